// SPDX-License-Identifier: Apache-2.0
//! The message path: the same collectives as schedules over the in-process fabric, a thread per rank.

use std::cell::RefCell;
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use spanker_scheduler::{
    Algorithm, Fabric, FabricError, Registered, Schedule, Team, Workspace, execute_registered,
    inproc, schedule,
};

use super::data::{Sample, count_wrong};
use super::fused::{Stage, beside_peers};
use super::row::Row;
use super::{Case, PATIENCE};

pub(super) fn measure<T: Sample>(
    case: &Case,
    algorithm: Algorithm,
    team: &Team,
    len: usize,
) -> anyhow::Result<Row> {
    let plan = schedule(case.collective, algorithm, case.cards, len)?;
    let wrong = run_once::<T>(case, &plan)?;
    // The limit is what as many threads can do as there are ranks and cores for them.
    let threads = case.cards.min(team.threads());
    let stage = RefCell::new(Stage::<T>::new(case, len));
    let turns = Turns::new(case.cards);
    let times = std::thread::scope(|scope| {
        for end in inproc::group(case.cards) {
            let (plan, turns) = (&plan, &turns);
            start(scope, move || turns.serve::<T>(end, case, plan));
        }
        let times = beside_peers(&stage, case, team, threads, &mut |count| turns.take(count));
        turns.end();
        times
    })?;
    Ok(Row::new(case, T::DTYPE, algorithm.name(), case.cards, len, wrong, &times))
}

/// Starts a rank's thread. A machine that gives no more threads ends the bench: the ranks that have
/// started wait for the others.
fn start<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> R + Send + 'scope,
) -> ScopedJoinHandle<'scope, R> {
    std::thread::Builder::new().spawn_scoped(scope, work).unwrap_or_else(|error| {
        crate::output::error(format_args!("a thread for each rank: {error}"));
        std::process::exit(1)
    })
}

/// Runs once on known inputs and counts the wrong elements over all ranks.
fn run_once<T: Sample>(case: &Case, plan: &Schedule) -> anyhow::Result<usize> {
    let deadline = Instant::now() + PATIENCE;
    let outcomes: Vec<Result<usize, FabricError>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = inproc::group(case.cards)
            .into_iter()
            .map(|mut end| {
                start(scope, move || {
                    let rank = end.rank();
                    let mut data = Registered::<T>::new(plan.data_len());
                    for (i, value) in data.as_mut_slice().iter_mut().enumerate() {
                        *value = T::input(case.op, case.cards, rank, i);
                    }
                    let mut workspace = Workspace::new();
                    execute_registered(
                        &mut end,
                        plan,
                        &mut workspace,
                        &mut data,
                        case.op,
                        deadline,
                    )?;
                    let (n, len) = (case.cards, plan.elements());
                    Ok(count_wrong(case.collective, case.op, n, len, rank, data.as_slice()))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    });
    let mut wrong = 0;
    for outcome in outcomes {
        wrong += outcome?;
    }
    Ok(wrong)
}

/// Lets the measuring thread have the ranks run some calls, and wait while others are measured.
struct Turns {
    gate: Barrier,
    order: Mutex<Option<usize>>,
    outcome: Mutex<Result<Duration, FabricError>>,
}

impl Turns {
    fn new(ranks: usize) -> Self {
        Turns {
            gate: Barrier::new(ranks + 1),
            order: Mutex::new(None),
            outcome: Mutex::new(Ok(Duration::ZERO)),
        }
    }

    /// Has all ranks run `count` calls and returns how long rank 0 took.
    fn take(&self, count: usize) -> anyhow::Result<Duration> {
        *self.order.lock().unwrap_or_else(PoisonError::into_inner) = Some(count);
        self.gate.wait();
        self.gate.wait();
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(outcome.clone()?)
    }

    /// Sends the ranks home.
    fn end(&self) {
        *self.order.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.gate.wait();
    }

    /// One rank's side: runs what is asked for until there is nothing more.
    fn serve<T: Sample>(&self, mut end: inproc::Inproc, case: &Case, plan: &Schedule) {
        let mut data = Registered::<T>::new(plan.data_len());
        let mut workspace = Workspace::new();
        loop {
            self.gate.wait();
            let order = *self.order.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(count) = order else { return };
            let deadline = Instant::now() + PATIENCE;
            let mut call =
                || execute_registered(&mut end, plan, &mut workspace, &mut data, case.op, deadline);
            // The ranks wake one after another; an untimed call brings them together.
            let outcome = call().and_then(|()| {
                let begun = Instant::now();
                for _ in 0..count {
                    call()?;
                }
                Ok(begun.elapsed())
            });
            if end.rank() == 0 {
                *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = outcome;
            }
            self.gate.wait();
        }
    }
}
