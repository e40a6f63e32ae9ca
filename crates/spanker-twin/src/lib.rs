// SPDX-License-Identifier: Apache-2.0
//! Twins: emulated cards, one process each, with links between them.
//!
//! A keeper starts the cards, wires them, does to them what a rehearsal wants done, and takes everything
//! down: no process, socket, file or shared memory outlives it, however it ends. [`specs`] turns a
//! cluster into what each card is; [`orders`] is what the keeper tells a card; [`home`] is the directory
//! in which programs find the cards; [`desk`] is what a program asks the keeper. What a card does with
//! its work is not decided here.

mod card;
pub mod desk;
mod error;
mod frame;
pub mod home;
pub mod keeper;
pub mod orders;
mod serve;
mod shared;
mod signals;
mod spec;
mod wire;
mod world;

pub use card::{Card, ClientId, Pulse, Reply, Wire};
pub use error::TwinError;
pub use serve::serve;
pub use signals::{Caught, Signals};
pub use spec::{CardSpec, MOST_CARDS, Pace, PortSpec, specs};
pub use wire::{LinkEnd, link_pair};
pub use world::{Disturbance, World};
