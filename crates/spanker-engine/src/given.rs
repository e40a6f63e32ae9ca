// SPDX-License-Identifier: Apache-2.0
//! Tokens that were given out, and what becomes of them when a card turns out to have been wrong.
//!
//! Everything is then computed again from the prompt. Tokens that come out again are not given out twice. Where the
//! first other one comes, whoever reads the text is told from where on it was wrong.

use spanker_llm::LlmError;
use spanker_scheduler::DeviceErrorKind;

/// Whether an error means that what cards have computed so far may be wrong.
pub(crate) fn casts_doubt(error: &LlmError) -> bool {
    match error {
        LlmError::Device(error) => error.kind() == DeviceErrorKind::Wrong,
        LlmError::Unsure { .. } => true,
        _ => false,
    }
}

/// What is to be done with a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is new.
    New,
    /// It was given out before.
    Known,
    /// Another one was given out in its place.
    Departs,
}

/// Tokens that were given out.
#[derive(Debug, Default)]
pub(crate) struct Given {
    tokens: Vec<u32>,
    /// The first token, from 0, that was wrong.
    pub(crate) corrected_from: Option<usize>,
}

impl Given {
    /// What is to be done with the token at a place; nothing is the end of the text.
    pub(crate) fn next(&mut self, at: usize, token: Option<u32>) -> Fate {
        match (self.tokens.get(at), token) {
            (Some(known), Some(token)) if *known == token => Fate::Known,
            (Some(_), token) => {
                self.tokens.truncate(at);
                self.tokens.extend(token);
                let first = self.corrected_from.map_or(at, |first| first.min(at));
                self.corrected_from = Some(first);
                Fate::Departs
            }
            (None, token) => {
                self.tokens.extend(token);
                Fate::New
            }
        }
    }
}

/// The length of the text that can be given out: what follows may become the beginning of a stop string. With where
/// the first stop string begins, if one is in it.
pub(crate) fn released(text: &str, stops: &[String], from: usize) -> (usize, Option<usize>) {
    let stops = stops.iter().filter(|stop| !stop.is_empty());
    let mut end = text.len();
    let mut found: Option<usize> = None;
    for stop in stops {
        // A stop string may have begun in what came before.
        let begin = floor(text, from.saturating_sub(stop.len()));
        if let Some(at) = text[begin..].find(stop.as_str()) {
            let at = begin + at;
            found = Some(found.map_or(at, |first| first.min(at)));
        }
        let held = (1..stop.len())
            .rev()
            .find(|&length| stop.is_char_boundary(length) && text.ends_with(&stop[..length]));
        end = end.min(text.len() - held.unwrap_or(0));
    }
    (found.map_or(end, |at| at.min(end)), found)
}

/// The last character boundary up to a place.
fn floor(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fates(given: &mut Given, tokens: &[Option<u32>]) -> Vec<Fate> {
        tokens.iter().enumerate().map(|(at, &token)| given.next(at, token)).collect()
    }

    #[test]
    fn tokens_that_come_out_again_are_known_and_the_text_goes_on() {
        let mut given = Given::default();
        assert_eq!(fates(&mut given, &[Some(5), Some(6)]), [Fate::New; 2]);
        let again = fates(&mut given, &[Some(5), Some(6), Some(7), None]);
        assert_eq!(again, [Fate::Known, Fate::Known, Fate::New, Fate::New]);
        assert_eq!(given.corrected_from, None);
    }

    #[test]
    fn first_other_token_departs_and_what_follows_is_new() {
        let mut given = Given::default();
        fates(&mut given, &[Some(5), Some(6), Some(7)]);
        let again = fates(&mut given, &[Some(5), Some(9), Some(7)]);
        assert_eq!(again, [Fate::Known, Fate::Departs, Fate::New]);
        assert_eq!(given.corrected_from, Some(1));
        // Wrong once more, and later: the first wrong token is what counts.
        let third = fates(&mut given, &[Some(5), Some(9), Some(8)]);
        assert_eq!(third, [Fate::Known, Fate::Known, Fate::Departs]);
        assert_eq!(given.corrected_from, Some(1));
    }

    #[test]
    fn text_that_ends_earlier_than_what_was_given_departs() {
        let mut given = Given::default();
        fates(&mut given, &[Some(5), Some(6)]);
        assert_eq!(fates(&mut given, &[Some(5), None]), [Fate::Known, Fate::Departs]);
        assert_eq!(given.corrected_from, Some(1));
    }

    #[test]
    fn text_is_held_back_as_long_as_it_may_be_a_stop_string_and_no_longer() {
        let stops = ["\n\nUser:".to_owned(), "END".to_owned()];
        let mut text = String::new();
        let mut shown = 0;
        let mut given = String::new();
        for part in ["Hello", "\n", "\nUs", "ually E", "N", "X", "\n\nUse", "r: more"] {
            let from = text.len();
            text += part;
            let (end, found) = released(&text, &stops, from);
            if end > shown {
                given += &text[shown..end];
                shown = end;
            }
            if let Some(at) = found {
                assert_eq!(given, text[..at]);
                assert_eq!(given, "Hello\n\nUsually ENX");
                return;
            }
        }
        panic!("no stop string was found in {text:?}");
    }

    #[test]
    fn text_without_stop_strings_is_given_out_at_once() {
        assert_eq!(released("añb", &[], 0), (4, None));
        assert_eq!(released("añb", &[String::new()], 1), (4, None));
        // A place within a character is none to cut at.
        assert_eq!(released("aññ", &["ñx".into()], 3), (3, None));
    }
}
