// SPDX-License-Identifier: Apache-2.0
//! Which cards there are, how they are and how they are linked, as a report.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use spanker_runtime::{Error as CardError, PortInfo, PortState, SpankerControl};
use spanker_scheduler::{
    BytesPerSecond, Link, LinkState, MAX_RANKS, MockSail, Surveyed, Topology, is_without_discovery,
    load_links, survey, surveyed_links,
};

use crate::directory;
use crate::error::{EngineError, Result};

/// Cards and the links between them.
#[derive(Debug, Serialize)]
pub struct CardReport {
    /// Whether these are mock cards.
    pub mock: bool,
    /// Where they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// Whether any card is played by a program, and what its clock shows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nature: Option<&'static str>,
    /// Every card, also dead ones.
    pub cards: Vec<CardRow>,
    /// Every link, also of ports that lead nowhere.
    pub links: Vec<LinkRow>,
    /// What to do where there are no cards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<&'static str>,
}

/// A card.
#[derive(Debug, Default, Serialize)]
pub struct CardRow {
    /// Its number.
    pub card: usize,
    /// `up`, or `down` with a reason.
    pub state: &'static str,
    /// `sail`, `twin` or `mock`; nothing for a card that cannot say.
    pub kind: Option<&'static str>,
    /// Why it is down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Its device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The version of the ABI that it speaks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub abi: Option<String>,
    /// What it says about itself.
    #[serde(flatten)]
    pub more: Option<CardDetails>,
}

/// What a card says about itself since version 0.2 of the ABI.
#[derive(Debug, Serialize)]
pub struct CardDetails {
    /// In hexadecimal digits, because JSON's numbers are too short for it.
    pub serial: String,
    /// The profile that it is said to have.
    pub profile: String,
    /// What its clock shows, in a word.
    pub pace: &'static str,
    /// Its memory.
    pub memory_bytes: u64,
    /// What nobody has of it.
    pub memory_free_bytes: u64,
    /// The process that has work on the card.
    pub owner: Option<u32>,
}

/// A link from one card to another.
#[derive(Debug, Serialize)]
pub struct LinkRow {
    /// The card that sends.
    pub from: usize,
    /// Nothing for a port that leads to no card that answers.
    pub to: Option<usize>,
    /// Whether it is up.
    pub state: String,
    /// Its width.
    pub lanes: Option<u32>,
    /// What it carries.
    pub bandwidth_bytes_per_second: Option<u64>,
    /// What a message takes at least.
    pub latency_ns: Option<u128>,
    /// `probe` for measured figures, `profile` for those that the card was told.
    pub source: Option<&'static str>,
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

/// So many mock cards: buffers in host memory, every card linked to every other.
///
/// # Errors
/// [`EngineError::Request`](crate::EngineError) for none, or more than a group has.
pub fn mock_cards(count: usize) -> Result<CardReport> {
    if !(1..=MAX_RANKS).contains(&count) {
        let what = format!("--mock {count}: a group has 1 to {MAX_RANKS} cards");
        return Err(EngineError::request(what));
    }
    let topology = Topology::<MockSail>::with_mock(count);
    let card = |sail: &MockSail| CardRow {
        card: sail.id(),
        state: "up",
        kind: Some("mock"),
        ..CardRow::default()
    };
    Ok(CardReport {
        mock: true,
        directory: None,
        nature: None,
        cards: topology.sails().iter().map(card).collect(),
        links: topology.links().iter().map(LinkRow::from).collect(),
        hint: None,
    })
}

/// The cards in a folder of devices, with what was measured of their links.
///
/// # Errors
/// [`EngineError::Unavailable`] for measurements that cannot be read.
pub fn survey_cards(folder: &Path) -> Result<CardReport> {
    let cards = survey(folder);
    let probed = load_links(folder);
    let probed = probed.map_err(|error| EngineError::unavailable(error.to_string(), None))?;
    let links = surveyed_links(&cards, &probed);
    let emulated = cards.iter().filter_map(|card| Some(&card.card.as_ref().ok()?.info));
    let nature = emulated.clone().find(|info| info.emulated());
    let mut rows: Vec<LinkRow> = links.iter().map(|link| row(link, &cards)).collect();
    rows.extend(cards.iter().flat_map(|card| loose(card, &cards)));
    rows.sort_by_key(|row| (row.from, row.to.unwrap_or(usize::MAX)));
    Ok(CardReport {
        mock: false,
        directory: Some(folder.display().to_string()),
        nature: nature.map(|info| directory::nature(info.pace)),
        hint: cards.is_empty().then_some(directory::HINT),
        cards: cards.iter().map(card).collect(),
        links: rows,
    })
}

fn card(surveyed: &Surveyed) -> CardRow {
    let path = Some(surveyed.path.display().to_string());
    let plain = CardRow { card: surveyed.index, state: "up", path, ..CardRow::default() };
    match &surveyed.card {
        Ok(card) => {
            let info = &card.info;
            let more = CardDetails {
                serial: format!("{:016x}", info.serial),
                profile: info.profile.clone(),
                pace: directory::pace(info.pace),
                memory_bytes: info.capacity,
                memory_free_bytes: info.available,
                owner: info.owner,
            };
            let abi = card.control.version().ok().map(|abi| abi.to_string());
            CardRow { kind: Some(directory::kind(info)), abi, more: Some(more), ..plain }
        }
        // The first version of the ABI has no more to say than that it is there.
        Err(error) if is_without_discovery(error) => {
            match SpankerControl::open_path(&surveyed.path).and_then(|card| card.version()) {
                Ok(abi) => CardRow { kind: Some("sail"), abi: Some(abi.to_string()), ..plain },
                Err(error) => CardRow { state: "down", reason: Some(error.to_string()), ..plain },
            }
        }
        Err(error) => {
            let abi = match error {
                CardError::Version { theirs } => Some(theirs.to_string()),
                _ => None,
            };
            let kind = abi.as_ref().map(|_| "sail");
            let reason = Some(directory::reason(surveyed));
            CardRow { state: "down", kind, abi, reason, ..plain }
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
