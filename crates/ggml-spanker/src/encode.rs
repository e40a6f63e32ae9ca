// SPDX-License-Identifier: Apache-2.0
//! Weights from f32 to every type that [`decode`](crate::decode()) reads but codebooks, by plain rounding: scales are the least that reach all of
//! a block, and every weight is the nearest that its block has. No weight counts more than another, and nothing is searched.

mod long;

use half::{bf16, f16};
use spanker_model::Quant;

use crate::decode::{CURVE, HALVES};
use crate::error::{Error, Result};

/// The types of weights that [`encode`] makes.
pub const ENCODE_TYPES: [Quant; 18] = [
    Quant::F32,
    Quant::F16,
    Quant::Bf16,
    Quant::Q4_0,
    Quant::Q4_1,
    Quant::Q5_0,
    Quant::Q5_1,
    Quant::Q8_0,
    Quant::Q2K,
    Quant::Q3K,
    Quant::Q4K,
    Quant::Q5K,
    Quant::Q6K,
    Quant::Iq4Nl,
    Quant::Iq4Xs,
    Quant::Mxfp4,
    Quant::Tq1_0,
    Quant::Tq2_0,
];

/// Encodes whole blocks.
///
/// ```
/// use ggml_spanker::{Quant, decode, encode};
/// let values: Vec<f32> = (0..32).map(|i| (i - 16) as f32).collect();
/// let mut block = [0; 34];
/// encode(Quant::Q8_0, &values, &mut block)?;
/// let mut back = [0.0; 32];
/// decode(Quant::Q8_0, &block, &mut back)?;
/// assert!(values.iter().zip(&back).all(|(one, other)| (one - other).abs() <= 16.0 / 254.0 + 0.01));
/// # Ok::<(), ggml_spanker::Error>(())
/// ```
///
/// # Errors
/// [`Error::Type`] for a type that is not among [`ENCODE_TYPES`]; [`Error::PartialBlock`] and [`Error::OutputTooSmall`] if
/// the lengths do not belong together; [`Error::Value`] for a value that the type cannot hold. What was written then is of
/// no use.
pub fn encode(quant: Quant, values: &[f32], out: &mut [u8]) -> Result<()> {
    if !ENCODE_TYPES.contains(&quant) {
        return Err(Error::Type { quant });
    }
    let (weights, bytes) = (quant.block() as usize, quant.block_bytes() as usize);
    if !values.len().is_multiple_of(weights) {
        let (len, block) = (size_of_val(values), weights * size_of::<f32>());
        return Err(Error::PartialBlock { len, block });
    }
    let need = values.len() / weights * bytes;
    if out.len() < need {
        return Err(Error::OutputTooSmall { have: out.len(), need });
    }
    for (index, (values, out)) in
        values.chunks_exact(weights).zip(out.chunks_exact_mut(bytes)).enumerate()
    {
        let refused = |at: usize| {
            let (value, at) = (values[at].to_string(), index * weights + at);
            Err(Error::Value { value, at, quant })
        };
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return refused(at);
        }
        if !encode_block(quant, values, out) {
            return refused(largest(values).0);
        }
    }
    Ok(())
}

/// Where the value of the largest magnitude is, and the value; the first of several.
fn largest(values: &[f32]) -> (usize, f32) {
    values.iter().copied().enumerate().fold((0, 0.0_f32), |best, (at, value)| {
        if value.abs() > best.1.abs() { (at, value) } else { best }
    })
}

/// Encodes one block, and says whether its scales can be stored.
fn encode_block(quant: Quant, values: &[f32], out: &mut [u8]) -> bool {
    match quant {
        Quant::F32 => {
            out.copy_from_slice(&values[0].to_le_bytes());
            true
        }
        Quant::F16 => put_half(out, 0, values[0]),
        Quant::Bf16 => {
            let value = bf16::from_f32(values[0]);
            out.copy_from_slice(&value.to_le_bytes());
            value.is_finite()
        }
        Quant::Q4K | Quant::Q5K => with_mins(quant, values, out),
        Quant::Q6K => of_sixteens(values, out),
        Quant::Mxfp4 => {
            powers(values, out);
            true
        }
        _ if quant.block() == 256 => long::encode_block(quant, values, out),
        _ => of_thirty_two(quant, values, out),
    }
}

