// SPDX-License-Identifier: Apache-2.0
//! `spanker bench COLLECTIVE --fabric cuda`: reductions between logical cards that share one GPU, beside copies in the
//! same memory and the prediction; between GPUs with NCCL.
//!
//! Copies and reductions take turns in one run, are timed by the GPU's own clock, and medians count.

mod check;
mod native;
mod row;

use spanker_cuda::{CudaViewMut, Gpu, GpuProbe, Tuning, all_reduce_tuned, probe, reduce};
use spanker_scheduler::{Collective, DType, ReduceOp, Team, Threads, bf16, f16, host};

use super::samples::Samples;
use super::{Args, How, collective, measuring, sizes};
use crate::directory::CardList;
use crate::{Usage, output};
use check::{Drawn, same};
use row::{Measured, Row};

/// Sizes of the rows unless others are wanted.
const SIZES: &str = "1M,16M,64M,256M";
/// Turns of which the median counts.
const TURNS: usize = 15;
/// Copies, and reductions, in a turn.
const REPEATS: u32 = 8;
/// Inputs repeat after this many elements, a prime, so that large ones are there at once.
const PERIOD: usize = 1_048_573;
/// Kernels laid out differently, to find the fastest.
const TUNING_VARIABLE: &str = "SPANKER_CUDA_REDUCE";

/// What is measured, apart from the size.
struct Case {
    gpu: Gpu,
    probe: GpuProbe,
    collective: Collective,
    cards: usize,
    op: ReduceOp,
    tuning: Tuning,
}

pub(super) fn run(args: &Args, mut samples: Samples) -> anyhow::Result<()> {
    if args.threads != Threads::Auto || args.deadline.is_some() {
        return Err(Usage("--threads and --deadline are not for --fabric cuda".into()).into());
    }
    if args.check {
        return check::run(args);
    }
    let plain = collective(args, 0, &[])?;
    let sizes = sizes(args, plain, SIZES);
    let chosen = collective(args, args.root.unwrap_or(0), &sizes)?;
    match args.algorithm {
        How::Native => return native::run(args, chosen, &sizes, samples),
        How::Auto | How::Fused => {}
        _ => return Err(Usage("--fabric cuda has --algorithm fused and native".into()).into()),
    }
    if !matches!(chosen, Collective::AllReduce | Collective::Reduce { .. }) {
        let text = format!("{chosen}: logical cards of one GPU have all-reduce and reduce");
        return Err(Usage(text).into());
    }
    let cards = count(args, 4)?;
    if args.root.is_some_and(|root| root >= cards) {
        return Err(Usage(format!("--root: there are cards 0 to {}", cards - 1)).into());
    }
    let tuning = std::env::var(TUNING_VARIABLE).unwrap_or_default();
    let tuning = Tuning::parse(&tuning).map_err(|error| Usage(error.to_string()))?;
    let gpu = Gpu::open(0)?;
    output::progress("measuring copies");
    let probe = probe(&gpu);
    output::progress_done();
    let case = Case { gpu, probe: probe?, collective: chosen, cards, op: args.op, tuning };
    if !args.json {
        header(args, &case)?;
    }
    let mut wrong = 0;
    for (at, &size) in sizes.iter().enumerate() {
        if samples.is_useless() {
            break;
        }
        measuring(size, at, sizes.len());
        let row = measure(args.dtype, &case, size);
        output::progress_done();
        let row = row?;
        wrong += row.wrong;
        samples.add(row.sample())?;
        output::line(&if args.json { serde_json::to_string(&row)? } else { row.text() })?;
    }
    anyhow::ensure!(wrong == 0, "{wrong} elements are wrong");
    Ok(())
}

/// How many cards are asked for.
fn count(args: &Args, usual: usize) -> Result<usize, Usage> {
    match &args.cards {
        None => Ok(usual),
        Some(CardList::Count(count)) if (1..=spanker_cuda::MOST_BUFFERS).contains(count) => {
            Ok(*count)
        }
        Some(CardList::Count(count)) => Err(Usage(format!(
            "--cards {count}: a GPU is shared by 1 to {}",
            spanker_cuda::MOST_BUFFERS
        ))),
        Some(CardList::Indices(_)) => {
            Err(Usage("--cards: --fabric cuda takes a number, not a list".into()))
        }
    }
}

