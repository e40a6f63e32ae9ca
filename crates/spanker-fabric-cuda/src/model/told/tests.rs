// SPDX-License-Identifier: Apache-2.0
//! Lines with places of their own do what lines that meet do.

use std::collections::HashMap;

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
    assert_eq!(told[0].p[1], 0x1000, "numbers of a token are written where the program says, too");
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
}

#[test]
fn a_model_without_its_first_line_is_one_kernel_too() {
    let mut run = Run::default();
    assert!(model()[1..].iter().all(|line| run.take(line)));
}

/// A line's results from its inputs: every number depends on all of them.
fn results(line: &Line, inputs: &[Vec<u64>]) -> u64 {
    let mut sum = u64::from(line.kind) + u64::from(line.n[4]);
    for number in inputs.iter().flatten() {
        sum = sum.wrapping_mul(31).wrapping_add(*number);
    }
    sum
}

type Memory = HashMap<u64, u64>;

fn load(memory: &Memory, numbers: &Numbers) -> Vec<u64> {
    numbers.at.clone().step_by(4).map(|at| memory.get(&at).copied().unwrap_or(at)).collect()
}

/// Goes through lines that meet after each.
fn met(lines: &[Line]) -> Memory {
    let mut memory = Memory::new();
    for line in lines {
        let inputs: Vec<Vec<u64>> = read(line).iter().map(|n| load(&memory, n)).collect();
        let sum = results(line, &inputs);
        for (which, numbers) in written(line).iter().enumerate() {
            for (i, at) in numbers.at.clone().step_by(4).enumerate() {
                memory.insert(at, sum.wrapping_add((which * 1000 + i) as u64));
            }
        }
    }
    memory
}

/// Goes through told lines as blocks do that are late: what is written where the program says is there before anybody has
/// read anything, unless it was told.
fn late(lines: &[Line], was: &[Line], base: u64) -> Memory {
    let mut memory = Memory::new();
    let mut places: Vec<(u64, u64)> = Vec::new();
    for (line, was) in lines.iter().zip(was) {
        let inputs: Vec<Vec<u64>> = read(line)
            .iter()
            .map(|numbers| {
                if numbers.at.start >= base {
                    let unwritten =
                        numbers.at.clone().step_by(4).find(|at| !memory.contains_key(at));
                    assert_eq!(unwritten, None, "nobody writes what is waited for");
                    load(&memory, numbers)
                } else {
                    // Nobody has written there: late blocks read what was there before the kernel.
                    numbers.at.clone().step_by(4).collect()
                }
            })
            .collect();
        let sum = results(was, &inputs);
        for (which, numbers) in written(was).iter().enumerate() {
            let told = if line.kind == kind::EMBED { 8 } else { numbers.place };
            let also = if line.kind == kind::EMBED { 1 } else { kept(line, numbers.place) };
            for (i, offset) in (0..numbers.at.end - numbers.at.start).step_by(4).enumerate() {
                let value = sum.wrapping_add((which * 1000 + i) as u64);
                for place in [line.p[told], line.p[also]] {
                    if place != 0 {
                        assert!(place < base || memory.insert(place + offset, value).is_none());
                        places.push((place + offset, value));
                    }
                }
            }
        }
    }
    for (place, value) in places {
        memory.insert(place, value);
    }
    memory
}

proptest! {
    /// Random programs, cut where a line cannot follow: told lines leave the memory that lines leave which meet.
    #[test]
    fn told_lines_leave_what_lines_that_meet_leave(
        steps in prop::collection::vec((0u32..3, 0u64..6, 0u64..6, 1u32..5), 1..30),
    ) {
        let place = |which: u64| 0x1000 + which * 0x100;
        let lines: Vec<Line> = steps
            .iter()
            .map(|&(keep, from, to, size)| product(keep, size * 8, size * 8, place(from), place(to)))
            .collect();
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
            let expected = met(&run);
            let memory = late(&told, &run, base);
            prop_assert!(memory.keys().all(|at| *at < base + bytes));
            let visible: Memory = memory.into_iter().filter(|(at, _)| *at < base).collect();
            prop_assert_eq!(visible, expected);
        }
    }
}
