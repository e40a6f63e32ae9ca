// SPDX-License-Identifier: Apache-2.0
//! What came of a job: a table for people, an object for programs, and an exit code.

use std::ops::Range;

use anyhow::bail;
use serde_json::{Value, json};
use spanker_steal::{BackendReport, Incident, IncidentKind, Report, StealError};
use spanker_topology::Seconds;

use super::Setup;
use super::questions::Answer;
use crate::{Interrupted, output};

/// Incidents that a table shows.
const SHOWN: usize = 10;
/// Ranges of missing items that JSON names.
const NAMED: usize = 1000;

/// What the first version's rule made of the same job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ByOrigin {
    /// Until the last unit that was done.
    pub(super) seconds: f64,
    /// Items that were done, and are right.
    pub(super) done: usize,
    /// Bytes of them that are wrong, where there are bytes.
    pub(super) wrong_bytes: Option<usize>,
}

/// What came of a job.
pub(super) struct Outcome {
    pub(super) simulated: bool,
    pub(super) report: Report,
    /// Items that are not done.
    pub(super) missing: Vec<Range<usize>>,
    pub(super) error: Option<String>,
    pub(super) interrupted: bool,
    pub(super) seconds: f64,
    /// Infinite if the backends could not do it.
    pub(super) ideal_seconds: f64,
    pub(super) launches: usize,
    pub(super) lost: usize,
    pub(super) duplicated: usize,
    /// Nothing if nobody has compared them.
    pub(super) wrong_bytes: Option<usize>,
    /// What prompts were answered, if the items are prompts.
    pub(super) answers: Option<Vec<Answer>>,
    pub(super) origin: Option<ByOrigin>,
}

impl Outcome {
    /// What a run says about itself; times and comparisons are still to come.
    pub(super) fn of(setup: &Setup, ended: Result<Report, StealError>) -> Outcome {
        let items = setup.job.items();
        let (report, missing, error, interrupted) = match ended {
            Ok(report) => (report, Vec::new(), None, false),
            Err(error) => {
                let interrupted = matches!(error, StealError::Cancelled(_));
                let (report, missing) = match error.unfinished() {
                    Some(unfinished) => (unfinished.report.clone(), unfinished.missing.clone()),
                    None => (nothing(setup), std::iter::once(0..items).collect()),
                };
                (report, missing, Some(error.to_string()), interrupted)
            }
        };
        Outcome {
            simulated: false,
            missing,
            error,
            interrupted,
            seconds: 0.0,
            ideal_seconds: f64::INFINITY,
            launches: 0,
            lost: items - report.done,
            duplicated: report.duplicated,
            wrong_bytes: Some(0),
            answers: None,
            origin: None,
            report,
        }
    }

    /// The part of the ideal speed, if the job was done.
    fn efficiency(&self) -> Option<f64> {
        let sound = self.error.is_none() && self.ideal_seconds.is_finite() && self.seconds > 0.0;
        sound.then(|| self.ideal_seconds / self.seconds)
    }

    /// The same by the first version's rule, and less by what it lost.
    fn origin_efficiency(&self) -> Option<f64> {
        let origin = self.origin.filter(|_| self.ideal_seconds.is_finite())?;
        if origin.done == 0 {
            return Some(0.0);
        }
        let done = origin.done as f64 / self.report.items as f64;
        Some(self.ideal_seconds / origin.seconds * done)
    }

    /// What went wrong. Timings that were not believed did not.
    fn failures(&self) -> impl DoubleEndedIterator<Item = &Incident> {
        self.report.incidents.iter().filter(|incident| incident.kind != IncidentKind::Implausible)
    }

    /// How a backend is in the end.
    fn state(&self, backend: &BackendReport) -> String {
        if let Some(why) = &backend.benched {
            return format!("benched: {why}");
        }
        let last = self.failures().rfind(|incident| incident.backend == backend.name);
        let silent = last.is_some_and(|incident| incident.kind == IncidentKind::Expired);
        if silent { "no answer".to_owned() } else { "ok".to_owned() }
    }

