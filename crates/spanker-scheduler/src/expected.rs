// SPDX-License-Identifier: Apache-2.0
//! What a collective on cards must give, element by element, from the buffers that it began with. Only the
//! elements that somebody asks for are computed.

use std::ops::Range;

use spanker_collective::{Collective, Rank, ReduceOp, chunk};
use spanker_reduce::{Element, Team, Threads, divide, reduce};

use crate::Result;
use crate::sample::Sampler;

/// A collective with its inputs, which lie in host memory.
#[derive(Debug)]
pub(crate) struct Expected<'a, T> {
    pub(crate) collective: Collective,
    pub(crate) elements: usize,
    pub(crate) op: ReduceOp,
    /// What each rank contributes: for an all-gather its chunk, for a broadcast the root's data and else
    /// nothing, for everything else a whole buffer.
    pub(crate) inputs: &'a [&'a [T]],
}

/// What was found in a part of a rank's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) holder: Rank,
    /// The place of the part in [`Expected::parts`].
    pub(crate) part: usize,
    /// The first element of the rank's result that is known to be wrong.
    pub(crate) wrong: Option<usize>,
}

impl<T: Element> Expected<'_, T> {
    pub(crate) fn ranks(&self) -> usize {
        self.inputs.len()
    }

    /// Whether every rank gets the same.
    fn is_alike(&self) -> bool {
        let alike = |c| matches!(c, Collective::AllReduce | Collective::AllGather);
        alike(self.collective) || self.collective.root().is_some()
    }

    /// The elements of a rank's result, by the card that computes, owns or sends them.
    fn parts(&self, rank: Rank) -> Vec<Range<usize>> {
        let (elements, ranks) = (self.elements, self.ranks());
        let own = chunk(elements, ranks, rank).len();
        match self.collective {
            Collective::ReduceScatter => std::iter::once(0..own).collect(),
            Collective::AllToAll => (0..ranks).map(|from| from * own..(from + 1) * own).collect(),
            _ => (0..ranks).map(|part| chunk(elements, ranks, part)).collect(),
        }
    }

    /// Some elements of a rank's result.
    fn at(&self, rank: Rank, positions: &[usize]) -> Result<Vec<T>> {
        let own = chunk(self.elements, self.ranks(), rank);
        match self.collective {
            Collective::AllReduce => self.folded(positions, 0),
            Collective::ReduceScatter => self.folded(positions, own.start),
            Collective::AllToAll => {
                let from = |&at: &usize| self.inputs[at / own.len()][own.start + at % own.len()];
                Ok(positions.iter().map(from).collect())
            }
            Collective::AllGather => {
                let length = own.len();
                let from = |&at: &usize| self.inputs[at / length][at % length];
                Ok(positions.iter().map(from).collect())
            }
            other => {
                let source = self.inputs[other.root().unwrap_or(0)];
                Ok(positions.iter().map(|&at| source[at]).collect())
            }
        }
    }

    /// The serial fold of some elements in rank order.
    fn folded(&self, positions: &[usize], offset: usize) -> Result<Vec<T>> {
        let column = |input: &&[T]| positions.iter().map(|&at| input[offset + at]).collect();
        let columns: Vec<Vec<T>> = self.inputs.iter().map(column).collect();
        let mut folded = vec![T::zeroed(); positions.len()];
        // An average is a sum that is divided at the end, as cards do it.
        let fold = if self.op == ReduceOp::Avg { ReduceOp::Sum } else { self.op };
        reduce(Team::global(), Threads::Auto, &columns, &mut folded, fold)?;
        if self.op == ReduceOp::Avg {
            divide(&mut folded, self.ranks());
        }
        Ok(folded)
    }

    /// Compares a sample of every rank's result with what it must be.
    pub(crate) fn compare(&self, results: &[Vec<T>], sampler: &mut Sampler) -> Result<Vec<Seen>> {
        let mut seen = Vec::new();
        let mut drawn = Vec::new();
        for (holder, result) in results.iter().enumerate() {
            if holder == 0 || !self.is_alike() {
                drawn.clear();
                for part in self.parts(holder) {
                    let positions = sampler.positions(part);
                    let expected = self.at(holder, &positions)?;
                    drawn.push((positions, expected));
                }
            }
            for (part, (positions, expected)) in drawn.iter().enumerate() {
                let differs = |&(&at, expected): &(&usize, &T)| !same(&result[at], expected);
                let wrong = positions.iter().zip(expected).find(differs).map(|(&at, _)| at);
                if !positions.is_empty() {
                    seen.push(Seen { holder, part, wrong });
                }
            }
        }
        Ok(seen)
    }
}

/// Whether two results are the same bits. Which of many NaNs one is depends on the order of the operands of
/// an addition, which no one promises.
#[allow(clippy::eq_op)]
fn same<T: Element>(one: &T, other: &T) -> bool {
    bytemuck::bytes_of(one) == bytemuck::bytes_of(other) || (one != one && other != other)
}
