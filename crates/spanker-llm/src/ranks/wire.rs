// SPDX-License-Identifier: Apache-2.0
//! A rank's end of the fabric, with what its messages are stamped with: the plan, the step, the exchange. Ranks that
//! are not at the same one find out from the first message between them.
//!
//! To the fabric all of it is one call, from the first order to the last: its ranks are in different exchanges of
//! it most of the time, and a fabric may take that for a mistake if they are different calls.

use std::ops::Range;
use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool};

use super::clock::Answer;
use super::order::Order;
use crate::card::Peers;

/// The rank that gives orders.
pub(super) const LEADER: Rank = 0;

/// How long a rank may take to lay a plan out: it may have to read its part of the file from a disk.
const LOADING: Duration = Duration::from_secs(600);

/// Bytes of a stamp, behind those of a message.
const STAMP: usize = 8;

/// What every message belongs to: the same call as barriers, which others may have reached already.
const CALL: Call = Call::BARRIER;

/// FNV-1a of words.
fn stamp(words: &[u64]) -> u64 {
    crate::fingerprint(words.iter().flat_map(|word| word.to_le_bytes()))
}

/// A fabric that somebody else keeps, or that is kept here.
pub(super) enum End<'f> {
    Lent(&'f mut dyn Fabric),
    Own(Box<dyn Fabric>),
}

impl End<'_> {
    fn get(&self) -> &dyn Fabric {
        match self {
            End::Lent(fabric) => &**fabric,
            End::Own(fabric) => &**fabric,
        }
    }

    fn get_mut(&mut self) -> &mut dyn Fabric {
        match self {
            End::Lent(fabric) => *fabric,
            End::Own(fabric) => &mut **fabric,
        }
    }
}

/// A rank's end of the fabric.
pub(super) struct Wire<'f> {
    fabric: End<'f>,
    pool: Pool,
    timeout: Duration,
    /// Orders so far.
    orders: u64,
    /// What the plan in use is stamped with.
    plan: u64,
    /// Where this rank's clock begins.
    origin: Instant,
}

impl<'f> Wire<'f> {
    pub(super) fn new(fabric: End<'f>, timeout: Duration) -> Self {
        let origin = Instant::now();
        Wire { fabric, pool: Pool::default(), timeout, orders: 0, plan: 0, origin }
    }

