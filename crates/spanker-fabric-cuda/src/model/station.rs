// SPDX-License-Identifier: Apache-2.0
//! One processor that goes through lines: the kernel, and what it needs besides them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DeviceRepr, DriverError, LaunchConfig, PinnedHostSlice,
    PushKernelArg, sys,
};
use spanker_model::Quant;

use super::lines::{Line, THREADS, TILE_ROWS, kind, many_rows};
use super::{streams, told};
use crate::{CudaError, Gpu};

const KERNEL: &str = concat!(
    include_str!("numbers.cu"),
    include_str!("weights.cu"),
    include_str!("vector.cu"),
    include_str!("rows.cu"),
    include_str!("attend.cu"),
    include_str!("stream.cu"),
    include_str!("kernel.cu"),
);
/// Blocks of the kernel on each multiprocessor, if their memory allows it.
const MOST_BLOCKS: u32 = 2;
/// Positions whose scores are kept in shared memory.
const SCORES: usize = 8192;
/// Blocks of inputs that several blocks of the kernel put together: enough for 256 Ki values.
pub(super) const COUNTERS: u32 = 8192;
/// The oldest processors that copy into shared memory by themselves.
const OLDEST: (u32, u32) = (8, 0);
/// Shared memory from which on a kernel has to ask for it.
const USUAL_SHARED: u32 = 48 << 10;
/// Shared memory that a kernel has besides what it is given.
const OWN_SHARED: u32 = 4 << 10;
/// Where weights that come ahead of time may begin.
const RING_ALIGNMENT: u32 = 128;
/// The type of weights that may come ahead of time, as a bit.
const Q4_0: u64 = 1 << 2;

/// A processor, ready for lines.
pub(crate) struct Station {
    gpu: Arc<Gpu>,
    /// The types of weights that its kernel knows, as bits.
    types: u64,
    /// The kernel, and the one whose weights come ahead of time.
    kernels: [Compiled; 2],
    /// Shared memory of a block at most.
    most_shared: u32,
    meet: CudaSlice<u8>,
    met: u64,
    counters: CudaSlice<u8>,
    ids: CudaSlice<u8>,
    scores: CudaSlice<u8>,
    scores_each: u32,
    tile_rows: u32,
    staging: PinnedHostSlice<u8>,
    /// Where the kernel notes when lines begin, once somebody wanted to know, and its address while somebody does.
    noted: Option<CudaSlice<u8>>,
    times: u64,
}

/// A kernel, and the shared memory that it may have so far.
#[derive(Default)]
struct Compiled {
    function: Option<CudaFunction>,
    allowed: u32,
}

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Streamed,
}

impl Kind {
    fn threads(self) -> u32 {
        match self {
            Kind::Plain => THREADS,
            Kind::Streamed => streams::THREADS,
        }
    }
}

/// Lines in the processor's memory.
pub(crate) struct Loaded {
    lines: CudaSlice<u8>,
    count: u32,
    kind: Kind,
    shared: u32,
    blocks: u32,
    /// The first line whose weights come ahead of time: its number and one, or 0. And where they come to.
    first: u32,
    ring: u32,
    told: Option<Told>,
}

impl Loaded {
    /// Bytes of the processor's memory.
    pub(crate) fn bytes(&self) -> u64 {
        let told = self.told.as_ref().map_or(0, |told| told.numbers.len() + told.other.len());
        (self.lines.len() + told) as u64
    }
}

/// What blocks tell each other: numbers of one step and of the next, which take turns. In a step, those of the next become
/// unwritten again.
struct Told {
    numbers: CudaSlice<u8>,
    /// Bytes of a step's.
    each: u64,
    /// The same lines with the second half of the numbers.
    other: CudaSlice<u8>,
    is_other: AtomicBool,
}

/// What the kernel is told besides its lines, as it declares it.
#[repr(C)]
#[derive(Clone, Copy)]
struct StepArgument {
    past: u32,
    token: u32,
    ids: u64,
    meet: u64,
    met: u64,
    scores: u64,
    scores_each: u32,
    streamed: u32,
    ring: u32,
    reserved: u32,
    unwritten: u64,
    pieces: u64,
    times: u64,
}

// SAFETY: numbers in C's order; there is nothing between them that has no value.
unsafe impl DeviceRepr for StepArgument {}

