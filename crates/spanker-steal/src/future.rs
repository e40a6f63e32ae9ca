// SPDX-License-Identifier: Apache-2.0
//! A run as a future, for whoever has an executor: a thread that runs the job and wakes whoever waits. It is no executor.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::backend::panicked;
use crate::error::StealError;
use crate::job::{Cancel, Job};
use crate::report::Report;
use crate::scheduler::WorkStealingScheduler;

/// The outputs of a job, in order, and its report.
pub type Finished = Result<(Vec<u8>, Report), StealError>;

#[derive(Default)]
struct Meeting {
    finished: Option<Finished>,
    /// The result has been taken.
    over: bool,
    waker: Option<Waker>,
}

/// A job that runs; see [`WorkStealingScheduler::spawn`]. Dropped before it is done, it cancels the job.
pub struct Running {
    meeting: Arc<Mutex<Meeting>>,
    cancel: Cancel,
}

fn meet(meeting: &Mutex<Meeting>) -> MutexGuard<'_, Meeting> {
    meeting.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WorkStealingScheduler {
    /// Runs a job on a thread of its own, into memory that comes with the result.
    ///
    /// # Errors
    ///
    /// What [`Job::check`] says, and [`StealError::Job`] if there is no memory for the outputs or no thread. What else
    /// [`run`](Self::run) says is the future's.
    ///
    /// # Examples
    ///
    /// ```
    /// use spanker_steal::{Cpu, Job, WorkStealingScheduler};
    /// use std::sync::Arc;
    ///
    /// let cpu = Cpu::new(2, |items, out: &mut [u8]| {
    ///     items.zip(out).for_each(|(item, out)| *out = item as u8);
    ///     Ok(())
    /// });
    /// let scheduler = Arc::new(WorkStealingScheduler::new(vec![Arc::new(cpu)]));
    /// let running = scheduler.spawn(&Job::new(100, 1))?;
    /// async move {
    ///     let (out, report) = running.await?;
    ///     assert_eq!((out[99], report.done), (99, 100));
    ///     Ok::<(), spanker_steal::StealError>(())
    /// };
    /// # Ok::<(), spanker_steal::StealError>(())
    /// ```
    pub fn spawn(self: &Arc<Self>, job: &Job) -> Result<Running, StealError> {
        let bytes = self.check(job)?;
        let refused = |what: String| StealError::Job { what };
        let mut out = Vec::new();
        out.try_reserve_exact(bytes).map_err(|error| refused(format!("{bytes} bytes: {error}")))?;
        out.resize(bytes, 0);
        let meeting = Arc::new(Mutex::new(Meeting::default()));
        let running = Running { meeting: Arc::clone(&meeting), cancel: job.canceller() };
        let (scheduler, job) = (Arc::clone(self), job.clone());
        let work = move || {
            // Whoever waits is woken, whatever happens.
            let ran = catch_unwind(AssertUnwindSafe(|| scheduler.run(&job, &mut out)));
            let ran = ran.unwrap_or_else(|panic| Err(refused(panicked(panic.as_ref()))));
            let finished = ran.map(|report| (out, report));
            let mut meeting = meet(&meeting);
            meeting.finished = Some(finished);
            if let Some(waker) = meeting.waker.take() {
                waker.wake();
            }
        };
        let thread = std::thread::Builder::new().name("steal run".into()).spawn(work);
        thread.map_err(|error| refused(format!("no thread for the run: {error}")))?;
        Ok(running)
    }
}

impl Future for Running {
    type Output = Finished;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Finished> {
        let mut meeting = meet(&self.meeting);
        if let Some(finished) = meeting.finished.take() {
            meeting.over = true;
            return Poll::Ready(finished);
        }
        meeting.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let meeting = meet(&self.meeting);
        if !meeting.over && meeting.finished.is_none() {
            self.cancel.cancel();
        }
    }
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("cancelled", &self.cancel.is_cancelled()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;
    use std::thread::Thread;

    use super::*;
    use crate::Cpu;

    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on(mut running: Running) -> Finished {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            match Pin::new(&mut running).poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(finished) => return finished,
                Poll::Pending => std::thread::park(),
            }
        }
    }

    fn scheduler() -> Arc<WorkStealingScheduler> {
        let cpu = Cpu::new(2, |items: std::ops::Range<usize>, out: &mut [u8]| {
            items.zip(out).for_each(|(item, out)| *out = item as u8);
            Ok(())
        });
        Arc::new(WorkStealingScheduler::new(vec![Arc::new(cpu)]))
    }

    #[test]
    fn a_run_that_is_awaited_gives_outputs_and_report() {
        let (scheduler, job) = (scheduler(), Job::new(200, 1));
        for _ in 0..2 {
            let (out, report) = block_on(scheduler.spawn(&job).expect("it runs")).expect("done");
            assert_eq!(out, (0..200).map(|item| item as u8).collect::<Vec<_>>());
            assert_eq!(report.done, 200);
        }
    }

    #[test]
    fn a_run_that_is_dropped_is_cancelled_and_bad_jobs_are_refused_at_once() {
        let scheduler = scheduler();
        let job = Job::new(200, 1);
        drop(scheduler.spawn(&job).expect("it runs"));
        assert!(job.canceller().is_cancelled());
        assert_eq!(scheduler.spawn(&Job::new(0, 1)).err(), Some(StealError::NoItems));
        let vast = scheduler.spawn(&Job::new(1 << 40, 1 << 20)).err();
        assert!(matches!(vast, Some(StealError::Job { .. })), "{vast:?}");
    }
}
