// SPDX-License-Identifier: Apache-2.0
//! Which part of each matrix a rank of a tensor-parallel group holds.
//!
//! Parts are runs of whole units: heads of attention, blocks of the feed-forward network, rows of what
//! is split by rows only. No quantisation block is ever cut. Ranks may have different shares, and a rank
//! may have none of something.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use spanker_model::{Layer, Model};

/// How the matrices of a stage are split over its cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Split {
    /// One card has all of them.
    Whole,
    /// Every matrix by output rows; what the next one needs is gathered. Four all-gathers a layer, no
    /// partial sums: the bits are those of one card.
    Gather,
    /// Rows, then columns, with partial sums. Two all-reduces a layer.
    Reduce,
}

/// What one rank holds of a layer and of the vocabulary, as runs of rows (or columns, where a *reduce*
/// split cuts those).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// Query heads.
    pub heads: Range<u64>,
    /// The key and value heads that those need. Neighbours may hold the same one.
    pub kv_heads: Range<u64>,
    /// Rows of the product after attention; all of them where its columns are split.
    pub output: Range<u64>,
    /// Rows of gate and up.
    pub ffn: Range<u64>,
    /// Rows of down; all of them where its columns are split.
    pub down: Range<u64>,
    /// Rows of the head and of the embedding table.
    pub vocab: Range<u64>,
    /// Rows of gate and up of the expert that every token of a mixture meets.
    #[serde(default, skip_serializing_if = "Range::is_empty")]
    pub shared: Range<u64>,
}

/// Units of heads and of the feed-forward network that cannot be divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Units {
    heads: u64,
    ffn: u64,
    shared: u64,
}

fn lcm(a: u64, b: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b).max(1) * b
}

impl Units {
    pub(crate) fn of(model: &Model, split: Split) -> Units {
        let blocks = |layer: &Layer| match split {
            Split::Reduce => (layer.o.quant.block(), layer.down.quant.block()),
            _ => (1, layer.down.quant.input().block()),
        };
        let each = model.layers.iter().map(blocks);
        let (output, down) = each.fold((1, 1), |(a, b), (c, d)| (lcm(a, c), lcm(b, d)));
        let shared = model.layers.iter().filter_map(|layer| layer.experts?.shared);
        let shared = shared.fold(1, |unit, own| match split {
            Split::Reduce => lcm(unit, own.down.quant.block()),
            _ => lcm(unit, own.down.quant.input().block()),
        });
        Units { heads: lcm(output, model.head_size) / model.head_size, ffn: down, shared }
    }
}

/// Divides `total` units by weight, largest results first served: the largest `count / weight` is as
/// small as it can be.
pub(crate) fn apportion(total: u64, weights: &[f64]) -> Vec<u64> {
    // Only their relations count: so neither sums nor products of the largest numbers overflow.
    let most = weights.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let weights: Vec<f64> = weights.iter().map(|weight| weight / most).collect();
    let sum: f64 = weights.iter().sum();
    let mut counts: Vec<u64> =
        weights.iter().map(|weight| (total as f64 * weight / sum).floor() as u64).collect();
    let mut left = total - counts.iter().sum::<u64>().min(total);
    while left > 0 {
        let after = |rank: usize| (counts[rank] + 1) as f64 / weights[rank];
        let open = (0..weights.len()).filter(|&rank| weights[rank] > 0.0);
        let next = open.min_by(|&a, &b| after(a).total_cmp(&after(b))).unwrap_or(0);
        counts[next] += 1;
        left -= 1;
    }
    counts
}

/// Runs of whole units, in rank order; the last unit may be short.
fn runs(total: u64, unit: u64, weights: &[f64]) -> Vec<Range<u64>> {
    let mut start = 0;
    apportion(total.div_ceil(unit), weights)
        .into_iter()
        .map(|units| {
            let end = (start + units * unit).min(total);
            let run = start..end;
            start = end;
            run
        })
        .collect()
}

