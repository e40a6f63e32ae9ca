// SPDX-License-Identifier: Apache-2.0
//! Byte-level byte-pair encoding: every word is its bytes, merged in the order of a list.

use std::cmp::Reverse;
use std::collections::HashMap;

use spanker_model::gguf::Header;

use crate::TextError;
use crate::error::printable;
use crate::merge::merge;
use crate::split::Split;
use crate::words::Words;

/// The byte that `c` stands for in the spelling of tokens, if it stands for one: a byte that can be
/// seen stands for itself, and characters from 256 on, in order, for the others.
fn byte_of(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Appends the bytes that `text` spells, and says whether it spells bytes to its end.
pub(crate) fn spelled_bytes(text: &str, out: &mut Vec<u8>) -> bool {
    for c in text.chars() {
        let Some(byte) = byte_of(c) else { return false };
        out.push(byte);
    }
    true
}

/// A piece of a word, by its number: the 256 bytes, then all tokens and what merging can make.
type Piece = u32;

/// Byte-level byte-pair encoding.
#[derive(Debug, Clone)]
pub(crate) struct Bpe {
    split: Split,
    pieces: Words,
    /// The token of each piece, or [`NONE`].
    tokens: Vec<u32>,
    /// For a pair of pieces its place in the list of merges and what it becomes.
    merges: HashMap<u64, (u32, Piece)>,
}

/// No token.
const NONE: u32 = u32::MAX;

/// A pair of pieces as one number.
fn pair(left: Piece, right: Piece) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Bpe {
    /// The encoding of a file, and whether a text begins with a token of its own unless the file says
    /// otherwise.
    pub(crate) fn read(
        header: &Header,
        bytes: &[u8],
        texts: Vec<&str>,
    ) -> Result<(Bpe, bool), TextError> {
        let key = "tokenizer.ggml.pre";
        let has = |key: &str| header.metadata().contains_key(key);
        let rule = if has(key) { header.text(bytes, key)? } else { "default".to_owned() };
        let split = Split::named(&rule)?;
        let add_bos = split.add_bos;
        let room = texts.iter().map(|text| text.len()).sum::<usize>() + 256;
        let mut bpe = Bpe {
            split,
            pieces: Words::with_capacity(texts.len() + 256, room),
            tokens: Vec::with_capacity(texts.len() + 256),
            merges: HashMap::new(),
        };
        for byte in 0..=u8::MAX {
            bpe.piece(&[byte])?;
        }
        let mut spelled = Vec::new();
        for (token, text) in (0..).zip(&texts) {
            spelled.clear();
            // Marks and pieces of users may be spelled in plain text, which no merge makes.
            if spelled_bytes(text, &mut spelled) && !spelled.is_empty() {
                let piece = bpe.piece(&spelled)?;
                bpe.tokens[piece as usize] = token;
            }
        }
        // Two long lists at once would take more memory than what is made of them.
        drop(texts);
        let key = "tokenizer.ggml.merges";
        let merges = if has(key) { header.texts(bytes, key)? } else { Vec::new() };
        bpe.merges.reserve(merges.len());
        for (rank, text) in (0_u32..).zip(merges) {
            bpe.add_merge(rank, text, &mut spelled)?;
        }
        bpe.pieces.shrink();
        bpe.tokens.shrink_to_fit();
        Ok((bpe, add_bos))
    }

    fn piece(&mut self, bytes: &[u8]) -> Result<Piece, TextError> {
        let piece = self.pieces.add(bytes)?;
        if piece as usize == self.tokens.len() {
            self.tokens.push(NONE);
        }
        Ok(piece)
    }

    /// The token of a piece, if it is one.
    fn token(&self, piece: Piece) -> Option<u32> {
        Some(self.tokens[piece as usize]).filter(|token| *token != NONE)
    }

    /// Adds a line of the list of merges. What `spelled` holds is lost.
    fn add_merge(
        &mut self,
        rank: u32,
        text: &[u8],
        spelled: &mut Vec<u8>,
    ) -> Result<(), TextError> {
        spelled.clear();
        let middle = std::str::from_utf8(text).ok().and_then(|text| {
            let (left, right) = text.split_once(' ')?;
            let left_spells = spelled_bytes(left, spelled);
            let middle = spelled.len();
            let spells = left_spells && spelled_bytes(right, spelled);
            (spells && middle > 0 && spelled.len() > middle).then_some(middle)
        });
        let Some(middle) = middle else {
            let shown = printable(&String::from_utf8_lossy(text));
            let reason = format!("'{shown}' is not two pieces with a space between");
            return Err(TextError::vocabulary(format!("merge {rank}"), reason));
        };
        let merged = self.piece(spelled)?;
        let (left, right) = spelled.split_at(middle);
        let pair = pair(self.piece(left)?, self.piece(right)?);
        // The first mention counts.
        self.merges.entry(pair).or_insert((rank, merged));
        Ok(())
    }

    /// Appends the tokens of `text`. Bytes that no token spells are left out.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        for word in self.split.words(text) {
            if self.split.whole_words {
                let whole = self.pieces.get(word.as_bytes()).and_then(|at| self.token(at));
                if let Some(token) = whole {
                    out.push(token);
                    continue;
                }
            }
            // The first 256 pieces are the bytes.
            let bytes = word.bytes().map(Piece::from);
            let pieces = merge(bytes, |left, right| {
                let (rank, merged) = self.merges.get(&pair(left, right))?;
                Some((Reverse(*rank), *merged))
            });
            pieces.for_each(|piece| self.spell(piece, out));
        }
    }

    /// Appends the token of a piece, or of its bytes where the piece is none.
    fn spell(&self, piece: Piece, out: &mut Vec<u32>) {
        if let Some(token) = self.token(piece) {
            out.push(token);
            return;
        }
        // The piece is what merging makes and is no token, which a sound file does not have.
        let bytes = self.pieces.text(piece).iter();
        out.extend(bytes.filter_map(|byte| self.token(Piece::from(*byte))));
    }
}

#[cfg(test)]
mod tests {
    use super::{byte_of, spelled_bytes};

    /// The character that stands for `byte` in the spelling of tokens: itself where it can be seen, else
    /// one from 256 on, in order.
    fn spelled(byte: u8) -> char {
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

    #[test]
    fn every_byte_has_a_spelling_of_its_own() {
        for byte in 0..=u8::MAX {
            assert_eq!(byte_of(spelled(byte)), Some(byte));
        }
        assert_eq!((spelled(b' '), spelled(b'\n'), spelled(0xad)), ('Ġ', 'Ċ', 'Ń'));
        assert_eq!((spelled(0x7f), spelled(0xa0), spelled(0)), ('ġ', 'ł', 'Ā'));
        let spelling = ('\0'..=char::MAX).filter(|c| byte_of(*c).is_some());
        assert_eq!(spelling.count(), 256);
        assert!(!spelled_bytes("a b", &mut Vec::new()));
    }
}
