// SPDX-License-Identifier: Apache-2.0
//! `spanker flight`: what every card is doing, and what happened last on it.

use spanker_engine::{FlightEntry, FlightReport, directory, read_flight};

use crate::output;

/// Show what every card is doing, and the last entries of their flight recorders
///
/// Cards always record work, links, faults and the programs that come and go. Entries of all cards are
/// merged by the host's clock.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker flight                 what every card does, and the last 40 entries
  spanker flight --all --json    everything that is still recorded")]
pub(crate) struct Args {
    /// Show every entry that is still recorded
    #[arg(long)]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Entries that are shown unless all are wanted.
const USUAL: usize = 40;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let report = read_flight(&directory::find(), (!args.all).then_some(USUAL))?;
    output::report(args.json, &report, show)
}

fn show(report: &FlightReport) -> anyhow::Result<()> {
    let cards = report.cards.iter().map(|row| {
        let done = match (row.completed, row.submitted) {
            (Some(done), Some(all)) if done < all => format!(" ({done} of {all} complete)"),
            _ => String::new(),
        };
        vec![row.card.to_string(), row.state.to_owned(), format!("{}{done}", row.doing)]
    });
    say!("{}\n", report.directory)?;
    output::table(&["card", "state", "doing"], cards.collect(), &["card"])?;
    let Some(last) = report.records.last() else { return Ok(()) };
    let before = match report.left_out {
        0 => None,
        left => {
            Some(vec![".".into(), ".".into(), format!("{left} entries before: --all shows them")])
        }
    };
    let entry = |entry: &FlightEntry| {
        let before = last.wall_ns.saturating_sub(entry.wall_ns) as f64 / 1e6;
        vec![format!("{before:.3} ms"), entry.card.to_string(), entry.text.clone()]
    };
    let rows = before.into_iter().chain(report.records.iter().map(entry)).collect();
    let header = ["before the last", "card", "entry"];
    output::line("")?;
    output::table(&header, rows, &header[..2])
}
