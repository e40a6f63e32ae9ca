// SPDX-License-Identifier: Apache-2.0
//! Work on the card's own memory, in slices, so that a card answers its host while it computes.
//!
//! All places were checked when the work was submitted, and buffers cannot go while work uses them.

use bytemuck::{cast_slice, cast_slice_mut};
use ggml_spanker::{HostMatmul, MatmulInt4, OUTPUT_ELEM_BYTES, Q4_K_BLOCK_BYTES, QK_K};
use spanker_plan::{DType, ReduceOp};
use spanker_reduce::{Element, Team, Threads, bf16, divide, f16, fold, reduce};
use spanker_runtime::{Place, Work};

use super::check::known;
use super::memory::Memory;

/// Bytes that one slice touches.
pub(crate) const SLICE: u64 = 256 << 10;
/// Multiply-accumulates of one slice of a product.
pub(crate) const SLICE_MACS: u64 = 4 << 20;

/// Scratch memory for folds, and the one thread that folds.
#[derive(Debug)]
pub(crate) struct Alu {
    solo: Team,
    folded: Vec<u64>,
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

/// Memory traffic and multiply-accumulates of an operator.
pub(crate) fn traffic(work: &Work) -> (u64, u64) {
    match *work {
        Work::Copy { length, .. } => (2 * length, 0),
        Work::Fill { length, .. } => (length, 0),
        Work::Reduce { ref sources, elements, fold, .. } => {
            let size = DType::from_code(fold.dtype).map_or(0, DType::size) as u64;
            ((sources.len() as u64 + 1) * elements * size, 0)
        }
        Work::Matmul { shape: [m, k, n], .. } => {
            let row = k / QK_K as u64 * Q4_K_BLOCK_BYTES as u64;
            ((m + n) * row + m * n * OUTPUT_ELEM_BYTES as u64, m * n * k)
        }
        _ => (0, 0),
    }
}

impl Alu {
    pub(crate) fn new() -> Alu {
        Alu { solo: Team::new(1), folded: Vec::new(), incoming: Vec::new(), garble: false }
    }

    /// Does the slice of `work` from `done` on. Returns how far it is, or nothing when it is complete.
    pub(crate) fn slice(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Option<u64> {
        match *work {
            Work::Copy { from, into, length } => {
                let part = (length - done).min(SLICE);
                let source =
                    memory.get(shifted(from, done), part).expect("it was checked").to_vec();
                let target = memory.get_mut(shifted(into, done), part).expect("it was checked");
                target.copy_from_slice(&source);
                self.spoil(target);
                (done + part < length).then_some(done + part)
            }
            Work::Fill { into, length, pattern } => {
                let part = (length - done).min(SLICE);
                let target = memory.get_mut(shifted(into, done), part).expect("it was checked");
                target
                    .chunks_exact_mut(4)
                    .for_each(|word| word.copy_from_slice(&pattern.to_le_bytes()));
                (done + part < length).then_some(done + part)
            }
            Work::Reduce { into, ref sources, elements, fold, divisor } => {
                let (dtype, op) = known(fold).expect("it was checked");
                let size = dtype.size() as u64;
                // Of all operands together, but a few elements in any case.
                let most = SLICE / (size * (sources.len() as u64 + 1));
                let part = (elements - done).min(most.max(64));
                let places: Vec<Place> =
                    sources.iter().map(|&source| shifted(source, done * size)).collect();
                let target = shifted(into, done * size);
                typed!(dtype, reduce_places(self, memory, &places, target, part, op, divisor));
                (done + part < elements).then_some(done + part)
            }
            Work::Matmul { a, b, out, shape, .. } => self.matmul(memory, [a, b, out], shape, done),
            _ => None,
        }
    }

    /// One run of rows of b against one row of a, so that the product's places follow each other.
    fn matmul(
        &mut self,
        memory: &mut Memory,
        [a, b, out]: [Place; 3],
        [m, k, n]: [u64; 3],
        done: u64,
    ) -> Option<u64> {
        let total = m * n;
        if done >= total {
            return None;
        }
        let (row, column) = (done / n, done % n);
        let part = (n - column).min((SLICE_MACS / k).max(1));
        let bytes = k / QK_K as u64 * Q4_K_BLOCK_BYTES as u64;
        let left = memory.get(shifted(a, row * bytes), bytes).expect("it was checked");
        let right = memory.get(shifted(b, column * bytes), part * bytes).expect("it was checked");
        let mut product = vec![0; part as usize * OUTPUT_ELEM_BYTES];
        HostMatmul
            .matmul_q4_k(left, right, &mut product, 1, k as usize, part as usize)
            .expect("the shape was checked");
        self.spoil(&mut product);
        let place = shifted(out, done * OUTPUT_ELEM_BYTES as u64);
        memory
            .get_mut(place, product.len() as u64)
            .expect("it was checked")
            .copy_from_slice(&product);
        (done + part < total).then_some(done + part)
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

fn shifted(place: Place, by: u64) -> Place {
    Place { offset: place.offset + by, ..place }
}

/// At least so many bytes of aligned scratch.
fn room(scratch: &mut Vec<u64>, bytes: usize) -> &mut [u8] {
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
    // A frame's data is aligned where its reader took care, and copied where not.
    let theirs: &[T] = match bytemuck::try_cast_slice(incoming) {
        Ok(aligned) => aligned,
        Err(_) => {
            let copy = room(&mut alu.incoming, incoming.len());
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
    let operands: Vec<&[T]> = sources
        .iter()
        .map(|&source| cast_slice(memory.get(source, bytes).expect("it was checked")))
        .collect();
    let out = room(&mut alu.folded, bytes as usize);
    match operands[..] {
        [only] => out.copy_from_slice(cast_slice(only)),
        _ => reduce(&alu.solo, Threads::Exactly(1), &operands, cast_slice_mut(out), op)
            .expect("operation and lengths were checked"),
    }
    if divisor > 1 {
        divide::<T>(cast_slice_mut(out), divisor as usize);
    }
    if let (true, Some(first)) = (alu.garble, out.first_mut()) {
        *first ^= 0x40;
    }
    memory.get_mut(into, bytes).expect("it was checked").copy_from_slice(out);
}
