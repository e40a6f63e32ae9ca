// SPDX-License-Identifier: Apache-2.0
//! Token after token, on whatever cards there are; when one is lost, on those that are left.

use spanker_llm::{AuditLog, LlmError, Outcome, Session, Timing, Want};
use spanker_text::{Sampler, Stream};

use super::Loaded;
use super::given::{Audience, Fate, Given, casts_doubt, correct};

/// How often an answer is computed again because of cards that were wrong.
const MOST_AGAIN: usize = 16;

/// What to do when a runner is lost.
pub(crate) trait Mend<'r> {
    /// Gives the session something to go on with and what it was working on, or the error back.
    fn mend(
        &mut self,
        loaded: &Loaded,
        error: LlmError,
        session: &mut Session<'r>,
        want: Want,
    ) -> anyhow::Result<Outcome>;

    /// What was checked of what cards computed, if anything was.
    fn audit(&self) -> Option<AuditLog>;
}

/// Threads of this process are lost with it.
pub(crate) struct GiveUp;

impl Mend<'_> for GiveUp {
    fn mend(
        &mut self,
        _: &Loaded,
        error: LlmError,
        _: &mut Session<'_>,
        _: Want,
    ) -> anyhow::Result<Outcome> {
        Err(error.into())
    }

    fn audit(&self) -> Option<AuditLog> {
        None
    }
}

/// Ranks and graphics processors are lost with the run as well; what was checked of them is known.
pub(crate) struct Unmended(pub(crate) Option<AuditLog>);

impl Mend<'_> for Unmended {
    fn mend(
        &mut self,
        _: &Loaded,
        error: LlmError,
        _: &mut Session<'_>,
        _: Want,
    ) -> anyhow::Result<Outcome> {
        Err(error.into())
    }

    fn audit(&self) -> Option<AuditLog> {
        self.0.clone()
    }
}

/// What was generated, and how long that took.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    /// The prompt.
    pub(crate) prompt: Timing,
    pub(crate) prompt_tokens: usize,
    /// Each token after the first.
    pub(crate) steps: Vec<Timing>,
    /// The logits after the prompt, if they are kept.
    pub(crate) logits: Option<Vec<f32>>,
    /// Whether the model ended the text itself.
    pub(crate) ended: bool,
    /// What was checked of what cards computed.
    pub(crate) audit: Option<AuditLog>,
    /// The first token, from 0, that was given out wrong and then corrected.
    pub(crate) corrected_from: Option<usize>,
}

/// What ends an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) tokens: usize,
    pub(crate) ignore_end: bool,
    /// Whether the logits after the prompt are kept.
    pub(crate) keep_logits: bool,
    /// Who reads it.
    pub(crate) audience: Audience,
}

/// Feeds a prompt and generates. `show` gets the text as it comes.
///
/// When a card turns out to be wrong, everything is computed again from the prompt, with the sampler as it was
/// then: see [`super::given`].
pub(crate) fn generate<'r>(
    loaded: &Loaded,
    session: &mut Session<'r>,
    prompt: &[u32],
    sampler: &mut Sampler,
    limits: Limits,
    mend: &mut dyn Mend<'r>,
    show: &mut dyn FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Answer> {
    let end = session.tokens().len() + prompt.len();
    let begun = sampler.clone();
    let mut given = Given::default();
    let mut doubt: Option<LlmError> = None;
    for _ in 0..=MOST_AGAIN {
        let begin = match doubt.take() {
            None => Begin::Feed(prompt),
            Some(error) => {
                session.cut(end);
                *sampler = begun.clone();
                Begin::Mend(error)
            }
        };
        let mut attempt =
            Attempt { loaded, session, sampler, limits, mend, show, given: &mut given };
        match attempt.run(begin, prompt.len())? {
            Ended::Complete(mut answer) => {
                answer.audit = mend.audit();
                answer.corrected_from = given.corrected_from;
                return Ok(*answer);
            }
            Ended::Doubtful(error) => doubt = Some(error),
        }
    }
    Err(doubt.map_or_else(|| anyhow::anyhow!("no answer"), Into::into))
}

