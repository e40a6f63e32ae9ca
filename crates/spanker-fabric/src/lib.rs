// SPDX-License-Identifier: Apache-2.0
//! Fabrics move bytes between ranks; [`execute`] runs the schedules of `spanker-plan` over any of them.
//!
//! * [`Fabric`]: one rank's end of a group. It sends, receives, agrees and gives up; every wait has a
//!   deadline.
//! * [`inproc`]: the fabric whose ranks are threads of this process.
//! * [`device`]: groups of cards, which run schedules as descriptors in their own memory.
//! * [`Faulty`]: any fabric, with messages lost, late or corrupt and ranks that die, from a seed.
//! * [`wire`]: calls and faults as bytes, for fabrics whose ranks are processes.
//! * [`conformance`]: what a fabric must do, as one suite for all of them.
//!
//! # Faults
//!
//! The first fault of a group is the group's fault: every rank that is left gets the same
//! [`FabricError`], which names the rank and its peer, no later than its deadline, and its buffer is as
//! it was before the call. A call succeeds on every rank or on none: ranks commit a call together
//! before they touch the caller's buffer. After a fault the group is of no more use; the ranks that are
//! left form a new one.
//!
//! Ranks that do not mean the same thing (another collective, length, type, operation, algorithm or
//! schedule) find out from the first message between them, because every message says what it belongs
//! to, and at the latest when they commit.
#![deny(unsafe_code)]

mod block;
pub mod conformance;
pub mod device;
mod error;
mod execute;
mod fabric;
mod fault;
mod in_place;
pub mod inproc;
mod launch;
mod message;
mod overlay;
mod registered;
pub mod wire;

pub use error::FabricError;
pub use execute::{Workspace, execute, execute_registered};
pub use fabric::{Call, Fabric};
pub use fault::{Faults, Faulty};
pub use launch::{Launcher, launched, launched_rank, launcher};
pub use message::{Message, Pool, ReceiveBuffer};
pub use registered::Registered;
