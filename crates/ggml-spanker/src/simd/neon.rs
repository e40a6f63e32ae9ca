// SPDX-License-Identifier: Apache-2.0
//! Four rows at a time, with the vector instructions that every 64-bit Arm processor has.
#![allow(unsafe_code)]

use std::arch::aarch64::{
    float32x4_t, int32x4_t, uint32x4_t, vaddlvq_s8, vaddq_f32, vaddq_s32, vandq_s32, vandq_u8,
    vandq_u32, vceqq_u32, vcvtq_f32_s32, vdupq_n_f32, vdupq_n_s32, vdupq_n_u8, vdupq_n_u32,
    veorq_s32, vfmaq_f32, vget_low_s8, vget_low_s16, vld1q_f32, vld1q_s32, vld1q_u8, vmull_high_s8,
    vmull_high_s16, vmull_s8, vmull_s16, vmulq_f32, vmulq_s32, vorrq_s32, vorrq_u32, vpadalq_s16,
    vpaddq_s32, vqtbl1q_u8, vreinterpretq_f32_s32, vreinterpretq_f32_u32, vreinterpretq_s8_s32,
    vreinterpretq_s16_s32, vreinterpretq_s32_s64, vreinterpretq_s32_u8, vreinterpretq_s32_u32,
    vreinterpretq_s64_s32, vreinterpretq_u8_s32, vreinterpretq_u32_f32, vreinterpretq_u32_s32,
    vshlq_n_u32, vshlq_s32, vshlq_u32, vst1q_f32, vsubq_f32, vsubq_s32, vtrn1q_s32, vtrn1q_s64,
    vtrn2q_s32, vtrn2q_s64, vtstq_u8,
};

use half::f16;

use super::{Lanes, Rows, Simd, Work};
use crate::input::Run;
use crate::kernel;
use crate::product::Product;

/// The instructions that every processor of this kind has.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

/// Calls an intrinsic that needs nothing but the instructions.
macro_rules! op {
    ($call:expr) => {
        // SAFETY: every processor of this kind has the instructions.
        unsafe { $call }
    };
}

/// The f16 in the low half of each lane, whose high half is zero.
#[inline(always)]
fn widen(halves: uint32x4_t) -> float32x4_t {
    // SAFETY: every processor of this kind has the instructions.
    unsafe {
        let magnitude = vshlq_n_u32::<13>(vandq_u32(halves, vdupq_n_u32(0x7FFF)));
        // Exponents of f32 begin 112 lower. The product is exact, also for numbers without a leading one.
        let shift = vdupq_n_f32(f32::from_bits((127 + 112) << 23));
        let value = vreinterpretq_u32_f32(vmulq_f32(vreinterpretq_f32_u32(magnitude), shift));
        let top = vdupq_n_u32(0x7C00);
        let infinite = vceqq_u32(vandq_u32(halves, top), top);
        let value = vorrq_u32(value, vandq_u32(infinite, vdupq_n_u32(0x7F80_0000)));
        let sign = vshlq_n_u32::<16>(vandq_u32(halves, vdupq_n_u32(0x8000)));
        vreinterpretq_f32_u32(vorrq_u32(value, sign))
    }
}

impl Lanes for Neon {
    type Wide = [float32x4_t; 4];

    #[inline(always)]
    fn vectorize<W: Work>(self, work: W) -> W::Out {
        work.run(self)
    }

    #[inline(always)]
    fn wide(self, values: &[f32; 16]) -> [float32x4_t; 4] {
        let at = values.as_ptr();
        // SAFETY: 16 values are read.
        unsafe {
            [vld1q_f32(at), vld1q_f32(at.add(4)), vld1q_f32(at.add(8)), vld1q_f32(at.add(12))]
        }
    }

    #[inline(always)]
    fn wide_f32(self, bytes: &[u8; 64]) -> [float32x4_t; 4] {
        let words = bytes.as_chunks().0;
        self.wide(&std::array::from_fn(|at| f32::from_le_bytes(words[at])))
    }

    #[inline(always)]
    fn wide_f16(self, bytes: &[u8; 32]) -> [float32x4_t; 4] {
        let words = bytes.as_chunks().0;
        let quad = |quad: usize| -> float32x4_t {
            let word = |at: usize| i32::from(u16::from_le_bytes(words[4 * quad + at]));
            let four = [word(0), word(1), word(2), word(3)];
            // SAFETY: 4 numbers are read.
            widen(unsafe { vreinterpretq_u32_s32(vld1q_s32(four.as_ptr())) })
        };
        [quad(0), quad(1), quad(2), quad(3)]
    }

