// SPDX-License-Identifier: Apache-2.0
//! A card's exchanges with cards that are other ranks: schedules from the leader's table, in stamped messages.
//!
//! Nothing is committed here: what a step gives back leaves rank 0 only when all of its reports have come, and
//! after a fault nobody's memory is used again. That is why this is not `spanker_fabric::execute`, which asks all ranks
//! of a fabric after each call whether they are done: two more messages for an exchange that often takes one.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

use spanker_collective::{Algorithm, Collective, Rank, chunk};
use spanker_fabric::{FabricError, Message};
use spanker_plan::ExchangeTable;

use super::rounds::{Added, Received, Rounds};
use super::wire::{Wire, stamp};
use crate::card::{Folding, Peers};

/// How much longer each round of an exchange may take than the one before, as a part of the timeout. A rank that
/// waits for one that waits itself gives up later than that one, so that the fault names who is really missing.
const PATIENCE_PARTS: u32 = 8;

/// Bytes of what is folded.
const WORD: usize = 4;

/// The algorithms of a stage's exchanges, and this rank's rounds of those that were used.
#[derive(Debug)]
pub(super) struct Exchanges {
    table: ExchangeTable,
    stage: usize,
    /// The rank of every member.
    members: Vec<Rank>,
    /// This card's place among the members.
    rank: usize,
    known: HashMap<(Collective, Algorithm), Rc<Rounds>>,
}

impl Exchanges {
    /// Exchanges among the ranks of a stage.
    pub(super) fn new(
        table: ExchangeTable,
        stage: usize,
        members: Vec<Rank>,
        rank: usize,
    ) -> Exchanges {
        Exchanges { table, stage, members, rank, known: HashMap::new() }
    }

    /// This rank's rounds of a collective of so many bytes.
    fn rounds(&mut self, collective: Collective, bytes: f64) -> Result<Rc<Rounds>, String> {
        let algorithm = self.table.algorithm(self.stage, collective, bytes);
        let key = (collective, algorithm);
        if let Some(known) = self.known.get(&key) {
            return Ok(Rc::clone(known));
        }
        let rounds = Rounds::new(collective, algorithm, self.members.len(), self.rank)?;
        let rounds = Rc::new(rounds);
        self.known.insert(key, Rc::clone(&rounds));
        Ok(rounds)
    }
}

/// A card's way to the others, which are other ranks, in one step.
pub(super) struct Neighbours<'w, 'f> {
    wire: &'w mut Wire<'f>,
    exchanges: &'w mut Exchanges,
    /// The rank of every member of the plan.
    ranks: &'w [Rank],
    step: u64,
    /// Exchanges of the group in this step.
    count: u64,
}

/// What an exchange has brought: the parts that are not this rank's own, and the bytes that it sent.
struct Exchanged {
    parts: Vec<Option<Message>>,
    sent: u64,
}

impl<'w, 'f> Neighbours<'w, 'f> {
    pub(super) fn new(
        wire: &'w mut Wire<'f>,
        exchanges: &'w mut Exchanges,
        ranks: &'w [Rank],
        step: u64,
    ) -> Self {
        Neighbours { wire, exchanges, ranks, step, count: 0 }
    }

    /// What messages from one stage to the next are stamped with.
    fn passing(&self, step: u64) -> u64 {
        stamp(&[self.wire.plan(), step, u64::MAX])
    }

