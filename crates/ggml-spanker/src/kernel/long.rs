// SPDX-License-Identifier: Apache-2.0
//! Weights in blocks of 256, whose sub-blocks have scales of their own.

use super::Place;
use crate::input::Inputs;
use crate::simd::{Rows, Simd};

/// Scales and minima of the sub-blocks of Q4_K and Q5_K, one to a byte: 0 to 3 and 4 to 7 of each.
struct Header<I> {
    scales: [I; 2],
    minima: [I; 2],
}

#[inline(always)]
fn header<S: Simd>(s: S, words: [S::Int; 4]) -> Header<S::Int> {
    let [_, scales, minima, low] = words;
    let (six, four) = (s.splat(0x3F3F_3F3F), s.splat(0x0F0F_0F0F));
    let top = s.splat(0x3030_3030);
    let (top_scales, top_minima) = (s.and(s.shr(scales, 2), top), s.and(s.shr(minima, 2), top));
    Header {
        scales: [s.and(scales, six), s.or(s.and(low, four), top_scales)],
        minima: [s.and(minima, six), s.or(s.and(s.shr(low, 4), four), top_minima)],
    }
}

/// 32 bytes of each row.
#[inline(always)]
fn load32<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
    let (a, b) = (s.load(rows, at), s.load(rows, at + 16));
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

/// Adds the products of whole rows of Q4_K or, with fifth bits, Q5_K to `sums`.
#[inline(always)]
pub(super) fn add_blocks<S: Simd, const FIFTH: bool>(
    s: S,
    inputs: &Inputs,
    place: &Place<'_>,
    sums: &mut [S::Float],
    products: &mut [S::Int],
) {
    let bytes = if FIFTH { 176 } else { 144 };
    let quants = bytes - 128;
    let nibble = s.splat(0x0F0F_0F0F);
    for block in 0..place.rows.len() / bytes {
        let at = block * bytes;
        let words = s.load(place.rows, at);
        let header = header(s, words);
        let bits = if FIFTH { load32(s, place.rows, at + 16) } else { [s.splat(0); 8] };
        products.fill(s.splat(0));
        for pair in 0..4 {
            let packed = load32(s, place.rows, at + quants + 32 * pair);
            for odd in 0..2 {
                let sub = 2 * pair + odd;
                let mut weights = packed;
                for (weights, &bits) in weights.iter_mut().zip(&bits) {
                    *weights = s.and(s.shr(*weights, 4 * odd as u32), nibble);
                    if FIFTH {
                        let bit = s.and(s.shr(bits, sub as u32), s.splat(0x0101_0101));
                        *weights = s.or(*weights, s.shl(bit, 4));
                    }
                }
                let scale = byte(s, header.scales[sub / 4], sub % 4);
                let from = (block * 8 + sub) * inputs.rows + place.from;
                for (sum, run) in products.iter_mut().zip(&inputs.runs[from..][..place.count]) {
                    let product = s.dot32(&weights, if FIFTH { 5 } else { 4 }, run, 0);
                    *sum = s.add(*sum, s.mul(product, scale));
                }
            }
        }
        let mut minima = [s.splat(0); 8];
        for (sub, pair) in minima.iter_mut().enumerate() {
            let minimum = byte(s, header.minima[sub / 4], sub % 4);
            *pair = s.or(minimum, s.shl(minimum, 16));
        }
        let [d, dmin] = s.halves(words[0]);
        let from = block * inputs.rows + place.from;
        let scales = inputs.scales[from..][..place.count].iter();
        let parts = inputs.parts[from..][..place.count].iter();
        for (((sum, product), &a), parts) in
            sums.iter_mut().zip(products.iter()).zip(scales).zip(parts)
        {
            let mut least = s.splat(0);
            for (minima, &pair) in minima.iter().zip(parts.as_chunks().0) {
                least = s.add_pairs(least, *minima, pair);
            }
            let a = s.splat_f(a);
            let term = s.mul_f(s.mul_f(d, a), s.float(*product));
            let least = s.mul_f(s.mul_f(dmin, a), s.float(least));
            *sum = s.add_f(*sum, s.sub_f(term, least));
        }
    }
}

