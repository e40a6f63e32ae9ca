// SPDX-License-Identifier: Apache-2.0
//! The all-reduce of the first version as plain loops over f32 buffers, before and after its transposition. Both fold in
//! card order; they differ in which index runs outside. What this crate does instead is not here.

use spanker_collective::ReduceOp;

/// The operations of the first version.
#[allow(dead_code, reason = "not every user goes through all of them")]
pub const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min];

fn fold(op: ReduceOp, total: f32, x: f32) -> f32 {
    match op {
        ReduceOp::Max if x > total => x,
        ReduceOp::Min if x < total => x,
        ReduceOp::Max | ReduceOp::Min => total,
        _ => total + x,
    }
}

fn finish(op: ReduceOp, total: f32, cards: usize) -> f32 {
    if op == ReduceOp::Avg { total / cards as f32 } else { total }
}

/// Before the transposition: element after element, each over all cards, and the operation is looked up for each.
#[inline(never)]
pub fn element_outer(cards: &mut [Vec<f32>], op: ReduceOp) {
    let Some(len) = cards.first().map(Vec::len) else { return };
    let mut reduced = vec![0.0; len];
    for (element, reduced) in reduced.iter_mut().enumerate() {
        let mut total = cards[0][element];
        for card in &cards[1..] {
            total = fold(op, total, card[element]);
        }
        *reduced = finish(op, total, cards.len());
    }
    for card in cards {
        card.copy_from_slice(&reduced);
    }
}

/// After it: card after card, each over all elements, with the operation chosen once.
#[inline(never)]
pub fn card_outer(cards: &mut [Vec<f32>], op: ReduceOp) {
    fn run(cards: &mut [Vec<f32>], fold: impl Fn(f32, f32) -> f32, finish: impl Fn(f32) -> f32) {
        let Some((first, rest)) = cards.split_first() else { return };
        let mut reduced = first.clone();
        for card in rest {
            for (total, &x) in reduced.iter_mut().zip(card) {
                *total = fold(*total, x);
            }
        }
        reduced.iter_mut().for_each(|total| *total = finish(*total));
        for card in cards {
            card.copy_from_slice(&reduced);
        }
    }
    let count = cards.len() as f32;
    match op {
        ReduceOp::Max => run(cards, |total, x| if x > total { x } else { total }, |total| total),
        ReduceOp::Min => run(cards, |total, x| if x < total { x } else { total }, |total| total),
        ReduceOp::Avg => run(cards, |total, x| total + x, |total| total / count),
        _ => run(cards, |total, x| total + x, |total| total),
    }
}

/// Inputs whose sums depend on the order of the folds.
pub fn inputs(cards: usize, len: usize) -> Vec<Vec<f32>> {
    let number = |card: usize, element: usize| {
        let mut z = (card as u64) << 32 ^ element as u64;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // From 2^-12 to 2^12 in magnitude, of either sign.
        let exponent = 115 + (z >> 40) as u32 % 24;
        f32::from_bits((z as u32 & 0x807f_ffff) | exponent << 23)
    };
    (0..cards).map(|card| (0..len).map(|element| number(card, element)).collect()).collect()
}

/// Elements whose bits are not those of `expected`, over all cards.
pub fn count_different(found: &[Vec<f32>], expected: &[Vec<f32>]) -> usize {
    assert_eq!(found.len(), expected.len(), "as many cards");
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    pairs.filter(|(found, expected)| found.to_bits() != expected.to_bits()).count()
}
