// SPDX-License-Identifier: Apache-2.0
//! Guesses of what a sequence goes on with, which the next step checks besides computing the next token. Rows do not depend on
//! each other, so what is accepted is what would have been generated: guesses cost or save time, and change nothing else.

mod acceptance;
mod forecast;
mod length;
mod lookup;
mod model;

use std::cell::Cell;
use std::str::FromStr;

pub use acceptance::DraftCounts;
pub(crate) use acceptance::{Acceptance, OF_MODEL};
pub use forecast::DraftForecast;
pub(crate) use length::{StepTimes, lengths};
pub use lookup::{Guess, Lookup};
pub use model::DraftModel;

/// Guesses of a sequence that a step checks at most.
pub const MOST_GUESSES: usize = 15;
/// Guesses of all sequences of a service that a step checks at most.
pub const MOST_GUESSES_TOGETHER: usize = 32;

/// Where guesses come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DraftSource {
    /// Nothing is guessed.
    #[default]
    None,
    /// From what followed earlier in prompt and answer.
    Lookup,
    /// The same, as many as there is room for, whatever they cost: to see that they change nothing.
    LookupAlways,
    /// From a small model with the same vocabulary.
    Model,
}

impl DraftSource {
    /// In a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DraftSource::None => "none",
            DraftSource::Lookup => "lookup",
            DraftSource::LookupAlways => "lookup-always",
            DraftSource::Model => "model",
        }
    }

    /// Whether guesses are checked whatever they cost.
    pub(crate) fn is_eager(self) -> bool {
        self == DraftSource::LookupAlways
    }

    /// Guesses of one sequence that a step has to have room for.
    #[must_use]
    pub fn most(self) -> u64 {
        match self {
            DraftSource::None => 0,
            _ => MOST_GUESSES as u64,
        }
    }

    /// Guesses of all sequences of a service that a step has to have room for.
    #[must_use]
    pub fn most_together(self) -> u64 {
        match self {
            DraftSource::None => 0,
            _ => MOST_GUESSES_TOGETHER as u64,
        }
    }
}

impl FromStr for DraftSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [DraftSource::None, DraftSource::Lookup, DraftSource::LookupAlways]
            .into_iter()
            .find(|source| source.name() == text)
            .ok_or_else(|| format!("'{text}': expected none, lookup or lookup-always"))
    }
}

/// Faults that tests plant, to see that others find them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A guess is accepted although another token follows.
    AcceptsTooMuch,
    /// Random numbers are drawn for rows behind a refused guess.
    DrawsTooMuch,
}

#[cfg(test)]
thread_local! {
    pub(crate) static PLANTED: Cell<Option<Fault>> = const { Cell::new(None) };
}

/// Whether a test has planted a fault.
#[cfg(test)]
pub(crate) fn is_planted(fault: Fault) -> bool {
    PLANTED.get() == Some(fault)
}

#[cfg(not(test))]
pub(crate) const fn is_planted(_: Fault) -> bool {
    false
}

/// What guesses of a sequence are made from, and what came of them.
#[derive(Debug, Clone)]
pub(crate) struct Drafter {
    lookup: Lookup,
    acceptance: Acceptance,
    /// How long the ending was that the last guesses followed.
    matched: Cell<usize>,
    pub(crate) counts: DraftCounts,
}

impl Drafter {
    /// For a sequence that begins with a prompt.
    pub(crate) fn new<'t>(prompt: impl IntoIterator<Item = &'t u32>) -> Drafter {
        let mut lookup = Lookup::new();
        prompt.into_iter().for_each(|&token| lookup.push(token));
        let (acceptance, counts) = (Acceptance::default(), DraftCounts::default());
        Drafter { lookup, acceptance, matched: Cell::new(0), counts }
    }

    /// The sequence goes on.
    pub(crate) fn push(&mut self, token: u32) {
        self.lookup.push(token);
        self.acceptance.age();
    }

    /// The sequence is computed again from its first `length` tokens.
    pub(crate) fn truncate(&mut self, length: usize) {
        self.lookup.truncate(length);
    }

    /// The sequence so far.
    pub(crate) fn tokens(&self) -> &[u32] {
        self.lookup.tokens()
    }

    /// How likely each of so many guesses of a model is to be reached and right.
    pub(crate) fn chances_of_model(&self, count: usize) -> Vec<f64> {
        self.matched.set(OF_MODEL);
        self.acceptance.chances(OF_MODEL, count)
    }

    /// What may follow, and how likely each token is to be reached and right.
    pub(crate) fn guess(&self, most: usize) -> (Guess, Vec<f64>) {
        let guess = self.lookup.guess(most);
        self.matched.set(guess.matched);
        let chances = self.acceptance.chances(guess.matched, guess.tokens.len());
        (guess, chances)
    }

    /// A step has checked the first ones of the last guesses, of which `accepted` were right.
    pub(crate) fn note(&mut self, guessed: usize, accepted: usize) {
        if guessed > 0 {
            self.acceptance.note(self.matched.get(), guessed, accepted);
            self.counts.steps += 1;
            self.counts.guessed += guessed as u64;
            self.counts.accepted += accepted as u64;
        }
    }
}
