// SPDX-License-Identifier: Apache-2.0
//! One row of inputs with weights whose magnitudes stand in codebooks, or that are digits to the base of three: IQ2_XXS,
//! IQ2_XS, IQ3_XXS and TQ1_0. A row of weights is a vector's length of weights after the other, because looking up is the
//! work; integer sums of a block are exact, so the order in them does not matter, and blocks are added as everywhere.

use spanker_model::Quant;

use crate::blocks::{Book, Iq2Xs, Iq2Xxs, Iq3Xxs};
use crate::product::Product;
use crate::simd::Simd;

/// Computes the product if it is one of these; says whether it was.
#[inline(always)]
pub(super) fn multiply<S: Simd>(s: S, product: &mut Product<'_>) -> bool {
    if !S::BOOKS || product.inputs.rows != 1 {
        return false;
    }
    match product.quant {
        Quant::Iq2Xxs => by_book::<S, Iq2Xxs>(s, product),
        Quant::Iq2Xs => by_book::<S, Iq2Xs>(s, product),
        Quant::Iq3Xxs => by_book::<S, Iq3Xxs>(s, product),
        Quant::Tq1_0 => by_digits(s, product),
        _ => return false,
    }
    true
}

#[inline(always)]
fn by_book<S: Simd, B: Book>(s: S, product: &mut Product<'_>) {
    let Product { weights, n, inputs, ref mut out, .. } = *product;
    let row = weights.len() / n;
    for (weights, out) in weights.chunks_exact(row).zip(out.iter_mut()) {
        let mut sum = 0.0;
        let runs = inputs.runs.as_chunks::<8>().0.iter().zip(&inputs.scales);
        for (block, (runs, &a)) in weights.chunks_exact(B::BYTES).zip(runs) {
            let d = s.half([block[0], block[1]]) * B::FACTOR;
            sum += d * a * s.signed_sum::<B>(block, runs) as f32;
        }
        *out = sum;
    }
}

/// Bytes of a block of TQ1_0.
const DIGITS: usize = 54;

#[inline(always)]
fn by_digits<S: Simd>(s: S, product: &mut Product<'_>) {
    let Product { weights, n, inputs, ref mut out, .. } = *product;
    let row = weights.len() / n;
    // Digits are one too much.
    let mut over = Vec::with_capacity(inputs.parts.len());
    for parts in &inputs.parts {
        let mut sum = 0;
        for &part in parts {
            sum += i32::from(part);
        }
        over.push(sum);
    }
    for (weights, out) in weights.chunks_exact(row).zip(out.iter_mut()) {
        let mut sum = 0.0;
        let runs = inputs.runs.as_chunks::<8>().0.iter().zip(&inputs.scales).zip(&over);
        for (block, ((runs, &a), over)) in weights.as_chunks::<DIGITS>().0.iter().zip(runs) {
            let d = s.half([block[52], block[53]]);
            sum += d * a * (s.digits_sum(block, runs) - over) as f32;
        }
        *out = sum;
    }
}
