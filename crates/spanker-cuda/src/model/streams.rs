// SPDX-License-Identifier: Apache-2.0
//! Products of one row of inputs whose weights come ahead of time: which these are, and their lines. Pure: nothing is
//! launched here.
//!
//! They have a kernel of their own, with one block on each multiprocessor and most of its memory for weights. It knows
//! little else: what it does not know is done by the other kernel, before or after.

use spanker_model::Quant;
use spanker_runtime::Place;

use super::lines::{GATED, INTO, Line, Normed, Vector, kind, small};
use super::told;
use crate::CudaError;

/// Threads of a block, as the kernel has it.
pub(super) const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
/// Slots of a warp, units of a slot's two rows, and pairs of rows that meet the same inputs one after the other.
const SLOTS: u32 = 3;
const SPAN: u32 = 64;
const PAIRS: u32 = 3;
/// Bytes of slots: units and their scales.
pub(super) const RING: u32 = WARPS * SLOTS * (2 * SPAN * 18);
/// Bytes of terms: those of a warp's pairs of rows, a little apart.
const TERMS: u32 = WARPS * PAIRS * 2 * (SPAN + 4) * 4;
/// Bytes of a unit's inputs: 32, a scale and a sum.
const INPUTS: u32 = 36;
/// Units of a line are multiples of this, so that each row's scales begin at a multiple of 16 bytes.
const UNITS: u64 = 8;
const LANES_BYTES: u32 = 128 * 8;

const NORMED: u32 = 1;
const ROUNDED: u32 = 2;

/// What the kernel is told of these when it is compiled.
pub(super) fn options() -> [String; 4] {
    let numbers = [("SLOTS", SLOTS), ("SPAN", SPAN), ("PAIRS", PAIRS)];
    let [slots, span, pairs] = numbers.map(|(name, number)| format!("-D{name}={number}"));
    ["-DSTREAM".to_owned(), slots, span, pairs]
}

/// Numbers that are rounded where they are used, instead of a line of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rounding {
    /// Where blocks would have been.
    pub(super) blocks: Place,
    pub(super) numbers: Place,
    pub(super) width: u64,
    pub(super) quant: u32,
}

/// Whether weights of a product can come ahead of time.
pub(super) fn is_streamed(product: &Vector) -> bool {
    let is = |at: usize, quant: Quant| Some(product.types[at]) == quant.ggml_id();
    let units = product.width / 32;
    is(0, Quant::Q8_0)
        && is(1, Quant::Q4_0)
        && product.width.is_multiple_of(32 * UNITS)
        && (UNITS..=1 << 16).contains(&units)
        && product.rows.is_multiple_of(2)
}

/// Where a line's inputs come from.
pub(super) enum Source {
    Normed(Normed),
    Rounded(Place),
}

/// The line of products that share their inputs, and the shared memory that it needs. Nothing where addresses do not
/// allow it.
pub(super) fn line(
    products: &[Vector],
    source: &Source,
    keep: u32,
    blocks: u32,
    at: &dyn Fn(Place) -> u64,
) -> Result<Option<(Line, u32)>, CudaError> {
    let Some(first) = products.first() else { return Ok(None) };
    let mut line = Line { kind: kind::STREAMED, ..Line::default() };
    let width = small(first.width)?;
    line.n[0] = width;
    line.n[4] = keep;
    let mut scratch = TERMS;
    match source {
        Source::Normed(normed) => {
            line.n[2] = NORMED;
            line.n[3] = normed.epsilon;
            line.p[0] = at(normed.from);
            line.p[1] = at(normed.weight);
            scratch = scratch.max(width * 4 + LANES_BYTES);
        }
        Source::Rounded(numbers) => {
            line.n[2] = ROUNDED;
            line.p[0] = at(*numbers);
        }
    }
    for (i, product) in products.iter().enumerate() {
        line.n[8 + i] = small(product.rows)?;
        line.p[2 + i] = at(product.b);
    }
    // Of a gated pair, a row of each.
    let gated = keep == GATED;
    let kept = if gated { &products[..1] } else { products };
    let mut pairs = 0;
    for (i, product) in kept.iter().enumerate() {
        line.p[5 + i] = at(product.out);
        pairs += line.n[8 + i] / if gated { 1 } else { 2 };
        line.n[6 + i..8].fill(pairs);
    }
    if keep == INTO {
        line.p[8] = line.p[5];
    }
    line.n[16] = pairs / blocks;
    line.n[17] = pairs % blocks;
    // While some blocks write results, others may still read inputs.
    let inputs = line.p[0]..line.p[0] + u64::from(width) * 4;
    let is_apart = (0..kept.len()).all(|i| {
        let out = line.p[5 + i]..line.p[5 + i] + u64::from(line.n[8 + i]) * 4;
        out.end <= inputs.start || inputs.end <= out.start
    });
    let aligned = line.p[..5].iter().all(|address| address.is_multiple_of(16));
    let shared = (width / 32).next_multiple_of(SPAN) * INPUTS + scratch;
    Ok((aligned && is_apart).then_some((line, shared)))
}

