// SPDX-License-Identifier: Apache-2.0
//! What the tests of the product share: a caller, a reference in f64, and how far an f32 sum may be
//! from it. No matrix is made here; each test brings its own.

use ggml_spanker::{MatmulInt4, OUTPUT_ELEM_BYTES, Q4_K_BLOCK_BYTES, QK_K, dequantize_q4_k};

/// Multiplies, and returns the outputs as f32.
pub fn multiply(on: &impl MatmulInt4, a: &[u8], b: &[u8], k: usize) -> Vec<f32> {
    let row_bytes = k / QK_K * Q4_K_BLOCK_BYTES;
    let (m, n) = (a.len() / row_bytes, b.len() / row_bytes);
    let mut out = vec![0; m * n * OUTPUT_ELEM_BYTES];
    on.matmul_q4_k(a, b, &mut out, m, k, n).expect("the dimensions fit");
    out.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Decodes rows of `k` values.
pub fn decode_rows(blocks: &[u8], k: usize) -> Vec<Vec<f32>> {
    let mut values = vec![0.0; blocks.len() / Q4_K_BLOCK_BYTES * QK_K];
    dequantize_q4_k(blocks, &mut values).expect("whole blocks");
    values.chunks(k).map(<[f32]>::to_vec).collect()
}

/// The magnitudes that values are made of, `|d| * scale * quant + |dmin| * min`, in rows of `k`.
pub fn decode_magnitudes(blocks: &[u8], k: usize) -> Vec<Vec<f32>> {
    let mut blocks = blocks.to_vec();
    for block in blocks.chunks_exact_mut(Q4_K_BLOCK_BYTES) {
        block[1] &= 0x7F;
        block[3] |= 0x80;
    }
    decode_rows(&blocks, k)
}

/// The dot product in f64, and the largest error that a product with a row `a` of 8 bits may have.
///
/// Rounding moves a value of `a` by at most 1/254 of the block's largest magnitude, or a little more because
/// the scale is rounded too. The rest is what f32 rounds: a few times in a block and once for each block, in
/// proportion to the parts that values of `b` are made of.
pub fn exact_dot(a: &[f32], b: &[f32], parts: &[f32]) -> (f64, f64) {
    let product: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    let total = |values: &[f32]| values.iter().map(|value| f64::from(value.abs())).sum::<f64>();
    let roundings = (a.len() / QK_K + 8) as f64 * f64::from(f32::EPSILON);
    let blocks = a.chunks(QK_K).zip(b.chunks(QK_K)).zip(parts.chunks(QK_K));
    let bounds = blocks.map(|((a, b), parts)| {
        let largest = a.iter().fold(0.0, |most, value| f64::from(value.abs()).max(most));
        largest * (total(b) / 253.9 + roundings * total(parts))
    });
    (product, bounds.sum())
}
