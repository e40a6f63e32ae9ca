// SPDX-License-Identifier: Apache-2.0
//! What a Llama-family model does between its products, on rows of f32.
//!
//! Every function has one order of operations, without fused ones, so that the bits are the same on every
//! processor and however rows are shared out. Lengths are the caller's to check: functions panic where they
//! do not belong together.

use half::f16;

/// Adds 16 lanes in halves: 8, 4, 2, 1.
pub(crate) fn fold_lanes(mut lanes: [f32; 16]) -> f32 {
    let mut half = 8;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The product of two rows in 16 lanes: lane `i` adds every sixteenth product in rising order.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut lanes = [0.0f32; 16];
    let (wide_a, rest_a) = a.as_chunks::<16>();
    let (wide_b, rest_b) = b.as_chunks::<16>();
    for (a, b) in wide_a.iter().zip(wide_b) {
        for lane in 0..16 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(rest_a.iter().zip(rest_b)) {
        *lane += a * b;
    }
    fold_lanes(lanes)
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
#[inline]
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
    let power = |n: f32| f32::from_bits(((n as i32 + 127) << 23) as u32);
    let scaled = p * power(half) * power(whole - half);
    let scaled = if x > 88.722_84 { f32::INFINITY } else { scaled };
    let scaled = if x < -87.336_54 { 0.0 } else { scaled };
    if x.is_nan() { x } else { scaled }
}

/// Root-mean-square norm of one row: `out = row / sqrt(mean(row^2) + epsilon) * weight`.
///
/// Squares are added as f64 in 8 lanes.
///
/// # Panics
/// If the lengths differ.
pub fn norm(row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert!(row.len() == weight.len() && row.len() == out.len());
    let mut lanes = [0.0f64; 8];
    let (wide, rest) = row.as_chunks::<8>();
    for values in wide {
        for lane in 0..8 {
            lanes[lane] += f64::from(values[lane]) * f64::from(values[lane]);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(*value) * f64::from(*value);
    }
    let fours: [f64; 4] = std::array::from_fn(|i| lanes[i] + lanes[i + 4]);
    let sum = (fours[0] + fours[2]) + (fours[1] + fours[3]);
    let scale = (1.0 / (sum / row.len() as f64 + f64::from(epsilon)).sqrt()) as f32;
    for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
        *out = (value * scale) * weight;
    }
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
    let half = table.len() / 2;
    for head in row.chunks_exact_mut(head_size) {
        for (i, turn) in table.chunks_exact(2).enumerate() {
            let (cos, sin) = (turn[0], turn[1]);
            let (one, two) = match pairs {
                Pairs::Adjacent => (2 * i, 2 * i + 1),
                Pairs::Halves => (i, i + half),
            };
            let (a, b) = (head[one], head[two]);
            head[one] = a * cos - b * sin;
            head[two] = a * sin + b * cos;
        }
    }
}

/// The gate of a feed-forward network: `out = gate / (1 + exp(-gate)) * up`.
///
/// # Panics
/// If the lengths differ.
pub fn gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len());
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

/// Adds `row` to `into`.
///
/// # Panics
/// If the lengths differ.
pub fn add(into: &mut [f32], row: &[f32]) {
    assert_eq!(into.len(), row.len());
    for (into, value) in into.iter_mut().zip(row) {
        *into += value;
    }
}

/// Rounds to 16 bits, as keys and values are kept.
///
/// # Panics
/// If `out` has not two bytes for each value.
pub fn to_half(values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * 2);
    for (out, value) in out.chunks_exact_mut(2).zip(values) {
        out.copy_from_slice(&f16::from_f32_const(*value).to_le_bytes());
    }
}

/// What a row of queries looks back on, for the heads that share one head of keys and values.
#[derive(Debug, Clone, Copy)]
pub struct Look<'a> {
    /// Keys of all positions as f16: one row of `stride` bytes for each.
    pub keys: &'a [u8],
    /// Values, likewise.
    pub values: &'a [u8],
    /// Bytes from a position to the next, in both.
    pub stride: usize,
    /// Positions that are seen.
    pub positions: usize,
    /// What products of queries and keys are multiplied with.
    pub scale: f32,
}

