// SPDX-License-Identifier: Apache-2.0
//! The context of one device: the kernels that run instructions, and what they need besides them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DeviceRepr, DriverError, LaunchConfig, PinnedHostSlice,
    PushKernelArg, sys,
};
use spanker_model::Quant;
use spanker_plan::{GpuPlaces, GpuStaging};

use super::instructions::{THREADS, TILE_ROWS, many_rows};
use super::operands::{Instruction, Step, kind};
use super::{slots, streams};
use crate::{CudaError, Gpu};

const KERNEL: &str = concat!(
    include_str!("numbers.cu"),
    include_str!("operands.cuh"),
    include_str!("weights.cu"),
    include_str!("vector.cu"),
    include_str!("rows.cu"),
    include_str!("attend.cu"),
    include_str!("stream.cu"),
    include_str!("kernel.cu"),
);
/// Blocks of the kernel on each multiprocessor, if their memory allows it.
const MOST_BLOCKS: u32 = GpuStaging::MOST_BLOCKS as u32;
/// Positions whose scores are in shared memory.
const SCORES: usize = GpuStaging::SHARED_SCORES as usize;
/// Blocks of inputs that several blocks of the kernel put together.
pub(super) const COUNTERS: u32 = GpuStaging::COUNTERS as u32;
// Plans count instructions in these bytes.
const _: () = assert!(size_of::<Instruction>() == GpuStaging::INSTRUCTION as usize);
/// The oldest processors that copy into shared memory by themselves.
const OLDEST: (u32, u32) = (8, 0);
/// Shared memory from which on a kernel has to ask for it.
const USUAL_SHARED: u32 = 48 << 10;
/// Shared memory that a kernel has besides what it is given.
const OWN_SHARED: u32 = 4 << 10;
/// Where the ring of prefetched weights may begin.
const RING_ALIGNMENT: u32 = 128;
/// The type of weights that may be prefetched, as a bit.
const Q4_0: u64 = 1 << 2;

/// A device with its kernels.
pub(crate) struct DeviceContext {
    gpu: Arc<Gpu>,
    /// The types of weights that its kernel knows, as bits.
    types: u64,
    /// The kernel, and the one whose weights are prefetched.
    kernels: [Compiled; 2],
    /// Shared memory of a block at most.
    most_shared: u32,
    scores_each: u32,
    tile_rows: u32,
    staging: PinnedHostSlice<u8>,
}

/// The kernel's memory for one card: one buffer, as large as the card's plan says.
pub(crate) struct Workspace {
    memory: CudaSlice<u8>,
    base: u64,
    places: GpuPlaces,
    /// Where the next program goes.
    next: u64,
    /// The value of the grid barrier's counter.
    arrived: u64,
}

impl Workspace {
    /// Memory for what a plan says, with zeros in it.
    pub(crate) fn new(gpu: &Gpu, staging: &GpuStaging) -> Result<Workspace, CudaError> {
        let places = staging.places();
        let bytes = usize::try_from(places.end).unwrap_or(usize::MAX);
        let memory = gpu.allocate(bytes, "its kernel's workspace")?;
        let base = address(&memory, gpu);
        Ok(Workspace { memory, base, places, next: places.programs, arrived: 0 })
    }

    /// Bytes that it has.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Where the counters are.
    pub(super) fn counters(&self) -> u64 {
        self.base + self.places.counters
    }

    /// No program is used any more.
    pub(crate) fn forget(&mut self) {
        self.next = self.places.programs;
    }

    /// Allocates so many bytes and returns their offset; nothing if there are not as many left.
    fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let start = self.next;
        let end = start.checked_add(bytes.next_multiple_of(GpuStaging::ALIGNMENT))?;
        (end <= self.places.end).then(|| {
            self.next = end;
            start
        })
    }
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

/// Instructions in a card's workspace.
pub(crate) struct Loaded {
    /// Where they begin.
    instructions: u64,
    count: u32,
    kind: Kind,
    shared: u32,
    blocks: u32,
    /// The first instruction whose weights are prefetched: its index and one, or 0. And where their ring is.
    first: u32,
    ring: u32,
    dataflow: Option<Dataflow>,
}

