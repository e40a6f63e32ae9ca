// SPDX-License-Identifier: Apache-2.0
//! One end of the full-duplex link between two cards, without I/O.
//!
//! [`Link`] turns frames into what to do next: training, sequence numbers, cumulative
//! acknowledgements, go-back-N replay, credits, and a policy for links with many errors. [`encode`]
//! and [`decode`] turn frames into bytes and back. Whoever has a wire, be it memory, a socket or a
//! register file, moves the bytes and passes in the time. The README beside this crate says why each
//! rule is there; `docs/link-protocol.md` describes the other end for whoever builds it in hardware.
//!
//! This crate has no I/O, no clock, no threads and no unsafe code: it runs the same under simulation.
//!
//! # A caller's loop
//!
//! 1. Append what arrived to a buffer; [`decode`] it. [`Decoded::Frame`] goes to [`Link::receive`],
//!    [`Decoded::Corrupt`] to [`Link::corrupt`], then forget `used` or `skip` bytes.
//! 2. On [`Event::Deliver`] read the payload; call [`Link::consumed`] when its buffer is free again.
//! 3. [`Link::push`] up to [`Link::free_slots`] frames; drop what [`Link::acked`] gives back.
//! 4. While the wire accepts frames, [`Link::transmit`] and [`encode`].
//! 5. At [`Link::next_timer`], [`Link::tick`].
#![forbid(unsafe_code)]

mod config;
mod counters;
mod crc8;
mod decode;
mod event;
mod frame;
mod link;
mod policy;
mod receive;
mod send;
pub mod sim;
mod speed;
mod training;

pub use config::{Config, Identity, MAX_WINDOW, MIN_WINDOW, RESERVED, SHRUNK_PAYLOAD};
pub use counters::Counters;
pub use crc8::crc8;
pub use decode::{Decoded, decode};
pub use event::{Body, Event, Fault};
pub use frame::{
    CONTROL_BYTES, END, GAP, Header, Kind, MAX_PAYLOAD, OVERHEAD, START, encode, encode_into,
    frame_len, seal,
};
pub use link::Link;
pub use spanker_topology::LinkState;
pub use speed::{Speed, measure};
pub use training::{TRAINING_BYTES, VERSION};
