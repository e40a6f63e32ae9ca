// SPDX-License-Identifier: Apache-2.0
//! Cards that are threads of this process: each a thread, with a team of helpers if there are threads to
//! spare. Weights are read where the file lies in memory; everything else belongs to one card alone, and
//! what cards tell each other goes through shared memory.

mod exchange;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spanker_plan::{CardLayout, HostStaging, Op, Plan, Programs, StepShape, WindowCache};
use spanker_topology::{ExchangeKind, Kernels};

use crate::card::memory::Memory;
use crate::card::{self, Card, Report, Stopped, Task, Tracing};
use crate::layout::{self, Planned};
use crate::runner::{Asked, MemoryUse, Outcome, Runner, Step};
use crate::{LlmError, Network, Recorder};
use exchange::{Link, SharedExchanges};

/// How long a card's thread looks for the next step before it sleeps: longer than sampling a token takes.
const LOOK: Duration = Duration::from_micros(200);

/// The programs of all cards for steps of one shape.
type Lists = Arc<Vec<Vec<Op>>>;

/// What a card's thread is told to do.
struct Job {
    programs: Lists,
    tables: Arc<[u8]>,
    task: Task,
}

/// What it answers.
struct Done {
    member: usize,
    step: u64,
    report: Option<Report>,
}

/// A step that is under way.
struct Begun {
    /// Its parts without tokens and blocks: what was asked for.
    step: Asked,
    number: u64,
    since: Instant,
    /// The first card's own job, where that works on the caller's thread.
    own: Option<Job>,
    reports: Vec<Option<Report>>,
}

/// Programs that are kept: steps of so many shapes take turns.
const MOST_PROGRAMS: usize = 32;

