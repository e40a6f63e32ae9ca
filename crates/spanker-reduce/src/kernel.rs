// SPDX-License-Identifier: Apache-2.0
//! The loop that folds one block of every card before it writes any: each buffer is read once and
//! written once.
//!
//! There is one generic body. It is compiled for the baseline instruction set and, on x86-64, for AVX2
//! and AVX-512; the choice is made once for each call. No lane ever mixes with another and no operation
//! is fused or re-associated, so every variant computes the bits of the scalar loop.
//!
//! Not here: threads (`team.rs`), shapes and lengths (`fused.rs`).

use std::ops::Range;

use half::f16;
use spanker_collective::ReduceOp;

use crate::element::{
    Acc, And, Avg, Bits, Float, Fold, LogSumExp, Max, Min, Or, Product, Sum, Wide, Xor,
    f32_to_half, half_to_f32,
};

/// Folds elements `range` of all `sources` in order and writes the result to all `dests`.
///
/// # Safety
/// Every pointer is valid for reads (sources) or writes (dests) of `range.end` elements, and nobody
/// else accesses `range` of them meanwhile. A destination may be a source at the same offset, and
/// must not overlap one otherwise. There is at least one source.
pub type Kernel<T> = unsafe fn(sources: &[*mut T], dests: &[*mut T], range: Range<usize>);

/// The kernel of a float type.
pub(crate) fn select_float<T, const W: usize>(op: ReduceOp, sources: usize) -> Option<Kernel<T>>
where
    T: Wide<Acc: Float>,
{
    match op {
        ReduceOp::LogSumExp => Some(by_isa::<T, LogSumExp, 0, W>()),
        _ => select_common::<T, W>(op, sources),
    }
}

/// The kernel of an integer type.
pub(crate) fn select_integer<T, const W: usize>(op: ReduceOp, sources: usize) -> Option<Kernel<T>>
where
    T: Wide<Acc: Bits>,
{
    match op {
        ReduceOp::BitwiseOr => Some(by_isa::<T, Or, 0, W>()),
        ReduceOp::BitwiseAnd => Some(by_isa::<T, And, 0, W>()),
        ReduceOp::BitwiseXor => Some(by_isa::<T, Xor, 0, W>()),
        _ => select_common::<T, W>(op, sources),
    }
}

fn select_common<T, const W: usize>(op: ReduceOp, sources: usize) -> Option<Kernel<T>>
where
    T: Wide<Acc: Acc>,
{
    match op {
        ReduceOp::Sum => Some(by_count::<T, Sum, W>(sources)),
        ReduceOp::Avg => Some(by_count::<T, Avg, W>(sources)),
        ReduceOp::Product => Some(by_isa::<T, Product, 0, W>()),
        ReduceOp::Max => Some(by_isa::<T, Max, 0, W>()),
        ReduceOp::Min => Some(by_isa::<T, Min, 0, W>()),
        _ => None,
    }
}

/// Sums over the usual numbers of cards are unrolled, so that each card has load instructions of its
/// own: the hardware's prefetcher distinguishes streams by instruction.
fn by_count<T, O, const W: usize>(sources: usize) -> Kernel<T>
where
    T: Wide<Acc: Acc>,
    O: Fold<T::Acc>,
{
    match sources {
        2 => by_isa::<T, O, 2, W>(),
        3 => by_isa::<T, O, 3, W>(),
        4 => by_isa::<T, O, 4, W>(),
        8 => by_isa::<T, O, 8, W>(),
        _ => by_isa::<T, O, 0, W>(),
    }
}

fn by_isa<T, O, const N: usize, const W: usize>() -> Kernel<T>
where
    T: Wide<Acc: Acc>,
    O: Fold<T::Acc>,
{
    #[cfg(target_arch = "x86_64")]
    {
        if isa::has_avx512() {
            return isa::avx512::<T, O, N, W>;
        }
        if isa::has_avx2() {
            return isa::avx2::<T, O, N, W>;
        }
    }
    baseline::<T, O, N, W>
}

/// # Safety
/// As [`Kernel`].
unsafe fn baseline<T, O, const N: usize, const W: usize>(
    sources: &[*mut T],
    dests: &[*mut T],
    range: Range<usize>,
) where
    T: Wide<Acc: Acc>,
    O: Fold<T::Acc>,
{
    // SAFETY: the caller keeps the promises of `Kernel`.
    unsafe { body::<BASELINE, T, O, N, W>(sources, dests, range) }
}

