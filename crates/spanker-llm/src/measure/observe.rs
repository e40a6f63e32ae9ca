// SPDX-License-Identifier: Apache-2.0
//! What the marks of a step say: how long operators took, class by class, and how long cards took to exchange bytes.

use std::collections::BTreeMap;
use std::ops::Range;

use spanker_model::Quant;
use spanker_plan::{Load, Mark, Op, Reach, load};
use spanker_runtime::Work;
use spanker_topology::ExchangeKind;

use super::fit::{Class, Line, Times, least_squares, mean, middle};

/// Seconds that no message between machines takes less than.
const LEAST_MESSAGE: f64 = 5e-6;

/// All that was seen so far.
#[derive(Debug)]
pub(super) struct Observed {
    exchange: ExchangeKind,
    steps: BTreeMap<Alike, Vec<Seen>>,
}

/// The bytes that an exchange of so many ranks counts for in its price: all that is read from shared memory, or what
/// the busiest rank sends.
fn carried(op: &Op, ranks: usize, exchange: ExchangeKind) -> f64 {
    let (bytes, others) = (op.exchanged_bytes(ranks), ranks as f64 - 1.0);
    match (exchange, op) {
        (ExchangeKind::SharedMemory, _) => bytes,
        _ => bytes * others / ranks as f64,
    }
}

/// Steps that take the same time: with so many rows of so many sequences, after so many tokens, through so many operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Alike {
    pub(super) rows: usize,
    pub(super) past: usize,
    pub(super) sequences: usize,
    pub(super) operators: usize,
}

/// What one step took.
#[derive(Debug, Default)]
struct Seen {
    /// From its first operator to its last, on all cards.
    seconds: f64,
    /// By member.
    operators: Vec<(usize, Class, f64)>,
    phases: Vec<Phase>,
    /// Messages to the next stage: their bytes and seconds.
    messages: Vec<(u64, f64)>,
}

/// Work of the ranks of a group, and the exchange after it.
#[derive(Debug)]
struct Phase {
    /// The bytes that the exchange counts for.
    bytes: u64,
    /// From the end of one exchange to that of the next, on the last rank each.
    seconds: f64,
    /// What each rank has done.
    work: Vec<Vec<Class>>,
    /// The member that is rank 0.
    first: usize,
}

/// Where a card met others, and what it did before.
#[derive(Debug)]
struct Meeting {
    /// The bytes that an exchange counts for; nothing for a message of another stage.
    bytes: Option<f64>,
    end: f64,
    work: Vec<Class>,
}

impl Observed {
    /// Nothing so far, of cards that exchange in this way.
    pub(super) fn new(exchange: ExchangeKind) -> Observed {
        Observed { exchange, steps: BTreeMap::new() }
    }

    /// Adds a step: a program and the marks of each card, by one clock.
    pub(super) fn add(
        &mut self,
        alike: Alike,
        reach: &Reach,
        programs: &[Vec<Op>],
        groups: &[Range<usize>],
        marks: &[&[Mark]],
    ) {
        let mut seen = Seen { seconds: span(marks), ..Seen::default() };
        for (member, (program, marks)) in programs.iter().zip(marks).enumerate() {
            for (mark, class) in marks.iter().zip(classes(program, marks, reach)) {
                seen.operators.extend(class.map(|class| (member, class, mark.end - mark.start)));
            }
        }
        for group in groups.iter().filter(|group| group.len() > 1) {
            let bytes = |op: &Op| carried(op, group.len(), self.exchange);
            let of = |member: usize| meetings(&programs[member], marks[member], reach, &bytes);
            seen.group(group.start, group.clone().map(of).collect());
        }
        seen.handoffs(programs, marks);
        self.steps.entry(alike).or_default().push(seen);
    }

