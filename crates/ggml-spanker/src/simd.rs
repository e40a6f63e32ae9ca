// SPDX-License-Identifier: Apache-2.0
//! The vector operations that kernels are written in. A lane is a row of weights: a vector of words holds
//! one word of each of several rows, so no sum ever crosses lanes. Which operations in which order is the
//! kernels' business.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

use crate::input::Run;

/// Work that is compiled once for each instruction set.
pub(crate) trait Work {
    fn run<S: Simd>(self, s: S);
}

/// As many rows of weights as a vector has lanes, at equal distances.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    bytes: &'a [u8],
    len: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    /// The largest distance of rows, so that every place in 16 of them has a number of 31 bits.
    pub(crate) const STRIDE_MAX: usize = 1 << 26;

    /// `lanes` rows of `len` bytes in `weights`: every `step`-th from row `first`.
    #[inline(always)]
    pub(crate) fn new(
        weights: &'a [u8],
        lanes: usize,
        len: usize,
        first: usize,
        step: usize,
    ) -> Rows<'a> {
        let bytes = &weights[first * len..];
        let stride = step * len;
        assert!(stride <= Self::STRIDE_MAX && (lanes - 1) * stride + len <= bytes.len());
        Rows { bytes, len, stride }
    }

    /// The bytes of a row.
    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The first row from byte `at`, and the bytes to the next row, once `len` bytes from `at` are known to be
    /// inside each of `lanes` rows.
    #[inline(always)]
    fn locate(self, lanes: usize, at: usize, len: usize) -> (*const u8, usize) {
        debug_assert!((lanes - 1) * self.stride + self.len <= self.bytes.len());
        assert!(self.len >= len && at <= self.len - len);
        (self.bytes.as_ptr().wrapping_add(at), self.stride)
    }
}

/// Vector operations of one instruction set. A value of the type exists only where the processor has the
/// instructions.
pub(crate) trait Simd: Copy {
    /// One 32-bit word for each row.
    type Int: Copy;
    /// One f32 for each row.
    type Float: Copy;
    /// 16 f32 of one row.
    type Wide: Copy;
    /// Rows at a time.
    const LANES: usize;
    /// Whether there are registers for the weights of two groups of rows.
    const PAIRS: bool;

    /// Runs the work as code that uses the instructions.
    fn vectorize(self, work: impl Work);

    /// 16 bytes of each row from byte `at`, as four words.
    fn load(self, rows: Rows<'_>, at: usize) -> [Self::Int; 4];
    /// The word at byte `at` of each row.
    fn word(self, rows: Rows<'_>, at: usize) -> Self::Int;

    fn splat(self, value: i32) -> Self::Int;
    fn and(self, a: Self::Int, b: Self::Int) -> Self::Int;
    fn or(self, a: Self::Int, b: Self::Int) -> Self::Int;
    fn xor(self, a: Self::Int, b: Self::Int) -> Self::Int;
    fn add(self, a: Self::Int, b: Self::Int) -> Self::Int;
    fn sub(self, a: Self::Int, b: Self::Int) -> Self::Int;
    fn mul(self, a: Self::Int, b: Self::Int) -> Self::Int;
    fn shl(self, a: Self::Int, bits: u32) -> Self::Int;
    /// Zeros move in.
    fn shr(self, a: Self::Int, bits: u32) -> Self::Int;
    /// The sign moves in.
    fn sar(self, a: Self::Int, bits: u32) -> Self::Int;

    /// The bits `4 * group ..` of each lane as 16 or 0 in its four bytes.
    fn spread(self, bits: Self::Int, group: usize) -> Self::Int;
    /// For each of `G` groups of rows: `start` and the products of 32 bytes of weights without sign, less than
    /// `1 << bits`, with activations.
    fn dot32<const G: usize>(
        self,
        weights: &[[Self::Int; 8]; G],
        bits: u32,
        run: &Run,
        start: i32,
    ) -> [Self::Int; G];
    /// Likewise of the first (`half` 0) or last (1) 16 weights, from zero.
    fn dot16<const G: usize>(
        self,
        weights: &[[Self::Int; 8]; G],
        bits: u32,
        run: &Run,
        half: usize,
    ) -> [Self::Int; G];
    /// `to` and the products of two 16-bit numbers of each lane with two that all lanes share.
    fn add_pairs(self, to: Self::Int, pairs: Self::Int, with: [i16; 2]) -> Self::Int;

    /// The f16 in the low and in the high half of each lane.
    fn halves(self, a: Self::Int) -> [Self::Float; 2];
    fn float(self, a: Self::Int) -> Self::Float;
    fn splat_f(self, value: f32) -> Self::Float;
    fn add_f(self, a: Self::Float, b: Self::Float) -> Self::Float;
    fn sub_f(self, a: Self::Float, b: Self::Float) -> Self::Float;
    fn mul_f(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// Writes one value for each lane to the beginning of `out`.
    fn store(self, a: Self::Float, out: &mut [f32]);

    /// 16 numbers of one row.
    fn wide(self, values: &[f32; 16]) -> Self::Wide;
    /// 16 numbers, stored as f32.
    fn wide_f32(self, bytes: &[u8; 64]) -> Self::Wide;
    /// 16 numbers, stored as f16.
    fn wide_f16(self, bytes: &[u8; 32]) -> Self::Wide;
    /// 16 numbers, stored as BF16.
    fn wide_bf16(self, bytes: &[u8; 32]) -> Self::Wide;
    /// Adds the products of `a` and `b` to `sum`.
    fn wide_add(self, sum: Self::Wide, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn wide_values(self, a: Self::Wide) -> [f32; 16];
}
