// SPDX-License-Identifier: Apache-2.0
//! What the operators compute. Each function is compiled for every path, with the same operations in the same
//! order; lengths have been checked.

use half::f16;

use super::{AttendParts, AttendScratch, KvView, NORM_LANES, Pairs, RUN, exp};
use crate::simd::Lanes;

#[inline(always)]
pub(super) fn dot<L: Lanes>(l: L, a: &[f32], b: &[f32]) -> f32 {
    let (wide_a, rest_a) = a.as_chunks();
    let (wide_b, rest_b) = b.as_chunks();
    let mut sum = l.wide(&[0.0; 16]);
    for (a, b) in wide_a.iter().zip(wide_b) {
        sum = l.wide_add(sum, l.wide(a), l.wide(b));
    }
    if !rest_a.is_empty() {
        let mut lanes = l.wide_values(sum);
        for (lane, (a, b)) in lanes.iter_mut().zip(rest_a.iter().zip(rest_b)) {
            *lane += a * b;
        }
        sum = l.wide(&lanes);
    }
    l.wide_sum(sum)
}

#[inline(always)]
pub(super) fn norm<L: Lanes>(_: L, row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let mut lanes = [0.0f64; NORM_LANES];
    for values in row.chunks(NORM_LANES) {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    let mut half = NORM_LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    let sum = lanes[0];
    let scale = (1.0 / (sum / row.len() as f64 + f64::from(epsilon)).sqrt()) as f32;
    for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
        *out = (value * scale) * weight;
    }
}

