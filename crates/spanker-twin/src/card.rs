// SPDX-License-Identifier: Apache-2.0
//! An emulated card without I/O, clock or threads: requests, frames and the time go in, answers and frames
//! come out. A process plays one card with it, a simulation plays many.
//!
//! * `requests.rs`: what hosts ask.
//! * `check.rs`: whether work may run.
//! * `engine.rs`: work in order, on the card's clock; `traffic.rs` says what work counts for there.
//! * `compute.rs`: what work does to memory.
//! * `transfer.rs`: messages to and from the ports.
//! * `fault.rs`: how a job fails, on this card and its neighbours.

mod check;
mod compute;
mod costs;
mod engine;
mod fault;
mod memory;
mod port;
mod recorder;
mod requests;
mod traffic;
mod transfer;

use std::collections::VecDeque;

use spanker_link::Identity;
use spanker_runtime::{Counters, Fault};
use spanker_topology::LinkState;

use self::compute::Alu;
use self::costs::{Costs, later};
use self::engine::{Lane, Submission};
use self::memory::Memory;
use self::port::{NOTICE, Port};
use self::recorder::Recorder;
use self::requests::{Client, Waiter};
use crate::spec::{CardSpec, Pace};

/// A program that is connected to the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// An answer for a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// For whom.
    pub client: ClientId,
    /// The message.
    pub bytes: Vec<u8>,
    /// Not to be complete before this time, in nanoseconds.
    pub due: u64,
    /// The client is to be cut off after it.
    pub last: bool,
}

/// Where a port's frames go.
pub trait Wire {
    /// Whether a frame of the largest size fits.
    fn has_space(&self) -> bool;
    /// Puts a frame on the wire, given in parts. `stamp` is when it arrives, on the card's clock.
    fn put(&mut self, stamp: u64, parts: &[&[u8]]);
}

/// What a card wants of whoever runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pulse {
    /// There is work that needs nothing but to be called again.
    pub busy: bool,
    /// When to call again at the latest, in nanoseconds.
    pub timer: Option<u64>,
}

/// One emulated card.
#[derive(Debug)]
pub struct Card {
    spec: CardSpec,
    costs: Costs,
    memory: Memory,
    ports: Vec<Port>,
    lanes: Vec<Lane>,
    alu: Alu,
    clients: Vec<Client>,
    waiters: Vec<Waiter>,
    replies: VecDeque<Reply>,
    /// Bytes of `replies`.
    unsent: usize,
    recorder: Recorder,
    counters: Counters,
    progress: u64,
    /// Nanoseconds, as the caller last said.
    now: u64,
    /// Answers requests but does no work: a fault that someone has ordered.
    stuck: bool,

    queue: VecDeque<Submission>,
    /// The weight of the queue.
    queued: usize,
    /// The first submission of the queue that has descriptors to start.
    cursor: usize,
    /// How far the operator at work is.
    done: Option<u64>,
    next_ticket: u64,
    completed: u64,
    /// Jobs that failed somewhere.
    dead: VecDeque<Fault>,

    /// Card time at which the next descriptor starts, in picoseconds.
    clock: u64,
    /// The latest end of a transfer since the last fence.
    horizon: u64,
    /// Card time of the last fence, and memory traffic since.
    epoch: (u64, u64),
    /// The latest end since the last fence of what the card did itself.
    own: u64,
    outstanding: usize,
    /// Scratch for a frame.
    frame: Vec<u8>,
    /// Memory of frames that arrived early, reused for the next ones.
    spare: Vec<Vec<u8>>,
}

/// Bytes of a notice, as a frame counts them.
const NOTICE_BYTES: u16 = NOTICE as u16;

/// Entries that are remembered of what has happened to the tickets of a client, and to jobs.
const REMEMBERED: usize = 4096;

