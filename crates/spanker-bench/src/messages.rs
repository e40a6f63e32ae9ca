// SPDX-License-Identifier: Apache-2.0
//! Collectives as schedules over the in-process fabric: a thread for each rank, which runs what it is sent and
//! waits while something else is measured.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use spanker_scheduler::{
    Algorithm, Fabric, FabricError, Registered, Schedule, Workspace, execute_registered, inproc,
    schedule,
};

use crate::collective::{Case, TIMEOUT};
use crate::element::{BenchElement, count_wrong, fill};
use crate::error::{BenchError, Result};
use crate::turns::{Subject, timed};

/// What a rank is to do: one call on known inputs, or so many calls that are timed together.
#[derive(Debug, Clone, Copy)]
enum Order {
    Check,
    Run(usize),
}

/// How long a rank took, and how many of its elements were wrong.
type Outcome = Result<(Duration, usize), FabricError>;

/// Starts a thread for each rank, counts the wrong elements over all of them, and hands `measure` the subject to time.
pub(crate) fn run<T: BenchElement, R>(
    case: &Case,
    algorithm: Algorithm,
    len: usize,
    measure: impl FnOnce(&mut Subject<'_>) -> Result<R>,
) -> Result<(usize, R)> {
    let plan = &schedule(case.collective, algorithm, case.ranks, len)?;
    std::thread::scope(|scope| {
        // When this function ends early, orders end and the threads with them.
        let mut ranks = Vec::with_capacity(case.ranks);
        for end in inproc::group(case.ranks) {
            let (orders, received) = channel();
            let (done, outcomes) = channel();
            std::thread::Builder::new()
                .spawn_scoped(scope, move || serve::<T>(end, case, plan, &received, &done))
                .map_err(|error| BenchError::Threads(error.to_string()))?;
            ranks.push((orders, outcomes));
        }
        let (_, wrong) = all(&ranks, Order::Check)?;
        let found = measure(&mut |count| Ok(all(&ranks, Order::Run(count))?.0))?;
        Ok((wrong, found))
    })
}

/// Has all ranks do something: how long rank 0 took, and wrong elements over all.
fn all(ranks: &[(Sender<Order>, Receiver<Outcome>)], order: Order) -> Result<(Duration, usize)> {
    let gone = |rank: usize| BenchError::Threads(format!("that of rank {rank} is gone"));
    for (rank, (orders, _)) in ranks.iter().enumerate() {
        orders.send(order).map_err(|_| gone(rank))?;
    }
    let (mut first, mut wrong) = (Duration::ZERO, 0);
    for (rank, (_, outcomes)) in ranks.iter().enumerate() {
        let (took, bad) = outcomes.recv().map_err(|_| gone(rank))??;
        wrong += bad;
        if rank == 0 {
            first = took;
        }
    }
    Ok((first, wrong))
}

/// One rank's side, until there are no more orders.
fn serve<T: BenchElement>(
    mut end: inproc::Inproc,
    case: &Case,
    plan: &Schedule,
    orders: &Receiver<Order>,
    done: &Sender<Outcome>,
) {
    let rank = end.rank();
    let mut data = Registered::<T>::new(plan.data_len());
    let mut workspace = Workspace::new();
    for order in orders {
        let deadline = Instant::now() + TIMEOUT;
        let mut call = |data: &mut Registered<T>| {
            execute_registered(&mut end, plan, &mut workspace, data, case.op, deadline)
        };
        let outcome = match order {
            Order::Check => {
                fill(case, rank, 0, data.as_mut_slice());
                let outcome = call(&mut data);
                let wrong = count_wrong(case, plan.elements(), rank, data.as_slice());
                // Zeros stay zeros however often they are summed.
                data.as_mut_slice().fill(T::default());
                outcome.map(|()| (Duration::ZERO, wrong))
            }
            // The ranks wake one after another; an untimed call brings them together.
            Order::Run(count) => {
                call(&mut data).and_then(|()| Ok((timed(count, || call(&mut data))?, 0)))
            }
        };
        if done.send(outcome).is_err() {
            return;
        }
    }
}
