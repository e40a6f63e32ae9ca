// SPDX-License-Identifier: Apache-2.0
//! The bytes of a message, shared instead of copied.

use std::sync::Arc;

/// A message's bytes, aligned for every element type. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Letter {
    page: Arc<Page>,
    len: usize,
}

#[derive(Debug, Default)]
struct Page {
    words: Vec<u64>,
}

impl Letter {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.page.words)[..self.len]
    }

    /// The same bytes without those after `len`.
    #[must_use]
    pub fn truncated(&self, len: usize) -> Letter {
        Letter { page: Arc::clone(&self.page), len: self.len.min(len) }
    }
}

/// Letters' memory, reused when the last reader has let go of it.
///
/// ```
/// use spanker_fabric::Pool;
/// let mut pool = Pool::default();
/// let letter = pool.write(5, |bytes| bytes.copy_from_slice(b"hello"));
/// assert_eq!(letter.bytes(), b"hello");
/// ```
#[derive(Debug, Default)]
pub struct Pool {
    pages: Vec<Arc<Page>>,
}

impl Pool {
    /// A letter of `len` bytes that `fill` writes. What `fill` finds there means nothing.
    pub fn write(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Letter {
        let free = self.pages.iter_mut().position(|page| Arc::get_mut(page).is_some());
        let mut page = free.map_or_else(Arc::default, |index| self.pages.swap_remove(index));
        let fresh = Arc::get_mut(&mut page).expect("nobody else holds a free page");
        let words = len.div_ceil(size_of::<u64>());
        if fresh.words.len() < words {
            fresh.words.resize(words, 0);
        }
        fill(&mut bytemuck::cast_slice_mut(&mut fresh.words)[..len]);
        self.pages.push(Arc::clone(&page));
        Letter { page, len }
    }
}
