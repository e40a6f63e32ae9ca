// SPDX-License-Identifier: Apache-2.0
//! Buffers of the caller that a fabric sends from without copying them first.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use spanker_reduce::Element;

use crate::Message;
use crate::block::Block;
use crate::overlay::Overlay;

/// A rank's buffer in memory that its peers can read without a copy.
///
/// It is double-buffered: while peers still read one half, a result is written to the other.
///
/// ```
/// use spanker_fabric::Registered;
/// let mut buffer = Registered::<f32>::new(3);
/// buffer.as_mut_slice().copy_from_slice(&[1.0, 2.0, 3.0]);
/// assert_eq!(buffer.as_slice(), [1.0, 2.0, 3.0]);
/// ```
#[derive(Debug)]
pub struct Registered<T> {
    /// The half that has the elements.
    front: Arc<Block>,
    back: Arc<Block>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Registered<T> {
    /// A buffer of `len` zeros.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let front = Arc::new(Block::new(len * size_of::<T>()));
        Registered { front, back: Arc::default(), len, element: PhantomData }
    }

    fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The elements.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        bytemuck::cast_slice(&self.front[..self.bytes()])
    }

    /// The elements, to be written. A peer that is still reading them keeps the old ones.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        let bytes = self.bytes();
        bytemuck::cast_slice_mut(&mut Arc::make_mut(&mut self.front)[..bytes])
    }

    /// All elements as a message.
    pub(crate) fn message(&self) -> Message {
        Message::new(Arc::clone(&self.front), self.bytes())
    }

    /// The back half, cut into blocks that end at `ends` (in bytes), so that a result can be received in place while
    /// peers read the front half. `None` for buffers that are too short to be cut.
    pub(crate) fn split_back(&mut self, ends: &[usize]) -> Option<Vec<Block>> {
        let bytes = self.bytes();
        let back = Arc::try_unwrap(std::mem::take(&mut self.back)).ok();
        let back = back.filter(|block| block.len() == bytes);
        match back.unwrap_or_else(|| Block::new(bytes)).split(ends) {
            Ok(blocks) => Some(blocks),
            Err(block) => {
                self.back = Arc::new(block);
                None
            }
        }
    }

    /// Makes `block`, which has all elements, the front half.
    pub(crate) fn replace_front(&mut self, block: Block) {
        self.back = std::mem::replace(&mut self.front, Arc::new(block));
    }

    /// Copies what `overlay` changes within `range`: in place, or to the back half if a peer is still reading the
    /// front half.
    pub(crate) fn update(&mut self, overlay: &Overlay, range: &Range<usize>) {
        let bytes = self.bytes();
        if overlay.is_bare(range) {
            return;
        }
        if let Some(front) = Arc::get_mut(&mut self.front) {
            let elements = bytemuck::cast_slice_mut::<u8, T>(&mut front[..bytes]);
            for (changed, values) in overlay.changes(range) {
                elements[changed].copy_from_slice(values);
            }
            return;
        }
        let unfit = Arc::get_mut(&mut self.back).is_none_or(|back| back.len() < bytes);
        if unfit {
            self.back = Arc::new(Block::new(bytes));
        }
        let old: &[T] = bytemuck::cast_slice(&self.front[..bytes]);
        let back = Arc::get_mut(&mut self.back).expect("the back half is not shared");
        let new: &mut [T] = bytemuck::cast_slice_mut(&mut back[..bytes]);
        new[..range.start].copy_from_slice(&old[..range.start]);
        overlay.read(old, range.clone(), &mut new[range.clone()]);
        new[range.end..].copy_from_slice(&old[range.end..]);
        std::mem::swap(&mut self.front, &mut self.back);
    }
}
