// SPDX-License-Identifier: Apache-2.0
//! What the fuzzers run: each target takes any bytes and panics if a promise is broken. The brief runner is
//! `main.rs`, the long one is in `fuzz/` at the root.

pub mod frames;
mod pair;
pub mod requests;
mod script;
pub mod work;
