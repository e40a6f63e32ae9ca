// SPDX-License-Identifier: Apache-2.0
//! How groups come together, and why they do not.

use std::time::Duration;

use spanker_fabric::Fabric;
use spanker_fabric_tcp::{Event, Listener, Options, TcpError, lead};

use crate::support::{VERSION, dial, join, listener, options, soon};

#[test]
fn members_know_each_other_and_a_worker_takes_part_in_one_group_after_the_other() {
    let (one, other) = (listener(), listener());
    for _ in 0..3 {
        std::thread::scope(|scope| {
            for (rank, listener) in [&one, &other].into_iter().enumerate() {
                scope.spawn(move || {
                    let mut fabric = join(listener, &options()).expect("a group");
                    assert_eq!((fabric.rank(), fabric.ranks()), (rank + 1, 3));
                    fabric.barrier(soon()).expect("nobody is missing");
                });
            }
            let channels = vec![dial(&one), dial(&other)];
            let (mut fabric, info) = lead(channels, &options()).expect("a group");
            assert_eq!(info.members, [None, Some(one.address()), Some(other.address())]);
            fabric.barrier(soon()).expect("nobody is missing");
        });
    }
}

#[test]
fn a_leader_alone_is_a_group() {
    let (mut fabric, info) = lead(Vec::new(), &options()).expect("a group");
    assert_eq!((fabric.ranks(), info.members), (1, vec![None]));
    fabric.barrier(soon()).expect("nobody is missing");
}

/// A worker's part in a group that does not come together.
fn fails(listener: &Listener, options: &Options) -> TcpError {
    join(listener, options).map(|_| ()).expect_err("no group")
}

#[test]
fn another_version_is_named_on_both_ends_and_ends_the_group_for_all() {
    let (same, other) = (listener(), listener());
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| fails(&other, &Options::new("9.9.9")));
        let bystander = scope.spawn(|| fails(&same, &options()));
        let error = lead(vec![dial(&same), dial(&other)], &options()).map(|_| ());
        let expected = |address, ours: &str, theirs: &str| TcpError::Version {
            address,
            ours: ours.into(),
            theirs: theirs.into(),
        };
        assert_eq!(error, Err(expected(other.address(), VERSION, "9.9.9")));
        let theirs = worker.join().expect("no panic");
        assert!(
            matches!(&theirs, TcpError::Version { ours, theirs, .. }
            if ours == "9.9.9" && theirs == VERSION),
            "{theirs}"
        );
        let text = bystander.join().expect("no panic");
        assert!(
            matches!(
                text,
                TcpError::Closed { .. } | TcpError::Handshake { .. } | TcpError::Timeout { .. }
            ),
            "{text}"
        );
    });
}

#[test]
fn a_worker_that_does_not_want_to_says_why() {
    let listener = listener();
    std::thread::scope(|scope| {
        scope.spawn(|| match listener.next(soon()).and_then(|leader| leader.next(10, soon())) {
            Ok(Event::Join(join)) => {
                assert_eq!((join.rank(), join.ranks(), join.version()), (1, 2, VERSION));
                join.refuse("the model is not here");
            }
            other => panic!("no request to join: {other:?}"),
        });
        let error = lead(vec![dial(&listener)], &options()).map(|_| ()).expect_err("refused");
        assert!(error.to_string().ends_with(" refused: the model is not here"), "{error}");
    });
}

#[test]
fn a_worker_that_does_not_answer_is_named_at_the_deadline_and_the_others_are_free() {
    let (silent, willing) = (listener(), listener());
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| fails(&willing, &options()));
        let hurried = Options { timeout: Duration::from_millis(300), ..options() };
        let error = lead(vec![dial(&silent), dial(&willing)], &hurried).map(|_| ());
        let Err(TcpError::Timeout { address, .. }) = error else { panic!("{error:?}") };
        assert_eq!(address, silent.address());
        let freed = worker.join().expect("no panic");
        assert!(matches!(freed, TcpError::Closed { .. }), "{freed}");
    });
}

#[test]
fn a_leader_that_goes_away_frees_the_workers_that_wait_for_the_others() {
    let (first, second) = (listener(), listener());
    std::thread::scope(|scope| {
        // The second worker never connects, so the first one waits for it.
        let waiting = scope.spawn(|| fails(&first, &options()));
        let leader = scope.spawn(|| {
            let hurried = Options { timeout: Duration::from_millis(100), ..options() };
            lead(vec![dial(&first), dial(&second)], &hurried).map(|_| ())
        });
        assert!(leader.join().expect("no panic").is_err());
        let freed = waiting.join().expect("no panic");
        assert!(matches!(freed, TcpError::Closed { .. }), "{freed}");
    });
}
