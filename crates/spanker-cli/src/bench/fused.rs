// SPDX-License-Identifier: Apache-2.0
//! The fused path: collectives over host buffers without messages.

use std::cell::RefCell;

use spanker_scheduler::host::{
    ReduceError, all_gather, all_reduce, all_to_all, broadcast, gather, memory_limit, reduce,
    reduce_scatter, scatter, threads_for,
};
use spanker_scheduler::{Collective, Team, Threads, chunk};

use super::Case;
use super::data::{Buffer, Sample, count_wrong};
use super::origin;
use super::row::{Row, Subject, Times, in_turns, timed};

/// The buffers of one collective: in-place ones have no outputs.
pub(super) struct Stage<T> {
    inputs: Vec<Buffer<T>>,
    outputs: Vec<Buffer<T>>,
}

impl<T: Sample> Stage<T> {
    pub(super) fn new(case: &Case, len: usize) -> Self {
        let n = case.cards;
        let chunks = || (0..n).map(|card| Buffer::new(chunk(len, n, card).len())).collect();
        let blocks = || (0..n).map(|card| Buffer::new(n * chunk(len, n, card).len())).collect();
        let (inputs, outputs) = match case.collective {
            Collective::ReduceScatter => (Buffer::group(n, len), chunks()),
            Collective::AllGather => (chunks(), Buffer::group(n, len)),
            Collective::Broadcast { .. } => (Buffer::group(1, len), Buffer::group(n - 1, len)),
            Collective::Reduce { .. } => (Buffer::group(n, len), Buffer::group(1, len)),
            Collective::Gather { .. } => (chunks(), Buffer::group(1, len)),
            Collective::Scatter { .. } => (Buffer::group(1, len), chunks()),
            Collective::AllToAll => (Buffer::group(n, len), blocks()),
            _ => (Buffer::group(n, len), Vec::new()),
        };
        Stage { inputs, outputs }
    }

    fn call(&mut self, case: &Case, team: &Team, threads: Threads) -> Result<(), ReduceError> {
        let Stage { inputs, outputs } = self;
        match case.collective {
            Collective::ReduceScatter => reduce_scatter(team, threads, inputs, outputs, case.op),
            Collective::AllGather => all_gather(team, threads, inputs, outputs),
            Collective::Broadcast { .. } => broadcast(team, threads, inputs[0].as_ref(), outputs),
            Collective::Reduce { .. } => {
                reduce(team, threads, inputs, outputs[0].as_mut(), case.op)
            }
            Collective::Gather { .. } => gather(team, threads, inputs, outputs[0].as_mut()),
            Collective::Scatter { .. } => scatter(team, threads, inputs[0].as_ref(), outputs),
            Collective::AllToAll => all_to_all(team, threads, inputs, outputs),
            _ => all_reduce(team, threads, inputs, case.op),
        }
    }

    /// The read-modify-write stream over the bytes that the collective reads or writes, whichever are
    /// more.
    pub(super) fn limit(&mut self, team: &Team, threads: usize) -> Result<(), ReduceError> {
        let weight = |buffers: &[Buffer<T>]| {
            let elements: usize = buffers.iter().map(|buffer| buffer.as_ref().len()).sum();
            // Of equal ones, those that are in fewer pieces.
            (elements, std::cmp::Reverse(buffers.len()))
        };
        let inputs = weight(&self.inputs) >= weight(&self.outputs);
        let buffers = if inputs { &mut self.inputs } else { &mut self.outputs };
        memory_limit(team, Threads::Exactly(threads), buffers)
    }

    /// Whether the first version had a loop for this.
    pub(super) fn has_origin(case: &Case) -> bool {
        match case.collective {
            Collective::AllReduce => T::origin_all_reduce(case.op).is_some(),
            Collective::AllGather => true,
            _ => false,
        }
    }

    /// That loop, and a copy of its result to each card.
    pub(super) fn origin(&mut self, case: &Case) -> Result<(), ReduceError> {
        match (case.collective, T::origin_all_reduce(case.op)) {
            (Collective::AllReduce, Some(all_reduce)) => all_reduce(&mut self.inputs),
            _ => origin::all_gather(&self.inputs, &mut self.outputs),
        }
        Ok(())
    }

    /// Runs once on known inputs and counts the wrong elements over all cards.
    fn count_wrong(&mut self, case: &Case, team: &Team, len: usize) -> Result<usize, ReduceError> {
        let (n, op, collective) = (case.cards, case.op, case.collective);
        let root = collective.root().unwrap_or(0);
        let chunked = matches!(collective, Collective::AllGather | Collective::Gather { .. });
        let alone = self.inputs.len() == 1;
        for (card, input) in self.inputs.iter_mut().enumerate() {
            let first = if chunked { chunk(len, n, card).start } else { 0 };
            input.fill(op, n, if alone { root } else { card }, first);
        }
        self.call(case, team, case.threads)?;
        let results = if self.outputs.is_empty() { &self.inputs } else { &self.outputs };
        let mut wrong = 0;
        for (place, result) in results.iter().enumerate() {
            // Outputs that hold one chunk are checked where the chunk lies in the whole buffer.
            let mut whole;
            let (rank, data) = match collective {
                Collective::ReduceScatter | Collective::Scatter { .. } => {
                    whole = vec![T::default(); len];
                    whole[chunk(len, n, place)].copy_from_slice(result.as_ref());
                    (place, &whole[..])
                }
                Collective::Reduce { root } | Collective::Gather { root } => {
                    (root, result.as_ref())
                }
                _ => (place, result.as_ref()),
            };
            wrong += count_wrong(collective, op, n, len, rank, data);
        }
        Ok(wrong)
    }
}

pub(super) fn measure<T: Sample>(case: &Case, team: &Team, len: usize) -> anyhow::Result<Row> {
    let mut stage = Stage::<T>::new(case, len);
    let wrong = stage.count_wrong(case, team, len)?;
    for buffer in stage.inputs.iter_mut().chain(&mut stage.outputs) {
        buffer.clear();
    }
    let threads = threads_for(team, case.threads, case.cards * len * size_of::<T>());
    // The peers run over the very same buffers: where they lie in the caches is then no difference.
    let stage = RefCell::new(stage);
    let mut subject = |count: usize| {
        let stage = &mut *stage.borrow_mut();
        timed(count, || stage.call(case, team, case.threads))
    };
    let times = beside_peers(&stage, case, team, threads, &mut subject)?;
    Ok(Row::new(case, T::DTYPE, "fused", threads, len, wrong, &times))
}

/// Times `subject` in turns with the limit of the memory and, where there is one, the original loop,
/// which run over `stage`.
pub(super) fn beside_peers<T: Sample>(
    stage: &RefCell<Stage<T>>,
    case: &Case,
    team: &Team,
    threads: usize,
    subject: &mut Subject<'_>,
) -> anyhow::Result<Times> {
    let mut limit = |count: usize| {
        let stage = &mut *stage.borrow_mut();
        timed(count, || stage.limit(team, threads))
    };
    let mut origin = |count: usize| {
        let stage = &mut *stage.borrow_mut();
        timed(count, || stage.origin(case))
    };
    let mut subjects: Vec<&mut Subject<'_>> = vec![subject, &mut limit];
    if Stage::<T>::has_origin(case) {
        subjects.push(&mut origin);
    }
    let (medians, repeats) = in_turns(case.budget, &mut subjects)?;
    let origin = medians.get(2).copied();
    Ok(Times { subject: medians[0], limit: medians[1], origin, repeats })
}
