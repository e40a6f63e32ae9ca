// SPDX-License-Identifier: Apache-2.0
//! The blocks of a KV cache: whose they are, and what is in those that are nobody's any more.
//!
//! A block that is full of computed tokens is known by its content: its tokens, and the block before it, which stands for
//! all tokens before. Contents are compared token by token, no hash is believed. A sequence whose prompt begins like
//! another's uses the same blocks; nobody writes to a block that has two users, because only full blocks are shared.
//! Of a block that agrees in its first tokens alone, a copy is made.
//!
//! Blocks that nobody uses keep their content until they are needed: the one that was used longest ago goes first, and of
//! those that were used together the one with the most tokens before it.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use spanker_llm::WindowCache;
use spanker_model::{KV_BLOCK, KvShape};

use super::windows::WindowBlocks;

/// Tokens of a block.
const TOKENS: usize = KV_BLOCK as usize;
/// Blocks behind one other that are looked at for a common beginning, the last ones that were filled.
const LOOKED_AT: usize = 16;

/// The content of a block and of all before it; 0 is no token at all.
type Content = u64;

/// What is known of a block.
#[derive(Debug, Clone, Default)]
struct Block {
    /// Sequences that use it.
    users: u32,
    /// Its content, if it is known by it.
    known: Option<Known>,
    /// When it was last used.
    used: u64,
}

/// A block by its content.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    content: Content,
    before: Content,
    tokens: Vec<u32>,
    /// Blocks before it.
    depth: u32,
}

/// What a sequence finds in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Reused {
    /// Blocks with its first tokens, which it uses from now on.
    pub(crate) blocks: Vec<u32>,
    /// Its first tokens that are computed.
    pub(crate) tokens: usize,
    /// A block of which the last of these is to be a copy.
    pub(crate) copy_of: Option<u32>,
    /// Of these, the first whose block in layers with a window it holds, up to the last.
    pub(crate) held: usize,
}

/// The blocks of one copy of a model.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    /// Blocks without content or users.
    free: Vec<u32>,
    /// Blocks with content and without users: when they were last used, how deep they are from the bottom, and which.
    cached: BTreeSet<(u64, u32, u32)>,
    /// Full blocks by what is before them and their tokens.
    full: HashMap<(Content, Vec<u32>), u32>,
    /// Blocks by what is before them, the last one last.
    after: HashMap<Content, Vec<u32>>,
    contents: Content,
    clock: u64,
    /// Whether contents are kept at all.
    shares: bool,
    /// Blocks of layers with a window, where these have their own.
    windows: Option<WindowBlocks>,
}

impl BlockPool {
    pub(crate) fn new(blocks: usize, shares: bool) -> BlockPool {
        BlockPool {
            blocks: vec![Block::default(); blocks],
            free: (0..blocks as u32).rev().collect(),
            cached: BTreeSet::new(),
            full: HashMap::new(),
            after: HashMap::new(),
            contents: 0,
            clock: 0,
            shares,
            windows: None,
        }
    }

    /// The same where layers with a window have blocks of their own.
    pub(crate) fn with_windows(mut self, cache: Option<WindowCache>) -> BlockPool {
        self.windows = cache.map(|cache| WindowBlocks::new(cache, self.blocks.len()));
        self
    }

    /// Holds the block in layers with a window of one that is to be written or seen. False where there is none.
    pub(crate) fn hold(&mut self, block: u32) -> bool {
        self.windows.as_mut().is_none_or(|windows| windows.hold(block))
    }

