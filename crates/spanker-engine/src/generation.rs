// SPDX-License-Identifier: Apache-2.0
//! Text on its way: token after token, on whatever cards there are; when one is lost, on those that are left; when one
//! was wrong, again from the prompt.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use spanker_llm::{LlmError, Outcome, Output, Timing, Want};

use crate::answering::{Answering, Shaping};
use crate::draft::{
    DraftCounts, DraftModel, DraftSource, Drafter, Fault, StepTimes, is_planted, lengths,
};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::sampling::Sampling;
use crate::summary::{Answer, Drafted, FinishReason};

/// How often an answer is computed again because of cards that were wrong.
pub(crate) const MOST_AGAIN: usize = 16;

/// Ends a generation from elsewhere: after the step that is under way.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Ends it.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Lets it be used for another.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether it was ended.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What ends a generation.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// Tokens at most; nothing goes on until the model or the context ends it.
    pub tokens: Option<usize>,
    /// Whether it goes on after the model has ended the text.
    pub ignore_end: bool,
    /// Texts that end it; they are not part of the answer.
    pub stops: Vec<String>,
    /// Whether the logits after the prompt are kept.
    pub keep_logits: bool,
    /// Ends it from elsewhere.
    pub stop: Stop,
}

impl Limits {
    /// So many tokens at most.
    #[must_use]
    pub fn tokens(count: usize) -> Limits {
        Limits { tokens: Some(count), ..Limits::default() }
    }
}

/// Text that was given out and is wrong from a token on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Correction {
    /// The first wrong token of the answer, from 0.
    pub token: usize,
    /// The length of the answer's text that is right, in bytes.
    pub text: usize,
    /// Whose fault it was, in words.
    pub blamed: String,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The token; nothing with the last text, when there is no token more.
    pub token: Option<u32>,
    /// Its text, as far as it is complete.
    pub text: String,
    /// What was wrong of what came before; this piece follows what was right.
    pub corrects: Option<Correction>,
}

/// What is to be done next.
enum Next {
    /// Run the prompt.
    Prompt(Vec<u32>),
    /// Run the last token.
    Token(u32),
    /// Take what a step has given already: the last token was guessed.
    Checked,
    /// Compute everything again on other cards, because of this.
    Again(LlmError),
    /// Nothing.
    Nothing,
}

/// An answer on its way: an iterator over its pieces. [`Generation::into_answer`] tells how it went.
pub struct Generation<'e, 'h> {
    engine: &'e mut Engine<'h>,
    answering: Answering,
    /// Tokens of the sequence with the prompt.
    end: usize,
    prompt: usize,
    next: Next,
    /// How often it was computed again.
    again: usize,
    /// The answer's times.
    answer: Answer,
    /// What guesses are made from, if they are made.
    drafting: Option<Drafting>,
    /// What follows guesses of the last step.
    checked: VecDeque<Output>,
}

/// Guesses of one sequence.
struct Drafting {
    drafter: Drafter,
    times: StepTimes,
    /// The guesses that the last step checked: how many there were, and how many of them were right so far.
    under_way: (usize, usize),
    /// What making them took.
    guessing: Duration,
}

impl std::fmt::Debug for Generation<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("tokens", &self.answering.tokens.len())
            .finish_non_exhaustive()
    }
}

impl<'e, 'h> Generation<'e, 'h> {
    pub(crate) fn new(
        engine: &'e mut Engine<'h>,
        prompt: &[u32],
        sampling: Sampling,
        limits: Limits,
    ) -> Result<Self> {
        if prompt.is_empty() {
            return Err(EngineError::request("the prompt has no tokens"));
        }
        let past_tokens = engine.tokens().len();
        let end = past_tokens + prompt.len();
        let whole: Vec<u32> = engine.tokens().iter().chain(prompt).copied().collect();
        let vocab = engine.model().shape().vocab as usize;
        let drafting = (engine.draft() != DraftSource::None).then(|| Drafting {
            drafter: Drafter::new(&whole),
            times: StepTimes::default(),
            under_way: (0, 0),
            guessing: Duration::ZERO,
        });
        let stop = limits.stop.clone();
        let answering = Answering::new(sampling, limits, Shaping::default(), &whole, vocab)?;
        engine.begin(&whole);
        engine.stop_by(&stop);
        Ok(Generation {
            answering,
            end,
            prompt: prompt.len(),
            next: Next::Prompt(prompt.to_vec()),
            again: 0,
            answer: empty(prompt.len(), past_tokens, engine.draft()),
            drafting,
            checked: VecDeque::new(),
            engine,
        })
    }

