// SPDX-License-Identifier: Apache-2.0
//! An answer as it grows: the choice of each token, text that is complete, what ends it, and what becomes of it when it is
//! computed again. Where tokens come from is not its business.

use spanker_llm::{Output, Want};
use spanker_text::{Sampler, Stream, Tokenizer};

use crate::error::{EngineError, Result};
use crate::generation::{Correction, Limits, Piece};
use crate::given::{Fate, Given, released};
use crate::sampling::Sampling;
use crate::service::{Chance, Constraint};
use crate::summary::FinishReason;

/// Candidates that cards are asked for at most; who looks at more gets all logits.
const MOST_CANDIDATES: usize = 1024;

/// What an answer has to be besides what its sampling says.
#[derive(Default)]
pub(crate) struct Shaping {
    /// For each token its log probability, and that of so many of the likeliest; nothing for none of this.
    pub(crate) chances: Option<usize>,
    /// What is added to the logits of tokens.
    pub(crate) bias: Vec<(u32, f32)>,
    /// What the text has to be.
    pub(crate) constraint: Option<Box<dyn Constraint>>,
}

/// An answer as it grows.
pub(crate) struct Answering {
    sampler: Sampler,
    /// The sampler as it was after the prompt, for when everything is computed again.
    begun: Sampler,
    pub(crate) limits: Limits,
    shaping: Shaping,
    want: Want,
    blamed: String,
    given: Given,
    /// Bytes of the text that were given out.
    shown: usize,
    stream: Stream,
    /// The tokens so far.
    pub(crate) tokens: Vec<u32>,
    /// Their text.
    pub(crate) text: String,
    /// Why it ended; nothing if it has not.
    pub(crate) finish: Option<FinishReason>,
    /// The stop string that ended it.
    pub(crate) stop: Option<String>,
    /// How likely the token was that was chosen last, and the likeliest ones.
    pub(crate) chances: Vec<Chance>,
}

