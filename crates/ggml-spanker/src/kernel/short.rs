// SPDX-License-Identifier: Apache-2.0
//! Weights in blocks of 32.

use super::Place;
use crate::decode::{CURVE, HALVES};
use crate::simd::{Rows, Simd};

/// A type of weights, as kernels see it.
pub(super) trait Short {
    /// Bytes of a block.
    const BYTES: usize;
    /// Unpacked weights are less than `1 << BITS`.
    const BITS: u32;
    /// What unpacked weights have too much.
    const OFFSET: i32;
    /// Whether a minimum follows the scale.
    const MINIMUM: bool;

    /// The weights of the block at byte `at` of each row, without sign.
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8];

    /// The scale of the block at byte `at` of each row and, where there is one, its minimum.
    #[inline(always)]
    fn numbers<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Float; 2] {
        s.halves(s.word(rows, at))
    }
}

pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q5_0;
pub(super) struct Q5_1;
pub(super) struct Q8_0;
pub(super) struct Iq4Nl;
pub(super) struct Mxfp4;

impl Short for Q4_0 {
    const BYTES: usize = 18;
    const BITS: u32 = 4;
    const OFFSET: i32 = 8;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
        nibbles(s, rows, at + 2)
    }
}

impl Short for Q4_1 {
    const BYTES: usize = 20;
    const BITS: u32 = 4;
    const OFFSET: i32 = 0;
    const MINIMUM: bool = true;

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
        nibbles(s, rows, at + 4)
    }
}

impl Short for Q5_0 {
    const BYTES: usize = 22;
    const BITS: u32 = 5;
    const OFFSET: i32 = 16;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
        nibbles_and_bits(s, rows, at + 2)
    }
}

impl Short for Q5_1 {
    const BYTES: usize = 24;
    const BITS: u32 = 5;
    const OFFSET: i32 = 0;
    const MINIMUM: bool = true;

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
        nibbles_and_bits(s, rows, at + 4)
    }
}

impl Short for Q8_0 {
    const BYTES: usize = 34;
    const BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
        let (a, b) = (s.load(rows, at + 2), s.load(rows, at + 18));
        // Another top bit adds 128 to a signed byte.
        let top = s.splat(0x8080_8080_u32 as i32);
        let mut weights = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]];
        for word in &mut weights {
            *word = s.xor(*word, top);
        }
        weights
    }
}

/// A table with so much added to every number that none has a sign.
pub(super) const fn raised(table: [i8; 16], offset: i32) -> [u8; 16] {
    let mut raised = [0; 16];
    let mut at = 0;
    while at < 16 {
        raised[at] = (table[at] as i32 + offset) as u8;
        at += 1;
    }
    raised
}

impl Short for Iq4Nl {
    const BYTES: usize = 18;
    const BITS: u32 = 8;
    const OFFSET: i32 = 128;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
        const TABLE: [u8; 16] = raised(CURVE, Iq4Nl::OFFSET);
        looked_up(s, &TABLE, nibbles(s, rows, at + 2))
    }
}

impl Short for Mxfp4 {
    const BYTES: usize = 17;
    const BITS: u32 = 5;
    const OFFSET: i32 = 12;
    const MINIMUM: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
        const TABLE: [u8; 16] = raised(HALVES, Mxfp4::OFFSET);
        looked_up(s, &TABLE, nibbles(s, rows, at + 1))
    }

    #[inline(always)]
    fn numbers<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Float; 2] {
        let byte = s.and(s.word(rows, at), s.splat(0xFF));
        let one = s.shr(byte, 1);
        // In two factors, because the smallest powers have no exponent of their own.
        let [one, two] = [s.add(one, s.splat(63)), s.add(s.sub(byte, one), s.splat(63))];
        let half = s.mul_f(s.float_of_bits(s.shl(one, 23)), s.float_of_bits(s.shl(two, 23)));
        [half, half]
    }
}

/// What a table has for each weight.
#[inline(always)]
pub(super) fn looked_up<S: Simd>(s: S, table: &[u8; 16], weights: [S::Int; 8]) -> [S::Int; 8] {
    // A closure would be compiled without the instructions.
    let mut weights = weights;
    for word in &mut weights {
        *word = s.look_up(table, *word);
    }
    weights
}

/// 16 bytes: the low halves first, then the high ones.
#[inline(always)]
fn nibbles<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
    let [a, b, c, d] = s.load(rows, at);
    let mask = s.splat(0x0F0F_0F0F);
    let mut weights = [a, b, c, d, s.shr(a, 4), s.shr(b, 4), s.shr(c, 4), s.shr(d, 4)];
    for word in &mut weights {
        *word = s.and(*word, mask);
    }
    weights
}

/// 32 fifth bits, then nibbles.
#[inline(always)]
fn nibbles_and_bits<S: Simd>(s: S, rows: Rows<'_>, at: usize) -> [S::Int; 8] {
    let bits = s.word(rows, at);
    let mut weights = nibbles(s, rows, at + 4);
    for (group, word) in weights.iter_mut().enumerate() {
        *word = s.or(*word, s.expand_bits(bits, group));
    }
    weights
}

/// Adds the products of whole rows to `sums`, one for each row of inputs.
#[inline(always)]
pub(super) fn add_blocks<S: Simd, K: Short, const G: usize>(
    s: S,
    place: &Place<'_, G>,
    sums: &mut [[S::Float; G]],
) {
    let inputs = place.inputs;
    for block in 0..place.rows[0].len() / K::BYTES {
        let at = block * K::BYTES;
        let mut weights = [[s.splat(0); 8]; G];
        let mut numbers = [[s.splat_f(0.0); 2]; G];
        for (group, &rows) in place.rows.iter().enumerate() {
            weights[group] = K::unpack(s, rows, at);
            numbers[group] = K::numbers(s, rows, at);
        }
        let from = block * inputs.rows + place.from;
        let runs = inputs.runs[from..][..place.count].iter();
        let scales = inputs.scales[from..][..place.count].iter();
        let totals = inputs.sums[from..][..place.count].iter();
        for (((sums, run), &a), &total) in sums.iter_mut().zip(runs).zip(scales).zip(totals) {
            let products = s.dot32(&weights, K::BITS, run, -K::OFFSET * total);
            let a = s.splat_f(a);
            for group in 0..G {
                let [d, m] = numbers[group];
                let mut term = s.mul_f(s.mul_f(d, a), s.float(products[group]));
                if K::MINIMUM {
                    let least = s.mul_f(s.mul_f(m, a), s.float(s.splat(total)));
                    term = s.add_f(term, least);
                }
                sums[group] = s.add_f(sums[group], term);
            }
        }
    }
}
