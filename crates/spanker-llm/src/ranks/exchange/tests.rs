// SPDX-License-Identifier: Apache-2.0
//! Every algorithm gives the bytes of one-shot, whatever the parts; whoever dies, is silent or has another table is named.

use std::time::Duration;

use proptest::prelude::*;
use spanker_fabric::conformance::on_all;
use spanker_fabric::inproc::{Inproc, group};
use spanker_fabric::{Call, Fabric};

use super::*;
use crate::ranks::wire::End;

/// Longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The algorithms of gathers or folds; those that have none of their own fall back to one-shot.
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::OneShot,
    Algorithm::TwoShot,
    Algorithm::Ring,
    Algorithm::RecursiveDoubling,
    Algorithm::Tree,
];

/// What a rank has after a gather, a sum and a union, all in one step, and the bytes that it sent.
type Results = (Vec<Vec<u8>>, Vec<u32>, Vec<u8>, u64);

/// Numbers whose sum depends on the order in which they are added.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    let number = |at: usize| {
        let scale = [1e-3, 1.0, 1e3, 1e6][(rank + at) % 4];
        scale * ((rank * 31 + at * 17) % 101) as f32 / 7.0
    };
    (0..count).map(number).collect()
}

fn part(rank: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (rank * 37 + at) as u8).collect()
}

/// Runs all three exchanges on one rank. The card's place in its group is not its rank in the fabric.
fn exchanged(
    fabric: &mut dyn Fabric,
    table: &ExchangeTable,
    lengths: &[usize],
    count: usize,
    timeout: Duration,
) -> Result<Results, FabricError> {
    let ranks = lengths.len();
    let members: Vec<Rank> = (0..ranks).rev().collect();
    let rank = ranks - 1 - fabric.rank();
    let mut exchanges = Exchanges::new(table.clone(), 0, members.clone(), rank);
    let mut wire = Wire::new(End::Lent(fabric), timeout);
    let mut peers = Neighbours::new(&mut wire, &mut exchanges, &members, 1);
    let mut parts = vec![Vec::new(); ranks];
    let own = part(rank, lengths[rank]);
    let mut sent = peers.all_gather(
        &own,
        |rank| lengths[rank] as u64,
        |rank, bytes| {
            parts[rank] = bytes.to_vec();
        },
    )?;
    let mut sum = numbers(rank, count);
    sent += peers.fold(bytemuck::cast_slice_mut(&mut sum), Folding::Sum)?;
    // One rank has something, the others zeros.
    let root = count % ranks;
    let mut data = if rank == root { part(9, 4 * count) } else { vec![0; 4 * count] };
    sent += peers.fold(&mut data, Folding::Or)?;
    Ok((parts, sum.into_iter().map(f32::to_bits).collect(), data, sent))
}

