// SPDX-License-Identifier: Apache-2.0
//! One card that this process plays: it goes through its program, shares large operators with its team, and
//! notes where the time went. How it reaches other cards is not its business.

mod crew;
mod furnish;
pub(crate) mod memory;
mod operate;
mod peers;
mod product;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ggml_spanker::Inputs;
use ggml_spanker::ops::AttendScratch;
use spanker_plan::{Activity, Label, Mark};
use spanker_reduce::Team;
use spanker_runtime::{Place, Work};

use self::crew::Crew;
pub(crate) use self::furnish::furnish;
use self::memory::{Memory, part};
pub(crate) use self::peers::Peers;
use crate::runner::{Outcome, Timing, Want, candidates};
use crate::{Op, Recorder};

/// What a card says after a step.
pub(crate) struct Report {
    /// Time on exchanges and waiting.
    pub(crate) sync: Duration,
    /// Bytes for other cards.
    pub(crate) sent: u64,
    /// What it did when, in seconds since the step began here.
    pub(crate) marks: Vec<Mark>,
    /// What the host asked for.
    pub(crate) read: Option<Vec<u8>>,
}

/// A card.
pub(crate) struct Card<B> {
    memory: Memory<B>,
    team: Team,
    crew: Crew,
    inputs: Inputs,
    scratch: Mutex<Vec<AttendScratch>>,
    /// Products of several rows, before they are put in order.
    tiles: Vec<f32>,
}

/// What a card's thread is told to do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    /// The step's number.
    pub(crate) step: u64,
    /// Whether it says what it does when.
    pub(crate) traced: bool,
    /// What the host wants to read afterwards.
    pub(crate) read: Option<(Place, u64)>,
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
    pub(crate) fn new(memory: Memory<B>, threads: usize) -> Self {
        let team = Team::new(threads);
        let (inputs, scratch, tiles) = (Inputs::new(), Mutex::default(), Vec::new());
        Card { memory, team, crew: Crew::new(), inputs, scratch, tiles }
    }

    /// Threads that share an operator.
    fn threads(&self) -> usize {
        if self.crew.alone() { 1 } else { self.team.threads() }
    }

    /// Runs a program and reads what the host wants from a room.
    pub(crate) fn run<P: Peers>(
        &mut self,
        program: &[Op],
        peers: &mut P,
        task: Task,
    ) -> Result<Report, Stopped<P::Fault>> {
        let mut report = Report { sync: Duration::ZERO, sent: 0, marks: Vec::new(), read: None };
        let work = || {
            self.go_through(program, peers, task, &mut report)?;
            report.read = task.read.map(|(place, length)| self.memory.get(place, length).to_vec());
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
        program: &[Op],
        peers: &mut P,
        task: Task,
        report: &mut Report,
    ) -> Result<(), P::Fault> {
        let begun = Instant::now();
        let mut log = Log { begun, traced: task.traced, open: None };
        let mut at = 0;
        while let Some(op) = program.get(at) {
            match op {
                Op::Work(Work::Matmul { a, .. }) => {
                    let shares =
                        |op: &&Op| matches!(op, Op::Work(Work::Matmul { a: b, .. }) if a == b);
                    let run = program[at..].iter().take_while(shares).count();
                    self.products(&program[at..at + run]);
                    at += run;
                    continue;
                }
                Op::Work(work) => self.operate(work),
                Op::Mark { activity, layer } => log.mark(report, *activity, *layer),
                exchange => {
                    let before = Instant::now();
                    self.exchange(exchange, peers, task.step, report)?;
                    let after = Instant::now();
                    report.sync += after - before;
                    log.exchanged(report, before, after);
                }
            }
            at += 1;
        }
        log.close(report);
        Ok(())
    }

    fn exchange<P: Peers>(
        &mut self,
        op: &Op,
        peers: &mut P,
        step: u64,
        report: &mut Report,
    ) -> Result<(), P::Fault> {
        let (rank, others) = (peers.rank(), peers.ranks() as u64 - 1);
        match *op {
            Op::Gather { ref parts, rows, from, into } => {
                let bytes = |rank: usize| rows * (parts[rank].end - parts[rank].start);
                report.sent += bytes(rank) * others;
                let row = parts.last().map_or(0, |part| part.end);
                let mut words = self.memory.take(into.buffer);
                let out = part(&mut words, into, rows * row);
                let own = self.memory.get(from, bytes(rank));
                let met = peers.meet(own, bytes, |rank, bytes| {
                    let range = parts[rank].start as usize..parts[rank].end as usize;
                    let pieces = bytes.chunks_exact(range.len().max(1));
                    for (out, piece) in out.chunks_exact_mut(row as usize).zip(pieces) {
                        out[range.clone()].copy_from_slice(piece);
                    }
                });
                self.memory.put(into.buffer, words);
                met
            }
            Op::Sum { data, elements } => {
                report.sent += elements * 4 * others;
                let mut words = self.memory.take(data.buffer);
                let own = part(&mut words, data, elements * 4).to_vec();
                let sum: &mut [f32] =
                    bytemuck::cast_slice_mut(part(&mut words, data, elements * 4));
                let met = peers.meet(
                    &own,
                    |_| elements * 4,
                    |rank, bytes| {
                        let numbers =
                            bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word));
                        match rank {
                            0 => sum.iter_mut().zip(numbers).for_each(|(sum, value)| *sum = value),
                            _ => sum.iter_mut().zip(numbers).for_each(|(sum, value)| *sum += value),
                        }
                    },
                );
                self.memory.put(data.buffer, words);
                met
            }
            Op::Spread { root, data, length } => {
                report.sent += if root == rank { length * others } else { 0 };
                let mut words = self.memory.take(data.buffer);
                let met = peers.spread(root, part(&mut words, data, length));
                self.memory.put(data.buffer, words);
                met
            }
            Op::Hand { to, from, length } => {
                report.sent += length;
                peers.hand(to, step, self.memory.get(from, length))
            }
            Op::Take { from, into, length } => {
                let mut words = self.memory.take(into.buffer);
                let met = peers.take(from, step, part(&mut words, into, length));
                self.memory.put(into.buffer, words);
                met
            }
            Op::Work(_) | Op::Mark { .. } => Ok(()),
        }
    }
}

