// SPDX-License-Identifier: Apache-2.0
//! What every fabric must do, as one suite that each backend's tests call with a constructor.
//!
//! A fabric passes if every collective gives the right result by every algorithm, if messages keep
//! their order, if ranks that disagree find out, and if a rank that dies or is silent ends the call for
//! everyone, with the same error, in time.

use std::time::{Duration, Instant};

use spanker_plan::{Algorithm, Collective, DType, Rank, ReduceOp, Schedule, Step, chunk, schedule};
use spanker_reduce::Element;

use crate::{Call, Fabric, FabricError, Pool, Registered, Workspace, execute, execute_registered};

/// Runs the whole suite over groups that `group` makes. Panics with what is wrong.
///
/// # Panics
/// If the fabric does not conform.
pub fn check<F: Fabric + Send>(group: impl Fn(usize) -> Vec<F>) {
    collectives_match_a_plain_loop(&group);
    messages_between_two_ranks_keep_their_order(&group);
    ranks_that_disagree_find_out(&group);
    a_rank_that_dies_is_named_to_all_others(&group);
    a_silent_rank_ends_the_call_at_the_deadline(&group);
}

/// Runs `work` on a thread for each rank and returns what they return, in rank order.
///
/// # Panics
/// If `work` panics.
pub fn on_all<F: Fabric + Send, R: Send>(group: Vec<F>, work: impl Fn(F) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> =
            group.into_iter().map(|fabric| scope.spawn(move || work(fabric))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("the rank's work panicked")).collect()
    })
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A small number that depends on rank and element: sums of these are exact in every type.
fn value(rank: Rank, element: usize) -> u8 {
    ((rank * 7 + element * 3) % 5) as u8
}

fn collectives_match_a_plain_loop<F: Fabric + Send>(group: &impl Fn(usize) -> Vec<F>) {
    for ranks in [1, 2, 3, 4, 5, 7, 8] {
        for collective in Collective::ALL {
            for algorithm in Algorithm::ALL {
                let lens = [0, 1, ranks - 1, 3 * ranks + 1, 200];
                let schedules: Vec<Schedule> = lens
                    .iter()
                    .map(|&len| schedule(collective, algorithm, ranks, len).expect("legal"))
                    .collect();
                on_all(group(ranks), |mut fabric| {
                    let mut workspace = Workspace::new();
                    for schedule in &schedules {
                        check_rank::<i32>(&mut fabric, schedule, &mut workspace, i32::from);
                    }
                    let mut workspace = Workspace::new();
                    for schedule in &schedules {
                        check_rank::<f32>(&mut fabric, schedule, &mut workspace, f32::from);
                    }
                });
            }
        }
    }
}

/// Runs one rank's part and compares what it gets with what the collective promises.
fn check_rank<T: Element>(
    fabric: &mut dyn Fabric,
    schedule: &Schedule,
    workspace: &mut Workspace<T>,
    number: impl Fn(u8) -> T,
) {
    let (rank, n, len) = (fabric.rank(), schedule.ranks(), schedule.elements());
    let collective = schedule.collective();
    let mut data: Vec<T> = (0..schedule.data_len()).map(|i| number(value(rank, i))).collect();
    let before = data.clone();
    // Plain and registered buffers take turns.
    let outcome = if T::DTYPE.is_float() {
        let mut buffer = Registered::new(data.len());
        buffer.as_mut_slice().copy_from_slice(&data);
        let outcome =
            execute_registered(fabric, schedule, workspace, &mut buffer, ReduceOp::Sum, soon());
        data.copy_from_slice(buffer.as_slice());
        outcome
    } else {
        execute(fabric, schedule, workspace, &mut data, ReduceOp::Sum, soon())
    };
    outcome.unwrap_or_else(|error| panic!("{} {collective}: {error}", schedule.algorithm()));
    let sum = |i: usize| number((0..n).map(|r| value(r, i)).sum());
    let owner = |i: usize| (0..n).find(|&r| chunk(len, n, r).contains(&i)).expect("an owner");
    for (i, &found) in data.iter().enumerate() {
        let mine = i < len && owner(i) == rank;
        let block = chunk(len, n, rank);
        let expected = match collective {
            Collective::AllReduce => sum(i),
            Collective::ReduceScatter if mine => sum(i),
            Collective::Reduce { root } if root == rank => sum(i),
            Collective::AllGather => number(value(owner(i), i)),
            Collective::Gather { root } if root == rank => number(value(owner(i), i)),
            Collective::Broadcast { root } => number(value(root, i)),
            Collective::Scatter { root } if mine => number(value(root, i)),
            Collective::AllToAll if i < n * block.len() => {
                number(value(i / block.len(), block.start + i % block.len()))
            }
            _ => before[i],
        };
        let what = (schedule.algorithm(), collective, n, len, rank, i);
        assert!(found == expected, "{what:?}: found {found:?}, expected {expected:?}");
    }
}

/// A call that no schedule belongs to, for tests of bare messages.
fn bare_call() -> Call {
    Call {
        collective: Collective::Barrier,
        algorithm: Algorithm::OneShot,
        elements: 0,
        dtype: DType::U8,
        op: ReduceOp::Sum,
        plan: 0,
    }
}

