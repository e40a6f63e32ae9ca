// SPDX-License-Identifier: Apache-2.0
//! The Q4_K block of GGML and its decoder. It does not quantise: blocks come from model files.
//!
//! A block holds [`QK_K`] values in [`Q4_K_BLOCK_BYTES`] bytes:
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | `d`, f16, little-endian: the scale of the sub-block scales |
//! | 2..4 | `dmin`, f16, little-endian: the scale of the sub-block minima |
//! | 4..16 | eight scales and eight minima of 6 bits each, packed |
//! | 16..144 | 256 quants of 4 bits each |
//!
//! There are eight sub-blocks of 32 values. Sub-blocks `2g` and `2g + 1` share the quant bytes
//! `32g..32g + 32`: the even one has the low halves, the odd one the high halves. A value is
//! `d * scale * quant - dmin * min` in f32. Both products are exact, since 11 bits of f16 times 6
//! bits of scale times 4 bits of quant fit f32's 24, so only the subtraction rounds: every decoder
//! that computes in IEEE f32, fused or not, gives the same bits.
//!
//! In the packed scales, bytes 0..4 hold scales 0..4 in their low six bits, bytes 4..8 hold minima
//! 0..4 likewise, and bytes 8..12 hold the low halves of scales 4..8 (low nibble) and minima 4..8
//! (high nibble). The two top bits of scales and minima 4..8 are the top bits of bytes 0..4 and 4..8.

use half::f16;

use crate::error::{Error, Result};

/// The number of values in a block.
pub const QK_K: usize = 256;
/// The number of bytes in a block.
pub const Q4_K_BLOCK_BYTES: usize = 144;

const SCALES: usize = 12;
const SUB_BLOCKS: usize = 8;
/// The values of a sub-block, and the quant bytes that a pair of them shares.
const SUB_BLOCK: usize = QK_K / SUB_BLOCKS;

const _: () = assert!(Q4_K_BLOCK_BYTES == 2 + 2 + SCALES + QK_K / 2);

/// Decodes whole blocks to f32.
///
/// The first `QK_K` values of `out` per block are written, and a longer `out` keeps its tail. Blocks
/// whose `d` or `dmin` is infinite or NaN decode to what f32 arithmetic makes of them.
///
/// # Errors
///
/// [`Error::PartialBlock`] when `blocks` is not a whole number of blocks, [`Error::OutputTooSmall`]
/// (in bytes) when `out` is too short. Then nothing is written.
///
/// # Examples
///
/// ```
/// use ggml_spanker::{Q4_K_BLOCK_BYTES, QK_K, dequantize_q4_k};
///
/// // dmin = 1.0, the minimum of sub-block 0 is 3, and all else is zero.
/// let mut block = [0u8; Q4_K_BLOCK_BYTES];
/// block[2..4].copy_from_slice(&0x3C00u16.to_le_bytes());
/// block[8] = 3;
/// let mut values = [1.0; QK_K];
/// dequantize_q4_k(&block, &mut values)?;
/// assert_eq!(values[..32], [-3.0; 32]);
/// assert_eq!(values[32..], [0.0; 224]);
/// # Ok::<(), ggml_spanker::Error>(())
/// ```
pub fn dequantize_q4_k(blocks: &[u8], out: &mut [f32]) -> Result<()> {
    let (blocks, rest) = blocks.as_chunks::<Q4_K_BLOCK_BYTES>();
    if !rest.is_empty() {
        return Err(Error::PartialBlock {
            len: blocks.len() * Q4_K_BLOCK_BYTES + rest.len(),
            block: Q4_K_BLOCK_BYTES,
        });
    }
    // Saturation keeps the comparison true where the count of values overflows.
    let values = blocks.len().saturating_mul(QK_K);
    if out.len() < values {
        return Err(Error::OutputTooSmall {
            have: size_of_val(out),
            need: values.saturating_mul(size_of::<f32>()),
        });
    }
    decode_blocks(blocks, out);
    Ok(())
}

/// Decodes as many blocks as both slices hold.
pub(crate) fn decode_blocks(blocks: &[[u8; Q4_K_BLOCK_BYTES]], out: &mut [f32]) {
    let (out, _) = out.as_chunks_mut::<QK_K>();
    for (block, values) in blocks.iter().zip(out) {
        decode_block(block, values);
    }
}

fn decode_block(block: &[u8; Q4_K_BLOCK_BYTES], values: &mut [f32; QK_K]) {
    let [d0, d1, min0, min1, rest @ ..] = block;
    let d = f16::from_le_bytes([*d0, *d1]).to_f32_const();
    let dmin = f16::from_le_bytes([*min0, *min1]).to_f32_const();
    let (packed, quants) = rest.split_at(SCALES);
    let (scales, mins) = unpack_scales(packed);

    let (quants, _) = quants.as_chunks::<SUB_BLOCK>();
    let (pairs, _) = values.as_chunks_mut::<{ 2 * SUB_BLOCK }>();
    for (g, (quants, pair)) in quants.iter().zip(pairs).enumerate() {
        let scale = [2 * g, 2 * g + 1].map(|i| d * f32::from(scales[i]));
        let min = [2 * g, 2 * g + 1].map(|i| dmin * f32::from(mins[i]));
        decode_pair(quants, scale, min, pair);
    }
}

/// Decodes the two sub-blocks that share their quant bytes.
///
/// It stays out of line because the compiler, once it has unrolled the loop over the pairs, builds
/// its vectors byte by byte instead of loading them.
#[inline(never)]
fn decode_pair(
    quants: &[u8; SUB_BLOCK],
    scale: [f32; 2],
    min: [f32; 2],
    pair: &mut [f32; 2 * SUB_BLOCK],
) {
    let (even, odd) = pair.split_at_mut(SUB_BLOCK);
    for (value, quant) in even.iter_mut().zip(quants) {
        *value = scale[0] * f32::from(quant & 0x0F) - min[0];
    }
    for (value, quant) in odd.iter_mut().zip(quants) {
        *value = scale[1] * f32::from(quant >> 4) - min[1];
    }
}

/// Unpacks the eight scales and the eight minima.
pub(crate) fn unpack_scales(packed: &[u8]) -> ([u8; SUB_BLOCKS], [u8; SUB_BLOCKS]) {
    let mut scales = [0; SUB_BLOCKS];
    let mut mins = [0; SUB_BLOCKS];
    for i in 0..SUB_BLOCKS / 2 {
        let (scale, min, low) = (packed[i], packed[i + 4], packed[i + 8]);
        scales[i] = scale & 0x3F;
        mins[i] = min & 0x3F;
        scales[i + 4] = (low & 0x0F) | (scale >> 6 << 4);
        mins[i + 4] = (low >> 4) | (min >> 6 << 4);
    }
    (scales, mins)
}
