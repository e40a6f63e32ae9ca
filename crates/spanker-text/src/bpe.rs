// SPDX-License-Identifier: Apache-2.0
//! Byte-level byte-pair encoding: every word is its bytes, merged in the order of a list.

use std::cmp::Reverse;
use std::collections::HashMap;

use spanker_model::gguf::Header;

use crate::TextError;
use crate::error::printable;
use crate::merge::merge;
use crate::split::Split;
use crate::vocab::Vocab;

/// The character that stands for `byte` in the spelling of tokens: itself where it can be seen, else
/// one from 256 on, in order.
const fn spelled(byte: u8) -> char {
    let shift = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => return byte as char,
        0x00..=0x20 => byte as u32,
        0x7f..=0xa0 => byte as u32 - 0x7f + 0x21,
        0xad => 0x21 + 0x22,
    };
    match char::from_u32(256 + shift) {
        Some(c) => c,
        None => unreachable!(),
    }
}

/// What spells bytes, the other way round.
pub(crate) struct Alphabet(HashMap<char, u8>);

impl Alphabet {
    pub(crate) fn new() -> Alphabet {
        Alphabet((0..=u8::MAX).map(|byte| (spelled(byte), byte)).collect())
    }

    /// The bytes that `text` spells, if it spells bytes.
    pub(crate) fn bytes(&self, text: &str) -> Option<Vec<u8>> {
        text.chars().map(|c| self.0.get(&c).copied()).collect()
    }
}

/// A piece of a word, by its number: the 256 bytes, then all tokens and what merging can make.
type Piece = u32;

/// Byte-level byte-pair encoding.
#[derive(Debug, Clone)]
pub(crate) struct Bpe {
    split: Split,
    /// Whether a word that is a token is not merged from its bytes.
    whole_words: bool,
    pieces: HashMap<Vec<u8>, Piece>,
    /// The token of each piece that is one.
    tokens: Vec<Option<u32>>,
    /// For a pair of pieces its place in the list of merges and what it becomes.
    merges: HashMap<(Piece, Piece), (u32, Piece)>,
    /// The bytes of pieces that merging makes and that are no token, which a sound file does not have.
    spellings: HashMap<Piece, Vec<u8>>,
}

impl Bpe {
    /// The encoding of a file, and whether a text begins with a token of its own unless the file says
    /// otherwise.
    pub(crate) fn read(
        header: &Header,
        bytes: &[u8],
        vocab: &Vocab,
    ) -> Result<(Bpe, bool), TextError> {
        let key = "tokenizer.ggml.pre";
        let has = |key: &str| header.metadata().contains_key(key);
        let rule = if has(key) { header.text(bytes, key)? } else { "default".to_owned() };
        let (split, whole_words, add_bos) = Split::named(&rule)?;
        let mut bpe = Bpe {
            split,
            whole_words,
            pieces: HashMap::new(),
            tokens: Vec::new(),
            merges: HashMap::new(),
            spellings: HashMap::new(),
        };
        let alphabet = Alphabet::new();
        (0..=u8::MAX).for_each(|byte| {
            bpe.piece(vec![byte]);
        });
        for (token, text) in (0..).zip(&vocab.texts) {
            // Marks and pieces of users may be spelled in plain text, which no merge makes.
            if let Some(bytes) = alphabet.bytes(text).filter(|bytes| !bytes.is_empty()) {
                let piece = bpe.piece(bytes);
                bpe.tokens[piece as usize] = Some(token);
            }
        }
        let key = "tokenizer.ggml.merges";
        let merges = if has(key) { header.texts(bytes, key)? } else { Vec::new() };
        for (rank, text) in (0_u32..).zip(merges) {
            bpe.add_merge(&alphabet, rank, text)?;
        }
        let unspelled = bpe
            .pieces
            .iter()
            .filter(|(bytes, at)| bytes.len() > 1 && bpe.tokens[**at as usize].is_none());
        bpe.spellings = unspelled.map(|(bytes, at)| (*at, bytes.clone())).collect();
        Ok((bpe, add_bos))
    }

    fn piece(&mut self, bytes: Vec<u8>) -> Piece {
        let next = self.tokens.len() as Piece;
        let piece = *self.pieces.entry(bytes).or_insert(next);
        if piece == next {
            self.tokens.push(None);
        }
        piece
    }

    fn add_merge(&mut self, alphabet: &Alphabet, rank: u32, text: &[u8]) -> Result<(), TextError> {
        let halves = std::str::from_utf8(text).ok().and_then(|text| {
            let (left, right) = text.split_once(' ')?;
            Some((alphabet.bytes(left)?, alphabet.bytes(right)?))
        });
        let whole = |halves: &(Vec<u8>, Vec<u8>)| !halves.0.is_empty() && !halves.1.is_empty();
        let Some((left, right)) = halves.filter(whole) else {
            let shown = printable(&String::from_utf8_lossy(text));
            let reason = format!("'{shown}' is not two pieces with a space between");
            return Err(TextError::vocabulary(format!("merge {rank}"), reason));
        };
        let merged = self.piece([&left[..], &right].concat());
        let pair = (self.piece(left), self.piece(right));
        // The first mention counts.
        self.merges.entry(pair).or_insert((rank, merged));
        Ok(())
    }

    /// Appends the tokens of `text`. Bytes that no token spells are left out.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        for word in self.split.words(text) {
            let whole = self.pieces.get(word.as_bytes()).and_then(|at| self.tokens[*at as usize]);
            if let Some(token) = whole.filter(|_| self.whole_words) {
                out.push(token);
                continue;
            }
            // The first 256 pieces are the bytes.
            let bytes = word.bytes().map(Piece::from);
            let pieces = merge(bytes, |left, right| {
                let (rank, merged) = self.merges.get(&(left, right))?;
                Some((Reverse(*rank), *merged))
            });
            pieces.for_each(|piece| self.spell(piece, out));
        }
    }

    /// Appends the token of a piece, or of its bytes where the piece is none.
    fn spell(&self, piece: Piece, out: &mut Vec<u32>) {
        if let Some(token) = self.tokens[piece as usize] {
            out.push(token);
            return;
        }
        let bytes = self.spellings.get(&piece).map_or(&[][..], Vec::as_slice);
        out.extend(bytes.iter().filter_map(|byte| self.tokens[usize::from(*byte)]));
    }
}

#[cfg(test)]
mod tests {
    use super::{Alphabet, spelled};

    #[test]
    fn every_byte_has_a_spelling_of_its_own() {
        let alphabet = Alphabet::new();
        assert_eq!(alphabet.0.len(), 256);
        for byte in 0..=u8::MAX {
            assert_eq!(alphabet.bytes(&spelled(byte).to_string()), Some(vec![byte]));
        }
        assert_eq!((spelled(b' '), spelled(b'\n'), spelled(0xad)), ('Ġ', 'Ċ', 'Ń'));
        assert_eq!((spelled(0x7f), spelled(0xa0), spelled(0)), ('ġ', 'ł', 'Ā'));
        assert_eq!(alphabet.bytes("a b"), None);
    }
}