fn on_ranks(algorithm: Algorithm, lengths: &[usize], count: usize) -> Vec<Results> {
    let table = ExchangeTable::all(1, algorithm);
    on_all(group(lengths.len()), |mut fabric| {
        let results = exchanged(&mut fabric, &table, lengths, count, TIMEOUT).expect("no fault");
        // Who left before the others were done would look dead to them.
        fabric.barrier(Instant::now() + TIMEOUT).expect("all are done");
        results
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_algorithm_gives_the_bytes_of_one_shot(
        lengths in prop::collection::vec(prop_oneof![Just(0usize), 1..200usize, Just(3000)], 2..=6),
        count in prop_oneof![1..9usize, 9..400usize],
    ) {
        let whole: Vec<Vec<u8>> =
            lengths.iter().enumerate().map(|(rank, &length)| part(rank, length)).collect();
        let mut sum = numbers(0, count);
        for rank in 1..lengths.len() {
            sum.iter_mut().zip(numbers(rank, count)).for_each(|(sum, number)| *sum += number);
        }
        let sum: Vec<u32> = sum.into_iter().map(f32::to_bits).collect();
        for algorithm in ALGORITHMS {
            for (parts, added, data, sent) in on_ranks(algorithm, &lengths, count) {
                prop_assert_eq!(&parts, &whole, "{}", algorithm);
                prop_assert_eq!(&added, &sum, "{}", algorithm);
                prop_assert_eq!(&data, &part(9, 4 * count), "{}", algorithm);
                prop_assert!(sent > 0);
            }
        }
    }
}

#[test]
fn parts_of_unequal_length_are_not_padded_on_the_wire() {
    let lengths = [1000, 10, 0, 100];
    let all: usize = lengths.iter().sum();
    for algorithm in [Algorithm::OneShot, Algorithm::Ring, Algorithm::RecursiveDoubling] {
        let table = ExchangeTable::all(1, algorithm);
        let sent = on_all(group(4), |mut fabric| {
            let rank = fabric.rank();
            let mut exchanges = Exchanges::new(table.clone(), 0, vec![0, 1, 2, 3], rank);
            let mut wire = Wire::new(End::Lent(&mut fabric), TIMEOUT);
            let mut peers = Neighbours::new(&mut wire, &mut exchanges, &[0, 1, 2, 3], 1);
            let own = part(rank, lengths[rank]);
            let met = peers.all_gather(&own, |rank| lengths[rank] as u64, |_, _| ());
            wire.part().expect("all are done");
            met.expect("no fault")
        });
        // Every rank gets every other's part exactly once.
        assert_eq!(sent.iter().sum::<u64>(), 3 * all as u64, "{algorithm}");
    }
}

/// An end that dies after so many exchanges, or says nothing any more.
struct Mortal {
    inner: Option<Inproc>,
    left: usize,
}

impl Fabric for Mortal {
    fn rank(&self) -> usize {
        2
    }

    fn ranks(&self) -> usize {
        4
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => self.inner = None,
        }
        let gone = FabricError::Died { rank: 2 };
        self.inner.as_mut().map_or(Err(gone), |end| end.exchange(call, sends, receives, deadline))
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        let gone = FabricError::Died { rank: 2 };
        self.inner.as_mut().map_or(Err(gone), |end| end.commit(call, deadline))
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.inner.as_mut().map_or(error.clone(), |end| end.abort(error))
    }
}

#[test]
fn rank_that_dies_in_the_midst_of_an_exchange_is_named_to_all_others() {
    for algorithm in ALGORITHMS {
        let table = ExchangeTable::all(1, algorithm);
        for left in 0..5 {
            let errors = on_all(group(4), |mut fabric| {
                let again = |fabric: &mut dyn Fabric| loop {
                    if let Err(error) = exchanged(fabric, &table, &[40, 0, 7, 900], 60, TIMEOUT) {
                        return error;
                    }
                };
                match fabric.rank() {
                    2 => again(&mut Mortal { inner: Some(fabric), left }),
                    _ => again(&mut fabric),
                }
            });
            let died = FabricError::Died { rank: 2 };
            assert!(errors.iter().all(|error| *error == died), "{algorithm} {left}: {errors:?}");
        }
    }
}

#[test]
fn silent_rank_is_named_by_the_rank_that_waits_for_it_and_not_by_those_behind() {
    let timeout = Duration::from_millis(400);
    for algorithm in ALGORITHMS {
        let table = ExchangeTable::all(1, algorithm);
        let everyone_done = std::sync::Barrier::new(4);
        let outcomes = on_all(group(4), |mut fabric| {
            let outcome = match fabric.rank() {
                2 => None,
                _ => exchanged(&mut fabric, &table, &[40, 30, 7, 900], 60, timeout).err(),
            };
            everyone_done.wait();
            outcome
        });
        for error in outcomes.into_iter().flatten() {
            let is_right = matches!(error, FabricError::Deadline { peer: 2, .. });
            assert!(is_right, "{algorithm}: {error}");
        }
    }
}

#[test]
fn ranks_with_different_tables_find_out_from_the_first_message() {
    let tables = [Algorithm::OneShot, Algorithm::Ring].map(|one| ExchangeTable::all(1, one));
    let errors = on_all(group(2), |mut fabric| {
        let rank = fabric.rank();
        let mut exchanges = Exchanges::new(tables[rank].clone(), 0, vec![0, 1], rank);
        let mut wire = Wire::new(End::Lent(&mut fabric), TIMEOUT);
        let plan = crate::ranks::plan_stamp("the same plan", &tables[rank].to_bytes());
        wire.settle(plan, 0).expect("nobody has said anything yet");
        let mut peers = Neighbours::new(&mut wire, &mut exchanges, &[0, 1], 1);
        peers.all_gather(&[rank as u8], |_| 1, |_, _| ()).expect_err("another table").to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("disagree on the place in the run"), "{}", errors[0]);
}

#[test]
fn part_that_has_changed_is_not_sent_as_it_was() {
    let mut fabric = group(1).remove(0);
    let mut wire = Wire::new(End::Lent(&mut fabric), TIMEOUT);
    let own = |_: Range<usize>| &b"old"[..];
    let mut run = Run { own: &own, parts: 1, slots: vec![None], whole: Vec::new(), sent: 0 };
    let text = |message: Option<Message>| message.expect("not empty").bytes()[..3].to_vec();
    assert_eq!(text(run.message(&mut wire, &(0..1), 7)), b"old");
    let new = wire.stamped(&[b"new"], 7);
    let received = Received { from: 0, slots: 0..1, parts: 0..1 };
    run.store(&received, &new.part(0..3), new, |_| 3);
    assert_eq!(text(run.message(&mut wire, &(0..1), 7)), b"new");
    assert_eq!(run.sent, 6);
}
