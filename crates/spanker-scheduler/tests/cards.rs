// SPDX-License-Identifier: Apache-2.0
//! Topologies of cards that can work: what they find, what their collectives promise, how they go on after a
//! loss.

use proptest::prelude::*;
use spanker_collective::Collective;
use spanker_plan::{cheapest, prices};
use spanker_scheduler::planner::{Cluster, Profile, Shape};
use spanker_scheduler::{
    AllGather, AllReduce, BytesPerSecond, DeviceErrorKind, Error, LinkEnd, LinkState, MockSail,
    ProbedLink, ReduceOp, SpankerControl, Topology, bf16, save_links, survey,
};
use spanker_test_support::cards::{Cards, Health};

fn topology(cards: &Cards) -> Topology<SpankerControl> {
    Topology::of_cards(cards.open()).unwrap()
}

fn pairs(cards: &Topology<SpankerControl>) -> Vec<(usize, usize)> {
    cards.links().iter().map(|link| (link.local_sail, link.remote_sail)).collect()
}

#[test]
fn links_between_cards_are_found_in_both_directions() {
    let cards = Cards::ring(3);
    let found = topology(&cards);
    assert_eq!(pairs(&found), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]);
    assert!(found.links().iter().all(|link| link.state == LinkState::Up));
    cards.cut(0, 1);
    let states: Vec<LinkState> = topology(&cards).links().iter().map(|link| link.state).collect();
    let (up, down) = (LinkState::Up, LinkState::Down);
    assert_eq!(states, [down, up, down, up, up, up]);
}

#[test]
fn collectives_on_cards_give_what_mock_cards_give() {
    let (cards, mocks) = (topology(&Cards::ring(4)), Topology::<MockSail>::with_mock(4));
    let inputs: Vec<Vec<f32>> =
        (0..4).map(|card| (0..37).map(|i| (card * 37 + i) as f32 / 7.0).collect()).collect();
    for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Product] {
        let (mut here, mut there) = (inputs.clone(), inputs.clone());
        cards.all_reduce_f32(&mut here, op).unwrap();
        mocks.all_reduce_f32(&mut there, op).unwrap();
        assert_eq!(here, there);
        let outputs = || [vec![0.0; 10], vec![0.0; 9], vec![0.0; 9], vec![0.0; 9]];
        let (mut here, mut there) = (outputs(), outputs());
        cards.reduce_scatter(&inputs, &mut here, op).unwrap();
        mocks.reduce_scatter(&inputs, &mut there, op).unwrap();
        assert_eq!(here, there);
    }
    assert_eq!(cards.all_gather_f32(&inputs).unwrap(), inputs.concat());
    let uneven = [vec![1u8], vec![2, 3, 4], vec![], vec![5, 6]];
    let mut outputs = vec![[0u8; 6]; 4];
    cards.all_gather(&uneven, &mut outputs).unwrap();
    assert_eq!(outputs, [[1, 2, 3, 4, 5, 6]; 4]);
    let mut outputs = vec![[bf16::ZERO; 3]; 4];
    let source = [1.0, 2.5, -3.0].map(bf16::from_f32);
    cards.broadcast(&source, &mut outputs).unwrap();
    assert_eq!(outputs, [source; 4]);
    let outputs = || [vec![0.0; 40], vec![0.0; 36], vec![0.0; 36], vec![0.0; 36]];
    let (mut here, mut there) = (outputs(), outputs());
    cards.all_to_all(&inputs, &mut here).unwrap();
    mocks.all_to_all(&inputs, &mut there).unwrap();
    assert_eq!(here, there);
}

#[test]
fn one_card_and_empty_buffers_are_legal() {
    let one = topology(&Cards::ring(1));
    let mut buffers = vec![vec![1.0f32, 2.0]];
    one.all_reduce_f32(&mut buffers, ReduceOp::Avg).unwrap();
    assert_eq!(buffers, [[1.0, 2.0]]);
    let three = topology(&Cards::ring(3));
    three.all_reduce_f32(&mut [vec![], vec![], vec![]], ReduceOp::Sum).unwrap();
    assert_eq!(three.all_gather_f32(&[vec![], vec![], vec![]]).unwrap(), [0.0f32; 0]);
    let none = three.without(0).without(1).without(2);
    none.all_reduce_f32(&mut [], ReduceOp::Sum).unwrap();
}

