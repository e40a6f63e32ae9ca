// SPDX-License-Identifier: Apache-2.0
//! Cards, the links between them and their states, as plain data.
//!
//! Here are the numbers of the inter-card link that hardware and software agree on, the directed
//! [`Link`], profiles of cards ([`Profile`]) and clusters of them ([`Cluster`]). Handles to cards, discovery and anything that
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
mod cluster;
mod cluster_file;
mod error;
mod intercard;
mod link;
mod numbers;
mod operators;
mod profile;
mod profile_file;
mod route;
mod shape;
mod units;

pub use bandwidth::{
    HOST_LINK_BW_BYTES_PER_SEC, INTERCARD_BW_BYTES_PER_SEC, LOCAL_DDR_BW_BYTES_PER_SEC,
};
pub use cluster::{Cluster, MAX_CARDS, Shape, Shared, Wire};
pub use error::TopologyError;
pub use intercard::{Framing, MESSAGE_HEAD, Saturation};
pub use link::{
    INTERCARD_BUS_WIDTH, INTERCARD_LANE_WIDTH, INTERCARD_LANES, Link, LinkState, find, mesh,
};
pub use numbers::Number;
pub use operators::{OperatorKind, OperatorRate, operator_time};
pub use profile::{
    Compute, Confidence, ExchangeKind, HostProfile, Kernels, LinkProfile, Memory, Profile,
    Provenance, Value,
};
pub use units::{Bytes, BytesPerSecond, MacsPerSecond, Seconds, UnitError};
