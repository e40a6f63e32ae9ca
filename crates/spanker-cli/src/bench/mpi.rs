// SPDX-License-Identifier: Apache-2.0
//! `spanker bench COLLECTIVE --fabric mpi`: collectives between the processes that a launcher has started, beside
//! the prediction and beside `MPI_Allreduce` called from C in the same run.
//!
//! Every rank measures, the slowest counts, and rank 0 prints. What is compared takes turns (`pairs.rs`), on the same
//! buffer: as many calls, after one that warms up and after all ranks have met.

mod forecast;
mod pairs;
mod row;

use std::time::{Duration, Instant};

use spanker_fabric_mpi::{MpiFabric, World, plain_all_reduce};
use spanker_scheduler::{
    Collective, DType, Fabric, FabricError, ReduceOp, Registered, Threads, Workspace, bf16,
    execute_registered, f16, schedule,
};

use super::data::{Sample, count_wrong};
use super::row::in_turns;
use super::samples::Samples;
use super::{Args, How, PATIENCE, collective, measuring, sizes};
use crate::directory::CardList;
use crate::sizes::human;
use crate::{Unspoken, Usage, output, ranks};
use forecast::{Forecast, Way};
use pairs::in_pairs;
use row::{Measured, Row};

/// Sizes of the rows unless others are wanted.
const SIZES: &str = "4,64,1K,8K,64K,1M,4M,16M";

/// What is measured, apart from the size.
pub(super) struct Case {
    collective: Collective,
    op: ReduceOp,
    ranks: usize,
    patience: Duration,
    budget: Duration,
}

pub(super) fn run(args: &Args, samples: Samples) -> anyhow::Result<()> {
    let (plain, choice) = (collective(args, 0, &[])?, choice(args)?);
    let sizes = sizes(args, plain, SIZES);
    collective(args, 0, &sizes)?;
    if args.threads != Threads::Auto {
        return Err(Usage("--threads is for --fabric host".into()).into());
    }
    let world = ranks::world()?;
    let outcome = on_ranks(args, &world, choice, &sizes, samples);
    match outcome {
        Err(error) if !world.speaks() && !error.is::<Usage>() => Err(Unspoken.into()),
        other => other,
    }
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The cheapest, with MPI's own or among the schedules alone.
    Cheapest {
        native: bool,
    },
    Given(Way),
}

fn choice(args: &Args) -> Result<Choice, Usage> {
    match args.algorithm {
        How::Auto => Ok(Choice::Cheapest { native: true }),
        How::Suited => Ok(Choice::Cheapest { native: false }),
        How::Native => Ok(Choice::Given(Way::Native)),
        How::Messages(algorithm) => Ok(Choice::Given(Way::Schedule(algorithm))),
        How::Fused => Err(Usage("--algorithm fused is for --fabric host".into())),
    }
}

fn on_ranks(
    args: &Args,
    world: &World,
    choice: Choice,
    sizes: &[usize],
    samples: Samples,
) -> anyhow::Result<()> {
    let ranks = world.ranks();
    match &args.cards {
        Some(CardList::Count(count)) if *count != ranks => {
            let text = format!("--cards {count}: there are {ranks} ranks, each of them one card");
            return Err(Usage(text).into());
        }
        Some(CardList::Indices(_)) => {
            return Err(Usage("--cards: a list of cards is for --fabric cards".into()).into());
        }
        _ => {}
    }
    let root = args.root.unwrap_or(0);
    if root >= ranks {
        return Err(Usage(format!("--root {root}: there are ranks 0 to {}", ranks - 1)).into());
    }
    let case = Case {
        collective: collective(args, root, sizes)?,
        op: args.op,
        ranks,
        patience: args.deadline.unwrap_or(PATIENCE),
        budget: Duration::from_millis(args.budget),
    };
    let mut fabric = world.fabric(PATIENCE)?;
    let outcome = rows(args, world, &case, choice, (sizes, samples), &mut fabric);
    // A rank that fails on its own tells the others, so that all end with the same words.
    outcome.map_err(|error| match error.downcast::<FabricError>() {
        Ok(fault) => fault.into(),
        Err(error) => {
            let reason = format!("{error:#}");
            fabric.abort(FabricError::Refused { rank: world.rank(), reason });
            error
        }
    })
}

