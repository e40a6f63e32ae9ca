// SPDX-License-Identifier: Apache-2.0
//! One end of a link: what it is in, what it says next, what it makes of what it hears.
//!
//! The README beside this crate has the states and the failure that each rule prevents.

mod handshake;

use spanker_topology::{LinkState, Saturation};

use crate::config::{Config, Identity, SHRUNK_PAYLOAD};
use crate::counters::Counters;
use crate::event::{Body, Event, Fault};
use crate::frame::{Header, Kind};
use crate::policy::Policy;
use crate::receive::{Arrival, Receiver};
use crate::send::Sender;

/// The other end, as far as this one has heard of it.
#[derive(Debug, Clone, Copy)]
struct Peer {
    identity: Identity,
    session: u32,
    birth: u32,
    window: u8,
    payload: u16,
}

/// One end of a full-duplex link. `P` is what the caller stores with a frame until it is acknowledged; the
/// link never reads it.
///
/// ```
/// use spanker_link::{Body, Config, Event, Identity, Link, TRAINING_BYTES};
/// use spanker_topology::LinkState;
///
/// let end = |serial| Link::<&str>::new(Config::nanoseconds(Identity { serial, port: 0 }, 1));
/// let (mut left, mut right) = (end(1), end(2));
/// left.train(0);
/// right.train(0);
/// let mut heard = Vec::new();
/// for now in (0..200_000).step_by(20_000) {
///     if left.free_slots() > 0 && heard.is_empty() {
///         left.push("hello", 5).unwrap();
///     }
///     for _ in 0..3 {
///         for (from, to) in [(0, 1), (1, 0)] {
///             let (from, to) =
///                 if from < to { (&mut left, &mut right) } else { (&mut right, &mut left) };
///             // A real wire carries bytes: `encode` on one side, `decode` on the other.
///             if let Some((header, body)) = from.transmit(now) {
///                 let event = match body {
///                     Body::Empty => to.receive(&header, &[], now),
///                     Body::Training(bytes) => to.receive(&header, &bytes, now),
///                     Body::Payload(text) => {
///                         let event = to.receive(&header, text.as_bytes(), now);
///                         if event == Event::Deliver {
///                             heard.push(*text);
///                         }
///                         event
///                     }
///                 };
///                 assert!(!matches!(event, Event::Faulted(_)));
///             }
///         }
///     }
///     if !heard.is_empty() {
///         break;
///     }
/// }
/// assert_eq!(left.state(), LinkState::Up);
/// assert_eq!(heard, ["hello"]);
/// assert_eq!(left.acked(), Some("hello"));
/// ```
#[derive(Debug)]
pub struct Link<P> {
    config: Config,
    state: LinkState,
    fault: Option<Fault>,
    sender: Sender<P>,
    receiver: Receiver,
    policy: Policy,
    counters: Counters,
    lanes: u8,
    /// Lanes as announced in training frames of this session.
    announced_lanes: u8,
    payload_limit: usize,
    peer: Option<Peer>,
    session: u32,
    /// Ends when this end loses its streams.
    life: u32,
    /// The life of the peer that shares the streams; 0 for none.
    knows: u32,
    /// `knows` as it was when this training began; both ends decide from this.
    announced_knows: u32,
    /// When the next training frame goes out, in training.
    train_at: u64,
    /// When the training has failed.
    train_until: u64,
    /// The peer still waits for a training frame, although this end is up.
    answer_due: bool,
    /// When there has been no progress for too long.
    deadline: Option<u64>,
    attempts: u32,
    probe_due: bool,
    in_garbage: bool,
}

