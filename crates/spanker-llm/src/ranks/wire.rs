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
use super::supply::{self, Store};

/// The rank that gives orders.
pub(super) const LEADER: Rank = 0;

/// Bytes of a stamp, behind those of a message.
const STAMP: usize = 8;

/// What every message belongs to: the same call as barriers, which others may have reached already.
const CALL: Call = Call::BARRIER;

/// FNV-1a of words.
pub(super) fn stamp(words: &[u64]) -> u64 {
    crate::fingerprint(words.iter().flat_map(|word| word.to_le_bytes()))
}

/// What a message is stamped with.
fn stamp_of(message: &Message) -> Option<u64> {
    message.bytes().last_chunk().map(|end| u64::from_le_bytes(*end))
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
    /// How long a worker waits for an order.
    order_timeout: Duration,
    /// Orders so far.
    orders: u64,
    /// What the plan in use is stamped with.
    plan: u64,
    /// Where this rank's clock begins.
    origin: Instant,
    /// The stamps of reports on steps that are under way.
    awaited: Vec<u64>,
    /// Reports that came while something else was waited for: whose, their stamps, and they themselves.
    early: Vec<(Rank, u64, Message)>,
}

impl<'f> Wire<'f> {
    pub(super) fn new(fabric: End<'f>, timeout: Duration) -> Self {
        let origin = Instant::now();
        let (pool, awaited, early) = (Pool::default(), Vec::new(), Vec::new());
        let order_timeout = timeout;
        Wire { fabric, pool, timeout, order_timeout, orders: 0, plan: 0, origin, awaited, early }
    }

    /// How long this worker waits for orders from now on.
    pub(super) fn wait_for_orders(&mut self, order_timeout: Duration) {
        self.order_timeout = order_timeout;
    }

    /// Gives out what ranks lack of the model's file.
    pub(super) fn supply(
        &mut self,
        file: &[u8],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), FabricError> {
        let (others, timeout) = (self.others(), self.timeout);
        supply::supply_chunks(self.fabric.get_mut(), file, &others, timeout, progress).map(|_| ())
    }

