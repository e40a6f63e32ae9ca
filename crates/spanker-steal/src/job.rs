// SPDX-License-Identifier: Apache-2.0
//! A job: how many items, how large their outputs, which of them first, and how much trust there is.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::claims::{MOST_BACKENDS, MOST_ITEMS};
use crate::error::StealError;
use crate::sync::run::{AtomicBool, Ordering};

/// The most priorities of one job.
const MOST_BANDS: usize = 64;

/// How a run deals with time, trouble and trust.
///
/// # Examples
///
/// ```
/// use spanker_steal::Options;
/// use std::time::Duration;
///
/// let strict = Options { sample: 0.05, lease: Duration::from_millis(20), ..Options::STANDARD };
/// assert!(strict.sample > Options::STANDARD.sample);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The longest time that a chunk should take, unless launches cost too much for that.
    pub cap: Duration,
    /// The shortest lease. A task that takes longer than this, and than several times what was expected, is
    /// taken for lost.
    pub lease: Duration,
    /// How long nothing may happen before a run that waits for backends gives up.
    pub patience: Duration,
    /// Failures in a row after which a backend gets no more work.
    pub strikes: u32,
    /// The most bytes of one task's outputs.
    pub chunk_bytes: usize,
    /// Sums of every unit's bytes are made where they are computed and checked where they arrive.
    pub checksums: bool,
    /// The part of every task, from 0 to 1, that another backend does again to compare the bytes. Above zero, some of
    /// the first and of the last task of every backend is among it.
    pub sample: f64,
    /// What the choice of samples starts from.
    pub seed: u64,
    /// How many bytes of outputs may wait for whoever reads a stream.
    pub window_bytes: usize,
}

impl Options {
    /// What suits most jobs.
    pub const STANDARD: Options = Options {
        cap: Duration::from_millis(12),
        lease: Duration::from_millis(20),
        patience: Duration::from_secs(30),
        strikes: 3,
        chunk_bytes: 64 << 20,
        checksums: false,
        sample: 0.0,
        seed: 0,
        window_bytes: 256 << 20,
    };
}

/// Items to be done once each, whoever does them.
///
/// # Examples
///
/// ```
/// use spanker_steal::Job;
///
/// // A million items with outputs of 8 bytes; backends get multiples of 64; the last thousand first.
/// let job = Job::new(1_000_000, 8).grain(64).first(999_040..1_000_000, 1);
/// assert_eq!(job.check(1)?, 8_000_000);
/// # Ok::<(), spanker_steal::StealError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Job {
    pub(crate) items: usize,
    pub(crate) bytes: usize,
    pub(crate) grain: usize,
    pub(crate) urgent: Vec<(Range<usize>, i32)>,
    pub(crate) options: Options,
    pub(crate) cancel: Cancel,
}

impl Job {
    /// So many items, with outputs of so many bytes each; zero bytes if all there is to it happens elsewhere.
    #[must_use]
    pub fn new(items: usize, bytes: usize) -> Job {
        let cancel = Cancel(Arc::new(AtomicBool::new(false)));
        Job { items, bytes, grain: 1, urgent: Vec::new(), options: Options::STANDARD, cancel }
    }

    /// Only whole units of so many items are given out; the last may be shorter.
    #[must_use]
    pub fn grain(mut self, items: usize) -> Job {
        self.grain = items;
        self
    }

    /// Gives `items` a priority: higher ones are given out earlier, and all others have 0. The order of the outputs
    /// stays as it is.
    #[must_use]
    pub fn first(mut self, items: Range<usize>, priority: i32) -> Job {
        self.urgent.push((items, priority));
        self
    }

    /// With these options.
    #[must_use]
    pub fn options(mut self, options: Options) -> Job {
        self.options = options;
        self
    }

    /// How many items there are.
    #[must_use]
    pub fn items(&self) -> usize {
        self.items
    }