impl<P> Link<P> {
    /// An end that is DOWN.
    ///
    /// # Panics
    ///
    /// When a value of the configuration is one that no link can work with.
    #[must_use]
    pub fn new(config: Config) -> Self {
        config.check();
        let first = config.nonce.wrapping_mul(0x9E37_79B1).max(1);
        Link {
            config,
            state: LinkState::Down,
            fault: None,
            sender: Sender::new(),
            receiver: Receiver::new(config.window, config.ack_every),
            policy: Policy::new(config.saturation),
            counters: Counters::default(),
            lanes: config.lanes,
            announced_lanes: config.lanes,
            payload_limit: usize::from(config.payload),
            peer: None,
            session: first,
            life: first,
            knows: 0,
            announced_knows: 0,
            train_at: 0,
            train_until: 0,
            answer_due: false,
            deadline: None,
            attempts: 0,
            probe_due: false,
            in_garbage: false,
        }
    }

    /// Where the link is.
    #[must_use]
    pub fn state(&self) -> LinkState {
        self.state
    }

    /// Why the link is in FAULT.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Who is at the other end, while the link is up.
    #[must_use]
    pub fn peer(&self) -> Option<Identity> {
        self.peer.filter(|_| self.state == LinkState::Up).map(|peer| peer.identity)
    }

    /// Lanes in use.
    #[must_use]
    pub fn lanes(&self) -> u8 {
        self.lanes
    }

    /// Bytes that a frame should carry at most: the smaller of both ends' payloads, or 512 after the
    /// policy has shrunk frames. What is queued already stays as it is.
    #[must_use]
    pub fn payload_limit(&self) -> usize {
        self.payload_limit
    }

    /// What has been counted since this end was made.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Starts training: from DOWN and FAULT with all lanes, from UP with those in use, keeping what
    /// is queued. An end in training goes on.
    pub fn train(&mut self, now: u64) {
        match self.state {
            LinkState::Training => {}
            LinkState::Up => self.begin_training(now),
            _ => {
                self.lanes = self.config.lanes;
                self.fault = None;
                self.policy = Policy::new(self.config.saturation);
                self.begin_training(now);
            }
        }
    }

    /// The signal is gone: DOWN. What had no acknowledgement is among [`Link::dropped`].
    pub fn cut(&mut self) {
        self.lose_streams();
        self.fault = None;
        self.state = LinkState::Down;
    }

