// SPDX-License-Identifier: Apache-2.0
//! Files that are almost models, opened and run on one card and on several: eight bytes make the file, each three that
//! follow replace a byte of it. Errors are right, panics and different logits are not.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spanker_fuzz_targets::models::tried;

fuzz_target!(|data: &[u8]| {
    let Some((seed, rest)) = data.split_first_chunk() else { return };
    let patches: Vec<(u16, u8)> =
        rest.as_chunks().0.iter().map(|&[a, b, c]| (u16::from_le_bytes([a, b]), c)).collect();
    tried(u64::from_le_bytes(*seed), &patches);
});
