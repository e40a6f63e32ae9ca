// SPDX-License-Identifier: Apache-2.0
//! When cards go on: the programs of all cards of a plan become launches and exchanges, one after the other. Pure: nothing
//! is launched here.
//!
//! Cards of one device are in one list. In every round each of them has one instruction, or cards that have come to an
//! exchange have it together; blocks wait for each other after a round, and not between its instructions, since cards have
//! nothing in common but exchanges. A list ends only where another kernel has to go on, or where an exchange goes to another
//! device. So a step of cards that share a device needs one launch, and nothing of the host before its end.

use std::collections::VecDeque;
use std::ops::Range;

use spanker_plan::Op;
use spanker_runtime::Place;

use super::exchange::{Exchange, astray};
use super::instructions::{Part, Parts};
use super::operands::Instruction;
use crate::CudaError;

/// What a card did: operators of its program, and of an exchange the bytes that it has afterwards.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Done {
    pub(super) slot: usize,
    pub(super) ops: Range<usize>,
    pub(super) exchanged: Option<u64>,
}

/// Instructions that do one thing, for one card or several.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Task {
    pub(super) instructions: Vec<Instruction>,
    pub(super) done: Vec<Done>,
    /// Bytes that cards give to other cards.
    pub(super) sent: u64,
}

/// An exchange of cards, each with the number of its operator.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Between {
    pub(super) exchange: Exchange,
    pub(super) slots: Vec<usize>,
    ops: Vec<usize>,
}

/// What happens next.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entry {
    /// A device goes through instructions of its cards.
    Launch { device: usize, tasks: Vec<Task> },
    /// A card's weights are prefetched.
    Streamed { slot: usize, instructions: Vec<Instruction>, done: Vec<Done> },
    /// Cards exchange through the host.
    Exchange(Between),
}

/// What a card does next.
enum Item {
    Instruction(Instruction, Range<usize>),
    Streamed(Vec<Instruction>, Vec<Range<usize>>),
    Exchange(Op, usize),
}

/// A card's program, and the device that it is on.
pub(super) struct Listed {
    device: usize,
    items: VecDeque<Item>,
}

impl Listed {
    /// The program of a card, as it was translated.
    pub(super) fn new(device: usize, parts: Parts) -> Listed {
        let mut ops = parts.ops.into_iter();
        let mut items = VecDeque::new();
        for part in parts.parts {
            match part {
                Part::Instructions(instructions) => {
                    let own = instructions.into_iter().zip(ops.by_ref());
                    items.extend(own.map(|(instruction, ops)| Item::Instruction(instruction, ops)));
                }
                Part::Streamed(instructions) => {
                    let own = ops.by_ref().take(instructions.len()).collect();
                    items.push_back(Item::Streamed(instructions, own));
                }
                Part::Exchange(op) => {
                    let at = ops.next().map_or(0, |ops| ops.start);
                    items.push_back(Item::Exchange(op, at));
                }
            }
        }
        Listed { device, items }
    }
}

impl Between {
    /// What each card has done then.
    pub(super) fn done(&self) -> Vec<Done> {
        let each = self.slots.iter().zip(&self.ops).enumerate();
        let done = |(rank, (&slot, &op)): (usize, (&usize, &usize))| {
            let exchanged = Some(self.exchange.whole(rank));
            Done { slot, ops: op..op + 1, exchanged }
        };
        each.map(done).collect()
    }
}

/// Programs of all cards, as far as they are not scheduled yet.
struct Waiting<'a> {
    cards: Vec<Listed>,
    groups: &'a [Range<usize>],
    address: &'a dyn Fn(usize, Place) -> u64,
}

/// What programs come to, in order. `groups` are the cards that exchange with each other, and `address` says where a card's
/// place is in its device's memory.
pub(super) fn schedule(
    cards: Vec<Listed>,
    groups: &[Range<usize>],
    address: &dyn Fn(usize, Place) -> u64,
) -> Result<Vec<Entry>, CudaError> {
    let devices = cards.iter().map(|card| card.device + 1).max().unwrap_or(0);
    let mut waiting = Waiting { cards, groups, address };
    let mut entries = Vec::new();
    loop {
        for device in 0..devices {
            waiting.on_device(device, &mut entries)?;
        }
        if waiting.cards.iter().all(|card| card.items.is_empty()) {
            return Ok(entries);
        }
        let ready = waiting.ready(None)?;
        if ready.is_empty() {
            return Err(astray());
        }
        for between in ready {
            waiting.pass(&between.slots);
            entries.push(Entry::Exchange(between));
        }
    }
}

