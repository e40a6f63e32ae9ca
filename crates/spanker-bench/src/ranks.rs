// SPDX-License-Identifier: Apache-2.0
//! Collectives between the processes that a launcher has started, beside the prediction and beside `MPI_Allreduce`
//! called from C in the same run.
//!
//! Every rank measures, and the slowest counts. What is compared takes turns (`pairs.rs`), on the same buffer: as many
//! calls, after one that warms up and after a barrier.

mod forecast;

use std::time::{Duration, Instant};

use spanker_fabric_mpi::{MpiFabric, World, plain_all_reduce};
use spanker_scheduler::{
    Collective, DType, Fabric, FabricError, ReduceOp, Registered, Workspace, execute_registered,
    schedule,
};

use crate::collective::{BenchTarget, Case, Method, MethodChoice, TIMEOUT};
use crate::element::{BenchElement, count_wrong, fill};
use crate::error::Result;
use crate::pairs::in_pairs;
use crate::row::{Beside, Measured};
use crate::turns::in_turns;
use forecast::ProbeForecast;

/// All ranks of a launcher, of which this process is one. Every one of them has to measure the same rows.
#[derive(Debug)]
pub struct Ranks {
    fabric: MpiFabric,
    rank: usize,
    choice: MethodChoice,
    timeout: Duration,
}

impl Ranks {
    /// This process as a rank of the world, and how collectives are run. `timeout` is how long one call may take.
    ///
    /// # Errors
    /// What MPI fails with.
    pub fn new(world: &World, choice: MethodChoice, timeout: Option<Duration>) -> Result<Ranks> {
        let (fabric, timeout) = (world.fabric(TIMEOUT)?, timeout.unwrap_or(TIMEOUT));
        Ok(Ranks { fabric, rank: world.rank(), choice, timeout })
    }

    /// Tells the other ranks that this one cannot go on.
    pub fn give_up(&mut self, reason: String) {
        self.fabric.abort(FabricError::Refused { rank: self.rank, reason });
    }
}

impl BenchTarget for Ranks {
    /// Predicts and measures, again if the prediction would be another one afterwards.
    fn measure<T: BenchElement>(&mut self, case: &Case, elements: usize) -> Result<Measured> {
        let bytes = elements * size_of::<T>();
        let methods = forecast::methods(case, self.choice, T::DTYPE);
        let (fabric, timeout) = (&mut self.fabric, self.timeout);
        let mut tries = 1;
        loop {
            let before = ProbeForecast::measure::<T>(case, &methods, bytes, timeout, fabric)?;
            let method = match self.choice {
                MethodChoice::Given(method) => method,
                // All ranks have the same figures, so they choose the same.
                _ => before.cheapest(case, elements, size_of::<T>()),
            };
            let predicted = before.of(method, bytes);
            let mut measured = measure_as::<T>(case, method, elements, timeout, fabric)?;
            let after = ProbeForecast::measure::<T>(case, &[method], bytes, timeout, fabric)?;
            let pair = predicted.zip(after.of(method, bytes));
            let apart = pair.map_or(0.0, |(before, after)| (after / before).ln().abs());
            if apart <= STEADY || tries == TRIES {
                measured.predicted = Some(predicted);
                if let Beside::Ranks { steady, .. } = &mut measured.beside {
                    *steady = apart <= STEADY;
                }
                return Ok(measured);
            }
            tries += 1;
        }
    }
}

/// Tries until a row does not count whose prediction was made on a machine that has changed meanwhile.
const TRIES: usize = 3;
/// How far the probe's times before and after a row may be apart.
const STEADY: f64 = 0.2;

/// The largest of all ranks' values, on every rank: a collective takes as long as on its slowest rank.
fn slowest(fabric: &mut MpiFabric, value: f64) -> Result<f64, FabricError> {
    let mut shared = [value];
    let deadline = Instant::now() + TIMEOUT;
    fabric.native(Collective::AllReduce, &mut shared, ReduceOp::Max, deadline)?;
    Ok(shared[0])
}

/// One rank's buffers for a method of running the collective.
struct Runner<T> {
    plan: Option<spanker_scheduler::Schedule>,
    registered: Registered<T>,
    plain: Vec<T>,
    workspace: Workspace<T>,
    timeout: Duration,
}

/// Calls that share a look at the clock: their deadline is so many times that of one.
const CALLS: usize = 64;

impl<T: BenchElement> Runner<T> {
    fn new(case: &Case, method: Method, elements: usize, timeout: Duration) -> Result<Self> {
        let plan = match method {
            Method::Schedule(algorithm) => {
                Some(schedule(case.collective, algorithm, case.ranks, elements)?)
            }
            _ => None,
        };
        let elements = case.collective.data_len(case.ranks, elements).unwrap_or(elements);
        let (registered, plain) = match plan {
            Some(_) => (elements, 0),
            None => (0, elements),
        };
        Ok(Runner {
            plan,
            timeout,
            registered: Registered::new(registered),
            plain: vec![T::default(); plain],
            workspace: Workspace::new(),
        })
    }

