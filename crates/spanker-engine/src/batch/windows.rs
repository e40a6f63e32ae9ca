// SPDX-License-Identifier: Apache-2.0
//! The blocks of layers with a window: which block of a sequence has one, and whose windows see it.
//!
//! A block of the KV cache has one in these layers from the first token that is written to it until no window of a
//! sequence that runs sees it and another needs it; the one that was seen longest ago goes first. A beginning that is
//! known can be used where the blocks are there that are seen from its end. Sequences hold what they see; what a
//! step that has begun sees no more is free for those that begin after it, because cards run steps in their order.

use std::collections::BTreeSet;

use spanker_llm::WindowCache;

/// The blocks of layers with a window.
#[derive(Debug)]
pub(super) struct WindowBlocks {
    cache: WindowCache,
    /// For each block of the KV cache, its block in these layers.
    own: Vec<Option<u32>>,
    /// For each block of the KV cache, the sequences that hold its block in these layers.
    holders: Vec<u32>,
    /// For each block of the KV cache, when it was held last.
    held: Vec<u64>,
    free: Vec<u32>,
    /// Blocks of the KV cache that have one in these layers which nobody holds.
    idle: BTreeSet<(u64, u32)>,
    clock: u64,
}

impl WindowBlocks {
    /// For a KV cache of so many blocks.
    pub(super) fn new(cache: WindowCache, blocks: usize) -> WindowBlocks {
        WindowBlocks {
            cache,
            own: vec![None; blocks],
            holders: vec![0; blocks],
            held: vec![0; blocks],
            free: (0..cache.blocks as u32).rev().collect(),
            idle: BTreeSet::new(),
            clock: 0,
        }
    }

    /// The first of a sequence's blocks that a row at a position sees.
    pub(super) fn first_seen(&self, position: usize) -> usize {
        self.cache.seen(position as u64, position as u64).start as usize
    }

    /// Whether all blocks that a row behind these sees have one here.
    pub(super) fn sees(&self, blocks: &[u32], position: usize) -> bool {
        let seen = &blocks[self.first_seen(position).min(blocks.len())..];
        seen.iter().all(|&block| self.has(block))
    }

    pub(super) fn has(&self, block: u32) -> bool {
        self.own[block as usize].is_some()
    }

    /// The block in these layers of one that is held.
    pub(super) fn block(&self, block: u32) -> u32 {
        // Any other block is somebody else's.
        let own = self.own[block as usize].filter(|_| self.holders[block as usize] > 0);
        own.expect("blocks that a step sees are held")
    }

    /// One holder more, with a block in these layers if there is none yet. False where there is none to be had.
    pub(super) fn hold(&mut self, block: u32) -> bool {
        let at = block as usize;
        if self.own[at].is_none() {
            let free = self.free.pop().or_else(|| {
                let (_, longest) = self.idle.pop_first()?;
                self.own[longest as usize].take()
            });
            let Some(free) = free else { return false };
            self.own[at] = Some(free);
        } else {
            self.idle.remove(&(self.held[at], block));
        }
        self.holders[at] += 1;
        true
    }

    /// One holder less of each of these.
    pub(super) fn release(&mut self, blocks: &[u32]) {
        self.clock += 1;
        for &block in blocks {
            let at = block as usize;
            self.holders[at] -= 1;
            self.held[at] = self.clock;
            if self.holders[at] == 0 {
                self.idle.insert((self.clock, block));
            }
        }
    }

    /// What was in a block is not there any more.
    pub(super) fn forget(&mut self, block: u32) {
        let at = block as usize;
        debug_assert_eq!(self.holders[at], 0, "block {block} is held");
        if let Some(own) = self.own[at].take() {
            self.idle.remove(&(self.held[at], block));
            self.free.push(own);
        }
    }

    /// A block has the same content as another, which is used from now on.
    pub(super) fn merge(&mut self, block: u32, other: u32) {
        let (from, to) = (block as usize, other as usize);
        let (own, holders) = (self.own[from].take(), std::mem::take(&mut self.holders[from]));
        let Some(own) = own else { return };
        self.idle.remove(&(self.held[from], block));
        self.idle.remove(&(self.held[to], other));
        match self.own[to] {
            Some(_) => self.free.push(own),
            None => self.own[to] = Some(own),
        }
        self.holders[to] += holders;
        if self.holders[to] == 0 {
            self.idle.insert((self.held[to], other));
        }
    }

    /// Blocks in these layers that nobody holds.
    #[cfg(test)]
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> WindowBlocks {
        WindowBlocks::new(WindowCache { window: 70, blocks: 2 }, 8)
    }

    #[test]
    fn block_that_was_seen_longest_ago_goes_first_and_held_ones_stay() {
        let mut blocks = two();
        assert!(blocks.hold(5) && blocks.hold(3) && !blocks.hold(4));
        assert!(blocks.hold(5), "another holder of the same");
        blocks.release(&[5]);
        assert!(!blocks.hold(4), "one is left");
        blocks.release(&[5]);
        blocks.release(&[3]);
        assert!(blocks.sees(&[3, 5], 128) && blocks.hold(4));
        assert!(!blocks.has(5) && blocks.has(3));
        // A row at 128 sees from 59 on, which is in the first block; one at 133 does not.
        assert!(!blocks.sees(&[5, 3], 128) && blocks.sees(&[5, 3], 133));
        blocks.forget(3);
        assert_eq!(blocks.available(), 1);
    }

    #[test]
    fn same_content_has_one_block_and_the_holders_of_both() {
        let mut blocks = two();
        assert!(blocks.hold(1) && blocks.hold(2));
        blocks.release(&[2]);
        blocks.merge(1, 2);
        assert_eq!((blocks.has(1), blocks.available()), (false, 1));
        blocks.release(&[2]);
        assert_eq!(blocks.available(), 2);
        // The other has lost its own.
        assert!(blocks.hold(6));
        blocks.merge(6, 7);
        assert!(blocks.has(7) && !blocks.has(6));
        blocks.release(&[7]);
        assert_eq!(blocks.available(), 2);
    }
}
