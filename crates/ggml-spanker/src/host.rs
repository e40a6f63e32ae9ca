// SPDX-License-Identifier: Apache-2.0
//! The product of Q4_K matrices on the host's processor, on one thread: rows of the left operand become
//! activations, and [`multiply`] does the rest.

use crate::error::Result;
use crate::input::{Inputs, quantize};
use crate::matmul::{MatmulInt4, OUTPUT_ELEM_BYTES, check_dims};
use crate::product::multiply;
use crate::q4_k::{Q4_K_BLOCK_BYTES, QK_K, dequantize_q4_k};
use spanker_model::Quant;

/// The rows of `a` that are multiplied with `b` at once.
const TILE_M: usize = 64;
/// The rows of `b` whose products are buffered before they are written out.
const TILE_N: usize = 256;
/// The values of `a` in a tile that has more than one row.
const TILE_VALUES: usize = 1 << 18;

/// Multiplies on the host's processor.
///
/// # Bits
///
/// Each row of `a` is decoded and rounded to Q8_K: to 8 bits, by the largest magnitude of each 256 values. Then
/// an output has the bits that [`multiply`] defines. They depend on its two rows alone, not on `m`, `n`, the
/// other rows or the processor. A product may therefore be split by rows of `a` or of `b` over any number of
/// cards, and the parts have the bits of the whole.
///
/// An output differs from the exact product by at most 1/254 of the largest magnitude of a block of `a` times the
/// sum of magnitudes of that block of `b`, added over blocks, and the roundings of f32.
///
/// # Memory
///
/// A call allocates scratch of about seven bytes for each value of a row, and of at most 1 MiB more.
///
/// # Examples
///
/// ```
/// use ggml_spanker::{Error, HostMatmul, MatmulInt4};
///
/// let refused = HostMatmul.matmul_q4_k(&[], &[], &mut [], 1, 100, 1);
/// assert_eq!(refused, Err(Error::BadDims { m: 1, k: 100, n: 1, qk: 256 }));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostMatmul;

impl MatmulInt4 for HostMatmul {
    fn matmul_q4_k(
        &self,
        a: &[u8],
        b: &[u8],
        out: &mut [u8],
        m: usize,
        k: usize,
        n: usize,
    ) -> Result<()> {
        let need = check_dims([a.len(), b.len(), out.len()], m, k, n)?;
        if need == 0 {
            return Ok(());
        }
        let row = k / QK_K * Q4_K_BLOCK_BYTES;
        let rows = (TILE_VALUES / k).clamp(1, TILE_M).min(m);
        let mut left = Left::new(rows, k);
        let mut products = vec![0.0; rows * n.min(TILE_N)];
        let out_tiles = out[..need].chunks_mut(rows * n * OUTPUT_ELEM_BYTES);
        for (a, out) in a.chunks(rows * row).zip(out_tiles) {
            left.load(a)?;
            let (out, _) = out.as_chunks_mut::<OUTPUT_ELEM_BYTES>();
            for (tile, b) in b.chunks(TILE_N * row).enumerate() {
                let width = b.len() / row;
                let products = &mut products[..left.inputs.rows() * width];
                multiply(Quant::Q4K, b, width, &left.inputs, products)?;
                for (products, out) in products.chunks_exact(width).zip(out.chunks_exact_mut(n)) {
                    for (out, value) in out[tile * TILE_N..].iter_mut().zip(products) {
                        *out = value.to_le_bytes();
                    }
                }
            }
        }
        Ok(())
    }
}

/// Some rows of `a`, and the scratch memory to make activations of them.
struct Left {
    values: Vec<f32>,
    blocks: Vec<u8>,
    inputs: Inputs,
}

impl Left {
    fn new(rows: usize, k: usize) -> Left {
        let blocks = vec![0; rows * Quant::Q8K.row_bytes(k as u64) as usize];
        Left { values: vec![0.0; k], blocks, inputs: Inputs::new() }
    }

    /// Loads whole rows of Q4_K, no more than fit.
    fn load(&mut self, a: &[u8]) -> Result<()> {
        let k = self.values.len();
        let (from, to) = (k / QK_K * Q4_K_BLOCK_BYTES, Quant::Q8K.row_bytes(k as u64) as usize);
        let rows = a.len() / from;
        for (a, blocks) in a.chunks_exact(from).zip(self.blocks.chunks_exact_mut(to)) {
            dequantize_q4_k(a, &mut self.values)?;
            quantize(Quant::Q8K, &self.values, blocks)?;
        }
        self.inputs.load(Quant::Q8K, &self.blocks[..rows * to], rows, k)
    }
}
