// SPDX-License-Identifier: Apache-2.0
//! Keys and values of 4 bits: how they are rounded, put into blocks, and become numbers again. Rounding is GGML's for
//! Q4_0; what is in a block says [`KvShape`].

use std::ops::Range;

use half::f16;
use spanker_model::KvShape;

use super::{BLOCK, KvView, SLAB, WIDE, scale_whole, widen_scales};
use crate::simd::Lanes;

/// Numbers that have one scale.
const SCALED: usize = 32;
/// Bytes that they are in.
const BYTES: usize = SCALED / 2;

/// Some numbers of the keys of a block as f32: for each number one of every position.
#[inline(always)]
pub(super) fn widen_keys<L: Lanes>(
    l: L,
    kv: &KvView<'_>,
    keys: &[u8],
    numbers: Range<usize>,
    out: &mut [f32],
) {
    let (packed, scales) = keys.split_at(kv.shape.scales_at() as usize);
    let scales = scales.as_chunks::<{ 2 * BLOCK }>().0[numbers.start / SCALED..].iter();
    let rows = packed.as_chunks::<BLOCK>().0[numbers.start / 2..numbers.end / 2].chunks(BYTES);
    let out = out.as_chunks_mut::<BLOCK>().0.chunks_mut(SCALED);
    for ((scales, rows), out) in scales.zip(rows).zip(out) {
        let mut factors = [0.0; BLOCK];
        widen_scales(l, scales, &mut factors);
        let factors = factors.as_chunks().0;
        let (low, high) = out.split_at_mut(BYTES);
        for ((row, low), high) in rows.iter().zip(low).zip(high) {
            scale_whole(l, &row.map(first), factors, low);
            scale_whole(l, &row.map(second), factors, high);
        }
    }
}

/// Some numbers of the values of a block as f32, position by position, [`SLAB`] apart.
#[inline(always)]
pub(super) fn widen_values<L: Lanes>(
    l: L,
    kv: &KvView<'_>,
    values: &[u8],
    numbers: Range<usize>,
    out: &mut [f32],
) {
    let (packed, scales) = values.split_at(kv.shape.scales_at() as usize);
    let (size, each) = (kv.shape.head_size as usize / 2, 2 * kv.shape.scales() as usize);
    let rows = out.as_chunks_mut::<SLAB>().0.iter_mut();
    let kept = packed.chunks_exact(size).zip(scales.chunks_exact(each));
    for (out, (packed, scales)) in rows.zip(kept) {
        let runs = packed[numbers.start / 2..numbers.end / 2].as_chunks::<BYTES>().0.iter();
        let scales = &scales.as_chunks::<2>().0[numbers.start / SCALED..];
        let out = out.as_chunks_mut::<SCALED>().0.iter_mut();
        for ((run, scale), out) in runs.zip(scales).zip(out) {
            let factors = [[f16::from_le_bytes(*scale).to_f32_const(); WIDE]];
            let (low, high) = out.split_at_mut(BYTES);
            scale_whole(l, &run.map(first), &factors, low);
            scale_whole(l, &run.map(second), &factors, high);
        }
    }
}

/// The lower number of a byte, from -8 to 7.
#[inline(always)]
fn first(byte: u8) -> u8 {
    (byte & 15).wrapping_sub(8)
}

/// The upper one.
#[inline(always)]
fn second(byte: u8) -> u8 {
    (byte >> 4).wrapping_sub(8)
}

/// Puts a position's key into a block.
#[inline(always)]
pub(super) fn keep_key(shape: KvShape, at: usize, key: &[f32], kept: &mut [u8]) {
    let (rows, scales) = kept.split_at_mut(shape.scales_at() as usize);
    for (index, values) in key.as_chunks::<SCALED>().0.iter().enumerate() {
        let (scale, bytes) = round(values);
        scales[index * 2 * BLOCK + 2 * at..][..2].copy_from_slice(&scale);
        for (row, byte) in rows.chunks_exact_mut(BLOCK).skip(BYTES * index).zip(bytes) {
            row[at] = byte;
        }
    }
}

/// Puts a position's value into a block.
#[inline(always)]
pub(super) fn keep_value(shape: KvShape, at: usize, value: &[f32], kept: &mut [u8]) {
    let (rows, scales) = kept.split_at_mut(shape.scales_at() as usize);
    let (size, each) = (shape.head_size as usize / 2, 2 * shape.scales() as usize);
    let (row, scales) = (&mut rows[at * size..], &mut scales[at * each..]);
    for (index, values) in value.as_chunks::<SCALED>().0.iter().enumerate() {
        let (scale, bytes) = round(values);
        row[BYTES * index..BYTES * (index + 1)].copy_from_slice(&bytes);
        scales[2 * index..2 * index + 2].copy_from_slice(&scale);
    }
}

/// The scale of some numbers, and two of them in each byte.
#[inline(always)]
fn round(values: &[f32; SCALED]) -> ([u8; 2], [u8; BYTES]) {
    let further = |most: f32, value: &f32| if value.abs() > most.abs() { *value } else { most };
    let extreme = values.iter().fold(0.0, further);
    // What is not finite is seen wherever it is read.
    if values.iter().any(|value| !value.is_finite()) {
        return (f16::NAN.to_le_bytes(), [0; BYTES]);
    }
    let scale = extreme / -8.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    // A cast to an integer truncates, and stays within its bounds.
    let whole = values.map(|value| ((value * inverse + 8.5) as u8).min(15));
    let (low, high) = whole.split_at(BYTES);
    let bytes = std::array::from_fn(|at| low[at] | high[at] << 4);
    (f16::from_f32_const(scale).to_le_bytes(), bytes)
}
