// SPDX-License-Identifier: Apache-2.0
//! Tokens that were given out, and what becomes of them when a card turns out to have been wrong.
//!
//! Everything is then computed again from the prompt. Tokens that come out again are not shown twice. Where the
//! first other one comes, whoever reads the text is told: on a terminal the right text follows, JSON has not been
//! printed yet, and any other output cannot be taken back, so that the run ends with an error.

use std::io::IsTerminal;

use spanker_llm::LlmError;
use spanker_scheduler::DeviceErrorKind;

/// Who reads a text while it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audience {
    /// Nobody: it is printed when it is complete.
    Later,
    /// People.
    Terminal,
    /// A file or another program.
    Stream,
}

impl Audience {
    pub(crate) fn of(json: bool) -> Audience {
        match (json, std::io::stdout().is_terminal()) {
            (true, _) => Audience::Later,
            (false, true) => Audience::Terminal,
            (false, false) => Audience::Stream,
        }
    }
}

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
    Show,
    /// It was shown before.
    Known,
    /// Another one was shown in its place.
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
                Fate::Show
            }
        }
    }
}

/// Tells whoever reads that the text is wrong from a token on, or ends with an error if they cannot be told.
pub(crate) fn correct(audience: Audience, at: usize, blamed: &str) -> anyhow::Result<()> {
    let number = at + 1;
    match audience {
        Audience::Later => Ok(()),
        Audience::Terminal => {
            println!();
            eprintln!(
                "token {number} and what followed was wrong: {blamed}; the right text from there:"
            );
            Ok(())
        }
        Audience::Stream => anyhow::bail!(
            "token {number} and what follows it in the output is wrong: {blamed}\nhint: --audit 1 computes everything twice before it is printed, and --json prints the right text alone"
        ),
    }
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
        assert_eq!(fates(&mut given, &[Some(5), Some(6)]), [Fate::Show; 2]);
        let again = fates(&mut given, &[Some(5), Some(6), Some(7), None]);
        assert_eq!(again, [Fate::Known, Fate::Known, Fate::Show, Fate::Show]);
        assert_eq!(given.corrected_from, None);
    }

    #[test]
    fn first_other_token_departs_and_what_follows_is_new() {
        let mut given = Given::default();
        fates(&mut given, &[Some(5), Some(6), Some(7)]);
        let again = fates(&mut given, &[Some(5), Some(9), Some(7)]);
        assert_eq!(again, [Fate::Known, Fate::Departs, Fate::Show]);
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
    fn stream_with_wrong_text_ends_with_an_error_that_names_the_token() {
        let error = correct(Audience::Stream, 32, "card 2 gives wrong answers").expect_err("wrong");
        let text = error.to_string();
        assert!(text.starts_with("token 33 and what follows it in the output is wrong"), "{text}");
        assert!(text.contains("card 2") && text.contains("hint: --audit 1"), "{text}");
        for audience in [Audience::Later, Audience::Terminal] {
            assert!(correct(audience, 32, "card 2 gives wrong answers").is_ok());
        }
    }
}
