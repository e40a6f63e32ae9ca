// SPDX-License-Identifier: Apache-2.0
//! Weights that are numbers: F32, F16 and BF16. Here lanes run along the rows.
//!
//! Few rows of inputs meet weights as they are stored. For many, weights become f32 in a buffer that the first-level cache
//! holds, a part of their rows at a time. Tiles of sums stay in registers: each lane of a sum is the fold that
//! `product.rs` defines, wherever it waits in between.

use half::{bf16, f16};
use spanker_model::Quant;

use crate::product::Product;
use crate::simd::Simd;

/// Rows of weights that are multiplied together.
const SIDE: usize = 4;
/// Such groups of rows of weights that are numbers at once.
const GROUPS: usize = 4;
/// Rows of inputs whose sums are kept at once.
const HIGH: usize = 64;
/// Rows of inputs from which on it pays to keep weights as f32.
const MANY: usize = 16;
/// Runs of 16 weights of a row that are f32 at once.
const LONG: usize = 32;

/// What begins with a cache line.
#[repr(align(64))]
struct Aligned<T>(T);

/// A type of numbers.
trait Plain<const BYTES: usize, const WIDE: usize> {
    fn one(bytes: &[u8; BYTES]) -> f32;
    /// 16 of them.
    fn wide<S: Simd>(s: S, bytes: &[u8; WIDE]) -> S::Wide;
    /// As many of these as there are lanes.
    fn part<S: Simd>(s: S, bytes: &[u8; WIDE], part: usize) -> S::Float;
}

struct F32;
struct F16;
struct Bf16;

impl Plain<4, 64> for F32 {
    #[inline(always)]
    fn one(bytes: &[u8; 4]) -> f32 {
        f32::from_le_bytes(*bytes)
    }

    #[inline(always)]
    fn wide<S: Simd>(s: S, bytes: &[u8; 64]) -> S::Wide {
        s.wide_f32(bytes)
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, bytes: &[u8; 64], part: usize) -> S::Float {
        s.part_f32(bytes, part)
    }
}

impl Plain<2, 32> for F16 {
    #[inline(always)]
    fn one(bytes: &[u8; 2]) -> f32 {
        f16::from_le_bytes(*bytes).to_f32_const()
    }

    #[inline(always)]
    fn wide<S: Simd>(s: S, bytes: &[u8; 32]) -> S::Wide {
        s.wide_f16(bytes)
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, bytes: &[u8; 32], part: usize) -> S::Float {
        s.part_f16(bytes, part)
    }
}

impl Plain<2, 32> for Bf16 {
    #[inline(always)]
    fn one(bytes: &[u8; 2]) -> f32 {
        bf16::from_le_bytes(*bytes).to_f32()
    }

    #[inline(always)]
    fn wide<S: Simd>(s: S, bytes: &[u8; 32]) -> S::Wide {
        s.wide_bf16(bytes)
    }

    #[inline(always)]
    fn part<S: Simd>(s: S, bytes: &[u8; 32], part: usize) -> S::Float {
        s.part_bf16(bytes, part)
    }
}

#[inline(always)]
pub(super) fn multiply<S: Simd>(s: S, product: &mut Product<'_>) {
    match product.quant {
        Quant::F16 => of_type::<S, F16, 2, 32>(s, product),
        Quant::Bf16 => of_type::<S, Bf16, 2, 32>(s, product),
        _ => of_type::<S, F32, 4, 64>(s, product),
    }
}

