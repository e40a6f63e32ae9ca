// SPDX-License-Identifier: Apache-2.0
//! Every type, operation, number of cards, odd length and alignment against the bits of the host's serial fold, over
//! arbitrary bit patterns and over ordinary numbers.

use serde::Serialize;
use spanker_cuda::{CudaViewMut, Gpu, all_reduce, reduce};
use spanker_scheduler::{DType, ReduceOp, Team, Threads, host};

use super::refused;
use crate::element::{BenchElement, scramble};
use crate::error::Result;

/// Numbers of cards: with kernels of their own, and with the one for any number.
const CARDS: [usize; 7] = [1, 2, 3, 4, 5, 8, 9];
/// Elements of a buffer: less than a piece, odd, and more than one block's.
const LENGTHS: [usize; 5] = [1, 7, 1023, 4099, 100_003];

/// What was compared for a type and an operation.
#[derive(Debug, Clone, Serialize)]
pub struct Checked {
    /// The type.
    pub dtype: &'static str,
    /// The operation.
    pub op: &'static str,
    /// Elements that were compared.
    pub elements: usize,
    /// Those that were wrong.
    pub wrong: usize,
}

/// Checks every type with every operation that it has, one at a time. `begins` is called with which comes next.
///
/// # Errors
/// What the GPU fails with.
pub fn check(
    mut begins: impl FnMut(DType, ReduceOp),
) -> Result<impl Iterator<Item = Result<Checked>>> {
    let gpu = Gpu::open(0)?;
    let pairs = DType::ALL.into_iter().flat_map(|dtype| {
        let ops = ReduceOp::ALL.into_iter().filter(move |op| op.is_defined_for(dtype));
        ops.map(move |op| (dtype, op))
    });
    Ok(pairs.map(move |(dtype, op)| {
        begins(dtype, op);
        let (elements, wrong) = for_type!(dtype, T => check_as::<T>(&gpu, op))?;
        Ok(Checked { dtype: dtype.name(), op: op.name(), elements, wrong })
    }))
}

/// Bits that look random, for one element of a card.
pub(super) fn draw(card: usize, element: usize) -> u64 {
    scramble(card + 1, element + 1)
}

/// Whether a result is what the host has: the same bits, or both NaN. A logsumexp may be off by 2 units in the last
/// place of 1, or of the result if that is larger, for each fold.
pub(super) fn same<T: BenchElement>(found: T, expected: T, op: ReduceOp, folds: usize) -> bool {
    if bytemuck::bytes_of(&found) == bytemuck::bytes_of(&expected) {
        return true;
    }
    let (Some((found, epsilon)), Some((expected, _))) = (found.float(), expected.float()) else {
        return false;
    };
    if found.is_nan() || expected.is_nan() {
        return found.is_nan() && expected.is_nan();
    }
    let allowed = 2.0 * folds as f64 * epsilon * expected.abs().max(1.0);
    op == ReduceOp::LogSumExp && (found - expected).abs() <= allowed
}

/// Elements before the buffer of a card: all lie on boundaries of 16 bytes, all one element after one, or each differently.
const BEFORE: [fn(usize) -> usize; 3] = [|_| 0, |_| 1, |card| card % 3];

/// Elements that were compared, and those that were wrong.
fn check_as<T: BenchElement>(gpu: &Gpu, op: ReduceOp) -> Result<(usize, usize)> {
    let (mut elements, mut wrong) = (0, 0);
    for cards in CARDS {
        for len in LENGTHS {
            for before in BEFORE {
                // Every second element is any pattern of bits.
                let value = |card: usize, i: usize| match i % 2 {
                    0 => T::pattern(draw(card, i)),
                    _ => T::ordinary(draw(card, i)),
                };
                let inputs: Vec<Vec<T>> =
                    (0..cards).map(|card| (0..len).map(|i| value(card, i)).collect()).collect();
                let mut expected = inputs[0].clone();
                host::reduce(Team::global(), Threads::Auto, &inputs, &mut expected, op)?;
                for root in [None, Some(cards - 1)] {
                    let outputs = on_gpu(gpu, &inputs, op, before, root)?;
                    for (card, output) in outputs.iter().enumerate() {
                        let kept = root.is_some_and(|root| root != card);
                        let right = if kept { &inputs[card] } else { &expected };
                        let bad = |&(&a, &b): &(&T, &T)| !same(a, b, op, cards - 1);
                        elements += len;
                        wrong += output.iter().zip(right).filter(bad).count();
                    }
                }
            }
        }
    }
    Ok((elements, wrong))
}

/// What the GPU makes of the inputs: of all cards' buffers, or of the root's.
fn on_gpu<T: BenchElement>(
    gpu: &Gpu,
    inputs: &[Vec<T>],
    op: ReduceOp,
    before: fn(usize) -> usize,
    root: Option<usize>,
) -> Result<Vec<Vec<T>>> {
    let (cards, len) = (inputs.len(), inputs[0].len());
    let bytes = len * size_of::<T>();
    let stride = (bytes + 16 * size_of::<T>()).next_multiple_of(256);
    let place = |card: usize| {
        let first = card * stride + before(card) * size_of::<T>();
        first..first + bytes
    };
    let mut memory = gpu.allocate(stride * cards, "buffers to check")?;
    for (card, input) in inputs.iter().enumerate() {
        let mut buffer = memory.slice_mut(place(card));
        gpu.stream()
            .memcpy_htod(bytemuck::cast_slice::<T, u8>(input), &mut buffer)
            .map_err(refused)?;
    }
    {
        let mut places: Vec<CudaViewMut<'_, u8>> =
            memory.as_view_mut().chunks_exact_mut(stride).collect();
        let mut buffers: Vec<CudaViewMut<'_, u8>> = places
            .iter_mut()
            .enumerate()
            .map(|(card, whole)| {
                let first = before(card) * size_of::<T>();
                whole.slice_mut(first..first + bytes)
            })
            .collect();
        match root {
            Some(root) => reduce(gpu, &mut buffers, T::DTYPE, op, root)?,
            None => all_reduce(gpu, &mut buffers, T::DTYPE, op)?,
        }
    }
    let mut outputs = Vec::with_capacity(cards);
    for card in 0..cards {
        let mut output = vec![T::default(); len];
        let buffer = memory.slice(place(card));
        gpu.stream()
            .memcpy_dtoh(&buffer, bytemuck::cast_slice_mut::<T, u8>(&mut output))
            .map_err(refused)?;
        gpu.synchronize()?;
        outputs.push(output);
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_logsumexp_may_be_off_and_only_by_little() {
        let next = f32::from_bits(1.0f32.to_bits() + 1);
        assert!(same(1.0f32, 1.0, ReduceOp::Sum, 1));
        assert!(!same(next, 1.0, ReduceOp::Sum, 1));
        assert!(same(next, 1.0, ReduceOp::LogSumExp, 1));
        assert!(!same(1.01f32, 1.0, ReduceOp::LogSumExp, 1));
        assert!(!same(-0.0f32, 0.0, ReduceOp::Max, 1));
        assert!(same(f32::NAN, -f32::NAN, ReduceOp::Max, 1));
        assert!(!same(f32::NAN, 1.0, ReduceOp::LogSumExp, 1));
        assert!(!same(3i32, 2, ReduceOp::Avg, 1));
    }
}
