// SPDX-License-Identifier: Apache-2.0
//! What can go wrong between a model's file and its next token.

use spanker_fabric::FabricError;
use spanker_fabric::device::DeviceError;
use spanker_model::{ModelError, Quant};

/// A model that cannot be run, or a run that could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LlmError {
    /// The file is no model that can be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor has a type that nothing here computes with.
    #[error("tensor {tensor}: weights of type {quant} cannot be computed with")]
    Type {
        /// The tensor.
        tensor: String,
        /// Its type.
        quant: Quant,
    },
    /// The model needs something that is not there.
    #[error("{what}")]
    Unsupported {
        /// What, in words.
        what: String,
    },
    /// The plan is not one for this model, or not one that can be run.
    #[error("plan: {what}")]
    Plan {
        /// Why.
        what: String,
    },
    /// More tokens than there is room for.
    #[error("{tokens} tokens do not fit a context of {context}")]
    Context {
        /// Tokens that there would be.
        tokens: usize,
        /// The context, in tokens.
        context: usize,
    },
    /// A token that the vocabulary does not have.
    #[error("token {token} is not in a vocabulary of {vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: u64,
    },
    /// A card or a link failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A card has too little memory for its part of the model.
    #[error("card {card} needs {needed} bytes for its part of the model and has {available} free")]
    Memory {
        /// The card.
        card: usize,
        /// What it needs, in whole pages.
        needed: u64,
        /// What it has.
        available: u64,
    },
    /// A card that goes through programs itself has failed.
    #[error("card {card}: {what}")]
    Card {
        /// The card.
        card: usize,
        /// What it said.
        what: String,
    },
    /// A rank failed, or ranks do not mean the same thing.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The cards' results are not this host's, and nothing says which card is wrong.
    #[error("the cards give wrong answers after {past} tokens, and no card by itself")]
    Unsure {
        /// Tokens before the step.
        past: usize,
    },
    /// Somebody wanted no more of a prompt that was being run.
    #[error("stopped after {done} of {total} tokens of the prompt")]
    Stopped {
        /// Tokens that were run.
        done: usize,
        /// Tokens in all.
        total: usize,
    },
    /// A thread that plays a card ended in a panic.
    #[error("card {card}: its thread has panicked")]
    Panicked {
        /// The card.
        card: usize,
    },
}

impl LlmError {
    pub(crate) fn plan(what: impl Into<String>) -> LlmError {
        LlmError::Plan { what: what.into() }
    }

    /// Something that cannot be done here.
    #[must_use]
    pub fn unsupported(what: impl Into<String>) -> LlmError {
        LlmError::Unsupported { what: what.into() }
    }
}
