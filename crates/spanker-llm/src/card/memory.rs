// SPDX-License-Identifier: Apache-2.0
//! The memory of a card that this process plays: the file, shared and never written, and buffers of its own.

use std::borrow::Cow;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use spanker_plan::{ALIGNMENT, BufferId, Place, WEIGHT_ALIGNMENT};

use crate::{LlmError, Network};

/// The file.
pub(crate) const FILE: BufferId = BufferId(0);
/// Pieces of weights that lie nowhere in the file in one run.
pub(crate) const COPIES: BufferId = BufferId(1);

/// Words of a line of the processor's caches.
const LINE: usize = 8;

/// The first word of a buffer that begins a line of the processor's caches. Vectors that lie across two lines take
/// longer to read and write, and memory from the allocator may begin anywhere: steps would take another time in every
/// process.
fn line(words: &[u64]) -> usize {
    words.as_ptr().align_offset(8 * LINE).min(LINE - 1)
}

/// All that a card can see.
pub(crate) struct Memory<B> {
    network: Arc<Network<B>>,
    /// Whole words, so that numbers of every type are aligned, and lengths in bytes. A buffer's bytes begin at the
    /// [`line`].
    buffers: Vec<(Vec<u64>, usize)>,
    /// Bytes of weights.
    weights: u64,
}

impl<B: AsRef<[u8]>> Memory<B> {
    pub(crate) fn new(network: Arc<Network<B>>) -> Self {
        // The file's own number.
        Memory { network, buffers: vec![(Vec::new(), 0)], weights: 0 }
    }

    /// Bytes of all buffers in whole pages, and of the weights that are read in the file or copied from it.
    pub(crate) fn allocated(&self) -> u64 {
        let pages = |bytes: u64| bytes.max(1).next_multiple_of(ALIGNMENT);
        // Behind the file and the copies.
        let own = self.buffers.iter().skip(2).map(|(_, bytes)| pages(*bytes as u64));
        own.sum::<u64>() + pages(self.weights)
    }

    /// Notes bytes of weights that the card reads where they lie in the file, or in its copies.
    pub(crate) fn add_weights(&mut self, bytes: u64) {
        self.weights += bytes.next_multiple_of(WEIGHT_ALIGNMENT);
    }

    /// A buffer of zeros, with the next number. The system's memory is taken when it is first touched; what
    /// the system would never give is refused here.
    pub(crate) fn add(&mut self, bytes: u64) -> Result<(), LlmError> {
        // Making zeros cannot fail without ending the process.
        let words = self.room_for(bytes)?;
        self.buffers.push((vec![0; words + LINE - 1], bytes as usize));
        Ok(())
    }

    /// Whether the system would give so many bytes. Says how many words these are.
    pub(crate) fn room_for(&self, bytes: u64) -> Result<usize, LlmError> {
        let refused =
            || LlmError::unsupported(format!("a card needs {bytes} bytes more than there are"));
        let words = usize::try_from(bytes).map_err(|_| refused())?.div_ceil(8);
        Vec::<u64>::new().try_reserve_exact(words).map_err(|_| refused())?;
        Ok(words)
    }

    /// Bytes from a place on.
    pub(crate) fn get(&self, place: Place, length: u64) -> &[u8] {
        let start = place.offset as usize;
        let end = start + length as usize;
        match place.buffer {
            FILE => &self.network.bytes()[start..end],
            BufferId(id) => {
                let words = &self.buffers[id as usize].0;
                &cast_slice(&words[line(words)..])[start..end]
            }
        }
    }

    /// Numbers from a place on; copied where a file keeps them at an odd place.
    pub(crate) fn floats(&self, place: Place, count: u64) -> Cow<'_, [f32]> {
        let bytes = self.get(place, count * 4);
        match bytemuck::try_cast_slice(bytes) {
            Ok(floats) => Cow::Borrowed(floats),
            Err(_) => bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect(),
        }
    }

    /// Calls `work` with a buffer's bytes.
    pub(crate) fn bytes_mut(&mut self, buffer: BufferId, work: impl FnOnce(&mut [u8])) {
        let (words, length) = &mut self.buffers[buffer.0 as usize];
        work(part(words, Place { buffer, offset: 0 }, *length as u64));
    }

    /// Fills the card's own buffers with numbers from -1 to 1, as 16-bit floats, so that the system has given them
    /// memory and times are those of a run: a page that was never written reads faster than memory, and attention
    /// over zeros is faster than over a KV cache.
    pub(crate) fn fill(&mut self) {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        for (words, _) in self.buffers.iter_mut().skip(COPIES.0 as usize + 1) {
            for word in words {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // Signs and fractions of any kind, exponents of a half and below.
                *word = state & 0x87FF_87FF_87FF_87FF | 0x3000_3000_3000_3000;
            }
        }
    }

    /// Takes a buffer out, so that it can be written while others are read.
    pub(crate) fn take(&mut self, buffer: BufferId) -> Vec<u64> {
        std::mem::take(&mut self.buffers[buffer.0 as usize].0)
    }

    /// Puts a buffer back.
    pub(crate) fn put(&mut self, buffer: BufferId, words: Vec<u64>) {
        self.buffers[buffer.0 as usize].0 = words;
    }
}

/// The bytes of a taken buffer from a place on.
pub(crate) fn part(words: &mut [u64], place: Place, length: u64) -> &mut [u8] {
    let (first, start) = (line(words), place.offset as usize);
    &mut cast_slice_mut(&mut words[first..])[start..start + length as usize]
}
