// SPDX-License-Identifier: Apache-2.0
//! Twins as tables.

use std::path::Path;
use std::time::Duration;

use spanker_twin::control::{CardStatus, LinkStatus, Request, Status, Target};

use crate::output;

/// A twin that has come up, and how programs find it.
pub(super) fn up(status: &Status, notes: &[String], took: Duration) -> anyhow::Result<()> {
    let links = match status.links.len() {
        0 => "no links".into(),
        1 => "1 link".into(),
        count => format!("{count} links"),
    };
    let row = |name: &str, value: &str| output::line(&format!("{name:<10} {value}"));
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
    output::line(&format!("\nexport SPANKER_DEV_DIR={}", quoted(&status.dir)))
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+,:@%".contains(c);
    match text.chars().all(plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Every card and link.
pub(super) fn status(status: &Status) -> anyhow::Result<()> {
    let Status { title, topology, seed, supervisor, .. } = status;
    let (dir, pace) = (status.dir.display(), status.pace.name());
    output::line(&format!(
        "{title}, {topology}, pace {pace}, seed {seed}, supervisor pid {supervisor}"
    ))?;
    output::line(&format!("{dir}\n"))?;
    let header = ["card", "state", "pid", "serial", "profile"];
    let cards = status.cards.iter().map(card).collect();
    output::line(&output::table(&header, cards, &["card", "pid"]))?;
    if status.links.is_empty() {
        return Ok(());
    }
    let header = ["link", "state", "lanes", "rate", "latency", "bit errors"];
    let links = status.links.iter().map(link).collect();
    output::line(&format!("\n{}", output::table(&header, links, &header[2..])))
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

/// What was done to a twin.
pub(super) fn changed(request: &Request) -> anyhow::Result<()> {
    output::line(&match request {
        Request::Kill(card) => format!("card {card} is dead"),
        Request::Stop(card) => format!("card {card} is stopped"),
        Request::Stick(card) => format!("card {card} is stuck"),
        Request::Garble(card) => format!("card {card} computes garbage"),
        Request::Slow(card, factor) => format!("card {card} takes {factor} times as long"),
        Request::Cut(a, b) => format!("link {a}-{b} is cut"),
        Request::Corrupt(a, b, rate) => format!("link {a}-{b} has a bit error rate of {rate:e}"),
        Request::Restore(Some(Target::Card(card))) => format!("card {card} is well again"),
        Request::Restore(Some(Target::Link(a, b))) => format!("link {a}-{b} is whole again"),
        Request::Restore(None) => "everything is well again".into(),
        Request::Status | Request::Down => return Ok(()),
    })
}

/// The end of a twin.
pub(super) fn down(dir: &Path, left: &[String]) -> anyhow::Result<()> {
    output::line(&format!("the twin in {} is down", dir.display()))?;
    if left.is_empty() {
        return Ok(());
    }
    output::line(&format!("the directory stays: {} belongs to others", left.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_where_a_shell_would_split_or_expand_them() {
        assert_eq!(quoted(Path::new("/tmp/spanker-0")), "/tmp/spanker-0");
        assert_eq!(quoted(Path::new("/a b/$c")), "'/a b/$c'");
        assert_eq!(quoted(Path::new("/it's")), r"'/it'\''s'");
    }
}
