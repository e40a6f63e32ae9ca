// SPDX-License-Identifier: Apache-2.0
//! Weights in blocks of 256 with a scale for each 16 or 32 of them, whose bits are taken apart in the lanes: Q2_K, Q3_K, Q6_K,
//! IQ4_XS and TQ2_0.

use super::Place;
use super::long::load32;
use super::short::{looked_up, raised};
use crate::decode::CURVE;
use crate::simd::{Rows, Simd};

/// A type of weights, as kernels see it.
pub(super) trait Subs {
    /// Bytes of a block.
    const BYTES: usize;
    /// Unpacked weights are less than `1 << BITS`.
    const BITS: u32;
    /// What unpacked weights have too much.
    const OFFSET: i32;
    /// Weights that share a scale: 16, 32 or all 256.
    const SHARE: usize;
    /// Whether there are minima.
    const MINIMA: bool = false;

    /// The scale of each 16 weights, and pairs of minima, for the block at byte `at` of each row.
    fn scales<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> ([S::Int; 16], [S::Int; 8]);
    /// The scale of the scales, and that of the minima.
    fn numbers<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Float; 2];
    /// What is stored of half of the block's weights.
    fn half<S: Simd>(s: S, rows: Rows<'_>, at: usize, half: usize) -> [[S::Int; 8]; 3];
    /// 32 weights of it, those of part 0 to 7 of the block, without sign.
    fn part<S: Simd>(s: S, half: &[[S::Int; 8]; 3], part: usize) -> [S::Int; 8];
}

pub(super) struct Q2K;
pub(super) struct Q3K;
pub(super) struct Q6K;
pub(super) struct Iq4Xs;
pub(super) struct Tq2_0;

/// A byte of each lane, with its sign.
#[inline(always)]
fn signed_byte<S: Simd>(s: S, word: S::Int, at: usize) -> S::Int {
    s.sar(s.shl(word, 24 - 8 * at as u32), 24)
}

/// The lowest bits of every byte, `1 << shift` of them being one.
#[inline(always)]
fn bits<S: Simd>(s: S, words: &[S::Int; 8], shift: u32, mask: i32) -> [S::Int; 8] {
    let mut weights = *words;
    for word in &mut weights {
        *word = s.and(s.shr(*word, shift), s.splat(mask * 0x0101_0101));
    }
    weights
}

/// The word that begins with the high half of `one` and ends with the low half of `two`.
#[inline(always)]
fn across<S: Simd>(s: S, one: S::Int, two: S::Int) -> S::Int {
    s.or(s.shr(one, 16), s.shl(two, 16))
}

impl Subs for Q2K {
    const BYTES: usize = 84;
    const BITS: u32 = 2;
    const OFFSET: i32 = 0;
    const SHARE: usize = 16;
    const MINIMA: bool = true;

    #[inline(always)]
    fn scales<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> ([S::Int; 16], [S::Int; 8]) {
        let words = s.load(rows, at);
        let (mut scales, mut minima) = ([s.splat(0); 16], [s.splat(0); 8]);
        for (sub, scale) in scales.iter_mut().enumerate() {
            *scale = s.and(s.shr(words[sub / 4], 8 * (sub % 4) as u32), s.splat(15));
        }
        for (pair, minima) in minima.iter_mut().enumerate() {
            let both = s.shr(words[pair / 2], 16 * (pair % 2) as u32 + 4);
            let (low, high) = (s.and(both, s.splat(15)), s.and(both, s.splat(0xF00)));
            *minima = s.or(low, s.shl(high, 8));
        }
        (scales, minima)
    }

    #[inline(always)]
    fn numbers<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Float; 2] {
        s.halves(s.word(rows, at + 80))
    }

    #[inline(always)]
    fn half<S: Simd>(s: S, rows: Rows<'_>, at: usize, half: usize) -> [[S::Int; 8]; 3] {
        [load32(s, rows, at + 16 + 32 * half); 3]
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, half: &[[S::Int; 8]; 3], part: usize) -> [S::Int; 8] {
        bits(s, &half[0], 2 * (part % 4) as u32, 3)
    }
}

impl Subs for Q3K {
    const BYTES: usize = 110;
    const BITS: u32 = 3;
    const OFFSET: i32 = 4;
    const SHARE: usize = 16;

