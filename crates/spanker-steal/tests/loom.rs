// SPDX-License-Identifier: Apache-2.0
//! Every order of the atomic operations of claims: each unit is committed once, late answers are refused, what comes
//! back is seen, and nobody waits for what has happened. Orders of threads are all tried, without a bound.
#![cfg(feature = "loom")]

use std::sync::Arc;
use std::time::Duration;

use loom::sync::Mutex;
use loom::thread;
use spanker_steal::{
    Capabilities, Claim, Claims, Failure, Job, Ledger, Member, Piece, StealError, Token, Verdict,
};

/// Later than any lease.
const LATE: Duration = Duration::from_secs(3600);

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A job of units of one byte. Loom's objects are made here, so this is called in a model only.
fn open(units: usize, backends: usize) -> (Ledger, Arc<Claims>) {
    let member = |place| Member { name: format!("b{place}"), capabilities: Capabilities::PLAIN };
    let members = (0..backends).map(member).collect();
    Ledger::open(1, &Job::new(units, 1), members).expect("a job")
}

fn token(lane: usize, serial: u64) -> Token {
    Token { epoch: 1, lane, serial }
}

/// Tells the ledger of a piece and its outputs at once. A task that took no time says nothing about speeds, so that
/// the numbers that claims are sized by stay as they are, and the orders of their loads do not multiply the others.
fn told_and_done(ledger: &mut Ledger, token: Token, piece: Piece, millis: u64) -> Verdict {
    let items = piece.items.clone();
    ledger.claimed(token, piece, at(millis));
    ledger.completed(token, items.clone(), &vec![7; items.len()], None, at(millis))
}

/// Lets `backends` do what is left, one after the other. Returns the items that they committed.
fn finish(ledger: &mut Ledger, claims: &Claims, backends: &[usize], millis: u64) -> Vec<usize> {
    let mut committed = Vec::new();
    let mut idle = 0;
    let mut turns = backends.iter().cycle();
    for serial in 100.. {
        let backend = *turns.next().expect("backends");
        let Claim::Take(piece) = claims.claim(backend) else {
            idle += 1;
            if idle > backends.len() {
                break;
            }
            continue;
        };
        idle = 0;
        let items = piece.items.clone();
        if told_and_done(ledger, token(backend, serial), piece, millis) == Verdict::Commit {
            committed.extend(items);
        }
    }
    committed
}

/// The run is over, and every unit was committed once.
fn assert_once(ledger: Ledger, mut committed: Vec<usize>, units: usize) {
    committed.sort_unstable();
    assert_eq!(committed, (0..units).collect::<Vec<_>>());
    let report = ledger.close().expect("all is done");
    assert_eq!((report.done, report.duplicated), (units, 0));
}

