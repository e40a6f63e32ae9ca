// SPDX-License-Identifier: Apache-2.0
//! Whole groups of cards in one process and in virtual time: the cards of the twin, the link protocol between
//! them, programs that use them, and faults, all from one seed. The same seed gives the same run.
//!
//! A program is ordinary code that uses [`SpankerControl`]: a request runs the world until its answer is there,
//! and a wait that nobody answers passes in virtual time, not in the program's.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytemuck::pod_read_unaligned;
use nix::errno::Errno;
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_runtime::abi::{Direction, MESSAGE_MAGIC, RawMessage, request};
use spanker_runtime::message::{HEAD_BYTES, Parsed, head, parse};
use spanker_runtime::{Call, Error, Payload, Result, SpankerControl, Transport};

use crate::card::{Card, ClientId, Wire};
use crate::spec::CardSpec;

/// Something that goes wrong, or right again.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Disturbance {
    /// The card is gone.
    Kill(usize),
    /// The card does nothing at all any more, and answers nobody.
    Stop(usize),
    /// The card answers, but does no work.
    Stick(usize),
    /// The card computes garbage.
    Garble(usize),
    /// The card is so many times as slow.
    Slow(usize, f64),
    /// The link at a card's port is cut, at both ends.
    Cut(usize, usize),
    /// The link at a card's port is joined again.
    Mend(usize, usize),
    /// The link at a card's port has bit errors at this rate, both ways.
    Errors(usize, usize, f64),
    /// The card is well again: one that was gone is started anew, without memory of anything.
    Restore(usize),
    /// Every wire loses, repeats and delays frames with this chance, and flips a bit with it.
    Noise(f64),
}

/// A frame on its way.
#[derive(Debug)]
struct Flight {
    due: u64,
    stamp: u64,
    bytes: Vec<u8>,
}

/// The frames that one port has sent.
#[derive(Debug, Default)]
struct SentFrames {
    flights: VecDeque<Flight>,
}

/// Frames that may be on a wire at once.
const WIRE_CAPACITY: usize = 64;

/// Collects what a port puts on its wire.
struct Outbox<'a> {
    flights: &'a mut VecDeque<Flight>,
    now: u64,
    dice: &'a mut Pcg64Mcg,
    noise: f64,
}

impl Wire for Outbox<'_> {
    fn has_space(&self) -> bool {
        self.flights.len() < WIRE_CAPACITY
    }

    fn put(&mut self, stamp: u64, parts: &[&[u8]]) {
        let mut bytes = parts.concat();
        // A wire keeps the order; only noise breaks it.
        let soonest = self.flights.back().map_or(0, |flight| flight.due);
        let mut due = soonest.max(self.now + self.dice.random_range(100..2000));
        if self.noise > 0.0 {
            let mut hit = || self.dice.random::<f64>() < self.noise;
            let (lost, twice, late, flipped) = (hit(), hit(), hit(), hit());
            if lost {
                return;
            }
            if flipped {
                let at = self.dice.random_range(0..bytes.len());
                bytes[at] ^= 1 << self.dice.random_range(0..8u32);
            }
            if twice {
                self.flights.push_back(Flight { due, stamp, bytes: bytes.clone() });
            }
            if late {
                due += 50_000;
            }
        }
        self.flights.push_back(Flight { due, stamp, bytes });
    }
}

/// Everything, at one moment.
#[derive(Debug)]
struct State {
    now: u64,
    dice: Pcg64Mcg,
    noise: f64,
    cards: Vec<Option<Card>>,
    stopped: Vec<bool>,
    specs: Vec<CardSpec>,
    /// By card and port.
    sent: Vec<Vec<SentFrames>>,
    answers: BTreeMap<u64, Vec<u8>>,
    coming: VecDeque<(u64, Disturbance)>,
    clients: u64,
    frames: u64,
}

/// Cards in virtual time.
///
/// ```
/// use spanker_topology::{Cluster, Profile, Shape};
/// use spanker_twin::{Pace, World, specs};
/// let ring = Cluster::uniform(Profile::builtin("rev-a")?, 3, Shape::Ring)?;
/// let world = World::new(specs(&ring, Pace::Card, 1)?, 7);
/// let card = world.control(2);
/// assert_eq!(card.info()?.profile, "rev-a");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
}

