// SPDX-License-Identifier: Apache-2.0
//! Where cards that are threads leave what others need.
//!
//! Every rank of a group has two slots, used in turn. A rank leaves its bytes in the slot of an exchange and then
//! reads everybody's. Nobody overwrites a slot that another still reads: before a rank fills the slot of
//! exchange `e + 2`, it has seen everybody in exchange `e + 1`, and whoever is there has read exchange `e`.
//! For this, every rank takes part in every exchange of its group, if only with nothing.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use crate::program::Lowering;

/// Nobody has failed.
const NOBODY: usize = usize::MAX;

/// Bytes, and the number of the exchange that they are for. On a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Slot {
    number: AtomicU64,
    bytes: RwLock<Vec<u8>>,
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
    pub(super) fn new(lowering: &Lowering, patient: bool) -> Boards {
        let slots = |members: &std::ops::Range<usize>| {
            members.clone().map(|_| Default::default()).collect()
        };
        Boards {
            slots: lowering.members.iter().map(slots).collect(),
            hands: lowering.seats.iter().map(|_| Slot::default()).collect(),
            failed: AtomicUsize::new(NOBODY),
            looks: if patient { 2000 } else { 20 },
        }
    }

    /// The seat that has failed, if one has.
    pub(super) fn culprit(&self) -> Option<usize> {
        Some(self.failed.load(Ordering::Acquire)).filter(|&seat| seat != NOBODY)
    }

    /// Lets everybody know that a seat has failed.
    pub(super) fn fail(&self, seat: usize) {
        let _ = self.failed.compare_exchange(NOBODY, seat, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Waits until a slot is for an exchange; false if somebody has failed.
    fn wait(&self, slot: &Slot, number: u64) -> bool {
        let mut looks = 0;
        while slot.number.load(Ordering::Acquire) < number {
            looks += 1;
            if looks < self.looks {
                std::hint::spin_loop();
                continue;
            }
            if self.culprit().is_some() {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

fn fill(slot: &Slot, number: u64, bytes: &[u8]) {
    let mut kept = slot.bytes.write().unwrap_or_else(PoisonError::into_inner);
    kept.clear();
    kept.extend_from_slice(bytes);
    drop(kept);
    slot.number.store(number, Ordering::Release);
}

/// A card's way to the others.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) boards: Arc<Boards>,
    pub(super) seat: usize,
    pub(super) stage: usize,
    pub(super) rank: usize,
}

impl Link {
    /// Ranks in the card's group.
    pub(super) fn ranks(&self) -> usize {
        self.boards.slots[self.stage].len()
    }

    /// Leaves bytes for an exchange of the group, and calls `read` with what each rank has left, in the
    /// order of ranks. False if somebody has failed.
    pub(super) fn meet(
        &self,
        number: u64,
        bytes: &[u8],
        mut read: impl FnMut(usize, RwLockReadGuard<'_, Vec<u8>>),
    ) -> bool {
        let slots = &self.boards.slots[self.stage];
        let turn = (number % 2) as usize;
        fill(&slots[self.rank][turn], number, bytes);
        for (rank, slot) in slots.iter().enumerate() {
            if !self.boards.wait(&slot[turn], number) {
                return false;
            }
            read(rank, slot[turn].bytes.read().unwrap_or_else(PoisonError::into_inner));
        }
        true
    }

    /// Hands bytes to a seat of the next stage.
    pub(super) fn hand(&self, to: usize, number: u64, bytes: &[u8]) {
        fill(&self.boards.hands[to], number, bytes);
    }

    /// Calls `read` with what the stage before has handed over. False if somebody has failed.
    pub(super) fn take(&self, number: u64, read: impl FnOnce(&[u8])) -> bool {
        let slot = &self.boards.hands[self.seat];
        if !self.boards.wait(slot, number) {
            return false;
        }
        read(&slot.bytes.read().unwrap_or_else(PoisonError::into_inner));
        true
    }
}
