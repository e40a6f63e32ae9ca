// SPDX-License-Identifier: Apache-2.0
//! Text on its way: token after token, on whatever cards there are; when one is lost, on those that are left; when one
//! was wrong, again from the prompt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spanker_llm::{LlmError, Outcome, Want};
use spanker_text::{Sampler, Stream};

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::given::{Fate, Given, released};
use crate::sampling::Sampling;
use crate::summary::{Answer, FinishReason};

/// How often an answer is computed again because of cards that were wrong.
const MOST_AGAIN: usize = 16;
/// Candidates that cards are asked for at most; who looks at more gets all logits.
const MOST_CANDIDATES: usize = 1024;

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
    /// Compute everything again on other cards, because of this.
    Again(LlmError),
    /// Nothing.
    Nothing,
}

/// An answer on its way: an iterator over its pieces. [`Generation::into_answer`] tells how it went.
pub struct Generation<'e, 'h> {
    engine: &'e mut Engine<'h>,
    sampler: Sampler,
    /// The sampler as it was after the prompt, for when everything is computed again.
    begun: Sampler,
    limits: Limits,
    want: Want,
    /// Tokens of the sequence with the prompt.
    end: usize,
    prompt: usize,
    next: Next,
    /// How often it was computed again.
    again: usize,
    blamed: String,
    given: Given,
    /// Bytes of the answer's text that were given out.
    shown: usize,
    stream: Stream,
    answer: Answer,
}

