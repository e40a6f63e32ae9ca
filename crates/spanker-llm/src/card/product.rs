// SPDX-License-Identifier: Apache-2.0
//! Products of a card that is a thread: the rows of weights are shared out over the team.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use ggml_spanker::{Quant, multiply};
use spanker_runtime::{BufferId, Place, Work};

use super::Card;
use super::memory::part;
use spanker_plan::Op;

/// Rows of weights that kernels take together.
const STRIDE: usize = 16;
/// Units of work for each thread at most, so that one that is put off its core leaves little behind.
const UNITS: usize = 4;
/// Rows of weights that a unit should have: kernels are slow to start.
const ROWS: usize = 128;

/// One product of a run.
struct Product {
    quant: Quant,
    b: Place,
    out: Place,
    n: usize,
    row: u64,
}

/// Some rows of weights of one product.
struct Unit {
    product: usize,
    rows: Range<usize>,
    /// Its place among the product's units.
    place: usize,
}

impl<B: AsRef<[u8]> + Send + Sync> Card<B> {
    /// Products that share their inputs, together.
    pub(super) fn products(&mut self, ops: &[Op]) {
        let mut products = Vec::with_capacity(ops.len());
        let mut loaded = false;
        let mut m = 0;
        for op in ops {
            let Op::Work(Work::Matmul { a, b, out, shape: [rows, k, n], types }) = *op else {
                continue;
            };
            let [input, quant] =
                types.map(|id| Quant::from_ggml_id(id).expect("programs have types of files"));
            if !loaded {
                let bytes = self.memory.get(a, rows * input.row_bytes(k));
                let (team, threads) = (&self.team, self.threads());
                self.inputs
                    .load_shared(input, bytes, (rows as usize, k as usize), |units, work| {
                        team.run(threads, units, work);
                    })
                    .expect("programs have whole rows");
                (loaded, m) = (true, rows as usize);
            }
            products.push(Product { quant, b, out, n: n as usize, row: quant.row_bytes(k) });
        }
        let units = self.units(&products);
        let begun = Instant::now();
        match m {
            1 => self.one_row(&products, &units),
            _ => self.many_rows(&products, &units, m),
        }
        if self.team.threads() > 1 {
            let bytes = products.iter().map(|product| product.n as u64 * product.row).sum();
            self.team_policy.took(m, bytes, begun.elapsed());
        }
    }

    fn units(&self, products: &[Product]) -> Vec<Unit> {
        let threads = self.team.threads();
        let total: usize = products.iter().map(|product| product.n).sum();
        let each = match threads {
            1 => usize::MAX,
            _ => {
                let each = (total / (threads * ROWS)).clamp(1, UNITS);
                total.div_ceil(threads * each).next_multiple_of(STRIDE)
            }
        };
        let mut units = Vec::new();
        for (index, product) in products.iter().enumerate() {
            let (mut start, mut place) = (0, 0);
            while start < product.n {
                let end = product.n.min(start.saturating_add(each));
                units.push(Unit { product: index, rows: start..end, place });
                (start, place) = (end, place + 1);
            }
        }
        units
    }

    fn weights(&self, product: &Product, rows: &Range<usize>) -> &[u8] {
        let offset = product.b.offset + rows.start as u64 * product.row;
        let place = Place { offset, ..product.b };
        self.memory.get(place, rows.len() as u64 * product.row)
    }

    /// Takes the buffers of all results out.
    fn take_outs(&mut self, products: &[Product]) -> Vec<(BufferId, Vec<u64>)> {
        let take = |product: &Product| (product.out.buffer, self.memory.take(product.out.buffer));
        products.iter().map(take).collect()
    }

    fn put_outs(&mut self, outs: Vec<(BufferId, Vec<u64>)>) {
        outs.into_iter().for_each(|(buffer, words)| self.memory.put(buffer, words));
    }

    /// Computes a unit.
    fn product_unit(&self, products: &[Product], unit: &Unit, out: &mut [f32]) {
        let product = &products[unit.product];
        let weights = self.weights(product, &unit.rows);
        multiply(product.quant, weights, unit.rows.len(), &self.inputs, out)
            .expect("programs have products that can be");
    }

    /// One row of inputs: units write to where the result goes.
    fn one_row(&mut self, products: &[Product], units: &[Unit]) {
        let mut outs = self.take_outs(products);
        let mut targets: Vec<Mutex<&mut [f32]>> = Vec::with_capacity(units.len());
        for (index, ((_, words), product)) in outs.iter_mut().zip(products).enumerate() {
            let mut rest: &mut [f32] =
                bytemuck::cast_slice_mut(part(words, product.out, product.n as u64 * 4));
            for unit in units.iter().filter(|unit| unit.product == index) {
                let (own, more) = rest.split_at_mut(unit.rows.len());
                targets.push(Mutex::new(own));
                rest = more;
            }
        }
        self.team.run(self.threads(), units.len(), &|at| {
            let mut out = targets[at].lock().expect("a unit is worked on once");
            self.product_unit(products, &units[at], &mut out);
        });
        drop(targets);
        self.put_outs(outs);
    }

    /// Several rows of inputs: a unit has a tile of its own, and puts each row of it where it goes.
    fn many_rows(&mut self, products: &[Product], units: &[Unit], m: usize) {
        let mut outs = self.take_outs(products);
        let mut tiles = std::mem::take(&mut self.tiles);
        let mut targets: Vec<Mutex<&mut [f32]>> = Vec::with_capacity(units.len());
        let mut rest = &mut tiles[..];
        for unit in units {
            let (own, more) = rest.split_at_mut(unit.rows.len() * m);
            targets.push(Mutex::new(own));
            rest = more;
        }
        // Product by product and row by row, what each unit has of it.
        let mut pieces: Vec<Mutex<&mut [f32]>> = Vec::with_capacity(units.len() * m);
        let mut first_pieces = Vec::with_capacity(products.len());
        for (index, ((_, words), product)) in outs.iter_mut().zip(products).enumerate() {
            let out = part(words, product.out, (product.n * m) as u64 * 4);
            first_pieces.push(pieces.len());
            for mut row in bytemuck::cast_slice_mut(out).chunks_exact_mut(product.n) {
                for unit in units.iter().filter(|unit| unit.product == index) {
                    let (own, more) = row.split_at_mut(unit.rows.len());
                    pieces.push(Mutex::new(own));
                    row = more;
                }
            }
        }
        let last_pieces = first_pieces.iter().skip(1).copied().chain([pieces.len()]);
        let firsts: Vec<(usize, usize)> = first_pieces
            .iter()
            .zip(last_pieces)
            .map(|(&first, last)| (first, (last - first) / m))
            .collect();
        self.team.run(self.threads(), units.len(), &|at| {
            let unit = &units[at];
            let mut tile = targets[at].lock().expect("a unit is worked on once");
            self.product_unit(products, unit, &mut tile);
            let (first, each) = firsts[unit.product];
            for (row, tile) in tile.chunks_exact(unit.rows.len()).enumerate() {
                let piece = &pieces[first + row * each + unit.place];
                piece.lock().expect("a unit is worked on once").copy_from_slice(tile);
            }
        });
        drop((targets, pieces));
        self.tiles = tiles;
        self.put_outs(outs);
    }
}
