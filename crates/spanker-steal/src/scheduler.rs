// SPDX-License-Identifier: Apache-2.0
//! The scheduler: backends, and jobs run over them. Its first half, units dealt round robin and a bare counter, is what the
//! first version had and stays as it was; the rest of this crate is why nobody needs it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, TryLockError};
use std::time::Duration;

use crate::backend::Backend;
use crate::dispatch::{Accepted, Crew};
use crate::error::StealError;
use crate::job::Job;
use crate::report::Report;
use crate::stream::Stream;
use crate::sync::run::{Mutex, MutexGuard};

/// How often progress is told.
const PROGRESS: Duration = Duration::from_millis(100);

/// A unit of work, and the backend that it is dealt to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// The backend's id. Backends may share one.
    pub backend_id: &'static str,
    /// The items.
    pub work_range: Range<usize>,
}

/// Backends that do jobs together.
///
/// [`run`](Self::run) gives each of them chunks that suit its speed until every item is done once. The methods about
/// shards and units are those of the first version: equal units, whatever the speeds, and no record of what became of
/// them.
///
/// # Examples
///
/// Units as the first version had them:
///
/// ```
/// use spanker_steal::WorkStealingScheduler;
///
/// let scheduler = WorkStealingScheduler::new(Vec::new());
/// assert_eq!(scheduler.claim_next_unit(), 0);
/// assert_eq!(scheduler.claim_next_unit(), 1);
/// scheduler.reset_unit_cursor();
/// assert_eq!(scheduler.claim_next_unit(), 0);
/// assert!(scheduler.partition(100).is_empty()); // there is no backend
/// ```
pub struct WorkStealingScheduler {
    crew: Crew,
    next_unit: AtomicUsize,
    /// Held by the run in progress.
    running: Mutex<()>,
}

impl WorkStealingScheduler {
    /// A scheduler over these backends, which do nothing until there is a job.
    #[must_use]
    pub fn new(backends: Vec<Arc<dyn Backend>>) -> WorkStealingScheduler {
        WorkStealingScheduler {
            crew: Crew::new(backends),
            next_unit: AtomicUsize::new(0),
            running: Mutex::new(()),
        }
    }

    /// The backends' names in reports: the id of each, and its place among those with the same id.
    #[must_use]
    pub fn names(&self) -> &[String] {
        self.crew.names()
    }

    /// Checks a job against the backends, and returns the bytes of its outputs.
    pub(crate) fn check(&self, job: &Job) -> Result<usize, StealError> {
        job.check(self.crew.backends.len())
    }

    /// Runs a job and puts the outputs into `out`, in order of the items.
    ///
    /// # Errors
    ///
    /// What [`Job::check`] says, and [`StealError::Output`] if `out` has not exactly the bytes of the job: then
    /// nothing has run. After that, [`StealError::AllLost`], [`StealError::Stalled`], [`StealError::Refused`],
    /// [`StealError::Disagreement`] and [`StealError::Cancelled`] say which items are done; their outputs are in `out`.
    ///
    /// # Examples
    ///
    /// ```
    /// use spanker_steal::{Cpu, Job, WorkStealingScheduler};
    /// use std::sync::Arc;
    ///
    /// let scheduler = WorkStealingScheduler::new(vec![Arc::new(Cpu::new(2, |items, out: &mut [u8]| {
    ///     items.zip(out).for_each(|(item, out)| *out = item as u8);
    ///     Ok(())
    /// }))]);
    /// let mut out = [0; 100];
    /// let report = scheduler.run(&Job::new(100, 1), &mut out)?;
    /// assert_eq!((report.done, out[99]), (100, 99));
    /// # Ok::<(), spanker_steal::StealError>(())
    /// ```
    pub fn run(&self, job: &Job, out: &mut [u8]) -> Result<Report, StealError> {
        self.run_watched(job, out, |_| ())
    }

