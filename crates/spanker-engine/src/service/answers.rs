// SPDX-License-Identifier: Apache-2.0
//! An answer that a service is giving: to whom, how far it is, and what it took.

use std::time::Instant;

use spanker_llm::{Output, Want};
use spanker_text::Tokenizer;

use super::ask::{Ask, Delivery, Done, ServedPiece, Update};
use crate::answering::{Answering, Shaping};
use crate::draft::{DraftSource, Drafter, Guess};
use crate::error::{EngineError, Result};
use crate::generation::Stop;
use crate::model::Model;
use crate::summary::FinishReason;

pub(crate) struct Answer {
    answering: Answering,
    deliver: Delivery,
    /// Whether anybody still listens.
    is_heard: bool,
    stop: Stop,
    prompt: Vec<u32>,
    reuses: bool,
    cached: usize,
    asked_at: Instant,
    begun_at: Option<Instant>,
    first_at: Option<Instant>,
    last_at: Option<Instant>,
    drafter: Option<Drafter>,
}

impl Answer {
    pub(crate) fn new(
        ask: Ask,
        deliver: Delivery,
        model: &Model,
        draft: DraftSource,
    ) -> Result<Answer, (EngineError, Delivery)> {
        let Ask { prompt, sampling, limits, chances, bias, constraint, reuse } = ask;
        let (stop, vocab) = (limits.stop.clone(), model.shape().vocab as usize);
        let shaping = Shaping { chances, bias, constraint };
        let drafter = (draft != DraftSource::None).then(|| Drafter::new(&prompt));
        match Answering::new(sampling, limits, shaping, &prompt, vocab) {
            Ok(answering) => Ok(Answer {
                answering,
                deliver,
                is_heard: true,
                stop,
                prompt,
                reuses: reuse,
                cached: 0,
                asked_at: Instant::now(),
                begun_at: None,
                first_at: None,
                last_at: None,
                drafter,
            }),
            Err(error) => Err((error, deliver)),
        }
    }

    pub(crate) fn want(&self) -> Want {
        self.answering.want()
    }

    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt.len()
    }

    /// Prompt and answer so far.
    pub(crate) fn sequence(&self) -> Vec<u32> {
        self.prompt.iter().chain(&self.answering.tokens).copied().collect()
    }

    /// Tokens of prompt and answer.
    pub(crate) fn length(&self) -> usize {
        self.prompt.len() + self.answering.tokens.len()
    }

    pub(crate) fn reuses(&self, allowed: bool) -> bool {
        self.reuses && allowed
    }

    pub(crate) fn is_heard(&self) -> bool {
        self.is_heard
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.begun_at.is_some()
    }

    /// Whether it has a token, whatever has become of it.
    pub(crate) fn has_spoken(&self) -> bool {
        self.first_at.is_some()
    }

    pub(crate) fn is_stopped(&self) -> bool {
        !self.is_heard || self.stop.is_stopped()
    }

    pub(crate) fn deliver(&mut self, update: Update) {
        self.is_heard = self.is_heard && (self.deliver)(update);
    }

    /// Its turn has come; says whether for the first time.
    pub(crate) fn begin(&mut self, cached_tokens: usize) -> bool {
        if self.begun_at.is_some() {
            return false;
        }
        self.begun_at = Some(Instant::now());
        self.cached = cached_tokens;
        self.deliver(Update::Begun { cached_tokens });
        true
    }

    /// Everything is computed again from the prompt, because a card was wrong.
    pub(crate) fn restart(&mut self, blamed: &str) {
        self.answering.restart(blamed.to_owned());
        if let Some(drafter) = &mut self.drafter {
            drafter.truncate(self.prompt.len());
        }
    }

    /// What may follow, and how likely each token is to be reached and right. The last token of an answer needs no guess.
    pub(crate) fn guess(&self, most: usize) -> (Guess, Vec<f64>) {
        let left = self.answering.limits.tokens.map(|most| most - self.answering.tokens.len());
        let most = most.min(left.map_or(usize::MAX, |left| left.saturating_sub(1)));
        self.drafter.as_ref().map(|drafter| drafter.guess(most)).unwrap_or_default()
    }

    /// The last step has checked so many guesses, of which the first `accepted` were right.
    pub(crate) fn note_guesses(&mut self, guessed: usize, accepted: usize) {
        if let Some(drafter) = &mut self.drafter {
            drafter.note(guessed, accepted);
        }
    }

    /// Takes what a step gave. Gives the token with which it goes on; nothing if it is over.
    pub(crate) fn next(
        &mut self,
        output: &Output,
        tokenizer: &Tokenizer,
        context: usize,
    ) -> Result<Option<u32>> {
        let token = self.answering.choose(output, tokenizer)?;
        let now = Instant::now();
        self.first_at.get_or_insert(now);
        self.last_at = Some(now);
        // The token itself takes a place of the sequence when it is run.
        let room = self.length() + 1 < context;
        let piece = self.answering.take(token, tokenizer, room);
        if let (Some(drafter), Some(token)) = (&mut self.drafter, token) {
            drafter.push(token);
        }
        if let Some(piece) = piece {
            let chances = std::mem::take(&mut self.answering.chances);
            let (text, corrects) = (piece.text, piece.corrects);
            let piece = ServedPiece { token: piece.token, text, chances, corrects };
            self.deliver(Update::Piece(piece));
        }
        Ok(if self.answering.finish.is_some() { None } else { token })
    }

    /// It ends here.
    pub(crate) fn finish(&mut self, reason: FinishReason) {
        self.answering.end(reason);
        self.complete();
    }

    /// Says how it went.
    pub(crate) fn complete(&mut self) {
        let begun = self.begun_at.unwrap_or(self.asked_at);
        let first = self.first_at.unwrap_or(begun);
        let done = Done {
            reason: self.answering.finish.unwrap_or(FinishReason::Stopped),
            stop: self.answering.stop.clone(),
            prompt_tokens: self.prompt.len(),
            cached_tokens: self.cached,
            tokens: self.answering.tokens.len(),
            waited: begun.duration_since(self.asked_at),
            prompt: first.duration_since(begun),
            generation: self.last_at.unwrap_or(first).duration_since(first),
        };
        self.deliver(Update::Done(done));
    }
}
