// SPDX-License-Identifier: Apache-2.0
//! One card that is a thread: it goes through its program, shares large operators with its team, and notes
//! where the time went.

mod crew;
mod operate;
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
use super::board::Link;
use super::memory::{Memory, part};
use crate::Op;

/// What a card says after a step.
pub(super) struct Report {
    /// Time on exchanges and waiting.
    pub(super) sync: Duration,
    /// Bytes for other cards.
    pub(super) sent: u64,
    /// What it did when, in seconds since the step began here.
    pub(super) marks: Vec<Mark>,
    /// What the host asked for.
    pub(super) read: Option<Vec<u8>>,
}

/// A card.
pub(super) struct Card<B> {
    memory: Memory<B>,
    link: Link,
    team: Team,
    crew: Crew,
    inputs: Inputs,
    scratch: Mutex<Vec<AttendScratch>>,
    /// Products of several rows, before they are put in order.
    tiles: Vec<f32>,
    /// Exchanges of the group so far.
    exchanges: u64,
}

/// Somebody has failed, and the step cannot be completed.
struct GivenUp;

impl<B: AsRef<[u8]> + Send + Sync> Card<B> {
    pub(super) fn new(memory: Memory<B>, link: Link, threads: usize) -> Self {
        let team = Team::new(threads);
        let (inputs, scratch, tiles) = (Inputs::new(), Mutex::default(), Vec::new());
        Card { memory, link, team, crew: Crew::new(), inputs, scratch, tiles, exchanges: 0 }
    }

    /// Threads that share an operator.
    fn threads(&self) -> usize {
        if self.crew.alone() { 1 } else { self.team.threads() }
    }

    /// Runs a program and reads what the host wants from a room. Nothing if this card or another has failed.
    pub(super) fn run(
        &mut self,
        program: &[Op],
        step: u64,
        traced: bool,
        read: Option<(Place, u64)>,
    ) -> Option<Report> {
        let mut report = Report { sync: Duration::ZERO, sent: 0, marks: Vec::new(), read: None };
        let work = || {
            self.go_through(program, step, traced, &mut report)?;
            report.read = read.map(|(place, length)| self.memory.get(place, length).to_vec());
            Ok::<(), GivenUp>(())
        };
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => {}
            Ok(Err(GivenUp)) => return None,
            Err(_) => {
                self.link.boards.fail(self.link.seat);
                return None;
            }
        }
        Some(report)
    }

    fn go_through(
        &mut self,
        program: &[Op],
        step: u64,
        traced: bool,
        report: &mut Report,
    ) -> Result<(), GivenUp> {
        let begun = Instant::now();
        let mut log = Log { begun, traced, open: None };
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
                    self.exchange(exchange, step, report)?;
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

    fn exchange(&mut self, op: &Op, step: u64, report: &mut Report) -> Result<(), GivenUp> {
        let others = self.link.ranks() as u64 - 1;
        let went_well = match *op {
            Op::Gather { ref parts, rows, from, into } => {
                let own = &parts[self.link.rank];
                let length = rows * (own.end - own.start);
                report.sent += length * others;
                let row = parts.last().map_or(0, |part| part.end);
                let number = self.next_exchange();
                let mut words = self.memory.take(into.buffer);
                let out = part(&mut words, into, rows * row);
                let met = self.link.meet(number, self.memory.get(from, length), |rank, bytes| {
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
                let number = self.next_exchange();
                let mut words = self.memory.take(data.buffer);
                let own = part(&mut words, data, elements * 4).to_vec();
                let sum: &mut [f32] =
                    bytemuck::cast_slice_mut(part(&mut words, data, elements * 4));
                let met = self.link.meet(number, &own, |rank, bytes| {
                    let numbers = bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word));
                    match rank {
                        0 => sum.iter_mut().zip(numbers).for_each(|(sum, value)| *sum = value),
                        _ => sum.iter_mut().zip(numbers).for_each(|(sum, value)| *sum += value),
                    }
                });
                self.memory.put(data.buffer, words);
                met
            }
            Op::Spread { root, data, length } => {
                let number = self.next_exchange();
                let mut words = self.memory.take(data.buffer);
                let bytes = part(&mut words, data, length);
                let own = if root == self.link.rank { bytes.to_vec() } else { Vec::new() };
                report.sent += own.len() as u64 * others;
                let met = self.link.meet(number, &own, |rank, given| {
                    if rank == root {
                        bytes.copy_from_slice(&given);
                    }
                });
                self.memory.put(data.buffer, words);
                met
            }
            Op::Hand { to, from, length } => {
                report.sent += length;
                self.link.hand(to, step, self.memory.get(from, length));
                true
            }
            Op::Take { into, length, .. } => {
                let mut words = self.memory.take(into.buffer);
                let bytes = part(&mut words, into, length);
                let met = self.link.take(step, |given| bytes.copy_from_slice(given));
                self.memory.put(into.buffer, words);
                met
            }
            Op::Work(_) | Op::Mark { .. } => true,
        };
        if went_well { Ok(()) } else { Err(GivenUp) }
    }

    fn next_exchange(&mut self) -> u64 {
        self.exchanges += 1;
        self.exchanges
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
        report.marks.push(Mark { card: 0, label, start, end: from });
        let activity = match label.activity {
            Activity::Handoff => Activity::Handoff,
            _ => Activity::Exchange,
        };
        report.marks.push(Mark {
            card: 0,
            label: Label { activity, ..label },
            start: from,
            end: to,
        });
        self.open = Some((label, to));
    }

    fn close(&mut self, report: &mut Report) {
        if let Some((label, start)) = self.open.take() {
            let end = self.seconds(Instant::now());
            report.marks.push(Mark { card: 0, label, start, end });
        }
    }
}
