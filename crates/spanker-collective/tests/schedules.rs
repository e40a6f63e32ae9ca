// SPDX-License-Identifier: Apache-2.0
//! Every algorithm of every collective, proved for many numbers of ranks and lengths.

use proptest::prelude::*;
use spanker_collective::{
    Algorithm, Collective, CollectiveError, Flaw, Local, Proof, ReduceOp, Schedule, Span, Step,
    Transfer, schedule, verify,
};

fn prove(collective: Collective, algorithm: Algorithm, ranks: usize, len: usize) -> Proof {
    let built = schedule(collective, algorithm, ranks, len).expect("a legal request");
    verify(&built).unwrap_or_else(|error| panic!("{ranks} ranks, {len} elements: {error}"))
}

#[test]
fn every_algorithm_for_small_groups_and_every_short_length_is_proved() {
    for collective in Collective::ALL {
        for algorithm in Algorithm::ALL {
            for ranks in 1..=9 {
                for len in (0..=ranks + 2).chain([2 * ranks + 1, 37]) {
                    for root in [0, ranks / 2, ranks - 1] {
                        prove(collective.with_root(root), algorithm, ranks, len);
                    }
                }
            }
        }
    }
}

#[test]
fn every_algorithm_for_every_group_up_to_65_ranks_is_proved() {
    for collective in Collective::ALL {
        for algorithm in Algorithm::ALL {
            for ranks in 10..=65 {
                for len in [0, 1, ranks - 1, ranks + 3] {
                    prove(collective.with_root(ranks / 3), algorithm, ranks, len);
                }
            }
        }
    }
}

#[test]
fn all_reduce_gives_equal_bits_on_all_ranks_whatever_the_algorithm() {
    for algorithm in Algorithm::ALL {
        for ranks in 1..=33 {
            assert!(prove(Collective::AllReduce, algorithm, ranks, 70).uniform);
        }
    }
}

#[test]
fn direct_algorithms_give_the_serial_fold() {
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        for collective in
            [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce { root: 2 }]
        {
            assert!(prove(collective, algorithm, 7, 40).serial, "{algorithm} {collective}");
        }
    }
    assert!(!prove(Collective::AllReduce, Algorithm::Ring, 7, 40).serial);
    // In rank order, but rounded after each pair where a type is narrower than its accumulator.
    assert!(!prove(Collective::AllReduce, Algorithm::RecursiveDoubling, 3, 40).serial);
}

#[test]
fn rounds_and_traffic_of_all_reduce_match_the_documented_formulas() {
    for n in [2usize, 3, 4, 5, 8, 16, 31] {
        let len = 16 * n;
        let log = n.next_power_of_two().trailing_zeros() as usize;
        let (power, floor) = (n.is_power_of_two(), n.ilog2() as usize);
        let share = 2 * (n - 1) * len / n;
        let cost = |algorithm| {
            let proof = prove(Collective::AllReduce, algorithm, n, len);
            (proof.rounds, proof.sent_most)
        };
        assert_eq!(cost(Algorithm::Ring), (2 * (n - 1), share));
        assert_eq!(cost(Algorithm::HalvingDoubling), (2 * log, share));
        assert_eq!(cost(Algorithm::OneShot), (1, (n - 1) * len));
        assert_eq!(cost(Algorithm::TwoShot), (2, share));
        assert_eq!(cost(Algorithm::Tree).0, 2 * log);
        let doubling = cost(Algorithm::RecursiveDoubling);
        assert_eq!(doubling.0, if power { log } else { floor + 2 });
        assert_eq!(doubling.1, (floor + usize::from(!power)) * len);
    }
}

#[test]
fn a_request_outside_the_bounds_names_what_is_wrong() {
    let error = schedule(Collective::AllReduce, Algorithm::Ring, 0, 4).unwrap_err();
    assert!(error.to_string().contains("over 0 ranks"), "{error}");
    let root = Collective::Broadcast { root: 4 };
    let error = schedule(root, Algorithm::Tree, 4, 4).unwrap_err();
    assert_eq!(error.to_string(), "broadcast: root 4 is not one of 4 ranks");
    let error = schedule(Collective::AllToAll, Algorithm::Ring, 64, usize::MAX).unwrap_err();
    assert!(matches!(error, CollectiveError::TooLarge { ranks: 64, .. }));
    let error = "rong".parse::<Algorithm>().unwrap_err().to_string();
    assert!(error.starts_with("unknown algorithm 'rong' (expected one of: ring,"), "{error}");
    assert!("bogus".parse::<ReduceOp>().is_err());
}

