// SPDX-License-Identifier: Apache-2.0
//! What came of a job over ranks: a table for people, an object for programs, and an exit code.

use std::ops::Range;

use anyhow::bail;
use serde_json::{Value, json};
use spanker_fabric_mpi::World;
use spanker_topology::Seconds;

use super::super::Setup;
use super::super::outcome::{count, rate};
use super::super::planned::ideal;
use super::board::{Account, STOPPED, Seen};
use crate::output;

/// Ranges of missing items that are named, and that JSON names.
const NAMED: usize = 4;
const NAMED_IN_JSON: usize = 1000;

/// One rank.
struct Row {
    backend: String,
    host: String,
    lanes: usize,
    /// Items a second, as told last.
    rate: f64,
    account: Account,
    /// Items that it marked.
    marked: usize,
    state: String,
}

/// What came of it.
pub(super) struct Table {
    job: &'static str,
    library: String,
    seed: u64,
    items: usize,
    seconds: f64,
    ideal_seconds: f64,
    missing: Vec<Range<usize>>,
    duplicated: usize,
    wrong_bytes: Option<usize>,
    rows: Vec<Row>,
}

impl Row {
    fn busy(&self) -> f64 {
        self.account.busy as f64 * 1e-9 / self.lanes as f64
    }

    /// Microseconds of a round trip in the mean.
    fn trip(&self) -> f64 {
        self.account.trips as f64 * 1e-3 / self.account.claims.max(1) as f64
    }
}

/// What there is to know in the end, on rank 0.
pub(super) struct Findings<'a> {
    pub(super) seen: &'a Seen,
    pub(super) seconds: f64,
    pub(super) missing: Vec<Range<usize>>,
    /// Items that each rank marked.
    pub(super) marked: &'a [usize],
    pub(super) wrong_bytes: Option<usize>,
    /// Ranks that have not told what they did, and why.
    pub(super) silent: &'a [(usize, String)],
}

impl Table {
    pub(super) fn new(setup: &Setup, world: &World, findings: Findings<'_>) -> Table {
        let Findings { seen, seconds, missing, marked, wrong_bytes, silent } = findings;
        let row = |rank: usize| {
            let why = silent.iter().find(|(other, _)| *other == rank);
            let account = seen.accounts[rank];
            Row {
                backend: setup.names[rank].clone(),
                host: world.hosts()[rank].clone(),
                lanes: setup.lanes(setup.kinds[rank]),
                rate: seen.rates[rank],
                account,
                marked: marked[rank],
                state: match why {
                    Some((_, why)) => why.clone(),
                    None if account.state == STOPPED => "stopped".to_owned(),
                    None => "ok".to_owned(),
                },
            }
        };
        let rows: Vec<Row> = (0..world.ranks()).map(row).collect();
        // Whoever told how many items it did, and marked fewer, did some that another marked as well.
        let twice = |row: &Row| (row.account.items as usize).saturating_sub(row.marked);
        let last = rows.iter().map(|row| row.account.took as f64 * 1e-9).fold(0.0, f64::max);
        Table {
            job: setup.kind.name(),
            library: world.library().to_owned(),
            seed: setup.seed,
            items: setup.job.items(),
            seconds: seconds.max(last),
            ideal_seconds: ideal(&setup.scenario(&seen.speeds)),
            missing,
            duplicated: rows.iter().map(twice).sum(),
            wrong_bytes,
            rows,
        }
    }

    fn lost(&self) -> usize {
        self.missing.iter().map(ExactSizeIterator::len).sum()
    }

    /// The part of the ideal speed, if everything was done.
    fn efficiency(&self) -> Option<f64> {
        (self.lost() == 0 && self.seconds > 0.0).then(|| self.ideal_seconds / self.seconds)
    }

    /// All round trips: how many, microseconds in the mean, and of the shortest.
    fn trips(&self) -> (u64, f64, f64) {
        let sum =
            |of: fn(&Account) -> u64| self.rows.iter().map(|row| of(&row.account)).sum::<u64>();
        let (claims, time) = (sum(|account| account.claims), sum(|account| account.trips));
        let shortest = self.rows.iter().map(|row| row.account.shortest).filter(|time| *time > 0);
        let shortest = shortest.min().unwrap_or(0);
        (claims, time as f64 * 1e-3 / claims.max(1) as f64, shortest as f64 * 1e-3)
    }

    /// Microseconds of a claim that carries nothing, as it was measured before the start.
    fn bare(&self) -> f64 {
        self.rows.iter().map(|row| row.account.bare).max().unwrap_or(0) as f64 * 1e-3
    }