    #[inline(always)]
    fn scales<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> ([S::Int; 16], [S::Int; 8]) {
        // The 12 bytes of scales are the last but two: 16 bytes from them on would end outside the block.
        let [a, b, c, d] = s.load(rows, at + 94);
        let (one, two, high) = (across(s, a, b), across(s, b, c), across(s, c, d));
        let mut scales = [s.splat(0); 16];
        for (group, scales) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let low = s.shr(if group % 2 == 0 { one } else { two }, 4 * (group / 2) as u32);
            let top = s.and(s.shr(high, 2 * group as u32), s.splat(0x0303_0303));
            let word = s.or(s.and(low, s.splat(0x0F0F_0F0F)), s.shl(top, 4));
            for (at, scale) in scales.iter_mut().enumerate() {
                let byte = s.and(s.shr(word, 8 * at as u32), s.splat(0xFF));
                *scale = s.sub(byte, s.splat(32));
            }
        }
        (scales, [s.splat(0); 8])
    }

    #[inline(always)]
    fn numbers<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Float; 2] {
        let [_, d] = s.halves(s.word(rows, at + 106));
        [d; 2]
    }

    #[inline(always)]
    fn half<S: Simd>(s: S, rows: Rows<'_>, at: usize, half: usize) -> [[S::Int; 8]; 3] {
        let low = load32(s, rows, at + 32 + 32 * half);
        let mut high = load32(s, rows, at);
        for word in &mut high {
            *word = s.shr(*word, 4 * half as u32);
        }
        [low, high, high]
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, half: &[[S::Int; 8]; 3], part: usize) -> [S::Int; 8] {
        let quarter = (part % 4) as u32;
        let mut weights = bits(s, &half[0], 2 * quarter, 3);
        for (word, &high) in weights.iter_mut().zip(&half[1]) {
            let bit = s.and(s.shr(high, quarter), s.splat(0x0101_0101));
            *word = s.or(*word, s.shl(bit, 2));
        }
        weights
    }
}

impl Subs for Q6K {
    const BYTES: usize = 210;
    const BITS: u32 = 6;
    const OFFSET: i32 = 32;
    const SHARE: usize = 16;

    #[inline(always)]
    fn scales<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> ([S::Int; 16], [S::Int; 8]) {
        let words = s.load(rows, at + 192);
        let mut scales = [s.splat(0); 16];
        for (sub, scale) in scales.iter_mut().enumerate() {
            *scale = signed_byte(s, words[sub / 4], sub % 4);
        }
        (scales, [s.splat(0); 8])
    }

    #[inline(always)]
    fn numbers<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Float; 2] {
        // The scale is the last two bytes of the block; a word from there would end outside it.
        let [_, d] = s.halves(s.word(rows, at + 206));
        [d; 2]
    }

    #[inline(always)]
    fn half<S: Simd>(s: S, rows: Rows<'_>, at: usize, half: usize) -> [[S::Int; 8]; 3] {
        [
            load32(s, rows, at + 64 * half),
            load32(s, rows, at + 64 * half + 32),
            load32(s, rows, at + 128 + 32 * half),
        ]
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, half: &[[S::Int; 8]; 3], part: usize) -> [S::Int; 8] {
        let quarter = part % 4;
        let mut weights = bits(s, &half[quarter % 2], 4 * (quarter / 2) as u32, 15);
        for (word, &high) in weights.iter_mut().zip(&half[2]) {
            let high = s.and(s.shr(high, 2 * quarter as u32), s.splat(0x0303_0303));
            *word = s.or(*word, s.shl(high, 4));
        }
        weights
    }
}

impl Subs for Iq4Xs {
    const BYTES: usize = 136;
    const BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const SHARE: usize = 32;

    #[inline(always)]
    fn scales<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> ([S::Int; 16], [S::Int; 8]) {
        let [high, low, _, _] = s.load(rows, at);
        let mut scales = [s.splat(0); 16];
        for (sub, scales) in scales.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let low = s.and(s.shr(low, 4 * sub as u32), s.splat(15));
            let high = s.and(s.shr(high, 16 + 2 * sub as u32), s.splat(3));
            *scales = [s.sub(s.or(low, s.shl(high, 4)), s.splat(32)); 2];
        }
        (scales, [s.splat(0); 8])
    }

    #[inline(always)]
    fn numbers<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Float; 2] {
        s.halves(s.word(rows, at))
    }

    #[inline(always)]
    fn half<S: Simd>(s: S, rows: Rows<'_>, at: usize, half: usize) -> [[S::Int; 8]; 3] {
        let two = load32(s, rows, at + 8 + 64 * half + 32);
        [load32(s, rows, at + 8 + 64 * half), two, two]
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, half: &[[S::Int; 8]; 3], part: usize) -> [S::Int; 8] {
        const TABLE: [u8; 16] = raised(CURVE, Iq4Xs::OFFSET);
        let (words, first) = (&half[part % 4 / 2], 4 * (part % 2));
        let mut weights = [s.splat(0); 8];
        for at in 0..4 {
            let word = words[first + at];
            weights[at] = s.and(word, s.splat(0x0F0F_0F0F));
            weights[4 + at] = s.and(s.shr(word, 4), s.splat(0x0F0F_0F0F));
        }
        looked_up(s, &TABLE, weights)
    }
}

