// SPDX-License-Identifier: Apache-2.0
//! What a graphics processor does, measured: its memory, the way to the host and to its peers, and what a launch
//! takes. Rates are medians over runs that the processor's own clock timed.

use std::time::Instant;

use cudarc::driver::{CudaSlice, DriverError, LaunchConfig, PushKernelArg, sys};
use serde::Serialize;

use crate::{CudaError, Gpu};

const SOURCE: &str = include_str!("probe.cu");
/// Runs of which the median counts.
const RUNS: usize = 15;
/// Repeats of a copy or stream in a run.
const REPEATS: u32 = 4;
/// Launches in a run.
const LAUNCHES: u32 = 500;
/// Bytes of the buffers that are streamed: far more than any cache.
const STREAM_BYTES: usize = 1 << 30;
/// Bytes of the copies to and from the host.
const HOST_BYTES: usize = 256 << 20;
/// Threads of a block of the streams, and 16-byte pieces that each thread moves; as in `probe.cu`.
const THREADS: u32 = 256;
const EACH: u32 = 8;

/// A rate: the median, and the slowest and fastest run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Figure {
    /// Bytes a second in the median run.
    pub bytes_per_second: u64,
    /// In the slowest run.
    pub low: u64,
    /// In the fastest run.
    pub high: u64,
    /// Bytes that were moved at a time.
    pub bytes: u64,
    /// Runs.
    pub runs: usize,
}

impl Figure {
    fn new(bytes: u64, mut seconds: Vec<f64>) -> Figure {
        seconds.sort_by(f64::total_cmp);
        let rate = |seconds: f64| (bytes as f64 / seconds.max(1e-12)) as u64;
        Figure {
            bytes_per_second: rate(seconds[seconds.len() / 2]),
            low: rate(seconds[seconds.len() - 1]),
            high: rate(seconds[0]),
            bytes,
            runs: seconds.len(),
        }
    }
}

/// What was measured of one processor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuProbe {
    /// Its number, as the driver counts.
    pub gpu: usize,
    /// Its name.
    pub name: String,
    /// Copies from memory to memory; what is read and what is written both count.
    pub copy: Figure,
    /// A stream of reads.
    pub read: Figure,
    /// A stream of writes.
    pub write: Figure,
    /// Pinned host memory to the processor.
    pub to_device: Figure,
    /// The processor to pinned host memory.
    pub from_device: Figure,
    /// One of many kernels that do nothing, in a row.
    pub launch_seconds: f64,
    /// A kernel that does nothing, and the wait for it, by the host's clock.
    pub round_trip_seconds: f64,
    /// A copy of 64 bytes from the host, and the wait for it, by the host's clock.
    pub host_latency_seconds: f64,
}

/// What was measured of the way from one processor to another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PeerProbe {
    /// The processor that is read.
    pub from: usize,
    /// The processor that is written.
    pub to: usize,
    /// Whether they reach each other's memory without the host.
    pub direct: bool,
    /// Copies in this direction.
    pub copy: Figure,
    /// One of many copies of 64 bytes in a row.
    pub latency_seconds: f64,
}

fn refused(what: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::call(what, &error)
}

/// Times `work`, of which each repeat moves `bytes`.
fn figure(
    gpu: &Gpu,
    bytes: usize,
    mut work: impl FnMut() -> Result<(), CudaError>,
) -> Result<Figure, CudaError> {
    // The first makes the clocks go up and pages be there.
    for _ in 0..REPEATS {
        work()?;
    }
    let mut seconds = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let run = gpu.timed(|_| (0..REPEATS).try_for_each(|_| work()))?;
        seconds.push(run / f64::from(REPEATS));
    }
    Ok(Figure::new(bytes as u64, seconds))
}

