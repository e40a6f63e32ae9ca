// SPDX-License-Identifier: Apache-2.0
//! Twins as tables.

use std::path::Path;
use std::time::Duration;

use spanker_twin::control::{CardStatus, LinkStatus, Status};

use crate::output;
use crate::shell::quoted;

/// A twin that has come up, and how programs find it.
pub(super) fn up(status: &Status, notes: &[String], took: Duration) -> anyhow::Result<()> {
    let links = match status.links.len() {
        0 => "no links".into(),
        links => output::count(links, "link"),
    };
    let row = |name: &str, value: &str| say!("{name:<10} {value}");
    row("cards", &format!("{}, {}, {links}, all up", status.title, status.topology))?;
    row("pace", status.pace.name())?;
    row("seed", &status.seed.to_string())?;
    row("directory", &status.dir.display().to_string())?;
    row(
        "supervisor",
        &format!("pid {}, up after {:.0} ms", status.supervisor, took.as_secs_f64() * 1e3),
    )?;
    for note in notes {
        row("note", note)?;
    }
    say!("\nexport SPANKER_DEV_DIR={}", quoted(&status.dir.display().to_string()))
}

/// Every card and link.
pub(super) fn status(status: &Status) -> anyhow::Result<()> {
    let Status { title, topology, seed, supervisor, .. } = status;
    let (dir, pace) = (status.dir.display(), status.pace.name());
    say!("{title}, {topology}, pace {pace}, seed {seed}, supervisor pid {supervisor}")?;
    say!("{dir}\n")?;
    let header = ["card", "state", "pid", "serial", "profile"];
    let cards = status.cards.iter().map(card).collect();
    output::table(&header, cards, &["card", "pid"])?;
    if status.links.is_empty() {
        return Ok(());
    }
    let header = ["link", "state", "lanes", "rate", "latency", "bit errors"];
    let links = status.links.iter().map(link).collect();
    output::line("")?;
    output::table(&header, links, &header[2..])
}

fn card(card: &CardStatus) -> Vec<String> {
    let pid = card.pid.map_or_else(|| "-".into(), |pid| pid.to_string());
    let profile = match card.faults.is_empty() {
        true => card.profile.clone(),
        false => format!("{}  ({})", card.profile, card.faults.join(", ")),
    };
    vec![
        card.card.to_string(),
        card.state.to_string(),
        pid,
        format!("{:016x}", card.serial),
        profile,
    ]
}

fn link(link: &LinkStatus) -> Vec<String> {
    let LinkStatus { between: [a, b], state, lanes, .. } = link;
    let errors = match link.bit_error_rate {
        0.0 => "0".into(),
        rate => format!("{rate:e}"),
    };
    let (rate, latency) = (link.bandwidth.to_string(), link.latency.to_string());
    vec![format!("{a}-{b}"), state.to_string(), lanes.to_string(), rate, latency, errors]
}

/// The end of a twin.
pub(super) fn down(dir: &Path, left: &[String]) -> anyhow::Result<()> {
    say!("the twin in {} is down", dir.display())?;
    if left.is_empty() {
        return Ok(());
    }
    say!("the directory stays: {} belongs to others", left.join(", "))
}
