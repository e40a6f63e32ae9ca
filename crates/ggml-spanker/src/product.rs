// SPDX-License-Identifier: Apache-2.0
//! Products of rows of weights with rows of activations.
//!
//! # Bits
//!
//! An element of a product depends on its two rows alone. It is the fold of its blocks in rising order,
//! from zero, in f32:
//!
//! | weights | added for each block |
//! |---|---|
//! | Q4_0, Q5_0, Q8_0, IQ4_NL, MXFP4 | `(d * a) * S` |
//! | Q4_1, Q5_1 | `(d * a) * S + (m * a) * A` |
//! | Q2_K, Q4_K, Q5_K | `(d * a) * S - (dmin * a) * M` |
//! | Q3_K, Q6_K, IQ4_XS, TQ1_0, TQ2_0 | `(d * a) * S` |
//! | IQ2_XXS, IQ2_XS, IQ3_XXS | `(d * a) * S` |
//!
//! `d`, `m` and `dmin` are the block's numbers as f32 (in MXFP4 half of its power of two, as weights are doubled; in
//! IQ2_XXS and IQ2_XS an eighth, in IQ3_XXS a quarter, as scales are whole numbers of half-steps), `a` is the scale of the
//! activations. `S` is the exact integer sum of products of weights and activations, in K types each times its sub-block's scale;
//! `A` is the sum of the activations, `M` the sum over sub-blocks of minimum times sum of activations. Each
//! becomes f32 once. Plain weights are multiplied in 16 lanes: lane `i` adds every sixteenth product in
//! rising order, each with one rounding (a fused multiplication and addition), and the lanes are added in
//! halves (8, 4, 2, 1).
//!
//! So a product may be cut by rows of either operand, over threads and over cards, and every kernel gives
//! these bits.

use half::bf16;
use spanker_model::Quant;

use crate::blocks::unpack;
use crate::decode::{WEIGHT_TYPES, half_at, integers, scale};
use crate::error::{Error, Result};
use crate::input::Inputs;
use crate::path::Path;
use crate::q4_k::unpack_scales;
use crate::simd::{self, Lanes, Rows, Scalar};

/// Computes `out[i][j] = inputs[i] . weights[j]` for `n` rows of weights.
///
/// `weights` is `n` rows as long as the inputs, of the type `quant`; `out` is one row of `n` values for each
/// row of the inputs.
///
/// ```
/// use ggml_spanker::{Inputs, Quant, multiply, quantize};
/// let mut row = [0; 34];
/// quantize(Quant::Q8_0, &[1.0; 32], &mut row)?;
/// let mut inputs = Inputs::new();
/// inputs.load(Quant::Q8_0, &row, 1, 32)?;
/// let mut out = [0.0];
/// multiply(Quant::Q8_0, &row, 1, &inputs, &mut out)?;
/// assert!((out[0] - 32.0).abs() < 0.1);
/// # Ok::<(), ggml_spanker::Error>(())
/// ```
///
/// # Errors
/// [`Error::Type`] for weights of a type that is not in [`WEIGHT_TYPES`] or inputs that do not go with it,
/// [`Error::BadDims`] and [`Error::OutputTooSmall`] if lengths do not belong together. Then `out` has not
/// changed.
pub fn multiply(
    quant: Quant,
    weights: &[u8],
    n: usize,
    inputs: &Inputs,
    out: &mut [f32],
) -> Result<()> {
    multiply_on(Path::best(), quant, weights, n, inputs, out)
}

/// [`multiply`] by the instructions of one path. The bits are the same on every path.
///
/// # Errors
/// Those of [`multiply`], and [`Error::Path`] if this processor has not the instructions.
pub fn multiply_on(
    path: Path,
    quant: Quant,
    weights: &[u8],
    n: usize,
    inputs: &Inputs,
    out: &mut [f32],
) -> Result<()> {
    if !path.is_available() {
        return Err(Error::Path { path });
    }
    check(quant, weights, n, inputs, out)?;
    if !out.is_empty() {
        let mut product = Product { quant, weights, n, inputs, out };
        let too_far = weights.len() / n > Rows::STRIDE_MAX;
        if too_far || !simd::multiply_on(path, &mut product) {
            multiply_portable(product);
        }
    }
    Ok(())
}

/// A product whose lengths belong together, with at least one row of each operand.
pub(crate) struct Product<'a> {
    pub(crate) quant: Quant,
    pub(crate) weights: &'a [u8],
    pub(crate) n: usize,
    pub(crate) inputs: &'a Inputs,
    pub(crate) out: &'a mut [f32],
}

fn multiply_portable(product: Product<'_>) {
    let Product { quant, weights, n, inputs, out } = product;
    for (i, out) in out.chunks_exact_mut(n).enumerate() {
        for (weights, out) in weights.chunks_exact(weights.len() / n).zip(out) {
            *out = dot(quant, weights, inputs, i);
        }
    }
}

