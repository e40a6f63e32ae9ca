// SPDX-License-Identifier: Apache-2.0
//! One card: the ABI, and a handle to it.
//!
//! A card is a character device with a driver behind it, or a Unix socket behind which a program plays a card.
//! [`SpankerControl`] opens either and makes the same requests of both: what the card is and what its ports are
//! connected to, buffers in its memory, work, waiting, counters, a flight recorder. It knows nothing about
//! groups of cards, plans or models, and it depends on no other crate of the workspace.
//!
//! ```no_run
//! use std::time::Duration;
//! use spanker_runtime::{Place, SpankerControl, Work};
//!
//! # fn main() -> spanker_runtime::Result<()> {
//! let card = SpankerControl::open_path("/dev/spanker0")?;
//! println!("{} with {} bytes free", card.info()?.profile, card.info()?.available);
//! let buffer = card.allocate(4096)?;
//! let into = Place { buffer, offset: 0 };
//! let ticket = card.submit(1, &[Work::Fill { into, length: 4096, pattern: 7 }.into()])?;
//! let done = card.wait(ticket, Duration::from_millis(300))?;
//! println!("complete {} us after the card was switched on", done.micros());
//! # Ok(())
//! # }
//! ```
//!
//! # The ABI
//!
//! The C header `include/spanker_ioctl.h` is the definition; a test compiles it and compares every
//! number, size and offset with the Rust mirror ([`abi`]).
//!
//! | request | number | what it does |
//! |---|---|---|
//! | `PING`, `GET_VERSION` | 1, 2 | the first version of the ABI |
//! | `CARD_INFO`, `PORT_INFO` | 3, 4 | what the card and its ports are |
//! | `ALLOCATE`, `FREE`, `WRITE`, `READ` | 5 to 8 | buffers |
//! | `SUBMIT`, `WAIT`, `RESET` | 9, 10, 12 | work, as descriptors ([`encode_work`]), under a job number |
//! | `COUNTERS`, `STATE`, `RECORDS` | 11, 13, 14 | what the card has done, is doing, and did last |
//!
//! As a message, a request is a head of 32 bytes, its struct, and the bytes it moves ([`message`]). A card that does
//! not answer in time, goes away or answers nonsense is an error of its own kind, and the handle is of no more use.
//!
//! # Versions
//!
//! A card and a program may be of different minor versions. [`Feature`] lists what each minor version brought, as the
//! header does, and [`SpankerControl::supports`] says whether a card has it:
//!
//! | minor | brought |
//! |---|---|
//! | 1 | `PING`, `GET_VERSION`; every card has them, of whatever major version |
//! | 2 | the other requests; copies, fills, reductions, products of two Q4_K matrices, sends, receives, fences |
//! | 3 | the operators of a model, products of other types |
//!
//! A request or work that the card is too old for is not sent: [`Error::Unsupported`] names it, the card's version and
//! the one that is needed. A card of a newer minor version does all that this crate knows. One of another major
//! version is refused by either side ([`Error::Version`]); it only says which version it is.
//!
//! # Faking a card
//!
//! Requests go through the C library's `ioctl` symbol, so a preloaded library can answer in the
//! driver's place; this crate's own tests do so. [`SpankerControl::over`] takes any [`Transport`].

pub mod abi;
mod card;
#[cfg(test)]
#[path = "../tests/support/cc.rs"]
mod cc;
mod control;
mod error;
mod feature;
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
pub use control::{CONTROL_DEVICE_PATH, REQUEST_TIMEOUT, SpankerControl};
pub use error::{Error, Result};
pub use feature::Feature;
pub use transport::{Call, Payload, Transport};
pub use work::{
    Activation, BufferId, Descriptor, Fold, KvCache, Landing, MAX_BEST, MAX_EXPERTS, MAX_SOURCES,
    MAX_WRITE, Malformed, PICK_BYTES, Picks, Place, ROW_BYTES, Scores, Work, decode_work,
    encode_work,
};
