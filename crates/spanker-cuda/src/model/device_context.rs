// SPDX-License-Identifier: Apache-2.0
//! The context of one device: which kernel runs instructions, and what they need besides them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spanker_model::Quant;
use spanker_plan::GpuStaging;

use super::device::{Device, Kind, Launch, Memory, Piece, Processor};
use super::instructions::tile_rows;
use super::operands::{Instruction, Step, kind};
use super::slots::{self, Lies};
use super::streams;
use crate::{CudaError, Gpu};

/// Blocks of the kernel on each multiprocessor, if their memory allows it.
const MOST_BLOCKS: u32 = 2;
/// Blocks of inputs that several blocks of the kernel put together.
pub(super) const COUNTERS: u32 = GpuStaging::COUNTERS as u32;
// Plans count instructions in these bytes.
const _: () = assert!(size_of::<Instruction>() == GpuStaging::INSTRUCTION as usize);
/// Shared memory that a kernel has besides what it is given.
const OWN_SHARED: u32 = 4 << 10;
/// Where the ring of prefetched weights may begin.
const RING_ALIGNMENT: u32 = 128;
/// The type of weights that may be prefetched, as a bit.
const Q4_0: u64 = 1 << 2;

/// A device with its kernels.
pub(crate) struct DeviceContext {
    device: Box<dyn Device>,
    /// The types of weights that its kernel knows, as bits.
    types: u64,
    tile_rows: u32,
}

/// The kernel's memory for one card: one buffer, as large as the card's plan says.
pub(crate) struct Workspace {
    memory: Memory,
    places: spanker_plan::GpuPlaces,
    /// Where the next program goes.
    next: u64,
    /// The value of the grid barrier's counter.
    arrived: u64,
}

