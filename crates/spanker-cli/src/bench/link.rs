// SPDX-License-Identifier: Apache-2.0
//! `spanker bench link`: how fast one core makes and reads the link's frames, beside what it could at best, and
//! how fast two ends of the protocol run in virtual time.

use std::time::Instant;

use serde_json::json;
use spanker_link::measure;
use spanker_link::sim::{Case, run as simulate};

use crate::output;

/// What encoding and decoding together shall reach, in GB/s of payload.
const BAR: f64 = 2.0;
const PAYLOADS: [usize; 3] = [512, 2048, 4096];
const REPEATS: usize = 51;
/// Frames of the simulated transfer, and nanoseconds of its wires.
const FRAMES: u64 = 200_000;
const DELAY: u64 = 500;

pub(super) fn run(as_json: bool) -> anyhow::Result<()> {
    let start = Instant::now();
    if !as_json {
        output::line(
            "# frames of the inter-card link, one core, GB/s of payload; medians that took turns",
        )?;
        output::line(&format!(
            "{:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>9} {:>9}",
            "payload", "both", "encode", "decode", "crc32c", "memcpy", "of crc32c", "of bar"
        ))?;
    }
    for payload in PAYLOADS {
        output::progress(&format!("frames of {payload} B"));
        let speed = measure(payload, REPEATS, || start.elapsed().as_secs_f64());
        output::progress_done();
        output::line(&match as_json {
            true => json!({
                "payload_bytes": payload,
                "both_gbps": speed.both,
                "encode_gbps": speed.encode,
                "decode_gbps": speed.decode,
                "crc32c_gbps": speed.crc,
                "memcpy_gbps": speed.copy,
                "bar_gbps": BAR,
            })
            .to_string(),
            false => format!(
                "{payload:>7} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>9.2} {:>8.1}x",
                speed.both,
                speed.encode,
                speed.decode,
                speed.crc,
                speed.copy,
                speed.both / speed.crc,
                speed.both / BAR,
            ),
        })?;
    }
    protocol(as_json)
}

/// Both ends of a link in virtual time, one way.
fn protocol(as_json: bool) -> anyhow::Result<()> {
    let begun = Instant::now();
    let report = simulate(&Case::one_way(1, 2048, DELAY, FRAMES))?;
    let seconds = begun.elapsed().as_secs_f64();
    let rate = report.delivered[1] as f64 / seconds;
    if as_json {
        let frames = report.delivered[1];
        return output::line(
            &json!({
                "simulated_frames": frames,
                "wall_seconds": seconds,
                "frames_per_second": rate,
            })
            .to_string(),
        );
    }
    output::line(&format!(
        "\nbar: {BAR} GB/s for both; two simulated ends, every check included: {:.2} M frames/s ({:.2} GB/s)",
        rate / 1e6,
        rate * 2048.0 / 1e9
    ))
}
