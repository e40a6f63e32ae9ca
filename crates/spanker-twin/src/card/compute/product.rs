// SPDX-License-Identifier: Apache-2.0
//! Products in slices: some rows of weights against some rows of inputs, which stay unpacked until all weights
//! have met them.

use bytemuck::cast_slice_mut;
use ggml_spanker::{HostMatmul, MatmulInt4, Quant, multiply};
use spanker_runtime::{Place, Work};

use super::{Alu, Memory, Slice, read, scratch_bytes, shifted};
use crate::card::traffic::quant;

/// Multiply-accumulates of one slice.
pub(super) const MACS: u64 = 4 << 20;
/// Multiply-accumulates in the time of a byte that is copied.
pub(super) const MACS_PER_BYTE: u64 = 8;
/// Bytes of weights of one slice.
pub(super) const WEIGHTS: u64 = 1 << 20;
/// Bytes of weights that are read in the time of a byte that is copied.
pub(super) const WEIGHTS_PER_BYTE: u64 = 4;
/// Values of inputs that are unpacked at a time: what stays near while weights pass.
const INPUTS: u64 = 512 << 10;

impl Alu {
    /// `done` counts results: all of the first rows of inputs, then all of the next ones.
    pub(super) fn product(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Matmul { a, b, out, shape: [m, k, n], types } = *work else {
            unreachable!("only products come here");
        };
        let total = m * n;
        if done >= total {
            return Slice::of(total, total, 0);
        }
        let [a_type, b_type] = types.map(|id| quant(id).expect("it was checked"));
        let (a_row, b_row) = (a_type.row_bytes(k), b_type.row_bytes(k));
        // Q4_K inputs are not cached: one row at a time.
        let most = if a_type == Quant::Q4K { 1 } else { (INPUTS / k).max(1) };
        let first = done / (most * n) * most;
        let rows = most.min(m - first);
        let column = (done - first * n) / rows;
        let part = (n - column).min(MACS / (k * rows)).min(WEIGHTS / b_row).max(1);
        let inputs = (shifted(a, first * a_row), rows * a_row);
        let weights = read(memory, shifted(b, column * b_row), part * b_row);
        let product = scratch_bytes(&mut self.scratch.out, (rows * part * 4) as usize);
        let checked = "types and sizes were checked";
        if a_type == Quant::Q4K {
            let left = read(memory, inputs.0, inputs.1);
            HostMatmul
                .matmul_q4_k(left, weights, product, 1, k as usize, part as usize)
                .expect(checked);
        } else {
            let loaded = &mut self.scratch.inputs;
            if column == 0 {
                let bytes = read(memory, inputs.0, inputs.1);
                loaded.load(a_type, bytes, rows as usize, k as usize).expect(checked);
            }
            multiply(b_type, weights, part as usize, loaded, cast_slice_mut(product))
                .expect(checked);
        }
        self.place_product(memory, shifted(out, (first * n + column) * 4), [rows, part, n]);
        let spent = (rows * part * k / MACS_PER_BYTE).max(part * b_row / WEIGHTS_PER_BYTE);
        Slice::of(done + rows * part, total, spent)
    }

    /// Brings `rows` rows of `part` results to where rows are `n` apart.
    fn place_product(&mut self, memory: &mut Memory, out: Place, [rows, part, n]: [u64; 3]) {
        let product = scratch_bytes(&mut self.scratch.out, (rows * part * 4) as usize);
        if self.garble {
            product[0] ^= 0x40;
        }
        for (row, results) in (0..).zip(product.chunks_exact((part * 4) as usize)) {
            let target = memory.get_mut(shifted(out, row * n * 4), part * 4);
            target.expect("it was checked").copy_from_slice(results);
        }
    }
}
