// SPDX-License-Identifier: Apache-2.0
//! Mixtures of experts on a card that is a thread: which experts rows meet, products with these, and their sums.
//!
//! A step of one row computes the products of all its experts side by side. In a step of several rows each expert that
//! anybody meets is read once: the rows that have picked it go through together.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use bytemuck::cast_slice_mut;
use ggml_spanker::ops::{add_picked, combine, route};
use ggml_spanker::{Inputs, Quant, multiply};
use spanker_model::Gating;
use spanker_plan::{Op, PICK_BYTES, Picks};
use spanker_runtime::{BufferId, Place, Work};

use super::Card;
use super::memory::part;
use super::operate::shifted;

/// Rows of weights that kernels take together.
const STRIDE: usize = 16;
/// Units of work for each thread.
const UNITS: usize = 4;

/// One product of a run.
struct Product {
    quant: Quant,
    b: Place,
    stride: u64,
    out: Place,
    n: usize,
    row: u64,
}

/// What the products of a run have in common.
struct Shared {
    a: Place,
    picks: Picks,
    rows: usize,
    width: usize,
    input: Quant,
    apart: bool,
}

/// Some rows of weights of one product with one expert: which inputs they meet, and the row of results they begin.
struct Unit {
    product: usize,
    expert: u64,
    pick: usize,
    weights: Range<usize>,
}

impl<B: AsRef<[u8]> + Send + Sync> Card<B> {
    /// Experts of rows, or sums of what came of them.
    pub(super) fn route_or_combine(&mut self, work: &Work) {
        match *work {
            Work::Route { logits, picks, rows, gating } => {
                let gating = Gating::from_code(gating).expect("programs have gatings of models");
                self.rows(picks.at, rows, picks.used * PICK_BYTES, |card, row, out| {
                    let logits = shifted(logits, row as u64 * picks.experts * 4);
                    let mut chosen = vec![(0, 0.0); picks.used as usize];
                    route(&card.memory.floats(logits, picks.experts), gating, &mut chosen);
                    for (out, (expert, weight)) in out.as_chunks_mut::<8>().0.iter_mut().zip(chosen)
                    {
                        out[..4].copy_from_slice(&expert.to_le_bytes());
                        out[4..].copy_from_slice(&weight.to_le_bytes());
                    }
                });
            }
            Work::Combine { from, picks, into, rows, width, add } => {
                self.rows(into, rows, width * 4, |card, row, out| {
                    let row = row as u64;
                    let from = shifted(from, row * picks.used * width * 4);
                    let from = card.memory.floats(from, picks.used * width);
                    let own = shifted(picks.at, row * picks.used * PICK_BYTES);
                    let own = card.memory.floats(own, picks.used * 2);
                    let weights = own.as_chunks::<2>().0.iter().map(|pick| pick[1]);
                    combine(&from, weights, add, cast_slice_mut(out));
                });
            }
            Work::AddPicked { into, table, picks, rows, width, stride, weighed } => {
                let (total, used) =
                    if weighed { (rows, picks.used) } else { (rows * picks.used, 1) };
                self.rows(into, total, width * 4, |card, row, out| {
                    let each = used * PICK_BYTES;
                    let own = card.memory.get(shifted(picks.at, row as u64 * each), each);
                    let table = |expert: u64| {
                        let there = expert < picks.experts;
                        there.then(|| card.memory.floats(shifted(table, expert * stride), width))
                    };
                    add_picked(own, table, weighed, cast_slice_mut(out));
                });
            }
            _ => unreachable!("only picks and their sums come here"),
        }
    }

