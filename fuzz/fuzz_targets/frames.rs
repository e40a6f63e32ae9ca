// SPDX-License-Identifier: Apache-2.0
//! Any bytes as frames, for a decoder, a link and a card. What is promised is said in the body.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spanker_fuzz_targets::frames::run(bytes));
