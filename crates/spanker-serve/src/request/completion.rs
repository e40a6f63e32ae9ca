// SPDX-License-Identifier: Apache-2.0
//! A request for text that follows other text.

use serde_json::Value;

use super::fields::{Fields, shown};
use super::shared::token;
use super::{Served, Wanted, tables};
use crate::error::Result;

/// What an answer follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// What a completion asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CompletionRequest {
    pub(crate) prompts: Vec<Prompt>,
    /// Whether answers begin with their prompts.
    pub(crate) echo: bool,
    /// So many alternatives of each token, with log probabilities; nothing for none of this.
    pub(crate) chances: Option<usize>,
    pub(crate) wanted: Wanted,
}

impl CompletionRequest {
    /// What a body asks for.
    pub(crate) fn of(body: &Value, served: &Served) -> Result<CompletionRequest> {
        let fields = Fields::of_request(body)?;
        fields.refuse(&tables::REFUSED_COMPLETION)?;
        let wanted = Wanted::of(&fields, served)?;
        let prompts = prompts(&fields, served)?;
        let all = prompts.len() * wanted.answers;
        if all > served.room {
            let what = format!("{all} answers in all: at most {} are taken at a time", served.room);
            return Err(fields.wrong(if prompts.len() > 1 { "prompt" } else { "n" }, what));
        }
        let chances = fields.integer(&tables::COMPLETION_LOGPROBS)?.map(|count| count as usize);
        let echo = fields.flag(&tables::ECHO)?.unwrap_or(false);
        if echo && chances.is_some() {
            let what = "log probabilities of the prompt are not there: not together with logprobs";
            return Err(fields.wrong("echo", what));
        }
        Ok(CompletionRequest { prompts, echo, chances, wanted })
    }
}

fn prompts(fields: &Fields<'_>, served: &Served) -> Result<Vec<Prompt>> {
    let name = tables::PROMPT.name;
    let value = fields.required(name)?;
    let list = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text.clone())]),
        Value::Array(list) if !list.is_empty() => list,
        _ => return Err(fields.expected(name, "a text, tokens, or a list of them", value)),
    };
    if list[0].is_number() {
        return Ok(vec![tokens(fields, name, list, served)?]);
    }
    if list.len() > served.room {
        let what = format!("{} prompts: at most {} at a time", list.len(), served.room);
        return Err(fields.wrong(name, what));
    }
    let each = list.iter().enumerate();
    each.map(|(at, value)| match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(list) if !list.is_empty() => {
            tokens(fields, &format!("{name}[{at}]"), list, served)
        }
        other => Err(fields.expected(&format!("{name}[{at}]"), "a text or tokens", other)),
    })
    .collect()
}

fn tokens(fields: &Fields<'_>, name: &str, list: &[Value], served: &Served) -> Result<Prompt> {
    Ok(Prompt::Tokens(tokens_of(fields, name, list, served)?))
}

/// A list of tokens of the vocabulary.
pub(super) fn tokens_of(
    fields: &Fields<'_>,
    name: &str,
    list: &[Value],
    served: &Served,
) -> Result<Vec<u32>> {
    let each = list.iter().enumerate();
    each.map(|(at, value)| {
        token(value, served).ok_or_else(|| {
            let what = format!("{} is no token of a vocabulary of {}", shown(value), served.vocab);
            fields.wrong(&format!("{name}[{at}]"), what)
        })
    })
    .collect()
}
