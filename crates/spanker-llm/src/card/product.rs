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
                self.inputs
                    .load(input, bytes, rows as usize, k as usize)
                    .expect("programs have whole rows");
                (loaded, m) = (true, rows as usize);
            }
            products.push(Product { quant, b, out, n: n as usize, row: quant.row_bytes(k) });
        }
        let units = self.units(&products);
        let begun = Instant::now();
        match m {
            1 => {
                let bytes = products.iter().map(|product| product.n as u64 * product.row).sum();
                self.one_row(&products, &units);
                if self.team.threads() > 1 {
                    self.team_policy.took(bytes, begun.elapsed());
                }
            }
            _ => {
                self.many_rows(&products, &units, m);
                self.team_policy.passed(begun.elapsed());
            }
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
            let mut start = 0;
            while start < product.n {
                let end = product.n.min(start.saturating_add(each));
                units.push(Unit { product: index, rows: start..end });
                start = end;
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

    /// Computes all units, each to its target.
    fn multiply_units(&self, products: &[Product], units: &[Unit], targets: &[Mutex<&mut [f32]>]) {
        self.team.run(self.threads(), units.len(), &|at| {
            let unit = &units[at];
            let product = &products[unit.product];
            let weights = self.weights(product, &unit.rows);
            let mut out = targets[at].lock().expect("a unit is worked on once");
            multiply(product.quant, weights, unit.rows.len(), &self.inputs, &mut out)
                .expect("programs have products that can be");
        });
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
        self.multiply_units(products, units, &targets);
        drop(targets);
        self.put_outs(outs);
    }

    /// Several rows of inputs: units have tiles of their own, which are put in order afterwards.
    fn many_rows(&mut self, products: &[Product], units: &[Unit], m: usize) {
        let mut outs = self.take_outs(products);
        let mut tiles = std::mem::take(&mut self.tiles);
        let total: usize = products.iter().map(|product| product.n).sum();
        let mut targets: Vec<Mutex<&mut [f32]>> = Vec::with_capacity(units.len());
        let mut rest = &mut tiles[..total * m];
        for unit in units {
            let (own, more) = rest.split_at_mut(unit.rows.len() * m);
            targets.push(Mutex::new(own));
            rest = more;
        }
        self.multiply_units(products, units, &targets);
        drop(targets);
        let mut start = 0;
        for (index, ((_, words), product)) in outs.iter_mut().zip(products).enumerate() {
            let n = product.n;
            let out = part(words, product.out, (n * m) as u64 * 4);
            let own = &tiles[start..start + n * m];
            start += n * m;
            let widths: Vec<usize> = units
                .iter()
                .filter(|unit| unit.product == index)
                .map(|unit| unit.rows.len())
                .collect();
            let rows: Vec<Mutex<&mut [f32]>> =
                bytemuck::cast_slice_mut(out).chunks_exact_mut(n).map(Mutex::new).collect();
            self.team.run(self.threads(), m, &|row| {
                let mut out = rows[row].lock().expect("a row is worked on once");
                let (mut tile, mut column) = (0, 0);
                for &width in &widths {
                    let from = tile + row * width;
                    out[column..column + width].copy_from_slice(&own[from..from + width]);
                    tile += width * m;
                    column += width;
                }
            });
        }
        self.tiles = tiles;
        self.put_outs(outs);
    }
}
