// SPDX-License-Identifier: Apache-2.0
//! Cards and links as tables.

use spanker_engine::{CardReport, CardRow, LinkRow, directory};
use spanker_topology::{Bytes, BytesPerSecond, Seconds};

use crate::output;

/// More rows than this help nobody; the JSON has all of them.
const MOST_LINKS: usize = 64;

pub(super) fn show(report: &CardReport) -> anyhow::Result<()> {
    if report.cards.is_empty() {
        let folder = report.directory.as_deref().unwrap_or("/dev");
        say!("no cards at {folder}/spanker0 and on")?;
        say!("hint: {}", directory::HINT)?;
        return output::line("hint: or look at mock cards: spanker cards --mock 4");
    }
    if let Some(folder) = &report.directory {
        let nature = report.nature.map_or(String::new(), |nature| format!(" ({nature})"));
        say!("{folder}{nature}\n")?;
    }
    cards(report)?;
    match report.mock {
        true => matrix(report),
        false => links(&report.links),
    }
}

fn cards(report: &CardReport) -> anyhow::Result<()> {
    let (header, right) = match report.mock {
        true => (&["card", "kind"][..], &["card"][..]),
        false => (&CARDS[..], &["card", "memory free"][..]),
    };
    output::table(header, report.cards.iter().map(card).collect(), right)
}

const CARDS: [&str; 8] =
    ["card", "state", "kind", "profile", "pace", "memory free", "abi", "owner"];

fn card(card: &CardRow) -> Vec<String> {
    let kind = card.kind.unwrap_or("-").to_owned();
    let mut row = vec![card.card.to_string()];
    if kind == "mock" {
        row.push(kind);
        return row;
    }
    row.extend([card.state.to_string(), kind]);
    let abi = card.abi.as_deref().unwrap_or("-");
    let nothing = |why: &str| ["-", "-", "-", abi, why].map(str::to_owned);
    match (&card.reason, &card.more) {
        (Some(reason), _) => row.extend(nothing(reason)),
        (None, None) => row.extend(nothing("its version has no links")),
        (None, Some(more)) => {
            let (free, all) = (Bytes(more.memory_free_bytes), Bytes(more.memory_bytes));
            let owner = more.owner.map_or_else(|| "-".into(), |pid| format!("pid {pid}"));
            let (profile, pace) = (more.profile.clone(), more.pace.to_string());
            row.extend([profile, pace, format!("{free} of {all}"), abi.into(), owner]);
        }
    }
    row
}

fn links(links: &[LinkRow]) -> anyhow::Result<()> {
    if links.is_empty() {
        return Ok(());
    }
    let row = |link: &LinkRow| {
        let to = link.to.map_or_else(|| "?".into(), |to| to.to_string());
        let rate = link.bandwidth_bytes_per_second.map(|rate| BytesPerSecond(rate).to_string());
        let latency = link.latency_ns.map(|ns| Seconds(ns as f64 / 1e9).to_string());
        let figures = [link.lanes.map(|lanes| lanes.to_string()), rate, latency];
        let figures = figures.map(|figure| figure.unwrap_or_else(|| "-".into()));
        let mut row = vec![format!("{} -> {to}", link.from), link.state.to_string()];
        row.extend(figures);
        row.push(link.source.unwrap_or("-").into());
        row
    };
    let header = ["link", "state", "lanes", "bandwidth", "latency", "by"];
    let rows = links.iter().take(MOST_LINKS).map(row).collect();
    output::line("")?;
    output::table(&header, rows, &["lanes", "bandwidth", "latency"])?;
    match links.len().checked_sub(MOST_LINKS) {
        Some(left) if left > 0 => say!("and {left} more: --json has every link"),
        _ => Ok(()),
    }
}

fn matrix(report: &CardReport) -> anyhow::Result<()> {
    output::line("\nlinks, from row to column (mock: nothing of this was measured)")?;
    // Wider than a terminal helps nobody; the JSON has all of them.
    let shown = report.cards.len().min(16);
    let header: String = (0..shown).map(|to| format!("{to:>6}")).collect();
    say!("{:>4}{header}", "")?;
    for from in 0..shown {
        let row: String = (0..shown)
            .map(|to| {
                let mut links = report.links.iter();
                let link = links.find(|link| (link.from, link.to) == (from, Some(to)));
                let state = link.map_or(if from == to { "." } else { "-" }, |link| &link.state);
                format!("{state:>6}")
            })
            .collect();
        say!("{from:>4}{row}")?;
    }
    if shown < report.cards.len() {
        let left = report.cards.len() - shown;
        say!("and {left} cards more: --json has every link")?;
    }
    Ok(())
}
