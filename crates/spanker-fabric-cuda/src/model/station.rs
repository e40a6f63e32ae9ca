// SPDX-License-Identifier: Apache-2.0
//! One processor that goes through lines: the kernel, and what it needs besides them.

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DeviceRepr, DriverError, LaunchConfig, PinnedHostSlice,
    PushKernelArg, sys,
};
use spanker_model::Quant;

use super::lines::{Line, THREADS, TILE_ROWS, many_rows};
use crate::{CudaError, Gpu};

const KERNEL: &str = concat!(
    include_str!("numbers.cu"),
    include_str!("weights.cu"),
    include_str!("vector.cu"),
    include_str!("rows.cu"),
    include_str!("attend.cu"),
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

/// A processor, ready for lines.
pub(crate) struct Station {
    gpu: Arc<Gpu>,
    /// The types of weights that its kernel knows, as bits.
    types: u64,
    kernel: Option<CudaFunction>,
    allowed: u32,
    meet: CudaSlice<u8>,
    met: u64,
    counters: CudaSlice<u8>,
    ids: CudaSlice<u8>,
    scores: CudaSlice<u8>,
    scores_each: u32,
    tile_rows: u32,
    staging: PinnedHostSlice<u8>,
}

/// Lines in the processor's memory.
pub(crate) struct Loaded {
    lines: CudaSlice<u8>,
    count: u32,
    shared: u32,
    blocks: u32,
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
    reserved: u32,
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
        let fits = |rows: &&u32| many_rows(Quant::Q4_0, 0, **rows) as i32 <= most;
        let tile_rows = TILE_ROWS.iter().find(fits).copied().unwrap_or(TILE_ROWS[1]);
        let words = |count: usize, what: &str| gpu.allocate(count.max(1) * 4, what);
        let beyond = if context > SCORES { Self::most_blocks(&gpu) as usize * context } else { 0 };
        let (meet, counters) =
            (gpu.allocate(8, "a counter")?, words(COUNTERS as usize, "counters")?);
        let (ids, scores) = (words(batch, "tokens")?, words(beyond, "scores of attention")?);
        let staging = pinned(&gpu, 1 << 20)?;
        let scores_each = context.min(SCORES) as u32;
        Ok(Station {
            gpu,
            types: 0,
            kernel: None,
            allowed: USUAL_SHARED,
            meet,
            met: 0,
            counters,
            ids,
            scores,
            scores_each,
            tile_rows,
            staging,
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
            self.kernel = None;
        }
    }

    fn kernel(&mut self) -> Result<CudaFunction, CudaError> {
        if self.kernel.is_none() {
            let options = options(self.types, self.tile_rows);
            self.kernel = Some(self.gpu.kernel("card", KERNEL, &options, "spanker_card")?);
            self.allowed = USUAL_SHARED;
        }
        self.kernel.clone().ok_or(CudaError::NoDevice)
    }

    /// How many blocks run at once if each has so much shared memory.
    pub(crate) fn blocks(&mut self, shared: u32) -> Result<u32, CudaError> {
        let kernel = self.kernel()?;
        if shared > self.allowed {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            kernel.set_attribute(most, shared as i32).map_err(|error| {
                let what = format!("a kernel with {shared} bytes of shared memory");
                CudaError::call(what, &error)
            })?;
            self.allowed = shared;
        }
        let fit = kernel
            .occupancy_max_active_blocks_per_multiprocessor(THREADS, shared as usize, None)
            .map_err(|error| CudaError::call("ask how many blocks fit", &error))?;
        match fit.min(MOST_BLOCKS) {
            0 => Err(CudaError::Unsupported(format!(
                "a kernel with {shared} bytes of shared memory does not fit this GPU"
            ))),
            fit => Ok(fit * self.gpu.multiprocessors()),
        }
    }

    /// Puts lines into the processor's memory. `blocks` is what they were made for.
    pub(crate) fn load(
        &mut self,
        lines: &[Line],
        shared: u32,
        blocks: u32,
    ) -> Result<Loaded, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(lines);
        let copied = self.gpu.stream().clone_htod(bytes);
        let copied = copied.map_err(|error| CudaError::call("copy a program", &error))?;
        Ok(Loaded { lines: copied, count: lines.len() as u32, shared, blocks })
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
        let kernel = self.kernel()?;
        let argument = StepArgument {
            past,
            token,
            ids: address(&self.ids, &self.gpu),
            meet: address(&self.meet, &self.gpu),
            met: self.met,
            scores: address(&self.scores, &self.gpu),
            scores_each: self.scores_each,
            reserved: 0,
        };
        let config = LaunchConfig {
            grid_dim: (loaded.blocks, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: loaded.shared,
        };
        let mut launch = self.gpu.stream().launch_builder(&kernel);
        launch.arg(&loaded.lines).arg(&loaded.count).arg(&argument);
        // SAFETY: the kernel takes these arguments. Lines come from programs whose places are in buffers of this
        // processor, and all blocks run at once, as `blocks` has found.
        let launched = unsafe { launch.launch_cooperative(config) };
        launched.map_err(|error| CudaError::call("start the kernel", &error))?;
        self.met += u64::from(loaded.count.saturating_sub(1)) * u64::from(loaded.blocks);
        Ok(())
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

/// How the kernel is compiled for some types of weights.
fn options(types: u64, tile_rows: u32) -> Vec<String> {
    let own = [format!("-DTYPES={types:#x}ull"), format!("-DTILE_R={tile_rows}")];
    let always = ["-fmad=false", "--std=c++17"].map(str::to_owned);
    always.into_iter().chain(own).collect()
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
                assert_compiles(&name, KERNEL, &options(bit(quant), rows));
            }
        }
        let all = ggml_spanker::WEIGHT_TYPES.iter().map(bit).fold(0, |all, one| all | one);
        assert_compiles("card", KERNEL, &options(all, TILE_ROWS[0]));
    }
}