    /// A moment by this rank's clock, in seconds.
    pub(super) fn clock(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.origin).as_secs_f64()
    }

    pub(super) fn rank(&self) -> Rank {
        self.fabric.get().rank()
    }

    pub(super) fn ranks(&self) -> usize {
        self.fabric.get().ranks()
    }

    /// Gives the group up, with words that the others hear.
    pub(super) fn refuse(&mut self, reason: String) -> FabricError {
        let rank = self.rank();
        self.fabric.get_mut().abort(FabricError::Refused { rank, reason })
    }

    /// Gives the group up because this rank and the leader mean different things.
    pub(super) fn disagree(&mut self, field: &'static str, ours: u64, theirs: u64) -> FabricError {
        let (ours, theirs) = (format!("{ours:016x}"), format!("{theirs:016x}"));
        let rank = self.rank();
        self.fabric.get_mut().abort(FabricError::Mismatch {
            rank,
            peer: LEADER,
            field,
            ours,
            theirs,
        })
    }

    fn stamped(&mut self, bytes: &[u8], stamp: u64) -> Message {
        self.pool.write(bytes.len() + STAMP, |out| {
            let (text, end) = out.split_at_mut(bytes.len());
            text.copy_from_slice(bytes);
            end.copy_from_slice(&stamp.to_le_bytes());
        })
    }

    fn exchange(
        &mut self,
        sends: &[(Rank, Message)],
        receives: &[Rank],
    ) -> Result<Vec<Message>, FabricError> {
        self.fabric.get_mut().exchange(&CALL, sends, receives, Instant::now() + self.timeout)
    }

    /// What a message of `peer` says, if it is meant for this place of the run.
    fn open(&mut self, peer: Rank, message: &Message, stamp: u64) -> Result<Message, FabricError> {
        let (rank, actual) = (self.rank(), message.bytes().len());
        let Some((text, end)) = message.bytes().split_last_chunk::<STAMP>() else {
            let short = FabricError::Length { rank, peer, expected: STAMP, actual };
            return Err(self.fabric.get_mut().abort(short));
        };
        let (length, found) = (text.len(), u64::from_le_bytes(*end));
        if found != stamp {
            let (ours, theirs) = (format!("{stamp:016x}"), format!("{found:016x}"));
            let field = "place in the run";
            let other = FabricError::Mismatch { rank, peer, field, ours, theirs };
            return Err(self.fabric.get_mut().abort(other));
        }
        Ok(message.part(0..length))
    }

    /// The same, if it is as long as it must be.
    fn checked(
        &mut self,
        peer: Rank,
        message: &Message,
        expected: u64,
        stamp: u64,
    ) -> Result<Message, FabricError> {
        let message = self.open(peer, message, stamp)?;
        let (actual, expected) = (message.bytes().len(), expected as usize);
        if actual == expected {
            return Ok(message);
        }
        let rank = self.rank();
        Err(self.fabric.get_mut().abort(FabricError::Length { rank, peer, expected, actual }))
    }

    fn others(&self) -> Vec<Rank> {
        (0..self.ranks()).filter(|&rank| rank != LEADER).collect()
    }

    /// What the next order is stamped with.
    fn next_order(&mut self) -> u64 {
        self.orders += 1;
        stamp(&[self.plan, self.orders])
    }

    /// Gives an order to all other ranks. A heartbeat is answered.
    pub(super) fn order(&mut self, order: &Order) -> Result<(), FabricError> {
        let receives = if let Order::Heartbeat { .. } = order { self.others() } else { Vec::new() };
        self.ask(order, &receives, 0).map(|_| ())
    }

    /// Asks a rank for the time by its clock; says when, by this rank's.
    pub(super) fn ask_time(&mut self, rank: Rank) -> Result<Answer, FabricError> {
        let asked = self.clock(Instant::now());
        let answers = self.ask(&Order::Clock { rank: rank as u64 }, &[rank], 8)?;
        let answered = self.clock(Instant::now());
        let bits = answers.first().and_then(|answer| answer.bytes().first_chunk().copied());
        let theirs = f64::from_le_bytes(bits.unwrap_or_default());
        if !theirs.is_finite() {
            return Err(self.refuse(format!("the time of rank {rank} makes no sense")));
        }
        Ok(Answer { asked, answered, theirs })
    }

    /// Gives an order to all other ranks, and takes the answers of some, so many bytes each.
    fn ask(
        &mut self,
        order: &Order,
        receives: &[Rank],
        bytes: u64,
    ) -> Result<Vec<Message>, FabricError> {
        let stamp = self.next_order();
        let message = self.stamped(&order.to_bytes(), stamp);
        let sends: Vec<_> = self.others().into_iter().map(|rank| (rank, message.clone())).collect();
        let answers = self.exchange(&sends, receives)?;
        let answers = answers.iter().zip(receives);
        answers.map(|(answer, &peer)| self.checked(peer, answer, bytes, stamp)).collect()
    }

    /// Waits for an order, and answers heartbeats and questions for the time.
    pub(super) fn next(&mut self) -> Result<Order, FabricError> {
        loop {
            let stamp = self.next_order();
            let mut order = None;
            for message in self.exchange(&[], &[LEADER])? {
                order = Order::from_bytes(self.open(LEADER, &message, stamp)?.bytes());
            }
            match order {
                None => return Err(self.refuse("an order of rank 0 makes no sense".into())),
                Some(Order::Heartbeat { .. }) => {
                    let answer = self.stamped(&[], stamp);
                    self.exchange(&[(LEADER, answer)], &[])?;
                }
                Some(Order::Clock { rank }) if rank == self.rank() as u64 => {
                    let now = self.clock(Instant::now());
                    let answer = self.stamped(&now.to_le_bytes(), stamp);
                    self.exchange(&[(LEADER, answer)], &[])?;
                }
                Some(Order::Clock { .. }) => {}
                Some(order) => return Ok(order),
            }
        }
    }

    /// Agrees with all ranks that a plan is laid out, and stamps messages with it from here on.
    pub(super) fn settle(&mut self, plan: u64) -> Result<(), FabricError> {
        self.plan = plan;
        self.fabric.get_mut().barrier(Instant::now() + self.timeout.max(LOADING))
    }

    /// Waits until all ranks know that it is over: who left before would look dead to those that do not.
    pub(super) fn part(&mut self) -> Result<(), FabricError> {
        self.fabric.get_mut().barrier(Instant::now() + self.timeout)
    }

    /// Tells the leader what came of a step.
    pub(super) fn report(&mut self, step: u64, bytes: &[u8]) -> Result<(), FabricError> {
        let message = self.stamped(bytes, stamp(&[self.plan, step]));
        self.exchange(&[(LEADER, message)], &[]).map(|_| ())
    }

    /// What came of a step on each of these ranks, so many bytes each.
    pub(super) fn reports(
        &mut self,
        step: u64,
        from: &[(Rank, u64)],
    ) -> Result<Vec<Message>, FabricError> {
        let ranks: Vec<Rank> = from.iter().map(|&(rank, _)| rank).collect();
        let stamp = stamp(&[self.plan, step]);
        let messages = self.exchange(&[], &ranks)?;
        let checked = messages.iter().zip(from);
        checked
            .map(|(message, &(rank, length))| self.checked(rank, message, length, stamp))
            .collect()
    }
}

