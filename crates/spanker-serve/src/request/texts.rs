// SPDX-License-Identifier: Apache-2.0
//! Requests that are about text and tokens, and not about answers.

use serde_json::Value;
use spanker_text::template::Message;

use super::completion::tokens_of;
use super::fields::Fields;
use super::{Served, messages, tables, tools};
use crate::error::Result;

/// A text that becomes tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TokenizeRequest {
    pub(crate) content: String,
    /// Whether the token that begins a text comes first.
    pub(crate) add_special: bool,
    /// Whether special tokens that are spelled are tokens.
    pub(crate) parse_special: bool,
    /// Whether every token comes with its text.
    pub(crate) with_pieces: bool,
}

impl TokenizeRequest {
    /// What a body asks for.
    pub(crate) fn of(body: &Value) -> Result<TokenizeRequest> {
        let fields = Fields::of_request(body)?;
        let content = fields.required("content")?;
        let content =
            content.as_str().ok_or_else(|| fields.expected("content", "a text", content))?;
        Ok(TokenizeRequest {
            content: content.to_owned(),
            add_special: fields.flag(&tables::ADD_SPECIAL)?.unwrap_or(false),
            parse_special: fields.flag(&tables::PARSE_SPECIAL)?.unwrap_or(true),
            with_pieces: fields.flag(&tables::WITH_PIECES)?.unwrap_or(false),
        })
    }
}

/// Tokens that become text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DetokenizeRequest {
    pub(crate) tokens: Vec<u32>,
}

impl DetokenizeRequest {
    /// What a body asks for.
    pub(crate) fn of(body: &Value, served: &Served) -> Result<DetokenizeRequest> {
        let fields = Fields::of_request(body)?;
        fields.required("tokens")?;
        let list = fields.list("tokens")?.unwrap_or_default();
        Ok(DetokenizeRequest { tokens: tokens_of(&fields, "tokens", list, served)? })
    }
}

/// A conversation that becomes a prompt.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TemplateRequest {
    pub(crate) messages: Vec<Message>,
    pub(crate) tools: Vec<Value>,
}

impl TemplateRequest {
    /// What a body asks for.
    pub(crate) fn of(body: &Value) -> Result<TemplateRequest> {
        let fields = Fields::of_request(body)?;
        let tools = tools::list(&fields)?.into_iter().map(|tool| tool.json).collect();
        Ok(TemplateRequest { messages: messages(&fields)?, tools })
    }
}