#[test]
fn three_units_claimed_by_three_threads_are_committed_once_in_every_order() {
    loom::model(|| {
        let (mut ledger, claims) = open(3, 3);
        let told = Arc::new(Mutex::new(Vec::new()));
        let threads: Vec<_> = (0..3)
            .map(|backend| {
                let (claims, told) = (Arc::clone(&claims), Arc::clone(&told));
                thread::spawn(move || {
                    let claim = claims.claim(backend);
                    let Claim::Take(piece) = claim else { panic!("{claim:?}") };
                    told.lock().expect("told").push((token(backend, 1), piece));
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("a thread");
        }
        assert_eq!(claims.left(), 0);
        let mut committed = Vec::new();
        for (token, piece) in told.lock().expect("told").drain(..) {
            let items = piece.items.clone();
            assert_eq!(told_and_done(&mut ledger, token, piece, 1), Verdict::Commit);
            committed.extend(items);
        }
        assert_eq!(claims.claim(0), Claim::Over);
        assert_once(ledger, committed, 3);
    });
}

#[test]
fn more_claims_than_units_get_each_unit_once_and_then_wait() {
    loom::model(|| {
        let (mut ledger, claims) = open(3, 2);
        let claimer = |backend: usize| {
            let claims = Arc::clone(&claims);
            move || {
                let mut got = Vec::new();
                loop {
                    match claims.claim(backend) {
                        Claim::Take(piece) => got.push(piece),
                        Claim::Wait => break got,
                        Claim::Over => panic!("nothing is done yet"),
                    }
                }
            }
        };
        let other = thread::spawn(claimer(1));
        let mut committed = Vec::new();
        let mine = claimer(0)();
        let others = other.join().expect("a thread");
        for (backend, got) in [mine, others].into_iter().enumerate() {
            for (serial, piece) in got.into_iter().enumerate() {
                let items = piece.items.clone();
                let token = token(backend, serial as u64);
                assert_eq!(told_and_done(&mut ledger, token, piece, 1), Verdict::Commit);
                committed.extend(items);
            }
        }
        assert_once(ledger, committed, 3);
    });
}

#[test]
fn a_ledger_that_hears_while_others_claim_commits_every_unit_once() {
    loom::model(|| {
        let (ledger, claims) = open(3, 2);
        let ledger = Arc::new(Mutex::new(ledger));
        let (theirs, their_claims) = (Arc::clone(&ledger), Arc::clone(&claims));
        let other = thread::spawn(move || {
            let mut committed = Vec::new();
            if let Claim::Take(piece) = their_claims.claim(1) {
                let items = piece.items.clone();
                let mut ledger = theirs.lock().expect("ledger");
                ledger.claimed(token(1, 1), piece, at(1));
                // A speed is told to those who claim.
                let verdict = ledger.completed(token(1, 1), items.clone(), &[7], None, at(2));
                assert_eq!(verdict, Verdict::Commit);
                committed.extend(items);
            }
            committed
        });
        let mut committed = Vec::new();
        if let Claim::Take(piece) = claims.claim(0) {
            let items = piece.items.clone();
            let mut ledger = ledger.lock().expect("ledger");
            assert_eq!(told_and_done(&mut ledger, token(0, 1), piece, 1), Verdict::Commit);
            committed.extend(items);
        }
        committed.extend(other.join().expect("a thread"));
        let ledger = Arc::into_inner(ledger).expect("nobody else has it");
        let mut ledger = ledger.into_inner().expect("ledger");
        committed.extend(finish(&mut ledger, &claims, &[0, 1], 5));
        assert_once(ledger, committed, 3);
    });
}

#[test]
fn an_answer_after_its_lease_was_revoked_is_refused_and_the_unit_is_committed_once() {
    loom::model(|| {
        let (mut ledger, claims) = open(1, 2);
        let Claim::Take(piece) = claims.claim(0) else { panic!("a unit") };
        ledger.claimed(token(0, 1), piece, at(1));
        let ledger = Arc::new(Mutex::new(ledger));
        let theirs = Arc::clone(&ledger);
        let holder = thread::spawn(move || {
            let mut ledger = theirs.lock().expect("ledger");
            let verdict = ledger.completed(token(0, 1), 0..1, &[7], None, at(1));
            verdict == Verdict::Commit
        });
        let (theirs, their_claims) = (Arc::clone(&ledger), Arc::clone(&claims));
        let other = thread::spawn(move || match their_claims.claim(1) {
            Claim::Take(piece) => {
                let mut ledger = theirs.lock().expect("ledger");
                Some(told_and_done(&mut ledger, token(1, 1), piece, 3_600_001))
            }
            Claim::Wait | Claim::Over => None,
        });
        ledger.lock().expect("ledger").tick(LATE);
        let in_time = holder.join().expect("the holder");
        let again = other.join().expect("the other");
        let ledger = Arc::into_inner(ledger).expect("nobody else has it");
        let mut ledger = ledger.into_inner().expect("ledger");
        let mut committed = Vec::new();
        if in_time {
            assert_eq!(again, None, "what is done was given out again");
            committed.push(0);
        }
        if again == Some(Verdict::Commit) {
            committed.push(0);
        }
        committed.extend(finish(&mut ledger, &claims, &[1], 3_600_002));
        assert_once(ledger, committed, 1);
    });
}

#[test]
fn a_unit_that_comes_back_while_others_claim_is_done_once_by_somebody_else() {
    loom::model(|| {
        let (mut ledger, claims) = open(2, 3);
        let Claim::Take(piece) = claims.claim(0) else { panic!("a unit") };
        let lost = piece.items.clone();
        ledger.claimed(token(0, 1), piece, at(1));
        let claimer = |backend: usize| {
            let claims = Arc::clone(&claims);
            thread::spawn(move || {
                let seen = claims.stirs();
                (backend, seen, claims.claim(backend))
            })
        };
        let others = [claimer(1), claimer(2)];
        ledger.failed(token(0, 1), &Failure::passing("not now"), at(2));
        let mut committed = Vec::new();
        let claimed = others.map(|other| other.join().expect("a thread"));
        for (backend, seen, claim) in claimed {
            match claim {
                Claim::Take(piece) => {
                    let items = piece.items.clone();
                    let verdict = told_and_done(&mut ledger, token(backend, 1), piece, 3);
                    assert_eq!(verdict, Verdict::Commit);
                    committed.extend(items);
                }
                // Whoever looked before the unit was back is told to look again.
                Claim::Wait => assert_ne!(seen, claims.stirs()),
                Claim::Over => panic!("not all is done"),
            }
        }
        assert!(ledger.is_over() || claims.left() > 0, "a unit that nobody holds is to be had");
        committed.extend(finish(&mut ledger, &claims, &[1, 2], 5));
        assert_eq!(lost, 0..1);
        assert_once(ledger, committed, 2);
    });
}

#[test]
fn a_pooled_piece_that_two_want_goes_to_one() {
    loom::model(|| {
        let (mut ledger, claims) = open(1, 3);
        let Claim::Take(piece) = claims.claim(0) else { panic!("a unit") };
        ledger.claimed(token(0, 1), piece, at(1));
        ledger.failed(token(0, 1), &Failure::passing("not now"), at(2));
        let theirs = Arc::clone(&claims);
        let other = thread::spawn(move || theirs.claim(2));
        let mine = claims.claim(1);
        let both = [mine, other.join().expect("a thread")];
        let mut committed = Vec::new();
        for (backend, claim) in (1..).zip(both) {
            match claim {
                Claim::Take(piece) => {
                    let items = piece.items.clone();
                    told_and_done(&mut ledger, token(backend, 1), piece, 3);
                    committed.extend(items);
                }
                Claim::Wait => (),
                Claim::Over => panic!("not all is done"),
            }
        }
        assert_once(ledger, committed, 1);
    });
}

#[test]
fn a_claim_beside_the_end_of_the_run_commits_nothing_afterwards() {
    loom::model(|| {
        let (ledger, claims) = open(2, 2);
        let ledger = Arc::new(Mutex::new(ledger));
        let (theirs, their_claims) = (Arc::clone(&ledger), Arc::clone(&claims));
        let other = thread::spawn(move || match their_claims.claim(1) {
            Claim::Take(piece) => {
                let mut ledger = theirs.lock().expect("ledger");
                let over = ledger.is_over();
                let verdict = told_and_done(&mut ledger, token(1, 1), piece, 1);
                assert_eq!(verdict == Verdict::Refuse, over, "{verdict:?}");
                usize::from(verdict == Verdict::Commit)
            }
            Claim::Wait => panic!("units are to be had"),
            Claim::Over => 0,
        });
        ledger.lock().expect("ledger").cancel();
        let committed = other.join().expect("a thread");
        assert_eq!([claims.claim(0), claims.claim(1)], [Claim::Over, Claim::Over]);
        assert!(claims.is_closed());
        let ledger = Arc::into_inner(ledger).expect("nobody else has it");
        let ledger = ledger.into_inner().expect("ledger");
        match ledger.close() {
            Err(StealError::Cancelled(unfinished)) => {
                assert_eq!(unfinished.report.done, committed);
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn whoever_finds_nothing_before_the_end_is_told_of_the_end() {
    loom::model(|| {
        let (mut ledger, claims) = open(1, 2);
        let Claim::Take(piece) = claims.claim(0) else { panic!("a unit") };
        let theirs = Arc::clone(&claims);
        let other = thread::spawn(move || {
            let seen = theirs.stirs();
            (seen, theirs.claim(1))
        });
        assert_eq!(told_and_done(&mut ledger, token(0, 1), piece, 1), Verdict::Commit);
        match other.join().expect("a thread") {
            (seen, Claim::Wait) => assert_ne!(seen, claims.stirs()),
            (_, claim) => assert_eq!(claim, Claim::Over),
        }
    });
}