impl Station {
    /// A processor for steps of so many tokens, after as many as the context has.
    pub(crate) fn new(gpu: Arc<Gpu>, context: usize, batch: usize) -> Result<Station, CudaError> {
        if gpu.capability() < OLDEST {
            let ((major, minor), (least, _)) = (gpu.capability(), OLDEST);
            return Err(CudaError::Unsupported(format!(
                "GPU {} has compute capability {major}.{minor}: models and products need {least}.0 or newer",
                gpu.index()
            )));
        }
        let most = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let most = gpu
            .context()
            .attribute(most)
            .map_err(|error| CudaError::call("ask for the shared memory of a block", &error))?;
        let most_shared = u32::try_from(most).unwrap_or(USUAL_SHARED);
        let fits = |rows: &&u32| many_rows(Quant::Q4_0, 0, **rows) <= most_shared;
        let tile_rows = TILE_ROWS.iter().find(fits).copied().unwrap_or(TILE_ROWS[1]);
        let words = |count: usize, what: &str| gpu.allocate(count.max(1) * 4, what);
        let each = context.next_multiple_of(4);
        let beyond = if context > SCORES { Self::most_blocks(&gpu) as usize * each } else { 0 };
        let (meet, counters) =
            (gpu.allocate(8, "a counter")?, words(COUNTERS as usize, "counters")?);
        let (ids, scores) = (words(batch, "tokens")?, words(beyond, "scores of attention")?);
        let staging = pinned(&gpu, 1 << 20)?;
        let scores_each = context.min(SCORES) as u32;
        Ok(Station {
            gpu,
            types: 0,
            kernels: [Compiled::default(), Compiled::default()],
            most_shared,
            meet,
            met: 0,
            counters,
            ids,
            scores,
            scores_each,
            tile_rows,
            staging,
            noted: None,
            times: 0,
        })
    }

    fn most_blocks(gpu: &Gpu) -> u32 {
        gpu.multiprocessors() * MOST_BLOCKS
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Where the counters are.
    pub(super) fn counters(&self) -> u64 {
        address(&self.counters, &self.gpu)
    }

    /// Positions whose scores fit into shared memory.
    pub(super) fn scores(&self) -> u32 {
        self.scores_each
    }

    /// Rows of weights of a tile that meets many rows of inputs.
    pub(crate) fn tile_rows(&self) -> u32 {
        self.tile_rows
    }

    /// Has the kernel know a type of weights.
    pub(crate) fn knows(&mut self, quant: Quant) {
        let bit = quant.ggml_id().filter(|&id| id < 64).map_or(0, |id| 1 << id);
        if self.types & bit == 0 {
            self.types |= bit;
            self.kernels = [Compiled::default(), Compiled::default()];
        }
    }

    fn kernel(&mut self, kind: Kind) -> Result<CudaFunction, CudaError> {
        let compiled = &mut self.kernels[kind as usize];
        if compiled.function.is_none() {
            let options = options(self.types, self.tile_rows, kind);
            let name = if kind == Kind::Plain { "card" } else { "stream" };
            let function = self.gpu.kernel(name, KERNEL, &options, "spanker_card")?;
            *compiled = Compiled { function: Some(function), allowed: USUAL_SHARED };
        }
        compiled.function.clone().ok_or(CudaError::NoDevice)
    }

    /// How many blocks of a kernel a multiprocessor has at once if each has so much shared memory.
    fn fit(&mut self, kind: Kind, shared: u32) -> Result<u32, CudaError> {
        let kernel = self.kernel(kind)?;
        let compiled = &mut self.kernels[kind as usize];
        if shared > compiled.allowed {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            kernel.set_attribute(most, shared as i32).map_err(|error| {
                let what = format!("a kernel with {shared} bytes of shared memory");
                CudaError::call(what, &error)
            })?;
            compiled.allowed = shared;
        }
        kernel
            .occupancy_max_active_blocks_per_multiprocessor(kind.threads(), shared as usize, None)
            .map_err(|error| CudaError::call("ask how many blocks fit", &error))
    }

    /// How many blocks run at once if each has so much shared memory.
    pub(crate) fn blocks(&mut self, shared: u32) -> Result<u32, CudaError> {
        match self.fit(Kind::Plain, shared)?.min(MOST_BLOCKS) {
            0 => Err(CudaError::Unsupported(format!(
                "a kernel with {shared} bytes of shared memory does not fit this GPU"
            ))),
            fit => Ok(fit * self.gpu.multiprocessors()),
        }
    }

    /// The same of the kernel whose weights come ahead of time, or 0 where it does not fit.
    pub(crate) fn streams(&mut self, shared: u32) -> Result<u32, CudaError> {
        let shared = shared.next_multiple_of(RING_ALIGNMENT) + streams::RING;
        if self.types & Q4_0 == 0 || shared + OWN_SHARED > self.most_shared {
            return Ok(0);
        }
        let all = self.all_shared();
        Ok(self.fit(Kind::Streamed, all)?.min(1) * self.gpu.multiprocessors())
    }

    /// Shared memory of a block that has a multiprocessor for itself. It takes more than it needs: what it leaves
    /// becomes first-level cache, with which it is slower.
    fn all_shared(&self) -> u32 {
        self.most_shared.saturating_sub(OWN_SHARED)
    }

    /// Puts lines into the processor's memory. `blocks` is what they were made for.
    pub(crate) fn load(
        &mut self,
        lines: &[Line],
        shared: u32,
        blocks: u32,
    ) -> Result<Loaded, CudaError> {
        let (count, kind) = (lines.len() as u32, Kind::Plain);
        let lines = self.copied(lines)?;
        Ok(Loaded { lines, count, kind, shared, blocks, first: 0, ring: 0, told: None })
    }

    /// The same for the kernel whose weights come ahead of time.
    pub(crate) fn load_streamed(
        &mut self,
        lines: &[Line],
        shared: u32,
    ) -> Result<Loaded, CudaError> {
        let blocks = self.streams(shared)?;
        if blocks == 0 {
            return Err(CudaError::Unsupported(format!(
                "a kernel with {shared} bytes of shared memory besides weights does not fit this GPU"
            )));
        }
        let ring = shared.next_multiple_of(RING_ALIGNMENT);
        let first = lines.iter().position(|line| line.kind == kind::STREAMED);
        let first = first.map_or(0, |at| at as u32 + 1);
        let (count, kind, shared) = (lines.len() as u32, Kind::Streamed, self.all_shared());
        let (_, each) = told::told(lines, 0);
        let mut numbers =
            self.gpu.allocate((2 * each).max(1) as usize, "what blocks tell each other")?;
        let unwritten = vec![0xff; numbers.len()];
        let copied = self.gpu.stream().memcpy_htod(&unwritten, &mut numbers);
        copied.map_err(|error| CudaError::call("write what nobody has told", &error))?;
        let at = address(&numbers, &self.gpu);
        let other = self.copied(&told::told(lines, at + each).0)?;
        let lines = self.copied(&told::told(lines, at).0)?;
        let told = Some(Told { numbers, each, other, is_other: AtomicBool::new(false) });
        Ok(Loaded { lines, count, kind, shared, blocks, first, ring, told })
    }

    fn copied(&self, lines: &[Line]) -> Result<CudaSlice<u8>, CudaError> {
        let copied = self.gpu.stream().clone_htod(bytemuck::cast_slice::<Line, u8>(lines));
        copied.map_err(|error| CudaError::call("copy a program", &error))
    }

    /// Gives tokens for steps of more than one.
    pub(crate) fn tokens(&mut self, tokens: &[u32]) -> Result<(), CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(tokens);
        let mut ids = self.ids.slice_mut(..bytes.len());
        let copied = self.gpu.stream().memcpy_htod(bytes, &mut ids);
        copied.map_err(|error| CudaError::call("copy tokens", &error))
    }

