// SPDX-License-Identifier: Apache-2.0
//! How much of the ideal speed is reached, in virtual time: the stated bound as a property, the cases that other rules get
//! wrong, and the first version's rule beside it. Nothing here depends on the machine.

use std::ops::Range;
use std::time::Duration;

use proptest::prelude::*;
use spanker_steal::{
    Fault, Job, Scenario, SimBackend, Trouble, efficiency_bound, ideal_seconds, origin, simulate,
};

const LAUNCH: Duration = Duration::from_micros(50);

/// A second of work for backends of these speeds. `told` is whether the speeds are known beforehand.
fn scenario(speeds: &[f64], items: usize, told: bool) -> Scenario {
    let unit = items as f64 / speeds.iter().sum::<f64>();
    let backend = |(place, speed): (usize, &f64)| {
        let backend = SimBackend::new(format!("emul{place}"), speed * unit, LAUNCH);
        SimBackend { told, ..backend }
    };
    let backends = speeds.iter().enumerate().map(backend).collect();
    Scenario { job: Job::new(items, 0), backends, hot: Vec::new(), jitter: 0.0, seed: 1 }
}

fn with_fault(mut scenario: Scenario, backend: usize, at: f64, trouble: Trouble) -> Scenario {
    let at = Duration::from_secs_f64(at);
    scenario.backends[backend].faults.push(Fault { at, trouble });
    scenario
}

fn with_hot(mut scenario: Scenario, items: Range<usize>, factor: f64) -> Scenario {
    scenario.hot.push((items, factor));
    scenario
}

/// The part of the ideal speed; every item must have been done once.
fn efficiency(scenario: &Scenario) -> f64 {
    let run = simulate(scenario);
    assert!(run.outcome.is_ok(), "{:?}", run.outcome);
    assert_eq!((run.lost, run.duplicated, run.hung), (0, 0, false));
    ideal_seconds(scenario) / run.seconds
}

fn against_origin(scenario: &Scenario) -> f64 {
    origin(scenario).seconds / simulate(scenario).seconds
}

/// Speeds that other rules stumble over.
fn groups() -> Vec<(&'static str, Vec<f64>)> {
    let one_slow = [vec![1.0], vec![20.0; 7]].concat();
    let steps = (0..64).map(|place| 1.0 + 19.0 * f64::from(place) / 63.0).collect();
    let halves = (0..64).map(|place| if place % 2 == 0 { 1.0 } else { 20.0 }).collect();
    vec![
        ("1:2:4:8", vec![1.0, 2.0, 4.0, 8.0]),
        ("one slow, seven fast", one_slow),
        ("1:20", vec![1.0, 20.0]),
        ("2 equal", vec![1.0; 2]),
        ("8 equal", vec![1.0; 8]),
        ("64 equal", vec![1.0; 64]),
        ("64 from 1 to 20", steps),
        ("64, half 1 and half 20", halves),
    ]
}

#[test]
fn efficiency_for_ratios_up_to_twenty_and_sixty_four_backends_is_high() {
    for (name, speeds) in groups() {
        for told in [false, true] {
            for items in [20_000, 1_000_000] {
                let reached = efficiency(&scenario(&speeds, items, told));
                assert!(reached >= 0.98, "{name}, {items} items, told {told}: {reached}");
            }
        }
    }
}

#[test]
fn efficiency_with_a_card_that_throttles_stays_high() {
    for (name, speeds) in groups() {
        for (at, factor) in [(0.2, 3.0), (0.5, 10.0), (0.8, 2.0), (0.5, 30.0)] {
            let last = speeds.len() - 1;
            let case =
                with_fault(scenario(&speeds, 1_000_000, false), last, at, Trouble::Slow(factor));
            let reached = efficiency(&case);
            assert!(reached >= 0.97, "{name}, {factor} times slower at {at}: {reached}");
        }
    }
}

#[test]
fn efficiency_with_a_hot_tail_stays_high() {
    for (name, speeds) in groups() {
        for (part, factor) in [(0.9, 10.0), (0.7, 4.0), (0.95, 20.0)] {
            let items = 1_000_000;
            let tail = (items as f64 * part) as usize..items;
            let reached = efficiency(&with_hot(scenario(&speeds, items, false), tail, factor));
            assert!(reached >= 0.97, "{name}, {factor} times the cost from {part} on: {reached}");
        }
    }
}

#[test]
fn efficiency_with_one_death_stays_high() {
    for (name, speeds) in groups().into_iter().filter(|(_, speeds)| speeds.len() > 2) {
        for at in [0.1, 0.3, 0.5, 0.7, 0.9] {
            for trouble in [Trouble::Kill, Trouble::Hang(None)] {
                let last = speeds.len() - 1;
                let case = with_fault(scenario(&speeds, 1_000_000, false), last, at, trouble);
                let reached = efficiency(&case);
                assert!(reached >= 0.97, "{name}, {trouble:?} at {at}: {reached}");
            }
        }
    }
}

#[test]
fn the_first_versions_rule_is_far_behind_where_speeds_differ_and_not_ahead_where_they_do_not() {
    let times = |speeds: &[f64]| against_origin(&scenario(speeds, 1_000_000, false));
    let doubling = times(&[1.0, 2.0, 4.0, 8.0]);
    assert!(doubling >= 1.8, "1:2:4:8: {doubling}");
    let one_slow = times(&[1.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0]);
    assert!(one_slow >= 4.0, "one slow, seven fast: {one_slow}");
    for count in [2, 4, 8, 16, 64] {
        let equal = times(&vec![1.0; count]);
        assert!(equal >= 0.99, "{count} equal: {equal}");
    }
}

#[test]
fn the_first_versions_rule_loses_what_a_dead_backend_held() {
    let case = with_fault(scenario(&[1.0, 1.0], 80_000, false), 1, 0.3, Trouble::Kill);
    assert_eq!(origin(&case).lost, 10_000);
    assert_eq!(simulate(&case).lost, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn efficiency_of_steady_known_rates_is_never_below_the_bound(
        speeds in prop::collection::vec(1.0f64..20.0, 1..=64),
        launch_us in 1u64..2000,
        seconds in 0.2f64..20.0,
    ) {
        let launch = Duration::from_micros(launch_us);
        // Items are small where every backend has at least some thousands of them.
        let sum: f64 = speeds.iter().sum();
        let items = (sum * 4000.0) as usize;
        let backend = |(place, speed): (usize, &f64)| SimBackend {
            told: true,
            ..SimBackend::new(format!("b{place}"), speed * 4000.0 / seconds, launch)
        };
        let backends = speeds.iter().enumerate().map(backend).collect();
        let scenario =
            Scenario { job: Job::new(items, 0), backends, hot: Vec::new(), jitter: 0.0, seed: 1 };
        let bound = efficiency_bound(launch.as_secs_f64(), ideal_seconds(&scenario));
        let reached = efficiency(&scenario);
        prop_assert!(reached >= bound, "{} is below {}", reached, bound);
    }
}
