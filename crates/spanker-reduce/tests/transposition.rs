// SPDX-License-Identifier: Apache-2.0
//! The loops that the example `transposition` times give the same bits as the fused all-reduce. Their speed is not tested.

#[path = "support/loops.rs"]
mod loops;

use loops::{OPS, card_outer, count_different, element_outer, inputs};
use spanker_collective::ReduceOp;
use spanker_reduce::{Team, Threads, all_reduce};

#[test]
fn element_outer_card_outer_and_fused_loops_have_identical_bits() {
    for cards in [1, 2, 3, 4, 8] {
        for len in [0, 1, 7, 1000, 65_537] {
            for op in OPS {
                let (mut before, mut after, mut fused) =
                    (inputs(cards, len), inputs(cards, len), inputs(cards, len));
                element_outer(&mut before, op);
                card_outer(&mut after, op);
                all_reduce(Team::global(), Threads::Auto, &mut fused, op).expect("an operation");
                assert_eq!(count_different(&after, &before), 0, "{cards} x {len}, {op}");
                assert_eq!(count_different(&fused, &before), 0, "{cards} x {len}, {op}");
            }
        }
    }
}

#[test]
fn fold_in_another_order_and_a_single_wrong_bit_are_found() {
    let mut right = inputs(4, 1000);
    element_outer(&mut right, ReduceOp::Sum);
    let mut backwards = inputs(4, 1000);
    backwards.reverse();
    element_outer(&mut backwards, ReduceOp::Sum);
    assert!(count_different(&backwards, &right) > 1000, "inputs that show the order");
    let mut flipped = right.clone();
    flipped[3][999] = f32::from_bits(flipped[3][999].to_bits() ^ 1);
    assert_eq!(count_different(&flipped, &right), 1);
}