#[test]
fn wrong_arguments_are_the_errors_of_mock_cards_and_leave_buffers_alone() {
    let cards = topology(&Cards::ring(2));
    let mut three = vec![vec![1.0f32]; 3];
    let error = cards.all_reduce_f32(&mut three, ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::TopologyMismatch { expected: 2, actual: 3 }), "{error}");
    let mut uneven = vec![vec![1.0f32, 2.0], vec![3.0]];
    let error = cards.all_reduce_f32(&mut uneven, ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::ShapeMismatch { sail: 1, expected: 2, actual: 1 }), "{error}");
    let error = cards.all_gather_f32(&uneven).unwrap_err();
    assert!(matches!(error, Error::ShapeMismatch { sail: 1, expected: 2, actual: 1 }), "{error}");
    let mut even = vec![vec![1.0f32], vec![3.0]];
    let error = cards.all_reduce_f32(&mut even, ReduceOp::BitwiseOr).unwrap_err();
    assert!(matches!(error, Error::UndefinedOperation { .. }), "{error}");
    let error = cards.reduce_scatter(&even, &mut [[0.0f32; 2]; 2], ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::ShapeMismatch { sail: 0, expected: 1, actual: 2 }), "{error}");
    assert_eq!(even, [[1.0], [3.0]]);
}

#[test]
fn collective_after_a_loss_goes_on_with_the_survivors() {
    let cards = Cards::ring(4);
    let found = topology(&cards);
    cards.ail(2, 6, Health::Gone);
    let before: Vec<Vec<f32>> = (0..4).map(|card| vec![card as f32; 100]).collect();
    let mut buffers = before.clone();
    let error = found.all_reduce_f32(&mut buffers, ReduceOp::Sum).unwrap_err();
    assert_eq!(error.to_string(), "card 2 is gone");
    assert_eq!(buffers, before);
    assert_eq!(found.survivors(&error), [0, 1, 3]);
    let rest = found.without(2);
    assert_eq!(rest.indices(), [0, 1, 3]);
    assert_eq!(pairs(&rest), [(0, 1), (0, 2), (1, 0), (2, 0)]);
    buffers.remove(2);
    rest.all_reduce_f32(&mut buffers, ReduceOp::Sum).unwrap();
    assert_eq!(buffers, vec![vec![4.0; 100]; 3]);
}

#[test]
fn cards_behind_sockets_are_found_work_and_are_named_when_they_fail() {
    let folder = tempfile::tempdir().unwrap();
    let cards = Cards::ring(4);
    cards.serve(folder.path());
    let end = |serial: u64, port| LinkEnd { serial: 0xca7d_0000 + serial, port };
    let probed = ProbedLink {
        from: end(0, 0),
        to: end(1, 1),
        bandwidth: BytesPerSecond(480_000_000),
        latency: "2.5 us".parse().unwrap(),
        fitted: 1_760_000_000,
    };
    save_links(folder.path(), &[probed]).unwrap();
    let found = Topology::enumerate_in(folder.path()).unwrap();
    assert_eq!((found.n_sails(), found.links().len()), (4, 8));
    assert_eq!(found.links()[0].bandwidth, Some(BytesPerSecond(480_000_000)));
    assert_eq!(found.links()[2].bandwidth, None);
    let mut buffers = vec![vec![2.0f32; 70_000]; 4];
    found.all_reduce_f32(&mut buffers, ReduceOp::Sum).unwrap();
    assert_eq!(buffers, vec![vec![8.0; 70_000]; 4]);

    cards.ail(1, 6, Health::Gone);
    let error = found.all_reduce_f32(&mut buffers, ReduceOp::Sum).unwrap_err();
    assert_eq!(error.to_string(), "card 1 is gone");
    assert_eq!(buffers, vec![vec![8.0; 70_000]; 4]);
    let alive: Vec<bool> = survey(folder.path()).iter().map(|card| card.card.is_ok()).collect();
    assert_eq!(alive, [true, false, true, true]);
    let error = Topology::enumerate_in(folder.path()).unwrap_err();
    let path = folder.path().join("spanker1");
    let text = format!("card 1 is gone: no answer to GET_VERSION at {}", path.display());
    assert_eq!(error.to_string(), text);

    let rest = Topology::open_cards(folder.path(), &[0, 2, 3]).unwrap();
    buffers.pop();
    rest.all_reduce_f32(&mut buffers, ReduceOp::Sum).unwrap();
    assert_eq!(buffers, vec![vec![24.0; 70_000]; 3]);
    cards.ail(3, 6, Health::Silent);
    let error = rest.all_reduce_f32(&mut buffers, ReduceOp::Sum).unwrap_err();
    assert!(error.to_string().starts_with("card 3 is stuck: no answer to "), "{error}");
    assert_eq!(rest.survivors(&error), [0]);
}

