// SPDX-License-Identifier: Apache-2.0
//! Messages to and from the ports: cutting into frames, matching with receives, time stamps.
//!
//! A frame's time stamp is when it arrives on the sender's clock; a receive ends at the later of its own
//! start and the last stamp. Nothing on a card's clock depends on when frames really arrive.

use std::cell::Cell;

use spanker_link::{Body, Decoded, Event, decode, encode, seal};
use spanker_runtime::{Fault, FaultKind, Landing, Place, abi};

use super::check::known;
use super::costs::{LATEST, later};
use super::port::{HEAD, Incoming, MessageHead, SMALLEST, Segment, Unexpected, notice_fault};
use super::{Card, Wire};

/// What became of a frame's data.
#[derive(Debug, PartialEq, Eq)]
enum Delivery {
    /// It is where it belongs, or nowhere because its job is dead.
    Yes,
    /// No receive is there for it yet.
    NotYet,
    /// It is not what the receive expects: the job has failed.
    Failed,
}

/// Whether so many bytes can be folded: a peer cuts messages between elements.
fn whole_elements(landing: Landing, bytes: usize) -> bool {
    match landing {
        Landing::Store => true,
        Landing::FoldFirst(fold) | Landing::FoldSecond(fold) => {
            known(fold).is_some_and(|(dtype, _)| bytes.is_multiple_of(dtype.size()))
        }
    }
}

impl Card {
    /// Passes messages to the links. Returns whether anything happened.
    pub(super) fn pump(&mut self) -> bool {
        let before = self.progress;
        for port in 0..self.ports.len() {
            // Whoever begins to receive from a link that is gone waits for nobody.
            if !self.ports[port].receives.is_empty() && !self.ports[port].usable() {
                self.fail_port(port);
            }
            self.drain(port);
            self.send_notices(port);
        }
        for lane in 0..self.lanes.len() {
            while self.pump_lane(lane) {}
        }
        self.progress != before
    }

    /// Passes the first message of a lane to its link. Returns whether the next one may follow.
    fn pump_lane(&mut self, lane: usize) -> bool {
        let Some(send) = self.lanes[lane].queue.front() else { return false };
        let (port, job, issued) = (send.port, send.job, send.issued);
        if !self.ports[port].usable() {
            let fault = self.ports[port].fault(self.spec.serial, job);
            self.fail_job(fault);
            return true;
        }
        let waited = match send.after {
            None => 0,
            Some(id) => match self.ended(id) {
                None => return false,
                Some(end) => end,
            },
        };
        let slow = self.costs.slow;
        let free = self.lanes[lane].free;
        let link = &mut self.ports[port];
        let send = self.lanes[lane].queue.front_mut().expect("it was there");
        let start = issued.max(waited).max(free);
        let (mut sent, mut time) = send.sent.unwrap_or((0, start));
        let mut first = send.sent.is_none();
        let limit =
            (link.frames.payload() as u64).min((link.link.payload_limit() - HEAD) as u64) & !63;
        let mut busy = 0;
        while (first || sent < send.length) && link.link.free_slots() > 0 {
            let part = (send.length - sent).min(limit);
            let head =
                first.then(|| MessageHead { job, tag: send.tag, length: send.length }.to_bytes());
            let bytes = part as usize + if first { HEAD } else { 0 };
            let (cost, broken) = link.frames.send(bytes, slow);
            time = later(time, cost);
            busy = later(busy, cost);
            let from = Place { offset: send.from.offset + sent, ..send.from };
            sent += part;
            first = false;
            let ends = (sent == send.length).then_some((send.id, time));
            let (stamp, broken) = (later(time, link.frames.latency), Cell::new(broken.min(3)));
            let segment = Segment::Data { head, from, length: part as u32, stamp, broken, ends };
            let pushed = link.link.push(segment, bytes as u16);
            debug_assert!(pushed.is_ok(), "the window had space");
            self.progress += 1;
        }
        if !first {
            send.sent = Some((sent, time));
        }
        let complete = !first && sent == send.length;
        self.counters.busy_ps = self.counters.busy_ps.saturating_add(busy);
        if complete {
            self.counters.sent += sent;
            self.lanes[lane].free = time;
            self.lanes[lane].queue.pop_front();
        }
        complete
    }

