// SPDX-License-Identifier: Apache-2.0
//! The contract of mock topologies, as a user of the first version relies on it.

use proptest::prelude::*;
use spanker_scheduler::{
    AllGather, AllReduce, DType, Error, INTERCARD_BUS_WIDTH, INTERCARD_LANE_WIDTH, INTERCARD_LANES,
    LinkState, MockSail, ModelParallel, ReduceOp, TensorParallel, Topology,
};

fn reduced(buffers: &[&[f32]], op: ReduceOp) -> Vec<Vec<f32>> {
    let cards = Topology::<MockSail>::with_mock(buffers.len());
    let mut per_card: Vec<Vec<f32>> = buffers.iter().map(|b| b.to_vec()).collect();
    cards.all_reduce_f32(&mut per_card, op).unwrap();
    per_card
}

#[test]
fn all_reduce_sum_two_cards_yields_sum() {
    let after = reduced(&[&[1.0, 2.0, 3.0], &[10.0, 20.0, 30.0]], ReduceOp::Sum);
    assert_eq!(after, vec![vec![11.0, 22.0, 33.0]; 2]);
}

#[test]
fn all_reduce_sum_four_cards_yields_total() {
    let after = reduced(&[&[1.0], &[2.0], &[3.0], &[4.0]], ReduceOp::Sum);
    assert_eq!(after, vec![vec![10.0]; 4]);
}

#[test]
fn all_reduce_avg_four_cards_yields_mean() {
    let after = reduced(&[&[1.0], &[2.0], &[3.0], &[4.0]], ReduceOp::Avg);
    assert_eq!(after, vec![vec![2.5]; 4]);
}

const THREE: [&[f32]; 3] = [&[1.0, 5.0, 9.0], &[7.0, 2.0, 8.0], &[3.0, 6.0, 4.0]];

#[test]
fn all_reduce_max_picks_per_index_max() {
    assert_eq!(reduced(&THREE, ReduceOp::Max), vec![vec![7.0, 6.0, 9.0]; 3]);
}

#[test]
fn all_reduce_min_picks_per_index_min() {
    assert_eq!(reduced(&THREE, ReduceOp::Min), vec![vec![1.0, 2.0, 4.0]; 3]);
}

#[test]
fn all_gather_four_cards_concatenates_in_order() {
    let cards = Topology::<MockSail>::with_mock(4);
    let per_card: Vec<Vec<f32>> =
        (0..4u8).map(|c| vec![f32::from(2 * c), f32::from(2 * c + 1)]).collect();
    let gathered = cards.all_gather_f32(&per_card).unwrap();
    assert_eq!(gathered, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
}

#[test]
fn all_gather_topology_mismatch() {
    let cards = Topology::<MockSail>::with_mock(3);
    let error = cards.all_gather_f32(&[vec![1.0], vec![2.0]]).unwrap_err();
    assert!(matches!(error, Error::TopologyMismatch { expected: 3, actual: 2 }), "{error}");
}

#[test]
fn all_gather_shape_mismatch() {
    let cards = Topology::<MockSail>::with_mock(2);
    let error = cards.all_gather_f32(&[vec![1.0, 2.0], vec![3.0]]).unwrap_err();
    assert!(matches!(error, Error::ShapeMismatch { sail: 1, expected: 2, actual: 1 }), "{error}");
}

#[test]
fn intercard_constants_match_mast_14_contract() {
    assert_eq!((INTERCARD_LANES, INTERCARD_LANE_WIDTH, INTERCARD_BUS_WIDTH), (4, 32, 128));
    assert_eq!(INTERCARD_LANES * INTERCARD_LANE_WIDTH, INTERCARD_BUS_WIDTH);
}

#[test]
fn all_reduce_errors_leave_every_buffer_alone() {
    let cards = Topology::<MockSail>::with_mock(2);
    let mut three = vec![vec![1.0f32]; 3];
    let error = cards.all_reduce_f32(&mut three, ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::TopologyMismatch { expected: 2, actual: 3 }), "{error}");
    let mut uneven = vec![vec![1.0f32, 2.0], vec![3.0]];
    let error = cards.all_reduce_f32(&mut uneven, ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::ShapeMismatch { sail: 1, expected: 2, actual: 1 }), "{error}");
    let mut even = vec![vec![1.0f32], vec![3.0]];
    let error = cards.all_reduce_f32(&mut even, ReduceOp::BitwiseOr).unwrap_err();
    let (op, dtype) = (ReduceOp::BitwiseOr, DType::F32);
    assert!(
        matches!(error, Error::UndefinedOperation { op: o, dtype: d } if (o, d) == (op, dtype))
    );
    assert_eq!(
        (three, uneven, even),
        (vec![vec![1.0]; 3], vec![vec![1.0, 2.0], vec![3.0]], vec![vec![1.0], vec![3.0]],)
    );
}

