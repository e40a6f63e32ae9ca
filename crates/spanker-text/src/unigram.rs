// SPDX-License-Identifier: Apache-2.0
//! SentencePiece vocabularies with scores: characters merged, the pair with the best score first.

use std::cmp::Ordering;

use spanker_model::gguf::Header;

use crate::TextError;
use crate::merge::merge;
use crate::vocab::{Kind, Vocab, same_length};
use crate::words::Words;

/// What stands for a space.
pub(crate) const SPACE: char = '\u{2581}';

/// A score as something to sort by.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Score(f64);

impl Eq for Score {}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A vocabulary with scores.
#[derive(Debug, Clone)]
pub(crate) struct Unigram {
    words: Words,
    /// The token of each word and its score.
    tokens: Vec<(u32, Score)>,
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
    /// Whether a text gets a space before it.
    pub(crate) space_prefix: bool,
}

impl Unigram {
    pub(crate) fn read(
        header: &Header,
        bytes: &[u8],
        vocab: &Vocab,
        texts: &[&str],
    ) -> Result<Self, TextError> {
        let key = "tokenizer.ggml.scores";
        let scores = header.floats(bytes, key)?;
        same_length(key, scores.len(), texts.len())?;
        let words = Words::with_capacity(texts.len(), texts.iter().map(|text| text.len()).sum());
        let tokens = Vec::with_capacity(texts.len());
        let mut unigram = Unigram {
            words,
            tokens,
            bytes: Vec::new(),
            unknown: vocab.unknown,
            space_prefix: true,
        };
        for ((token, text), score) in (0..).zip(texts).zip(scores) {
            // What is not a number would win over every number.
            let score = if score.is_nan() { f64::NEG_INFINITY } else { score };
            let found = (token, Score(score + 0.0));
            let at = unigram.words.add(text.as_bytes())? as usize;
            // The last of equal texts counts.
            match unigram.tokens.get_mut(at) {
                Some(before) => *before = found,
                None => unigram.tokens.push(found),
            }
        }
        unigram.words.shrink();
        unigram.tokens.shrink_to_fit();
        let byte = |byte: u8| {
            let named = unigram.find(&format!("<0x{byte:02X}>"));
            let plain = || unigram.find(char::from(byte).to_string().as_str());
            named.or_else(|| if byte.is_ascii() { plain() } else { None }).map(|found| found.0)
        };
        unigram.bytes = (0..=u8::MAX).map(byte).collect();
        unigram.space_prefix = header.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
        Ok(unigram)
    }

    /// The token that `text` is and its score, if it is one.
    fn find(&self, text: &str) -> Option<(u32, Score)> {
        self.words.get(text.as_bytes()).map(|at| self.tokens[at as usize])
    }

    /// Appends the tokens of `text`, which begins after a mark or at the beginning if `first`.
    pub(crate) fn encode(&self, text: &str, first: bool, out: &mut Vec<u32>) {
        let mut escaped = String::with_capacity(text.len() + text.len() / 4);
        if first && self.space_prefix {
            escaped.push(SPACE);
        }
        escaped.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        let spans = escaped.char_indices().map(|(at, c)| (at, at + c.len_utf8()));
        let pieces = merge(spans, |left: (usize, usize), right: (usize, usize)| {
            let (_, score) = self.find(&escaped[left.0..right.1])?;
            Some((score, (left.0, right.1)))
        });
        for (from, to) in pieces {
            match self.find(&escaped[from..to]) {
                Some((token, _)) => out.push(token),
                None => {
                    let token = |byte: u8| self.bytes[usize::from(byte)].or(self.unknown);
                    out.extend(escaped[from..to].bytes().filter_map(token));
                }
            }
        }
    }
}

/// Appends the bytes of a token as text.
pub(crate) fn piece(text: &str, kind: Kind, out: &mut Vec<u8>) {
    let hexadecimal = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    let byte = hexadecimal.and_then(|digits| u8::from_str_radix(digits, 16).ok());
    if let (Kind::Byte, Some(byte)) = (kind, byte) {
        out.push(byte);
        return;
    }
    for (at, part) in text.split(SPACE).enumerate() {
        if at > 0 {
            out.push(b' ');
        }
        out.extend_from_slice(part.as_bytes());
    }
}