    pub(super) fn to_json(&self) -> Value {
        let (claims, mean, shortest) = self.trips();
        let ranges = self.missing.iter().take(NAMED_IN_JSON).map(|r| json!([r.start, r.end]));
        let rank = |row: &Row| {
            json!({
                "backend": row.backend,
                "host": row.host,
                "lanes": row.lanes,
                "items": row.marked,
                "chunks": row.account.chunks,
                "rate": row.rate,
                "busy_seconds": row.busy(),
                "claims": row.account.claims,
                "claim_us": row.trip(),
                "claim_us_min": row.account.shortest as f64 * 1e-3,
                "state": row.state,
            })
        };
        json!({
            "version": 1,
            "fabric": "mpi",
            "library": self.library,
            "job": self.job,
            "seed": self.seed,
            "items": self.items,
            "done": self.items - self.lost(),
            "lost": self.lost(),
            "duplicated": self.duplicated,
            "wrong_bytes": self.wrong_bytes,
            "seconds": self.seconds,
            "ideal_seconds": self.ideal_seconds,
            "efficiency": self.efficiency(),
            "claims": claims,
            "claim_us": mean,
            "claim_us_min": shortest,
            "claim_us_bare": self.bare(),
            "ranks": self.rows.iter().map(rank).collect::<Vec<_>>(),
            "missing": ranges.collect::<Vec<_>>(),
        })
    }

    pub(super) fn show(&self) -> anyhow::Result<()> {
        let (items, ranks) = (count(self.items, "item"), count(self.rows.len(), "rank"));
        output::line(&format!("# {}, {items} over {ranks}, {}", self.job, self.library))?;
        output::line(&line([
            "rank", "backend", "items", "share", "chunks", "items/s", "busy", "idle", "claim",
            "state",
        ]))?;
        for (rank, row) in self.rows.iter().enumerate() {
            let share = 100.0 * row.marked as f64 / self.items.max(1) as f64;
            let busy = 100.0 * (row.busy() / self.seconds).min(1.0);
            let told = row.account.state != 0;
            let if_told = |text: String| if told { text } else { "-".to_owned() };
            output::line(&line([
                &rank.to_string(),
                &row.backend,
                &row.marked.to_string(),
                &format!("{share:.1} %"),
                &if_told(row.account.chunks.to_string()),
                &rate(row.rate),
                &if_told(format!("{busy:.1} %")),
                &if_told(format!("{:.1} %", 100.0 - busy)),
                &if_told(format!("{:.1} us", row.trip())),
                &row.state,
            ]))?;
        }
        output::line("")?;
        self.show_figures()
    }

    fn show_figures(&self) -> anyhow::Result<()> {
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
        let (claims, mean, shortest) = self.trips();
        output::line(&format!(
            "{} of one round trip: {mean:.1} us in the mean, {shortest:.1} us the shortest, {:.1} us before the start",
            count(claims as usize, "claim"),
            self.bare()
        ))?;
        let bytes = match self.wrong_bytes {
            None => "not compared".to_owned(),
            Some(0) if self.missing.is_empty() => "every byte as expected".to_owned(),
            Some(0) => "every byte of them as expected".to_owned(),
            Some(wrong) => format!("{} wrong", count(wrong, "byte")),
        };
        let (lost, duplicated) = (self.lost(), self.duplicated);
        let done = self.items - lost;
        output::line(&format!(
            "done {done} of {}, lost {lost}, duplicated {duplicated}; {bytes}",
            self.items
        ))
    }

    /// What the exit code says.
    pub(super) fn end(&self) -> anyhow::Result<()> {
        let bad = |(rank, row): (usize, &Row)| {
            (row.state != "ok").then(|| format!("rank {rank} ({}) {}", row.backend, row.state))
        };
        let troubles: Vec<String> = self.rows.iter().enumerate().filter_map(bad).collect();
        let lost = self.lost();
        if !troubles.is_empty() || lost > 0 {
            let mut text = troubles.join(", ");
            text += if text.is_empty() { "" } else { ": " };
            text += &format!("{} of {} items are done", self.items - lost, self.items);
            for (place, range) in self.missing.iter().take(NAMED).enumerate() {
                let before = if place == 0 { "; not done: " } else { ", " };
                text += &format!("{before}{}..{}", range.start, range.end);
            }
            if self.missing.len() > NAMED {
                text += &format!(" and {} more ranges", self.missing.len() - NAMED);
            }
            bail!(text);
        }
        if self.duplicated > 0 {
            bail!("{} done twice", count(self.duplicated, "item"));
        }
        match self.wrong_bytes {
            Some(wrong @ 1..) => bail!("{} wrong", count(wrong, "byte")),
            _ => Ok(()),
        }
    }
}

fn line(cells: [&str; 10]) -> String {
    let [rank, backend, items, share, chunks, rate, busy, idle, claim, state] = cells;
    format!(
        "{rank:<5} {backend:<8} {items:>10} {share:>8} {chunks:>7} {rate:>10} {busy:>8} {idle:>8} {claim:>9}  {state}"
    )
}
