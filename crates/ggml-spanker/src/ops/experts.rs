// SPDX-License-Identifier: Apache-2.0
//! Which experts of a mixture a row meets, and the sum of what comes of them. Products are elsewhere.

use std::ops::Deref;

use spanker_model::Gating;

use super::{add, add_scaled, best, exp};

/// Picks experts by their logits: those with the largest, among equals the lowest number first; what is not a number comes
/// last. Fills `picks` with numbers and weights.
///
/// With `e(i)` for `e` to the power of a logit minus the largest one, added in f32, over all experts in rising order and over
/// picks in theirs:
///
/// | gating | weight |
/// |---|---|
/// | [`Gating::Softmax`] | `e(i)` / sum of all |
/// | [`Gating::SoftmaxNormed`] | that / its sum over the picks |
/// | [`Gating::SoftmaxOfChosen`] | `e(i)` / sum of the picks |
/// | [`Gating::Sigmoid`] | `1 / (1 + exp(-logit))` |
///
/// ```
/// use ggml_spanker::ops::route;
/// use spanker_model::Gating;
/// let mut picks = [(0, 0.0); 2];
/// route(&[0.0, 2.0, -1.0, 2.0], Gating::SoftmaxOfChosen, &mut picks);
/// assert_eq!(picks, [(1, 0.5), (3, 0.5)]);
/// ```
///
/// # Panics
/// If there are more picks than logits.
pub fn route(logits: &[f32], gating: Gating, picks: &mut [(u32, f32)]) {
    assert!(picks.len() <= logits.len());
    let chosen = best(logits, picks.len());
    picks.copy_from_slice(&chosen);
    // Numbers come before what is none.
    let largest = chosen.first().map_or(0.0, |&(_, logit)| logit);
    let sum = |sum: f32, logit: f32| sum + exp(logit - largest);
    let all = match gating {
        Gating::SoftmaxOfChosen => chosen.iter().fold(0.0, |total, &(_, logit)| sum(total, logit)),
        _ => logits.iter().fold(0.0, |total, &logit| sum(total, logit)),
    };
    for (_, weight) in picks.iter_mut() {
        *weight = match gating {
            Gating::Sigmoid => 1.0 / (1.0 + exp(-*weight)),
            _ => exp(*weight - largest) / all,
        };
    }
    if gating == Gating::SoftmaxNormed {
        let norm = picks.iter().fold(0.0, |total, &(_, weight)| total + weight);
        picks.iter_mut().for_each(|(_, weight)| *weight /= norm);
    }
}

/// Adds rows, each times its weight, in their order to zeros, or to what is there: row after row of `out.len()` numbers.
///
/// # Panics
/// If there are not as many rows as weights.
pub fn combine(
    rows: &[f32],
    weights: impl ExactSizeIterator<Item = f32>,
    add: bool,
    out: &mut [f32],
) {
    assert_eq!(rows.len(), weights.len() * out.len());
    if !add {
        out.fill(0.0);
    }
    for (row, weight) in rows.chunks_exact(out.len().max(1)).zip(weights) {
        add_scaled(out, row, weight);
    }
}

/// Adds to a row those of a table that belong to the experts of some picks, in their order; each times its pick's weight
/// where they are weighed. A pick is 8 bytes: the number of its expert, u32, and its weight, f32. An expert that `table`
/// does not have adds nothing.
///
/// ```
/// use ggml_spanker::ops::add_picked;
/// let picks: Vec<u8> = [1u32.to_le_bytes(), 0.5f32.to_le_bytes()].concat();
/// let rows: [&[f32]; 2] = [&[1.0], &[8.0]];
/// let mut out = [3.0];
/// add_picked(&picks, |expert| rows.get(expert as usize).copied(), true, &mut out);
/// assert_eq!(out, [7.0]);
/// ```
///
/// # Panics
/// If a row of the table is not as long as the sum.
pub fn add_picked<R: Deref<Target = [f32]>>(
    picks: &[u8],
    table: impl Fn(u64) -> Option<R>,
    weighed: bool,
    out: &mut [f32],
) {
    for pick in picks.as_chunks::<8>().0 {
        let [a, b, c, d, weight @ ..] = *pick;
        let Some(row) = table(u32::from_le_bytes([a, b, c, d]).into()) else { continue };
        match weighed {
            true => add_scaled(out, &row, f32::from_le_bytes(weight)),
            false => add(out, &row),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(logits: &[f32], used: usize, gating: Gating) -> Vec<(u32, f32)> {
        let mut picks = vec![(0, 0.0); used];
        route(logits, gating, &mut picks);
        picks
    }

    #[test]
    fn ties_go_to_the_lowest_number_and_what_is_no_number_comes_last() {
        let numbers = |logits: &[f32], used: usize| -> Vec<u32> {
            picked(logits, used, Gating::Softmax).into_iter().map(|(at, _)| at).collect()
        };
        assert_eq!(numbers(&[1.0, 3.0, 3.0, 2.0, 3.0], 3), [1, 2, 4]);
        assert_eq!(numbers(&[f32::NAN, -1.0, -2.0], 2), [1, 2]);
        assert_eq!(numbers(&[0.0; 5], 5), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn weights_are_probabilities_by_every_gating() {
        let logits = [0.5, -1.0, 2.0, 0.0];
        let e: Vec<f64> = logits.iter().map(|&logit| f64::from(logit).exp()).collect();
        let all: f64 = e.iter().sum();
        for (gating, expected) in [
            (Gating::Softmax, [e[2] / all, e[0] / all]),
            (Gating::SoftmaxNormed, [e[2] / (e[2] + e[0]), e[0] / (e[2] + e[0])]),
            (Gating::SoftmaxOfChosen, [e[2] / (e[2] + e[0]), e[0] / (e[2] + e[0])]),
            (Gating::Sigmoid, [e[2] / (1.0 + e[2]), e[0] / (1.0 + e[0])]),
        ] {
            let picks = picked(&logits, 2, gating);
            assert_eq!((picks[0].0, picks[1].0), (2, 0));
            for ((_, weight), expected) in picks.into_iter().zip(expected) {
                assert!((f64::from(weight) - expected).abs() < 1e-6, "{gating:?}: {weight}");
            }
        }
    }

    #[test]
    fn one_expert_of_one_has_all_weight_and_sums_are_in_the_order_of_the_picks() {
        assert_eq!(picked(&[-3.0], 1, Gating::SoftmaxNormed), [(0, 1.0)]);
        // In another order the small one would be lost.
        let rows = [1e8, 1.0, -1e8, 1.0, 1.0, 1.0];
        let mut out = [5.0, 5.0];
        combine(&rows, [1.0, 1.0, 1.0].into_iter(), false, &mut out);
        assert_eq!(out, [1.0, 3.0]);
        combine(&rows[..2], [0.5].into_iter(), true, &mut out);
        assert_eq!(out, [5e7 + 1.0, 3.5]);
    }
}
