// SPDX-License-Identifier: Apache-2.0
//! How two ends find each other: the training half of a link.

use spanker_topology::LinkState;

use super::{Link, Peer};
use crate::event::{Body, Event, Fault};
use crate::frame::{Header, Kind};
use crate::training::{Hello, TRAINING_BYTES, Unusable};

impl<P> Link<P> {
    pub(super) fn training_frame(&mut self) -> (Header, Body<'_, P>) {
        let header = Header { length: TRAINING_BYTES as u16, ..self.header(Kind::Train, false) };
        let hello = Hello {
            seeking: self.state == LinkState::Training,
            lanes: self.announced_lanes,
            window: self.config.window,
            payload: self.config.payload,
            identity: self.config.identity,
            session: self.session,
            echo: self.peer.map_or(0, |peer| peer.session),
            life: self.life,
            knows: self.announced_knows,
            birth: self.config.nonce,
        };
        (header, Body::Training(hello.to_bytes()))
    }

    /// Queued and unconsumed frames stay; the next session decides whether they still count.
    pub(super) fn begin_training(&mut self, now: u64) {
        self.state = LinkState::Training;
        self.session = self.session.wrapping_add(1).max(1);
        self.counters.trainings += 1;
        self.peer = None;
        self.announced_knows = self.knows;
        self.announced_lanes = self.lanes;
        self.train_at = now;
        self.train_until = now.saturating_add(self.config.train_within);
        self.answer_due = false;
        self.probe_due = false;
        self.deadline = None;
        self.attempts = 0;
        self.policy.clear();
    }

    pub(super) fn receive_training(&mut self, header: &Header, payload: &[u8], now: u64) -> Event {
        if !matches!(self.state, LinkState::Training | LinkState::Up) {
            self.counters.stale += 1;
            return Event::Nothing;
        }
        let hello = match Hello::from_bytes(payload) {
            Ok(hello) => hello,
            Err(Unusable::Version) => return self.give_up(Fault::Version),
            Err(Unusable::Malformed) => {
                self.counters.stale += 1;
                return Event::Nothing;
            }
        };
        if hello.identity == self.config.identity {
            return self.give_up(Fault::SelfConnected);
        }
        if self.state == LinkState::Up {
            self.hail(&hello, now)
        } else {
            self.seek(&hello, header, now)
        }
    }

    /// A training frame for an end that is up.
    fn hail(&mut self, hello: &Hello, now: u64) -> Event {
        let known = self
            .peer
            .is_some_and(|peer| (peer.birth, peer.session) == (hello.birth, hello.session));
        if known && hello.echo == self.session {
            self.answer_due |= hello.seeking;
            return Event::Nothing;
        }
        if !hello.seeking {
            // An answer of an earlier session: whoever sent it is not seeking.
            self.counters.stale += 1;
            return Event::Nothing;
        }
        // The other end began anew, so this one has to.
        self.begin_training(now);
        self.record_peer(hello);
        Event::Retraining
    }

    /// A training frame for an end in training. A session of this end belongs to one start of the
    /// peer: an echo of it from another start may come from a peer that is no more, while the one
    /// that replaced it has heard the same session.
    fn seek(&mut self, hello: &Hello, header: &Header, now: u64) -> Event {
        let known = self.peer.map(|peer| peer.session);
        if let Some(peer) = self.peer {
            let same = peer.birth == hello.birth;
            // Sessions of one start rise; what is behind the last one heard is late.
            let late = same && hello.session.wrapping_sub(peer.session) >= 1 << 31;
            // A peer that has just started seeks, so this is an answer of the one before it.
            let left_over = !same && !hello.seeking;
            if late || left_over {
                self.counters.stale += 1;
                return Event::Nothing;
            }
            if !same {
                self.begin_training(now);
            }
        }
        self.record_peer(hello);
        if known != Some(hello.session) {
            self.train_at = now;
        }
        if hello.echo == self.session { self.complete(hello, header, now) } else { Event::Nothing }
    }

    fn record_peer(&mut self, hello: &Hello) {
        self.peer = Some(Peer {
            identity: hello.identity,
            session: hello.session,
            birth: hello.birth,
            window: hello.window,
            payload: hello.payload,
        });
    }

    fn complete(&mut self, hello: &Hello, header: &Header, now: u64) -> Event {
        // Both ends compute this from the same four numbers, so they agree.
        let resumed = self.announced_knows != 0
            && hello.life == self.announced_knows
            && hello.knows == self.life;
        self.state = LinkState::Up;
        self.knows = hello.life;
        self.lanes = self.announced_lanes.min(hello.lanes);
        self.answer_due = hello.seeking;
        let full = usize::from(self.config.payload.min(hello.payload));
        self.payload_limit = if resumed { self.payload_limit.min(full) } else { full };
        if resumed {
            self.receiver.resume();
            self.sender.rewind();
            self.acknowledge(header, now);
        } else {
            self.sender.reset();
            self.receiver.reset();
            let free = header.credit.wrapping_sub(header.ack as u8);
            self.sender.grant(if free <= hello.window { free } else { 0 });
        }
        self.watch(now);
        Event::Trained { peer: hello.identity, resumed }
    }
}