    /// How it went, as far as it went; and the sampling for what follows.
    #[must_use]
    pub fn into_answer(self) -> (Answer, Sampling) {
        let (mut answer, mut answering) = (self.answer, self.answering);
        if let (Some(draft), Some(drafting)) = (&mut answer.draft, self.drafting) {
            draft.counts = drafting.counts();
        }
        answer.tokens = std::mem::take(&mut answering.tokens);
        answer.text = std::mem::take(&mut answering.text);
        answer.finish = answering.finish;
        let (sampling, corrected_from) = answering.into_sampling();
        answer.corrected_from = corrected_from;
        (answer, sampling)
    }

    /// What the first step asks for.
    fn first(&self) -> Want {
        match self.answering.limits.keep_logits {
            true => Want::Logits,
            false => self.answering.want(),
        }
    }

    /// Runs what is next, and gives what follows it; nothing if that cast doubt on what came before.
    fn run(&mut self) -> Result<Option<Output>> {
        match std::mem::replace(&mut self.next, Next::Nothing) {
            Next::Nothing => Ok(None),
            Next::Prompt(tokens) => {
                let outcome = self.engine.try_feed(&tokens, self.first())?;
                let outcome = self.certain(outcome).inspect(|outcome| self.answer.begin(outcome));
                Ok(outcome.map(last))
            }
            Next::Token(token) => self.step(token),
            Next::Checked => Ok(self.checked.pop_front()),
            Next::Again(error) => {
                self.again += 1;
                if self.again > MOST_AGAIN {
                    return Err(error.into());
                }
                self.engine.cut(self.end);
                let past_tokens = self.end - self.prompt;
                self.answer = empty(self.prompt, past_tokens, self.engine.draft());
                self.answering.restart(error.to_string());
                self.checked.clear();
                if let Some(drafting) = &mut self.drafting {
                    drafting.restart(self.end);
                }
                let outcome = self.engine.recover(error, self.first(), false)?;
                let outcome = self.certain(outcome).inspect(|outcome| self.answer.begin(outcome));
                Ok(outcome.map(last))
            }
        }
    }

    /// Runs the last token, with guesses where these are worth it. Gives what follows the token.
    fn step(&mut self, token: u32) -> Result<Option<Output>> {
        if is_planted(Fault::DrawsTooMuch) {
            while let Some(output) = self.checked.pop_front() {
                self.choose(&output)?;
            }
        }
        let want = self.answering.want();
        let guesses = match &mut self.drafting {
            None => Vec::new(),
            Some(drafting) => drafting.guess(self.engine, &self.answering),
        };
        let (lost, rows) = (self.engine.lost(), 1 + guesses.len());
        let predicted = self.drafting.is_some().then(|| self.engine.price(rows));
        let outcome = self.engine.try_check(token, &guesses, want)?;
        let Some(outcome) = self.certain(outcome) else { return Ok(None) };
        let guessing = self
            .drafting
            .as_mut()
            .map_or(Duration::ZERO, |drafting| std::mem::take(&mut drafting.guessing));
        // Whoever waits for a token waits for guesses, too, by whatever clock.
        let Timing { wall, card, .. } = outcome.timing;
        let (wall, card) = (wall + guessing, card.map(|card| card + guessing));
        self.answer.steps.push(Timing { wall, card, ..outcome.timing });
        if let (Some(drafting), Some(draft)) = (&mut self.drafting, &mut self.answer.draft) {
            draft.guesses.push(rows - 1);
            draft.reached.push(self.engine.tokens().len() - self.end);
            if lost == self.engine.lost() {
                let took = outcome.timing.time().as_secs_f64();
                drafting.times.note(rows, predicted.unwrap_or(0.0), took);
            } else {
                // Another layout, on which the guesses were not checked.
                (drafting.times, drafting.under_way) = (StepTimes::default(), (0, 0));
            }
        }
        self.checked = outcome.outputs.into();
        Ok(Some(self.checked.pop_front().unwrap_or_default()))
    }

    /// An outcome that nothing casts doubt on.
    fn certain(&mut self, outcome: Result<Outcome, LlmError>) -> Option<Outcome> {
        outcome.map_err(|error| self.next = Next::Again(error)).ok()
    }

    /// The token that follows, or what ends the text.
    fn choose(&mut self, output: &Output) -> Result<Option<u32>> {
        if self.answering.limits.keep_logits && self.answering.tokens.is_empty() {
            self.answer.logits.clone_from(&output.logits);
        }
        self.answering.choose(output, self.engine.model().tokenizer())
    }

