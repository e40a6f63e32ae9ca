// SPDX-License-Identifier: Apache-2.0
//! The ledger in time that the tests make: what is left is to be had at once when somebody is gone, and a run in which
//! nobody answers ends when its patience does.
#![cfg(not(any(feature = "loom", feature = "shuttle")))]

use std::sync::Arc;
use std::time::Duration;

use spanker_steal::{
    Capabilities, Claim, Claims, Failure, Job, Ledger, Member, Options, Piece, StealError, Token,
    Verdict,
};

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn open(items: usize, rates: &[Option<f64>], options: Options) -> (Ledger, Arc<Claims>) {
    let member = |rate: &Option<f64>| Member {
        name: "b".to_owned(),
        capabilities: Capabilities { rate: *rate, ..Capabilities::PLAIN },
    };
    let members = rates.iter().map(member).collect();
    Ledger::open(1, &Job::new(items, 1).options(options), members).expect("a job")
}

fn token(lane: usize, serial: u64) -> Token {
    Token { epoch: 1, lane, serial }
}

fn take(claims: &Claims, backend: usize) -> Piece {
    match claims.claim(backend) {
        Claim::Take(piece) => piece,
        other => panic!("{other:?} for backend {backend}"),
    }
}

#[test]
fn lanes_of_a_backend_are_one_at_least_and_bounded() {
    for (in_flight, lanes) in [(0, 1), (1, 1), (7, 7), (usize::MAX, 256)] {
        let capabilities = Capabilities { in_flight, ..Capabilities::PLAIN };
        let members = vec![Member { name: "b".to_owned(), capabilities }];
        let (ledger, _) = Ledger::open(1, &Job::new(10, 1), members).expect("a job");
        assert_eq!(ledger.lanes().count(), lanes);
    }
}

#[test]
fn piece_of_a_liar_that_others_failed_at_is_to_be_had_at_once() {
    let (mut ledger, claims) = open(1, &[None, None], Options::STANDARD);
    ledger.claimed(token(0, 1), take(&claims, 0), at(1));
    ledger.failed(token(0, 1), &Failure::passing("not now"), at(2));
    ledger.claimed(token(1, 1), take(&claims, 1), at(3));
    assert_eq!(ledger.completed(token(1, 1), 5..6, &[0], None, at(4)), Verdict::Refuse);
    assert_eq!(take(&claims, 0).items, 0..1);
}

#[test]
fn work_that_slower_ones_left_to_a_fast_liar_is_to_be_had_by_them_at_once() {
    let (mut ledger, claims) = open(100, &[Some(1e9), Some(1.0)], Options::STANDARD);
    assert_eq!(claims.claim(1), Claim::Wait, "the other would be through before");
    let piece = take(&claims, 0);
    let wrong = piece.items.start..piece.items.end + 1;
    ledger.claimed(token(0, 1), piece, at(1));
    assert_eq!(ledger.completed(token(0, 1), wrong, &[0], None, at(2)), Verdict::Refuse);
    let mut taken = 0;
    while let Claim::Take(piece) = claims.claim(1) {
        taken += piece.items.len();
    }
    assert_eq!(taken, 100);
}

#[test]
fn piece_claimed_by_a_backend_that_was_benched_meanwhile_is_to_be_had_at_once() {
    let (mut ledger, claims) = open(2, &[None, None], Options::STANDARD);
    ledger.claimed(token(0, 1), take(&claims, 0), at(1));
    ledger.claimed(token(1, 1), take(&claims, 1), at(1));
    ledger.failed(token(0, 1), &Failure::passing("not now"), at(2));
    // The other takes what the first failed at, and is gone before this is known.
    let piece = take(&claims, 1);
    assert_eq!(piece.items, 0..1);
    ledger.failed(token(1, 1), &Failure::lasting("dead"), at(3));
    ledger.claimed(token(1, 2), piece, at(3));
    let mut left: Vec<usize> = (0..2).map(|_| take(&claims, 0).items.start).collect();
    left.sort_unstable();
    assert_eq!(left, [0, 1]);
}

#[test]
fn run_whose_lanes_all_hang_ends_with_its_patience() {
    let options = Options { patience: at(1000), ..Options::STANDARD };
    let (mut ledger, claims) = open(100, &[None, None], options);
    for lane in 0..2 {
        ledger.claimed(token(lane, 1), take(&claims, lane), at(1));
    }
    for now in (100..1000).step_by(100) {
        ledger.tick(at(now));
        assert!(!ledger.is_over(), "{now} ms");
        assert!(ledger.next_tick() <= at(1001));
    }
    ledger.tick(at(1001));
    assert!(ledger.is_over());
    let error = ledger.close().expect_err("nobody answered");
    assert!(matches!(error, StealError::Stalled { waited, .. } if waited == at(1000)), "{error}");
}

#[test]
fn lease_of_a_lane_is_counted_from_when_its_keeper_is_back() {
    let options = Options { patience: at(1000), ..Options::STANDARD };
    let (mut ledger, claims) = open(100, &[None, None], options);
    let piece = take(&claims, 0);
    let items = piece.items.clone();
    ledger.claimed(token(0, 1), piece, at(1));
    let left = claims.left();
    ledger.resume(at(5000));
    for now in [5001, 5200, 5400] {
        ledger.tick(at(now));
        assert_eq!(claims.left(), left, "{now} ms: the items are not to be had");
    }
    ledger.tick(at(5600));
    assert_eq!(claims.left(), left + 1);
    assert_eq!(ledger.completed(token(0, 1), items, &[1], None, at(400)), Verdict::Commit);
}

