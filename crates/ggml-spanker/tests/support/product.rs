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

/// The dot product in f64, and the largest error that an f32 sum in eight lanes may have.
///
/// A product passes through its own rounding, at most `k / 8` additions in its lane and three in the
/// fold of the lanes. Each contributes at most half a unit in the last place of the magnitudes'
/// sum, and one more covers the terms of second order.
pub fn exact_dot(a: &[f32], b: &[f32]) -> (f64, f64) {
    let products = || a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    let roundings = (a.len() / 8 + 1 + 3 + 1) as f64;
    let magnitude: f64 = products().map(f64::abs).sum();
    (products().sum(), roundings * f64::from(f32::EPSILON) / 2.0 * magnitude)
}
