// SPDX-License-Identifier: Apache-2.0
//! What blocks of a kernel tell each other. Pure: nothing is launched here.
//!
//! The kernel whose weights come ahead of time has no meetings. What a line of it writes for a later one goes to a place
//! that nobody has written in this step, and who needs a number there looks until it is written. So every such line has a
//! place of its own, whatever the program calls it; what is still needed afterwards is also kept where the program says.

use std::collections::BTreeSet;
use std::ops::Range;

use super::lines::{GATED, INTO, Line, kind};

/// Where a told place begins: at a multiple of this.
const ALIGNMENT: u64 = 128;
/// Bytes of a number.
const NUMBER: u64 = 4;

/// What of a streamed line others tell: its inputs, and what its results are added to. As the kernel has them.
const HEARD: u32 = 1;
const ADDED: u32 = 2;

/// Numbers that a line reads or writes: which of its places, and the addresses.
struct Numbers {
    place: usize,
    at: Range<u64>,
}

impl Numbers {
    fn new(line: &Line, place: usize, count: u64) -> Numbers {
        let start = line.p[place];
        Numbers { place, at: start..start + count * NUMBER }
    }
}

/// Numbers that a line reads and that may have been written by a line before it. Keys and values that are kept belong to a
/// layer, and blocks of results are for the other kernel: neither is read by a later line of the same one.
fn read(line: &Line) -> Vec<Numbers> {
    let n = |at: usize| u64::from(line.n[at]);
    let new = |place, count| Numbers::new(line, place, count);
    match line.kind {
        kind::STREAMED if line.n[4] == INTO => vec![new(0, n(0)), new(8, n(8))],
        kind::STREAMED => vec![new(0, n(0))],
        kind::ATTEND if line.n[7] == 1 => {
            vec![new(0, n(1) * n(3)), new(5, n(2) * n(3)), new(6, n(2) * n(3))]
        }
        kind::ATTEND => vec![new(0, n(1) * n(3))],
        _ => Vec::new(),
    }
}

/// Numbers that a line writes.
fn written(line: &Line) -> Vec<Numbers> {
    let n = |at: usize| u64::from(line.n[at]);
    let new = |place, count| Numbers::new(line, place, count);
    match line.kind {
        kind::STREAMED if line.n[4] == GATED => vec![new(5, n(8))],
        kind::STREAMED => (0..3).filter(|i| n(8 + i) > 0).map(|i| new(5 + i, n(8 + i))).collect(),
        kind::ATTEND => vec![new(3, n(1) * n(3))],
        kind::EMBED => vec![new(1, n(1))],
        _ => Vec::new(),
    }
}

/// Where the results at a place are also kept.
fn kept(line: &Line, place: usize) -> usize {
    if line.kind == kind::STREAMED { place + 4 } else { 8 }
}

fn overlap(one: &Range<u64>, two: &Range<u64>) -> bool {
    one.start < two.end && two.start < one.end
}

fn contains(outer: &Range<u64>, inner: &Range<u64>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Lines that one kernel goes through, so far.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// What lines have told, and which.
    told: Vec<(Range<u64>, usize)>,
    /// What lines read where the program says, and which.
    plain: Vec<(Range<u64>, usize)>,
    /// Of each line, those of which nothing is left to do once it has begun.
    done: Vec<BTreeSet<usize>>,
}

