// SPDX-License-Identifier: Apache-2.0
//! What a link reports to its caller: events, reasons to give up, bodies of frames.

use crate::config::Identity;
use crate::training::TRAINING_BYTES;

/// What the caller has to know or do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Nothing.
    Nothing,
    /// The payload is the next data or notice: read it now. It occupies receive buffer until
    /// [`crate::Link::consumed`].
    Deliver,
    /// The link is up.
    Trained {
        /// Who is at the other end.
        peer: Identity,
        /// Whether both streams go on where they were. If not, what had no acknowledgement is
        /// among [`crate::Link::dropped`], and numbers began anew.
        resumed: bool,
    },
    /// The link is no longer up and trains with its peer again; queued frames wait.
    Retraining,
    /// Frames get smaller from here on: see [`crate::Link::payload_limit`].
    Shrunk,
    /// The link gave up.
    Faulted(Fault),
}

/// Why a link gave up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// The other end has this end's identity: the connector loops back, or two cards share a serial
    /// number.
    SelfConnected,
    /// The other end speaks another version of the protocol.
    Version,
    /// No progress after all the replays that the configuration allows.
    Silent,
    /// Too many errors with one lane.
    Saturated,
    /// Trainings failed with every number of lanes.
    Untrainable,
}

/// What goes behind a header.
#[derive(Debug, PartialEq, Eq)]
pub enum Body<'a, P> {
    /// Nothing: a control frame.
    Empty,
    /// The payload of a training frame.
    Training([u8; TRAINING_BYTES]),
    /// What the caller queued.
    Payload(&'a P),
}