impl World {
    /// Cards that have just been switched on, and whose links have been given time to train.
    #[must_use]
    pub fn new(specs: Vec<CardSpec>, seed: u64) -> World {
        let cards: Vec<_> =
            specs.iter().map(|spec| Some(Card::new(spec.clone(), seed as u32, 0))).collect();
        let sent = |spec: &CardSpec| spec.ports.iter().map(|_| SentFrames::default()).collect();
        let mut state = State {
            now: 0,
            dice: Pcg64Mcg::seed_from_u64(seed),
            noise: 0.0,
            stopped: vec![false; cards.len()],
            cards,
            sent: specs.iter().map(sent).collect(),
            specs,
            answers: BTreeMap::new(),
            coming: VecDeque::new(),
            clients: 0,
            frames: 0,
        };
        state.run_until(10_000_000);
        World { state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A program's handle to a card.
    ///
    /// # Panics
    /// If there is no such card.
    #[must_use]
    pub fn control(&self, card: usize) -> SpankerControl {
        SpankerControl::over(self.transport(card))
    }

    /// A program's way to a card, for whoever wants to see or change what passes.
    ///
    /// # Panics
    /// If there is no such card.
    #[must_use]
    pub fn transport(&self, card: usize) -> Box<dyn Transport> {
        let mut state = self.state();
        state.clients += 1;
        let client = state.clients;
        if let Some(card) = &mut state.cards[card] {
            card.connect(ClientId(client), 1);
        }
        drop(state);
        Box::new(Handle { world: self.clone(), card, client, broken: AtomicBool::new(false) })
    }

    /// Lets something happen at once.
    pub fn disturb(&self, what: Disturbance) {
        self.state().disturb(what);
    }

    /// Lets something happen so much later.
    pub fn disturb_in(&self, delay: Duration, what: Disturbance) {
        let mut state = self.state();
        let at = state.now + delay.as_nanos() as u64;
        let place = state.coming.partition_point(|(time, _)| *time <= at);
        state.coming.insert(place, (at, what));
    }

    /// Virtual time since the beginning.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.state().now)
    }

    /// Frames that have been on wires.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.state().frames
    }

    /// Lets time pass.
    pub fn pass(&self, time: Duration) {
        let mut state = self.state();
        let until = state.now + time.as_nanos() as u64;
        state.run_until(until);
    }
}

impl State {
    fn disturb(&mut self, what: Disturbance) {
        let now = self.now;
        match what {
            Disturbance::Kill(card) => {
                self.cards[card] = None;
                for port in 0..self.specs[card].ports.len() {
                    self.sent[card][port].flights.clear();
                    let (peer, peer_port) = self.other_end(card, port);
                    if let Some(peer) = &mut self.cards[peer] {
                        peer.lost(peer_port);
                    }
                }
            }
            Disturbance::Stop(card) => self.stopped[card] = true,
            Disturbance::Stick(card) => self.with(card, |card| card.stick(true)),
            Disturbance::Garble(card) => self.with(card, |card| card.garble(true)),
            Disturbance::Slow(card, factor) => self.with(card, |card| card.slow_down(factor)),
            Disturbance::Cut(card, port) => {
                let (peer, peer_port) = self.other_end(card, port);
                for (card, port) in [(card, port), (peer, peer_port)] {
                    self.sent[card][port].flights.clear();
                    self.with(card, |card| card.cut(port));
                }
            }
            Disturbance::Mend(card, port) => {
                let (peer, peer_port) = self.other_end(card, port);
                for (card, port) in [(card, port), (peer, peer_port)] {
                    self.with(card, |card| card.mend(port, now));
                }
            }
            Disturbance::Errors(card, port, rate) => {
                let (peer, peer_port) = self.other_end(card, port);
                for (card, port) in [(card, port), (peer, peer_port)] {
                    self.with(card, |card| card.set_errors(port, rate));
                }
            }
            Disturbance::Noise(chance) => self.noise = chance,
            Disturbance::Restore(card) => self.restore(card),
        }
    }

    fn restore(&mut self, card: usize) {
        self.stopped[card] = false;
        if let Some(card) = &mut self.cards[card] {
            card.stick(false);
            card.garble(false);
            return card.slow_down(1.0);
        }
        let (now, nonce) = (self.now, self.dice.random());
        self.cards[card] = Some(Card::new(self.specs[card].clone(), nonce, now));
        for port in 0..self.specs[card].ports.len() {
            let (peer, peer_port) = self.other_end(card, port);
            for (card, port) in [(card, port), (peer, peer_port)] {
                self.sent[card][port].flights.clear();
                self.with(card, |card| card.connect_port(port, now));
            }
        }
    }

    fn with(&mut self, card: usize, act: impl FnOnce(&mut Card)) {
        if let Some(card) = &mut self.cards[card] {
            act(card);
        }
    }

    fn other_end(&self, card: usize, port: usize) -> (usize, usize) {
        let port = &self.specs[card].ports[port];
        (port.peer as usize, port.peer_port as usize)
    }

