// SPDX-License-Identifier: Apache-2.0
//! A ring of cards in virtual time, and places in their buffers.

use std::time::Duration;

use spanker_runtime::{BufferId, Place};
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Pace, World, specs};

pub const SECOND: Duration = Duration::from_secs(1);

pub fn ring(cards: usize) -> World {
    let cluster = Cluster::uniform(Profile::builtin("rev-a").unwrap(), cards, Shape::Ring).unwrap();
    World::new(specs(&cluster, Pace::Card, 1).unwrap(), 7)
}

pub fn at(buffer: BufferId, offset: u64) -> Place {
    Place { buffer, offset }
}
