// SPDX-License-Identifier: Apache-2.0
//! What the fuzzers run: each target takes any bytes and panics if a promise is broken. Only a dev-dependency: short
//! runs are among the tests of `spanker-twin` and `spanker-llm`, long ones are in `fuzz/` at the root.
#![forbid(unsafe_code)]

pub mod frames;
pub mod models;
pub mod pair;
pub mod requests;
mod script;
pub mod work;