    /// What steps that took a usual time consisted of. Steps are chosen, not operators: each operator's usual time
    /// would leave out what happens to some operator of every step, and their sum would be too small.
    pub(super) fn usual(&self) -> Usual<'_> {
        let mut usual = Usual::default();
        for steps in self.steps.values() {
            let mut steps: Vec<&Seen> = steps.iter().collect();
            steps.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
            usual.steps.extend(&steps[middle(steps.len())]);
        }
        for (member, class, seconds) in usual.steps.iter().flat_map(|step| &step.operators) {
            usual.times.add(class, *seconds);
            if usual.members.len() <= *member {
                usual.members.resize_with(member + 1, Times::default);
            }
            usual.members[*member].add(class, *seconds);
        }
        usual
    }
}

/// From the first start to the last end.
fn span(marks: &[&[Mark]]) -> f64 {
    let all = || marks.iter().copied().flatten();
    let first = all().map(|mark| mark.start).fold(f64::MAX, f64::min);
    let last = all().map(|mark| mark.end).fold(f64::MIN, f64::max);
    (last - first).max(0.0)
}

/// Steps that took a usual time.
#[derive(Debug, Default)]
pub(super) struct Usual<'a> {
    steps: Vec<&'a Seen>,
    /// Of all members together.
    pub(super) times: Times,
    /// Of each.
    pub(super) members: Vec<Times>,
}

impl Usual<'_> {
    /// Seconds of exchanges, by the bytes that they count for: what a phase takes besides the usual work of its
    /// slowest rank. Ranks that are late by chance are part of it. Where members are `apart`, one may always be slower
    /// than another.
    fn exchanges(&self, apart: bool) -> BTreeMap<u64, Vec<f64>> {
        let all = self.times.means();
        let each: Vec<_> = self.members.iter().map(Times::means).collect();
        let mut list: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        let phases = self.steps.iter().flat_map(|step| &step.phases);
        for Phase { bytes, seconds, work, first } in phases {
            let sum = |(rank, work): (usize, &Vec<Class>)| {
                let means = if apart { each.get(first + rank).unwrap_or(&all) } else { &all };
                work.iter().filter_map(|class| means.get(class)).sum::<f64>()
            };
            let busy = work.iter().enumerate().map(sum).fold(0.0, f64::max);
            list.entry(*bytes).or_default().push(seconds - busy);
        }
        list
    }

    /// Seconds of an empty exchange and of each byte: of exchanges, or where there were none, of messages.
    pub(super) fn link(&self, apart: bool) -> Option<(f64, f64)> {
        let mut seen = self.exchanges(apart);
        if seen.is_empty() {
            for (bytes, seconds) in self.steps.iter().flat_map(|step| &step.messages) {
                seen.entry(*bytes).or_default().push(*seconds);
            }
        }
        if seen.is_empty() {
            return None;
        }
        let least = if apart { LEAST_MESSAGE } else { 0.0 };
        let line = |(&bytes, times): (&u64, &Vec<f64>)| {
            // One that seems to take less was measured beside something else, and would make all others look free.
            let seconds = mean(times).max(least);
            let weight = times.len() as f64 / seconds.max(1e-7).powi(2);
            Line { columns: vec![bytes as f64], seconds, weight }
        };
        let lines: Vec<Line> = seen.iter().map(line).collect();
        let (latency, per_byte) = least_squares(&lines);
        Some((latency.max(least), per_byte[0]))
    }
}

impl Seen {
    /// Exchanges of one group, each with the work before it.
    fn group(&mut self, first: usize, ranks: Vec<Vec<Meeting>>) {
        let count = ranks.iter().map(Vec::len).min().unwrap_or(0);
        let mut ranks: Vec<_> = ranks.into_iter().map(Vec::into_iter).collect();
        let mut before: Option<f64> = None;
        for _ in 0..count {
            let here: Vec<Meeting> = ranks.iter_mut().filter_map(Iterator::next).collect();
            let end = here.iter().map(|meeting| meeting.end).fold(f64::MIN, f64::max);
            let bytes = here[0].bytes;
            if let (Some(before), Some(bytes)) = (before, bytes) {
                let work = here.into_iter().map(|meeting| meeting.work).collect();
                self.phases.push(Phase { bytes: bytes as u64, seconds: end - before, work, first });
            }
            before = Some(end);
        }
    }

