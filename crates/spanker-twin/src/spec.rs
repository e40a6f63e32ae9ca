// SPDX-License-Identifier: Apache-2.0
//! What each card of a twin is: its profile, its ports, and what they are connected to.

use serde::{Deserialize, Serialize};
use spanker_runtime::AbiVersion;
use spanker_topology::{
    BytesPerSecond, Cluster, Framing, LinkProfile, Profile, Seconds, Shape, Wire,
};

use crate::TwinError;

/// The most cards of one twin. The descriptors of all ports of a card must fit into one message, which
/// carries 253.
pub const MOST_CARDS: usize = 64;

/// How fast a card is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pace {
    /// It works as fast as it can and keeps a clock of its own by its profile.
    Card,
    /// It holds itself back to its profile's speed.
    Wall,
    /// It works as fast as it can, and its clock is the wall's.
    Unshaped,
}

impl Pace {
    /// The name that flags and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Pace::Card => "card",
            Pace::Wall => "wall",
            Pace::Unshaped => "unshaped",
        }
    }
}

/// A card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardSpec {
    /// The number in its device's name.
    pub index: u32,
    /// Unique among the cards of a twin, and not 0.
    pub serial: u64,
    /// Its numbers.
    pub profile: Profile,
    /// Its ports, in the order of their numbers.
    pub ports: Vec<PortSpec>,
    /// How fast it is.
    pub pace: Pace,
    /// Where its randomness begins. Each card has its own.
    pub seed: u64,
    /// The version of the ABI that it speaks. A card of an older minor version has not what came later, one of another
    /// major version answers PING and GET_VERSION only.
    #[serde(with = "version")]
    pub abi: AbiVersion,
}

/// Versions as text, as in `0.2.0`.
pub(crate) mod version {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use spanker_runtime::AbiVersion;

