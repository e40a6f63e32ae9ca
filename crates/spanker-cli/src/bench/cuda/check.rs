// SPDX-License-Identifier: Apache-2.0
//! `--check`: every type, operation, number of cards, odd length and alignment against the bits of the host's serial
//! fold, over arbitrary bit patterns and over ordinary numbers.

use spanker_cuda::{CudaViewMut, Gpu, all_reduce, reduce};
use spanker_scheduler::{DType, ReduceOp, Team, Threads, bf16, f16, host};

use super::super::Args;
use super::super::data::Sample;
use crate::output;

/// Numbers of cards: with kernels of their own, and with the one for any number.
const CARDS: [usize; 7] = [1, 2, 3, 4, 5, 8, 9];
/// Elements of a buffer: less than a piece, odd, and more than one block's.
const LENGTHS: [usize; 5] = [1, 7, 1023, 4099, 100_003];

/// An element type whose values can be drawn and compared.
pub(super) trait Drawn: Sample {
    /// An ordinary number: a float between -1 and 1, any integer.
    fn tame(bits: u64) -> Self;

    /// Any pattern of bits.
    fn wild(bits: u64) -> Self;

    /// The value as a double and the distance of floats of this type after 1; nothing for integers.
    fn float(self) -> Option<(f64, f64)>;
}

macro_rules! drawn_float {
    ($type:ty, $bits:ty, $from:expr, $epsilon:expr) => {
        impl Drawn for $type {
            fn tame(bits: u64) -> Self {
                ($from)((bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
            }
            fn wild(bits: u64) -> Self {
                <$type>::from_bits(bits as $bits)
            }
            fn float(self) -> Option<(f64, f64)> {
                Some((f64::from(self), f64::from($epsilon)))
            }
        }
    };
}

drawn_float!(f32, u32, |x: f64| x as f32, f32::EPSILON);
drawn_float!(f64, u64, |x: f64| x, f64::EPSILON);
drawn_float!(f16, u16, f16::from_f64, f16::EPSILON);
drawn_float!(bf16, u16, bf16::from_f64, bf16::EPSILON);

macro_rules! drawn_integer {
    ($($type:ty),*) => {
        $(impl Drawn for $type {
            fn tame(bits: u64) -> Self {
                bits as $type
            }
            fn wild(bits: u64) -> Self {
                bits as $type
            }
            fn float(self) -> Option<(f64, f64)> {
                None
            }
        })*
    };
}

drawn_integer!(i32, i64, u8, u32);

/// Bits that look random, for one element of a card.
pub(super) fn draw(card: usize, element: usize) -> u64 {
    let mut z = (card as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (element as u64 + 1);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Whether a result is what the host has: the same bits, or both NaN. A logsumexp may be off by 2 units in the last
/// place of 1, or of the result if that is larger, for each fold.
pub(super) fn same<T: Drawn>(found: T, expected: T, op: ReduceOp, folds: usize) -> bool {
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

/// How the buffers lie: all on boundaries of 16 bytes, all one element after one, or each differently.
#[derive(Debug, Clone, Copy)]
enum Lie {
    Aligned,
    Shifted,
    Unequal,
}

impl Lie {
    const ALL: [Lie; 3] = [Lie::Aligned, Lie::Shifted, Lie::Unequal];

    /// Elements before the buffer of a card.
    fn before(self, card: usize) -> usize {
        match self {
            Lie::Aligned => 0,
            Lie::Shifted => 1,
            Lie::Unequal => card % 3,
        }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let gpu = Gpu::open(0)?;
    let mut wrong = 0;
    for dtype in DType::ALL {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(dtype)) {
            output::progress(&format!("checking {op} of {dtype}"));
            let checked = check(&gpu, dtype, op);
            output::progress_done();
            let (elements, bad) = checked?;
            wrong += bad;
            output::line(&match args.json {
                true => serde_json::json!({
                    "dtype": dtype.name(), "op": op.name(), "elements": elements, "wrong": bad,
                })
                .to_string(),
                false => format!(
                    "{:<5} {:<10} {elements:>9} elements, {bad} wrong",
                    dtype.name(),
                    op.name()
                ),
            })?;
        }
    }
    anyhow::ensure!(wrong == 0, "{wrong} elements are wrong");
    Ok(())
}

fn check(gpu: &Gpu, dtype: DType, op: ReduceOp) -> anyhow::Result<(usize, usize)> {
    for_type!(dtype, check_as(gpu, op))
}

/// Elements that were compared, and those that were wrong.
fn check_as<T: Drawn>(gpu: &Gpu, op: ReduceOp) -> anyhow::Result<(usize, usize)> {
    let (mut elements, mut wrong) = (0, 0);
    for cards in CARDS {
        for len in LENGTHS {
            for lie in Lie::ALL {
                // Every second element is any pattern of bits.
                let value = |card: usize, i: usize| match i % 2 {
                    0 => T::wild(draw(card, i)),
                    _ => T::tame(draw(card, i)),
                };
                let inputs: Vec<Vec<T>> =
                    (0..cards).map(|card| (0..len).map(|i| value(card, i)).collect()).collect();
                let mut expected = inputs[0].clone();
                host::reduce(Team::global(), Threads::Auto, &inputs, &mut expected, op)?;
                for root in [None, Some(cards - 1)] {
                    let outputs = on_gpu(gpu, &inputs, op, lie, root)?;
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
fn on_gpu<T: Drawn>(
    gpu: &Gpu,
    inputs: &[Vec<T>],
    op: ReduceOp,
    lie: Lie,
    root: Option<usize>,
) -> anyhow::Result<Vec<Vec<T>>> {
    let (cards, len) = (inputs.len(), inputs[0].len());
    let bytes = len * size_of::<T>();
    let stride = (bytes + 16 * size_of::<T>()).next_multiple_of(256);
    let place = |card: usize| {
        let first = card * stride + lie.before(card) * size_of::<T>();
        first..first + bytes
    };
    let mut memory = gpu.allocate(stride * cards, "buffers to check")?;
    for (card, input) in inputs.iter().enumerate() {
        let mut buffer = memory.slice_mut(place(card));
        gpu.stream().memcpy_htod(bytemuck::cast_slice::<T, u8>(input), &mut buffer)?;
    }
    {
        let mut places: Vec<CudaViewMut<'_, u8>> =
            memory.as_view_mut().chunks_exact_mut(stride).collect();
        let mut buffers: Vec<CudaViewMut<'_, u8>> = places
            .iter_mut()
            .enumerate()
            .map(|(card, whole)| {
                let first = lie.before(card) * size_of::<T>();
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
        gpu.stream().memcpy_dtoh(&buffer, bytemuck::cast_slice_mut::<T, u8>(&mut output))?;
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

    #[test]
    fn drawn_numbers_are_ordinary_where_they_should_be() {
        for element in 0..1000 {
            let x = f16::tame(draw(3, element));
            assert!((-1.0..=1.0).contains(&f64::from(x)), "{x}");
        }
        assert_ne!(draw(0, 1), draw(1, 0));
    }
}
