// SPDX-License-Identifier: Apache-2.0
//! Which port of which card leads to which other card of a group, and how messages get to cards that are
//! not neighbours. It does not choose an order of the cards: ranks are what the caller says.

use spanker_collective::Rank;
use spanker_runtime::{CardInfo, Peer, PortInfo, PortState, SpankerControl};

use super::error::{DeviceError, DeviceErrorKind};

/// Ports that a card is believed to have.
const PORTS: u32 = 256;

/// The links between the cards of a group, and a route between any two of them.
///
/// ```
/// use spanker_fabric::device::Wiring;
/// // A ring of four: port 0 of each card leads to port 1 of the next.
/// let ring = Wiring::from_links(4, &[(0, 0, 1, 1), (1, 0, 2, 1), (2, 0, 3, 1), (3, 0, 0, 1)])?;
/// assert_eq!(ring.port(3, 0), Some(0));
/// assert_eq!(ring.port(0, 2), None);
/// // Of two ways equally long the same one is taken from every card.
/// assert_eq!((ring.route(0, 2), ring.route(2, 0)), (vec![0, 1, 2], vec![2, 3, 0]));
/// # Ok::<(), spanker_fabric::device::DeviceError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wiring {
    /// The port of `[from][to]`, for neighbours.
    ports: Vec<Vec<Option<u32>>>,
    /// From which rank a message of `[from]` reaches `[to]`.
    arrives_from: Vec<Vec<Rank>>,
}

/// A link: a rank, its port, the rank at the other end and the port there.
pub type RankLink = (Rank, u32, Rank, u32);

impl Wiring {
    /// The wiring of cards that have said what their ports are. A link counts if both ends say that it is up
    /// and name each other. Links that lead out of the group are left alone.
    pub(super) fn between(group: &[Ends]) -> Result<Self, DeviceError> {
        let mut links: Vec<RankLink> = Vec::new();
        // Ports that carry nothing: those that led to a card of the group, and those that lead nowhere.
        let (mut down, mut idle) = (Vec::new(), Vec::new());
        for (rank, ends) in group.iter().enumerate() {
            for port in &ends.ports {
                let peer = port.peer.and_then(|peer| {
                    let there = group.iter().position(|ends| ends.serial == peer.serial)?;
                    Some((there, peer.port))
                });
                let (card, number) = (ends.index, port.port);
                match peer {
                    Some((there, back)) if agreed(ends, port, &group[there], back) => {
                        links.push((rank, number, there, back));
                    }
                    Some((there, _)) => {
                        let (there, state) = (group[there].index, word(port.state));
                        down.push(format!("card {card} port {number} to card {there} is {state}"));
                    }
                    None if port.state != PortState::Up => {
                        idle.push(format!("card {card} port {number} is {}", word(port.state)));
                    }
                    None => {}
                }
            }
        }
        Wiring::from_links(group.len(), &links).map_err(|error| {
            let index = |rank: Option<usize>| rank.map(|rank| group[rank].index);
            let (from, to) = (index(error.card()), index(error.peer()));
            let why = if down.is_empty() { idle } else { down };
            DeviceError::new(DeviceErrorKind::Unreachable, from, why.join(", ")).with_peer(to)
        })
    }

    /// The wiring of a list of links. Of several links between two ranks the first is used.
    ///
    /// # Errors
    /// [`DeviceErrorKind::Unreachable`] names two ranks that nothing connects.
    ///
    /// # Panics
    /// If a link names a rank outside the group.
    pub fn from_links(ranks: usize, links: &[RankLink]) -> Result<Self, DeviceError> {
        let mut ports = vec![vec![None; ranks]; ranks];
        for &(here, port, there, back) in links {
            // Both directions of a pair use the same link.
            if here != there && ports[here][there].is_none() && ports[there][here].is_none() {
                ports[here][there] = Some(port);
                ports[there][here] = Some(back);
            }
        }
        let places = places(&ports);
        let mut arrives_from = Vec::with_capacity(ranks);
        for from in 0..ranks {
            let reached = search(&ports, &places, from);
            if let Some(to) = (0..ranks).find(|&to| reached[to].is_none()) {
                let apart = DeviceErrorKind::Unreachable;
                return Err(DeviceError::new(apart, Some(from), String::new()).with_peer(Some(to)));
            }
            arrives_from.push(reached.into_iter().flatten().collect());
        }
        Ok(Wiring { ports, arrives_from })
    }

    /// Cards in the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ports.len()
    }

    /// The port of `from` that leads to `to`, if they are neighbours.
    ///
    /// # Panics
    /// If a rank is not in the group.
    #[must_use]
    pub fn port(&self, from: Rank, to: Rank) -> Option<u32> {
        self.ports[from][to]
    }

    /// The ranks that a message passes, both ends included: the fewest that do.
    ///
    /// # Panics
    /// If a rank is not in the group.
    #[must_use]
    pub fn route(&self, from: Rank, to: Rank) -> Vec<Rank> {
        let mut route = vec![to];
        while let Some(&last) = route.last().filter(|&&last| last != from) {
            route.push(self.arrives_from[from][last]);
        }
        route.reverse();
        route
    }
}

/// What one card says about its ports.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) serial: u64,
    pub(super) index: usize,
    pub(super) ports: Vec<PortInfo>,
}

impl Ends {
    /// Asks a card; `name` is its index until it has said so itself.
    pub(super) fn ask(card: &SpankerControl, name: usize) -> Result<(CardInfo, Ends), DeviceError> {
        let info = card.info().map_err(|error| DeviceError::request(name, error))?;
        let (serial, index) = (info.serial, info.index as usize);
        if info.ports > PORTS {
            let detail = format!("it says that it has {} ports", info.ports);
            return Err(DeviceError::new(DeviceErrorKind::Wrong, Some(index), detail));
        }
        let ports: Result<_, _> = (0..info.ports).map(|port| card.port(port)).collect();
        let ports = ports.map_err(|error| DeviceError::request(index, error))?;
        Ok((info, Ends { serial, index, ports }))
    }
}

