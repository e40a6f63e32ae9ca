// SPDX-License-Identifier: Apache-2.0
//! The inter-card link as formulas: framing, acknowledgements, bit errors, training, saturation.
//!
//! Nothing here was measured; the numbers come with the profile. `docs/link-model.md` has the tables
//! that these functions print, and `python/spanker_link.py` computes the same figures.

use serde::{Deserialize, Serialize};

use crate::{BytesPerSecond, Seconds};

/// Bytes that a message between cards begins with: its job, tag and length.
pub const MESSAGE_HEAD: u64 = 24;

/// How bytes travel on the wire: what each frame adds to its payload.
///
/// ```
/// use spanker_topology::{BytesPerSecond, Framing, Seconds};
/// let framing = Framing::SPANKER;
/// let clean = framing.goodput(BytesPerSecond(500_000_000), 0.0, Seconds::from_micros(1.52));
/// assert_eq!((clean / 1e6).round(), 493.0); // MB/s with 2 KiB frames
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Framing {
    /// Bytes of data in a full frame.
    pub payload: u64,
    /// Bytes that a frame adds: start, header, checksum, end, gap.
    pub overhead: u64,
    /// Bytes of one acknowledgement, which travels against the data.
    pub ack_bytes: u64,
    /// Frames that one acknowledgement covers.
    pub ack_every: u64,
    /// The part of all symbols that clock compensation takes.
    pub compensation: f64,
}

impl Framing {
    /// The frame of this project: start 4, header 8, payload, CRC 4, end 4, gap 4; 16 bytes of
    /// acknowledgement for four frames; 0.12 % clock compensation.
    pub const SPANKER: Framing =
        Framing { payload: 2048, overhead: 24, ack_bytes: 16, ack_every: 4, compensation: 0.0012 };

    /// The same with another payload.
    #[must_use]
    pub fn with_payload(self, payload: u64) -> Framing {
        Framing { payload, ..self }
    }

    /// The part of the raw rate that is payload on a link without errors.
    #[must_use]
    pub fn efficiency(self) -> f64 {
        let payload = self.payload as f64;
        let acks = self.ack_bytes as f64 / self.ack_every as f64;
        payload / (payload + self.overhead as f64 + acks) * (1.0 - self.compensation)
    }

    /// The probability that a frame arrives broken at a bit error rate, at ten bits on the wire for a byte.
    #[must_use]
    pub fn frame_error_rate(self, bit_error_rate: f64) -> f64 {
        let bits = 10.0 * (self.payload + self.overhead) as f64;
        -(bits * (-bit_error_rate).ln_1p()).exp_m1()
    }

    /// The part of the frames that go-back-N delivers: a broken frame costs itself and what was sent
    /// until its loss was known.
    #[must_use]
    pub fn go_back_n(self, raw: BytesPerSecond, bit_error_rate: f64, round_trip: Seconds) -> f64 {
        let broken = self.frame_error_rate(bit_error_rate);
        let frame = (self.payload + self.overhead) as f64 / raw.0 as f64;
        let window = 1.0 + (round_trip.0 / frame).ceil();
        (1.0 - broken) / (1.0 - broken + broken * window)
    }

    /// Payload bytes per second: `raw * efficiency * go_back_n`.
    #[must_use]
    pub fn goodput(self, raw: BytesPerSecond, bit_error_rate: f64, round_trip: Seconds) -> f64 {
        let delivered = self.go_back_n(raw, bit_error_rate, round_trip);
        raw.0 as f64 * self.efficiency() * delivered
    }

    /// A small message there and back at the link's MAC: two frames of that payload and the pipeline
    /// latency of each direction.
    #[must_use]
    pub fn round_trip(self, raw: BytesPerSecond, payload: u64, pipeline: Seconds) -> Seconds {
        let frame = (payload + self.overhead) as f64 / raw.0 as f64;
        Seconds(2.0 * (frame + pipeline.0))
    }
}

/// What a link does about errors in a window of 10 ms. This policy is the project's own: the hardware
/// documents define none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Saturation {
    /// Go on.
    Keep,
    /// Send frames of 512 bytes, so that an error costs less.
    ShrinkFrames,
    /// Train the link again.
    Retrain,
    /// Halve the lanes: 4, 2, 1.
    HalveLanes,
    /// Give up: the state FAULT. Traffic goes over the host link, or the plan changes.
    Fault,
}

impl Saturation {
    /// The window over which the frame error rate is taken.
    pub const WINDOW: Seconds = Seconds(0.010);

    /// What to do at a frame error rate, after so many failed trainings, with so many lanes.
    ///
    /// ```
    /// use spanker_topology::Saturation;
    /// assert_eq!(Saturation::decide(0.02, 0, 4), Saturation::ShrinkFrames);
    /// assert_eq!(Saturation::decide(0.07, 0, 4), Saturation::Retrain);
    /// assert_eq!(Saturation::decide(0.07, 3, 4), Saturation::HalveLanes);
    /// assert_eq!(Saturation::decide(0.5, 0, 1), Saturation::Fault);
    /// ```
    #[must_use]
    pub fn decide(frame_error_rate: f64, failed_trainings: u32, lanes: u32) -> Saturation {
        match frame_error_rate {
            rate if rate > 0.10 || failed_trainings >= 3 => match lanes {
                0 | 1 => Saturation::Fault,
                _ => Saturation::HalveLanes,
            },
            rate if rate > 0.05 => Saturation::Retrain,
            rate if rate > 0.01 => Saturation::ShrinkFrames,
            _ => Saturation::Keep,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: BytesPerSecond = BytesPerSecond(500_000_000);
    const ROUND_TRIP: Seconds = Seconds(1.52e-6);

    fn megabytes(payload: u64, bit_error_rate: f64) -> f64 {
        Framing::SPANKER.with_payload(payload).goodput(RAW, bit_error_rate, ROUND_TRIP) / 1e6
    }

    fn close(actual: f64, expected: f64) {
        assert!((actual / expected - 1.0).abs() < 0.01, "{actual} is not about {expected}");
    }

    #[test]
    fn payload_rate_grows_with_the_frame_as_documented() {
        let table = [(64, 347.0), (256, 450.0), (512, 473.0), (1024, 486.0), (2048, 493.0)];
        for (payload, expected) in table {
            close(megabytes(payload, 0.0), expected);
        }
        close(megabytes(4096, 0.0), 496.0);
    }

    #[test]
    fn bit_errors_cost_large_frames_more() {
        assert!(megabytes(4096, 1e-7) > 0.99 * megabytes(4096, 0.0));
        close(megabytes(4096, 1e-6), 457.0);
        close(megabytes(4096, 1e-5), 246.0);
        close(megabytes(256, 1e-5), 404.0);
    }

    #[test]
    fn round_trip_of_64_bytes_is_the_documented_one() {
        let pipeline = Seconds::from_micros(0.584);
        close(Framing::SPANKER.round_trip(RAW, 64, pipeline).micros(), 1.52);
    }
}
