// SPDX-License-Identifier: Apache-2.0
//! One line of results, and the turns in which its parts are measured.

use std::time::{Duration, Instant};

use serde::Serialize;
use spanker_scheduler::host::ReduceError;
use spanker_scheduler::{Collective, DType};

use super::Case;
use super::samples::Sample;
use crate::sizes::human;

/// A line of the table, and the schema of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    collective: &'static str,
    cards: usize,
    dtype: &'static str,
    op: &'static str,
    algorithm: &'static str,
    threads: usize,
    bytes_per_card: usize,
    count: usize,
    time_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    pub(crate) wrong: usize,
    /// `None` where nothing is moved.
    limit_fraction: Option<f64>,
    /// `None` where the original has no such loop.
    origin_speedup: Option<f64>,
    limit_us: f64,
    origin_us: Option<f64>,
    repeats: usize,
}

/// What was measured, in seconds.
#[derive(Debug)]
pub(crate) struct Times {
    pub(crate) subject: f64,
    pub(crate) limit: f64,
    pub(crate) origin: Option<f64>,
    pub(crate) repeats: usize,
}

impl Row {
    pub(crate) fn new(
        case: &Case,
        dtype: DType,
        algorithm: &'static str,
        threads: usize,
        len: usize,
        wrong: usize,
        times: &Times,
    ) -> Row {
        let bytes = len * dtype.size();
        let algbw = bytes as f64 / times.subject / 1e9;
        let moves = case.collective != Collective::Barrier;
        Row {
            collective: case.collective.name(),
            cards: case.cards,
            dtype: dtype.name(),
            op: if case.collective.reduces() { case.op.name() } else { "none" },
            algorithm,
            threads,
            bytes_per_card: bytes,
            count: len,
            time_us: times.subject * 1e6,
            algbw_gbps: algbw,
            busbw_gbps: algbw * case.collective.bus_factor(case.cards),
            wrong,
            limit_fraction: moves.then_some(times.limit / times.subject),
            origin_speedup: times.origin.map(|origin| origin / times.subject),
            limit_us: times.limit * 1e6,
            origin_us: times.origin.map(|origin| origin * 1e6),
            repeats: times.repeats,
        }
    }

    pub(crate) fn header() -> String {
        format!(
            "{:>8} {:>11} {:>5} {:>9} {:>18} {:>7} {:>11} {:>8} {:>8} {:>7} {:>8} {:>9}\n\
             {:>8} {:>11} {:>5} {:>9} {:>18} {:>7} {:>11} {:>8} {:>8} {:>7} {:>8} {:>9}",
            "size",
            "count",
            "type",
            "op",
            "algorithm",
            "threads",
            "time",
            "algbw",
            "busbw",
            "#wrong",
            "of limit",
            "vs origin",
            "(B)",
            "(elements)",
            "",
            "",
            "",
            "",
            "(us)",
            "(GB/s)",
            "(GB/s)",
            "",
            "",
            "",
        )
    }

    /// The row as `spanker fit link` sees it.
    pub(super) fn sample(&self) -> Sample {
        let (bytes, microseconds) = (self.bytes_per_card, self.time_us);
        Sample { ranks: self.cards, bytes, microseconds }
    }

    pub(crate) fn text(&self) -> String {
        let ratio = |value: Option<f64>, unit: &str| match value {
            Some(value) => format!("{value:.2}{unit}"),
            None => "-".to_owned(),
        };
        format!(
            "{:>8} {:>11} {:>5} {:>9} {:>18} {:>7} {:>11.2} {:>8.2} {:>8.2} {:>7} {:>8} {:>9}",
            human(self.bytes_per_card),
            self.count,
            self.dtype,
            self.op,
            self.algorithm,
            self.threads,
            self.time_us,
            self.algbw_gbps,
            self.busbw_gbps,
            self.wrong,
            ratio(self.limit_fraction, ""),
            ratio(self.origin_speedup, "x"),
        )
    }
}

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
pub(crate) type Subject<'a> = dyn FnMut(usize) -> anyhow::Result<Duration> + 'a;

/// Runs a subject for a part of the budget. Returns how long one call takes.
pub(crate) fn warm_up(budget: Duration, subject: &mut Subject<'_>) -> anyhow::Result<Duration> {
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

/// Times every subject in turn, again and again, and returns the median seconds per call of each.
pub(crate) fn in_turns(
    budget: Duration,
    subjects: &mut [&mut Subject<'_>],
) -> anyhow::Result<(Vec<f64>, usize)> {
    let mut calls = Vec::new();
    let mut longest = Duration::from_nanos(1);
    for subject in subjects.iter_mut() {
        let once = warm_up(budget, subject)?;
        let fill =
            |span: Duration| span.as_nanos().div_ceil(once.as_nanos()).clamp(1, 100_000) as usize;
        let count = fill(RUN);
        longest = longest.max(once * count as u32);
        calls.push((count, fill(AWAKE.min(budget / 100))));
    }
    let repeats = (budget.as_nanos() / longest.as_nanos()) as usize;
    let repeats = repeats.clamp(*REPEATS.start(), *REPEATS.end());
    let mut samples = vec![Vec::with_capacity(repeats); subjects.len()];
    for _ in 0..repeats {
        let turns = subjects.iter_mut().zip(&calls).zip(&mut samples);
        for ((subject, &(count, first)), samples) in turns {
            // What ran before has left its own data in the caches and perhaps the helpers asleep. An
            // operating system that wakes them on a busy core takes a time slice to move them.
            subject(first)?;
            samples.push(subject(count)?.as_secs_f64() / count as f64);
        }
    }
    Ok((samples.into_iter().map(median).collect(), repeats))
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// How long `count` calls of `work` take.
pub(crate) fn timed(
    count: usize,
    mut work: impl FnMut() -> Result<(), ReduceError>,
) -> anyhow::Result<Duration> {
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
        assert_eq!(median(vec![9.0, 1.0, 5.0]), 5.0);
    }
}
