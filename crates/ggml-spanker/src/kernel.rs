// SPDX-License-Identifier: Apache-2.0
//! The products of `product.rs` in vectors: a few rows of weights at a time, each in a lane of its own.
//!
//! Weights of one block are unpacked once and meet all rows of inputs, so that unpacking costs little where
//! there are many of these, and one row of inputs takes the same way. Every lane is the fold that
//! `product.rs` defines.

mod long;
mod plain;
mod short;

use spanker_model::Quant;

use crate::path::Path;
use crate::product::Product;
use crate::simd::{Rows, Simd, Work};

/// Rows of inputs that weights are unpacked for at once: their sums stay in the first-level cache.
const TILE: usize = 128;

/// Computes the product by the instructions of `path`, which the processor has.
pub(crate) fn multiply(path: Path, product: Product<'_>) {
    match path {
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 => {
            if let Some(s) = crate::simd::avx512::Avx512::new() {
                s.vectorize(product);
            }
        }
        _ => unreachable!("{path} is not a vector path of this processor"),
    }
}

impl Work for Product<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let lanes = S::LANES;
        if self.quant.block() == 1 {
            return plain::multiply(s, self);
        }
        if self.n >= lanes {
            return in_groups(s, self);
        }
        // Too few rows for one vector: rows of zeros follow them.
        let mut weights = self.weights.to_vec();
        weights.resize(self.weights.len() / self.n * lanes, 0);
        let mut out = vec![0.0; self.inputs.rows * lanes];
        in_groups(s, Product { weights: &weights, n: lanes, out: &mut out, ..self });
        for (to, from) in self.out.chunks_exact_mut(self.n).zip(out.chunks_exact(lanes)) {
            to.copy_from_slice(&from[..self.n]);
        }
    }
}

/// Where a group of rows of weights meets a tile of rows of inputs.
struct Place<'a> {
    rows: Rows<'a>,
    /// The bytes of the rows.
    stride: usize,
    /// The weights that come after these.
    ahead: &'a [u8],
    /// The first row of the inputs.
    from: usize,
    /// How many rows of the inputs.
    count: usize,
}

impl Place<'_> {
    /// Asks for as many bytes of the next weights as one block of all rows has.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, at: usize, block: usize) {
        for line in 0..(block * S::LANES).div_ceil(64) {
            s.prefetch(self.ahead, at * S::LANES + 64 * line);
        }
    }
}

/// A product with at least as many rows of weights as there are lanes.
#[inline(always)]
fn in_groups<S: Simd>(s: S, product: Product<'_>) {
    let Product { quant, weights, n, inputs, out } = product;
    let stride = weights.len() / n;
    for from in (0..inputs.rows).step_by(TILE) {
        let count = TILE.min(inputs.rows - from);
        let mut sums = [s.splat_f(0.0); TILE];
        for group in 0..n.div_ceil(S::LANES) {
            // The last group takes rows of the one before it again, which have the same bits again.
            let first = (group * S::LANES).min(n - S::LANES);
            let (bytes, ahead) = weights[first * stride..].split_at(S::LANES * stride);
            let rows = Rows::new(bytes, S::LANES, stride);
            let place = Place { rows, stride, ahead, from, count };
            let sums = &mut sums[..count];
            sums.fill(s.splat_f(0.0));
            match quant {
                Quant::Q4_0 => short::add_blocks::<S, short::Q4_0>(s, inputs, &place, sums),
                Quant::Q4_1 => short::add_blocks::<S, short::Q4_1>(s, inputs, &place, sums),
                Quant::Q5_0 => short::add_blocks::<S, short::Q5_0>(s, inputs, &place, sums),
                Quant::Q5_1 => short::add_blocks::<S, short::Q5_1>(s, inputs, &place, sums),
                Quant::Q8_0 => short::add_blocks::<S, short::Q8_0>(s, inputs, &place, sums),
                Quant::Q4K => long::add_blocks::<S, false>(s, inputs, &place, sums),
                Quant::Q5K => long::add_blocks::<S, true>(s, inputs, &place, sums),
                _ => long::add_blocks_6(s, inputs, &place, sums),
            }
            for (sum, out) in sums.iter().zip(out[from * n..].chunks_exact_mut(n)) {
                s.store(*sum, &mut out[first..]);
            }
        }
    }
}
