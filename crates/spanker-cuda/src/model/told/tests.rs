// SPDX-License-Identifier: Apache-2.0
//! Lines with places of their own do what lines that meet do.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;

/// A streamed line that takes `width` numbers and makes `rows`.
fn product(keep: u32, width: u32, rows: u32, from: u64, to: u64) -> Line {
    let mut line = Line { kind: kind::STREAMED, ..Line::default() };
    (line.n[0], line.n[4], line.n[8]) = (width, keep, rows);
    (line.p[0], line.p[5]) = (from, to);
    if keep == INTO {
        line.p[8] = to;
    }
    line
}

/// A model of two layers: x at 0x1000, queries, keys and values, what comes of them, gates, and logits.
fn model() -> Vec<Line> {
    let (x, q, k, v, seen, gate, logits) = (0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000, 0x9000);
    let mut lines = Vec::new();
    let mut embed = Line { kind: kind::EMBED, ..Line::default() };
    (embed.n[0], embed.n[1], embed.p[1]) = (1, 64, x);
    lines.push(embed);
    for _ in 0..2 {
        let mut all = product(0, 64, 64, x, q);
        (all.n[9], all.n[10], all.p[6], all.p[7]) = (32, 32, k, v);
        lines.push(all);
        let mut attend = Line { kind: kind::ATTEND, ..Line::default() };
        (attend.n[0], attend.n[1], attend.n[2], attend.n[3], attend.n[7]) = (1, 4, 2, 16, 1);
        (attend.p[0], attend.p[3], attend.p[5], attend.p[6]) = (q, seen, k, v);
        lines.push(attend);
        lines.push(product(INTO, 64, 64, seen, x));
        lines.push(product(GATED, 64, 128, x, gate));
        lines.push(product(INTO, 128, 64, gate, x));
    }
    lines.push(product(0, 64, 100, x, logits));
    lines
}

/// Whether a line can follow others.
fn follows(line: &Line, before: &[Line]) -> bool {
    let mut run = Run::default();
    assert!(before.iter().all(|line| run.take(line)));
    run.take(line)
}

#[test]
fn a_model_is_told_from_its_first_line_to_its_last() {
    let lines = model();
    let mut run = Run::default();
    assert!(lines.iter().all(|line| run.take(line)));
    let (told, bytes) = told(&lines, 1 << 20);
    assert!(bytes > 0 && bytes.is_multiple_of(ALIGNMENT));
    assert_eq!((told[0].p[1], told[0].n[5]), (0x1000, 1), "a later line writes it");
    for (line, was) in told[1..].iter().zip(&lines[1..]) {
        let ins = read(line);
        assert!(ins.iter().all(|numbers| numbers.at.start >= 1 << 20), "{line:?}");
        match line.kind {
            kind::ATTEND => assert_eq!(line.n[12], 1),
            _ => assert_eq!(line.n[1], if was.n[4] == INTO { HEARD | ADDED } else { HEARD }),
        }
    }
    // Results that nobody in the kernel needs go where the program says, and only there.
    let last = told.last().unwrap();
    assert_eq!((last.p[5], last.p[9]), (0x9000, 0));
    // What is written once more is not kept before.
    assert_eq!(told[5].p[9], 0);
    assert_eq!(told[10].p[9], 0x1000, "the last x is kept");
}

#[test]
fn a_place_is_told_once() {
    let (told, bytes) = told(&model(), 0x10_0000);
    let mut places: Vec<Range<u64>> = Vec::new();
    for line in &told {
        for numbers in written(line) {
            let at = if line.kind == kind::EMBED { line.p[8] } else { line.p[numbers.place] };
            let range = at..at + (numbers.at.end - numbers.at.start);
            if at < 0x10_0000 {
                continue;
            }
            assert!(range.end <= 0x10_0000 + bytes);
            assert!(places.iter().all(|place| !overlap(place, &range)), "{range:?}");
            places.push(range);
        }
    }
    assert_eq!(places.len(), 1 + 2 * 7);
}

#[test]
fn what_was_told_in_part_ends_a_kernel() {
    let first = product(0, 64, 64, 0x1000, 0x2000);
    // A wider row than what was written, one beside it, and a part of it.
    assert!(!follows(&product(0, 128, 64, 0x2000, 0x8000), &[first]));
    assert!(!follows(&product(0, 64, 64, 0x2000 - 4, 0x8000), &[first]));
    assert!(follows(&product(0, 32, 64, 0x2000 + 16, 0x8000), &[first]));
    // Writes that cover another's in part.
    assert!(!follows(&product(0, 64, 32, 0x2000, 0x2000 + 64), &[first]));
}

