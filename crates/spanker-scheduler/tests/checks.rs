// SPDX-License-Identifier: Apache-2.0
//! Collectives on cards that give wrong results: the sample finds them, the right card is named, nothing reaches
//! the caller; and the schedule is the cheapest that gives the promised bits.

use spanker_plan::{Price, cheapest, price, prices};
use spanker_scheduler::{
    Algorithm, Collective, DType, DeviceErrorKind, Element, Error, MockSail, ReduceOp, ResultCheck,
    SpankerControl, Topology, bf16, schedule, verify,
};
use spanker_test_support::cards::{Cards, Health};

fn topology(cards: &Cards, check: ResultCheck) -> Topology<SpankerControl> {
    Topology::of_cards(cards.open()).unwrap().with_result_check(check)
}

/// Numbers that are not round, so that the order of a sum shows.
fn inputs(cards: usize, elements: usize) -> Vec<Vec<f32>> {
    let value = |card: usize, i: usize| ((card * 7919 + i * 31) % 4093) as f32 / 7.0 - 200.0;
    (0..cards).map(|card| (0..elements).map(|i| value(card, i)).collect()).collect()
}

/// The card that an all-reduce names, or none if it succeeds. Buffers must be as they were.
fn named_for<T: Element>(found: &Topology<SpankerControl>, given: &[Vec<T>]) -> Option<usize> {
    let mut buffers = given.to_vec();
    match found.all_reduce(&mut buffers, ReduceOp::Sum) {
        Ok(()) => None,
        Err(Error::Device(error)) => {
            assert_eq!(error.kind(), DeviceErrorKind::Wrong, "{error}");
            assert!(buffers == given);
            error.card()
        }
        Err(error) => panic!("{error}"),
    }
}

fn named(found: &Topology<SpankerControl>, elements: usize) -> Option<usize> {
    named_for(found, &inputs(found.n_sails(), elements))
}

/// A seed with a number of cards and a culprit among them.
fn cases() -> impl Iterator<Item = (u64, usize, usize)> {
    (0..40).map(|seed| (seed, 2 + seed as usize % 4, (seed as usize / 4) % (2 + seed as usize % 4)))
}

#[test]
fn card_that_computes_garbage_or_drops_a_term_is_found_and_named_whatever_the_seed() {
    for (seed, count, culprit) in cases() {
        for health in [Health::Corrupt, Health::Dropping] {
            for elements in [12, 5_000, 20_000] {
                // Two cards fold what arrives where it arrives, and compute nothing else.
                let cards = Cards::ring(count.max(3));
                let found = topology(&cards, ResultCheck::SeededSample(seed));
                cards.ail(culprit, 0, health);
                let card = named(&found, elements);
                assert_eq!(
                    card,
                    Some(culprit),
                    "seed {seed}, {count} cards, {health:?}, {elements}"
                );
            }
        }
    }
}

#[test]
fn card_that_sends_garbage_or_swaps_is_found_and_named_whatever_the_seed() {
    for (seed, count, culprit) in cases() {
        for health in [Health::Garbling, Health::Swapping] {
            for elements in [12, 5_000, 20_000] {
                let cards = Cards::ring(count);
                let found = topology(&cards, ResultCheck::SeededSample(seed));
                cards.ail(culprit, 0, health);
                let case = format!("seed {seed}, {count} cards, {health:?}, {elements}");
                // Every bit of a whole number shows in a sum.
                let whole = |card: usize| (0..elements).map(move |i| (card * 977 + i * i) as i64);
                let given: Vec<Vec<i64>> = (0..count).map(|card| whole(card).collect()).collect();
                assert_eq!(named_for(&found, &given), Some(culprit), "{case}");
                // The last bit of a float may not.
                if health == Health::Swapping {
                    assert_eq!(named(&found, elements), Some(culprit), "{case}, floats");
                }
            }
        }
    }
}

#[test]
fn card_that_sends_garbage_in_a_gather_is_found_and_named() {
    for (count, culprit) in [2, 3, 4, 5, 6].into_iter().flat_map(|n| (0..n).map(move |c| (n, c))) {
        for health in [Health::Garbling, Health::Swapping] {
            for elements in [2, 10_000] {
                let cards = Cards::ring(count);
                let found = topology(&cards, ResultCheck::Sample);
                cards.ail(culprit, 0, health);
                let given = inputs(count, elements);
                let mut outputs = vec![vec![-1.0; count * elements]; count];
                let error = found.all_gather(&given, &mut outputs).unwrap_err();
                let Error::Device(device) = &error else { panic!("{error}") };
                assert_eq!(device.card(), Some(culprit), "{count} cards, {health:?}: {error}");
                assert!(outputs.iter().flatten().all(|&x| x == -1.0));
            }
        }
    }
}

