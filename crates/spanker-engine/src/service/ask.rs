// SPDX-License-Identifier: Apache-2.0
//! What a request asks for, and what comes of it.

use std::time::Duration;

use super::ServiceOptions;
use crate::error::{EngineError, Result};
use crate::generation::{Correction, Limits};
use crate::model::Model;
use crate::sampling::Sampling;
use crate::summary::FinishReason;

/// The most alternatives of a token that can be asked for.
const MOST_CHANCES: usize = 20;
/// How far a token's logit can be moved.
const MOST_BIAS: f32 = 100.0;

/// A request.
pub struct Ask {
    /// The tokens that the answer follows.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What ends the answer.
    pub limits: Limits,
    /// For each token its log probability, and that of so many of the likeliest; nothing for none of this.
    pub chances: Option<usize>,
    /// What is added to the logits of tokens.
    pub bias: Vec<(u32, f32)>,
    /// What the answer's text has to be.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Whether keys and values of what other prompts began with are used.
    pub reuse: bool,
}

impl std::fmt::Debug for Ask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ask").field("prompt", &self.prompt.len()).finish_non_exhaustive()
    }
}

impl Ask {
    /// A prompt with nothing else asked for.
    #[must_use]
    pub fn new(prompt: Vec<u32>, sampling: Sampling, limits: Limits) -> Ask {
        let (chances, bias, constraint, reuse) = (None, Vec::new(), None, true);
        Ask { prompt, sampling, limits, chances, bias, constraint, reuse }
    }

    /// Whether there is a model that could answer it.
    pub(crate) fn check(&self, model: &Model, options: &ServiceOptions) -> Result<()> {
        let (tokens, context) = (self.prompt.len(), options.context);
        if tokens == 0 {
            return Err(EngineError::request("the prompt has no tokens"));
        }
        if tokens >= context {
            let what = format!(
                "the prompt has {tokens} tokens, and the context has room for {context} with the answer"
            );
            return Err(EngineError::Prompt { what, hint: None });
        }
        if self.limits.tokens == Some(0) {
            return Err(EngineError::request("0 tokens: at least one token is generated"));
        }
        let vocab = model.shape().vocab;
        let unknown = |token: &&u32| u64::from(**token) >= vocab;
        let biased = self.bias.iter().map(|(token, _)| token);
        if let Some(token) = self.prompt.iter().chain(biased).find(unknown) {
            return Err(EngineError::request(format!("token {token} of a vocabulary of {vocab}")));
        }
        let allowed = -MOST_BIAS..=MOST_BIAS;
        if let Some((token, bias)) = self.bias.iter().find(|(_, bias)| !allowed.contains(bias)) {
            let what = format!("a bias of {bias} for token {token}: from -100 to 100");
            return Err(EngineError::request(what));
        }
        match self.chances {
            Some(count) if count > MOST_CHANCES => {
                let what = format!("{count} alternatives of a token: from 0 to {MOST_CHANCES}");
                Err(EngineError::request(what))
            }
            _ => Ok(()),
        }
    }
}

/// What the text of an answer has to be, token by token.
pub trait Constraint: Send {
    /// The tokens that may follow: a bit for each, the lowest token in the lowest bit of the first word. Nothing if
    /// any may.
    ///
    /// # Errors
    /// A sentence, if the constraint cannot be followed any more.
    fn allowed(&mut self) -> std::result::Result<Option<Vec<u32>>, String>;

    /// Takes note of a token that was chosen.
    ///
    /// # Errors
    /// A sentence, if it may not follow.
    fn accept(&mut self, token: u32) -> std::result::Result<(), String>;

    /// Whether the text is complete, so that nothing may follow.
    fn is_complete(&mut self) -> bool;

    /// The same before any token.
    fn restarted(&self) -> Box<dyn Constraint>;
}

/// A token and how likely it was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chance {
    /// The token.
    pub token: u32,
    /// The logarithm of its probability, before anything but the bias was done to it.
    pub logprob: f32,
}

/// What comes next of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ServedPiece {
    /// The token; nothing with the last text, when there is no token more.
    pub token: Option<u32>,
    /// Text that is complete since the last piece.
    pub text: String,
    /// How likely the token was, and then the likeliest ones, if that was asked for.
    pub chances: Vec<Chance>,
    /// What was wrong of what came before; this piece follows what was right.
    pub corrects: Option<Correction>,
}

/// How an answer went.
#[derive(Debug, Clone, PartialEq)]
pub struct Done {
    /// Why it ended.
    pub reason: FinishReason,
    /// The stop string that ended it, if one did.
    pub stop: Option<String>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, those whose keys and values were there already.
    pub cached_tokens: usize,
    /// Tokens of the answer.
    pub tokens: usize,
    /// How long it waited for its turn.
    pub waited: Duration,
    /// From its turn to its first token.
    pub prompt: Duration,
    /// From its first token to its last.
    pub generation: Duration,
}

/// What comes of a request.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Update {
    /// Its turn has come; so many tokens of the prompt need not be computed.
    Begun {
        /// How many.
        cached_tokens: usize,
    },
    /// More of the answer.
    Piece(ServedPiece),
    /// The answer is complete.
    Done(Done),
    /// There is no more of it.
    Failed {
        /// Why.
        what: String,
        /// Whether the request itself is at fault, and not the cards.
        is_request: bool,
    },
}

/// Where updates go; says whether anybody still listens.
pub type Delivery = Box<dyn FnMut(Update) -> bool + Send>;
