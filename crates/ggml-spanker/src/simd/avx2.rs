// SPDX-License-Identifier: Apache-2.0
//! Eight rows at a time, with AVX2 and FMA.
//!
//! Products of bytes are added in pairs to 16 bits, where they must not saturate: so many pairs are added as the
//! size of weights allows, and weights of 8 bits are multiplied in two halves.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_add_epi8, _mm_add_epi32,
    _mm_add_ps, _mm_add_ss, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtsi128_si32, _mm_cvtss_f32,
    _mm_insert_epi32, _mm_loadl_epi64, _mm_loadu_si128, _mm_movehdup_ps, _mm_movehl_ps,
    _mm_prefetch, _mm_set1_epi16, _mm_set1_epi32, _mm_shuffle_epi32, _mm_storeu_si128,
    _mm_unpacklo_epi32, _mm_unpacklo_epi64, _mm256_abs_epi8, _mm256_add_epi8, _mm256_add_epi16,
    _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_broadcastsi128_si256,
    _mm256_castps256_ps128, _mm256_castsi128_si256, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cmpeq_epi8, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_extractf128_ps, _mm256_extracti128_si256,
    _mm256_fmadd_ps, _mm256_inserti128_si256, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_min_epu8, _mm256_mul_ps, _mm256_mullo_epi32,
    _mm256_or_si256, _mm256_permute4x64_epi64, _mm256_set1_epi8, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_set1_epi64x, _mm256_set1_ps, _mm256_setr_epi8, _mm256_setr_epi32,
    _mm256_setr_epi64x, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_sign_epi8,
    _mm256_sll_epi32, _mm256_slli_epi32, _mm256_sra_epi32, _mm256_srl_epi32, _mm256_srli_epi16,
    _mm256_storeu_ps, _mm256_sub_epi8, _mm256_sub_epi32, _mm256_sub_ps, _mm256_subs_epu8,
    _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
    _mm256_xor_si256,
};

use super::{Lanes, Rows, Simd, Work};
use crate::blocks::Book;
use crate::input::Run;
use crate::kernel;
use crate::path::Path;
use crate::product::Product;

/// Proof that the processor has AVX2, F16C and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn new() -> Option<Avx2> {
        Path::Avx2.is_available().then_some(Avx2(()))
    }
}

#[target_feature(enable = "avx2,f16c,fma")]
fn with_instructions<W: Work>(s: Avx2, work: W) -> W::Out {
    work.run(s)
}

#[target_feature(enable = "avx2,f16c,fma")]
fn multiply_with_instructions(s: Avx2, product: &mut Product<'_>) {
    kernel::multiply(s, product);
}

/// Four bytes, three times these, nine and 27 times, each modulo 256.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn powers(bytes: i32) -> __m128i {
    let triple = |a: __m128i| _mm_add_epi8(_mm_add_epi8(a, a), a);
    let one = _mm_set1_epi32(bytes);
    let three = triple(one);
    let nine = triple(three);
    let low = _mm_unpacklo_epi32(one, three);
    _mm_unpacklo_epi64(low, _mm_unpacklo_epi32(nine, triple(nine)))
}

/// Calls an intrinsic that needs nothing but the instructions.
macro_rules! op {
    ($call:expr) => {
        // SAFETY: a value of `Avx2` exists only where the processor has the instructions.
        unsafe { $call }
    };
}

impl Lanes for Avx2 {
    type Wide = [__m256; 2];

    #[inline(always)]
    fn vectorize<W: Work>(self, work: W) -> W::Out {
        op!(with_instructions(self, work))
    }

    #[inline(always)]
    fn fetch(self, bytes: &[u8]) {
        for line in bytes.chunks(64) {
            // SAFETY: nothing is read or written, and every processor with these instructions has this one.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }

    #[inline(always)]
    fn wide(self, values: &[f32; 16]) -> [__m256; 2] {
        let at = values.as_ptr();
        // SAFETY: 16 values are read, and the processor has the instructions.
        unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] }
    }