impl Workspace {
    /// Bytes that it has.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes as u64
    }

    fn base(&self) -> u64 {
        self.memory.base()
    }

    /// Where the counters are.
    pub(super) fn counters(&self) -> u64 {
        self.base() + self.places.counters
    }

    /// Where inputs for tensor cores are, and for how many bytes of them there is space.
    pub(super) fn packed(&self) -> (u64, u64) {
        (self.base() + self.places.inputs, self.places.times - self.places.inputs)
    }

    /// No program is used any more.
    pub(crate) fn forget(&mut self) {
        self.next = self.places.programs;
    }

    /// Bytes that are left for programs.
    pub(super) fn room(&self) -> u64 {
        self.places.end.saturating_sub(self.next)
    }

    /// Instructions at most that can be timed in one launch.
    pub(super) fn timed(&self) -> usize {
        let words = (self.places.programs - self.places.times) / 8;
        usize::try_from(words.saturating_sub(1)).unwrap_or(usize::MAX)
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

/// Instructions in a card's workspace.
pub(crate) struct Loaded {
    /// Where they begin.
    instructions: u64,
    count: u32,
    /// After which of them blocks wait for each other, where they do.
    waits: Vec<bool>,
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
    /// Where numbers of instructions lie, with the first half.
    lies: Vec<Lies>,
}

impl Loaded {
    /// Instructions.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Where numbers of its instructions lie, if they are in dataflow slots; and how far those of the last step are from
    /// there, with the range of the first half.
    pub(super) fn lies(&self) -> Option<(&[Lies], Range<u64>, u64)> {
        let dataflow = self.dataflow.as_ref()?;
        let Dataflow { slots, each, ref is_other, ref lies, .. } = *dataflow;
        // The halves have changed places since.
        let shift = if is_other.load(Ordering::Relaxed) { 0 } else { each };
        Some((lies, slots..slots + each, shift))
    }
}

impl Loaded {
    /// Grid barriers between some of the instructions: there is none after the last.
    fn barriers(&self, some: Range<u32>) -> u64 {
        let last = some.end.saturating_sub(1).max(some.start);
        let waits = self.waits.get(some.start as usize..last as usize).unwrap_or_default();
        waits.iter().filter(|waits| **waits).count() as u64
    }
}

impl DeviceContext {
    /// A device's context.
    pub(super) fn new(device: Box<dyn Device>) -> DeviceContext {
        let tile_rows = tile_rows(device.most_shared());
        DeviceContext { device, types: 0, tile_rows }
    }

    /// Its multiprocessors.
    pub(super) fn multiprocessors(&self) -> u32 {
        self.device.multiprocessors()
    }

    /// Zeroed memory. `what` is said if there is not enough.
    pub(crate) fn allocate(&self, bytes: usize, what: &str) -> Result<Memory, CudaError> {
        self.device.allocate(bytes, what)
    }

    /// Memory for what a plan says, with zeros in it.
    pub(crate) fn workspace(&self, staging: &GpuStaging) -> Result<Workspace, CudaError> {
        let places = staging.places();
        let bytes = usize::try_from(places.end).unwrap_or(usize::MAX);
        let memory = self.allocate(bytes, "its kernel's workspace")?;
        Ok(Workspace { memory, places, next: places.programs, arrived: 0 })
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
            self.device.forget();
        }
    }

    /// How many blocks of a kernel a multiprocessor has at once if each has so much shared memory.
    fn fit(&mut self, kind: Kind, shared: u32) -> Result<u32, CudaError> {
        let options = options(self.types, self.tile_rows, kind);
        self.device.fit(kind, &options, shared)
    }

    /// How many blocks run at once if each has so much shared memory.
    pub(crate) fn blocks(&mut self, shared: u32) -> Result<u32, CudaError> {
        match self.fit(Kind::Plain, shared)?.min(MOST_BLOCKS) {
            0 => Err(CudaError::Unsupported(format!(
                "a kernel with {shared} bytes of shared memory does not fit this GPU"
            ))),
            fit => Ok(fit * self.multiprocessors()),
        }
    }

    /// The same of the kernel whose weights are prefetched, or 0 where it does not fit.
    pub(crate) fn streams(&mut self, shared: u32) -> Result<u32, CudaError> {
        let shared = shared.next_multiple_of(RING_ALIGNMENT) + streams::RING;
        if self.types & Q4_0 == 0 || shared + OWN_SHARED > self.device.most_shared() {
            return Ok(0);
        }
        let all = self.all_shared();
        Ok(self.fit(Kind::Streamed, all)?.min(1) * self.multiprocessors())
    }

    /// Shared memory of a block that has a multiprocessor for itself. It gets more than it needs: the rest would
    /// become first-level cache, with which it is slower.
    fn all_shared(&self) -> u32 {
        self.device.most_shared().saturating_sub(OWN_SHARED)
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
        let waits = instructions.iter().map(|one| !one.is_joined()).collect();
        let loaded = |instructions| Loaded {
            instructions,
            count,
            waits,
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
            self.device.write(&mut work.memory, start as usize, &vec![0xff; 2 * each as usize])?;
        }
        let slots = work.base() + start;
        let other = self.copied(work, &slots::assign(instructions, slots + each).0)?;
        let assigned = slots::assign(instructions, slots).0;
        let lies = slots::lies(instructions, &assigned);
        let instructions = self.copied(work, &assigned)?;
        let (Some(other), Some(instructions)) = (other, instructions) else { return Ok(None) };
        let is_other = AtomicBool::new(false);
        let dataflow = Some(Dataflow { slots, each, other, is_other, lies });
        let waits = Vec::new();
        Ok(Some(Loaded { instructions, count, waits, kind, shared, blocks, first, ring, dataflow }))
    }

    /// Where instructions are in a workspace, once they were written there.
    fn copied(
        &mut self,
        work: &mut Workspace,
        instructions: &[Instruction],
    ) -> Result<Option<u64>, CudaError> {
        let bytes = bytemuck::cast_slice::<Instruction, u8>(instructions);
        let Some(at) = work.allocate(bytes.len() as u64) else { return Ok(None) };
        self.device.write(&mut work.memory, at as usize, bytes)?;
        Ok(Some(work.base() + at))
    }

    /// Starts a kernel that runs the instructions.
    pub(crate) fn run(&mut self, work: &mut Workspace, loaded: &Loaded) -> Result<(), CudaError> {
        self.run_some(work, loaded, 0..loaded.count)
    }

    /// The same of some of the instructions. Those that are in dataflow slots run all together.
    pub(super) fn run_some(
        &mut self,
        work: &mut Workspace,
        loaded: &Loaded,
        some: Range<u32>,
    ) -> Result<(), CudaError> {
        self.start(work, loaded, some, 0)
    }

    /// The same with an address where the kernel writes when instructions begin, or 0.
    fn start(
        &mut self,
        work: &mut Workspace,
        loaded: &Loaded,
        some: Range<u32>,
        times: u64,
    ) -> Result<(), CudaError> {
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
            barrier: work.base() + work.places.barrier,
            arrived: work.arrived,
            streamed: loaded.first,
            ring: loaded.ring,
            unwritten,
            unwritten_parts,
            times,
        };
        let Loaded { kind, blocks, shared, .. } = *loaded;
        let count = some.end - some.start;
        instructions += u64::from(some.start) * GpuStaging::INSTRUCTION;
        self.device.launch(&Launch { kind, blocks, shared, instructions, count, step })?;
        match &loaded.dataflow {
            Some(dataflow) => {
                dataflow.is_other.fetch_xor(true, Ordering::Relaxed);
            }
            None => work.arrived += loaded.barriers(some) * u64::from(blocks),
        }
        Ok(())
    }

    /// Runs some instructions and waits for their end. Returns the seconds of every instruction, by the device's clock.
    pub(crate) fn run_timed(
        &mut self,
        work: &mut Workspace,
        loaded: &Loaded,
        some: Range<u32>,
    ) -> Result<Vec<f64>, CudaError> {
        let mut times = vec![0u64; some.len() + 1];
        let (start, space) = (work.places.times, work.places.programs - work.places.times);
        if times.len() as u64 * 8 > space {
            let what = format!("{} instructions to be timed in {space} bytes", some.len());
            return Err(CudaError::Unsupported(what));
        }
        self.start(work, loaded, some, work.base() + start)?;
        self.read(&work.memory, start as usize, bytemuck::cast_slice_mut(&mut times))?;
        let seconds = |pair: &[u64]| pair[1].saturating_sub(pair[0]) as f64 * 1e-9;
        Ok(times.windows(2).map(seconds).collect())
    }

    /// Reads bytes once all earlier work is done.
    pub(crate) fn read(
        &mut self,
        from: &Memory,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), CudaError> {
        self.device.read(from, offset, out)
    }

    /// Writes bytes, which are no longer needed afterwards.
    pub(crate) fn write(
        &mut self,
        into: &mut Memory,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        self.device.write(into, offset, bytes)
    }

    /// Copies bytes within memory to others.
    pub(super) fn copy(
        &mut self,
        memory: &mut Memory,
        from: usize,
        into: usize,
        length: usize,
    ) -> Result<(), CudaError> {
        self.device.copy(memory, from, into, length)
    }

    /// Gathers pieces of its memory.
    pub(super) fn gather(&mut self, pieces: &[Piece]) -> Result<(), CudaError> {
        if pieces.is_empty() { Ok(()) } else { self.device.gather(pieces) }
    }

    /// Begins to read bytes. `number` tells reads apart.
    pub(super) fn fetch(
        &mut self,
        number: usize,
        from: &Memory,
        offset: usize,
        length: usize,
    ) -> Result<(), CudaError> {
        self.device.fetch(number, from, offset, length)
    }

    /// Waits for the read of a number, and for nothing that was begun later.
    pub(super) fn fetched(&mut self, number: usize, out: &mut [u8]) -> Result<(), CudaError> {
        self.device.fetched(number, out)
    }

    /// Waits for everything.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.device.synchronize()
    }
}

/// The context of a graphics processor.
pub(crate) fn on_gpu(gpu: Arc<Gpu>) -> Result<DeviceContext, CudaError> {
    Ok(DeviceContext::new(Box::new(Processor::new(gpu)?)))
}

/// How a kernel is compiled for some types of weights.
pub(super) fn options(types: u64, tile_rows: u32, kind: Kind) -> Vec<String> {
    let own = [format!("-DTYPES={types:#x}ull"), format!("-DTILE_R={tile_rows}")];
    let always = ["-fmad=false", "--std=c++17"].map(str::to_owned);
    let streamed = (kind == Kind::Streamed).then(streams::options).into_iter().flatten();
    always.into_iter().chain(own).chain(streamed).collect()
}
