// SPDX-License-Identifier: Apache-2.0
//! Cards and links as tables.

use spanker_topology::{Bytes, BytesPerSecond, Seconds};

use super::{Card, LinkRow, Report};
use crate::{directory, output};

/// More rows than this help nobody; the JSON has all of them.
const MOST_LINKS: usize = 64;

pub(super) fn show(report: &Report) -> anyhow::Result<()> {
    if report.cards.is_empty() {
        let folder = report.directory.as_deref().unwrap_or("/dev");
        output::line(&format!("no cards at {folder}/spanker0 and on"))?;
        output::line(&format!("hint: {}", directory::HINT))?;
        return output::line("hint: or look at mock cards: spanker cards --mock 4");
    }
    if let Some(folder) = &report.directory {
        let nature = report.nature.map_or(String::new(), |nature| format!(" ({nature})"));
        output::line(&format!("{folder}{nature}\n"))?;
    }
    match report.mock {
        true => output::line("card  kind")?,
        false => output::line(&format!(
            "card  state  kind  {:<12} {:<8}  {:>19}  {:<5}  owner",
            "profile", "pace", "memory free", "abi"
        ))?,
    }
    report.cards.iter().try_for_each(card)?;
    match report.mock {
        true => matrix(report),
        false => links(&report.links),
    }
}

fn card(card: &Card) -> anyhow::Result<()> {
    let Card { card: index, state, .. } = card;
    let kind = card.kind.unwrap_or("-");
    if kind == "mock" {
        return output::line(&format!("{index:>4}  {kind}"));
    }
    let start = format!("{index:>4}  {state:<5}  {kind:<4}");
    if let Some(reason) = &card.reason {
        return output::line(&format!("{start}  {reason}"));
    }
    let abi = card.abi.as_deref().unwrap_or("-");
    let Some(more) = &card.more else {
        return output::line(&format!("{start}  abi {abi}, which has no links"));
    };
    let memory = format!("{} of {}", Bytes(more.memory_free_bytes), Bytes(more.memory_bytes));
    let owner = more.owner.map_or_else(|| "-".into(), |pid| format!("pid {pid}"));
    let (profile, pace) = (&more.profile, more.pace);
    output::line(&format!("{start}  {profile:<12} {pace:<8}  {memory:>19}  {abi:<5}  {owner}"))
}

fn links(links: &[LinkRow]) -> anyhow::Result<()> {
    if links.is_empty() {
        return Ok(());
    }
    output::line(&format!(
        "\nlink      {:<8}  {:>5}  {:>12}  {:>10}  by",
        "state", "lanes", "bandwidth", "latency"
    ))?;
    for link in links.iter().take(MOST_LINKS) {
        let to = link.to.map_or_else(|| "?".into(), |to| to.to_string());
        let name = format!("{} -> {to}", link.from);
        let rate = link.bandwidth_bytes_per_second.map(|rate| BytesPerSecond(rate).to_string());
        let latency = link.latency_ns.map(|ns| Seconds(ns as f64 / 1e9).to_string());
        let (rate, latency) =
            (rate.unwrap_or_else(|| "-".into()), latency.unwrap_or_else(|| "-".into()));
        let lanes = link.lanes.map_or_else(|| "-".into(), |lanes| lanes.to_string());
        let (state, by) = (&link.state, link.source.unwrap_or("-"));
        output::line(&format!(
            "{name:<8}  {state:<8}  {lanes:>5}  {rate:>12}  {latency:>10}  {by}"
        ))?;
    }
    match links.len().checked_sub(MOST_LINKS) {
        Some(left) if left > 0 => output::line(&format!("and {left} more: --json has every link")),
        _ => Ok(()),
    }
}

fn matrix(report: &Report) -> anyhow::Result<()> {
    output::line("\nlinks, from row to column (mock: nothing of this was measured)")?;
    // Wider than a terminal helps nobody; the JSON has all of them.
    let shown = report.cards.len().min(16);
    let header: String = (0..shown).map(|to| format!("{to:>6}")).collect();
    output::line(&format!("{:>4}{header}", ""))?;
    for from in 0..shown {
        let row: String = (0..shown)
            .map(|to| {
                let mut links = report.links.iter();
                let link = links.find(|link| (link.from, link.to) == (from, Some(to)));
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