fn rows(
    args: &Args,
    world: &World,
    case: &Case,
    choice: Choice,
    (sizes, mut samples): (&[usize], Samples),
    fabric: &mut MpiFabric,
) -> anyhow::Result<()> {
    let speaks = world.rank() == 0;
    if speaks && !args.json {
        header(args, world, case)?;
    }
    let (mut wrong, mut unsteady) = (0, Vec::new());
    for (at, &size) in sizes.iter().enumerate() {
        if speaks {
            measuring(size, at, sizes.len());
        }
        let row = measure(args.dtype, case, choice, size, fabric)?;
        wrong += row.wrong;
        unsteady.extend((!row.steady).then(|| human(size)));
        if speaks {
            output::progress_done();
            samples.add(row.sample())?;
            output::line(&if args.json { serde_json::to_string(&row)? } else { row.text() })?;
        }
    }
    anyhow::ensure!(wrong == 0, "{wrong} elements are wrong");
    if speaks && !unsteady.is_empty() {
        output::note(format_args!(
            "this machine changed while these sizes were measured: {}",
            unsteady.join(", ")
        ));
    }
    Ok(())
}

fn measure(
    dtype: DType,
    case: &Case,
    choice: Choice,
    size: usize,
    fabric: &mut MpiFabric,
) -> anyhow::Result<Row> {
    for_type!(dtype, steady_as(case, choice, size, fabric))
}

/// The largest of all ranks' values, on every rank: a collective takes as long as on its slowest rank.
pub(super) fn slowest(fabric: &mut MpiFabric, value: f64) -> Result<f64, FabricError> {
    let mut shared = [value];
    let deadline = Instant::now() + PATIENCE;
    fabric.native(Collective::AllReduce, &mut shared, ReduceOp::Max, deadline)?;
    Ok(shared[0])
}

/// Waits for all ranks, which go on within microseconds of each other. Ranks that wait for MPI's own barrier may
/// keep others from their cores, for whole time slices where it does not give them up.
fn meet(fabric: &mut MpiFabric, deadline: Instant) -> Result<(), FabricError> {
    fabric.barrier(deadline)
}

/// One rank's buffers for a way of running the collective.
pub(super) struct Runner<T> {
    way: Way,
    plan: Option<spanker_scheduler::Schedule>,
    registered: Registered<T>,
    plain: Vec<T>,
    workspace: Workspace<T>,
}

/// Calls that share a look at the clock: their deadline is so many times that of one.
const CALLS: usize = 64;

impl<T: Sample> Runner<T> {
    fn new(case: &Case, way: Way, elements: usize) -> anyhow::Result<Self> {
        let plan = match way {
            Way::Native => None,
            Way::Schedule(algorithm) => {
                Some(schedule(case.collective, algorithm, case.ranks, elements)?)
            }
        };
        let elements = case.collective.data_len(case.ranks, elements).unwrap_or(elements);
        let (registered, plain) = match plan {
            Some(_) => (elements, 0),
            None => (0, elements),
        };
        Ok(Runner {
            way,
            plan,
            registered: Registered::new(registered),
            plain: vec![T::default(); plain],
            workspace: Workspace::new(),
        })
    }

    fn data(&mut self) -> &mut [T] {
        match self.way {
            Way::Native => &mut self.plain,
            Way::Schedule(_) => self.registered.as_mut_slice(),
        }
    }