#[test]
fn other_collectives_find_a_card_that_sends_garbage_and_leave_outputs_alone() {
    let cards = Cards::ring(4);
    let found = topology(&cards, ResultCheck::Sample);
    cards.ail(0, 0, Health::Garbling);
    let given = inputs(4, 16_000);
    let mut chunks = vec![vec![-1.0f32; 4_000]; 4];
    let mut wholes = vec![vec![-1.0f32; 16_000]; 4];
    let outcomes = [
        found.reduce_scatter(&given, &mut chunks, ReduceOp::Sum),
        found.all_to_all(&given, &mut wholes),
        found.broadcast(&given[0], &mut wholes),
    ];
    for outcome in outcomes {
        let Err(Error::Device(error)) = outcome else { panic!("{outcome:?}") };
        assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Wrong, Some(0)), "{error}");
    }
    assert!(chunks.iter().chain(&wholes).flatten().all(|&x| x == -1.0));
}

/// A chunk of 10,000 elements has strata of 14.
const ELEMENTS: usize = 40_000;

#[test]
fn block_of_two_strata_is_found_in_every_sample_and_its_card_is_named() {
    for seed in 0..20 {
        let cards = Cards::ring(4);
        let found = topology(&cards, ResultCheck::SeededSample(seed));
        // Beyond what the test of a single card covers.
        cards.ail(2, 0, Health::Blemished(4 * 5_003, 4 * (5_003 + 27)));
        assert_eq!(named(&found, ELEMENTS), Some(2), "seed {seed}");
    }
}

#[test]
fn short_block_is_found_in_proportion_and_always_by_the_whole_check() {
    // 4 of 14 elements of a stratum, so in 29 of 100 samples; the block may lie across two strata.
    let cards = Cards::ring(4);
    cards.ail(2, 0, Health::Blemished(4 * 5_003, 4 * (5_003 + 4)));
    let by_seed = |seed| named(&topology(&cards, ResultCheck::SeededSample(seed)), ELEMENTS);
    let outcomes: Vec<Option<usize>> = (0..100).map(by_seed).collect();
    let hits = outcomes.iter().flatten().count();
    assert!((10..=50).contains(&hits), "{hits}");
    assert!(outcomes.iter().flatten().all(|&card| card == 2));
    // Calls draw anew, so the same cards are found out sooner or later.
    let found = topology(&cards, ResultCheck::SeededSample(0));
    assert!((0..100).any(|_| named(&found, ELEMENTS) == Some(2)));
    assert_eq!(named(&topology(&cards, ResultCheck::Whole), ELEMENTS), Some(2));
}

#[test]
fn whole_check_passes_what_is_right() {
    let found = topology(&Cards::ring(3), ResultCheck::Whole);
    let mut buffers = inputs(3, 10_000);
    let mut expected = buffers.clone();
    found.all_reduce(&mut buffers, ReduceOp::Avg).unwrap();
    Topology::<MockSail>::with_mock(3).all_reduce(&mut expected, ReduceOp::Avg).unwrap();
    assert_eq!(buffers, expected);
}

/// The least time of some prices, folds included.
fn best(elements: usize, all: &[Price]) -> (Algorithm, f64) {
    let time = |price: &Price| (price.algorithm, price.at(4.0 * elements as f64).0);
    all.iter().map(time).min_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
}

#[test]
fn all_reduce_of_floats_takes_the_cheapest_schedule_with_the_bits_of_the_serial_fold() {
    let mut taken = std::collections::BTreeSet::new();
    for count in [2, 3, 4, 6] {
        let found = topology(&Cards::ring(count), ResultCheck::Sample);
        let cluster = found.cluster().unwrap();
        let ranks: Vec<usize> = (0..count).collect();
        for elements in [16, 1 << 10, 1 << 14, 1 << 20] {
            let collective = Collective::AllReduce;
            let algorithm = found.algorithm(collective, elements, DType::F32).unwrap();
            let proof = verify(&schedule(collective, algorithm, count, 100).unwrap()).unwrap();
            assert!(proof.serial, "{count} {elements} {algorithm}");
            let direct = [Algorithm::OneShot, Algorithm::TwoShot];
            let direct = direct.map(|algorithm| price(&cluster, collective, algorithm, &ranks));
            let chosen = [price(&cluster, collective, algorithm, &ranks)];
            let least = best(elements, &direct).1;
            let time = best(elements, &chosen).1;
            assert!(time <= least, "{count} {elements} {algorithm}: {time} {least}");
            taken.insert(algorithm.name());
        }
        // Latency is everything: one round beats two.
        if count == 2 {
            let algorithm = found.algorithm(Collective::AllReduce, 16, DType::F32).unwrap();
            assert_ne!(algorithm, Algorithm::TwoShot);
        }
    }
    assert!(taken.len() > 1 && taken.contains("two-shot"), "{taken:?}");
}

