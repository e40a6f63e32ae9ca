// SPDX-License-Identifier: Apache-2.0
//! Products of many rows: which are left to tensor cores, in what order their inputs lie for that, and how large tiles are.

use spanker_model::Quant;
use spanker_plan::GpuStaging;
use spanker_runtime::Work;

use super::super::operands::{Instruction, Matmul, Pack};
use super::{TILE_ROWS, Writer, bytes_of, small};
use crate::CudaError;

/// Rows of inputs from which on tensor cores multiply, and of long blocks.
const FEWEST: u32 = 16;
const FEWEST_LONG: u32 = 8;
/// Rows of inputs of a tile, blocks of 32 that are in shared memory at a time, and how many times that, as the kernel has it.
const ROWS: u32 = 64;
const CHUNK: u32 = 4;
const STAGES: u32 = 3;
/// Rows of weights of a tile, and what one takes, as a ratio.
const TILES: [(u32, u64); 2] = [(128, 8), (32, 3)];

/// Rows of weights of the tiles with which a product takes least.
fn tile_outs(rows: u32, outs: u32, blocks: u32) -> u32 {
    let cost = |&(tile, cost): &(u32, u64)| {
        let tiles = outs.div_ceil(tile) * rows.div_ceil(ROWS);
        u64::from(tiles.div_ceil(blocks.max(1))) * cost
    };
    TILES.iter().min_by_key(|tile| cost(tile)).map_or(TILES[0].0, |tile| tile.0)
}

/// Whether tensor cores multiply weights of a type.
fn is_multiplied(quant: Quant) -> bool {
    matches!(quant, Quant::Q4_0 | Quant::Q8_0 | Quant::Q4K)
}

/// Shared memory of a tile.
fn tile_shared(quant: Quant, outs: u32) -> u32 {
    if quant == Quant::Q4K {
        // Two stages of a block of each row, and what is unpacked of one.
        let stage = 4 * (outs * 32 + 32) + outs * 16 + 8 * ROWS * 32 + ROWS * 48;
        return 2 * stage + 8 * outs * 8;
    }
    let block = if quant == Quant::Q8_0 { 32 } else { 16 };
    let stage = CHUNK * (outs * block + 32) + CHUNK * ROWS * 32 + CHUNK * 2 * (outs + ROWS);
    STAGES * stage
}

/// Shared memory of a product of many rows without tensor cores, by tiles of so many rows: inputs twice, and terms.
pub(crate) fn many_rows(weights: Quant, width: u32, tile: u32) -> u32 {
    if weights.block() == 1 { width * 4 } else { 2 * 16 * 32 * 40 + tile * 16 * 33 * 4 }
}

/// Rows of weights of the largest tile that has space in so much shared memory.
pub(crate) fn tile_rows(most_shared: u32) -> u32 {
    let fits = |rows: &&u32| many_rows(Quant::Q4_0, 0, **rows) <= most_shared;
    TILE_ROWS.iter().find(fits).copied().unwrap_or(TILE_ROWS[1])
}

impl Writer<'_> {
    /// Writes the instruction of a product of many rows, and before it that of its inputs for tensor cores unless the product
    /// before it has the same.
    pub(super) fn rows_product(&mut self, work: &Work) -> Result<(), CudaError> {
        let Work::Matmul { a, b, out, shape: [rows, width, outs], types: [input, weights] } = work
        else {
            return Err(CudaError::Unsupported("a product of another kind".into()));
        };
        let quant = bytes_of(*weights)?;
        let mut op = Matmul {
            rows: small(*rows)?,
            width: small(*width)?,
            outs: small(*outs)?,
            input_quant: *input,
            weight_quant: *weights,
            inputs: self.at(*a),
            weights: self.at(*b),
            out: self.at(*out),
            ..Default::default()
        };
        let (packed, room) = self.setting.packed;
        let is_long = quant == Quant::Q4K;
        let inputs = if is_long { Quant::Q8K } else { Quant::Q8_0 };
        let is_rounded = Some(*input) == inputs.ggml_id() && is_multiplied(quant);
        let fits = GpuStaging::packed_bytes(*rows, *width) <= room;
        if !is_rounded || !fits || op.rows < if is_long { FEWEST_LONG } else { FEWEST } {
            self.push(Instruction::new(op), many_rows(quant, op.width, self.setting.tile_rows));
            return Ok(());
        }
        let pack = Instruction::new(Pack {
            rows: op.rows,
            width: op.width,
            is_interleaved: u32::from(quant == Quant::Q4_0),
            is_long: u32::from(is_long),
            from: op.inputs,
            into: packed,
            ..Default::default()
        });
        if self.packed != Some(pack) {
            self.push(pack, 0);
            self.packed = Some(pack);
        }
        (op.packed, op.tile_outs) = (packed, tile_outs(op.rows, op.outs, self.setting.blocks));
        self.push(Instruction::new(op), tile_shared(quant, op.tile_outs));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_as_large_as_leaves_enough_of_them_for_all_blocks() {
        assert_eq!(tile_outs(512, 4096, 264), 128);
        assert_eq!(tile_outs(128, 4096, 264), 32);
        assert_eq!(tile_outs(64, 32000, 264), 128);
        assert_eq!(tile_outs(16, 128, 264), 32);
        assert_eq!(tile_outs(16, 128, 0), 128);
    }

    #[test]
    fn tiles_of_two_blocks_fit_a_multiprocessor() {
        for quant in [Quant::Q4_0, Quant::Q8_0, Quant::Q4K] {
            for (outs, _) in TILES {
                let shared = tile_shared(quant, outs);
                assert!(shared <= 99 << 10, "{quant} {outs}: {shared}");
            }
        }
    }
}
