// SPDX-License-Identifier: Apache-2.0
//! How fast one core encodes and decodes frames, beside what it could at best.

use std::hint::black_box;

use crate::frame::{checksum, frame_len};
use crate::{Decoded, Header, Kind, decode, encode_into};

/// Bytes of payload that each measurement moves through frames in a small ring.
const BATCH: usize = 1 << 22;
const RING: usize = 16;

/// Gigabytes of payload per second; medians of repeats that took turns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Bytes of payload in a frame.
    pub payload: usize,
    /// Encoding into a ring and decoding from it, both with the checks.
    pub both: f64,
    /// Encoding alone.
    pub encode: f64,
    /// Decoding alone.
    pub decode: f64,
    /// CRC-32C alone, once over the payload.
    pub crc: f64,
    /// Copying alone.
    pub copy: f64,
}

/// Measures frames of this payload with the caller's clock, which returns seconds.
///
/// # Panics
///
/// When the payload is longer than a frame can carry, or `repeats` is 0.
pub fn measure(payload: usize, repeats: usize, mut clock: impl FnMut() -> f64) -> Speed {
    assert!(repeats > 0, "a median needs a repeat");
    let source: Vec<u8> = (0..payload).map(|at| (at * 31) as u8).collect();
    let mut ring = vec![0; RING * frame_len(Kind::Data, payload)];
    let mut seconds: [Vec<f64>; 5] = Default::default();
    for _ in 0..=repeats {
        for (kind, seconds) in seconds.iter_mut().enumerate() {
            let before = clock();
            turn(kind, &source, &mut ring);
            seconds.push(clock() - before);
        }
    }
    let frames = (BATCH / payload.max(1)).max(1);
    let moved = (frames * payload) as f64 / 1e9;
    let rates = seconds.map(|mut seconds| {
        // The first turn warms up.
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        moved / seconds[seconds.len() / 2]
    });
    let [both, encode, decode, crc, copy] = rates;
    Speed { payload, both, encode, decode, crc, copy }
}

/// Moves a batch in one of the ways that are compared.
fn turn(kind: usize, source: &[u8], ring: &mut [u8]) {
    let length = source.len();
    let frame = frame_len(Kind::Data, length);
    let mut header = Header {
        kind: Kind::Data,
        last: false,
        session: 1,
        length: length as u16,
        seq: 0,
        ack: 0,
        credit: 64,
    };
    for number in 0..(BATCH / length.max(1)).max(1) {
        let slot = &mut ring[number % RING * frame..][..frame];
        let source = black_box(source);
        if kind < 2 {
            header.seq = number as u16;
            encode_into(&header, &[source], slot);
        }
        match kind {
            0 | 2 => {
                let whole = matches!(decode(black_box(slot)), Decoded::Frame { .. });
                assert!(black_box(whole), "a frame in memory broke");
            }
            3 => {
                black_box(checksum(source));
            }
            4 => slot[..length].copy_from_slice(source),
            _ => {}
        }
        black_box(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_payload_over_the_median_of_the_turns() {
        let mut now = 0.0;
        let clock = || {
            now += 0.5;
            now
        };
        let speed = measure(2048, 1, clock);
        let expected = BATCH as f64 / 1e9 / 0.5;
        assert_eq!((speed.both, speed.copy), (expected, expected));
    }
}
