// SPDX-License-Identifier: Apache-2.0
//! The algorithms: functions from (ranks, elements) to messages.
//!
//! Each is written once, in rounds, against [`Builder`]. A round is one step on each rank; ranks are
//! synchronised only by the messages themselves. None of them knows an element type or an operation.

mod bruck;
mod direct;
mod doubling;
mod ring;
mod tree;

use std::ops::Range;

use crate::schedule::{Incoming, Local, Rank, Schedule, Span, Step, Transfer};
use crate::{Algorithm, Collective, chunk};

/// Collects the steps of all ranks, a round at a time.
struct Builder {
    ranks: usize,
    elements: usize,
    scratch: usize,
    keep_empty: bool,
    programs: Vec<Vec<Step>>,
}

impl Builder {
    fn new(ranks: usize, elements: usize) -> Self {
        Builder {
            ranks,
            elements,
            scratch: 0,
            keep_empty: false,
            programs: vec![Vec::new(); ranks],
        }
    }

    /// Opens the next round: what follows may depend on everything before it.
    fn round(&mut self) {
        for program in &mut self.programs {
            program.push(Step::default());
        }
    }

    /// Makes sure that each rank has `elements` of working memory.
    fn need_scratch(&mut self, elements: usize) {
        self.scratch = self.scratch.max(elements);
    }

    fn current(&mut self, rank: Rank) -> &mut Step {
        self.programs[rank].last_mut().expect("a round is opened before it is filled")
    }

    /// Adds one message to the current round. Empty ones are left out on both sides, unless the
    /// schedule is a barrier, where the message itself is what counts.
    fn message(&mut self, from: Rank, to: Rank, src: Span, dst: Span, fold: Option<Incoming>) {
        debug_assert_eq!(src.len, dst.len);
        if src.len == 0 && !self.keep_empty {
            return;
        }
        let send = Transfer::Send { to, span: src };
        let recv = Transfer::Recv { from, span: dst, fold };
        self.current(from).transfers.push(send);
        self.current(to).transfers.push(recv);
    }

    /// A message of the same elements of `data` on both sides.
    fn data(&mut self, from: Rank, to: Rank, range: Range<usize>, fold: Option<Incoming>) {
        self.message(from, to, Span::data(range.clone()), Span::data(range), fold);
    }

    /// Messages of `count` chunks from chunk `first` on, around the end of the buffer if need be.
    fn chunks(&mut self, from: Rank, to: Rank, first: usize, count: usize, fold: Option<Incoming>) {
        let [whole, wrapped] = self.cyclic(first, count);
        self.data(from, to, whole, fold);
        if !wrapped.is_empty() {
            self.data(from, to, wrapped, fold);
        }
    }

    fn copy(&mut self, rank: Rank, from: Span, into: Span) {
        if from.len > 0 && from != into {
            self.current(rank).locals.push(Local::Copy { from, into });
        }
    }

    fn fold(&mut self, rank: Rank, sources: Vec<Span>, into: Span) {
        if into.len > 0 {
            self.current(rank).locals.push(Local::Fold { sources, into });
        }
    }

    /// The elements of chunk `index`, counted around the group.
    fn chunk(&self, index: usize) -> Range<usize> {
        chunk(self.elements, self.ranks, index % self.ranks)
    }

    /// The whole buffer.
    fn whole(&self) -> Range<usize> {
        0..self.elements
    }

    /// The elements of `count` chunks from chunk `first` on. The second range is what wraps around.
    fn cyclic(&self, first: usize, count: usize) -> [Range<usize>; 2] {
        let first = first % self.ranks;
        let start = self.chunk(first).start;
        match first + count {
            _ if count == 0 => [0..0, 0..0],
            last if last <= self.ranks => [start..self.chunk(last - 1).end, 0..0],
            last => [start..self.elements, 0..self.chunk(last - 1).end],
        }
    }

    fn finish(mut self, collective: Collective, algorithm: Algorithm, elements: usize) -> Schedule {
        for program in &mut self.programs {
            program.retain(|step| !step.transfers.is_empty() || !step.locals.is_empty());
        }
        let data = collective.data_len(self.ranks, elements).expect("the size was checked");
        Schedule::from_parts(collective, algorithm, elements, data, self.scratch, self.programs)
    }
}

