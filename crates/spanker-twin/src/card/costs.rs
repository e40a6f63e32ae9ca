// SPDX-License-Identifier: Apache-2.0
//! What work costs on the card's clock, in picoseconds.
//!
//! An operator costs what the planner predicts.
//! A frame costs its bytes on the wire, its part of an acknowledgement, and for each time that it breaks the
//! frames that go-back-N sends again.

use rand::Rng;
use rand_pcg::Pcg32;
use spanker_plan::{Cost, Load};
use spanker_topology::{Framing, Profile, Saturation};

use crate::spec::{Pace, PortSpec};

/// The end of card time. Nothing ends later, whatever work and peers say.
pub(crate) const LATEST: u64 = u64::MAX - 1;

/// So much later.
pub(crate) fn later(at: u64, by: u64) -> u64 {
    at.saturating_add(by).min(LATEST)
}

/// Picoseconds in a second.
pub(crate) const SECOND: f64 = 1e12;

/// What a card's work costs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Costs {
    cost: Cost,
    host_latency: f64,
    host_per_byte: f64,
    /// The factor of a card that someone has slowed down.
    pub(crate) slow: f64,
}

impl Costs {
    pub(crate) fn of(profile: &Profile) -> Costs {
        Costs {
            cost: Cost::of(profile),
            host_latency: profile.host.latency.value.0 * SECOND,
            host_per_byte: SECOND / profile.host.bandwidth.value.0 as f64,
            slow: 1.0,
        }
    }

    /// Work on the card itself, as the planner prices it.
    pub(crate) fn work(&self, load: &Load) -> u64 {
        (self.cost.operator(load).total().0 * SECOND * self.slow).round() as u64
    }

    /// Memory traffic alone.
    pub(crate) fn memory(&self, bytes: u64) -> u64 {
        (self.cost.memory(bytes as f64) * SECOND * self.slow).round() as u64
    }

    /// A message from or to the host.
    pub(crate) fn host(&self, bytes: u64) -> u64 {
        ((self.host_latency + bytes as f64 * self.host_per_byte) * self.slow).round() as u64
    }
}

/// What a port's frames cost, and which of them break.
#[derive(Debug, Clone)]
pub(crate) struct Frames {
    raw: f64,
    framing: Option<Framing>,
    round_trip: f64,
    pub(crate) latency: u64,
    bit_error_rate: f64,
    dice: Pcg32,
    /// Lanes that are left of those there are.
    lanes: (u32, u32),
    payload: usize,
}

/// What a message's bytes are cut into where nothing says so.
const PLAIN_PAYLOAD: usize = 2048;
/// The most that a frame carries of a message, beside the message's head.
const MOST_PAYLOAD: usize = 4032;

impl Frames {
    pub(crate) fn of(spec: &PortSpec, pace: Pace, seed: u64, stream: u64) -> Frames {
        if pace == Pace::Unshaped {
            // Nothing is counted, so frames are as large as the protocol allows.
            let plain = PortSpec { framing: None, bit_error_rate: 0.0, ..spec.clone() };
            let frames = Frames::of(&plain, Pace::Card, seed, stream);
            return Frames { payload: MOST_PAYLOAD, ..frames };
        }
        let payload = spec.framing.map_or(PLAIN_PAYLOAD, |framing| framing.payload as usize);
        let mut frames = Frames {
            raw: spec.raw.0 as f64,
            framing: spec.framing,
            round_trip: spec.round_trip.0,
            latency: (spec.latency.0 * SECOND).round() as u64,
            bit_error_rate: 0.0,
            dice: Pcg32::new(seed, stream),
            lanes: (spec.lanes, spec.lanes),
            // Whole elements of every type.
            payload: (payload & !63).clamp(64, MOST_PAYLOAD),
        };
        frames.set_errors(spec.bit_error_rate);
        frames
    }

    /// Bytes of a message in a full frame.
    pub(crate) fn payload(&self) -> usize {
        self.payload
    }

    /// Lanes in use.
    pub(crate) fn lanes(&self) -> u32 {
        self.lanes.0
    }

    /// Changes the bit error rate. The saturation policy is applied at once, because a steady rate makes the
    /// same decision in every window. False if it ends in FAULT.
    pub(crate) fn set_errors(&mut self, bit_error_rate: f64) -> bool {
        self.bit_error_rate = bit_error_rate;
        let Some(framing) = self.framing else { return true };
        self.lanes.0 = self.lanes.1;
        self.payload = (framing.payload as usize & !63).clamp(64, MOST_PAYLOAD);
        loop {
            let rate = framing.with_payload(self.payload as u64).frame_error_rate(bit_error_rate);
            match Saturation::decide(rate, 0, self.lanes.0) {
                Saturation::Keep => return true,
                // Smaller frames are tried before anything that costs more.
                _ if self.payload > 512 => self.payload = 512,
                Saturation::HalveLanes => self.lanes.0 /= 2,
                Saturation::Fault => return false,
                _ => return true,
            }
        }
    }

    /// Picoseconds on the wire of a frame with `payload` bytes, and how often it breaks before it arrives.
    pub(crate) fn send(&mut self, payload: usize, slow: f64) -> (u64, u32) {
        let lanes = f64::from(self.lanes.0) / f64::from(self.lanes.1.max(1));
        let raw = self.raw * lanes / slow;
        let Some(framing) = self.framing else {
            return ((payload as f64 / raw * SECOND).round() as u64, 0);
        };
        let overhead =
            framing.overhead as f64 + framing.ack_bytes as f64 / framing.ack_every as f64;
        let time = (payload as f64 + overhead) / (raw * (1.0 - framing.compensation));
        if self.bit_error_rate == 0.0 {
            return ((time * SECOND).round() as u64, 0);
        }
        let framing = framing.with_payload(payload as u64);
        let chance = framing.frame_error_rate(self.bit_error_rate);
        let mut broken = 0;
        while chance > 0.0 && broken < 1000 && self.dice.random::<f64>() < chance {
            broken += 1;
        }
        let alone = (payload as u64 + framing.overhead) as f64 / raw;
        let window = 1.0 + (self.round_trip / alone).ceil();
        let delay = f64::from(broken) * window * alone;
        (((time + delay) * SECOND).round() as u64, broken)
    }

    /// Payload bytes per second of long messages without errors.
    pub(crate) fn rate(&self) -> u64 {
        let lanes = f64::from(self.lanes.0) / f64::from(self.lanes.1.max(1));
        let part = match self.framing {
            Some(framing) => framing.with_payload(self.payload as u64).efficiency(),
            None => 1.0,
        };
        (self.raw * lanes * part).round() as u64
    }
}