#[cfg(target_arch = "x86_64")]
mod isa {
    use super::{Acc, Fold, Range, Wide, body};

    pub(super) fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
    }

    pub(super) fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
    }

    /// # Safety
    /// As [`super::Kernel`], on a CPU with AVX2 and F16C.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn avx2<T, O, const N: usize, const W: usize>(
        sources: &[*mut T],
        dests: &[*mut T],
        range: Range<usize>,
    ) where
        T: Wide<Acc: Acc>,
        O: Fold<T::Acc>,
    {
        // SAFETY: the caller keeps the promises of `Kernel`.
        unsafe { body::<{ super::AVX2 }, T, O, N, W>(sources, dests, range) }
    }

    /// # Safety
    /// As [`super::Kernel`], on a CPU with the AVX-512 features that `has_avx512` asks for.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
    pub(super) unsafe fn avx512<T, O, const N: usize, const W: usize>(
        sources: &[*mut T],
        dests: &[*mut T],
        range: Range<usize>,
    ) where
        T: Wide<Acc: Acc>,
        O: Fold<T::Acc>,
    {
        // SAFETY: the caller keeps the promises of `Kernel`.
        unsafe { body::<{ super::AVX512 }, T, O, N, W>(sources, dests, range) }
    }
}

/// The levels of instructions that a body is compiled for.
const BASELINE: u8 = 0;
#[cfg(target_arch = "x86_64")]
const AVX2: u8 = 1;
#[cfg(target_arch = "x86_64")]
const AVX512: u8 = 2;

/// The body of every kernel. `N` is the number of sources where it is fixed, else 0.
///
/// # Safety
/// As [`Kernel`].
#[inline(always)]
unsafe fn body<const ISA: u8, T, O, const N: usize, const W: usize>(
    sources: &[*mut T],
    dests: &[*mut T],
    range: Range<usize>,
) where
    T: Wide<Acc: Acc>,
    O: Fold<T::Acc>,
{
    let (mut i, end) = (range.start, range.end);
    // SAFETY: blocks are whole and inside `range`, for which the caller vouches.
    unsafe {
        // Blocks begin on a cache line of the first card; where the cards' buffers are aligned alike,
        // as allocators make them, of every card.
        let lead = sources[0].add(i).align_offset(CACHE_LINE).min(end - i);
        while i < range.start + lead {
            block::<ISA, T, O, 0, 1>(sources, dests, i);
            i += 1;
        }
        if N > 0 && dests.len() == N {
            while end - i >= W {
                prefetch::<T, N, W>(sources, i);
                block::<ISA, T, O, N, W>(sources, dests, i);
                i += W;
            }
        } else {
            while end - i >= W {
                prefetch::<T, 0, W>(sources, i);
                block::<ISA, T, O, 0, W>(sources, dests, i);
                i += W;
            }
        }
        while end - i >= 16 {
            block::<ISA, T, O, 0, 16>(sources, dests, i);
            i += 16;
        }
        while i < end {
            block::<ISA, T, O, 0, 1>(sources, dests, i);
            i += 1;
        }
    }
}

const CACHE_LINE: usize = 64;

/// How far ahead of the fold cache lines are prefetched, in bytes.
const PREFETCH_DISTANCE: usize = 512;

