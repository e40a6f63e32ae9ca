// SPDX-License-Identifier: Apache-2.0
//! The bytes of a message, shared instead of copied, and buffers that messages can be cut from.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use spanker_reduce::Element;

use crate::block::Block;
use crate::rope::Rope;

/// A message's bytes, aligned for every element type. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Letter {
    page: Arc<Page>,
    range: Range<usize>,
}

/// Memory that letters point into.
#[derive(Debug, Default, Clone)]
struct Page {
    words: Block,
}

impl Page {
    fn new(bytes: usize) -> Self {
        Page { words: Block::new(bytes.div_ceil(size_of::<u64>())) }
    }

    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..len]
    }
}

impl Letter {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.page.words)[self.range.clone()]
    }

    /// A letter of some of these bytes, which it shares.
    ///
    /// # Panics
    /// If `range` is not within the letter.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Letter {
        assert!(range.start <= range.end && range.end <= self.range.len(), "{range:?} is outside");
        let start = self.range.start;
        Letter { page: Arc::clone(&self.page), range: start + range.start..start + range.end }
    }
}

/// Letters' memory, reused when the last reader has let go of it.
///
/// ```
/// use spanker_fabric::Pool;
/// let mut pool = Pool::default();
/// let letter = pool.write(5, |bytes| bytes.copy_from_slice(b"hello"));
/// assert_eq!(letter.bytes(), b"hello");
/// assert_eq!(letter.part(1..3).bytes(), b"el");
/// ```
#[derive(Debug, Default)]
pub struct Pool {
    pages: Vec<Arc<Page>>,
}

impl Pool {
    /// A letter of `len` bytes that `fill` writes. What `fill` finds there means nothing.
    pub fn write(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Letter {
        let mut draft = self.draft(len);
        fill(draft.bytes_mut());
        self.seal(draft)
    }

    /// Memory for a letter of `len` bytes, for whoever writes it later. What is there means nothing.
    pub fn draft(&mut self, len: usize) -> Draft {
        // What was used last is likely to be in the caches.
        let free = self.pages.iter_mut().rposition(|page| Arc::get_mut(page).is_some());
        let mut page = free.map_or_else(Arc::default, |index| self.pages.swap_remove(index));
        let fresh = Arc::get_mut(&mut page).expect("nobody else holds a free page");
        let words = len.div_ceil(size_of::<u64>());
        if fresh.words.len() < words {
            fresh.words = Block::new(words);
        }
        Draft { page, len }
    }

    /// The letter that a draft has become. From here on nobody writes to it.
    pub fn seal(&mut self, draft: Draft) -> Letter {
        self.pages.push(Arc::clone(&draft.page));
        Letter { page: draft.page, range: 0..draft.len }
    }
}

/// A letter that is not written yet: a fabric receives into it, and [`Pool::seal`] makes it a letter.
#[derive(Debug)]
pub struct Draft {
    page: Arc<Page>,
    len: usize,
}

impl Draft {
    /// The bytes, to be written. They stay where they are in memory when the draft is moved.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        Arc::get_mut(&mut self.page).expect("nobody else holds a draft").bytes_mut(self.len)
    }
}

/// A rank's buffer in memory that its fabric can hand to peers without copying it.
///
/// It has two sides: while peers still read the one, a result is written to the other.
///
/// ```
/// use spanker_fabric::Registered;
/// let mut buffer = Registered::<f32>::new(3);
/// buffer.as_mut_slice().copy_from_slice(&[1.0, 2.0, 3.0]);
/// assert_eq!(buffer.as_slice(), [1.0, 2.0, 3.0]);
/// ```
#[derive(Debug)]
pub struct Registered<T> {
    front: Arc<Page>,
    back: Arc<Page>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Registered<T> {
    /// A buffer of `len` zeros.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let front = Arc::new(Page::new(len * size_of::<T>()));
        Registered { front, back: Arc::default(), len, element: PhantomData }
    }

    fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The elements.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        bytemuck::cast_slice(&bytemuck::cast_slice::<u64, u8>(&self.front.words)[..self.bytes()])
    }

    /// The elements, to be written. If a peer is still reading them, it keeps the old ones.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        let bytes = self.bytes();
        bytemuck::cast_slice_mut(Arc::make_mut(&mut self.front).bytes_mut(bytes))
    }

    /// All elements as a letter.
    pub(crate) fn letter(&self) -> Letter {
        Letter { page: Arc::clone(&self.front), range: 0..self.bytes() }
    }

    /// The other side, for a result that is received while peers read this one.
    pub(crate) fn other_side(&mut self) -> Draft {
        let (bytes, mut page) = (self.bytes(), std::mem::take(&mut self.back));
        if Arc::get_mut(&mut page).is_none_or(|page| page.words.is_empty()) {
            page = Arc::new(Page::new(bytes));
        }
        Draft { page, len: bytes }
    }

    /// Makes the other side the buffer. Elements `landed`, which are in order and apart, are there; all others are
    /// as `rope` has them.
    pub(crate) fn turn(&mut self, other: Draft, rope: &Rope, landed: &[Range<usize>]) {
        let bytes = self.bytes();
        let old = bytemuck::cast_slice::<u64, u8>(&self.front.words);
        let old: &[T] = bytemuck::cast_slice(&old[..bytes]);
        let mut other = other;
        let new: &mut [T] = bytemuck::cast_slice_mut(other.bytes_mut());
        let mut at = 0;
        for next in landed.iter().cloned().chain([self.len..self.len]) {
            rope.read(old, at..next.start, &mut new[at..next.start]);
            at = next.end;
        }
        self.back = std::mem::replace(&mut self.front, other.page);
    }

    /// Takes over what `rope` changes within `range`: in place, or on the other side if a peer is still
    /// reading this one.
    pub(crate) fn update(&mut self, rope: &Rope, range: &Range<usize>) {
        let bytes = self.bytes();
        if rope.is_bare(range) {
            return;
        }
        if let Some(front) = Arc::get_mut(&mut self.front) {
            let elements = bytemuck::cast_slice_mut::<u8, T>(front.bytes_mut(bytes));
            for (changed, values) in rope.changes(range) {
                elements[changed].copy_from_slice(values);
            }
            return;
        }
        let unfit = Arc::get_mut(&mut self.back).is_none_or(|back| back.words.is_empty());
        if unfit {
            self.back = Arc::new(Page::new(bytes));
        }
        let old = bytemuck::cast_slice::<u64, u8>(&self.front.words);
        let old: &[T] = bytemuck::cast_slice(&old[..bytes]);
        let back = Arc::get_mut(&mut self.back).expect("nobody else holds it");
        let new: &mut [T] = bytemuck::cast_slice_mut(back.bytes_mut(bytes));
        new[..range.start].copy_from_slice(&old[..range.start]);
        rope.read(old, range.clone(), &mut new[range.clone()]);
        new[range.end..].copy_from_slice(&old[range.end..]);
        std::mem::swap(&mut self.front, &mut self.back);
    }
}