    /// Asks for what this rank lacks of some bytes of the model's file.
    pub(super) fn fetch_chunks(
        &mut self,
        store: &dyn Store,
        needed: &[Range<u64>],
    ) -> Result<(), FabricError> {
        let timeout = self.timeout;
        supply::fetch_chunks(self.fabric.get_mut(), store, needed, timeout).map(|_| ())
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

    /// What messages of the plan in use are stamped with.
    pub(super) fn plan(&self) -> u64 {
        self.plan
    }

    /// How long a rank waits for another.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A message of some parts, end to end, with a stamp.
    pub(super) fn stamped(&mut self, parts: &[&[u8]], stamp: u64) -> Message {
        let bytes = parts.iter().map(|part| part.len()).sum::<usize>();
        self.pool.write(bytes + STAMP, |out| {
            let (mut rest, end) = out.split_at_mut(bytes);
            for part in parts {
                let (own, others) = rest.split_at_mut(part.len());
                own.copy_from_slice(part);
                rest = others;
            }
            end.copy_from_slice(&stamp.to_le_bytes());
        })
    }

    /// Bytes of a stamped message without its stamp.
    pub(super) fn payload(message: &Message) -> u64 {
        message.bytes().len().saturating_sub(STAMP) as u64
    }

    /// Bytes of this rank's own.
    pub(super) fn write(&mut self, length: usize, fill: impl FnOnce(&mut [u8])) -> Message {
        self.pool.write(length, fill)
    }

    fn exchange(
        &mut self,
        sends: &[(Rank, Message)],
        receives: &[Rank],
    ) -> Result<Vec<Message>, FabricError> {
        self.exchange_until(sends, receives, Instant::now() + self.timeout)
    }

    /// Sends messages and receives others, all at once. A rank that shares the leader's stage, or comes before it, has
    /// reported on a step before it sends what belongs to the next one: the leader keeps such reports.
    pub(super) fn exchange_until(
        &mut self,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        let fabric = self.fabric.get_mut();
        let mut messages = fabric.exchange(&CALL, sends, receives, deadline)?;
        for (message, &from) in messages.iter_mut().zip(receives) {
            while let Some(stamp) = stamp_of(message).filter(|stamp| self.awaited.contains(stamp)) {
                let fabric = self.fabric.get_mut();
                let Some(next) = fabric.exchange(&CALL, &[], &[from], deadline)?.pop() else {
                    break;
                };
                self.early.push((from, stamp, std::mem::replace(message, next)));
            }
        }
        Ok(messages)
    }

    /// Sends bytes to one rank.
    pub(super) fn send(&mut self, to: Rank, bytes: &[u8], stamp: u64) -> Result<(), FabricError> {
        let message = self.stamped(&[bytes], stamp);
        self.exchange(&[(to, message)], &[]).map(|_| ())
    }

    /// Takes the bytes of one rank.
    pub(super) fn fetch(
        &mut self,
        from: Rank,
        into: &mut [u8],
        stamp: u64,
    ) -> Result<(), FabricError> {
        for message in self.exchange(&[], &[from])? {
            let message = self.checked(from, &message, into.len() as u64, stamp)?;
            into.copy_from_slice(message.bytes());
        }
        Ok(())
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
    pub(super) fn checked(
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
        let message = self.stamped(&[&order.to_bytes()], stamp);
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
            let until = Instant::now() + self.order_timeout;
            for message in self.exchange_until(&[], &[LEADER], until)? {
                order = Order::from_bytes(self.open(LEADER, &message, stamp)?.bytes());
            }
            match order {
                None => return Err(self.refuse("an order of rank 0 makes no sense".into())),
                Some(Order::Heartbeat { .. }) => {
                    self.send(LEADER, &[], stamp)?;
                }
                Some(Order::Clock { rank }) if rank == self.rank() as u64 => {
                    let now = self.clock(Instant::now());
                    self.send(LEADER, &now.to_le_bytes(), stamp)?;
                }
                Some(Order::Clock { .. }) => {}
                Some(order) => return Ok(order),
            }
        }
    }

    /// Agrees with all ranks that a plan is laid out, and stamps messages with it from here on. A rank may have to read
    /// its part of a file of so many bytes from a disk first.
    pub(super) fn settle(&mut self, plan: u64, file: u64) -> Result<(), FabricError> {
        self.plan = plan;
        self.awaited.clear();
        self.early.clear();
        let loading = supply::reading_time(file);
        self.fabric.get_mut().barrier(Instant::now() + self.timeout.max(loading))
    }

    /// Waits until all ranks know that it is over: who left before would look dead to those that do not.
    pub(super) fn part(&mut self) -> Result<(), FabricError> {
        self.fabric.get_mut().barrier(Instant::now() + self.timeout)
    }

    /// Tells the leader what came of a step.
    pub(super) fn report(&mut self, step: u64, bytes: &[u8]) -> Result<(), FabricError> {
        self.send(LEADER, bytes, stamp(&[self.plan, step]))
    }

    /// Ranks will report on a step.
    pub(super) fn await_reports(&mut self, step: u64) {
        self.awaited.push(stamp(&[self.plan, step]));
    }

    /// What came of a step on each of these ranks, so many bytes each.
    pub(super) fn reports(
        &mut self,
        step: u64,
        from: &[(Rank, u64)],
    ) -> Result<Vec<Message>, FabricError> {
        let stamp = stamp(&[self.plan, step]);
        self.awaited.retain(|awaited| *awaited != stamp);
        let is_here = |(of, found, _): &(Rank, u64, Message), rank| *of == rank && *found == stamp;
        let ranks = from.iter().map(|&(rank, _)| rank);
        let left = ranks.filter(|&rank| !self.early.iter().any(|one| is_here(one, rank)));
        let left: Vec<Rank> = left.collect();
        let mut messages = self.exchange(&[], &left)?.into_iter();
        let mut reports = Vec::with_capacity(from.len());
        for &(rank, length) in from {
            let early = self.early.iter().position(|one| is_here(one, rank));
            let message = match early {
                Some(at) => Some(self.early.swap_remove(at).2),
                None => messages.next(),
            };
            if let Some(message) = message {
                reports.push(self.checked(rank, &message, length, stamp)?);
            }
        }
        Ok(reports)
    }
}
