// SPDX-License-Identifier: Apache-2.0
//! `spanker cards`: which cards are there, how they are and how they are linked.

mod show;

use spanker_engine::{directory, mock_cards, survey_cards};

use crate::output;

/// Show the cards and the links between them
///
/// Looks in $SPANKER_DEV_DIR if that is set, or in /dev, or where 'spanker twin up' puts emulated cards. A
/// link's bandwidth and latency are those of its profile until 'spanker probe' has measured them. Cards
/// that are dead are shown too.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker twin up --cards 4 && spanker cards
  spanker probe && spanker cards       with what was measured
  spanker cards --json")]
pub(crate) struct Args {
    /// Show this many mock cards instead: buffers in host memory, every card linked to every other
    #[arg(long, value_name = "N")]
    mock: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let report = match args.mock {
        Some(count) => mock_cards(count)?,
        None => survey_cards(&directory::find())?,
    };
    output::report(args.json, &report, show::show)
}
