// SPDX-License-Identifier: Apache-2.0
//! Text that comes token by token: a character is held back until all its bytes are there.

use crate::Tokenizer;

/// Turns tokens into text as they come.
///
/// All that is given out together is what [`String::from_utf8_lossy`] makes of the bytes of all
/// tokens together. Control tokens are hidden, but for those that structure an answer.
#[derive(Debug, Clone, Default)]
pub struct Stream {
    /// The beginning of a character: at most three bytes.
    held: Vec<u8>,
}

impl Stream {
    /// A stream without bytes.
    #[must_use]
    pub fn new() -> Stream {
        Stream::default()
    }

    /// The text that is complete with `token`, which may be none.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> String {
        if tokenizer.is_hidden(token) {
            return String::new();
        }
        self.push_bytes(tokenizer.piece(token))
    }

    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.held.extend(bytes);
        let mut text = String::new();
        let mut rest = &self.held[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    // Without a length, more bytes may complete the character.
                    let Some(wrong) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[wrong..];
                }
            }
        }
        self.held = rest.to_vec();
        text
    }

    /// What is left when no token follows: a replacement character if one was never completed.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        String::from_utf8_lossy(&held).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::Stream;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_together_are_the_text_of_all_bytes(
            mut bytes in prop::collection::vec(any::<u8>(), 0..40),
            text in any::<String>(),
            cuts in prop::collection::vec(1_usize..5, 1..20),
        ) {
            bytes.extend(text.bytes());
            let mut stream = Stream::new();
            let mut given = String::new();
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                given.push_str(&stream.push_bytes(now));
                prop_assert!(stream.held.len() < 4);
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            given.push_str(&stream.finish());
            prop_assert_eq!(given, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn character_is_held_until_complete() {
        let mut stream = Stream::new();
        assert_eq!(stream.push_bytes(&[b'a', 0xf0, 0x9f]), "a");
        assert_eq!(stream.push_bytes(&[0x98]), "");
        assert_eq!(stream.push_bytes(&[0x80, b'b']), "\u{1f600}b");
        assert_eq!(stream.push_bytes(&[0xe2, 0x82]), "");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.finish(), "");
    }
}