/// Dataflow slots of one step and of the next, in two halves that alternate. In a step, the slots of the next are reset to
/// unwritten.
struct Dataflow {
    /// Where they begin.
    slots: u64,
    /// Bytes of a step's.
    each: u64,
    /// The same instructions with the second half of the slots.
    other: u64,
    is_other: AtomicBool,
}

// SAFETY: numbers in C's order; there is nothing between them that has no value.
unsafe impl DeviceRepr for Step {}

impl DeviceContext {
    /// A processor for steps after as many tokens as the context has.
    pub(crate) fn new(gpu: Arc<Gpu>, context: usize) -> Result<DeviceContext, CudaError> {
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
        let staging = pinned(&gpu, 1 << 20)?;
        let scores_each = context.min(SCORES) as u32;
        Ok(DeviceContext {
            gpu,
            types: 0,
            kernels: [Compiled::default(), Compiled::default()],
            most_shared,
            scores_each,
            tile_rows,
            staging,
        })
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Positions whose scores fit into shared memory.
    pub(super) fn scores(&self) -> u32 {
        self.scores_each
    }

    /// Rows of weights of a tile of a product of many rows.
    pub(crate) fn tile_rows(&self) -> u32 {
        self.tile_rows
    }

    /// Has the kernel compiled for a type of weights.
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

    /// The same of the kernel whose weights are prefetched, or 0 where it does not fit.
    pub(crate) fn streams(&mut self, shared: u32) -> Result<u32, CudaError> {
        let shared = shared.next_multiple_of(RING_ALIGNMENT) + streams::RING;
        if self.types & Q4_0 == 0 || shared + OWN_SHARED > self.most_shared {
            return Ok(0);
        }
        let all = self.all_shared();
        Ok(self.fit(Kind::Streamed, all)?.min(1) * self.gpu.multiprocessors())
    }

    /// Shared memory of a block that has a multiprocessor for itself. It gets more than it needs: the rest would
    /// become first-level cache, with which it is slower.
    fn all_shared(&self) -> u32 {
        self.most_shared.saturating_sub(OWN_SHARED)
    }

    /// Copies instructions into a card's workspace. `blocks` is what they were made for. Nothing if they do not fit.
    pub(crate) fn load(
        &mut self,
        work: &mut Workspace,
        instructions: &[Instruction],
        shared: u32,
        blocks: u32,
    ) -> Result<Option<Loaded>, CudaError> {
        let (count, kind) = (instructions.len() as u32, Kind::Plain);
        let loaded = |instructions| Loaded {
            instructions,
            count,
            kind,
            shared,
            blocks,
            first: 0,
            ring: 0,
            dataflow: None,
        };
        Ok(self.copied(work, instructions)?.map(loaded))
    }

    /// The same for the kernel whose weights are prefetched.
    pub(crate) fn load_streamed(
        &mut self,
        work: &mut Workspace,
        instructions: &[Instruction],
        shared: u32,
    ) -> Result<Option<Loaded>, CudaError> {
        let blocks = self.streams(shared)?;
        if blocks == 0 {
            return Err(CudaError::Unsupported(format!(
                "a kernel with {shared} bytes of shared memory besides weights does not fit this GPU"
            )));
        }
        let ring = shared.next_multiple_of(RING_ALIGNMENT);
        let first =
            instructions.iter().position(|instruction| instruction.kind() == kind::STREAMED);
        let first = first.map_or(0, |at| at as u32 + 1);
        let (count, kind, shared) = (instructions.len() as u32, Kind::Streamed, self.all_shared());
        let (_, each) = slots::assign(instructions, 0);
        let Some(start) = work.allocate(2 * each) else { return Ok(None) };
        if each > 0 {
            self.write(&mut work.memory, start as usize, &vec![0xff; 2 * each as usize])?;
        }
        let slots = work.base + start;
        let other = self.copied(work, &slots::assign(instructions, slots + each).0)?;
        let instructions = self.copied(work, &slots::assign(instructions, slots).0)?;
        let (Some(other), Some(instructions)) = (other, instructions) else { return Ok(None) };
        let is_other = AtomicBool::new(false);
        let dataflow = Some(Dataflow { slots, each, other, is_other });
        Ok(Some(Loaded { instructions, count, kind, shared, blocks, first, ring, dataflow }))
    }

    /// Where instructions are in a workspace, once they were written there.
    fn copied(
        &mut self,
        work: &mut Workspace,
        instructions: &[Instruction],
    ) -> Result<Option<u64>, CudaError> {
        let bytes = bytemuck::cast_slice::<Instruction, u8>(instructions);
        let Some(at) = work.allocate(bytes.len() as u64) else { return Ok(None) };
        self.write(&mut work.memory, at as usize, bytes)?;
        Ok(Some(work.base + at))
    }

    /// Gives tokens for steps of more than one.
    pub(crate) fn tokens(&mut self, work: &mut Workspace, tokens: &[u32]) -> Result<(), CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(tokens);
        let start = work.places.ids as usize;
        let mut ids = work.memory.slice_mut(start..start + bytes.len());
        let copied = self.gpu.stream().memcpy_htod(bytes, &mut ids);
        copied.map_err(|error| CudaError::call("copy tokens", &error))
    }

