// SPDX-License-Identifier: Apache-2.0
//! The wiring of a group from what its cards say about their ports. Routes are `spanker-plan`'s.

use spanker_plan::{Apart, RankLink, Wiring};
use spanker_runtime::{CardInfo, Peer, PortInfo, PortState, SpankerControl};

use super::error::{DeviceError, DeviceErrorKind};

/// Ports that a card is believed to have.
const PORTS: u32 = 256;

/// The wiring of cards that have said what their ports are. A link counts if both ends say that it is up
/// and name each other. Links that lead out of the group are left alone.
pub(super) fn between(group: &[Ends]) -> Result<Wiring, DeviceError> {
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
    Wiring::from_links(group.len(), &links).map_err(|Apart { from, to }| {
        let (from, to) = (Some(group[from].index), Some(group[to].index));
        let why = if down.is_empty() { idle } else { down };
        DeviceError::new(DeviceErrorKind::Unreachable, from, why.join(", ")).with_peer(to)
    })
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
        assert_eq!(between(&good).unwrap().port(0, 1), Some(0));
        for there in [(1, 100, 0), (2, 100, 3), (2, 102, 0), (0, 0, 0)] {
            let bad = [ends(0, &[(2, 101, 0)]), ends(1, &[there])];
            let error = between(&bad).unwrap_err();
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
        let error = between(&group).unwrap_err();
        assert_eq!((error.card(), error.peer()), (Some(4), Some(6)));
        let text = error.to_string();
        assert!(text.contains("card 5 port 1 to card 6 is down"), "{text}");
    }
}
