// SPDX-License-Identifier: Apache-2.0
//! Many short texts in little memory: one after the other ([`Texts`]), and with an index that finds
//! them ([`Words`]). Nothing is ever taken out.

use std::hash::{BuildHasher, RandomState};

use crate::TextError;

/// Texts by number, all in one piece of memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Texts {
    bytes: Vec<u8>,
    /// Where each text ends; it begins where the one before ends.
    ends: Vec<u32>,
}

impl Texts {
    /// No texts, with room for `texts` of together `bytes` bytes.
    pub(crate) fn with_capacity(texts: usize, bytes: usize) -> Texts {
        Texts { bytes: Vec::with_capacity(bytes), ends: Vec::with_capacity(texts) }
    }

    /// Appends a text.
    pub(crate) fn push(&mut self, text: &[u8]) -> Result<(), TextError> {
        let Ok(end) = u32::try_from(self.bytes.len() + text.len()) else {
            let reason = "more than 2^32 - 1 bytes of text";
            return Err(TextError::vocabulary("tokenizer.ggml.tokens", reason));
        };
        self.bytes.extend_from_slice(text);
        self.ends.push(end);
        Ok(())
    }

    /// The text with a number, if there is one.
    pub(crate) fn get(&self, at: usize) -> Option<&[u8]> {
        let end = *self.ends.get(at)?;
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        Some(&self.bytes[start as usize..end as usize])
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Gives back memory that no text needs.
    pub(crate) fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
        self.ends.shrink_to_fit();
    }
}

/// No text.
const FREE: u32 = u32::MAX;

/// Texts that differ, numbered from 0 in the order they came.
///
/// The hash has a key of its own in every process, so that a file cannot choose texts that collide.
#[derive(Debug, Clone)]
pub(crate) struct Words {
    texts: Texts,
    /// Numbers of texts, each at its hash or in the next free slot; a power of two of slots, of which
    /// at most half are taken.
    slots: Vec<u32>,
    hasher: RandomState,
}

impl Words {
    /// No texts, with room for `texts` of together `bytes` bytes.
    pub(crate) fn with_capacity(texts: usize, bytes: usize) -> Words {
        Words {
            texts: Texts::with_capacity(texts, bytes),
            slots: vec![FREE; (2 * texts.max(1)).next_power_of_two()],
            hasher: RandomState::new(),
        }
    }

    /// The number of `text`, or the free slot that is its own.
    fn find(&self, text: &[u8]) -> Result<u32, usize> {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(text) as usize & mask;
        loop {
            let at = self.slots[slot];
            if at == FREE {
                return Err(slot);
            }
            if self.texts.get(at as usize) == Some(text) {
                return Ok(at);
            }
            slot = (slot + 1) & mask;
        }
    }

    /// The number of `text`, if it is one of the texts.
    pub(crate) fn get(&self, text: &[u8]) -> Option<u32> {
        self.find(text).ok()
    }

    /// The number of `text`, which becomes one of the texts unless it is.
    pub(crate) fn add(&mut self, text: &[u8]) -> Result<u32, TextError> {
        let mut slot = match self.find(text) {
            Ok(at) => return Ok(at),
            Err(slot) => slot,
        };
        if 2 * (self.texts.len() + 1) > self.slots.len() {
            self.grow();
            slot = self.find(text).err().unwrap_or(slot);
        }
        // Texts that differ are fewer than their bytes and one, so the number is less than `FREE`.
        let at = self.texts.len() as u32;
        self.texts.push(text)?;
        self.slots[slot] = at;
        Ok(at)
    }

    /// Doubles the slots.
    fn grow(&mut self) {
        let slots = 2 * self.slots.len();
        self.slots = Vec::new();
        self.slots.resize(slots, FREE);
        for at in 0..self.texts.len() {
            let text = self.texts.get(at).unwrap_or_default();
            if let Err(slot) = self.find(text) {
                self.slots[slot] = at as u32;
            }
        }
    }

    /// The text with a number, empty if there is none.
    pub(crate) fn text(&self, at: u32) -> &[u8] {
        self.texts.get(at as usize).unwrap_or_default()
    }

    /// Gives back memory that no text needs.
    pub(crate) fn shrink(&mut self) {
        self.texts.shrink();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::{Texts, Words};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_are_numbered_as_a_map_would(
            texts in prop::collection::vec(prop::collection::vec(0_u8..3, 0..5), 0..200),
            room in 0_usize..300,
        ) {
            let mut words = Words::with_capacity(room, room);
            let mut map: HashMap<Vec<u8>, u32> = HashMap::new();
            for text in &texts {
                prop_assert_eq!(words.get(text), map.get(text).copied());
                let next = map.len() as u32;
                let at = *map.entry(text.clone()).or_insert(next);
                prop_assert_eq!(words.add(text), Ok(at));
                prop_assert_eq!(words.text(at), &text[..]);
            }
            words.shrink();
            for (text, at) in &map {
                prop_assert_eq!(words.get(text), Some(*at));
            }
            prop_assert_eq!(words.get(b"none"), None);
            prop_assert!(2 * map.len() <= words.slots.len());
        }
    }

    #[test]
    fn texts_come_back_by_number_with_empty_ones_and_equal_ones() {
        let given: [&[u8]; 5] = [b"", b"a", b"", b"bc", b"a"];
        let mut texts = Texts::default();
        for text in given {
            texts.push(text).expect("little text");
        }
        let back: Vec<&[u8]> = (0..texts.len()).filter_map(|at| texts.get(at)).collect();
        assert_eq!(back, given);
        assert_eq!(texts.get(5), None);
    }
}
