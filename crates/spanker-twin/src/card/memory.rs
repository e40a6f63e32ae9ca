// SPDX-License-Identifier: Apache-2.0
//! A card's memory: buffers that belong to clients. Every access names a buffer and a range and is checked
//! here, whoever asks.

use std::collections::BTreeMap;

use nix::errno::Errno;
use spanker_plan::ALIGNMENT;
use spanker_runtime::{BufferId, Place};

use super::ClientId;

/// The most buffers that a card has at a time: handles cost the host's memory, not the card's.
const MAX_BUFFERS: usize = 65_536;

/// One buffer. Whole words, so that elements of every type are aligned.
#[derive(Debug)]
struct Buffer {
    owner: ClientId,
    length: u64,
    words: Vec<u64>,
}

/// All buffers of a card.
#[derive(Debug)]
pub(crate) struct Memory {
    capacity: u64,
    used: u64,
    next: u64,
    buffers: BTreeMap<u64, Buffer>,
}

impl Memory {
    pub(crate) fn new(capacity: u64) -> Memory {
        Memory { capacity, used: 0, next: 1, buffers: BTreeMap::new() }
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(crate) fn available(&self) -> u64 {
        self.capacity - self.used
    }

    /// A buffer of zeros. The host allocates its memory when it is first touched.
    pub(crate) fn allocate(&mut self, owner: ClientId, length: u64) -> Result<BufferId, Errno> {
        let bytes = length.max(1).checked_next_multiple_of(ALIGNMENT).ok_or(Errno::ENOMEM)?;
        if bytes > self.available() || self.buffers.len() >= MAX_BUFFERS {
            return Err(Errno::ENOMEM);
        }
        let words = usize::try_from(length.div_ceil(8)).map_err(|_| Errno::ENOMEM)?;
        let mut storage: Vec<u64> = Vec::new();
        // A host without that much memory is an answer, not a crash.
        storage.try_reserve_exact(words).map_err(|_| Errno::ENOMEM)?;
        drop(storage);
        let buffer = Buffer { owner, length, words: vec![0; words] };
        let handle = self.next;
        self.next += 1;
        self.used += bytes;
        self.buffers.insert(handle, buffer);
        Ok(BufferId(handle))
    }

    /// Gives a buffer back.
    pub(crate) fn free(&mut self, owner: ClientId, buffer: BufferId) -> Result<(), Errno> {
        self.owned(owner, buffer)?;
        let freed = self.buffers.remove(&buffer.0).expect("it is there");
        self.used -= freed.length.max(1).next_multiple_of(ALIGNMENT);
        Ok(())
    }

    /// Gives back everything of a client that has gone.
    pub(crate) fn free_all(&mut self, owner: ClientId) {
        let handles: Vec<u64> = self
            .buffers
            .iter()
            .filter(|(_, b)| b.owner == owner)
            .map(|(&handle, _)| handle)
            .collect();
        for handle in handles {
            self.free(owner, BufferId(handle)).expect("it is the owner's");
        }
    }

    /// The length of a buffer of a client.
    pub(crate) fn owned(&self, owner: ClientId, buffer: BufferId) -> Result<u64, Errno> {
        match self.buffers.get(&buffer.0) {
            Some(found) if found.owner == owner => Ok(found.length),
            _ => Err(Errno::EINVAL),
        }
    }

    /// The bytes from a place on; nothing if the buffer has gone or ends before.
    pub(crate) fn get(&self, place: Place, length: u64) -> Option<&[u8]> {
        let buffer = self.buffers.get(&place.buffer.0)?;
        let (start, end) = bounds(place.offset, length, buffer.length)?;
        Some(&bytemuck::cast_slice(&buffer.words)[start..end])
    }

    /// The same, for writing.
    pub(crate) fn get_mut(&mut self, place: Place, length: u64) -> Option<&mut [u8]> {
        let buffer = self.buffers.get_mut(&place.buffer.0)?;
        let (start, end) = bounds(place.offset, length, buffer.length)?;
        Some(&mut bytemuck::cast_slice_mut(&mut buffer.words)[start..end])
    }
}

/// A range inside `length` bytes, for indexing.
fn bounds(offset: u64, wanted: u64, length: u64) -> Option<(usize, usize)> {
    let end = offset.checked_add(wanted).filter(|&end| end <= length)?;
    Some((usize::try_from(offset).ok()?, usize::try_from(end).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: ClientId = ClientId(1);
    const OTHER: ClientId = ClientId(2);

    #[test]
    fn buffers_take_whole_pages_and_give_them_back() {
        let mut memory = Memory::new(3 * ALIGNMENT);
        let first = memory.allocate(ME, ALIGNMENT + 1).unwrap();
        assert_eq!(memory.allocate(ME, ALIGNMENT + 1), Err(Errno::ENOMEM));
        let second = memory.allocate(ME, 0).unwrap();
        assert_eq!(memory.available(), 0);
        memory.free(ME, first).unwrap();
        memory.free(ME, second).unwrap();
        assert_eq!(memory.available(), 3 * ALIGNMENT);
        assert_eq!(memory.allocate(ME, u64::MAX), Err(Errno::ENOMEM));
    }

    #[test]
    fn buffers_of_another_client_are_not_there() {
        let mut memory = Memory::new(1 << 20);
        let buffer = memory.allocate(ME, 100).unwrap();
        assert_eq!(memory.owned(OTHER, buffer), Err(Errno::EINVAL));
        assert_eq!(memory.free(OTHER, buffer), Err(Errno::EINVAL));
        memory.free_all(OTHER);
        assert_eq!(memory.owned(ME, buffer), Ok(100));
        memory.free_all(ME);
        assert_eq!(memory.owned(ME, buffer), Err(Errno::EINVAL));
    }

    #[test]
    fn ranges_outside_a_buffer_are_not_there() {
        let mut memory = Memory::new(1 << 20);
        let buffer = memory.allocate(ME, 13).unwrap();
        let at = |offset| Place { buffer, offset };
        assert_eq!(memory.get(at(13), 0).map(<[u8]>::len), Some(0));
        assert_eq!(memory.get(at(12), 1).map(<[u8]>::len), Some(1));
        for (offset, length) in [(13, 1), (0, 14), (14, 0), (u64::MAX, 2), (1, u64::MAX)] {
            assert_eq!(memory.get(at(offset), length), None, "{offset} {length}");
            assert_eq!(memory.get_mut(at(offset), length), None, "{offset} {length}");
        }
    }
}
