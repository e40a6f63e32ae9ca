// SPDX-License-Identifier: Apache-2.0
//! What the operators compute. Each function is compiled for every path, with the same operations in the same
//! order; lengths have been checked.

use half::f16;

use spanker_model::Activation;

use super::{NORM_LANES, Pairs, capped, exp};
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
pub(super) fn gate<L: Lanes>(
    l: L,
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) {
    match activation {
        Activation::Gelu => gate_by(l, gate, up, out, |gate, up| {
            // (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)).
            let cubic = gate + 0.044_715 * gate * gate * gate;
            gate / (1.0 + exp(-1.595_769 * cubic)) * up
        }),
        Activation::ClampedSilu => gate_by(l, gate, up, out, |gate, up| {
            let gate = if gate > 7.0 { 7.0 } else { gate };
            let up = if up > 7.0 { 7.0 } else { up };
            let up = if up < -7.0 { -7.0 } else { up };
            gate / (1.0 + exp(-1.702 * gate)) * (up + 1.0)
        }),
        _ => gate_by(l, gate, up, out, |gate, up| gate / (1.0 + exp(-gate)) * up),
    }
}

#[inline(always)]
fn gate_by<L: Lanes>(
    _: L,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
    by: impl Fn(f32, f32) -> f32,
) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = by(gate, up);
    }
}

#[inline(always)]
pub(super) fn scale<L: Lanes>(_: L, data: &mut [f32], factor: f32, cap: f32) {
    data.iter_mut().for_each(|value| *value *= factor);
    if cap != 0.0 {
        data.iter_mut().for_each(|value| *value = capped(*value, cap));
    }
}

#[inline(always)]
pub(super) fn add<L: Lanes>(_: L, into: &mut [f32], row: &[f32]) {
    for (into, value) in into.iter_mut().zip(row) {
        *into += value;
    }
}

#[inline(always)]
pub(super) fn add_scaled<L: Lanes>(_: L, into: &mut [f32], row: &[f32], weight: f32) {
    for (into, value) in into.iter_mut().zip(row) {
        *into += weight * value;
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
    let mut half = 8;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = larger(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    let most = lanes[0];
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