/// Memory that [`attend`] uses again from call to call.
#[derive(Debug, Clone, Default)]
pub struct AttendScratch {
    /// Scores of all positions, head by head.
    scores: Vec<f32>,
    wide: Vec<f32>,
}

/// Attention of some heads of one row that share their keys and values.
///
/// `queries` and `out` are the heads, end to end. For each head: scores are [`dot`] products times the
/// scale; the largest is taken off; [`exp`] of each; their sum in 16 lanes like `dot`; values times these, added
/// position by position from the first, and divided by the sum.
///
/// # Panics
/// If lengths do not belong together.
pub fn attend(
    queries: &[f32],
    head_size: usize,
    look: Look<'_>,
    scratch: &mut AttendScratch,
    out: &mut [f32],
) {
    assert!(queries.len() == out.len() && queries.len().is_multiple_of(head_size));
    let heads = queries.len() / head_size;
    let positions = look.positions;
    scratch.scores.clear();
    scratch.scores.resize(heads * positions, 0.0);
    scratch.wide.resize(head_size, 0.0);
    for (at, key) in rows(look.keys, look.stride, head_size).take(positions).enumerate() {
        widen(key, &mut scratch.wide);
        for (head, query) in queries.chunks_exact(head_size).enumerate() {
            scratch.scores[head * positions + at] = dot(query, &scratch.wide) * look.scale;
        }
    }
    for scores in scratch.scores.chunks_exact_mut(positions) {
        soften(scores);
    }
    out.fill(0.0);
    for (at, value) in rows(look.values, look.stride, head_size).take(positions).enumerate() {
        widen(value, &mut scratch.wide);
        for (head, out) in out.chunks_exact_mut(head_size).enumerate() {
            let weight = scratch.scores[head * positions + at];
            for (out, value) in out.iter_mut().zip(&scratch.wide) {
                *out += weight * value;
            }
        }
    }
}

/// One head of each position.
fn rows(bytes: &[u8], stride: usize, head_size: usize) -> impl Iterator<Item = &[u8]> {
    (0..).map_while(move |at: usize| bytes.get(at * stride..at * stride + 2 * head_size))
}

fn widen(bytes: &[u8], out: &mut [f32]) {
    for (out, half) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *out = f16::from_le_bytes([half[0], half[1]]).to_f32_const();
    }
}

/// Scores become shares that add up to one.
fn soften(scores: &mut [f32]) {
    let most = scores
        .iter()
        .fold(f32::NEG_INFINITY, |most, &score| if score > most { score } else { most });
    for score in scores.iter_mut() {
        *score = exp(*score - most);
    }
    let mut lanes = [0.0f32; 16];
    for (index, score) in scores.iter().enumerate() {
        lanes[index % 16] += score;
    }
    let sum = fold_lanes(lanes);
    for score in scores.iter_mut() {
        *score /= sum;
    }
}

/// The `k` largest values with their places, largest first and the lowest place first among equals.
/// What is not a number comes last.
///
/// ```
/// assert_eq!(ggml_spanker::ops::best(&[1.0, 3.0, f32::NAN, 3.0], 2), [(1, 3.0), (3, 3.0)]);
/// ```
#[must_use]
pub fn best(values: &[f32], k: usize) -> Vec<(u32, f32)> {
    let ahead = |a: &(u32, f32), b: &(u32, f32)| {
        let key = |v: f32| if v.is_nan() { f32::NEG_INFINITY } else { v };
        key(b.1).total_cmp(&key(a.1)).then(a.1.is_nan().cmp(&b.1.is_nan())).then(a.0.cmp(&b.0))
    };
    let mut found: Vec<(u32, f32)> = Vec::with_capacity(k + 1);
    for (place, &value) in values.iter().enumerate() {
        if found.len() == k && found.last().is_none_or(|last| value <= last.1) {
            continue;
        }
        let one = (place as u32, value);
        let at = found.partition_point(|known| ahead(known, &one).is_lt());
        if at < k {
            found.insert(at, one);
            found.truncate(k);
        }
    }
    found
}
