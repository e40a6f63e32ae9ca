// SPDX-License-Identifier: Apache-2.0
//! A rank's end of the fabric, with what its messages are stamped with: the plan, the step, the exchange. Ranks that
//! are not at the same one find out from the first message between them.

use std::ops::Range;
use std::time::{Duration, Instant};

use spanker_fabric::{Call, Fabric, FabricError, Letter, Pool};
use spanker_plan::{Algorithm, Collective, DType, Rank, ReduceOp};

use super::order::Order;
use crate::card::Peers;

/// The rank that gives orders.
pub(super) const FRONT: Rank = 0;

/// How long a rank may take to lay a plan out: it may have to read its part of the file from a disk.
const LOADING: Duration = Duration::from_secs(600);

/// FNV-1a of words.
pub(super) fn stamp(words: &[u64]) -> u64 {
    fingerprint(words.iter().flat_map(|word| word.to_le_bytes()))
}

/// FNV-1a of bytes.
pub(crate) fn fingerprint(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// A rank's end of the fabric.
pub(super) struct Wire<'f> {
    fabric: &'f mut dyn Fabric,
    pool: Pool,
    patience: Duration,
    /// Orders so far.
    orders: u64,
    /// What the plan in use is stamped with.
    plan: u64,
}

impl<'f> Wire<'f> {
    pub(super) fn new(fabric: &'f mut dyn Fabric, patience: Duration) -> Self {
        Wire { fabric, pool: Pool::default(), patience, orders: 0, plan: 0 }
    }

    pub(super) fn rank(&self) -> Rank {
        self.fabric.rank()
    }

    pub(super) fn ranks(&self) -> usize {
        self.fabric.ranks()
    }

    /// Gives the group up, with words that the others hear.
    pub(super) fn refuse(&mut self, reason: String) -> FabricError {
        let rank = self.rank();
        self.fabric.abort(FabricError::Refused { rank, reason })
    }

    /// Gives the group up because this rank and the front mean different things.
    pub(super) fn disagree(&mut self, field: &'static str, ours: u64, theirs: u64) -> FabricError {
        let (ours, theirs) = (format!("{ours:016x}"), format!("{theirs:016x}"));
        let rank = self.rank();
        self.fabric.abort(FabricError::Mismatch { rank, peer: FRONT, field, ours, theirs })
    }

    fn letter(&mut self, bytes: &[u8]) -> Letter {
        self.pool.write(bytes.len(), |out| out.copy_from_slice(bytes))
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Letter)],
        receives: &[Rank],
    ) -> Result<Vec<Letter>, FabricError> {
        self.fabric.exchange(call, sends, receives, Instant::now() + self.patience)
    }

    /// The letter that `peer` was to send, if it is as long as it must be.
    fn checked(
        &mut self,
        peer: Rank,
        letter: Letter,
        expected: u64,
    ) -> Result<Letter, FabricError> {
        let (actual, expected) = (letter.bytes().len(), expected as usize);
        if actual == expected {
            return Ok(letter);
        }
        let rank = self.rank();
        Err(self.fabric.abort(FabricError::Length { rank, peer, expected, actual }))
    }

    fn others(&self) -> Vec<Rank> {
        (0..self.ranks()).filter(|&rank| rank != FRONT).collect()
    }

    /// The call of the next order. Its length is the order's own business.
    fn next_order(&mut self) -> Call {
        self.orders += 1;
        let plan = stamp(&[self.plan, self.orders]);
        call(Collective::Broadcast { root: FRONT }, 0, DType::U8, plan)
    }

    /// Gives an order to all other ranks. A beat is answered.
    pub(super) fn order(&mut self, order: &Order) -> Result<(), FabricError> {
        let call = self.next_order();
        let letter = self.letter(&order.to_bytes());
        let others = self.others();
        let sends: Vec<_> = others.iter().map(|&rank| (rank, letter.clone())).collect();
        let receives = if let Order::Beat { .. } = order { &others[..] } else { &[] };
        self.exchange(&call, &sends, receives).map(|_| ())
    }

    /// Waits for an order, and answers beats.
    pub(super) fn next(&mut self) -> Result<Order, FabricError> {
        loop {
            let call = self.next_order();
            let letters = self.exchange(&call, &[], &[FRONT])?;
            match letters.first().and_then(|letter| Order::from_bytes(letter.bytes())) {
                None => return Err(self.refuse("an order of rank 0 makes no sense".into())),
                Some(Order::Beat { .. }) => {
                    let answer = self.letter(&[1]);
                    self.exchange(&call, &[(FRONT, answer)], &[])?;
                }
                Some(order) => return Ok(order),
            }
        }
    }

    /// Agrees with all ranks that a plan is laid out, and that it is this one.
    pub(super) fn settle(&mut self, plan: u64) -> Result<(), FabricError> {
        self.plan = plan;
        let call = call(Collective::Barrier, 0, DType::U8, plan);
        self.fabric.commit(&call, Instant::now() + self.patience.max(LOADING))
    }

    fn report_call(&self, step: u64) -> Call {
        call(Collective::Gather { root: FRONT }, 0, DType::U8, stamp(&[self.plan, step]))
    }

    /// Tells the front what came of a step.
    pub(super) fn report(&mut self, step: u64, bytes: &[u8]) -> Result<(), FabricError> {
        let letter = self.letter(bytes);
        let call = self.report_call(step);
        self.exchange(&call, &[(FRONT, letter)], &[]).map(|_| ())
    }

    /// What came of a step on each of these ranks, so many bytes each.
    pub(super) fn reports(
        &mut self,
        step: u64,
        from: &[(Rank, u64)],
    ) -> Result<Vec<Letter>, FabricError> {
        let ranks: Vec<Rank> = from.iter().map(|&(rank, _)| rank).collect();
        let call = self.report_call(step);
        let letters = self.exchange(&call, &[], &ranks)?;
        let checked = letters.into_iter().zip(from);
        checked.map(|(letter, &(rank, length))| self.checked(rank, letter, length)).collect()
    }
}

