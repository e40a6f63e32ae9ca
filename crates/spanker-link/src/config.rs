// SPDX-License-Identifier: Apache-2.0
//! Who an end is and how it behaves. Time is in ticks, whatever the caller's tick is.

use crate::frame::MAX_PAYLOAD;

/// Credits that data leaves to notices, so that news of a fault gets through where data is stuck.
pub const RESERVED: usize = 4;
/// The smallest receive buffer: with less, the reserve and delayed updates could leave no credit.
pub const MIN_WINDOW: u8 = 8;
/// The largest receive buffer. It keeps `credit - ack` unambiguous in eight bits.
pub const MAX_WINDOW: u8 = 120;
/// The payload of a frame after the policy has shrunk it.
pub const SHRUNK_PAYLOAD: usize = 512;

/// Which connector of which card this is. No two ends have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The card's serial number.
    pub serial: u64,
    /// The connector on the card.
    pub port: u32,
}

/// How an end behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Who this end is.
    pub identity: Identity,
    /// A number that differs from one start of the program to the next: the first session. Frames
    /// of an earlier run that are still about carry another one.
    pub nonce: u32,
    /// Lanes to begin with: 1, 2 or 4.
    pub lanes: u8,
    /// Bytes of a full frame's payload, and of a slot of the receive buffer.
    pub payload: u16,
    /// Frames of receive buffer, from [`MIN_WINDOW`] to [`MAX_WINDOW`].
    pub window: u8,
    /// Frames that one acknowledgement covers while more follow.
    pub ack_every: u8,
    /// Ticks without progress before a replay. Longer than a round trip and `ack_every` frames.
    pub retry: u64,
    /// Replays without progress before the state FAULT.
    pub attempts: u32,
    /// Ticks between two training frames.
    pub train_every: u64,
    /// Ticks after which a training has failed.
    pub train_within: u64,
    /// Ticks of a window of the saturation policy (10 ms); `None` switches the policy off.
    pub saturation: Option<u64>,
}

impl Config {
    /// The values of this project, with nanoseconds for ticks.
    #[must_use]
    pub const fn nanoseconds(identity: Identity, nonce: u32) -> Config {
        Config {
            identity,
            nonce,
            lanes: 4,
            payload: 2048,
            window: 64,
            ack_every: 4,
            retry: 200_000,
            attempts: 64,
            train_every: 20_000,
            train_within: 5_000_000,
            saturation: Some(10_000_000),
        }
    }

    /// Panics on values that no link can work with.
    pub(crate) fn check(&self) {
        let Config { lanes, payload, window, .. } = *self;
        assert!(matches!(lanes, 1 | 2 | 4), "lanes are {lanes}, not 1, 2 or 4");
        assert!(
            (1..=MAX_PAYLOAD).contains(&usize::from(payload)),
            "a payload of {payload} bytes does not fit a frame"
        );
        assert!((MIN_WINDOW..=MAX_WINDOW).contains(&window), "a window of {window} frames");
        assert!(self.ack_every > 0 && self.attempts > 0, "ack_every and attempts are at least 1");
        assert!(self.retry > 0 && self.train_every > 0, "a timer of 0 ticks never rests");
        assert!(self.train_within > 0 && self.saturation != Some(0), "a window of 0 ticks");
    }
}
