// SPDX-License-Identifier: Apache-2.0
//! A comparison of two subjects on a machine that is never quite calm.
//!
//! Both run short batches of as many calls, in the order ours, theirs, theirs, ours, and the next time the other way
//! round: what drifts or comes first counts for both. Each such four gives one ratio, and the median of these is the
//! answer. What disturbs the machine for a while disturbs both sides of a ratio, or few ratios.

use std::time::Duration;

use crate::error::Result;
use crate::turns::{Subject, warm_up};

/// How long a batch lasts at least.
const BATCH: Duration = Duration::from_millis(1);
/// How many fours there are.
const FOURS: std::ops::RangeInclusive<u128> = 15..=250;

/// What a comparison found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pairs {
    /// Median seconds of a call.
    pub(crate) ours: f64,
    pub(crate) theirs: f64,
    /// How many times as fast ours is: the median of all fours.
    pub(crate) ratio: f64,
    /// Where the median lies with a confidence of 95 %.
    pub(crate) range: [f64; 2],
    /// How many fours there were.
    pub(crate) repeats: usize,
}

/// Compares `ours` with `theirs`, within twice `budget`.
///
/// Ranks must get the same durations: they decide how often both are called.
pub(crate) fn in_pairs(
    budget: Duration,
    ours: &mut Subject<'_>,
    theirs: &mut Subject<'_>,
) -> Result<Pairs> {
    let (one, other) = (warm_up(budget, ours)?, warm_up(budget, theirs)?);
    // The batches of the faster one are short, and those of the slower one fill the budget.
    let (once, slower) = (one.min(other), one.max(other));
    let calls = BATCH.as_nanos().div_ceil(once.as_nanos()).clamp(1, 100_000) as usize;
    let four = slower.as_nanos() * calls as u128 * 4;
    let fours = (2 * budget.as_nanos() / four).clamp(*FOURS.start(), *FOURS.end()) as usize;
    let (mut own, mut other, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..fours {
        let order =
            if turn % 2 == 0 { [true, false, false, true] } else { [false, true, true, false] };
        let (mut mine, mut yours) = (0.0, 0.0);
        for is_ours in order {
            let subject: &mut Subject<'_> = if is_ours { &mut *ours } else { &mut *theirs };
            let seconds = subject(calls)?.as_secs_f64() / calls as f64;
            if is_ours {
                own.push(seconds);
                mine += seconds;
            } else {
                other.push(seconds);
                yours += seconds;
            }
        }
        ratios.push(yours / mine);
    }
    let ([_, ours, _], [_, theirs, _]) = (middle(own), middle(other));
    let [low, ratio, high] = middle(ratios);
    Ok(Pairs { ours, theirs, ratio, range: [low, high], repeats: fours })
}

/// The median, with the values on either side that it lies between with a confidence of 95 %.
fn middle(mut samples: Vec<f64>) -> [f64; 3] {
    samples.sort_by(f64::total_cmp);
    let (last, half) = (samples.len() - 1, samples.len() as f64 / 2.0);
    // How many of the samples are below the median is binomial.
    let around = 0.98 * (samples.len() as f64).sqrt();
    let low = (half - around).floor().max(0.0) as usize;
    let high = ((half + around).ceil() as usize).min(last);
    [samples[low], samples[samples.len() / 2], samples[high]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn batches_are_as_long_and_take_turns_both_ways() {
        let order = RefCell::new(Vec::new());
        let mut ours = |n: usize| {
            order.borrow_mut().push(('a', n));
            Ok(Duration::from_micros(100) * n as u32)
        };
        let mut theirs = |n: usize| {
            order.borrow_mut().push(('b', n));
            Ok(Duration::from_micros(50) * n as u32)
        };
        let found = in_pairs(Duration::from_millis(20), &mut ours, &mut theirs).unwrap();
        assert!((found.ratio - 0.5).abs() < 1e-9 && found.repeats == 15, "{found:?}");
        assert!((found.ours - 1e-4).abs() < 1e-9 && (found.theirs - 5e-5).abs() < 1e-9);
        let order = order.into_inner();
        let timed = &order[order.len() - 4 * found.repeats..];
        assert!(timed.iter().all(|&(_, calls)| calls == 20), "{timed:?}");
        let names: String = timed.iter().map(|&(name, _)| name).collect();
        assert!(names.starts_with("abbabaababba"), "{names}");
    }

    #[test]
    fn a_machine_that_slows_down_and_stumbles_does_not_change_the_ratio() {
        let clock = RefCell::new(0u32);
        let at = |n: usize, cost: u32| {
            let mut clock = clock.borrow_mut();
            *clock += 1;
            // Everything takes longer and longer, and every ninth batch ten times as long.
            let stumble = if clock.is_multiple_of(9) { 10 } else { 1 };
            Ok(Duration::from_nanos(u64::from(cost * (1000 + *clock)) * n as u64) * stumble)
        };
        let mut ours = |n: usize| at(n, 20);
        let mut theirs = |n: usize| at(n, 19);
        let found = in_pairs(Duration::from_millis(100), &mut ours, &mut theirs).unwrap();
        assert!((found.ratio - 0.95).abs() < 0.005, "{found:?}");
        assert!(found.range[0] <= found.ratio && found.ratio <= found.range[1]);
    }

    #[test]
    fn the_middle_of_few_samples_is_between_the_first_and_the_last() {
        assert_eq!(middle(vec![3.0]), [3.0; 3]);
        assert_eq!(middle(vec![9.0, 1.0, 5.0]), [1.0, 5.0, 9.0]);
    }
}
