// SPDX-License-Identifier: Apache-2.0
//! The fused path: collectives over host buffers without messages.

use std::hint::black_box;
use std::time::Duration;

use spanker_scheduler::host::{
    ReduceError, all_gather, all_reduce, all_to_all, broadcast, gather, memory_limit, reduce,
    reduce_scatter, scatter, threads_for,
};
use spanker_scheduler::{Collective, Team, Threads, chunk};

use super::Case;
use super::data::{Buffer, Sample, count_wrong};
use super::origin;
use super::row::{Row, Times, in_turns, time};

/// The buffers of one collective: in-place ones have no outputs.
struct Stage<T> {
    inputs: Vec<Buffer<T>>,
    outputs: Vec<Buffer<T>>,
}

impl<T: Sample> Stage<T> {
    fn new(case: &Case, len: usize) -> Self {
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

    /// Runs once on known inputs and counts the wrong elements over all cards.
    fn count_wrong(&mut self, case: &Case, team: &Team, len: usize) -> Result<usize, ReduceError> {
        let (n, op, collective) = (case.cards, case.op, case.collective);
        let root = collective.root().unwrap_or(0);
        let chunked = matches!(collective, Collective::AllGather | Collective::Gather { .. });
        let alone = self.inputs.len() == 1;
        for (card, input) in self.inputs.iter_mut().enumerate() {
            let first = if chunked { chunk(len, n, card).start } else { 0 };
            input.fill(op, if alone { root } else { card }, first);
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
    let mut peers = Peers::<T>::new(case, len);
    let mut subject = |count: usize| -> anyhow::Result<Duration> {
        let mut outcome = Ok(());
        let elapsed = time(count, || outcome = stage.call(case, team, case.threads));
        outcome?;
        Ok(elapsed)
    };
    let times = peers.compare(case, team, threads, &mut subject)?;
    Ok(Row::new(case, T::DTYPE, "fused", threads, len, wrong, &times))
}

/// What a collective is compared with: the limit of the memory and the original loop, on buffers of
/// the same size.
pub(super) struct Peers<T> {
    cards: Vec<Buffer<T>>,
    chunks: Vec<Buffer<T>>,
}

impl<T: Sample> Peers<T> {
    pub(super) fn new(case: &Case, len: usize) -> Self {
        let n = case.cards;
        // A scatter or gather touches one buffer's worth; the others touch every card's.
        let count = match case.collective {
            Collective::Scatter { .. } | Collective::Gather { .. } => 1,
            _ => n,
        };
        let chunks = match case.collective {
            Collective::AllGather => {
                (0..n).map(|card| Buffer::new(chunk(len, n, card).len())).collect()
            }
            _ => Vec::new(),
        };
        Peers { cards: Buffer::group(count, len), chunks }
    }

    /// Times `subject` in turns with its peers.
    pub(super) fn compare(
        &mut self,
        case: &Case,
        team: &Team,
        threads: usize,
        subject: &mut super::row::Subject<'_>,
    ) -> anyhow::Result<Times> {
        let Peers { cards, chunks } = self;
        let cards = std::cell::RefCell::new(cards);
        let mut limit = |count: usize| -> anyhow::Result<Duration> {
            let cards = &mut *cards.borrow_mut();
            let mut outcome = Ok(());
            let elapsed =
                time(count, || outcome = memory_limit(team, Threads::Exactly(threads), cards));
            outcome?;
            Ok(elapsed)
        };
        let mut reduce_loop = T::origin_all_reduce(case.op).map(|all_reduce| {
            let cards = &cards;
            move |count: usize| Ok(time(count, || all_reduce(&mut cards.borrow_mut())))
        });
        let mut gather_loop = |count: usize| {
            Ok(time(count, || {
                black_box(origin::all_gather(black_box(chunks)));
            }))
        };
        let mut subjects: Vec<&mut super::row::Subject<'_>> = vec![subject, &mut limit];
        match (case.collective, &mut reduce_loop) {
            (Collective::AllReduce, Some(reduce_loop)) => subjects.push(reduce_loop),
            (Collective::AllGather, _) => subjects.push(&mut gather_loop),
            _ => {}
        }
        let (medians, repeats) = in_turns(&mut subjects)?;
        let origin = medians.get(2).copied();
        Ok(Times { subject: medians[0], limit: medians[1], origin, repeats })
    }
}
