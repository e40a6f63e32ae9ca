// SPDX-License-Identifier: Apache-2.0
//! Cards, the links between them and their states, as plain data.
//!
//! Here are the numbers of the inter-card link that hardware and software agree on, the directed
//! [`Link`], and the graphs that groups of cards form. Handles to cards, discovery and anything that
//! touches a device are elsewhere: this crate has no I/O, no clock and no unsafe code.
//!
//! ```
//! use spanker_topology::{LinkState, find, mesh};
//! let links = mesh(3);
//! assert_eq!(links.len(), 6);
//! assert_eq!(find(&links, 0, 2).map(|link| link.state), Some(LinkState::Up));
//! assert_eq!(find(&links, 0, 0), None);
//! ```
#![forbid(unsafe_code)]

mod bandwidth;
mod link;

pub use bandwidth::{
    BytesPerSecond, HOST_LINK_BW_BYTES_PER_SEC, INTERCARD_BW_BYTES_PER_SEC,
    LOCAL_DDR_BW_BYTES_PER_SEC,
};
pub use link::{
    INTERCARD_BUS_WIDTH, INTERCARD_LANE_WIDTH, INTERCARD_LANES, Link, LinkState, find, mesh,
};
