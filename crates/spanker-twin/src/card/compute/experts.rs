// SPDX-License-Identifier: Apache-2.0
//! Mixtures of experts in slices. Which experts rows meet is read when it is needed: picks are data, and those of experts
//! that are not there leave their results alone.

use bytemuck::cast_slice_mut;
use ggml_spanker::{Gating, multiply, ops};

use spanker_runtime::{PICK_BYTES, Place, Work};

use super::operator::share;
use super::product::{MACS, MACS_PER_BYTE, WEIGHTS, WEIGHTS_PER_BYTE};
use super::{Alu, Memory, Slice, floats, read, scratch_bytes, shifted};
use crate::card::traffic::quant;

/// The number of a pick's expert.
fn expert(memory: &Memory, picks: Place, pick: u64) -> u64 {
    let word = read(memory, shifted(picks, pick * PICK_BYTES), 4);
    u32::from_le_bytes([word[0], word[1], word[2], word[3]]).into()
}

impl Alu {
    /// `done` counts rows.
    pub(super) fn route(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Route { logits, picks, rows, gating } = *work else {
            unreachable!("only routers come here");
        };
        let gating = Gating::from_code(gating).expect("it was checked");
        let (each, bytes) = (picks.used * PICK_BYTES, picks.experts * 4);
        let part = share(rows - done, each + bytes);
        let given = floats(memory, shifted(logits, done * bytes), part * picks.experts);
        let out = scratch_bytes(&mut self.scratch.out, (part * each) as usize);
        let mut chosen = vec![(0, 0.0); picks.used as usize];
        let rows_of = given.chunks_exact(picks.experts as usize);
        for (logits, out) in rows_of.zip(out.chunks_exact_mut(each as usize)) {
            ops::route(logits, gating, &mut chosen);
            for (out, (expert, weight)) in out.as_chunks_mut::<8>().0.iter_mut().zip(&chosen) {
                out[..4].copy_from_slice(&expert.to_le_bytes());
                out[4..].copy_from_slice(&weight.to_le_bytes());
            }
        }
        self.store(memory, shifted(picks.at, done * each), part * each);
        Slice::of(done + part, rows, part * (each + bytes))
    }

    /// `done` counts results, pick by pick.
    pub(super) fn expert_product(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::MatmulExperts { a, b, out, picks, shape: [m, k, n], types, stride, apart } =
            *work
        else {
            unreachable!("only products with experts come here");
        };
        let total = m * picks.used * n;
        if done >= total {
            return Slice::of(total, total, 0);
        }
        let [a_type, b_type] = types.map(|id| quant(id).expect("it was checked"));
        let (a_row, b_row) = (a_type.row_bytes(k), b_type.row_bytes(k));
        let (pick, column) = (done / n, done % n);
        let expert = expert(memory, picks.at, pick);
        if expert >= picks.experts {
            return Slice::of((pick + 1) * n, total, PICK_BYTES);
        }
        let part = (n - column).min(MACS / k).min(WEIGHTS / b_row).max(1);
        if column == 0 {
            let row = if apart { pick } else { pick / picks.used };
            let bytes = read(memory, shifted(a, row * a_row), a_row);
            let loaded = self.scratch.inputs.load(a_type, bytes, 1, k as usize);
            loaded.expect("types and sizes were checked");
        }
        let first = shifted(b, expert * stride + column * b_row);
        let weights = read(memory, first, part * b_row);
        let product = scratch_bytes(&mut self.scratch.out, (part * 4) as usize);
        let inputs = &self.scratch.inputs;
        multiply(b_type, weights, part as usize, inputs, cast_slice_mut(product))
            .expect("types and sizes were checked");
        self.store(memory, shifted(out, done * 4), part * 4);
        let spent = (part * k / MACS_PER_BYTE).max(part * b_row / WEIGHTS_PER_BYTE);
        Slice::of(done + part, total, spent)
    }

    /// `done` counts rows.
    pub(super) fn combine(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::Combine { from, picks, into, rows, width, add } = *work else {
            unreachable!("only sums of experts come here");
        };
        let (row, used) = (width * 4, picks.used);
        let part = share(rows - done, (used + 1) * row);
        let out = scratch_bytes(&mut self.scratch.out, (part * row) as usize);
        if add {
            out.copy_from_slice(read(memory, shifted(into, done * row), part * row));
        }
        let out: &mut [f32] = cast_slice_mut(out);
        for (at, out) in (done..).zip(out.chunks_exact_mut(width as usize)) {
            let given = floats(memory, shifted(from, at * used * row), used * width);
            let own = floats(memory, shifted(picks.at, at * used * PICK_BYTES), used * 2);
            let weights = own.as_chunks::<2>().0.iter().map(|pick| pick[1]);
            ops::combine(given, weights, add, out);
        }
        self.store(memory, shifted(into, done * row), part * row);
        Slice::of(done + part, rows, part * (used + 1) * row)
    }

    /// `done` counts rows of sums.
    pub(super) fn add_picked(&mut self, memory: &mut Memory, work: &Work, done: u64) -> Slice {
        let Work::AddPicked { into, table, picks, rows, width, stride, weighed } = *work else {
            unreachable!("only rows that picks add come here");
        };
        let (total, used) = if weighed { (rows, picks.used) } else { (rows * picks.used, 1) };
        let row = width * 4;
        let part = share(total - done, (used + 2) * row);
        let out = scratch_bytes(&mut self.scratch.out, (part * row) as usize);
        out.copy_from_slice(read(memory, shifted(into, done * row), part * row));
        let out: &mut [f32] = cast_slice_mut(out);
        for (at, out) in (done..).zip(out.chunks_exact_mut(width as usize)) {
            let own = read(memory, shifted(picks.at, at * used * PICK_BYTES), used * PICK_BYTES);
            let table = |expert: u64| {
                let there = expert < picks.experts;
                there.then(|| floats(memory, shifted(table, expert * stride), width))
            };
            ops::add_picked(own, table, weighed, out);
        }
        self.store(memory, shifted(into, done * row), part * row);
        Slice::of(done + part, total, part * (used + 2) * row)
    }
}