impl Card {
    /// A card that has just been switched on. `nonce` differs from one start to the next.
    #[must_use]
    pub fn new(spec: CardSpec, nonce: u32, now: u64) -> Card {
        let mut ports = Vec::with_capacity(spec.ports.len());
        for (index, port) in spec.ports.iter().enumerate() {
            let identity = Identity { serial: spec.serial, port: index as u32 };
            ports.push(Port::new(port.clone(), identity, spec.pace, spec.seed, nonce));
        }
        // Ports that share the card's lanes send in turn.
        let lanes = (0..=ports.len()).map(|_| Lane::default()).collect();
        for port in &mut ports {
            port.link.train(now);
        }
        let capacity = spec.profile.usable().0;
        Card {
            costs: Costs::of(&spec.profile),
            memory: Memory::new(capacity),
            ports,
            lanes,
            alu: Alu::new(),
            clients: Vec::new(),
            waiters: Vec::new(),
            replies: VecDeque::new(),
            unsent: 0,
            recorder: Recorder::new(),
            counters: Counters::default(),
            progress: 0,
            now,
            stuck: false,
            queue: VecDeque::new(),
            queued: 0,
            cursor: 0,
            done: None,
            next_ticket: 1,
            completed: 0,
            dead: VecDeque::new(),
            clock: 0,
            horizon: 0,
            epoch: (0, 0),
            own: 0,
            outstanding: 0,
            frame: Vec::new(),
            spare: Vec::new(),
            spec,
        }
    }

    /// What the card was made from.
    #[must_use]
    pub fn spec(&self) -> &CardSpec {
        &self.spec
    }

    /// Removes the next answer from the queue.
    pub fn reply(&mut self) -> Option<Reply> {
        let reply = self.replies.pop_front()?;
        self.unsent -= reply.bytes.len();
        Some(reply)
    }

    /// Bytes of answers in the queue.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Does what can be done, for about a millisecond.
    pub fn advance(&mut self, now: u64) -> Pulse {
        self.now = now;
        self.tick_links();
        let mut busy = false;
        if !self.stuck {
            for _ in 0..8 {
                let sent = self.pump();
                let (started, more) = self.issue();
                busy = sent || started || more;
                if !busy || more {
                    break;
                }
            }
        }
        self.expire_waiters();
        Pulse { busy, timer: self.next_timer() }
    }

    /// Whether there is work that is not complete.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The state of the link at a port.
    #[must_use]
    pub fn port_state(&self, port: usize) -> LinkState {
        let port = &self.ports[port];
        match port.link.state() {
            LinkState::Up | LinkState::Training if !port.usable() => LinkState::Down,
            state => state,
        }
    }

    /// Slows the card down, or lets it run at its profile's speed again with 1.
    pub fn slow_down(&mut self, factor: f64) {
        self.costs.slow = factor;
    }

    /// Stops or resumes all work; requests are answered all the same.
    pub fn stick(&mut self, on: bool) {
        self.stuck = on;
    }

    /// Puts a wrong bit into everything that is computed.
    pub fn garble(&mut self, on: bool) {
        self.alu.garble = on;
    }

    /// The caller's clock as card time.
    fn wall(&self) -> u64 {
        later(0, self.now.saturating_mul(1000))
    }

    /// Card time now: for an unshaped card the caller's clock.
    fn time(&self) -> u64 {
        match self.spec.pace {
            Pace::Unshaped => self.wall(),
            _ => self.clock,
        }
    }

    /// The end of something that would end at `at`: on an unshaped card it ends now.
    fn ends(&self, at: u64) -> u64 {
        match self.spec.pace {
            Pace::Unshaped => self.wall(),
            _ => at,
        }
    }

    fn note(&mut self, kind: u32, port: usize, a: u64, b: u64) {
        let times = (self.now, self.time());
        self.recorder.note(times, kind, port, a, b);
    }

    fn next_timer(&self) -> Option<u64> {
        // A link without a signal has no timers that anyone serves.
        let alive = self.ports.iter().filter(|port| !port.cut && !port.lost);
        let links = alive.filter_map(|port| port.link.next_timer());
        let waiters = self.waiters.iter().map(|waiter| waiter.deadline);
        links.chain(waiters).chain(self.pace_timer()).min()
    }
}
