// SPDX-License-Identifier: Apache-2.0
//! Twins: emulated cards, one process each, with links between them.
//!
//! A supervisor starts the cards, wires them, injects faults on request, and takes everything down: no process, socket,
//! file or shared memory outlives it, however it ends. [`specs`] turns a cluster into what each card is; [`orders`] are
//! the requests of the supervisor to a card; [`home`] is the directory in which programs find the cards; [`control`] is
//! the control socket, where programs send requests to the supervisor. What a card does with its work is not decided
//! here.

mod card;
pub mod control;
mod error;
mod frame;
pub mod home;
pub mod orders;
mod serve;
mod shared;
mod signals;
mod spec;
pub mod supervisor;
pub mod text;
mod wire;
mod world;

pub use card::{Card, ClientId, Pulse, Reply, Wire};
pub use error::TwinError;
pub use serve::serve;
pub use signals::{Caught, Signals};
pub use spec::{CardSpec, MOST_CARDS, Pace, PortSpec, specs};
pub use wire::{LinkEnd, link_pair};
pub use world::{Disturbance, World};