    pub(super) fn to_json(&self, setup: &Setup) -> Value {
        let report = &self.report;
        let ranges = |ranges: &[Range<usize>]| {
            ranges.iter().take(NAMED).map(|r| json!([r.start, r.end])).collect::<Vec<_>>()
        };
        let failure = |incident: &Incident| {
            json!({
                "at_seconds": incident.at.as_secs_f64(),
                "backend": incident.backend,
                "kind": incident.kind.name(),
                "items": [incident.items.start, incident.items.end],
                "what": incident.what,
            })
        };
        let backend = |(place, backend): (usize, &BackendReport)| {
            json!({
                "name": backend.name,
                "items": backend.items,
                "chunks": backend.chunks,
                "rate": backend.rate,
                "card": setup.kinds[place].card(),
                "lanes": setup.lanes(setup.kinds[place]),
                "benched": backend.benched,
            })
        };
        let answers = self.answers.as_ref();
        let answers = answers.map(|all| all.iter().map(Answer::to_json).collect::<Vec<_>>());
        json!({
            "version": 1,
            "simulated": self.simulated,
            "job": setup.kind.name(),
            "seed": setup.seed,
            "items": report.items,
            "done": report.done,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "wrong_bytes": self.wrong_bytes,
            "redone": report.redone,
            "audited": report.audited,
            "launches": self.launches,
            "seconds": self.seconds,
            "ideal_seconds": self.ideal_seconds,
            "efficiency": self.efficiency(),
            "origin_efficiency": self.origin_efficiency(),
            "origin_seconds": self.origin.map(|origin| origin.seconds),
            "origin_lost": self.origin.map(|origin| report.items - origin.done),
            "origin_wrong_bytes": self.origin.and_then(|origin| origin.wrong_bytes),
            "backends": report.backends.iter().enumerate().map(backend).collect::<Vec<_>>(),
            "failures": self.failures().map(failure).collect::<Vec<_>>(),
            "more_failures": report.more_incidents,
            "implausible_timings": report.incidents.len() - self.failures().count(),
            "missing": ranges(&self.missing),
            "answers": answers,
            "error": self.error,
        })
    }

    pub(super) fn show(&self, setup: &Setup) -> anyhow::Result<()> {
        let items = self.report.items;
        let how = if self.simulated { " in virtual time" } else { "" };
        let (job, backends) = (setup.kind.name(), count(setup.kinds.len(), "backend"));
        output::line(&format!("# {job}, {} over {backends}{how}", count(items, "item")))?;
        output::line(&row([
            "backend",
            "items",
            "share",
            "chunks",
            "mean chunk",
            "items/s",
            "state",
        ]))?;
        for (backend, kind) in self.report.backends.iter().zip(&setup.kinds) {
            // Backends are named by their place, which need not be a card's number.
            let card = kind.card().filter(|index| backend.name != format!("card{index}"));
            let card = card.map_or_else(String::new, |index| format!(" (card:{index})"));
            let share = 100.0 * backend.items as f64 / items.max(1) as f64;
            let mean = backend.items.checked_div(backend.chunks).unwrap_or(0);
            output::line(&row([
                &backend.name,
                &backend.items.to_string(),
                &format!("{share:.1} %"),
                &backend.chunks.to_string(),
                &mean.to_string(),
                &rate(backend.rate),
                &(self.state(backend) + &card),
            ]))?;
        }
        output::line("")?;
        self.show_incidents()?;
        self.show_figures()?;
        let Some(answers) = &self.answers else { return Ok(()) };
        output::line("")?;
        answers.iter().try_for_each(|answer| output::line(&answer.line()))
    }

    fn show_incidents(&self) -> anyhow::Result<()> {
        for incident in self.failures().take(SHOWN) {
            let at = incident.at.as_secs_f64();
            output::line(&format!("{at:>9.3} s  {incident}"))?;
        }
        let count = self.failures().count() + self.report.more_incidents;
        if count > SHOWN {
            output::line(&format!("{:>11}  and {} more", "", count - SHOWN))?;
        }
        if count > 0 { output::line("") } else { Ok(()) }
    }