    /// Has the processor go through lines, some time.
    pub(crate) fn run(&mut self, loaded: &Loaded, token: u32, past: u32) -> Result<(), CudaError> {
        let kernel = self.kernel(loaded.kind)?;
        let (mut lines, mut unwritten, mut pieces) = (&loaded.lines, 0, 0);
        if let Some(told) = &loaded.told {
            unwritten = address(&told.numbers, &self.gpu);
            pieces = told.each / 16;
            if told.is_other.load(Ordering::Relaxed) {
                lines = &told.other;
            } else {
                unwritten += told.each;
            }
        }
        let argument = StepArgument {
            past,
            token,
            ids: address(&self.ids, &self.gpu),
            meet: address(&self.meet, &self.gpu),
            met: self.met,
            scores: address(&self.scores, &self.gpu),
            scores_each: self.scores_each,
            streamed: loaded.first,
            ring: loaded.ring,
            reserved: 0,
            unwritten,
            pieces,
            times: self.times,
        };
        let config = LaunchConfig {
            grid_dim: (loaded.blocks, 1, 1),
            block_dim: (loaded.kind.threads(), 1, 1),
            shared_mem_bytes: loaded.shared,
        };
        let mut launch = self.gpu.stream().launch_builder(&kernel);
        launch.arg(lines).arg(&loaded.count).arg(&argument);
        // SAFETY: the kernel takes these arguments. Lines come from programs whose places are in buffers of this
        // processor, and all blocks run at once, as `blocks` has found.
        let launched = unsafe { launch.launch_cooperative(config) };
        launched.map_err(|error| CudaError::call("start the kernel", &error))?;
        match &loaded.told {
            Some(told) => {
                told.is_other.fetch_xor(true, Ordering::Relaxed);
            }
            None => {
                self.met += u64::from(loaded.count.saturating_sub(1)) * u64::from(loaded.blocks)
            }
        }
        Ok(())
    }