#[inline(always)]
fn of_type<S: Simd, P: Plain<BYTES, WIDE>, const BYTES: usize, const WIDE: usize>(
    s: S,
    product: &mut Product<'_>,
) {
    let inputs = product.inputs;
    if inputs.rows >= MANY {
        for from in (0..inputs.rows).step_by(HIGH) {
            for first in (0..product.n).step_by(SIDE * GROUPS) {
                several::<S, P, BYTES, WIDE>(s, product, from, first);
            }
        }
        return;
    }
    let Product { weights, n, ref mut out, .. } = *product;
    let row = inputs.width * BYTES;
    for first in (0..n).step_by(SIDE) {
        let wide = SIDE.min(n - first);
        let rows = rows::<SIDE>(weights, row, first, n);
        // The time of reading weights from memory is not hidden: those that follow are asked for.
        let next = &weights[(first + wide) * row..];
        let mut sums = [[0.0; SIDE]; MANY];
        let sums = &mut sums[..inputs.rows];
        match sums {
            [sums] => *sums = one::<S, P, BYTES, WIDE>(s, rows, next, inputs.plain()),
            _ => few::<S, P, BYTES, WIDE>(s, rows, next, inputs.plain(), sums),
        }
        for (sums, out) in sums.iter().zip(out.chunks_exact_mut(n)) {
            out[first..first + wide].copy_from_slice(&sums[..wide]);
        }
    }
}

/// `N` rows from `first` on; the last one again where there are fewer.
#[inline(always)]
fn rows<const N: usize>(weights: &[u8], row: usize, first: usize, n: usize) -> [&[u8]; N] {
    let mut rows = [&weights[..0]; N];
    for (at, weight) in rows.iter_mut().enumerate() {
        *weight = &weights[(first + at).min(n - 1) * row..][..row];
    }
    rows
}

/// Asks for as many bytes of the rows that follow as a step takes of all rows.
#[inline(always)]
fn fetch<S: Simd>(s: S, next: &[u8], step: usize, bytes: usize) {
    if let Some(bytes) = next.get(step * SIDE * bytes..(step + 1) * SIDE * bytes) {
        s.fetch(bytes);
    }
}

/// One row of inputs.
#[inline(always)]
fn one<S, P, const BYTES: usize, const WIDE: usize>(
    s: S,
    weights: [&[u8]; SIDE],
    next: &[u8],
    input: &[f32],
) -> [f32; SIDE]
where
    S: Simd,
    P: Plain<BYTES, WIDE>,
{
    let (runs, rest) = input.as_chunks::<16>();
    let mut rows = [&weights[0].as_chunks::<WIDE>().0[..runs.len()]; SIDE];
    for (row, weights) in rows.iter_mut().zip(&weights) {
        *row = &weights.as_chunks::<WIDE>().0[..runs.len()];
    }
    let mut sums = [s.wide(&[0.0; 16]); SIDE];
    for (step, run) in runs.iter().enumerate() {
        fetch(s, next, step, WIDE);
        let input = s.wide(run);
        for (sum, row) in sums.iter_mut().zip(&rows) {
            *sum = s.wide_fused(*sum, P::wide(s, &row[step]), input);
        }
    }
    let mut out = [0.0; SIDE];
    for ((out, sum), weights) in out.iter_mut().zip(sums).zip(weights) {
        let rest_of_row = &weights[runs.len() * WIDE..];
        *out = end::<S, P, BYTES, WIDE>(s, s.wide_values(sum), rest_of_row, rest);
    }
    out
}

/// The sum of all lanes once what is left of a row has been added.
#[inline(always)]
fn end<S, P, const BYTES: usize, const WIDE: usize>(
    s: S,
    mut lanes: [f32; 16],
    weights: &[u8],
    input: &[f32],
) -> f32
where
    S: Simd,
    P: Plain<BYTES, WIDE>,
{
    for ((lane, weight), input) in lanes.iter_mut().zip(weights.as_chunks::<BYTES>().0).zip(input) {
        *lane = P::one(weight).mul_add(*input, *lane);
    }
    s.wide_sum(s.wide(&lanes))
}