/// A two-rank all-reduce of four elements that is right: both exchange and fold.
fn exchange() -> Vec<Vec<Step>> {
    let (mine, theirs) = (Span::data(0..4), Span::scratch(0, 4));
    (0..2)
        .map(|rank| {
            let peer = 1 - rank;
            let sources = if rank == 0 { vec![mine, theirs] } else { vec![theirs, mine] };
            vec![Step {
                transfers: vec![
                    Transfer::Send { to: peer, span: mine },
                    Transfer::Recv { from: peer, span: theirs, fold: None },
                ],
                locals: vec![Local::Fold { sources, into: mine }],
            }]
        })
        .collect()
}

fn flaw_of(change: impl FnOnce(&mut Vec<Vec<Step>>)) -> Option<Flaw> {
    let mut programs = exchange();
    change(&mut programs);
    let all_reduce = Collective::AllReduce;
    let built = Schedule::from_parts(all_reduce, Algorithm::OneShot, 4, 4, 4, programs);
    match verify(&built) {
        Ok(_) => None,
        Err(CollectiveError::Refused { flaw, .. }) => Some(flaw),
        Err(other) => panic!("unexpected {other}"),
    }
}

#[test]
fn verifier_refuses_each_kind_of_broken_schedule() {
    use spanker_collective::Incoming;
    assert_eq!(flaw_of(|_| ()), None);
    let span = Span::data(1..5);
    let flaw = flaw_of(|p| p[0][0].transfers[0] = Transfer::Send { to: 1, span });
    assert!(matches!(flaw, Some(Flaw::OutOfBounds { rank: 0, len: 4, .. })), "{flaw:?}");
    let span = Span { start: usize::MAX, ..Span::data(0..4) };
    let flaw = flaw_of(|p| p[1][0].transfers[0] = Transfer::Send { to: 0, span });
    assert!(matches!(flaw, Some(Flaw::OutOfBounds { rank: 1, .. })), "{flaw:?}");
    let fold = Some(Incoming::Second);
    let span = Span::data(0..4);
    let flaw = flaw_of(|p| p[0][0].transfers[1] = Transfer::Recv { from: 1, span, fold });
    assert!(matches!(flaw, Some(Flaw::Conflict { rank: 0, .. })), "{flaw:?}");
    let flaw = flaw_of(|p| p[0][0].transfers[0] = Transfer::Send { to: 0, span });
    assert!(matches!(flaw, Some(Flaw::Peer { peer: 0, .. })), "{flaw:?}");
    let flaw = flaw_of(|p| p[0][0].transfers[0] = Transfer::Send { to: 2, span });
    assert!(matches!(flaw, Some(Flaw::Peer { peer: 2, .. })), "{flaw:?}");
    let short = Span::data(0..3);
    let flaw = flaw_of(|p| p[0][0].transfers[0] = Transfer::Send { to: 1, span: short });
    assert!(matches!(flaw, Some(Flaw::Lengths { one: 3, other: 4, .. })), "{flaw:?}");
    let flaw = flaw_of(|p| p[1].clear());
    assert_eq!(flaw, Some(Flaw::Deadlock { waiting: vec![0, 1] }));
    let flaw = flaw_of(|p| {
        let scratch = Span::scratch(0, 4);
        p[0][0].transfers[0] = Transfer::Send { to: 1, span: scratch };
        p[0][0].transfers.remove(1);
    });
    assert!(matches!(flaw, Some(Flaw::Undefined { rank: 0, .. })), "{flaw:?}");
    let flaw = flaw_of(|p| {
        let again = p[0][0].locals[0].clone();
        p[0][0].locals.push(again);
    });
    assert!(matches!(flaw, Some(Flaw::Twice { rank: 0, .. })), "{flaw:?}");
    let flaw = flaw_of(|p| p[1][0].locals.clear());
    assert!(matches!(flaw, Some(Flaw::Wrong { rank: 1, element: 0, .. })), "{flaw:?}");
}

