// SPDX-License-Identifier: Apache-2.0
//! One end of a simulated link with its caller: it sends numbered payloads and checks the peer's.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::TICK;
use super::case::{Case, Stall};
use super::wire::{Medium, Packet};
use crate::{Body, Decoded, Event, Header, Kind, Link, LinkState, decode, encode};

/// A payload: its number, from which everything else follows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    number: u64,
    length: u16,
}

#[derive(Debug)]
pub(super) struct End {
    pub link: Link<Item>,
    rng: Pcg64Mcg,
    /// Of the payloads that this end sends and of those that it hears.
    keys: [u64; 2],
    frames: u64,
    fixed_length: bool,
    notices: bool,
    pushed: u64,
    pub acked: u64,
    pub delivered: u64,
    pub bytes: u64,
    trained: bool,
    stream: Vec<u8>,
    stall: Option<Stall>,
    stalled_until: u64,
    unconsumed: usize,
    window: usize,
    scratch: Vec<u8>,
}

impl End {
    pub fn new(case: &Case, side: usize) -> Self {
        let key = |side: usize| scramble(case.seed ^ (side as u64) << 63);
        End {
            link: Link::new(case.ends[side]),
            rng: Pcg64Mcg::seed_from_u64(key(side)),
            keys: [key(side), key(1 - side)],
            frames: case.frames[side],
            fixed_length: case.fixed_length,
            notices: case.notices,
            pushed: 0,
            acked: 0,
            delivered: 0,
            bytes: 0,
            trained: false,
            stream: Vec::new(),
            stall: case.stall,
            stalled_until: 0,
            unconsumed: 0,
            window: usize::from(case.ends[side].window),
            scratch: Vec::new(),
        }
    }

    /// Everything sent was acknowledged, and everything of the peer's was delivered.
    pub fn is_done(&self, peer: &End) -> bool {
        self.acked == self.frames && self.delivered == peer.frames
    }

    /// Queues what fits the window and puts a frame on the wire if that is free.
    pub fn pump(&mut self, now: u64, medium: &mut Medium) -> Result<(), String> {
        self.collect_acked()?;
        while self.pushed < self.frames && self.queue_next() {
            self.pushed += 1;
        }
        if medium.free > now {
            return Ok(());
        }
        let lanes = self.link.lanes();
        if let Some((header, body)) = self.link.transmit(now / TICK) {
            let mut bytes = medium.buffer();
            match body {
                Body::Empty => encode(&header, &[], &mut bytes),
                Body::Training(hello) => encode(&header, &[&hello], &mut bytes),
                Body::Payload(item) => {
                    fill(self.keys[0], *item, &mut self.scratch);
                    encode(&header, &[&self.scratch], &mut bytes);
                }
            }
            medium.send(bytes, lanes, now);
        }
        Ok(())
    }

    fn queue_next(&mut self) -> bool {
        let limit = self.link.payload_limit() as u64;
        let random = scramble(self.keys[0] ^ self.pushed);
        let length = if self.fixed_length { limit } else { random % (limit + 1) } as u16;
        let item = Item { number: self.pushed, length };
        if self.is_notice(self.pushed) {
            self.link.notify(item, length).is_ok()
        } else {
            self.link.push(item, length).is_ok()
        }
    }

    fn is_notice(&self, number: u64) -> bool {
        self.notices && number % 61 == 60
    }

    fn collect_acked(&mut self) -> Result<(), String> {
        while let Some(item) = self.link.acked() {
            if item.number != self.acked {
                return Err(format!("frame {} acknowledged, not {}", item.number, self.acked));
            }
            self.acked += 1;
        }
        if self.link.state() == LinkState::Up
            && let Some(item) = self.link.dropped()
        {
            return Err(format!("frame {} dropped by a link that is up", item.number));
        }
        Ok(())
    }

    /// When something can happen at this end.
    pub fn next(&self, now: u64, out: &Medium, incoming: &Medium) -> Option<u64> {
        let timer = self.link.next_timer().map(|tick| tick * TICK);
        let wire = [Some(out.free), Some(self.stalled_until)];
        let events = wire.into_iter().flatten().filter(|at| *at > now);
        events
            .chain(timer.map(|at| if at > now { at } else { now + TICK }))
            .chain(incoming.next())
            .min()
    }

    pub fn tick(&mut self, now: u64) -> Result<(), String> {
        if now >= self.stalled_until && self.unconsumed > 0 {
            self.link.consumed(self.unconsumed);
            self.unconsumed = 0;
        }
        if self.link.next_timer().is_some_and(|tick| tick * TICK <= now) {
            let event = self.link.tick(now / TICK);
            return self.note(event);
        }
        Ok(())
    }

    /// Receives bytes from the wire. Frames are cut out of the stream, as a real receiver has to.
    pub fn hear(&mut self, packet: &Packet, now: u64) -> Result<(), String> {
        let mut stream = std::mem::take(&mut self.stream);
        stream.extend_from_slice(&packet.bytes);
        let mut at = 0;
        while at < stream.len() {
            match decode(&stream[at..]) {
                Decoded::Frame { header, payload, used } => {
                    let event = self.link.receive(&header, payload, now / TICK);
                    self.note(event)?;
                    if event == Event::Deliver {
                        self.deliver(&header, payload, now)?;
                    }
                    at += used;
                }
                Decoded::Corrupt { skip, header } => {
                    self.link.corrupt(header.as_ref(), now / TICK);
                    at += skip;
                }
                Decoded::Incomplete { .. } => break,
            }
        }
        stream.drain(..at);
        self.stream = stream;
        Ok(())
    }

    fn note(&mut self, event: Event) -> Result<(), String> {
        if let Event::Trained { resumed, .. } = event {
            if self.trained && !resumed {
                return Err("training lost the streams".to_owned());
            }
            self.trained = true;
        }
        Ok(())
    }

    fn deliver(&mut self, header: &Header, payload: &[u8], now: u64) -> Result<(), String> {
        let number = self.delivered;
        let item = Item { number, length: payload.len() as u16 };
        fill(self.keys[1], item, &mut self.scratch);
        if self.scratch != payload {
            return Err(format!("payload {number} is not the one that was sent"));
        }
        if (header.kind == Kind::Notice) != self.is_notice(number) {
            return Err(format!("frame {number} came as {:?}", header.kind));
        }
        self.delivered += 1;
        self.bytes += payload.len() as u64;
        self.unconsumed += 1;
        if self.unconsumed > self.window {
            return Err(format!("{} frames for a buffer of {}", self.unconsumed, self.window));
        }
        if let Some(stall) = self.stall
            && now >= self.stalled_until
            && self.rng.random::<f64>() < stall.chance
        {
            self.stalled_until = now + self.rng.random_range(0..=stall.most * TICK);
        }
        Ok(())
    }
}

/// The finalizer of `SplitMix64`.
pub(super) fn scramble(mut value: u64) -> u64 {
    value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// The bytes of a payload. They depend on its length too, so one that is cut short is wrong.
fn fill(key: u64, item: Item, out: &mut Vec<u8>) {
    out.resize(usize::from(item.length), 0);
    let mut state = scramble(key ^ item.number ^ u64::from(item.length) << 40);
    for place in out.chunks_mut(8) {
        state = (state ^ state >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9).rotate_left(23);
        place.copy_from_slice(&state.to_le_bytes()[..place.len()]);
    }
}
