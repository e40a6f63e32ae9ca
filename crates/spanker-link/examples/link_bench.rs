// SPDX-License-Identifier: Apache-2.0
//! Prints how fast one core encodes and decodes frames, beside CRC-32C and copying alone.

use std::time::Instant;

use spanker_link::measure;

// A measurement needs a clock; the library itself has none.
#[expect(clippy::disallowed_methods, reason = "an example is not part of the pure library")]
fn main() {
    let start = Instant::now();
    println!("GB/s of payload, one core   both  encode  decode  crc32c    copy");
    for payload in [512, 2048, 4096] {
        let speed = measure(payload, 101, || start.elapsed().as_secs_f64());
        println!(
            "frames of {payload:4} B           {:6.2}  {:6.2}  {:6.2}  {:6.2}  {:6.2}",
            speed.both, speed.encode, speed.decode, speed.crc, speed.copy
        );
    }
}
