// SPDX-License-Identifier: Apache-2.0
//! Nothing is lost, repeated, reordered or changed, whatever the wire does.

use spanker_link::sim::{Case, Stall, Wire, run};
use spanker_link::{Config, Fault};

/// Runs cases from their seeds; a flaw says how to repeat it.
fn soak(seeds: std::ops::Range<u64>, frames: u64) -> (u64, u64) {
    let (mut delivered, mut broken) = (0, 0);
    for seed in seeds {
        let report = run(&Case::random(seed, frames))
            .unwrap_or_else(|flaw| panic!("{flaw}\nreplay with: scripts/check-link seed {seed}"));
        if report.fault.is_none() {
            assert_eq!(report.delivered, [frames; 2], "seed {seed}");
        }
        delivered += report.delivered.iter().sum::<u64>();
        broken += report.counters.iter().map(|counters| counters.corrupt).sum::<u64>();
    }
    (delivered, broken)
}

// `scripts/check-link` uses the same cases: seeds and numbers of frames are its.
#[test]
fn half_a_million_frames_over_bad_wires_arrive_as_sent() {
    let (delivered, broken) = soak(0..8, 50_000);
    assert!(delivered >= 500_000 && broken > 1_000, "{delivered} delivered, {broken} broken");
}

#[test]
fn another_half_million_frames_over_bad_wires_arrive_as_sent() {
    let (delivered, broken) = soak(100..108, 50_000);
    assert!(delivered >= 500_000 && broken > 1_000, "{delivered} delivered, {broken} broken");
}

#[test]
fn many_short_runs_over_bad_wires_arrive_as_sent() {
    let (delivered, broken) = soak(1_000..1_200, 500);
    assert!(delivered > 100_000 && broken > 500, "{delivered} delivered, {broken} broken");
}

#[test]
fn bit_error_rate_of_1e_4_with_small_frames_is_survived() {
    let wire = Wire { bit_error_rate: 1e-4, ..Wire::clean(500) };
    let case = Case { wires: [wire; 2], frames: [30_000; 2], ..Case::one_way(3, 128, 500, 0) };
    let report = run(&case).unwrap_or_else(|flaw| panic!("{flaw}"));
    assert_eq!((report.fault, report.delivered), (None, [30_000; 2]));
    assert!(report.counters[0].corrupt > 3_000, "{report:?}");
}

#[test]
fn receivers_that_stall_hold_the_sender_without_a_replay() {
    let stall = Some(Stall { chance: 0.01, most: 2_000_000 });
    let case = Case { stall, frames: [20_000; 2], ..Case::one_way(5, 256, 500, 0) };
    let report = run(&case).unwrap_or_else(|flaw| panic!("{flaw}"));
    assert_eq!((report.fault, report.delivered), (None, [20_000; 2]));
    assert_eq!(report.counters.map(|counters| counters.overrun), [0, 0]);
    assert_eq!(report.counters.map(|counters| counters.replayed), [0, 0]);
}

#[test]
fn stalls_with_lost_credit_do_not_leave_the_sender_waiting() {
    let stall = Some(Stall { chance: 0.02, most: 500_000 });
    let wire = Wire { drop: 0.2, ..Wire::clean(500) };
    let mut case = Case { stall, frames: [3_000; 2], ..Case::one_way(6, 64, 500, 0) };
    case.wires = [wire; 2];
    case.ends = case.ends.map(|end| Config { window: 8, ..end });
    let report = run(&case).unwrap_or_else(|flaw| panic!("{flaw}"));
    assert_eq!((report.fault, report.delivered), (None, [3_000; 2]));
}

/// The project's ends with the policy on, over wires with this bit error rate.
fn with_policy(bit_error_rate: f64, sound_lanes: u8) -> Case {
    let mut case = Case::one_way(9, 2048, 500, 40_000);
    case.ends = case.ends.map(|end| Config { saturation: Some(10_000_000), ..end });
    case.wires = [Wire { bit_error_rate, sound_lanes, ..Wire::clean(500) }; 2];
    case
}

#[test]
fn frames_shrink_where_that_helps() {
    // 2 KiB frames break at 2 %, those of 512 bytes at half a per cent.
    let report = run(&with_policy(1e-6, 0)).unwrap_or_else(|flaw| panic!("{flaw}"));
    assert_eq!((report.fault, report.delivered), (None, [0, 40_000]));
    assert_eq!((report.counters[0].shrinks, report.lanes), (1, 4));
}

#[test]
fn lanes_are_halved_until_the_bad_ones_are_out_and_nothing_is_lost() {
    let report = run(&with_policy(1e-4, 1)).unwrap_or_else(|flaw| panic!("{flaw}"));
    assert_eq!((report.fault, report.delivered), (None, [0, 40_000]));
    assert_eq!((report.counters[0].halvings, report.lanes), (2, 1));
}

#[test]
fn wire_that_no_lane_makes_good_ends_in_a_typed_fault() {
    let report = run(&with_policy(1e-4, 0)).unwrap_or_else(|flaw| panic!("{flaw}"));
    assert_eq!(report.fault, Some((0, Fault::Saturated)), "{report:?}");
    assert!(report.counters[0].acked <= report.delivered[1]);
}
