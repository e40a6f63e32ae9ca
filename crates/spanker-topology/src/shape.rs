// SPDX-License-Identifier: Apache-2.0
//! The regular shapes: which wires a ring, a mesh, a star or a switch has.

use crate::cluster::{Shape, Shared, Wire};
use crate::{BytesPerSecond, LinkProfile, Profile, Seconds, TopologyError};

type Wiring = (Vec<Wire>, Vec<Shared>, Vec<String>);

/// The wires of a shape, what they share, and what someone who builds it should know.
pub(crate) fn wire(cards: &[Profile], shape: Shape) -> Result<Wiring, TopologyError> {
    let count = cards.len();
    let refuse = |reason: String| TopologyError::Shape { shape, cards: count, reason };
    match shape {
        Shape::PointToPoint if count > 2 => {
            Err(refuse("one link joins two cards: a ring, a switch or a star joins more".into()))
        }
        Shape::PointToPoint => neighbours(cards, shape),
        Shape::Ring => neighbours(cards, shape),
        Shape::Mesh => mesh(cards),
        Shape::Star => Ok(star(cards)),
        Shape::Switch => Ok(switch(cards)),
        Shape::Links => Err(refuse("a list of links has to name them".into())),
    }
}

fn link(cards: &[Profile], card: usize, shape: Shape) -> Result<&LinkProfile, TopologyError> {
    cards[card].link.as_ref().ok_or_else(|| TopologyError::Shape {
        shape,
        cards: cards.len(),
        reason: format!(
            "card {card} ({}) has no link to other cards: use star or switch",
            cards[card].name
        ),
    })
}

/// Both directions between two cards that use `lanes` lanes each.
fn pair(
    cards: &[Profile],
    (a, b): (usize, usize),
    lanes: impl Fn(&LinkProfile) -> u32,
    shape: Shape,
) -> Result<[Wire; 2], TopologyError> {
    let (here, there) = (link(cards, a, shape)?, link(cards, b, shape)?);
    let bandwidth = here.sustained(lanes(here)).min(there.sustained(lanes(there)));
    let latency = here.latency.value.max(there.latency.value);
    let wire = |from, to| Wire { from, to, bandwidth, latency, shared: None };
    Ok([wire(a, b), wire(b, a)])
}

/// Each card with all its lanes to either neighbour, but no more than all of them at once; two cards have
/// one link, not two.
fn neighbours(cards: &[Profile], shape: Shape) -> Result<Wiring, TopologyError> {
    let count = cards.len();
    let mut wires = Vec::new();
    let pairs = match count {
        1 => 0,
        2 => 1,
        _ => count,
    };
    for card in 0..pairs {
        wires.extend(pair(cards, (card, (card + 1) % count), |link| link.lanes.value, shape)?);
    }
    // A card sends on the same lanes whichever neighbour it sends to.
    let mut shared = Vec::new();
    if count > 2 {
        for (card, profile) in cards.iter().enumerate() {
            let bandwidth = link(cards, card, shape)?.sustained(lanes_of(profile));
            shared.push(Shared { name: format!("the lanes of card {card}"), bandwidth });
        }
        wires.iter_mut().for_each(|wire| wire.shared = Some(wire.from));
    }
    let mut notes = Vec::new();
    let short = cards.iter().find(|card| card.link.as_ref().is_some_and(|l| l.ports.value < 2));
    if let Some(card) = short.filter(|_| count > 2) {
        notes.push(format!(
            "{} has one connector as drawn: a ring of {count} needs a backplane or a second one",
            card.name
        ));
    }
    Ok((wires, shared, notes))
}

fn lanes_of(profile: &Profile) -> u32 {
    profile.link.as_ref().map_or(0, |link| link.lanes.value)
}

/// Each card's lanes divided between all others.
fn mesh(cards: &[Profile]) -> Result<Wiring, TopologyError> {
    let peers = (cards.len() - 1) as u32;
    let mut wires = Vec::new();
    let mut notes = Vec::new();
    if peers == 0 {
        return Ok((wires, Vec::new(), notes));
    }
    for card in 0..cards.len() {
        let lanes = link(cards, card, Shape::Mesh)?.lanes.value;
        if lanes < peers {
            return Err(TopologyError::Shape {
                shape: Shape::Mesh,
                cards: cards.len(),
                reason: format!(
                    "each card needs a lane to each of {peers} others and {} has {lanes}: \
                     a ring, a switch or a star does with fewer",
                    cards[card].name
                ),
            });
        }
    }
    for a in 0..cards.len() {
        for b in a + 1..cards.len() {
            let lanes = |link: &LinkProfile| link.lanes.value / peers;
            wires.extend(pair(cards, (a, b), lanes, Shape::Mesh)?);
        }
    }
    let lanes = link(cards, 0, Shape::Mesh)?.lanes.value;
    if peers > 1 {
        let each = lanes / peers;
        notes.push(format!("a full mesh leaves {each} of {lanes} lanes to each of {peers} peers"));
    }
    Ok((wires, Vec::new(), notes))
}

/// Every card on the host, which all traffic enters and leaves once.
fn star(cards: &[Profile]) -> Wiring {
    let hub = cards.len();
    let fastest = cards.iter().map(|card| card.host.bandwidth.value).max();
    let rate = fastest.unwrap_or(BytesPerSecond(1));
    let shared = ["into the host", "out of the host"]
        .map(|name| Shared { name: name.to_owned(), bandwidth: rate });
    let wires = (0..hub).flat_map(|card| {
        let (bandwidth, latency) =
            (cards[card].host.bandwidth.value, cards[card].host.latency.value);
        [
            Wire { from: card, to: hub, bandwidth, latency, shared: Some(0) },
            Wire { from: hub, to: card, bandwidth, latency, shared: Some(1) },
        ]
    });
    let note = "all traffic between cards passes the host, which is shared".to_owned();
    (wires.collect(), shared.into(), vec![note])
}

/// Every card on one port of a switch; a message pays one latency, at its sender.
fn switch(cards: &[Profile]) -> Wiring {
    let hub = cards.len();
    let fabrics = cards.iter().filter_map(|card| card.link.as_ref()?.fabric.as_ref());
    let fabric = fabrics.map(|fabric| fabric.value).min();
    let shared = fabric.map(|bandwidth| Shared { name: "the host's fabric".to_owned(), bandwidth });
    let wires = (0..hub).flat_map(|card| {
        let profile = &cards[card];
        let (bandwidth, latency) = match &profile.link {
            Some(link) => (link.sustained(link.lanes.value), link.latency.value),
            None => (profile.host.bandwidth.value, profile.host.latency.value),
        };
        let entered = shared.is_some().then_some(0);
        [
            Wire { from: card, to: hub, bandwidth, latency, shared: entered },
            Wire { from: hub, to: card, bandwidth, latency: Seconds::ZERO, shared: None },
        ]
    });
    (wires.collect(), shared.clone().into_iter().collect(), Vec::new())
}