fn messages_between_two_ranks_keep_their_order<F: Fabric + Send>(group: &impl Fn(usize) -> Vec<F>) {
    on_all(group(2), |mut fabric| {
        let (peer, call, mut pool) = (1 - fabric.rank(), bare_call(), Pool::default());
        for round in 0..50u8 {
            let sends: Vec<_> = (0..20)
                .map(|i| (peer, pool.write(2, |out| out.copy_from_slice(&[round, i]))))
                .collect();
            let letters = fabric.exchange(&call, &sends, &[peer; 20], soon()).expect("no fault");
            for (i, letter) in letters.iter().enumerate() {
                assert_eq!(letter.bytes(), [round, i as u8], "messages out of order");
            }
        }
        fabric.commit(&call, soon()).expect("no fault");
    });
}

fn ranks_that_disagree_find_out<F: Fabric + Send>(group: &impl Fn(usize) -> Vec<F>) {
    let odd_one_out = |ring: Schedule, odd: Schedule, odd_op: ReduceOp| {
        let outcomes = on_all(group(3), |mut fabric| {
            let (schedule, op) =
                if fabric.rank() == 1 { (&odd, odd_op) } else { (&ring, ReduceOp::Sum) };
            let mut data = vec![1.0f32; schedule.data_len()];
            let before = data.clone();
            let outcome =
                execute(&mut fabric, schedule, &mut Workspace::new(), &mut data, op, soon());
            assert_eq!(data, before, "a failed call changed its buffer");
            outcome
        });
        let first = outcomes[0].clone().expect_err("a mismatch went unnoticed");
        assert!(outcomes.iter().all(|other| *other == Err(first.clone())), "{outcomes:?}");
        first
    };
    let plan = |algorithm, len| schedule(Collective::AllReduce, algorithm, 3, len).expect("legal");
    let field = |error| match error {
        FabricError::Mismatch { field, .. } => field,
        other => panic!("expected a mismatch, got {other}"),
    };
    let (ring, sum) = (Algorithm::Ring, ReduceOp::Sum);
    // No message passes between ranks that each think they are the root.
    let rooted =
        |root| schedule(Collective::Broadcast { root }, Algorithm::OneShot, 3, 0).expect("legal");
    assert_eq!(field(odd_one_out(rooted(0), rooted(1), sum)), "collective");
    assert_eq!(field(odd_one_out(plan(ring, 0), plan(ring, 4), sum)), "number of elements");
    let mut steps: Vec<_> = (0..3).map(|rank| plan(ring, 9).program(rank).to_vec()).collect();
    steps[1].push(Step::default());
    let other = Schedule::from_parts(Collective::AllReduce, ring, 9, 9, 0, steps);
    assert_eq!(field(odd_one_out(plan(ring, 9), other, sum)), "schedule");
    assert_eq!(field(odd_one_out(plan(ring, 9), plan(ring, 12), sum)), "number of elements");
    assert_eq!(field(odd_one_out(plan(ring, 9), plan(ring, 9), ReduceOp::Max)), "operation");
    let two_shot = plan(Algorithm::TwoShot, 9);
    assert_eq!(field(odd_one_out(plan(ring, 9), two_shot, sum)), "algorithm");
    let refused = odd_one_out(plan(ring, 9), plan(ring, 9), ReduceOp::BitwiseOr);
    assert!(matches!(refused, FabricError::Refused { rank: 1, .. }), "{refused}");
}

fn a_rank_that_dies_is_named_to_all_others<F: Fabric + Send>(group: &impl Fn(usize) -> Vec<F>) {
    for algorithm in Algorithm::ALL {
        let plan = schedule(Collective::AllReduce, algorithm, 4, 100).expect("legal");
        let begun = Instant::now();
        let outcomes = on_all(group(4), |mut fabric| {
            if fabric.rank() == 2 {
                return None;
            }
            let mut data = vec![1i64; 100];
            let outcome = execute(
                &mut fabric,
                &plan,
                &mut Workspace::new(),
                &mut data,
                ReduceOp::Sum,
                soon(),
            );
            assert_eq!(data, [1; 100], "a failed call changed its buffer");
            Some(outcome)
        });
        let died = FabricError::Died { rank: 2 };
        for outcome in outcomes.into_iter().flatten() {
            assert_eq!(outcome, Err(died.clone()), "{algorithm}");
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "a death took until the deadline");
    }
}

fn a_silent_rank_ends_the_call_at_the_deadline<F: Fabric + Send>(group: &impl Fn(usize) -> Vec<F>) {
    let plan = schedule(Collective::AllReduce, Algorithm::Ring, 3, 100).expect("legal");
    let patience = Duration::from_millis(100);
    let everyone_done = std::sync::Barrier::new(3);
    let outcomes = on_all(group(3), |mut fabric| {
        let mut data = vec![1u8; 100];
        let deadline = Instant::now() + patience;
        let outcome = (fabric.rank() != 1).then(|| {
            execute(&mut fabric, &plan, &mut Workspace::new(), &mut data, ReduceOp::Sum, deadline)
        });
        // The silent rank is there all the time; it only never says anything.
        everyone_done.wait();
        outcome
    });
    let errors: Vec<FabricError> =
        outcomes.into_iter().flatten().map(|outcome| outcome.expect_err("no answer")).collect();
    assert_eq!(errors[0], errors[1]);
    assert!(matches!(errors[0], FabricError::Deadline { .. }), "{}", errors[0]);
}
