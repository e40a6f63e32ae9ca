// SPDX-License-Identifier: Apache-2.0
//! The bytes of a message, shared instead of copied, and the buffers that messages are received into.

use std::ops::Range;
use std::sync::Arc;

use crate::block::Block;

/// A message's bytes, aligned for every element type. They never change, and cloning shares them.
#[derive(Debug, Clone)]
pub struct Message {
    block: Arc<Block>,
    range: Range<usize>,
}

impl Message {
    /// A message of the first `len` bytes of `block`.
    pub(crate) fn new(block: Arc<Block>, len: usize) -> Message {
        Message { block, range: 0..len }
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.block[self.range.clone()]
    }

    /// A message of some of these bytes, which it shares.
    ///
    /// # Panics
    /// If `range` is not within the message.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Message {
        assert!(range.start <= range.end && range.end <= self.range.len(), "{range:?} is outside");
        let start = self.range.start;
        Message { block: Arc::clone(&self.block), range: start + range.start..start + range.end }
    }

    /// The memory that the bytes are in.
    pub(crate) fn block(&self) -> &Arc<Block> {
        &self.block
    }

    /// Whether the bytes are the first `len` of `block`.
    pub(crate) fn is_all_of(&self, block: &Arc<Block>, len: usize) -> bool {
        Arc::ptr_eq(&self.block, block) && self.range == (0..len)
    }
}

/// Memory of messages, reused when the last reader has dropped its message.
///
/// ```
/// use spanker_fabric::Pool;
/// let mut pool = Pool::default();
/// let message = pool.write(5, |bytes| bytes.copy_from_slice(b"hello"));
/// assert_eq!(message.bytes(), b"hello");
/// assert_eq!(message.part(1..3).bytes(), b"el");
/// ```
#[derive(Debug, Default)]
pub struct Pool {
    blocks: Vec<Arc<Block>>,
}

impl Pool {
    /// A message of `len` bytes that `fill` writes. The bytes that `fill` finds are unspecified.
    pub fn write(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Message {
        let mut buffer = self.receive_buffer(len);
        fill(buffer.bytes_mut());
        self.freeze(buffer)
    }

    /// A buffer for a message of `len` bytes. Its bytes are unspecified until they are written.
    pub fn receive_buffer(&mut self, len: usize) -> ReceiveBuffer {
        // The block that was used last is likely to be in the caches.
        let free = self.blocks.iter_mut().rposition(|block| Arc::get_mut(block).is_some());
        let mut block = free.map_or_else(Arc::default, |index| self.blocks.swap_remove(index));
        let unshared = Arc::get_mut(&mut block).expect("a free block is not shared");
        if unshared.len() < len {
            *unshared = Block::new(len);
        }
        ReceiveBuffer { block, len }
    }

    /// Turns a buffer into a message, which nobody can write to. The pool reuses its memory when the message is
    /// dropped.
    pub fn freeze(&mut self, buffer: ReceiveBuffer) -> Message {
        self.blocks.push(Arc::clone(&buffer.block));
        buffer.freeze()
    }
}

/// A buffer that a fabric receives a message into. [`ReceiveBuffer::freeze`] or [`Pool::freeze`] makes it a message.
#[derive(Debug)]
pub struct ReceiveBuffer {
    block: Arc<Block>,
    len: usize,
}

impl ReceiveBuffer {
    /// The first `len` bytes of `block`, if the block is that long and nobody else has it.
    pub(crate) fn new(mut block: Arc<Block>, len: usize) -> Result<ReceiveBuffer, Arc<Block>> {
        match Arc::get_mut(&mut block).filter(|block| block.len() >= len) {
            Some(_) => Ok(ReceiveBuffer { block, len }),
            None => Err(block),
        }
    }

    /// The bytes, to be written. They keep their address when the buffer is moved.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let block = Arc::get_mut(&mut self.block).expect("a receive buffer is not shared");
        &mut block[..self.len]
    }

    /// How many bytes the message will have.
    #[must_use]
    pub fn size(&self) -> usize {
        self.len
    }

    /// Turns the buffer into a message, which nobody can write to.
    #[must_use]
    pub fn freeze(self) -> Message {
        Message::new(self.block, self.len)
    }
}