    /// Products of rows with the experts that they have picked; several with the same inputs, together.
    pub(super) fn expert_products(&mut self, ops: &[Op]) {
        let mut products = Vec::with_capacity(ops.len());
        let mut known = None;
        for op in ops {
            let Op::Work(Work::MatmulExperts { a, b, out, picks, shape, types, stride, apart }) =
                *op
            else {
                continue;
            };
            let [input, quant] =
                types.map(|id| Quant::from_ggml_id(id).expect("programs have types of files"));
            let [rows, k, n] = shape;
            known = Some(Shared { a, picks, rows: rows as usize, width: k as usize, input, apart });
            products.push(Product {
                quant,
                b,
                stride,
                out,
                n: n as usize,
                row: quant.row_bytes(k),
            });
        }
        let Some(shared) = known else { return };
        let experts = self.picked(&shared);
        let begun = Instant::now();
        if shared.rows == 1 {
            self.one_row_of_experts(&products, &shared, &experts);
            let each: u64 = products.iter().map(|product| product.n as u64 * product.row).sum();
            if self.team.threads() > 1 {
                self.team_policy.took(1, each * experts.len() as u64, begun.elapsed());
            }
        } else {
            self.rows_by_expert(&products, &shared, &experts);
            self.team_policy.passed(begun.elapsed());
        }
    }

    /// The expert of every pick.
    fn picked(&self, shared: &Shared) -> Vec<u64> {
        let count = shared.rows as u64 * shared.picks.used;
        let bytes = self.memory.get(shared.picks.at, count * PICK_BYTES);
        let picks = bytes.as_chunks::<8>().0.iter();
        picks.map(|pick| u32::from_le_bytes([pick[0], pick[1], pick[2], pick[3]]).into()).collect()
    }

    fn given(&self, shared: &Shared) -> (&[u8], usize) {
        let used = shared.picks.used as usize;
        let rows = shared.rows * if shared.apart { used } else { 1 };
        let bytes = rows as u64 * shared.input.row_bytes(shared.width as u64);
        (self.memory.get(shared.a, bytes), rows)
    }

    /// Rows of weights of the products of an expert, in units that a team shares.
    fn expert_units(
        &self,
        products: &[Product],
        (expert, pick): (u64, usize),
        sharing: usize,
        units: &mut Vec<Unit>,
    ) {
        let total: usize = products.iter().map(|product| product.n).sum();
        let each = match self.threads() {
            1 => usize::MAX,
            threads => (total * sharing).div_ceil(threads * UNITS).next_multiple_of(STRIDE),
        };
        for (product, n) in products.iter().map(|product| product.n).enumerate() {
            let mut start = 0;
            while start < n {
                let end = n.min(start.saturating_add(each));
                units.push(Unit { product, expert, pick, weights: start..end });
                start = end;
            }
        }
    }

    fn multiply_unit(&self, products: &[Product], unit: &Unit, inputs: &Inputs, out: &mut [f32]) {
        let product = &products[unit.product];
        let first = unit.expert * product.stride + unit.weights.start as u64 * product.row;
        let rows = unit.weights.len();
        let weights = self.memory.get(shifted(product.b, first), rows as u64 * product.row);
        multiply(product.quant, weights, rows, inputs, out)
            .expect("programs have products that can be");
    }

    fn take_results(&mut self, products: &[Product]) -> Vec<(BufferId, Vec<u64>)> {
        let take = |product: &Product| (product.out.buffer, self.memory.take(product.out.buffer));
        products.iter().map(take).collect()
    }

