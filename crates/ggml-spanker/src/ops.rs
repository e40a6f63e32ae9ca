// SPDX-License-Identifier: Apache-2.0
//! What a Llama-family model does between its products, on rows of f32.
//!
//! Every function has one order of operations, without fused ones, so that the bits are the same on every
//! processor and however rows are shared out. Lengths are the caller's to check: functions panic where they
//! do not belong together.

mod attend;
mod body;
mod experts;

pub use experts::{add_picked, combine, route};

pub use attend::{AttendScratch, KvView, Queries, attend, attend_blocks, fold, keep, partial_len};

use spanker_model::Activation;

use crate::path::Path;
use crate::simd::{Lanes, Work, run_on};

/// Calls a function of `body` with its arguments, by the instructions of a path.
macro_rules! on_path {
    ($path:expr, $name:ident($($argument:ident: $kind:ty),*) -> $out:ty) => {{
        struct Call<'a> {
            $($argument: $kind,)*
            lifetime: std::marker::PhantomData<&'a ()>,
        }
        impl Work for Call<'_> {
            type Out = $out;

            #[inline(always)]
            fn run<L: Lanes>(self, l: L) -> $out {
                body::$name(l, $(self.$argument),*)
            }
        }
        run_on($path, Call { $($argument,)* lifetime: std::marker::PhantomData })
    }};
}

#[cfg(test)]
mod tests;

/// The product of two rows in 16 lanes: lane `i` adds every sixteenth product in rising order.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    on_path!(Path::best(), dot(a: &'a [f32], b: &'a [f32]) -> f32)
}

/// `e` to the power of `x`, within 2 units in the last place, the same bits on every processor.
///
/// Below -87.3 it is 0; above 88.7 it is infinite.
///
/// ```
/// use ggml_spanker::ops::exp;
/// assert_eq!((exp(0.0), exp(-100.0), exp(100.0)), (1.0, 0.0, f32::INFINITY));
/// assert!((exp(1.0) - std::f32::consts::E).abs() < 1e-6);
/// ```
#[must_use]
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest whole number with vector instructions that
    // every processor has.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > 88.8 { 88.8 } else { x };
    let clamped = if clamped < -88.0 { -88.0 } else { clamped };
    let whole = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    // ln 2 in two parts: the first has few bits, so that its product is exact.
    let rest = (clamped - whole * 0.693_359_4) - whole * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * rest + 1.398_199_9e-3;
    let p = p * rest + 8.333_452e-3;
    let p = p * rest + 4.166_579_6e-2;
    let p = p * rest + 1.666_666_5e-1;
    let p = p * rest + 0.5;
    let p = p * (rest * rest) + rest + 1.0;
    // In two steps, because 2^128 is no f32.
    let half = (whole * 0.5 + ROUND) - ROUND;
    // The low bits of a whole number plus `ROUND` are that number: no conversion is needed.
    let whole_bits = |n: f32| (n + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
    let power = |n: f32| f32::from_bits(whole_bits(n).wrapping_add(127) << 23);
    let scaled = p * power(half) * power(whole - half);
    let scaled = if x > 88.722_84 { f32::INFINITY } else { scaled };
    let scaled = if x < -87.336_54 { 0.0 } else { scaled };
    if x.is_nan() { x } else { scaled }
}

/// Lanes in which [`norm`] adds squares: so many that a graphics processor need not wait for one addition after
/// the other.
pub const NORM_LANES: usize = 128;

/// Root-mean-square norm of one row: `out = row / sqrt(mean(row^2) + epsilon) * weight`.
///
/// Squares are added as f64 in [`NORM_LANES`] lanes, like the products of [`dot`] in 16.
///
/// # Panics
/// If the lengths differ.
pub fn norm(row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert!(row.len() == weight.len() && row.len() == out.len());
    on_path!(Path::best(), norm(row: &'a [f32], weight: &'a [f32], epsilon: f32, out: &'a mut [f32]) -> ());
}

/// How the numbers of a head pair up when it is rotated by its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pairs {
    /// Neighbours: 0 and 1, 2 and 3 (`llama`).
    Adjacent,
    /// One from each half: 0 and `dims / 2`, 1 and `dims / 2 + 1` (`qwen2`).
    Halves,
}

/// Rotates every head of one row by the row's position.
///
/// `table` is the position's cosines and sines, `[cos 0, sin 0, cos 1, sin 1, ..]`, one pair for each pair of
/// numbers; what is left of a head beyond `table.len()` numbers stays as it is.
///
/// # Panics
/// If the table is longer than a head, or the row is not whole heads.
pub fn rotate(row: &mut [f32], head_size: usize, table: &[f32], pairs: Pairs) {
    assert!(table.len() <= head_size && row.len().is_multiple_of(head_size));
    on_path!(Path::best(), rotate(row: &'a mut [f32], head_size: usize, table: &'a [f32], pairs: Pairs) -> ());
}

/// The gate of a feed-forward network: see [`Activation`].
///
/// # Panics
/// If the lengths differ.
pub fn gate(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len());
    on_path!(Path::best(), gate(activation: Activation, gate: &'a [f32], up: &'a [f32], out: &'a mut [f32]) -> ());
}

/// Multiplies numbers, and has them come near to a cap and never pass it, `cap * tanh(x / cap)`, where it is not 0.
pub fn scale(data: &mut [f32], factor: f32, cap: f32) {
    on_path!(Path::best(), scale(data: &'a mut [f32], factor: f32, cap: f32) -> ());
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
pub(crate) fn capped(x: f32, cap: f32) -> f32 {
    let part = x / cap;
    let small = exp(-2.0 * part.abs());
    let tanh = (1.0 - small) / (1.0 + small);
    cap * if part < 0.0 { -tanh } else { tanh }
}

/// Adds `row` to `into`.
///
/// # Panics
/// If the lengths differ.
pub fn add(into: &mut [f32], row: &[f32]) {
    assert_eq!(into.len(), row.len());
    on_path!(Path::best(), add(into: &'a mut [f32], row: &'a [f32]) -> ());
}

/// Adds `row` times `weight` to `into`.
///
/// # Panics
/// If the lengths differ.
pub fn add_scaled(into: &mut [f32], row: &[f32], weight: f32) {
    assert_eq!(into.len(), row.len());
    on_path!(Path::best(), add_scaled(into: &'a mut [f32], row: &'a [f32], weight: f32) -> ());
}

/// Rounds to the 16 bits of the KV cache.
///
/// # Panics
/// If `out` has not two bytes for each value.
pub fn to_half(values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * 2);
    on_path!(Path::best(), to_half(values: &'a [f32], out: &'a mut [u8]) -> ());
}

/// The `k` largest values with their places, largest first and the lowest place first among equals.
/// What is not a number comes last.
///
/// ```
/// assert_eq!(ggml_spanker::ops::best(&[1.0, 3.0, f32::NAN, 3.0], 2), [(1, 3.0), (3, 3.0)]);
/// ```
#[must_use]
pub fn best(values: &[f32], k: usize) -> Vec<(u32, f32)> {
    on_path!(Path::best(), best(values: &'a [f32], k: usize) -> Vec<(u32, f32)>)
}
