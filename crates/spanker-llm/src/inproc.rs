// SPDX-License-Identifier: Apache-2.0
//! Cards that are threads of this process: each a thread, with a team of helpers if there are threads to
//! spare. Weights are read where the file lies in memory; everything else belongs to one card alone, and
//! what cards tell each other goes through shared memory.

mod exchange;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spanker_plan::{CardLayout, HostStaging, Op, Part, Plan, Programs, Want};
use spanker_topology::{ExchangeKind, Kernels};

use crate::card::memory::Memory;
use crate::card::{self, Card, Report, Stopped, Task, Tracing};
use crate::layout::{self, Planned};
use crate::runner::{MemoryUse, Outcome, Runner, Step};
use crate::{LlmError, Network, Recorder};
use exchange::{Link, SharedExchanges};

/// How long a card's thread looks for the next step before it sleeps: longer than sampling a token takes.
const LOOK: Duration = Duration::from_micros(200);

/// What a card's thread is told to do.
struct Job {
    programs: Arc<Vec<Vec<Op>>>,
    task: Task,
}

/// What it answers.
struct Done {
    member: usize,
    report: Option<Report>,
}

/// A network on cards that are threads of this process.
///
/// The first card works on the thread that calls [`Runner::step`].
pub struct InProcess<B> {
    network: Arc<Network<B>>,
    programs: Programs,
    exchanges: Arc<SharedExchanges>,
    first: (Card<B>, Link),
    jobs: Vec<Sender<Job>>,
    done: Receiver<Done>,
    threads: Vec<JoinHandle<()>>,
    steps: u64,
    trace: Option<Tracing>,
    memory: Vec<MemoryUse>,
}

impl<B> std::fmt::Debug for InProcess<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcess")
            .field("cards", &self.programs.members().len())
            .finish_non_exhaustive()
    }
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> InProcess<B> {
    /// Lays a network out over threads: `threads` in all, shared out over the cards, at least one each.
    ///
    /// # Errors
    /// [`LlmError::Plan`] for a plan of another model or one that cannot be run, [`LlmError::Unsupported`] if
    /// the system has not the memory or the threads.
    pub fn new(
        network: Arc<Network<B>>,
        plan: &Plan,
        context: usize,
        batch: usize,
        threads: usize,
    ) -> Result<Self, LlmError> {
        let planned = planned(&network, plan, context, batch, threads)?;
        let (programs, memories) = card::allocate(&network, &planned, &|_| true)?;
        Self::start(network, programs, &planned.cards(), memories, threads, false)
    }

    /// What each card was planned to allocate, and what was allocated for it.
    #[must_use]
    pub fn memory(&self) -> &[MemoryUse] {
        &self.memory
    }

    /// Like [`InProcess::new`], on memory that is filled with numbers, as in the midst of a run, and with teams that
    /// share work even where something else on this machine holds them up.
    pub(crate) fn filled(
        network: Arc<Network<B>>,
        plan: &Plan,
        context: usize,
        batch: usize,
        threads: usize,
    ) -> Result<Self, LlmError> {
        let planned = planned(&network, plan, context, batch, threads)?;
        let (programs, mut memories) = card::allocate(&network, &planned, &|_| true)?;
        memories.iter_mut().for_each(Memory::fill);
        Self::start(network, programs, &planned.cards(), memories, threads, true)
    }

    fn start(
        network: Arc<Network<B>>,
        programs: Programs,
        layouts: &[CardLayout],
        memories: Vec<Memory<B>>,
        threads: usize,
        together: bool,
    ) -> Result<Self, LlmError> {
        let members = programs.members().len();
        (0..members).for_each(|member| card::touch(&network, &programs, member));
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let patient = members.max(threads) <= cores;
        let staging: Vec<HostStaging> =
            layouts.iter().map(|layout| layout.host.unwrap_or_default()).collect();
        let exchanges = Arc::new(SharedExchanges::new(&programs, &staging, patient));
        let share =
            |member: usize| (threads / members + usize::from(member < threads % members)).max(1);
        let cards = memories.into_iter().zip(staging).enumerate();
        let cards = cards.map(|(member, (memory, staging))| {
            let mut card = Card::new(memory, share(member), staging);
            if together {
                card.hold_team_together();
            }
            (card, Link::new(&exchanges, &programs, member))
        });
        let cards: Vec<(Card<B>, Link)> = cards.collect();
        let memory = layouts.iter().zip(&cards).enumerate().map(|(member, (layout, (card, _)))| {
            let allocated = card.allocated() + exchanges.allocated(&programs, member);
            MemoryUse { card: layout.card, planned: layout.bytes(), allocated }
        });
        let memory = memory.collect();
        let mut cards = cards.into_iter();
        let first = cards.next().expect("a plan has cards");
        let (answer, done) = channel();
        let (mut jobs, mut handles) = (Vec::new(), Vec::new());
        for (index, card) in cards.enumerate() {
            let (sender, receiver) = channel();
            let answer = answer.clone();
            let work = move || serve(card, index + 1, &receiver, &answer);
            let named = std::thread::Builder::new().name(format!("spanker-card-{}", index + 1));
            // Without its sender, a thread that runs already ends.
            let refused =
                |error| LlmError::unsupported(format!("card {}: no thread: {error}", index + 1));
            handles.push(named.spawn(work).map_err(refused)?);
            jobs.push(sender);
        }
        Ok(InProcess {
            network,
            programs,
            exchanges,
            first,
            jobs,
            done,
            threads: handles,
            steps: 0,
            trace: None,
            memory,
        })
    }

    /// The programs of all cards for a step.
    pub(crate) fn programs_of(&self, step: &Step<'_>) -> Vec<Vec<Op>> {
        let parts = [layout::part(step)];
        let whole = spanker_plan::Step { parts: &parts };
        self.programs.step(&whole, &|from, to| vec![from, to])
    }

    /// Ranks of the group that each card belongs to.
    pub(crate) fn groups(&self) -> &[std::ops::Range<usize>] {
        self.programs.groups()
    }

    /// Runs a program on each card, and says what came of it, card by card.
    pub(crate) fn go(
        &mut self,
        programs: Arc<Vec<Vec<Op>>>,
        want: Want,
        traced: bool,
        begun: Instant,
    ) -> Result<Vec<Report>, LlmError> {
        let parts = [Part { sequence: 0, tokens: &[], past: 0, want }];
        self.go_for(programs, (&spanker_plan::Step { parts: &parts }, 0), traced, begun)
    }

    /// The same for a step of several sequences, of which the host reads what one asks for.
    fn go_for(
        &mut self,
        programs: Arc<Vec<Vec<Op>>>,
        (step, part): (&spanker_plan::Step<'_>, usize),
        traced: bool,
        begun: Instant,
    ) -> Result<Vec<Report>, LlmError> {
        self.steps += 1;
        let task = |of: &Self, member: usize| {
            let read = of.programs.wanted(member, step, part);
            Task { step: of.steps, traced, read, captured: None, begun }
        };
        for (index, jobs) in self.jobs.iter().enumerate() {
            let job = Job { programs: Arc::clone(&programs), task: task(self, index + 1) };
            if jobs.send(job).is_err() {
                return Err(LlmError::Panicked { card: self.programs.members()[index + 1].card });
            }
        }
        let own = task(self, 0);
        let mut reports: Vec<Option<Report>> =
            (0..self.programs.members().len()).map(|_| None).collect();
        let (first, link) = &mut self.first;
        reports[0] = play(first, link, &programs[0], own);
        for _ in 0..self.jobs.len() {
            let Ok(Done { member, report }) = self.done.recv() else { break };
            reports[member] = report;
        }
        let culprit = self.exchanges.culprit();
        if let Some(member) = culprit.or_else(|| reports.iter().position(Option::is_none)) {
            return Err(LlmError::Panicked { card: self.programs.members()[member].card });
        }
        Ok(reports.into_iter().flatten().collect())
    }

    /// Records from now on what each card does when.
    pub fn record(&mut self, recorder: &Recorder) {
        self.trace = Some(Tracing::new(recorder));
    }

    /// The network.
    #[must_use]
    pub fn network(&self) -> &Arc<Network<B>> {
        &self.network
    }
}

/// A plan as threads of this process run it: what a card's team keeps is for as many threads as any card has.
fn planned<'p, B: AsRef<[u8]>>(
    network: &Network<B>,
    plan: &'p Plan,
    context: usize,
    batch: usize,
    threads: usize,
) -> Result<Planned<'p>, LlmError> {
    let kernels = kernels(threads, plan.layout.cards().len());
    Planned::new(network, plan, context, batch, ExchangeKind::SharedMemory, kernels)
}

