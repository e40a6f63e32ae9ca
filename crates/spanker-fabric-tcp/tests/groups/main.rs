// SPDX-License-Identifier: Apache-2.0
//! Groups over connections of this machine: what every fabric does, who gets in, and what a fault does.

mod admission;
mod channels;
mod conformance;
mod faults;
mod fuzz;
mod heartbeats;
mod joining;
mod machines;
mod processes;
mod seeds;
mod support;
