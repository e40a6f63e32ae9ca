// SPDX-License-Identifier: Apache-2.0
//! Faults from seeds: a call succeeds on all ranks with the right sums, or fails on all with the same fault.

use std::time::{Duration, Instant};

use spanker_collective::{Algorithm, Collective, ReduceOp, schedule};
use spanker_fabric::conformance::on_all;
use spanker_fabric::{Fabric, FabricError, Faults, Faulty, Workspace, execute};

use crate::support::group;

/// Seeds of a run, unless `SPANKER_FAULT_SEEDS` says how many.
const SEEDS: u64 = 24;
const RANKS: usize = 3;
const ELEMENTS: usize = 3000;

/// What is wrong with this seed: one message in fifty is lost or changed, one in ten is late, a step in a hundred kills.
fn faults(seed: u64) -> Faults {
    let often = |kind: u64, probability: f64| if seed % 4 == kind { probability } else { 0.0 };
    Faults {
        drop: often(0, 0.02),
        corrupt: often(1, 0.02),
        kill: often(2, 0.01),
        delay: 0.1,
        delay_most: Duration::from_millis(3),
    }
}

/// A rank's part: calls until one fails. How many succeeded, and what ended them.
fn part(mut fabric: Faulty<spanker_fabric_tcp::TcpFabric>) -> (usize, Option<FabricError>) {
    let ring = schedule(Collective::AllReduce, Algorithm::Ring, RANKS, ELEMENTS).expect("legal");
    let mut workspace = Workspace::new();
    let own = fabric.rank() as f32 + 1.0;
    for call in 0..8 {
        let mut data = vec![own; ELEMENTS];
        let deadline = Instant::now() + Duration::from_millis(700);
        let sum = ReduceOp::Sum;
        match execute(&mut fabric, &ring, &mut workspace, &mut data, sum, deadline) {
            Ok(()) => assert!(data.iter().all(|&value| value == 6.0), "a wrong sum"),
            Err(fault) => {
                assert!(data.iter().all(|&value| value == own), "a failed call changed its buffer");
                return (call, Some(fault));
            }
        }
    }
    (8, None)
}

#[test]
fn calls_succeed_on_all_ranks_or_fail_on_all_with_one_fault() {
    let seeds = std::env::var("SPANKER_FAULT_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    let mut faulty = 0;
    for seed in 0..seeds.unwrap_or(SEEDS) {
        let ends = group(RANKS).into_iter();
        let ends = ends.map(|end| Faulty::new(end, faults(seed), seed)).collect();
        let outcomes = on_all(ends, part);
        let same = outcomes.iter().all(|outcome| *outcome == outcomes[0]);
        assert!(
            same,
            "seed {seed}, to be played with SPANKER_FAULT_SEEDS={}: {outcomes:?}",
            seed + 1
        );
        faulty += u64::from(outcomes[0].1.is_some());
    }
    assert!(faulty > 3, "hardly anything went wrong, so hardly anything was tried: {faulty}");
}
