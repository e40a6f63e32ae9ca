// SPDX-License-Identifier: Apache-2.0
//! How fast a backend is, from how long its tasks took. One bad timing moves the estimate by half at most, and a
//! timing that cannot be true does not move it at all. There is no clock here.

/// So many timings are taken as they come; after them, none moves the rate by more than half.
const WARM: u32 = 3;
/// A timing that makes a backend so many times faster than it is known to be is not believed ..
const IMPLAUSIBLE: f64 = 64.0;
/// .. unless so many in a row say so.
const INSISTENT: u32 = 3;
/// No backend does more items in a second.
const MOST_RATE: f64 = 1e15;

/// The rate of one task of a backend, in items a second, and what a task costs however small it is.
///
/// # Examples
///
/// ```
/// use spanker_steal::Rate;
///
/// let mut rate = Rate::unknown();
/// for _ in 0..5 {
///     rate.sample(1000, 1.0)?;
/// }
/// rate.sample(1000, 60.0)?; // one outlier
/// assert!(rate.items_per_second() >= 500.0);
/// assert!(rate.sample(1000, 0.0).is_err()); // no time at all
/// # Ok::<(), spanker_steal::Implausible>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Rate {
    rate: f64,
    launch: f64,
    /// The launch cost was given: it is not estimated.
    told: bool,
    seen: u32,
    refused_in_a_row: u32,
    /// The last timing, if it was far from what was known: a second one like it is no outlier.
    odd: Option<f64>,
    /// Items and seconds of the shortest task: nothing bounds the launch cost better.
    shortest: Option<(f64, f64)>,
}

/// A timing that cannot be true.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{items} items in {seconds:e} s, with {rate:.3e} items/s known before")]
pub struct Implausible {
    /// Items of the task.
    pub items: usize,
    /// How long it is said to have taken.
    pub seconds: f64,
    /// What was known, in items a second; zero if nothing was.
    pub rate: f64,
}

impl Rate {
    /// Nothing is known.
    #[must_use]
    pub fn unknown() -> Rate {
        Rate::told(None, None)
    }

    /// What a backend says about itself: its rate, and its launch cost in seconds. What makes no sense is ignored.
    #[must_use]
    pub fn told(rate: Option<f64>, launch: Option<f64>) -> Rate {
        let sensible = |value: Option<f64>| value.filter(|v| v.is_finite() && *v >= 0.0);
        let rate = sensible(rate).filter(|rate| *rate <= MOST_RATE);
        let launch = sensible(launch);
        Rate {
            rate: rate.unwrap_or(0.0),
            launch: launch.unwrap_or(0.0),
            told: launch.is_some(),
            seen: 0,
            refused_in_a_row: 0,
            odd: None,
            shortest: None,
        }
    }

    /// Items a second, beside launches. Zero while it is unknown.
    #[must_use]
    pub fn items_per_second(&self) -> f64 {
        self.rate
    }