    /// These are seen by one sequence less.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        if let Some(windows) = &mut self.windows {
            windows.release(blocks);
        }
    }

    /// The first of a sequence's blocks that layers with a window see from a position on; all are held where there are no
    /// such layers.
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        self.windows.as_ref().map_or(0, |windows| windows.first_seen(position))
    }

    /// The blocks in layers with a window of a sequence that holds some of its blocks; nothing where there are none.
    pub(crate) fn windowed(&self, blocks: &[u32], held: &Range<usize>) -> Vec<u32> {
        let of = |windows: &WindowBlocks| {
            let own = |(at, &block): (usize, &u32)| match held.contains(&at) {
                true => windows.block(block),
                // Nobody looks there.
                false => 0,
            };
            blocks.iter().enumerate().map(own).collect()
        };
        self.windows.as_ref().map_or_else(Vec::new, of)
    }

    /// What is copied in layers with a window where one block is copied to another.
    pub(crate) fn windowed_copy(&self, from: u32, to: u32) -> Option<[u32; 2]> {
        self.windows.as_ref().map(|windows| [from, to].map(|block| windows.block(block)))
    }

    /// All blocks.
    pub(crate) fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that somebody can get: free ones, and those that are nobody's.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Blocks in layers with a window that nobody holds.
    #[cfg(test)]
    pub(crate) fn windowed_available(&self) -> Option<usize> {
        self.windows.as_ref().map(WindowBlocks::available)
    }

    /// Blocks that are nobody's, and have content.
    pub(crate) fn cached(&self) -> usize {
        self.cached.len()
    }

    /// A block for one user, if there is one.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, _, block) = self.cached.pop_first()?;
                self.forget(block);
                block
            }
        };
        self.blocks[block as usize].users = 1;
        Some(block)
    }

    /// One user less of each of these.
    pub(crate) fn give_back(&mut self, blocks: &[u32]) {
        self.clock += 1;
        for &block in blocks {
            let one = &mut self.blocks[block as usize];
            one.users -= 1;
            one.used = self.clock;
            if one.users > 0 {
                continue;
            }
            match &one.known {
                Some(known) => {
                    self.cached.insert((self.clock, u32::MAX - known.depth, block));
                }
                None => {
                    if let Some(windows) = &mut self.windows {
                        windows.forget(block);
                    }
                    self.free.push(block);
                }
            }
        }
    }

    /// What of these tokens is computed already: whole blocks, and the beginning of another. A token at least is left, so
    /// that there is something to ask for. Whoever gets blocks uses them from now on. A block is copied only where there is
    /// room for it beside all blocks that the tokens need: a sequence that is alone must not wait for its own original.
    pub(crate) fn reuse(&mut self, tokens: &[u32]) -> Reused {
        let mut reused = Reused::default();
        if !self.shares {
            return reused;
        }
        let most = tokens.len().saturating_sub(1);
        reused.blocks = self.whole(&tokens[..most]);
        reused.blocks.iter().for_each(|&block| self.use_again(block));
        reused.tokens = reused.blocks.len() * TOKENS;
        reused.held = self.first_seen(reused.tokens).min(reused.blocks.len());
        for &block in &reused.blocks[reused.held..] {
            let is_there = self.hold(block);
            assert!(is_there, "what is seen is there");
        }
        let before = reused.blocks.last().map_or(0, |&last| self.content(last));
        let rest = &tokens[reused.tokens..most];
        if let Some((block, length)) = self.begins_like(before, rest) {
            // The original must not go while the copy is made.
            self.use_again(block);
            let is_there = self.hold(block);
            assert!(is_there, "what is seen is there");
            let needed = KvShape::blocks_for(tokens.len() as u64) as usize - reused.blocks.len();
            let copy = if needed <= self.available() { self.take() } else { None };
            let copy = copy.filter(|&copy| {
                let is_held = self.hold(copy);
                if !is_held {
                    self.give_back(&[copy]);
                }
                is_held
            });
            match copy {
                Some(copy) => {
                    reused.blocks.push(copy);
                    reused.tokens += length;
                    reused.copy_of = Some(block);
                }
                None => self.copied(block),
            }
        }
        reused
    }

    /// Blocks with the first of these tokens that somebody uses already: using them as well takes none from anybody.
    pub(crate) fn in_use(&self, tokens: &[u32]) -> usize {
        // One token at least is left to compute.
        let blocks = self.whole(&tokens[..tokens.len().saturating_sub(1)]).into_iter();
        blocks.take_while(|&block| self.blocks[block as usize].users > 0).count()
    }

    /// Whole blocks with the first of these tokens.
    fn whole(&self, tokens: &[u32]) -> Vec<u32> {
        let mut before: Content = 0;
        let known = |whole: &[u32]| {
            let block = *self.full.get(&(before, whole.to_vec()))?;
            before = self.content(block);
            Some(block)
        };
        let mut blocks: Vec<u32> = tokens.chunks_exact(TOKENS).map_while(known).collect();
        // Of a beginning whose end sees what is not there any more, a shorter one is used.
        if let Some(windows) = &self.windows {
            while !windows.sees(&blocks, blocks.len() * TOKENS) {
                blocks.pop();
            }
        }
        blocks
    }

    /// The copy of a block is made.
    pub(crate) fn copied(&mut self, original: u32) {
        self.release(&[original]);
        self.give_back(&[original]);
    }

    /// The block behind a content that has most of these tokens first, and how many.
    fn begins_like(&self, before: Content, tokens: &[u32]) -> Option<(u32, usize)> {
        let list = self.after.get(&before)?;
        let common = |block: &u32| {
            let known = self.blocks[*block as usize].known.as_ref()?;
            let same = known.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            let is_there = self.windows.as_ref().is_none_or(|windows| windows.has(*block));
            (same > 0 && is_there).then_some((*block, same))
        };
        list.iter().rev().take(LOOKED_AT).filter_map(common).max_by_key(|(_, same)| *same)
    }

    fn content(&self, block: u32) -> Content {
        self.blocks[block as usize].known.as_ref().map_or(0, |known| known.content)
    }

    fn use_again(&mut self, block: u32) {
        let one = &mut self.blocks[block as usize];
        if one.users == 0
            && let Some(known) = &one.known
        {
            self.cached.remove(&(one.used, u32::MAX - known.depth, block));
        }
        one.users += 1;
    }

    /// Takes note of what is in a sequence's blocks: `tokens` are all that are computed, and blocks before `known` are
    /// known already. With `last`, the block that is not full becomes known as well: nobody writes to it any more. Gives
    /// the number of blocks that are known now. A block whose content another has is exchanged for that one.
    pub(crate) fn know(
        &mut self,
        blocks: &mut [u32],
        tokens: &[u32],
        known: usize,
        last: bool,
    ) -> usize {
        if !self.shares {
            return known;
        }
        let mut before = match known.checked_sub(1) {
            Some(at) => self.content(blocks[at]),
            None => 0,
        };
        let mut count = known;
        for (at, part) in tokens.chunks(TOKENS).enumerate().skip(known) {
            if part.len() < TOKENS && !last {
                break;
            }
            let block = blocks[at];
            if part.len() == TOKENS
                && let Some(&same) = self.full.get(&(before, part.to_vec()))
            {
                // Two sequences have computed the same at the same time.
                self.use_again(same);
                if let Some(windows) = &mut self.windows {
                    windows.merge(block, same);
                }
                self.give_back(&[block]);
                blocks[at] = same;
            } else {
                self.contents += 1;
                let (content, tokens, depth) = (self.contents, part.to_vec(), at as u32);
                if part.len() == TOKENS {
                    self.full.insert((before, tokens.clone()), block);
                }
                self.after.entry(before).or_default().push(block);
                self.blocks[block as usize].known = Some(Known { content, before, tokens, depth });
            }
            before = self.content(blocks[at]);
            count = at + 1;
        }
        count
    }

    /// A block's content goes.
    fn forget(&mut self, block: u32) {
        let Some(known) = self.blocks[block as usize].known.take() else { return };
        if let Some(windows) = &mut self.windows {
            windows.forget(block);
        }
        if known.tokens.len() == TOKENS {
            self.full.remove(&(known.before, known.tokens));
        }
        if let Some(list) = self.after.get_mut(&known.before) {
            list.retain(|one| *one != block);
            if list.is_empty() {
                self.after.remove(&known.before);
            }
        }
    }
}

#[cfg(test)]
mod tests;
