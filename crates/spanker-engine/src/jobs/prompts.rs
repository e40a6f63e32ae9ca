// SPDX-License-Identifier: Apache-2.0
//! Prompts as a job: one item is one prompt, and nothing connects it with the others. What tokens mean as text is not
//! known here.

use std::sync::Arc;
use std::time::Duration;

use spanker_fabric::device::DeviceErrorKind;
use spanker_llm::{LlmError, Network, Session, Want};
use spanker_steal::{Failure, Job, Options};

use super::JobError;
use super::worker::Order;

/// What fills up the output of a prompt whose answer has ended.
pub const NO_TOKEN: u32 = u32::MAX;

/// Tokens of a prompt that are run together at most.
const BATCH: usize = 128;
/// The most tokens of one answer, far beyond any context.
const MOST_TOKENS: usize = 1 << 24;

/// Answers take as long as they like, and a replica that is lost says so itself.
pub(super) const OPTIONS: Options = Options {
    lease: Duration::from_secs(30),
    patience: Duration::from_secs(600),
    ..Options::STANDARD
};

/// Prompts for one model.
///
/// The output of a prompt is `tokens` u32, little endian: the best token each time. After one of `ends` the rest is
/// [`NO_TOKEN`]. Tokens depend on the prompt alone, not on which replica of the model made them.
#[derive(Debug)]
pub struct Prompts<B> {
    network: Arc<Network<B>>,
    prompts: Vec<Vec<u32>>,
    tokens: usize,
    ends: Vec<u32>,
    longest: usize,
}

impl<B: AsRef<[u8]>> Prompts<B> {
    /// Prompts whose answers have at most `tokens` tokens. `ends` are the tokens after which an answer is over, which
    /// may be none.
    ///
    /// # Errors
    /// [`JobError::Nothing`] without prompts or tokens, [`JobError::Prompt`] for a prompt that is empty, does not
    /// leave room for its answer in the model's context, or has a token that the vocabulary has not.
    pub fn new(
        network: Arc<Network<B>>,
        prompts: Vec<Vec<u32>>,
        tokens: usize,
        ends: &[u32],
    ) -> Result<Prompts<B>, JobError> {
        if prompts.is_empty() || tokens == 0 {
            let what = format!("{} prompts with answers of {tokens} tokens", prompts.len());
            return Err(JobError::Nothing { what });
        }
        let (context, vocab) = (network.model().context, network.model().vocab);
        let context = usize::try_from(context).unwrap_or(usize::MAX).min(MOST_TOKENS);
        for (prompt, words) in prompts.iter().enumerate() {
            let bad = |what: String| Err(JobError::Prompt { prompt, what });
            let length = words.len();
            if length == 0 {
                return bad("it is empty".to_owned());
            }
            if length.saturating_add(tokens) > context {
                return bad(format!(
                    "{length} tokens and {tokens} of an answer do not fit a context of {context}"
                ));
            }
            if let Some(token) = words.iter().find(|&&token| u64::from(token) >= vocab) {
                return bad(format!("token {token} is not in a vocabulary of {vocab}"));
            }
        }
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        Ok(Prompts { network, prompts, tokens, ends: ends.to_vec(), longest })
    }

    /// The job: an item for each prompt, given out one by one, with long leases.
    #[must_use]
    pub fn job(&self) -> Job {
        Job::new(self.prompts.len(), 4 * self.tokens).options(OPTIONS)
    }

    /// The prompts.
    #[must_use]
    pub fn prompts(&self) -> &[Vec<u32>] {
        &self.prompts
    }

    /// The answers in outputs of the job: each without what fills it up.
    pub fn answers<'a>(&self, out: &'a [u8]) -> impl Iterator<Item = Vec<u32>> + use<'a, B> {
        out.chunks_exact(4 * self.tokens).map(|one| {
            let words = one.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word));
            words.take_while(|&token| token != NO_TOKEN).collect()
        })
    }

    /// The model.
    #[must_use]
    pub fn network(&self) -> &Arc<Network<B>> {
        &self.network
    }

    /// Tokens that a replica has room for.
    pub(crate) fn context(&self) -> usize {
        self.longest + self.tokens
    }

    /// Tokens that a replica runs together.
    pub(crate) fn batch(&self) -> usize {
        self.longest.min(BATCH)
    }

    /// Answers the prompts of an order.
    pub(crate) fn work(&self, session: &mut Session<'_>, order: &mut Order) -> Result<(), Failure> {
        let items = order.items();
        let bytes = 4 * self.tokens;
        let found = order.output().len();
        let Some(prompts) = self.prompts.get(items.clone()) else {
            let have = self.prompts.len();
            return Err(Failure::passing(format!("prompts {items:?} of {have}")));
        };
        if prompts.len().checked_mul(bytes) != Some(found) {
            return Err(Failure::passing(format!("prompts {items:?} into {found} bytes")));
        }
        for (place, prompt) in prompts.iter().enumerate() {
            let answer = self.answer(session, prompt, order)?;
            let out = &mut order.output()[place * bytes..(place + 1) * bytes];
            let tokens = answer.into_iter().chain(std::iter::repeat(NO_TOKEN));
            for (out, token) in out.as_chunks_mut().0.iter_mut().zip(tokens) {
                *out = token.to_le_bytes();
            }
        }
        Ok(())
    }

    fn answer(
        &self,
        session: &mut Session<'_>,
        prompt: &[u32],
        order: &Order,
    ) -> Result<Vec<u32>, Failure> {
        session.cut(0);
        let mut answer: Vec<u32> = Vec::new();
        while answer.len() < self.tokens {
            if !order.is_wanted() {
                return Err(Failure::passing("nobody wants the answer any more"));
            }
            let fed = answer.last().map_or(prompt, std::slice::from_ref);
            let outcome = session.feed(fed, Want::Best(1)).map_err(|error| failure(&error))?;
            let Some(&(token, _)) = outcome.last().best.first() else {
                return Err(Failure::passing("the model has no best token"));
            };
            answer.push(token);
            if self.ends.contains(&token) {
                break;
            }
        }
        Ok(answer)
    }
}

/// A card or a thread that failed leaves its runner without use.
fn failure(error: &LlmError) -> Failure {
    let lasting = match error {
        LlmError::Device(error) => error.kind() != DeviceErrorKind::Busy,
        LlmError::Panicked { .. } => true,
        _ => false,
    };
    let what = error.to_string();
    if lasting { Failure::lasting(what) } else { Failure::passing(what) }
}
