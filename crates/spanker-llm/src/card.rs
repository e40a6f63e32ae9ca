// SPDX-License-Identifier: Apache-2.0
//! One card that this process plays: it goes through its program, shares large operators with its team, and
//! notes where the time went. How it reaches other cards is not its business.

mod allocate;
mod attend;
mod experts;
pub(crate) mod memory;
mod operate;
mod peers;
mod product;
mod team_policy;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ggml_spanker::Inputs;
use ggml_spanker::ops::AttendScratch;
use spanker_plan::{ALIGNMENT, Activity, HostStaging, Label, Mark, Member, Op, Wanted};
use spanker_reduce::Team;
use spanker_runtime::{Place, Work};

pub(crate) use self::allocate::{allocate, needed, touch};
use self::memory::{Memory, part};
pub(crate) use self::peers::{Folding, Peers};
use self::team_policy::TeamPolicy;
use crate::Recorder;
use crate::runner::{Asked, Given, Outcome, Timing};

/// What a card says after a step.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Time on exchanges and waiting.
    pub(crate) sync: Duration,
    /// Bytes for other cards.
    pub(crate) sent: u64,
    /// What it did when, in seconds since the step began.
    pub(crate) marks: Vec<Mark>,
    /// What the host asked for.
    pub(crate) given: Given,
    /// What taps kept of operators.
    pub(crate) captured: Vec<u8>,
}

/// A card.
pub(crate) struct Card<B> {
    memory: Memory<B>,
    team: Team,
    team_policy: TeamPolicy,
    inputs: Inputs,
    /// Inputs of the experts that a row meets, each by itself.
    pick_inputs: Vec<Inputs>,
    scratch: Mutex<Vec<Attending>>,
    /// What blocks that threads share come to.
    partials: Vec<f32>,
    /// Products of several rows, before they are put in order.
    tiles: Vec<f32>,
}

/// What a thread attends with.
#[derive(Default)]
struct Attending {
    attend: AttendScratch,
    queries: Vec<f32>,
    results: Vec<f32>,
}

impl Attending {
    fn allocated_bytes(&self) -> usize {
        self.attend.allocated_bytes() + (self.queries.capacity() + self.results.capacity()) * 4
    }
}

/// What a card's thread is told to do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    /// The step's number.
    pub(crate) step: u64,
    /// Whether it says what it does when.
    pub(crate) traced: bool,
    /// What the host wants to read afterwards.
    pub(crate) wanted: Wanted,
    /// What taps write.
    pub(crate) captured: Option<(Place, u64)>,
    /// When the step began: the origin of the marks of all cards that share a clock.
    pub(crate) begun: Instant,
}

/// Why a card did not get through its program.
#[derive(Debug)]
pub(crate) enum Stopped<F> {
    /// Its own work has panicked.
    Panicked,
    /// Another card cannot be reached.
    Fault(F),
}

impl<B: AsRef<[u8]> + Send + Sync> Card<B> {
    /// A card whose kernels keep what a plan says, and nothing more.
    pub(crate) fn new(memory: Memory<B>, threads: usize, staging: HostStaging) -> Self {
        let team = Team::new(threads);
        let inputs = Inputs::with_capacity(staging.inputs.map(|values| values as usize));
        let of_pick = staging.pick_inputs.map(|values| values as usize);
        let pick_inputs = (0..staging.picks).map(|_| Inputs::with_capacity(of_pick)).collect();
        let [rows, heads, size] =
            [staging.rows, staging.heads, staging.head_size].map(|count| count as usize);
        let scratch = || Attending {
            attend: AttendScratch::with_capacity(rows, heads, size),
            queries: Vec::with_capacity(rows * heads * size),
            results: Vec::with_capacity(rows * heads * size),
        };
        let scratch = Mutex::new((0..staging.threads).map(|_| scratch()).collect());
        let partials = Vec::with_capacity((staging.partial_bytes() / 4) as usize);
        let tiles = vec![0.0; staging.tiles as usize];
        let team_policy = TeamPolicy::new();
        Card { memory, team, team_policy, inputs, pick_inputs, scratch, partials, tiles }
    }

    /// Shares work with the team even where that does not pay at the moment.
    pub(crate) fn hold_team_together(&mut self) {
        self.team_policy.hold_together();
    }

