// SPDX-License-Identifier: Apache-2.0
//! Sixteen rows at a time, with AVX-512 and its byte products (VNNI).

#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m256i, __m512, __m512i, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_add_epi8, _mm_add_epi32,
    _mm_add_ps, _mm_add_ss, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtsi128_si32, _mm_cvtss_f32,
    _mm_insert_epi32, _mm_loadu_si128, _mm_movehdup_ps, _mm_movehl_ps, _mm_prefetch,
    _mm_shuffle_epi32, _mm256_abs_epi8, _mm256_add_epi8, _mm256_add_epi32, _mm256_add_ps,
    _mm256_castps256_ps128, _mm256_castsi128_si256, _mm256_castsi256_si128, _mm256_dpbusd_epi32,
    _mm256_dpwssd_epi32, _mm256_extractf128_ps, _mm256_extracti128_si256, _mm256_inserti128_si256,
    _mm256_loadu_si256, _mm256_maddubs_epi16, _mm256_mask_set1_epi16, _mm256_mask_sub_epi8,
    _mm256_movepi8_mask, _mm256_set1_epi16, _mm256_setr_epi64x, _mm256_setzero_si256,
    _mm256_storeu_si256, _mm256_sub_epi32, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512,
    _mm512_broadcast_i32x4, _mm512_castps512_ps256, _mm512_castsi128_si512, _mm512_castsi512_ps,
    _mm512_castsi512_si256, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32,
    _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_dpbusd_epi32, _mm512_dpwssd_epi32,
    _mm512_extractf32x8_ps, _mm512_extracti64x4_epi64, _mm512_fmadd_ps, _mm512_inserti32x4,
    _mm512_loadu_ps, _mm512_mask_add_epi8, _mm512_mul_ps, _mm512_mullo_epi32, _mm512_or_si512,
    _mm512_permutexvar_epi16, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setr_epi32, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_sll_epi32,
    _mm512_slli_epi32, _mm512_sra_epi32, _mm512_srl_epi32, _mm512_storeu_ps, _mm512_sub_epi32,
    _mm512_sub_ps, _mm512_test_epi8_mask, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi32, _mm512_unpacklo_epi64, _mm512_xor_si512,
};

use super::avx2::powers;
use super::{Lanes, Rows, Simd, Work};
use crate::blocks::Book;
use crate::input::Run;
use crate::kernel;
use crate::path::Path;
use crate::product::Product;

/// Proof that the processor has AVX-512 with VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn new() -> Option<Avx512> {
        Path::Avx512.is_available().then_some(Avx512(()))
    }
}

#[target_feature(enable = "avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn with_instructions<W: Work>(s: Avx512, work: W) -> W::Out {
    work.run(s)
}

#[target_feature(enable = "avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn multiply_with_instructions(s: Avx512, product: &mut Product<'_>) {
    kernel::multiply(s, product);
}

/// Calls an intrinsic that needs nothing but the instructions.
macro_rules! op {
    ($call:expr) => {
        // SAFETY: a value of `Avx512` exists only where the processor has the instructions.
        unsafe { $call }
    };
}

/// The sum of all lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn total(a: __m256i) -> i32 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b00_00_00_01>(two)))
}