    pub(crate) fn serialize<S: Serializer>(
        version: &AbiVersion,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(version)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<AbiVersion, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A port of a card. Rates and times are those of what the card sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortSpec {
    /// The index of the card at the other end.
    pub peer: u32,
    /// The port at the other end.
    pub peer_port: u32,
    /// Lanes in use.
    pub lanes: u32,
    /// What these lanes carry: with `framing` the raw rate after line coding, without it the sustained
    /// payload rate.
    pub raw: BytesPerSecond,
    /// Frames, if the payload rate follows from them.
    pub framing: Option<Framing>,
    /// The fixed cost of a message.
    pub latency: Seconds,
    /// A small message there and back.
    pub round_trip: Seconds,
    /// The probability that a bit on the wire flips.
    pub bit_error_rate: f64,
    /// Whether all ports of the card send on the same lanes.
    pub shared_lanes: bool,
}

impl PortSpec {
    /// Payload bytes per second.
    #[must_use]
    pub fn payload_rate(&self) -> f64 {
        match self.framing {
            None => self.raw.0 as f64,
            Some(framing) => framing.goodput(self.raw, self.bit_error_rate, self.round_trip),
        }
    }
}

/// What each card of a cluster is. Two cards that wires join in both directions have one port each to the
/// other; cards on a hub have one to every other.
///
/// ```
/// use spanker_topology::{Cluster, Profile, Shape};
/// use spanker_twin::{Pace, specs};
/// let ring = Cluster::uniform(Profile::builtin("rev-a")?, 4, Shape::Ring)?;
/// let cards = specs(&ring, Pace::Card, 1)?;
/// let peers: Vec<u32> = cards[0].ports.iter().map(|port| port.peer).collect();
/// assert_eq!(peers, [1, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`TwinError::Cluster`] for more cards than [`MOST_CARDS`], and for a link that goes one way only.
pub fn specs(cluster: &Cluster, pace: Pace, seed: u64) -> Result<Vec<CardSpec>, TwinError> {
    let cards = cluster.cards();
    if cards > MOST_CARDS {
        let text = format!("{cards} cards: a twin has at most {MOST_CARDS}");
        return Err(TwinError::Cluster(text));
    }
    let mut ports: Vec<Vec<PortSpec>> = Vec::with_capacity(cards);
    for card in 0..cards {
        let peers = (0..cards).filter(|&peer| peer != card);
        let found = peers.filter_map(|peer| port(cluster, card, peer).transpose());
        ports.push(found.collect::<Result<_, _>>()?);
    }
    for card in 0..cards {
        for place in 0..ports[card].len() {
            let peer = ports[card][place].peer as usize;
            let back = ports[peer].iter().position(|port| port.peer as usize == card);
            ports[card][place].peer_port = back.expect("links go both ways") as u32;
        }
    }
    let drawn = mixed(seed);
    let spec = |(card, ports)| CardSpec {
        index: card as u32,
        // The last digits distinguish the cards of one twin, the others twins of different seeds.
        serial: drawn & !0xFFFF | (card as u64 + 1),
        profile: cluster.profile(card).clone(),
        ports,
        pace,
        seed: mixed(drawn ^ (card as u64 + 1)),
        abi: AbiVersion::OURS,
    };
    Ok(ports.into_iter().enumerate().map(spec).collect())
}

/// One step of SplitMix64: neighbouring seeds give numbers that have nothing in common.
fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The port of `card` to `peer`, if a link joins them.
fn port(cluster: &Cluster, card: usize, peer: usize) -> Result<Option<PortSpec>, TwinError> {
    if matches!(cluster.shape(), Shape::Star | Shape::Switch) {
        return Ok(through_hub(cluster, card, peer));
    }
    match (wire(cluster, card, peer), wire(cluster, peer, card)) {
        (None, None) => Ok(None),
        (Some(out), Some(_)) => Ok(Some(direct(cluster, out))),
        _ => {
            let text = format!(
                "the link between {card} and {peer} goes one way: an emulated link goes both"
            );
            Err(TwinError::Cluster(text))
        }
    }
}

/// The fastest wire from one node to another.
fn wire(cluster: &Cluster, from: usize, to: usize) -> Option<&Wire> {
    let wires = cluster.wires().iter().filter(|wire| (wire.from, wire.to) == (from, to));
    wires.max_by_key(|wire| wire.bandwidth)
}

/// A port to a neighbour. Frames are those of the slower end, whose rate the wire has.
fn direct(cluster: &Cluster, wire: &Wire) -> PortSpec {
    let peers = cluster.cards().saturating_sub(1).max(1) as u32;
    let lanes = |link: &LinkProfile| match cluster.shape() {
        Shape::Mesh => (link.lanes.value / peers).max(1),
        _ => link.lanes.value,
    };
    let ends = [wire.from, wire.to].map(|card| cluster.profile(card).link.as_ref());
    let slower = ends.into_iter().flatten().min_by_key(|link| link.sustained(lanes(link)));
    let mut port = PortSpec {
        peer: wire.to as u32,
        peer_port: 0,
        lanes: slower.map_or(1, lanes),
        raw: wire.bandwidth,
        framing: slower.and_then(|link| link.framing),
        latency: wire.latency,
        round_trip: slower.map_or(wire.latency * 2.0, |link| link.round_trip.value),
        bit_error_rate: slower.map_or(0.0, |link| link.bit_error_rate.value),
        shared_lanes: wire.shared.is_some(),
    };
    if port.framing.is_some() {
        port.raw = raw_for(&port, wire.bandwidth);
    }
    port
}

/// The raw rate at which frames leave the payload rate `wanted`. Losses depend a little on the raw rate
/// itself, so the quotient is taken until it stands still.
fn raw_for(port: &PortSpec, wanted: BytesPerSecond) -> BytesPerSecond {
    let mut port = port.clone();
    for _ in 0..8 {
        let next = port.raw.0 as f64 * (wanted.0 as f64 / port.payload_rate());
        let next = BytesPerSecond((next.round() as u64).max(1));
        if next == port.raw {
            break;
        }
        port.raw = next;
    }
    port.raw
}

/// A port to another card on the same hub.
fn through_hub(cluster: &Cluster, card: usize, peer: usize) -> Option<PortSpec> {
    let hub = cluster.cards();
    let (into, out) = (wire(cluster, card, hub)?, wire(cluster, hub, peer)?);
    let latency = into.latency + out.latency;
    // Where the hub is the host, the cards' own links are not used.
    let switched = cluster.shape() == Shape::Switch;
    let link = cluster.profile(card).link.as_ref().filter(|_| switched);
    let raw = cluster.part_at_hub(into).min(cluster.part_at_hub(out));
    Some(PortSpec {
        peer: peer as u32,
        peer_port: 0,
        lanes: link.map_or(1, |link| link.lanes.value),
        raw,
        framing: None,
        latency,
        round_trip: link.map_or(latency * 2.0, |link| link.round_trip.value),
        bit_error_rate: link.map_or(0.0, |link| link.bit_error_rate.value),
        shared_lanes: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(profile: &str, cards: usize, shape: Shape) -> (Cluster, Vec<CardSpec>) {
        let cluster = Cluster::uniform(Profile::builtin(profile).unwrap(), cards, shape).unwrap();
        let cards = specs(&cluster, Pace::Card, 7).unwrap();
        (cluster, cards)
    }

    fn linked_both_ways(cards: &[CardSpec]) {
        for card in cards {
            for (place, port) in card.ports.iter().enumerate() {
                let back = &cards[port.peer as usize].ports[port.peer_port as usize];
                assert_eq!((back.peer, back.peer_port), (card.index, place as u32));
            }
        }
    }

    #[test]
    fn port_of_a_rev_a_ring_carries_what_the_cluster_says() {
        for (profile, shape) in [("rev-a", Shape::Ring), ("rev-a-x16", Shape::Ring)] {
            for cards in [1, 2, 3, 4, 8, 64] {
                let (cluster, cards) = built(profile, cards, shape);
                linked_both_ways(&cards);
                for card in &cards {
                    assert_eq!(card.ports.len(), cards.len().saturating_sub(1).min(2));
                    for port in &card.ports {
                        let wire = wire(&cluster, card.index as usize, port.peer as usize).unwrap();
                        let rate = port.payload_rate() / wire.bandwidth.0 as f64;
                        assert!((rate - 1.0).abs() < 1e-6, "{rate}");
                        assert_eq!(port.shared_lanes, cards.len() > 2);
                        assert_eq!(port.latency, wire.latency);
                    }
                }
            }
        }
    }

    #[test]
    fn port_of_a_mesh_has_its_part_of_the_lanes() {
        let (cluster, cards) = built("rev-a", 4, Shape::Mesh);
        linked_both_ways(&cards);
        let port = &cards[0].ports[2];
        assert_eq!((cards[0].ports.len(), port.lanes, port.shared_lanes), (3, 1, false));
        let rate = port.payload_rate() / cluster.wires()[0].bandwidth.0 as f64;
        assert!((rate - 1.0).abs() < 1e-6, "{rate}");
    }

    #[test]
    fn ports_through_a_hub_reach_every_card() {
        for (profile, shape) in [("rev-a", Shape::Star), ("h200-nvlink", Shape::Switch)] {
            let (cluster, cards) = built(profile, 5, shape);
            linked_both_ways(&cards);
            for card in &cards {
                assert_eq!(card.ports.len(), 4);
                for port in &card.ports {
                    let ends = (card.index as usize, port.peer as usize);
                    assert_eq!(port.latency, cluster.latency(ends.0, ends.1));
                    assert!(port.shared_lanes && port.framing.is_none());
                }
            }
        }
    }

    #[test]
    fn serials_of_any_seed_are_unique_and_not_zero() {
        let (cluster, _) = built("rev-a", 64, Shape::Ring);
        let mut all = Vec::new();
        for seed in [0, 1, u64::MAX] {
            all.extend(specs(&cluster, Pace::Wall, seed).unwrap().iter().map(|card| card.serial));
        }
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
        assert_ne!(all[0], 0);
    }

    #[test]
    fn links_of_a_list_keep_their_own_rates_and_one_way_links_are_refused() {
        let card = Profile::builtin("rev-a").unwrap();
        let wire = |from, to, rate| Wire {
            from,
            to,
            bandwidth: BytesPerSecond(rate),
            latency: Seconds::from_micros(3.0),
            shared: None,
        };
        let wires = vec![wire(0, 1, 400_000_000), wire(1, 0, 100_000_000)];
        let both = Cluster::with_wires(vec![card.clone(); 2], wires, Vec::new()).unwrap();
        let cards = specs(&both, Pace::Card, 0).unwrap();
        for (card, rate) in [(0, 400e6), (1, 100e6)] {
            let found: f64 = cards[card].ports[0].payload_rate();
            assert!((found / rate - 1.0).abs() < 1e-6, "{found}");
        }
        let wires = vec![wire(0, 1, 1000), wire(1, 2, 1000), wire(2, 0, 1000)];
        let circle = Cluster::with_wires(vec![card; 3], wires, Vec::new()).unwrap();
        let error = specs(&circle, Pace::Card, 0).unwrap_err().to_string();
        assert!(error.contains("between 0 and 1 goes one way"), "{error}");
    }

    #[test]
    fn more_cards_than_a_twin_has_are_refused() {
        let cluster =
            Cluster::uniform(Profile::builtin("rev-a").unwrap(), 65, Shape::Ring).unwrap();
        let error = specs(&cluster, Pace::Card, 0).unwrap_err().to_string();
        assert!(error.contains("65 cards"), "{error}");
    }

    #[test]
    fn specs_survive_being_written_and_read() {
        let (_, cards) = built("rev-a", 3, Shape::Ring);
        let text = serde_json::to_string(&cards[1]).unwrap();
        assert_eq!(serde_json::from_str::<CardSpec>(&text).unwrap(), cards[1]);
    }
}
