// SPDX-License-Identifier: Apache-2.0
//! What runs a kernel: memory, copies, and launches. A graphics processor is one such device; tests have another that
//! emulates the kernel on the host. What is launched is not decided here.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::{
    CudaEvent, CudaFunction, CudaSlice, DevicePtr, DeviceRepr, DriverError, LaunchConfig,
    PinnedHostSlice, PushKernelArg, sys,
};

use cudarc::driver::result::memcpy_dtoh_async;

use super::instructions::THREADS;
use super::operands::Step;
use super::streams;
use crate::{CudaError, Gpu};

/// The kernel's source, but for what the device itself brings.
pub(super) const KERNEL: &str = concat!(
    include_str!("numbers.cu"),
    include_str!("operands.cuh"),
    include_str!("weights.cu"),
    include_str!("vector.cu"),
    include_str!("tensor.cu"),
    include_str!("tensor_long.cu"),
    include_str!("rows.cu"),
    include_str!("attend.cu"),
    include_str!("tile.cu"),
    include_str!("stream.cu"),
    include_str!("kernel.cu"),
);
/// The kernel that gathers pieces of memory.
const GATHER: &str = include_str!("gather.cu");
/// What a graphics processor brings.
const DEVICE: &str = include_str!("device.cu");
/// The oldest processors that copy into shared memory by themselves.
const OLDEST: (u32, u32) = (8, 0);
/// Shared memory from which on a kernel has to ask for it.
pub(super) const USUAL_SHARED: u32 = 48 << 10;

/// Memory of a device.
pub(crate) struct Memory {
    /// Where it begins, as the kernel sees it.
    pub(super) base: u64,
    pub(super) bytes: usize,
    /// What frees it.
    pub(super) owner: Box<dyn Any + Send + Sync>,
}

impl Memory {
    /// Where it begins.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Its bytes.
    pub(crate) fn size(&self) -> usize {
        self.bytes
    }
}

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Streamed,
}

impl Kind {
    pub(super) fn threads(self) -> u32 {
        match self {
            Kind::Plain => THREADS,
            Kind::Streamed => streams::THREADS,
        }
    }
}

/// A launch of a kernel.
pub(crate) struct Launch {
    pub(super) kind: Kind,
    pub(super) blocks: u32,
    /// Shared memory of a block.
    pub(super) shared: u32,
    /// Where its instructions are, and how many.
    pub(super) instructions: u64,
    pub(super) count: u32,
    pub(super) step: Step,
}

/// Pieces of memory at equal distances, which are copied end to end.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Piece {
    /// The address of the first.
    pub(super) from: u64,
    /// Where they go.
    pub(super) into: u64,
    /// Bytes from one to the next.
    pub(super) stride: u64,
    pub(super) rows: u32,
    /// Bytes of one.
    pub(super) length: u32,
}

/// Pieces that one launch gathers at most: they are arguments of the kernel, which has 4 KiB of these.
const PIECES: usize = 96;
/// Threads of a block that gathers, and blocks for each piece.
const GATHERING: (u32, u32) = (256, 8);

/// Arguments of the kernel that gathers.
#[repr(C)]
#[derive(Clone, Copy)]
struct Pieces([Piece; PIECES]);

// SAFETY: numbers in C's order; there is nothing between them that has no value.
unsafe impl DeviceRepr for Pieces {}

