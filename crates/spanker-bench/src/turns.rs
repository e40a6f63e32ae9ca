// SPDX-License-Identifier: Apache-2.0
//! The turns in which what is compared is timed: the one measuring loop of this crate.

use std::time::{Duration, Instant};

use crate::error::Result;

/// How long one measured run lasts at least: many short calls are timed together.
const RUN: Duration = Duration::from_millis(1);

/// The part of the budget that each subject runs before it is timed: with the usual budget the time an
/// operating system takes to spread threads over its cores.
const WARM_UP: u32 = 8;

/// How long a subject runs before each of its timed runs, with the usual budget.
const AWAKE: Duration = Duration::from_millis(4);

/// How many repeats the budget is spent on.
const REPEATS: std::ops::RangeInclusive<usize> = 7..=31;

/// Something to time: runs itself `n` times and says how long that took.
pub(crate) type Subject<'a> = dyn FnMut(usize) -> Result<Duration> + 'a;

/// A subject with the number of calls of a turn.
pub(crate) struct Turn<'s, 'a> {
    pub(crate) subject: &'s mut Subject<'a>,
    /// Calls that are timed together.
    pub(crate) calls: usize,
    /// Calls before those, which are not counted. What ran before has left its own data in the caches and perhaps the
    /// helpers asleep. An operating system that wakes them on a busy core takes a time slice to move them.
    pub(crate) before: usize,
}

impl<'s, 'a> Turn<'s, 'a> {
    /// Timed at once.
    pub(crate) fn new(subject: &'s mut Subject<'a>, calls: usize) -> Self {
        Turn { subject, calls, before: 0 }
    }
}

/// Times every subject in turn, again and again, and returns the median seconds per call of each.
pub(crate) fn take_turns(repeats: usize, turns: &mut [Turn<'_, '_>]) -> Result<Vec<f64>> {
    let mut samples = vec![Vec::with_capacity(repeats); turns.len()];
    for _ in 0..repeats {
        for (turn, samples) in turns.iter_mut().zip(&mut samples) {
            if turn.before > 0 {
                (turn.subject)(turn.before)?;
            }
            samples.push((turn.subject)(turn.calls)?.as_secs_f64() / turn.calls as f64);
        }
    }
    Ok(samples.iter().map(|samples| median(samples).unwrap_or(f64::NAN)).collect())
}

/// Runs a subject for a part of the budget. Returns how long one call takes.
pub(crate) fn warm_up(budget: Duration, subject: &mut Subject<'_>) -> Result<Duration> {
    let mut once = subject(1)?;
    let (mut calls, mut spent) = (1, once);
    while spent < budget / WARM_UP && calls < 1_000_000 {
        let more = calls;
        once = subject(more)? / more as u32;
        calls += more;
        spent += once * more as u32;
    }
    Ok(once.max(Duration::from_nanos(20)))
}

/// Warms all subjects up, decides how often each is called, and lets them take turns within the budget. Returns also
/// how many turns there were.
pub(crate) fn in_turns(
    budget: Duration,
    subjects: &mut [&mut Subject<'_>],
) -> Result<(Vec<f64>, usize)> {
    let mut turns = Vec::new();
    let mut longest = Duration::from_nanos(1);
    for subject in subjects {
        let once = warm_up(budget, subject)?;
        let fill =
            |span: Duration| span.as_nanos().div_ceil(once.as_nanos()).clamp(1, 100_000) as usize;
        let (calls, before) = (fill(RUN), fill(AWAKE.min(budget / 100)));
        longest = longest.max(once * calls as u32);
        turns.push(Turn { subject: &mut **subject, calls, before });
    }
    let repeats = (budget.as_nanos() / longest.as_nanos()) as usize;
    let repeats = repeats.clamp(*REPEATS.start(), *REPEATS.end());
    Ok((take_turns(repeats, &mut turns)?, repeats))
}

/// The one in the middle; nothing if there are none.
pub(crate) fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// How long `count` calls of `work` take.
pub(crate) fn timed<E>(
    count: usize,
    mut work: impl FnMut() -> Result<(), E>,
) -> Result<Duration, E> {
    let begun = Instant::now();
    for _ in 0..count {
        work()?;
    }
    Ok(begun.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_take_turns_and_get_medians_of_their_own() {
        let order = std::cell::RefCell::new(Vec::new());
        let mut one = |n: usize| {
            order.borrow_mut().push('a');
            Ok(Duration::from_millis(100) * n as u32)
        };
        let mut other = |n: usize| {
            order.borrow_mut().push('b');
            Ok(Duration::from_micros(100) * n as u32)
        };
        let (medians, repeats) =
            in_turns(Duration::from_millis(400), &mut [&mut one, &mut other]).unwrap();
        assert!((medians[0] - 0.1).abs() < 1e-9 && (medians[1] - 1e-4).abs() < 1e-9);
        assert_eq!(repeats, 7);
        let order: String = order.into_inner().into_iter().collect();
        assert!(order.ends_with("aabbaabbaabb"), "{order}");
    }

    #[test]
    fn a_median_is_the_one_in_the_middle() {
        assert_eq!(median(&[9.0, 1.0, 5.0]), Some(5.0));
        assert_eq!(median(&[]), None);
    }
}