    /// Runs a collective of so many bytes. `own` has the bytes of parts that this rank has from the start, `length`
    /// says how long a part is.
    fn run<'d>(
        &mut self,
        (collective, bytes): (Collective, f64),
        own: &'d dyn Fn(Range<usize>) -> &'d [u8],
        length: impl Fn(usize) -> usize,
        folding: Folding,
    ) -> Result<Exchanged, FabricError> {
        self.count += 1;
        let stamp = stamp(&[self.wire.plan(), self.step, self.count]);
        let rounds = self.exchanges.rounds(collective, bytes);
        let rounds = rounds.map_err(|reason| self.wire.refuse(reason))?;
        let begun = Instant::now();
        let (parts, slots) = (rounds.parts, vec![None; rounds.slots]);
        let mut run = Run { own, parts, slots, whole: Vec::new(), sent: 0 };
        for (number, round) in rounds.rounds.iter().enumerate() {
            let mut sends = Vec::with_capacity(round.sends.len());
            for send in &round.sends {
                // Who has nothing to give sends nothing; the receiver knows that too.
                if let Some(message) = run.message(self.wire, &send.slots, stamp) {
                    sends.push((self.exchanges.members[send.to], message));
                }
            }
            let total = |received: &Received| received.parts.clone().map(&length).sum::<usize>();
            let receives: Vec<(&Received, usize)> = round
                .receives
                .iter()
                .map(|received| (received, total(received)))
                .filter(|&(_, bytes)| bytes > 0)
                .collect();
            let from: Vec<Rank> =
                receives.iter().map(|(one, _)| self.exchanges.members[one.from]).collect();
            let timeout = self.wire.timeout();
            let deadline = begun + timeout + timeout * number as u32 / PATIENCE_PARTS;
            let messages = self.wire.exchange_until(&sends, &from, deadline)?;
            for (((received, bytes), from), message) in receives.into_iter().zip(from).zip(messages)
            {
                let opened = self.wire.checked(from, &message, bytes as u64, stamp)?;
                run.store(received, &opened, message, &length);
            }
            for sum in &round.sums {
                run.add(self.wire, sum, folding);
            }
        }
        run.slots.truncate(rounds.parts);
        Ok(Exchanged { parts: run.slots, sent: run.sent })
    }
}

/// An exchange on its way.
struct Run<'d> {
    /// What this rank has from the start.
    own: &'d dyn Fn(Range<usize>) -> &'d [u8],
    /// Slots of the data; the others are working memory.
    parts: usize,
    /// What came or was added up since.
    slots: Vec<Option<Message>>,
    /// Whole messages with their stamps, by the slots that they hold: they are passed on as they are.
    whole: Vec<(Range<usize>, Message)>,
    /// Bytes sent.
    sent: u64,
}

impl Run<'_> {
    /// The bytes of a slot.
    fn bytes(&self, slot: usize) -> &[u8] {
        match &self.slots[slot] {
            Some(message) => message.bytes(),
            None if slot < self.parts => (self.own)(slot..slot + 1),
            // An empty part, for which there was no message.
            None => &[],
        }
    }

    /// A stamped message of some slots, or nothing if they are empty.
    fn message(
        &mut self,
        wire: &mut Wire<'_>,
        slots: &Range<usize>,
        stamp: u64,
    ) -> Option<Message> {
        let known = self.whole.iter().find(|(of, _)| of == slots);
        let message = match known {
            Some((_, message)) => message.clone(),
            None => {
                let is_own = self.slots[slots.clone()].iter().all(Option::is_none);
                let parts: Vec<&[u8]> = match is_own {
                    true => vec![(self.own)(slots.clone())],
                    false => slots.clone().map(|slot| self.bytes(slot)).collect(),
                };
                if parts.iter().all(|part| part.is_empty()) {
                    return None;
                }
                let message = wire.stamped(&parts, stamp);
                self.whole.push((slots.clone(), message.clone()));
                message
            }
        };
        self.sent += Wire::payload(&message);
        Some(message)
    }

    /// Forgets messages of slots that change.
    fn change(&mut self, slots: &Range<usize>) {
        self.whole.retain(|(of, _)| of.end <= slots.start || slots.end <= of.start);
    }

    /// Keeps what came: a message's parts, and the whole of it.
    fn store(
        &mut self,
        received: &Received,
        opened: &Message,
        whole: Message,
        length: impl Fn(usize) -> usize,
    ) {
        self.change(&received.slots);
        let mut start = 0;
        for (slot, part) in received.slots.clone().zip(received.parts.clone()) {
            let end = start + length(part);
            self.slots[slot] = Some(opened.part(start..end));
            start = end;
        }
        self.whole.push((received.slots.clone(), whole));
    }

    /// Folds parts, in the order of their sources.
    fn add(&mut self, wire: &mut Wire<'_>, sum: &Added, folding: Folding) {
        for (at, into) in sum.into.clone().enumerate() {
            let sources: Vec<&[u8]> =
                sum.sources.iter().map(|source| self.bytes(source.start + at)).collect();
            let total = wire.write(sources[0].len(), |out| {
                out.copy_from_slice(sources[0]);
                sources[1..].iter().for_each(|source| folding.into(out, source));
            });
            self.slots[into] = Some(total);
        }
        self.change(&sum.into);
    }
}

