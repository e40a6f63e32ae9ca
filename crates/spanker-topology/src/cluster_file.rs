// SPDX-License-Identifier: Apache-2.0
//! The file that describes a cluster.
//!
//! ```toml
//! topology = "links"              # or point-to-point, ring, mesh, star, switch
//!
//! [[cards]]
//! profile = "rev-a"               # a built-in name or the path of a profile
//! count = 2
//!
//! [[cards]]
//! profile = "rev-a"
//! memory_bandwidth = "1 GB/s"     # and memory_capacity: what is different about these
//!
//! [[links]]                       # only for "links"; both directions unless one_way = true
//! between = [0, 1]
//! bandwidth = "480 MB/s"          # from the profiles where absent, and so is latency
//! shared = "backplane"
//!
//! [[shared]]
//! name = "backplane"
//! bandwidth = "800 MB/s"
//! ```

use serde::Deserialize;

use crate::cluster::{Cluster, Shape, Shared, Wire};
use crate::{Bytes, BytesPerSecond, Profile, Provenance, Seconds, TopologyError};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    topology: Option<Shape>,
    cards: Vec<CardEntry>,
    #[serde(default)]
    links: Vec<LinkEntry>,
    #[serde(default)]
    shared: Vec<Shared>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CardEntry {
    profile: String,
    #[serde(default = "one")]
    count: usize,
    memory_bandwidth: Option<BytesPerSecond>,
    memory_capacity: Option<Bytes>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkEntry {
    between: [usize; 2],
    #[serde(default)]
    one_way: bool,
    bandwidth: Option<BytesPerSecond>,
    latency: Option<Seconds>,
    shared: Option<String>,
}

fn one() -> usize {
    1
}

impl Profile {
    /// The same card with another memory rate.
    #[must_use]
    pub fn with_memory_bandwidth(mut self, rate: BytesPerSecond, source: &str) -> Profile {
        let memory = &mut self.memory.bandwidth;
        *memory = memory.replaced(rate, Provenance::Assumed, source);
        self.name = format!("{}@{}", self.name, rate.to_string().replace(' ', ""));
        self
    }
}

impl Cluster {
    /// Reads a cluster; `find` turns a profile's name or path into a profile. `shape` replaces what the
    /// file says.
    ///
    /// # Errors
    /// [`TopologyError`] that names the entry and the value, or what `find` says.
    pub fn from_toml<E: From<TopologyError>>(
        text: &str,
        shape: Option<Shape>,
        mut find: impl FnMut(&str) -> Result<Profile, E>,
    ) -> Result<Cluster, E> {
        let bad = |message: String| TopologyError::Toml { what: "cluster", message };
        let file: File =
            toml::from_str(text).map_err(|error| bad(error.to_string().trim().to_owned()))?;
        let mut cards = Vec::new();
        for entry in &file.cards {
            let mut profile = find(&entry.profile)?;
            if let Some(rate) = entry.memory_bandwidth {
                profile = profile.with_memory_bandwidth(rate, "the cluster file");
            }
            if let Some(size) = entry.memory_capacity {
                let memory = &mut profile.memory.capacity;
                *memory = memory.replaced(size, Provenance::Assumed, "the cluster file");
                if profile.memory.reserved.value >= size {
                    let reserved = profile.memory.reserved.value;
                    let message = format!("memory_capacity {size} is all reserved ({reserved})");
                    return Err(bad(message).into());
                }
            }
            let left = crate::MAX_CARDS.saturating_sub(cards.len());
            if entry.count == 0 || entry.count > left {
                let cards = cards.len().saturating_add(entry.count);
                return Err(TopologyError::Cards { cards }.into());
            }
            cards.extend(std::iter::repeat_n(profile, entry.count));
        }
        let Some(first) = cards.first() else {
            return Err(TopologyError::Cards { cards: 0 }.into());
        };
        let default = if file.links.is_empty() { first.topology } else { Shape::Links };
        let shape = shape.or(file.topology).unwrap_or(default);
        match shape {
            Shape::Links => {
                let wires = wires(&cards, &file)?;
                Ok(Cluster::with_wires(cards, wires, file.shared)?)
            }
            _ if !file.links.is_empty() => {
                Err(bad(format!("topology {shape} and a list of links exclude each other")).into())
            }
            _ => Ok(Cluster::new(cards, shape)?),
        }
    }
}

fn wires(cards: &[Profile], file: &File) -> Result<Vec<Wire>, TopologyError> {
    let mut wires = Vec::new();
    for entry in &file.links {
        let [from, to] = entry.between;
        if let Some(missing) = [from, to].into_iter().find(|&card| card >= cards.len()) {
            return Err(TopologyError::MissingCard { from, to, missing, cards: cards.len() });
        }
        let refuse = |message: String| TopologyError::Link { from, to, message };
        let ends = [&cards[from], &cards[to]].map(|card| card.link.as_ref());
        let whole = |end: Option<&crate::LinkProfile>| end.map(|l| l.sustained(l.lanes.value));
        let slower = || Some(whole(ends[0])?.min(whole(ends[1])?));
        let later = || Some(ends[0]?.latency.value.max(ends[1]?.latency.value));
        let missing = |what: &str| refuse(format!("has no {what} and neither have the profiles"));
        let shared = match &entry.shared {
            None => None,
            Some(name) => {
                let known = file.shared.iter().position(|shared| shared.name == *name);
                Some(known.ok_or_else(|| refuse(format!("there is no shared '{name}'")))?)
            }
        };
        let bandwidth = entry.bandwidth.or_else(slower).ok_or_else(|| missing("bandwidth"))?;
        let latency = entry.latency.or_else(later).ok_or_else(|| missing("latency"))?;
        wires.push(Wire { from, to, bandwidth, latency, shared });
        if !entry.one_way {
            wires.push(Wire { from: to, to: from, bandwidth, latency, shared });
        }
    }
    Ok(wires)
}
