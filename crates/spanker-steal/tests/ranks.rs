// SPDX-License-Identifier: Apache-2.0
//! Ranks that share a job by adding to one cursor: in any order of what they send and get, every item is taken once; in
//! virtual time, little is lost to round trips, ranks that slow down and ranks that stop.

use std::collections::VecDeque;
use std::time::Duration;

use proptest::prelude::*;
use spanker_steal::{
    Ask, Capabilities, Fault, Job, RankClaims, Scenario, SimBackend, SimulatedRanks, Spans,
    Trouble, ideal_seconds, simulate_ranks,
};

const LAUNCH: Duration = Duration::from_micros(50);
const TRIPS: [Duration; 2] = [Duration::from_micros(5), Duration::from_micros(100)];

/// A second of work for ranks of these speeds.
fn scenario(speeds: &[f64], items: usize) -> Scenario {
    let unit = items as f64 / speeds.iter().sum::<f64>();
    let rank = |(place, speed): (usize, &f64)| {
        SimBackend::new(format!("rank{place}"), speed * unit, LAUNCH)
    };
    let backends = speeds.iter().enumerate().map(rank).collect();
    Scenario { job: Job::new(items, 0), backends, hot: Vec::new(), jitter: 0.0, seed: 1 }
}

fn with_fault(mut scenario: Scenario, rank: usize, at: f64, trouble: Trouble) -> Scenario {
    let at = Duration::from_secs_f64(at);
    scenario.backends[rank].faults.push(Fault { at, trouble });
    scenario
}

/// A run in which every item was done once.
fn whole(scenario: &Scenario, trip: Duration) -> SimulatedRanks {
    let run = simulate_ranks(scenario, trip).expect("a job");
    assert_eq!((&run.missing[..], run.duplicated, run.hung), (&[][..], 0, false));
    assert_eq!(run.items.iter().sum::<usize>(), scenario.job.items());
    run
}

fn efficiency(scenario: &Scenario, trip: Duration) -> f64 {
    ideal_seconds(scenario) / whole(scenario, trip).seconds
}

fn groups() -> Vec<(&'static str, Vec<f64>)> {
    vec![
        ("1:1:2:4", vec![1.0, 1.0, 2.0, 4.0]),
        ("4 equal", vec![1.0; 4]),
        ("1:20", vec![1.0, 20.0]),
        ("1:2:4:8", vec![1.0, 2.0, 4.0, 8.0]),
        ("one slow, seven fast", [vec![1.0], vec![20.0; 7]].concat()),
        ("64 from 1 to 20", (0..64).map(|place| 1.0 + 19.0 * f64::from(place) / 63.0).collect()),
    ]
}

#[test]
fn efficiency_of_unequal_ranks_is_high_with_short_and_long_round_trips() {
    for (name, speeds) in groups() {
        for trip in TRIPS {
            for items in [20_000, 1_000_000] {
                let reached = efficiency(&scenario(&speeds, items), trip);
                println!("{name}, {items} items, {trip:?}: {reached:.4}");
                assert!(reached >= 0.97, "{name}, {items} items, {trip:?}: {reached}");
            }
        }
    }
}

#[test]
fn efficiency_with_a_rank_that_throttles_stays_high() {
    for (name, speeds) in groups() {
        for trip in TRIPS {
            for rank in [0, speeds.len() - 1] {
                let slow = with_fault(scenario(&speeds, 1_000_000), rank, 0.4, Trouble::Slow(4.0));
                let reached = efficiency(&slow, trip);
                println!("{name}, rank {rank} slow, {trip:?}: {reached:.4}");
                assert!(reached >= 0.97, "{name}, rank {rank}, {trip:?}: {reached}");
            }
        }
    }
}

#[test]
fn rank_that_stops_leaves_the_rest_to_others_and_its_own_items_are_missing() {
    for (name, speeds) in groups() {
        for trouble in [Trouble::Kill, Trouble::Hang(None)] {
            for rank in [0, speeds.len() - 1] {
                let stopped = with_fault(scenario(&speeds, 100_000), rank, 0.5, trouble);
                let run = simulate_ranks(&stopped, TRIPS[1]).expect("a job");
                assert!(!run.hung, "{name}");
                assert_eq!(run.duplicated, 0, "{name}");
                let missing: usize = run.missing.iter().map(ExactSizeIterator::len).sum();
                assert_eq!(run.items.iter().sum::<usize>() + missing, 100_000, "{name}");
                // It held one chunk, which is 12 ms of its work or so.
                let held = 0.03 * stopped.backends[rank].rate;
                assert!(run.missing.len() <= 1 && missing as f64 <= held.max(1.0), "{name}");
                assert!(run.seconds < 1.5 * ideal_seconds(&stopped), "{name}: {}", run.seconds);
            }
        }
    }
}

#[test]
fn items_that_take_long_are_left_to_whoever_is_fast_but_never_for_ever() {
    // Forty items for ranks of 1:20: one item takes the slow rank half of the whole time.
    let coarse = scenario(&[1.0, 20.0], 40);
    let reached = efficiency(&coarse, TRIPS[0]);
    assert!(reached >= 0.85, "{reached}");
    // The fast one stops early: the slow one does everything else.
    let stopped = with_fault(coarse, 1, 0.3, Trouble::Kill);
    let run = simulate_ranks(&stopped, TRIPS[0]).expect("a job");
    assert!(!run.hung);
    let missing: usize = run.missing.iter().map(ExactSizeIterator::len).sum();
    assert!(missing <= 1, "{:?}", run.missing);
    assert_eq!(run.items.iter().sum::<usize>() + missing, 40);
}

