// SPDX-License-Identifier: Apache-2.0
//! Collectives over buffers in host memory: fused, without messages, or as messages between threads; beside the limit
//! that the memory sets and beside the original loop.

use std::cell::RefCell;

use spanker_scheduler::host::{
    ReduceError, all_gather, all_reduce, all_to_all, broadcast, gather, memory_limit, reduce,
    reduce_scatter, scatter, threads_for,
};
use spanker_scheduler::{Algorithm, Collective, Team, Threads, chunk, inproc};

use crate::collective::{BenchTarget, Case, Method, MethodChoice};
use crate::element::{BenchElement, Buffer, count_wrong, fill, origin_all_gather};
use crate::error::{BenchError, Result};
use crate::messages;
use crate::row::{Beside, Measured};
use crate::turns::{Subject, in_turns, timed};

/// Buffers in host memory.
#[derive(Debug)]
pub struct HostMemory {
    threads: Threads,
    /// Nothing for the schedule that suits the size.
    method: Option<Method>,
    own_team: Option<Team>,
}

impl HostMemory {
    /// Threads of the fused path, and how collectives are run. A barrier moves nothing: it is always messages.
    #[must_use]
    pub fn new(collective: Collective, threads: Threads, choice: MethodChoice) -> HostMemory {
        let method = match (collective, choice) {
            (Collective::Barrier, MethodChoice::Auto | MethodChoice::Given(Method::Fused)) => None,
            (_, MethodChoice::Auto) => Some(Method::Fused),
            (_, MethodChoice::Messages | MethodChoice::Given(Method::Native)) => None,
            (_, MethodChoice::Given(method)) => Some(method),
        };
        let more = |count: &usize| *count > Team::global().threads();
        let own_team = match threads {
            Threads::Exactly(count) => Some(count).filter(more).map(Team::new),
            _ => None,
        };
        HostMemory { threads, method, own_team }
    }

    /// Whether collectives need no messages.
    #[must_use]
    pub fn is_fused(&self) -> bool {
        self.method == Some(Method::Fused)
    }

    /// Refuses what the machine cannot hold, instead of being killed half-way.
    ///
    /// # Errors
    /// [`BenchError::DoesNotFit`].
    pub fn check_memory(&self, case: &Case, largest: usize) -> Result<()> {
        // Inputs, outputs and the original loop's buffer; messages are also on the way and being folded,
        // and every rank has a thread with its stack and its part of the schedule.
        let (copies, each) = if self.is_fused() { (3, 0) } else { (8, 1 << 20) };
        let needed = largest.saturating_mul(copies).saturating_add(each).saturating_mul(case.ranks);
        match spanker_engine::memory::available() {
            Some(available) if needed > available => Err(BenchError::DoesNotFit(format!(
                "{} cards need about {} MiB, and {} MiB are available",
                case.ranks,
                needed >> 20,
                available >> 20
            ))),
            _ => Ok(()),
        }
    }

    fn team(&self) -> &Team {
        self.own_team.as_ref().unwrap_or_else(|| Team::global())
    }

    fn fused<T: BenchElement>(&self, case: &Case, len: usize) -> Result<Measured> {
        let (team, threads) = (self.team(), self.threads);
        let mut stage = Stage::<T>::new(case, len);
        let wrong = stage.count_wrong(case, team, threads, len)?;
        stage.clear();
        let used = threads_for(team, threads, case.ranks * len * size_of::<T>());
        // The peers run over the very same buffers: where they lie in the caches is then no difference.
        let stage = RefCell::new(stage);
        let mut subject = |count: usize| {
            let stage = &mut *stage.borrow_mut();
            Ok(timed(count, || stage.call(case, team, threads))?)
        };
        let mut measured = beside_peers(&stage, case, team, used, &mut subject)?;
        (measured.wrong, measured.elements) = (wrong, len);
        Ok(measured)
    }

    fn messages<T: BenchElement>(
        &self,
        case: &Case,
        by: Algorithm,
        len: usize,
    ) -> Result<Measured> {
        // The limit is what as many threads can do as there are ranks and cores for them.
        let threads = case.ranks.min(self.team().threads());
        let stage = RefCell::new(Stage::<T>::new(case, len));
        let (wrong, mut measured) = messages::run::<T, _>(case, by, len, |subject| {
            beside_peers(&stage, case, self.team(), threads, subject)
        })?;
        (measured.wrong, measured.elements, measured.method) = (wrong, len, Method::Schedule(by));
        if let Beside::Host { threads, .. } = &mut measured.beside {
            *threads = case.ranks;
        }
        Ok(measured)
    }
}

