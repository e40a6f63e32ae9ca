// SPDX-License-Identifier: Apache-2.0
//! The vector operations that kernels are written in. A lane is a row of weights: a vector of words holds
//! one word of each of several rows, so no sum ever crosses lanes. Which operations in which order is the
//! kernels' business.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use half::{bf16, f16};

use crate::blocks::Book;
use crate::input::Run;
use crate::path::Path;
use crate::product::Product;

/// Work that is compiled once for each instruction set.
pub(crate) trait Work {
    type Out;
    fn run<L: Lanes>(self, l: L) -> Self::Out;
}

/// Runs the work by the instructions of a path; by no particular ones if the processor has not these.
pub(crate) fn run_on<W: Work>(path: Path, work: W) -> W::Out {
    #[cfg(target_arch = "x86_64")]
    {
        if path == Path::Avx512
            && let Some(s) = avx512::Avx512::new()
        {
            return s.vectorize(work);
        }
        if path == Path::Avx2
            && let Some(s) = avx2::Avx2::new()
        {
            return s.vectorize(work);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if path == Path::Neon {
        return neon::Neon.vectorize(work);
    }
    work.run(Scalar)
}

/// Computes the product by the vector instructions of a path, if the processor has them. Says whether it has.
pub(crate) fn multiply_on(path: Path, product: &mut Product<'_>) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        if path == Path::Avx512
            && let Some(s) = avx512::Avx512::new()
        {
            s.multiply(product);
            return true;
        }
        if path == Path::Avx2
            && let Some(s) = avx2::Avx2::new()
        {
            s.multiply(product);
            return true;
        }
    }
    #[cfg(target_arch = "aarch64")]
    if path == Path::Neon {
        neon::Neon.multiply(product);
        return true;
    }
    false
}

/// 16 numbers of one row at a time. A value of the type exists only where the processor has the
/// instructions.
pub(crate) trait Lanes: Copy {
    /// 16 f32 of one row.
    type Wide: Copy;
    /// Such vectors of sums that registers hold for each of four rows: 4 or 1.
    const ABREAST: usize = 1;

    /// Runs the work as code that uses the instructions.
    fn vectorize<W: Work>(self, work: W) -> W::Out;

    fn wide(self, values: &[f32; 16]) -> Self::Wide;
    /// 16 numbers, stored as f32.
    fn wide_f32(self, bytes: &[u8; 64]) -> Self::Wide;
    /// 16 numbers, stored as f16.
    fn wide_f16(self, bytes: &[u8; 32]) -> Self::Wide;
    /// 16 numbers, stored as BF16.
    fn wide_bf16(self, bytes: &[u8; 32]) -> Self::Wide;
    /// 16 whole numbers of 8 bits with signs.
    #[inline(always)]
    fn wide_i8(self, bytes: &[u8; 16]) -> Self::Wide {
        self.wide(&bytes.map(|byte| f32::from(byte as i8)))
    }
    /// Adds the products of `a` and `b` to `sum`.
    fn wide_add(self, sum: Self::Wide, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// Adds the products of `a` and `b` to `sum`, each with one rounding.
    fn wide_fused(self, sum: Self::Wide, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn wide_values(self, a: Self::Wide) -> [f32; 16];
    /// The sum of all: lanes are added in halves (8, 4, 2, 1).
    fn wide_sum(self, a: Self::Wide) -> f32;
    /// Rounds to f16.
    fn narrow(self, values: &[f32; 16]) -> [u8; 32];
    /// Asks for bytes that will be read soon; where that is not known how, nothing.
    #[inline(always)]
    fn fetch(self, _: &[u8]) {}
}

/// No instructions in particular.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Lanes for Scalar {
    type Wide = [f32; 16];

    #[inline(always)]
    fn vectorize<W: Work>(self, work: W) -> W::Out {
        work.run(self)
    }

    #[inline(always)]
    fn wide(self, values: &[f32; 16]) -> [f32; 16] {
        *values
    }

    #[inline(always)]
    fn wide_f32(self, bytes: &[u8; 64]) -> [f32; 16] {
        let words = bytes.as_chunks().0;
        std::array::from_fn(|at| f32::from_le_bytes(words[at]))
    }

    #[inline(always)]
    fn wide_f16(self, bytes: &[u8; 32]) -> [f32; 16] {
        let words = bytes.as_chunks().0;
        std::array::from_fn(|at| f16::from_le_bytes(words[at]).to_f32_const())
    }

    #[inline(always)]
    fn wide_bf16(self, bytes: &[u8; 32]) -> [f32; 16] {
        let words = bytes.as_chunks().0;
        std::array::from_fn(|at| bf16::from_le_bytes(words[at]).to_f32_const())
    }

    #[inline(always)]
    fn wide_add(self, sum: [f32; 16], a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|at| sum[at] + a[at] * b[at])
    }

    #[inline(always)]
    fn wide_fused(self, sum: [f32; 16], a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|at| a[at].mul_add(b[at], sum[at]))
    }

    #[inline(always)]
    fn wide_values(self, a: [f32; 16]) -> [f32; 16] {
        a
    }

    #[inline(always)]
    fn wide_sum(self, mut lanes: [f32; 16]) -> f32 {
        let mut half = 8;
        while half > 0 {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
            half /= 2;
        }
        lanes[0]
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

/// As many rows of weights as a vector has lanes, at equal distances.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    bytes: &'a [u8],
    lanes: usize,
    len: usize,
    stride: usize,
    /// Bytes from the first row to those that are to be asked for; 0 is none.
    ahead: usize,
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
        Rows { bytes, lanes, len, stride, ahead: 0 }
    }

    /// The same rows; whoever reads them asks for as many rows so many after them.
    #[inline(always)]
    pub(crate) fn ahead(self, rows: usize) -> Rows<'a> {
        Rows { ahead: rows * self.len, ..self }
    }

    /// Where rows further on have what begins at byte `at` of these, if neighbours are read in turn and they are to
    /// be asked for.
    #[inline(always)]
    fn following(self, lanes: usize, at: usize) -> Option<*const u8> {
        (self.ahead > 0).then(|| self.bytes.as_ptr().wrapping_add(self.ahead + lanes * at))
    }

    /// The bytes of a row.
    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// `len` bytes of a row from byte `at`.
    #[inline(always)]
    pub(crate) fn part(self, lane: usize, at: usize, len: usize) -> &'a [u8] {
        &self.bytes[lane * self.stride + at..][..len]
    }

    /// The first row from byte `at`, and the bytes to the next row, once `len` bytes from `at` are known to be
    /// inside each of `lanes` rows.
    #[inline(always)]
    fn locate(self, lanes: usize, at: usize, len: usize) -> (*const u8, usize) {
        assert!(lanes <= self.lanes && self.len >= len && at <= self.len - len);
        (self.bytes.as_ptr().wrapping_add(at), self.stride)
    }
}

