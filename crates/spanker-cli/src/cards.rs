// SPDX-License-Identifier: Apache-2.0
//! `spanker cards`: which cards are there and how they are linked.

use anyhow::Context;
use serde::Serialize;
use spanker_scheduler::{BytesPerSecond, Error, Link, MAX_RANKS, MockSail, Topology};

use crate::{Usage, output};

/// Show the cards and the links between them
///
/// Looks at /dev/spanker0, /dev/spanker1 and so on. Without cards it says how to make some up.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Show this many mock cards instead: buffers in host memory, every card linked to every other
    #[arg(long, value_name = "N")]
    mock: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const HINT: &str = "rehearse with mock cards: spanker cards --mock 4";

/// What is shown, and the schema of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    mock: bool,
    cards: Vec<Card>,
    links: Vec<LinkRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Card {
    card: usize,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    abi: Option<String>,
}

#[derive(Debug, Serialize)]
struct LinkRow {
    from: usize,
    to: usize,
    state: String,
    bandwidth_bytes_per_second: Option<u64>,
    latency_ns: Option<u128>,
}

impl From<&Link> for LinkRow {
    fn from(link: &Link) -> Self {
        LinkRow {
            from: link.local_sail,
            to: link.remote_sail,
            state: link.state.to_string(),
            bandwidth_bytes_per_second: link.bandwidth.map(|BytesPerSecond(rate)| rate),
            latency_ns: link.latency.map(|latency| latency.as_nanos()),
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let report = match args.mock {
        Some(0) => return Err(Usage("--mock 0: a group has at least one card".into()).into()),
        Some(count) if count > MAX_RANKS => {
            return Err(Usage(format!("--mock {count}: more than {MAX_RANKS} cards")).into());
        }
        Some(count) => mock(count),
        None => real()?,
    };
    if args.json {
        return output::line(&serde_json::to_string(&report)?);
    }
    show(&report)
}

fn mock(count: usize) -> Report {
    let topology = Topology::<MockSail>::with_mock(count);
    let card = |sail: &MockSail| Card { card: sail.id(), kind: "mock", path: None, abi: None };
    Report {
        mock: true,
        cards: topology.sails().iter().map(card).collect(),
        links: topology.links().iter().map(LinkRow::from).collect(),
        hint: None,
    }
}

fn real() -> anyhow::Result<Report> {
    let topology = match Topology::enumerate() {
        Ok(topology) => topology,
        Err(Error::NoSails) => {
            let (cards, links) = (Vec::new(), Vec::new());
            return Ok(Report { mock: false, cards, links, hint: Some(HINT) });
        }
        Err(error) => return Err(error.into()),
    };
    let mut cards = Vec::new();
    for (card, control) in topology.sails().iter().enumerate() {
        let path = format!("/dev/spanker{card}");
        let abi = control.version().with_context(|| format!("card {card} at {path}"))?;
        cards.push(Card { card, kind: "sail", path: Some(path), abi: Some(abi.to_string()) });
    }
    let links = topology.links().iter().map(LinkRow::from).collect();
    Ok(Report { mock: false, cards, links, hint: None })
}

fn show(report: &Report) -> anyhow::Result<()> {
    if report.cards.is_empty() {
        output::line("no cards at /dev/spanker0 and on")?;
        return output::line(&format!("hint: {HINT}"));
    }
    output::line(&format!("{:>4}  {:<5} {:<16} abi", "card", "kind", "path"))?;
    for card in &report.cards {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".into());
        let (path, abi) = (text(&card.path), text(&card.abi));
        output::line(&format!("{:>4}  {:<5} {path:<16} {abi}", card.card, card.kind))?;
    }
    let note = if report.mock { " (mock: nothing of this was measured)" } else { "" };
    output::line(&format!("\nlinks, from row to column{note}"))?;
    // Wider than a terminal helps nobody; the JSON has all of them.
    let shown = report.cards.len().min(16);
    let header: String = (0..shown).map(|to| format!("{to:>6}")).collect();
    output::line(&format!("{:>4}{header}", ""))?;
    for from in 0..shown {
        let row: String = (0..shown)
            .map(|to| {
                let link = report.links.iter().find(|link| (link.from, link.to) == (from, to));
                let state = link.map_or(if from == to { "." } else { "-" }, |link| &link.state);
                format!("{state:>6}")
            })
            .collect();
        output::line(&format!("{from:>4}{row}"))?;
    }
    if shown < report.cards.len() {
        let left = report.cards.len() - shown;
        output::line(&format!("and {left} cards more: --json has every link"))?;
    }
    Ok(())
}