impl Run {
    /// Takes a line if it can follow the others in one kernel: all numbers that it reads together were told as a whole or
    /// not at all, and what it writes is neither a part of what was told nor what somebody may still read where the program
    /// says. Says whether it can.
    pub(super) fn take(&mut self, line: &Line) -> bool {
        let teller = |at: &Range<u64>| self.told.iter().rfind(|(told, _)| contains(told, at));
        let is_told = |at: &Range<u64>| teller(at).is_some();
        let is_apart = |at: &Range<u64>| !self.told.iter().any(|(told, _)| overlap(told, at));
        let reads = read(line);
        // Inputs of products are read 16 bytes at a time.
        let is_even = |numbers: &Numbers| {
            let off = teller(&numbers.at).map_or(0, |(told, _)| numbers.at.start - told.start);
            numbers.place == 8 || line.kind == kind::ATTEND || off.is_multiple_of(16)
        };
        let together = match line.kind {
            kind::ATTEND => {
                reads.iter().all(|numbers| is_told(&numbers.at))
                    || reads.iter().all(|numbers| is_apart(&numbers.at))
            }
            _ => reads.iter().all(|numbers| is_told(&numbers.at) || is_apart(&numbers.at)),
        };
        // Whoever has heard all that a line tells knows that all blocks are done with it. What results are added to is
        // heard number by number.
        let heard = reads.iter().filter(|numbers| numbers.place != 8);
        let heard: Vec<(&Range<u64>, usize)> =
            heard.filter_map(|n| teller(&n.at).map(|(_, by)| (&n.at, *by))).collect();
        let (mut done, mut before) = (BTreeSet::new(), BTreeSet::new());
        for (_, by) in &heard {
            let mut tells = self.told.iter().filter(|(_, teller)| teller == by);
            if tells.all(|(told, _)| heard.iter().any(|(at, _)| *at == told)) {
                done.insert(*by);
                before.extend(&self.done[*by]);
            }
        }
        // Heads have heard all of it together, and each a part.
        let known = if line.kind == kind::ATTEND { BTreeSet::new() } else { done.clone() };
        let known: BTreeSet<usize> = &known | &before;
        done.extend(before);
        let writes: Vec<Range<u64>> = written(line).into_iter().map(|numbers| numbers.at).collect();
        let is_free = |at: &Range<u64>| {
            self.told.iter().all(|(told, _)| told == at || !overlap(told, at))
                && self.plain.iter().all(|(plain, by)| known.contains(by) || !overlap(plain, at))
        };
        if !together || !reads.iter().all(is_even) || !writes.iter().all(is_free) {
            return false;
        }
        let own = self.done.len();
        let plain: Vec<(Range<u64>, usize)> =
            reads.iter().filter(|n| !is_told(&n.at)).map(|n| (n.at.clone(), own)).collect();
        self.plain.extend(plain);
        self.told.extend(writes.into_iter().map(|at| (at, own)));
        self.done.push(done);
        true
    }
}

/// Lines that follow each other, with places from `base` on where blocks tell each other numbers, and the bytes of these.
pub(super) fn told(lines: &[Line], base: u64) -> (Vec<Line>, u64) {
    // What the program calls a place, and where its numbers were told last.
    let mut now: Vec<(Range<u64>, u64)> = Vec::new();
    let mut next = base;
    let mut out = Vec::with_capacity(lines.len());
    for (at, line) in lines.iter().enumerate() {
        let mut line = *line;
        let (reads, writes) = (read(&line), written(&line));
        for numbers in reads {
            let Some((of, to)) = now.iter().find(|(of, _)| contains(of, &numbers.at)) else {
                continue;
            };
            line.p[numbers.place] = to + (numbers.at.start - of.start);
            match (line.kind, numbers.place) {
                (kind::ATTEND, _) => line.n[12] = 1,
                (_, 8) => line.n[1] |= ADDED,
                _ => line.n[1] |= HEARD,
            }
        }
        for Numbers { place, at: of } in writes {
            let later = &lines[at + 1..];
            let again = later.iter().position(|line| written(line).iter().any(|n| n.at == of));
            let readers = &later[..again.map_or(later.len(), |again| again + 1)];
            now.retain(|(old, _)| *old != of);
            let is_read = readers.iter().any(|l| read(l).iter().any(|n| contains(&of, &n.at)));
            if !is_read && again.is_none() {
                continue;
            }
            let to = next;
            next += (of.end - of.start).next_multiple_of(ALIGNMENT);
            if line.kind == kind::EMBED {
                line.p[8] = to;
                line.n[5] = u32::from(again.is_some());
            } else {
                line.p[place] = to;
                line.p[kept(&line, place)] = if again.is_none() { of.start } else { 0 };
            }
            now.push((of, to));
        }
        out.push(line);
    }
    (out, next - base)
}

#[cfg(test)]
mod tests;
