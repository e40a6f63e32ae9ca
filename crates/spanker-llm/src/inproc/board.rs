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

use crate::card::{Peers, pages};

/// Nobody has failed.
const NOBODY: usize = usize::MAX;

/// Bytes, and the number of the exchange that they are for. On a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Slot {
    number: AtomicU64,
    bytes: RwLock<Vec<u8>>,
}

impl Slot {
    fn new(bytes: u64) -> Slot {
        let bytes = RwLock::new(Vec::with_capacity(bytes as usize));
        Slot { number: AtomicU64::new(0), bytes }
    }

    fn allocated(&self) -> usize {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner).capacity()
    }
}

/// All boards of a run.
#[derive(Debug)]
pub(super) struct Boards {
    /// By stage and rank.
    slots: Vec<Vec<[Slot; 2]>>,
    /// By receiving seat: what the stage before hands over.
    hands: Vec<Slot>,
    /// A seat that has failed.
    failed: AtomicUsize,
    /// How often to look before giving up the core.
    looks: u32,
}

impl Boards {
    /// Boards for what cards exchange: `staging` says how much that is, card by card.
    pub(super) fn new(programs: &Programs, staging: &[HostStaging], patient: bool) -> Boards {
        let slots = |members: &std::ops::Range<usize>| {
            let given = staging[members.clone()].iter().map(|card| card.given);
            given.map(|bytes| [Slot::new(bytes), Slot::new(bytes)]).collect()
        };
        Boards {
            slots: programs.groups().iter().map(slots).collect(),
            hands: staging.iter().map(|card| Slot::new(card.handed)).collect(),
            failed: AtomicUsize::new(NOBODY),
            looks: if patient { 2000 } else { 20 },
        }
    }

    /// Bytes that are there for what a seat gives and is handed, in whole pages.
    pub(super) fn allocated(&self, programs: &Programs, seat: usize) -> u64 {
        let member = &programs.members()[seat];
        let given = self.slots[member.stage][member.rank].iter().map(Slot::allocated).sum();
        pages(given) + pages(self.hands[seat].allocated())
    }

    /// The seat that has failed, if one has.
    pub(super) fn culprit(&self) -> Option<usize> {
        Some(self.failed.load(Ordering::Acquire)).filter(|&seat| seat != NOBODY)
    }

    /// Lets everybody know that a seat has failed.
    pub(super) fn fail(&self, seat: usize) {
        let _ = self.failed.compare_exchange(NOBODY, seat, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Waits until a slot is for an exchange.
    fn wait(&self, slot: &Slot, number: u64) -> Result<(), GivenUp> {
        let mut looks = 0;
        while slot.number.load(Ordering::Acquire) < number {
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
    boards: Arc<Boards>,
    seat: usize,
    stage: usize,
    rank: usize,
    /// Exchanges of the group so far.
    exchanges: u64,
}

impl Link {
    pub(super) fn new(boards: &Arc<Boards>, programs: &Programs, seat: usize) -> Link {
        let member = &programs.members()[seat];
        let (stage, rank) = (member.stage, member.rank);
        Link { boards: Arc::clone(boards), seat, stage, rank, exchanges: 0 }
    }

    /// Lets everybody know that this card has failed.
    pub(super) fn fail(&self) {
        self.boards.fail(self.seat);
    }

    /// Leaves bytes for the next exchange of the group.
    fn leave(&mut self, own: &[u8]) {
        self.exchanges += 1;
        let turn = (self.exchanges % 2) as usize;
        fill(&self.boards.slots[self.stage][self.rank][turn], self.exchanges, own);
    }

    /// Calls `read` with what each rank has left for this exchange.
    fn read(&self, mut read: impl FnMut(usize, &[u8])) -> Result<(), GivenUp> {
        let turn = (self.exchanges % 2) as usize;
        for (rank, slot) in self.boards.slots[self.stage].iter().enumerate() {
            self.boards.wait(&slot[turn], self.exchanges)?;
            read(rank, &slot[turn].bytes.read().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(())
    }
}

impl Peers for Link {
    type Fault = GivenUp;

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.boards.slots[self.stage].len()
    }

    fn meet(
        &mut self,
        own: &[u8],
        _: impl Fn(usize) -> u64,
        read: impl FnMut(usize, &[u8]),
    ) -> Result<(), GivenUp> {
        self.leave(own);
        self.read(read)
    }

    fn spread(&mut self, root: usize, data: &mut [u8]) -> Result<(), GivenUp> {
        self.leave(if root == self.rank { data } else { &[] });
        self.read(|rank, given| {
            if rank == root {
                data.copy_from_slice(given);
            }
        })
    }

    fn hand(&mut self, to: usize, step: u64, bytes: &[u8]) -> Result<(), GivenUp> {
        fill(&self.boards.hands[to], step, bytes);
        Ok(())
    }

    fn take(&mut self, _: usize, step: u64, into: &mut [u8]) -> Result<(), GivenUp> {
        let slot = &self.boards.hands[self.seat];
        self.boards.wait(slot, step)?;
        into.copy_from_slice(&slot.bytes.read().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }
}
