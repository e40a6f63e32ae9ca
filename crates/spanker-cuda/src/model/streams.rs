// SPDX-License-Identifier: Apache-2.0
//! Products of one row of inputs whose weights are prefetched: which these are, and their instructions. Pure: nothing is
//! launched here.
//!
//! They have a kernel of their own, with one block on each multiprocessor and most of its memory for weights. It knows
//! little else: what it does not know is done by the other kernel, before or after.

use spanker_model::Quant;
use spanker_runtime::Place;

use super::instructions::{Normed, RowProduct, small};
use super::operands::{Attend, Embed, Instruction, Streamed, keep, kind, ready};
use super::slots;
use crate::CudaError;

/// Threads of a block, as the kernel has it.
pub(super) const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
/// Slots of a warp, units of a slot's two rows, and pairs of rows that use the same inputs one after the other.
const SLOTS: u32 = 3;
const SPAN: u32 = 64;
const PAIRS: u32 = 3;
/// Bytes of slots: units and their scales.
pub(super) const RING: u32 = WARPS * SLOTS * (2 * SPAN * 18);
/// Bytes of terms: those of a warp's pairs of rows, a little apart.
const TERMS: u32 = WARPS * PAIRS * 2 * (SPAN + 4) * 4;
/// Bytes of a unit's inputs: 32, a scale and a sum.
const INPUTS: u32 = 36;
/// Units of an instruction are multiples of this, so that each row's scales begin at a multiple of 16 bytes.
const UNITS: u64 = 8;
const LANES_BYTES: u32 = 128 * 8;

/// The kernel's compiler options for these.
pub(super) fn options() -> [String; 4] {
    let numbers = [("SLOTS", SLOTS), ("SPAN", SPAN), ("PAIRS", PAIRS)];
    let [slots, span, pairs] = numbers.map(|(name, number)| format!("-D{name}={number}"));
    ["-DSTREAM".to_owned(), slots, span, pairs]
}

/// Numbers that are rounded where they are used, instead of an instruction of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rounding {
    /// Where blocks would have been.
    pub(super) blocks: Place,
    pub(super) numbers: Place,
    pub(super) width: u64,
    pub(super) quant: u32,
    /// Operators of the program that are left to the next instruction with it.
    pub(super) operators: usize,
}

/// Whether weights of a product can be prefetched.
pub(super) fn is_streamed(product: &RowProduct) -> bool {
    let is = |at: usize, quant: Quant| Some(product.types[at]) == quant.ggml_id();
    let units = product.width / 32;
    is(0, Quant::Q8_0)
        && is(1, Quant::Q4_0)
        && product.width.is_multiple_of(32 * UNITS)
        && (UNITS..=1 << 16).contains(&units)
        && product.rows.is_multiple_of(2)
}

/// Where an instruction's inputs come from.
pub(super) enum Source {
    Normed(Normed),
    Rounded(Place),
}

/// The operands of products that share their inputs, and the shared memory that they need. Nothing where addresses do not
/// allow it.
pub(super) fn products(
    products: &[RowProduct],
    source: &Source,
    keep: u32,
    blocks: u32,
    at: &dyn Fn(Place) -> u64,
) -> Result<Option<(Streamed, u32)>, CudaError> {
    let Some(first) = products.first() else { return Ok(None) };
    let width = small(first.width)?;
    let mut op = Streamed { width, keep, ..Default::default() };
    let mut scratch = TERMS;
    match source {
        Source::Normed(normed) => {
            (op.ready, op.epsilon) = (ready::NORMED, normed.epsilon);
            (op.input, op.norm_weight) = (at(normed.from), at(normed.weight));
            scratch = scratch.max(width * 4 + LANES_BYTES);
        }
        Source::Rounded(numbers) => (op.ready, op.input) = (ready::ROUNDED, at(*numbers)),
    }
    for (i, product) in products.iter().enumerate() {
        op.rows[i] = small(product.rows)?;
        op.weights[i] = at(product.b);
    }
    // Of a gated pair, a row of each.
    let gated = keep == keep::GATED;
    let stored = if gated { &products[..1] } else { products };
    let mut pairs = 0;
    for (i, product) in stored.iter().enumerate() {
        op.outs[i] = at(product.out);
        pairs += op.rows[i] / if gated { 1 } else { 2 };
        op.pair_ends.iter_mut().skip(i).for_each(|end| *end = pairs);
    }
    if keep == keep::INTO {
        op.added = op.outs[0];
    }
    (op.block_pairs, op.larger_blocks) = (pairs / blocks, pairs % blocks);
    // While some blocks write results, others may still read inputs.
    let inputs = op.input..op.input + u64::from(width) * 4;
    let is_apart = op.outs.iter().zip(op.rows).take(stored.len()).all(|(&start, rows)| {
        let out = start..start + u64::from(rows) * 4;
        out.end <= inputs.start || inputs.end <= out.start
    });
    let read = [op.input, op.norm_weight].into_iter().chain(op.weights);
    let aligned = read.into_iter().all(|address| address.is_multiple_of(16));
    let shared = (width / 32).next_multiple_of(SPAN) * INPUTS + scratch;
    Ok((aligned && is_apart).then_some((op, shared)))
}