/// Median seconds of `work` by the host's clock.
fn waited(mut work: impl FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    let mut seconds = Vec::with_capacity(LAUNCHES as usize);
    for _ in 0..LAUNCHES {
        let start = Instant::now();
        work()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

/// What copies in a processor's memory move, both ways counted, over two buffers of `bytes`.
///
/// # Errors
/// [`CudaError::Memory`] if two such buffers do not fit, [`CudaError::Call`] if a copy fails.
pub fn copy_rate(gpu: &Gpu, bytes: usize) -> Result<Figure, CudaError> {
    let from = gpu.allocate(bytes, "the source of a copy")?;
    let mut to = gpu.allocate(bytes, "the destination of a copy")?;
    figure(gpu, bytes * 2, || gpu.stream().memcpy_dtod(&from, &mut to).map_err(refused("copy")))
}

/// Measures a processor: its memory, the way to the host, and launches.
///
/// # Errors
/// [`CudaError::Missing`] without the compiler; [`CudaError::Memory`] if the buffers do not fit;
/// [`CudaError::Call`] if something fails on the processor.
pub fn probe(gpu: &Gpu) -> Result<GpuProbe, CudaError> {
    let bytes = STREAM_BYTES.min(usize::try_from(gpu.memory()?.free / 4).unwrap_or(STREAM_BYTES));
    let bytes = (bytes / 4096 * 4096).max(4096);
    let copy = copy_rate(gpu, bytes)?;
    let (read, write) = streams(gpu, bytes)?;
    let (to_device, from_device, host_latency_seconds) = host(gpu, HOST_BYTES.min(bytes))?;
    let (launch_seconds, round_trip_seconds) = launches(gpu)?;
    Ok(GpuProbe {
        gpu: gpu.index(),
        name: gpu.context().name().map_err(refused("name the GPU"))?,
        copy,
        read,
        write,
        to_device,
        from_device,
        launch_seconds,
        round_trip_seconds,
        host_latency_seconds,
    })
}

fn streams(gpu: &Gpu, bytes: usize) -> Result<(Figure, Figure), CudaError> {
    let mut memory = gpu.allocate(bytes, "a stream")?;
    let mut seen = gpu.allocate(4, "the sum of a stream")?;
    let pieces = bytes as u64 / 16;
    let blocks = pieces.div_ceil(u64::from(THREADS * EACH));
    let config = LaunchConfig {
        grid_dim: (u32::try_from(blocks).unwrap_or(u32::MAX >> 1), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    let kernel = gpu.kernel("probe", SOURCE, &[], "read")?;
    let read = figure(gpu, bytes, || {
        let mut launch = gpu.stream().launch_builder(&kernel);
        launch.arg(&memory).arg(&pieces).arg(&mut seen);
        // SAFETY: the kernel reads `pieces` times 16 bytes of the memory and may write the sum.
        unsafe { launch.launch(config) }.map(drop).map_err(refused("read a stream"))
    })?;
    let (kernel, bits) = (gpu.kernel("probe", SOURCE, &[], "write")?, 0u32);
    let write = figure(gpu, bytes, || {
        let mut launch = gpu.stream().launch_builder(&kernel);
        launch.arg(&mut memory).arg(&pieces).arg(&bits);
        // SAFETY: the kernel writes `pieces` times 16 bytes of the memory.
        unsafe { launch.launch(config) }.map(drop).map_err(refused("write a stream"))
    })?;
    Ok((read, write))
}

fn host(gpu: &Gpu, bytes: usize) -> Result<(Figure, Figure, f64), CudaError> {
    let pin = |bytes: usize| {
        // SAFETY: the memory is filled before anybody reads it.
        unsafe { gpu.context().alloc_pinned_with_flags::<u8>(bytes, 0) }
            .map_err(refused("pin host memory"))
    };
    let (mut pinned, mut small) = (pin(bytes)?, pin(64)?);
    for memory in [&mut pinned, &mut small] {
        memory.as_mut_slice().map_err(refused("use pinned memory"))?.fill(0);
    }
    let mut memory = gpu.allocate(bytes, "copies from the host")?;
    let stream = gpu.stream();
    let to = figure(gpu, bytes, || {
        stream.memcpy_htod(&pinned, &mut memory).map_err(refused("copy from the host"))
    })?;
    let from = figure(gpu, bytes, || {
        stream.memcpy_dtoh(&memory, &mut pinned).map_err(refused("copy to the host"))
    })?;
    let latency = waited(|| {
        stream.memcpy_htod(&small, &mut memory).map_err(refused("copy from the host"))?;
        gpu.synchronize()
    })?;
    Ok((to, from, latency))
}

fn launches(gpu: &Gpu) -> Result<(f64, f64), CudaError> {
    let kernel = gpu.kernel("probe", SOURCE, &[], "nothing")?;
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    let launch = || {
        // SAFETY: the kernel has no arguments and does nothing.
        let launched = unsafe { gpu.stream().launch_builder(&kernel).launch(config) };
        launched.map(drop).map_err(refused("launch a kernel"))
    };
    let round_trip = waited(|| launch().and_then(|()| gpu.synchronize()))?;
    let mut seconds = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let run = gpu.timed(|_| (0..LAUNCHES).try_for_each(|_| launch()))?;
        seconds.push(run / f64::from(LAUNCHES));
    }
    seconds.sort_by(f64::total_cmp);
    Ok((seconds[RUNS / 2], round_trip))
}

/// Measures the way from one processor to another.
///
/// # Errors
/// [`CudaError::Memory`] if the buffers do not fit, [`CudaError::Call`] if a copy fails.
pub fn probe_peer(from: &Gpu, to: &Gpu) -> Result<PeerProbe, CudaError> {
    let direct = open_to(from, to).is_ok();
    let source = from.allocate(HOST_BYTES, "copies between GPUs")?;
    let mut target = to.allocate(HOST_BYTES, "copies between GPUs")?;
    let copy = figure(to, HOST_BYTES, || {
        to.stream().memcpy_dtod(&source, &mut target).map_err(refused("copy between GPUs"))
    })?;
    let latency_seconds = latency(from, to, &source, &mut target)?;
    Ok(PeerProbe { from: from.index(), to: to.index(), direct, copy, latency_seconds })
}

fn latency(
    from: &Gpu,
    to: &Gpu,
    source: &CudaSlice<u8>,
    target: &mut CudaSlice<u8>,
) -> Result<f64, CudaError> {
    from.synchronize()?;
    let mut seconds = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let run = to.timed(|to| {
            (0..LAUNCHES).try_for_each(|_| {
                let small = source.slice(0..64);
                to.stream().memcpy_dtod(&small, target).map_err(refused("copy between GPUs"))
            })
        })?;
        seconds.push(run / f64::from(LAUNCHES));
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[RUNS / 2])
}

/// Opens the memory of `from` to `to`, so that copies need not pass the host.
fn open_to(from: &Gpu, to: &Gpu) -> Result<(), CudaError> {
    use cudarc::driver::result::device::get_default_mem_pool;
    let failed = refused("open a GPU's memory to another");
    to.context().bind_to_thread().map_err(&failed)?;
    // SAFETY: both contexts are alive, and the pool is the one that the processor's buffers come from.
    unsafe {
        match sys::cuCtxEnablePeerAccess(from.context().cu_ctx(), 0) {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            answer => answer.result().map_err(&failed)?,
        }
        let pool = get_default_mem_pool(from.context().cu_device()).map_err(&failed)?;
        let access = sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: i32::try_from(to.index()).unwrap_or(i32::MAX),
            },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        sys::cuMemPoolSetAccess(pool, &raw const access, 1).result().map_err(&failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::assert_compiles;

    #[test]
    fn the_probes_kernels_compile() {
        assert_compiles("probe", SOURCE, &[]);
        assert!(SOURCE.contains(&format!("#define EACH {EACH}\n")));
        assert!(SOURCE.contains(&format!("__launch_bounds__({THREADS})")));
    }

    #[test]
    fn a_figure_is_the_median_between_the_slowest_and_the_fastest() {
        let figure = Figure::new(1000, vec![4.0, 1.0, 2.0]);
        assert_eq!((figure.bytes_per_second, figure.low, figure.high), (500, 250, 1000));
        assert_eq!((figure.bytes, figure.runs), (1000, 3));
    }
}