    /// Starts a kernel that runs the instructions.
    pub(crate) fn run(
        &mut self,
        work: &mut Workspace,
        loaded: &Loaded,
        token: u32,
        past: u32,
    ) -> Result<(), CudaError> {
        self.start(work, loaded, (token, past), 0)
    }

    /// The same with an address where the kernel writes when instructions begin, or 0.
    fn start(
        &mut self,
        work: &mut Workspace,
        loaded: &Loaded,
        (token, past): (u32, u32),
        times: u64,
    ) -> Result<(), CudaError> {
        let kernel = self.kernel(loaded.kind)?;
        let (mut instructions, mut unwritten, mut unwritten_parts) = (loaded.instructions, 0, 0);
        if let Some(dataflow) = &loaded.dataflow {
            unwritten = dataflow.slots;
            unwritten_parts = dataflow.each / 16;
            if dataflow.is_other.load(Ordering::Relaxed) {
                instructions = dataflow.other;
            } else {
                unwritten += dataflow.each;
            }
        }
        let step = Step {
            past,
            token,
            ids: work.base + work.places.ids,
            barrier: work.base + work.places.barrier,
            arrived: work.arrived,
            scores: work.base + work.places.scores,
            scores_each: self.scores_each,
            streamed: loaded.first,
            ring: loaded.ring,
            reserved: 0,
            unwritten,
            unwritten_parts,
            times,
        };
        let config = LaunchConfig {
            grid_dim: (loaded.blocks, 1, 1),
            block_dim: (loaded.kind.threads(), 1, 1),
            shared_mem_bytes: loaded.shared,
        };
        let mut launch = self.gpu.stream().launch_builder(&kernel);
        launch.arg(&instructions).arg(&loaded.count).arg(&step);
        // SAFETY: the kernel takes these arguments, the first as the address of instructions in the card's workspace. Instructions
        // come from programs whose places are in buffers of this processor, and all blocks run at once, as `blocks`
        // has found.
        let launched = unsafe { launch.launch_cooperative(config) };
        launched.map_err(|error| CudaError::call("start the kernel", &error))?;
        match &loaded.dataflow {
            Some(dataflow) => {
                dataflow.is_other.fetch_xor(true, Ordering::Relaxed);
            }
            None => {
                work.arrived += u64::from(loaded.count.saturating_sub(1)) * u64::from(loaded.blocks)
            }
        }
        Ok(())
    }

    /// Runs instructions and waits for their end. Returns the seconds of every instruction, by the device's clock.
    pub(crate) fn run_timed(
        &mut self,
        work: &mut Workspace,
        loaded: &Loaded,
        token: u32,
        past: u32,
    ) -> Result<Vec<f64>, CudaError> {
        let mut times = vec![0u64; loaded.count as usize + 1];
        let (start, space) = (work.places.times, work.places.programs - work.places.times);
        if times.len() as u64 * 8 > space {
            let what = format!("{} instructions to be timed in {space} bytes", loaded.count);
            return Err(CudaError::Unsupported(what));
        }
        self.start(work, loaded, (token, past), work.base + start)?;
        self.read(&work.memory, start as usize, bytemuck::cast_slice_mut(&mut times))?;
        let seconds = |pair: &[u64]| pair[1].saturating_sub(pair[0]) as f64 * 1e-9;
        Ok(times.windows(2).map(seconds).collect())
    }

    /// Reads bytes once all earlier work is done.
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
