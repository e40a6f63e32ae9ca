// SPDX-License-Identifier: Apache-2.0
//! The blocks of 256 whose kernels unpack them first. Scales of sub-blocks are rounded first; weights are rounded to steps of
//! those.

use half::f16;
use spanker_model::Quant;

use super::{inverse, largest, nearest, nibbles, put_half};
use crate::decode::CURVE;

/// Encodes one block, and says whether its scales can be stored.
pub(super) fn encode_block(quant: Quant, values: &[f32], out: &mut [u8]) -> bool {
    match quant {
        Quant::Q2K => q2_k(values, out),
        Quant::Q3K => q3_k(values, out),
        Quant::Iq4Xs => iq4_xs(values, out),
        _ => ternary(quant, values, out),
    }
}

/// What it becomes as an f16.
fn rounded(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

/// Steps of sub-blocks with a scale and a minimum, none of which is negative: the scales of both, those of the
/// sub-blocks in steps of these, and the weights.
struct Above<const SUBS: usize> {
    d: f32,
    dmin: f32,
    scales: [u8; SUBS],
    minima: [u8; SUBS],
    quants: [u8; 256],
}

/// Sub-blocks whose weights are 0 to `highest`, with scales and minima of 0 to `steps`.
fn above<const SUBS: usize>(values: &[f32], highest: u8, steps: u8) -> Above<SUBS> {
    let size = 256 / SUBS;
    let (mut spans, mut lows) = ([0.0; SUBS], [0.0; SUBS]);
    for ((span, low), values) in spans.iter_mut().zip(&mut lows).zip(values.chunks_exact(size)) {
        let least = values.iter().copied().fold(0.0, f32::min);
        let largest = values.iter().copied().fold(0.0, f32::max);
        (*span, *low) = ((largest - least) / f32::from(highest), -least);
    }
    let d = rounded(largest(&spans).1 / f32::from(steps));
    let dmin = rounded(largest(&lows).1 / f32::from(steps));
    let step = |value: f32, size: f32, most: u8| {
        (value * inverse(size)).round().clamp(0.0, f32::from(most)) as u8
    };
    let scales = spans.map(|span| step(span, d, steps));
    let minima = lows.map(|low| step(low, dmin, steps));
    let mut quants = [0; 256];
    for (at, (quant, value)) in quants.iter_mut().zip(values).enumerate() {
        let (scale, least) =
            (d * f32::from(scales[at / size]), dmin * f32::from(minima[at / size]));
        *quant = step(value + least, scale, highest);
    }
    Above { d, dmin, scales, minima, quants }
}

/// Sub-blocks whose weights are `-middle` to `middle - 1`, with scales of either sign from `-steps` to `steps - 1`: the
/// scale of scales, the scales, and the weights with `middle` added.
fn around<const SUBS: usize>(
    values: &[f32],
    middle: i16,
    steps: i16,
) -> (f32, [i8; SUBS], [u8; 256]) {
    let size = 256 / SUBS;
    let (d, scales) = signed_scales::<SUBS>(values, f32::from(middle), steps);
    let mut quants = [0; 256];
    for (at, (quant, value)) in quants.iter_mut().zip(values).enumerate() {
        let exact = value * inverse(d * f32::from(scales[at / size]));
        let step = exact.round().clamp(-f32::from(middle), f32::from(middle - 1));
        *quant = (step as i16 + middle) as u8;
    }
    (d, scales, quants)
}

/// Scales such that the number of the largest magnitude of a sub-block becomes `-lowest` of its steps.
fn signed_scales<const SUBS: usize>(values: &[f32], lowest: f32, steps: i16) -> (f32, [i8; SUBS]) {
    let mut exact = [0.0; SUBS];
    for (scale, values) in exact.iter_mut().zip(values.chunks_exact(256 / SUBS)) {
        *scale = largest(values).1 / -lowest;
    }
    let d = rounded(largest(&exact).1 / -f32::from(steps));
    let (low, high) = (-f32::from(steps), f32::from(steps - 1));
    (d, exact.map(|scale| (scale * inverse(d)).round().clamp(low, high) as i8))
}

/// Two bits of each of 256 weights, as Q2_K, Q3_K and TQ2_0 have them.
fn put_pairs_of_bits(quants: &[u8; 256], out: &mut [u8]) {
    for (out, quants) in out.chunks_exact_mut(32).zip(quants.as_chunks::<128>().0) {
        for (at, out) in out.iter_mut().enumerate() {
            *out =
                (0..4).fold(0, |byte, shift| byte | (quants[32 * shift + at] & 3) << (2 * shift));
        }
    }
}

fn q2_k(values: &[f32], out: &mut [u8]) -> bool {
    let Above { d, dmin, scales, minima, quants } = above::<16>(values, 3, 15);
    for ((out, scale), least) in out.iter_mut().zip(scales).zip(minima) {
        *out = scale | least << 4;
    }
    put_pairs_of_bits(&quants, &mut out[16..80]);
    put_half(out, 80, d) & put_half(out, 82, dmin)
}

fn q3_k(values: &[f32], out: &mut [u8]) -> bool {
    let (d, scales, quants) = around::<16>(values, 4, 32);
    out.fill(0);
    for (at, quant) in quants.iter().enumerate() {
        out[at % 32] |= (quant >> 2) << (at / 32);
    }
    put_pairs_of_bits(&quants, &mut out[32..96]);
    for (at, scale) in scales.iter().enumerate() {
        let scale = (i16::from(*scale) + 32) as u8;
        out[96 + at % 8] |= (scale & 15) << (4 * (at / 8));
        out[104 + at % 4] |= (scale >> 4) << (2 * (at / 4));
    }
    put_half(out, 108, d)
}

fn iq4_xs(values: &[f32], out: &mut [u8]) -> bool {
    let (d, scales) = signed_scales::<8>(values, 127.0, 32);
    out.fill(0);
    let sound = put_half(out, 0, d);
    let mut high = 0;
    for (sub, values) in values.as_chunks::<32>().0.iter().enumerate() {
        let scale = (i16::from(scales[sub]) + 32) as u16;
        out[4 + sub / 2] |= (scale as u8 & 15) << (4 * (sub % 2));
        high |= (scale >> 4) << (2 * sub);
        let inverse = inverse(d * f32::from(scales[sub]));
        let places = values.map(|value| nearest(&CURVE, value * inverse));
        nibbles(&places, &mut out[8 + 16 * sub..][..16]);
    }
    out[2..4].copy_from_slice(&high.to_le_bytes());
    sound
}

fn ternary(quant: Quant, values: &[f32], out: &mut [u8]) -> bool {
    let scale = largest(values).1.abs();
    let mut digits = [0; 256];
    for (digit, value) in digits.iter_mut().zip(values) {
        *digit = ((value * inverse(scale)).round() as i8 + 1) as u8;
    }
    let at = if quant == Quant::Tq2_0 { 64 } else { 52 };
    let sound = put_half(out, at, scale);
    if quant == Quant::Tq2_0 {
        put_pairs_of_bits(&digits, &mut out[..64]);
        return sound;
    }
    // Digits to the base of three, the first the highest, as a fraction of 256.
    let byte = |first: usize, apart: usize, count: u32| {
        let digit = |at: u32| u16::from(digits[first + at as usize * apart]) * 3u16.pow(4 - at);
        ((0..count).map(digit).sum::<u16>() * 256).div_ceil(243) as u8
    };
    for (at, out) in out[..52].iter_mut().enumerate() {
        *out = match at {
            0..32 => byte(at, 32, 5),
            32..48 => byte(160 + at - 32, 16, 5),
            _ => byte(240 + at - 48, 4, 4),
        };
    }
    sound
}
