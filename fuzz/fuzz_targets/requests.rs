// SPDX-License-Identifier: Apache-2.0
//! Any bytes as the stream of a program, for a card. What is promised is said in the body.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spanker_fuzz_targets::requests::run(bytes));
