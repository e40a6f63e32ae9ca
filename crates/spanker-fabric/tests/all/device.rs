// SPDX-License-Identifier: Apache-2.0
//! Every collective on cards, against the in-process fabric; and what becomes of a job when cards fail.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use spanker_collective::{Algorithm, Collective, DType, ReduceOp, Schedule, schedule};
use spanker_fabric::device::{Deadline, DeviceError, DeviceErrorKind, DeviceGroup, examine, lower};
use spanker_fabric::{Workspace, execute, inproc};
use spanker_plan::Wiring;
use spanker_reduce::{Element, bf16, f16};
use spanker_runtime::{BufferId, Error, FaultKind, Landing, Place, SpankerControl, Work};
use spanker_test_support::cards::{Cards, Health, ring};

type Links = Vec<(usize, u32, usize, u32)>;

/// Links between pairs, each on the next free port of either card.
fn links(count: usize, pairs: impl IntoIterator<Item = (usize, usize)>) -> Links {
    let mut free = vec![0; count];
    let mut port = |card: usize| {
        free[card] += 1;
        free[card] - 1
    };
    pairs.into_iter().map(|(a, b)| (a, port(a), b, port(b))).collect()
}

fn line(count: usize) -> Links {
    links(count, (1..count).map(|card| (card - 1, card)))
}

fn mesh(count: usize) -> Links {
    links(count, (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))))
}

/// A connected graph: a tree from a seed, and some more links.
fn tangle(count: usize, mut seed: u64) -> Links {
    let mut dice = move |sides: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % sides
    };
    let mut pairs: Vec<(usize, usize)> = (1..count).map(|card| (card, dice(card))).collect();
    for _ in 0..dice(count + 1) {
        let (a, b) = (dice(count), dice(count));
        if a != b && !pairs.contains(&(a, b)) && !pairs.contains(&(b, a)) {
            pairs.push((a, b));
        }
    }
    links(count, pairs)
}

/// Numbers whose sums depend on their order.
trait Sample: Element {
    fn sample(x: u32) -> Self;
}

macro_rules! sample {
    ($($type:ty: |$x:ident| $value:expr;)*) => {
        $(impl Sample for $type {
            fn sample($x: u32) -> Self {
                $value
            }
        })*
    };
}

sample! {
    f32: |x| (x >> 8) as f32 / 8_388_608.0 - 1.0;
    f64: |x| f64::from(x) / 2_147_483_648.0 - 1.0;
    f16: |x| f16::from_f32((x >> 8) as f32 / 8_388_608.0 - 1.0);
    bf16: |x| bf16::from_f32((x >> 8) as f32 / 8_388_608.0 - 1.0);
    i32: |x| x as i32;
    i64: |x| i64::from(x) << 31;
    u8: |x| (x >> 13) as u8;
    u32: |x| x;
}

fn inputs<T: Sample>(schedule: &Schedule) -> Vec<Vec<T>> {
    let number = |rank: usize, i: usize| {
        let x = (rank * 1_000_003 + i) as u32;
        (x ^ (x >> 7)).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca6b)
    };
    let buffer = |rank| (0..schedule.data_len()).map(|i| T::sample(number(rank, i))).collect();
    (0..schedule.ranks()).map(buffer).collect()
}

