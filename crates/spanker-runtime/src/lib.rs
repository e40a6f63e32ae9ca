// SPDX-License-Identifier: Apache-2.0
//! One card: the ioctl ABI of the control device, and a handle to it.
//!
//! A Spanker card's driver offers a control device, [`CONTROL_DEVICE_PATH`]. This crate opens it,
//! asks whether the driver is alive and which version of the ABI it speaks. It knows nothing about
//! groups of cards, links, plans or models, and it depends on no other crate of the workspace.
//!
//! ```no_run
//! use spanker_runtime::{ABI_VERSION_MAJOR, SpankerControl};
//!
//! # fn main() -> spanker_runtime::Result<()> {
//! let card = SpankerControl::open()?;
//! card.ping()?;
//! let version = card.version()?;
//! if version.major != ABI_VERSION_MAJOR {
//!     eprintln!("the driver speaks ABI {version}, this program {ABI_VERSION_MAJOR}.x");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # The ABI
//!
//! The C header `include/spanker_ioctl.h` is the definition; a test compiles it and compares every
//! number, size and offset with the Rust mirror.
//!
//! | request | number | data |
//! |---|---|---|
//! | `SPANKER_IOC_PING` | `_IO(0xE3, 1)` | none |
//! | `SPANKER_IOC_GET_VERSION` | `_IOR(0xE3, 2, struct spanker_version)` | four `u16`, 8 bytes |
//!
//! # Faking a card
//!
//! Requests go through the C library's `ioctl` symbol, so a preloaded library can answer in the
//! driver's place; this crate's own tests do so.

pub mod abi;
mod card;
#[cfg(test)]
#[path = "../tests/support/cc.rs"]
mod cc;
mod control;
mod error;
pub mod message;
mod transport;
mod work;

pub use abi::{
    ABI_VERSION_MAJOR, ABI_VERSION_MINOR, ABI_VERSION_PATCH, AbiVersion, Counters,
    RawRecord as Record,
};
pub use card::{
    Activity, CardInfo, CardState, CardTime, Fault, FaultKind, Pace, Peer, PortInfo, PortState,
    Ticket,
};
pub use control::{CONTROL_DEVICE_PATH, PATIENCE, SpankerControl};
pub use error::{Error, Result};
pub use transport::{Call, Payload, Transport};
pub use work::{
    BufferId, Descriptor, Fold, Landing, MAX_SOURCES, Malformed, Place, Work, decode_work,
    encode_work,
};
