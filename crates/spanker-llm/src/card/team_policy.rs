// SPDX-License-Identifier: Apache-2.0
//! Whether sharing work with the team pays at the moment.
//!
//! A helper that is put off its core in the middle of a unit holds everybody up for as long as the system
//! lets someone else run there: milliseconds, where a product takes a tenth of one. Where that happens again
//! and again, a card is faster alone on the core that it has. So after a stall it works alone for a while, and
//! for twice as long after each stall that follows soon.

use std::time::Duration;

/// How long a card works alone after a stall.
const SHORT: Duration = Duration::from_millis(6);
/// The same after many stalls.
const LONG: Duration = Duration::from_secs(1);
/// Shared work without a stall after which the next one counts as the first.
const SMOOTH: Duration = Duration::from_millis(25);
/// What a product may take more than expected before it counts as a stall.
const GRACE: Duration = Duration::from_micros(300);
/// And how many times as long.
const TIMES: f64 = 4.0;

/// Numbers of rows whose products take about equally long: 1, 2 and 3, 4 to 7 and so on.
const CLASSES: usize = 6;

/// What is known of the team.
#[derive(Debug)]
pub(super) struct TeamPolicy {
    /// Bytes of weights in a nanosecond, when shared, for each class of rows; nothing before the first product.
    rates: [f64; CLASSES],
    /// How long the card still works alone.
    alone: Duration,
    /// How long that will be after the next stall.
    pause: Duration,
    /// Shared work since the last stall.
    smooth: Duration,
    /// Whether work is shared whatever happens.
    steady: bool,
}

impl TeamPolicy {
    pub(super) fn new() -> TeamPolicy {
        TeamPolicy {
            rates: [0.0; CLASSES],
            alone: Duration::ZERO,
            pause: SHORT,
            smooth: Duration::ZERO,
            steady: false,
        }
    }

    /// Shares work whatever happens from now on: for whoever measures what sharing takes.
    pub(super) fn hold_together(&mut self) {
        (self.steady, self.alone) = (true, Duration::ZERO);
    }

    /// Whether the card works alone at the moment.
    pub(super) fn alone(&self) -> bool {
        !self.alone.is_zero()
    }

    /// So much time has passed with work of many rows, of which nothing is expected.
    pub(super) fn passed(&mut self, time: Duration) {
        self.alone = self.alone.saturating_sub(time);
    }

    /// A product of so many bytes of weights with so many rows took so long.
    pub(super) fn took(&mut self, rows: usize, bytes: u64, time: Duration) {
        if self.steady {
            return;
        }
        if self.alone() {
            return self.passed(time);
        }
        let class = rows.max(1).ilog2() as usize;
        let Some(usual) = self.rates.get_mut(class) else {
            // So many rows take so long that one stall matters little.
            return;
        };
        let nanos = time.as_nanos() as f64;
        let expected = if *usual > 0.0 { bytes as f64 / *usual } else { nanos };
        if nanos > TIMES * expected + GRACE.as_nanos() as f64 {
            (self.alone, self.smooth) = (self.pause, Duration::ZERO);
            self.pause = (2 * self.pause).min(LONG);
            return;
        }
        let rate = bytes as f64 / nanos.max(1.0);
        *usual = if *usual > 0.0 { 0.95 * *usual + 0.05 * rate } else { rate };
        self.smooth += time;
        if self.smooth >= SMOOTH {
            self.pause = SHORT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Duration = Duration::from_micros(50);
    const STALL: Duration = Duration::from_millis(3);

    /// The time until work is shared again.
    fn pause(policy: &mut TeamPolicy) -> Duration {
        let mut time = Duration::ZERO;
        while policy.alone() {
            policy.took(1, 500_000, 2 * USUAL);
            time += 2 * USUAL;
        }
        time
    }

    #[test]
    fn team_that_stalls_again_and_again_works_alone_for_longer_and_longer() {
        let mut policy = TeamPolicy::new();
        (0..10).for_each(|_| policy.took(1, 500_000, USUAL));
        assert!(!policy.alone());
        let pauses: Vec<Duration> = (0..12)
            .map(|_| {
                policy.took(1, 500_000, STALL);
                assert!(policy.alone());
                pause(&mut policy)
            })
            .collect();
        assert_eq!(pauses[..3], [SHORT, 2 * SHORT, 4 * SHORT]);
        assert_eq!(pauses[11], LONG);
    }

    #[test]
    fn team_that_has_worked_well_for_long_takes_a_stall_lightly() {
        let mut policy = TeamPolicy::new();
        for _ in 0..3 {
            (0..600).for_each(|_| policy.took(1, 500_000, USUAL));
            policy.took(1, 500_000, STALL);
            assert_eq!(pause(&mut policy), SHORT);
        }
    }

    #[test]
    fn pauses_of_large_products_are_as_long_as_those_of_small_ones() {
        let large = 40 * USUAL;
        let mut policy = TeamPolicy::new();
        (0..10).for_each(|_| policy.took(1, 20_000_000, large));
        for _ in 0..12 {
            policy.took(1, 20_000_000, 10 * large);
            let mut alone = Duration::ZERO;
            while policy.alone() {
                policy.took(1, 20_000_000, 2 * large);
                alone += 2 * large;
            }
            assert!(alone <= LONG + 2 * large, "{alone:?}");
        }
    }

    #[test]
    fn team_that_is_held_together_never_works_alone() {
        let mut policy = TeamPolicy::new();
        (0..10).for_each(|_| policy.took(1, 500_000, USUAL));
        policy.took(1, 500_000, STALL);
        assert!(policy.alone());
        policy.hold_together();
        policy.took(1, 500_000, STALL);
        assert!(!policy.alone());
    }

    #[test]
    fn stall_of_a_batch_counts_and_its_usual_time_does_not() {
        let mut policy = TeamPolicy::new();
        for _ in 0..20 {
            policy.took(1, 500_000, USUAL);
            policy.took(16, 500_000, 40 * USUAL);
            assert!(!policy.alone(), "products of many rows take longer");
        }
        policy.took(16, 500_000, 400 * USUAL);
        assert!(policy.alone());
        let mut policy = TeamPolicy::new();
        (0..3).for_each(|turn| policy.took(512, 500_000, [USUAL, 1000 * USUAL, USUAL][turn]));
        assert!(!policy.alone(), "prompts are not watched");
    }

    #[test]
    fn products_of_any_size_at_the_usual_rate_are_no_stalls() {
        let mut policy = TeamPolicy::new();
        for factor in [1u32, 100, 3, 1000, 1] {
            policy.took(1, 500_000 * u64::from(factor), USUAL * factor);
            assert!(!policy.alone());
        }
    }
}