impl std::fmt::Debug for Generation<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("tokens", &self.answer.tokens.len())
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
        if limits.tokens == Some(0) {
            return Err(EngineError::request("--n-predict 0: at least one token is generated"));
        }
        let mut sampler = sampling.sampler;
        // The sequence as it is now, whatever was accepted before.
        sampler.forget();
        engine.tokens().iter().chain(prompt).for_each(|&token| sampler.accept(token));
        let vocab = engine.model().shape().vocab as usize;
        let want = match sampler.wanted(vocab) {
            wanted if wanted > MOST_CANDIDATES => Want::Logits,
            wanted => Want::Best(wanted as u32),
        };
        let past_tokens = engine.tokens().len();
        let end = past_tokens + prompt.len();
        let whole: Vec<u32> = engine.tokens().iter().chain(prompt).copied().collect();
        engine.begin(&whole);
        engine.stop_by(&limits.stop);
        Ok(Generation {
            begun: sampler.clone(),
            sampler,
            limits,
            want,
            end,
            prompt: prompt.len(),
            next: Next::Prompt(prompt.to_vec()),
            again: 0,
            blamed: String::new(),
            given: Given::default(),
            shown: 0,
            stream: Stream::new(),
            answer: Answer { prompt_tokens: prompt.len(), past_tokens, ..Answer::default() },
            engine,
        })
    }

    /// How it went, as far as it went; and the sampling for what follows.
    #[must_use]
    pub fn into_answer(self) -> (Answer, Sampling) {
        let mut answer = self.answer;
        answer.corrected_from = self.given.corrected_from;
        (answer, Sampling { sampler: self.sampler })
    }

    /// What the first step asks for.
    fn first(&self) -> Want {
        if self.limits.keep_logits { Want::Logits } else { self.want }
    }

    /// Runs what is next; nothing if that cast doubt on what came before.
    fn run(&mut self) -> Result<Option<Outcome>> {
        match std::mem::replace(&mut self.next, Next::Nothing) {
            Next::Nothing => Ok(None),
            Next::Prompt(tokens) => {
                let outcome = self.engine.try_feed(&tokens, self.first())?;
                Ok(self.certain(outcome).inspect(|outcome| self.answer.begin(outcome)))
            }
            Next::Token(token) => {
                let outcome = self.engine.try_feed(&[token], self.want)?;
                Ok(self.certain(outcome).inspect(|outcome| self.answer.steps.push(outcome.timing)))
            }
            Next::Again(error) => {
                self.again += 1;
                if self.again > MOST_AGAIN {
                    return Err(error.into());
                }
                self.engine.cut(self.end);
                self.sampler = self.begun.clone();
                self.stream = Stream::new();
                let (prompt_tokens, past_tokens) = (self.prompt, self.end - self.prompt);
                self.answer = Answer { prompt_tokens, past_tokens, ..Answer::default() };
                self.blamed = error.to_string();
                let outcome = self.engine.recover(error, self.first(), false)?;
                Ok(self.certain(outcome).inspect(|outcome| self.answer.begin(outcome)))
            }
        }
    }

    /// An outcome that nothing casts doubt on.
    fn certain(&mut self, outcome: Result<Outcome, LlmError>) -> Option<Outcome> {
        outcome.map_err(|error| self.next = Next::Again(error)).ok()
    }

    /// The token that follows, or what ends the text.
    fn choose(&mut self, outcome: &Outcome) -> Result<Option<u32>> {
        if self.limits.keep_logits && self.answer.tokens.is_empty() {
            self.answer.logits.clone_from(&outcome.last().logits);
        }
        let token = match &outcome.last().logits {
            Some(logits) => self.sampler.choose(logits)?,
            None => self.sampler.choose_from(&outcome.last().best)?,
        };
        self.sampler.accept(token);
        let ends = self.engine.model().tokenizer().is_end(token) && !self.limits.ignore_end;
        Ok((!ends).then_some(token))
    }

    /// Takes the next token, or the end, and gives out what is new.
    fn take(&mut self, token: Option<u32>) -> Option<Piece> {
        let at = self.answer.tokens.len();
        let begin = self.answer.text.len();
        let fate = self.given.next(at, token);
        let corrects = (fate == Fate::Departs).then(|| {
            self.shown = self.shown.min(begin);
            Correction { token: at, text: self.shown, blamed: self.blamed.clone() }
        });
        let text = match token {
            Some(token) => {
                self.answer.tokens.push(token);
                self.stream.push(self.engine.model().tokenizer(), token)
            }
            None => self.stream.finish(),
        };
        self.answer.text += &text;
        let (released, stopped) = released(&self.answer.text, &self.limits.stops, begin);
        let finished = match (token, stopped) {
            (_, Some(stop)) => {
                self.answer.text.truncate(stop);
                Some(FinishReason::StopString)
            }
            (None, None) => Some(FinishReason::End),
            (Some(_), None) => self.full(),
        };
        let released = match finished {
            None => {
                self.next = token.map_or(Next::Nothing, Next::Token);
                released
            }
            Some(reason) => {
                self.finish(reason);
                self.answer.text.len()
            }
        };
        let text = self.answer.text.get(self.shown..released).unwrap_or_default().to_owned();
        self.shown = self.shown.max(released.min(self.answer.text.len()));
        let new = fate != Fate::Known || !text.is_empty();
        (new && (token.is_some() || !text.is_empty() || corrects.is_some())).then_some(Piece {
            token,
            text,
            corrects,
        })
    }

    /// Whether a limit is reached.
    fn full(&self) -> Option<FinishReason> {
        if self.limits.stop.is_stopped() {
            return Some(FinishReason::Stopped);
        }
        if self.limits.tokens.is_some_and(|most| self.answer.tokens.len() >= most) {
            return Some(FinishReason::Length);
        }
        (self.engine.tokens().len() + 1 > self.engine.context()).then_some(FinishReason::Context)
    }

    /// Nothing follows.
    fn finish(&mut self, reason: FinishReason) {
        self.next = Next::Nothing;
        self.answer.finish = Some(reason);
        if reason != FinishReason::StopString {
            self.answer.text += &self.stream.finish();
        }
    }
}

impl Iterator for Generation<'_, '_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        while !matches!(self.next, Next::Nothing) {
            let chosen = self.run().and_then(|outcome| match outcome {
                None => Ok(None),
                Some(outcome) => self.choose(&outcome).map(Some),
            });
            match chosen {
                // In the midst of the prompt, before there is a token.
                Err(EngineError::Run(LlmError::Stopped { .. })) => {
                    self.finish(FinishReason::Stopped)
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
