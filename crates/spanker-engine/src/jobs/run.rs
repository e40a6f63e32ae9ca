// SPDX-License-Identifier: Apache-2.0
//! A job on real threads, cards and GPUs, watched by whoever has asked for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use spanker_steal::{Report, WorkStealingScheduler};

use super::report::JobReport;
use super::request::{Inputs, PreparedJob};
use super::simulated::{by_rule, ideal};
use super::workers::Workers;
use super::{JobError, origin};
use crate::error::Result;

/// The first version's rule is not run where it would take more seconds.
const MOST_ORIGIN: f64 = 60.0;

/// How a job is watched and stopped.
pub struct JobWatch<'a> {
    /// Whether the job should end; asked often, and from several threads.
    pub stop: &'a (dyn Fn() -> bool + Sync),
    /// Called with what is being done before and after the run; nothing if that is over.
    pub progress: &'a dyn Fn(&str),
    /// Called with how far the run is, several times a second.
    pub report: &'a dyn Fn(&Report),
    /// Called with what a user should know although the job goes on.
    pub note: &'a dyn Fn(&str),
}

impl JobWatch<'_> {
    /// Refuses to go on when the job should end.
    pub(super) fn check(&self) -> Result<(), JobError> {
        if (self.stop)() { Err(JobError::Interrupted) } else { Ok(()) }
    }
}

impl PreparedJob {
    /// Runs the job, in virtual time if that was asked for, and compares every byte with what it should be.
    ///
    /// A run that ends early has a report, too: it says what was done, and why there is no more.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`](crate::EngineError::Unavailable) for backends that are not there, and
    /// [`JobError::Interrupted`] if the job was stopped before it began.
    pub fn run(&self, watch: &JobWatch<'_>) -> Result<JobReport> {
        if self.request.simulate {
            return Ok(self.simulate()?);
        }
        let workers = Workers::open(self, 0..self.names.len(), watch)?;
        let scenario = self.scenario(&workers.rates);
        let launches = Arc::default();
        let scheduler = WorkStealingScheduler::new(workers.with_faults(self, &launches)?);
        let items = self.job.items();
        // Touched, so that its pages are there.
        let mut out = vec![0xff; items * self.bytes];
        let cancel = self.job.canceller();
        let begun = Instant::now();
        let ended = scheduler.run_watched(&self.job, &mut out, |report| {
            if (watch.stop)() {
                cancel.cancel();
            }
            (watch.report)(report);
        });
        let seconds = begun.elapsed().as_secs_f64();
        let mut report = JobReport::new(self, ended)?;
        let totals = &mut report.totals;
        totals.took(seconds, ideal(&scenario), report.error.is_none());
        totals.compare(&workers.expected, self.bytes, &out);
        report.launches = launches.load(Ordering::Relaxed);
        if let Inputs::Prompts(questions, _) = &self.inputs {
            report.answers = Some(questions.read(&out, &report.totals.missing));
        }
        // Nobody waits for a rule that is known to take for ever.
        let worth_it =
            report.totals.ideal_seconds.is_finite() && by_rule(&scenario).seconds <= MOST_ORIGIN;
        if self.request.origin && report.answers.is_none() && !report.interrupted && worth_it {
            origin::run(self, &scenario, &workers, watch, &mut report)?;
        }
        Ok(report)
    }
}
