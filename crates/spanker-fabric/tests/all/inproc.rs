// SPDX-License-Identifier: Apache-2.0
//! The in-process fabric: conformance, and its behaviour under seeded faults.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use spanker_collective::{Algorithm, Collective, ReduceOp, schedule};
use spanker_fabric::conformance::{Case, on_all};
use spanker_fabric::{
    Call, Fabric, FabricError, Faults, Faulty, Message, Registered, Workspace, conformance,
    execute, execute_registered, inproc,
};

#[test]
fn the_in_process_fabric_conforms() {
    conformance::check(inproc::group);
}

#[test]
fn a_fabric_wrapped_without_faults_conforms() {
    let wrap = |end| Faulty::new(end, Faults::NONE, 1);
    conformance::check(|ranks| inproc::group(ranks).into_iter().map(wrap).collect());
}

/// A fabric that says that it receives messages in place.
struct InPlace(inproc::Inproc);

impl Fabric for InPlace {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn ranks(&self) -> usize {
        self.0.ranks()
    }

    fn receives_in_place(&self, bytes: usize) -> bool {
        bytes > 1000
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(usize, Message)],
        receives: &[usize],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        self.0.exchange(call, sends, receives, deadline)
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        self.0.commit(call, deadline)
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.0.abort(error)
    }
}

#[test]
fn a_fabric_that_receives_in_place_conforms() {
    conformance::check(|ranks| inproc::group(ranks).into_iter().map(InPlace).collect());
}

/// A fabric whose barrier does not wait.
struct NoBarrier(inproc::Inproc);

impl Fabric for NoBarrier {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn ranks(&self) -> usize {
        self.0.ranks()
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(usize, Message)],
        receives: &[usize],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        self.0.exchange(call, sends, receives, deadline)
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        self.0.commit(call, deadline)
    }

    fn barrier(&mut self, _deadline: Instant) -> Result<(), FabricError> {
        Ok(())
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.0.abort(error)
    }
}

#[test]
fn a_barrier_that_does_not_wait_does_not_conform() {
    for (case, wrong) in [
        (Case::Barrier, "left a barrier that rank"),
        (Case::MissedBarrier, "a barrier ended without one of the ranks"),
    ] {
        let settled = std::sync::Barrier::new(3);
        let group = inproc::group(3).into_iter().map(NoBarrier).collect();
        let outcomes = on_all(group, |fabric| {
            conformance::play(case, fabric, &|| {
                settled.wait();
            })
        });
        let error = conformance::judge(case, &outcomes).unwrap_err();
        assert!(error.contains(wrong), "{error}");
    }
}

#[test]
fn a_rank_that_is_late_for_a_barrier_gets_the_fault_of_those_that_waited() {
    let mut ends = inproc::group(2);
    let fault = ends[0].barrier(Instant::now() + Duration::from_millis(20)).unwrap_err();
    assert!(matches!(fault, FabricError::Deadline { rank: 0, peer: 1, .. }), "{fault}");
    assert_eq!(ends[1].barrier(Instant::now() + Duration::from_secs(30)), Err(fault));
}

proptest! {
    /// The same calls give the same bits whether messages are received in place or copied, also when repeated.
    #[test]
    fn results_received_in_place_have_the_bits_of_results_that_are_copied(
        ranks in 1usize..6,
        elements in 16_000usize..40_000,
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
        op in prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max]),
        seed in any::<u32>(),
    ) {
        let plan = schedule(Collective::AllReduce, algorithm, ranks, elements).unwrap();
        let value = |rank: usize, i: usize| {
            let mixed = (seed ^ (rank * 7919 + i) as u32).wrapping_mul(2_654_435_761);
            (mixed >> 8) as f32 / 1e4 - 700.0
        };
        let bits = |fabric: &mut dyn Fabric| {
            let (rank, mut space) = (fabric.rank(), Workspace::new());
            let mut buffer = Registered::<f32>::new(elements);
            for (i, slot) in buffer.as_mut_slice().iter_mut().enumerate() {
                *slot = value(rank, i);
            }
            for _ in 0..3 {
                let soon = Instant::now() + Duration::from_secs(60);
                execute_registered(fabric, &plan, &mut space, &mut buffer, op, soon).unwrap();
            }
            buffer.as_slice().iter().map(|value| value.to_bits()).collect::<Vec<u32>>()
        };
        let copied = on_all(inproc::group(ranks), |mut end| bits(&mut end));
        let in_place = on_all(
            inproc::group(ranks).into_iter().map(InPlace).collect(),
            |mut end| bits(&mut end),
        );
        prop_assert!(copied == in_place, "{algorithm} over {ranks} ranks of {elements}");
    }
}

