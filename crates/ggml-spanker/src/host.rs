// SPDX-License-Identifier: Apache-2.0
//! The product of Q4_K matrices on the host's processor: one thread and no intrinsics.
//!
//! Rows are decoded to f32 tile by tile. A row of `a` is decoded once per [`TILE_N`] rows of `b`, and
//! a row of `b` once per [`TILE_M`] rows of `a`, so many outputs share the cost of decoding, while
//! the scratch memory has a fixed bound whatever the dimensions are.

use std::ops::Range;

use crate::error::Result;
use crate::matmul::{MatmulInt4, OUTPUT_ELEM_BYTES, check_dims};
use crate::q4_k::{Q4_K_BLOCK_BYTES, QK_K, decode_blocks};

/// The partial sums of one output. Eight fill one wide or two narrow vector registers, and four
/// outputs at a time then keep the adders busy without running out of registers.
const LANES: usize = 8;
/// The rows of `b` that are multiplied together; decoded, they stay in the first-level cache.
const STRIP: usize = 4;
/// The rows of `a` in a tile.
const TILE_M: usize = 64;
/// The rows of `b` that share one decoded tile of `a`.
const TILE_N: usize = 64;
/// The blocks of a row in a tile.
const TILE_BLOCKS: usize = 2;
/// The values of a row in a tile.
const TILE_K: usize = TILE_BLOCKS * QK_K;

type Block = [u8; Q4_K_BLOCK_BYTES];
/// The partial sums of one row of `a` against one strip of `b`.
type StripSums = [[f32; LANES]; STRIP];

const _: () = {
    assert!(TILE_N.is_multiple_of(STRIP) && QK_K.is_multiple_of(LANES) && LANES.is_power_of_two());
    let tiles = size_of::<f32>() * TILE_K * (TILE_M + STRIP);
    assert!(tiles + size_of::<StripSums>() * TILE_M * (TILE_N / STRIP) <= 1 << 20);
};

/// Multiplies on the host's processor.
///
/// # Bits
///
/// The bits of an output depend on its two rows alone, not on `m`, `n`, the other rows, or how the
/// work is cut into tiles: eight lanes each add every eighth product in rising order, starting from
/// zero, and the lanes are then added in halves (lane `i` and `i + 4`, then `i + 2`, then `i + 1`).
/// No operation is fused. A product may therefore be split by rows of `a` or of `b` over any number
/// of cards, and the pieces are those of the whole.
///
/// # Memory
///
/// A call allocates at most 1 MiB of scratch.
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
        let row_blocks = k / QK_K;
        let (a, _) = a.as_chunks();
        let (b, _) = b.as_chunks();
        let mut tile = Tile::new(m.min(TILE_M), n.min(TILE_N));
        let out_tiles = out[..need].chunks_mut(TILE_M * n * OUTPUT_ELEM_BYTES);
        for (a, out) in a.chunks(TILE_M * row_blocks).zip(out_tiles) {
            for (j, b) in b.chunks(TILE_N * row_blocks).enumerate() {
                tile.multiply(a, b, row_blocks);
                let from = j * TILE_N;
                tile.store(out, from..from + b.len() / row_blocks, n);
            }
        }
        Ok(())
    }
}

/// The scratch memory of one tile of the output.
struct Tile {
    /// Decoded pieces of rows of `a`, each as wide as the piece in hand.
    a: Vec<f32>,
    /// Decoded pieces of one strip of `b`.
    b: Vec<f32>,
    /// Strip by strip, one entry per row of `a`.
    sums: Vec<StripSums>,
    /// The rows of `a` in the tile.
    rows: usize,
}

impl Tile {
    fn new(rows_max: usize, columns_max: usize) -> Self {
        Self {
            a: vec![0.0; rows_max * TILE_K],
            b: vec![0.0; STRIP * TILE_K],
            sums: vec![[[0.0; LANES]; STRIP]; rows_max * columns_max.div_ceil(STRIP)],
            rows: rows_max,
        }
    }

    /// Leaves the partial sums of every row of `a` against every row of `b`.
    fn multiply(&mut self, a: &[Block], b: &[Block], row_blocks: usize) {
        self.rows = a.len() / row_blocks;
        self.sums.fill([[0.0; LANES]; STRIP]);
        for from in (0..row_blocks).step_by(TILE_BLOCKS) {
            let piece = from..row_blocks.min(from + TILE_BLOCKS);
            let width = piece.len() * QK_K;
            decode_rows(a, row_blocks, piece.clone(), &mut self.a);
            let strips = b.chunks(STRIP * row_blocks);
            for (strip, sums) in strips.zip(self.sums.chunks_mut(self.rows)) {
                // A strip that is short of rows leaves old ones behind it. They are multiplied too,
                // because one shape of the inner loop is simpler than two, and never stored.
                decode_rows(strip, row_blocks, piece.clone(), &mut self.b);
                for (a, sums) in self.a.chunks_exact(width).zip(sums) {
                    accumulate(a, &self.b[..STRIP * width], sums);
                }
            }
        }
    }

    /// Writes the tile's outputs to the given columns of rows of `n` values.
    fn store(&self, out: &mut [u8], columns: Range<usize>, n: usize) {
        let (out, _) = out.as_chunks_mut::<OUTPUT_ELEM_BYTES>();
        for (row, out) in out.chunks_exact_mut(n).enumerate() {
            for (column, out) in out[columns.clone()].iter_mut().enumerate() {
                let strip = &self.sums[column / STRIP * self.rows + row];
                *out = fold_lanes(strip[column % STRIP]).to_le_bytes();
            }
        }
    }
}

/// Decodes one piece of each row, one after the other.
fn decode_rows(rows: &[Block], row_blocks: usize, piece: Range<usize>, out: &mut [f32]) {
    let width = piece.len() * QK_K;
    for (row, out) in rows.chunks_exact(row_blocks).zip(out.chunks_exact_mut(width)) {
        decode_blocks(&row[piece.clone()], out);
    }
}

/// Adds the products of one row of `a` with each row of a strip of `b` to the lanes.
fn accumulate(a: &[f32], strip: &[f32], sums: &mut StripSums) {
    let (a, _) = a.as_chunks::<LANES>();
    let (strip, _) = strip.as_chunks::<LANES>();
    let (b0, rest) = strip.split_at(a.len());
    let (b1, rest) = rest.split_at(a.len());
    let (b2, rest) = rest.split_at(a.len());
    let b3 = &rest[..a.len()];
    // The copy lives in registers; memory that others could see would be written at every step.
    let mut lanes = *sums;
    for (step, a) in a.iter().enumerate() {
        let b = [&b0[step], &b1[step], &b2[step], &b3[step]];
        for (lanes, b) in lanes.iter_mut().zip(b) {
            for lane in 0..LANES {
                lanes[lane] += a[lane] * b[lane];
            }
        }
    }
    *sums = lanes;
}

/// Adds the lanes in halves, always in the same order.
fn fold_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}