    /// Puts frames of a port on its wire. Says whether there were any.
    pub fn depart(&mut self, index: usize, wire: &mut dyn Wire) -> bool {
        let (now, mut any) = (self.now, false);
        let port = &mut self.ports[index];
        if port.cut || port.lost {
            return false;
        }
        while wire.has_space() {
            let Some((header, body)) = port.link.transmit(now) else { break };
            match body {
                Body::Payload(Segment::Data { head, from, length, stamp, broken, .. }) => {
                    let head = head.as_ref().map_or(&[][..], |head| &head[..]);
                    // Of a job that was given up the buffer may be gone; the length still has to be right.
                    let gone;
                    let data = match self.memory.get(*from, u64::from(*length)) {
                        Some(data) => data,
                        None => {
                            gone = vec![0; *length as usize];
                            &gone
                        }
                    };
                    let (mut start, end) = seal(&header, &[head, data]);
                    if broken.get() > 0 {
                        broken.set(broken.get() - 1);
                        start[(stamp % 12) as usize] ^= 0x10;
                    }
                    wire.put(*stamp, &[&start, head, data, &end]);
                }
                other => {
                    self.frame.clear();
                    match other {
                        Body::Training(bytes) => encode(&header, &[&bytes], &mut self.frame),
                        Body::Payload(Segment::Notice(bytes)) => {
                            encode(&header, &[bytes], &mut self.frame);
                        }
                        _ => encode(&header, &[], &mut self.frame),
                    }
                    wire.put(0, &[&self.frame]);
                }
            }
            self.counters.frames_sent += 1;
            any = true;
        }
        any
    }

    /// A frame has come in at a port.
    pub fn arrived(&mut self, index: usize, stamp: u64, bytes: &[u8]) {
        let now = self.now;
        let port = &mut self.ports[index];
        if port.cut || port.lost {
            return;
        }
        self.counters.frames_received += 1;
        let (header, payload) = match decode(bytes) {
            Decoded::Frame { header, payload, .. } => (header, payload),
            other => {
                let header = match &other {
                    Decoded::Corrupt { header, .. } => header.as_ref(),
                    _ => None,
                };
                self.counters.frames_corrupt += 1;
                port.link.corrupt(header, now);
                return;
            }
        };
        let event = port.link.receive(&header, payload, now);
        match event {
            Event::Deliver if header.kind == spanker_link::Kind::Notice => {
                if let Some(fault) = notice_fault(payload) {
                    port.unexpected.push_back(Unexpected::Dead { job: fault.job });
                    self.noticed(index, fault);
                    self.drain(index);
                } else {
                    port.link.consumed(1);
                }
            }
            Event::Deliver => {
                let waits = !port.unexpected.is_empty() || self.stuck;
                if waits || self.deliver(index, stamp, payload) == Delivery::NotYet {
                    let mut bytes = self.spare.pop().unwrap_or_default();
                    bytes.extend_from_slice(payload);
                    self.ports[index].unexpected.push_back(Unexpected::Data { stamp, bytes });
                }
            }
            other => self.link_event(index, other),
        }
        self.acknowledged(index);
    }

    /// Sends whose last frame was acknowledged are complete.
    fn acknowledged(&mut self, index: usize) {
        while let Some(segment) = self.ports[index].link.acked() {
            if let Segment::Data { ends: Some((id, at)), .. } = segment {
                self.end_transfer(id, at, Some(index));
            }
        }
    }

    fn link_event(&mut self, index: usize, event: Event) {
        match event {
            Event::Trained { peer, resumed } => {
                self.ports[index].peer = Some(peer);
                if self.ports[index].link.payload_limit() < SMALLEST {
                    // No part of a message fits the payload of this peer.
                    self.ports[index].down();
                    self.fail_port(index);
                } else if !resumed {
                    self.begin_anew(index);
                }
                self.note_link(index);
            }
            Event::Faulted(_) => {
                self.note_link(index);
                self.fail_port(index);
            }
            _ => {}
        }
    }

    /// A link has forgotten what it carried. Jobs whose bytes were among it fail.
    fn begin_anew(&mut self, index: usize) {
        let lane = self.lane_of(index);
        let mut sends = self.lanes[lane].queue.iter().filter(|send| send.port == index);
        let mut lost = sends.any(|send| send.sent.is_some());
        let port = &mut self.ports[index];
        while let Some(segment) = port.link.dropped() {
            lost |= matches!(segment, Segment::Data { .. });
        }
        lost |= port.incoming.take().is_some() || !port.unexpected.is_empty();
        port.link.consumed(port.unexpected.len());
        port.unexpected.clear();
        if lost {
            self.fail_port(index);
        }
    }

    /// Timers of the links.
    pub(super) fn tick_links(&mut self) {
        let now = self.now;
        for index in 0..self.ports.len() {
            let port = &mut self.ports[index];
            if port.cut || port.lost {
                continue;
            }
            let event = port.link.tick(now);
            self.link_event(index, event);
        }
    }