#[test]
fn survivors_of_a_broken_link_are_what_it_leaves_connected() {
    // A line of five.
    let links: Vec<_> =
        (0..4u32).map(|card| (card as usize, u32::from(card > 0), card as usize + 1, 0)).collect();
    let cards = Cards::new(5, &links);
    let found = topology(&cards);
    cards.cut(1, 2);
    let error = found.all_reduce_f32(&mut vec![vec![1.0]; 5], ReduceOp::Sum).unwrap_err();
    let Error::Device(device) = &error else { panic!("{error}") };
    assert_eq!(device.kind(), DeviceErrorKind::Unreachable);
    let found = topology(&cards);
    assert_eq!(found.survivors(&error), [2, 3, 4]);
    assert_eq!(found.survivors(&Error::NoSails), [0, 1, 2, 3, 4]);
}

#[test]
fn result_that_is_wrong_reaches_no_buffer_and_names_the_card() {
    for culprit in 0..4 {
        let cards = Cards::ring(4);
        let found = topology(&cards);
        cards.ail(culprit, 0, Health::Corrupt);
        let mut buffers = vec![vec![1.0f32; 100]; 4];
        let error = found.all_reduce_f32(&mut buffers, ReduceOp::Sum).unwrap_err();
        let Error::Device(device) = &error else { panic!("{error}") };
        assert_eq!((device.kind(), device.card()), (DeviceErrorKind::Wrong, Some(culprit)));
        assert_eq!(buffers, vec![vec![1.0; 100]; 4]);
    }
}

#[test]
fn card_that_passes_its_test_and_sends_what_is_wrong_is_named_by_its_chunk() {
    let cards = Cards::ring(3);
    let found = topology(&cards);
    cards.ail(1, 0, Health::Garbling);
    let mut outputs = vec![[0u32; 6]; 3];
    let inputs = [[1u32, 2], [3, 4], [5, 6]];
    let error = found.all_gather(&inputs, &mut outputs).unwrap_err();
    let Error::Device(device) = &error else { panic!("{error}") };
    assert_eq!((device.kind(), device.card()), (DeviceErrorKind::Wrong, Some(1)));
    assert_eq!(
        error.to_string(),
        "card 1 gives wrong answers: element 2 of card 0 is not what it must be"
    );
    assert_eq!(outputs, [[0; 6]; 3]);
}

#[test]
fn threads_that_share_a_topology_take_turns() {
    let found = topology(&Cards::ring(3));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut buffers = vec![vec![1i64; 50]; 3];
                found.all_reduce(&mut buffers, ReduceOp::Sum).unwrap();
                assert_eq!(buffers, vec![vec![3; 50]; 3]);
            });
        }
    });
}

#[test]
fn cluster_of_a_ring_of_cards_is_the_one_that_predictions_use() {
    let profile = Profile::builtin("rev-a").unwrap();
    for count in [1, 2, 3, 4, 8] {
        let found = topology(&Cards::ring(count)).cluster().unwrap();
        assert_eq!(found, Cluster::uniform(profile.clone(), count, Shape::Ring).unwrap());
    }
}

#[test]
fn cluster_of_cards_that_are_all_linked_is_a_mesh() {
    let links =
        [(0, 0, 1, 0), (0, 1, 2, 0), (0, 2, 3, 0), (1, 1, 2, 1), (1, 2, 3, 1), (2, 2, 3, 2)];
    let found = topology(&Cards::new(4, &links)).cluster().unwrap();
    let profile = Profile::builtin("rev-a").unwrap();
    assert_eq!(found, Cluster::uniform(profile, 4, Shape::Mesh).unwrap());
}

#[test]
fn cluster_of_what_is_left_of_a_ring_is_a_line_that_can_be_priced() {
    let rest = topology(&Cards::ring(4)).without(2);
    let line = rest.cluster().unwrap();
    assert_eq!((line.cards(), line.shape(), line.wires().len()), (3, Shape::Links, 4));
    let whole = Cluster::uniform(Profile::builtin("rev-a").unwrap(), 4, Shape::Ring).unwrap();
    assert_eq!(line.wires()[0].bandwidth, whole.wires()[0].bandwidth);
    assert_eq!(line.wires()[0].latency, whole.wires()[0].latency);
    // Card 0 has two neighbours and sends to both on the same lanes.
    assert_eq!(line.shared().len(), 1);
    assert!(line.wires().iter().all(|wire| wire.shared.is_some() == (wire.from == 0)));
    let (_, time) = cheapest(&prices(&line, Collective::AllReduce, &[0, 1, 2]), 1e6);
    assert!(time.0 > 0.0 && time.0.is_finite());
}

proptest! {
    #[test]
    fn all_reduce_on_cards_has_the_bits_of_the_serial_fold(
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
        topology(&Cards::ring(cards)).all_reduce_f32(&mut per_card, ReduceOp::Sum).unwrap();
        for buffer in &per_card {
            for (found, expected) in buffer.iter().zip(&expected) {
                let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
                prop_assert!(same, "{found} {expected}");
            }
        }
    }
}
