// SPDX-License-Identifier: Apache-2.0
//! What a group does when one of its ranks is gone, silent or wrong: every rank reports the same.

use std::time::{Duration, Instant};

use spanker_fabric::conformance::on_all;
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool};
use spanker_fabric_tcp::TcpFabric;

use crate::support::{group, soon};

fn message(bytes: &[u8]) -> Message {
    Pool::default().write(bytes.len(), |out| out.copy_from_slice(bytes))
}

/// Every rank sends to all others and receives from them.
fn all_to_all(fabric: &mut TcpFabric, bytes: &[u8], deadline: Instant) -> Result<(), FabricError> {
    let (rank, ranks) = (fabric.rank(), fabric.ranks());
    let others: Vec<usize> = (0..ranks).filter(|&other| other != rank).collect();
    let sends: Vec<_> = others.iter().map(|&other| (other, message(bytes))).collect();
    for (message, from) in
        fabric.exchange(&Call::BARRIER, &sends, &others, deadline)?.iter().zip(&others)
    {
        assert_eq!(message.bytes(), bytes, "from {from}");
    }
    Ok(())
}

#[test]
fn every_rank_that_dies_is_named_by_all_others_long_before_the_deadline() {
    for victim in 0..4 {
        let (begun, settled) = (Instant::now(), std::sync::Barrier::new(4));
        let outcomes = on_all(group(4), |mut fabric| {
            let before = all_to_all(&mut fabric, b"before", soon());
            settled.wait();
            assert_eq!(before, Ok(()));
            if fabric.rank() == victim {
                return None;
            }
            let fault = all_to_all(&mut fabric, &[7; 5000], soon());
            // Every later call says the same.
            assert_eq!(fabric.barrier(soon()), fault);
            Some(fault)
        });
        assert!(begun.elapsed() < Duration::from_secs(30), "a death took until the deadline");
        for (rank, outcome) in outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != victim)
        {
            let expected = Err(FabricError::Died { rank: victim });
            assert_eq!(outcome, Some(expected), "rank {rank} of {victim}");
        }
    }
}

#[test]
fn what_a_rank_had_sent_before_it_died_still_counts() {
    // Neither of the two that are left leaves before the other has everything: that would be a death, too.
    let settled = std::sync::Barrier::new(2);
    let outcomes = on_all(group(3), |mut fabric| {
        if fabric.rank() == 2 {
            let sends = [(0, message(&[9; 300_000])), (1, message(&[9; 300_000]))];
            fabric.exchange(&Call::BARRIER, &sends, &[], soon()).expect("sent");
            return Ok(300_000);
        }
        let messages = fabric.exchange(&Call::BARRIER, &[], &[2], soon());
        settled.wait();
        let messages = messages?;
        assert!(messages[0].bytes().iter().all(|&byte| byte == 9));
        Ok::<_, FabricError>(messages[0].bytes().len())
    });
    assert_eq!(outcomes, [Ok(300_000), Ok(300_000), Ok(300_000)]);
}

#[test]
fn reasons_of_the_rank_that_gives_up_reach_everybody() {
    for (quits, fault) in [
        (0, FabricError::Refused { rank: 0, reason: "the request ended".into() }),
        (2, FabricError::Failed { rank: 2, reason: "no memory for 7 GiB".into() }),
    ] {
        let outcomes = on_all(group(4), |mut fabric| {
            if fabric.rank() == quits {
                return Err(fabric.abort(fault.clone()));
            }
            fabric.barrier(soon())
        });
        assert!(outcomes.iter().all(|outcome| *outcome == Err(fault.clone())), "{outcomes:?}");
    }
}

