// SPDX-License-Identifier: Apache-2.0
//! What values of each element type do under each operation.
//!
//! Everything here is scalar, branch-free where it can be and always inlined: the kernels run it over
//! blocks that the compiler turns into vector code. Which operation is legal for which type is decided
//! in `spanker-plan`.

use half::{bf16, f16};
use spanker_collective::{DType, ReduceOp};

use crate::kernel::{self, Kernel};

mod sealed {
    /// Keeps the list of element types closed: a kernel exists for each.
    pub trait Sealed {}
}

/// A type that collectives can carry: `f32`, `f64`, `f16`, `bf16`, `i32`, `i64`, `u8` or `u32`.
pub trait Element:
    sealed::Sealed + bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug
{
    /// The type's name as data.
    const DTYPE: DType;

    /// The kernel of `op` for `sources` operands, or `None` for an illegal pair.
    #[doc(hidden)]
    fn kernel(op: ReduceOp, sources: usize) -> Option<Kernel<Self>>;

    /// The quotient by a number of cards.
    #[doc(hidden)]
    fn over(self, count: usize) -> Self;
}

/// What kernels need of an element type and nobody else may call: the level of instructions is not
/// checked here.
pub(crate) trait Wide: Element {
    /// What folds accumulate in: `f32` for the 16-bit floats, otherwise the type itself.
    type Acc: Copy;

    fn widen(self) -> Self::Acc;

    fn narrow(acc: Self::Acc) -> Self;

    /// Widens a block, with the instructions that level `ISA` of the kernels may use.
    #[inline(always)]
    fn widen_block<const ISA: u8, const W: usize>(block: &[Self; W]) -> [Self::Acc; W] {
        block.map(Self::widen)
    }

    /// Narrows a block, likewise.
    #[inline(always)]
    fn narrow_block<const ISA: u8, const W: usize>(block: &[Self::Acc; W]) -> [Self; W] {
        let mut narrow = [Self::zeroed(); W];
        for (narrow, &wide) in narrow.iter_mut().zip(block) {
            *narrow = Self::narrow(wide);
        }
        narrow
    }

    /// Folds a block into `total`, likewise. Types that need no widening are folded straight from
    /// memory.
    #[inline(always)]
    fn fold_block<const ISA: u8, O, const W: usize>(total: &mut [Self::Acc; W], block: &[Self; W])
    where
        Self::Acc: Acc,
        O: Fold<Self::Acc>,
    {
        for j in 0..W {
            total[j] = O::fold(total[j], block[j].widen());
        }
    }
}

/// Arithmetic of an accumulator.
pub(crate) trait Acc: Copy {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// The later operand if it is larger or NaN, otherwise the earlier one, NaN included.
    fn max(self, other: Self) -> Self;
    /// The later operand if it is smaller or NaN, otherwise the earlier one, NaN included.
    fn min(self, other: Self) -> Self;
    /// The quotient by a number of cards.
    fn over(self, count: usize) -> Self;
}

/// Accumulators of the float types.
pub(crate) trait Float: Acc {
    fn log_add_exp(self, other: Self) -> Self;
}

