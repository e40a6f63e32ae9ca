// SPDX-License-Identifier: Apache-2.0
//! What came of a job: how much each backend did, what went wrong, and how far it was from the ideal time.

mod lines;

use std::ops::Range;

use serde::{Serialize, Serializer};
use serde_json::json;
use spanker_steal::{BackendReport, Incident, IncidentKind, Report, StealError};

use super::JobError;
use super::backends::BackendKind;
use super::expected::Expected;
use super::questions::PromptAnswer;
use super::request::PreparedJob;
#[cfg(feature = "mpi")]
pub(super) use lines::count;

/// Ranges of missing items that are serialized.
const NAMED: usize = 1000;

/// What came of a job, wherever it ran.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct JobTotals {
    /// Of what is serialized.
    pub version: u32,
    /// What the items are, in a word.
    pub job: &'static str,
    /// What chance started from.
    pub seed: u64,
    /// Items of the job.
    pub items: usize,
    /// Items that are done.
    pub done: usize,
    /// Items that are not.
    pub lost: usize,
    /// Items that were done twice.
    pub duplicated: usize,
    /// Bytes that are not as they should be; nothing if nobody has compared them.
    pub wrong_bytes: Option<usize>,
    /// How long it took.
    pub seconds: f64,
    /// The shortest time in which these backends could do it; infinite if they cannot.
    pub ideal_seconds: f64,
    /// The part of the ideal speed, if the job was done.
    pub efficiency: Option<f64>,
    /// Items that are not done.
    #[serde(serialize_with = "ranges")]
    pub missing: Vec<Range<usize>>,
}

impl JobTotals {
    /// Totals without times and comparisons.
    pub(super) fn new(job: &PreparedJob, missing: Vec<Range<usize>>) -> JobTotals {
        let items = job.job.items();
        let lost = missing.iter().map(ExactSizeIterator::len).sum();
        JobTotals {
            version: 1,
            job: job.request.workload.name(),
            seed: job.request.seed,
            items,
            done: items - lost,
            lost,
            duplicated: 0,
            wrong_bytes: None,
            seconds: 0.0,
            ideal_seconds: f64::INFINITY,
            efficiency: None,
            missing,
        }
    }

    /// Counts the bytes of outputs of so many bytes each that are not as they should be.
    pub(super) fn compare(&mut self, expected: &Expected, bytes: usize, out: &[u8]) {
        self.wrong_bytes = expected.wrong_bytes(self.items, bytes, &self.missing, out);
    }

    /// Says how long the job took and ideally would have taken.
    pub(super) fn took(&mut self, seconds: f64, ideal_seconds: f64, is_done: bool) {
        let is_done = is_done && ideal_seconds.is_finite() && seconds > 0.0;
        self.efficiency = is_done.then(|| ideal_seconds / seconds);
        (self.seconds, self.ideal_seconds) = (seconds, ideal_seconds);
    }
}

/// What came of a job in one process.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct JobReport {
    /// Items, bytes and times.
    #[serde(flatten)]
    pub totals: JobTotals,
    /// The job ran in virtual time.
    pub simulated: bool,
    /// Items that were thrown out and done again.
    pub redone: usize,
    /// Items that a second backend did to compare.
    pub audited: usize,
    /// Tasks that were begun.
    pub launches: usize,
    /// The part of the ideal speed by the first version's rule, and less by what it lost.
    pub origin_efficiency: Option<f64>,
    /// How long that took.
    pub origin_seconds: Option<f64>,
    /// Items that it lost.
    pub origin_lost: Option<usize>,
    /// Bytes that it got wrong.
    pub origin_wrong_bytes: Option<usize>,
    /// Each backend, in the order in which they were given.
    pub backends: Vec<BackendShare>,
    /// What went wrong, in order. Timings that were not believed did not.
    #[serde(serialize_with = "incidents")]
    pub failures: Vec<Incident>,
    /// How many more there were.
    pub more_failures: usize,
    /// Timings that were not believed.
    pub implausible_timings: usize,
    /// What prompts were answered, if the items are prompts.
    pub answers: Option<Vec<PromptAnswer>>,
    /// Why the job did not end well.
    pub error: Option<String>,
    /// It was stopped.
    #[serde(skip)]
    pub interrupted: bool,
}