#[inline(always)]
pub(super) fn rotate<L: Lanes>(
    _: L,
    row: &mut [f32],
    head_size: usize,
    table: &[f32],
    pairs: Pairs,
) {
    let half = table.len() / 2;
    let turns = table.as_chunks::<2>().0;
    for head in row.chunks_exact_mut(head_size) {
        match pairs {
            Pairs::Adjacent => {
                for (pair, [cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
                    let [a, b] = *pair;
                    *pair = [a * cos - b * sin, a * sin + b * cos];
                }
            }
            Pairs::Halves => {
                let (one, two) = head.split_at_mut(half);
                for ((one, two), [cos, sin]) in one.iter_mut().zip(two).zip(turns) {
                    let (a, b) = (*one, *two);
                    (*one, *two) = (a * cos - b * sin, a * sin + b * cos);
                }
            }
        }
    }
}

#[inline(always)]
pub(super) fn gate<L: Lanes>(_: L, gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

#[inline(always)]
pub(super) fn add<L: Lanes>(_: L, into: &mut [f32], row: &[f32]) {
    for (into, value) in into.iter_mut().zip(row) {
        *into += value;
    }
}

#[inline(always)]
pub(super) fn to_half<L: Lanes>(l: L, values: &[f32], out: &mut [u8]) {
    let (wide, rest) = values.as_chunks();
    let (wide_out, rest_out) = out.as_chunks_mut();
    for (out, values) in wide_out.iter_mut().zip(wide) {
        *out = l.narrow(values);
    }
    for (out, value) in rest_out.chunks_exact_mut(2).zip(rest) {
        out.copy_from_slice(&f16::from_f32_const(*value).to_le_bytes());
    }
}

#[inline(always)]
pub(super) fn attend<L: Lanes>(
    l: L,
    queries: &[f32],
    head_size: usize,
    kv: KvView<'_>,
    scratch: &mut AttendScratch,
    out: &mut [f32],
) {
    let heads = queries.len() / head_size;
    let positions = kv.positions;
    let AttendParts { wide, part, scores } = scratch.parts(heads, head_size, positions);
    for (at, key) in rows(kv.keys, kv.stride, head_size).take(positions).enumerate() {
        prefetch_position(l, kv.keys, kv.stride, head_size, at);
        widen(l, key, wide);
        for (head, query) in queries.chunks_exact(head_size).enumerate() {
            scores[head * positions + at] = dot(l, query, wide) * kv.scale;
        }
    }
    for scores in scores.chunks_exact_mut(positions) {
        soften(l, scores);
    }
    out.fill(0.0);
    part.fill(0.0);
    for (at, value) in rows(kv.values, kv.stride, head_size).take(positions).enumerate() {
        prefetch_position(l, kv.values, kv.stride, head_size, at);
        widen(l, value, wide);
        for (head, part) in part.chunks_exact_mut(head_size).enumerate() {
            let weight = scores[head * positions + at];
            for (part, value) in part.iter_mut().zip(&*wide) {
                *part += weight * value;
            }
        }
        if (at + 1).is_multiple_of(RUN) || at + 1 == positions {
            add(l, out, part);
            part.fill(0.0);
        }
    }
}

/// Positions whose keys or values are on their way while one is worked on.
const PREFETCH_DISTANCE: usize = 16;

/// Prefetches the position `PREFETCH_DISTANCE` later: heads of other positions lie in between, which processors do not
/// foresee wherever memory begins.
#[inline(always)]
fn prefetch_position<L: Lanes>(l: L, bytes: &[u8], stride: usize, head_size: usize, at: usize) {
    let start = (at + PREFETCH_DISTANCE) * stride;
    if let Some(bytes) = bytes.get(start..start + 2 * head_size) {
        l.fetch(bytes);
    }
}

/// One head of each position.
#[inline(always)]
fn rows(bytes: &[u8], stride: usize, head_size: usize) -> impl Iterator<Item = &[u8]> {
    (0..).map_while(move |at: usize| bytes.get(at * stride..at * stride + 2 * head_size))
}

#[inline(always)]
fn widen<L: Lanes>(l: L, bytes: &[u8], out: &mut [f32]) {
    let (wide, rest) = bytes.as_chunks();
    let (wide_out, rest_out) = out.as_chunks_mut();
    for (out, bytes) in wide_out.iter_mut().zip(wide) {
        *out = l.wide_values(l.wide_f16(bytes));
    }
    for (out, half) in rest_out.iter_mut().zip(rest.as_chunks().0) {
        *out = f16::from_le_bytes(*half).to_f32_const();
    }
}

/// Scores become shares that add up to one.
#[inline(always)]
fn soften<L: Lanes>(l: L, scores: &mut [f32]) {
    let most = most(scores);
    for score in scores.iter_mut() {
        *score = exp(*score - most);
    }
    let (wide, rest) = scores.as_chunks::<16>();
    let mut lanes = [0.0f32; 16];
    for scores in wide {
        for lane in 0..16 {
            lanes[lane] += scores[lane];
        }
    }
    for (lane, score) in lanes.iter_mut().zip(rest) {
        *lane += score;
    }
    let sum = l.wide_sum(l.wide(&lanes));
    for score in scores.iter_mut() {
        *score /= sum;
    }
}

/// The largest number; what is not a number does not count.
#[inline(always)]
pub(crate) fn most(values: &[f32]) -> f32 {
    let larger = |most: f32, value: f32| if value > most { value } else { most };
    let (wide, rest) = values.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for values in wide {
        for lane in 0..16 {
            lanes[lane] = larger(lanes[lane], values[lane]);
        }
    }
    let most = lanes.into_iter().fold(f32::NEG_INFINITY, larger);
    rest.iter().fold(most, |most, value| larger(most, *value))
}

#[inline(always)]
pub(super) fn best<L: Lanes>(_: L, values: &[f32], k: usize) -> Vec<(u32, f32)> {
    let order = |a: &(u32, f32), b: &(u32, f32)| {
        let key = |v: f32| if v.is_nan() { f32::NEG_INFINITY } else { v };
        key(b.1).total_cmp(&key(a.1)).then(a.1.is_nan().cmp(&b.1.is_nan())).then(a.0.cmp(&b.0))
    };
    let mut found: Vec<(u32, f32)> = Vec::with_capacity(k.min(values.len()) + 1);
    for (run, values) in values.chunks(64).enumerate() {
        // Most runs have nothing that is larger than the last one found.
        let last = match found.last() {
            Some(last) if found.len() == k => last.1,
            _ => f32::NAN,
        };
        if values.iter().fold(true, |none, &value| none & (value <= last)) {
            continue;
        }
        for (at, &value) in values.iter().enumerate() {
            if found.len() == k && found.last().is_none_or(|last| value <= last.1) {
                continue;
            }
            let one = ((64 * run + at) as u32, value);
            let at = found.partition_point(|known| order(known, &one).is_lt());
            if at < k {
                found.insert(at, one);
                found.truncate(k);
            }
        }
    }
    found
}