/// Accumulators of the integer types.
pub(crate) trait Bits: Acc {
    fn or(self, other: Self) -> Self;
    fn and(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

/// One fold step of an operation, and what happens to the total.
pub(crate) trait Fold<A: Acc>: 'static {
    fn fold(earlier: A, later: A) -> A;
    #[inline(always)]
    fn finish(total: A, _count: usize) -> A {
        total
    }
}

macro_rules! operation {
    ($name:ident, $bound:ident, |$a:ident, $b:ident| $fold:expr $(, |$t:ident, $n:ident| $finish:expr)?) => {
        pub(crate) struct $name;
        impl<A: $bound> Fold<A> for $name {
            #[inline(always)]
            fn fold($a: A, $b: A) -> A {
                $fold
            }
            $(
                #[inline(always)]
                fn finish($t: A, $n: usize) -> A {
                    $finish
                }
            )?
        }
    };
}

operation!(Sum, Acc, |a, b| a.add(b));
operation!(Product, Acc, |a, b| a.mul(b));
operation!(Max, Acc, |a, b| a.max(b));
operation!(Min, Acc, |a, b| a.min(b));
operation!(Avg, Acc, |a, b| a.add(b), |total, count| total.over(count));
operation!(LogSumExp, Float, |a, b| a.log_add_exp(b));
operation!(Or, Bits, |a, b| a.or(b));
operation!(And, Bits, |a, b| a.and(b));
operation!(Xor, Bits, |a, b| a.xor(b));

macro_rules! float_acc {
    ($float:ty) => {
        impl Acc for $float {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            // Comparing a value with itself is the NaN test that stays a single vector compare.
            #[inline(always)]
            #[allow(clippy::eq_op)]
            fn max(self, other: Self) -> Self {
                if other > self || other != other { other } else { self }
            }
            #[inline(always)]
            #[allow(clippy::eq_op)]
            fn min(self, other: Self) -> Self {
                if other < self || other != other { other } else { self }
            }
            #[inline(always)]
            fn over(self, count: usize) -> Self {
                self / count as $float
            }
        }

        impl Float for $float {
            /// Computed in `f64`: one rounding for each fold step.
            #[inline(always)]
            fn log_add_exp(self, other: Self) -> Self {
                let (a, b) = (f64::from(self), f64::from(other));
                if a.is_nan() || b.is_nan() {
                    return (a + b) as $float;
                }
                let (low, high) = if a < b { (a, b) } else { (b, a) };
                // Both infinities of one sign have no defined difference.
                if low == high && high.is_infinite() {
                    return high as $float;
                }
                (high + (low - high).exp().ln_1p()) as $float
            }
        }
    };
}

float_acc!(f32);
float_acc!(f64);

macro_rules! integer_acc {
    ($int:ty) => {
        impl Acc for $int {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn over(self, count: usize) -> Self {
                // More cards than the type can count to are more than any total.
                <$int>::try_from(count).map_or(0, |count| self / Ord::max(count, 1))
            }
        }

        impl Bits for $int {
            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }
    };
}

integer_acc!(i32);
integer_acc!(i64);
integer_acc!(u8);
integer_acc!(u32);

/// `$width` elements are folded at once: 256 bytes or more as accumulators, so that the compiler keeps the block in
/// vector registers and every card's cache lines are read in runs.
macro_rules! element {
    ($type:ty, $dtype:ident, $acc:ty, $select:ident, $width:literal, $widen:expr, $narrow:expr $(, $blocks:item)*) => {
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            fn kernel(op: ReduceOp, sources: usize) -> Option<Kernel<Self>> {
                kernel::$select::<Self, $width>(op, sources)
            }
            #[inline(always)]
            fn over(self, count: usize) -> Self {
                Self::narrow(Acc::over(self.widen(), count))
            }
        }
        impl Wide for $type {
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                ($widen)(self)
            }
            #[inline(always)]
            fn narrow(acc: $acc) -> Self {
                ($narrow)(acc)
            }
            $($blocks)*
        }
    };
}

element!(f32, F32, f32, select_float, 64, |x| x, |x| x);
element!(f64, F64, f64, select_float, 64, |x| x, |x| x);
element!(
    f16,
    F16,
    f32,
    select_float,
    64,
    half_to_f32,
    f32_to_half,
    #[inline(always)]
    fn widen_block<const ISA: u8, const W: usize>(block: &[f16; W]) -> [f32; W] {
        kernel::widen_half::<ISA, W>(block)
    },
    #[inline(always)]
    fn narrow_block<const ISA: u8, const W: usize>(block: &[f32; W]) -> [f16; W] {
        kernel::narrow_half::<ISA, W>(block)
    },
    #[inline(always)]
    fn fold_block<const ISA: u8, O: Fold<f32>, const W: usize>(
        total: &mut [f32; W],
        block: &[f16; W],
    ) {
        let wide = kernel::widen_half::<ISA, W>(block);
        for j in 0..W {
            total[j] = O::fold(total[j], wide[j]);
        }
    }
);
// Two of them are a word: one is its high half, and the other one shift away from being that. Kept apart, first the ones
// and then the others, they are widened and narrowed without changing their places.
element!(
    bf16,
    Bf16,
    f32,
    select_float,
    64,
    brain_to_f32,
    f32_to_brain,
    #[inline(always)]
    fn widen_block<const ISA: u8, const W: usize>(block: &[bf16; W]) -> [f32; W] {
        let mut wide = [0.0; W];
        if !W.is_multiple_of(2) {
            for (wide, &narrow) in wide.iter_mut().zip(block) {
                *wide = brain_to_f32(narrow);
            }
            return wide;
        }
        for (at, &pair) in block.as_chunks::<2>().0.iter().enumerate() {
            [wide[at], wide[W / 2 + at]] = pair_to_f32(pair);
        }
        wide
    },
    #[inline(always)]
    fn narrow_block<const ISA: u8, const W: usize>(block: &[f32; W]) -> [bf16; W] {
        let mut narrow = [bf16::ZERO; W];
        if !W.is_multiple_of(2) {
            for (narrow, &wide) in narrow.iter_mut().zip(block) {
                *narrow = f32_to_brain(wide);
            }
            return narrow;
        }
        for (at, pair) in narrow.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *pair = f32_to_pair([block[at], block[W / 2 + at]]);
        }
        narrow
    },
    #[inline(always)]
    fn fold_block<const ISA: u8, O: Fold<f32>, const W: usize>(
        total: &mut [f32; W],
        block: &[bf16; W],
    ) {
        if !W.is_multiple_of(2) {
            for (total, &narrow) in total.iter_mut().zip(block) {
                *total = O::fold(*total, brain_to_f32(narrow));
            }
            return;
        }
        for (at, &pair) in block.as_chunks::<2>().0.iter().enumerate() {
            let [one, two] = pair_to_f32(pair);
            total[at] = O::fold(total[at], one);
            total[W / 2 + at] = O::fold(total[W / 2 + at], two);
        }
    }
);
element!(i32, I32, i32, select_integer, 64, |x| x, |x| x);
element!(i64, I64, i64, select_integer, 64, |x| x, |x| x);
element!(u8, U8, u8, select_integer, 256, |x| x, |x| x);
element!(u32, U32, u32, select_integer, 64, |x| x, |x| x);

