// SPDX-License-Identifier: Apache-2.0
//! What a card says about itself, and why its work can fail: the ABI's structs as values.

use std::fmt;
use std::time::Duration;

use crate::abi::{
    ACTIVITY_RECEIVING, ACTIVITY_SENDING, ACTIVITY_WORKING, CARD_EMULATED, CARD_PACE_WALL,
    CARD_UNSHAPED, FAULT_ABORTED, FAULT_CARD_LOST, FAULT_LINK_DOWN, FAULT_MISMATCH, FAULT_SLOW,
    FAULT_STUCK, FAULT_WRONG, RawCardInfo, RawFault, RawPortInfo, RawState,
};

/// What a card's clock shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pace {
    /// The time that hardware would take.
    Real,
    /// Emulated: what the work costs by the profile, however long the emulation takes.
    CardTime,
    /// Emulated, and slowed down so that the wall clock agrees.
    Wall,
    /// Emulated as fast as the host can; the clock is the host's.
    Unshaped,
}

/// What a card is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CardInfo {
    /// Unique among all cards.
    pub serial: u64,
    /// The number in the device's name.
    pub index: u32,
    /// The id of its profile.
    pub profile: String,
    /// Bytes of memory for buffers.
    pub capacity: u64,
    /// Of these, bytes in no buffer.
    pub available: u64,
    /// Link ports.
    pub ports: u32,
    /// What its clock shows.
    pub pace: Pace,
    /// The process that has work on the card.
    pub owner: Option<u32>,
    /// The card's clock.
    pub clock: CardTime,
}

impl CardInfo {
    /// Whether a program plays the card.
    #[must_use]
    pub fn emulated(&self) -> bool {
        self.pace != Pace::Real
    }
}

impl From<RawCardInfo> for CardInfo {
    fn from(raw: RawCardInfo) -> Self {
        let profile = raw.profile.split(|&byte| byte == 0).next().unwrap_or_default();
        let pace = match raw.flags {
            flags if flags & CARD_EMULATED == 0 => Pace::Real,
            flags if flags & CARD_UNSHAPED != 0 => Pace::Unshaped,
            flags if flags & CARD_PACE_WALL != 0 => Pace::Wall,
            _ => Pace::CardTime,
        };
        CardInfo {
            serial: raw.serial,
            index: raw.index,
            profile: String::from_utf8_lossy(profile).escape_debug().to_string(),
            capacity: raw.capacity,
            available: raw.available,
            ports: raw.ports,
            pace,
            owner: (raw.owner != 0).then_some(raw.owner),
            clock: CardTime(raw.card_time_ps),
        }
    }
}

/// A moment of a card's clock, in picoseconds since it was switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CardTime(pub u64);

impl CardTime {
    /// The time from `earlier` to this moment; none if it is later.
    #[must_use]
    pub fn since(self, earlier: CardTime) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0) / 1000)
    }

    /// Microseconds since the card was switched on.
    #[must_use]
    pub fn micros(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

/// The state of a port, in the hardware's encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortState {
    /// No signal: 0.
    Down,
    /// The two ends are finding each other: 1.
    Training,
    /// Carries data: 2.
    Up,
    /// Gave up: 3.
    Fault,
}

/// The other end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The card's serial.
    pub serial: u64,
    /// Its port.
    pub port: u32,
}

/// What a port is and what it is connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortInfo {
    /// Which port.
    pub port: u32,
    /// Whether it carries data.
    pub state: PortState,
    /// Lanes in use.
    pub lanes: u32,
    /// The other end, if training found one.
    pub peer: Option<Peer>,
    /// Payload bytes per second by the profile, if that says.
    pub bandwidth: Option<u64>,
    /// One message by the profile.
    pub latency: Duration,
    /// Whether it sends on the same lanes as the card's other ports.
    pub shared_lanes: bool,
}

impl From<RawPortInfo> for PortInfo {
    fn from(raw: RawPortInfo) -> Self {
        let state = match raw.state {
            0 => PortState::Down,
            1 => PortState::Training,
            2 => PortState::Up,
            _ => PortState::Fault,
        };
        let peer = Peer { serial: raw.peer_serial, port: raw.peer_port };
        PortInfo {
            port: raw.port,
            state,
            lanes: raw.lanes,
            peer: (raw.peer_serial != 0).then_some(peer),
            bandwidth: (raw.bandwidth != 0).then_some(raw.bandwidth),
            latency: Duration::from_nanos(raw.latency_ps / 1000),
            shared_lanes: raw.shared != 0,
        }
    }
}

