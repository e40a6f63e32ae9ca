// SPDX-License-Identifier: Apache-2.0
//! The inter-card link: its width, its states and the directed [`Link`] of a topology.

pub use spanker_topology::{
    INTERCARD_BUS_WIDTH, INTERCARD_LANE_WIDTH, INTERCARD_LANES, Link, LinkState,
};