/// What an answer begins with.
enum Begin<'p> {
    /// The prompt.
    Feed(&'p [u32]),
    /// Other cards, because of this.
    Mend(LlmError),
}

/// How an attempt ended.
enum Ended {
    Complete(Box<Answer>),
    /// What was computed so far may be wrong.
    Doubtful(LlmError),
}

/// An answer on its way.
struct Attempt<'a, 'r> {
    loaded: &'a Loaded,
    session: &'a mut Session<'r>,
    sampler: &'a mut Sampler,
    limits: Limits,
    mend: &'a mut dyn Mend<'r>,
    show: &'a mut dyn FnMut(&str) -> anyhow::Result<()>,
    given: &'a mut Given,
}

impl Attempt<'_, '_> {
    fn run(&mut self, begin: Begin<'_>, prompt: usize) -> anyhow::Result<Ended> {
        let (loaded, limits) = (self.loaded, self.limits);
        let vocab = loaded.network.model().vocab as usize;
        let want = match self.sampler.wanted(vocab) {
            wanted if wanted > 1024 => Want::Logits,
            wanted => Want::Best(wanted as u32),
        };
        let first = if limits.keep_logits { Want::Logits } else { want };
        // Who was wrong, in case something was given out that was.
        let blamed = match &begin {
            Begin::Feed(_) => String::new(),
            Begin::Mend(error) => error.to_string(),
        };
        let mut outcome = match begin {
            Begin::Feed(tokens) => match self.feed(tokens, first)? {
                Ok(outcome) => outcome,
                Err(error) => return Ok(Ended::Doubtful(error)),
            },
            Begin::Mend(error) => self.mend.mend(loaded, error, self.session, first)?,
        };
        let mut answer =
            Answer { prompt: outcome.timing, prompt_tokens: prompt, ..Answer::default() };
        if limits.keep_logits {
            answer.logits.clone_from(&outcome.logits);
        }
        let mut stream = Stream::new();
        loop {
            let token = match &outcome.logits {
                Some(logits) => self.sampler.choose(logits)?,
                None => self.sampler.choose_from(&outcome.best)?,
            };
            let ends = loaded.tokenizer.is_end(token) && !limits.ignore_end;
            let fate = self.given.next(answer.tokens.len(), (!ends).then_some(token));
            if fate == Fate::Departs {
                correct(limits.audience, answer.tokens.len(), &blamed)?;
            }
            if ends {
                answer.ended = true;
                break;
            }
            answer.tokens.push(token);
            let text = stream.push(&loaded.tokenizer, token);
            if fate != Fate::Known {
                (self.show)(&text)?;
            }
            answer.text += &text;
            let full = self.session.tokens().len() + 1 > loaded.context;
            if answer.tokens.len() >= limits.tokens || full {
                break;
            }
            outcome = match self.feed(&[token], want)? {
                Ok(outcome) => outcome,
                Err(error) => return Ok(Ended::Doubtful(error)),
            };
            answer.steps.push(outcome.timing);
        }
        let rest = stream.finish();
        (self.show)(&rest)?;
        answer.text += &rest;
        Ok(Ended::Complete(Box::new(answer)))
    }

    /// Runs tokens; on the cards that are left when one is lost. The inner error casts doubt on all that was
    /// computed.
    fn feed(&mut self, tokens: &[u32], want: Want) -> anyhow::Result<Result<Outcome, LlmError>> {
        match self.session.feed(tokens, want) {
            Ok(outcome) => Ok(Ok(outcome)),
            Err(error) if casts_doubt(&error) => Ok(Err(error)),
            Err(error) => self.mend.mend(self.loaded, error, self.session, want).map(Ok),
        }
    }
}

#[cfg(test)]
mod tests;