/// Writes a number as f16 and says whether it has room there.
fn put_half(out: &mut [u8], at: usize, value: f32) -> bool {
    let half = f16::from_f32(value);
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.is_finite()
}

/// 1 / `d`, or 0 for 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The blocks of 32 with a scale, some with a minimum.
fn of_thirty_two(quant: Quant, values: &[f32], out: &mut [u8]) -> bool {
    let extreme = largest(values).1;
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (d, min) = match quant {
        Quant::Q4_0 => (extreme / -8.0, 0.0),
        Quant::Q5_0 => (extreme / -16.0, 0.0),
        Quant::Q4_1 => ((most - least) / 15.0, least),
        Quant::Q5_1 => ((most - least) / 31.0, least),
        Quant::Iq4Nl => (extreme / f32::from(CURVE[0]), 0.0),
        _ => (extreme.abs() / 127.0, 0.0),
    };
    let id = inverse(d);
    let mut sound = put_half(out, 0, d);
    let mut quants = [0_u8; 32];
    for (quant_out, &value) in quants.iter_mut().zip(values) {
        let scaled = (value - min) * id;
        // A cast to an integer truncates, and stays within its bounds.
        *quant_out = match quant {
            Quant::Q4_0 => ((scaled + 8.5) as u8).min(15),
            Quant::Q5_0 => ((scaled + 16.5) as u8).min(31),
            Quant::Q4_1 => ((scaled + 0.5) as u8).min(15),
            Quant::Q5_1 => ((scaled + 0.5) as u8).min(31),
            Quant::Iq4Nl => nearest(&CURVE, scaled),
            _ => scaled.round() as i8 as u8,
        };
    }
    let mut at = 2;
    if matches!(quant, Quant::Q4_1 | Quant::Q5_1) {
        sound &= put_half(out, 2, min);
        at = 4;
    }
    if quant == Quant::Q8_0 {
        out[2..34].copy_from_slice(&quants);
        return sound;
    }
    if matches!(quant, Quant::Q5_0 | Quant::Q5_1) {
        let high = quants.iter().enumerate();
        let high = high.fold(0_u32, |bits, (i, &quant)| bits | u32::from(quant >> 4) << i);
        out[at..at + 4].copy_from_slice(&high.to_le_bytes());
        at += 4;
    }
    nibbles(&quants, &mut out[at..at + 16]);
    sound
}

/// The nibble of a table whose value is nearest, the first of several.
fn nearest(table: &[i8; 16], value: f32) -> u8 {
    let distance = |at: u8| (f32::from(table[usize::from(at)]) - value).abs();
    (1..16).fold(0, |best, at| if distance(at) < distance(best) { at } else { best })
}

/// 32 nibbles in 16 bytes: the first half low, the second high.
fn nibbles(quants: &[u8; 32], out: &mut [u8]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = (quants[i] & 15) | quants[i + 16] << 4;
    }
}

/// MXFP4: a power of two that the largest value is 4 to 8 halves of, and the nearest of eight magnitudes.
fn powers(values: &[f32], out: &mut [u8]) {
    let extreme = largest(values).1.abs();
    // The exponent of an f32 is that of the largest power of two below it; numbers too small to have one count as least.
    let exponent = (extreme.to_bits() >> 23).saturating_sub(2) as u8;
    let half = crate::decode::scale(Quant::Mxfp4, &[exponent]);
    let mut quants = [0_u8; 32];
    for (quant, &value) in quants.iter_mut().zip(values) {
        *quant = nearest(&HALVES, value / half);
    }
    out[0] = exponent;
    nibbles(&quants, &mut out[1..17]);
}

