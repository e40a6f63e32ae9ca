// SPDX-License-Identifier: Apache-2.0
//! Ranks that are processes on machines of a network, over TCP connections that are authenticated and encrypted.
//!
//! * [`Key`]: what a leader and its workers share. [`Listener`]: where a worker is reached.
//! * [`Channel`]: an authenticated connection for messages of bytes: questions, answers, weights.
//! * [`lead`] and [`Join::accept`]: how channels become a group, with one connection for each pair of ranks.
//! * [`TcpFabric`]: one rank's end of a group. It runs the same schedules as every fabric, and passes the same
//!   conformance suite.
//!
//! A worker waits for a leader, answers its questions, and joins when it is asked to:
//!
//! ```
//! use std::time::{Duration, Instant};
//! use spanker_fabric::Fabric;
//! use spanker_fabric_tcp::{Channel, Event, Key, Limits, Listener, Options, Purpose, TcpError, lead};
//!
//! let (key, soon) = (Key::generate()?, Instant::now() + Duration::from_secs(10));
//! let listener = Listener::bind("127.0.0.1:0", Some(key.clone()), Limits::USUAL)?;
//! let (address, options) = (listener.address().to_string(), Options::new("0.2.0"));
//!
//! std::thread::scope(|scope| {
//!     let worker = scope.spawn(|| {
//!         let mut leader = listener.next(soon)?;
//!         loop {
//!             leader = match leader.next(1 << 10, soon)? {
//!                 Event::Message(mut channel, _question) => {
//!                     channel.send(b"four cores", soon)?;
//!                     channel
//!                 }
//!                 Event::Join(join) => {
//!                     let (mut fabric, _) = join.accept(&listener, &Options::new("0.2.0"))?;
//!                     return Ok::<_, TcpError>(fabric.barrier(soon)?);
//!                 }
//!             };
//!         }
//!     });
//!     let mut channel = Channel::dial(&address, Some(&key), Purpose::Control, options.timeout)?;
//!     channel.send(b"what do you have?", soon)?;
//!     assert_eq!(channel.receive(1 << 10, soon)?.bytes(), b"four cores");
//!     let (mut fabric, _) = lead(vec![channel], &options)?;
//!     fabric.barrier(soon)?;
//!     worker.join().expect("no panic")
//! })?;
//! # Ok::<(), TcpError>(())
//! ```
//!
//! The README says in which states a connection can be and what each rule prevents.
#![forbid(unsafe_code)]

mod channel;
mod end;
mod error;
mod fabric;
mod fault;
mod frame;
mod group;
mod key;
mod link;
mod listener;
mod noise;
mod wait;

pub use channel::{Channel, Event, Id, Purpose};
pub use error::TcpError;
pub use fabric::TcpFabric;
pub use group::{GroupInfo, Join, Options, lead};
pub use key::Key;
pub use listener::{Limits, Listener};
