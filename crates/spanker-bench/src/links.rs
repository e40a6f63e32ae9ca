// SPDX-License-Identifier: Apache-2.0
//! What the links between cards take: messages of several sizes over every link that is up, and the line that explains
//! them, latency plus bytes over bandwidth.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use spanker_engine::{CardList, EngineError, directory, explain};
use spanker_plan::Line;
use spanker_runtime::SpankerControl;
use spanker_scheduler::{
    Deadline, DeviceError, DeviceGroup, LinkEnd, LinkState, ProbedLink, Topology, load_links,
};

use crate::error::Result;

/// A link that was measured, beside what its card says.
#[derive(Debug, Clone, Serialize)]
pub struct LinkProbe {
    /// The card that sends.
    pub from: usize,
    /// The card that receives.
    pub to: usize,
    /// Nothing where no line explains the samples.
    pub bandwidth_bytes_per_second: Option<u64>,
    /// The same for the latency.
    pub latency_ns: Option<f64>,
    /// How far the line is from a sample at most, as a share of the sample.
    pub worst_residual: Option<f64>,
    /// What the card's profile says.
    pub profile_bandwidth_bytes_per_second: Option<u64>,
    /// The same for the latency; 0 where it says nothing.
    pub profile_latency_ns: u128,
    /// What was measured.
    pub samples: Vec<LinkSample>,
    /// The line.
    #[serde(skip)]
    pub line: Option<Line>,
    #[serde(skip)]
    ends: (LinkEnd, LinkEnd),
}

/// A message of so many bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct LinkSample {
    /// Its bytes.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
}

/// What the links between some cards take, and the schema of `spanker probe --json`.
#[derive(Debug, Clone, Serialize)]
pub struct LinkSurvey {
    /// Where the cards are.
    pub directory: String,
    /// What the cards are and whose clock times are by.
    pub nature: &'static str,
    /// Links that were measured.
    pub links: Vec<LinkProbe>,
    /// Links that were not, because they are not up.
    pub skipped: Vec<SkippedLink>,
}

/// A link that is not up.
#[derive(Debug, Clone, Serialize)]
pub struct SkippedLink {
    /// The card that would send.
    pub from: usize,
    /// The card that would receive.
    pub to: usize,
    /// How the link is.
    pub state: String,
}

/// Measures every link between the cards that a list names, or all that answer, and keeps what was found beside the cards'
/// devices. `begins` and `detect` are those of [`probe_links`].
///
/// # Errors
/// Cards that do not answer, links that are all down, and a file that cannot be written.
pub fn survey_links(
    folder: &Path,
    list: Option<&CardList>,
    sizes: &[usize],
    detect: Duration,
    begins: impl FnMut((usize, usize), (usize, usize), usize),
) -> Result<LinkSurvey> {
    let unavailable = |what: String, hint: Option<&str>| EngineError::Unavailable {
        what,
        hint: hint.map(str::to_owned),
    };
    let indices = match list {
        // Without a word about cards, those that are left are measured.
        None => directory::alive(folder),
        Some(_) => directory::chosen(folder, list)?,
    };
    if indices.is_empty() {
        let first = directory::first(folder);
        let what = format!("no cards that answer at {}", first.display());
        return Err(unavailable(what, Some(directory::HINT)).into());
    }
    let cards = directory::open(folder, &indices)?;
    let info = cards.sails()[0].info();
    let info = info.map_err(|error| directory::blamed(folder, &indices, &error))?;
    let links = probe_links(&cards, sizes, detect, begins).collect::<Result<Vec<_>>>()?;
    if links.is_empty() {
        let what = format!("no link is up between cards {}", directory::list(&indices));
        return Err(unavailable(what, None).into());
    }
    save_links(folder, &links)?;
    let down = cards.links().iter().filter(|link| link.state != LinkState::Up);
    let index = |place: usize| cards.indices()[place];
    let skipped = down.map(|link| SkippedLink {
        from: index(link.local_sail),
        to: index(link.remote_sail),
        state: link.state.to_string(),
    });
    Ok(LinkSurvey {
        directory: folder.display().to_string(),
        nature: directory::nature(info.pace),
        skipped: skipped.collect(),
        links,
    })
}

