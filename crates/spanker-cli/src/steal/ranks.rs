// SPDX-License-Identifier: Apache-2.0
//! A job over ranks that are processes: flags that make no sense there, and the table of rank 0.

use spanker_engine::EngineError;
use spanker_engine::jobs::{RankReport, run_on_ranks};
use spanker_twin::Signals;

use super::{Args, failure, rate, watched};
use crate::{Unspoken, output, ranks, refuse};

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let world = ranks::world()?;
    check(args)?;
    let interrupt = Some(Signals::take()?);
    let request = args.request()?;
    let publish = |report: &RankReport| output::report(args.json, report, show);
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
fn check(args: &Args) -> anyhow::Result<()> {
    let flags = [
        ("--simulate", args.simulate),
        ("--corrupt", !args.corrupt.is_empty()),
        ("--audit", args.audit.is_some()),
        ("--checksums", args.checksums),
        ("--lease", args.lease.is_some()),
    ];
    if args.job == "prompts" {
        // Said before a model is opened.
        return refuse("--job prompts runs in one process, without --fabric mpi");
    }
    match flags.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => refuse(format!(
            "{flag} is for one process: over ranks, nobody does again what another has taken"
        )),
        None => Ok(()),
    }
}

fn show(report: &RankReport) -> anyhow::Result<()> {
    say!("# {}", report.title())?;
    let rows = report.ranks.iter().enumerate().map(|(rank, share)| {
        let busy = 100.0 * (share.busy_seconds / report.totals.seconds).min(1.0);
        let if_answered = |text: String| if share.answered { text } else { "-".to_owned() };
        vec![
            rank.to_string(),
            share.backend.clone(),
            share.items.to_string(),
            format!("{:.1} %", report.totals.percent(share.items)),
            if_answered(share.chunks.to_string()),
            rate(share.rate),
            if_answered(format!("{busy:.1} %")),
            if_answered(format!("{:.1} %", 100.0 - busy)),
            if_answered(format!("{:.1} us", share.trips.claim_us)),
            share.state.clone(),
        ]
    });
    let header = [
        "rank", "backend", "items", "share", "chunks", "items/s", "busy", "idle", "claim", "state",
    ];
    output::table(&header, rows.collect(), &header[2..9])?;
    output::line("")?;
    output::lines(&report.lines())
}