    /// The same, and tells ten times a second how far it is.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn run_watched(
        &self,
        job: &Job,
        out: &mut [u8],
        mut watch: impl FnMut(&Report),
    ) -> Result<Report, StealError> {
        let need = self.check(job)?;
        if out.len() != need {
            let (items, bytes) = (job.items, job.bytes);
            return Err(StealError::Output { have: out.len(), need, items, bytes });
        }
        let _running = self.begin()?;
        let mut run = self.crew.start(job, usize::MAX)?;
        let mut accepted = VecDeque::new();
        let mut told = Duration::ZERO;
        while !run.ledger.is_over() {
            // What is thrown out is done again and written over.
            run.step(&mut accepted, |_, _| ());
            for Accepted { items, out: from } in accepted.drain(..) {
                out[items.start * job.bytes..items.end * job.bytes].copy_from_slice(&from);
                run.recycle(from);
            }
            let elapsed = run.elapsed();
            if elapsed.saturating_sub(told) >= PROGRESS {
                told = elapsed;
                watch(&Report { elapsed, ..run.ledger.report() });
            }
        }
        run.end()
    }

    /// Runs a job and gives out its outputs as they come, in order of the items. Backends wait while
    /// [`Options::window_bytes`](crate::Options::window_bytes) of outputs wait to be read. A stream that is dropped ends
    /// its run.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run), and [`StealError::Job`] for a job with priorities: a stream goes in order.
    ///
    /// # Examples
    ///
    /// ```
    /// use spanker_steal::{Cpu, Job, WorkStealingScheduler};
    /// use std::sync::Arc;
    ///
    /// let scheduler = WorkStealingScheduler::new(vec![Arc::new(Cpu::new(2, |items, out: &mut [u8]| {
    ///     items.zip(out).for_each(|(item, out)| *out = item as u8);
    ///     Ok(())
    /// }))]);
    /// let mut next = 0;
    /// for block in scheduler.run_streaming(&Job::new(1000, 1))? {
    ///     let block = block?;
    ///     assert_eq!(block.items.start, next);
    ///     next = block.items.end;
    /// }
    /// assert_eq!(next, 1000);
    /// # Ok::<(), spanker_steal::StealError>(())
    /// ```
    pub fn run_streaming(&self, job: &Job) -> Result<Stream<'_>, StealError> {
        self.check(job)?;
        if !job.urgent.is_empty() {
            let what = "a stream goes in order of the items, and the job has priorities".to_owned();
            return Err(StealError::Job { what });
        }
        let running = self.begin()?;
        let window = job.window_items();
        Ok(Stream::new(self.crew.start(job, window)?, job.items, window, running))
    }

    /// Makes sure that there is one run at a time. One that ended in a panic of its caller is over as well.
    fn begin(&self) -> Result<MutexGuard<'_, ()>, StealError> {
        match self.running.try_lock() {
            Ok(running) => Ok(running),
            Err(TryLockError::Poisoned(running)) => Ok(running.into_inner()),
            Err(TryLockError::WouldBlock) => Err(StealError::Busy),
        }
    }

    /// Deals units of equal size to the backends in turn. An error gives no shards:
    /// [`try_partition`](Self::try_partition) tells.
    #[must_use]
    pub fn partition(&self, total: usize) -> Vec<Shard> {
        self.try_partition(total).unwrap_or_default()
    }

    /// Deals units of equal size to the backends in turn. Without work or backends there are none.
    ///
    /// # Errors
    ///
    /// [`StealError::Memory`] if there is no room for the list.
    pub fn try_partition(&self, total: usize) -> Result<Vec<Shard>, StealError> {
        let mut shards = Vec::new();
        self.try_partition_into(total, &mut shards)?;
        Ok(shards)
    }

    /// The same into the caller's list, which is emptied first and keeps its memory. An error leaves it empty.
    pub fn partition_into(&self, total: usize, shards: &mut Vec<Shard>) {
        if self.try_partition_into(total, shards).is_err() {
            shards.clear();
        }
    }

    /// The same, with its error.
    ///
    /// # Errors
    ///
    /// [`StealError::Memory`] if there is no room for the list.
    pub fn try_partition_into(
        &self,
        total: usize,
        shards: &mut Vec<Shard>,
    ) -> Result<(), StealError> {
        shards.clear();
        let backends = &self.crew.backends;
        if backends.is_empty() || total == 0 {
            return Ok(());
        }
        let unit = unit_size(total, backends.len());
        let count = total.div_ceil(unit);
        shards.try_reserve(count).map_err(|_| StealError::Memory { shards: count })?;
        let shard = |unit_index: usize| {
            let start = unit_index * unit;
            Shard {
                backend_id: backends[unit_index % backends.len()].id(),
                work_range: start..total.min(start.saturating_add(unit)),
            }
        };
        shards.extend((0..count).map(shard));
        Ok(())
    }

    /// The next unit's number: one atomic increment, and no more than that.
    #[must_use]
    pub fn claim_next_unit(&self) -> usize {
        self.next_unit.fetch_add(1, Ordering::AcqRel)
    }

    /// Starts the numbers of units from zero again. Whoever is late takes a number of the next round.
    pub fn reset_unit_cursor(&self) {
        self.next_unit.store(0, Ordering::Release);
    }
}

