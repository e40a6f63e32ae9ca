// SPDX-License-Identifier: Apache-2.0
//! What programs and peers that mean no good cannot do to a card, one by one. The fuzzers look for the rest.

use std::time::Duration;

use nix::errno::Errno;
use spanker_runtime::abi::{RawReset, RawSubmit, RawWait, Request};
use spanker_runtime::message::{HEAD_BYTES, Message};
use spanker_runtime::{
    BufferId, Descriptor, Error, Fault, FaultKind, Fold, Landing, Work, encode_work,
};
use spanker_twin::{Disturbance, Pace};

use crate::support::{SECOND, at, ring};
use spanker_fuzz_targets::pair::{GUARD, Guarded, HOSTILE};

fn fence() -> Descriptor {
    Work::Fence { not_before_ps: 0 }.into()
}

fn send(from: BufferId, length: u64, tag: u32) -> Descriptor {
    Work::Send { from: at(from, 0), length, port: 0, tag }.into()
}

fn receive(into: BufferId, length: u64, tag: u32) -> Descriptor {
    let landing = Landing::Store;
    Work::Receive { into: at(into, 0), length, port: 0, tag, landing }.into()
}

fn fault<T: std::fmt::Debug>(result: spanker_runtime::Result<T>) -> Fault {
    match result {
        Err(Error::Fault(fault)) => fault,
        other => panic!("expected a fault, got {other:?}"),
    }
}

/// Submits on a card by itself; the status and the ticket.
fn submit(end: &mut Guarded, client: spanker_twin::ClientId, job: u64, work: &[u8]) -> (i32, u64) {
    let request = RawSubmit { address: 0, length: work.len() as u64, job, ticket: 0 };
    let (status, raw, _) = end.ask(client, request, work);
    (status, raw.ticket)
}

fn wait(ticket: u64) -> RawWait {
    RawWait { ticket, timeout_ns: u64::MAX, ..RawWait::default() }
}

#[test]
fn fence_at_the_end_of_time_is_refused_and_a_late_one_leaves_time_for_others() {
    let world = ring(2);
    let (card, other) = (world.control(0), world.control(0));
    let buffer = card.allocate(4096).unwrap();
    for late in [u64::MAX, (1 << 63) + 1] {
        let refused = card.submit(1, &[Work::Fence { not_before_ps: late }.into()]);
        assert!(matches!(refused, Err(Error::Ioctl { source: Errno::EINVAL, .. })), "{refused:?}");
    }
    let work = [
        Work::Fence { not_before_ps: 1 << 63 }.into(),
        Work::Fill { into: at(buffer, 0), length: 4096, pattern: 1 }.into(),
    ];
    let ticket = card.submit(1, &work).unwrap();
    let end = card.wait(ticket, SECOND).unwrap();
    assert!(end.0 > 1 << 63);
    let before = other.info().unwrap().clock;
    let ticket = other.submit(2, &[fence()]).unwrap();
    assert!(other.wait(ticket, SECOND).unwrap() > before);
}

#[test]
fn message_that_breaks_off_does_not_swallow_the_next_one() {
    let world = ring(2);
    let (a, b) = (world.control(0), world.control(1));
    let length = 1 << 20;
    let (from, into) = (a.allocate(length).unwrap(), b.allocate(length).unwrap());
    let sent = a.submit(5, &[send(from, length, 1), fence()]).unwrap();
    let received = b.submit(5, &[receive(into, length, 2), fence()]).unwrap();
    let first = fault(b.wait(received, SECOND));
    assert_eq!((first.kind, fault(a.wait(sent, SECOND))), (FaultKind::Mismatch, first));
    let sent = a.submit(6, &[send(from, length, 3), fence()]).unwrap();
    let received = b.submit(6, &[receive(into, length, 3), fence()]).unwrap();
    b.wait(received, SECOND).unwrap();
    a.wait(sent, SECOND).unwrap();
}

#[test]
fn receive_from_a_link_that_is_cut_fails_at_once() {
    let world = ring(2);
    let card = world.control(0);
    let buffer = card.allocate(8).unwrap();
    world.disturb(Disturbance::Cut(0, 0));
    let ticket = card.submit(1, &[receive(buffer, 8, 0)]).unwrap();
    assert_eq!(fault(card.wait(ticket, SECOND)).kind, FaultKind::LinkDown);
}

#[test]
fn link_that_is_mended_in_use_fails_its_jobs_instead_of_losing_their_bytes() {
    let world = ring(2);
    let cards = [world.control(0), world.control(1)];
    let tickets: Vec<_> = cards
        .iter()
        .map(|card| {
            let buffer = card.allocate(1 << 20).unwrap();
            card.submit(4, &[send(buffer, 1 << 20, 0), receive(buffer, 1 << 20, 0)]).unwrap()
        })
        .collect();
    world.disturb_in(Duration::from_micros(5), Disturbance::Mend(0, 0));
    for (card, ticket) in cards.iter().zip(tickets) {
        assert_eq!(fault(card.wait(ticket, SECOND)).kind, FaultKind::LinkDown);
    }
}