impl Waiting<'_> {
    fn exchange(&self, slot: usize) -> Option<(&Op, usize)> {
        match self.cards.get(slot)?.items.front() {
            Some(Item::Exchange(op, at)) => Some((op, *at)),
            _ => None,
        }
    }

    /// These cards have done what was next.
    fn pass(&mut self, slots: &[usize]) {
        slots.iter().for_each(|&slot| {
            self.cards[slot].items.pop_front();
        });
    }

    /// Exchanges that all of their cards have come to: of a device, or any.
    fn ready(&self, device: Option<usize>) -> Result<Vec<Between>, CudaError> {
        let here = |slot: usize| device.is_none_or(|device| self.cards[slot].device == device);
        let mut ready = Vec::new();
        for group in self.groups.iter().filter(|group| Range::clone(group).all(here)) {
            let ops: Option<Vec<(&Op, usize)>> =
                group.clone().map(|slot| self.exchange(slot)).collect();
            let is_handoff = |op: &Op| matches!(op, Op::Send { .. } | Op::Receive { .. });
            let Some(ops) = ops.filter(|ops| !ops.iter().any(|(op, _)| is_handoff(op))) else {
                continue;
            };
            let (ops, numbers): (Vec<&Op>, Vec<usize>) = ops.into_iter().unzip();
            let (exchange, slots) = (Exchange::of(&ops)?, group.clone().collect());
            ready.push(Between { exchange, slots, ops: numbers });
        }
        for slot in (0..self.cards.len()).filter(|&slot| here(slot)) {
            let Some((Op::Send { to, from, length }, at)) = self.exchange(slot) else { continue };
            match self.exchange(*to) {
                Some((Op::Receive { from: giver, into, length: own }, then))
                    if *giver == slot && here(*to) =>
                {
                    if own != length {
                        return Err(astray());
                    }
                    let exchange = Exchange::Handoff { from: *from, into: *into, length: *length };
                    let (slots, ops) = (vec![slot, *to], vec![at, then]);
                    ready.push(Between { exchange, slots, ops });
                }
                _ => {}
            }
        }
        Ok(ready)
    }

    /// What the cards of a device do until they wait for another.
    fn on_device(&mut self, device: usize, entries: &mut Vec<Entry>) -> Result<(), CudaError> {
        let mut tasks: Vec<Task> = Vec::new();
        let end = |tasks: &mut Vec<Task>, entries: &mut Vec<Entry>| {
            if !tasks.is_empty() {
                entries.push(Entry::Launch { device, tasks: std::mem::take(tasks) });
            }
        };
        loop {
            let round = self.round(device)?;
            if !round.is_empty() {
                tasks.extend(joined(round));
                continue;
            }
            end(&mut tasks, entries);
            let is_streamed = |card: &Listed| {
                card.device == device && matches!(card.items.front(), Some(Item::Streamed(..)))
            };
            let Some(slot) = self.cards.iter().position(is_streamed) else { return Ok(()) };
            if let Some(Item::Streamed(instructions, ops)) = self.cards[slot].items.pop_front() {
                let done = ops.into_iter().map(|ops| Done { slot, ops, exchanged: None });
                entries.push(Entry::Streamed { slot, instructions, done: done.collect() });
            }
        }
    }

    /// An instruction of every card of a device that has one, and exchanges that its cards have come to.
    fn round(&mut self, device: usize) -> Result<Vec<Task>, CudaError> {
        let (mut round, mut passed) = (Vec::new(), Vec::new());
        for between in self.ready(Some(device))? {
            let address = |rank: usize, place: Place| (self.address)(between.slots[rank], place);
            // What the kernel cannot do goes through the host.
            if let Some(instructions) = between.exchange.instructions(&address) {
                let (done, sent) = (between.done(), between.exchange.sent());
                round.push(Task { instructions, done, sent });
                passed.extend(between.slots);
            }
        }
        for slot in (0..self.cards.len()).filter(|&slot| self.cards[slot].device == device) {
            if let Some(Item::Instruction(instruction, ops)) = self.cards[slot].items.front() {
                let done = vec![Done { slot, ops: ops.clone(), exchanged: None }];
                round.push(Task { instructions: vec![*instruction], done, sent: 0 });
                passed.push(slot);
            }
        }
        self.pass(&passed);
        Ok(round)
    }
}

/// A round whose instructions do not wait for each other.
fn joined(mut round: Vec<Task>) -> Vec<Task> {
    let mut all: Vec<&mut Instruction> =
        round.iter_mut().flat_map(|task| &mut task.instructions).collect();
    all.pop();
    all.into_iter().for_each(|instruction| *instruction = instruction.joined());
    round
}

#[cfg(test)]
mod tests;