/// A device. What it is told to do happens in order.
pub(crate) trait Device: Send {
    fn multiprocessors(&self) -> u32;
    /// Shared memory of a block at most.
    fn most_shared(&self) -> u32;
    /// Zeroed memory. `what` is said if there is not enough.
    fn allocate(&self, bytes: usize, what: &str) -> Result<Memory, CudaError>;
    /// Reads bytes once all earlier work is done.
    fn read(&mut self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<(), CudaError>;
    /// Writes bytes, which are no longer needed afterwards.
    fn write(&mut self, into: &mut Memory, offset: usize, bytes: &[u8]) -> Result<(), CudaError>;
    /// Copies bytes within memory to others.
    fn copy(
        &mut self,
        memory: &mut Memory,
        from: usize,
        into: usize,
        length: usize,
    ) -> Result<(), CudaError>;
    /// Gathers pieces of its memory, whose addresses are within what was allocated.
    fn gather(&mut self, pieces: &[Piece]) -> Result<(), CudaError>;
    /// Begins to read bytes, which are there once all earlier work is done. `number` tells reads apart.
    fn fetch(
        &mut self,
        number: usize,
        from: &Memory,
        offset: usize,
        length: usize,
    ) -> Result<(), CudaError>;
    /// Waits for the read of a number, and for nothing that was begun later.
    fn fetched(&mut self, number: usize, out: &mut [u8]) -> Result<(), CudaError>;
    /// Copies the first bytes of a device's memory, whose work is done, to the beginning of its own.
    fn copy_from(
        &mut self,
        from: &Memory,
        into: &mut Memory,
        length: usize,
    ) -> Result<(), CudaError>;
    /// Forgets kernels that know other types of weights.
    fn forget(&mut self);
    /// How many blocks of a kernel, with these options, a multiprocessor has at once if each has so much shared memory.
    fn fit(&mut self, kind: Kind, options: &[String], shared: u32) -> Result<u32, CudaError>;
    /// Starts a kernel for which blocks fit.
    fn launch(&mut self, launch: &Launch) -> Result<(), CudaError>;
    /// Waits for everything.
    fn synchronize(&self) -> Result<(), CudaError>;
}

/// A kernel, and the shared memory that it may have so far.
#[derive(Default)]
struct Compiled {
    function: Option<CudaFunction>,
    allowed: u32,
}

/// A graphics processor.
pub(crate) struct Processor {
    gpu: Arc<Gpu>,
    kernels: [Compiled; 2],
    most_shared: u32,
    staging: PinnedHostSlice<u8>,
    gather: Option<CudaFunction>,
    /// Reads that have begun, and when they are over.
    fetches: HashMap<usize, (PinnedHostSlice<u8>, Option<CudaEvent>)>,
}

// SAFETY: numbers in C's order; there is nothing between them that has no value.
unsafe impl DeviceRepr for Step {}

impl Processor {
    pub(crate) fn new(gpu: Arc<Gpu>) -> Result<Processor, CudaError> {
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
        let staging = pinned(&gpu, 1 << 20)?;
        let kernels = [Compiled::default(), Compiled::default()];
        let (gather, fetches) = (None, HashMap::new());
        Ok(Processor { gpu, kernels, most_shared, staging, gather, fetches })
    }
}

/// The memory, as the driver's bindings have it.
fn slice(memory: &Memory) -> Result<&CudaSlice<u8>, CudaError> {
    memory.owner.downcast_ref().ok_or_else(foreign)
}

fn slice_mut(memory: &mut Memory) -> Result<&mut CudaSlice<u8>, CudaError> {
    memory.owner.downcast_mut().ok_or_else(foreign)
}

fn foreign() -> CudaError {
    CudaError::Unsupported("memory of another device".into())
}

impl Device for Processor {
    fn multiprocessors(&self) -> u32 {
        self.gpu.multiprocessors()
    }

