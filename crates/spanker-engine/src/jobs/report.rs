// SPDX-License-Identifier: Apache-2.0
//! What came of a job: how much each backend did, what went wrong, and how far it was from the ideal time.

use std::ops::Range;

use serde::{Serialize, Serializer};
use serde_json::json;
use spanker_steal::{BackendReport, Incident, IncidentKind, Report, StealError};

use super::backends::BackendKind;
use super::questions::PromptAnswer;
use super::request::PreparedJob;

/// Ranges of missing items that are serialized.
const NAMED: usize = 1000;

/// What the first version's rule made of the same job.
pub(super) struct ByOrigin {
    /// Until the last unit that was done.
    pub(super) seconds: f64,
    /// Items that were done, and are right.
    pub(super) done: usize,
    /// Bytes of them that are wrong, where there are bytes.
    pub(super) wrong_bytes: Option<usize>,
}

/// What came of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct JobReport {
    /// Of what is serialized.
    pub version: u32,
    /// The job ran in virtual time.
    pub simulated: bool,
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
    /// Items that were thrown out and done again.
    pub redone: usize,
    /// Items that a second backend did to compare.
    pub audited: usize,
    /// Tasks that were begun.
    pub launches: usize,
    /// How long it took.
    pub seconds: f64,
    /// The shortest time in which these backends could do it; infinite if they cannot.
    pub ideal_seconds: f64,
    /// The part of the ideal speed, if the job was done.
    pub efficiency: Option<f64>,
    /// The same by the first version's rule, and less by what it lost.
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
    /// Items that are not done.
    #[serde(serialize_with = "ranges")]
    pub missing: Vec<Range<usize>>,
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
    pub(super) fn new(job: &PreparedJob, ended: Result<Report, StealError>) -> JobReport {
        let items = job.job.items();
        let (report, missing, error, interrupted) = match ended {
            Ok(report) => (report, Vec::new(), None, false),
            Err(error) => {
                let interrupted = matches!(error, StealError::Cancelled(_));
                let (report, missing) = match error.unfinished() {
                    Some(unfinished) => (unfinished.report.clone(), unfinished.missing.clone()),
                    None => (nothing(job), std::iter::once(0..items).collect()),
                };
                (report, missing, Some(error.to_string()), interrupted)
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
        JobReport {
            version: 1,
            simulated: job.request.simulate,
            job: job.request.workload.name(),
            seed: job.request.seed,
            items,
            done: report.done,
            lost: items - report.done,
            duplicated: report.duplicated,
            wrong_bytes: Some(0),
            redone: report.redone,
            audited: report.audited,
            launches: 0,
            seconds: 0.0,
            ideal_seconds: f64::INFINITY,
            efficiency: None,
            origin_efficiency: None,
            origin_seconds: None,
            origin_lost: None,
            origin_wrong_bytes: None,
            backends: report.backends.into_iter().zip(job.kinds()).map(share).collect(),
            more_failures: report.more_incidents,
            implausible_timings: all - failures.len(),
            failures,
            missing,
            answers: None,
            error,
            interrupted,
        }
    }

    /// The report with what follows from its times, and from those of the first version's rule.
    pub(super) fn rated(mut self, origin: Option<ByOrigin>) -> JobReport {
        let possible = self.ideal_seconds.is_finite();
        let sound = self.error.is_none() && possible && self.seconds > 0.0;
        self.efficiency = sound.then(|| self.ideal_seconds / self.seconds);
        let Some(ByOrigin { seconds, done, wrong_bytes }) = origin else { return self };
        self.origin_seconds = Some(seconds);
        self.origin_lost = Some(self.items - done);
        self.origin_wrong_bytes = wrong_bytes;
        let part = done as f64 / self.items as f64;
        let efficiency = if done == 0 { 0.0 } else { self.ideal_seconds / seconds * part };
        self.origin_efficiency = possible.then_some(efficiency);
        self
    }
}

/// The report of a run that did not begin.
fn nothing(job: &PreparedJob) -> Report {
    let backend = |name: &String| BackendReport {
        name: name.clone(),
        items: 0,
        chunks: 0,
        rate: 0.0,
        last_chunk: 0,
        benched: None,
    };
    Report {
        items: job.job.items(),
        done: 0,
        duplicated: 0,
        redone: 0,
        audited: 0,
        elapsed: std::time::Duration::ZERO,
        backends: job.names.iter().map(backend).collect(),
        incidents: Vec::new(),
        more_incidents: 0,
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
pub(super) fn ranges<S: Serializer>(ranges: &[Range<usize>], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(ranges.iter().take(NAMED).map(|range| [range.start, range.end]))
}