#[test]
fn empty_topologies_and_empty_buffers_are_legal() {
    let none = Topology::<MockSail>::with_mock(0);
    assert!(none.links().is_empty());
    none.all_reduce_f32(&mut [], ReduceOp::Sum).unwrap();
    assert_eq!(none.all_gather_f32(&[]).unwrap(), [0.0f32; 0]);
    let two = Topology::<MockSail>::with_mock(2);
    two.all_reduce_f32(&mut [vec![], vec![]], ReduceOp::Max).unwrap();
}

#[test]
fn mock_links_are_a_full_mesh_of_links_that_are_up() {
    let cards = Topology::<MockSail>::with_mock(4);
    assert_eq!(cards.links().len(), 12);
    assert!(cards.links().iter().all(|link| link.state == LinkState::Up));
    assert!(cards.links().iter().all(|link| link.local_sail != link.remote_sail));
}

#[test]
fn shard_counts_are_the_number_of_cards() {
    let cards = Topology::<MockSail>::with_mock(3);
    assert_eq!(TensorParallel::shard_count(&cards), 3);
    assert_eq!(ModelParallel::shard_count(&cards), 3);
}

#[test]
fn nan_from_any_card_reaches_max_and_min() {
    for card in 0..3 {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let mut buffers = vec![vec![1.0f32; 100]; 3];
            buffers[card][57] = f32::NAN;
            Topology::<MockSail>::with_mock(3).all_reduce_f32(&mut buffers, op).unwrap();
            for buffer in &buffers {
                assert!(buffer[57].is_nan());
                assert_eq!(buffer[56], 1.0);
            }
        }
    }
}

#[test]
fn other_collectives_of_a_mock_topology_check_the_number_of_buffers() {
    let cards = Topology::<MockSail>::with_mock(2);
    let inputs = [[1i32, 2], [3, 4]];
    let mut outputs = [[0i32; 1]; 2];
    cards.reduce_scatter(&inputs, &mut outputs, ReduceOp::Sum).unwrap();
    assert_eq!(outputs, [[4], [6]]);
    let mut wide = [[0i32; 4]; 2];
    cards.all_gather(&inputs, &mut wide).unwrap();
    assert_eq!(wide, [[1, 2, 3, 4]; 2]);
    cards.broadcast(&[9, 8, 7, 6], &mut wide).unwrap();
    assert_eq!(wide, [[9, 8, 7, 6]; 2]);
    let mut turned = [[0i32; 2]; 2];
    cards.all_to_all(&inputs, &mut turned).unwrap();
    assert_eq!(turned, [[1, 3], [2, 4]]);
    let error = cards.broadcast(&[1, 2, 3, 4], &mut wide[..1]).unwrap_err();
    assert!(matches!(error, Error::TopologyMismatch { expected: 2, actual: 1 }));
    let error = cards.all_gather(&inputs[..1], &mut wide).unwrap_err();
    assert!(matches!(error, Error::TopologyMismatch { expected: 2, actual: 1 }));
}

proptest! {
    #[test]
    fn all_reduce_sum_has_the_bits_of_the_serial_fold(
        cards in 1usize..7,
        values in prop::collection::vec(any::<f32>(), 0..600),
    ) {
        let len = values.len() / cards;
        let mut per_card: Vec<Vec<f32>> =
            (0..cards).map(|c| values[c * len..(c + 1) * len].to_vec()).collect();
        let mut expected = per_card[0].clone();
        for buffer in &per_card[1..] {
            for (total, x) in expected.iter_mut().zip(buffer) {
                *total += x;
            }
        }
        Topology::<MockSail>::with_mock(cards).all_reduce_f32(&mut per_card, ReduceOp::Sum).unwrap();
        for buffer in &per_card {
            for (found, expected) in buffer.iter().zip(&expected) {
                let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
                prop_assert!(same, "{found} {expected}");
            }
        }
    }
}
