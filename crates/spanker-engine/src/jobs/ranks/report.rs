// SPDX-License-Identifier: Apache-2.0
//! What came of a job over ranks, as rank 0 counts it.

use serde::Serialize;
use spanker_fabric_mpi::World;

use super::super::report::{JobTotals, count};
use super::super::request::PreparedJob;
use super::super::simulated::ideal;
use super::window::{RankStats, STOPPED, Snapshot};

/// Ranges of missing items that an error names.
const NAMED: usize = 4;

/// What came of a job over ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RankReport {
    /// Items, bytes and times.
    #[serde(flatten)]
    pub totals: JobTotals,
    /// What connects the ranks.
    pub fabric: &'static str,
    /// The MPI.
    pub library: String,
    /// Round trips of all ranks.
    #[serde(flatten)]
    pub trips: ClaimTrips,
    /// Microseconds of a claim that carries nothing, as measured before the start.
    pub claim_us_bare: f64,
    /// Each rank.
    pub ranks: Vec<RankShare>,
}

/// Round trips that claimed items.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ClaimTrips {
    /// How many.
    pub claims: u64,
    /// Microseconds of one in the mean.
    pub claim_us: f64,
    /// Microseconds of the shortest.
    pub claim_us_min: f64,
}

impl ClaimTrips {
    /// Those of some ranks.
    fn of(stats: &[RankStats]) -> ClaimTrips {
        let sum = |of: fn(&RankStats) -> u64| stats.iter().map(of).sum::<u64>();
        let (claims, time) = (sum(|stats| stats.claims), sum(|stats| stats.trips));
        let shortest = stats.iter().map(|stats| stats.shortest).filter(|time| *time > 0).min();
        ClaimTrips {
            claims,
            claim_us: microseconds(time) / claims.max(1) as f64,
            claim_us_min: microseconds(shortest.unwrap_or(0)),
        }
    }
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
    #[serde(flatten)]
    pub trips: ClaimTrips,
    /// `ok`, `stopped`, or why nothing was heard of it.
    pub state: String,
    /// It has said what it did.
    #[serde(skip)]
    pub answered: bool,
}

/// Nanoseconds in microseconds.
fn microseconds(time: u64) -> f64 {
    time as f64 * 1e-3
}

impl RankReport {
    /// What rank 0 knows in the end: `marked` are the items that each rank marked, `silent` the ranks that have not said what
    /// they did, with why.
    pub(super) fn new(
        job: &PreparedJob,
        world: &World,
        mut totals: JobTotals,
        seconds: f64,
        seen: &Snapshot,
        marked: &[usize],
        silent: &[(usize, String)],
    ) -> RankReport {
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
                trips: ClaimTrips::of(std::slice::from_ref(stats)),
                state: match why {
                    Some((_, why)) => why.clone(),
                    None if stats.state == STOPPED => "stopped".to_owned(),
                    None => "ok".to_owned(),
                },
                answered: stats.state != 0,
            }
        };
        let most = |of: fn(&RankStats) -> u64| seen.stats.iter().map(of).max().unwrap_or(0);
        // Whoever said how many items it did, and marked fewer, did some that another marked as well.
        let twice = |(stats, marked): (&RankStats, &usize)| {
            usize::try_from(stats.items).unwrap_or(usize::MAX).saturating_sub(*marked)
        };
        let seconds = seconds.max(most(|stats| stats.took) as f64 * 1e-9);
        totals.took(seconds, ideal(&job.scenario(&seen.speeds)), totals.lost == 0);
        totals.duplicated = seen.stats.iter().zip(marked).map(twice).sum();
        RankReport {
            totals,
            fabric: "mpi",
            library: world.library().to_owned(),
            trips: ClaimTrips::of(&seen.stats),
            claim_us_bare: microseconds(most(|stats| stats.bare)),
            ranks: seen.stats.iter().enumerate().map(share).collect(),
        }
    }

    /// The job, its size and who did it.
    #[must_use]
    pub fn title(&self) -> String {
        let title = self.totals.title(&count(self.ranks.len(), "rank"));
        format!("{title}, {}", self.library)
    }

    /// How far the job was from the ideal time, what claims took, and what was counted.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let ClaimTrips { claims, claim_us, claim_us_min } = self.trips;
        let claims = count(usize::try_from(claims).unwrap_or(usize::MAX), "claim");
        let bare = self.claim_us_bare;
        let trips = format!(
            "{claims} of one round trip: {claim_us:.1} us in the mean, {claim_us_min:.1} us the shortest, \
             {bare:.1} us before the start"
        );
        vec![self.totals.efficiency_line(), trips, self.totals.counts_line()]
    }

    /// What went wrong, if something did.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let bad = |(rank, share): (usize, &RankShare)| {
            let RankShare { backend, state, .. } = share;
            (state != "ok").then(|| format!("rank {rank} ({backend}) {state}"))
        };
        let JobTotals { items, done, lost, ref missing, .. } = self.totals;
        let troubles: Vec<String> = self.ranks.iter().enumerate().filter_map(bad).collect();
        if !troubles.is_empty() || lost > 0 {
            let mut text = troubles.join(", ");
            text += if text.is_empty() { "" } else { ": " };
            text += &format!("{done} of {items} items are done");
            for (place, range) in missing.iter().take(NAMED).enumerate() {
                let before = if place == 0 { "; not done: " } else { ", " };
                text += &format!("{before}{}..{}", range.start, range.end);
            }
            if missing.len() > NAMED {
                text += &format!(" and {} more ranges", missing.len() - NAMED);
            }
            return Some(text);
        }
        self.totals.wrong()
    }
}