#[test]
fn ranks_that_ask_after_the_end_are_told_so_and_the_cursor_stays_near_it() {
    let job = Job::new(100, 8).grain(8);
    let mut rank = RankClaims::new(&job, 1, 2, &Capabilities::PLAIN).expect("a rank");
    assert_eq!(rank.ask(0.0), Ask::Add(8));
    assert_eq!(rank.answer(8, 96, &[0.0, 0.0], 0.0, 1e-6), Some(96..100));
    assert_eq!(rank.ask(2e-6), Ask::Over);
    assert_eq!(rank.answer(8, u64::MAX, &[f64::NAN, -1.0], 0.0, 1e-6), None);
}

#[test]
fn rank_of_a_job_with_priorities_or_beyond_the_last_is_refused() {
    let plain = Capabilities::PLAIN;
    let error = RankClaims::new(&Job::new(10, 1).first(0..1, 1), 0, 2, &plain).unwrap_err();
    assert!(error.to_string().contains("priorities"), "{error}");
    let error = RankClaims::new(&Job::new(10, 1), 2, 2, &plain).unwrap_err();
    assert!(error.to_string().contains("rank 2: there are 2"), "{error}");
    assert!(simulate_ranks(&scenario(&[], 5), TRIPS[0]).is_err());
}

/// What is on its way between a rank and the shared words.
enum Mail {
    There { asked: u64, sent: f64 },
    Back { asked: u64, before: u64, rates: Vec<f64>, sent: f64 },
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Chance says who goes on next: it asks, its addition takes effect, or its answer comes. No time is sensible.
    #[test]
    fn every_item_is_taken_once_whatever_the_order(
        items in 1usize..3000,
        grain in 1usize..20,
        ranks in 1usize..6,
        order in prop::collection::vec((0usize..6, 0.0f64..0.01, 1e-6f64..0.02), 1..400),
    ) {
        let job = Job::new(items, 0).grain(grain);
        let rank = |rank| RankClaims::new(&job, rank, ranks, &Capabilities::PLAIN).expect("a rank");
        let mut all: Vec<RankClaims> = (0..ranks).map(rank).collect();
        let mut mail: Vec<VecDeque<Mail>> = (0..ranks).map(|_| VecDeque::new()).collect();
        let (mut cursor, mut rates) = (0u64, vec![0.0; ranks]);
        let (mut now, mut taken, mut count) = (0.0, Spans::new(), 0);
        let steps = order.iter().cycle().take(200 * (items + 100));
        for &(who, pause, took) in steps {
            let who = who % ranks;
            now += pause;
            match mail[who].pop_front() {
                Some(Mail::There { asked, sent }) => {
                    let before = cursor;
                    cursor += asked;
                    rates[who] = all[who].rate();
                    mail[who].push_back(Mail::Back { asked, before, rates: rates.clone(), sent });
                }
                Some(Mail::Back { asked, before, rates, sent }) => {
                    if let Some(items) = all[who].answer(asked, before, &rates, sent, now) {
                        all[who].timed(items.len(), took);
                        prop_assert!(items.start.is_multiple_of(grain));
                        count += items.len();
                        taken.insert(items);
                    }
                }
                None => match all[who].ask(now) {
                    Ask::Add(asked) => mail[who].push_back(Mail::There { asked, sent: now }),
                    Ask::Later(_) | Ask::Over => {}
                },
            }
        }
        // Those that chance forgot go on alone: what is on its way arrives, and the rest is taken.
        for who in 0..ranks {
            for _ in 0..100 * (items + 100) {
                now += 0.1;
                match mail[who].pop_front() {
                    Some(Mail::There { asked, sent }) => {
                        let before = cursor;
                        cursor += asked;
                        mail[who].push_back(Mail::Back { asked, before, rates: rates.clone(), sent });
                    }
                    Some(Mail::Back { asked, before, rates, sent }) => {
                        if let Some(items) = all[who].answer(asked, before, &rates, sent, now) {
                            count += items.len();
                            taken.insert(items);
                        }
                    }
                    None => match all[who].ask(now) {
                        Ask::Add(asked) => mail[who].push_back(Mail::There { asked, sent: now }),
                        Ask::Later(_) => {}
                        Ask::Over => break,
                    },
                }
            }
        }
        prop_assert_eq!((taken.len(), count), (items, items));
        prop_assert!(cursor < (items + grain) as u64 * (ranks as u64 + 1));
    }

    #[test]
    fn every_item_is_done_once_or_named_whatever_ranks_do(
        speeds in prop::collection::vec(0.1f64..30.0, 1..9),
        items in 1usize..20_000,
        trip in 0u64..1000,
        lanes in 1usize..4,
        jitter in 0.0f64..1.0,
        seed: u64,
        stops in prop::option::of((0usize..9, 0.0f64..2.0)),
        slows in prop::option::of((0usize..9, 0.0f64..1.0, 0.5f64..10.0)),
    ) {
        let mut scenario = Scenario { jitter, seed, ..scenario(&speeds, items) };
        scenario.backends[0].lanes = lanes;
        if let Some((rank, at, factor)) = slows {
            scenario = with_fault(scenario, rank % speeds.len(), at, Trouble::Slow(factor));
        }
        if let Some((rank, at)) = stops {
            scenario = with_fault(scenario, rank % speeds.len(), at, Trouble::Kill);
        }
        let run = simulate_ranks(&scenario, Duration::from_micros(trip)).expect("a job");
        let missing: usize = run.missing.iter().map(ExactSizeIterator::len).sum();
        prop_assert!(!run.hung);
        prop_assert_eq!((run.items.iter().sum::<usize>() + missing, run.duplicated), (items, 0));
        // What its lanes held, what it was about to get, and the rest if there was nobody else.
        let most = stops.map_or(0, |_| lanes + 2);
        prop_assert!(run.missing.len() <= most, "{:?}", run.missing);
    }
}