/// What every rank got, its buffer, and how long it took.
type Outcome = (Result<(), FabricError>, Vec<f32>, Duration);

/// One all-reduce under faults.
fn faulty_all_reduce(seed: u64, faults: Faults, timeout: Duration) -> Vec<Outcome> {
    let ranks = 2 + seed as usize % 5;
    let algorithm = Algorithm::ALL[seed as usize / 5 % 6];
    let plan = schedule(Collective::AllReduce, algorithm, ranks, 50).unwrap();
    let group = inproc::group(ranks).into_iter().map(|end| Faulty::new(end, faults, seed));
    on_all(group.collect(), |mut fabric| {
        let begun = Instant::now();
        let mut data = vec![1.0f32; 50];
        let mut workspace = Workspace::new();
        let outcome =
            execute(&mut fabric, &plan, &mut workspace, &mut data, ReduceOp::Sum, begun + timeout);
        (outcome, data, begun.elapsed())
    })
}

/// Either everyone has the sum, or everyone has the same error and an unchanged buffer.
fn assert_all_or_nothing(seed: u64, outcomes: &[Outcome], timeout: Duration) -> bool {
    let replay =
        format!("replay: SPANKER_SEED={seed} cargo test -p spanker-fabric --test all inproc");
    let (first, _, _) = &outcomes[0];
    let sum = outcomes.len() as f32;
    for (rank, (outcome, data, took)) in outcomes.iter().enumerate() {
        assert_eq!(outcome, first, "seed {seed}, rank {rank}; {replay}");
        let expected = if outcome.is_ok() { sum } else { 1.0 };
        assert!(data.iter().all(|&x| x == expected), "seed {seed}, rank {rank}; {replay}");
        let bound = timeout + Duration::from_secs(5);
        assert!(*took < bound, "seed {seed}, rank {rank} took {took:?}; {replay}");
    }
    first.is_err()
}