/// A byte of each lane, without sign.
#[inline(always)]
fn byte<S: Simd>(s: S, word: S::Int, at: usize) -> S::Int {
    s.and(s.shr(word, 8 * at as u32), s.splat(0xFF))
}

/// A byte of each lane, with its sign.
#[inline(always)]
fn signed_byte<S: Simd>(s: S, word: S::Int, at: usize) -> S::Int {
    s.sar(s.shl(word, 24 - 8 * at as u32), 24)
}

/// Adds the products of whole rows of Q6_K to `sums`.
#[inline(always)]
pub(super) fn add_blocks_6<S: Simd>(
    s: S,
    inputs: &Inputs,
    place: &Place<'_>,
    sums: &mut [S::Float],
    products: &mut [S::Int],
) {
    for block in 0..place.rows.len() / 210 {
        let at = block * 210;
        let words = s.load(place.rows, at + 192);
        let mut subs = [s.splat(0); 16];
        for (sub, scale) in subs.iter_mut().enumerate() {
            *scale = signed_byte(s, words[sub / 4], sub % 4);
        }
        products.fill(s.splat(0));
        for half in 0..2 {
            let low = at + 64 * half;
            let lows = [load32(s, place.rows, low), load32(s, place.rows, low + 32)];
            let high = load32(s, place.rows, at + 128 + 32 * half);
            for quarter in 0..4 {
                let weights = sixes(s, &lows[quarter % 2], &high, quarter as u32);
                let sub = 8 * half + 2 * quarter;
                let scales = [subs[sub], subs[sub + 1]];
                let from = (block * 16 + sub) / 2 * inputs.rows + place.from;
                for (sum, run) in products.iter_mut().zip(&inputs.runs[from..][..place.count]) {
                    let one = s.mul(s.dot16(&weights, 6, run, 0), scales[0]);
                    let two = s.mul(s.dot16(&weights, 6, run, 1), scales[1]);
                    *sum = s.add(*sum, s.add(one, two));
                }
            }
        }
        let mut pairs = [s.splat(0); 8];
        for (pair, scales) in pairs.iter_mut().zip(subs.as_chunks::<2>().0) {
            *pair = s.or(s.and(scales[0], s.splat(0xFFFF)), s.shl(scales[1], 16));
        }
        // The scale is the last two bytes of the block; a word from there would end outside it.
        let [_, d] = s.halves(s.word(place.rows, at + 206));
        let from = block * inputs.rows + place.from;
        let scales = inputs.scales[from..][..place.count].iter();
        let parts = inputs.parts[from..][..place.count].iter();
        for (((sum, product), &a), parts) in
            sums.iter_mut().zip(products.iter()).zip(scales).zip(parts)
        {
            // Unpacked weights are 32 too much.
            let mut over = s.splat(0);
            for (pairs, &with) in pairs.iter().zip(parts.as_chunks().0) {
                over = s.add_pairs(over, *pairs, with);
            }
            let product = s.float(s.sub(*product, s.shl(over, 5)));
            *sum = s.add_f(*sum, s.mul_f(s.mul_f(d, s.splat_f(a)), product));
        }
    }
}

/// 32 weights of 6 bits, without sign, from their four low and two high bits.
#[inline(always)]
fn sixes<S: Simd>(s: S, low: &[S::Int; 8], high: &[S::Int; 8], quarter: u32) -> [S::Int; 8] {
    let mut weights = *low;
    for (weights, &high) in weights.iter_mut().zip(high) {
        let low = s.and(s.shr(*weights, 4 * (quarter / 2)), s.splat(0x0F0F_0F0F));
        let high = s.and(s.shr(high, 2 * quarter), s.splat(0x0303_0303));
        *weights = s.or(low, s.shl(high, 4));
    }
    weights
}
