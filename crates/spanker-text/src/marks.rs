// SPDX-License-Identifier: Apache-2.0
//! Marks in a text: tokens that are found before it is cut into words.
//!
//! Longer marks are found before shorter ones, wherever they stand. One pass over the text says which
//! marks occur at all, so that a vocabulary with many marks costs no more than one with few.

use std::collections::{BTreeSet, HashMap};

use crate::vocab::Kind;

/// The longest mark, in bytes; what is longer is no mark.
const LONGEST: usize = 256;

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// Plain text, never empty.
    Text(&'a str),
    /// A mark.
    Mark(u32),
}

/// The marks of a vocabulary.
#[derive(Debug, Clone)]
pub(crate) struct Marks {
    /// The longest first: text, token, and whether it is found only when asked for.
    marks: Vec<(String, u32, bool)>,
    /// A tree of the marks' bytes: from a node by a byte to the next; 0 is the root.
    next: HashMap<(u32, u8), u32>,
    /// The mark that ends at a node, as its place in `marks`.
    ends: Vec<Option<usize>>,
}

impl Marks {
    /// The marks among tokens of these texts and kinds.
    pub(crate) fn new(texts: &[&str], kinds: &[Kind]) -> Marks {
        let mut marks: Vec<(String, u32, bool)> = (0..)
            .zip(texts.iter().zip(kinds))
            .filter(|(_, (text, _))| (1..=LONGEST).contains(&text.len()))
            .filter_map(|(token, (text, kind))| match kind {
                Kind::Control | Kind::Unknown => Some(((*text).to_owned(), token, true)),
                Kind::UserDefined => Some(((*text).to_owned(), token, false)),
                _ => None,
            })
            .collect();
        marks.sort_by_key(|(text, token, _)| (std::cmp::Reverse(text.len()), *token));
        let (mut next, mut ends) = (HashMap::new(), vec![None]);
        for (at, (text, ..)) in marks.iter().enumerate() {
            let mut node = 0;
            for byte in text.bytes() {
                let new = ends.len() as u32;
                node = *next.entry((node, byte)).or_insert(new);
                if node == new {
                    ends.push(None);
                }
            }
            ends[node as usize].get_or_insert(at);
        }
        Marks { marks, next, ends }
    }

    /// Which marks occur in `text`, the longest first.
    fn occurring(&self, text: &str) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let bytes = text.as_bytes();
        for at in 0..bytes.len() {
            let mut node = 0;
            for byte in &bytes[at..] {
                let Some(child) = self.next.get(&(node, *byte)) else { break };
                node = *child;
                found.extend(self.ends[node as usize]);
            }
        }
        found
    }

    /// The control tokens as they are spelled, longest first.
    pub(crate) fn special(&self) -> impl Iterator<Item = &str> {
        self.marks.iter().filter(|(_, _, special)| *special).map(|(mark, ..)| mark.as_str())
    }

    /// The parts of `text`. Control tokens are found only if `special`.
    pub(crate) fn parts<'a>(&self, text: &'a str, special: bool) -> Vec<Part<'a>> {
        let mut parts = vec![Part::Text(text)];
        for at in self.occurring(text) {
            let (mark, token, only_special) = &self.marks[at];
            if *only_special && !special {
                continue;
            }
            parts = parts.into_iter().flat_map(|part| divide(part, mark, *token)).collect();
        }
        parts.retain(|part| *part != Part::Text(""));
        parts
    }
}

/// Cuts every `mark` out of a part.
fn divide<'a>(part: Part<'a>, mark: &str, token: u32) -> Vec<Part<'a>> {
    let Part::Text(text) = part else { return vec![part] };
    let mut parts = Vec::new();
    for (at, between) in text.split(mark).enumerate() {
        if at > 0 {
            parts.push(Part::Mark(token));
        }
        parts.push(Part::Text(between));
    }
    parts
}
