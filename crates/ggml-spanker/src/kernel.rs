// SPDX-License-Identifier: Apache-2.0
//! The products of `product.rs` in vectors: a few rows of weights at a time, each in a lane of its own.
//!
//! Weights of one block are unpacked once for all rows of inputs, so that unpacking costs little where
//! there are many of these, and one row of inputs follows the same path. Every lane is the fold that
//! `product.rs` defines.

mod books;
mod long;
mod plain;
mod short;
mod subs;
mod unpacked;

use spanker_model::Quant;

use crate::blocks;
use crate::input::Inputs;
use crate::product::Product;
use crate::simd::{Rows, Simd};

/// Rows of inputs that weights are unpacked for at once: their sums stay in the first-level cache.
const TILE: usize = 128;

/// So few rows of inputs do not hide the time of reading weights from memory.
const FEW: usize = 8;

/// Rows of inputs from which on two groups of rows of weights share what is read of these.
const PAIRED: usize = 9;

/// Computes the product.
#[inline(always)]
pub(crate) fn multiply<S: Simd>(s: S, product: &mut Product<'_>) {
    let lanes = S::LANES;
    if product.quant.block() == 1 {
        return plain::multiply(s, product);
    }
    if books::multiply(s, product) {
        return;
    }
    if product.n >= lanes {
        // One row of inputs is a case of its own: its sums stay in registers.
        return match product.inputs.rows {
            1 => in_groups::<S, true>(s, product),
            _ => in_groups::<S, false>(s, product),
        };
    }
    // Too few rows for one vector: rows of zeros follow them.
    let n = product.n;
    let mut weights = product.weights.to_vec();
    weights.resize(weights.len() / n * lanes, 0);
    let mut out = vec![0.0; product.inputs.rows * lanes];
    let mut padded = Product { weights: &weights, n: lanes, out: &mut out, ..*product };
    in_groups::<S, false>(s, &mut padded);
    for (to, from) in product.out.chunks_exact_mut(n).zip(out.chunks_exact(lanes)) {
        to.copy_from_slice(&from[..n]);
    }
}

/// The product of `G` groups of rows of weights with a tile of rows of inputs.
struct Place<'a, const G: usize> {
    rows: [Rows<'a>; G],
    inputs: &'a Inputs,
    /// The first row of the inputs.
    from: usize,
    /// How many rows of the inputs.
    count: usize,
}

/// How lanes are dealt out over rows of weights.
///
/// With few rows of inputs, weights must come from memory as fast as it gives them. Then every lane walks
/// rows that follow each other: memory is read in as many places as there are lanes, each of them straight
/// on, which is what processors prefetch. With many rows of inputs, lanes are neighbours.
struct Deal {
    /// The first row of the first lane.
    first: usize,
    /// From lane to lane.
    step: usize,
    /// Rows of each lane.
    rounds: usize,
}

impl Deal {
    /// Deals out some of the rows from `first` to `n`; the last ones again if there are too few.
    #[inline(always)]
    fn next(first: usize, n: usize, lanes: usize, row: usize, apart: bool) -> Deal {
        let left = n - first;
        if left < lanes {
            // These have been computed before, and get the same bits again.
            return Deal { first: n - lanes, step: 1, rounds: 1 };
        }
        let mut step = if apart { (left / lanes).min(Rows::STRIDE_MAX / row) } else { 1 };
        // Rows a multiple of 4096 bytes apart would compete for the same cache lines.
        if step > 1 && (step * row + 255) % 4096 < 511 {
            step -= 1;
        }
        Deal { first, step, rounds: step }
    }
}

/// Sums that are being computed: for each row of inputs one in each lane of `G` groups.
struct Sums<'a, S: Simd, const G: usize> {
    total: &'a mut [[S::Float; G]],
    /// Integer sums of the current block.
    block: &'a mut [[S::Int; G]],
}