/// One number of several rows of weights at a time.
pub(crate) trait Simd: Lanes {
    /// One 32-bit word for each row.
    type Int: Copy;
    /// One f32 for each row.
    type Float: Copy;
    /// Rows at a time.
    const LANES: usize;
    /// Whether there are registers for the weights of two groups of rows.
    const PAIRS: bool;
    /// Rows of inputs whose sums with four rows of numbers there are registers for: 6 or 2.
    const TALL: usize;
    /// Whether `load` asks for rows that follow.
    const AHEAD: bool;

    /// Computes the product by code that uses the instructions.
    fn multiply(self, product: &mut Product<'_>);

    /// 16 bytes of each row from byte `at`, as four words. Where rows are said to be read ahead, memory is asked for as many
    /// bytes of the rows that follow.
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
    fn expand_bits(self, bits: Self::Int, group: usize) -> Self::Int;
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

    /// Whether there are [`Simd::signed_sum`] and [`Simd::digits_sum`] in vectors.
    const BOOKS: bool = false;

    /// A number that is stored as f16.
    #[inline(always)]
    fn half(self, bytes: [u8; 2]) -> f32 {
        f16::from_le_bytes(bytes).to_f32_const()
    }

    /// The products of a block of one row of weights from a codebook, times their scales, with activations.
    #[inline(always)]
    fn signed_sum<B: Book>(self, block: &[u8], runs: &[Run; 8]) -> i32 {
        let mut sum = 0;
        for (part, run) in runs.iter().enumerate() {
            let weights = B::signed(block, part);
            for (at, value) in run.values().enumerate() {
                let magnitude = weights.magnitudes[at / 8] >> (8 * (at % 8)) & 0xff;
                let sign = 1 - 2 * (weights.negative >> at & 1) as i32;
                let scale = i32::from(weights.scales[at / 16]);
                sum += scale * sign * magnitude as i32 * i32::from(value);
            }
        }
        sum
    }

    /// The products of a block of one row of TQ1_0 with activations: of digits, which are one more than the weights.
    #[inline(always)]
    fn digits_sum(self, block: &[u8; 54], runs: &[Run; 8]) -> i32 {
        let mut sum = 0;
        for (at, value) in runs.iter().flat_map(Run::values).enumerate() {
            let (byte, power) = match at {
                0..160 => (at % 32, at / 32),
                160..240 => (32 + at % 16, (at - 160) / 16),
                _ => (48 + at % 4, (at - 240) / 4),
            };
            let fraction = block[byte].wrapping_mul([1, 3, 9, 27, 81][power]);
            sum += ((i32::from(fraction) * 3) >> 8) * i32::from(value);
        }
        sum
    }

    /// The f16 in the low and in the high half of each lane.
    fn halves(self, a: Self::Int) -> [Self::Float; 2];
    /// Each byte, which is less than 16, becomes the byte of the table at its place.
    fn look_up(self, table: &[u8; 16], bytes: Self::Int) -> Self::Int;
    fn float(self, a: Self::Int) -> Self::Float;
    fn float_of_bits(self, a: Self::Int) -> Self::Float;
    fn splat_f(self, value: f32) -> Self::Float;
    fn add_f(self, a: Self::Float, b: Self::Float) -> Self::Float;
    fn sub_f(self, a: Self::Float, b: Self::Float) -> Self::Float;
    fn mul_f(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// As many of 16 numbers as there are lanes: those of a part.
    fn part(self, values: &[f32; 16], part: usize) -> Self::Float;
    /// The same of numbers that are stored as f32.
    fn part_f32(self, bytes: &[u8; 64], part: usize) -> Self::Float;
    /// The same of numbers that are stored as f16.
    fn part_f16(self, bytes: &[u8; 32], part: usize) -> Self::Float;
    /// The same of numbers that are stored as BF16.
    fn part_bf16(self, bytes: &[u8; 32], part: usize) -> Self::Float;
    /// Adds the products of `a` and `b` to `sum`, each with one rounding.
    fn fused(self, sum: Self::Float, a: Self::Float, b: Self::Float) -> Self::Float;
    /// Writes one value for each lane to the beginning of `out`.
    fn store(self, a: Self::Float, out: &mut [f32]);
}
