// SPDX-License-Identifier: Apache-2.0
//! A backend that takes as long as its profile says, whatever this machine could do. Its bytes are real, its speed is not.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::backend::{Backend, Capabilities, Failure};

/// An emulated backend: it computes, and then sleeps until as much time has passed as its items would take on a
/// backend of its speed.
///
/// # Examples
///
/// ```
/// use spanker_steal::{Backend, Emulated};
/// use std::time::Duration;
///
/// // A million items a second, and 50 us for every task.
/// let fast = Emulated::new(1e6, Duration::from_micros(50), |items, out: &mut [u8]| {
///     items.zip(out).for_each(|(item, out)| *out = item as u8);
///     Ok(())
/// });
/// let mut out = [0; 2];
/// fast.run(7..9, &mut out)?;
/// assert_eq!(out, [7, 8]);
/// # Ok::<(), spanker_steal::Failure>(())
/// ```
pub struct Emulated<F> {
    rate: f64,
    launch: Duration,
    hot: Vec<(Range<usize>, f64)>,
    work: F,
}

impl<F> Emulated<F>
where
    F: Fn(Range<usize>, &mut [u8]) -> Result<(), Failure> + Send + Sync,
{
    /// So many items a second, so much for every task, and `work` for the bytes.
    #[must_use]
    pub fn new(rate: f64, launch: Duration, work: F) -> Emulated<F> {
        Emulated { rate, launch, hot: Vec::new(), work }
    }

    /// These items take so many times as long as others.
    #[must_use]
    pub fn hot(mut self, items: Range<usize>, factor: f64) -> Emulated<F> {
        self.hot.push((items, factor));
        self
    }
}

/// What some items cost, in items, where some cost so many times as much as others.
pub(crate) fn cost(items: &Range<usize>, hot: &[(Range<usize>, f64)]) -> f64 {
    let more = |(range, factor): &(Range<usize>, f64)| {
        let common = items.end.min(range.end).saturating_sub(items.start.max(range.start));
        common as f64 * (factor - 1.0)
    };
    items.len() as f64 + hot.iter().map(more).sum::<f64>()
}

/// Sleeps as exactly as the system can. By default it puts off wake-ups by 50 us to gather them, which would be as much as
/// a launch.
fn sleep(time: Duration) {
    #[cfg(target_os = "linux")]
    {
        // Where that is not granted, sleeps are longer.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    }
    std::thread::sleep(time);
}

impl<F> Backend for Emulated<F>
where
    F: Fn(Range<usize>, &mut [u8]) -> Result<(), Failure> + Send + Sync,
{
    fn id(&self) -> &'static str {
        "emul"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::PLAIN
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        let begun = Instant::now();
        let seconds = cost(&items, &self.hot) / self.rate;
        (self.work)(items, out)?;
        let items = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let time = self.launch.saturating_add(items);
        sleep(time.saturating_sub(begun.elapsed()));
        Ok(())
    }
}

impl<F> std::fmt::Debug for Emulated<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Emulated").field("rate", &self.rate).finish_non_exhaustive()
    }
}