    /// A handle that cancels the job.
    #[must_use]
    pub fn canceller(&self) -> Cancel {
        self.cancel.clone()
    }

    /// Checks the job for so many backends and returns the bytes of all outputs.
    ///
    /// # Errors
    ///
    /// What is wrong with it: no items, no backends, too many of either, sizes that overflow, a grain of zero,
    /// priorities of ranges that are not there, overlap, or cut units.
    pub fn check(&self, backends: usize) -> Result<usize, StealError> {
        let Job { items, bytes, grain, .. } = *self;
        let bad = |what: String| Err(StealError::Job { what });
        if items == 0 {
            return Err(StealError::NoItems);
        }
        if backends == 0 {
            return Err(StealError::NoBackends { items });
        }
        if backends > MOST_BACKENDS {
            return Err(StealError::TooManyBackends { backends });
        }
        if items > MOST_ITEMS {
            return Err(StealError::TooManyItems { items });
        }
        let all = items.checked_mul(bytes).filter(|all| *all <= isize::MAX as usize);
        let all = all.ok_or(StealError::Overflow { items, bytes })?;
        if grain == 0 || grain > MOST_ITEMS {
            return bad(format!("a unit of {grain} items: expected 1 to {MOST_ITEMS}"));
        }
        let sample = self.options.sample;
        if !(0.0..=1.0).contains(&sample) {
            return bad(format!("a sample of {sample}: expected 0 to 1"));
        }
        let mut urgent: Vec<_> = self.urgent.iter().map(|(range, _)| range.clone()).collect();
        urgent.sort_by_key(|range| range.start);
        for range in &urgent {
            let whole = |end: usize| end.is_multiple_of(grain) || end == items;
            if range.is_empty() || range.end > items || !whole(range.start) || !whole(range.end) {
                return bad(format!(
                    "priority for items {}..{}: expected whole units of {grain} of {items} items",
                    range.start, range.end
                ));
            }
        }
        if let Some(two) = urgent.windows(2).find(|two| two[0].end > two[1].start) {
            return bad(format!("two priorities for item {}", two[1].start));
        }
        if urgent.len() > MOST_BANDS {
            return bad(format!("{} priorities: at most {MOST_BANDS}", urgent.len()));
        }
        Ok(all)
    }

    /// The items by priority, highest first, and by place.
    pub(crate) fn bands(&self) -> Vec<Range<usize>> {
        let mut urgent = crate::Spans::new();
        for (range, _) in &self.urgent {
            urgent.insert(range.clone());
        }
        let mut bands = self.urgent.clone();
        bands.extend(urgent.gaps(0..self.items).map(|range| (range, 0)));
        bands.sort_by_key(|(range, priority)| (-i64::from(*priority), range.start));
        bands.into_iter().map(|(range, _)| range).collect()
    }

    /// Items of a unit, of which there is one at least.
    pub(crate) fn unit(&self) -> usize {
        self.grain.clamp(1, self.items.max(1))
    }

    /// The most items of one task, by the bytes of its outputs.
    pub(crate) fn most_items(&self) -> usize {
        let most = self.options.chunk_bytes.checked_div(self.bytes).unwrap_or(MOST_ITEMS);
        (most / self.unit()).max(1).saturating_mul(self.unit())
    }

    /// The items of a stream's window, in whole units.
    pub(crate) fn window_items(&self) -> usize {
        match self.options.window_bytes.checked_div(self.bytes) {
            Some(window) => (window / self.grain).max(1).saturating_mul(self.grain),
            None => usize::MAX,
        }
    }
}

/// Cancels a job, from any thread. What is done by then stays done.
///
/// # Examples
///
/// ```
/// use spanker_steal::Job;
///
/// let job = Job::new(100, 8);
/// let cancel = job.canceller();
/// cancel.cancel();
/// assert!(cancel.is_cancelled());
/// ```
#[derive(Debug, Clone)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks the run to end.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was asked to.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
