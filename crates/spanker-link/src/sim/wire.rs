// SPDX-License-Identifier: Apache-2.0
//! One direction of the virtual wire.

use std::collections::VecDeque;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// What one direction of a wire does to frames.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wire {
    /// Femtoseconds per byte on one lane.
    pub lane_byte_fs: u64,
    /// Nanoseconds from the end of a frame at one end to its end at the other.
    pub delay: u64,
    /// The probability that a bit on the wire is wrong; a byte has ten, and a wrong one changes it at random.
    pub bit_error_rate: f64,
    /// With so many lanes or fewer there are no bit errors.
    pub sound_lanes: u8,
    /// The chance that a frame vanishes.
    pub drop: f64,
    /// The chance that a frame comes twice.
    pub duplicate: f64,
    /// The chance that a frame is late, so that others overtake it.
    pub reorder: f64,
    /// By how many nanoseconds at most it is late.
    pub late: u64,
}

impl Wire {
    /// A wire without errors: lanes of 125 MB/s less 0.12 % for clock compensation.
    #[must_use]
    pub const fn clean(delay: u64) -> Wire {
        Wire {
            lane_byte_fs: 8_009_612,
            delay,
            bit_error_rate: 0.0,
            sound_lanes: 0,
            drop: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            late: 0,
        }
    }
}

#[derive(Debug)]
pub(super) struct Packet {
    arrives: u64,
    pub bytes: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Medium {
    wire: Wire,
    rng: Pcg64Mcg,
    in_flight: VecDeque<Packet>,
    spare: Vec<Vec<u8>>,
    /// Bits on the wire until the next wrong one.
    until_error: u64,
    /// When the sender may begin its next frame.
    pub free: u64,
}

impl Medium {
    pub fn new(wire: Wire, seed: u64, side: u64) -> Self {
        let mut medium = Medium {
            wire,
            rng: Pcg64Mcg::seed_from_u64(seed.wrapping_mul(2).wrapping_add(side)),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            until_error: 0,
            free: 0,
        };
        medium.until_error = medium.draw_error();
        medium
    }

    fn draw_error(&mut self) -> u64 {
        if self.wire.bit_error_rate <= 0.0 {
            return u64::MAX;
        }
        // The conversion saturates, which is far enough away.
        ((1.0 - self.rng.random::<f64>()).ln() / (-self.wire.bit_error_rate).ln_1p()) as u64
    }

    /// A buffer for the next frame.
    pub fn buffer(&mut self) -> Vec<u8> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes
    }

    pub fn recycle(&mut self, packet: Packet) {
        self.spare.push(packet.bytes);
    }

    /// Sends a frame that begins at `now`.
    pub fn send(&mut self, mut bytes: Vec<u8>, lanes: u8, now: u64) {
        self.free = now + bytes.len() as u64 * self.wire.lane_byte_fs / u64::from(lanes);
        let mut arrives = self.free + self.wire.delay * super::TICK;
        if lanes > self.wire.sound_lanes {
            self.damage(&mut bytes);
        }
        if self.chance(self.wire.reorder) {
            arrives += self.rng.random_range(0..=self.wire.late * super::TICK);
        }
        if self.chance(self.wire.duplicate) {
            let later = arrives + self.rng.random_range(0..=self.wire.late * super::TICK);
            let mut copy = self.buffer();
            copy.extend_from_slice(&bytes);
            self.insert(Packet { arrives: later, bytes: copy });
        }
        let packet = Packet { arrives, bytes };
        if self.chance(self.wire.drop) {
            self.recycle(packet);
        } else {
            self.insert(packet);
        }
    }

    fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.random::<f64>() < probability
    }

    fn damage(&mut self, bytes: &mut [u8]) {
        let bits = 10 * bytes.len() as u64;
        let mut at = 0;
        while self.until_error < bits - at {
            at += self.until_error;
            bytes[(at / 10) as usize] ^= self.rng.random_range(1..=255u8);
            self.until_error = self.draw_error();
            at += 1;
        }
        self.until_error -= bits - at;
    }

    fn insert(&mut self, packet: Packet) {
        let before = self.in_flight.iter().rev().take_while(|other| other.arrives > packet.arrives);
        let place = self.in_flight.len() - before.count();
        self.in_flight.insert(place, packet);
    }

    /// When the next frame arrives.
    pub fn next(&self) -> Option<u64> {
        self.in_flight.front().map(|packet| packet.arrives)
    }

    /// A frame that has arrived by now.
    pub fn arrived(&mut self, now: u64) -> Option<Packet> {
        if self.next()? <= now { self.in_flight.pop_front() } else { None }
    }
}
