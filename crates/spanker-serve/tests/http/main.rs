// SPDX-License-Identifier: Apache-2.0
//! The server over real sockets: what clients get, what hostile ones cannot do, and what is left when they have gone.

mod client;
mod conversation;
mod ending;
mod endpoints;
mod fields;
mod fuzz;
mod hostile;
mod page;
mod place;
mod schemas;
mod script;
mod secured;
mod streams;
mod tools;
