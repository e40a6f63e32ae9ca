// SPDX-License-Identifier: Apache-2.0
//! `--algorithm native`: collectives between GPUs by NCCL, one rank for each GPU, by the host's clock.

use std::time::Instant;

use serde::Serialize;
use spanker_cuda::{CudaError, CudaSlice, Gpu, Nccl, gpu_count};
use spanker_scheduler::{Collective, DType, ReduceOp, bf16, chunk, f16};

use super::super::Args;
use super::super::data::{Sample, count_wrong};
use super::super::samples::{self, Samples};
use super::{REPEATS, TURNS, count, median};
use crate::sizes::human;
use crate::{Usage, output};

/// A line of the table, and the schema of `--json`.
#[derive(Debug, Serialize)]
struct Row {
    collective: &'static str,
    fabric: &'static str,
    gpus: usize,
    dtype: &'static str,
    op: &'static str,
    algorithm: &'static str,
    library: String,
    bytes_per_card: usize,
    count: usize,
    time_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    wrong: usize,
    repeats: usize,
}

pub(super) fn run(
    args: &Args,
    chosen: Collective,
    sizes: &[usize],
    mut samples: Samples,
) -> anyhow::Result<()> {
    let known = matches!(
        chosen,
        Collective::AllReduce
            | Collective::AllGather
            | Collective::ReduceScatter
            | Collective::Broadcast { .. }
    );
    if !known {
        let text = format!(
            "{chosen}: NCCL is used for all-reduce, all-gather, reduce-scatter and broadcast"
        );
        return Err(Usage(text).into());
    }
    let there = gpu_count()?;
    let ranks = count(args, there)?;
    if ranks > there {
        let text = format!("--cards {ranks}: NCCL has a rank for each GPU, and there are {there}");
        return Err(Usage(text).into());
    }
    if args.root.is_some_and(|root| root >= ranks) {
        return Err(Usage(format!("--root: there are ranks 0 to {}", ranks - 1)).into());
    }
    let gpus = (0..ranks).map(Gpu::open).collect::<Result<Vec<Gpu>, CudaError>>()?;
    let mut group = Nccl::new(gpus)?;
    let library = format!("NCCL {}", group.version()?);
    if !args.json {
        output::line(&format!(
            "# {} over {ranks} GPUs by {library}; wall time; medians; #wrong counts elements over all ranks",
            args.name()
        ))?;
        output::line(&format!(
            "{:>8} {:>11} {:>5} {:>9} {:>11} {:>8} {:>8} {:>7}",
            "size", "count", "type", "op", "time (us)", "algbw", "busbw", "#wrong"
        ))?;
    }
    let mut wrong = 0;
    for &size in sizes {
        output::progress(&format!("measuring {}", human(size)));
        let row = measure(&mut group, args.dtype, chosen, args.op, size, &library);
        output::progress_done();
        let row = row?;
        wrong += row.wrong;
        let (bytes, microseconds) = (row.bytes_per_card, row.time_us);
        samples.add(samples::Sample { ranks, bytes, microseconds })?;
        output::line(&if args.json { serde_json::to_string(&row)? } else { text(&row) })?;
    }
    anyhow::ensure!(wrong == 0, "{wrong} elements are wrong");
    Ok(())
}

fn text(row: &Row) -> String {
    format!(
        "{:>8} {:>11} {:>5} {:>9} {:>11.2} {:>8.1} {:>8.1} {:>7}",
        human(row.bytes_per_card),
        row.count,
        row.dtype,
        row.op,
        row.time_us,
        row.algbw_gbps,
        row.busbw_gbps,
        row.wrong,
    )
}

fn measure(
    group: &mut Nccl,
    dtype: DType,
    collective: Collective,
    op: ReduceOp,
    size: usize,
    library: &str,
) -> anyhow::Result<Row> {
    let (elements, seconds, wrong) = for_type!(dtype, measure_as(group, collective, op, size))?;
    let ranks = group.gpus().len();
    let bytes = elements * dtype.size();
    let algbw = bytes as f64 / seconds / 1e9;
    Ok(Row {
        collective: collective.name(),
        fabric: "cuda",
        gpus: ranks,
        dtype: dtype.name(),
        op: if collective.reduces() { op.name() } else { "none" },
        algorithm: "native",
        library: library.to_owned(),
        bytes_per_card: bytes,
        count: elements,
        time_us: seconds * 1e6,
        algbw_gbps: algbw,
        busbw_gbps: algbw * collective.bus_factor(ranks),
        wrong,
        repeats: TURNS * REPEATS as usize,
    })
}

