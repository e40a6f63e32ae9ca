// SPDX-License-Identifier: Apache-2.0
//! `spanker cards`: which cards are there, how they are and how they are linked.

mod show;

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use spanker_runtime::{Error as CardError, PortInfo, PortState, SpankerControl};
use spanker_scheduler::{
    BytesPerSecond, Link, LinkState, MAX_RANKS, MockSail, Surveyed, Topology, is_without_discovery,
    load_links, survey, surveyed_links,
};

use crate::{Usage, directory, output};

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

/// What is shown, and the schema of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    mock: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    directory: Option<String>,
    /// Whether any card is played by a program, and what its clock shows.
    #[serde(skip_serializing_if = "Option::is_none")]
    nature: Option<&'static str>,
    cards: Vec<Card>,
    links: Vec<LinkRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
struct Card {
    card: usize,
    /// `up`, or `down` with a reason.
    state: &'static str,
    /// `sail`, `twin` or `mock`; nothing for a card that cannot say.
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    abi: Option<String>,
    #[serde(flatten)]
    more: Option<More>,
}

/// What a card says about itself since version 0.2 of the ABI.
#[derive(Debug, Serialize)]
struct More {
    /// In hexadecimal digits, because JSON's numbers are too short for it.
    serial: String,
    profile: String,
    pace: &'static str,
    memory_bytes: u64,
    memory_free_bytes: u64,
    /// The process that has work on the card.
    owner: Option<u32>,
}

#[derive(Debug, Serialize)]
struct LinkRow {
    from: usize,
    /// Nothing for a port that leads to no card that answers.
    to: Option<usize>,
    state: String,
    lanes: Option<u32>,
    bandwidth_bytes_per_second: Option<u64>,
    latency_ns: Option<u128>,
    /// `probe` for measured figures, `profile` for those that the card was told.
    source: Option<&'static str>,
}

impl From<&Link> for LinkRow {
    fn from(link: &Link) -> Self {
        LinkRow {
            from: link.local_sail,
            to: Some(link.remote_sail),
            state: link.state.to_string(),
            lanes: None,
            bandwidth_bytes_per_second: link.bandwidth.map(|BytesPerSecond(rate)| rate),
            latency_ns: link.latency.map(|latency| latency.as_nanos()),
            source: link.bandwidth.map(|_| "probe"),
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
        None => found(&directory::find())?,
    };
    match args.json {
        true => output::line(&serde_json::to_string(&report)?),
        false => show::show(&report),
    }
}

fn mock(count: usize) -> Report {
    let topology = Topology::<MockSail>::with_mock(count);
    let card = |sail: &MockSail| Card {
        card: sail.id(),
        state: "up",
        kind: Some("mock"),
        ..Card::default()
    };
    Report {
        mock: true,
        directory: None,
        nature: None,
        cards: topology.sails().iter().map(card).collect(),
        links: topology.links().iter().map(LinkRow::from).collect(),
        hint: None,
    }
}

fn found(folder: &Path) -> anyhow::Result<Report> {
    let cards = survey(folder);
    let links = surveyed_links(&cards, &load_links(folder)?);
    let emulated = cards.iter().filter_map(|card| Some(&card.card.as_ref().ok()?.info));
    let nature = emulated.clone().find(|info| info.emulated());
    let mut rows: Vec<LinkRow> = links.iter().map(|link| row(link, &cards)).collect();
    rows.extend(cards.iter().flat_map(|card| loose(card, &cards)));
    rows.sort_by_key(|row| (row.from, row.to.unwrap_or(usize::MAX)));
    Ok(Report {
        mock: false,
        directory: Some(folder.display().to_string()),
        nature: nature.map(|info| directory::nature(info.pace)),
        hint: cards.is_empty().then_some(directory::HINT),
        cards: cards.iter().map(card).collect(),
        links: rows,
    })
}

fn card(surveyed: &Surveyed) -> Card {
    let path = Some(surveyed.path.display().to_string());
    let plain = Card { card: surveyed.index, state: "up", path, ..Card::default() };
    match &surveyed.card {
        Ok(card) => {
            let info = &card.info;
            let more = More {
                serial: format!("{:016x}", info.serial),
                profile: info.profile.clone(),
                pace: directory::pace(info.pace),
                memory_bytes: info.capacity,
                memory_free_bytes: info.available,
                owner: info.owner,
            };
            let abi = card.control.version().ok().map(|abi| abi.to_string());
            Card { kind: Some(directory::kind(info)), abi, more: Some(more), ..plain }
        }
        // The first version of the ABI has no more to say than that it is there.
        Err(error) if is_without_discovery(error) => {
            match SpankerControl::open_path(&surveyed.path).and_then(|card| card.version()) {
                Ok(abi) => Card { kind: Some("sail"), abi: Some(abi.to_string()), ..plain },
                Err(error) => Card { state: "down", reason: Some(error.to_string()), ..plain },
            }
        }
        Err(error) => {
            let abi = match error {
                CardError::Version { theirs } => Some(theirs.to_string()),
                _ => None,
            };
            let kind = abi.as_ref().map(|_| "sail");
            let reason = Some(directory::reason(surveyed));
            Card { state: "down", kind, abi, reason, ..plain }
        }
    }
}

/// A link with what its profile says, where nobody has measured it.
fn row(link: &Link, cards: &[Surveyed]) -> LinkRow {
    let plain = LinkRow::from(link);
    let said = |place: usize| cards.get(place).and_then(|card| card.card.as_ref().ok());
    let (Some(from), Some(to)) = (said(link.local_sail), said(link.remote_sail)) else {
        return plain;
    };
    let leads = |port: &&PortInfo| port.peer.is_some_and(|peer| peer.serial == to.info.serial);
    let up = |port: &&PortInfo| port.state == PortState::Up;
    let ports = || from.ports.iter().filter(leads);
    let Some(port) = ports().find(up).or_else(|| ports().next()) else { return plain };
    let lanes = (port.lanes > 0).then_some(port.lanes);
    match plain.source {
        Some(_) => LinkRow { lanes, ..plain },
        None => LinkRow { lanes, ..by_profile(plain, port) },
    }
}

fn by_profile(row: LinkRow, port: &PortInfo) -> LinkRow {
    let known = port.bandwidth.is_some() || port.latency > Duration::ZERO;
    LinkRow {
        bandwidth_bytes_per_second: port.bandwidth,
        latency_ns: known.then_some(port.latency.as_nanos()),
        source: known.then_some("profile"),
        ..row
    }
}

/// The ports of a card that lead to no card that answers.
fn loose<'a>(
    surveyed: &'a Surveyed,
    cards: &'a [Surveyed],
) -> impl Iterator<Item = LinkRow> + use<'a> {
    let answers = |serial: u64| {
        let there = cards.iter().filter_map(|card| card.card.as_ref().ok());
        there.into_iter().any(|card| card.info.serial == serial)
    };
    let ports = surveyed.card.iter().flat_map(|card| &card.ports);
    let loose = ports.filter(move |port| !port.peer.is_some_and(|peer| answers(peer.serial)));
    loose.map(|port| {
        let state = match port.state {
            PortState::Up => LinkState::Up,
            PortState::Training => LinkState::Training,
            PortState::Down => LinkState::Down,
            PortState::Fault => LinkState::Error,
        };
        let plain = LinkRow {
            from: surveyed.index,
            to: None,
            state: state.to_string(),
            lanes: None,
            bandwidth_bytes_per_second: None,
            latency_ns: None,
            source: None,
        };
        by_profile(plain, port)
    })
}