impl Lanes for Avx512 {
    type Wide = __m512;
    const ABREAST: usize = 4;

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
    fn wide(self, values: &[f32; 16]) -> __m512 {
        // SAFETY: 16 values are read, and the processor has the instructions.
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn wide_f32(self, bytes: &[u8; 64]) -> __m512 {
        // SAFETY: 64 bytes are read, and the processor has the instructions.
        unsafe { _mm512_loadu_ps(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn wide_f16(self, bytes: &[u8; 32]) -> __m512 {
        // SAFETY: 32 bytes are read, and the processor has the instructions.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())) }
    }

    #[inline(always)]
    fn wide_bf16(self, bytes: &[u8; 32]) -> __m512 {
        // SAFETY: 32 bytes are read, and the processor has the instructions.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bytes.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    fn wide_i8(self, bytes: &[u8; 16]) -> __m512 {
        // SAFETY: 16 bytes are read, and the processor has the instructions.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn wide_add(self, sum: __m512, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(sum, _mm512_mul_ps(a, b)))
    }

    #[inline(always)]
    fn wide_fused(self, sum: __m512, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, sum))
    }

    #[inline(always)]
    fn wide_values(self, a: __m512) -> [f32; 16] {
        let mut out = [0.0; 16];
        self.store(a, &mut out);
        out
    }

    #[inline(always)]
    fn wide_sum(self, a: __m512) -> f32 {
        op!({
            let eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn narrow(self, values: &[f32; 16]) -> [u8; 32] {
        let mut out = [0; 32];
        // SAFETY: 16 values are read, 32 bytes are written, and the processor has the instructions.
        unsafe {
            let halves =
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(values.as_ptr()));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), halves);
        }
        out
    }
}

impl Simd for Avx512 {
    type Int = __m512i;
    type Float = __m512;
    const LANES: usize = 16;
    const TALL: usize = 6;
    const AHEAD: bool = true;
    const PAIRS: bool = true;

    #[inline(always)]
    fn multiply(self, product: &mut Product<'_>) {
        op!(multiply_with_instructions(self, product));
    }

    #[inline(always)]
    fn load(self, rows: Rows<'_>, at: usize) -> [__m512i; 4] {
        let (first, stride) = rows.locate(16, at, 16);
        if let Some(next) = rows.following(16, at) {
            // One line more than 16 bytes of each row have: what is between them is scales.
            for line in 0..5 {
                // SAFETY: nothing is read or written, and every processor with these instructions has this one.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64 * line).cast()) };
            }
        }
        // Vector `j` takes row `4 * lane + j` in its 128-bit lane, so that four rows of a lane are
        // turned into four words of four rows without crossing lanes.
        let quarter = |j: usize| {
            let row = |lane: usize| first.wrapping_add((4 * lane + j) * stride).cast();
            // SAFETY: `locate` has checked that 16 bytes are inside each of 16 rows, and the processor has
            // the instructions.
            unsafe {
                let one = _mm512_castsi128_si512(_mm_loadu_si128(row(0)));
                let two = _mm512_inserti32x4::<1>(one, _mm_loadu_si128(row(1)));
                let three = _mm512_inserti32x4::<2>(two, _mm_loadu_si128(row(2)));
                _mm512_inserti32x4::<3>(three, _mm_loadu_si128(row(3)))
            }
        };
        let [a, b, c, d] = [quarter(0), quarter(1), quarter(2), quarter(3)];
        op!({
            let (low, high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (low2, high2) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(low, low2),
                _mm512_unpackhi_epi64(low, low2),
                _mm512_unpacklo_epi64(high, high2),
                _mm512_unpackhi_epi64(high, high2),
            ]
        })
    }

    #[inline(always)]
    fn word(self, rows: Rows<'_>, at: usize) -> __m512i {
        let (first, stride) = rows.locate(16, at, 4);
        // SAFETY: `locate` has checked that 4 bytes are inside each of 16 rows, and the processor has the instructions.
        unsafe {
            // Gathers are slower than as many loads.
            let row = |lane: usize| first.wrapping_add(lane * stride).cast::<i32>();
            let four = |lane: usize| {
                let one = _mm_cvtsi32_si128(row(lane).read_unaligned());
                let two = _mm_insert_epi32::<1>(one, row(lane + 1).read_unaligned());
                let three = _mm_insert_epi32::<2>(two, row(lane + 2).read_unaligned());
                _mm_insert_epi32::<3>(three, row(lane + 3).read_unaligned())
            };
            let one = _mm512_castsi128_si512(four(0));
            let two = _mm512_inserti32x4::<1>(one, four(4));
            let three = _mm512_inserti32x4::<2>(two, four(8));
            _mm512_inserti32x4::<3>(three, four(12))
        }
    }

    #[inline(always)]
    fn splat(self, value: i32) -> __m512i {
        op!(_mm512_set1_epi32(value))
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_xor_si512(a, b))
    }

    #[inline(always)]
    fn add(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_sub_epi32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_mullo_epi32(a, b))
    }