// The conversions of the `half` crate ask for CPU features one element at a time, which keeps a loop
// from becoming vector code. These are plain integer and float arithmetic with selects; tests compare
// them with `half` for every 16-bit pattern and around every rounding boundary.

#[inline(always)]
fn brain_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to nearest, ties to even. NaN stays NaN.
#[inline(always)]
fn f32_to_brain(x: f32) -> bf16 {
    bf16::from_bits((brain_in_word(x) >> 16) as u16)
}

/// The same in the high half of a word.
#[inline(always)]
fn brain_in_word(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet = bits | 0x0040_0000;
    if x.is_nan() { quiet } else { rounded }
}

/// Two neighbours.
#[inline(always)]
fn pair_to_f32(pair: [bf16; 2]) -> [f32; 2] {
    let word = u32::from_le_bytes(bytemuck::cast(pair));
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

#[inline(always)]
fn f32_to_pair(pair: [f32; 2]) -> [bf16; 2] {
    let [one, two] = pair.map(brain_in_word);
    bytemuck::cast(((one >> 16) | (two & 0xffff_0000)).to_le_bytes())
}

#[inline(always)]
pub(crate) fn half_to_f32(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7fff;
    // Shifted into place, the exponent is too small by 112; a multiplication puts that right and
    // makes subnormals exact.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((254 - 15) << 23);
    let special = (magnitude << 13) | 0x7f80_0000;
    let quiet = if magnitude > 0x7c00 { 0x0040_0000 } else { 0 };
    let value = if magnitude >= 0x7c00 { special | quiet } else { scaled.to_bits() };
    f32::from_bits(sign | value)
}

/// Rounds to nearest, ties to even. Too large becomes infinity, NaN stays NaN.
#[inline(always)]
pub(crate) fn f32_to_half(x: f32) -> f16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Adding a half at the weight of the last kept bit lets the float unit round subnormals.
    let aligned = f32::from_bits(magnitude) + f32::from_bits(126 << 23);
    let subnormal = aligned.to_bits().wrapping_sub(126 << 23);
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_add(0xc800_0fff).wrapping_add(odd) >> 13;
    let finite = if magnitude < (113 << 23) { subnormal } else { normal };
    let special =
        if magnitude > 0x7f80_0000 { 0x7e00 | ((magnitude >> 13) & 0x3ff) } else { 0x7c00 };
    let value = if magnitude >= (143 << 23) { special } else { finite };
    f16::from_bits((sign | value) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_from_16_bits_match_half_for_every_pattern() {
        for bits in 0..=u16::MAX {
            let (mine, theirs) = (half_to_f32(f16::from_bits(bits)), f16::from_bits(bits).to_f32());
            assert!(same(mine, theirs), "f16 {bits:#06x}: {mine} {theirs}");
            let (mine, theirs) =
                (brain_to_f32(bf16::from_bits(bits)), bf16::from_bits(bits).to_f32());
            assert!(same(mine, theirs), "bf16 {bits:#06x}: {mine} {theirs}");
        }
    }

    #[test]
    fn conversions_to_16_bits_match_half_around_every_boundary() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xefff, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (mine, theirs) = (f32_to_half(x), f16::from_f32(x));
                assert!(same(mine.to_f32(), theirs.to_f32()), "f16 of {x:e}: {mine} {theirs}");
                let (mine, theirs) = (f32_to_brain(x), bf16::from_f32(x));
                assert!(same(mine.to_f32(), theirs.to_f32()), "bf16 of {x:e}: {mine} {theirs}");
            }
        }
    }

    fn same(one: f32, other: f32) -> bool {
        one.to_bits() == other.to_bits() || (one.is_nan() && other.is_nan())
    }

    #[test]
    fn log_sum_exp_of_extremes_neither_overflows_nor_loses_a_nan() {
        assert_eq!(Float::log_add_exp(1000.0f32, 1000.0), 1000.0 + std::f32::consts::LN_2);
        assert_eq!(Float::log_add_exp(f32::NEG_INFINITY, f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert_eq!(Float::log_add_exp(f32::NEG_INFINITY, 3.0), 3.0);
        assert_eq!(Float::log_add_exp(f32::INFINITY, 3.0), f32::INFINITY);
        assert!(Float::log_add_exp(f64::NAN, 3.0).is_nan());
        assert!(Float::log_add_exp(3.0, f64::NAN).is_nan());
    }
}
