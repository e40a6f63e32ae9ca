// SPDX-License-Identifier: Apache-2.0
//! Any bytes as work, for two linked cards. What is promised is said in the body.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spanker_fuzz_targets::work::run(bytes));