/// Prefetches the cache lines that a block a little further on will read. Addresses past the end are only
/// hints, never accesses.
#[inline(always)]
fn prefetch<T, const N: usize, const W: usize>(sources: &[*mut T], i: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let ask = |source: *mut T| {
            let ahead =
                source.wrapping_add(i).cast_const().cast::<i8>().wrapping_add(PREFETCH_DISTANCE);
            let mut line = 0;
            while line < W * size_of::<T>() {
                // SAFETY: a prefetch is a hint and has no requirement on its address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line)) };
                line += CACHE_LINE;
            }
        };
        if N > 0 {
            for &source in &sources[..N] {
                ask(source);
            }
        } else {
            for &source in sources {
                ask(source);
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (sources, i);
}

/// Folds elements `i..i + W`. `N` is the number of sources and of destinations where it is fixed.
///
/// # Safety
/// As [`Kernel`], for `i..i + W`.
#[inline(always)]
unsafe fn block<const ISA: u8, T, O, const N: usize, const W: usize>(
    sources: &[*mut T],
    dests: &[*mut T],
    i: usize,
) where
    T: Wide<Acc: Acc>,
    O: Fold<T::Acc>,
{
    let (sources, dests) = if N > 0 { (&sources[..N], &dests[..N]) } else { (sources, dests) };
    // SAFETY: the caller vouches for `i..i + W` of every pointer. An array of `W` elements has the
    // alignment of one.
    unsafe {
        let mut total = T::widen_block::<ISA, W>(&*sources[0].add(i).cast::<[T; W]>());
        for source in &sources[1..] {
            T::fold_block::<ISA, O, W>(&mut total, &*source.add(i).cast::<[T; W]>());
        }
        let count = sources.len();
        for total in &mut total {
            *total = O::finish(*total, count);
        }
        let result = T::narrow_block::<ISA, W>(&total);
        for dest in dests {
            *dest.add(i).cast::<[T; W]>() = result;
        }
    }
}

/// Widens 16-bit floats with the instructions for it, where the level has them.
///
/// Called only from a body, which runs only on CPUs of its level.
#[inline(always)]
pub(crate) fn widen_half<const ISA: u8, const W: usize>(block: &[f16; W]) -> [f32; W] {
    let mut wide = [0.0; W];
    #[cfg(target_arch = "x86_64")]
    if ISA >= AVX2 && W.is_multiple_of(16) {
        use std::arch::x86_64::{
            _mm_loadu_si128, _mm256_cvtph_ps, _mm256_loadu_si256, _mm256_storeu_ps,
            _mm512_cvtph_ps, _mm512_storeu_ps,
        };
        for (from, to) in block.chunks_exact(16).zip(wide.chunks_exact_mut(16)) {
            let (from, to) = (from.as_ptr(), to.as_mut_ptr());
            // SAFETY: 16 elements are read and written; the body runs only on CPUs of its level.
            unsafe {
                if ISA == AVX512 {
                    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())));
                } else {
                    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(from.cast())));
                    let (from, to) = (from.add(8), to.add(8));
                    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(from.cast())));
                }
            }
        }
        return wide;
    }
    for (wide, &narrow) in wide.iter_mut().zip(block) {
        *wide = half_to_f32(narrow);
    }
    wide
}

/// Narrows to 16-bit floats, likewise: to nearest, ties to even.
#[inline(always)]
pub(crate) fn narrow_half<const ISA: u8, const W: usize>(block: &[f32; W]) -> [f16; W] {
    let mut narrow = [f16::ZERO; W];
    #[cfg(target_arch = "x86_64")]
    if ISA >= AVX2 && W.is_multiple_of(16) {
        use std::arch::x86_64::{
            _MM_FROUND_TO_NEAREST_INT, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_set_m128i,
            _mm256_storeu_si256, _mm512_castsi256_si512, _mm512_cvtps_ph, _mm512_inserti64x4,
            _mm512_loadu_ps, _mm512_storeu_si512,
        };
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        let mut done = 0;
        // Two vectors of results make one: the instruction can narrow straight to memory, and then does so again for each
        // destination.
        if ISA == AVX512 {
            for (from, to) in block.chunks_exact(32).zip(narrow.chunks_exact_mut(32)) {
                let (from, to) = (from.as_ptr(), to.as_mut_ptr());
                // SAFETY: 32 elements are read and written; the body runs only on CPUs of its level.
                unsafe {
                    let low = _mm512_cvtps_ph::<NEAREST>(_mm512_loadu_ps(from));
                    let high = _mm512_cvtps_ph::<NEAREST>(_mm512_loadu_ps(from.add(16)));
                    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                    _mm512_storeu_si512(to.cast(), both);
                }
                done += 32;
            }
        }
        let rest = block[done..].chunks_exact(16).zip(narrow[done..].chunks_exact_mut(16));
        for (from, to) in rest {
            let (from, to) = (from.as_ptr(), to.as_mut_ptr());
            // SAFETY: 16 elements are read and written; the body runs only on CPUs of its level.
            unsafe {
                let low = _mm256_cvtps_ph::<NEAREST>(_mm256_loadu_ps(from));
                let high = _mm256_cvtps_ph::<NEAREST>(_mm256_loadu_ps(from.add(8)));
                _mm256_storeu_si256(to.cast(), _mm256_set_m128i(high, low));
            }
        }
        return narrow;
    }
    for (narrow, &wide) in narrow.iter_mut().zip(block) {
        *narrow = f32_to_half(wide);
    }
    narrow
}