    /// Messages between stages: from when both ends were ready to when it was received.
    fn handoffs(&mut self, programs: &[Vec<Op>], marks: &[&[Mark]]) {
        let mut sent: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        for (member, (program, marks)) in programs.iter().zip(marks).enumerate() {
            for mark in *marks {
                if let Op::Send { to, .. } = program[mark.op as usize] {
                    sent.entry((member, to)).or_default().push(mark.start);
                }
            }
        }
        for (member, (program, marks)) in programs.iter().zip(marks).enumerate() {
            let mut taken: BTreeMap<usize, usize> = BTreeMap::new();
            for mark in *marks {
                let Op::Receive { from, length, .. } = program[mark.op as usize] else { continue };
                let at = taken.entry(from).or_default();
                let start = sent.get(&(from, member)).and_then(|starts| starts.get(*at));
                *at += 1;
                if let Some(start) = start {
                    let seconds = mark.end - start.max(mark.start);
                    self.messages.push((length, seconds.max(0.0)));
                }
            }
        }
    }
}

fn add_units(units: &mut Vec<(Option<Quant>, u64)>, weights: Option<Quant>, more: u64) {
    match units.iter_mut().find(|(known, _)| *known == weights) {
        Some((_, units)) => *units += more,
        None => units.push((weights, more)),
    }
}

/// What each mark of a card counts for; nothing for exchanges.
fn classes(program: &[Op], marks: &[Mark], reach: &Reach) -> Vec<Option<Class>> {
    let mut before: Option<&Work> = None;
    let mut list = Vec::with_capacity(marks.len());
    for mark in marks {
        let mut class: Option<Class> = None;
        for op in &program[mark.op as usize..(mark.op + mark.ops) as usize] {
            let counted = match op {
                Op::Work(work) => load(work, before, reach),
                Op::Data { length, .. } => Some(Load::data(*length)),
                _ => None,
            };
            if let Some(load) = counted {
                let (kind, rows) = (load.kind, load.rows);
                let first = || Class { kind, rows, units: Vec::new() };
                add_units(&mut class.get_or_insert_with(first).units, load.weights, load.units);
            }
            before = if let Op::Work(work) = op { Some(work) } else { None };
        }
        if let Some(class) = &mut class {
            class.units.sort_unstable();
        }
        list.push(class);
    }
    list
}