fn seeds(count: u64) -> std::ops::Range<u64> {
    match std::env::var("SPANKER_SEED") {
        Ok(text) => {
            let seed = text.parse().expect("SPANKER_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..count,
    }
}

/// Plays some seeds with faults, of which more than `least` must be seen. Whoever fails, all ranks say the same, which
/// `expected` has to be.
fn assert_seen(
    (count, least): (u64, usize),
    faults: Faults,
    timeout: Duration,
    expected: impl Fn(&FabricError) -> bool,
) {
    let mut seen = 0;
    for seed in seeds(count) {
        let outcomes = faulty_all_reduce(seed, faults, timeout);
        if assert_all_or_nothing(seed, &outcomes, timeout) {
            let error = outcomes[0].0.clone().unwrap_err();
            assert!(expected(&error), "seed {seed}: {error}");
            // A death is noticed when it happens, not when time runs out.
            let in_time = outcomes.iter().all(|(_, _, took)| *took < timeout);
            assert!(in_time || !matches!(error, FabricError::Died { .. }), "seed {seed}");
            seen += 1;
        }
    }
    assert!(seen > least || seeds(2).count() == 1, "only {seen} of {count} seeds had a fault");
}

#[test]
fn a_killed_rank_gives_every_other_rank_the_same_error_for_a_thousand_seeds() {
    let faults = Faults { kill: 0.15, ..Faults::NONE };
    assert_seen((1000, 300), faults, Duration::from_secs(30), |error| {
        matches!(error, FabricError::Died { .. })
    });
}

#[test]
fn corrupt_messages_are_errors_and_never_wrong_numbers() {
    let faults = Faults { corrupt: 0.05, ..Faults::NONE };
    assert_seen((300, 50), faults, Duration::from_secs(30), |error| {
        matches!(error, FabricError::Corrupt { .. })
    });
}

#[test]
fn lost_messages_end_the_call_by_the_deadline() {
    let faults = Faults { drop: 0.04, ..Faults::NONE };
    assert_seen((60, 5), faults, Duration::from_millis(60), |error| {
        matches!(error, FabricError::Deadline { .. } | FabricError::Lost { .. })
    });
}

#[test]
fn late_messages_change_nothing() {
    let timeout = Duration::from_secs(30);
    for seed in seeds(60) {
        let delay_most = Duration::from_millis(2);
        let faults = Faults { delay: 0.2, delay_most, ..Faults::NONE };
        let outcomes = faulty_all_reduce(seed, faults, timeout);
        assert!(!assert_all_or_nothing(seed, &outcomes, timeout), "seed {seed}");
    }
}

#[test]
fn all_faults_together_give_the_sum_or_one_error() {
    let timeout = Duration::from_millis(80);
    for seed in seeds(100) {
        let faults = Faults {
            drop: 0.01,
            delay: 0.05,
            delay_most: Duration::from_millis(1),
            corrupt: 0.01,
            kill: 0.02,
        };
        let outcomes = faulty_all_reduce(seed, faults, timeout);
        assert_all_or_nothing(seed, &outcomes, timeout);
    }
}

#[test]
fn registered_buffers_keep_their_values_over_many_calls_of_every_collective() {
    for collective in Collective::ALL.into_iter().filter(|c| c.reduces()) {
        for algorithm in Algorithm::ALL {
            let plan = schedule(collective, algorithm, 3, 10).unwrap();
            let (registered, plain): (Vec<Vec<u32>>, Vec<Vec<u32>>) =
                on_all(inproc::group(3), |mut fabric| {
                    let start: Vec<u32> = (0..10).map(|i| i + 100).collect();
                    let mut buffer = Registered::new(10);
                    buffer.as_mut_slice().copy_from_slice(&start);
                    let mut data = start;
                    let mut workspace = Workspace::new();
                    let deadline = Instant::now() + Duration::from_secs(30);
                    for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Sum] {
                        let (end, w) = (&mut fabric, &mut workspace);
                        execute_registered(end, &plan, w, &mut buffer, op, deadline).unwrap();
                        execute(end, &plan, w, &mut data, op, deadline).unwrap();
                    }
                    (buffer.as_slice().to_vec(), data)
                })
                .into_iter()
                .unzip();
            assert_eq!(registered, plain, "{algorithm} {collective}");
        }
    }
}

#[test]
fn a_group_that_had_a_fault_reports_it_again() {
    let plan = schedule(Collective::Barrier, Algorithm::Tree, 2, 0).unwrap();
    let mut ends = inproc::group(2);
    drop(ends.pop());
    for _ in 0..2 {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut workspace = Workspace::<u8>::new();
        let outcome =
            execute(&mut ends[0], &plan, &mut workspace, &mut [], ReduceOp::Sum, deadline);
        assert_eq!(outcome, Err(FabricError::Died { rank: 1 }));
    }
}

#[test]
fn wrong_arguments_are_refused_with_the_numbers_in_question() {
    let plan = schedule(Collective::AllReduce, Algorithm::Ring, 1, 4).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let run = |plan, data: &mut [f32]| {
        let mut end = inproc::group(1).remove(0);
        let mut workspace = Workspace::new();
        execute(&mut end, plan, &mut workspace, data, ReduceOp::Sum, deadline)
            .map_err(|error| error.to_string())
    };
    let message = "rank 0: the buffer has 3 elements, the schedule 4";
    assert_eq!(run(&plan, &mut [0.0; 3]), Err(message.to_owned()));
    let other = schedule(Collective::AllReduce, Algorithm::Ring, 2, 4).unwrap();
    let message = "rank 0: the schedule is for 2 ranks, the group has 1";
    assert_eq!(run(&other, &mut [0.0; 4]), Err(message.to_owned()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The direct algorithms give the bits of the serial fold, which messages cannot disturb.
    #[test]
    fn direct_algorithms_have_the_bits_of_the_serial_fold(
        ranks in 1usize..9,
        inputs in prop::collection::vec(any::<f32>(), 0..300),
        two in any::<bool>(),
        avg in any::<bool>(),
    ) {
        let len = inputs.len() / ranks;
        let algorithm = if two { Algorithm::TwoShot } else { Algorithm::OneShot };
        let op = if avg { ReduceOp::Avg } else { ReduceOp::Sum };
        let plan = schedule(Collective::AllReduce, algorithm, ranks, len).unwrap();
        let results = on_all(inproc::group(ranks), |mut fabric| {
            let mut data = inputs[Fabric::rank(&fabric) * len..][..len].to_vec();
            let deadline = Instant::now() + Duration::from_secs(30);
            let mut workspace = Workspace::new();
            execute(&mut fabric, &plan, &mut workspace, &mut data, op, deadline).unwrap();
            data
        });
        for i in 0..len {
            let mut total = inputs[i];
            for rank in 1..ranks {
                total += inputs[rank * len + i];
            }
            if avg {
                total /= ranks as f32;
            }
            for result in &results {
                let same = result[i].to_bits() == total.to_bits() || (result[i].is_nan() && total.is_nan());
                prop_assert!(same, "element {i}: {} {total}", result[i]);
            }
        }
    }
}
