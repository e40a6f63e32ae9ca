// SPDX-License-Identifier: Apache-2.0
//! `spanker bench COLLECTIVE --fabric cards`: collectives on the cards that are there, beside the prediction.
//!
//! Cards in card time are measured by their own clocks: one run says it all, because card time repeats. Others
//! are measured by the host's clock, many repeats in one submission, median of several runs.

mod forecast;
mod row;

use std::time::Duration;

use spanker_runtime::{Pace, SpankerControl};
use spanker_scheduler::device::{Timing, examine};
use spanker_scheduler::{
    Algorithm, Collective, DType, Deadline, DeviceError, DeviceGroup, Error, ReduceOp, Threads,
    Topology, bf16, f16,
};

use super::data::{Sample, count_wrong};
use super::samples::Samples;
use super::{Args, How, collective, measuring, sizes};
use crate::{Usage, directory, fault, output};
use forecast::Forecast;
use row::{Measured, Row};

/// Sizes of the rows unless others are wanted.
const SIZES: &str = "1K,8K,64K,1M,4M";
/// Runs by the host's clock of which the median counts.
const RUNS: u32 = 7;
/// Repeats in one submission at most.
const MOST_REPEATS: u128 = 4096;
/// How long one run may take in all, as waited by the host.
const PATIENCE: Duration = Duration::from_secs(600);

/// What is measured, apart from the size.
struct Case<'a> {
    cards: &'a Topology<SpankerControl>,
    group: DeviceGroup<'a>,
    pace: Pace,
    collective: Collective,
    op: ReduceOp,
    forecast: Forecast,
    deadline: Deadline,
    budget: Duration,
}

pub(super) fn run(args: &Args, samples: Samples) -> anyhow::Result<()> {
    let wanted = algorithm(args)?;
    let folder = directory::find();
    let plain = collective(args, 0, &[])?;
    let sizes = sizes(args, plain, SIZES);
    collective(args, 0, &sizes)?;
    let indices = directory::chosen(&folder, args.cards.as_ref())?;
    let root = match args.root {
        None => 0,
        Some(card) => indices.iter().position(|&index| index == card).ok_or_else(|| {
            Usage(format!("--root {card}: the group is {}", directory::list(&indices)))
        })?,
    };
    let cards = directory::open(&folder, &indices)?;
    let blamed = |error: anyhow::Error| directory::blamed(&folder, &indices, error);
    let told = |error: DeviceError| fault::told(&cards, error);
    let group = cards.group().map_err(|error| match error {
        Error::Device(error) => told(error),
        other => other.into(),
    })?;
    let pace = pace(&cards).map_err(blamed)?;
    let kind = collective(args, root, &sizes)?;
    let case = Case {
        forecast: Forecast::new(&cards, pace, kind, wanted).map_err(blamed)?,
        cards: &cards,
        group,
        pace,
        collective: kind,
        op: args.op,
        deadline: Deadline {
            detect: args.deadline.unwrap_or(Deadline::USUAL.detect),
            total: PATIENCE,
            ..Deadline::USUAL
        },
        budget: Duration::from_millis(args.budget),
    };
    if !args.json {
        header(args, &case)?;
    }
    rows(args, &case, &sizes, samples)
}

fn rows(args: &Args, case: &Case<'_>, sizes: &[usize], mut samples: Samples) -> anyhow::Result<()> {
    let mut wrong = 0;
    for (at, &size) in sizes.iter().enumerate() {
        if samples.is_useless() {
            break;
        }
        measuring(size, at, sizes.len());
        let row = measure(args.dtype, case, size);
        output::progress_done();
        let row = row.map_err(|error| fault::told(case.cards, error))?;
        wrong += row.wrong;
        samples.add(row.sample())?;
        output::line(&if args.json { serde_json::to_string(&row)? } else { row.text() })?;
    }
    if wrong == 0 {
        return Ok(());
    }
    // A card that fails a test on its own is the one to leave out.
    let fails = |&place: &usize| !examine(&case.cards.sails()[place]).unwrap_or(false);
    let Some(place) = (0..case.cards.n_sails()).find(fails) else {
        anyhow::bail!("{wrong} elements are wrong, and every card passes a test on its own");
    };
    let culprit = case.cards.indices()[place];
    let left = case.cards.indices().iter().copied().filter(|&index| index != culprit);
    let hint = directory::go_on(&left.collect::<Vec<_>>());
    anyhow::bail!("{wrong} elements are wrong: card {culprit} gives wrong answers{hint}")
}