fn call(collective: Collective, elements: usize, dtype: DType, plan: u64) -> Call {
    let (algorithm, op) = (Algorithm::OneShot, ReduceOp::Sum);
    Call { collective, algorithm, elements, dtype, op, plan }
}

/// A card's way to the others, which are other ranks.
///
/// Nothing is committed here: what a step gives back leaves rank 0 only when all of its reports have come, and
/// after a fault nobody's memory is used again.
pub(super) struct Neighbours<'w, 'f> {
    wire: &'w mut Wire<'f>,
    /// The rank of every seat.
    seats: &'w [Rank],
    /// The seats of the card's group.
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
        seats: &'w [Rank],
        members: Range<usize>,
        rank: usize,
        step: u64,
    ) -> Self {
        Neighbours { wire, seats, members, rank, step, exchanges: 0 }
    }

    /// The rank, in the fabric, of a rank of the group.
    fn at(&self, member: usize) -> Rank {
        self.seats[self.members.start + member]
    }

    fn next_call(&mut self, collective: Collective, bytes: u64) -> Call {
        self.exchanges += 1;
        let plan = stamp(&[self.wire.plan, self.step, self.exchanges]);
        call(collective, bytes as usize, DType::U8, plan)
    }

    /// The call of a message from one stage to the next.
    fn passing(&self, from: Rank, step: u64, bytes: usize) -> Call {
        let plan = stamp(&[self.wire.plan, step]);
        call(Collective::Scatter { root: from }, bytes, DType::U8, plan)
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

    fn meet(
        &mut self,
        own: &[u8],
        bytes: impl Fn(usize) -> u64,
        mut read: impl FnMut(usize, &[u8]),
    ) -> Result<(), FabricError> {
        let total = (0..self.ranks()).map(&bytes).sum();
        let call = self.next_call(Collective::AllGather, total);
        // Who has nothing to give sends nothing.
        let others: Vec<usize> = (0..self.ranks()).filter(|&other| other != self.rank).collect();
        let givers: Vec<usize> = others.iter().copied().filter(|&one| bytes(one) > 0).collect();
        let letter = self.wire.letter(own);
        let takers = if own.is_empty() { &[] } else { &others[..] };
        let sends: Vec<_> = takers.iter().map(|&one| (self.at(one), letter.clone())).collect();
        let receives: Vec<Rank> = givers.iter().map(|&one| self.at(one)).collect();
        let mut letters = self.wire.exchange(&call, &sends, &receives)?.into_iter().zip(givers);
        for rank in 0..self.ranks() {
            if rank == self.rank {
                read(rank, own);
            } else if bytes(rank) > 0
                && let Some((letter, giver)) = letters.next()
            {
                let letter = self.wire.checked(self.at(giver), letter, bytes(giver))?;
                read(giver, letter.bytes());
            }
        }
        Ok(())
    }

    fn spread(&mut self, root: usize, data: &mut [u8]) -> Result<(), FabricError> {
        let from = self.at(root);
        let call = self.next_call(Collective::Broadcast { root: from }, data.len() as u64);
        if root == self.rank {
            let letter = self.wire.letter(data);
            let others = (0..self.ranks()).filter(|&other| other != root);
            let sends: Vec<_> = others.map(|one| (self.at(one), letter.clone())).collect();
            return self.wire.exchange(&call, &sends, &[]).map(|_| ());
        }
        let letters = self.wire.exchange(&call, &[], &[from])?;
        for letter in letters {
            let letter = self.wire.checked(from, letter, data.len() as u64)?;
            data.copy_from_slice(letter.bytes());
        }
        Ok(())
    }

    fn hand(&mut self, to: usize, step: u64, bytes: &[u8]) -> Result<(), FabricError> {
        let call = self.passing(self.wire.rank(), step, bytes.len());
        let letter = self.wire.letter(bytes);
        self.wire.exchange(&call, &[(self.seats[to], letter)], &[]).map(|_| ())
    }

    fn take(&mut self, from: usize, step: u64, into: &mut [u8]) -> Result<(), FabricError> {
        let from = self.seats[from];
        let call = self.passing(from, step, into.len());
        let letters = self.wire.exchange(&call, &[], &[from])?;
        for letter in letters {
            let letter = self.wire.checked(from, letter, into.len() as u64)?;
            into.copy_from_slice(letter.bytes());
        }
        Ok(())
    }
}
