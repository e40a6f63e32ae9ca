// SPDX-License-Identifier: Apache-2.0
//! Cards, messages and wires in virtual time.
//!
//! Each card follows a program: work that takes its time, steps of collectives, single messages. A message
//! starts when its sender and every wire and shared resource on its route are free, in the order in
//! which senders ask; it occupies each for its bytes and frames over that resource's rate, and arrives after
//! the latencies of the route and its bytes over the slowest. Where cards pass messages on, each hop of each
//! segment takes its own time. A step of a collective ends when its messages have come and gone and the card's
//! memory has had the time for all that went through it since the step before; then copies and folds follow. The only queue holds one entry for each card
//! that can go on, so the order of events, and with it every figure, is the same on every run.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rand::Rng;
use rand_pcg::Pcg32;
use spanker_topology::{Cluster, ExchangeKind, MESSAGE_HEAD};

use super::flow::Flow;
use crate::program::Cost;
use crate::trace::{Label, Mark, Parts};

/// One thing that a card does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Item {
    /// Busy for so many seconds, in which so many bytes go through the card's memory.
    Work { seconds: f64, bytes: f64, label: Label, op: u32, parts: Parts },
    /// This rank's part of a collective that carries `bytes` in total.
    Collective { flow: u32, rank: u32, group: u32, bytes: f64, label: Label, op: u32 },
    /// A message, which the sender waits for until it has left.
    Send { to: u32, bytes: f64, label: Label, op: u32 },
    /// Waits for the next message from a card.
    Recv { from: u32, label: Label, op: u32 },
    /// Tells a card something by way of the host, which takes so long and no wire.
    Tell { to: u32, seconds: f64 },
    /// Notes that a token is complete.
    Done { token: u32 },
}

/// The number of an item that is no operator of a program.
pub(crate) const OUTSIDE: u32 = u32::MAX;

/// What happens besides the plan. Times are absolute.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disturbance {
    /// For each card, when it dies.
    pub(crate) death: Vec<f64>,
    /// For each card, the factor on its work and from when on it holds.
    pub(crate) slow: Vec<(f64, f64)>,
    /// For each wire, when it dies.
    pub(crate) cut: Vec<f64>,
    /// What bit errors do to messages.
    pub(crate) errors: Option<Errors>,
}

/// Frames that break, at random from a seed, and what each costs.
#[derive(Debug, Clone)]
pub(crate) struct Errors {
    pub(crate) dice: Pcg32,
    /// Bytes of data in a frame.
    pub(crate) payload: f64,
    /// The chance that a frame breaks.
    pub(crate) chance: f64,
    /// The time that a broken frame costs: itself and what was sent until its loss was known.
    pub(crate) penalty: f64,
}

impl Errors {
    /// The time that broken frames add to a message.
    fn delay(&mut self, bytes: f64) -> f64 {
        let expected = (bytes / self.payload).ceil().max(1.0) * self.chance;
        if expected > 30.0 {
            // So many that their number hardly varies.
            return expected * self.penalty;
        }
        // Knuth's way to draw a number of rare events.
        let (limit, mut product, mut broken) = ((-expected).exp(), 1.0, 0u32);
        loop {
            product *= self.dice.random::<f64>();
            if product <= limit {
                return f64::from(broken) * self.penalty;
            }
            broken += 1;
        }
    }
}

/// What messages take on a wire.
#[derive(Debug, Clone, Copy)]
struct WireTime {
    per_byte: f64,
    /// Bytes of data in a frame, and what a frame takes besides them.
    payload: f64,
    per_frame: f64,
    /// What a message's own head takes.
    head: f64,
}

impl WireTime {
    fn plain(rate: f64) -> WireTime {
        WireTime { per_byte: 1.0 / rate, payload: f64::INFINITY, per_frame: 0.0, head: 0.0 }
    }

