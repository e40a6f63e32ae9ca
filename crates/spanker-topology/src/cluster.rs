// SPDX-License-Identifier: Apache-2.0
//! Clusters: cards of one or several kinds, the wires between them, and what the wires share.
//!
//! A wire is a directed edge between two nodes. Nodes are the cards and, for a switch or a host in the
//! middle, one hub. A message from card to card follows the route of least latency; every wire on it adds
//! its latency, and the slowest one and whatever is shared set the rate.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::route::Routes;
use crate::{Bytes, BytesPerSecond, Profile, Seconds, TopologyError};

/// The most cards that a cluster may have. Routes between all pairs are stored.
pub const MAX_CARDS: usize = 256;

/// How cards are wired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Shape {
    /// Two cards, one link.
    PointToPoint,
    /// Each card linked to the next and the last to the first, in both directions.
    Ring,
    /// Each card linked to every other; its lanes are divided between them.
    Mesh,
    /// Every message goes through the host, over the cards' host links.
    Star,
    /// Every card has one port on a switch.
    Switch,
    /// A list of links.
    Links,
}

impl Shape {
    /// Every shape, in the order in which help texts list them.
    pub const ALL: [Shape; 6] =
        [Shape::PointToPoint, Shape::Ring, Shape::Mesh, Shape::Star, Shape::Switch, Shape::Links];

    /// The name that flags, files and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Shape::PointToPoint => "point-to-point",
            Shape::Ring => "ring",
            Shape::Mesh => "mesh",
            Shape::Star => "star",
            Shape::Switch => "switch",
            Shape::Links => "links",
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Shape::ALL.into_iter().find(|shape| shape.name() == text).ok_or_else(|| {
            let names = Shape::ALL.map(Shape::name).join(", ");
            format!("unknown topology '{text}' (expected one of: {names})")
        })
    }
}

/// A directed edge between two nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wire {
    /// The node that sends: a card, or the hub if it is the number of cards.
    pub from: usize,
    /// The node that receives.
    pub to: usize,
    /// Payload that it sustains.
    pub bandwidth: BytesPerSecond,
    /// The fixed cost of a message.
    pub latency: Seconds,
    /// The shared resource that it crosses, as an index into [`Cluster::shared`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<usize>,
}

/// A rate that several wires divide between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shared {
    /// Its name, for explanations.
    pub name: String,
    /// What all its wires carry together.
    pub bandwidth: BytesPerSecond,
}

/// Cards and the wires between them.
///
/// ```
/// use spanker_topology::{Bytes, Cluster, Profile, Shape};
/// let ring = Cluster::uniform(Profile::builtin("rev-a")?, 4, Shape::Ring)?;
/// // A message to the card opposite takes two hops.
/// assert_eq!(ring.latency(0, 2).to_string(), "4 us");
/// // Every card sends to the next at once: nothing is shared.
/// let shift: Vec<_> = (0..4).map(|card| (card, (card + 1) % 4, 493_000.0)).collect();
/// assert_eq!(ring.round(&shift).to_string(), "1 ms");
/// # Ok::<(), spanker_topology::TopologyError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Wired", into = "Wired")]
pub struct Cluster {
    wired: Wired,
    routes: Routes,
}

/// What a cluster is made of, and how it is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wired {
    shape: Shape,
    profiles: Vec<Profile>,
    /// The profile of each card.
    cards: Vec<usize>,
    wires: Vec<Wire>,
    shared: Vec<Shared>,
    notes: Vec<String>,
}

impl From<Cluster> for Wired {
    fn from(cluster: Cluster) -> Wired {
        cluster.wired
    }
}

impl TryFrom<Wired> for Cluster {
    type Error = TopologyError;

    fn try_from(wired: Wired) -> Result<Cluster, TopologyError> {
        let cards = wired.cards.len();
        if cards == 0 || cards > MAX_CARDS {
            return Err(TopologyError::Cards { cards });
        }
        let toml = |message| TopologyError::Toml { what: "cluster", message };
        if let Some(bad) = wired.cards.iter().find(|&&profile| profile >= wired.profiles.len()) {
            return Err(toml(format!("there is no profile {bad}")));
        }
        for wire in &wired.wires {
            let (from, to) = (wire.from, wire.to);
            if let Some(missing) = [from, to].into_iter().find(|&node| node > cards) {
                return Err(TopologyError::MissingCard { from, to, missing, cards });
            }
            if from == to {
                return Err(TopologyError::Link { from, to, message: "joins nothing".into() });
            }
            if wire.shared.is_some_and(|shared| shared >= wired.shared.len()) {
                let message = "crosses a shared resource that is not there".into();
                return Err(TopologyError::Link { from, to, message });
            }
        }
        for profile in &wired.profiles {
            let named = |message| toml(format!("{}: {message}", profile.name));
            profile.check().map_err(named)?;
        }
        let routes = Routes::new(cards, &wired.wires);
        let cluster = Cluster { wired, routes };
        for to in 1..cluster.cards() {
            for (from, to) in [(0, to), (to, 0)] {
                if !cluster.reaches(from, to) {
                    return Err(TopologyError::Disconnected { from, to });
                }
            }
        }
        Ok(cluster)
    }
}

