// SPDX-License-Identifier: Apache-2.0
//! Jobs over unequal backends: products and prompts, on threads and on emulated cards, healthy and not.

mod lone;
mod matmul;
mod products;
mod prompts;
mod requests;
mod sockets;
mod watched;

use std::time::Duration;

use spanker_fabric::device::Deadline;
use spanker_runtime::{AbiVersion, BufferId, Landing, Place, SpankerControl, Work};
use spanker_steal::{Incident, IncidentKind, Report};
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Pace, World, specs};

/// A card that makes no progress is noticed soon.
const DEADLINE: Deadline = Deadline { detect: Duration::from_millis(50), ..Deadline::USUAL };

/// Cards of the newest version.
fn world(cards: usize) -> World {
    world_of(cards, None)
}

/// Cards, of which the first speaks a minor version of the ABI.
fn world_of(cards: usize, minor: Option<u16>) -> World {
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, cards, Shape::Ring).expect("cards");
    let mut cards = specs(&cluster, Pace::Card, 1).expect("cards");
    if let Some(minor) = minor {
        cards[0].abi = AbiVersion { major: 0, minor, patch: 0 };
    }
    World::new(cards, 7)
}

/// What went wrong and was not a matter of time: a busy machine makes leases run out and timings hard to believe.
fn faults(report: &Report) -> Vec<&Incident> {
    use IncidentKind::{Expired, Implausible, Refused};
    let timely = |one: &&Incident| !matches!(one.kind, Expired | Implausible | Refused);
    report.incidents.iter().filter(timely).collect()
}

/// Has a card wait for a message that nobody sends.
fn occupy(card: &SpankerControl) {
    let buffer: BufferId = card.allocate(64).expect("memory");
    let (into, landing) = (Place { buffer, offset: 0 }, Landing::Store);
    let endless = Work::Receive { into, length: 64, port: 0, tag: 0, landing };
    card.submit(1, &[endless.into()]).expect("work");
}

/// Leaves a card no more memory than 1000 bytes.
fn fill(card: &SpankerControl) {
    let free = card.info().expect("an answer").available;
    card.allocate(free - 1000).expect("nearly all of it");
}