impl std::fmt::Debug for WorkStealingScheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkStealingScheduler")
            .field("names", &self.names())
            .finish_non_exhaustive()
    }
}

/// A quarter of an equal share, one at least.
pub(crate) fn unit_size(total: usize, backends: usize) -> usize {
    (total / backends.saturating_mul(4).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Failure;

    struct Named(&'static str);

    impl Backend for Named {
        fn id(&self) -> &'static str {
            self.0
        }

        fn run(&self, _: Range<usize>, _: &mut [u8]) -> Result<(), Failure> {
            Ok(())
        }
    }

    fn scheduler(ids: &[&'static str]) -> WorkStealingScheduler {
        let backend = |id: &&'static str| -> Arc<dyn Backend> { Arc::new(Named(id)) };
        WorkStealingScheduler::new(ids.iter().map(backend).collect())
    }

    #[test]
    fn units_are_dealt_round_robin_and_cover_everything_once() {
        let shards = scheduler(&["a", "b", "c"]).partition(10);
        let ranges: Vec<_> = shards.iter().map(|shard| shard.work_range.clone()).collect();
        assert_eq!(ranges, (0..10).map(|at| at..at + 1).collect::<Vec<_>>());
        let ids: Vec<_> = shards.iter().map(|shard| shard.backend_id).collect();
        assert_eq!(ids, ["a", "b", "c", "a", "b", "c", "a", "b", "c", "a"]);
        let uneven = scheduler(&["a"]).partition(11);
        assert_eq!(uneven.last().map(|shard| shard.work_range.clone()), Some(10..11));
    }

    #[test]
    fn no_backend_or_no_work_gives_no_shards_and_no_shard_is_empty() {
        assert_eq!(scheduler(&[]).try_partition(10), Ok(Vec::new()));
        assert_eq!(scheduler(&["a"]).try_partition(0), Ok(Vec::new()));
        let few = scheduler(&["a"; 8]).partition(2);
        assert_eq!(few.len(), 2);
        assert!(few.iter().all(|shard| !shard.work_range.is_empty()));
    }

    #[test]
    fn unit_size_of_any_number_of_backends_does_not_overflow() {
        assert_eq!(unit_size(2, usize::MAX), 1);
        assert_eq!(unit_size(usize::MAX, 1), usize::MAX / 4);
        assert_eq!(unit_size(100, 0), 100);
    }

    #[test]
    fn a_partition_into_storage_of_the_caller_reuses_it() {
        let scheduler = scheduler(&["a", "b"]);
        let mut shards = Vec::with_capacity(64);
        scheduler.partition_into(80, &mut shards);
        let place = shards.as_ptr();
        scheduler.partition_into(80, &mut shards);
        assert_eq!((shards.as_ptr(), shards.len()), (place, 8));
    }

    #[test]
    fn names_tell_backends_of_one_kind_apart() {
        assert_eq!(scheduler(&["emul", "cpu", "emul"]).names(), ["emul0", "cpu0", "emul1"]);
    }
}