    #[inline(always)]
    fn wide_bf16(self, bytes: &[u8; 32]) -> [float32x4_t; 4] {
        let words = bytes.as_chunks().0;
        let number = |at: usize| f32::from_bits(u32::from(u16::from_le_bytes(words[at])) << 16);
        self.wide(&std::array::from_fn(number))
    }

    #[inline(always)]
    fn wide_add(
        self,
        sum: [float32x4_t; 4],
        a: [float32x4_t; 4],
        b: [float32x4_t; 4],
    ) -> [float32x4_t; 4] {
        let mut sum = sum;
        for (sum, (a, b)) in sum.iter_mut().zip(a.into_iter().zip(b)) {
            *sum = self.add_f(*sum, self.mul_f(a, b));
        }
        sum
    }

    #[inline(always)]
    fn wide_fused(
        self,
        sum: [float32x4_t; 4],
        a: [float32x4_t; 4],
        b: [float32x4_t; 4],
    ) -> [float32x4_t; 4] {
        let mut sum = sum;
        for (sum, (a, b)) in sum.iter_mut().zip(a.into_iter().zip(b)) {
            *sum = self.fused(*sum, a, b);
        }
        sum
    }

    #[inline(always)]
    fn wide_values(self, a: [float32x4_t; 4]) -> [f32; 16] {
        let mut out = [0.0; 16];
        for (out, a) in out.chunks_exact_mut(4).zip(a) {
            self.store(a, out);
        }
        out
    }

    #[inline(always)]
    fn wide_sum(self, a: [float32x4_t; 4]) -> f32 {
        let four = self.add_f(self.add_f(a[0], a[2]), self.add_f(a[1], a[3]));
        let mut lanes = [0.0; 4];
        self.store(four, &mut lanes);
        (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
    }

    #[inline(always)]
    fn narrow(self, values: &[f32; 16]) -> [u8; 32] {
        let mut out = [0; 32];
        for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
            *out = f16::from_f32_const(*value).to_le_bytes();
        }
        out
    }
}

impl Neon {
    /// The products of some words of weights with activations, both with signs.
    #[inline(always)]
    fn dot(self, weights: &[int32x4_t], words: &[i32]) -> int32x4_t {
        // SAFETY: every processor of this kind has the instructions.
        unsafe {
            let (mut low, mut high) = (vdupq_n_s32(0), vdupq_n_s32(0));
            for (weights, &word) in weights.iter().zip(words) {
                let weights = vreinterpretq_s8_s32(*weights);
                let word = vreinterpretq_s8_s32(vdupq_n_s32(word));
                low = vpadalq_s16(low, vmull_s8(vget_low_s8(weights), vget_low_s8(word)));
                high = vpadalq_s16(high, vmull_high_s8(weights, word));
            }
            vpaddq_s32(low, high)
        }
    }
}

impl Simd for Neon {
    type Int = int32x4_t;
    type Float = float32x4_t;
    const LANES: usize = 4;
    const TALL: usize = 6;
    const AHEAD: bool = false;
    const PAIRS: bool = true;

    #[inline(always)]
    fn multiply(self, product: &mut Product<'_>) {
        kernel::multiply(self, product);
    }

    #[inline(always)]
    fn load(self, rows: Rows<'_>, at: usize) -> [int32x4_t; 4] {
        let (first, stride) = rows.locate(4, at, 16);
        // SAFETY: `locate` has checked that 16 bytes are inside each of 4 rows.
        let row = |index: usize| unsafe {
            vreinterpretq_s32_u8(vld1q_u8(first.wrapping_add(index * stride)))
        };
        let [a, b, c, d] = [row(0), row(1), row(2), row(3)];
        // SAFETY: every processor of this kind has the instructions.
        unsafe {
            let wide = |words| vreinterpretq_s64_s32(words);
            let (even, odd) = (wide(vtrn1q_s32(a, b)), wide(vtrn2q_s32(a, b)));
            let (even2, odd2) = (wide(vtrn1q_s32(c, d)), wide(vtrn2q_s32(c, d)));
            [
                vreinterpretq_s32_s64(vtrn1q_s64(even, even2)),
                vreinterpretq_s32_s64(vtrn1q_s64(odd, odd2)),
                vreinterpretq_s32_s64(vtrn2q_s64(even, even2)),
                vreinterpretq_s32_s64(vtrn2q_s64(odd, odd2)),
            ]
        }
    }