    fn of(cluster: &Cluster, wire: &spanker_topology::Wire) -> WireTime {
        let rate = wire.bandwidth.0 as f64;
        let ends = [wire.from, wire.to].into_iter().filter(|&node| node < cluster.cards());
        let links: Vec<_> = ends.filter_map(|card| cluster.profile(card).link.as_ref()).collect();
        let framed = links.iter().filter_map(|link| link.framing).next();
        match framed.filter(|_| links.len() == 2) {
            None => WireTime::plain(rate),
            Some(framing) => {
                let payload = framing.payload as f64;
                let more =
                    framing.overhead as f64 + framing.ack_bytes as f64 / framing.ack_every as f64;
                let per_byte = payload / (payload + more) / rate;
                let head = MESSAGE_HEAD as f64 * per_byte;
                WireTime { per_byte, payload, per_frame: more * per_byte, head }
            }
        }
    }

    fn time(&self, bytes: f64) -> f64 {
        let frames = (bytes / self.payload).ceil().max(1.0);
        bytes * self.per_byte + frames * self.per_frame + self.head
    }
}

/// Which wires and shared resources are busy until when.
struct Network<'a> {
    cluster: &'a Cluster,
    free: Vec<f64>,
    /// What each wire takes, then each shared resource.
    times: Vec<WireTime>,
    /// Whether cards pass messages on themselves.
    relays: bool,
    errors: Option<Errors>,
}

/// The least bytes that a relayed message is cut into, the most segments, and what they begin at a multiple of.
const SEGMENT: f64 = 8192.0;
const SEGMENTS: f64 = 64.0;
const SEGMENT_ALIGNMENT: f64 = 64.0;

impl<'a> Network<'a> {
    fn new(cluster: &'a Cluster, start: f64) -> Self {
        let wires = cluster.wires().iter().map(|wire| WireTime::of(cluster, wire));
        let shared = cluster.shared().iter().enumerate().map(|(index, shared)| {
            let plain = WireTime::plain(shared.bandwidth.0 as f64);
            // The lanes of a card carry the frames of its wires.
            let wire = cluster.wires().iter().find(|wire| wire.shared == Some(index));
            let framed = wire
                .map(|wire| WireTime::of(cluster, wire))
                .filter(|_| wire.is_some_and(|wire| wire.bandwidth == shared.bandwidth));
            framed.unwrap_or(plain)
        });
        let times: Vec<WireTime> = wires.chain(shared).collect();
        let kind = cluster.profile(0).link.as_ref().map(|link| link.exchange);
        let relays = kind.unwrap_or_default() == ExchangeKind::Schedules;
        Network { cluster, free: vec![start; times.len()], times, relays, errors: None }
    }

    /// When the wire is free that a message from one card to another leaves by.
    fn wire_free(&self, from: usize, to: usize) -> f64 {
        self.cluster.route(from, to).first().map_or(0.0, |&wire| self.free[wire as usize])
    }

    /// Whether cards between two others pass their messages on.
    fn relayed(&self, route: &[u32]) -> bool {
        let card = |&wire: &u32| self.cluster.wires()[wire as usize].to < self.cluster.cards();
        self.relays && route.len() > 1 && route[..route.len() - 1].iter().all(card)
    }

    /// One segment over one wire: when it has left and when it is there.
    fn hop(&mut self, index: usize, bytes: f64, ready: f64) -> (f64, f64) {
        let wire = &self.cluster.wires()[index];
        let shared = wire.shared.map(|shared| self.cluster.wires().len() + shared);
        let free = shared.map_or(0.0, |shared| self.free[shared]).max(self.free[index]);
        let start = ready.max(free);
        let slower = shared.map_or(0.0, |shared| self.times[shared].time(bytes));
        let left = start + self.times[index].time(bytes).max(slower);
        self.free[index] = left;
        if let Some(shared) = shared {
            self.free[shared] = left;
        }
        (left, left + wire.latency.0)
    }

    /// A message that cards pass on, segment by segment.
    fn relay(&mut self, route: &[u32], bytes: f64, at: f64) -> (f64, f64) {
        let size = match bytes <= SEGMENT {
            true => bytes,
            false => {
                let part = (bytes / SEGMENTS / SEGMENT_ALIGNMENT).ceil() * SEGMENT_ALIGNMENT;
                part.max(SEGMENT)
            }
        };
        let count = if bytes > 0.0 { (bytes / size).ceil() as usize } else { 1 };
        let (mut left, mut arrival) = (at, at);
        for segment in 0..count {
            let part = size.min(bytes - size * segment as f64);
            let mut ready = at;
            for (hop, &wire) in route.iter().enumerate() {
                let (gone, there) = self.hop(wire as usize, part, ready);
                ready = there;
                if hop == 0 {
                    left = gone;
                }
            }
            arrival = ready;
        }
        (left, arrival)
    }

