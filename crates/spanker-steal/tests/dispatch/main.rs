// SPDX-License-Identifier: Apache-2.0
//! Runs on real threads, with backends that are slow, fail, panic, hang, lie and come back late: every item is
//! delivered once, by these tests' own count.
#![cfg(not(any(feature = "loom", feature = "shuttle")))]

mod crew;
mod faults;
mod hangs;
mod limits;
mod orders;
mod streams;
mod trust;