/// A network on cards that are threads of this process.
///
/// The first card works on the thread that calls [`Runner::end`], unless the cards are a pipeline.
pub struct InProcess<B> {
    network: Arc<Network<B>>,
    programs: Programs,
    written: HashMap<StepShape, Lists>,
    begun: VecDeque<Begun>,
    exchanges: Arc<SharedExchanges>,
    first: Option<(Card<B>, Link)>,
    /// The threads of all cards but the first, or of all.
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
        // In a pipeline the first card works on what comes next while the caller waits for the last one.
        let first = if programs.groups().len() == 1 { cards.next() } else { None };
        let skipped = usize::from(first.is_some());
        let (answer, done) = channel();
        let (mut jobs, mut handles) = (Vec::new(), Vec::new());
        for (index, card) in cards.enumerate() {
            let (member, (sender, receiver)) = (index + skipped, channel());
            let answer = answer.clone();
            let work = move || serve(card, member, &receiver, &answer);
            let named = std::thread::Builder::new().name(format!("spanker-card-{member}"));
            // Without its sender, a thread that runs already ends.
            let refused =
                |error| LlmError::unsupported(format!("card {member}: no thread: {error}"));
            handles.push(named.spawn(work).map_err(refused)?);
            jobs.push(sender);
        }
        Ok(InProcess {
            network,
            programs,
            written: HashMap::new(),
            begun: VecDeque::new(),
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
        self.programs.step(step, &|from, to| vec![from, to])
    }

    /// The same, which steps of the same shape share.
    fn written(&mut self, step: &Step<'_>) -> Lists {
        let shape = StepShape::of(step);
        if let Some(known) = self.written.get(&shape).filter(|_| !step.is_copying()) {
            return Arc::clone(known);
        }
        let programs = Arc::new(self.programs_of(step));
        if !step.is_copying() {
            if self.written.len() >= MOST_PROGRAMS {
                self.written.clear();
            }
            self.written.insert(shape, Arc::clone(&programs));
        }
        programs
    }

    /// Ranks of the group that each card belongs to.
    pub(crate) fn groups(&self) -> &[std::ops::Range<usize>] {
        self.programs.groups()
    }

    /// Runs a program of a step on each card, and says what came of it, card by card.
    pub(crate) fn go(
        &mut self,
        programs: Lists,
        step: &Step<'_>,
        traced: bool,
        begun: Instant,
    ) -> Result<Vec<Report>, LlmError> {
        self.start_step(programs, step, traced, begun)?;
        self.reports().map(|(reports, _)| reports)
    }

    /// Gives all cards their programs.
    fn start_step(
        &mut self,
        programs: Lists,
        step: &Step<'_>,
        traced: bool,
        since: Instant,
    ) -> Result<(), LlmError> {
        self.steps += 1;
        let tables: Arc<[u8]> = self.programs.tables(step).into();
        let members = self.programs.members().len();
        let job = |of: &Self, member: usize| {
            let wanted = of.programs.wanted(member, step);
            let task = Task { step: of.steps, traced, wanted, captured: None, begun: since };
            Job { programs: Arc::clone(&programs), tables: Arc::clone(&tables), task }
        };
        let skipped = usize::from(self.first.is_some());
        for (index, jobs) in self.jobs.iter().enumerate() {
            let member = index + skipped;
            if jobs.send(job(self, member)).is_err() {
                return Err(LlmError::Panicked { card: self.programs.members()[member].card });
            }
        }
        let own = self.first.is_some().then(|| job(self, 0));
        let reports = (0..members).map(|_| None).collect();
        let (step, number) = (Asked::of(step), self.steps);
        self.begun.push_back(Begun { step, number, since, own, reports });
        Ok(())
    }

    /// What the cards say of the step that began first.
    fn reports(&mut self) -> Result<(Vec<Report>, Begun), LlmError> {
        let nothing = || LlmError::unsupported("no step has begun");
        let mut begun = self.begun.pop_front().ok_or_else(nothing)?;
        if let (Some((card, link)), Some(job)) = (&mut self.first, begun.own.take()) {
            begun.reports[0] = play(card, link, &job, 0);
        }
        let mut missing = begun.reports.iter().filter(|report| report.is_none()).count();
        if self.first.is_some() && begun.reports[0].is_none() {
            // It has failed, and so will the others.
            missing -= 1;
        }
        while missing > 0 {
            let Ok(Done { member, step, report }) = self.done.recv() else { break };
            if step == begun.number {
                begun.reports[member] = report;
                missing -= 1;
            } else if let Some(later) = self.begun.iter_mut().find(|one| one.number == step) {
                later.reports[member] = report;
            }
        }
        let culprit = self.exchanges.culprit();
        if let Some(member) = culprit.or_else(|| begun.reports.iter().position(Option::is_none)) {
            return Err(LlmError::Panicked { card: self.programs.members()[member].card });
        }
        let reports = std::mem::take(&mut begun.reports);
        Ok((reports.into_iter().flatten().collect(), begun))
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
        let report = play(&mut card, &mut link, &job, member);
        if answer.send(Done { member, step: job.task.step, report }).is_err() {
            return;
        }
    }
}

/// Runs a card's program. Nothing if this card or another has failed.
fn play<B: AsRef<[u8]> + Send + Sync>(
    card: &mut Card<B>,
    link: &mut Link,
    job: &Job,
    member: usize,
) -> Option<Report> {
    let played = card.run((&job.programs[member], &job.tables), link, job.task);
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
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        layout::check(&self.programs, self.network.model().vocab, step)?;
        let begun = Instant::now();
        let programs = self.written(step);
        self.start_step(programs, step, self.trace.is_some(), begun)
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        let (reports, begun) = self.reports()?;
        if let Some(trace) = &self.trace {
            for (member, report) in self.programs.members().iter().zip(&reports) {
                trace.keep(member.card, report, begun.since, begun.step.past);
            }
        }
        let members = self.programs.members();
        Ok(card::outcome(&begun.step, begun.since.elapsed(), members, reports))
    }

    fn batch(&self) -> usize {
        self.programs.space().batch as usize
    }

    fn windows(&self) -> Option<WindowCache> {
        self.programs.windows()
    }

    fn depth(&self) -> usize {
        self.programs.groups().len()
    }
}

impl<B> Drop for InProcess<B> {
    fn drop(&mut self) {
        self.jobs.clear();
        // A step is under way, and nobody works on the first card's part of it any more: the others wait for that.
        if self.begun.iter().any(|begun| begun.own.is_some()) {
            self.exchanges.fail(0);
        }
        for handle in self.threads.drain(..) {
            // A card's thread catches the panics of its work.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests;