/// Elements, median seconds of one collective, and wrong elements of the first.
fn measure_as<T: Sample>(
    group: &mut Nccl,
    collective: Collective,
    op: ReduceOp,
    size: usize,
) -> anyhow::Result<(usize, f64, usize)> {
    let ranks = group.gpus().len();
    // NCCL's parts are all of one length.
    let len = (size / size_of::<T>() / ranks).max(1) * ranks;
    let bytes = len * size_of::<T>();
    let mut wholes = Vec::with_capacity(ranks);
    let mut parts = Vec::with_capacity(ranks);
    for (rank, gpu) in group.gpus().iter().enumerate() {
        let input: Vec<T> = (0..len).map(|i| T::input(op, ranks, rank, i)).collect();
        let mut whole = gpu.allocate(bytes, "a rank's buffer")?;
        let mut part = gpu.allocate(bytes / ranks, "a rank's part")?;
        gpu.stream().memcpy_htod(bytemuck::cast_slice::<T, u8>(&input), &mut whole)?;
        let mine = bytemuck::cast_slice::<T, u8>(&input[chunk(len, ranks, rank)]);
        gpu.stream().memcpy_htod(mine, &mut part)?;
        wholes.push(whole);
        parts.push(part);
    }
    call(group, collective, T::DTYPE, op, &mut wholes, &mut parts)?;
    settle(group)?;
    let mut wrong = 0;
    for (rank, gpu) in group.gpus().iter().enumerate() {
        let mut found = vec![T::default(); len];
        let (from, range) = match collective {
            Collective::ReduceScatter => (&parts[rank], chunk(len, ranks, rank)),
            _ => (&wholes[rank], 0..len),
        };
        let place = bytemuck::cast_slice_mut::<T, u8>(&mut found[range]);
        gpu.stream().memcpy_dtoh(from, place)?;
        gpu.synchronize()?;
        wrong += count_wrong(collective, op, ranks, len, rank, &found);
    }
    let mut times = Vec::with_capacity(TURNS);
    for _ in 0..TURNS {
        let start = Instant::now();
        for _ in 0..REPEATS {
            call(group, collective, T::DTYPE, op, &mut wholes, &mut parts)?;
        }
        settle(group)?;
        times.push(start.elapsed().as_secs_f64() / f64::from(REPEATS));
    }
    Ok((len, median(times), wrong))
}

fn settle(group: &Nccl) -> Result<(), CudaError> {
    group.gpus().iter().try_for_each(Gpu::synchronize)
}

fn call(
    group: &mut Nccl,
    collective: Collective,
    dtype: DType,
    op: ReduceOp,
    wholes: &mut [CudaSlice<u8>],
    parts: &mut [CudaSlice<u8>],
) -> Result<(), CudaError> {
    match collective {
        Collective::AllGather => {
            let from: Vec<_> = parts.iter().map(CudaSlice::as_view).collect();
            let mut to: Vec<_> = wholes.iter_mut().map(CudaSlice::as_view_mut).collect();
            group.all_gather(&from, &mut to)
        }
        Collective::ReduceScatter => {
            let from: Vec<_> = wholes.iter().map(CudaSlice::as_view).collect();
            let mut to: Vec<_> = parts.iter_mut().map(CudaSlice::as_view_mut).collect();
            group.reduce_scatter(&from, &mut to, dtype, op)
        }
        _ => {
            let mut all: Vec<_> = wholes.iter_mut().map(CudaSlice::as_view_mut).collect();
            match collective {
                Collective::Broadcast { root } => group.broadcast(&mut all, root),
                _ => group.all_reduce(&mut all, dtype, op),
            }
        }
    }
}
