// SPDX-License-Identifier: Apache-2.0
//! Blocks of 256 weights as integers, for the types that have no plain layout: Q2_K, Q3_K, IQ4_XS, IQ2_XXS,
//! IQ2_XS, IQ3_XXS, TQ1_0 and TQ2_0. The kernels of the IQ2 and IQ3 types and of TQ1_0 unpack them first.

use spanker_model::Quant;

use crate::codebooks::{Eight, three_xxs, two_xs, two_xxs};
use crate::decode::{CURVE, half_at};

/// A block: weight `i` is `d * scales[i / 16] * (quants[i] - OFFSET)`, less `dmin * minima[i / 16]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) d: f32,
    pub(crate) dmin: f32,
    pub(crate) scales: [i16; 16],
    pub(crate) minima: [i16; 16],
    /// Without sign.
    pub(crate) quants: [u8; 256],
}

/// A type of weights.
pub(crate) trait Long {
    /// Bytes of a block.
    const BYTES: usize;
    /// Unpacked weights are less than `1 << BITS`.
    const BITS: u32;
    /// What unpacked weights have too much.
    const OFFSET: i32;

    fn unpack(block: &[u8]) -> Block;
}

pub(crate) struct Q2K;
pub(crate) struct Q3K;
pub(crate) struct Iq4Xs;
pub(crate) struct Iq2Xxs;
pub(crate) struct Iq2Xs;
pub(crate) struct Iq3Xxs;
pub(crate) struct Tq1_0;
pub(crate) struct Tq2_0;

/// The integers of a block of a type that this module knows, and what they have too much.
pub(crate) fn unpack(quant: Quant, block: &[u8]) -> Option<(Block, i32)> {
    Some(match quant {
        Quant::Q2K => (Q2K::unpack(block), Q2K::OFFSET),
        Quant::Q3K => (Q3K::unpack(block), Q3K::OFFSET),
        Quant::Iq4Xs => (Iq4Xs::unpack(block), Iq4Xs::OFFSET),
        Quant::Iq2Xxs => (Iq2Xxs::unpack(block), Iq2Xxs::OFFSET),
        Quant::Iq2Xs => (Iq2Xs::unpack(block), Iq2Xs::OFFSET),
        Quant::Iq3Xxs => (Iq3Xxs::unpack(block), Iq3Xxs::OFFSET),
        Quant::Tq1_0 => (Tq1_0::unpack(block), Tq1_0::OFFSET),
        Quant::Tq2_0 => (Tq2_0::unpack(block), Tq2_0::OFFSET),
        _ => return None,
    })
}

/// 64 bytes of four weights of two bits each: 32 bytes hold 128 weights, those of the lowest bits first.
#[inline(always)]
fn pairs_of_bits(bytes: &[u8], quants: &mut [u8; 256]) {
    for (bytes, quants) in bytes.as_chunks::<32>().0.iter().zip(quants.as_chunks_mut::<128>().0) {
        for (shift, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (quant, byte) in quants.iter_mut().zip(bytes) {
                *quant = byte >> (2 * shift) & 3;
            }
        }
    }
}

impl Long for Q2K {
    const BYTES: usize = 84;
    const BITS: u32 = 2;
    const OFFSET: i32 = 0;

    #[inline(always)]
    fn unpack(block: &[u8]) -> Block {
        let (d, dmin) = (half_at(block, 80), half_at(block, 82));
        let mut out = Block { d, dmin, ..EMPTY };
        for (at, &byte) in block[..16].iter().enumerate() {
            (out.scales[at], out.minima[at]) = (i16::from(byte & 15), i16::from(byte >> 4));
        }
        pairs_of_bits(&block[16..80], &mut out.quants);
        out
    }
}

impl Long for Q3K {
    const BYTES: usize = 110;
    const BITS: u32 = 3;
    const OFFSET: i32 = 4;

    #[inline(always)]
    fn unpack(block: &[u8]) -> Block {
        let mut out = Block { d: half_at(block, 108), ..EMPTY };
        let packed = &block[96..108];
        for (at, scale) in out.scales.iter_mut().enumerate() {
            let low = packed[at % 8] >> (4 * (at / 8)) & 15;
            let high = packed[8 + at % 4] >> (2 * (at / 4)) & 3;
            *scale = i16::from(low | high << 4) - 32;
        }
        pairs_of_bits(&block[32..96], &mut out.quants);
        let high = &block[..32];
        for (shift, quants) in out.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (quant, high) in quants.iter_mut().zip(high) {
                *quant |= (high >> shift & 1) << 2;
            }
        }
        out
    }
}

impl Long for Iq4Xs {
    const BYTES: usize = 136;
    const BITS: u32 = 8;
    const OFFSET: i32 = 128;