/// Builds the schedule. The table in [`crate::schedule`]'s documentation is this `match` in words.
pub(crate) fn build(
    collective: Collective,
    algorithm: Algorithm,
    ranks: usize,
    elements: usize,
) -> Schedule {
    let elements = match collective {
        Collective::Barrier => 0,
        _ => elements,
    };
    let mut b = Builder::new(ranks, elements);
    match collective {
        Collective::AllReduce => all_reduce(&mut b, algorithm),
        Collective::ReduceScatter => reduce_scatter(&mut b, algorithm),
        Collective::AllGather => all_gather(&mut b, algorithm),
        Collective::Broadcast { root } => broadcast(&mut b, algorithm, root),
        Collective::Reduce { root } => reduce(&mut b, algorithm, root),
        Collective::Gather { root } => match algorithm {
            Algorithm::Ring => ring::gather(&mut b, root),
            Algorithm::OneShot | Algorithm::TwoShot => direct::gather(&mut b, root),
            _ => tree::gather(&mut b, root),
        },
        Collective::Scatter { root } => match algorithm {
            Algorithm::Ring => ring::scatter(&mut b, root),
            Algorithm::OneShot | Algorithm::TwoShot => direct::scatter(&mut b, root),
            _ => tree::scatter(&mut b, root),
        },
        Collective::AllToAll => match algorithm {
            Algorithm::Ring => ring::all_to_all(&mut b),
            Algorithm::OneShot | Algorithm::TwoShot => direct::all_to_all(&mut b),
            _ => bruck::all_to_all(&mut b),
        },
        Collective::Barrier => {
            b.keep_empty = true;
            barrier(&mut b, algorithm);
        }
    }
    b.finish(collective, algorithm, elements)
}

fn all_reduce(b: &mut Builder, algorithm: Algorithm) {
    match algorithm {
        Algorithm::Ring => {
            ring::reduce_scatter(b);
            ring::all_gather(b);
        }
        Algorithm::RecursiveDoubling => doubling::all_reduce(b),
        Algorithm::HalvingDoubling => {
            bruck::reduce_scatter(b);
            bruck::all_gather(b);
        }
        Algorithm::Tree => {
            tree::reduce(b, 0);
            tree::broadcast(b, 0);
        }
        Algorithm::OneShot => direct::all_reduce(b),
        Algorithm::TwoShot => {
            direct::reduce_scatter(b);
            direct::all_gather(b);
        }
    }
}

fn reduce_scatter(b: &mut Builder, algorithm: Algorithm) {
    match algorithm {
        Algorithm::Ring => ring::reduce_scatter(b),
        Algorithm::RecursiveDoubling | Algorithm::HalvingDoubling => bruck::reduce_scatter(b),
        Algorithm::Tree => {
            tree::reduce(b, 0);
            tree::scatter(b, 0);
        }
        Algorithm::OneShot | Algorithm::TwoShot => direct::reduce_scatter(b),
    }
}

fn all_gather(b: &mut Builder, algorithm: Algorithm) {
    match algorithm {
        Algorithm::Ring => ring::all_gather(b),
        Algorithm::RecursiveDoubling | Algorithm::HalvingDoubling => bruck::all_gather(b),
        Algorithm::Tree => {
            tree::gather(b, 0);
            tree::broadcast(b, 0);
        }
        Algorithm::OneShot | Algorithm::TwoShot => direct::all_gather(b),
    }
}

fn broadcast(b: &mut Builder, algorithm: Algorithm, root: Rank) {
    match algorithm {
        Algorithm::Ring => ring::broadcast(b, root),
        Algorithm::RecursiveDoubling | Algorithm::Tree => tree::broadcast(b, root),
        Algorithm::HalvingDoubling => {
            tree::scatter(b, root);
            bruck::all_gather(b);
        }
        Algorithm::OneShot => direct::broadcast(b, root),
        Algorithm::TwoShot => {
            direct::scatter(b, root);
            direct::all_gather(b);
        }
    }
}

fn reduce(b: &mut Builder, algorithm: Algorithm, root: Rank) {
    match algorithm {
        Algorithm::Ring => ring::reduce(b, root),
        Algorithm::RecursiveDoubling | Algorithm::Tree => tree::reduce(b, root),
        Algorithm::HalvingDoubling => {
            bruck::reduce_scatter(b);
            tree::gather(b, root);
        }
        Algorithm::OneShot => direct::reduce(b, root),
        Algorithm::TwoShot => {
            direct::reduce_scatter(b);
            direct::gather(b, root);
        }
    }
}

fn barrier(b: &mut Builder, algorithm: Algorithm) {
    match algorithm {
        Algorithm::Ring => {
            ring::reduce_scatter(b);
            ring::all_gather(b);
        }
        Algorithm::RecursiveDoubling | Algorithm::HalvingDoubling => bruck::all_gather(b),
        Algorithm::Tree => {
            tree::reduce(b, 0);
            tree::broadcast(b, 0);
        }
        Algorithm::OneShot => direct::all_gather(b),
        Algorithm::TwoShot => {
            direct::gather(b, 0);
            direct::broadcast(b, 0);
        }
    }
}
