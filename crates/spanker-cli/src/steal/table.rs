// SPDX-License-Identifier: Apache-2.0
//! What came of a job: a table for people, and an exit code.

use anyhow::bail;
use spanker_engine::jobs::{BackendShare, JobReport, JobTotals};
use spanker_topology::Seconds;

use crate::{Interrupted, output};

/// Incidents that a table shows.
const SHOWN: usize = 10;

/// Shows a report.
pub(super) fn show(report: &JobReport) -> anyhow::Result<()> {
    let JobTotals { job, items, .. } = report.totals;
    let how = if report.simulated { " in virtual time" } else { "" };
    let backends = count(report.backends.len(), "backend");
    output::line(&format!("# {job}, {} over {backends}{how}", count(items, "item")))?;
    let header = ["backend", "items", "share", "chunks", "mean chunk", "items/s", "state"];
    let row = |backend: &BackendShare| {
        let share = 100.0 * backend.items as f64 / items.max(1) as f64;
        let mean = backend.items.checked_div(backend.chunks).unwrap_or(0);
        vec![
            backend.name.clone(),
            backend.items.to_string(),
            format!("{share:.1} %"),
            backend.chunks.to_string(),
            mean.to_string(),
            rate(backend.rate),
            state(backend),
        ]
    };
    let rows = report.backends.iter().map(row).collect();
    output::line(&format!("{}\n", output::table(&header, rows, &header[1..6])))?;
    show_failures(report)?;
    show_figures(report)?;
    let Some(answers) = &report.answers else { return Ok(()) };
    output::line("")?;
    answers.iter().try_for_each(|answer| output::line(&answer.to_string()))
}

/// How a backend is in the end.
fn state(backend: &BackendShare) -> String {
    let state = match &backend.benched {
        Some(why) => format!("benched: {why}"),
        None if backend.silent => "no answer".to_owned(),
        None => "ok".to_owned(),
    };
    // Backends are named by their place, which need not be a card's number.
    match backend.card.filter(|index| backend.name != format!("card{index}")) {
        Some(index) => format!("{state} (card:{index})"),
        None => state,
    }
}

fn show_failures(report: &JobReport) -> anyhow::Result<()> {
    for failure in report.failures.iter().take(SHOWN) {
        output::line(&format!("{:>9.3} s  {failure}", failure.at.as_secs_f64()))?;
    }
    let count = report.failures.len() + report.more_failures;
    if count > SHOWN {
        output::line(&format!("{:>11}  and {} more", "", count - SHOWN))?;
    }
    if count > 0 { output::line("") } else { Ok(()) }
}

fn show_figures(report: &JobReport) -> anyhow::Result<()> {
    show_efficiency(&report.totals)?;
    if let Some(line) = origin_line(report) {
        output::line(&line)?;
    }
    let JobReport { redone, audited, .. } = report;
    if redone + audited > 0 {
        output::line(&format!("{audited} done again to compare, {redone} thrown out"))?;
    }
    show_counts(&report.totals)
}

/// Shows how far a job was from the ideal time.
pub(super) fn show_efficiency(totals: &JobTotals) -> anyhow::Result<()> {
    let (ideal, seconds) = (Seconds(totals.ideal_seconds), Seconds(totals.seconds));
    output::line(&match totals.efficiency {
        Some(efficiency) => format!("efficiency {efficiency:.3} (ideal {ideal}, took {seconds})"),
        None => format!("unfinished after {seconds}"),
    })
}

/// Shows how many items there were, and are done, lost and done twice.
pub(super) fn show_counts(totals: &JobTotals) -> anyhow::Result<()> {
    let JobTotals { items, done, lost, duplicated, .. } = totals;
    let bytes = match totals.wrong_bytes {
        None => "not compared".to_owned(),
        Some(0) if done == items => "every byte as expected".to_owned(),
        Some(0) => "every byte of them as expected".to_owned(),
        Some(wrong) => format!("{} wrong", count(wrong, "byte")),
    };
    output::line(&format!("done {done} of {items}, lost {lost}, duplicated {duplicated}; {bytes}"))
}

/// How the first version's rule did, and how much better this was.
fn origin_line(report: &JobReport) -> Option<String> {
    let efficiency = report.origin_efficiency?;
    let mut line = format!("origin's rule {efficiency:.3} ({}", Seconds(report.origin_seconds?));
    if let Some(lost @ 1..) = report.origin_lost {
        line += &format!(", {} lost", count(lost, "item"));
    }
    if let Some(wrong @ 1..) = report.origin_wrong_bytes {
        line += &format!(", {} wrong", count(wrong, "byte"));
    }
    line += ")";
    Some(match report.totals.efficiency {
        Some(here) if efficiency > 0.0 => line + &format!(": {:.2}x", here / efficiency),
        _ => line,
    })
}

/// Items a second, with a fraction where it matters.
pub(super) fn rate(rate: f64) -> String {
    if rate < 100.0 && rate > 0.0 { format!("{rate:.2}") } else { format!("{rate:.0}") }
}

pub(super) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// What the exit code says.
pub(super) fn end(report: &JobReport) -> anyhow::Result<()> {
    if report.interrupted {
        return Err(Interrupted.into());
    }
    if let Some(error) = &report.error {
        let lost = report.backends.iter().any(|one| one.benched.is_some() && one.card.is_some());
        let hint =
            if lost { "\nhint: 'spanker cards' shows which answer, and who has them" } else { "" };
        bail!("{error}{hint}");
    }
    let JobTotals { lost, duplicated, wrong_bytes, .. } = report.totals;
    if let Some(wrong @ 1..) = wrong_bytes {
        bail!("{} wrong", count(wrong, "byte"));
    }
    if lost > 0 || duplicated > 0 {
        bail!("{} lost and {duplicated} done twice", count(lost, "item"));
    }
    Ok(())
}