    /// Data frames that may be queued now.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        if self.state == LinkState::Up { self.sender.free_slots() } else { 0 }
    }

    /// Queues a data frame with so many bytes of payload.
    ///
    /// # Errors
    ///
    /// Gives the payload back when [`Link::free_slots`] is 0, or when it is longer than a slot of
    /// the peer's buffer.
    pub fn push(&mut self, payload: P, length: u16) -> Result<(), P> {
        if self.free_slots() == 0 || !self.fits(length) {
            return Err(payload);
        }
        self.sender.push(payload, length, Kind::Data);
        Ok(())
    }

    /// Queues a notice: in order with data, but allowed into the credits that data leaves.
    ///
    /// # Errors
    ///
    /// As [`Link::push`].
    pub fn notify(&mut self, payload: P, length: u16) -> Result<(), P> {
        let up = self.state == LinkState::Up;
        if !up || self.sender.free_notice_slots() == 0 || !self.fits(length) {
            return Err(payload);
        }
        self.sender.push(payload, length, Kind::Notice);
        Ok(())
    }

    fn fits(&self, length: u16) -> bool {
        let slot = self.peer.map_or(0, |peer| peer.payload);
        length <= slot.min(self.config.payload)
    }

    /// The next frame for the wire: training, then a request for a replay, then replays, new frames,
    /// and an acknowledgement if none of these carried it.
    pub fn transmit(&mut self, now: u64) -> Option<(Header, Body<'_, P>)> {
        match self.state {
            LinkState::Training if now >= self.train_at => {
                self.train_at = now.saturating_add(self.config.train_every);
                Some(self.training_frame())
            }
            LinkState::Up => self.transmit_up(now),
            _ => None,
        }
    }

    fn transmit_up(&mut self, now: u64) -> Option<(Header, Body<'_, P>)> {
        if self.answer_due {
            self.answer_due = false;
            return Some(self.training_frame());
        }
        if self.receiver.nak_due() {
            let seq = self.receiver.asked();
            self.counters.naks_sent += 1;
            return Some((Header { seq, ..self.header(Kind::Nak, false) }, Body::Empty));
        }
        if self.sender.has_due() {
            let mut header = self.header(Kind::Data, false);
            let due = self.sender.next()?;
            header.kind = due.kind;
            header.last = due.last;
            header.length = due.length;
            header.seq = due.seq;
            *(if due.again { &mut self.counters.replayed } else { &mut self.counters.sent }) += 1;
            self.deadline.get_or_insert(now.saturating_add(self.config.retry));
            return Some((header, Body::Payload(due.payload)));
        }
        if self.receiver.ack_due() || self.probe_due {
            let probe = std::mem::take(&mut self.probe_due);
            self.counters.acks_sent += 1;
            return Some((self.header(Kind::Ack, probe), Body::Empty));
        }
        None
    }

    /// A header without payload. Every frame carries the acknowledgement and the limit.
    fn header(&mut self, kind: Kind, last: bool) -> Header {
        self.receiver.announced();
        Header {
            kind,
            last,
            session: self.session as u16,
            length: 0,
            seq: 0,
            ack: self.receiver.expected(),
            credit: self.receiver.limit() as u8,
        }
    }

    /// Processes a frame that [`crate::decode`] found.
    pub fn receive(&mut self, header: &Header, payload: &[u8], now: u64) -> Event {
        self.in_garbage = false;
        if header.kind == Kind::Train {
            return self.receive_training(header, payload, now);
        }
        let session = self.peer.map(|peer| peer.session as u16);
        if self.state != LinkState::Up || session != Some(header.session) {
            self.counters.stale += 1;
            return Event::Nothing;
        }
        self.acknowledge(header, now);
        if header.kind.is_control() {
            if header.kind == Kind::Ack && header.last {
                self.receiver.request_ack();
            }
            return Event::Nothing;
        }
        if payload.len() > usize::from(self.config.payload) {
            self.counters.overrun += 1;
            return Event::Nothing;
        }
        match self.receiver.arrive(header) {
            Arrival::InOrder => {
                self.counters.delivered += 1;
                return Event::Deliver;
            }
            Arrival::Duplicate => self.counters.duplicate += 1,
            Arrival::OutOfOrder => self.counters.out_of_order += 1,
            Arrival::Overrun => self.counters.overrun += 1,
        }
        Event::Nothing
    }

    /// The acknowledgement and the credit, which every frame carries.
    fn acknowledge(&mut self, header: &Header, now: u64) {
        let window = self.peer.map_or(0, |peer| peer.window);
        let Some((frames, credits)) = self.sender.acknowledge(header.ack, header.credit, window)
        else {
            return;
        };
        self.counters.acked += frames as u64;
        let broken = header.kind == Kind::Nak && self.sender.serve(header.seq);
        if header.kind == Kind::Nak {
            self.counters.naks_received += 1;
        }
        self.policy.count(frames, broken, now);
        // While only credit is missing, an answer without any still shows that the peer is there.
        if frames > 0 || credits > 0 || self.sender.is_empty() {
            self.attempts = 0;
            self.deadline = None;
        }
        self.watch(now);
    }

    /// Sets the timer while something is owed: an acknowledgement, or credit for data.
    fn watch(&mut self, now: u64) {
        let starved = self.sender.is_empty() && self.sender.free_slots() == 0;
        if self.sender.is_waiting() || starved {
            self.deadline.get_or_insert(now.saturating_add(self.config.retry));
        } else {
            self.deadline = None;
        }
    }

    /// Bytes arrived that are not a frame, or a broken one; `header` as [`crate::decode`] gave it.
    pub fn corrupt(&mut self, header: Option<&Header>, _now: u64) {
        // One broken frame may arrive as several runs of garbage.
        let counted = header.is_none() && self.in_garbage;
        self.in_garbage = header.is_none();
        if counted {
            return;
        }
        self.counters.corrupt += 1;
        if self.state != LinkState::Up {
            return;
        }
        match header {
            None => self.receiver.garbage(),
            Some(header) if self.peer.is_some_and(|peer| peer.session as u16 == header.session) => {
                if matches!(header.kind, Kind::Data | Kind::Notice) {
                    self.receiver.broken(header);
                }
            }
            Some(_) => {}
        }
    }

    /// The caller has freed the buffer of so many delivered frames.
    pub fn consumed(&mut self, frames: usize) {
        self.receiver.consumed(frames);
    }

    /// Answers at once, without waiting for more frames.
    pub fn flush_ack(&mut self) {
        self.receiver.request_ack();
    }

    /// The next payload, in order, that the peer has acknowledged.
    pub fn acked(&mut self) -> Option<P> {
        self.sender.pop_acked()
    }

    /// The next payload, in order, that was queued and is given up without acknowledgement. The
    /// peer may have received it or not.
    pub fn dropped(&mut self) -> Option<P> {
        self.sender.pop_dropped()
    }

    /// Does what is due by the clock.
    pub fn tick(&mut self, now: u64) -> Event {
        match self.state {
            LinkState::Training if now >= self.train_until => {
                self.counters.failed_trainings += 1;
                let verdict = self.policy.training_failed(self.lanes);
                self.obey(verdict, Fault::Untrainable, now);
                if self.state == LinkState::Training && verdict == Saturation::Keep {
                    self.begin_training(now);
                }
                self.fault.map_or(Event::Retraining, Event::Faulted)
            }
            LinkState::Up => {
                if self.deadline.is_some_and(|deadline| now >= deadline) {
                    self.deadline = None;
                    self.attempts += 1;
                    self.counters.timeouts += 1;
                    if self.attempts > self.config.attempts {
                        return self.give_up(Fault::Silent);
                    }
                    self.probe_due = !self.sender.rewind();
                    self.watch(now);
                }
                let verdict = self.policy.judge(now, self.lanes);
                self.obey(verdict, Fault::Saturated, now)
            }
            _ => Event::Nothing,
        }
    }

    /// When [`Link::tick`] or [`Link::transmit`] has something to do next, if nothing arrives before.
    #[must_use]
    pub fn next_timer(&self) -> Option<u64> {
        match self.state {
            LinkState::Training => Some(self.train_at.min(self.train_until)),
            LinkState::Up => match (self.deadline, self.policy.end()) {
                (Some(deadline), Some(end)) => Some(deadline.min(end)),
                (deadline, end) => deadline.or(end),
            },
            _ => None,
        }
    }

    fn obey(&mut self, verdict: Saturation, fault: Fault, now: u64) -> Event {
        match verdict {
            Saturation::Keep => Event::Nothing,
            Saturation::ShrinkFrames => {
                if self.payload_limit <= SHRUNK_PAYLOAD {
                    return Event::Nothing;
                }
                self.payload_limit = SHRUNK_PAYLOAD;
                self.counters.shrinks += 1;
                Event::Shrunk
            }
            Saturation::Fault => self.give_up(fault),
            verdict => {
                if verdict == Saturation::HalveLanes {
                    self.lanes /= 2;
                    // Fewer lanes may be clean ones, for which large frames are right again.
                    self.payload_limit = usize::from(self.config.payload);
                    self.counters.halvings += 1;
                }
                self.begin_training(now);
                Event::Retraining
            }
        }
    }

    fn lose_streams(&mut self) {
        self.sender.reset();
        self.receiver.reset();
        self.policy.clear();
        self.life = self.life.wrapping_add(1).max(1);
        self.knows = 0;
        self.peer = None;
        self.deadline = None;
        self.payload_limit = usize::from(self.config.payload);
    }

    fn give_up(&mut self, fault: Fault) -> Event {
        self.lose_streams();
        self.state = LinkState::Error;
        self.fault = Some(fault);
        Event::Faulted(fault)
    }
}
