// SPDX-License-Identifier: Apache-2.0
//! Work on the card's own memory, in slices, so that a card answers its host while it computes.
//!
//! All places were checked when the work was submitted, and buffers cannot go while work uses them. Results of
//! a slice are computed into memory that is used again and then brought to their place, so operands may be in
//! the buffer of the result. What an operator keeps from slice to slice is made at its first one.
//!
//! * `product.rs`: products.
//! * `attend.rs`: attention over positions that lie end to end.
//! * `blocks.rs`: the KV cache in blocks, and attention over it.
//! * `experts.rs`: mixtures of experts.
//! * `operator.rs`: the other operators of a model.

mod attend;
mod blocks;
mod experts;
mod operator;
mod product;

pub(crate) use attend::shared_heads;
pub(crate) use blocks::reach;

use bytemuck::{cast_slice, cast_slice_mut};
use ggml_spanker::Inputs;
use ggml_spanker::ops::AttendScratch;
use spanker_collective::{DType, ReduceOp};
use spanker_reduce::{Element, Team, Threads, bf16, divide, f16, fold, reduce};
use spanker_runtime::{Place, Work};

use super::check::known;
use super::memory::Memory;

/// Bytes that one slice touches, an eighth of a millisecond or less.
pub(crate) const SLICE: u64 = 256 << 10;

/// What a slice has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slice {
    /// How far the work is, or nothing when it is complete.
    pub(crate) next: Option<u64>,
    /// Its cost, in bytes that could be copied meanwhile.
    pub(crate) spent: u64,
}

impl Slice {
    fn of(done: u64, total: u64, spent: u64) -> Slice {
        Slice { next: (done < total).then_some(done), spent }
    }
}

/// Memory that operators use again, and what the one at work keeps between its slices.
#[derive(Debug, Default)]
struct Scratch {
    /// Results of a slice.
    out: Vec<u64>,
    /// Rows of activations, unpacked.
    inputs: Inputs,
    attend: AttendScratch,
    /// Numbers to choose from, or queries.
    values: Vec<f32>,
    /// Attention of these.
    results: Vec<f32>,
    /// The best so far.
    best: Vec<(u32, f32)>,
}

/// What computes: scratch memory, and the one thread that folds.
#[derive(Debug)]
pub(crate) struct Alu {
    solo: Team,
    scratch: Scratch,
    incoming: Vec<u64>,
    /// Every result has a wrong bit: a fault that someone has ordered.
    pub(crate) garble: bool,
}

/// Calls a generic function with the element type of a [`DType`].
macro_rules! typed {
    ($dtype:expr, $call:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F64 => $call::<f64>($($argument),*),
            DType::F16 => $call::<f16>($($argument),*),
            DType::Bf16 => $call::<bf16>($($argument),*),
            DType::I32 => $call::<i32>($($argument),*),
            DType::I64 => $call::<i64>($($argument),*),
            DType::U8 => $call::<u8>($($argument),*),
            DType::U32 => $call::<u32>($($argument),*),
            _ => $call::<f32>($($argument),*),
        }
    };
}

impl Alu {
    pub(crate) fn new() -> Alu {
        let scratch = Scratch::default();
        Alu { solo: Team::new(1), scratch, incoming: Vec::new(), garble: false }
    }