/// A card's way to the others, which are other ranks.
///
/// Nothing is committed here: what a step gives back leaves rank 0 only when all of its reports have come, and
/// after a fault nobody's memory is used again.
pub(super) struct Neighbours<'w, 'f> {
    wire: &'w mut Wire<'f>,
    /// The rank of every member.
    ranks: &'w [Rank],
    /// The members of the card's group.
    members: Range<usize>,
    /// The card's rank there.
    rank: usize,
    step: u64,
    /// Exchanges of the group in this step.
    exchanges: u64,
}

impl<'w, 'f> Neighbours<'w, 'f> {
    pub(super) fn new(
        wire: &'w mut Wire<'f>,
        ranks: &'w [Rank],
        members: Range<usize>,
        rank: usize,
        step: u64,
    ) -> Self {
        Neighbours { wire, ranks, members, rank, step, exchanges: 0 }
    }

    /// The rank, in the fabric, of a rank of the group.
    fn at(&self, member: usize) -> Rank {
        self.ranks[self.members.start + member]
    }

    /// What the next exchange of the group is stamped with.
    fn next_exchange(&mut self) -> u64 {
        self.exchanges += 1;
        stamp(&[self.wire.plan, self.step, self.exchanges])
    }

    /// What messages from one stage to the next are stamped with.
    fn passing(&self, step: u64) -> u64 {
        stamp(&[self.wire.plan, step, u64::MAX])
    }

    /// Takes the bytes of one rank.
    fn fetch(&mut self, from: Rank, into: &mut [u8], stamp: u64) -> Result<(), FabricError> {
        for message in self.wire.exchange(&[], &[from])? {
            let message = self.wire.checked(from, &message, into.len() as u64, stamp)?;
            into.copy_from_slice(message.bytes());
        }
        Ok(())
    }
}

impl Peers for Neighbours<'_, '_> {
    type Fault = FabricError;

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.members.len()
    }

    fn all_gather(
        &mut self,
        own: &[u8],
        bytes: impl Fn(usize) -> u64,
        mut read: impl FnMut(usize, &[u8]),
    ) -> Result<(), FabricError> {
        let stamp = self.next_exchange();
        // Who has nothing to give sends nothing.
        let others: Vec<usize> = (0..self.ranks()).filter(|&other| other != self.rank).collect();
        let givers: Vec<usize> = others.iter().copied().filter(|&one| bytes(one) > 0).collect();
        let message = self.wire.stamped(own, stamp);
        let takers = if own.is_empty() { &[] } else { &others[..] };
        let sends: Vec<_> = takers.iter().map(|&one| (self.at(one), message.clone())).collect();
        let receives: Vec<Rank> = givers.iter().map(|&one| self.at(one)).collect();
        let mut messages = self.wire.exchange(&sends, &receives)?.into_iter().zip(givers);
        for rank in 0..self.ranks() {
            if rank == self.rank {
                read(rank, own);
            } else if bytes(rank) > 0
                && let Some((message, giver)) = messages.next()
            {
                let message = self.wire.checked(self.at(giver), &message, bytes(giver), stamp)?;
                read(giver, message.bytes());
            }
        }
        Ok(())
    }

    fn broadcast(&mut self, root: usize, data: &mut [u8]) -> Result<(), FabricError> {
        let stamp = self.next_exchange();
        if root != self.rank {
            return self.fetch(self.at(root), data, stamp);
        }
        let message = self.wire.stamped(data, stamp);
        let others = (0..self.ranks()).filter(|&other| other != root);
        let sends: Vec<_> = others.map(|one| (self.at(one), message.clone())).collect();
        self.wire.exchange(&sends, &[]).map(|_| ())
    }

    fn send(&mut self, to: usize, step: u64, bytes: &[u8]) -> Result<(), FabricError> {
        let message = self.wire.stamped(bytes, self.passing(step));
        self.wire.exchange(&[(self.ranks[to], message)], &[]).map(|_| ())
    }

    fn receive(&mut self, from: usize, step: u64, into: &mut [u8]) -> Result<(), FabricError> {
        self.fetch(self.ranks[from], into, self.passing(step))
    }
}