    #[inline]
    pub(super) fn call(
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
    pub(super) fn timed(
        &mut self,
        case: &Case,
        fabric: &mut MpiFabric,
        count: usize,
    ) -> Result<Duration, FabricError> {
        let deadline = Instant::now() + case.patience;
        self.call(case, fabric, deadline)?;
        meet(fabric, deadline)?;
        let begun = Instant::now();
        let mut left = count;
        while left > 0 {
            // Looking at the clock for each would cost more than some calls take.
            let deadline = Instant::now() + case.patience * CALLS as u32;
            for _ in 0..left.min(CALLS) {
                self.call(case, fabric, deadline)?;
            }
            left = left.saturating_sub(CALLS);
        }
        let took = begun.elapsed().as_secs_f64();
        Ok(Duration::from_secs_f64(slowest(fabric, took)?))
    }
}

/// Tries until a row does not count whose prediction was made on a machine that has changed meanwhile.
const TRIES: usize = 3;
/// How far the probe's times before and after a row may be apart.
const STEADY: f64 = 0.2;

/// Predicts and measures, again if the prediction would be another one afterwards.
fn steady_as<T: Sample>(
    case: &Case,
    choice: Choice,
    size: usize,
    fabric: &mut MpiFabric,
) -> anyhow::Result<Row> {
    let elements = size / size_of::<T>();
    let ways = forecast::ways(case, choice, T::DTYPE);
    let mut tries = 1;
    loop {
        let before = Forecast::measure::<T>(case, &ways, size, fabric)?;
        let way = match choice {
            Choice::Given(way) => way,
            // All ranks have the same figures, so they choose the same.
            Choice::Cheapest { .. } => before.cheapest(case, elements, size_of::<T>()),
        };
        let bytes = elements * size_of::<T>();
        let predicted = before.of(way, bytes);
        let mut measured = measure_as::<T>(case, way, elements, fabric)?;
        let after = Forecast::measure::<T>(case, &[way], size, fabric)?.of(way, bytes);
        let apart = predicted.zip(after).map_or(0.0, |(before, after)| (after / before).ln().abs());
        let steady = apart <= STEADY;
        if steady || tries == TRIES {
            (measured.predicted, measured.steady) = (predicted, steady);
            return Ok(Row::new(case, T::DTYPE, &measured));
        }
        tries += 1;
    }
}

fn measure_as<T: Sample>(
    case: &Case,
    way: Way,
    elements: usize,
    fabric: &mut MpiFabric,
) -> anyhow::Result<Measured> {
    let mut runner = Runner::<T>::new(case, way, elements)?;
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
            let deadline =
                Instant::now() + case.patience * u32::try_from(count).unwrap_or(u32::MAX);
            plain_all_reduce(fabric, data, 1, deadline)?;
            meet(fabric, deadline)?;
            let took = plain_all_reduce(fabric, data, count, deadline)?;
            Ok(Duration::from_secs_f64(slowest(fabric, took.as_secs_f64())?))
        };
        let pairs = in_pairs(case.budget, &mut ours, &mut theirs)?;
        (pairs.ours, Some(pairs), pairs.repeats)
    } else {
        let (times, repeats) = in_turns(case.budget, &mut [&mut ours])?;
        (times[0], None, repeats)
    };
    let (predicted, steady) = (None, true);
    Ok(Measured { way, elements, seconds, versus, predicted, steady, wrong, repeats })
}

/// Runs once on known inputs, and counts the wrong elements over all ranks.
fn checked<T: Sample>(
    case: &Case,
    runner: &mut Runner<T>,
    elements: usize,
    fabric: &mut MpiFabric,
) -> Result<usize, FabricError> {
    let rank = fabric.rank();
    for (i, value) in runner.data().iter_mut().enumerate() {
        *value = T::input(case.op, case.ranks, rank, i);
    }
    runner.call(case, fabric, Instant::now() + case.patience)?;
    let found = count_wrong(case.collective, case.op, case.ranks, elements, rank, runner.data());
    let mut wrong = [found as i64];
    let deadline = Instant::now() + PATIENCE;
    fabric.native(Collective::AllReduce, &mut wrong, ReduceOp::Sum, deadline)?;
    Ok(usize::try_from(wrong[0]).unwrap_or(0))
}

fn header(args: &Args, world: &World, case: &Case) -> anyhow::Result<()> {
    let mut hosts: Vec<&String> = world.hosts().iter().collect();
    hosts.sort();
    hosts.dedup();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    output::line(&format!(
        "# {} over {} ranks on {} (hosts: {}; {cores} cores here); medians; #wrong counts elements over all ranks",
        args.name(),
        case.ranks,
        world.library(),
        hosts.len(),
    ))?;
    output::line("# predicted from other sizes close by, timed by all ranks right before")?;
    output::line(&Row::header())
}