impl Answering {
    /// An answer that follows `tokens`, from a vocabulary of so many.
    pub(crate) fn new<'t>(
        sampling: Sampling,
        limits: Limits,
        shaping: Shaping,
        tokens: impl IntoIterator<Item = &'t u32>,
        vocab: usize,
    ) -> Result<Answering> {
        if limits.tokens == Some(0) {
            return Err(EngineError::request("--n-predict 0: at least one token is generated"));
        }
        let mut sampler = sampling.sampler;
        // The sequence as it is now, whatever was accepted before.
        sampler.forget();
        tokens.into_iter().for_each(|&token| sampler.accept(token));
        let all =
            shaping.chances.is_some() || shaping.constraint.is_some() || !shaping.bias.is_empty();
        let want = match sampler.wanted(vocab) {
            wanted if all || wanted > MOST_CANDIDATES => Want::Logits,
            wanted => Want::Best(wanted as u32),
        };
        Ok(Answering {
            begun: sampler.clone(),
            sampler,
            limits,
            shaping,
            want,
            blamed: String::new(),
            given: Given::default(),
            shown: 0,
            stream: Stream::new(),
            tokens: Vec::new(),
            text: String::new(),
            finish: None,
            stop: None,
            chances: Vec::new(),
        })
    }

    /// What is asked for after each token.
    pub(crate) fn want(&self) -> Want {
        self.want
    }

    /// The sampling for what follows, and the first token that was given out wrong and then corrected.
    pub(crate) fn into_sampling(self) -> (Sampling, Option<usize>) {
        (Sampling { sampler: self.sampler }, self.given.corrected_from)
    }

    /// Everything is computed again from the prompt, because somebody was wrong.
    pub(crate) fn restart(&mut self, blamed: String) {
        self.sampler = self.begun.clone();
        self.stream = Stream::new();
        self.tokens.clear();
        self.text.clear();
        (self.finish, self.stop) = (None, None);
        self.chances.clear();
        if let Some(constraint) = &mut self.shaping.constraint {
            *constraint = constraint.restarted();
        }
        self.blamed = blamed;
    }

    /// The token that follows, or what ends the text.
    pub(crate) fn choose(&mut self, output: &Output, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        let token = match &output.logits {
            Some(logits) if self.want == Want::Logits => self.shaped(logits)?,
            Some(logits) => self.sampler.choose(logits)?,
            None => self.sampler.choose_from(&output.best)?,
        };
        self.sampler.accept(token);
        let ends = tokenizer.is_end(token) && !self.limits.ignore_end;
        if !ends && let Some(constraint) = &mut self.shaping.constraint {
            constraint.accept(token).map_err(EngineError::request)?;
        }
        Ok((!ends).then_some(token))
    }

    /// The choice from all logits, after what was asked for was done to them.
    fn shaped(&mut self, logits: &[f32]) -> Result<u32> {
        let Shaping { chances, bias, constraint } = &mut self.shaping;
        let allowed = match constraint {
            Some(constraint) => constraint.allowed().map_err(EngineError::request)?,
            None => None,
        };
        if bias.is_empty() && allowed.is_none() && chances.is_none() {
            return Ok(self.sampler.choose(logits)?);
        }
        let mut logits = logits.to_vec();
        for (token, bias) in bias.iter() {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        let plain = chances.map(|_| logits.clone());
        if let Some(allowed) = allowed {
            for (token, logit) in logits.iter_mut().enumerate() {
                let word = allowed.get(token / 32).copied().unwrap_or(0);
                if word >> (token % 32) & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let token = self.sampler.choose(&logits)?;
        if let (Some(count), Some(plain)) = (*chances, plain) {
            self.chances = likeliest(&plain, token, count);
        }
        Ok(token)
    }

    /// Takes the next token, or the end, and gives out what is new. `room` says whether the sequence has room for another
    /// token.
    pub(crate) fn take(
        &mut self,
        token: Option<u32>,
        tokenizer: &Tokenizer,
        room: bool,
    ) -> Option<Piece> {
        let (at, begin) = (self.tokens.len(), self.text.len());
        let fate = self.given.next(at, token);
        let corrects = (fate == Fate::Departs).then(|| {
            self.shown = self.shown.min(begin);
            Correction { token: at, text: self.shown, blamed: self.blamed.clone() }
        });
        let text = match token {
            Some(token) => {
                self.tokens.push(token);
                self.stream.push(tokenizer, token)
            }
            None => self.stream.finish(),
        };
        self.text += &text;
        let (released, stopped) = released(&self.text, &self.limits.stops, begin);
        let finished = match (token, stopped) {
            (_, Some(stop)) => {
                let is_here = |one: &&String| self.text[stop..].starts_with(one.as_str());
                self.stop = self.limits.stops.iter().find(is_here).cloned();
                self.text.truncate(stop);
                Some(FinishReason::StopString)
            }
            (None, None) => Some(FinishReason::End),
            (Some(_), None) => self.full(room),
        };
        let released = match finished {
            None => released,
            Some(reason) => {
                self.end(reason);
                self.text.len()
            }
        };
        let text = self.text.get(self.shown..released).unwrap_or_default().to_owned();
        self.shown = self.shown.max(released.min(self.text.len()));
        let new = fate != Fate::Known || !text.is_empty();
        (new && (token.is_some() || !text.is_empty() || corrects.is_some())).then_some(Piece {
            token,
            text,
            corrects,
        })
    }

    /// Whether a limit is reached.
    fn full(&mut self, room: bool) -> Option<FinishReason> {
        if self.limits.stop.is_stopped() {
            return Some(FinishReason::Stopped);
        }
        if self.shaping.constraint.as_mut().is_some_and(|constraint| constraint.is_complete()) {
            return Some(FinishReason::End);
        }
        if self.limits.tokens.is_some_and(|most| self.tokens.len() >= most) {
            return Some(FinishReason::Length);
        }
        (!room).then_some(FinishReason::Context)
    }

    /// Nothing follows.
    pub(crate) fn end(&mut self, reason: FinishReason) {
        self.finish = Some(reason);
        if reason != FinishReason::StopString {
            self.text += &self.stream.finish();
        }
    }
}

/// How likely a token was, and then the likeliest ones.
fn likeliest(logits: &[f32], token: u32, count: usize) -> Vec<Chance> {
    let numbers = logits.iter().filter(|logit| !logit.is_nan());
    let most = f64::from(numbers.clone().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = numbers.map(|logit| (f64::from(*logit) - most).exp()).sum();
    let logprob = |logit: f32| (f64::from(logit) - most - sum.ln()) as f32;
    let own = Chance { token, logprob: logprob(logits[token as usize]) };
    let best = spanker_text::best(logits, count);
    let best = best.into_iter().map(|(token, logit)| Chance { token, logprob: logprob(logit) });
    std::iter::once(own).chain(best).collect()
}
