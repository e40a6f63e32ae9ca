// SPDX-License-Identifier: Apache-2.0
//! Guesses from the text itself: what followed the last time that the text ended as it ends now. Pure, deterministic, and
//! indexed as the text grows: nothing is looked through twice.

use std::collections::HashMap;

/// Tokens of an ending that must have come before.
const FEWEST: usize = 2;
/// More of a common ending than this says no more.
const MOST: usize = 32;
/// Earlier places with the same last tokens that are looked at, the latest first.
const PLACES: usize = 32;
/// No place.
const NONE: u32 = u32::MAX;

/// What may follow a text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Guess {
    /// Tokens.
    pub tokens: Vec<u32>,
    /// Tokens of the text's end that came before these earlier.
    pub matched: usize,
}

/// A text, and where its pairs of tokens are.
///
/// ```
/// use spanker_engine::Lookup;
///
/// let mut lookup = Lookup::new();
/// [5, 6, 7, 8, 9, 5, 6].into_iter().for_each(|token| lookup.push(token));
/// let guess = lookup.guess(4);
/// assert_eq!((&guess.tokens[..], guess.matched), (&[7, 8, 9, 5][..], 2));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Lookup {
    tokens: Vec<u32>,
    /// For each pair of tokens, where the last one ends: the number of tokens up to it.
    latest: HashMap<[u32; FEWEST], u32>,
    /// For each number of tokens, the same for the pair before with the same tokens.
    before: Vec<u32>,
}

impl Lookup {
    /// An empty text.
    #[must_use]
    pub fn new() -> Lookup {
        Lookup::default()
    }

    /// The text so far.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The text goes on.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        let earlier = match self.pair() {
            Some(pair) => self.latest.insert(pair, self.tokens.len() as u32).unwrap_or(NONE),
            None => NONE,
        };
        self.before.push(earlier);
    }

    /// Forgets all but the first `length` tokens.
    pub fn truncate(&mut self, length: usize) {
        while self.tokens.len() > length {
            let earlier = self.before.pop().unwrap_or(NONE);
            if let Some(pair) = self.pair() {
                match earlier {
                    NONE => self.latest.remove(&pair),
                    earlier => self.latest.insert(pair, earlier),
                };
            }
            self.tokens.pop();
        }
    }

    /// The last tokens.
    fn pair(&self) -> Option<[u32; FEWEST]> {
        self.tokens.last_chunk().copied()
    }

    /// What followed the place that ends like the text over the most tokens, the latest of such places: at most `most`
    /// tokens. Where that place is so near that the text itself is what followed, it goes round.
    #[must_use]
    pub fn guess(&self, most: usize) -> Guess {
        let all = self.tokens.len();
        let (mut best, mut matched) = (0, 0);
        let mut place = self.before.last().copied().unwrap_or(NONE);
        for _ in 0..PLACES {
            if place == NONE || matched == MOST {
                break;
            }
            let end = place as usize;
            let same = self.common(end);
            if same > matched {
                (best, matched) = (end, same);
            }
            place = self.before[end - 1];
        }
        if matched == 0 {
            return Guess::default();
        }
        let period = all - best;
        let tokens = (0..most).map(|at| self.tokens[best + at % period]).collect();
        Guess { tokens, matched }
    }

    /// How many tokens before a place are those at the text's end.
    fn common(&self, end: usize) -> usize {
        let here = self.tokens[..end].iter().rev();
        here.zip(self.tokens.iter().rev())
            .take(MOST)
            .take_while(|(one, other)| one == other)
            .count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same by looking through everything.
    fn naive(tokens: &[u32], most: usize) -> Guess {
        let all = tokens.len();
        let common = |end: usize| {
            (1..=MOST.min(end)).take_while(|n| tokens[end - n] == tokens[all - n]).count()
        };
        let places = (FEWEST..all).rev().filter(|&end| common(end) >= FEWEST).take(PLACES);
        let mut places: Vec<usize> = places.collect();
        // The last of the longest: the latest.
        places.reverse();
        let best = places.into_iter().max_by_key(|&end| common(end));
        best.map_or_else(Guess::default, |end| {
            let mut text = tokens.to_vec();
            for at in 0..most {
                text.push(text[end + at]);
            }
            Guess { tokens: text[all..].to_vec(), matched: common(end) }
        })
    }

    fn of(tokens: &[u32]) -> Lookup {
        let mut lookup = Lookup::new();
        tokens.iter().for_each(|&token| lookup.push(token));
        lookup
    }

    proptest! {
        #[test]
        fn guesses_are_those_of_a_search_through_everything(
            tokens in prop::collection::vec(0..4u32, 0..120),
            most in 0..20usize,
        ) {
            let mut lookup = Lookup::new();
            for end in 0..tokens.len() {
                prop_assert_eq!(lookup.guess(most), naive(&tokens[..end], most), "{}", end);
                lookup.push(tokens[end]);
            }
        }

        #[test]
        fn text_that_was_cut_is_as_if_it_had_never_been_longer(
            tokens in prop::collection::vec(0..3u32, 0..60),
            cut in 0..60usize,
            more in prop::collection::vec(0..3u32, 0..20),
        ) {
            let mut lookup = of(&tokens);
            lookup.truncate(cut);
            let mut kept = tokens[..cut.min(tokens.len())].to_vec();
            prop_assert_eq!(lookup.tokens(), &kept[..]);
            for token in more {
                lookup.push(token);
                kept.push(token);
                prop_assert_eq!(lookup.guess(9), naive(&kept, 9));
            }
            prop_assert_eq!(lookup.latest.len(), of(&kept).latest.len());
        }
    }

    #[test]
    fn text_that_repeats_itself_goes_on_for_as_long_as_is_asked_for() {
        let guess = of(&[1, 2, 3, 1, 2, 3, 1]).guess(8);
        assert_eq!((guess.tokens, guess.matched), (vec![2, 3, 1, 2, 3, 1, 2, 3], 4));
        assert_eq!(of(&[1, 2, 3, 4]).guess(8), Guess::default());
        assert_eq!(of(&[]).guess(8), Guess::default());
    }
}