#[test]
fn all_gather_and_sums_of_integers_take_the_cheapest_of_all_schedules() {
    let found = topology(&Cards::ring(4), ResultCheck::Sample);
    let (cluster, ranks) = (found.cluster().unwrap(), [0, 1, 2, 3]);
    for elements in [16, 1 << 14, 1 << 20] {
        for (collective, dtype) in
            [(Collective::AllGather, DType::F32), (Collective::AllReduce, DType::I32)]
        {
            let all = prices(&cluster, collective, &ranks);
            let (algorithm, _) = best(elements, &all);
            assert_eq!(found.algorithm(collective, elements, dtype).unwrap(), algorithm);
        }
    }
    let bytes = 4.0 * f64::from(1 << 20);
    assert_eq!(
        cheapest(&prices(&cluster, Collective::AllReduce, &ranks), bytes).0,
        Algorithm::Ring
    );
    let taken = found.algorithm(Collective::AllReduce, 1 << 20, DType::I32).unwrap();
    assert_eq!(taken, Algorithm::Ring);
}

#[test]
fn schedule_follows_the_links_that_are_up() {
    let cards = Cards::ring(4);
    let found = topology(&cards, ResultCheck::Sample);
    assert_eq!(named(&found, 3_000), None);
    cards.cut(1, 2);
    // The topology still lists the link; the collective is priced and run on what is there.
    assert_eq!(named(&found, 3_000), None);
    let line = Topology::of_cards(cards.open()).unwrap();
    for elements in [16, 1 << 12, 1 << 20] {
        let wanted = |cards: &Topology<SpankerControl>| {
            cards.algorithm(Collective::AllReduce, elements, DType::F32).unwrap()
        };
        assert_eq!(wanted(&found), wanted(&line));
    }
}

#[test]
fn schedule_that_needs_more_memory_than_a_card_has_gives_way_to_the_next() {
    let cards = Cards::ring(3);
    let found = topology(&cards, ResultCheck::Sample);
    let cheap = found.algorithm(Collective::AllReduce, 100, DType::F32).unwrap();
    assert_eq!(cheap, Algorithm::OneShot);
    // The data, and less than the two slots of a one-shot, which have 800 bytes.
    cards.memory(500);
    let mut buffers = inputs(3, 100);
    let mut expected = buffers.clone();
    found.all_reduce(&mut buffers, ReduceOp::Sum).unwrap();
    Topology::<MockSail>::with_mock(3).all_reduce(&mut expected, ReduceOp::Sum).unwrap();
    assert_eq!(buffers, expected);
    cards.memory(128);
    let error = found.all_reduce(&mut buffers, ReduceOp::Sum).unwrap_err();
    assert!(error.to_string().contains("ALLOCATE refused"), "{error}");
    assert_eq!(buffers, expected);
}

fn agree<T: Element>(count: usize, elements: usize, of: impl Fn(usize) -> T) {
    let found = topology(&Cards::ring(count), ResultCheck::Whole);
    let mut buffers: Vec<Vec<T>> =
        (0..count).map(|card| (0..elements).map(|i| of(card * 31 + i * 7)).collect()).collect();
    let mut expected = buffers.clone();
    for op in ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(T::DTYPE)) {
        // A 16-bit average over host buffers rounds once, on cards twice.
        if op == ReduceOp::Avg && T::DTYPE == DType::Bf16 {
            continue;
        }
        found.all_reduce(&mut buffers, op).unwrap();
        Topology::<MockSail>::with_mock(count).all_reduce(&mut expected, op).unwrap();
        let bits = |all: &[Vec<T>]| bytemuck::cast_slice::<T, u8>(&all.concat()).to_vec();
        assert_eq!(bits(&buffers), bits(&expected), "{count} {elements} {op}");
    }
}

#[test]
fn every_type_and_operation_has_the_bits_of_the_serial_fold() {
    for (count, elements) in [(2, 5), (2, 3_000), (3, 1), (4, 2_000), (5, 777)] {
        agree(count, elements, |i| i as i32 - 50);
        agree(count, elements, |i| (i % 251) as u8);
        agree(count, elements, |i| i as f64 / 7.0);
        agree(count, elements, |i| bf16::from_f32((i % 97) as f32 / 9.0));
    }
}