    /// Whether any of it was measured.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.seen > 0
    }

    /// Seconds that a task costs beside its items.
    #[must_use]
    pub fn launch(&self) -> f64 {
        self.launch
    }

    /// Takes a task of `items` items that took `seconds`.
    ///
    /// # Errors
    ///
    /// [`Implausible`], and nothing has changed: no time, less than none, or one in which the backend would have
    /// been many times faster than it is.
    pub fn sample(&mut self, items: usize, seconds: f64) -> Result<(), Implausible> {
        let refused = Implausible { items, seconds, rate: self.rate };
        if items == 0 || !seconds.is_finite() || seconds <= 0.0 {
            return Err(refused);
        }
        let count = items as f64;
        // A task that is hardly more than its launch says nothing about the rate: half of it counts at least.
        let rate = count / (seconds - self.launch).max(0.5 * seconds);
        if rate > MOST_RATE {
            return Err(refused);
        }
        if self.seen >= WARM && rate > IMPLAUSIBLE * self.rate {
            self.refused_in_a_row += 1;
            if self.refused_in_a_row < INSISTENT {
                self.odd = None;
                return Err(refused);
            }
        } else {
            self.refused_in_a_row = 0;
        }
        self.rate = if self.seen < WARM { rate } else { self.moved(rate) };
        self.seen = self.seen.saturating_add(1);
        self.learn_launch(count, seconds);
        Ok(())
    }

    /// The rate after a timing that says `rate`. One that is far off moves it by half; two on the same side move it to the
    /// nearer of both.
    fn moved(&mut self, rate: f64) -> f64 {
        let known = self.rate;
        let odd = |rate: f64| rate < 0.5 * known || rate > 2.0 * known;
        match self.odd.replace(rate).filter(|last| odd(*last) && odd(rate)) {
            Some(last) if last < known && rate < known => last.max(rate),
            Some(last) if last > known && rate > known => last.min(rate),
            // As far below as it may be, this halves; and above, it adds a half at most.
            _ => 0.5 * known + 0.5 * rate.min(2.0 * known),
        }
    }

    /// Takes the launch cost from the shortest task and one that is clearly larger.
    fn learn_launch(&mut self, items: f64, seconds: f64) {
        let shortest = self.shortest.get_or_insert((items, seconds));
        if seconds < shortest.1 {
            *shortest = (items, seconds);
        }
        let (few, short) = *shortest;
        if !self.told && items >= 2.0 * few && seconds > short {
            let slope = (seconds - short) / (items - few);
            let launch = (short - few * slope).clamp(0.0, short);
            self.launch = if self.launch > 0.0 { 0.5 * (self.launch + launch) } else { launch };
        }
        self.launch = if self.told { self.launch } else { self.launch.min(short) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn warm(rate: f64) -> Rate {
        let mut known = Rate::unknown();
        for _ in 0..8 {
            known.sample(1000, 1000.0 / rate).expect("plausible");
        }
        known
    }

    proptest! {
        #[test]
        fn rate_after_one_outlier_has_moved_by_half_at_most(
            rate in 1e-3f64..1e9, items in 1usize..1_000_000, seconds in 1e-9f64..1e9,
        ) {
            let mut known = warm(rate);
            let before = known.items_per_second();
            let _ = known.sample(items, seconds);
            let after = known.items_per_second();
            prop_assert!((after - before).abs() <= 0.5 * before * (1.0 + 1e-12));
        }

        #[test]
        fn rate_that_is_steady_again_is_found_again(rate in 1.0f64..1e6, factor in 0.05f64..20.0) {
            let mut known = warm(rate);
            for _ in 0..30 {
                let _ = known.sample(1000, 1000.0 / (rate * factor));
            }
            let found = known.items_per_second();
            prop_assert!((found / (rate * factor) - 1.0).abs() < 0.01, "{} for {}", found, rate * factor);
        }

        #[test]
        fn launch_cost_is_told_apart_from_the_rate(rate in 1e3f64..1e6, launch in 1e-6f64..1e-3) {
            let mut known = Rate::unknown();
            for items in [1usize, 8, 64, 512, 4096, 4096, 4096, 4096, 4096, 4096] {
                known.sample(items, launch + items as f64 / rate).expect("plausible");
            }
            prop_assert!((known.items_per_second() / rate - 1.0).abs() < 0.1);
            prop_assert!((known.launch() / launch - 1.0).abs() < 0.1);
        }
    }

    #[test]
    fn timings_that_cannot_be_true_are_refused_and_change_nothing() {
        let mut known = warm(100.0);
        let before = known.clone();
        for (items, seconds) in
            [(10, 0.0), (10, -1.0), (10, f64::NAN), (10, f64::INFINITY), (0, 1.0), (10, 1e-300)]
        {
            assert!(known.sample(items, seconds).is_err(), "{items} items in {seconds} s");
        }
        assert_eq!(known.items_per_second(), before.items_per_second());
        let error = known.sample(1_000_000, 1.0).expect_err("ten thousand times faster");
        assert_eq!(error.items, 1_000_000);
    }

    #[test]
    fn rate_that_insists_on_being_faster_is_believed_in_steps() {
        let mut known = warm(100.0);
        let tries = (0..40).filter(|_| known.sample(100_000, 1.0).is_err()).count();
        assert!(tries >= 2, "{tries}");
        assert!((known.items_per_second() / 100_000.0 - 1.0).abs() < 0.01);
    }
}
