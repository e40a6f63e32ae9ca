// SPDX-License-Identifier: Apache-2.0
//! Token after token, on whatever cards there are; when one is lost, on those that are left.

use spanker_llm::{LlmError, Outcome, Session, Timing, Want};
use spanker_text::{Sampler, Stream};

use super::Loaded;

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
}

/// What ends an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) tokens: usize,
    pub(crate) ignore_end: bool,
    /// Whether the logits after the prompt are kept.
    pub(crate) keep_logits: bool,
}

/// Feeds a prompt and generates. `show` gets the text as it comes.
pub(crate) fn generate<'r>(
    loaded: &Loaded,
    session: &mut Session<'r>,
    prompt: &[u32],
    sampler: &mut Sampler,
    limits: Limits,
    mend: &mut dyn Mend<'r>,
    show: &mut dyn FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<Answer> {
    let vocab = loaded.network.model().vocab as usize;
    let want = match sampler.wanted(vocab) {
        wanted if wanted > 1024 => Want::Logits,
        wanted => Want::Best(wanted as u32),
    };
    let mut feed =
        |session: &mut Session<'r>, tokens: &[u32], want: Want| match session.feed(tokens, want) {
            Err(error) => mend.mend(loaded, error, session, want),
            Ok(outcome) => Ok(outcome),
        };
    let mut outcome = feed(session, prompt, if limits.keep_logits { Want::Logits } else { want })?;
    let mut answer =
        Answer { prompt: outcome.timing, prompt_tokens: prompt.len(), ..Answer::default() };
    if limits.keep_logits {
        answer.logits.clone_from(&outcome.logits);
    }
    let mut stream = Stream::new();
    loop {
        let token = match &outcome.logits {
            Some(logits) => sampler.choose(logits)?,
            None => sampler.choose_from(&outcome.best)?,
        };
        if loaded.tokenizer.is_end(token) && !limits.ignore_end {
            answer.ended = true;
            break;
        }
        answer.tokens.push(token);
        let text = stream.push(&loaded.tokenizer, token);
        show(&text)?;
        answer.text += &text;
        let full = session.tokens().len() + 1 > loaded.context;
        if answer.tokens.len() >= limits.tokens || full {
            break;
        }
        outcome = feed(session, &[token], want)?;
        answer.steps.push(outcome.timing);
    }
    let rest = stream.finish();
    show(&rest)?;
    answer.text += &rest;
    Ok(answer)
}
