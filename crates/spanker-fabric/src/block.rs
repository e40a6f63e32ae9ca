// SPDX-License-Identifier: Apache-2.0
//! Memory that messages are cut from. Long blocks lie in huge pages where the system has them.
//!
//! A message between processes is read page by page by the kernel, which looks up and pins each one: with pages of
//! 4 KiB that takes a third of the time. Huge pages are 2 MiB, so blocks share them. A block's memory is its own; the
//! pages go back to the system with the last block that lies in them. This is not an allocator for everything:
//! what is given back is not used again before that.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, madvise};

/// Bytes from which on a block is long.
const LONG: usize = 64 << 10;
/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Long blocks begin and end with pages of the usual size.
const PAGE: usize = 4 << 10;

/// Bytes of memory, zero at first, aligned for every element type.
#[derive(Debug)]
pub(crate) struct Block(Kind);

#[derive(Debug)]
enum Kind {
    Short { words: Vec<u64>, len: usize },
    Long(Part),
}

/// A part of a region that nobody else has.
#[derive(Debug)]
struct Part {
    first: NonNull<u8>,
    len: usize,
    region: Arc<Region>,
}

/// Whole huge pages. They come from the allocator and go back to it: libraries that remember which memory they have made
/// known to a network card learn from it what is gone.
#[derive(Debug)]
struct Region {
    first: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a part is memory that nobody else has, as a vector's is.
unsafe impl Send for Part {}
// SAFETY: as above; a shared part is only read.
unsafe impl Sync for Part {}
// SAFETY: a region is only held, until it is given back.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// So many bytes, a multiple of a huge page and not none, all zero.
    fn new(len: usize) -> Option<Region> {
        let layout = Layout::from_size_align(len, HUGE).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout has a size.
        let region = Region { first: NonNull::new(unsafe { alloc(layout) })?, layout };
        let first = region.first.as_ptr();
        // Where the system has no huge pages, others do.
        // SAFETY: all of what was allocated; there is nothing in it yet.
        let _ = unsafe { madvise(first.cast(), len, Advice::LinuxHugepage) };
        // SAFETY: so many bytes were allocated.
        unsafe { first.write_bytes(0, len) };
        Some(region)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated by `Region::new` with this layout, and no part of it is left.
        unsafe { dealloc(self.first.as_ptr(), self.layout) };
    }
}

/// What is left of the region that was allocated last.
struct Rest {
    region: Arc<Region>,
    first: NonNull<u8>,
    left: usize,
}

// SAFETY: memory that nobody has yet.
unsafe impl Send for Rest {}

static REST: Mutex<Option<Rest>> = Mutex::new(None);

impl Part {
    fn new(len: usize) -> Option<Part> {
        let bytes = len.checked_next_multiple_of(PAGE)?;
        let mut rest = REST.lock().unwrap_or_else(PoisonError::into_inner);
        if rest.as_ref().is_none_or(|rest| rest.left < bytes) {
            let left = bytes.checked_next_multiple_of(HUGE)?;
            let region = Region::new(left)?;
            *rest = Some(Rest { first: region.first, region: Arc::new(region), left });
        }
        let Rest { region, first, left } = rest.as_mut()?;
        let part = Part { first: *first, len, region: Arc::clone(region) };
        // SAFETY: so many bytes are left there.
        *first = unsafe { first.add(bytes) };
        *left -= bytes;
        if *left == 0 {
            *rest = None;
        }
        Some(part)
    }
}

impl Block {
    /// So many bytes, all zero.
    pub(crate) fn new(len: usize) -> Block {
        let long = if len >= LONG { Part::new(len) } else { None };
        Block(long.map_or_else(
            || Kind::Short { words: vec![0; len.div_ceil(size_of::<u64>())], len },
            Kind::Long,
        ))
    }

    /// Cuts a long block into blocks that end at `ends`, which rise to its length. Each is as good as any other, but
    /// only as aligned as its first byte. A short block stays whole.
    pub(crate) fn split(self, ends: &[usize]) -> Result<Vec<Block>, Block> {
        let Kind::Long(whole) = &self.0 else { return Err(self) };
        if !ends.is_sorted() || ends.last() != Some(&whole.len) {
            return Err(self);
        }
        let mut start = 0;
        let cut = |&end: &usize| {
            // SAFETY: the ends rise to the length of the block, so the parts are within it and apart, and the
            // block itself is used no more.
            let first = unsafe { whole.first.add(start) };
            let part = Part { first, len: end - start, region: Arc::clone(&whole.region) };
            start = end;
            Block(Kind::Long(part))
        };
        Ok(ends.iter().map(cut).collect())
    }