/// The bytes of some of `parts` nearly equal chunks of units of `unit` bytes.
fn chunks(bytes: usize, unit: usize, parts: usize, of: Range<usize>) -> Range<usize> {
    let at = |part: usize| chunk(bytes / unit, parts, part);
    let end = of.end.checked_sub(1).map_or(0, |last| at(last).end);
    unit * at(of.start).start..unit * end
}

impl Neighbours<'_, '_> {
    /// Runs a collective in place on data that is cut into chunks of units of so many bytes.
    fn in_place(
        &mut self,
        collective: Collective,
        data: &mut [u8],
        unit: usize,
        folding: Folding,
    ) -> Result<u64, FabricError> {
        let bytes = data.len();
        let rounds = self.exchanges.rounds(collective, bytes as f64);
        let parts = rounds.map_err(|reason| self.wire.refuse(reason))?.parts;
        let of = |range: Range<usize>| chunks(bytes, unit, parts, range);
        let given = &*data;
        let own = |range: Range<usize>| &given[of(range)];
        let length = |part: usize| of(part..part + 1).len();
        let came = self.run((collective, bytes as f64), &own, length, folding)?;
        for (part, message) in came.parts.iter().enumerate() {
            if let Some(message) = message {
                data[of(part..part + 1)].copy_from_slice(message.bytes());
            }
        }
        Ok(came.sent)
    }
}

impl Peers for Neighbours<'_, '_> {
    type Fault = FabricError;

    fn rank(&self) -> usize {
        self.exchanges.rank
    }

    fn ranks(&self) -> usize {
        self.exchanges.members.len()
    }

    fn all_gather(
        &mut self,
        own: &[u8],
        bytes: impl Fn(usize) -> u64,
        mut read: impl FnMut(usize, &[u8]),
    ) -> Result<u64, FabricError> {
        let ranks = self.ranks();
        let longest = (0..ranks).map(&bytes).max().unwrap_or(0);
        let whole = (Collective::AllGather, (longest * ranks as u64) as f64);
        // Whoever has nothing to give is passed on as nothing.
        let rank = self.rank();
        let given = |of: Range<usize>| if of.contains(&rank) { own } else { &[] };
        let came = self.run(whole, &given, |rank| bytes(rank) as usize, Folding::Or)?;
        for (rank, message) in came.parts.iter().enumerate() {
            match message {
                Some(message) => read(rank, message.bytes()),
                None if rank == self.rank() => read(rank, own),
                // It had nothing to give.
                None => {}
            }
        }
        Ok(came.sent)
    }

    fn fold(&mut self, data: &mut [u8], folding: Folding) -> Result<u64, FabricError> {
        self.in_place(Collective::AllReduce, data, WORD, folding)
    }

    fn send(&mut self, to: usize, step: u64, bytes: &[u8]) -> Result<(), FabricError> {
        self.wire.send(self.ranks[to], bytes, self.passing(step))
    }

    fn receive(&mut self, from: usize, step: u64, into: &mut [u8]) -> Result<(), FabricError> {
        self.wire.fetch(self.ranks[from], into, self.passing(step))
    }
}

#[cfg(test)]
mod tests;