/// Kernels of cards that share so many threads.
pub(crate) fn kernels(threads: usize, cards: usize) -> Kernels {
    let each = threads.div_ceil(cards.max(1)).max(1);
    Kernels::Host { threads: u32::try_from(each).unwrap_or(u32::MAX) }
}

/// A card's thread.
fn serve<B: AsRef<[u8]> + Send + Sync>(
    (mut card, mut link): (Card<B>, Link),
    member: usize,
    jobs: &Receiver<Job>,
    answer: &Sender<Done>,
) {
    while let Some(job) = next(jobs) {
        let report = play(&mut card, &mut link, &job.programs[member], job.task);
        if answer.send(Done { member, report }).is_err() {
            return;
        }
    }
}

/// Runs a card's program. Nothing if this card or another has failed.
fn play<B: AsRef<[u8]> + Send + Sync>(
    card: &mut Card<B>,
    link: &mut Link,
    program: &[Op],
    task: Task,
) -> Option<Report> {
    let played = card.run(program, link, task);
    if let Err(Stopped::Panicked) = played {
        link.fail();
    }
    played.ok()
}

/// The next job, or nothing when there will be none.
fn next(jobs: &Receiver<Job>) -> Option<Job> {
    let begun = Instant::now();
    loop {
        match jobs.try_recv() {
            Ok(job) => return Some(job),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) if begun.elapsed() > LOOK => return jobs.recv().ok(),
            Err(TryRecvError::Empty) => std::thread::yield_now(),
        }
    }
}

impl<B: AsRef<[u8]> + Send + Sync + 'static> Runner for InProcess<B> {
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        layout::check(&self.programs, self.network.model().vocab, step)?;
        let begun = Instant::now();
        let programs = Arc::new(self.programs_of(step));
        let reports = self.go(programs, step.want, self.trace.is_some(), begun)?;
        if let Some(trace) = &self.trace {
            for (member, report) in self.programs.members().iter().zip(&reports) {
                trace.keep(member.card, report, begun, step.past);
            }
        }
        Ok(card::outcome(step.want, begun.elapsed(), &reports))
    }

    fn batch(&self) -> usize {
        self.programs.space().batch as usize
    }
}

impl<B> Drop for InProcess<B> {
    fn drop(&mut self) {
        self.jobs.clear();
        for handle in self.threads.drain(..) {
            // A card's thread catches the panics of its work.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests;
