// SPDX-License-Identifier: Apache-2.0
//! Weights in blocks of 256 that become integers of a byte before they are multiplied: the blocks of a few rows at a time,
//! in memory that the first-level cache holds.

use super::Place;
use super::long::load32;
use super::subs::dot_parts;
use crate::blocks::Long;
use crate::simd::{Rows, Simd};

/// Bytes of an unpacked block: weights, scales, the scale of these, nothing.
const ROW: usize = 256 + 32 + 4 + 12;
const SCALES: usize = 256;
const NUMBER: usize = 288;
/// The most lanes that there are.
const LANES: usize = 16;

/// Unpacks a block of each row.
#[inline(always)]
fn unpack<S: Simd, K: Long>(rows: Rows<'_>, at: usize, out: &mut [u8]) {
    for (lane, out) in out.chunks_exact_mut(ROW).enumerate().take(S::LANES) {
        let block = K::unpack(rows.part(lane, at, K::BYTES));
        out[..256].copy_from_slice(&block.quants);
        for (out, scale) in out[SCALES..NUMBER].as_chunks_mut().0.iter_mut().zip(block.scales) {
            *out = scale.to_le_bytes();
        }
        out[NUMBER..NUMBER + 4].copy_from_slice(&block.d.to_le_bytes());
    }
}

/// Adds the products of whole rows to `sums`.
#[inline(always)]
pub(super) fn add_blocks<S: Simd, K: Long, const G: usize>(
    s: S,
    place: &Place<'_, G>,
    sums: &mut [[S::Float; G]],
    products: &mut [[S::Int; G]],
) {
    let inputs = place.inputs;
    let mut unpacked = [[0; ROW * LANES]; G];
    for block in 0..place.rows[0].len() / K::BYTES {
        let mut pairs = [[s.splat(0); 8]; G];
        let mut numbers = [s.splat_f(0.0); G];
        for (group, unpacked) in unpacked.iter_mut().enumerate() {
            unpack::<S, K>(place.rows[group], block * K::BYTES, unpacked);
            let rows = Rows::new(unpacked, S::LANES, ROW, 0, 1);
            pairs[group] = load32(s, rows, SCALES);
            numbers[group] = s.float_of_bits(s.word(rows, NUMBER));
        }
        products.fill([s.splat(0); G]);
        #[allow(
            clippy::needless_range_loop,
            reason = "a closure would be compiled without the instructions"
        )]
        for part in 0..8 {
            let mut weights = [[s.splat(0); 8]; G];
            let mut scales = [[s.splat(0); 2]; G];
            for group in 0..G {
                let rows = Rows::new(&unpacked[group], S::LANES, ROW, 0, 1);
                weights[group] = load32(s, rows, 32 * part);
                let pair = pairs[group][part];
                scales[group] = [s.sar(s.shl(pair, 16), 16), s.sar(pair, 16)];
            }
            let from = (block * 8 + part) * inputs.rows + place.from;
            for (sums, run) in products.iter_mut().zip(&inputs.runs[from..][..place.count]) {
                let one = s.dot16(&weights, K::BITS, run, 0);
                let two = s.dot16(&weights, K::BITS, run, 1);
                for group in 0..G {
                    let one = s.mul(one[group], scales[group][0]);
                    let two = s.mul(two[group], scales[group][1]);
                    sums[group] = s.add(sums[group], s.add(one, two));
                }
            }
        }
        let from = block * inputs.rows + place.from;
        let scales = inputs.scales[from..][..place.count].iter();
        let parts = inputs.parts[from..][..place.count].iter();
        let rows = sums.iter_mut().zip(products.iter()).zip(scales).zip(parts);
        for (((sums, products), &a), parts) in rows {
            let a = s.splat_f(a);
            for group in 0..G {
                // Unpacked weights are too much by that.
                let over = dot_parts(s, &pairs[group], parts);
                let product = s.sub(products[group], s.mul(over, s.splat(K::OFFSET)));
                let term = s.mul_f(s.mul_f(numbers[group], a), s.float(product));
                sums[group] = s.add_f(sums[group], term);
            }
        }
    }
}
