// SPDX-License-Identifier: Apache-2.0
//! Weights that are numbers: F32, F16 and BF16. Here lanes run along the rows.

use half::{bf16, f16};
use spanker_model::Quant;

use crate::product::Product;
use crate::simd::Simd;

/// Rows of weights, and rows of inputs, that are multiplied together.
const SIDE: usize = 4;

/// A type of numbers.
trait Plain<const BYTES: usize, const WIDE: usize> {
    fn one(bytes: &[u8; BYTES]) -> f32;
    /// 16 of them.
    fn wide<S: Simd>(s: S, bytes: &[u8; WIDE]) -> S::Wide;
}

struct F32;
struct F16;
struct Bf16;

impl Plain<4, 64> for F32 {
    #[inline(always)]
    fn one(bytes: &[u8; 4]) -> f32 {
        f32::from_le_bytes(*bytes)
    }

    #[inline(always)]
    fn wide<S: Simd>(s: S, bytes: &[u8; 64]) -> S::Wide {
        s.wide_f32(bytes)
    }
}

impl Plain<2, 32> for F16 {
    #[inline(always)]
    fn one(bytes: &[u8; 2]) -> f32 {
        f16::from_le_bytes(*bytes).to_f32_const()
    }

    #[inline(always)]
    fn wide<S: Simd>(s: S, bytes: &[u8; 32]) -> S::Wide {
        s.wide_f16(bytes)
    }
}

impl Plain<2, 32> for Bf16 {
    #[inline(always)]
    fn one(bytes: &[u8; 2]) -> f32 {
        bf16::from_le_bytes(*bytes).to_f32()
    }

    #[inline(always)]
    fn wide<S: Simd>(s: S, bytes: &[u8; 32]) -> S::Wide {
        s.wide_bf16(bytes)
    }
}

#[inline(always)]
pub(super) fn multiply<S: Simd>(s: S, product: &mut Product<'_>) {
    match product.quant {
        Quant::F16 => of_type::<S, F16, 2, 32>(s, product),
        Quant::Bf16 => of_type::<S, Bf16, 2, 32>(s, product),
        _ => of_type::<S, F32, 4, 64>(s, product),
    }
}

#[inline(always)]
fn of_type<S: Simd, P: Plain<BYTES, WIDE>, const BYTES: usize, const WIDE: usize>(
    s: S,
    product: &mut Product<'_>,
) {
    let Product { weights, n, inputs, ref mut out, .. } = *product;
    let (m, k) = (inputs.rows, inputs.width);
    let weight = |j: usize| &weights[j * k * BYTES..][..k * BYTES];
    let input = |i: usize| &inputs.plain[i * k..][..k];
    // Weights are read once; inputs, again and again, are what caches hold.
    let mut j = 0;
    while j < n {
        let wide = if n - j >= SIDE { SIDE } else { 1 };
        let mut i = 0;
        while i < m {
            let high = if m - i >= SIDE { SIDE } else { 1 };
            let out = &mut out[i * n + j..];
            match (high, wide) {
                (SIDE, SIDE) => {
                    let inputs = [input(i), input(i + 1), input(i + 2), input(i + 3)];
                    let weights = [weight(j), weight(j + 1), weight(j + 2), weight(j + 3)];
                    tile::<S, P, BYTES, WIDE, 4, 4>(s, inputs, weights, n, out);
                }
                (1, SIDE) => {
                    let weights = [weight(j), weight(j + 1), weight(j + 2), weight(j + 3)];
                    tile::<S, P, BYTES, WIDE, 1, 4>(s, [input(i)], weights, n, out);
                }
                (SIDE, _) => {
                    let inputs = [input(i), input(i + 1), input(i + 2), input(i + 3)];
                    tile::<S, P, BYTES, WIDE, 4, 1>(s, inputs, [weight(j)], n, out);
                }
                _ => tile::<S, P, BYTES, WIDE, 1, 1>(s, [input(i)], [weight(j)], n, out),
            }
            i += high;
        }
        j += wide;
    }
}

/// `I` rows of inputs with `J` rows of weights, to rows of `n` outputs.
#[inline(always)]
fn tile<S, P, const BYTES: usize, const WIDE: usize, const I: usize, const J: usize>(
    s: S,
    inputs: [&[f32]; I],
    weights: [&[u8]; J],
    n: usize,
    out: &mut [f32],
) where
    S: Simd,
    P: Plain<BYTES, WIDE>,
{
    let mut sums = [[s.wide(&[0.0; 16]); J]; I];
    let steps = inputs[0].len() / 16;
    let wide_inputs = inputs.map(|row| &row.as_chunks::<16>().0[..steps]);
    let wide_weights = weights.map(|row| &row.as_chunks::<WIDE>().0[..steps]);
    for step in 0..steps {
        let mut weights = [sums[0][0]; J];
        for (weights, row) in weights.iter_mut().zip(&wide_weights) {
            *weights = P::wide(s, &row[step]);
        }
        for (sums, row) in sums.iter_mut().zip(&wide_inputs) {
            let input = s.wide(&row[step]);
            for (sum, weights) in sums.iter_mut().zip(&weights) {
                *sum = s.wide_add(*sum, *weights, input);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for (j, sum) in sums.iter().enumerate() {
            let rest = weights[j][steps * WIDE..].as_chunks::<BYTES>().0.iter();
            let rest = rest.zip(&inputs[i][steps * 16..]);
            let mut lanes = s.wide_values(*sum);
            for (lane, (weight, input)) in lanes.iter_mut().zip(rest) {
                *lane += P::one(weight) * input;
            }
            out[i * n + j] = s.wide_sum(s.wide(&lanes));
        }
    }
}