    /// Takes the next token, or the end, and gives out what is new.
    fn take(&mut self, mut token: Option<u32>) -> Option<Piece> {
        if is_planted(Fault::AcceptsTooMuch) {
            token = self.engine.guessed().or(token);
        }
        let room = self.engine.tokens().len() < self.engine.context();
        let piece = self.answering.take(token, self.engine.model().tokenizer(), room);
        let guessed = self.answering.finish.is_none()
            && !self.checked.is_empty()
            && token.is_some_and(|token| self.engine.accept(token));
        if let Some(drafting) = &mut self.drafting {
            drafting.take(token, guessed);
        }
        self.next = match (self.answering.finish, token) {
            (None, Some(_)) if guessed => Next::Checked,
            (None, Some(token)) => Next::Token(token),
            _ => Next::Nothing,
        };
        piece
    }
}

impl Drafting {
    /// Guesses for the next step, as many as are worth it.
    fn guess(&mut self, engine: &mut Engine<'_>, answering: &Answering) -> Vec<u32> {
        let left = answering.limits.tokens.map(|most| most - answering.tokens.len());
        // A step gives a token more than it accepts.
        let most =
            engine.room_for_guesses().min(left.map_or(usize::MAX, |left| left.saturating_sub(1)));
        self.settle();
        let by_model = engine.draft() == DraftSource::Model;
        let (mut guesses, chances) = match by_model {
            true => (Vec::new(), self.drafter.chances_of_model(most)),
            false => {
                let (guess, chances) = self.drafter.guess(most);
                (guess.tokens, chances)
            }
        };
        let (times, most) = (&self.times, chances.len());
        let each = engine.draft_model().filter(|_| by_model).map_or(0.0, DraftModel::guess_seconds);
        let price: Vec<f64> = (0..=most)
            .map(|count| engine.price(1 + count) * times.factor(1 + count) + each * count as f64)
            .collect();
        if !engine.draft().is_eager() {
            let count = lengths(&[chances], most, |count| price[count])[0];
            guesses.truncate(count);
            if let Some(model) = engine.draft_model_mut().filter(|_| by_model) {
                let begun = Instant::now();
                guesses = model.guess(self.drafter.tokens(), count);
                self.guessing = begun.elapsed();
            }
        }
        self.under_way = (guesses.len(), 0);
        guesses
    }

    /// A token follows, or nothing; whether it was guessed.
    fn take(&mut self, token: Option<u32>, guessed: bool) {
        if let Some(token) = token {
            self.drafter.push(token);
        }
        self.under_way.1 += usize::from(guessed);
    }

    /// What came of the guesses of the last step is known.
    fn settle(&mut self) {
        let (guessed, accepted) = std::mem::take(&mut self.under_way);
        self.drafter.note(guessed, accepted);
    }

    /// Everything is computed again from the first `end` tokens.
    fn restart(&mut self, end: usize) {
        self.under_way = (0, 0);
        self.drafter.truncate(end);
        (self.drafter.counts, self.times) = (DraftCounts::default(), StepTimes::default());
    }

    /// What guesses came to in the end.
    fn counts(mut self) -> DraftCounts {
        self.settle();
        self.drafter.counts
    }
}

/// An answer that has not begun.
fn empty(prompt_tokens: usize, past_tokens: usize, source: DraftSource) -> Answer {
    let draft = (source != DraftSource::None).then(|| Drafted { source, ..Drafted::default() });
    Answer { prompt_tokens, past_tokens, draft, ..Answer::default() }
}

/// What was asked for last.
fn last(outcome: Outcome) -> Output {
    outcome.outputs.into_iter().next_back().unwrap_or_default()
}

impl Iterator for Generation<'_, '_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        while !matches!(self.next, Next::Nothing) {
            let chosen = self.run().and_then(|outcome| match outcome {
                None => Ok(None),
                Some(output) => self.choose(&output).map(Some),
            });
            match chosen {
                // In the midst of the prompt, before there is a token.
                Err(EngineError::Run(LlmError::Stopped { .. })) => {
                    self.answering.end(FinishReason::Stopped);
                }
                Err(error) => {
                    self.next = Next::Nothing;
                    return Some(Err(error));
                }
                // Everything is computed again.
                Ok(None) => {}
                Ok(Some(token)) => {
                    if let Some(piece) = self.take(token) {
                        return Some(Ok(piece));
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
