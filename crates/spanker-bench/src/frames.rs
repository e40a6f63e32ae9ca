// SPDX-License-Identifier: Apache-2.0
//! How fast one core makes and reads the link's frames, beside what it could at best, and how fast two ends of the
//! protocol run in virtual time.

use std::time::Instant;

use serde::Serialize;
use spanker_link::measure;
use spanker_link::sim::{Case, run as simulate};

use crate::error::Result;

/// What encoding and decoding together shall reach, in GB/s of payload.
pub const FRAMES_BAR_GBPS: f64 = 2.0;
const PAYLOADS: [usize; 3] = [512, 2048, 4096];
const REPEATS: usize = 51;
/// Payload of the simulated transfer.
pub const SIMULATED_PAYLOAD: u16 = 2048;
/// Frames of the simulated transfer, and nanoseconds of its wires.
const FRAMES: u64 = 200_000;
const DELAY: u64 = 500;

/// Both ends of a link in virtual time, one way, every check included.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SimulatedLink {
    /// Frames that came through.
    pub simulated_frames: u64,
    /// The host's time.
    pub wall_seconds: f64,
    /// Frames in a second of it.
    pub frames_per_second: f64,
}

/// How fast frames of one size are made and read, in GB/s of payload.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct FrameRow {
    /// Bytes of payload.
    pub payload_bytes: usize,
    /// Making and reading them.
    pub both_gbps: f64,
    /// Making them.
    pub encode_gbps: f64,
    /// Reading them.
    pub decode_gbps: f64,
    /// Their checksums alone.
    pub crc32c_gbps: f64,
    /// Copying them.
    pub memcpy_gbps: f64,
    /// What making and reading shall reach.
    pub bar_gbps: f64,
}

/// Times frames of each size on one core, one size at a time. `begins` is called with the size.
pub fn frames(mut begins: impl FnMut(usize)) -> impl Iterator<Item = FrameRow> {
    let start = Instant::now();
    PAYLOADS.into_iter().map(move |payload_bytes| {
        begins(payload_bytes);
        let speed = measure(payload_bytes, REPEATS, || start.elapsed().as_secs_f64());
        FrameRow {
            payload_bytes,
            both_gbps: speed.both,
            encode_gbps: speed.encode,
            decode_gbps: speed.decode,
            crc32c_gbps: speed.crc,
            memcpy_gbps: speed.copy,
            bar_gbps: FRAMES_BAR_GBPS,
        }
    })
}

/// Times the protocol in virtual time.
///
/// # Errors
/// A flaw of the protocol, which there is none of.
pub fn simulated_link() -> Result<SimulatedLink> {
    let begun = Instant::now();
    let report = simulate(&Case::one_way(1, SIMULATED_PAYLOAD, DELAY, FRAMES))?;
    let wall_seconds = begun.elapsed().as_secs_f64();
    let simulated_frames = report.delivered[1];
    let frames_per_second = simulated_frames as f64 / wall_seconds;
    Ok(SimulatedLink { simulated_frames, wall_seconds, frames_per_second })
}