    /// Bytes that it has allocated, each buffer in whole pages: by what there is, and not by what was planned.
    pub(crate) fn allocated(&self) -> u64 {
        let scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch: usize = scratch.iter().map(Attending::allocated_bytes).sum();
        let scratch = scratch + self.partials.capacity() * 4;
        let inputs = [&self.inputs].into_iter().chain(&self.pick_inputs);
        let inputs = inputs.map(Inputs::allocated_bytes).sum();
        let kept = [inputs, self.tiles.capacity() * 4, scratch];
        self.memory.allocated() + kept.into_iter().map(pages).sum::<u64>()
    }

    /// Threads that share an operator.
    fn threads(&self) -> usize {
        if self.team_policy.alone() { 1 } else { self.team.threads() }
    }

    /// Runs a program with the tables of a step, and reads what the host wants.
    pub(crate) fn run<P: Peers>(
        &mut self,
        (program, tables): (&[Op], &[u8]),
        peers: &mut P,
        task: Task,
    ) -> Result<Report, Stopped<P::Fault>> {
        let mut report = Report::default();
        let work = || {
            self.go_through((program, tables), peers, task, &mut report)?;
            let bytes = |(place, length): (Place, u64)| self.memory.get(place, length).to_vec();
            report.given.best = task.wanted.best.map(bytes).unwrap_or_default();
            report.given.logits = task.wanted.logits.map(bytes).into_iter().collect();
            report.captured = task.captured.map(bytes).unwrap_or_default();
            Ok::<(), P::Fault>(())
        };
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => Ok(report),
            Ok(Err(fault)) => Err(Stopped::Fault(fault)),
            Err(_) => Err(Stopped::Panicked),
        }
    }

    fn go_through<P: Peers>(
        &mut self,
        (program, tables): (&[Op], &[u8]),
        peers: &mut P,
        task: Task,
        report: &mut Report,
    ) -> Result<(), P::Fault> {
        let mut log = Log::new(task.begun, task.traced);
        // Taps have no number of their own: they belong to the operator before them.
        let (mut at, mut taps) = (0, 0);
        while let Some(op) = program.get(at) {
            let number = at - taps;
            match op {
                Op::Work(Work::Matmul { a, .. }) => {
                    let shares =
                        |op: &&Op| matches!(op, Op::Work(Work::Matmul { a: b, .. }) if a == b);
                    let run = program[at..].iter().take_while(shares).count();
                    self.products(&program[at..at + run]);
                    log.worked(report, number, run);
                    at += run;
                    continue;
                }
                Op::Work(Work::MatmulExperts { a, .. }) => {
                    let shares = |op: &&Op| matches!(op, Op::Work(Work::MatmulExperts { a: b, .. }) if a == b);
                    let run = program[at..].iter().take_while(shares).count();
                    self.expert_products(&program[at..at + run]);
                    log.worked(report, number, run);
                    at += run;
                    continue;
                }
                Op::Work(work) => {
                    self.operate(work);
                    log.worked(report, number, 1);
                }
                Op::Data { into, .. } => {
                    let mut words = self.memory.take(into.buffer);
                    part(&mut words, *into, tables.len() as u64).copy_from_slice(tables);
                    self.memory.put(into.buffer, words);
                    log.worked(report, number, 1);
                }
                Op::Tap(work) => {
                    self.operate(work);
                    log.tapped(report);
                    taps += 1;
                }
                Op::Mark { activity, layer } => log.mark(*activity, *layer),
                exchange => {
                    let before = Instant::now();
                    self.exchange(exchange, peers, task.step, report)?;
                    let after = Instant::now();
                    report.sync += after - before;
                    log.exchanged(report, number, after);
                }
            }
            at += 1;
        }
        Ok(())
    }

    fn exchange<P: Peers>(
        &mut self,
        op: &Op,
        peers: &mut P,
        step: u64,
        report: &mut Report,
    ) -> Result<(), P::Fault> {
        match *op {
            Op::Gather { ref parts, rows, from, into } => {
                let bytes = |rank: usize| rows * (parts[rank].end - parts[rank].start);
                let row = parts.last().map_or(0, |part| part.end);
                let mut words = self.memory.take(into.buffer);
                let out = part(&mut words, into, rows * row);
                let own = self.memory.get(from, bytes(peers.rank()));
                let met = peers.all_gather(own, bytes, |rank, bytes| {
                    let range = parts[rank].start as usize..parts[rank].end as usize;
                    let pieces = bytes.chunks_exact(range.len().max(1));
                    for (out, piece) in out.chunks_exact_mut(row as usize).zip(pieces) {
                        out[range.clone()].copy_from_slice(piece);
                    }
                });
                self.memory.put(into.buffer, words);
                met.map(|sent| report.sent += sent)
            }
            Op::Fold { data, elements, fold } => {
                let mut words = self.memory.take(data.buffer);
                let met = peers.fold(part(&mut words, data, elements * 4), Folding::of(fold));
                self.memory.put(data.buffer, words);
                met.map(|sent| report.sent += sent)
            }
            Op::Send { to, from, length } => {
                report.sent += length;
                peers.send(to, step, self.memory.get(from, length))
            }
            Op::Receive { from, into, length } => {
                let mut words = self.memory.take(into.buffer);
                let met = peers.receive(from, step, part(&mut words, into, length));
                self.memory.put(into.buffer, words);
                met
            }
            Op::Collective { .. } => {
                unreachable!("cards of this process exchange without schedules")
            }
            Op::Work(_) | Op::Data { .. } | Op::Tap(_) | Op::Mark { .. } => Ok(()),
            _ => unreachable!("an exchange that nobody has taught this card"),
        }
    }
}

