// SPDX-License-Identifier: Apache-2.0
//! All tests of this crate in one program, which is linked once.

#[path = "../support/ring.rs"]
mod support;

mod card;
mod collectives;
mod faults;
mod fuzz;
mod hostile;
mod operators;
mod probe;
mod process;
mod relayed;
mod rules;
mod versions;