/// Fewer than [`MANY`] rows of inputs.
#[inline(always)]
fn few<S, P, const BYTES: usize, const WIDE: usize>(
    s: S,
    weights: [&[u8]; SIDE],
    next: &[u8],
    inputs: &[f32],
    out: &mut [[f32; SIDE]],
) where
    S: Simd,
    P: Plain<BYTES, WIDE>,
{
    let width = inputs.len() / out.len();
    let mut row = 0;
    while row < out.len() {
        let (inputs, next) = (&inputs[row * width..], if row == 0 { next } else { &[] });
        let out = &mut out[row..];
        row += match out.len().min(S::TALL) {
            6 => direct::<S, P, BYTES, WIDE, 6>(s, weights, next, inputs, width, out),
            4 | 5 => direct::<S, P, BYTES, WIDE, 4>(s, weights, next, inputs, width, out),
            2 | 3 => direct::<S, P, BYTES, WIDE, 2>(s, weights, next, inputs, width, out),
            _ => direct::<S, P, BYTES, WIDE, 1>(s, weights, next, inputs, width, out),
        };
    }
}

/// `I` rows of inputs with weights as they are stored. Says how many rows these are.
#[inline(always)]
fn direct<S, P, const BYTES: usize, const WIDE: usize, const I: usize>(
    s: S,
    weights: [&[u8]; SIDE],
    next: &[u8],
    inputs: &[f32],
    width: usize,
    out: &mut [[f32; SIDE]],
) -> usize
where
    S: Simd,
    P: Plain<BYTES, WIDE>,
{
    let runs = width / 16;
    let mut rows = [&inputs.as_chunks::<16>().0[..0]; I];
    for (at, row) in rows.iter_mut().enumerate() {
        *row = &inputs[at * width..][..16 * runs].as_chunks::<16>().0[..runs];
    }
    let mut stored = [&weights[0].as_chunks::<WIDE>().0[..runs]; SIDE];
    for (stored, weights) in stored.iter_mut().zip(&weights) {
        *stored = &weights.as_chunks::<WIDE>().0[..runs];
    }
    let mut lanes = [[[0.0; 16]; SIDE]; I];
    for part in 0..16 / S::LANES {
        let mut sums = [[s.splat_f(0.0); SIDE]; I];
        for step in 0..runs {
            if part == 0 {
                fetch(s, next, step, WIDE);
            }
            let mut weights = [s.splat_f(0.0); SIDE];
            for (weights, stored) in weights.iter_mut().zip(&stored) {
                *weights = P::part(s, &stored[step], part);
            }
            for (sums, row) in sums.iter_mut().zip(&rows) {
                let input = s.part(&row[step], part);
                for (sum, weights) in sums.iter_mut().zip(&weights) {
                    *sum = s.fused(*sum, *weights, input);
                }
            }
        }
        for (sums, lanes) in sums.iter().zip(&mut lanes) {
            for (sum, lanes) in sums.iter().zip(lanes) {
                s.store(*sum, &mut lanes[part * S::LANES..]);
            }
        }
    }
    for ((out, lanes), input) in out.iter_mut().zip(&lanes).zip(inputs.chunks_exact(width)) {
        for ((out, lanes), weights) in out.iter_mut().zip(lanes).zip(weights) {
            *out =
                end::<S, P, BYTES, WIDE>(s, *lanes, &weights[runs * WIDE..], &input[16 * runs..]);
        }
    }
    I
}

