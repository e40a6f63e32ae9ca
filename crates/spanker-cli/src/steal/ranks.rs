// SPDX-License-Identifier: Apache-2.0
//! A job over ranks that are processes: flags that make no sense there, and the table of rank 0.

use spanker_engine::EngineError;
use spanker_engine::jobs::{ClaimTrips, JobTotals, RankReport, run_on_ranks};
use spanker_twin::Signals;

use super::table::{count, rate, show_counts, show_efficiency};
use super::{Args, JobKind, failure, watched};
use crate::{Unspoken, Usage, output, ranks};

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let world = ranks::world()?;
    check(args)?;
    let interrupt = Some(Signals::take()?);
    let request = args.request()?;
    let publish = |report: &RankReport| -> anyhow::Result<()> {
        match args.json {
            true => output::line(&serde_json::to_value(report)?.to_string()),
            false => show(report),
        }
    };
    let quiet = args.json || world.rank() > 0;
    let outcome = watched(interrupt, quiet, |watch| run_on_ranks(&world, request, watch, publish));
    outcome.map_err(|error| {
        let error = match error.downcast::<EngineError>() {
            // All ranks find the same, and leave together.
            Ok(error @ EngineError::Request { .. }) => return error.into(),
            Ok(error) => failure(error),
            Err(error) => error,
        };
        let own = world.rank() > 0 && !error.is::<Unspoken>();
        if own { error.context(format!("rank {}", world.rank())) } else { error }
    })
}

/// Refuses flags that make no sense over ranks.
fn check(args: &Args) -> Result<(), Usage> {
    let flags = [
        ("--simulate", args.simulate),
        ("--corrupt", !args.corrupt.is_empty()),
        ("--audit", args.audit.is_some()),
        ("--checksums", args.checksums),
        ("--lease", args.lease.is_some()),
    ];
    if args.job == JobKind::Prompts {
        // Said before a model is opened.
        return Err(Usage("--job prompts runs in one process, without --fabric mpi".into()));
    }
    match flags.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Usage(format!(
            "{flag} is for one process: over ranks, nobody does again what another has taken"
        ))),
        None => Ok(()),
    }
}

fn show(report: &RankReport) -> anyhow::Result<()> {
    let JobTotals { job, items, seconds, .. } = report.totals;
    let (all, ranks) = (count(items, "item"), count(report.ranks.len(), "rank"));
    output::line(&format!("# {job}, {all} over {ranks}, {}", report.library))?;
    output::line(&line([
        "rank", "backend", "items", "share", "chunks", "items/s", "busy", "idle", "claim", "state",
    ]))?;
    for (rank, share) in report.ranks.iter().enumerate() {
        let part = 100.0 * share.items as f64 / items.max(1) as f64;
        let busy = 100.0 * (share.busy_seconds / seconds).min(1.0);
        let if_answered = |text: String| if share.answered { text } else { "-".to_owned() };
        output::line(&line([
            &rank.to_string(),
            &share.backend,
            &share.items.to_string(),
            &format!("{part:.1} %"),
            &if_answered(share.chunks.to_string()),
            &rate(share.rate),
            &if_answered(format!("{busy:.1} %")),
            &if_answered(format!("{:.1} %", 100.0 - busy)),
            &if_answered(format!("{:.1} us", share.trips.claim_us)),
            &share.state,
        ]))?;
    }
    output::line("")?;
    show_efficiency(&report.totals)?;
    let ClaimTrips { claims, claim_us, claim_us_min, .. } = report.trips;
    let claims = count(usize::try_from(claims).unwrap_or(usize::MAX), "claim");
    output::line(&format!(
        "{claims} of one round trip: {claim_us:.1} us in the mean, {claim_us_min:.1} us the shortest, \
         {:.1} us before the start",
        report.claim_us_bare
    ))?;
    show_counts(&report.totals)
}

fn line(cells: [&str; 10]) -> String {
    let [rank, backend, items, share, chunks, rate, busy, idle, claim, state] = cells;
    format!(
        "{rank:<5} {backend:<8} {items:>10} {share:>8} {chunks:>7} {rate:>10} {busy:>8} {idle:>8} {claim:>9}  {state}"
    )
}