/// What each rank holds if rank `i` gets about `weights[i]` of everything.
pub(crate) fn shards(model: &Model, split: Split, units: Units, weights: &[f64]) -> Vec<Shard> {
    let heads = runs(model.heads, units.heads, weights);
    let ffn = runs(model.ffn, units.ffn, weights);
    let vocab = runs(model.vocab, 1, weights);
    let shared = runs(model.mixture.map_or(0, |own| own.shared), units.shared, weights);
    let rows = match split {
        Split::Reduce => vec![0..model.hidden; weights.len()],
        _ => runs(model.hidden, 1, weights),
    };
    let sharing = model.heads / model.kv_heads;
    let shard = |rank: usize| {
        let heads = heads[rank].clone();
        let kv_heads = match heads.is_empty() {
            true => 0..0,
            false => heads.start / sharing..heads.end.div_ceil(sharing),
        };
        let (output, down) = (rows[rank].clone(), rows[rank].clone());
        let (ffn, vocab) = (ffn[rank].clone(), vocab[rank].clone());
        Shard { heads, kv_heads, output, ffn, down, vocab, shared: shared[rank].clone() }
    };
    (0..weights.len()).map(shard).collect()
}

/// How many elements a run has.
pub(crate) fn len(run: &Range<u64>) -> u64 {
    run.end - run.start
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use spanker_model::{Quant, builtin};

    #[test]
    fn weights_of_any_size_count_by_their_relations() {
        let most = f64::MAX;
        for (weights, counts) in [
            (vec![1e308, 1.0], [60, 0]),
            (vec![most, most], [30, 30]),
            (vec![1e-308, 3e-308], [15, 45]),
            (vec![f64::MIN_POSITIVE, f64::MAX], [0, 60]),
        ] {
            assert_eq!(apportion(60, &weights), counts, "{weights:?}");
        }
    }

    proptest! {
        #[test]
        fn apportioned_units_sum_up_and_no_other_division_has_a_smaller_maximum(
            total in 0u64..200,
            weights in prop::collection::vec(0.05f64..10.0, 1..6),
        ) {
            let counts = apportion(total, &weights);
            prop_assert_eq!(counts.iter().sum::<u64>(), total);
            let worst = |counts: &[u64]| {
                counts.iter().zip(&weights).map(|(&c, w)| c as f64 / w).fold(0.0, f64::max)
            };
            // Moving one unit from any rank to any other never helps, which is enough for a maximum.
            for from in 0..weights.len() {
                for to in 0..weights.len() {
                    if from != to && counts[from] > 0 {
                        let mut moved = counts.clone();
                        moved[from] -= 1;
                        moved[to] += 1;
                        prop_assert!(worst(&moved) >= worst(&counts) - 1e-12);
                    }
                }
            }
        }

        #[test]
        fn shards_cover_everything_exactly_once_and_cut_no_block(
            name in prop::sample::select(vec![
                "smollm2-135m",
                "tinyllama-1.1b",
                "qwen2.5-7b",
                "qwen1.5-moe-a2.7b",
            ]),
            quant in prop::sample::select(vec![Quant::Q4_0, Quant::Q4K, Quant::F16]),
            split in prop::sample::select(vec![Split::Gather, Split::Reduce]),
            weights in prop::collection::vec(0.1f64..4.0, 1..9),
        ) {
            let model = builtin(name, quant).unwrap();
            let units = Units::of(&model, split);
            let shards = shards(&model, split, units, &weights);
            let joined = |part: &dyn Fn(&Shard) -> Range<u64>, total: u64| {
                let mut at = 0;
                for shard in &shards {
                    let run = part(shard);
                    assert_eq!(run.start, at);
                    at = run.end;
                }
                assert_eq!(at, total);
            };
            joined(&|s| s.heads.clone(), model.heads);
            joined(&|s| s.ffn.clone(), model.ffn);
            joined(&|s| s.vocab.clone(), model.vocab);
            joined(&|s| s.shared.clone(), model.mixture.map_or(0, |own| own.shared));
            for shard in &shards {
                let sharing = model.heads / model.kv_heads;
                for head in shard.heads.clone() {
                    prop_assert!(shard.kv_heads.contains(&(head / sharing)));
                }
                if split == Split::Reduce {
                    let layer = &model.layers[0];
                    prop_assert_eq!(shard.ffn.start % layer.down.quant.block(), 0);
                    prop_assert_eq!(shard.heads.start * model.head_size % layer.o.quant.block(), 0);
                    prop_assert_eq!(len(&shard.down), model.hidden);
                }
            }
            if split == Split::Gather {
                joined(&|s| s.output.clone(), model.hidden);
                joined(&|s| s.down.clone(), model.hidden);
            }
        }
    }
}