/// Instructions in runs that one kernel can go through: whether that is this one, and the instructions. The index of the
/// next instruction with prefetched weights is written into each of these.
pub(super) fn runs(instructions: Vec<Instruction>) -> Vec<(bool, Vec<Instruction>)> {
    let mut runs: Vec<(Option<bool>, Vec<Instruction>)> = Vec::new();
    let mut dataflow = slots::Run::default();
    for instruction in instructions {
        let one_row = |instruction: &Instruction| {
            instruction.get::<Attend>().is_some_and(|op| op.rows == 1)
                // The kernel does it at its start.
                || (instruction.get::<Embed>().is_some_and(|op| op.rows == 1) && runs.is_empty())
        };
        let need = match instruction.kind() {
            kind::STREAMED => Some(true),
            _ if one_row(&instruction) => None,
            _ => Some(false),
        };
        match runs.last_mut() {
            Some((of, run))
                if (need.is_none() || of.is_none() || *of == need)
                    && (of.or(need) == Some(false) || dataflow.append(&instruction)) =>
            {
                *of = of.or(need);
                run.push(instruction);
            }
            _ => {
                dataflow = slots::Run::default();
                dataflow.append(&instruction);
                runs.push((need, vec![instruction]));
            }
        }
    }
    let linked = |(of, mut run): (Option<bool>, Vec<Instruction>)| {
        let mut next = 0;
        for (at, instruction) in run.iter_mut().enumerate().rev() {
            if let Some(op) = instruction.get_mut::<Streamed>() {
                op.next = next;
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
    use crate::model::operands;

    fn at(buffer: u64) -> Place {
        Place { buffer: BufferId(buffer), offset: 0 }
    }

    fn product(width: u64, rows: u64, out: u64) -> RowProduct {
        let types = [Quant::Q8_0, Quant::Q4_0].map(|quant| quant.ggml_id().unwrap());
        RowProduct { a: at(1), b: at(10 + out), out: at(out), width, rows, types }
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
        let other = RowProduct { types: [8, 8], ..product(4096, 4096, 5) };
        assert!(!is_streamed(&other));
    }

    #[test]
    fn a_place_that_is_not_aligned_is_left_to_the_other_kernel() {
        let products = [product(4096, 64, 5)];
        let odd = |place: Place| (place.buffer.0 << 32) + 4;
        let source = Source::Rounded(at(3));
        assert!(super::products(&products, &source, 0, 132, &address).unwrap().is_some());
        assert!(super::products(&products, &source, 0, 132, &odd).unwrap().is_none());
    }

    /// An instruction of one row.
    fn one_row(kind: u32, place: u64) -> Instruction {
        match kind {
            kind::EMBED => {
                Instruction::new(Embed { rows: 1, table: place << 32, ..Default::default() })
            }
            kind::ATTEND => {
                Instruction::new(Attend { rows: 1, queries: place << 32, ..Default::default() })
            }
            kind::STREAMED => {
                Instruction::new(Streamed { width: 1, input: place << 32, ..Default::default() })
            }
            _ => Instruction::new(operands::Vector {
                width: 1,
                input: place << 32,
                ..Default::default()
            }),
        }
    }

    fn next(instruction: &Instruction) -> u32 {
        instruction.get::<Streamed>().map_or(0, |op| op.next)
    }

    #[test]
    fn runs_change_where_a_kernel_does_not_know_an_instruction() {
        let kinds = [
            kind::EMBED,
            kind::STREAMED,
            kind::ATTEND,
            kind::STREAMED,
            kind::VECTOR,
            kind::ATTEND,
            kind::STREAMED,
        ];
        let runs = runs(kinds.into_iter().zip(1..).map(|(kind, at)| one_row(kind, at)).collect());
        let shape: Vec<(bool, usize)> = runs.iter().map(|(of, run)| (*of, run.len())).collect();
        assert_eq!(shape, [(true, 4), (false, 2), (true, 1)]);
        assert_eq!(runs[0].1.iter().map(next).collect::<Vec<u32>>(), [0, 4, 0, 0]);
        assert_eq!(next(&runs[2].1[0]), 0);
    }

    #[test]
    fn only_the_first_instruction_of_all_may_embed_a_token_in_a_run() {
        let instructions =
            [one_row(kind::EMBED, 1), one_row(kind::STREAMED, 2), one_row(kind::EMBED, 3)];
        let shape: Vec<bool> = runs(instructions.to_vec()).iter().map(|(of, _)| *of).collect();
        assert_eq!(shape, [true, false]);
    }

    proptest! {
        /// As the kernel distributes pairs: blocks have all pairs, each once, and equally many but for one.
        #[test]
        fn every_pair_of_rows_belongs_to_one_block(
            rows in prop::collection::vec(1u64..3000, 1..4),
            blocks in 1u32..300,
            gated in any::<bool>(),
        ) {
            let products: Vec<RowProduct> = match gated {
                true => vec![product(4096, rows[0] * 2, 5), product(4096, rows[0] * 2, 6)],
                false => rows.iter().map(|rows| product(4096, rows * 2, 5)).collect(),
            };
            let keep = if gated { keep::GATED } else { keep::STORE };
            let (op, _) = super::products(&products, &Source::Rounded(at(3)), keep, blocks, &address).unwrap().unwrap();
            let pairs: u64 = if gated { rows[0] * 2 } else { rows.iter().sum() };
            let mut at = 0;
            for block in 0..blocks {
                prop_assert_eq!(at, block * op.block_pairs + block.min(op.larger_blocks));
                at += op.block_pairs + u32::from(block < op.larger_blocks);
            }
            prop_assert_eq!(u64::from(at), pairs);
        }
    }
}