/// Lines in runs that one kernel can go through: whether that is this one, and the lines. Numbers of the next line whose
/// weights come ahead of time are written into them.
pub(super) fn runs(lines: Vec<Line>) -> Vec<(bool, Vec<Line>)> {
    let mut runs: Vec<(Option<bool>, Vec<Line>)> = Vec::new();
    let mut told = told::Run::default();
    for line in lines {
        let need = match line.kind {
            kind::STREAMED => Some(true),
            kind::ATTEND if line.n[0] == 1 => None,
            // The kernel does it at its start.
            kind::EMBED if line.n[0] == 1 && runs.is_empty() => None,
            _ => Some(false),
        };
        match runs.last_mut() {
            Some((of, run))
                if (need.is_none() || of.is_none() || *of == need)
                    && (of.or(need) == Some(false) || told.take(&line)) =>
            {
                *of = of.or(need);
                run.push(line);
            }
            _ => {
                told = told::Run::default();
                told.take(&line);
                runs.push((need, vec![line]));
            }
        }
    }
    let linked = |(of, mut run): (Option<bool>, Vec<Line>)| {
        let mut next = 0;
        for (at, line) in run.iter_mut().enumerate().rev() {
            if line.kind == kind::STREAMED {
                line.n[18] = next;
                next = at as u32 + 1;
            }
        }
        (of.unwrap_or(false), run)
    };
    runs.into_iter().map(linked).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use spanker_runtime::BufferId;

    use super::*;

    fn at(buffer: u64) -> Place {
        Place { buffer: BufferId(buffer), offset: 0 }
    }

    fn product(width: u64, rows: u64, out: u64) -> Vector {
        let types = [Quant::Q8_0, Quant::Q4_0].map(|quant| quant.ggml_id().unwrap());
        Vector { a: at(1), b: at(10 + out), out: at(out), width, rows, types }
    }

    fn address(place: Place) -> u64 {
        place.buffer.0 << 32
    }

    #[test]
    fn widths_and_rows_that_slots_cannot_have_are_left_to_the_other_kernel() {
        assert!(is_streamed(&product(4096, 4096, 5)));
        assert!(is_streamed(&product(11008, 2, 5)));
        for (width, rows) in [(576, 1536), (4096, 4095), (128, 64)] {
            assert!(!is_streamed(&product(width, rows, 5)), "{width} {rows}");
        }
        let other = Vector { types: [8, 8], ..product(4096, 4096, 5) };
        assert!(!is_streamed(&other));
    }

    #[test]
    fn a_place_that_is_not_aligned_is_left_to_the_other_kernel() {
        let products = [product(4096, 64, 5)];
        let odd = |place: Place| (place.buffer.0 << 32) + 4;
        let source = Source::Rounded(at(3));
        assert!(line(&products, &source, 0, 132, &address).unwrap().is_some());
        assert!(line(&products, &source, 0, 132, &odd).unwrap().is_none());
    }

    #[test]
    fn runs_change_where_a_kernel_does_not_know_a_line() {
        // One row each.
        let mut place = 0;
        let mut of = |kind| {
            let mut line = Line { kind, ..Line::default() };
            place += 1;
            (line.n[0], line.p[0]) = (1, place << 32);
            line
        };
        let kinds = [
            kind::EMBED,
            kind::STREAMED,
            kind::ATTEND,
            kind::STREAMED,
            kind::VECTOR,
            kind::ATTEND,
            kind::STREAMED,
        ];
        let runs = runs(kinds.map(&mut of).to_vec());
        let shape: Vec<(bool, usize)> = runs.iter().map(|(of, run)| (*of, run.len())).collect();
        assert_eq!(shape, [(true, 4), (false, 2), (true, 1)]);
        let next: Vec<u32> = runs[0].1.iter().map(|line| line.n[18]).collect();
        assert_eq!(next, [0, 4, 0, 0]);
        assert_eq!(runs[2].1[0].n[18], 0);
    }

    #[test]
    fn only_the_first_line_of_all_may_bring_a_token_into_a_run() {
        let of = |kind, place: u64| {
            let mut line = Line { kind, ..Line::default() };
            (line.n[0], line.p[0]) = (1, place << 32);
            line
        };
        let lines = [of(kind::EMBED, 1), of(kind::STREAMED, 2), of(kind::EMBED, 3)];
        let shape: Vec<bool> = runs(lines.to_vec()).iter().map(|(of, _)| *of).collect();
        assert_eq!(shape, [true, false]);
    }

    proptest! {
        /// What the kernel makes of a line's numbers: blocks have all pairs, each once, and equally many but for one.
        #[test]
        fn every_pair_of_rows_belongs_to_one_block(
            rows in prop::collection::vec(1u64..3000, 1..4),
            blocks in 1u32..300,
            gated in any::<bool>(),
        ) {
            let products: Vec<Vector> = match gated {
                true => vec![product(4096, rows[0] * 2, 5), product(4096, rows[0] * 2, 6)],
                false => rows.iter().map(|rows| product(4096, rows * 2, 5)).collect(),
            };
            let keep = if gated { GATED } else { 0 };
            let (line, _) = line(&products, &Source::Rounded(at(3)), keep, blocks, &address).unwrap().unwrap();
            let pairs: u64 = if gated { rows[0] * 2 } else { rows.iter().sum() };
            let mut at = 0;
            for block in 0..blocks {
                prop_assert_eq!(at, block * line.n[16] + block.min(line.n[17]));
                at += line.n[16] + u32::from(block < line.n[17]);
            }
            prop_assert_eq!(u64::from(at), pairs);
        }
    }
}