    /// Does the slice of `work` from `done` on.
    pub(crate) fn slice(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        match *work {
            Work::Copy { from, into, length } => {
                let part = (length - done).min(SLICE);
                let scratch = scratch_bytes(&mut self.scratch.out, part as usize);
                scratch.copy_from_slice(read(memory, shifted(from, done), part));
                self.store(memory, shifted(into, done), part);
                Slice::of(done + part, length, 2 * part)
            }
            Work::Fill { into, length, pattern } => {
                let part = (length - done).min(SLICE);
                let target = memory.get_mut(shifted(into, done), part).expect("it was checked");
                target
                    .chunks_exact_mut(4)
                    .for_each(|word| word.copy_from_slice(&pattern.to_le_bytes()));
                Slice::of(done + part, length, part)
            }
            Work::Reduce { into, ref sources, elements, fold, divisor } => {
                let (dtype, op) = known(fold).expect("it was checked");
                let size = dtype.size() as u64;
                // Of all operands together, but a few elements in any case.
                let operands = sources.len() as u64 + 1;
                let part = (elements - done).min((SLICE / (size * operands)).max(64));
                let places: Vec<Place> =
                    sources.iter().map(|&source| shifted(source, done * size)).collect();
                let target = shifted(into, done * size);
                typed!(dtype, reduce_places(self, memory, &places, target, part, op, divisor));
                Slice::of(done + part, elements, part * size * operands)
            }
            Work::Write { into, ref bytes } => {
                scratch_bytes(&mut self.scratch.out, bytes.len()).copy_from_slice(bytes);
                self.store(memory, into, bytes.len() as u64);
                Slice::of(1, 1, bytes.len() as u64)
            }
            Work::Matmul { .. } => self.product(memory, work, done),
            Work::Attend { .. } => self.attend(memory, work, done),
            Work::AttendBlocks { .. } => self.attend_blocks(memory, work, done),
            Work::Keep { .. } => self.keep(memory, work, done),
            Work::Route { .. } => self.route(memory, work, done),
            Work::MatmulExperts { .. } => self.expert_product(memory, work, done),
            Work::Combine { .. } => self.combine(memory, work, done),
            Work::AddPicked { .. } => self.add_picked(memory, work, done),
            _ => self.operator(memory, work, done),
        }
    }

    /// Brings the first `length` bytes of the scratch memory for results to their place.
    fn store(&mut self, memory: &mut Memory, into: Place, length: u64) {
        let target = memory.get_mut(into, length).expect("it was checked");
        target.copy_from_slice(scratch_bytes(&mut self.scratch.out, length as usize));
        self.spoil(target);
    }

    /// `local = incoming op local` or the other way round, where `incoming` is a frame's data.
    pub(crate) fn fold(
        &mut self,
        local: &mut [u8],
        incoming: &[u8],
        (dtype, op): (DType, ReduceOp),
        incoming_first: bool,
    ) {
        typed!(dtype, fold_bytes(self, local, incoming, op, incoming_first));
        self.spoil(local);
    }

    fn spoil(&self, bytes: &mut [u8]) {
        if let (true, Some(first)) = (self.garble, bytes.first_mut()) {
            *first ^= 0x40;
        }
    }
}

/// Bytes that work reads.
fn read(memory: &Memory, place: Place, length: u64) -> &[u8] {
    memory.get(place, length).expect("it was checked")
}

/// Numbers that work reads.
fn floats(memory: &Memory, place: Place, count: u64) -> &[f32] {
    cast_slice(read(memory, place, count * 4))
}

fn shifted(place: Place, by: u64) -> Place {
    Place { offset: place.offset + by, ..place }
}

/// At least so many bytes of aligned scratch.
fn scratch_bytes(scratch: &mut Vec<u64>, bytes: usize) -> &mut [u8] {
    let words = bytes.div_ceil(8);
    if scratch.len() < words {
        scratch.resize(words, 0);
    }
    &mut cast_slice_mut(scratch)[..bytes]
}

fn fold_bytes<T: Element>(
    alu: &mut Alu,
    local: &mut [u8],
    incoming: &[u8],
    op: ReduceOp,
    incoming_first: bool,
) {
    // A frame's data is copied unless its reader has aligned it.
    let theirs: &[T] = match bytemuck::try_cast_slice(incoming) {
        Ok(aligned) => aligned,
        Err(_) => {
            let copy = scratch_bytes(&mut alu.incoming, incoming.len());
            copy.copy_from_slice(incoming);
            cast_slice(copy)
        }
    };
    fold(cast_slice_mut(local), theirs, op, incoming_first).expect("it was checked");
}

fn reduce_places<T: Element>(
    alu: &mut Alu,
    memory: &mut Memory,
    sources: &[Place],
    into: Place,
    elements: u64,
    op: ReduceOp,
    divisor: u32,
) {
    let bytes = elements * size_of::<T>() as u64;
    let operands: Vec<&[T]> =
        sources.iter().map(|&source| cast_slice(read(memory, source, bytes))).collect();
    let out = scratch_bytes(&mut alu.scratch.out, bytes as usize);
    match operands[..] {
        [only] => out.copy_from_slice(cast_slice(only)),
        _ => reduce(&alu.solo, Threads::Exactly(1), &operands, cast_slice_mut(out), op)
            .expect("operation and lengths were checked"),
    }
    if divisor > 1 {
        divide::<T>(cast_slice_mut(out), divisor as usize);
    }
    alu.store(memory, into, bytes);
}
