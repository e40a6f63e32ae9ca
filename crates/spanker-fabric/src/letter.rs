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
    block: Block,
}

impl Page {
    fn new(bytes: usize) -> Self {
        Page { block: Block::new(bytes) }
    }

    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        &mut self.block[..len]
    }
}

impl Letter {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.page.block[self.range.clone()]
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
        if fresh.block.len() < len {
            fresh.block = Block::new(len);
        }
        Draft { page, len }
    }

    /// The letter that a draft has become. From here on nobody writes to it.
    pub fn seal(&mut self, draft: Draft) -> Letter {
        self.pages.push(Arc::clone(&draft.page));
        draft.seal()
    }
}

/// A letter that is not written yet: a fabric receives into it, and [`Pool::seal`] makes it a letter, whose memory
/// the pool uses again.
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

    /// How many bytes the letter will have.
    #[must_use]
    pub fn size(&self) -> usize {
        self.len
    }

    /// The letter that the draft has become. Its memory is whoever's the draft was.
    #[must_use]
    pub fn seal(self) -> Letter {
        Letter { page: self.page, range: 0..self.len }
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
        bytemuck::cast_slice(&self.front.block[..self.bytes()])
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

    /// The other side in pieces that end at `ends`, counted in elements, for a result that takes shape while peers
    /// read this one. `None` for short buffers.
    pub(crate) fn pieces(&mut self, ends: &[usize]) -> Option<Pieces> {
        let bytes = self.bytes();
        let back = Arc::try_unwrap(std::mem::take(&mut self.back)).ok();
        let back = back.filter(|page| page.block.len() == bytes);
        let page = back.unwrap_or_else(|| Page::new(bytes));
        let ends: Vec<usize> = ends.iter().map(|end| end * size_of::<T>()).collect();
        match page.block.split(&ends) {
            Ok(blocks) => Some(Pieces::new(blocks, ends)),
            Err(block) => {
                self.back = Arc::new(Page { block });
                None
            }
        }
    }

    /// Makes the other side the buffer, with the elements that `rope` has, and clears `rope`. What it has from the
    /// pieces themselves is in its place.
    pub(crate) fn turn(&mut self, pieces: Pieces, rope: &mut Rope) {
        let old = self.as_slice();
        let block = pieces.assemble(old, rope).unwrap_or_else(|| {
            let mut block = Block::new(self.bytes());
            rope.read(old, 0..self.len, bytemuck::cast_slice_mut(&mut block));
            block
        });
        rope.clear();
        self.back = std::mem::replace(&mut self.front, Arc::new(Page { block }));
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
        let unfit = Arc::get_mut(&mut self.back).is_none_or(|back| back.block.len() < bytes);
        if unfit {
            self.back = Arc::new(Page::new(bytes));
        }
        let old: &[T] = bytemuck::cast_slice(&self.front.block[..bytes]);
        let back = Arc::get_mut(&mut self.back).expect("nobody else holds it");
        let new: &mut [T] = bytemuck::cast_slice_mut(back.bytes_mut(bytes));
        new[..range.start].copy_from_slice(&old[..range.start]);
        rope.read(old, range.clone(), &mut new[range.clone()]);
        new[range.end..].copy_from_slice(&old[range.end..]);
        std::mem::swap(&mut self.front, &mut self.back);
    }
}

/// A side of a buffer in pieces, each of which a letter can be written in. What they are for is the caller's.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Where each piece ends, in bytes.
    ends: Vec<usize>,
    pages: Vec<Option<Arc<Page>>>,
    /// Where each piece is in memory.
    homes: Vec<*const u8>,
}

impl Pieces {
    fn new(blocks: Vec<Block>, ends: Vec<usize>) -> Pieces {
        let pages: Vec<Arc<Page>> =
            blocks.into_iter().map(|block| Arc::new(Page { block })).collect();
        let homes = pages.iter().map(|page| page.block.as_ptr()).collect();
        Pieces { ends, pages: pages.into_iter().map(Some).collect(), homes }
    }

    fn range(&self, index: usize) -> Range<usize> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[index]
    }

    /// The piece that has these bytes, all of them and no more.
    pub(crate) fn of(&self, range: &Range<usize>) -> Option<usize> {
        let index = self.ends.partition_point(|&end| end < range.end);
        (index < self.ends.len() && self.range(index) == *range).then_some(index)
    }

    /// A draft of `len` bytes in a piece, if that is long enough and nobody holds a letter of it.
    pub(crate) fn take(&mut self, index: usize, len: usize) -> Option<Draft> {
        let page = self.pages.get_mut(index)?;
        page.as_mut().and_then(Arc::get_mut).filter(|page| page.block.len() >= len)?;
        page.take().map(|page| Draft { page, len })
    }

    /// Takes a piece back, as the letter that it has become. A letter that is somewhere else is left alone.
    pub(crate) fn put(&mut self, index: usize, letter: &Letter) {
        let block = &letter.page.block;
        if block.as_ptr() == self.homes[index] && block.len() == self.range(index).len() {
            self.pages[index] = Some(Arc::clone(&letter.page));
        }
    }

    /// All pieces as one block with the elements that `rope` has over `old`. If that can be, `rope` is cleared.
    fn assemble<T: Element>(mut self, old: &[T], rope: &mut Rope) -> Option<Block> {
        for index in 0..self.pages.len() {
            let range = self.range(index);
            let elements = range.start / size_of::<T>()..range.end / size_of::<T>();
            let page = self.pages[index].as_mut()?;
            let letter = rope.letter::<T>(&elements);
            match letter.filter(|letter| Arc::ptr_eq(&letter.page, page)) {
                // This letter, the rope's and the piece.
                Some(letter) if letter.range == (0..range.len()) => {
                    if Arc::strong_count(page) > 3 {
                        return None;
                    }
                }
                _ => {
                    let out = bytemuck::cast_slice_mut(&mut Arc::get_mut(page)?.block);
                    rope.read(old, elements, out);
                }
            }
        }
        rope.clear();
        let block = |page: Option<Arc<Page>>| Some(Arc::try_unwrap(page?).ok()?.block);
        let blocks: Option<Vec<Block>> = self.pages.into_iter().map(block).collect();
        Some(blocks.and_then(Block::join).expect("nobody else holds a piece"))
    }
}
