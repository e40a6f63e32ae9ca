// SPDX-License-Identifier: Apache-2.0
//! One port: the end of a link, the messages that wait to be received, and what has come for them.
//!
//! A message is a head of 24 bytes (job, tag, length) and its data, cut into frames. Messages of a job that
//! has failed are dropped wherever they are found; a notice, which travels in order with the data, says that
//! a job has failed and ends its message on the wire.

use std::cell::Cell;
use std::collections::VecDeque;

use spanker_link::{Config, Identity, Link};
use spanker_runtime::{Fault, FaultKind, Landing, Place};
use spanker_topology::LinkState;

use super::costs::Frames;
use crate::spec::{Pace, PortSpec};

/// Bytes of a message's head.
pub(crate) const HEAD: usize = spanker_topology::MESSAGE_HEAD as usize;
/// The smallest frame that carries part of a message behind its head.
pub(crate) const SMALLEST: usize = HEAD + 64;
/// Bytes of a notice.
pub(crate) const NOTICE: usize = 32;

/// Which transfer of which submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TransferId {
    pub(crate) ticket: u64,
    pub(crate) index: usize,
}

/// What the link keeps until it is acknowledged.
#[derive(Debug, Clone)]
pub(crate) enum Segment {
    /// Data of a message, which stays in the card's memory.
    Data {
        head: Option<[u8; HEAD]>,
        from: Place,
        length: u32,
        /// When the frame arrives, on the card's clock.
        stamp: u64,
        /// How many of its copies break on the way.
        broken: Cell<u32>,
        /// The transfer that is complete with it, and when.
        ends: Option<(TransferId, u64)>,
    },
    /// News of a fault.
    Notice([u8; NOTICE]),
}

/// A message's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessageHead {
    pub(crate) job: u64,
    pub(crate) tag: u32,
    pub(crate) length: u64,
}

impl MessageHead {
    pub(crate) fn to_bytes(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..8].copy_from_slice(&self.job.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<MessageHead> {
        let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        Some(MessageHead { job: word(0)?, tag: word(8)? as u32, length: word(16)? })
    }
}

/// A fault as it travels between cards.
pub(crate) fn notice_bytes(fault: &Fault) -> [u8; NOTICE] {
    let mut bytes = [0; NOTICE];
    bytes[..8].copy_from_slice(&fault.job.to_le_bytes());
    bytes[8..12].copy_from_slice(&fault.kind.code().to_le_bytes());
    bytes[16..24].copy_from_slice(&fault.card.to_le_bytes());
    bytes[24..].copy_from_slice(&fault.peer.to_le_bytes());
    bytes
}

pub(crate) fn notice_fault(bytes: &[u8]) -> Option<Fault> {
    let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let kind = FaultKind::from_code(word(8)? as u32);
    Some(Fault { kind, card: word(16)?, peer: word(24)?, job: word(0)? })
}

/// A receive that was started.
#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) id: TransferId,
    pub(crate) job: u64,
    pub(crate) after: Option<TransferId>,
    pub(crate) issued: u64,
    pub(crate) into: Place,
    pub(crate) length: u64,
    pub(crate) tag: u32,
    pub(crate) landing: Landing,
}

/// The message that is coming in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Incoming {
    pub(crate) head: MessageHead,
    pub(crate) got: u64,
}

/// What has arrived before there is a receive for it.
#[derive(Debug)]
pub(crate) enum Unexpected {
    Data { stamp: u64, bytes: Vec<u8> },
    Dead { job: u64 },
}

impl Unexpected {
    /// Whether it is the news that a job has ended.
    pub(crate) fn ends(&self, ended: u64) -> bool {
        matches!(self, Unexpected::Dead { job } if *job == ended)
    }
}

/// One port.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) spec: PortSpec,
    pub(crate) link: Link<Segment>,
    pub(crate) frames: Frames,
    /// Who was at the other end when the link was last up.
    pub(crate) peer: Option<Identity>,
    /// The link is cut on purpose.
    pub(crate) cut: bool,
    /// The card at the other end is gone.
    pub(crate) lost: bool,
    pub(crate) receives: VecDeque<Receive>,
    pub(crate) incoming: Option<Incoming>,
    pub(crate) unexpected: VecDeque<Unexpected>,
    /// Notices that did not fit the link's buffer.
    pub(crate) notices: VecDeque<Fault>,
    config: Config,
}

impl Port {
    pub(crate) fn new(
        spec: PortSpec,
        identity: Identity,
        pace: Pace,
        seed: u64,
        nonce: u32,
    ) -> Port {
        let stream = u64::from(identity.port) << 1 | 1;
        let frames = Frames::of(&spec, pace, seed ^ identity.serial, stream);
        let config = Config {
            payload: (frames.payload() + HEAD) as u16,
            window: 64,
            // What acknowledgements cost on the clock is part of every frame's cost.
            ack_every: 16,
            // The wire loses nothing and breaks are reported at once: timers only back that up, and a busy
            // host must not make them run out.
            retry: 20_000_000,
            attempts: 500,
            train_every: 500_000,
            train_within: 5_000_000_000,
            // The policy acts on card time, see `Frames::set_errors`.
            saturation: None,
            ..Config::nanoseconds(identity, nonce)
        };
        Port {
            spec,
            link: Link::new(config),
            frames,
            peer: None,
            cut: false,
            lost: false,
            receives: VecDeque::new(),
            incoming: None,
            unexpected: VecDeque::new(),
            notices: VecDeque::new(),
            config,
        }
    }

    /// A new wire: whatever the old one carried is gone.
    pub(crate) fn reconnect(&mut self, now: u64) {
        self.config.nonce = self.config.nonce.wrapping_add(0x9E37_79B9);
        self.link = Link::new(self.config);
        self.lost = false;
        self.cut = false;
        self.incoming = None;
        self.unexpected.clear();
        self.notices.clear();
        self.link.train(now);
    }

    /// The signal is gone.
    pub(crate) fn down(&mut self) {
        self.link.cut();
        while self.link.dropped().is_some() {}
        self.incoming = None;
        self.unexpected.clear();
        self.notices.clear();
    }

    /// Whether it carries data, or will soon.
    pub(crate) fn usable(&self) -> bool {
        let alive = matches!(self.link.state(), LinkState::Up | LinkState::Training);
        alive && !self.cut && !self.lost
    }

    /// What a job that needs this port fails with. Both ends name the same culprit.
    pub(crate) fn fault(&self, own: u64, job: u64) -> Fault {
        let peer = self.peer.map_or(0, |peer| peer.serial);
        if self.lost {
            return Fault { kind: FaultKind::CardLost, card: peer, peer: 0, job };
        }
        let (card, peer) = (own.min(peer), own.max(peer));
        Fault { kind: FaultKind::LinkDown, card, peer, job }
    }
}