/// What ranks that are threads come to.
fn in_process<T: Sample>(schedule: &Schedule, op: ReduceOp) -> Vec<Vec<T>> {
    std::thread::scope(|scope| {
        let ranks = inproc::group(schedule.ranks()).into_iter().zip(inputs::<T>(schedule));
        let ranks: Vec<_> = ranks
            .map(|(mut fabric, mut data)| {
                scope.spawn(move || {
                    let deadline = Instant::now() + Duration::from_secs(60);
                    let mut workspace = Workspace::new();
                    execute(&mut fabric, schedule, &mut workspace, &mut data, op, deadline)
                        .unwrap();
                    data
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn refs(controls: &[SpankerControl]) -> Vec<&SpankerControl> {
    controls.iter().collect()
}

/// Runs a collective on cards that are linked like this and compares every rank's result with the in-process
/// one.
fn check<T: Sample>(links: &Links, schedule: &Schedule, op: ReduceOp, strict: bool) {
    let cards = Cards::new(schedule.ranks(), links);
    cards.strict(strict);
    let controls = cards.open();
    let group = DeviceGroup::new(&refs(&controls)).unwrap();
    let (collective, algorithm) = (schedule.collective(), schedule.algorithm());
    let elements = schedule.elements();
    let mut call = group.prepare(collective, algorithm, elements, T::DTYPE, op, 1).unwrap();
    for (rank, data) in inputs::<T>(schedule).iter().enumerate() {
        call.write(rank, bytemuck::cast_slice(data)).unwrap();
    }
    let case = format!("{collective} {algorithm} {op} {} x {elements} on {links:?}", T::DTYPE);
    if let Err(error) = call.run(&Deadline::USUAL) {
        panic!("{case}: {error}, {:?}", error.waiting());
    }
    for (rank, expected) in in_process::<T>(schedule, op).iter().enumerate() {
        let mut found = vec![T::zeroed(); schedule.data_len()];
        call.read(rank, bytemuck::cast_slice_mut(&mut found)).unwrap();
        let range = call.result(rank);
        assert_eq!(found[range.clone()], expected[range], "{case}: rank {rank}");
    }
    drop(call);
    assert_eq!(cards.buffers(), 0, "{case}");
}

fn check_as(dtype: DType, links: &Links, schedule: &Schedule, op: ReduceOp, strict: bool) {
    match dtype {
        DType::F32 => check::<f32>(links, schedule, op, strict),
        DType::F64 => check::<f64>(links, schedule, op, strict),
        DType::F16 => check::<f16>(links, schedule, op, strict),
        DType::Bf16 => check::<bf16>(links, schedule, op, strict),
        DType::I32 => check::<i32>(links, schedule, op, strict),
        DType::I64 => check::<i64>(links, schedule, op, strict),
        DType::U8 => check::<u8>(links, schedule, op, strict),
        _ => check::<u32>(links, schedule, op, strict),
    }
}

#[test]
fn every_collective_by_every_algorithm_on_every_wiring_gives_the_in_process_bits() {
    let mut case = 0;
    for ranks in 1..=8 {
        let wirings = [ring(ranks), line(ranks), mesh(ranks), tangle(ranks, ranks as u64)];
        for links in &wirings {
            for collective in Collective::ALL {
                let collective = collective.with_root(ranks / 2);
                for algorithm in Algorithm::ALL {
                    for elements in [0, 1, 7, 641] {
                        // Types and operations take turns.
                        case += 1;
                        let dtype = DType::ALL[case % DType::ALL.len()];
                        let ops = ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(dtype));
                        let ops: Vec<ReduceOp> = ops.collect();
                        let op = ops[case / DType::ALL.len() % ops.len()];
                        let schedule = schedule(collective, algorithm, ranks, elements).unwrap();
                        check_as(dtype, links, &schedule, op, case % 2 == 0);
                    }
                }
            }
        }
    }
}

#[test]
fn interpreter_of_programs_that_wait_for_each_other_does_not_complete_them() {
    let place = Place { buffer: BufferId(1), offset: 0 };
    let send = Work::Send { from: place, length: 8, port: 0, tag: 0 };
    let receive =
        Work::Receive { into: place, length: 8, port: 0, tag: 0, landing: Landing::Store };
    let fence = Work::Fence { not_before_ps: 0 };
    let program = [send.into(), fence.into(), receive.into()];
    let controls = Cards::ring(2).open();
    let tickets: Vec<_> = controls
        .iter()
        .map(|card| {
            card.allocate(8).unwrap();
            card.submit(1, &program).unwrap()
        })
        .collect();
    let error = controls[0].wait(tickets[0], Duration::ZERO).unwrap_err();
    assert!(matches!(error, Error::Incomplete { .. }), "{error}");
}

#[test]
fn long_messages_are_passed_on_in_segments_that_arrive_in_order() {
    for collective in [Collective::AllReduce, Collective::AllToAll, Collective::Reduce { root: 1 }]
    {
        for algorithm in Algorithm::ALL {
            let schedule = schedule(collective, algorithm, 5, 60_001).unwrap();
            check::<f32>(&line(5), &schedule, ReduceOp::Sum, true);
            check::<f16>(&ring(5), &schedule, ReduceOp::Avg, false);
        }
    }
}

#[test]
fn relay_memory_is_the_most_of_any_level_and_none_between_neighbours() {
    let two_shot = schedule(Collective::AllReduce, Algorithm::TwoShot, 4, 64_000).unwrap();
    let wiring = Wiring::from_links(4, &ring(4)).unwrap();
    let lowered = lower(&two_shot, &wiring, DType::F32, ReduceOp::Sum).unwrap();
    // Each card passes on one message of a quarter of the buffer at a time.
    assert_eq!((0..4).map(|rank| lowered.relay_bytes(rank)).collect::<Vec<_>>(), [64_000; 4]);
    let by_ring = schedule(Collective::AllReduce, Algorithm::Ring, 4, 64_000).unwrap();
    let lowered = lower(&by_ring, &wiring, DType::F32, ReduceOp::Sum).unwrap();
    assert!((0..4).all(|rank| lowered.relay_bytes(rank) == 0));
}

#[test]
fn schedule_for_another_number_of_cards_is_refused() {
    let three = schedule(Collective::AllReduce, Algorithm::Ring, 3, 10).unwrap();
    let wiring = Wiring::from_links(2, &ring(2)).unwrap();
    let error = lower(&three, &wiring, DType::F32, ReduceOp::Sum).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Refused);
    assert_eq!(error.to_string(), "the schedule is for 3 cards, the group has 2");
    let two = schedule(Collective::AllReduce, Algorithm::Ring, 2, 10).unwrap();
    let error = lower(&two, &wiring, DType::F32, ReduceOp::BitwiseOr).unwrap_err();
    assert_eq!(error.to_string(), "operation or is not defined for f32");
}

/// A ring all-reduce of ones on some cards, run once.
fn ran(cards: &Cards, repeats: usize, deadline: &Deadline) -> Result<Vec<f32>, DeviceError> {
    let controls = cards.open();
    let group = DeviceGroup::new(&refs(&controls))?;
    let (collective, algorithm) = (Collective::AllReduce, Algorithm::Ring);
    let mut call =
        group.prepare(collective, algorithm, 1000, DType::F32, ReduceOp::Max, repeats)?;
    for rank in 0..group.ranks() {
        call.write(rank, bytemuck::cast_slice(&vec![rank as f32; 1000]))?;
    }
    let timing = call.run(deadline)?;
    assert!(timing.card_ps.is_some_and(|ps| ps > 0));
    let mut data = vec![0.0; 1000];
    call.read(0, bytemuck::cast_slice_mut(&mut data))?;
    Ok(data)
}

#[test]
fn repeats_in_many_submissions_wait_for_room_in_the_queue() {
    let cards = Cards::ring(4);
    assert_eq!(ran(&cards, 3, &Deadline::USUAL).unwrap(), [3.0; 1000]);
    cards.capacity(20_000);
    assert_eq!(ran(&cards, 2000, &Deadline::USUAL).unwrap(), [3.0; 1000]);
    assert_eq!(cards.buffers(), 0);
}

/// The error of a run in which a card comes down with something in the middle.
fn failed(cards: &Cards) -> DeviceError {
    let error = ran(cards, 1, &Deadline::USUAL).unwrap_err();
    assert!(!error.card_buffers_trusted());
    error
}

#[test]
fn card_that_dies_is_named_and_all_others_fail_with_the_same_fault() {
    for after in [0, 1, 5] {
        let cards = Cards::ring(4);
        cards.open();
        cards.ail(2, after + 1, Health::Gone);
        let error = failed(&cards);
        assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Lost, Some(2)));
        assert_eq!(error.to_string(), "card 2 is gone");
        assert!(error.waiting().contains(&(2, "gone".to_owned())), "{:?}", error.waiting());
        let faults = cards.faults();
        assert!([0, 1, 3].iter().all(|&card| faults[card] == faults[0]), "{faults:?}");
        assert_eq!(faults[0].unwrap().kind, FaultKind::CardLost);
    }
}

#[test]
fn card_that_does_not_answer_is_stuck_and_named() {
    let cards = Cards::ring(4);
    cards.ail(1, 5, Health::Silent);
    let error = failed(&cards);
    assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Stuck, Some(1)));
    assert!(error.to_string().starts_with("card 1 is stuck: no answer to"), "{error}");
    let faults = cards.faults();
    assert!([0, 2, 3].iter().all(|&card| faults[card].unwrap().kind == FaultKind::Stuck));
}

#[test]
fn card_that_is_lost_between_runs_is_found_before_any_card_has_work() {
    let cases = [(Health::Silent, DeviceErrorKind::Stuck), (Health::Gone, DeviceErrorKind::Lost)];
    for (health, kind) in cases {
        let cards = Cards::ring(3);
        let controls = cards.open();
        let group = DeviceGroup::new(&refs(&controls)).unwrap();
        let (collective, algorithm) = (Collective::AllReduce, Algorithm::Ring);
        let mut call =
            group.prepare(collective, algorithm, 1000, DType::F32, ReduceOp::Sum, 1).unwrap();
        cards.ail(2, 0, health);
        let error = call.run(&Deadline::USUAL).unwrap_err();
        assert_eq!((error.kind(), error.card()), (kind, Some(2)));
        assert!(error.card_buffers_trusted());
        assert_eq!(cards.faults(), [None; 3]);
        let error = DeviceGroup::new(&refs(&controls)).unwrap_err();
        assert_eq!((error.kind(), error.card()), (kind, Some(2)));
    }
}

#[test]
fn card_that_answers_and_does_nothing_is_found_by_who_waits_for_whom() {
    for culprit in 0..4 {
        let cards = Cards::ring(4);
        cards.ail(culprit, 5, Health::Frozen);
        let error = failed(&cards);
        assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Stuck, Some(culprit)));
        let next = (culprit + 1) % 4;
        let expected = format!("receiving from card {culprit}");
        assert!(error.waiting().contains(&(next, expected)), "{:?}", error.waiting());
        assert!(cards.faults().iter().all(Option::is_some));
    }
}