    fn show_figures(&self) -> anyhow::Result<()> {
        let Report { items, done, redone, audited, .. } = self.report;
        let seconds = Seconds(self.seconds);
        match self.efficiency() {
            Some(efficiency) => {
                let ideal = Seconds(self.ideal_seconds);
                output::line(&format!(
                    "efficiency {efficiency:.3} (ideal {ideal}, took {seconds})"
                ))?;
            }
            None => output::line(&format!("unfinished after {seconds}"))?,
        }
        if let (Some(origin), Some(by_origin)) = (self.origin, self.origin_efficiency()) {
            output::line(&origin_line(origin, items, by_origin, self.efficiency()))?;
        }
        if redone + audited > 0 {
            output::line(&format!("{audited} done again to compare, {redone} thrown out"))?;
        }
        let bytes = match self.wrong_bytes {
            None => "not compared".to_owned(),
            Some(0) if done == items => "every byte as expected".to_owned(),
            Some(0) => "every byte of them as expected".to_owned(),
            Some(wrong) => format!("{} wrong", count(wrong, "byte")),
        };
        let (lost, duplicated) = (self.lost, self.duplicated);
        output::line(&format!(
            "done {done} of {items}, lost {lost}, duplicated {duplicated}; {bytes}"
        ))
    }
}

/// How the first version's rule did, and how much better this was.
fn origin_line(origin: ByOrigin, items: usize, by_origin: f64, efficiency: Option<f64>) -> String {
    let mut line = format!("origin's rule {by_origin:.3} ({}", Seconds(origin.seconds));
    if origin.done < items {
        line += &format!(", {} lost", count(items - origin.done, "item"));
    }
    if let Some(wrong @ 1..) = origin.wrong_bytes {
        line += &format!(", {} wrong", count(wrong, "byte"));
    }
    line += ")";
    match efficiency {
        Some(efficiency) if by_origin > 0.0 => line + &format!(": {:.2}x", efficiency / by_origin),
        _ => line,
    }
}

/// Items a second, with a fraction where it matters.
pub(super) fn rate(rate: f64) -> String {
    if rate < 100.0 && rate > 0.0 { format!("{rate:.2}") } else { format!("{rate:.0}") }
}

fn row(cells: [&str; 7]) -> String {
    let [name, items, share, chunks, mean, rate, state] = cells;
    format!("{name:<8} {items:>12} {share:>8} {chunks:>8} {mean:>11} {rate:>12}  {state}")
}

pub(super) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// The report of a run that did not begin.
fn nothing(setup: &Setup) -> Report {
    let backend = |name: &String| BackendReport {
        name: name.clone(),
        items: 0,
        chunks: 0,
        rate: 0.0,
        last_chunk: 0,
        benched: None,
    };
    Report {
        items: setup.job.items(),
        done: 0,
        duplicated: 0,
        redone: 0,
        audited: 0,
        elapsed: std::time::Duration::ZERO,
        backends: setup.names.iter().map(backend).collect(),
        incidents: Vec::new(),
        more_incidents: 0,
    }
}

/// What the exit code says.
pub(super) fn end(outcome: Outcome, setup: &Setup) -> anyhow::Result<()> {
    if outcome.interrupted {
        return Err(Interrupted.into());
    }
    if let Some(error) = outcome.error {
        let mut kinds = outcome.report.backends.iter().zip(&setup.kinds);
        let lost = kinds.any(|(backend, kind)| backend.benched.is_some() && kind.card().is_some());
        let hint =
            if lost { "\nhint: 'spanker cards' shows which answer, and who has them" } else { "" };
        bail!("{error}{hint}");
    }
    if let Some(wrong @ 1..) = outcome.wrong_bytes {
        bail!("{} wrong", count(wrong, "byte"));
    }
    if outcome.lost > 0 || outcome.duplicated > 0 {
        bail!("{} lost and {} done twice", count(outcome.lost, "item"), outcome.duplicated);
    }
    Ok(())
}
