// SPDX-License-Identifier: Apache-2.0
//! Rows of weights as f32, for every type that models are stored in. Products do not go through here:
//! they multiply the blocks themselves ([`crate::multiply`]).

use half::{bf16, f16};
use spanker_model::Quant;

use crate::blocks::unpack;
use crate::error::{Error, Result};
use crate::q4_k::unpack_scales;

/// The types of weights that this crate computes with.
pub const WEIGHT_TYPES: [Quant; 21] = [
    Quant::F32,
    Quant::F16,
    Quant::Bf16,
    Quant::Q4_0,
    Quant::Q4_1,
    Quant::Q5_0,
    Quant::Q5_1,
    Quant::Q8_0,
    Quant::Q4K,
    Quant::Q5K,
    Quant::Q6K,
    Quant::Iq4Nl,
    Quant::Mxfp4,
    Quant::Q2K,
    Quant::Q3K,
    Quant::Iq4Xs,
    Quant::Iq2Xxs,
    Quant::Iq2Xs,
    Quant::Iq3Xxs,
    Quant::Tq1_0,
    Quant::Tq2_0,
];

/// What the nibbles of IQ4_NL stand for.
pub(crate) const CURVE: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice what the nibbles of MXFP4 stand for: a sign, two bits of exponent and one of mantissa.
pub(crate) const HALVES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Decodes whole blocks to f32.
///
/// ```
/// use ggml_spanker::{Quant, decode};
/// // One Q8_0 block: d = 0.5, then 32 signed bytes.
/// let mut block = vec![0x00, 0x38];
/// block.extend((0..32).map(|i: i8| (i - 16) as u8));
/// let mut values = [0.0; 32];
/// decode(Quant::Q8_0, &block, &mut values)?;
/// assert_eq!((values[0], values[31]), (-8.0, 7.5));
/// # Ok::<(), ggml_spanker::Error>(())
/// ```
///
/// # Errors
/// [`Error::Type`] for a type that is not among [`WEIGHT_TYPES`]; [`Error::PartialBlock`] and
/// [`Error::OutputTooSmall`] if the lengths do not belong together. Then nothing is written.
pub fn decode(quant: Quant, blocks: &[u8], out: &mut [f32]) -> Result<()> {
    if !WEIGHT_TYPES.contains(&quant) {
        return Err(Error::Type { quant });
    }
    let (weights, bytes) = (quant.block() as usize, quant.block_bytes() as usize);
    if !blocks.len().is_multiple_of(bytes) {
        return Err(Error::PartialBlock { len: blocks.len(), block: bytes });
    }
    let values = (blocks.len() / bytes).saturating_mul(weights);
    if out.len() < values {
        let need = values.saturating_mul(size_of::<f32>());
        return Err(Error::OutputTooSmall { have: size_of_val(out), need });
    }
    for (block, out) in blocks.chunks_exact(bytes).zip(out.chunks_exact_mut(weights)) {
        decode_block(quant, block, out);
    }
    Ok(())
}

/// An f16 at a byte of a block.
pub(crate) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32_const()
}

/// The scale at the beginning of a block of 32, for the numbers that [`integers`] gives.
pub(crate) fn scale(quant: Quant, block: &[u8]) -> f32 {
    if quant == Quant::Mxfp4 { half_of_power(block[0]) } else { half_at(block, 0) }
}

/// Half of the power of two that a byte stands for, 2 to the power of `byte - 127`.
fn half_of_power(byte: u8) -> f32 {
    // In two factors, because the smallest powers have no exponent of their own.
    let power = |exponent: u8| f32::from_bits((u32::from(exponent) + 63) << 23);
    power(byte / 2) * power(byte - byte / 2)
}