    #[inline(always)]
    fn unpack(block: &[u8]) -> Block {
        let mut out = Block { d: half_at(block, 0), ..EMPTY };
        let high = u16::from_le_bytes([block[2], block[3]]);
        for (sub, scales) in out.scales.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let low = block[4 + sub / 2] >> (4 * (sub % 2)) & 15;
            let high = (high >> (2 * sub) & 3) as i16;
            *scales = [(i16::from(low) | high << 4) - 32; 2];
        }
        let bytes = block[8..136].as_chunks::<16>().0;
        for (bytes, quants) in bytes.iter().zip(out.quants.as_chunks_mut::<32>().0) {
            let (one, two) = quants.split_at_mut(16);
            for ((one, two), byte) in one.iter_mut().zip(two).zip(bytes) {
                *one = (CURVE[(byte & 15) as usize] as u8) ^ 0x80;
                *two = (CURVE[(byte >> 4) as usize] as u8) ^ 0x80;
            }
        }
        out
    }
}

/// Eight weights from their magnitudes, which are less than 64, and seven signs; the eighth makes their number even.
#[inline(always)]
fn with_signs(magnitudes: Eight, signs: u32) -> [u8; 8] {
    let signs = (signs & 127) as u8;
    let signs = signs | ((signs.count_ones() % 2) as u8) << 7;
    // Each bit to the lowest of its byte, then to all of it.
    let spread = u64::from(signs).wrapping_mul(0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
    let bits = ((spread + 0x7f7f_7f7f_7f7f_7f7f) | spread) >> 7 & 0x0101_0101_0101_0101;
    let negative = bits * 0xff;
    let middle = 0x4040_4040_4040_4040;
    (middle + (magnitudes & !negative) - (magnitudes & negative)).to_le_bytes()
}

/// 32 weights of a block: eight magnitudes in each word, a bit for each that is negative, and the scales of both halves.
pub(crate) struct Signed {
    pub(crate) magnitudes: [Eight; 4],
    pub(crate) negative: u32,
    pub(crate) scales: [i16; 2],
}

/// A type whose weights are magnitudes from a codebook, with signs. Its scale is the first number of a block.
pub(crate) trait Book {
    /// Bytes of a block.
    const BYTES: usize;
    /// What the scale of the scales is multiplied with.
    const FACTOR: f32;

    /// Weights `32 * part ..` of a block.
    fn signed(block: &[u8], part: usize) -> Signed;
}

/// Four times seven signs, each with an eighth that makes their number even.
#[inline(always)]
fn evened(signs: u32) -> u32 {
    let seven = |at: u32| signs << at & 0x7f << (8 * at);
    let signs = seven(0) | seven(1) | seven(2) | seven(3);
    let odd = signs ^ signs >> 4;
    let odd = odd ^ odd >> 2;
    let odd = odd ^ odd >> 1;
    signs | (odd & 0x0101_0101) << 7
}

impl Book for Iq2Xxs {
    const BYTES: usize = <Self as Long>::BYTES;
    const FACTOR: f32 = 0.125;

    #[inline(always)]
    fn signed(block: &[u8], part: usize) -> Signed {
        let at = 2 + 8 * part;
        let signs = word(block, at + 4);
        let mut magnitudes = [0; 4];
        for (magnitudes, &number) in magnitudes.iter_mut().zip(&block[at..at + 4]) {
            *magnitudes = two_xxs(number);
        }
        let negative = evened(signs & 0x0fff_ffff);
        Signed { magnitudes, negative, scales: [half_steps(signs >> 28); 2] }
    }
}

impl Book for Iq2Xs {
    const BYTES: usize = <Self as Long>::BYTES;
    const FACTOR: f32 = 0.125;

    #[inline(always)]
    fn signed(block: &[u8], part: usize) -> Signed {
        let (mut magnitudes, mut signs) = ([0; 4], 0);
        let words = block[2 + 8 * part..10 + 8 * part].as_chunks().0.iter();
        for (at, (magnitudes, &bits)) in magnitudes.iter_mut().zip(words).enumerate() {
            let bits = u16::from_le_bytes(bits);
            *magnitudes = two_xs(bits & 511);
            signs |= u32::from(bits >> 9) << (7 * at);
        }
        let scales = u32::from(block[66 + part]);
        let scales = [half_steps(scales), half_steps(scales >> 4)];
        Signed { magnitudes, negative: evened(signs), scales }
    }
}

impl Book for Iq3Xxs {
    const BYTES: usize = <Self as Long>::BYTES;
    const FACTOR: f32 = 0.25;

    #[inline(always)]
    fn signed(block: &[u8], part: usize) -> Signed {
        let signs = word(block, 66 + 4 * part);
        let mut magnitudes = [0; 4];
        let numbers = block[2 + 8 * part..10 + 8 * part].as_chunks().0.iter();
        for (magnitudes, &[low, high]) in magnitudes.iter_mut().zip(numbers) {
            *magnitudes = u64::from(three_xxs(low)) | u64::from(three_xxs(high)) << 32;
        }
        let negative = evened(signs & 0x0fff_ffff);
        Signed { magnitudes, negative, scales: [half_steps(signs >> 28); 2] }
    }
}

#[inline(always)]
fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// The scale of 32 weights: half-steps, which are odd.
#[inline(always)]
fn half_steps(bits: u32) -> i16 {
    2 * (bits & 15) as i16 + 1
}

impl Long for Iq2Xxs {
    const BYTES: usize = 66;
    const BITS: u32 = 7;
    const OFFSET: i32 = 64;

    #[inline(always)]
    fn unpack(block: &[u8]) -> Block {
        let mut out = Block { d: half_at(block, 0) * 0.125, ..EMPTY };
        for sub in 0..8 {
            let at = 2 + 8 * sub;
            let signs = word(block, at + 4);
            out.scales[2 * sub..2 * sub + 2].fill(half_steps(signs >> 28));
            for part in 0..4 {
                let eight = with_signs(two_xxs(block[at + part]), signs >> (7 * part));
                out.quants[32 * sub + 8 * part..][..8].copy_from_slice(&eight);
            }
        }
        out
    }
}

impl Long for Iq2Xs {
    const BYTES: usize = 74;
    const BITS: u32 = 7;
    const OFFSET: i32 = 64;

    #[inline(always)]
    fn unpack(block: &[u8]) -> Block {
        let mut out = Block { d: half_at(block, 0) * 0.125, ..EMPTY };
        for part in 0..32 {
            let bits = u16::from_le_bytes([block[2 + 2 * part], block[3 + 2 * part]]);
            let eight = with_signs(two_xs(bits & 511), u32::from(bits >> 9));
            out.quants[8 * part..][..8].copy_from_slice(&eight);
        }
        for (sub, scale) in out.scales.iter_mut().enumerate() {
            *scale = half_steps(u32::from(block[66 + sub / 2]) >> (4 * (sub % 2)));
        }
        out
    }
}

impl Long for Iq3Xxs {
    const BYTES: usize = 98;
    const BITS: u32 = 7;
    const OFFSET: i32 = 64;

    #[inline(always)]
    fn unpack(block: &[u8]) -> Block {
        let mut out = Block { d: half_at(block, 0) * 0.25, ..EMPTY };
        for sub in 0..8 {
            let signs = word(block, 66 + 4 * sub);
            out.scales[2 * sub..2 * sub + 2].fill(half_steps(signs >> 28));
            for part in 0..4 {
                let at = 2 + 8 * sub + 2 * part;
                let (low, high) = (three_xxs(block[at]), three_xxs(block[at + 1]));
                let eight = u64::from(low) | u64::from(high) << 32;
                let eight = with_signs(eight, signs >> (7 * part));
                out.quants[32 * sub + 8 * part..][..8].copy_from_slice(&eight);
            }
        }
        out
    }
}

impl Long for Tq1_0 {
    const BYTES: usize = 54;
    const BITS: u32 = 2;
    const OFFSET: i32 = 1;

    #[inline(always)]
    fn unpack(block: &[u8]) -> Block {
        let mut out = Block { d: half_at(block, 52), scales: [1; 16], ..EMPTY };
        // A byte is a fraction of 256: its digits to the base of three come out at the top.
        let digit = |byte: u8, power: u8| ((u16::from(byte.wrapping_mul(power)) * 3) >> 8) as u8;
        let mut put = |first: usize, bytes: &[u8], powers: &[u8]| {
            for (out, &power) in out.quants[first..].chunks_exact_mut(bytes.len()).zip(powers) {
                for (out, &byte) in out.iter_mut().zip(bytes) {
                    *out = digit(byte, power);
                }
            }
        };
        put(0, &block[..32], &[1, 3, 9, 27, 81]);
        put(160, &block[32..48], &[1, 3, 9, 27, 81]);
        put(240, &block[48..52], &[1, 3, 9, 27]);
        out
    }
}

impl Long for Tq2_0 {
    const BYTES: usize = 66;
    const BITS: u32 = 2;
    const OFFSET: i32 = 1;

    #[inline(always)]
    fn unpack(block: &[u8]) -> Block {
        let mut out = Block { d: half_at(block, 64), scales: [1; 16], ..EMPTY };
        pairs_of_bits(&block[..64], &mut out.quants);
        out
    }
}

const EMPTY: Block =
    Block { d: 0.0, dmin: 0.0, scales: [0; 16], minima: [0; 16], quants: [0; 256] };