/// The algorithm that is asked for; nothing for the cheapest.
fn algorithm(args: &Args) -> Result<Option<Algorithm>, Usage> {
    if args.threads != Threads::Auto {
        return Err(Usage("--threads is for --fabric host".into()));
    }
    match args.algorithm {
        How::Auto => Ok(None),
        How::Messages(algorithm) => Ok(Some(algorithm)),
        How::Native => {
            Err(Usage("--algorithm native is for --fabric mpi and --fabric cuda".into()))
        }
        How::Fused | How::Suited => {
            Err(Usage("--algorithm fused and messages are for --fabric host".into()))
        }
    }
}

/// What the cards' clocks show. Cards of different kinds are measured by the host's clock.
fn pace(cards: &Topology<SpankerControl>) -> anyhow::Result<Pace> {
    let mut paces = Vec::new();
    for sail in cards.sails() {
        paces.push(sail.info()?.pace);
    }
    let first = paces.first().copied().unwrap_or(Pace::Real);
    Ok(if paces.iter().all(|&pace| pace == first) { first } else { Pace::Real })
}

fn measure(dtype: DType, case: &Case<'_>, size: usize) -> Result<Row, DeviceError> {
    for_type!(dtype, measure_as(case, size))
}

fn measure_as<T: Sample>(case: &Case<'_>, size: usize) -> Result<Row, DeviceError> {
    let elements = size / size_of::<T>();
    let (algorithm, predicted) = case.forecast.of(elements, size_of::<T>(), case.op);
    let (wrong, once) = checked::<T>(case, algorithm, elements)?;
    let (seconds, repeats) = match once.card_ps {
        Some(ps) => (ps as f64 / 1e12, 1),
        None => timed::<T>(case, algorithm, elements, once.wall)?,
    };
    let measured = Measured { algorithm, elements, seconds, repeats, predicted, wrong };
    Ok(Row::new(case, T::DTYPE, &measured))
}

/// Runs once on known inputs, and counts the wrong elements over all cards.
fn checked<T: Sample>(
    case: &Case<'_>,
    algorithm: Algorithm,
    elements: usize,
) -> Result<(usize, Timing), DeviceError> {
    let (group, op, ranks) = (&case.group, case.op, case.group.ranks());
    let mut call = group.prepare(case.collective, algorithm, elements, T::DTYPE, op, 1)?;
    let length = call.schedule().data_len();
    for rank in 0..ranks {
        let input: Vec<T> = (0..length).map(|i| T::input(op, ranks, rank, i)).collect();
        call.write(rank, bytemuck::cast_slice(&input))?;
    }
    let timing = call.run(&case.deadline)?;
    let mut wrong = 0;
    let mut data = vec![T::default(); length];
    for rank in 0..ranks {
        call.read(rank, bytemuck::cast_slice_mut(&mut data))?;
        wrong += count_wrong(case.collective, op, ranks, elements, rank, &data);
    }
    Ok((wrong, timing))
}

/// Median seconds of one collective by the host's clock, and how many were run. Buffers are zeros, which
/// stay zeros however often they are summed.
fn timed<T: Sample>(
    case: &Case<'_>,
    algorithm: Algorithm,
    elements: usize,
    once: Duration,
) -> Result<(f64, usize), DeviceError> {
    let share = case.budget / RUNS;
    let repeats = (share.as_nanos() / once.as_nanos().max(1)).clamp(1, MOST_REPEATS) as usize;
    let prepare = |repeats: usize| {
        case.group.prepare(case.collective, algorithm, elements, T::DTYPE, case.op, repeats)
    };
    // The first run had the host's round trips in it, so many more may fit.
    let first = prepare(repeats)?.run(&case.deadline)?.wall / repeats as u32;
    let repeats = (share.as_nanos() / first.as_nanos().max(1)).clamp(1, MOST_REPEATS) as usize;
    let mut call = prepare(repeats)?;
    let mut times = Vec::with_capacity(RUNS as usize);
    for _ in 0..RUNS {
        times.push(call.run(&case.deadline)?.wall.as_secs_f64() / repeats as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], repeats * RUNS as usize))
}

fn header(args: &Args, case: &Case<'_>) -> anyhow::Result<()> {
    let (cards, nature) = (directory::list(case.cards.indices()), directory::nature(case.pace));
    output::line(&format!(
        "# {} on cards {cards} ({nature}); #wrong counts elements over all cards",
        args.name()
    ))?;
    output::line(&Row::header(case))
}