    fn most_shared(&self) -> u32 {
        self.most_shared
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<Memory, CudaError> {
        let memory = self.gpu.allocate(bytes, what)?;
        let base = memory.device_ptr(self.gpu.stream()).0;
        Ok(Memory { base, bytes, owner: Box::new(memory) })
    }

    fn read(&mut self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<(), CudaError> {
        let failed = |error: DriverError| CudaError::call("read from the GPU", &error);
        if self.staging.len() < out.len() {
            self.staging = pinned(&self.gpu, out.len().next_power_of_two())?;
        }
        let most = self.staging.len();
        for (at, out) in out.chunks_mut(most).enumerate() {
            let start = offset + at * most;
            let staging = &mut self.staging.as_mut_slice().map_err(failed)?[..out.len()];
            let view = slice(from)?.slice(start..start + out.len());
            self.gpu.stream().memcpy_dtoh(&view, staging).map_err(failed)?;
            self.gpu.synchronize()?;
            out.copy_from_slice(staging);
        }
        Ok(())
    }

    fn write(&mut self, into: &mut Memory, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let mut view = slice_mut(into)?.slice_mut(offset..offset + bytes.len());
        // Bytes of pageable memory are taken before this returns.
        let copied = self.gpu.stream().memcpy_htod(bytes, &mut view);
        copied.map_err(|error| CudaError::call("write to the GPU", &error))
    }

    fn copy(
        &mut self,
        memory: &mut Memory,
        from: usize,
        into: usize,
        length: usize,
    ) -> Result<(), CudaError> {
        let (low, high) = (from.min(into), from.max(into));
        let (mut before, mut behind) = slice_mut(memory)?.split_at_mut(high);
        let (mut low, mut high) =
            (before.slice_mut(low..low + length), behind.slice_mut(0..length));
        let (from, into) = if from < into { (&low, &mut high) } else { (&high, &mut low) };
        let copied = self.gpu.stream().memcpy_dtod(from, into);
        copied.map_err(|error| CudaError::call("copy within the GPU", &error))
    }

    fn gather(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        if self.gather.is_none() {
            let options = ["--std=c++17".to_owned(), format!("-DPIECES={PIECES}")];
            let function = self.gpu.kernel("gather", GATHER, &options, "spanker_gather")?;
            self.gather = Some(function);
        }
        let kernel = self.gather.as_ref().ok_or(CudaError::NoDevice)?;
        for some in pieces.chunks(PIECES) {
            let mut all = Pieces([Piece::default(); PIECES]);
            all.0[..some.len()].copy_from_slice(some);
            let (threads, blocks) = GATHERING;
            let config = LaunchConfig {
                grid_dim: (some.len() as u32, blocks, 1),
                block_dim: (threads, 1, 1),
                shared_mem_bytes: 0,
            };
            let mut builder = self.gpu.stream().launch_builder(kernel);
            builder.arg(&all);
            // SAFETY: the kernel takes this argument. Addresses are within memory of this processor, as whoever calls has
            // made sure, and what is written is in the buffer that the plan has for it.
            let launched = unsafe { builder.launch(config) };
            launched.map_err(|error| CudaError::call("gather memory of the GPU", &error))?;
        }
        Ok(())
    }

    fn fetch(
        &mut self,
        number: usize,
        from: &Memory,
        offset: usize,
        length: usize,
    ) -> Result<(), CudaError> {
        let failed = |error: DriverError| CudaError::call("read from the GPU", &error);
        let known = self.fetches.remove(&number).filter(|(memory, _)| memory.len() >= length);
        let (mut memory, _) = match known {
            Some(known) => known,
            None => (pinned(&self.gpu, length.next_power_of_two())?, None),
        };
        let out = &mut memory.as_mut_slice().map_err(failed)?[..length];
        let source = from.base + offset as u64;
        debug_assert!(offset + length <= from.bytes);
        // SAFETY: the source is within the memory, and `out` stays where it is until the event says that it is written.
        let begun = unsafe { memcpy_dtoh_async(out, source, self.gpu.stream().cu_stream()) };
        begun.map_err(failed)?;
        let event = self.gpu.stream().record_event(None).map_err(failed)?;
        self.fetches.insert(number, (memory, Some(event)));
        Ok(())
    }

    fn fetched(&mut self, number: usize, out: &mut [u8]) -> Result<(), CudaError> {
        let failed = |error: DriverError| CudaError::call("read from the GPU", &error);
        let none = || CudaError::Unsupported(format!("read {number} of the GPU has not begun"));
        let (memory, event) = self.fetches.get_mut(&number).ok_or_else(none)?;
        if let Some(event) = event.take() {
            event.synchronize().map_err(failed)?;
        }
        out.copy_from_slice(&memory.as_slice().map_err(failed)?[..out.len()]);
        Ok(())
    }

    fn copy_from(
        &mut self,
        from: &Memory,
        into: &mut Memory,
        length: usize,
    ) -> Result<(), CudaError> {
        let from = slice(from)?.slice(0..length);
        let mut into = slice_mut(into)?.slice_mut(0..length);
        let copied = self.gpu.stream().memcpy_dtod(&from, &mut into);
        copied.map_err(|error| CudaError::call("copy between GPUs", &error))
    }

    fn forget(&mut self) {
        self.kernels = [Compiled::default(), Compiled::default()];
    }

    fn fit(&mut self, kind: Kind, options: &[String], shared: u32) -> Result<u32, CudaError> {
        let compiled = &mut self.kernels[kind as usize];
        if compiled.function.is_none() {
            let name = if kind == Kind::Plain { "card" } else { "stream" };
            let function = self.gpu.kernel(name, &source(), options, "spanker_card")?;
            *compiled = Compiled { function: Some(function), allowed: USUAL_SHARED };
        }
        let kernel = compiled.function.as_ref().ok_or(CudaError::NoDevice)?;
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

    fn launch(&mut self, launch: &Launch) -> Result<(), CudaError> {
        let compiled = &self.kernels[launch.kind as usize];
        let kernel = compiled.function.as_ref().ok_or(CudaError::NoDevice)?;
        let config = LaunchConfig {
            grid_dim: (launch.blocks, 1, 1),
            block_dim: (launch.kind.threads(), 1, 1),
            shared_mem_bytes: launch.shared,
        };
        let mut builder = self.gpu.stream().launch_builder(kernel);
        builder.arg(&launch.instructions).arg(&launch.count).arg(&launch.step);
        // SAFETY: the kernel takes these arguments, the first as the address of instructions in the card's workspace. Instructions
        // come from programs whose places are in buffers of this processor, and all blocks run at once, as `fit` has found.
        let launched = unsafe { builder.launch_cooperative(config) };
        launched.map(|_| ()).map_err(|error| CudaError::call("start the kernel", &error))
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu.synchronize()
    }
}

/// All of the source for a graphics processor.
fn source() -> String {
    [DEVICE, KERNEL].concat()
}

/// Host's memory that the processor can reach by itself.
fn pinned(gpu: &Gpu, bytes: usize) -> Result<PinnedHostSlice<u8>, CudaError> {
    // The host reads it, which is slow where writes are combined: there is no cache for it.
    // SAFETY: it is written before it is read.
    let memory = unsafe { gpu.context().alloc_pinned_with_flags(bytes, 0) };
    memory.map_err(|error| CudaError::call(format!("pin {bytes} bytes of memory"), &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::assert_compiles;
    use crate::model::device_context::options;
    use crate::model::instructions::TILE_ROWS;
    use crate::model::machine::KERNEL_TYPES;
    use spanker_model::Quant;

    #[test]
    fn the_kernel_compiles_for_every_type_of_weights_and_size_of_tile() {
        let bit = |quant: &Quant| 1 << quant.ggml_id().expect("types of files have numbers");
        for rows in TILE_ROWS {
            for quant in &KERNEL_TYPES {
                let name = format!("card-{quant}-{rows}");
                assert_compiles(&name, &source(), &options(bit(quant), rows, Kind::Plain));
            }
        }
        let pieces = ["--std=c++17".to_owned(), format!("-DPIECES={PIECES}")];
        assert_compiles("gather", GATHER, &pieces);
        let all = KERNEL_TYPES.iter().map(bit).fold(0, |all, one| all | one);
        assert_compiles("card", &source(), &options(all, TILE_ROWS[0], Kind::Plain));
        assert_compiles("stream", &source(), &options(all, TILE_ROWS[0], Kind::Streamed));
    }
}