    /// What [`Block::split`] has cut, whole again. `None` if the blocks are others or in another order.
    pub(crate) fn join(blocks: Vec<Block>) -> Option<Block> {
        let mut whole: Option<Part> = None;
        for block in blocks {
            let Kind::Long(next) = block.0 else { return None };
            whole = Some(match whole {
                None => next,
                Some(mut before) => {
                    // SAFETY: the end of a part is within its region, or where that ends.
                    let end = unsafe { before.first.add(before.len) };
                    if end != next.first || !Arc::ptr_eq(&before.region, &next.region) {
                        return None;
                    }
                    before.len += next.len;
                    before
                }
            });
        }
        whole.map(|whole| Block(Kind::Long(whole)))
    }
}

impl Default for Block {
    fn default() -> Self {
        Block(Kind::Short { words: Vec::new(), len: 0 })
    }
}

impl Clone for Block {
    fn clone(&self) -> Self {
        let mut copy = Block::new(self.len());
        copy.copy_from_slice(self);
        copy
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Kind::Short { words, len } => &bytemuck::cast_slice(words)[..*len],
            // SAFETY: the part has so many bytes of a region that it holds; the system has made them zero, and
            // nobody else has them.
            Kind::Long(part) => unsafe {
                std::slice::from_raw_parts(part.first.as_ptr(), part.len)
            },
        }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Kind::Short { words, len } => &mut bytemuck::cast_slice_mut(words)[..*len],
            // SAFETY: as above.
            Kind::Long(part) => unsafe {
                std::slice::from_raw_parts_mut(part.first.as_ptr(), part.len)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_any_length_are_zero_and_apart() {
        let lengths = [0, 1, 7, 65_535, 65_536, 65_537, 800_001, 2 << 20, 2_400_007, 70_000];
        let mut blocks: Vec<Block> = lengths.iter().map(|&len| Block::new(len)).collect();
        for (block, &len) in blocks.iter().zip(&lengths) {
            assert_eq!(block.len(), len);
            assert!(block.iter().all(|&byte| byte == 0), "{len}");
        }
        for (index, block) in blocks.iter_mut().enumerate() {
            block.fill(index as u8 + 1);
        }
        for (index, block) in blocks.iter().enumerate() {
            assert!(block.iter().all(|&byte| byte == index as u8 + 1), "{index}");
        }
    }

    #[test]
    fn a_block_stays_while_its_neighbours_go() {
        let mut kept = Block::new(80_000);
        for round in 0..100 {
            let mut other = Block::new(80_000 + round);
            other.fill(7);
        }
        kept.fill(5);
        let copy = kept.clone();
        drop(kept);
        assert!(copy.iter().all(|&byte| byte == 5));
    }

    #[test]
    fn long_blocks_begin_with_a_page() {
        let block = Block::new(400_000);
        assert_eq!(block.as_ptr().align_offset(PAGE), 0);
    }

    #[test]
    fn a_long_block_is_cut_and_joined_and_others_are_not() {
        let mut block = Block::new(100_000);
        for (index, byte) in block.iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        let before = block.to_vec();
        let parts = block.split(&[1, 1, 30_003, 100_000]).unwrap();
        let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        assert_eq!(lengths, [1, 0, 30_002, 69_997]);
        let whole = Block::join(parts).unwrap();
        assert_eq!(*whole, before);
        let whole = whole.split(&[5, 4, 100_000]).unwrap_err();
        let whole = whole.split(&[5, 99_999]).unwrap_err();
        let mut parts = whole.split(&[50_000, 100_000]).unwrap();
        parts.swap(0, 1);
        assert!(Block::join(parts).is_none());
        assert!(Block::new(100).split(&[50, 100]).is_err());
        assert!(Block::join(vec![Block::new(70_000), Block::new(10)]).is_none());
    }
}