fn decode_block(quant: Quant, block: &[u8], out: &mut [f32]) {
    if let Some((unpacked, offset)) = unpack(quant, block) {
        let has_minima = quant == Quant::Q2K;
        for (index, (value, quant)) in out.iter_mut().zip(unpacked.quants).enumerate() {
            let scale = unpacked.d * f32::from(unpacked.scales[index / 16]);
            *value = scale * (i32::from(quant) - offset) as f32;
            if has_minima {
                *value -= unpacked.dmin * f32::from(unpacked.minima[index / 16]);
            }
        }
        return;
    }
    match quant {
        Quant::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        Quant::F16 => out[0] = half_at(block, 0),
        Quant::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
        Quant::Q4K | Quant::Q5K => {
            let (d, min) = (half_at(block, 0), half_at(block, 2));
            let (scales, mins) = unpack_scales(&block[4..16]);
            let quants = integers(quant, block);
            for (index, value) in out.iter_mut().enumerate() {
                let sub = index / 32;
                let scale = d * f32::from(scales[sub]);
                *value = scale * f32::from(quants[index]) - min * f32::from(mins[sub]);
            }
        }
        Quant::Q6K => {
            let d = half_at(block, 208);
            let quants = integers(quant, block);
            for (index, value) in out.iter_mut().enumerate() {
                let scale = f32::from(block[192 + index / 16] as i8);
                *value = d * scale * f32::from(quants[index]);
            }
        }
        _ => {
            let d = scale(quant, block);
            let min = match quant {
                Quant::Q4_1 | Quant::Q5_1 => half_at(block, 2),
                _ => 0.0,
            };
            let quants = integers(quant, block);
            for (value, &quant) in out.iter_mut().zip(&quants) {
                *value = d * f32::from(quant) + min;
            }
        }
    }
}

/// The integers of one block, in the order of the weights, as they enter products: with a sign where the
/// type has an offset (Q4_0, Q5_0, Q6_K) or a table, and without one where it has a minimum.
pub(crate) fn integers(quant: Quant, block: &[u8]) -> [i8; 256] {
    let mut out = [0i8; 256];
    match quant {
        Quant::Q4_0 => nibbles(&block[2..18], &mut out, |q, _| q - 8),
        Quant::Q4_1 => nibbles(&block[4..20], &mut out, |q, _| q),
        Quant::Iq4Nl => nibbles(&block[2..18], &mut out, |q, _| CURVE[q as usize]),
        Quant::Mxfp4 => nibbles(&block[1..17], &mut out, |q, _| HALVES[q as usize]),
        Quant::Q5_0 | Quant::Q5_1 => {
            let at = if quant == Quant::Q5_0 { 2 } else { 4 };
            let high = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
            let less = if quant == Quant::Q5_0 { 16 } else { 0 };
            nibbles(&block[at + 4..at + 20], &mut out, |q, i| {
                (q | ((high >> i & 1) << 4) as i8) - less
            });
        }
        Quant::Q8_0 => {
            for (out, &byte) in out.iter_mut().zip(&block[2..34]) {
                *out = byte as i8;
            }
        }
        Quant::Q4K => {
            for (index, out) in out.iter_mut().enumerate() {
                *out = super_nibble(&block[16..], index);
            }
        }
        Quant::Q5K => {
            for (index, out) in out.iter_mut().enumerate() {
                let high = block[16 + index % 32] >> (index / 32) & 1;
                *out = super_nibble(&block[48..], index) | (high << 4) as i8;
            }
        }
        Quant::Q6K => {
            for (index, out) in out.iter_mut().enumerate() {
                let (half, quarter, column) = (index / 128, index % 128 / 32, index % 32);
                let low = block[64 * half + 32 * (quarter % 2) + column] >> (4 * (quarter / 2));
                let high = block[128 + 32 * half + column] >> (2 * quarter);
                *out = ((low & 15) | ((high & 3) << 4)) as i8 - 32;
            }
        }
        _ => {}
    }
    out
}

/// 32 nibbles of 16 bytes: the low halves first, then the high ones.
fn nibbles(bytes: &[u8], out: &mut [i8; 256], value: impl Fn(i8, usize) -> i8) {
    for (i, &byte) in bytes.iter().enumerate() {
        out[i] = value((byte & 15) as i8, i);
        out[i + 16] = value((byte >> 4) as i8, i + 16);
    }
}

/// The nibble of a weight of a super-block: sub-blocks come in pairs that share 32 bytes.
fn super_nibble(quants: &[u8], index: usize) -> i8 {
    let byte = quants[32 * (index / 64) + index % 32];
    (byte >> (4 * (index / 32 % 2)) & 15) as i8
}