#[test]
fn what_others_may_still_read_is_not_written() {
    let first = product(0, 64, 64, 0x1000, 0x2000);
    assert!(!follows(&product(INTO, 64, 64, 0x3000, 0x1000), &[first]));
    assert!(!follows(&product(INTO, 32, 64, 0x2000, 0x1000), &[first]), "half of what was told");
    // Who has heard all of the first line knows that nobody reads its inputs any more.
    assert!(follows(&product(INTO, 64, 64, 0x2000, 0x1000), &[first]));
    let second = product(0, 64, 64, 0x2000, 0x4000);
    assert!(follows(&product(INTO, 64, 64, 0x4000, 0x1000), &[first, second]));
    // Of a line that tells two rows, one says nothing about blocks that had none of it.
    let mut both = first;
    (both.n[9], both.p[6]) = (64, 0x5000);
    assert!(!follows(&product(INTO, 64, 64, 0x2000, 0x1000), &[both]));
    // A head has heard a part of what the line before tells: others may be at it still.
    let [_, all, mut attend, ..] = model()[..] else { panic!("a model has more lines") };
    attend.p[3] = all.p[0];
    assert!(!follows(&attend, &[all]));
    // An input that would be at an odd place.
    assert!(!follows(&product(0, 32, 64, 0x2000 + 4, 0x8000), &[first]));
}

#[test]
fn a_model_without_its_first_line_is_one_kernel_too() {
    let mut run = Run::default();
    assert!(model()[1..].iter().all(|line| run.take(line)));
}

type Memory = HashMap<u64, u64>;

fn load(memory: &Memory, at: u64, count: usize) -> Vec<u64> {
    (0..count as u64).map(|i| memory.get(&(at + 4 * i)).copied().unwrap_or(at + 4 * i)).collect()
}

/// A part of a line that one block does: what it reads, by place, number and count, and what it writes, by place and number.
struct Part {
    reads: Vec<(usize, usize, usize)>,
    writes: Vec<(usize, usize)>,
}

/// The parts of a line for so many blocks, as the kernel shares it: rows of a product in equal parts, of which some may be
/// empty; heads in turn, and a token's numbers too.
fn parts(line: &Line, blocks: usize) -> Vec<Vec<Part>> {
    let n = |at: usize| line.n[at] as usize;
    (0..blocks)
        .map(|block| match line.kind {
            kind::EMBED => {
                let writes = (block..n(1)).step_by(blocks).map(|i| (1, i)).collect();
                vec![Part { reads: Vec::new(), writes }]
            }
            kind::ATTEND => (block..n(1))
                .step_by(blocks)
                .map(|head| {
                    let (size, kv) = (n(3), head * n(2) / n(1));
                    let reads = [(0, head), (5, kv), (6, kv)].map(|(p, at)| (p, at * size, size));
                    Part {
                        reads: reads.into(),
                        writes: (0..size).map(|i| (3, head * size + i)).collect(),
                    }
                })
                .collect(),
            kind::STREAMED => {
                let outs = if line.n[4] == GATED { 1 } else { 3 };
                let rows = (0..outs).flat_map(|out| (0..n(8 + out)).map(move |row| (5 + out, row)));
                let rows: Vec<(usize, usize)> = rows.collect();
                let own =
                    rows[rows.len() * block / blocks..rows.len() * (block + 1) / blocks].to_vec();
                let mut reads = vec![(0, 0, n(0))];
                if line.n[4] == INTO {
                    reads.extend(own.iter().map(|(_, row)| (8, *row, 1)));
                }
                if own.is_empty() { Vec::new() } else { vec![Part { reads, writes: own }] }
            }
            _ => Vec::new(),
        })
        .collect()
}

/// What a part writes at one of its places: it depends on all that the part reads, but of what it adds to on its own row.
fn result(part: &Part, read: &[Vec<u64>], place: usize, row: usize) -> u64 {
    let mut sum = (place * 1000 + row) as u64;
    for ((from, at, _), numbers) in part.reads.iter().zip(read) {
        if *from != 8 || *at == row {
            for number in numbers {
                sum = sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ number;
            }
        }
    }
    sum
}

/// Goes through lines that meet after each.
fn met(lines: &[Line], blocks: usize) -> Memory {
    let mut memory = Memory::new();
    for line in lines {
        let mut new = Vec::new();
        for part in parts(line, blocks).iter().flatten() {
            let from = |(place, at, count): &(usize, usize, usize)| {
                load(&memory, line.p[*place] + 4 * *at as u64, *count)
            };
            let read: Vec<Vec<u64>> = part.reads.iter().map(from).collect();
            new.extend(part.writes.iter().map(|&(place, row)| {
                (line.p[place] + 4 * row as u64, result(part, &read, place, row))
            }));
        }
        memory.extend(new);
    }
    memory
}

/// Blocks that go through told lines and wait for nothing but for what they are told.
struct Race<'a> {
    lines: &'a [Line],
    base: u64,
    memory: Memory,
    /// What each block still does: parts of lines, each to read and then to write.
    left: Vec<VecDeque<(usize, Part)>>,
    read: Vec<Option<Vec<Vec<u64>>>>,
}

