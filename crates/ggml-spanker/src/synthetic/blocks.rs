// SPDX-License-Identifier: Apache-2.0
//! Random weights, written as the blocks of their type: random bits with scales that make sense.
//!
//! A row of `n` weights has a mean of about 0 and a variance of about `1 / n`, so that a product with it
//! neither grows nor vanishes.

use std::io::{self, Write};

use half::f16;
use rand::{RngCore, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_model::Quant;
use spanker_model::gguf::Tensor;

/// Bytes that are made at once, about.
const AT_ONCE: usize = 1 << 20;
/// The mean square of the scales 32 to 63 within a super-block.
const SUB_SCALE: f64 = 2341.5;

/// What makes a block of weights of a block of random bytes.
type Fill = Box<dyn Fn(&mut [u8])>;

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Matrix,
    Norm,
    Bias,
}

/// Writes the weights of a tensor. The same seed and place give the same weights.
pub(super) fn write(
    out: &mut dyn Write,
    seed: u64,
    at: usize,
    (name, tensor): (&str, &Tensor),
    mut progress: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut random =
        Pcg64Mcg::seed_from_u64(seed ^ (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let role = match tensor.dims.len() {
        _ if name.ends_with(".bias") => Role::Bias,
        1 => Role::Norm,
        _ => Role::Matrix,
    };
    let block = tensor.quant.block_bytes() as usize;
    let mut bytes = vec![0; AT_ONCE / block * block];
    let fill = filler(tensor.quant, tensor.dims[0], role);
    let mut left = tensor.bytes;
    while left > 0 {
        let now = left.min(bytes.len() as u64);
        let part = &mut bytes[..now as usize];
        random.fill_bytes(part);
        part.chunks_exact_mut(block).for_each(&fill);
        out.write_all(part)?;
        left -= now;
        progress(now)?;
    }
    Ok(())
}

/// What fills blocks of this type, for rows of `cols`.
fn filler(quant: Quant, cols: u64, role: Role) -> Fill {
    let deviation = 1.0 / (cols.max(1) as f64).sqrt();
    // The scale that gives weights of this deviation where numbers as they are stored have `square`
    // for their mean square.
    let scale = move |square: f64| f16::from_f64(deviation / square.sqrt());
    match quant {
        Quant::F32 if role != Role::Matrix => {
            let middle = if role == Role::Norm { 1.0 } else { 0.0 };
            Box::new(move |block| {
                // Within a tenth of the middle.
                let part = f32::from(block[0]) / 255.0 - 0.5;
                block.copy_from_slice(&(middle + part * 0.2_f32).to_le_bytes());
            })
        }
        Quant::F32 => {
            let exponent = (127 + exponent(deviation)).clamp(1, 254) as u32;
            Box::new(move |block| floats(block, 0x807f_ffff, exponent << 23))
        }
        Quant::F16 => {
            let exponent = (15 + exponent(deviation)).clamp(1, 30) as u32;
            Box::new(move |block| floats(block, 0x83ff, exponent << 10))
        }
        Quant::Bf16 => {
            let exponent = (127 + exponent(deviation)).clamp(1, 254) as u32;
            Box::new(move |block| floats(block, 0x807f, exponent << 7))
        }
        Quant::Q4_1 => with_minimum(scale(21.25), 7.5),
        Quant::Q5_1 => with_minimum(scale(85.25), 15.5),
        Quant::Q5_0 => with_sign(scale(85.5)),
        Quant::Q8_0 => with_sign(scale(5461.5)),
        Quant::Iq4Nl => with_sign(scale(4548.0)),
        Quant::Mxfp4 => {
            // Numbers are stored doubled, and the byte stands for twice their scale.
            let power = (deviation / 34.25_f64.sqrt()).log2().round() + 128.0;
            Box::new(move |block| block[0] = power as u8)
        }
        Quant::Q4K => super_block(scale(21.25 * SUB_SCALE), 7.5),
        Quant::Q5K => super_block(scale(85.25 * SUB_SCALE), 15.5),
        Quant::Q6K => {
            let scale = scale(341.5 * SUB_SCALE).to_le_bytes();
            Box::new(move |block| {
                // Scales of 32 to 63 with a random sign.
                for byte in &mut block[192..208] {
                    let size = (*byte & 0x1f) | 0x20;
                    *byte = if *byte & 0x80 == 0 { size } else { size.wrapping_neg() };
                }
                block[208..].copy_from_slice(&scale);
            })
        }
        // Scales of four bits, uniform, have a mean square of 77.5; those of six with a sign one of 341.5; half-steps of
        // 341. Codebooks' magnitudes have about 680 and 1,400, a curve's numbers 4,548, digits 2/3.
        Quant::Q2K => {
            let [d, least] = [scale(1.25 * 77.5), f16::from_f64(1.5 * scale(1.25 * 77.5).to_f64())];
            let [a, b] = [d.to_le_bytes(), least.to_le_bytes()];
            Box::new(move |block| {
                // Each minimum is its scale's, so that the mean is 0.
                block[..16].iter_mut().for_each(|byte| *byte = (*byte & 15) * 17);
                block[80..].copy_from_slice(&[a[0], a[1], b[0], b[1]]);
            })
        }
        Quant::Q3K => at_the_end(scale(5.5 * 341.5), 108),
        Quant::Iq4Xs => with_sign(scale(4548.0 * 341.5)),
        Quant::Iq2Xxs | Quant::Iq2Xs => with_sign(scale(680.0 * 341.0 / 64.0)),
        Quant::Iq3Xxs => with_sign(scale(1400.0 * 341.0 / 16.0)),
        Quant::Tq1_0 => at_the_end(scale(2.0 / 3.0), 52),
        Quant::Tq2_0 => {
            let fill = at_the_end(scale(2.0 / 3.0), 64);
            Box::new(move |block| {
                // There is no fourth digit.
                for byte in &mut block[..64] {
                    *byte &= !(*byte >> 1 & *byte & 0x55);
                }
                fill(block);
            })
        }
        // Q4_0 is what remains of the types that are offered.
        _ => with_sign(scale(21.5)),
    }
}

/// The power of two under which a float with a random mantissa has about this deviation.
fn exponent(deviation: f64) -> i32 {
    // The mean square of 1 to 2 is 7/3.
    (deviation / (7.0_f64 / 3.0).sqrt()).log2().round() as i32
}

/// Keeps sign and mantissa of a float of up to four bytes, and sets its exponent.
fn floats(block: &mut [u8], kept: u32, exponent: u32) {
    let mut bits = [0; 4];
    bits[..block.len()].copy_from_slice(block);
    let value = (u32::from_le_bytes(bits) & kept) | exponent;
    block.copy_from_slice(&value.to_le_bytes()[..block.len()]);
}

/// A block that begins with a scale; its sign is random, so that the mean is 0.
fn with_sign(scale: f16) -> Fill {
    let [low, high] = scale.to_le_bytes();
    Box::new(move |block| {
        block[0] = low;
        block[1] = high | (block[1] & 0x80);
    })
}

/// A block with a scale somewhere else; its sign is random.
fn at_the_end(scale: f16, at: usize) -> Fill {
    let with_sign = with_sign(scale);
    Box::new(move |block| with_sign(&mut block[at..]))
}

/// A block that begins with a scale and a minimum, `middle` steps below 0.
fn with_minimum(scale: f16, middle: f64) -> Fill {
    let minimum = f16::from_f64(-middle * scale.to_f64());
    let [a, b] = [scale.to_le_bytes(), minimum.to_le_bytes()];
    let head = [a[0], a[1], b[0], b[1]];
    Box::new(move |block| block[..4].copy_from_slice(&head))
}

/// A super-block that begins with a scale, a minimum, and eight scales and minima of six bits each. Each
/// minimum is its scale's, so that the mean is 0; scales are 32 to 63.
fn super_block(scale: f16, middle: f64) -> Fill {
    let minimum = f16::from_f64(middle * scale.to_f64());
    let [a, b] = [scale.to_le_bytes(), minimum.to_le_bytes()];
    let head = [a[0], a[1], b[0], b[1]];
    Box::new(move |block| {
        block[..4].copy_from_slice(&head);
        for at in 4..8 {
            // Six bits of a scale of the first four, two of one of the last four.
            block[at] |= 0xa0;
            block[at + 4] = block[at];
            let low = block[at + 8] & 0x0f;
            block[at + 8] = low | low << 4;
        }
    })
}
