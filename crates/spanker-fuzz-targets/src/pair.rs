// SPDX-License-Identifier: Apache-2.0
//! Two linked cards in virtual time, each with a program that guards a buffer. Another program does what it
//! likes; at the end the guarded bytes are as they were and the card still answers.

use std::collections::VecDeque;
use std::sync::OnceLock;

use bytemuck::{Pod, bytes_of, pod_read_unaligned};
use spanker_runtime::abi::{
    MESSAGE_MAGIC, Ping, RawAccess, RawAllocate, RawMessage, RawRead, Request,
};
use spanker_runtime::message::{HEAD_BYTES, Message};
use spanker_topology::{Bytes, Cluster, Profile, Shape};
use spanker_twin::{Card, CardSpec, ClientId, Pace, Wire, specs};

/// The program that must not be harmed.
pub const GUARD: ClientId = ClientId(1);
/// The program that does what it likes.
pub const HOSTILE: ClientId = ClientId(2);
/// Bytes of the guarded buffer.
const GUARDED: usize = 4096;
/// Nanoseconds of a step.
const STEP: u64 = 20_000;

/// A card's small memory, so that nothing that fits it is slow.
const MEMORY: u64 = 1 << 20;

fn specs_of(pace: Pace) -> &'static [CardSpec] {
    static ALL: [OnceLock<Vec<CardSpec>>; 3] = [OnceLock::new(), OnceLock::new(), OnceLock::new()];
    ALL[pace as usize].get_or_init(|| {
        let profile = Profile::builtin("rev-a").expect("it is built in");
        let ring = Cluster::uniform(profile, 2, Shape::Ring).expect("two cards make a ring");
        let mut specs = specs(&ring, pace, 1).expect("links go both ways");
        for spec in &mut specs {
            spec.profile.memory.capacity.value = Bytes(MEMORY);
            spec.profile.memory.reserved.value = Bytes(0);
        }
        specs
    })
}

/// A pace by a number.
pub fn pace(number: u8) -> Pace {
    [Pace::Card, Pace::Wall, Pace::Unshaped][usize::from(number % 3)]
}

/// Frames that one card has sent.
#[derive(Default)]
pub struct SentFrames {
    /// When each was sent, and its bytes.
    pub frames: VecDeque<(u64, Vec<u8>)>,
}

impl Wire for SentFrames {
    fn has_space(&self) -> bool {
        self.frames.len() < 64
    }

    fn put(&mut self, stamp: u64, parts: &[&[u8]]) {
        self.frames.push_back((stamp, parts.concat()));
    }
}

/// One card with a guarded buffer.
pub struct Guarded {
    /// The card.
    pub card: Card,
    /// Its time in nanoseconds.
    pub now: u64,
    buffer: u64,
}

impl Guarded {
    /// The card with a number of two, with both programs connected.
    pub fn new(pace: Pace, index: usize) -> Guarded {
        let mut card = Card::new(specs_of(pace)[index].clone(), 7 + index as u32, 0);
        card.connect(GUARD, 1);
        card.connect(HOSTILE, 2);
        let mut guarded = Guarded { card, now: 0, buffer: 0 };
        guarded.buffer = guarded.allocate(GUARD, GUARDED as u64);
        let access = guarded.access();
        let (status, ..) = guarded.ask(GUARD, access, &[0xA7; GUARDED]);
        assert_eq!(status, 0, "the guarded buffer takes its bytes");
        guarded
    }

    fn access(&self) -> RawAccess {
        RawAccess { address: 0, length: GUARDED as u64, buffer: self.buffer, offset: 0 }
    }

    /// A client's new buffer.
    pub fn allocate(&mut self, client: ClientId, length: u64) -> u64 {
        let (status, raw, _) = self.ask(client, RawAllocate { length, buffer: 0 }, &[]);
        assert_eq!(status, 0, "there is room for {length} bytes");
        raw.buffer
    }

    /// A request that is answered at once: the status, the struct and the further bytes.
    pub fn ask<R: Request + Pod>(
        &mut self,
        client: ClientId,
        request: R,
        payload: &[u8],
    ) -> (i32, R, Vec<u8>) {
        self.drop_replies();
        let argument = bytes_of(&request);
        let used = HEAD_BYTES + argument.len() + payload.len();
        let message = Message { number: R::NUMBER, sequence: 99, argument, payload, used };
        self.card.request(client, &message, self.now);
        let reply = self.card.reply().expect("every request is answered");
        let head: RawMessage = pod_read_unaligned(&reply.bytes[..HEAD_BYTES]);
        assert_eq!((reply.client, head.sequence, head.number), (client, 99, R::NUMBER));
        if head.status != 0 {
            return (head.status, request, Vec::new());
        }
        let (argument, payload) = reply.bytes[HEAD_BYTES..].split_at(head.argument as usize);
        (0, pod_read_unaligned(argument), payload.to_vec())
    }

    /// Takes answers that nobody waits for. Each of them is a message for a program that is there.
    pub fn drop_replies(&mut self) {
        while let Some(reply) = self.card.reply() {
            let head: RawMessage = pod_read_unaligned(&reply.bytes[..HEAD_BYTES]);
            assert_eq!(head.magic, MESSAGE_MAGIC);
            let length = HEAD_BYTES + (head.argument + head.payload) as usize;
            assert_eq!(reply.bytes.len(), length, "an answer is as long as it says");
            assert!(reply.client == GUARD || reply.client == HOSTILE);
        }
        assert_eq!(self.card.unsent(), 0);
    }

    /// The guarded bytes are as they were, and the card answers.
    pub fn check(&mut self) {
        let access = RawRead(self.access());
        let (status, _, bytes) = self.ask(GUARD, access, &[]);
        assert_eq!(status, 0);
        assert!(bytes == [0xA7; GUARDED], "bytes of another program have changed");
        let (status, ..) = self.ask(GUARD, Ping, &[]);
        assert_eq!(status, 0, "a card answers");
    }
}

/// Two cards whose ports 0 are joined.
pub struct Pair {
    /// The cards.
    pub ends: [Guarded; 2],
    /// What each card has sent and the other has not received.
    pub sent: [SentFrames; 2],
}

impl Pair {
    /// Two cards whose link has been trained.
    pub fn new(pace: Pace) -> Pair {
        let mut pair = Pair {
            ends: [Guarded::new(pace, 0), Guarded::new(pace, 1)],
            sent: [SentFrames::default(), SentFrames::default()],
        };
        pair.steps(6);
        pair
    }

    /// Lets time go on for both.
    pub fn steps(&mut self, count: usize) {
        for _ in 0..count {
            for side in 0..2 {
                let end = &mut self.ends[side];
                for (stamp, bytes) in std::mem::take(&mut self.sent[1 - side].frames) {
                    end.card.arrived(0, stamp, &bytes);
                }
                end.now += STEP;
                end.card.advance(end.now);
                end.card.depart(0, &mut self.sent[side]);
                end.drop_replies();
            }
        }
    }
}