impl Subs for Tq2_0 {
    const BYTES: usize = 66;
    const BITS: u32 = 2;
    const OFFSET: i32 = 1;
    const SHARE: usize = 256;

    #[inline(always)]
    fn scales<S: Simd>(s: S, _: Rows<'_>, _: usize) -> ([S::Int; 16], [S::Int; 8]) {
        ([s.splat(1); 16], [s.splat(0); 8])
    }

    #[inline(always)]
    fn numbers<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Float; 2] {
        let [_, d] = s.halves(s.word(rows, at + 62));
        [d; 2]
    }

    #[inline(always)]
    fn half<S: Simd>(s: S, rows: Rows<'_>, at: usize, half: usize) -> [[S::Int; 8]; 3] {
        [load32(s, rows, at + 32 * half); 3]
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, half: &[[S::Int; 8]; 3], part: usize) -> [S::Int; 8] {
        bits(s, &half[0], 2 * (part % 4) as u32, 3)
    }
}

/// Adds the products of whole rows to `sums`.
#[inline(always)]
pub(super) fn add_blocks<S: Simd, K: Subs, const G: usize>(
    s: S,
    place: &Place<'_, G>,
    sums: &mut [[S::Float; G]],
    products: &mut [[S::Int; G]],
) {
    let inputs = place.inputs;
    for block in 0..place.rows[0].len() / K::BYTES {
        let at = block * K::BYTES;
        let mut scales = [([s.splat(0); 16], [s.splat(0); 8]); G];
        for (scales, &rows) in scales.iter_mut().zip(&place.rows) {
            *scales = K::scales(s, rows, at);
        }
        products.fill([s.splat(0); G]);
        for half in 0..2 {
            let mut packed = [[[s.splat(0); 8]; 3]; G];
            for (packed, &rows) in packed.iter_mut().zip(&place.rows) {
                *packed = K::half(s, rows, at, half);
            }
            for part in 4 * half..4 * half + 4 {
                let mut weights = [[s.splat(0); 8]; G];
                for (weights, packed) in weights.iter_mut().zip(&packed) {
                    *weights = K::part(s, packed, part);
                }
                let from = (block * 8 + part) * inputs.rows + place.from;
                for (sums, run) in products.iter_mut().zip(&inputs.runs[from..][..place.count]) {
                    if K::SHARE >= 32 {
                        let all = s.dot32(&weights, K::BITS, run, 0);
                        for group in 0..G {
                            let scaled = match K::SHARE {
                                32 => s.mul(all[group], scales[group].0[2 * part]),
                                _ => all[group],
                            };
                            sums[group] = s.add(sums[group], scaled);
                        }
                        continue;
                    }
                    let one = s.dot16(&weights, K::BITS, run, 0);
                    let two = s.dot16(&weights, K::BITS, run, 1);
                    for group in 0..G {
                        let one = s.mul(one[group], scales[group].0[2 * part]);
                        let two = s.mul(two[group], scales[group].0[2 * part + 1]);
                        sums[group] = s.add(sums[group], s.add(one, two));
                    }
                }
            }
        }
        for group in 0..G {
            let (scales, minima) = &scales[group];
            let mut pairs = [s.splat(0); 8];
            for (pair, scales) in pairs.iter_mut().zip(scales.as_chunks::<2>().0) {
                *pair = s.or(s.and(scales[0], s.splat(0xFFFF)), s.shl(scales[1], 16));
            }
            let [d, dmin] = K::numbers(s, place.rows[group], at);
            let from = block * inputs.rows + place.from;
            let factors = inputs.scales[from..][..place.count].iter();
            let parts = inputs.parts[from..][..place.count].iter();
            let rows = sums.iter_mut().zip(products.iter()).zip(factors).zip(parts);
            for (((sums, products), &a), parts) in rows {
                let (a, mut product) = (s.splat_f(a), products[group]);
                if K::OFFSET != 0 {
                    // Unpacked weights are that much too much.
                    let over = dot_parts(s, &pairs, parts);
                    product = s.sub(product, s.shl(over, K::OFFSET.ilog2()));
                }
                let mut term = s.mul_f(s.mul_f(d, a), s.float(product));
                if K::MINIMA {
                    let least = s.float(dot_parts(s, minima, parts));
                    term = s.sub_f(term, s.mul_f(s.mul_f(dmin, a), least));
                }
                sums[group] = s.add_f(sums[group], term);
            }
        }
    }
}

/// The products of 16 numbers of each lane with the sums of 16 activations each.
#[inline(always)]
pub(super) fn dot_parts<S: Simd>(s: S, pairs: &[S::Int; 8], parts: &[i16; 16]) -> S::Int {
    let mut sum = s.splat(0);
    for (pair, &with) in pairs.iter().zip(parts.as_chunks().0) {
        sum = s.add_pairs(sum, *pair, with);
    }
    sum
}
