// SPDX-License-Identifier: Apache-2.0
//! Memory that messages are cut from. Long blocks lie in huge pages where the system has them.
//!
//! A message between processes is read page by page by the kernel, which looks up and pins each one: with pages of
//! 4 KiB that takes a third of the time. Huge pages are 2 MiB, so blocks share them. A block's memory is its own; the
//! pages go back to the system with the last block that lies in them. This is not an allocator for everything:
//! what is given back is not used again before that.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Bytes from which on a block is long.
const LONG: usize = 64 << 10;
/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Long blocks begin and end with pages of the usual size.
const PAGE: usize = 4 << 10;

/// Words of memory, zero at first.
#[derive(Debug)]
pub(crate) struct Block(Kind);

#[derive(Debug)]
enum Kind {
    Short(Vec<u64>),
    Long(Part),
}

/// A part of a region that nobody else has.
#[derive(Debug)]
struct Part {
    first: NonNull<u64>,
    words: usize,
    _region: Arc<Region>,
}

/// Memory from the system.
#[derive(Debug)]
struct Region {
    mapped: NonNull<u8>,
    len: usize,
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
    /// At least `len` bytes from the system, zero, and where the first huge page in them begins.
    fn map(len: usize) -> Option<(Region, NonNull<u8>)> {
        let len = len.checked_add(HUGE)?;
        let (read_write, own) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the system chooses a place where nothing is.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), len, read_write, own) }.ok()?;
        let region = Region { mapped: NonNull::new(mapped.cast())?, len };
        let skipped = region.mapped.as_ptr().align_offset(HUGE);
        if skipped >= HUGE {
            return None;
        }
        // SAFETY: less than what was mapped beyond `len`.
        let first = unsafe { region.mapped.add(skipped) };
        // Where the system has no huge pages, others do.
        // SAFETY: within what was mapped; the contents stay.
        let _ = unsafe { madvise(first.as_ptr().cast(), len - HUGE, Advice::LinuxHugepage) };
        Some((region, first))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `Region::map`, and no part of it is left.
        let _ = unsafe { munmap(self.mapped.as_ptr().cast(), self.len) };
    }
}

/// What is left of the region that was mapped last.
struct Rest {
    region: Arc<Region>,
    first: NonNull<u8>,
    left: usize,
}

// SAFETY: memory that nobody has yet.
unsafe impl Send for Rest {}

static REST: Mutex<Option<Rest>> = Mutex::new(None);

impl Part {
    fn new(words: usize) -> Option<Part> {
        let bytes = words.checked_mul(size_of::<u64>())?.checked_next_multiple_of(PAGE)?;
        let mut rest = REST.lock().unwrap_or_else(PoisonError::into_inner);
        if rest.as_ref().is_none_or(|rest| rest.left < bytes) {
            let left = bytes.checked_next_multiple_of(HUGE)?;
            let (region, first) = Region::map(left)?;
            *rest = Some(Rest { region: Arc::new(region), first, left });
        }
        let Rest { region, first, left } = rest.as_mut()?;
        let part = Part { first: first.cast(), words, _region: Arc::clone(region) };
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
    /// So many words, all zero.
    pub(crate) fn new(words: usize) -> Block {
        let long = if words >= LONG / size_of::<u64>() { Part::new(words) } else { None };
        Block(long.map_or_else(|| Kind::Short(vec![0; words]), Kind::Long))
    }
}

impl Default for Block {
    fn default() -> Self {
        Block(Kind::Short(Vec::new()))
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
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        match &self.0 {
            Kind::Short(words) => words,
            // SAFETY: the part has so many words, aligned to pages, of a region that it holds; the system has
            // made them zero, and nobody else has them.
            Kind::Long(part) => unsafe {
                std::slice::from_raw_parts(part.first.as_ptr(), part.words)
            },
        }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u64] {
        match &mut self.0 {
            Kind::Short(words) => words,
            // SAFETY: as above.
            Kind::Long(part) => unsafe {
                std::slice::from_raw_parts_mut(part.first.as_ptr(), part.words)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_any_length_are_zero_and_apart() {
        let lengths = [0, 1, 8191, 8192, 8193, 100_000, 262_144, 300_001, 9000, 20_000];
        let mut blocks: Vec<Block> = lengths.iter().map(|&words| Block::new(words)).collect();
        for (block, &words) in blocks.iter().zip(&lengths) {
            assert_eq!(block.len(), words);
            assert!(block.iter().all(|&word| word == 0), "{words}");
        }
        for (index, block) in blocks.iter_mut().enumerate() {
            block.fill(index as u64 + 1);
        }
        for (index, block) in blocks.iter().enumerate() {
            assert!(block.iter().all(|&word| word == index as u64 + 1), "{index}");
        }
    }

    #[test]
    fn a_block_stays_while_its_neighbours_go() {
        let mut kept = Block::new(10_000);
        for round in 0..100 {
            let mut other = Block::new(10_000 + round);
            other.fill(7);
        }
        kept.fill(5);
        let copy = kept.clone();
        drop(kept);
        assert!(copy.iter().all(|&word| word == 5));
    }

    #[test]
    fn long_blocks_begin_with_a_page() {
        let block = Block::new(50_000);
        assert_eq!(block.as_ptr().align_offset(PAGE), 0);
    }
}