#[test]
fn overdue_answer_that_counts_takes_its_items_back_from_others() {
    let options = Options { patience: at(1000), ..Options::STANDARD };
    let (mut ledger, claims) = open(2, &[None, None], options);
    let (mine, theirs) = (take(&claims, 0), take(&claims, 1));
    let items = mine.items.clone();
    ledger.claimed(token(0, 1), mine, at(1));
    ledger.claimed(token(1, 1), theirs, at(1));
    for now in [200, 400, 600] {
        ledger.tick(at(now));
    }
    assert_eq!(claims.left(), 2, "both are overdue");
    assert_eq!(ledger.completed(token(0, 1), items, &[1], None, at(700)), Verdict::Commit);
    assert_eq!(claims.left(), 1);
    let left = take(&claims, 0);
    assert_eq!(left.items, 1..2);
    // Whoever was late before finds its lease lost once that is known.
    ledger.claimed(token(0, 2), left, at(701));
    assert_eq!(ledger.completed(token(1, 1), 1..2, &[1], None, at(702)), Verdict::Refuse);
    assert_eq!(ledger.completed(token(0, 2), 1..2, &[1], None, at(703)), Verdict::Commit);
    assert!(ledger.is_over());
}

#[test]
fn claim_that_is_heard_of_after_its_items_were_given_to_others_holds_nothing() {
    let options = Options { patience: at(1000), ..Options::STANDARD };
    let (mut ledger, claims) = open(2, &[None, None], options);
    let unheard = take(&claims, 0);
    let other = take(&claims, 1);
    ledger.claimed(token(1, 1), other, at(1));
    assert_eq!(ledger.completed(token(1, 1), 1..2, &[1], None, at(2)), Verdict::Commit);
    ledger.tick(at(100));
    let swept = take(&claims, 1);
    assert_eq!(swept.items, 0..1);
    ledger.claimed(token(1, 2), swept, at(101));
    ledger.claimed(token(0, 1), unheard, at(102));
    assert_eq!(ledger.completed(token(0, 1), 0..1, &[2], None, at(103)), Verdict::Refuse);
    assert_eq!(ledger.completed(token(1, 2), 0..1, &[1], None, at(104)), Verdict::Commit);
    let report = ledger.close().expect("all is done");
    assert_eq!((report.done, report.duplicated), (2, 0));
}

#[test]
fn lease_of_a_backend_that_says_it_is_slow_and_hangs_runs_out_all_the_same() {
    let options = Options { patience: at(1000), ..Options::STANDARD };
    let (mut ledger, claims) = open(2, &[Some(1e-9), None], options);
    ledger.claimed(token(0, 1), take(&claims, 0), at(1));
    for now in [200, 400, 600] {
        ledger.tick(at(now));
    }
    assert_eq!(claims.left(), 2);
}

#[test]
fn item_that_always_fails_ends_the_run_however_many_strikes_are_allowed() {
    let options = Options { strikes: u32::MAX, ..Options::STANDARD };
    let (mut ledger, claims) = open(1, &[None], options);
    let mut serial = 0;
    while !ledger.is_over() {
        serial += 1;
        assert!(serial < 10_000, "no end");
        ledger.claimed(token(0, serial), take(&claims, 0), at(serial));
        ledger.failed(token(0, serial), &Failure::passing("never"), at(serial));
    }
    let error = ledger.close().expect_err("it never worked");
    assert!(matches!(error, StealError::Refused { .. }), "{error}");
}

#[test]
fn vote_of_a_backend_that_is_not_trusted_any_more_decides_nothing() {
    let options = Options { sample: 1.0, ..Options::STANDARD };
    let (mut ledger, claims) = open(2, &[None, None, None], options);
    let answer = |ledger: &mut Ledger, lane, serial, piece: Piece, byte| {
        let items = piece.items.clone();
        ledger.claimed(token(lane, serial), piece, at(serial));
        ledger.completed(token(lane, serial), items, &[byte], None, at(serial + 1))
    };
    // The second does both items right; the first is wrong about both.
    let (one, two) = (take(&claims, 1), take(&claims, 1));
    assert_eq!(answer(&mut ledger, 1, 1, one, 7), Verdict::Commit);
    assert_eq!(answer(&mut ledger, 1, 2, two, 7), Verdict::Commit);
    for serial in [3, 4] {
        let compared = take(&claims, 0);
        assert_eq!(answer(&mut ledger, 0, serial, compared, 9), Verdict::Compared);
    }
    // The third settles one of them, and is gone.
    let deciding = take(&claims, 2);
    assert_eq!(answer(&mut ledger, 2, 5, deciding, 7), Verdict::Compared);
    let last = take(&claims, 2);
    ledger.claimed(token(2, 6), last, at(6));
    ledger.failed(token(2, 6), &Failure::lasting("gone"), at(7));
    let report = ledger.close().expect("the wrong one has no say");
    assert_eq!(report.done, 2);
}