/// What to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Why a job failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// The card is gone.
    CardLost,
    /// The link between the card and its peer is down.
    LinkDown,
    /// The card answers nobody, or does not go on.
    Stuck,
    /// The card takes longer than it may.
    Slow,
    /// The card computes or answers nonsense.
    Wrong,
    /// The card sent another message than was expected.
    Mismatch,
    /// The program gave the job up, or went away.
    Aborted,
}

impl FaultKind {
    /// The ABI's number.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            FaultKind::CardLost => FAULT_CARD_LOST,
            FaultKind::LinkDown => FAULT_LINK_DOWN,
            FaultKind::Stuck => FAULT_STUCK,
            FaultKind::Slow => FAULT_SLOW,
            FaultKind::Wrong => FAULT_WRONG,
            FaultKind::Mismatch => FAULT_MISMATCH,
            FaultKind::Aborted => FAULT_ABORTED,
        }
    }

    /// The kind with this number. A number that is not known is nonsense.
    #[must_use]
    pub const fn from_code(code: u32) -> FaultKind {
        match code {
            FAULT_CARD_LOST => FaultKind::CardLost,
            FAULT_LINK_DOWN => FaultKind::LinkDown,
            FAULT_STUCK => FaultKind::Stuck,
            FAULT_SLOW => FaultKind::Slow,
            FAULT_MISMATCH => FaultKind::Mismatch,
            FAULT_ABORTED => FaultKind::Aborted,
            _ => FaultKind::Wrong,
        }
    }
}

/// A job's fault. Every card of the job reports the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    /// What happened.
    pub kind: FaultKind,
    /// The culprit's serial.
    pub card: u64,
    /// For a link, the serial at its other end; else 0.
    pub peer: u64,
    /// The job.
    pub job: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { kind, card, peer, .. } = self;
        match kind {
            FaultKind::CardLost => write!(f, "card with serial {card:x} is gone"),
            FaultKind::LinkDown => write!(f, "link between serials {card:x} and {peer:x} is down"),
            FaultKind::Stuck => write!(f, "card with serial {card:x} is stuck"),
            FaultKind::Slow => write!(f, "card with serial {card:x} is too slow"),
            FaultKind::Wrong => write!(f, "card with serial {card:x} gives wrong answers"),
            FaultKind::Mismatch => write!(f, "card with serial {card:x} sent another message"),
            FaultKind::Aborted => write!(f, "the job was given up"),
        }
    }
}

impl From<Fault> for RawFault {
    fn from(fault: Fault) -> Self {
        let Fault { kind, card, peer, job } = fault;
        RawFault { kind: kind.code(), reserved: 0, card, peer, job }
    }
}

impl RawFault {
    /// The fault, if there is one.
    #[must_use]
    pub fn fault(self) -> Option<Fault> {
        let RawFault { kind, card, peer, job, .. } = self;
        (kind != 0).then(|| Fault { kind: FaultKind::from_code(kind), card, peer, job })
    }
}

/// What a card is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activity {
    /// Nothing.
    Idle,
    /// It works.
    Working,
    /// The peer at a port accepts no more frames.
    Sending {
        /// The port.
        port: u32,
        /// The peer's serial, or 0.
        peer: u64,
    },
    /// Nothing comes from the peer at a port.
    Receiving {
        /// The port.
        port: u32,
        /// The peer's serial, or 0.
        peer: u64,
    },
}

/// What a card is doing, and how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CardState {
    /// What it is doing.
    pub activity: Activity,
    /// The job at work, or 0.
    pub job: u64,
    /// The last ticket given out.
    pub submitted: Ticket,
    /// The last ticket whose work is complete.
    pub completed: Ticket,
    /// Changes whenever the card gets on with its work.
    pub progress: u64,
    /// The card's clock.
    pub clock: CardTime,
}

impl From<RawState> for CardState {
    fn from(raw: RawState) -> Self {
        let (port, peer) = (raw.port, raw.peer);
        CardState {
            activity: match raw.activity {
                ACTIVITY_WORKING => Activity::Working,
                ACTIVITY_SENDING => Activity::Sending { port, peer },
                ACTIVITY_RECEIVING => Activity::Receiving { port, peer },
                _ => Activity::Idle,
            },
            job: raw.job,
            submitted: Ticket(raw.submitted),
            completed: Ticket(raw.completed),
            progress: raw.progress,
            clock: CardTime(raw.card_time_ps),
        }
    }
}
