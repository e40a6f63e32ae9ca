// SPDX-License-Identifier: Apache-2.0
//! How a generation went: what came out, why it ended, by whose clock, where a token's time went, and how far that was
//! from the prediction.

mod report;

use std::ops::Range;
use std::time::Duration;

use spanker_llm::{AuditLog, MemoryUse, Outcome, Timing};
use spanker_plan::{CardMemory, Plan, Prediction};

use crate::draft::{DraftCounts, DraftSource};
use crate::ranks::RankPlace;

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model ended it.
    End,
    /// A stop string came.
    StopString,
    /// It has as many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// Somebody stopped it.
    Stopped,
}

impl FinishReason {
    /// In a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::End => "end",
            FinishReason::StopString => "stop_string",
            FinishReason::Length => "length",
            FinishReason::Context => "context",
            FinishReason::Stopped => "stopped",
        }
    }
}

/// What was generated, and how long that took.
#[derive(Debug, Default)]
pub struct Answer {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// What the prompt took.
    pub prompt: Timing,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the sequence before it, which were on the cards already.
    pub past_tokens: usize,
    /// What each token after the first took.
    pub steps: Vec<Timing>,
    /// The logits after the prompt, if they were kept.
    pub logits: Option<Vec<f32>>,
    /// Why it ended; nothing if it did not.
    pub finish: Option<FinishReason>,
    /// The first token, from 0, that was given out wrong and then corrected.
    pub corrected_from: Option<usize>,
    /// What guesses came to, if any were to be made.
    pub draft: Option<Drafted>,
}

/// What guesses came to.
#[derive(Debug, Clone, Default)]
pub struct Drafted {
    /// Where they came from.
    pub source: DraftSource,
    /// How many there were, and were right.
    pub counts: DraftCounts,
    /// For each step after the prompt how many guesses it checked.
    pub guesses: Vec<usize>,
    /// And how many tokens followed the prompt when it ran, its own included.
    pub reached: Vec<usize>,
}

impl Answer {
    /// Tokens after the first: those that a step gave, and those that were guessed right.
    #[must_use]
    pub fn generated(&self) -> usize {
        let accepted = self.draft.as_ref().map_or(0, |draft| draft.counts.accepted as usize);
        self.steps.len() + accepted
    }

    /// Steps that had begun when so many tokens followed the prompt.
    pub(crate) fn steps_before(&self, tokens: usize) -> usize {
        match &self.draft {
            None => tokens,
            Some(draft) => draft.reached.partition_point(|reached| *reached <= tokens),
        }
    }

    /// Tokens that followed the prompt when so many steps had been run.
    pub(crate) fn tokens_at(&self, steps: usize) -> usize {
        match &self.draft {
            None => steps,
            Some(draft) => match steps.checked_sub(1) {
                Some(last) => draft.reached.get(last).copied().unwrap_or(steps),
                None => 0,
            },
        }
    }

    pub(crate) fn begin(&mut self, outcome: &Outcome) {
        self.prompt = outcome.timing;
    }
}

/// An answer beside its prediction.
#[derive(Debug)]
pub struct Summary<'a> {
    /// The answer.
    pub answer: &'a Answer,
    /// What it ran by in the end.
    pub plan: &'a Plan,
    /// What was predicted for the prompt and the steps that there were.
    pub prediction: Prediction,
    /// How many cards were lost on the way. Then the plan changed.
    pub lost: usize,
    /// The steps that the prediction is for: those on one layout, the one that was computed anew left out.
    pub steps: Range<usize>,
    /// Where the cards are, if they are ranks.
    pub place: Option<&'a RankPlace>,
    /// What each card was planned to allocate, and what it has.
    pub memory: &'a [MemoryUse],
    /// The device's number of each card of the plan.
    pub numbers: &'a [usize],
    /// What was checked of what cards computed.
    pub audit: Option<&'a AuditLog>,
}

/// The step in the middle: steps differ by noise and by what was mended.
#[must_use]
pub fn median(steps: &[Timing]) -> Timing {
    let mut sorted = steps.to_vec();
    sorted.sort_by_key(Timing::time);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// So many in a time, as a rate per second.
#[must_use]
pub fn rate(count: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

/// How far a measurement is from a prediction, in percent. Of times, more than nothing is slower than predicted; of
/// speeds, faster.
#[must_use]
pub fn off(measured: f64, predicted: f64) -> f64 {
    if predicted > 0.0 { (measured / predicted - 1.0) * 100.0 } else { 0.0 }
}

impl Summary<'_> {
    /// Whether times are by the clocks of cards.
    #[must_use]
    pub fn by_card_clocks(&self) -> bool {
        self.answer.prompt.card.is_some()
    }

    /// Tokens per second: of all steps, and of the step in the middle.
    #[must_use]
    pub fn speeds(&self) -> (f64, f64) {
        let total = self.answer.steps.iter().map(Timing::time).sum();
        (rate(self.answer.generated(), total), rate(1, self.middle().time()))
    }

    /// Steps that the prediction is for: of one token, without guesses.
    pub(crate) fn plain_steps(&self) -> impl Iterator<Item = Timing> + '_ {
        let draft = self.answer.draft.as_ref();
        let plain = move |at: &usize| {
            draft.is_none_or(|draft| draft.guesses.get(*at).is_none_or(|n| *n == 0))
        };
        let steps = self.steps.clone().filter(plain);
        steps.filter_map(|at| self.answer.steps.get(at).copied())
    }

    /// The step in the middle of those that the prediction is for; of all where each checked guesses.
    #[must_use]
    pub fn middle(&self) -> Timing {
        let plain: Vec<Timing> = self.plain_steps().collect();
        match plain.is_empty() {
            true => median(self.answer.steps.get(self.steps.clone()).unwrap_or_default()),
            false => median(&plain),
        }
    }

    /// How many times as fast guesses made the answer, by the time of a step without any: measured if there were some,
    /// else predicted.
    #[must_use]
    pub fn gained(&self) -> Option<f64> {
        self.answer.draft.as_ref()?;
        let total: Duration = self.answer.steps.iter().map(Timing::time).sum();
        let one = match self.plain_steps().next() {
            Some(_) => self.middle().time().as_secs_f64(),
            None => self.prediction.token.0,
        };
        let total = total.as_secs_f64();
        (total > 0.0).then(|| self.answer.generated() as f64 * one / total)
    }

    /// Which part of all weights each card holds: the device's number, and the part. What several hold counts for each.
    #[must_use]
    pub fn shares(&self) -> Vec<(usize, f64)> {
        let cards = &self.prediction.memory;
        let weights = |card: &CardMemory| card.footprint.weights.0 as f64;
        let total: f64 = cards.iter().map(weights).sum();
        let number = |card: usize| self.numbers.get(card).copied().unwrap_or(card);
        cards.iter().map(|card| (number(card.card), weights(card) / total.max(1.0))).collect()
    }

    /// The kinds of cards that the prediction is for.
    #[must_use]
    pub fn profiles(&self) -> String {
        let cluster = &self.plan.cluster;
        let cards = self.plan.layout.cards();
        let mut names: Vec<&str> =
            cards.iter().map(|&card| cluster.profile(card).name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        names.join(" and ")
    }
}