/// Whether a port and the one that it names are both up and mean each other.
fn agreed(here: &Ends, port: &PortInfo, there: &Ends, back: u32) -> bool {
    let us = |peer: Peer| (peer.serial, peer.port) == (here.serial, port.port);
    let theirs = there.ports.iter().find(|port| port.port == back);
    port.state == PortState::Up
        && theirs.is_some_and(|theirs| theirs.state == PortState::Up && theirs.peer.is_some_and(us))
}

fn word(state: PortState) -> &'static str {
    match state {
        PortState::Down => "down",
        PortState::Training => "training",
        PortState::Up => "up, and the other end does not agree",
        PortState::Fault => "faulty",
    }
}

/// The place of each rank on its way round, if the links form one ring; else its number.
fn places(ports: &[Vec<Option<u32>>]) -> Vec<usize> {
    let ranks = ports.len();
    let numbers: Vec<usize> = (0..ranks).collect();
    let neighbours = |rank: Rank| (0..ranks).filter(move |&other| ports[rank][other].is_some());
    if (0..ranks).any(|rank| neighbours(rank).count() != 2) {
        return numbers;
    }
    let mut places = vec![usize::MAX; ranks];
    let mut here = 0;
    for place in 0..ranks {
        places[here] = place;
        match neighbours(here).find(|&next| places[next] == usize::MAX) {
            Some(next) => here = next,
            None if place + 1 == ranks => return places,
            None => break,
        }
    }
    numbers
}

/// From which rank each rank is reached, by the fewest hops from `from`. Of equal routes the one that goes
/// up by places wins, so that on a ring all cards send the same way round and share the load.
fn search(ports: &[Vec<Option<u32>>], places: &[usize], from: Rank) -> Vec<Option<Rank>> {
    let ranks = ports.len();
    let mut best: Vec<Option<(usize, usize, Rank)>> = vec![None; ranks];
    best[from] = Some((0, 0, from));
    let mut layer = vec![from];
    let mut hops = 0;
    while !layer.is_empty() {
        hops += 1;
        let mut next = Vec::new();
        for &node in &layer {
            let turned = best[node].map_or(0, |(_, turned, _)| turned);
            for to in (0..ranks).filter(|&to| ports[node][to].is_some()) {
                let turn = (places[to] + ranks - places[node]) % ranks;
                let there = (hops, turned + turn, node);
                if best[to].is_none() {
                    next.push(to);
                }
                if best[to].is_none_or(|known| there < known) {
                    best[to] = Some(there);
                }
            }
        }
        layer = next;
    }
    best.into_iter().map(|known| known.map(|(_, _, node)| node)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_runtime::abi::RawPortInfo;

    fn ends(index: usize, ports: &[(u32, u64, u32)]) -> Ends {
        let port = |(port, &(state, peer_serial, peer_port)): (usize, &(u32, u64, u32))| {
            let port = port as u32;
            RawPortInfo { port, state, peer_serial, peer_port, ..RawPortInfo::default() }.into()
        };
        let ports = ports.iter().enumerate().map(port).collect();
        Ends { serial: 100 + index as u64, index, ports }
    }

    #[test]
    fn link_counts_only_if_both_ends_say_that_it_is_up_and_name_each_other() {
        let good = [ends(0, &[(2, 101, 0)]), ends(1, &[(2, 100, 0)])];
        assert_eq!(Wiring::between(&good).unwrap().port(0, 1), Some(0));
        for there in [(1, 100, 0), (2, 100, 3), (2, 102, 0), (0, 0, 0)] {
            let bad = [ends(0, &[(2, 101, 0)]), ends(1, &[there])];
            let error = Wiring::between(&bad).unwrap_err();
            assert_eq!(error.kind(), DeviceErrorKind::Unreachable);
            assert!(error.to_string().starts_with("card 0 cannot reach card 1: card"), "{error}");
        }
    }

    #[test]
    fn group_in_parts_names_two_cards_by_index_and_the_link_that_is_down() {
        let group = [
            ends(4, &[(2, 105, 0)]),
            ends(5, &[(2, 104, 0), (0, 106, 1)]),
            ends(6, &[(0, 0, 0), (0, 105, 1)]),
        ];
        let error = Wiring::between(&group).unwrap_err();
        assert_eq!((error.card(), error.peer()), (Some(4), Some(6)));
        let text = error.to_string();
        assert!(text.contains("card 5 port 1 to card 6 is down"), "{text}");
    }

    #[test]
    fn routes_on_a_scrambled_ring_go_the_same_way_round_from_every_card() {
        let around = [0, 3, 1, 4, 2, 5];
        let links: Vec<RankLink> = (0..6).map(|i| (around[i], 0, around[(i + 1) % 6], 1)).collect();
        let wiring = Wiring::from_links(6, &links).unwrap();
        for i in 0..6 {
            let route = wiring.route(around[i], around[(i + 3) % 6]);
            let forward: Vec<Rank> = (0..4).map(|hop| around[(i + hop) % 6]).collect();
            assert_eq!(route, forward);
        }
    }

    #[test]
    fn two_links_between_the_same_cards_are_one_neighbour() {
        let wiring = Wiring::from_links(2, &[(0, 0, 1, 1), (1, 0, 0, 1)]).unwrap();
        assert_eq!((wiring.port(0, 1), wiring.port(1, 0)), (Some(0), Some(1)));
    }
}
