// SPDX-License-Identifier: Apache-2.0
//! What came of a job over ranks, as rank 0 counts it.

use std::ops::Range;

use serde::Serialize;
use spanker_fabric_mpi::World;

use super::super::report::ranges;
use super::super::request::PreparedJob;
use super::super::simulated::ideal;
use super::window::{RankStats, STOPPED, Snapshot};

/// Ranges of missing items that an error names.
const NAMED: usize = 4;

/// What came of a job over ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RankReport {
    /// Of what is serialized.
    pub version: u32,
    /// What connects the ranks.
    pub fabric: &'static str,
    /// The MPI.
    pub library: String,
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
    /// The shortest time in which these ranks could do it; infinite if they cannot.
    pub ideal_seconds: f64,
    /// The part of the ideal speed, if everything was done.
    pub efficiency: Option<f64>,
    /// Round trips of claims.
    pub claims: u64,
    /// Microseconds of one in the mean.
    pub claim_us: f64,
    /// Microseconds of the shortest.
    pub claim_us_min: f64,
    /// Microseconds of a claim that carries nothing, as measured before the start.
    pub claim_us_bare: f64,
    /// Each rank.
    pub ranks: Vec<RankShare>,
    /// Items that are not done.
    #[serde(serialize_with = "ranges")]
    pub missing: Vec<Range<usize>>,
}

/// What a rank did of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RankShare {
    /// The name of its backend.
    pub backend: String,
    /// Its host.
    pub host: String,
    /// Tasks that it works on at a time.
    pub lanes: usize,
    /// Items that it did.
    pub items: usize,
    /// In how many tasks.
    pub chunks: u64,
    /// Items a second, as it published last.
    pub rate: f64,
    /// How long its tasks took, for each of its lanes.
    pub busy_seconds: f64,
    /// Its round trips.
    pub claims: u64,
    /// Microseconds of one in the mean.
    pub claim_us: f64,
    /// Microseconds of the shortest.
    pub claim_us_min: f64,
    /// `ok`, `stopped`, or why nothing was heard of it.
    pub state: String,
    /// It has said what it did.
    #[serde(skip)]
    pub answered: bool,
}

/// What there is to know in the end, on rank 0.
pub(super) struct Findings {
    pub(super) seen: Snapshot,
    pub(super) seconds: f64,
    pub(super) missing: Vec<Range<usize>>,
    /// Items that each rank marked.
    pub(super) marked: Vec<usize>,
    pub(super) wrong_bytes: Option<usize>,
    /// Ranks that have not said what they did, and why.
    pub(super) silent: Vec<(usize, String)>,
}

/// Nanoseconds in microseconds.
fn microseconds(time: u64) -> f64 {
    time as f64 * 1e-3
}

/// Microseconds of a round trip in the mean.
fn mean_trip(trips: u64, claims: u64) -> f64 {
    microseconds(trips) / claims.max(1) as f64
}

impl RankReport {
    pub(super) fn new(job: &PreparedJob, world: &World, findings: Findings) -> RankReport {
        let Findings { seen, seconds, missing, marked, wrong_bytes, silent } = findings;
        let share = |(rank, stats): (usize, &RankStats)| {
            let lanes = job.lanes(job.kinds()[rank]);
            let why = silent.iter().find(|(other, _)| *other == rank);
            RankShare {
                backend: job.names[rank].clone(),
                host: world.hosts()[rank].clone(),
                lanes,
                items: marked[rank],
                chunks: stats.chunks,
                rate: seen.rates[rank],
                busy_seconds: stats.busy as f64 * 1e-9 / lanes as f64,
                claims: stats.claims,
                claim_us: mean_trip(stats.trips, stats.claims),
                claim_us_min: microseconds(stats.shortest),
                state: match why {
                    Some((_, why)) => why.clone(),
                    None if stats.state == STOPPED => "stopped".to_owned(),
                    None => "ok".to_owned(),
                },
                answered: stats.state != 0,
            }
        };
        let sum = |of: fn(&RankStats) -> u64| seen.stats.iter().map(of).sum::<u64>();
        let most = |of: fn(&RankStats) -> u64| seen.stats.iter().map(of).max().unwrap_or(0);
        // Whoever said how many items it did, and marked fewer, did some that another marked as well.
        let twice = |(stats, marked): (&RankStats, &usize)| {
            usize::try_from(stats.items).unwrap_or(usize::MAX).saturating_sub(*marked)
        };
        let shortest = seen.stats.iter().map(|stats| stats.shortest).filter(|time| *time > 0).min();
        let (items, lost) = (job.job.items(), missing.iter().map(ExactSizeIterator::len).sum());
        let seconds = seconds.max(most(|stats| stats.took) as f64 * 1e-9);
        let ideal_seconds = ideal(&job.scenario(&seen.speeds));
        let claims = sum(|stats| stats.claims);
        RankReport {
            version: 1,
            fabric: "mpi",
            library: world.library().to_owned(),
            job: job.request.workload.name(),
            seed: job.request.seed,
            items,
            done: items - lost,
            lost,
            duplicated: seen.stats.iter().zip(&marked).map(twice).sum(),
            wrong_bytes,
            seconds,
            ideal_seconds,
            efficiency: (lost == 0 && seconds > 0.0).then(|| ideal_seconds / seconds),
            claims,
            claim_us: mean_trip(sum(|stats| stats.trips), claims),
            claim_us_min: microseconds(shortest.unwrap_or(0)),
            claim_us_bare: microseconds(most(|stats| stats.bare)),
            ranks: seen.stats.iter().enumerate().map(share).collect(),
            missing,
        }
    }

    /// What went wrong, if something did.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let bad = |(rank, share): (usize, &RankShare)| {
            let RankShare { backend, state, .. } = share;
            (state != "ok").then(|| format!("rank {rank} ({backend}) {state}"))
        };
        let troubles: Vec<String> = self.ranks.iter().enumerate().filter_map(bad).collect();
        if !troubles.is_empty() || self.lost > 0 {
            let mut text = troubles.join(", ");
            text += if text.is_empty() { "" } else { ": " };
            text += &format!("{} of {} items are done", self.done, self.items);
            for (place, range) in self.missing.iter().take(NAMED).enumerate() {
                let before = if place == 0 { "; not done: " } else { ", " };
                text += &format!("{before}{}..{}", range.start, range.end);
            }
            if self.missing.len() > NAMED {
                text += &format!(" and {} more ranges", self.missing.len() - NAMED);
            }
            return Some(text);
        }
        let many = |number: usize| if number == 1 { "" } else { "s" };
        match (self.duplicated, self.wrong_bytes) {
            (twice @ 1.., _) => Some(format!("{twice} item{} done twice", many(twice))),
            (_, Some(wrong @ 1..)) => Some(format!("{wrong} byte{} wrong", many(wrong))),
            _ => None,
        }
    }
}