    /// Delivers what arrived early, as far as there are receives for it.
    pub(super) fn drain(&mut self, index: usize) {
        if self.stuck {
            return;
        }
        while let Some(unexpected) = self.ports[index].unexpected.pop_front() {
            match unexpected {
                Unexpected::Dead { job } => {
                    let port = &mut self.ports[index];
                    // The message of that job ends here, however much of it has come.
                    if port.incoming.is_some_and(|incoming| incoming.head.job == job) {
                        port.incoming = None;
                    }
                    port.link.consumed(1);
                }
                Unexpected::Data { stamp, mut bytes } => match self.deliver(index, stamp, &bytes) {
                    Delivery::NotYet => {
                        self.ports[index].unexpected.push_front(Unexpected::Data { stamp, bytes });
                        return;
                    }
                    Delivery::Yes | Delivery::Failed => {
                        bytes.clear();
                        self.spare.push(bytes);
                    }
                },
            }
        }
    }

    /// Brings a frame's data to where it belongs.
    fn deliver(&mut self, index: usize, stamp: u64, payload: &[u8]) -> Delivery {
        let port = &mut self.ports[index];
        let (incoming, data) = match port.incoming {
            Some(incoming) => (incoming, payload),
            None => match MessageHead::from_bytes(payload) {
                Some(head) => (Incoming { head, got: 0 }, &payload[HEAD..]),
                // No head: nothing that this side ever sends.
                None => {
                    port.link.consumed(1);
                    return Delivery::Yes;
                }
            },
        };
        let Incoming { head, got } = incoming;
        let dead = self.dead.iter().any(|fault| fault.job == head.job);
        let port = &mut self.ports[index];
        // News of its end may be behind it, although so many jobs ended since that it is forgotten.
        let dead = dead || port.unexpected.iter().any(|unexpected| unexpected.ends(head.job));
        let ours = port.receives.front().filter(|receive| receive.job == head.job);
        let waited = match ours {
            _ if dead => 0,
            None => return Delivery::NotYet,
            Some(receive) => match receive.after {
                None => 0,
                Some(id) => match self.ended(id) {
                    None => return Delivery::NotYet,
                    Some(end) => end,
                },
            },
        };
        let port = &mut self.ports[index];
        port.link.consumed(1);
        let got = got.saturating_add(data.len() as u64);
        port.incoming = (got < head.length).then_some(Incoming { head, got });
        if dead {
            return Delivery::Yes;
        }
        let receive = port.receives.front().expect("it was there");
        let (id, issued) = (receive.id, receive.issued);
        let expected = receive.tag == head.tag && receive.length == head.length;
        if !expected || got > head.length || !whole_elements(receive.landing, data.len()) {
            let (card, job) = (port.peer.map_or(0, |peer| peer.serial), head.job);
            self.fail_job(Fault { kind: FaultKind::Mismatch, card, peer: 0, job });
            return Delivery::Failed;
        }
        let at = got - data.len() as u64;
        let (place, landing) = (receive.into, receive.landing);
        self.land(Place { offset: place.offset + at, ..place }, data, landing);
        self.counters.received += data.len() as u64;
        self.progress += 1;
        if got == head.length {
            self.ports[index].receives.pop_front();
            self.end_transfer(id, issued.max(waited).max(stamp).min(LATEST), None);
        }
        Delivery::Yes
    }

    fn land(&mut self, place: Place, data: &[u8], landing: Landing) {
        let local = self.memory.get_mut(place, data.len() as u64).expect("it was checked");
        match landing {
            Landing::Store => local.copy_from_slice(data),
            Landing::FoldFirst(fold) => {
                self.alu.fold(local, data, known(fold).expect("it was checked"), true);
            }
            Landing::FoldSecond(fold) => {
                self.alu.fold(local, data, known(fold).expect("it was checked"), false);
            }
        }
    }

    /// What the card waits for, if it waits for another card: the port, and the number of the activity.
    pub(super) fn waits_for(&self) -> Option<(usize, u32)> {
        let receiving = self.ports.iter().position(|port| !port.receives.is_empty());
        if let Some(port) = receiving {
            return Some((port, abi::ACTIVITY_RECEIVING));
        }
        let sending =
            self.queue.iter().find_map(|s| (0..self.ports.len()).find(|&port| s.sends_on(port)));
        sending.map(|port| (port, abi::ACTIVITY_SENDING))
    }
}
