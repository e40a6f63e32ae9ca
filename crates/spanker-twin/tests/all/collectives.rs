// SPDX-License-Identifier: Apache-2.0
//! Collectives on emulated cards in virtual time, against the bits of the serial fold and against what the
//! planner predicts.

use spanker_collective::{Algorithm, Collective, DType, ReduceOp};
use spanker_fabric::device::{Deadline, DeviceGroup};
use spanker_plan::prices;
use spanker_runtime::SpankerControl;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Pace, World, specs};

fn cluster(profile: &str, cards: usize, shape: Shape) -> Cluster {
    Cluster::uniform(Profile::builtin(profile).unwrap(), cards, shape).unwrap()
}

/// Runs an all-reduce of sums and returns the microseconds of card time.
fn all_reduce(cluster: &Cluster, algorithm: Algorithm, elements: usize, seed: u64) -> f64 {
    let cards = cluster.cards();
    let world = World::new(specs(cluster, Pace::Card, seed).unwrap(), seed);
    let controls: Vec<SpankerControl> = (0..cards).map(|card| world.control(card)).collect();
    let group = DeviceGroup::new(&controls.iter().collect::<Vec<_>>()).unwrap();
    let (dtype, op) = (DType::F32, ReduceOp::Sum);
    let mut call = group.prepare(Collective::AllReduce, algorithm, elements, dtype, op, 1).unwrap();
    let value = |card: usize, i: usize| ((card * 31 + i * 7) % 64) as f32;
    for card in 0..cards {
        let bytes: Vec<u8> = (0..elements).flat_map(|i| value(card, i).to_le_bytes()).collect();
        call.write(card, &bytes).unwrap();
    }
    let timing = call.run(&Deadline::USUAL).unwrap();
    for card in 0..cards {
        let mut bytes = vec![0; elements * 4];
        call.read(card, &mut bytes).unwrap();
        for (i, found) in bytes.chunks_exact(4).enumerate() {
            let sum: f32 = (0..cards).map(|card| value(card, i)).sum();
            assert_eq!(
                f32::from_le_bytes(found.try_into().unwrap()),
                sum,
                "card {card}, element {i}"
            );
        }
    }
    timing.card_ps.unwrap() as f64 / 1e6
}

fn predicted(cluster: &Cluster, algorithm: Algorithm, bytes: usize) -> f64 {
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    let prices = prices(cluster, Collective::AllReduce, &cards);
    let price = prices.iter().find(|price| price.algorithm == algorithm).unwrap();
    price.at(bytes as f64).micros()
}

#[test]
fn ring_all_reduce_on_a_ring_takes_what_is_predicted() {
    let ring = cluster("rev-a", 4, Shape::Ring);
    for (bytes, most) in [(1 << 20, 0.05), (8 << 10, 0.10), (4 << 20, 0.05), (64 << 10, 0.05)] {
        let took = all_reduce(&ring, Algorithm::Ring, bytes / 4, 1);
        let expected = predicted(&ring, Algorithm::Ring, bytes);
        let error = took / expected - 1.0;
        println!("{bytes}: {took:.2} us, predicted {expected:.2}, {:+.2} %", error * 100.0);
        assert!(error.abs() < most, "{bytes}: {took} against {expected}");
    }
}

#[test]
fn card_time_is_the_same_on_every_run_whatever_the_real_order_of_frames() {
    for (shape, algorithm) in [(Shape::Ring, Algorithm::TwoShot), (Shape::Mesh, Algorithm::OneShot)]
    {
        let cluster = cluster("rev-a", 4, shape);
        let spec_seed = specs(&cluster, Pace::Card, 5).unwrap();
        assert_eq!(spec_seed.len(), 4);
        let first = all_reduce(&cluster, algorithm, 5000, 5);
        for _ in 0..3 {
            assert_eq!(all_reduce(&cluster, algorithm, 5000, 5), first);
        }
        println!(
            "{shape} {algorithm}: {first} us, predicted {}",
            predicted(&cluster, algorithm, 20000)
        );
    }
}

#[test]
fn every_algorithm_on_every_shape_gives_the_sums() {
    for shape in [Shape::Ring, Shape::Mesh, Shape::Switch] {
        for cards in [2, 3, 5] {
            let cluster = cluster("rev-a", cards, shape);
            for algorithm in Algorithm::ALL {
                let took = all_reduce(&cluster, algorithm, 3001, 3);
                let expected = predicted(&cluster, algorithm, 3001 * 4);
                println!("{shape} {cards} {algorithm}: {took:.1} us, predicted {expected:.1}");
                assert!(took > 0.0);
            }
        }
    }
}