    #[inline(always)]
    fn word(self, rows: Rows<'_>, at: usize) -> int32x4_t {
        let (first, stride) = rows.locate(4, at, 4);
        let row = |index: usize| first.wrapping_add(index * stride).cast::<i32>();
        // SAFETY: `locate` has checked that 4 bytes are inside each of 4 rows.
        let words = [0, 1, 2, 3].map(|index| unsafe { row(index).read_unaligned() });
        // SAFETY: 4 numbers are read.
        unsafe { vld1q_s32(words.as_ptr()) }
    }

    #[inline(always)]
    fn splat(self, value: i32) -> int32x4_t {
        op!(vdupq_n_s32(value))
    }

    #[inline(always)]
    fn and(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        op!(vandq_s32(a, b))
    }

    #[inline(always)]
    fn or(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        op!(vorrq_s32(a, b))
    }

    #[inline(always)]
    fn xor(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        op!(veorq_s32(a, b))
    }

    #[inline(always)]
    fn add(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        op!(vaddq_s32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        op!(vsubq_s32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        op!(vmulq_s32(a, b))
    }

    #[inline(always)]
    fn shl(self, a: int32x4_t, bits: u32) -> int32x4_t {
        op!(vshlq_s32(a, vdupq_n_s32(bits as i32)))
    }

    #[inline(always)]
    fn shr(self, a: int32x4_t, bits: u32) -> int32x4_t {
        op!(vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-(bits as i32)))))
    }

    #[inline(always)]
    fn sar(self, a: int32x4_t, bits: u32) -> int32x4_t {
        op!(vshlq_s32(a, vdupq_n_s32(-(bits as i32))))
    }

    #[inline(always)]
    fn expand_bits(self, bits: int32x4_t, group: usize) -> int32x4_t {
        // The byte that holds the four bits goes to all four bytes of its lane; one bit of each is tested.
        let byte = (group / 2) as i32 * 0x0101_0101;
        let tested = if group.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32 as i32 };
        let from = [0, 0x0404_0404, 0x0808_0808, 0x0C0C_0C0C].map(|lane| lane + byte);
        // SAFETY: 4 numbers are read, and every processor of this kind has the instructions.
        unsafe {
            let from = vreinterpretq_u8_s32(vld1q_s32(from.as_ptr()));
            let bytes = vqtbl1q_u8(vreinterpretq_u8_s32(bits), from);
            let set = vtstq_u8(bytes, vreinterpretq_u8_s32(vdupq_n_s32(tested)));
            vreinterpretq_s32_u8(vandq_u8(set, vdupq_n_u8(16)))
        }
    }

    #[inline(always)]
    fn dot32<const G: usize>(
        self,
        weights: &[[int32x4_t; 8]; G],
        bits: u32,
        run: &Run,
        start: i32,
    ) -> [int32x4_t; G] {
        let mut start = start;
        let mut sums = [self.splat(0); G];
        for (sum, weights) in sums.iter_mut().zip(weights) {
            if bits < 8 {
                *sum = self.dot(weights, &run.0);
                continue;
            }
            // Less 128, weights of 8 bits have signs. That is added again below.
            let mut signed = *weights;
            for words in &mut signed {
                *words = self.xor(*words, self.splat(0x8080_8080_u32 as i32));
            }
            *sum = self.dot(&signed, &run.0);
        }
        if bits == 8 {
            // SAFETY: 8 numbers are read.
            let total = unsafe {
                let (low, high) = (vld1q_s32(run.0.as_ptr()), vld1q_s32(run.0.as_ptr().add(4)));
                vaddlvq_s8(vreinterpretq_s8_s32(low)) + vaddlvq_s8(vreinterpretq_s8_s32(high))
            };
            start += 128 * i32::from(total);
        }
        for sum in &mut sums {
            *sum = self.add(*sum, self.splat(start));
        }
        sums
    }

    #[inline(always)]
    fn dot16<const G: usize>(
        self,
        weights: &[[int32x4_t; 8]; G],
        bits: u32,
        run: &Run,
        half: usize,
    ) -> [int32x4_t; G] {
        let mut start = 0;
        let mut sums = [self.splat(0); G];
        let which = 4 * half..4 * half + 4;
        for (sum, weights) in sums.iter_mut().zip(weights) {
            let mut signed = *weights;
            if bits == 8 {
                // Less 128, weights of 8 bits have signs. That is added again below.
                for words in &mut signed[which.clone()] {
                    *words = self.xor(*words, self.splat(0x8080_8080_u32 as i32));
                }
            }
            *sum = self.dot(&signed[which.clone()], &run.0[which.clone()]);
        }
        if bits == 8 {
            // SAFETY: 4 numbers are read.
            let total =
                unsafe { vaddlvq_s8(vreinterpretq_s8_s32(vld1q_s32(run.0[which].as_ptr()))) };
            start = 128 * i32::from(total);
        }
        for sum in &mut sums {
            *sum = self.add(*sum, self.splat(start));
        }
        sums
    }

    #[inline(always)]
    fn add_pairs(self, to: int32x4_t, pairs: int32x4_t, with: [i16; 2]) -> int32x4_t {
        let with = i32::from(with[0] as u16) | i32::from(with[1]) << 16;
        // SAFETY: every processor of this kind has the instructions.
        unsafe {
            let pairs = vreinterpretq_s16_s32(pairs);
            let with = vreinterpretq_s16_s32(vdupq_n_s32(with));
            let low = vmull_s16(vget_low_s16(pairs), vget_low_s16(with));
            vaddq_s32(to, vpaddq_s32(low, vmull_high_s16(pairs, with)))
        }
    }

    #[inline(always)]
    fn halves(self, a: int32x4_t) -> [float32x4_t; 2] {
        let low = self.and(a, self.splat(0xFFFF));
        let high = self.shr(a, 16);
        op!([widen(vreinterpretq_u32_s32(low)), widen(vreinterpretq_u32_s32(high))])
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], bytes: int32x4_t) -> int32x4_t {
        // SAFETY: 16 bytes are read, and every processor of this kind has the instructions.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            vreinterpretq_s32_u8(vqtbl1q_u8(table, vreinterpretq_u8_s32(bytes)))
        }
    }

    #[inline(always)]
    fn float_of_bits(self, a: int32x4_t) -> float32x4_t {
        op!(vreinterpretq_f32_s32(a))
    }

    #[inline(always)]
    fn float(self, a: int32x4_t) -> float32x4_t {
        op!(vcvtq_f32_s32(a))
    }

    #[inline(always)]
    fn splat_f(self, value: f32) -> float32x4_t {
        op!(vdupq_n_f32(value))
    }

    #[inline(always)]
    fn add_f(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        op!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub_f(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        op!(vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul_f(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        op!(vmulq_f32(a, b))
    }

    #[inline(always)]
    fn part(self, values: &[f32; 16], part: usize) -> float32x4_t {
        let values = &values[4 * part..4 * part + 4];
        // SAFETY: 4 values are read.
        unsafe { vld1q_f32(values.as_ptr()) }
    }

    #[inline(always)]
    fn part_f32(self, bytes: &[u8; 64], part: usize) -> float32x4_t {
        let words = bytes[16 * part..16 * part + 16].as_chunks().0;
        let four: [f32; 4] = std::array::from_fn(|at| f32::from_le_bytes(words[at]));
        // SAFETY: 4 values are read.
        unsafe { vld1q_f32(four.as_ptr()) }
    }

    #[inline(always)]
    fn part_f16(self, bytes: &[u8; 32], part: usize) -> float32x4_t {
        let words = bytes[8 * part..8 * part + 8].as_chunks().0;
        let four: [i32; 4] = std::array::from_fn(|at| i32::from(u16::from_le_bytes(words[at])));
        // SAFETY: 4 numbers are read.
        widen(unsafe { vreinterpretq_u32_s32(vld1q_s32(four.as_ptr())) })
    }

    #[inline(always)]
    fn part_bf16(self, bytes: &[u8; 32], part: usize) -> float32x4_t {
        let words = bytes[8 * part..8 * part + 8].as_chunks().0;
        let four: [f32; 4] = std::array::from_fn(|at| {
            f32::from_bits(u32::from(u16::from_le_bytes(words[at])) << 16)
        });
        // SAFETY: 4 values are read.
        unsafe { vld1q_f32(four.as_ptr()) }
    }

    #[inline(always)]
    fn fused(self, sum: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        op!(vfmaq_f32(sum, a, b))
    }

    #[inline(always)]
    fn store(self, a: float32x4_t, out: &mut [f32]) {
        let out = &mut out[..4];
        // SAFETY: the target has space for 4 values.
        unsafe { vst1q_f32(out.as_mut_ptr(), a) }
    }
}