/// Q4_K and Q5_K: eight runs of 32 with a scale and a minimum of 6 bits each, below two scales of the block.
fn with_mins(quant: Quant, values: &[f32], out: &mut [u8]) -> bool {
    let levels = if quant == Quant::Q4K { 15.0 } else { 31.0 };
    let (mut scales, mut mins) = ([0.0_f32; 8], [0.0_f32; 8]);
    for (run, values) in values.chunks_exact(32).enumerate() {
        // What is added is never positive.
        let least = values.iter().copied().fold(0.0, f32::min);
        let most = values.iter().copied().fold(least, f32::max);
        (scales[run], mins[run]) = ((most - least) / levels, -least);
    }
    let (d, scales) = of_six_bits(&scales);
    let (dmin, mins) = of_six_bits(&mins);
    let sound = put_half(out, 0, d) & put_half(out, 2, dmin);
    // What is read back is what the halves have kept.
    let (d, dmin) = (f16::from_f32(d).to_f32(), f16::from_f32(dmin).to_f32());
    out[4..16].fill(0);
    for run in 0..8 {
        let (scale, min) = (scales[run], mins[run]);
        if run < 4 {
            out[4 + run] |= scale;
            out[8 + run] |= min;
        } else {
            out[8 + run] = (scale & 15) | (min & 15) << 4;
            out[run] |= (scale >> 4) << 6;
            out[4 + run] |= (min >> 4) << 6;
        }
    }
    let (high, low) = if quant == Quant::Q4K { (None, 16) } else { (Some(16), 48) };
    if let Some(high) = high {
        out[high..high + 32].fill(0);
    }
    out[low..low + 128].fill(0);
    for (index, &value) in values.iter().enumerate() {
        let run = index / 32;
        let id = inverse(d * f32::from(scales[run]));
        let scaled = (value + dmin * f32::from(mins[run])) * id;
        let level = (scaled.round().clamp(0.0, levels)) as u8;
        out[low + 32 * (index / 64) + index % 32] |= (level & 15) << (4 * (run % 2));
        if let Some(high) = high {
            out[high + index % 32] |= (level >> 4) << run;
        }
    }
    sound
}

/// Numbers that are not negative as 6-bit multiples of one.
fn of_six_bits(numbers: &[f32; 8]) -> (f32, [u8; 8]) {
    let d = numbers.iter().copied().fold(0.0, f32::max) / 63.0;
    let id = inverse(d);
    (d, numbers.map(|number| ((number * id).round() as u8).min(63)))
}

/// Q6_K: sixteen runs of 16 with a scale of 8 bits each, below a scale of the block.
fn of_sixteens(values: &[f32], out: &mut [u8]) -> bool {
    let mut scales = [0.0_f32; 16];
    for (scale, values) in scales.iter_mut().zip(values.chunks_exact(16)) {
        *scale = largest(values).1 / -32.0;
    }
    let d = largest(&scales).1 / -128.0;
    let sound = put_half(out, 208, d);
    let (d, id) = (f16::from_f32(d).to_f32(), inverse(d));
    let scales = scales.map(|scale| (scale * id).round() as i8);
    out[..192].fill(0);
    for (run, scale) in scales.iter().enumerate() {
        out[192 + run] = *scale as u8;
    }
    for (index, &value) in values.iter().enumerate() {
        let id = inverse(d * f32::from(scales[index / 16]));
        let level = ((value * id).round().clamp(-32.0, 31.0) as i8 + 32) as u8;
        let (half, quarter, column) = (index / 128, index % 128 / 32, index % 32);
        out[64 * half + 32 * (quarter % 2) + column] |= (level & 15) << (4 * (quarter / 2));
        out[128 + 32 * half + column] |= (level >> 4) << (2 * quarter);
    }
    sound
}

#[cfg(test)]
mod tests;
