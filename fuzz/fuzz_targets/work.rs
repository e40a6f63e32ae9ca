// SPDX-License-Identifier: Apache-2.0
//! Any bytes as work, for two linked cards. What is promised is said in the body.
#![no_main]

// Each target has bodies that it does not run, and the makers of inputs are for the brief runner.
#[allow(dead_code)]
#[path = "../../crates/spanker-twin/tests/fuzz/bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bodies::work::run(bytes));