/// Puts together what the cards of a step say, in the order of their seats.
pub(crate) fn outcome(want: Want, wall: Duration, reports: &[Report]) -> Outcome {
    let cards = reports.len() as u32;
    let sync = reports.iter().map(|report| report.sync).sum::<Duration>() / cards.max(1);
    let sent = reports.iter().map(|report| report.sent).sum();
    let timing = Timing { wall, card: None, sync, sent };
    let mut outcome = Outcome { timing, ..Outcome::default() };
    match want {
        Want::Best(k) => {
            let read = reports.iter().find_map(|report| report.read.as_deref());
            outcome.best = candidates(read.unwrap_or(&[]), k as usize);
        }
        Want::Logits => {
            let parts = reports.iter().filter_map(|report| report.read.as_deref());
            let words = parts.flat_map(|part| part.as_chunks().0.iter());
            outcome.logits = Some(words.map(|&word| f32::from_le_bytes(word)).collect());
        }
        Want::Nothing => {}
    }
    outcome
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

/// Marks of a trace as they grow.
struct Log {
    begun: Instant,
    traced: bool,
    open: Option<(Label, f64)>,
}

impl Log {
    fn seconds(&self, at: Instant) -> f64 {
        at.duration_since(self.begun).as_secs_f64()
    }

    fn mark(&mut self, report: &mut Report, activity: Activity, layer: u32) {
        if self.traced {
            self.close(report);
            self.open = Some((Label { activity, layer, token: 0 }, self.seconds(Instant::now())));
        }
    }

    /// An exchange interrupts what it is part of.
    fn exchanged(&mut self, report: &mut Report, before: Instant, after: Instant) {
        let Some((label, start)) = self.open else { return };
        let (from, to) = (self.seconds(before), self.seconds(after));
        report.marks.push(Mark::outside(0, label, start, from));
        let activity = match label.activity {
            Activity::Handoff => Activity::Handoff,
            _ => Activity::Exchange,
        };
        report.marks.push(Mark::outside(0, Label { activity, ..label }, from, to));
        self.open = Some((label, to));
    }

    fn close(&mut self, report: &mut Report) {
        if let Some((label, start)) = self.open.take() {
            let end = self.seconds(Instant::now());
            report.marks.push(Mark::outside(0, label, start, end));
        }
    }
}