/// A product with at least as many rows of weights as there are lanes, some rows of inputs at a time; `ONE` where there is
/// one of these, whose sums stay in registers.
#[inline(always)]
fn in_groups<S: Simd, const ONE: bool>(s: S, product: &mut Product<'_>) {
    let Product { quant, weights, n, inputs, ref mut out } = *product;
    let row = weights.len() / n;
    let pairs = !ONE && S::PAIRS && inputs.rows >= PAIRED && n >= 2 * S::LANES;
    let tile = if ONE { 0 } else { TILE.min(inputs.rows) };
    let mut one = ([[s.splat_f(0.0)]; 1], [[s.splat(0)]; 1]);
    // No more than there are rows: setting all of a tile would take as long as a product of few.
    let mut many = (vec![[s.splat_f(0.0)]; tile], vec![[s.splat(0)]; tile]);
    let tile_of_pairs = if pairs { tile } else { 0 };
    let mut paired =
        (vec![[s.splat_f(0.0); 2]; tile_of_pairs], vec![[s.splat(0); 2]; tile_of_pairs]);
    for from in (0..inputs.rows).step_by(TILE) {
        let count = if ONE { 1 } else { tile.min(inputs.rows - from) };
        let out = &mut out[from * n..(from + count) * n];
        let mut next = 0;
        while next < n {
            if pairs && n - next >= 2 * S::LANES {
                let second = next + S::LANES;
                let rows = |first| Rows::new(weights, S::LANES, row, first, 1);
                let ahead = if S::AHEAD { 2 * S::LANES } else { 0 };
                let rows = [rows(next).ahead(ahead), rows(second).ahead(ahead)];
                let (total, block) = (&mut paired.0[..count], &mut paired.1[..count]);
                Sums { total, block }.add(s, quant, &Place { rows, inputs, from, count });
                for ([one, two], out) in paired.0.iter().zip(out.chunks_exact_mut(n)) {
                    s.store(*one, &mut out[next..]);
                    s.store(*two, &mut out[second..]);
                }
                next += 2 * S::LANES;
                continue;
            }
            let deal = Deal::next(next, n, S::LANES, row, inputs.rows <= FEW && !S::AHEAD);
            for first in deal.first..deal.first + deal.rounds {
                let rows = Rows::new(weights, S::LANES, row, first, deal.step);
                let rows = [rows.ahead(if S::AHEAD { S::LANES } else { 0 })];
                let (total, block) = match ONE {
                    true => (&mut one.0[..], &mut one.1[..]),
                    false => (&mut many.0[..count], &mut many.1[..count]),
                };
                Sums { total, block }.add(s, quant, &Place { rows, inputs, from, count });
                let total = if ONE { &one.0[..] } else { &many.0[..] };
                for ([sum], out) in total.iter().zip(out.chunks_exact_mut(n)) {
                    store(s, *sum, &mut out[first..], deal.step);
                }
            }
            next = deal.first + deal.step * S::LANES;
        }
    }
}

impl<S: Simd, const G: usize> Sums<'_, S, G> {
    /// Computes the products of whole rows.
    #[inline(always)]
    fn add(&mut self, s: S, quant: Quant, place: &Place<'_, G>) {
        let (sums, block) = (&mut *self.total, &mut *self.block);
        sums.fill([s.splat_f(0.0); G]);
        match quant {
            Quant::Q4_0 => short::add_blocks::<S, short::Q4_0, G>(s, place, sums),
            Quant::Q4_1 => short::add_blocks::<S, short::Q4_1, G>(s, place, sums),
            Quant::Q5_0 => short::add_blocks::<S, short::Q5_0, G>(s, place, sums),
            Quant::Q5_1 => short::add_blocks::<S, short::Q5_1, G>(s, place, sums),
            Quant::Q8_0 => short::add_blocks::<S, short::Q8_0, G>(s, place, sums),
            Quant::Iq4Nl => short::add_blocks::<S, short::Iq4Nl, G>(s, place, sums),
            Quant::Mxfp4 => short::add_blocks::<S, short::Mxfp4, G>(s, place, sums),
            Quant::Q4K => long::add_blocks::<S, false, G>(s, place, sums, block),
            Quant::Q5K => long::add_blocks::<S, true, G>(s, place, sums, block),
            Quant::Q6K => subs::add_blocks::<S, subs::Q6K, G>(s, place, sums, block),
            Quant::Q2K => subs::add_blocks::<S, subs::Q2K, G>(s, place, sums, block),
            Quant::Q3K => subs::add_blocks::<S, subs::Q3K, G>(s, place, sums, block),
            Quant::Iq4Xs => subs::add_blocks::<S, subs::Iq4Xs, G>(s, place, sums, block),
            Quant::Tq2_0 => subs::add_blocks::<S, subs::Tq2_0, G>(s, place, sums, block),
            Quant::Iq2Xxs => unpacked::add_blocks::<S, blocks::Iq2Xxs, G>(s, place, sums, block),
            Quant::Iq2Xs => unpacked::add_blocks::<S, blocks::Iq2Xs, G>(s, place, sums, block),
            Quant::Iq3Xxs => unpacked::add_blocks::<S, blocks::Iq3Xxs, G>(s, place, sums, block),
            _ => unpacked::add_blocks::<S, blocks::Tq1_0, G>(s, place, sums, block),
        }
    }
}

/// Writes a value for each lane, `step` values apart.
#[inline(always)]
fn store<S: Simd>(s: S, sum: S::Float, out: &mut [f32], step: usize) {
    if step == 1 {
        return s.store(sum, out);
    }
    let mut lanes = [0.0; 16];
    s.store(sum, &mut lanes);
    for (lane, value) in lanes[..S::LANES].iter().enumerate() {
        out[lane * step] = *value;
    }
}