/// Reads and writes every byte of `bytes` once, in place: the fastest that any in-place work over
/// them can be, and so the limit that benchmarks compare with. The bytes keep their values.
pub(crate) fn read_modify_write(bytes: &mut [u8]) {
    // Unknown to the compiler, or it would leave out the loop.
    let zero = std::hint::black_box(0u8);
    let word = u32::from_ne_bytes([zero; 4]);
    let (head, words, tail) = bytemuck::pod_align_to_mut::<u8, u32>(bytes);
    head.iter_mut().chain(tail).for_each(|byte| *byte = byte.wrapping_add(zero));
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
        fn avx512(words: &mut [u32], addend: u32) {
            add(words, addend);
        }
        #[target_feature(enable = "avx2")]
        fn avx2(words: &mut [u32], addend: u32) {
            add(words, addend);
        }
        if isa::has_avx512() {
            // SAFETY: the CPU has the features.
            return unsafe { avx512(words, word) };
        }
        if isa::has_avx2() {
            // SAFETY: the CPU has the feature.
            return unsafe { avx2(words, word) };
        }
    }
    add(words, word);
}

#[inline(always)]
fn add(words: &mut [u32], addend: u32) {
    for word in words {
        *word = word.wrapping_add(addend);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// The same kernel, compiled for every level that this CPU has.
    fn levels<T, O, const N: usize, const W: usize>() -> Vec<(&'static str, Kernel<T>)>
    where
        T: Wide<Acc: Acc>,
        O: Fold<T::Acc>,
    {
        let mut levels: Vec<(&'static str, Kernel<T>)> = vec![("baseline", baseline::<T, O, N, W>)];
        #[cfg(target_arch = "x86_64")]
        {
            if isa::has_avx2() {
                levels.push(("avx2", isa::avx2::<T, O, N, W>));
            }
            if isa::has_avx512() {
                levels.push(("avx512", isa::avx512::<T, O, N, W>));
            }
        }
        levels
    }

    /// Every level against one element at a time, over arbitrary bit patterns and odd borders.
    fn check<T, O, const N: usize, const W: usize>(cards: usize)
    where
        T: Wide<Acc: Acc>,
        O: Fold<T::Acc>,
    {
        const LEN: usize = 1500;
        let mut state = 1u32;
        let bytes: Vec<u8> = (0..LEN * size_of::<T>() * cards)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
        let inputs: Vec<Vec<T>> =
            bytes.chunks_exact(LEN * size_of::<T>()).map(bytemuck::pod_collect_to_vec).collect();
        let run = |kernel: Kernel<T>, parts: &[Range<usize>]| {
            let mut buffers = inputs.clone();
            let cards: Vec<*mut T> = buffers.iter_mut().map(|buffer| buffer.as_mut_ptr()).collect();
            for part in parts {
                // SAFETY: all buffers are `LEN` long and used by this thread alone.
                unsafe { kernel(&cards, &cards, part.clone()) };
            }
            buffers.into_iter().flatten().collect::<Vec<T>>()
        };
        let single: Vec<Range<usize>> = (0..LEN).map(|i| i..i + 1).collect();
        let expected = run(baseline::<T, O, 0, W>, &single);
        for (level, kernel) in levels::<T, O, N, W>() {
            for cut in [0, 1, 17, 700, LEN] {
                let found = run(kernel, &[0..cut, cut..LEN]);
                for (i, (&a, &b)) in found.iter().zip(&expected).enumerate() {
                    // A NaN is the one value that differs from itself; any NaN is as good as another.
                    #[allow(clippy::eq_op)]
                    let same =
                        bytemuck::bytes_of(&a) == bytemuck::bytes_of(&b) || (a != a && b != b);
                    assert!(same, "{} {level} element {i}: {a:?} {b:?}", T::DTYPE);
                }
            }
        }
    }

    #[test]
    fn every_level_of_instructions_computes_the_same_bits() {
        check::<f32, Sum, 4, 64>(4);
        check::<f32, Avg, 0, 64>(5);
        check::<f32, Max, 0, 64>(3);
        check::<f64, Sum, 2, 64>(2);
        check::<f64, Min, 0, 64>(3);
        check::<f16, Sum, 8, 64>(8);
        check::<f16, Avg, 3, 64>(3);
        check::<f16, Product, 0, 64>(4);
        check::<bf16, Sum, 4, 64>(4);
        check::<bf16, Max, 0, 64>(3);
        check::<i32, Sum, 0, 64>(5);
        check::<i64, Product, 0, 64>(3);
        check::<u8, Avg, 3, 256>(3);
        check::<u32, Xor, 0, 64>(4);
    }
}