impl Race<'_> {
    /// Lets a block go on. Says whether it can.
    fn go_on(&mut self, block: usize) -> bool {
        let Some((at, part)) = self.left[block].front() else { return false };
        let line = &self.lines[*at];
        let Some(read) = self.read[block].take() else {
            let from = part.reads.iter().map(|&(p, at, count)| (line.p[p] + 4 * at as u64, count));
            let from: Vec<(u64, usize)> = from.collect();
            let (memory, base) = (&self.memory, self.base);
            let is_there = |&(at, count): &(u64, usize)| {
                at < base || (0..count as u64).all(|i| memory.contains_key(&(at + 4 * i)))
            };
            if from.iter().all(is_there) {
                let read = from.iter().map(|&(at, count)| load(memory, at, count)).collect();
                self.read[block] = Some(read);
            }
            return self.read[block].is_some();
        };
        for &(place, row) in &part.writes {
            let value = result(part, &read, place, row);
            let to = match line.kind {
                kind::EMBED => [line.p[8], if line.n[5] == 1 { 0 } else { line.p[1] }],
                _ => [line.p[place], line.p[kept(line, place)]],
            };
            for to in to.into_iter().filter(|to| *to != 0) {
                let before = self.memory.insert(to + 4 * row as u64, value);
                assert!(to < self.base || before.is_none(), "told twice");
            }
        }
        self.left[block].pop_front();
        true
    }
}

/// Goes through told lines with so many blocks, in an order that `choices` make.
fn raced(lines: &[Line], was: &[Line], base: u64, blocks: usize, choices: &[usize]) -> Memory {
    let left = (0..blocks).map(|_| VecDeque::new()).collect();
    let mut race = Race { lines, base, memory: Memory::new(), left, read: vec![None; blocks] };
    for (at, line) in was.iter().enumerate() {
        for (block, own) in parts(line, blocks).into_iter().enumerate() {
            race.left[block].extend(own.into_iter().map(|part| (at, part)));
        }
    }
    let mut choices = choices.iter().cycle();
    while race.left.iter().any(|own| !own.is_empty()) {
        let first = choices.next().unwrap();
        let went = (0..blocks).any(|i| race.go_on((first + i) % blocks));
        assert!(went, "nobody writes what is waited for");
    }
    race.memory
}

/// A line of a random program: its kind, where it reads and writes, and how much.
fn random(&(what, from, to, size): &(u32, u64, u64, u32)) -> Line {
    let place = |which: u64| 0x1000 + which % 6 * 0x100;
    let mut line = product(what % 3, size * 4, size * 4, place(from), place(to));
    match what {
        // A product with two matrices, heads that look back, and a token.
        3 => (line.n[9], line.p[6]) = (size * 4, place(to + 1)),
        4 => {
            line = Line { kind: kind::ATTEND, ..Line::default() };
            (line.n[0], line.n[1], line.n[2], line.n[3], line.n[7]) = (1, 4, 2, size, 1);
            (line.p[0], line.p[3]) = (place(from), place(to));
            (line.p[5], line.p[6]) = (place(from + 1), place(from + 2));
        }
        5 => {
            line = Line { kind: kind::EMBED, ..Line::default() };
            (line.n[0], line.n[1], line.p[1]) = (1, size * 4, place(to));
        }
        _ => {}
    }
    line
}

/// Whether a line reads where it writes, by itself: programs have no such lines, whatever kernel goes through them.
fn is_tangled(line: &Line) -> bool {
    let reads = read(line).into_iter().filter(|numbers| numbers.place != 8);
    let writes = written(line);
    reads.into_iter().any(|one| writes.iter().any(|two| overlap(&one.at, &two.at)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Random programs, cut where a line cannot follow: blocks in any order leave the memory that blocks leave which meet.
    #[test]
    fn told_lines_leave_what_lines_that_meet_leave(
        steps in prop::collection::vec((0u32..6, 0u64..6, 0u64..6, 1u32..5), 1..24),
        blocks in 1usize..5,
        choices in prop::collection::vec(0usize..5, 1..200),
    ) {
        let lines: Vec<Line> = steps.iter().map(random).filter(|line| !is_tangled(line)).collect();
        let base = 1 << 30;
        let mut run = Run::default();
        let mut runs: Vec<Vec<Line>> = Vec::new();
        for line in &lines {
            if !runs.is_empty() && run.take(line) {
                runs.last_mut().unwrap().push(*line);
            } else {
                run = Run::default();
                prop_assert!(run.take(line));
                runs.push(vec![*line]);
            }
        }
        for run in runs {
            let (told, bytes) = told(&run, base);
            let memory = raced(&told, &run, base, blocks, &choices);
            prop_assert!(memory.keys().all(|at| *at < base + bytes));
            let visible: Memory = memory.into_iter().filter(|(at, _)| *at < base).collect();
            prop_assert_eq!(visible, met(&run, blocks));
        }
    }
}