#[test]
fn verifier_refuses_schedules_whose_numbers_cannot_be() {
    let refused = |collective, elements, data, scratch, programs| {
        let built =
            Schedule::from_parts(collective, Algorithm::Ring, elements, data, scratch, programs);
        verify(&built).unwrap_err().to_string()
    };
    let all_reduce = Collective::AllReduce;
    let two = || vec![vec![], vec![]];
    assert!(refused(all_reduce, 4, 4, 0, vec![]).contains("ranks: 0"));
    assert!(refused(Collective::Broadcast { root: 9 }, 4, 4, 0, two()).contains("root: 9"));
    assert!(refused(all_reduce, 4, 3, 0, two()).contains("elements of data: 3"));
    assert!(refused(all_reduce, 4, 4, usize::MAX, two()).contains("elements in all"));
    assert!(refused(all_reduce, usize::MAX, usize::MAX, 0, two()).contains("elements in all"));
    assert!(refused(Collective::AllToAll, usize::MAX, 4, 0, two()).contains("elements of data"));
    assert!(refused(Collective::Barrier, usize::MAX, 0, 0, two()).contains("of a barrier"));
    let many = vec![vec![]; 1024];
    assert!(refused(all_reduce, 65536, 65536, 0, many).contains("elements in all"));
    let fold = Local::Fold { sources: vec![Span::data(0..1)], into: Span::data(0..1) };
    let folding = vec![Step { transfers: vec![], locals: vec![fold] }];
    let found = refused(Collective::AllGather, 2, 2, 0, vec![folding, vec![]]);
    assert!(found.contains("does not reduce"), "{found}");
}

#[test]
fn verifier_refuses_a_wait_on_a_cycle() {
    // Both ranks send in one step and receive in the next: without buffers neither send completes.
    let flaw = flaw_of(|programs| {
        for program in programs.iter_mut() {
            let received = program[0].transfers.pop().expect("a receive");
            let locals = std::mem::take(&mut program[0].locals);
            program.push(Step { transfers: vec![received], locals });
        }
    });
    assert_eq!(flaw, Some(Flaw::Deadlock { waiting: vec![0, 1] }));
}

#[test]
fn verifier_refuses_a_barrier_that_lets_a_rank_leave_early() {
    let token = Span::data(0..0);
    let send = Step { transfers: vec![Transfer::Send { to: 1, span: token }], locals: vec![] };
    let recv = Step {
        transfers: vec![Transfer::Recv { from: 0, span: token, fold: None }],
        locals: vec![],
    };
    let programs = vec![vec![send], vec![recv]];
    let built = Schedule::from_parts(Collective::Barrier, Algorithm::Ring, 0, 0, 0, programs);
    let error = verify(&built).unwrap_err().to_string();
    assert_eq!(error, "ring barrier: rank 0 can leave before rank 1 has entered");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_schedule_of_any_size_is_proved(
        collective in 0usize..9,
        algorithm in 0usize..6,
        ranks in 1usize..40,
        len in 0usize..150,
        root in 0usize..40,
    ) {
        let collective = Collective::ALL[collective].with_root(root % ranks);
        let built = schedule(collective, Algorithm::ALL[algorithm], ranks, len).unwrap();
        prop_assert!(verify(&built).is_ok(), "{:?}", verify(&built));
    }

    /// Taking any one transfer or local out of a schedule must be noticed.
    #[test]
    fn a_schedule_with_a_part_missing_is_refused(
        algorithm in 0usize..6,
        ranks in 2usize..9,
        len in 9usize..40,
        pick in any::<proptest::sample::Index>(),
    ) {
        let built = schedule(Collective::AllReduce, Algorithm::ALL[algorithm], ranks, len).unwrap();
        let mut programs: Vec<Vec<Step>> = (0..ranks).map(|r| built.program(r).to_vec()).collect();
        let parts: Vec<(usize, usize, usize)> = (0..ranks)
            .flat_map(|r| programs[r].iter().enumerate().flat_map(move |(s, step)| {
                (0..step.transfers.len() + step.locals.len()).map(move |i| (r, s, i))
            }).collect::<Vec<_>>())
            .collect();
        let (r, s, i) = parts[pick.index(parts.len())];
        let step = &mut programs[r][s];
        if i < step.transfers.len() {
            step.transfers.remove(i);
        } else {
            step.locals.remove(i - step.transfers.len());
        }
        let broken = Schedule::from_parts(
            built.collective(), built.algorithm(), len, built.data_len(), built.scratch_len(), programs,
        );
        prop_assert!(verify(&broken).is_err());
    }
}