#[test]
fn a_silent_rank_ends_the_wait_at_the_deadline_and_adopts_the_fault_that_it_finds() {
    let settled = std::sync::Barrier::new(3);
    let outcomes = on_all(group(3), |mut fabric| {
        if fabric.rank() == 1 {
            settled.wait();
            return all_to_all(&mut fabric, b"late", soon());
        }
        let outcome = all_to_all(&mut fabric, b"here", Instant::now() + Duration::from_millis(200));
        settled.wait();
        outcome
    });
    assert!(matches!(outcomes[0], Err(FabricError::Deadline { peer: 1, .. })), "{outcomes:?}");
    assert!(outcomes.iter().all(|outcome| outcome == &outcomes[0]), "{outcomes:?}");
}

#[test]
fn a_chain_of_deadlines_is_blamed_on_its_end_whoever_runs_out_of_time_first() {
    // Each rank waits for the one above it, and the last one is silent. Whose time is over first goes round.
    for first in 0..3 {
        let (begun, settled) = (std::sync::Barrier::new(4), std::sync::Barrier::new(4));
        let outcomes = on_all(group(4), |mut fabric| {
            let rank = fabric.rank();
            begun.wait();
            let within = Duration::from_millis(if rank == first { 300 } else { 310 });
            let outcome = match rank {
                3 => Ok(Vec::new()),
                _ => fabric.exchange(&Call::BARRIER, &[], &[rank + 1], Instant::now() + within),
            };
            settled.wait();
            outcome.map(|_| ())
        });
        let expected = FabricError::Deadline { rank: 2, peer: 3, what: "to receive from" };
        for (rank, outcome) in outcomes.iter().enumerate().take(3) {
            assert_eq!(*outcome, Err(expected.clone()), "rank {rank}, first {first}");
        }
    }
}

#[test]
fn a_rank_that_comes_too_late_is_named_itself() {
    let settled = std::sync::Barrier::new(3);
    let outcomes = on_all(group(3), |mut fabric| {
        let timeout = Duration::from_millis(200);
        if fabric.rank() == 0 {
            // It was elsewhere while rank 2 waited for it, and waits for rank 1 then.
            std::thread::sleep(2 * timeout);
            let outcome = fabric.exchange(&Call::BARRIER, &[], &[1], soon());
            settled.wait();
            return outcome.map(|_| ());
        }
        let from = if fabric.rank() == 2 { 0 } else { 2 };
        let within = if fabric.rank() == 2 { timeout } else { 100 * timeout };
        let outcome = fabric.exchange(&Call::BARRIER, &[], &[from], Instant::now() + within);
        settled.wait();
        outcome.map(|_| ())
    });
    let expected = FabricError::Deadline { rank: 2, peer: 0, what: "to receive from" };
    assert!(outcomes.iter().all(|outcome| *outcome == Err(expected.clone())), "{outcomes:?}");
}

#[test]
fn long_messages_in_all_directions_do_not_wait_for_each_other() {
    // Far more than the system keeps on the way: every rank has to read while it writes.
    let bytes: Vec<u8> = (0..9_000_000u32).map(|at| (at % 253) as u8).collect();
    let outcomes = on_all(group(3), |mut fabric| {
        for _ in 0..2 {
            all_to_all(&mut fabric, &bytes, soon())?;
        }
        fabric.barrier(soon())
    });
    assert_eq!(outcomes, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn a_sender_that_is_far_ahead_waits_for_its_reader_and_loses_nothing() {
    let count = 40usize;
    let outcomes = on_all(group(2), |mut fabric| {
        let bytes = vec![fabric.rank() as u8; 4 << 20];
        if fabric.rank() == 0 {
            for _ in 0..count {
                fabric.exchange(&Call::BARRIER, &[(1, message(&bytes))], &[], soon())?;
            }
            fabric.exchange(&Call::BARRIER, &[], &[1], soon())?;
        } else {
            for _ in 0..count {
                let got = fabric.exchange(&Call::BARRIER, &[], &[0], soon())?;
                assert_eq!(got[0].bytes().len(), 4 << 20);
            }
            fabric.exchange(&Call::BARRIER, &[(0, message(b"all"))], &[], soon())?;
        }
        fabric.barrier(soon())
    });
    assert_eq!(outcomes, [Ok(()), Ok(())]);
}
