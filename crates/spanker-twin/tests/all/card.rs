// SPDX-License-Identifier: Apache-2.0
//! Emulated cards in virtual time: what work does to memory, what it costs on the card's clock, and what a
//! hostile program cannot do.

use std::time::Duration;

use nix::errno::Errno;
use spanker_runtime::{
    BufferId, CardTime, Descriptor, Error, FaultKind, Fold, Landing, PortState, SpankerControl,
    Work,
};
use spanker_twin::Disturbance;

use crate::support::{SECOND, at, ring};

fn refused<T: std::fmt::Debug>(result: spanker_runtime::Result<T>) -> Errno {
    match result {
        Err(Error::Ioctl { source, .. }) => source,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

fn run(card: &SpankerControl, work: &[Descriptor]) -> spanker_runtime::Result<CardTime> {
    let ticket = card.submit(1, work)?;
    card.wait(ticket, SECOND)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

const SUM: Fold = Fold { dtype: 0, op: 0 };

#[test]
fn ports_of_a_ring_know_their_peers() {
    let world = ring(4);
    let cards: Vec<_> = (0..4).map(|card| world.control(card)).collect();
    let serials: Vec<u64> = cards.iter().map(|card| card.info().unwrap().serial).collect();
    for (index, card) in cards.iter().enumerate() {
        for port in 0..2 {
            let info = card.port(port).unwrap();
            assert_eq!(info.state, PortState::Up);
            let peer = info.peer.unwrap();
            let other = serials.iter().position(|&serial| serial == peer.serial).unwrap();
            let back = cards[other].port(peer.port).unwrap().peer.unwrap();
            assert_eq!((back.serial, back.port), (serials[index], port));
            assert_eq!(info.bandwidth.map(|rate| rate / 1_000_000), Some(492));
        }
        assert_eq!(refused(card.port(2)), Errno::EINVAL);
    }
}

#[test]
fn operators_change_memory_and_cost_what_the_profile_says() {
    let world = ring(2);
    let card = world.control(0);
    let buffer = card.allocate(1 << 20).unwrap();
    card.write(buffer, 0, &floats(&[1.0, 2.0])).unwrap();
    card.write(buffer, 8, &floats(&[10.0, 20.0])).unwrap();
    let before = card.info().unwrap().clock;
    let work = [
        Work::Reduce {
            into: at(buffer, 16),
            sources: vec![at(buffer, 0), at(buffer, 8)],
            elements: 2,
            fold: SUM,
            divisor: 2,
        }
        .into(),
        Work::Copy { from: at(buffer, 16), into: at(buffer, 512 << 10), length: 8 }.into(),
        Work::Fill { into: at(buffer, 24), length: 4, pattern: 0x0403_0201 }.into(),
        Work::Copy { from: at(buffer, 0), into: at(buffer, 512 << 10), length: 512 << 10 }.into(),
    ];
    let end = run(&card, &work).unwrap();
    let mut bytes = [0; 28];
    card.read(buffer, 512 << 10, &mut bytes).unwrap();
    assert_eq!(bytes[16..24], floats(&[5.5, 11.0]));
    assert_eq!(bytes[24..], [1, 2, 3, 4]);
    // The request's 60 us, four operators of 1 us, and a mebibyte at 2 GB/s.
    let micros = (end.0 - before.0) as f64 / 1e6;
    let expected = 60.0 + 4.0 + (1048576.0 + 24.0 + 16.0 + 4.0) / 2000.0;
    assert!((micros - expected).abs() < 0.01, "{micros} against {expected}");
}

#[test]
fn products_of_quantised_blocks_are_those_of_the_host() {
    use ggml_spanker::{HostMatmul, MatmulInt4, Q4_K_BLOCK_BYTES};
    let world = ring(2);
    let card = world.control(0);
    let [m, k, n] = [3usize, 512, 700];
    let row = k / 256 * Q4_K_BLOCK_BYTES;
    // Any bytes are a block; scales are kept finite by their high bytes.
    let blocks = |rows: usize, salt: usize| -> Vec<u8> {
        let byte = |i: usize| if i % Q4_K_BLOCK_BYTES < 4 { 0x20 } else { (i * 31 + salt) as u8 };
        (0..rows * row).map(byte).collect()
    };
    let (a, b) = (blocks(m, 1), blocks(n, 7));
    let mut expected = vec![0; m * n * 4];
    HostMatmul.matmul_q4_k(&a, &b, &mut expected, m, k, n).unwrap();
    let [left, right, out] =
        [a.len(), b.len(), expected.len()].map(|length| card.allocate(length as u64).unwrap());
    card.write(left, 0, &a).unwrap();
    card.write(right, 0, &b).unwrap();
    let before = card.info().unwrap().clock;
    let shape = [m as u64, k as u64, n as u64];
    let work =
        Work::Matmul { a: at(left, 0), b: at(right, 0), out: at(out, 0), shape, types: [12, 12] };
    let end = run(&card, &[work.into()]).unwrap();
    let mut found = vec![0; expected.len()];
    card.read(out, 0, &mut found).unwrap();
    assert!(found == expected);
    // The request, the operator, and the longer of traffic and arithmetic.
    let traffic = (a.len() + b.len() + expected.len()) as f64 / 2000.0;
    let arithmetic = (m * k * n) as f64 / 3600.0;
    let (micros, expected) = ((end.0 - before.0) as f64 / 1e6, 61.0 + traffic.max(arithmetic));
    assert!((micros - expected).abs() < 0.01, "{micros} against {expected}");
    let other =
        Work::Matmul { a: at(left, 0), b: at(right, 0), out: at(out, 0), shape, types: [2, 8] };
    assert_eq!(refused(card.submit(1, &[other.into()])), Errno::EOPNOTSUPP);
}

#[test]
fn messages_between_cards_take_latency_and_frames() {
    let world = ring(2);
    let (a, b) = (world.control(0), world.control(1));
    let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| ((i * 7) >> 3) as u8).collect();
    let (from, into) = (a.allocate(1 << 20).unwrap(), b.allocate(1 << 20).unwrap());
    a.write(from, 0, &bytes).unwrap();
    let start = a.info().unwrap().clock.max(b.info().unwrap().clock).0 + 1_000_000_000;
    let fence = |not_before_ps| Descriptor::from(Work::Fence { not_before_ps });
    let length = 1 << 20;
    let send = Work::Send { from: at(from, 0), length, port: 0, tag: 3 };
    let receive =
        Work::Receive { into: at(into, 0), length, port: 0, tag: 3, landing: Landing::Store };
    let sent = a.submit(9, &[fence(start), send.into()]).unwrap();
    let received = b.submit(9, &[fence(start), receive.into(), fence(0)]).unwrap();
    let end = b.wait(received, SECOND).unwrap();
    a.wait(sent, SECOND).unwrap();
    let mut found = vec![0; 1 << 20];
    b.read(into, 0, &mut found).unwrap();
    assert!(found == bytes);
    let micros = (end.0 - start) as f64 / 1e6;
    let expected = 2.0 + (512.0 * 2076.0 + 24.0) / (500.0 * 0.9988);
    assert!((micros / expected - 1.0).abs() < 1e-4, "{micros} against {expected}");
}

#[test]
fn a_message_with_another_tag_fails_the_job_on_both_cards() {
    let world = ring(2);
    let (a, b) = (world.control(0), world.control(1));
    let (from, into) = (a.allocate(64).unwrap(), b.allocate(64).unwrap());
    let send = Work::Send { from: at(from, 0), length: 64, port: 0, tag: 1 };
    let landing = Landing::FoldFirst(SUM);
    let receive = Work::Receive { into: at(into, 0), length: 64, port: 0, tag: 2, landing };
    let fence = || Descriptor::from(Work::Fence { not_before_ps: 0 });
    let sent = a.submit(5, &[send.into(), receive_nothing(from), fence()]).unwrap();
    let received = b.submit(5, &[receive.into(), fence()]).unwrap();
    let fault = |result| match result {
        Err(Error::Fault(fault)) => fault,
        other => panic!("{other:?}"),
    };
    let first = fault(b.wait(received, SECOND));
    assert_eq!((first.kind, first.card), (FaultKind::Mismatch, a.info().unwrap().serial));
    assert_eq!(fault(a.wait(sent, SECOND)), first);
    // The next job is not disturbed by what is left of the last one.
    let send = Work::Send { from: at(from, 0), length: 64, port: 0, tag: 2 };
    let sent = a.submit(6, &[send.into(), fence()]).unwrap();
    let received = b
        .submit(
            6,
            &[
                Work::Receive { into: at(into, 0), length: 64, port: 0, tag: 2, landing }.into(),
                fence(),
            ],
        )
        .unwrap();
    b.wait(received, SECOND).unwrap();
    a.wait(sent, SECOND).unwrap();
}

/// A receive for which nothing is ever sent.
fn receive_nothing(into: BufferId) -> Descriptor {
    let landing = Landing::Store;
    Work::Receive { into: at(into, 0), length: 8, port: 0, tag: 0, landing }.into()
}

#[test]
fn hostile_work_is_refused_and_nothing_of_it_runs() {
    let world = ring(2);
    let (card, other) = (world.control(0), world.control(0));
    let mine = card.allocate(64).unwrap();
    let theirs = other.allocate(64).unwrap();
    let fill = |place, length| Descriptor::from(Work::Fill { into: place, length, pattern: !0 });
    let reduce = |into, elements, fold| -> Descriptor {
        Work::Reduce { into, sources: vec![at(mine, 0)], elements, fold, divisor: 0 }.into()
    };
    let bad: Vec<Descriptor> = vec![
        fill(at(mine, 64), 4),
        fill(at(mine, u64::MAX - 3), 8),
        fill(at(theirs, 0), 4),
        fill(at(BufferId(0), 0), 4),
        fill(at(BufferId(u64::MAX), 0), 4),
        reduce(at(mine, 0), u64::MAX / 2, SUM),
        reduce(at(mine, 1), 1, SUM),
        reduce(at(mine, 4), 4, SUM),
        reduce(at(mine, 0), 1, Fold { dtype: 99, op: 0 }),
        reduce(at(mine, 0), 1, Fold { dtype: 0, op: 5 }),
        Work::Copy { from: at(mine, 0), into: at(mine, 8), length: 16 }.into(),
        Work::Send { from: at(mine, 0), length: 65, port: 0, tag: 0 }.into(),
        Work::Send { from: at(mine, 0), length: 8, port: 9, tag: 0 }.into(),
        Work::Matmul {
            a: at(mine, 0),
            b: at(mine, 0),
            out: at(mine, 0),
            shape: [u64::MAX, 256, u64::MAX],
            types: [12, 12],
        }
        .into(),
        Work::Matmul {
            a: at(mine, 0),
            b: at(mine, 0),
            out: at(mine, 0),
            shape: [1, 255, 1],
            types: [12, 12],
        }
        .into(),
    ];
    for descriptor in bad {
        let work = [fill(at(mine, 0), 4), descriptor.clone()];
        assert_eq!(refused(card.submit(1, &work)), Errno::EINVAL, "{descriptor:?}");
    }
    let mut bytes = [1; 64];
    card.read(mine, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 64]);
    assert_eq!(refused(card.submit(0, &[fill(at(mine, 0), 4)])), Errno::EINVAL);
    assert_eq!(refused(card.read(theirs, 0, &mut bytes)), Errno::EINVAL);
    assert_eq!(refused(card.write(mine, 60, &bytes)), Errno::EINVAL);
    assert_eq!(refused(card.free(theirs)), Errno::EINVAL);
    assert_eq!(refused(card.allocate(u64::MAX)), Errno::ENOMEM);
}

#[test]
fn work_of_another_program_makes_a_card_busy_until_it_ends() {
    let world = ring(2);
    let (first, second) = (world.control(0), world.control(0));
    let buffer = first.allocate(8).unwrap();
    first.submit(1, &[receive_nothing(buffer)]).unwrap();
    let idle = Work::Fence { not_before_ps: 0 };
    assert_eq!(refused(second.submit(2, &[idle.clone().into()])), Errno::EBUSY);
    assert_eq!(refused(first.free(buffer)), Errno::EBUSY);
    assert_eq!(second.info().unwrap().owner, Some(1));
    drop(first);
    let ticket = second.submit(2, &[idle.into()]).unwrap();
    second.wait(ticket, SECOND).unwrap();
}

#[test]
fn a_killed_card_fails_the_job_on_every_other_card_with_the_same_fault() {
    let world = ring(5);
    let cards: Vec<_> = (0..5).map(|card| world.control(card)).collect();
    let dead = cards[2].info().unwrap().serial;
    let tickets: Vec<_> = cards
        .iter()
        .map(|card| {
            let buffer = card.allocate(8).unwrap();
            let second = Work::Receive {
                into: at(buffer, 0),
                length: 8,
                port: 1,
                tag: 0,
                landing: Landing::Store,
            };
            card.submit(77, &[receive_nothing(buffer), second.into()]).unwrap()
        })
        .collect();
    world.disturb_in(Duration::from_micros(50), Disturbance::Kill(2));
    let begun = world.now();
    for (index, card) in cards.iter().enumerate() {
        match card.wait(tickets[index], SECOND) {
            Err(Error::Fault(fault)) => {
                assert_eq!((fault.kind, fault.card, fault.job), (FaultKind::CardLost, dead, 77));
            }
            Err(Error::Gone { .. }) => assert_eq!(index, 2),
            other => panic!("card {index}: {other:?}"),
        }
    }
    assert!(world.now() - begun < Duration::from_millis(1), "{:?}", world.now() - begun);
    let records = cards[0].records().unwrap();
    assert!(records.iter().any(|record| record.kind == 7 && record.a == dead), "{records:?}");
}

#[test]
fn waits_end_at_their_time_and_say_so() {
    let world = ring(2);
    let card = world.control(0);
    let buffer = card.allocate(8).unwrap();
    let ticket = card.submit(1, &[receive_nothing(buffer)]).unwrap();
    let begun = world.now();
    let waited = Duration::from_millis(300);
    assert!(matches!(card.wait(ticket, waited), Err(Error::Incomplete { .. })));
    let passed = world.now() - begun;
    assert!(passed >= waited && passed < waited * 11 / 10, "{passed:?}");
    let state = card.state(SECOND).unwrap();
    let peer = world.control(1).info().unwrap().serial;
    assert_eq!(state.activity, spanker_runtime::Activity::Receiving { port: 0, peer });
    world.disturb(Disturbance::Stop(0));
    assert!(matches!(card.state(waited), Err(Error::Unresponsive { .. })));
}