#[test]
fn messages_that_wait_for_their_receives_are_taken_without_further_news() {
    let world = ring(2);
    let (a, b) = (world.control(0), world.control(1));
    let (from, into) = (a.allocate(64).unwrap(), b.allocate(64).unwrap());
    let sends: Vec<Descriptor> = (0..30).map(|tag| send(from, 64, tag)).collect();
    a.submit(3, &sends).unwrap();
    world.pass(Duration::from_millis(1));
    let receives: Vec<Descriptor> =
        (0..30).flat_map(|tag| [receive(into, 64, tag), fence()]).collect();
    let begun = world.now();
    let ticket = b.submit(3, &receives).unwrap();
    b.wait(ticket, SECOND).unwrap();
    assert!(world.now() - begun < Duration::from_millis(1), "{:?}", world.now() - begun);
}

#[test]
fn waits_of_one_program_do_not_take_the_room_of_another() {
    let mut end = Guarded::new(Pace::Card, 0);
    let (status, ticket) = submit(&mut end, GUARD, 1, &[]);
    assert_eq!(status, 0);
    end.card.advance(1000);
    let buffer = BufferId(end.allocate(HOSTILE, 8));
    let (_, blocked) = submit(&mut end, HOSTILE, 2, &encode_work(&[receive(buffer, 8, 0)]));
    end.card.advance(2000);
    let request = wait(blocked);
    let argument = bytemuck::bytes_of(&request);
    let (number, used) = (RawWait::NUMBER, HEAD_BYTES + argument.len());
    for sequence in 0..2000 {
        let message = Message { number, sequence, argument, payload: &[], used };
        end.card.request(HOSTILE, &message, 0);
    }
    let (status, answer, _) = end.ask(GUARD, wait(ticket), &[]);
    assert_eq!((status, answer.completed >= ticket), (0, true));
    assert_eq!(end.ask(GUARD, wait(blocked), &[]).0, Errno::EINVAL as i32, "it is not its own");
}

#[test]
fn failed_ticket_is_not_forgotten_whatever_other_programs_do() {
    let mut end = Guarded::new(Pace::Card, 0);
    let reset = |job| RawReset { job, ..RawReset::default() };
    end.ask(GUARD, reset(5), &[]);
    let (_, ticket) = submit(&mut end, GUARD, 5, &[]);
    end.ask(HOSTILE, reset(6), &[]);
    for _ in 0..10_000 {
        assert_eq!(submit(&mut end, HOSTILE, 6, &[]).0, 0);
    }
    let (status, answer, _) = end.ask(GUARD, wait(ticket), &[]);
    assert_eq!((status, answer.fault.fault().map(|fault| fault.job)), (0, Some(5)));
}

#[test]
fn queue_is_full_by_what_it_holds_not_by_descriptors_alone() {
    let mut end = Guarded::new(Pace::Card, 0);
    let buffer = BufferId(end.allocate(HOSTILE, 8));
    submit(&mut end, HOSTILE, 1, &encode_work(&[receive(buffer, 8, 0), fence()]));
    let sources = vec![at(buffer, 0); 256];
    let fold = Fold { dtype: 0, op: 0 };
    let into = at(buffer, 0);
    let reduce = Work::Reduce { into, sources, elements: 1, fold, divisor: 0 };
    let work = encode_work(&vec![reduce.into(); 1000]);
    let accepted = (0..100).take_while(|_| submit(&mut end, HOSTILE, 1, &work).0 == 0).count();
    assert_eq!(accepted, 16);
    assert_eq!(submit(&mut end, HOSTILE, 1, &work).0, Errno::EOVERFLOW as i32);
    end.ask(HOSTILE, RawReset { job: 1, ..RawReset::default() }, &[]);
    assert_eq!(submit(&mut end, HOSTILE, 2, &work).0, 0);
}

#[test]
fn many_operators_leave_a_card_time_to_answer() {
    let mut end = Guarded::new(Pace::Card, 0);
    let buffer = BufferId(end.allocate(HOSTILE, 512 << 10));
    let half = 256 << 10;
    let copy = Work::Copy { from: at(buffer, 0), into: at(buffer, half), length: half };
    let (_, short) = submit(&mut end, HOSTILE, 1, &encode_work(&[copy.clone().into()]));
    let (_, long) = submit(&mut end, HOSTILE, 1, &encode_work(&vec![copy.into(); 300]));
    assert!(end.card.advance(1000).busy);
    let (status, answer, _) = end.ask(HOSTILE, wait(short), &[]);
    assert_eq!((status, answer.completed), (0, short), "what is complete is reported at once");
    let calls = (0..1000).take_while(|at| end.card.advance(2000 + at).busy).count();
    assert!((30..200).contains(&calls), "{calls} calls");
    assert_eq!(end.ask(HOSTILE, wait(long), &[]).1.completed, long);
}
