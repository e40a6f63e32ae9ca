// SPDX-License-Identifier: Apache-2.0
//! Messages of bytes between a leader and a worker, before and beside a group.

use std::time::{Duration, Instant};

use spanker_fabric_tcp::{Channel, Event, Id, Purpose, TcpError};

use crate::support::{dial, key, listener, soon};

#[test]
fn questions_are_answered_and_messages_of_any_length_arrive_as_they_were() {
    let listener = listener();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut leader = listener.next(soon()).expect("a leader");
            loop {
                match leader.next(1 << 24, soon()) {
                    Ok(Event::Message(mut channel, question)) => {
                        let answer: Vec<u8> = question.bytes().iter().map(|byte| !byte).collect();
                        channel.send(&answer, soon()).expect("sent");
                        leader = channel;
                    }
                    Ok(Event::Join(_)) => panic!("nobody asked for that"),
                    Err(closed) => return assert!(matches!(closed, TcpError::Closed { .. })),
                }
            }
        });
        let mut channel = dial(&listener);
        for length in [0, 1, 47, 48, 4096, 65_519, 65_520, 131_038, 3_000_001] {
            let question: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            channel.send(&question, soon()).expect("sent");
            let answer = channel.receive(1 << 24, soon()).expect("an answer");
            assert!(answer.bytes().iter().zip(&question).all(|(one, other)| *one == !other));
            assert_eq!(answer.bytes().len(), length);
        }
    });
}

#[test]
fn a_message_that_is_longer_than_its_receiver_takes_is_refused_by_its_length() {
    let listener = listener();
    let mut channel = dial(&listener);
    channel.send(&[7; 100], soon()).expect("sent");
    let mut worker = listener.next(soon()).expect("a leader");
    let error = worker.receive(99, soon()).expect_err("too long");
    assert!(matches!(error, TcpError::TooLong { length: 100, limit: 99, .. }), "{error}");
    let again = worker.receive(1000, soon()).expect_err("of no more use");
    assert!(matches!(again, TcpError::TooLong { .. }), "{again}");
}

#[test]
fn waiting_for_a_message_ends_at_the_deadline_and_can_go_on() {
    let listener = listener();
    let mut channel = dial(&listener);
    let mut worker = listener.next(soon()).expect("a leader");
    let late = worker.receive(10, Instant::now() + Duration::from_millis(50)).expect_err("silent");
    assert!(matches!(late, TcpError::Timeout { what: "message", .. }), "{late}");
    channel.send(b"here", soon()).expect("sent");
    assert_eq!(worker.receive(10, soon()).expect("a message").bytes(), b"here");
}

#[test]
fn bulk_data_has_a_connection_of_its_own_by_its_number() {
    let listener = listener();
    let (one, other) = (Id::random().expect("random"), Id::random().expect("random"));
    let address = listener.address().to_string();
    let open = |id| {
        let timeout = Duration::from_secs(30);
        Channel::dial(&address, Some(&key()), Purpose::Bulk(id), timeout).expect("a worker")
    };
    let (mut first, mut second) = (open(one), open(other));
    first.send(b"one", soon()).expect("sent");
    second.send(b"other", soon()).expect("sent");
    let take = |id| {
        let mut bulk = listener.next_bulk(id, soon()).expect("a connection");
        bulk.receive(10, soon()).expect("a message").bytes().to_vec()
    };
    assert_eq!(take(other), b"other");
    assert_eq!(take(one), b"one");
    let none = listener.next(Instant::now()).expect_err("no leader has come");
    assert!(matches!(none, TcpError::Timeout { what: "leader", .. }), "{none}");
}

#[test]
fn a_refusal_reaches_the_other_end_in_words() {
    let listener = listener();
    let mut channel = dial(&listener);
    listener.next(soon()).expect("a leader").refuse("busy with another group");
    let error = channel.receive(10, soon()).expect_err("refused");
    assert!(error.to_string().ends_with(" refused: busy with another group"), "{error}");
}
