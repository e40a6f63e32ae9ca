// SPDX-License-Identifier: Apache-2.0
//! Cards, messages and wires in virtual time.
//!
//! Each card follows a program: work that takes its time, steps of collectives, single messages. A message
//! starts when its sender and every wire and shared resource on its route are free, in the order in
//! which senders ask; it occupies each for its bytes and frames over that resource's rate, and arrives after
//! the latencies of the route and its bytes over the slowest. Where cards pass messages on, `relay.rs` goes through
//! the programs that they get. A step of a collective ends when its messages have come and gone and the card's
//! memory has had the time for all that went through it since the step before; then copies and folds follow. The only queue holds one entry for each card
//! that can go on, so the order of events, and with it every figure, is the same on every run.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;

use spanker_topology::Cluster;

use super::flow::{Flow, FlowStep};
use super::network::{Errors, Network, Speeds};
use super::relay::Relaying;
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

/// What has arrived of one collective at one card, step by step.
#[derive(Debug, Clone, Default)]
struct Arrivals(Vec<(u32, f64)>);

#[derive(Debug, Default)]
pub(super) struct CardState {
    at: usize,
    step: usize,
    /// Messages of the step that were sent.
    sent: usize,
    /// Whether all of them were, and the card waits.
    pub(super) issued: bool,
    pub(super) clock: f64,
    /// When the item at hand was begun.
    pub(super) begun: Option<f64>,
    /// Collectives that this card has completed.
    completed: u64,
    /// Arrivals of the collective at hand and of those that peers have begun already.
    arrivals: VecDeque<Arrivals>,
    /// Single messages, by sender.
    inbox: Vec<(u32, VecDeque<f64>)>,
    pub(super) dead: bool,
    /// When the memory had last caught up, and the bytes that went through it since.
    caught_up: f64,
    pub(super) touched: f64,
    /// When what was sent since has left, and what cards pass on has come.
    pub(super) left: f64,
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
    pub(super) network: Network<'a>,
    pub(super) flows: &'a [Rc<Flow>],
    /// For each group, the card of each rank.
    pub(super) groups: &'a [Vec<usize>],
    programs: &'a [Vec<Item>],
    pub(super) cards: Vec<CardState>,
    /// For each card, what its memory takes for a byte of an exchange, and what a copy or fold costs to begin.
    memories: &'a [(f64, f64)],
    /// Cards that can go on: the time as the bits of a float that is never negative, which sort alike.
    ready: BinaryHeap<Reverse<(u64, u32)>>,
    pub(super) relaying: Relaying,
    pub(super) disturbance: Disturbance,
    marks: Option<&'a mut Vec<Mark>>,
    collectives: Vec<Met>,
    done: Vec<(u32, f64)>,
    pub(super) events: u64,
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
        speeds: &'a Speeds,
        flows: &'a [Rc<Flow>],
        groups: &'a [Vec<usize>],
        programs: &'a [Vec<Item>],
    ) -> Self {
        let cards = (0..programs.len()).map(|_| CardState::default()).collect();
        Engine {
            memories: speeds.memories(),
            network: Network::new(cluster, speeds),
            flows,
            groups,
            programs,
            cards,
            ready: BinaryHeap::new(),
            disturbance: Disturbance::default(),
            marks: None,
            collectives: Vec::new(),
            relaying: Relaying::new(flows.len(), groups.len()),
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
        while let Some(Reverse((time, id))) = self.ready.pop() {
            self.proceed(id as usize, f64::from_bits(time));
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

    pub(super) fn wake(&mut self, card: usize) {
        self.wake_at(card, self.cards[card].clock);
    }

    fn wake_at(&mut self, card: usize, time: f64) {
        self.ready.push(Reverse((time.to_bits(), card as u32)));
    }

    pub(super) fn dies_at(&self, card: usize) -> f64 {
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

    /// Bytes go through a card's memory, for a message that ends then.
    pub(super) fn touch(&mut self, card: usize, bytes: f64, end: f64) {
        let state = &mut self.cards[card];
        state.touched += bytes;
        state.left = state.left.max(end);
    }

    /// The card's memory has gone through all that it had to, and begins anew.
    pub(super) fn catch_up(&mut self, card: usize) {
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

    pub(super) fn item(&self, card: usize) -> Option<Item> {
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
        if let Some(relays) = self.relays(number, group) {
            self.join(card, group, &relays);
            return false;
        }
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
        self.locals(card, &program[step], bytes);
        if last {
            return self.collective_done(card, (number, group), bytes, (label, op));
        }
        true
    }

    /// The copies and folds of a step, one after the other.
    pub(super) fn locals(&mut self, card: usize, step: &FlowStep, bytes: f64) {
        let (per_byte, start) = self.memories[card];
        let state = &mut self.cards[card];
        for part in &step.locals {
            state.clock += start + part * bytes * per_byte;
            state.touched += part * bytes;
        }
    }

    pub(super) fn collective_done(
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