impl Cluster {
    /// Cards of one kind.
    ///
    /// # Errors
    /// As [`Cluster::new`].
    pub fn uniform(profile: Profile, cards: usize, shape: Shape) -> Result<Self, TopologyError> {
        if cards == 0 || cards > MAX_CARDS {
            return Err(TopologyError::Cards { cards });
        }
        Cluster::new(vec![profile; cards], shape)
    }

    /// Cards of any kinds in one of the regular shapes. A link between two kinds has the lower rate and
    /// the higher latency of the two.
    ///
    /// # Errors
    /// [`TopologyError::Cards`] for none or too many, [`TopologyError::Shape`] for a shape that these
    /// cards cannot form.
    pub fn new(cards: Vec<Profile>, shape: Shape) -> Result<Self, TopologyError> {
        let (wires, shared, notes) = crate::shape::wire(&cards, shape)?;
        Cluster::assemble(cards, shape, wires, shared, notes)
    }

    /// Cards of any kinds with the links that a list names.
    ///
    /// # Errors
    /// [`TopologyError::MissingCard`] for a link to nowhere, [`TopologyError::Disconnected`] if the
    /// links leave cards apart.
    pub fn with_wires(
        cards: Vec<Profile>,
        wires: Vec<Wire>,
        shared: Vec<Shared>,
    ) -> Result<Self, TopologyError> {
        let count = cards.len();
        let outside = wires.iter().find(|wire| wire.from.max(wire.to) >= count);
        if let Some(&Wire { from, to, .. }) = outside {
            let missing = from.max(to);
            return Err(TopologyError::MissingCard { from, to, missing, cards: count });
        }
        Cluster::assemble(cards, Shape::Links, wires, shared, Vec::new())
    }

    fn assemble(
        cards: Vec<Profile>,
        shape: Shape,
        wires: Vec<Wire>,
        shared: Vec<Shared>,
        notes: Vec<String>,
    ) -> Result<Self, TopologyError> {
        let mut profiles: Vec<Profile> = Vec::new();
        let mut numbers = Vec::with_capacity(cards.len());
        for card in cards {
            let known = profiles.iter().position(|profile| *profile == card);
            numbers.push(known.unwrap_or_else(|| {
                profiles.push(card);
                profiles.len() - 1
            }));
        }
        Cluster::try_from(Wired { shape, profiles, cards: numbers, wires, shared, notes })
    }

    /// How many cards there are.
    #[must_use]
    pub fn cards(&self) -> usize {
        self.wired.cards.len()
    }