fn check(quant: Quant, weights: &[u8], n: usize, inputs: &Inputs, out: &[f32]) -> Result<()> {
    if !WEIGHT_TYPES.contains(&quant) {
        return Err(Error::Type { quant });
    }
    let (m, k, qk) = (inputs.rows, inputs.width, quant.block() as usize);
    match inputs.input {
        Some(input) if input == quant.input() => {}
        other => return Err(Error::Type { quant: other.unwrap_or(quant) }),
    }
    let bytes =
        (k / qk).checked_mul(quant.block_bytes() as usize).and_then(|row| row.checked_mul(n));
    if !k.is_multiple_of(qk) || bytes != Some(weights.len()) {
        return Err(Error::BadDims { m, k, n, qk });
    }
    match m.checked_mul(n) {
        Some(need) if need == out.len() => Ok(()),
        need => {
            let need = need.unwrap_or(usize::MAX).saturating_mul(size_of::<f32>());
            Err(Error::OutputTooSmall { have: size_of_val(out), need })
        }
    }
}

/// One row of weights with row `i` of the inputs.
fn dot(quant: Quant, weights: &[u8], inputs: &Inputs, i: usize) -> f32 {
    let k = inputs.width;
    if quant.block() == 1 {
        return dot_plain(quant, weights, &inputs.plain()[i * k..][..k]);
    }
    let (bytes, runs) = (quant.block_bytes() as usize, quant.block() as usize / 32);
    let mut total = 0.0;
    for (at, weights) in weights.chunks_exact(bytes).enumerate() {
        let mut quants = [0; 256];
        let values =
            (0..runs).flat_map(|run| inputs.runs[(at * runs + run) * inputs.rows + i].values());
        for (quant, value) in quants.iter_mut().zip(values) {
            *quant = value;
        }
        let at = at * inputs.rows + i;
        total += match runs {
            1 => short_product(quant, weights, &quants, inputs.scales[at], inputs.sums[at]),
            _ => long_product(quant, weights, &quants, inputs.scales[at], &inputs.parts[at]),
        };
    }
    total
}

/// The sum of products of weights and activations.
fn sum(integers: &[i8], quants: &[i8]) -> i32 {
    integers.iter().zip(quants).map(|(&w, &q)| i32::from(w) * i32::from(q)).sum()
}

/// A block of 32.
fn short_product(quant: Quant, weights: &[u8], quants: &[i8], a: f32, total: i32) -> f32 {
    let products = sum(&integers(quant, weights)[..32], &quants[..32]) as f32;
    match quant {
        Quant::Q4_1 | Quant::Q5_1 => {
            let (d, m) = (half_at(weights, 0), half_at(weights, 2));
            (d * a) * products + (m * a) * total as f32
        }
        _ => (scale(quant, weights) * a) * products,
    }
}

/// A block of 256.
fn long_product(quant: Quant, weights: &[u8], quants: &[i8], a: f32, sums: &[i16; 16]) -> f32 {
    if let Some((block, offset)) = unpack(quant, weights) {
        let mut products = 0;
        for (sub, scale) in block.scales.into_iter().enumerate() {
            let pairs = block.quants[16 * sub..].iter().zip(&quants[16 * sub..16 * sub + 16]);
            let all = pairs.map(|(&w, &q)| (i32::from(w) - offset) * i32::from(q));
            products += i32::from(scale) * all.sum::<i32>();
        }
        let term = (block.d * a) * products as f32;
        if quant != Quant::Q2K {
            return term;
        }
        let pairs = block.minima.iter().zip(sums);
        let minima: i32 = pairs.map(|(&min, &sum)| i32::from(min) * i32::from(sum)).sum();
        return term - (block.dmin * a) * minima as f32;
    }
    let integers = integers(quant, weights);
    let sum = |range: std::ops::Range<usize>| sum(&integers[range.clone()], &quants[range]);
    if quant == Quant::Q6K {
        let scaled =
            |sub: usize| i32::from(weights[192 + sub] as i8) * sum(16 * sub..16 * sub + 16);
        return (half_at(weights, 208) * a) * (0..16).map(scaled).sum::<i32>() as f32;
    }
    let (d, dmin) = (half_at(weights, 0), half_at(weights, 2));
    let (scales, mins) = unpack_scales(&weights[4..16]);
    let scaled = |sub: usize| i32::from(scales[sub]) * sum(32 * sub..32 * sub + 32);
    let least = |sub: usize| i32::from(mins[sub]) * i32::from(sums[2 * sub] + sums[2 * sub + 1]);
    let products: i32 = (0..8).map(scaled).sum();
    let minima: i32 = (0..8).map(least).sum();
    (d * a) * products as f32 - (dmin * a) * minima as f32
}

fn dot_plain(quant: Quant, weights: &[u8], row: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let size = quant.block_bytes() as usize;
    for (index, (weight, value)) in weights.chunks_exact(size).zip(row).enumerate() {
        let weight = match quant {
            Quant::F16 => half_at(weight, 0),
            Quant::Bf16 => bf16::from_le_bytes([weight[0], weight[1]]).to_f32(),
            _ => f32::from_le_bytes([weight[0], weight[1], weight[2], weight[3]]),
        };
        let lane = &mut lanes[index % 16];
        *lane = weight.mul_add(*value, *lane);
    }
    Scalar.wide_sum(lanes)
}