#[test]
fn card_that_answers_nonsense_is_wrong_and_one_that_is_gone_comes_first() {
    let cards = Cards::ring(4);
    cards.ail(1, 5, Health::Nonsense);
    let error = failed(&cards);
    assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Wrong, Some(1)));
    let cards = Cards::ring(4);
    cards.ail(0, 6, Health::Silent);
    cards.ail(1, 5, Health::Nonsense);
    cards.ail(3, 5, Health::Gone);
    let error = failed(&cards);
    assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Lost, Some(3)));
}

#[test]
fn link_that_goes_down_is_named_by_both_cards() {
    let cards = Cards::ring(4);
    let controls = cards.open();
    let group = DeviceGroup::new(&refs(&controls)).unwrap();
    let (collective, algorithm) = (Collective::AllReduce, Algorithm::Ring);
    let mut call =
        group.prepare(collective, algorithm, 1000, DType::F32, ReduceOp::Sum, 1).unwrap();
    cards.cut(1, 2);
    let error = call.run(&Deadline::USUAL).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::LinkDown);
    assert_eq!((error.card(), error.peer()), (Some(1), Some(2)));
    assert_eq!(error.to_string(), "the link between card 1 and card 2 is down");
    drop(call);
    assert_eq!(cards.buffers(), 0);
    // The same cards find another way round.
    assert_eq!(ran(&cards, 1, &Deadline::USUAL).unwrap(), [3.0; 1000]);
    // Another cut leaves them apart.
    cards.cut(3, 0);
    let error = ran(&cards, 1, &Deadline::USUAL).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Unreachable);
    assert!(error.card_buffers_trusted());
    assert!(error.to_string().contains("card 3 port 0 to card 0 is down"), "{error}");
}