    #[inline(always)]
    fn wide_f32(self, bytes: &[u8; 64]) -> [__m256; 2] {
        let at: *const f32 = bytes.as_ptr().cast();
        // SAFETY: 64 bytes are read, wherever they lie, and the processor has the instructions.
        unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.wrapping_add(8))] }
    }

    #[inline(always)]
    fn wide_f16(self, bytes: &[u8; 32]) -> [__m256; 2] {
        let (low, high) = bytes.split_at(16);
        // SAFETY: 16 bytes are read from each half, and the processor has the instructions.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(low.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(high.as_ptr().cast())),
            ]
        }
    }

    #[inline(always)]
    fn wide_bf16(self, bytes: &[u8; 32]) -> [__m256; 2] {
        let (low, high) = bytes.split_at(16);
        // SAFETY: 16 bytes are read from each half, and the processor has the instructions.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(low.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(high.as_ptr().cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }

    #[inline(always)]
    fn wide_i8(self, bytes: &[u8; 16]) -> [__m256; 2] {
        let (low, high) = bytes.split_at(8);
        // SAFETY: 8 bytes are read from each half, and the processor has the instructions.
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(low.as_ptr().cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(high.as_ptr().cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }

    #[inline(always)]
    fn wide_add(self, sum: [__m256; 2], a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        op!([
            _mm256_add_ps(sum[0], _mm256_mul_ps(a[0], b[0])),
            _mm256_add_ps(sum[1], _mm256_mul_ps(a[1], b[1])),
        ])
    }

    #[inline(always)]
    fn wide_fused(self, sum: [__m256; 2], a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        [self.fused(sum[0], a[0], b[0]), self.fused(sum[1], a[1], b[1])]
    }

    #[inline(always)]
    fn wide_values(self, a: [__m256; 2]) -> [f32; 16] {
        let mut out = [0.0; 16];
        self.store(a[0], &mut out[..8]);
        self.store(a[1], &mut out[8..]);
        out
    }

    #[inline(always)]
    fn wide_sum(self, a: [__m256; 2]) -> f32 {
        op!({
            let eight = _mm256_add_ps(a[0], a[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn narrow(self, values: &[f32; 16]) -> [u8; 32] {
        let mut out = [0; 32];
        let [low, high] = self.wide(values);
        let (to_low, to_high) = out.split_at_mut(16);
        // SAFETY: 16 bytes are written to each half, and the processor has the instructions.
        unsafe {
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
            _mm_storeu_si128(to_low.as_mut_ptr().cast(), low);
            _mm_storeu_si128(to_high.as_mut_ptr().cast(), high);
        }
        out
    }
}

impl Avx2 {
    /// The products of some words of weights, less than `1 << bits`, with activations.
    #[inline(always)]
    fn dot(self, weights: &[__m256i], bits: u32, words: &[i32]) -> __m256i {
        if bits == 8 {
            return self.dot_of_bytes(weights, words);
        }
        // Two products of 128 and the largest weight are added this often without leaving 16 bits.
        let often = match bits {
            0..=4 => 8,
            5 => 4,
            6 => 2,
            _ => 1,
        };
        let mut sum = self.splat(0);
        for (weights, words) in weights.chunks(often).zip(words.chunks(often)) {
            op!({
                let mut pairs = _mm256_setzero_si256();
                for (weights, &word) in weights.iter().zip(words) {
                    let products = _mm256_maddubs_epi16(*weights, _mm256_set1_epi32(word));
                    pairs = _mm256_add_epi16(pairs, products);
                }
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            });
        }
        sum
    }

    /// The sum of all lanes.
    #[inline(always)]
    fn total(self, a: __m256i) -> i32 {
        op!({
            let four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b00_00_00_01>(two)))
        })
    }

    /// The first digits of fractions to the base of three, which bytes are of 256, and what is left of them.
    #[inline(always)]
    fn digit(self, a: __m256i) -> [__m256i; 2] {
        op!({
            let one = _mm256_set1_epi8(1);
            let least = _mm256_min_epu8(_mm256_subs_epu8(a, _mm256_set1_epi8(85)), one);
            let most = _mm256_min_epu8(_mm256_subs_epu8(a, _mm256_set1_epi8(170_u8 as i8)), one);
            let rest = _mm256_add_epi8(_mm256_add_epi8(a, a), a);
            [_mm256_add_epi8(least, most), rest]
        })
    }

    /// At most eight words of weights of 8 bits: low halves and high halves by themselves.
    #[inline(always)]
    fn dot_of_bytes(self, weights: &[__m256i], words: &[i32]) -> __m256i {
        op!({
            let (mut low, mut high) = (_mm256_setzero_si256(), _mm256_setzero_si256());
            let mask = _mm256_set1_epi8(15);
            for (weights, &word) in weights.iter().zip(words) {
                let word = _mm256_set1_epi32(word);
                let nibbles = _mm256_and_si256(*weights, mask);
                low = _mm256_add_epi16(low, _mm256_maddubs_epi16(nibbles, word));
                let nibbles = _mm256_and_si256(_mm256_srli_epi16::<4>(*weights), mask);
                high = _mm256_add_epi16(high, _mm256_maddubs_epi16(nibbles, word));
            }
            let one = _mm256_set1_epi16(1);
            let high = _mm256_slli_epi32::<4>(_mm256_madd_epi16(high, one));
            _mm256_add_epi32(_mm256_madd_epi16(low, one), high)
        })
    }
}

impl Simd for Avx2 {
    type Int = __m256i;
    type Float = __m256;
    const LANES: usize = 8;
    const TALL: usize = 2;
    const AHEAD: bool = true;
    const PAIRS: bool = false;

    #[inline(always)]
    fn multiply(self, product: &mut Product<'_>) {
        op!(multiply_with_instructions(self, product));
    }

    #[inline(always)]
    fn load(self, rows: Rows<'_>, at: usize) -> [__m256i; 4] {
        let (first, stride) = rows.locate(8, at, 16);
        if let Some(next) = rows.following(8, at) {
            // One line more than 16 bytes of each row have: what is between them is scales.
            for line in 0..3 {
                // SAFETY: nothing is read or written, and every processor with these instructions has this one.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64 * line).cast()) };
            }
        }
        // Vector `j` takes rows `j` and `4 + j`, so that four rows of a 128-bit lane are turned into four
        // words of four rows without crossing lanes.
        let mut turned = [self.splat(0); 4];
        for (j, rows) in turned.iter_mut().enumerate() {
            let (one, two) = (first.wrapping_add(j * stride), first.wrapping_add((4 + j) * stride));
            // SAFETY: `locate` has checked that 16 bytes are inside each of 8 rows, and the processor has
            // the instructions.
            *rows = unsafe {
                let one = _mm256_castsi128_si256(_mm_loadu_si128(one.cast()));
                _mm256_inserti128_si256::<1>(one, _mm_loadu_si128(two.cast()))
            };
        }
        let [a, b, c, d] = turned;
        op!({
            let (low, high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (low2, high2) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            [
                _mm256_unpacklo_epi64(low, low2),
                _mm256_unpackhi_epi64(low, low2),
                _mm256_unpacklo_epi64(high, high2),
                _mm256_unpackhi_epi64(high, high2),
            ]
        })
    }

    #[inline(always)]
    fn word(self, rows: Rows<'_>, at: usize) -> __m256i {
        let (first, stride) = rows.locate(8, at, 4);
        // SAFETY: `locate` has checked that 4 bytes are inside each of 8 rows, and the processor has the instructions.
        unsafe {
            // Gathers are slower than as many loads.
            let row = |lane: usize| first.wrapping_add(lane * stride).cast::<i32>();
            let four = |lane: usize| {
                let one = _mm_cvtsi32_si128(row(lane).read_unaligned());
                let two = _mm_insert_epi32::<1>(one, row(lane + 1).read_unaligned());
                let three = _mm_insert_epi32::<2>(two, row(lane + 2).read_unaligned());
                _mm_insert_epi32::<3>(three, row(lane + 3).read_unaligned())
            };
            _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(four(0)), four(4))
        }
    }

    #[inline(always)]
    fn splat(self, value: i32) -> __m256i {
        op!(_mm256_set1_epi32(value))
    }

    #[inline(always)]
    fn and(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn xor(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_xor_si256(a, b))
    }

    #[inline(always)]
    fn add(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_sub_epi32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_mullo_epi32(a, b))
    }

    #[inline(always)]
    fn shl(self, a: __m256i, bits: u32) -> __m256i {
        op!(_mm256_sll_epi32(a, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn shr(self, a: __m256i, bits: u32) -> __m256i {
        op!(_mm256_srl_epi32(a, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn sar(self, a: __m256i, bits: u32) -> __m256i {
        op!(_mm256_sra_epi32(a, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn expand_bits(self, bits: __m256i, group: usize) -> __m256i {
        // The byte that holds the four bits goes to all four bytes of its lane; one bit of each is tested.
        let byte = (group / 2) as i32 * 0x0101_0101;
        let tested = if group.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32 as i32 };
        let [a, b, c, d] = [0, 0x0404_0404, 0x0808_0808, 0x0C0C_0C0C].map(|lane| lane + byte);
        op!({
            let bytes = _mm256_shuffle_epi8(bits, _mm256_setr_epi32(a, b, c, d, a, b, c, d));
            let tested = _mm256_set1_epi32(tested);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, tested), tested);
            _mm256_and_si256(set, _mm256_set1_epi8(16))
        })
    }

    #[inline(always)]
    fn dot32<const G: usize>(
        self,
        weights: &[[__m256i; 8]; G],
        bits: u32,
        run: &Run,
        start: i32,
    ) -> [__m256i; G] {
        let mut sums = [self.splat(start); G];
        for (sum, weights) in sums.iter_mut().zip(weights) {
            *sum = self.add(*sum, self.dot(weights, bits, &run.0));
        }
        sums
    }

    #[inline(always)]
    fn dot16<const G: usize>(
        self,
        weights: &[[__m256i; 8]; G],
        bits: u32,
        run: &Run,
        half: usize,
    ) -> [__m256i; G] {
        let mut sums = [self.splat(0); G];
        let which = 4 * half..4 * half + 4;
        for (sum, weights) in sums.iter_mut().zip(weights) {
            *sum = self.dot(&weights[which.clone()], bits, &run.0[which.clone()]);
        }
        sums
    }

    #[inline(always)]
    fn add_pairs(self, to: __m256i, pairs: __m256i, with: [i16; 2]) -> __m256i {
        let with = i32::from(with[0] as u16) | i32::from(with[1]) << 16;
        op!(_mm256_add_epi32(to, _mm256_madd_epi16(pairs, _mm256_set1_epi32(with))))
    }

    const BOOKS: bool = true;

    #[inline(always)]
    fn half(self, bytes: [u8; 2]) -> f32 {
        let bits = i32::from(u16::from_le_bytes(bytes));
        op!(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))))
    }

    #[inline(always)]
    fn signed_sum<B: Book>(self, block: &[u8], runs: &[Run; 8]) -> i32 {
        let mut sum = self.splat(0);
        for (part, run) in runs.iter().enumerate() {
            let weights = B::signed(block, part);
            let [a, b, c, d] = weights.magnitudes.map(u64::cast_signed);
            let [one, two] = weights.scales;
            // SAFETY: the 32 bytes of a run are read, and the processor has the instructions.
            sum = unsafe {
                let magnitudes = _mm256_setr_epi64x(a, b, c, d);
                let values = _mm256_loadu_si256(run.0.as_ptr().cast());
                // The byte of each eight signs to all of its eight, of which each tests its own.
                let from = _mm256_setr_epi64x(
                    0,
                    0x0101_0101_0101_0101,
                    0x0202_0202_0202_0202,
                    0x0303_0303_0303_0303,
                );
                let signs = _mm256_set1_epi32(weights.negative.cast_signed());
                let own = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
                let signs = _mm256_and_si256(_mm256_shuffle_epi8(signs, from), own);
                let negative = _mm256_cmpeq_epi8(signs, own);
                let signed = _mm256_sub_epi8(_mm256_xor_si256(magnitudes, negative), negative);
                // All signs go to the weights: -128 has no counterpart among activations.
                let signed = _mm256_sign_epi8(signed, values);
                // Magnitudes are less than 64: two products stay in 16 bits.
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(values), signed);
                let scales = _mm256_inserti128_si256::<1>(
                    _mm256_castsi128_si256(_mm_set1_epi16(one)),
                    _mm_set1_epi16(two),
                );
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scales))
            };
        }
        self.total(sum)
    }

    #[inline(always)]
    fn digits_sum(self, block: &[u8; 54], runs: &[Run; 8]) -> i32 {
        let (long, rest) = block.split_at(32);
        let last = i32::from_le_bytes([rest[16], rest[17], rest[18], rest[19]]);
        // SAFETY: 32 and 16 bytes of the block and 32 of a run are read, and the processor has the instructions.
        unsafe {
            let mut pairs = _mm256_setzero_si256();
            let mut left = _mm256_loadu_si256(long.as_ptr().cast());
            for run in &runs[..5] {
                let values = _mm256_loadu_si256(run.0.as_ptr().cast());
                let [digits, rest] = self.digit(left);
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(digits, values));
                left = rest;
            }
            // Sixteen weights of each power: two of these in a vector, and of the last run one, with four of the rest.
            let first = _mm_loadu_si128(rest.as_ptr().cast());
            let triple = _mm_add_epi8(_mm_add_epi8(first, first), first);
            let mut left = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(first), triple);
            for (run, values) in runs[5..].iter().enumerate() {
                let values = _mm256_loadu_si256(values.0.as_ptr().cast());
                if run == 2 {
                    left = _mm256_inserti128_si256::<1>(left, powers(last));
                }
                let [digits, rest] = self.digit(left);
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(digits, values));
                // Two powers further on.
                left = _mm256_add_epi8(_mm256_add_epi8(rest, rest), rest);
            }
            self.total(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }

    #[inline(always)]
    fn halves(self, a: __m256i) -> [__m256; 2] {
        op!({
            // Even 16-bit numbers to the lower half of each 128-bit lane, then of all.
            let even = _mm256_setr_epi8(
                0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2,
                3, 6, 7, 10, 11, 14, 15,
            );
            let apart = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(a, even));
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(apart)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(apart)),
            ]
        })
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], bytes: __m256i) -> __m256i {
        // SAFETY: 16 bytes are read, and the processor has the instructions.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, bytes)
        }
    }

    #[inline(always)]
    fn float_of_bits(self, a: __m256i) -> __m256 {
        op!(_mm256_castsi256_ps(a))
    }

    #[inline(always)]
    fn float(self, a: __m256i) -> __m256 {
        op!(_mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn splat_f(self, value: f32) -> __m256 {
        op!(_mm256_set1_ps(value))
    }

    #[inline(always)]
    fn add_f(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub_f(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul_f(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn part(self, values: &[f32; 16], part: usize) -> __m256 {
        let values = &values[8 * part..8 * part + 8];
        // SAFETY: 8 values are read, and the processor has the instructions.
        unsafe { _mm256_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn part_f32(self, bytes: &[u8; 64], part: usize) -> __m256 {
        let bytes = &bytes[32 * part..32 * part + 32];
        // SAFETY: 32 bytes are read, and the processor has the instructions.
        unsafe { _mm256_loadu_ps(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn part_f16(self, bytes: &[u8; 32], part: usize) -> __m256 {
        let bytes = &bytes[16 * part..16 * part + 16];
        // SAFETY: 16 bytes are read, and the processor has the instructions.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast())) }
    }

    #[inline(always)]
    fn part_bf16(self, bytes: &[u8; 32], part: usize) -> __m256 {
        let bytes = &bytes[16 * part..16 * part + 16];
        // SAFETY: 16 bytes are read, and the processor has the instructions.
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(bytes.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    fn fused(self, sum: __m256, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_fmadd_ps(a, b, sum))
    }

    #[inline(always)]
    fn store(self, a: __m256, out: &mut [f32]) {
        let out = &mut out[..8];
        // SAFETY: the target has space for 8 values, and the processor has the instructions.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), a) }
    }
}