/// The rows of inputs from `from` on, up to [`HIGH`], with the rows of weights from `first` on, up to [`GROUPS`] groups.
#[inline(always)]
fn several<S, P, const BYTES: usize, const WIDE: usize>(
    s: S,
    product: &mut Product<'_>,
    from: usize,
    first: usize,
) where
    S: Simd,
    P: Plain<BYTES, WIDE>,
{
    let Product { weights: all, n, inputs, ref mut out, .. } = *product;
    let (width, high) = (inputs.width, HIGH.min(inputs.rows - from));
    let inputs = &inputs.plain()[from * width..][..high * width];
    let weights = rows::<{ SIDE * GROUPS }>(all, width * BYTES, first, n);
    // Those that follow are asked for when the first rows of inputs read these.
    let next = if from == 0 { &all[(first + SIDE * GROUPS).min(n) * width * BYTES..] } else { &[] };
    let wide = weights.len().min(n - first);
    let runs = width / 16;
    let mut lanes = Aligned([[[[0.0; 16]; SIDE]; HIGH]; GROUPS]);
    let mut numbers = Aligned([[[[0.0; 16]; LONG]; SIDE]; GROUPS]);
    for from in (0..runs).step_by(LONG) {
        let count = LONG.min(runs - from);
        let rows = numbers.0.as_flattened_mut().iter_mut().zip(&weights[..wide]);
        for (at, (numbers, weights)) in rows.enumerate() {
            let row = &weights.as_chunks::<WIDE>().0[from..from + count];
            let next = next.get(at * width * BYTES + from * WIDE..).unwrap_or(&[]);
            let next = next.as_chunks::<WIDE>().0;
            for (step, (number, weights)) in numbers.iter_mut().zip(row).enumerate() {
                if let Some(next) = next.get(step) {
                    s.fetch(next);
                }
                *number = s.wide_values(P::wide(s, weights));
            }
        }
        let mut row = 0;
        while row < high {
            let (inputs, place) = (&inputs[row * width..], [width, 16 * from, count]);
            let tall = (high - row).min(S::TALL);
            for (numbers, lanes) in numbers.0.iter().zip(&mut lanes.0).take(wide.div_ceil(SIDE)) {
                let lanes = &mut lanes[row..];
                match tall {
                    6 => tile::<S, 6>(s, inputs, place, numbers, lanes),
                    4 | 5 => tile::<S, 4>(s, inputs, place, numbers, lanes),
                    2 | 3 => tile::<S, 2>(s, inputs, place, numbers, lanes),
                    _ => tile::<S, 1>(s, inputs, place, numbers, lanes),
                }
            }
            row += if tall == 6 { 6 } else { 1 << tall.ilog2() };
        }
    }
    for (at, weights) in weights[..wide].iter().enumerate() {
        let lanes = &lanes.0[at / SIDE];
        let rows = lanes.iter().zip(inputs.chunks_exact(width));
        for ((lanes, input), out) in rows.zip(out[from * n..].chunks_exact_mut(n)) {
            let (weights, input) = (&weights[runs * WIDE..], &input[16 * runs..]);
            out[first + at] = end::<S, P, BYTES, WIDE>(s, lanes[at % SIDE], weights, input);
        }
    }
}

/// Adds the products of `count` runs of `I` rows of inputs, which are `width` long, from number `from` on, to their lanes.
#[inline(always)]
fn tile<S: Simd, const I: usize>(
    s: S,
    inputs: &[f32],
    [width, from, count]: [usize; 3],
    numbers: &[[[f32; 16]; LONG]; SIDE],
    lanes: &mut [[[f32; 16]; SIDE]],
) {
    let lanes = &mut lanes[..I];
    let mut rows = [&inputs.as_chunks::<16>().0[..0]; I];
    for (at, row) in rows.iter_mut().enumerate() {
        *row = &inputs[at * width + from..][..16 * count].as_chunks::<16>().0[..count];
    }
    for part in 0..16 / S::LANES {
        let mut sums = [[s.splat_f(0.0); SIDE]; I];
        for (sums, lanes) in sums.iter_mut().zip(lanes.iter()) {
            for (sum, lanes) in sums.iter_mut().zip(lanes) {
                *sum = s.part(lanes, part);
            }
        }
        for step in 0..count {
            let mut weights = [s.splat_f(0.0); SIDE];
            for (weights, numbers) in weights.iter_mut().zip(numbers) {
                *weights = s.part(&numbers[step], part);
            }
            for (sums, row) in sums.iter_mut().zip(&rows) {
                let input = s.part(&row[step], part);
                for (sum, weights) in sums.iter_mut().zip(&weights) {
                    *sum = s.fused(*sum, *weights, input);
                }
            }
        }
        for (sums, lanes) in sums.iter().zip(lanes.iter_mut()) {
            for (sum, lanes) in sums.iter().zip(lanes) {
                s.store(*sum, &mut lanes[part * S::LANES..]);
            }
        }
    }
}