    /// When a message that is ready at `at` has left and when it arrives, or nothing if a wire has died on it.
    fn send(&mut self, from: u32, to: u32, bytes: f64, at: f64, cut: &[f64]) -> Option<(f64, f64)> {
        let wires = self.cluster.wires();
        let mut start = at;
        let mut slowest = 0.0f64;
        let mut latency = 0.0;
        let route = self.cluster.route(from as usize, to as usize);
        if route.is_empty() && from != to {
            return None;
        }
        if self.relayed(route) {
            let route = route.to_vec();
            let (left, arrival) = self.relay(&route, bytes, at);
            let lost = !cut.is_empty() && route.iter().any(|&wire| cut[wire as usize] <= arrival);
            return (!lost).then_some((left, arrival));
        }
        for &index in route {
            let index = index as usize;
            let wire = &wires[index];
            start = start.max(self.free[index]);
            slowest = slowest.max(self.times[index].time(bytes));
            latency += wire.latency.0;
            if let Some(shared) = wire.shared {
                start = start.max(self.free[wires.len() + shared]);
                slowest = slowest.max(self.times[wires.len() + shared].time(bytes));
            }
        }
        let delay = self.errors.as_mut().map_or(0.0, |errors| errors.delay(bytes));
        for &index in route {
            let index = index as usize;
            self.free[index] = start + delay + self.times[index].time(bytes);
            if let Some(shared) = wires[index].shared {
                let shared = wires.len() + shared;
                self.free[shared] = start + self.times[shared].time(bytes);
            }
        }
        let left = route.first().map_or(at, |&wire| self.free[wire as usize]);
        let arrival = start + latency + delay + slowest;
        let lost = !cut.is_empty() && route.iter().any(|&wire| cut[wire as usize] <= arrival);
        (!lost).then_some((left, arrival))
    }
}

/// What has arrived of one collective at one card, step by step.
#[derive(Debug, Clone, Default)]
struct Arrivals(Vec<(u32, f64)>);

#[derive(Debug, Default)]
struct CardState {
    at: usize,
    step: usize,
    /// Messages of the step that were sent.
    sent: usize,
    /// Whether all of them were, and the card waits.
    issued: bool,
    clock: f64,
    /// When the item at hand was begun.
    begun: Option<f64>,
    /// Collectives that this card has completed.
    completed: u64,
    /// Arrivals of the collective at hand and of those that peers have begun already.
    arrivals: VecDeque<Arrivals>,
    /// Single messages, by sender.
    inbox: Vec<(u32, VecDeque<f64>)>,
    dead: bool,
    /// When the memory had last caught up, and the bytes that went through it since.
    caught_up: f64,
    touched: f64,
    /// When what was sent since has left.
    left: f64,
}

impl CardState {
    fn arrivals_of(&mut self, collective: u64, steps: usize) -> &mut Vec<(u32, f64)> {
        let index = (collective - self.completed) as usize;
        while self.arrivals.len() <= index {
            self.arrivals.push_back(Arrivals::default());
        }
        let list = &mut self.arrivals[index].0;
        if list.len() < steps {
            list.resize(steps, (0, 0.0));
        }
        list
    }

    fn messages(&mut self, from: u32) -> &mut VecDeque<f64> {
        let known = self.inbox.iter().position(|(sender, _)| *sender == from);
        let index = known.unwrap_or_else(|| {
            self.inbox.push((from, VecDeque::new()));
            self.inbox.len() - 1
        });
        &mut self.inbox[index].1
    }
}