    #[inline(always)]
    fn shl(self, a: __m512i, bits: u32) -> __m512i {
        op!(_mm512_sll_epi32(a, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn shr(self, a: __m512i, bits: u32) -> __m512i {
        op!(_mm512_srl_epi32(a, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn sar(self, a: __m512i, bits: u32) -> __m512i {
        op!(_mm512_sra_epi32(a, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn expand_bits(self, bits: __m512i, group: usize) -> __m512i {
        // The byte that holds the four bits goes to all four bytes of its lane; one bit of each is tested.
        let byte = (group / 2) as i32 * 0x0101_0101;
        let tested = if group.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32 as i32 };
        op!({
            let lane = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
            let lane = _mm512_mullo_epi32(lane, _mm512_set1_epi32(0x0101_0101));
            let from = _mm512_add_epi32(lane, _mm512_set1_epi32(byte));
            let bytes = _mm512_shuffle_epi8(bits, from);
            let set = _mm512_test_epi8_mask(bytes, _mm512_set1_epi32(tested));
            let zero = _mm512_setzero_si512();
            _mm512_mask_add_epi8(zero, set, zero, _mm512_set1_epi8(16))
        })
    }

    #[inline(always)]
    fn dot32<const G: usize>(
        self,
        weights: &[[__m512i; 8]; G],
        _: u32,
        run: &Run,
        start: i32,
    ) -> [__m512i; G] {
        let mut sums = [self.splat(start); G];
        for (at, &word) in run.0.iter().enumerate() {
            let word = self.splat(word);
            for (sum, weights) in sums.iter_mut().zip(weights) {
                *sum = op!(_mm512_dpbusd_epi32(*sum, weights[at], word));
            }
        }
        sums
    }

    #[inline(always)]
    fn dot16<const G: usize>(
        self,
        weights: &[[__m512i; 8]; G],
        _: u32,
        run: &Run,
        half: usize,
    ) -> [__m512i; G] {
        let mut sums = [self.splat(0); G];
        for at in 4 * half..4 * half + 4 {
            let word = self.splat(run.0[at]);
            for (sum, weights) in sums.iter_mut().zip(weights) {
                *sum = op!(_mm512_dpbusd_epi32(*sum, weights[at], word));
            }
        }
        sums
    }

    #[inline(always)]
    fn add_pairs(self, to: __m512i, pairs: __m512i, with: [i16; 2]) -> __m512i {
        let with = i32::from(with[0] as u16) | i32::from(with[1]) << 16;
        op!(_mm512_dpwssd_epi32(to, pairs, _mm512_set1_epi32(with)))
    }

    const BOOKS: bool = true;

    #[inline(always)]
    fn half(self, bytes: [u8; 2]) -> f32 {
        let bits = i32::from(u16::from_le_bytes(bytes));
        op!(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))))
    }

    #[inline(always)]
    fn signed_sum<B: Book>(self, block: &[u8], runs: &[Run; 8]) -> i32 {
        let mut sum = op!(_mm256_setzero_si256());
        for (part, run) in runs.iter().enumerate() {
            let weights = B::signed(block, part);
            let [a, b, c, d] = weights.magnitudes.map(u64::cast_signed);
            let [one, two] = weights.scales;
            // SAFETY: the 32 bytes of a run are read, and the processor has the instructions.
            sum = unsafe {
                let magnitudes = _mm256_setr_epi64x(a, b, c, d);
                let values = _mm256_loadu_si256(run.0.as_ptr().cast());
                // All signs go to the weights: -128 has no counterpart among activations.
                let (zero, negative) = (_mm256_setzero_si256(), _mm256_movepi8_mask(values));
                let negative = negative ^ weights.negative;
                let signed = _mm256_mask_sub_epi8(magnitudes, negative, zero, magnitudes);
                // Magnitudes are less than 64: two products stay in 16 bits.
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(values), signed);
                let scales = _mm256_set1_epi16(one);
                let scales = _mm256_mask_set1_epi16(scales, 0xFF00, two);
                _mm256_dpwssd_epi32(sum, pairs, scales)
            };
        }
        op!(total(sum))
    }

    #[inline(always)]
    fn digits_sum(self, block: &[u8; 54], runs: &[Run; 8]) -> i32 {
        let (long, rest) = block.split_at(32);
        let last = i32::from_le_bytes([rest[16], rest[17], rest[18], rest[19]]);
        // With fractions `x` of 256 and `y` what is left of three times `x`, a digit is `(3 * x - y) / 256`: the products of
        // both are added, and digits are never taken apart.
        // SAFETY: 32 and 16 bytes of the block and 32 of a run are read, and the processor has the instructions.
        unsafe {
            let (mut whole, mut over) = (_mm256_setzero_si256(), _mm256_setzero_si256());
            let mut left = _mm256_loadu_si256(long.as_ptr().cast());
            for run in &runs[..5] {
                let values = _mm256_loadu_si256(run.0.as_ptr().cast());
                whole = _mm256_dpbusd_epi32(whole, left, values);
                left = _mm256_add_epi8(_mm256_add_epi8(left, left), left);
                over = _mm256_dpbusd_epi32(over, left, values);
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
                whole = _mm256_dpbusd_epi32(whole, left, values);
                let rest = _mm256_add_epi8(_mm256_add_epi8(left, left), left);
                over = _mm256_dpbusd_epi32(over, rest, values);
                // Two powers further on.
                left = _mm256_add_epi8(_mm256_add_epi8(rest, rest), rest);
            }
            let three = _mm256_add_epi32(_mm256_add_epi32(whole, whole), whole);
            total(_mm256_sub_epi32(three, over)) >> 8
        }
    }

    #[inline(always)]
    fn halves(self, a: __m512i) -> [__m512; 2] {
        op!({
            // Even 16-bit numbers to the lower half, odd ones to the upper.
            let even = _mm512_setr_epi32(
                0x2_0000, 0x6_0004, 0xA_0008, 0xE_000C, 0x12_0010, 0x16_0014, 0x1A_0018, 0x1E_001C,
                0x3_0001, 0x7_0005, 0xB_0009, 0xF_000D, 0x13_0011, 0x17_0015, 0x1B_0019, 0x1F_001D,
            );
            let apart = _mm512_permutexvar_epi16(even, a);
            [
                _mm512_cvtph_ps(_mm512_castsi512_si256(apart)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(apart)),
            ]
        })
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], bytes: __m512i) -> __m512i {
        // SAFETY: 16 bytes are read, and the processor has the instructions.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, bytes)
        }
    }

    #[inline(always)]
    fn float_of_bits(self, a: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(a))
    }

    #[inline(always)]
    fn float(self, a: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn splat_f(self, value: f32) -> __m512 {
        op!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    fn add_f(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub_f(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul_f(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn part(self, values: &[f32; 16], _: usize) -> __m512 {
        self.wide(values)
    }

    #[inline(always)]
    fn part_f32(self, bytes: &[u8; 64], _: usize) -> __m512 {
        self.wide_f32(bytes)
    }

    #[inline(always)]
    fn part_f16(self, bytes: &[u8; 32], _: usize) -> __m512 {
        self.wide_f16(bytes)
    }

    #[inline(always)]
    fn part_bf16(self, bytes: &[u8; 32], _: usize) -> __m512 {
        self.wide_bf16(bytes)
    }

    #[inline(always)]
    fn fused(self, sum: __m512, a: __m512, b: __m512) -> __m512 {
        self.wide_fused(sum, a, b)
    }

    #[inline(always)]
    fn store(self, a: __m512, out: &mut [f32]) {
        let out = &mut out[..16];
        // SAFETY: the target has space for 16 values, and the processor has the instructions.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), a) }
    }
}