impl BenchTarget for HostMemory {
    fn measure<T: BenchElement>(&mut self, case: &Case, len: usize) -> Result<Measured> {
        match self.method {
            Some(Method::Schedule(algorithm)) => self.messages::<T>(case, algorithm, len),
            Some(_) => self.fused::<T>(case, len),
            None => {
                let algorithm = inproc::suited(case.collective, case.ranks, len * size_of::<T>());
                self.messages::<T>(case, algorithm, len)
            }
        }
    }
}

/// The buffers of one collective: in-place ones have no outputs.
struct Stage<T> {
    inputs: Vec<Buffer<T>>,
    outputs: Vec<Buffer<T>>,
}

impl<T: BenchElement> Stage<T> {
    fn new(case: &Case, len: usize) -> Self {
        let n = case.ranks;
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

    /// Writes zeros, which stay zeros however often they are summed.
    fn clear(&mut self) {
        for buffer in self.inputs.iter_mut().chain(&mut self.outputs) {
            buffer.as_mut().fill(T::default());
        }
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
    fn limit(&mut self, team: &Team, threads: usize) -> Result<(), ReduceError> {
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
    fn has_origin(case: &Case) -> bool {
        match case.collective {
            Collective::AllReduce => T::origin_all_reduce(case.op).is_some(),
            Collective::AllGather => true,
            _ => false,
        }
    }

    /// That loop, and a copy of its result to each card.
    fn origin(&mut self, case: &Case) -> Result<(), ReduceError> {
        match (case.collective, T::origin_all_reduce(case.op)) {
            (Collective::AllReduce, Some(all_reduce)) => all_reduce(&mut self.inputs),
            _ => origin_all_gather(&self.inputs, &mut self.outputs),
        }
        Ok(())
    }

    /// Runs once on known inputs and counts the wrong elements over all cards.
    fn count_wrong(
        &mut self,
        case: &Case,
        team: &Team,
        threads: Threads,
        len: usize,
    ) -> Result<usize, ReduceError> {
        let (n, collective) = (case.ranks, case.collective);
        let root = collective.root().unwrap_or(0);
        let chunked = matches!(collective, Collective::AllGather | Collective::Gather { .. });
        let alone = self.inputs.len() == 1;
        for (card, input) in self.inputs.iter_mut().enumerate() {
            let first = if chunked { chunk(len, n, card).start } else { 0 };
            fill(case, if alone { root } else { card }, first, input.as_mut());
        }
        self.call(case, team, threads)?;
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
            wrong += count_wrong(case, len, rank, data);
        }
        Ok(wrong)
    }
}

/// Times `subject` in turns with the limit of the memory and, where there is one, the original loop,
/// which run over `stage`.
fn beside_peers<T: BenchElement>(
    stage: &RefCell<Stage<T>>,
    case: &Case,
    team: &Team,
    threads: usize,
    subject: &mut Subject<'_>,
) -> Result<Measured> {
    let mut limit = |count: usize| {
        let stage = &mut *stage.borrow_mut();
        Ok(timed(count, || stage.limit(team, threads))?)
    };
    let mut origin = |count: usize| {
        let stage = &mut *stage.borrow_mut();
        Ok(timed(count, || stage.origin(case))?)
    };
    let mut subjects: Vec<&mut Subject<'_>> = vec![subject, &mut limit];
    if Stage::<T>::has_origin(case) {
        subjects.push(&mut origin);
    }
    let (medians, repeats) = in_turns(case.budget, &mut subjects)?;
    let (seconds, limit, origin) = (medians[0], medians[1], medians.get(2).copied());
    let beside = Beside::Host {
        cards: case.ranks,
        threads,
        limit_fraction: (case.collective != Collective::Barrier).then_some(limit / seconds),
        origin_speedup: origin.map(|origin| origin / seconds),
        limit_us: limit * 1e6,
        origin_us: origin.map(|origin| origin * 1e6),
    };
    let (method, predicted) = (Method::Fused, None);
    Ok(Measured { method, elements: 0, seconds, repeats, wrong: 0, predicted, beside })
}