#[test]
fn card_that_takes_longer_than_it_may_is_named() {
    let cards = Cards::ring(4);
    cards.cost(2, 50_000_000);
    let deadline = Deadline { slow_after: Some(Duration::from_micros(100)), ..Deadline::USUAL };
    let error = ran(&cards, 1, &deadline).unwrap_err();
    assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Slow, Some(2)));
    assert!(error.to_string().starts_with("card 2 is too slow: "), "{error}");
}

#[test]
fn job_that_takes_too_long_in_total_is_given_up() {
    let cards = Cards::ring(4);
    cards.ail(3, 5, Health::Frozen);
    let deadline = Deadline { total: Duration::from_millis(100), ..Deadline::USUAL };
    let error = ran(&cards, 1, &deadline).unwrap_err();
    assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Slow, Some(3)));
    assert_eq!(error.to_string(), "card 3 is too slow: not done after 100 ms");
    assert!(cards.faults().iter().all(|fault| fault.unwrap().kind == FaultKind::Slow));
}

#[test]
fn card_at_work_for_another_program_is_named_and_the_others_give_up() {
    let cards = Cards::ring(3);
    cards.ail(1, 0, Health::Busy);
    let error = ran(&cards, 1, &Deadline::USUAL).unwrap_err();
    assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Busy, Some(1)));
    assert_eq!(error.to_string(), "card 1 is at work for another program");
    assert_eq!(cards.faults()[0].unwrap().kind, FaultKind::Aborted);
    assert_eq!(cards.buffers(), 0);
}