/// Bytes in whole pages; nothing for nothing.
pub(crate) fn pages(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(ALIGNMENT)
}

/// Puts together what the cards of a step say, in the order of their members.
pub(crate) fn outcome(
    asked: &Asked,
    wall: Duration,
    members: &[Member],
    reports: Vec<Report>,
) -> Outcome {
    let cards = reports.len() as u32;
    let sync = reports.iter().map(|report| report.sync).sum::<Duration>() / cards.max(1);
    let sent = reports.iter().map(|report| report.sent).sum();
    let timing = Timing { wall, card: None, sync, sent };
    let waits = members.iter().zip(&reports).map(|(member, report)| (member.card, report.sync));
    let waits = waits.collect();
    let mut given = Given::default();
    for report in reports {
        if !report.given.best.is_empty() {
            given.best = report.given.best;
        }
        given.logits.extend(report.given.logits);
    }
    Outcome { outputs: given.outputs(asked), timing, waits }
}

/// A trace of a run, and when that began.
#[derive(Debug)]
pub(crate) struct Tracing {
    origin: Instant,
    recorder: Recorder,
}

impl Tracing {
    pub(crate) fn new(recorder: &Recorder) -> Tracing {
        Tracing { origin: Instant::now(), recorder: recorder.clone() }
    }

    /// Adds what a card did in a step that began at `begun`.
    pub(crate) fn keep(&self, card: usize, report: &Report, begun: Instant, token: usize) {
        let shift = begun.duration_since(self.origin).as_secs_f64();
        self.recorder.add(report.marks.iter().map(|&(mut mark)| {
            mark.card = card as u32;
            mark.label.token = token as u32;
            mark.start += shift;
            mark.end += shift;
            mark
        }));
    }
}

/// Marks of a trace as they grow: one for each operator or run of products, end to end.
struct Log {
    begun: Instant,
    traced: bool,
    label: Label,
    /// Where the last mark ended.
    end: f64,
}

impl Log {
    fn new(begun: Instant, traced: bool) -> Log {
        let label = Label { activity: Activity::Host, layer: 0, token: 0 };
        Log { begun, traced, label, end: begun.elapsed().as_secs_f64() }
    }

    fn mark(&mut self, activity: Activity, layer: u32) {
        self.label = Label { activity, layer, token: 0 };
    }

    /// Operators from number `op` on are done.
    fn worked(&mut self, report: &mut Report, op: usize, ops: usize) {
        if self.traced {
            self.add(report, self.label, (op, ops), Instant::now());
        }
    }

    /// What was done since the last mark belongs to it.
    fn tapped(&mut self, report: &mut Report) {
        if let Some(mark) = report.marks.last_mut() {
            self.end = self.begun.elapsed().as_secs_f64();
            mark.end = self.end;
        }
    }

    fn exchanged(&mut self, report: &mut Report, op: usize, at: Instant) {
        if self.traced {
            let activity = match self.label.activity {
                Activity::Handoff => Activity::Handoff,
                _ => Activity::Exchange,
            };
            self.add(report, Label { activity, ..self.label }, (op, 1), at);
        }
    }

    fn add(&mut self, report: &mut Report, label: Label, (op, ops): (usize, usize), at: Instant) {
        let end = at.duration_since(self.begun).as_secs_f64();
        let (op, ops, start) = (op as u32, ops as u32, self.end);
        report.marks.push(Mark { card: 0, label, op, ops, start, end, parts: None });
        self.end = end;
    }
}