/// The simulation of one program per card.
pub(crate) struct Engine<'a> {
    network: Network<'a>,
    flows: &'a [Flow],
    /// For each group, the card of each rank.
    groups: &'a [Vec<usize>],
    programs: &'a [Vec<Item>],
    cards: Vec<CardState>,
    /// For each card, what its memory takes for a byte of an exchange, and what a copy or fold costs to begin.
    memories: Vec<(f64, f64)>,
    /// Cards that can go on: the time as the bits of a float that is never negative, which sort alike.
    ready: BinaryHeap<Reverse<(u64, u32)>>,
    disturbance: Disturbance,
    marks: Option<&'a mut Vec<Mark>>,
    collectives: Vec<Met>,
    done: Vec<(u32, f64)>,
    events: u64,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ended {
    /// For each card, when it was done, or stuck.
    pub(crate) clocks: Vec<f64>,
    /// Whether every card completed its program.
    pub(crate) complete: bool,
    /// When each token was complete.
    pub(crate) done: Vec<(u32, f64)>,
    /// Steps, messages and pieces of work.
    pub(crate) events: u64,
    /// The collectives of a recorded run.
    pub(crate) collectives: Vec<Met>,
}

/// One rank's part of a collective, for which a mark was made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Met {
    /// The place of the mark.
    pub(crate) mark: usize,
    pub(crate) group: u32,
    /// The card's collectives before it.
    pub(crate) number: u64,
    pub(crate) flow: u32,
    pub(crate) bytes: f64,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(
        cluster: &'a Cluster,
        flows: &'a [Flow],
        groups: &'a [Vec<usize>],
        programs: &'a [Vec<Item>],
    ) -> Self {
        let cards = (0..programs.len()).map(|_| CardState::default()).collect();
        let memory = |card: usize| {
            let profile = cluster.profile(card);
            let kind = profile.link.as_ref().map(|link| link.exchange).unwrap_or_default();
            match kind {
                ExchangeKind::Schedules => {
                    let cost = Cost::of(profile);
                    (cost.memory(1.0), cost.fixed())
                }
                // What was measured has it all.
                _ => (0.0, 0.0),
            }
        };
        Engine {
            memories: (0..programs.len()).map(memory).collect(),
            network: Network::new(cluster, 0.0),
            flows,
            groups,
            programs,
            cards,
            ready: BinaryHeap::new(),
            disturbance: Disturbance::default(),
            marks: None,
            collectives: Vec::new(),
            done: Vec::new(),
            events: 0,
        }
    }

    pub(crate) fn disturbed(mut self, mut disturbance: Disturbance) -> Self {
        self.network.errors = disturbance.errors.take();
        self.disturbance = disturbance;
        self
    }

    pub(crate) fn recording(mut self, marks: &'a mut Vec<Mark>) -> Self {
        self.marks = Some(marks);
        self
    }

    /// Runs all programs; each card begins at its own time.
    pub(crate) fn run(mut self, starts: &[f64]) -> Ended {
        for card in 0..self.cards.len() {
            let start = starts.get(card).copied().unwrap_or(0.0);
            self.cards[card].clock = start;
            self.cards[card].caught_up = start;
            if !self.programs[card].is_empty() {
                self.wake(card);
            }
        }
        while let Some(Reverse((time, card))) = self.ready.pop() {
            self.proceed(card as usize, f64::from_bits(time));
        }
        let done = |(card, state): (usize, &CardState)| state.at == self.programs[card].len();
        Ended {
            complete: self.cards.iter().enumerate().all(done),
            clocks: self.cards.iter().map(|card| card.clock).collect(),
            done: self.done,
            events: self.events,
            collectives: self.collectives,
        }
    }

    fn wake(&mut self, card: usize) {
        self.wake_at(card, self.cards[card].clock);
    }

    fn wake_at(&mut self, card: usize, time: f64) {
        self.ready.push(Reverse((time.to_bits(), card as u32)));
    }

    fn dies_at(&self, card: usize) -> f64 {
        self.disturbance.death.get(card).copied().unwrap_or(f64::INFINITY)
    }

    fn mark(&mut self, card: usize, label: Label, op: u32, start: f64, end: f64, parts: Parts) {
        if let Some(marks) = self.marks.as_deref_mut() {
            let (card, ops) = (card as u32, u32::from(op != OUTSIDE));
            let op = if op == OUTSIDE { 0 } else { op };
            marks.push(Mark { card, label, op, ops, start, end, parts: Some(parts) });
        }
    }

    /// Lets a card go on until it waits, is done, or its clock has moved past other cards'.
    fn proceed(&mut self, card: usize, now: f64) {
        loop {
            if now.max(self.cards[card].clock) >= self.dies_at(card) {
                self.cards[card].dead = true;
                return;
            }
            let Some(&item) = self.programs[card].get(self.cards[card].at) else { return };
            if self.cards[card].clock > now && !matches!(item, Item::Work { .. }) {
                // Others may want the wires before this card does.
                return self.wake(card);
            }
            self.events += 1;
            let went_on = match item {
                Item::Work { seconds, bytes, label, op, parts } => {
                    self.cards[card].touched += bytes;
                    self.work(card, seconds, label, op, parts)
                }
                Item::Send { to, bytes, label, op } => self.post(card, to, bytes, label, op),
                Item::Tell { to, seconds } => {
                    let arrival = self.cards[card].clock + seconds;
                    self.cards[card].at += 1;
                    self.deliver(card, to, arrival);
                    true
                }
                Item::Done { token } => {
                    self.done.push((token, self.cards[card].clock));
                    self.cards[card].at += 1;
                    true
                }
                Item::Recv { from, label, op } => self.receive(card, from, label, op),
                Item::Collective { flow, rank, group, bytes, label, op } => {
                    self.step(card, now, (flow, rank, group), bytes, (label, op))
                }
            };
            if !went_on {
                return;
            }
        }
    }

    fn work(&mut self, card: usize, seconds: f64, label: Label, op: u32, parts: Parts) -> bool {
        let begun = self.cards[card].clock;
        let slow = self.disturbance.slow.get(card).copied();
        let factor = slow.filter(|&(_, from)| begun >= from).map_or(1.0, |(factor, _)| factor);
        let end = (begun + seconds * factor).min(self.dies_at(card));
        self.cards[card].clock = end;
        self.cards[card].at += 1;
        self.mark(card, label, op, begun, end, parts);
        true
    }

    fn post(&mut self, card: usize, to: u32, bytes: f64, label: Label, op: u32) -> bool {
        let clock = self.cards[card].clock;
        let sent = self.network.send(card as u32, to, bytes, clock, &self.disturbance.cut);
        self.cards[card].at += 1;
        if let Some((left, arrival)) = sent {
            self.cards[card].clock = clock.max(left);
            self.mark(
                card,
                label,
                op,
                clock,
                clock.max(left),
                Parts { bandwidth: left - clock, ..Parts::default() },
            );
            self.deliver(card, to, arrival);
        }
        self.catch_up(card);
        true
    }

    /// The card's memory has gone through all that it had to, and begins anew.
    fn catch_up(&mut self, card: usize) {
        let (per_byte, _) = self.memories[card];
        let state = &mut self.cards[card];
        state.clock = state.clock.max(state.left).max(state.caught_up + state.touched * per_byte);
        (state.caught_up, state.touched, state.left) = (state.clock, 0.0, 0.0);
    }

    /// Puts a message into a card's inbox, and wakes the card if it waits for it.
    fn deliver(&mut self, from: usize, to: u32, arrival: f64) {
        let to = to as usize;
        self.cards[to].messages(from as u32).push_back(arrival);
        let awaited = matches!(self.item(to), Some(Item::Recv { from: sender, .. }) if sender as usize == from);
        if awaited && self.cards[to].issued {
            self.cards[to].issued = false;
            self.cards[to].clock = self.cards[to].clock.max(arrival);
            self.wake(to);
        }
    }

    fn item(&self, card: usize) -> Option<Item> {
        self.programs[card].get(self.cards[card].at).copied()
    }

    fn receive(&mut self, card: usize, from: u32, label: Label, op: u32) -> bool {
        let state = &mut self.cards[card];
        state.begun.get_or_insert(state.clock);
        match state.messages(from).front().copied() {
            None => {
                state.issued = true;
                false
            }
            Some(arrival) if arrival > state.clock => {
                state.clock = arrival;
                self.wake(card);
                false
            }
            Some(_) => {
                state.messages(from).pop_front();
                state.issued = false;
                state.at += 1;
                let (begun, end) = (state.begun.take(), state.clock);
                let begun = begun.unwrap_or(end);
                let parts = Parts { waiting: end - begun, ..Parts::default() };
                self.catch_up(card);
                self.mark(card, label, op, begun, end, parts);
                true
            }
        }
    }

    /// Sends what this rank sends in its current step, each message when the wire that it leaves by is free;
    /// goes on if everything that it waits for is there.
    fn step(
        &mut self,
        card: usize,
        now: f64,
        (flow, rank, group): (u32, u32, u32),
        bytes: f64,
        (label, op): (Label, u32),
    ) -> bool {
        let flows = self.flows;
        let number = flow;
        let flow = &flows[flow as usize];
        let program = flow.program(rank as usize);
        let state = &mut self.cards[card];
        if program.is_empty() {
            return self.collective_done(card, (number, group), bytes, (label, op));
        }
        state.begun.get_or_insert(state.clock);
        let (step, collective) = (state.step, state.completed);
        let sends = &program[step].sends;
        while let Some(send) = sends.get(self.cards[card].sent).filter(|_| !self.cards[card].issued)
        {
            let to = self.groups[group as usize][send.to as usize];
            let free = self.network.wire_free(card, to);
            if self.cards[card].sent > 0 && free > now {
                // Others may want the wires before this message goes.
                self.wake_at(card, free);
                return false;
            }
            self.cards[card].sent += 1;
            let carried = bytes * send.fraction;
            let cut = &self.disturbance.cut;
            let arrival = self.network.send(card as u32, to as u32, carried, now, cut);
            self.events += 1;
            if let Some((left, arrival)) = arrival {
                self.cards[card].left = self.cards[card].left.max(left);
                self.arrive(to, flow, send.to, send.at_step, collective, arrival);
            }
        }
        let state = &mut self.cards[card];
        state.issued = true;
        let awaited = program[step].receives;
        let (arrived, latest) = state.arrivals_of(collective, program.len())[step];
        if arrived < awaited {
            return false;
        }
        state.clock = state.clock.max(latest).max(now);
        state.issued = false;
        state.sent = 0;
        state.step += 1;
        state.touched += program[step].touched * bytes;
        let last = state.step == program.len();
        self.catch_up(card);
        let (per_byte, start) = self.memories[card];
        for part in &program[step].locals {
            let state = &mut self.cards[card];
            state.clock += start + part * bytes * per_byte;
            state.touched += part * bytes;
        }
        if last {
            return self.collective_done(card, (number, group), bytes, (label, op));
        }
        true
    }

    fn collective_done(
        &mut self,
        card: usize,
        (flow, group): (u32, u32),
        bytes: f64,
        (label, op): (Label, u32),
    ) -> bool {
        let state = &mut self.cards[card];
        state.arrivals.pop_front();
        state.completed += 1;
        state.step = 0;
        state.at += 1;
        let (begun, end) = (state.begun.take(), state.clock);
        let begun = begun.unwrap_or(end);
        let number = state.completed;
        if let Some(marks) = &self.marks {
            let mark = marks.len();
            self.collectives.push(Met { mark, group, number, flow, bytes });
        }
        self.mark(card, label, op, begun, end, Parts::default());
        true
    }

    /// Notes an arrival, and wakes the receiver if that was all it waited for.
    fn arrive(&mut self, card: usize, flow: &Flow, rank: u32, step: u32, collective: u64, at: f64) {
        let program = flow.program(rank as usize);
        let step = step as usize;
        let state = &mut self.cards[card];
        let entry = &mut state.arrivals_of(collective, program.len())[step];
        entry.0 += 1;
        entry.1 = entry.1.max(at);
        let (complete, latest) = (entry.0 == program[step].receives, entry.1);
        let waiting = state.issued && state.completed == collective && state.step == step;
        if complete && waiting && !state.dead {
            state.clock = state.clock.max(latest);
            self.wake(card);
        }
    }
}
