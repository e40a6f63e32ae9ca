// SPDX-License-Identifier: Apache-2.0
//! Clusters: what the shapes and files give, and what is refused.

use proptest::prelude::*;
use spanker_topology::{Cluster, Profile, Shape, TopologyError};

fn card(name: &str) -> Profile {
    Profile::builtin(name).unwrap()
}

fn from_file(text: &str) -> Result<Cluster, TopologyError> {
    Cluster::from_toml(text, None, Profile::builtin)
}

#[test]
fn regular_shapes_join_every_pair_of_cards() {
    let shapes = [(Shape::Ring, 5), (Shape::Mesh, 4), (Shape::Star, 5), (Shape::Switch, 5)];
    for (shape, cards) in shapes {
        let cluster = Cluster::uniform(card("rev-a"), cards, shape).unwrap();
        for from in 0..cards {
            for to in 0..cards {
                assert!(cluster.reaches(from, to), "{shape} {from}-{to}");
            }
        }
    }
}

#[test]
fn mesh_divides_the_lanes_and_refuses_more_peers_than_lanes() {
    let four = Cluster::uniform(card("rev-a"), 4, Shape::Mesh).unwrap();
    let two = Cluster::uniform(card("rev-a"), 2, Shape::Mesh).unwrap();
    assert_eq!(four.wires()[0].bandwidth.0 / 1_000, two.wires()[0].bandwidth.0 / 4_000);
    let error = Cluster::uniform(card("rev-a"), 8, Shape::Mesh).unwrap_err().to_string();
    assert!(error.contains("each of 7 others") && error.contains("has 4"), "{error}");
}

#[test]
fn cards_without_links_talk_through_host_or_switch_only() {
    let error = Cluster::uniform(card("rev-a-gbe-only"), 3, Shape::Ring).unwrap_err();
    assert!(error.to_string().contains("no link to other cards"), "{error}");
    let star = Cluster::uniform(card("rev-a-gbe-only"), 3, Shape::Star).unwrap();
    assert_eq!(star.latency(0, 2).to_string(), "120 us");
    // The host is shared: two messages at once take twice as long as one.
    let one = star.round(&[(0, 1, 1e6)]).0 - star.latency(0, 1).0;
    let two = star.round(&[(0, 1, 1e6), (1, 2, 1e6)]).0 - star.latency(0, 1).0;
    assert!((two / one - 2.0).abs() < 1e-9);
}

#[test]
fn link_lists_are_read_with_what_they_share() {
    let cluster = from_file(
        "cards = [{ profile = 'rev-a', count = 2 }, { profile = 'rev-a', memory_bandwidth = '1 GB/s' }]
         shared = [{ name = 'backplane', bandwidth = '100 MB/s' }]
         [[links]]
         between = [0, 1]
         shared = 'backplane'
         [[links]]
         between = [1, 2]
         bandwidth = '200 MB/s'
         latency = '5 us'",
    )
    .unwrap();
    assert_eq!(cluster.shape(), Shape::Links);
    assert_eq!(cluster.profile(2).memory.bandwidth.value.to_string(), "1 GB/s");
    assert_eq!((cluster.kind(0), cluster.kind(1), cluster.kind(2)), (0, 0, 1));
    assert_eq!(cluster.latency(0, 2).to_string(), "7 us");
    // 0 to 1 and back cross the same backplane.
    let both = cluster.round(&[(0, 1, 1e6), (1, 0, 1e6)]);
    assert_eq!((both.millis() * 10.0).round(), 200.0);
}

#[test]
fn files_that_make_no_sense_are_refused_with_the_value() {
    let cases = [
        ("cards = []", "0 cards"),
        ("cards = [{ profile = 'rev-b' }]", "rev-b"),
        ("cards = [{ profile = 'rev-a', count = 100000 }]", "100000"),
        ("cards = [{ profile = 'rev-a', count = 18446744073709551615 }]", "18446744073709551615"),
        ("cards = [{ profile = 'rev-a', speed = 2 }]", "speed"),
        ("cards = [{ profile = 'rev-a', memory_bandwidth = '-1 GB/s' }]", "-1 GB/s"),
        ("cards = [{ profile = 'rev-a', memory_capacity = '1 MB' }]", "all reserved"),
        ("cards = [{ profile = 'rev-a', count = 2 }]\nlinks = [{ between = [0, 7] }]", "no card 7"),
        ("cards = [{ profile = 'rev-a', count = 3 }]\nlinks = [{ between = [0, 1] }]", "apart"),
        (
            "cards = [{ profile = 'rev-a', count = 2 }]\nlinks = [{ between = [1, 1] }]",
            "joins nothing",
        ),
        (
            "cards = [{ profile = 'rev-a-gbe-only', count = 2 }]\nlinks = [{ between = [0, 1] }]",
            "no bandwidth",
        ),
        (
            "cards = [{ profile = 'rev-a', count = 2 }]\nlinks = [{ between = [0, 1], shared = 'x' }]",
            "no shared 'x'",
        ),
        (
            "topology = 'ring'\ncards = [{ profile = 'rev-a', count = 2 }]\nlinks = [{ between = [0, 1] }]",
            "exclude each other",
        ),
    ];
    for (text, named) in cases {
        let error = from_file(text).unwrap_err().to_string();
        assert!(error.contains(named), "{text}: {error}");
    }
}

#[test]
fn nothing_is_routed_through_what_is_gone() {
    let ring = Cluster::uniform(card("rev-a"), 4, Shape::Ring).unwrap();
    let chain = ring.without(&[1], &[]);
    assert!(!chain.reaches(0, 1));
    assert_eq!(chain.latency(0, 2).to_string(), "4 us"); // by way of card 3
    let cut = ring.without(&[], &[(0, 1)]);
    assert_eq!(cut.latency(0, 1).to_string(), "6 us");
    let parted = ring.without(&[1, 3], &[]);
    assert!(!parted.reaches(0, 2));
}

proptest! {
    #[test]
    fn routes_lead_from_end_to_end_over_wires_that_meet(
        cards in 1usize..12,
        shape in prop::sample::select(vec![Shape::Ring, Shape::Star, Shape::Switch]),
        dead in prop::collection::vec(0usize..12, 0..3),
    ) {
        let cluster = Cluster::uniform(card("rev-a"), cards, shape).unwrap();
        let cluster = cluster.without(&dead, &[]);
        for from in 0..cards {
            for to in 0..cards {
                let route = cluster.route(from, to);
                let mut node = from;
                for &wire in route {
                    let wire = &cluster.wires()[wire as usize];
                    prop_assert_eq!(wire.from, node);
                    prop_assert!(!dead.contains(&wire.from) && !dead.contains(&wire.to));
                    node = wire.to;
                }
                prop_assert!(route.is_empty() || node == to);
            }
        }
    }
}