/// What a backend did of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BackendShare {
    /// Its kind and its place among those of its kind.
    pub name: String,
    /// Items that it did.
    pub items: usize,
    /// In how many tasks.
    pub chunks: usize,
    /// Items a second, as estimated in the end.
    pub rate: f64,
    /// Its number, if it is a card.
    pub card: Option<usize>,
    /// Tasks that it works on at a time.
    pub lanes: usize,
    /// Why it got no more work, if so.
    pub benched: Option<String>,
    /// It has not answered when it was last asked for something.
    #[serde(skip)]
    pub silent: bool,
}

impl JobReport {
    /// What a run says about itself; times and comparisons are still to come.
    ///
    /// # Errors
    /// [`JobError::Steal`] for a job that has not begun.
    pub(super) fn new(
        job: &PreparedJob,
        ended: Result<Report, StealError>,
    ) -> Result<JobReport, JobError> {
        let (report, missing, error, interrupted) = match ended {
            Ok(report) => (report, Vec::new(), None, false),
            Err(error) => {
                let Some(unfinished) = error.unfinished().cloned() else {
                    return Err(error.into());
                };
                let interrupted = matches!(error, StealError::Cancelled(_));
                (unfinished.report, unfinished.missing, Some(error.to_string()), interrupted)
            }
        };
        let all = report.incidents.len();
        let went_wrong = |incident: &Incident| incident.kind != IncidentKind::Implausible;
        let failures: Vec<_> = report.incidents.into_iter().filter(went_wrong).collect();
        let share = |(backend, kind): (BackendReport, &BackendKind)| {
            let last = failures.iter().rfind(|incident| incident.backend == backend.name);
            BackendShare {
                items: backend.items,
                chunks: backend.chunks,
                rate: backend.rate,
                card: kind.card(),
                lanes: job.lanes(*kind),
                silent: last.is_some_and(|incident| incident.kind == IncidentKind::Expired),
                benched: backend.benched,
                name: backend.name,
            }
        };
        let mut totals = JobTotals::new(job, missing);
        (totals.done, totals.lost) = (report.done, totals.items - report.done);
        totals.duplicated = report.duplicated;
        Ok(JobReport {
            totals,
            simulated: job.request.simulate,
            redone: report.redone,
            audited: report.audited,
            launches: 0,
            origin_efficiency: None,
            origin_seconds: None,
            origin_lost: None,
            origin_wrong_bytes: None,
            backends: report.backends.into_iter().zip(job.kinds()).map(share).collect(),
            more_failures: report.more_incidents,
            implausible_timings: all - failures.len(),
            failures,
            answers: None,
            error,
            interrupted,
        })
    }

    /// Says what the first version's rule made of the same job: until when it did something, how many items are right,
    /// and how many bytes are not.
    pub(super) fn compare(&mut self, seconds: f64, right: usize, wrong_bytes: Option<usize>) {
        let JobTotals { items, ideal_seconds, .. } = self.totals;
        self.origin_seconds = Some(seconds);
        self.origin_lost = Some(items - right);
        self.origin_wrong_bytes = wrong_bytes;
        let part = right as f64 / items as f64;
        let efficiency = if right == 0 { 0.0 } else { ideal_seconds / seconds * part };
        self.origin_efficiency = ideal_seconds.is_finite().then_some(efficiency);
    }
}

fn incidents<S: Serializer>(incidents: &[Incident], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(incidents.iter().map(|incident| {
        json!({
            "at_seconds": incident.at.as_secs_f64(),
            "backend": incident.backend,
            "kind": incident.kind.name(),
            "items": [incident.items.start, incident.items.end],
            "what": incident.what,
        })
    }))
}

/// The first ranges, as pairs.
fn ranges<S: Serializer>(ranges: &[Range<usize>], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(ranges.iter().take(NAMED).map(|range| [range.start, range.end]))
}
