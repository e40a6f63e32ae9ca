// SPDX-License-Identifier: Apache-2.0
//! Weights in blocks of 256, whose sub-blocks have scales of their own.

use super::Place;
use crate::simd::{Rows, Simd};

/// What comes before the weights of Q4_K and Q5_K.
#[derive(Clone, Copy)]
struct Header<I> {
    /// The scales of scales and of minima, as f16.
    d: I,
    // One to a byte: sub-blocks 0 to 3, and 4 to 7.
    scales: [I; 2],
    minima: [I; 2],
}

#[inline(always)]
fn header<S: Simd>(s: S, words: [S::Int; 4]) -> Header<S::Int> {
    let [d, scales, minima, low] = words;
    let (six, four) = (s.splat(0x3F3F_3F3F), s.splat(0x0F0F_0F0F));
    let top = s.splat(0x3030_3030);
    let (top_scales, top_minima) = (s.and(s.shr(scales, 2), top), s.and(s.shr(minima, 2), top));
    Header {
        d,
        scales: [s.and(scales, six), s.or(s.and(low, four), top_scales)],
        minima: [s.and(minima, six), s.or(s.and(s.shr(low, 4), four), top_minima)],
    }
}

/// 32 bytes of each row.
#[inline(always)]
pub(super) fn load32<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
    let (a, b) = (s.load(rows, at), s.load(rows, at + 16));
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

/// Adds the products of whole rows of Q4_K or, with fifth bits, Q5_K to `sums`.
#[inline(always)]
pub(super) fn add_blocks<S: Simd, const FIFTH: bool, const G: usize>(
    s: S,
    place: &Place<'_, G>,
    sums: &mut [[S::Float; G]],
    products: &mut [[S::Int; G]],
) {
    let (bytes, bits) = if FIFTH { (176, 5) } else { (144, 4) };
    let (inputs, zero) = (place.inputs, s.splat(0));
    for block in 0..place.rows[0].len() / bytes {
        let at = block * bytes;
        let mut headers = [Header { d: zero, scales: [zero; 2], minima: [zero; 2] }; G];
        let mut fifths = [[zero; 8]; G];
        for (group, &rows) in place.rows.iter().enumerate() {
            headers[group] = header(s, s.load(rows, at));
            if FIFTH {
                fifths[group] = load32(s, rows, at + 16);
            }
        }
        products.fill([s.splat(0); G]);
        for pair in 0..4 {
            let mut packed = [[s.splat(0); 8]; G];
            for (packed, &rows) in packed.iter_mut().zip(&place.rows) {
                *packed = load32(s, rows, at + bytes - 128 + 32 * pair);
            }
            for sub in [2 * pair, 2 * pair + 1] {
                let mut weights = packed;
                let mut scales = [s.splat(0); G];
                for group in 0..G {
                    weights[group] =
                        sub_block::<S, FIFTH>(s, &packed[group], &fifths[group], sub as u32);
                    scales[group] = byte(s, headers[group].scales[sub / 4], sub % 4);
                }
                let from = (block * 8 + sub) * inputs.rows + place.from;
                for (sums, run) in products.iter_mut().zip(&inputs.runs[from..][..place.count]) {
                    let products = s.dot32(&weights, bits, run, 0);
                    for group in 0..G {
                        sums[group] = s.add(sums[group], s.mul(products[group], scales[group]));
                    }
                }
            }
        }
        for (group, header) in headers.iter().enumerate() {
            let mut minima = [s.splat(0); 8];
            for (sub, pair) in minima.iter_mut().enumerate() {
                let minimum = byte(s, header.minima[sub / 4], sub % 4);
                *pair = s.or(minimum, s.shl(minimum, 16));
            }
            let [d, dmin] = s.halves(header.d);
            let from = block * inputs.rows + place.from;
            let scales = inputs.scales[from..][..place.count].iter();
            let parts = inputs.parts[from..][..place.count].iter();
            for (((sums, products), &a), parts) in
                sums.iter_mut().zip(products.iter()).zip(scales).zip(parts)
            {
                let mut least = s.splat(0);
                for (minima, &pair) in minima.iter().zip(parts.as_chunks().0) {
                    least = s.add_pairs(least, *minima, pair);
                }
                let a = s.splat_f(a);
                let term = s.mul_f(s.mul_f(d, a), s.float(products[group]));
                let least = s.mul_f(s.mul_f(dmin, a), s.float(least));
                sums[group] = s.add_f(sums[group], s.sub_f(term, least));
            }
        }
    }
}

/// The weights of a sub-block, without sign.
#[inline(always)]
fn sub_block<S: Simd, const FIFTH: bool>(
    s: S,
    packed: &[S::Int; 8],
    fifths: &[S::Int; 8],
    sub: u32,
) -> [S::Int; 8] {
    let mut weights = *packed;
    for (word, &fifth) in weights.iter_mut().zip(fifths) {
        *word = s.and(s.shr(*word, 4 * (sub % 2)), s.splat(0x0F0F_0F0F));
        if FIFTH {
            let bit = s.and(s.shr(fifth, sub), s.splat(0x0101_0101));
            *word = s.or(*word, s.shl(bit, 4));
        }
    }
    weights
}

/// A byte of each lane, without sign.
#[inline(always)]
fn byte<S: Simd>(s: S, word: S::Int, at: usize) -> S::Int {
    s.and(s.shr(word, 8 * at as u32), s.splat(0xFF))
}