    /// All experts of a row side by side: units write to where the results go.
    fn one_row_of_experts(&mut self, products: &[Product], shared: &Shared, experts: &[u64]) {
        let mut pick_inputs = std::mem::take(&mut self.pick_inputs);
        let mut inputs = std::mem::take(&mut self.inputs);
        let (bytes, _) = self.given(shared);
        let whole = "programs have whole rows";
        if shared.apart {
            let row = bytes.len() / experts.len();
            for (inputs, bytes) in pick_inputs.iter_mut().zip(bytes.chunks_exact(row)) {
                inputs.load(shared.input, bytes, 1, shared.width).expect(whole);
            }
        } else {
            inputs.load(shared.input, bytes, 1, shared.width).expect(whole);
        }
        let mut units = Vec::new();
        for (pick, &expert) in experts.iter().enumerate() {
            // An expert that is not there leaves its results alone.
            if expert < shared.picks.experts {
                self.expert_units(products, (expert, pick), experts.len(), &mut units);
            }
        }
        let mut outs = self.take_results(products);
        let mut targets: Vec<Vec<&mut [f32]>> = Vec::with_capacity(products.len());
        for ((_, words), product) in outs.iter_mut().zip(products) {
            let all = part(words, product.out, (experts.len() * product.n) as u64 * 4);
            targets.push(cast_slice_mut(all).chunks_exact_mut(product.n).collect());
        }
        let mut parts: Vec<Mutex<&mut [f32]>> = Vec::with_capacity(units.len());
        for unit in &units {
            let row = &mut targets[unit.product][unit.pick];
            let (own, rest) = std::mem::take(row).split_at_mut(unit.weights.len());
            *row = rest;
            parts.push(Mutex::new(own));
        }
        self.team.run(self.threads(), units.len(), &|at| {
            let inputs = if shared.apart { &pick_inputs[units[at].pick] } else { &inputs };
            let mut out = parts[at].lock().expect("a unit is worked on once");
            self.multiply_unit(products, &units[at], inputs, &mut out);
        });
        drop(parts);
        outs.into_iter().for_each(|(buffer, words)| self.memory.put(buffer, words));
        (self.pick_inputs, self.inputs) = (pick_inputs, inputs);
    }

    /// Expert after expert, each with all rows that have picked it.
    fn rows_by_expert(&mut self, products: &[Product], shared: &Shared, experts: &[u64]) {
        let mut inputs = std::mem::take(&mut self.inputs);
        let mut tiles = std::mem::take(&mut self.tiles);
        let mut outs = self.take_results(products);
        let used = shared.picks.used as usize;
        let mut order: Vec<usize> = (0..experts.len()).collect();
        // Picks of an expert stay in the order of their rows.
        order.retain(|&pick| experts[pick] < shared.picks.experts);
        order.sort_by_key(|&pick| experts[pick]);
        let (mut which, mut units) = (Vec::new(), Vec::new());
        for picks in order.chunk_by(|&one, &next| experts[one] == experts[next]) {
            let (bytes, rows) = self.given(shared);
            which.clear();
            which.extend(picks.iter().map(|&pick| if shared.apart { pick } else { pick / used }));
            inputs
                .load_some(shared.input, bytes, (rows, &which), shared.width)
                .expect("programs have whole rows");
            units.clear();
            self.expert_units(products, (experts[picks[0]], 0), 1, &mut units);
            let mut parts: Vec<Mutex<&mut [f32]>> = Vec::with_capacity(units.len());
            let mut rest = &mut tiles[..];
            for unit in &units {
                let (own, more) = rest.split_at_mut(unit.weights.len() * picks.len());
                parts.push(Mutex::new(own));
                rest = more;
            }
            self.team.run(self.threads(), units.len(), &|at| {
                let mut out = parts[at].lock().expect("a unit is worked on once");
                self.multiply_unit(products, &units[at], &inputs, &mut out);
            });
            for (unit, tile) in units.iter().zip(parts) {
                let tile = tile.into_inner().expect("a unit is worked on once");
                let (product, words) = (&products[unit.product], &mut outs[unit.product].1);
                let all = part(words, product.out, (experts.len() * product.n) as u64 * 4);
                let all: &mut [f32] = cast_slice_mut(all);
                for (&pick, row) in picks.iter().zip(tile.chunks_exact(unit.weights.len())) {
                    let first = pick * product.n + unit.weights.start;
                    all[first..first + row.len()].copy_from_slice(row);
                }
            }
        }
        outs.into_iter().for_each(|(buffer, words)| self.memory.put(buffer, words));
        (self.inputs, self.tiles) = (inputs, tiles);
    }
}