    /// Has the processor go through lines now, and note when each begins: the seconds of every line, by its own clock.
    pub(crate) fn run_timed(
        &mut self,
        loaded: &Loaded,
        token: u32,
        past: u32,
    ) -> Result<Vec<f64>, CudaError> {
        let bytes = (loaded.count as usize + 1) * 8;
        let noted = match self.noted.take().filter(|noted| noted.len() >= bytes) {
            Some(noted) => noted,
            None => self.gpu.allocate(bytes.next_power_of_two(), "when lines begin")?,
        };
        self.times = address(&noted, &self.gpu);
        let run = self.run(loaded, token, past);
        self.times = 0;
        let mut times = vec![0u64; bytes / 8];
        let read = run.and_then(|()| self.read(&noted, 0, bytemuck::cast_slice_mut(&mut times)));
        self.noted = Some(noted);
        read?;
        let seconds = |pair: &[u64]| pair[1].saturating_sub(pair[0]) as f64 * 1e-9;
        Ok(times.windows(2).map(seconds).collect())
    }

    /// Bytes of the processor's memory that it has for itself, whatever programs there are.
    pub(crate) fn bytes(&self) -> u64 {
        let own = [&self.meet, &self.counters, &self.ids, &self.scores].into_iter();
        own.chain(&self.noted).map(|memory| memory.len() as u64).sum()
    }

    /// Reads bytes once everything before is done.
    pub(crate) fn read(
        &mut self,
        memory: &CudaSlice<u8>,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), CudaError> {
        let failed = |error: DriverError| CudaError::call("read from the GPU", &error);
        if self.staging.len() < out.len() {
            self.staging = pinned(&self.gpu, out.len().next_power_of_two())?;
        }
        let most = self.staging.len();
        for (at, out) in out.chunks_mut(most).enumerate() {
            let start = offset + at * most;
            let staging = &mut self.staging.as_mut_slice().map_err(failed)?[..out.len()];
            let view = memory.slice(start..start + out.len());
            self.gpu.stream().memcpy_dtoh(&view, staging).map_err(failed)?;
            self.gpu.synchronize()?;
            out.copy_from_slice(staging);
        }
        Ok(())
    }

    /// Writes bytes.
    pub(crate) fn write(
        &mut self,
        memory: &mut CudaSlice<u8>,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        let mut view = memory.slice_mut(offset..offset + bytes.len());
        let copied = self.gpu.stream().memcpy_htod(bytes, &mut view);
        copied.map_err(|error| CudaError::call("write to the GPU", &error))?;
        self.gpu.synchronize()
    }
}

/// How a kernel is compiled for some types of weights.
fn options(types: u64, tile_rows: u32, kind: Kind) -> Vec<String> {
    let own = [format!("-DTYPES={types:#x}ull"), format!("-DTILE_R={tile_rows}")];
    let always = ["-fmad=false", "--std=c++17"].map(str::to_owned);
    let streamed = (kind == Kind::Streamed).then(streams::options).into_iter().flatten();
    always.into_iter().chain(own).chain(streamed).collect()
}

/// Host's memory that the processor can reach by itself.
fn pinned(gpu: &Gpu, bytes: usize) -> Result<PinnedHostSlice<u8>, CudaError> {
    // SAFETY: it is written before it is read.
    let memory = unsafe { gpu.context().alloc_pinned(bytes) };
    memory.map_err(|error| CudaError::call(format!("pin {bytes} bytes of memory"), &error))
}

/// Where memory of a processor begins.
pub(crate) fn address(memory: &CudaSlice<u8>, gpu: &Gpu) -> u64 {
    memory.device_ptr(gpu.stream()).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::assert_compiles;

    #[test]
    fn the_kernel_compiles_for_every_type_of_weights_and_size_of_tile() {
        let bit = |quant: &Quant| 1 << quant.ggml_id().expect("types of files have numbers");
        for rows in TILE_ROWS {
            for quant in &ggml_spanker::WEIGHT_TYPES {
                let name = format!("card-{quant}-{rows}");
                assert_compiles(&name, KERNEL, &options(bit(quant), rows, Kind::Plain));
            }
        }
        let all = ggml_spanker::WEIGHT_TYPES.iter().map(bit).fold(0, |all, one| all | one);
        assert_compiles("card", KERNEL, &options(all, TILE_ROWS[0], Kind::Plain));
        assert_compiles("stream", KERNEL, &options(all, TILE_ROWS[0], Kind::Streamed));
    }
}
