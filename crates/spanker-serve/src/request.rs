// SPDX-License-Identifier: Apache-2.0
//! Requests: bytes become what is asked for, or an error that names the field. Nothing is computed here, and nothing of
//! the model is known but the size of its vocabulary.

mod chat;
mod completion;
pub(crate) mod fields;
mod messages;
mod schemas;
mod shared;
pub(crate) mod tables;
mod texts;
mod tools;

use serde_json::Value;

use crate::error::{ApiError, Result};

pub(crate) use chat::ChatRequest;
pub(crate) use completion::{CompletionRequest, Prompt};
pub(crate) use messages::messages;
pub(crate) use shared::{Form, Wanted};
pub(crate) use texts::{DetokenizeRequest, TemplateRequest, TokenizeRequest};
pub(crate) use tools::{Tool, Tools, Use};

/// What a request is read for.
#[derive(Debug, Clone)]
pub(crate) struct Served {
    /// The names by which the model can be asked for, the one that answers have first.
    pub(crate) names: Vec<String>,
    /// Tokens of the vocabulary.
    pub(crate) vocab: u64,
    /// Answers that are taken at a time.
    pub(crate) room: usize,
}

/// The JSON of a body.
pub(crate) fn json(body: &[u8]) -> Result<Value> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::request(format!("the body is not JSON: {error}")))
}