    fn data(&mut self) -> &mut [T] {
        match self.plan {
            None => &mut self.plain,
            Some(_) => self.registered.as_mut_slice(),
        }
    }

    #[inline]
    fn call(
        &mut self,
        case: &Case,
        fabric: &mut MpiFabric,
        deadline: Instant,
    ) -> Result<(), FabricError> {
        match &self.plan {
            None => fabric.native(case.collective, &mut self.plain, case.op, deadline),
            Some(plan) => {
                let (space, buffer) = (&mut self.workspace, &mut self.registered);
                execute_registered(fabric, plan, space, buffer, case.op, deadline)
            }
        }
    }

    /// How long `count` calls take on the slowest rank, after one that warms up.
    fn timed(
        &mut self,
        case: &Case,
        fabric: &mut MpiFabric,
        count: usize,
    ) -> Result<Duration, FabricError> {
        let deadline = Instant::now() + self.timeout;
        self.call(case, fabric, deadline)?;
        // Ranks that wait for MPI's own barrier may keep others from their cores, for whole time slices where it does
        // not give them up.
        fabric.barrier(deadline)?;
        let begun = Instant::now();
        let mut left = count;
        while left > 0 {
            // Looking at the clock for each would cost more than some calls take.
            let deadline = Instant::now() + self.timeout * CALLS as u32;
            for _ in 0..left.min(CALLS) {
                self.call(case, fabric, deadline)?;
            }
            left = left.saturating_sub(CALLS);
        }
        let took = begun.elapsed().as_secs_f64();
        Ok(Duration::from_secs_f64(slowest(fabric, took)?))
    }
}

fn measure_as<T: BenchElement>(
    case: &Case,
    method: Method,
    elements: usize,
    timeout: Duration,
    fabric: &mut MpiFabric,
) -> Result<Measured> {
    let mut runner = Runner::<T>::new(case, method, elements, timeout)?;
    let wrong = checked(case, &mut runner, elements, fabric)?;
    runner.data().fill(T::default());
    let compared = case.collective == Collective::AllReduce
        && T::DTYPE == DType::F32
        && case.op == ReduceOp::Sum;
    let shared = std::cell::RefCell::new((runner, fabric));
    let mut ours = |count: usize| {
        let (runner, fabric) = &mut *shared.borrow_mut();
        Ok(runner.timed(case, fabric, count)?)
    };
    let (seconds, versus, repeats) = if compared {
        let mut theirs = |count: usize| {
            let (runner, fabric) = &mut *shared.borrow_mut();
            let data = bytemuck::cast_slice_mut(runner.data());
            let deadline = Instant::now() + timeout * u32::try_from(count).unwrap_or(u32::MAX);
            plain_all_reduce(fabric, data, 1, deadline)?;
            fabric.barrier(deadline)?;
            let took = plain_all_reduce(fabric, data, count, deadline)?;
            Ok(Duration::from_secs_f64(slowest(fabric, took.as_secs_f64())?))
        };
        let pairs = in_pairs(case.budget, &mut ours, &mut theirs)?;
        (pairs.ours, Some(pairs), pairs.repeats)
    } else {
        let (times, repeats) = in_turns(case.budget, &mut [&mut ours])?;
        (times[0], None, repeats)
    };
    let beside = Beside::Ranks {
        ranks: case.ranks,
        plain_us: versus.map(|pairs| pairs.theirs * 1e6),
        vs_mpi: versus.map(|pairs| pairs.ratio),
        vs_mpi_range: versus.map(|pairs| pairs.range),
        steady: true,
    };
    Ok(Measured { method, elements, seconds, repeats, wrong, predicted: None, beside })
}

/// Runs once on known inputs, and counts the wrong elements over all ranks.
fn checked<T: BenchElement>(
    case: &Case,
    runner: &mut Runner<T>,
    elements: usize,
    fabric: &mut MpiFabric,
) -> Result<usize, FabricError> {
    let rank = fabric.rank();
    fill(case, rank, 0, runner.data());
    runner.call(case, fabric, Instant::now() + runner.timeout)?;
    let found = count_wrong(case, elements, rank, runner.data());
    let mut wrong = [found as i64];
    let deadline = Instant::now() + TIMEOUT;
    fabric.native(Collective::AllReduce, &mut wrong, ReduceOp::Sum, deadline)?;
    Ok(usize::try_from(wrong[0]).unwrap_or(0))
}