#[test]
fn card_without_the_memory_is_named_and_what_was_allocated_is_freed() {
    let cards = Cards::ring(3);
    let controls = cards.open();
    let group = DeviceGroup::new(&refs(&controls)).unwrap();
    let (collective, algorithm) = (Collective::AllReduce, Algorithm::OneShot);
    let error = group
        .prepare(collective, algorithm, 1 << 29, DType::F64, ReduceOp::Sum, 1)
        .map(drop)
        .unwrap_err();
    assert_eq!((error.kind(), error.card()), (DeviceErrorKind::Refused, Some(0)));
    assert!(error.to_string().starts_with("card 0: ALLOCATE refused"), "{error}");
    assert!(error.card_buffers_trusted());
    assert_eq!(cards.buffers(), 0);
}

#[test]
fn card_is_examined_alone() {
    let cards = Cards::ring(2);
    cards.ail(1, 0, Health::Corrupt);
    let controls = cards.open();
    assert!(examine(&controls[0]).unwrap());
    assert!(!examine(&controls[1]).unwrap());
    assert_eq!(cards.buffers(), 0);
}

#[test]
fn same_card_twice_in_a_group_is_refused() {
    let controls = Cards::ring(2).open();
    let error = DeviceGroup::new(&[&controls[0], &controls[0]]).unwrap_err();
    assert_eq!(error.to_string(), "card 0: it is twice in the group");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn random_collectives_on_random_wirings_give_the_in_process_bits(
        ranks in 1usize..=8,
        seed in any::<u64>(),
        collective in prop::sample::select(Collective::ALL.to_vec()),
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
        dtype in prop::sample::select(DType::ALL.to_vec()),
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        elements in 0usize..20_000,
        root in 0usize..8,
        strict in any::<bool>(),
    ) {
        let op = if op.is_defined_for(dtype) { op } else { ReduceOp::Sum };
        let collective = collective.with_root(root % ranks);
        let schedule = schedule(collective, algorithm, ranks, elements).unwrap();
        check_as(dtype, &tangle(ranks, seed), &schedule, op, strict);
    }
}
