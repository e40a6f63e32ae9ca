// SPDX-License-Identifier: Apache-2.0
//! A request for the next message of a conversation.

use serde_json::Value;
use spanker_text::template::Message;

use super::fields::Fields;
use super::{Form, Served, Tools, Use, Wanted, messages, tables};
use crate::error::Result;

/// What a chat asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ChatRequest {
    pub(crate) messages: Vec<Message>,
    pub(crate) tools: Tools,
    /// So many alternatives of each token, with log probabilities; nothing for none of this.
    pub(crate) chances: Option<usize>,
    pub(crate) wanted: Wanted,
}

impl ChatRequest {
    /// What a body asks for.
    pub(crate) fn of(body: &Value, served: &Served) -> Result<ChatRequest> {
        let fields = Fields::of_request(body)?;
        fields.refuse(&tables::REFUSED_CHAT)?;
        let wanted = Wanted::of(&fields, served)?;
        let logprobs = fields.flag(&tables::LOGPROBS)?.unwrap_or(false);
        let top = fields.integer(&tables::TOP_LOGPROBS)?;
        if top.is_some() && !logprobs {
            return Err(fields.wrong("top_logprobs", "logprobs is not true"));
        }
        let tools = Tools::of(&fields)?;
        if wanted.form != Form::Text && tools.choice != Use::None {
            let what = "an answer of a form has no room for tools: tool_choice none goes with it";
            return Err(fields.wrong("response_format", what));
        }
        let chances = logprobs.then(|| top.map_or(0, |count| count as usize));
        Ok(ChatRequest { messages: messages(&fields)?, tools, chances, wanted })
    }
}
