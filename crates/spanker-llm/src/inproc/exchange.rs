// SPDX-License-Identifier: Apache-2.0
//! Where cards that are threads leave what others need.
//!
//! Every rank of a group has two slots, used in turn. A rank leaves its bytes in the slot of an exchange and then
//! reads everybody's. Nobody overwrites a slot that another still reads: before a rank fills the slot of
//! exchange `e + 2`, it has seen everybody in exchange `e + 1`, and whoever is there has read exchange `e`.
//! For this, every rank takes part in every exchange of its group, if only with nothing.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use spanker_plan::{HostStaging, Programs};

use crate::card::{Folding, Peers, pages};

/// Nobody has failed.
const NOBODY: usize = usize::MAX;

/// Bytes, and the number of the exchange that they are for. On a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Slot {
    number: AtomicU64,
    /// Of a hand-off, the last one that was taken.
    taken: AtomicU64,
    bytes: RwLock<Vec<u8>>,
}

impl Slot {
    fn new(bytes: u64) -> Slot {
        let bytes = RwLock::new(Vec::with_capacity(bytes as usize));
        Slot { number: AtomicU64::new(0), taken: AtomicU64::new(0), bytes }
    }

    fn allocated(&self) -> usize {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner).capacity()
    }
}

/// All exchanges of a run.
#[derive(Debug)]
pub(super) struct SharedExchanges {
    /// By stage and rank.
    slots: Vec<Vec<[Slot; 2]>>,
    /// By receiving member: what the stage before sends.
    sent: Vec<Slot>,
    /// A member that has failed.
    failed: AtomicUsize,
    /// How often to look before giving up the core.
    looks: u32,
}

impl SharedExchanges {
    /// Slots for what cards exchange: `staging` says how much that is, card by card.
    pub(super) fn new(
        programs: &Programs,
        staging: &[HostStaging],
        patient: bool,
    ) -> SharedExchanges {
        let slots = |members: &std::ops::Range<usize>| {
            let given = staging[members.clone()].iter().map(|card| card.given);
            given.map(|bytes| [Slot::new(bytes), Slot::new(bytes)]).collect()
        };
        SharedExchanges {
            slots: programs.groups().iter().map(slots).collect(),
            sent: staging.iter().map(|card| Slot::new(card.handed)).collect(),
            failed: AtomicUsize::new(NOBODY),
            looks: if patient { 2000 } else { 20 },
        }
    }

    /// Bytes that are there for what a member gives and is sent, in whole pages.
    pub(super) fn allocated(&self, programs: &Programs, member: usize) -> u64 {
        let place = &programs.members()[member];
        let given = self.slots[place.stage][place.rank].iter().map(Slot::allocated).sum();
        pages(given) + pages(self.sent[member].allocated())
    }

    /// The member that has failed, if one has.
    pub(super) fn culprit(&self) -> Option<usize> {
        Some(self.failed.load(Ordering::Acquire)).filter(|&member| member != NOBODY)
    }

    /// Lets everybody know that a member has failed.
    pub(super) fn fail(&self, member: usize) {
        let _ = self.failed.compare_exchange(NOBODY, member, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Waits until a slot's number is that of an exchange, or a later one.
    fn wait(&self, at: &AtomicU64, number: u64) -> Result<(), GivenUp> {
        let mut looks = 0;
        while at.load(Ordering::Acquire) < number {
            looks += 1;
            if looks < self.looks {
                std::hint::spin_loop();
                continue;
            }
            if self.culprit().is_some() {
                return Err(GivenUp);
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

fn fill(slot: &Slot, number: u64, bytes: &[u8]) {
    let mut kept = slot.bytes.write().unwrap_or_else(PoisonError::into_inner);
    kept.clear();
    kept.extend_from_slice(bytes);
    drop(kept);
    slot.number.store(number, Ordering::Release);
}

/// Somebody has failed, and the step cannot be completed.
#[derive(Debug)]
pub(super) struct GivenUp;

/// A card's way to the others.
#[derive(Debug)]
pub(super) struct Link {
    shared: Arc<SharedExchanges>,
    member: usize,
    stage: usize,
    rank: usize,
    /// Exchanges of the group so far.
    exchanges: u64,
}

impl Link {
    pub(super) fn new(shared: &Arc<SharedExchanges>, programs: &Programs, member: usize) -> Link {
        let place = &programs.members()[member];
        let (stage, rank) = (place.stage, place.rank);
        Link { shared: Arc::clone(shared), member, stage, rank, exchanges: 0 }
    }

    /// Lets everybody know that this card has failed.
    pub(super) fn fail(&self) {
        self.shared.fail(self.member);
    }

    /// Leaves bytes for the next exchange of the group.
    fn leave(&mut self, own: &[u8]) {
        self.exchanges += 1;
        let turn = (self.exchanges % 2) as usize;
        fill(&self.shared.slots[self.stage][self.rank][turn], self.exchanges, own);
    }

    /// Calls `read` with what each rank has left for this exchange.
    fn read(&self, mut read: impl FnMut(usize, &[u8])) -> Result<(), GivenUp> {
        let turn = (self.exchanges % 2) as usize;
        for (rank, slot) in self.shared.slots[self.stage].iter().enumerate() {
            self.shared.wait(&slot[turn].number, self.exchanges)?;
            read(rank, &slot[turn].bytes.read().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(())
    }

    /// Bytes that others get of so many.
    fn to_others(&self, bytes: usize) -> u64 {
        bytes as u64 * (self.ranks() as u64 - 1)
    }
}

impl Peers for Link {
    type Fault = GivenUp;

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.slots[self.stage].len()
    }

    fn all_gather(
        &mut self,
        own: &[u8],
        _: impl Fn(usize) -> u64,
        read: impl FnMut(usize, &[u8]),
    ) -> Result<u64, GivenUp> {
        self.leave(own);
        self.read(read)?;
        Ok(self.to_others(own.len()))
    }

    fn fold(&mut self, data: &mut [u8], folding: Folding) -> Result<u64, GivenUp> {
        // What this rank has is in its slot, so the result can take its place.
        self.leave(data);
        self.read(|rank, given| match rank {
            0 => data.copy_from_slice(given),
            _ => folding.into(data, given),
        })?;
        Ok(self.to_others(data.len()))
    }

    fn send(&mut self, to: usize, step: u64, bytes: &[u8]) -> Result<(), GivenUp> {
        // What was sent for the step before has been taken.
        let slot = &self.shared.sent[to];
        self.shared.wait(&slot.taken, slot.number.load(Ordering::Acquire))?;
        fill(slot, step, bytes);
        Ok(())
    }

    fn receive(&mut self, _: usize, step: u64, into: &mut [u8]) -> Result<(), GivenUp> {
        let slot = &self.shared.sent[self.member];
        self.shared.wait(&slot.number, step)?;
        into.copy_from_slice(&slot.bytes.read().unwrap_or_else(PoisonError::into_inner));
        slot.taken.store(step, Ordering::Release);
        Ok(())
    }
}