    /// Runs every card once. Returns when something happens next, which is now if something happened.
    fn step(&mut self) -> u64 {
        let mut next = u64::MAX;
        while let Some(&(at, what)) = self.coming.front() {
            if at > self.now {
                next = at;
                break;
            }
            self.coming.pop_front();
            self.disturb(what);
        }
        for index in 0..self.cards.len() {
            if self.stopped[index] {
                continue;
            }
            self.deliver(index);
            let Some(card) = &mut self.cards[index] else { continue };
            let pulse = card.advance(self.now);
            if pulse.busy {
                next = self.now;
            }
            next = next.min(pulse.timer.unwrap_or(u64::MAX).max(self.now + 1));
            for (port, sent) in self.sent[index].iter_mut().enumerate() {
                let (now, dice, noise) = (self.now, &mut self.dice, self.noise);
                let mut outbox = Outbox { flights: &mut sent.flights, now, dice, noise };
                card.depart(port, &mut outbox);
                // Frames for a card that has stopped wait, and nobody waits for them.
                if !self.stopped[self.specs[index].ports[port].peer as usize] {
                    next = next.min(sent.flights.front().map_or(u64::MAX, |flight| flight.due));
                }
            }
            while let Some(reply) = card.reply() {
                self.answers.insert(reply.client.0, reply.bytes);
                next = self.now;
            }
        }
        next
    }

    /// Delivers the frames that are due at a card.
    fn deliver(&mut self, index: usize) {
        for port in 0..self.specs[index].ports.len() {
            let (peer, peer_port) = self.other_end(index, port);
            loop {
                let flights = &mut self.sent[peer][peer_port].flights;
                if flights.front().is_none_or(|flight| flight.due > self.now) {
                    break;
                }
                let flight = flights.pop_front().expect("it is there");
                self.frames += 1;
                if let Some(card) = &mut self.cards[index] {
                    card.arrived(port, flight.stamp, &flight.bytes);
                }
            }
        }
    }

    /// Drops frames for cards that read none: they would stop the clock.
    fn drop_undeliverable(&mut self) {
        for index in 0..self.cards.len() {
            if self.cards[index].is_some() {
                continue;
            }
            for port in 0..self.specs[index].ports.len() {
                let (peer, peer_port) = self.other_end(index, port);
                self.sent[peer][peer_port].flights.clear();
            }
        }
    }

    fn run_until(&mut self, until: u64) {
        while self.now < until {
            let next = self.step();
            self.drop_undeliverable();
            // Time passes even where something happens at once, as it does everywhere.
            self.now = next.max(self.now + 50).min(until);
        }
    }

    /// Runs until a client's answer is there, or so much time has passed.
    fn await_answer(&mut self, client: u64, timeout: Duration) -> Option<Vec<u8>> {
        let until = self.now.saturating_add(timeout.as_nanos() as u64);
        loop {
            if let Some(answer) = self.answers.remove(&client) {
                return Some(answer);
            }
            if self.now >= until {
                return None;
            }
            let next = self.step();
            self.drop_undeliverable();
            self.now = next.max(self.now + 50).min(until);
        }
    }
}

/// A program's way to a simulated card.
#[derive(Debug)]
struct Handle {
    world: World,
    card: usize,
    client: u64,
    /// An answer did not come, so that nobody knows what comes next: as on a socket.
    broken: AtomicBool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.world.state();
        let client = ClientId(self.client);
        state.with(self.card, |card| card.disconnect(client));
        state.answers.remove(&self.client);
    }
}

impl Transport for Handle {
    fn call(&self, call: &mut Call<'_>) -> Result<()> {
        let op = call.name;
        let mut state = self.world.state();
        if state.cards[self.card].is_none() || self.broken.load(Ordering::Relaxed) {
            return Err(Error::Gone { op });
        }
        let sent = match &call.payload {
            Payload::ToCard(bytes) => bytes,
            _ => &[][..],
        };
        let mut bytes = head(call.number, 0, 1, call.argument.len(), sent.len()).to_vec();
        bytes.extend_from_slice(call.argument);
        bytes.extend_from_slice(sent);
        let Parsed::Request(message) = parse(&bytes) else {
            return Err(Error::Ioctl { op, source: Errno::EBADMSG });
        };
        let (now, client) = (state.now, ClientId(self.client));
        state.with(self.card, |card| card.request(client, &message, now));
        let Some(answer) = state.await_answer(self.client, call.timeout) else {
            self.broken.store(true, Ordering::Relaxed);
            return match state.cards[self.card] {
                None => Err(Error::Gone { op }),
                Some(_) => Err(Error::Unresponsive { op, waited: call.timeout }),
            };
        };
        drop(state);
        read_answer(call, &answer)
    }
}

fn read_answer(call: &mut Call<'_>, answer: &[u8]) -> Result<()> {
    let op = call.name;
    let raw: RawMessage = pod_read_unaligned(&answer[..HEAD_BYTES]);
    assert_eq!(raw.magic, MESSAGE_MAGIC, "a card writes heads");
    if raw.status != 0 {
        return Err(Error::Ioctl { op, source: Errno::from_raw(raw.status) });
    }
    let (argument, payload) = answer[HEAD_BYTES..].split_at(raw.argument as usize);
    call.argument.copy_from_slice(argument);
    if let Payload::FromCard(bytes) = &mut call.payload {
        debug_assert!(matches!(request(call.number), Some((_, _, Direction::FromCard))));
        bytes[..payload.len()].copy_from_slice(payload);
    }
    Ok(())
}