/// Measures every link of some cards that is up, one at a time. `begins` is called with the link, which one it is of how many, and
/// the bytes of the message. `detect` is how long no card may get on with its work.
pub fn probe_links<'a>(
    cards: &'a Topology<SpankerControl>,
    sizes: &'a [usize],
    detect: Duration,
    mut begins: impl FnMut((usize, usize), (usize, usize), usize) + 'a,
) -> impl Iterator<Item = Result<LinkProbe>> + 'a {
    let up = cards.links().iter().filter(|link| link.state == LinkState::Up);
    let up: Vec<(usize, usize)> = up.map(|link| (link.local_sail, link.remote_sail)).collect();
    let (all, deadline) = (up.len(), Deadline { detect, ..Deadline::USUAL });
    up.into_iter().enumerate().map(move |(at, ends)| {
        let name = (cards.indices()[ends.0], cards.indices()[ends.1]);
        let probed = probe(cards, ends, sizes, &deadline, |size| begins(name, (at, all), size));
        Ok(probed.map_err(|error| explain(cards, error))?)
    })
}

fn probe(
    cards: &Topology<SpankerControl>,
    (from, to): (usize, usize),
    sizes: &[usize],
    deadline: &Deadline,
    mut begins: impl FnMut(usize),
) -> Result<LinkProbe, DeviceError> {
    let (here, there) = (&cards.sails()[from], &cards.sails()[to]);
    let group = DeviceGroup::new(&[here, there])?;
    let mut samples = Vec::with_capacity(sizes.len());
    for &size in sizes {
        begins(size);
        let bytes = size as u64;
        let seconds = group.message_time(0, 1, bytes, deadline)?.as_secs_f64();
        samples.push(LinkSample { bytes, seconds });
    }
    let line = Line::fit(&samples.iter().map(|s| (s.bytes, s.seconds)).collect::<Vec<_>>());
    let (sent, came) = (group.end(0, 1), group.end(1, 0));
    let said = sent.and_then(|(_, port)| here.port(port).ok());
    let end = |end: Option<(u64, u32)>| {
        let (serial, port) = end.unwrap_or_default();
        LinkEnd { serial, port }
    };
    Ok(LinkProbe {
        from: group.index(0),
        to: group.index(1),
        bandwidth_bytes_per_second: line.map(|line| line.bandwidth.0),
        latency_ns: line.map(|line| line.latency.0 * 1e9),
        worst_residual: line.map(|line| line.worst),
        profile_bandwidth_bytes_per_second: said.and_then(|port| port.bandwidth),
        profile_latency_ns: said.map_or(0, |port| port.latency.as_nanos()),
        samples,
        line,
        ends: (end(sent), end(came)),
    })
}

/// Saves what was found out beside the cards' devices, and keeps what is known of other links.
///
/// # Errors
/// A file that cannot be written.
pub fn save_links(folder: &Path, links: &[LinkProbe]) -> Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let fresh = links.iter().filter_map(|link| {
        let ((from, to), line) = (link.ends, link.line?);
        let (bandwidth, latency) = (line.bandwidth, line.latency);
        Some(ProbedLink { from, to, bandwidth, latency, fitted: now })
    });
    let fresh: Vec<ProbedLink> = fresh.collect();
    // What was saved before and makes no sense is replaced.
    let mut all = load_links(folder).unwrap_or_default();
    all.retain(|old| !fresh.iter().any(|new| (new.from, new.to) == (old.from, old.to)));
    all.extend(fresh);
    Ok(spanker_scheduler::save_links(folder, &all)?)
}