/// Where a card met others in a step.
fn meetings(
    program: &[Op],
    marks: &[Mark],
    reach: &Reach,
    carried: &dyn Fn(&Op) -> f64,
) -> Vec<Meeting> {
    let (mut list, mut work) = (Vec::new(), Vec::new());
    for (mark, class) in marks.iter().zip(classes(program, marks, reach)) {
        let op = &program[mark.op as usize];
        let bytes = op.is_exchange().then(|| carried(op));
        if bytes.is_some() || matches!(op, Op::Receive { .. }) {
            list.push(Meeting { bytes, end: mark.end, work: std::mem::take(&mut work) });
        }
        work.extend(class);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_collective::{Algorithm, Collective};
    use spanker_plan::{Activity, Fold, Label, collective_time};
    use spanker_runtime::{BufferId, Place};
    use spanker_topology::{Bytes, BytesPerSecond, Cluster, Seconds, Shape};

    const ALIKE: Alike = Alike { rows: 1, past: 0, sequences: 1, operators: 1 };
    const HERE: Place = Place { buffer: BufferId(1), offset: 0 };

    fn gather(rows: u64) -> Op {
        Op::Gather { parts: [0..64, 64..128].into(), rows, from: HERE, into: HERE }
    }

    fn mark(op: u32, start: f64, end: f64) -> Mark {
        let label = Label { activity: Activity::Exchange, layer: 0, token: 0 };
        Mark { card: 0, label, op, ops: 1, start, end, parts: None }
    }

    fn copy(length: u64) -> Op {
        Op::Work(Work::Copy { from: HERE, into: HERE, length })
    }

    /// Marks of two cards that copy for a while and meet, again and again; the second has more to do.
    fn step(programs: &[Vec<Op>; 2], latency: f64, per_byte: f64) -> [Vec<Mark>; 2] {
        let (mut now, mut lists) = (0.0, [Vec::new(), Vec::new()]);
        for at in (0..programs[0].len()).step_by(2) {
            let bytes = programs[0][at + 1].exchanged_bytes(2);
            let met = [now + 3e-6, now + 7e-6];
            let end = met[1] + latency + bytes * per_byte;
            for (list, met) in lists.iter_mut().zip(met) {
                list.push(mark(at as u32, now, met));
                list.push(mark(at as u32 + 1, met, end));
            }
            now = end;
        }
        lists
    }

    #[test]
    fn planted_latency_and_bandwidth_of_exchanges_come_back_and_waiting_does_not_count() {
        let program = |length: u64| -> Vec<Op> {
            [1, 1, 8, 8, 64, 64].into_iter().flat_map(|rows| [copy(length), gather(rows)]).collect()
        };
        let programs = [program(3000), program(7000)];
        let marks = step(&programs, 2e-6, 1.0 / 4e9);
        let marks: Vec<&[Mark]> = marks.iter().map(Vec::as_slice).collect();
        let mut observed = Observed::new(ExchangeKind::SharedMemory);
        observed.add(ALIKE, &Reach::of([(1, 0)]), &programs, std::slice::from_ref(&(0..2)), &marks);
        let (latency, per_byte) = observed.usual().link(false).unwrap();
        assert!((latency / 2e-6 - 1.0).abs() < 1e-6, "{latency}");
        assert!((per_byte * 4e9 - 1.0).abs() < 1e-6, "{per_byte}");
    }

    #[test]
    fn messages_between_machines_are_never_free() {
        let program = |length: u64| -> Vec<Op> {
            [1, 8, 64].into_iter().flat_map(|rows| [copy(length), gather(rows)]).collect()
        };
        let programs = [program(3000), program(7000)];
        let marks = step(&programs, 0.0, 0.0);
        let marks: Vec<&[Mark]> = marks.iter().map(Vec::as_slice).collect();
        let mut observed = Observed::new(ExchangeKind::Messages);
        observed.add(ALIKE, &Reach::of([(1, 0)]), &programs, std::slice::from_ref(&(0..2)), &marks);
        let free = observed.usual().link(false).unwrap();
        let apart = observed.usual().link(true).unwrap();
        assert!(free.0 < 1e-9 && apart.0 >= LEAST_MESSAGE, "{free:?} {apart:?}");
    }

    #[test]
    fn bytes_of_exchanges_count_as_the_planner_prices_them() {
        let mut profile =
            super::super::assumed(4, Bytes(1 << 30), super::super::Cards::Ranks).unwrap();
        let link = profile.link.as_mut().unwrap();
        link.bandwidth.value = BytesPerSecond(1_000_000_000);
        link.latency.value = Seconds::ZERO;
        for ranks in 2..=4usize {
            let cluster = Cluster::uniform(profile.clone(), ranks, Shape::Switch).unwrap();
            let cards: Vec<usize> = (0..ranks).collect();
            let part = 1 << 20;
            let parts = (0..ranks as u64).map(|rank| rank * part..(rank + 1) * part).collect();
            let all = part * ranks as u64;
            let gather = Op::Gather { parts, rows: 1, from: HERE, into: HERE };
            let fold = Fold { dtype: 0, op: 0 };
            let sum = Op::Fold { data: HERE, elements: part / 4, fold };
            let cases = [(gather, Collective::AllGather, all), (sum, Collective::AllReduce, part)];
            for (op, collective, bytes) in cases {
                let price =
                    collective_time(&cluster, collective, Algorithm::OneShot, &cards, bytes);
                let ours = carried(&op, ranks, ExchangeKind::Direct) / 1e9;
                assert!((price.0 / ours - 1.0).abs() < 1e-9, "{ranks}: {} {ours}", price.0);
            }
        }
    }

    #[test]
    fn operators_of_usual_steps_add_up_to_the_step_and_disturbed_steps_do_not_count() {
        // Something happens to another operator in every step; a fifth of the steps are disturbed as a whole.
        let program: Vec<Op> = (0..5).map(|_| copy(4096)).collect();
        let mut observed = Observed::new(ExchangeKind::SharedMemory);
        for turn in 0..20 {
            let slow = if turn % 5 == 4 { 9.0 } else { 1.0 };
            let mut now = 0.0;
            let marks: Vec<Mark> = (0..5)
                .map(|op| {
                    let start = now;
                    now += slow * if op == turn % 5 { 6e-6 } else { 1e-6 };
                    mark(op, start, now)
                })
                .collect();
            observed.add(
                ALIKE,
                &Reach::of([(1, 0)]),
                std::slice::from_ref(&program),
                &[],
                &[&marks],
            );
        }
        let usual = observed.usual();
        let each: f64 = usual.times.means().into_values().sum();
        assert!((5.0 * each / 10e-6 - 1.0).abs() < 1e-9, "{each}");
    }

    #[test]
    fn messages_of_stages_count_from_when_both_ends_were_ready() {
        let mut observed = Observed::new(ExchangeKind::SharedMemory);
        for (length, end) in [(1000, 12e-6), (9000, 20e-6)] {
            let send = vec![Op::Send { to: 1, from: HERE, length }];
            let receive = vec![Op::Receive { from: 0, into: HERE, length }];
            let marks = [[mark(0, 10e-6, 11e-6)], [mark(0, 0.0, end)]];
            observed.add(
                ALIKE,
                &Reach::of([(1, 0)]),
                &[send, receive],
                &[0..1, 1..2],
                &[&marks[0], &marks[1]],
            );
        }
        let (latency, per_byte) = observed.usual().link(false).unwrap();
        assert!((latency - 1e-6).abs() < 1e-12 && (per_byte - 1e-9).abs() < 1e-15);
    }

    #[test]
    fn a_run_of_products_is_one_class_with_the_units_of_each_type() {
        let product = |n: u64, quant: Quant| {
            let (a, b, out) = (HERE, HERE, HERE);
            let types = [Quant::Q8_0, quant].map(|quant| quant.ggml_id().unwrap());
            Op::Work(Work::Matmul { a, b, out, shape: [4, 256, n], types })
        };
        let program =
            vec![product(8, Quant::Q4_0), product(8, Quant::Q8_0), product(8, Quant::Q4_0)];
        let mut observed = Observed::new(ExchangeKind::SharedMemory);
        let marks = [Mark { ops: 3, ..mark(0, 0.0, 5e-6) }];
        observed.add(
            ALIKE,
            &Reach::of([(1, 0)]),
            &[program],
            std::slice::from_ref(&(0..1)),
            &[&marks],
        );
        let found = observed.usual().times.fit();
        let types: Vec<_> = found.iter().map(|entry| entry.weights.as_deref().unwrap()).collect();
        assert_eq!(types, ["q4_0", "q8_0"]);
        let bytes = [2 * 8 * Quant::Q4_0.row_bytes(256), 8 * Quant::Q8_0.row_bytes(256)];
        let total: f64 =
            found.iter().zip(bytes).map(|(entry, bytes)| bytes as f64 / entry.rate).sum();
        assert!((total + found[0].overhead.0 - 5e-6).abs() < 1e-12);
    }
}