    /// How they are wired.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.wired.shape
    }

    /// The profile of a card.
    ///
    /// # Panics
    /// If there is no such card.
    #[must_use]
    pub fn profile(&self, card: usize) -> &Profile {
        &self.wired.profiles[self.wired.cards[card]]
    }

    /// What it is made of, in a few words: `2 x rev-a, 1 x rev-a@1GB/s`.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut kinds: Vec<(&str, usize)> = Vec::new();
        for card in 0..self.cards() {
            let name = self.profile(card).name.as_str();
            match kinds.iter_mut().find(|(known, _)| *known == name) {
                Some((_, count)) => *count += 1,
                None => kinds.push((name, 1)),
            }
        }
        let listed = kinds.iter().map(|(name, count)| format!("{count} x {name}"));
        listed.collect::<Vec<_>>().join(", ")
    }

    /// A number that cards of the same kind share.
    #[must_use]
    pub fn kind(&self, card: usize) -> usize {
        self.wired.cards[card]
    }

    /// The wires, in a fixed order.
    #[must_use]
    pub fn wires(&self) -> &[Wire] {
        &self.wired.wires
    }

    /// What wires share.
    #[must_use]
    pub fn shared(&self) -> &[Shared] {
        &self.wired.shared
    }

    /// What someone who builds this should know.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.wired.notes
    }

    /// Whether a message can get from one card to another.
    #[must_use]
    pub fn reaches(&self, from: usize, to: usize) -> bool {
        from == to || !self.routes.path(from, to).is_empty()
    }

    /// The wires that a message takes, in order; none if it cannot get there or is there already.
    #[must_use]
    pub fn route(&self, from: usize, to: usize) -> &[u32] {
        self.routes.path(from, to)
    }

    /// The fixed cost of a message from one card to another.
    #[must_use]
    pub fn latency(&self, from: usize, to: usize) -> Seconds {
        if from != to && self.routes.path(from, to).is_empty() {
            return Seconds(f64::INFINITY);
        }
        self.routes.path(from, to).iter().map(|&wire| self.wired.wires[wire as usize].latency).sum()
    }

    /// How long it takes until all these messages (from, to, bytes), sent at once, have arrived: the
    /// longest latency, and the bytes over the wire or shared resource that has the most to carry.
    #[must_use]
    pub fn round(&self, messages: &[(usize, usize, f64)]) -> Seconds {
        let mut latency = Seconds::ZERO;
        let mut load = vec![0.0; self.wired.wires.len() + self.wired.shared.len()];
        for &(from, to, bytes) in messages {
            latency = latency.max(self.latency(from, to));
            for &wire in self.routes.path(from, to) {
                load[wire as usize] += bytes;
                if let Some(shared) = self.wired.wires[wire as usize].shared {
                    load[self.wired.wires.len() + shared] += bytes;
                }
            }
        }
        let rates = self.wired.wires.iter().map(|wire| wire.bandwidth);
        let rates = rates.chain(self.wired.shared.iter().map(|shared| shared.bandwidth));
        let busiest = load.iter().zip(rates).map(|(load, rate)| load / rate.0 as f64);
        latency + Seconds(busiest.fold(0.0, f64::max))
    }

    /// What a card can count on of a wire to or from a hub: all of it, or its part of what all cards share
    /// there, because no card knows what the others do.
    #[must_use]
    pub fn part_at_hub(&self, wire: &Wire) -> BytesPerSecond {
        let cards = self.cards().max(1) as u64;
        let part = wire.shared.map(|at| (self.wired.shared[at].bandwidth.0 / cards).max(1));
        BytesPerSecond(part.map_or(wire.bandwidth.0, |part| part.min(wire.bandwidth.0)))
    }

    /// The fixed cost of a collective among these cards before its first step.
    #[must_use]
    pub fn base(&self, cards: &[usize]) -> Seconds {
        let base = |&card: &usize| self.profile(card).link.as_ref().map(|link| link.base.value);
        cards.iter().filter_map(base).fold(Seconds::ZERO, Seconds::max)
    }

    /// How long the host takes to send `bytes` to a card.
    #[must_use]
    pub fn upload(&self, card: usize, bytes: Bytes) -> Seconds {
        let host = &self.profile(card).host;
        host.latency.value + host.bandwidth.value.time(bytes)
    }

    /// The same cluster after cards and links have died. Cards keep their numbers; nothing is routed
    /// through what is gone.
    #[must_use]
    pub fn without(&self, dead: &[usize], cut: &[(usize, usize)]) -> Cluster {
        let mut wired = self.wired.clone();
        wired.wires.retain(|wire| {
            let (from, to) = (wire.from, wire.to);
            let ends = !dead.contains(&from) && !dead.contains(&to);
            ends && !cut.contains(&(from, to)) && !cut.contains(&(to, from))
        });
        let routes = Routes::new(wired.cards.len(), &wired.wires);
        Cluster { wired, routes }
    }

    /// The same cluster with other profiles, kind by kind; `change` gets each of them.
    #[must_use]
    pub fn with_profiles(&self, change: impl FnMut(&mut Profile)) -> Cluster {
        let mut cluster = self.clone();
        cluster.wired.profiles.iter_mut().for_each(change);
        cluster
    }

    /// The same cluster with other shared resources; `change` gets each of them with the first wire that
    /// crosses it.
    #[must_use]
    pub fn with_changed_shared(&self, mut change: impl FnMut(&mut Shared, &Wire)) -> Cluster {
        let mut cluster = self.clone();
        for (index, shared) in cluster.wired.shared.iter_mut().enumerate() {
            let wire = cluster.wired.wires.iter().find(|wire| wire.shared == Some(index));
            if let Some(wire) = wire {
                change(shared, wire);
            }
        }
        cluster
    }

    /// The same cluster with other wires; `change` gets each of them. Routes are found anew.
    #[must_use]
    pub fn with_changed_wires(&self, change: impl FnMut(&mut Wire)) -> Cluster {
        let mut wired = self.wired.clone();
        wired.wires.iter_mut().for_each(change);
        let routes = Routes::new(wired.cards.len(), &wired.wires);
        Cluster { wired, routes }
    }
}