fn header(args: &Args, case: &Case) -> anyhow::Result<()> {
    let (name, cards) = (&case.probe.name, case.cards);
    let copy = case.probe.copy.bytes_per_second as f64 / 1e9;
    output::line(&format!(
        "# {} over {cards} logical cards that share GPU 0 ({name}): one GPU emulates {cards}; copies move \
         {copy:.0} GB/s; medians; #wrong counts elements over all cards",
        args.name()
    ))?;
    output::line(&Row::header())
}

fn measure(dtype: DType, case: &Case, size: usize) -> anyhow::Result<Row> {
    for_type!(dtype, measure_as(case, size))
}

/// The inputs of one card: a period of drawn values, over and over.
fn inputs<T: Drawn>(card: usize, len: usize) -> Vec<T> {
    let mut values: Vec<T> = (0..len.min(PERIOD)).map(|i| T::tame(check::draw(card, i))).collect();
    while values.len() < len {
        let more = PERIOD.min(len - values.len());
        values.extend_from_within(..more);
    }
    values
}

fn measure_as<T: Drawn>(case: &Case, size: usize) -> anyhow::Result<Row> {
    let (gpu, cards) = (&case.gpu, case.cards);
    let len = size / size_of::<T>();
    let bytes = len * size_of::<T>();
    // Every card begins on a boundary of its own memory, as separate allocations would.
    let stride = bytes.next_multiple_of(256);
    let inputs: Vec<Vec<T>> = (0..cards).map(|card| inputs(card, len)).collect();
    let mut expected = inputs[0].clone();
    host::reduce(Team::global(), Threads::Auto, &inputs, &mut expected, case.op)?;
    let mut kept = gpu.allocate(stride * cards, "the cards' inputs")?;
    let mut work = gpu.allocate(stride * cards, "the cards' buffers")?;
    for (card, values) in inputs.iter().enumerate() {
        let mut place = kept.slice_mut(card * stride..card * stride + bytes);
        gpu.stream().memcpy_htod(bytemuck::cast_slice::<T, u8>(values), &mut place)?;
    }
    gpu.stream().memcpy_dtod(&kept, &mut work)?;
    reduce_once(case, T::DTYPE, &mut work, stride, bytes)?;
    gpu.synchronize()?;
    let mut wrong = 0;
    let mut found = vec![T::default(); len];
    for (card, own) in inputs.iter().enumerate() {
        let place = work.slice(card * stride..card * stride + bytes);
        gpu.stream().memcpy_dtoh(&place, bytemuck::cast_slice_mut::<T, u8>(&mut found))?;
        gpu.synchronize()?;
        let right = match case.collective {
            Collective::Reduce { root } if root != card => own,
            _ => &expected,
        };
        let folds = cards - 1;
        let bad = |&(&a, &b): &(&T, &T)| !same(a, b, case.op, folds);
        wrong += found.iter().zip(right).filter(bad).count();
    }
    let (mut copies, mut folds) = (Vec::with_capacity(TURNS), Vec::with_capacity(TURNS));
    for _ in 0..TURNS {
        copies.push(gpu.timed(|gpu| {
            (0..REPEATS).try_for_each(|_| {
                let copied = gpu.stream().memcpy_dtod(&kept, &mut work);
                copied.map_err(|error| spanker_cuda::CudaError::Call {
                    what: "copy".into(),
                    message: error.to_string(),
                })
            })
        })?);
        folds.push(gpu.timed(|_| {
            (0..REPEATS).try_for_each(|_| reduce_once(case, T::DTYPE, &mut work, stride, bytes))
        })?);
    }
    let [copy, seconds] = [copies, folds].map(|times| median(times) / f64::from(REPEATS));
    let copy_rate = (stride * cards * 2) as f64 / copy;
    Ok(Row::new(case, T::DTYPE, &Measured { elements: len, seconds, copy_rate, wrong }))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn reduce_once(
    case: &Case,
    dtype: DType,
    work: &mut spanker_cuda::CudaSlice<u8>,
    stride: usize,
    bytes: usize,
) -> Result<(), spanker_cuda::CudaError> {
    let mut places: Vec<CudaViewMut<'_, u8>> =
        work.as_view_mut().chunks_exact_mut(stride.max(1)).collect();
    let mut buffers: Vec<CudaViewMut<'_, u8>> =
        places.iter_mut().map(|place| place.slice_mut(0..bytes)).collect();
    match case.collective {
        Collective::Reduce { root } => reduce(&case.gpu, &mut buffers, dtype, case.op, root),
        _ => all_reduce_tuned(&case.gpu, &mut buffers, dtype, case.op, case.tuning),
    }
}
