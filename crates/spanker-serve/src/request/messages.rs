// SPDX-License-Identifier: Apache-2.0
//! The messages of a conversation.

use serde_json::Value;
use spanker_text::template::{Message, ToolCall};

use super::fields::{Fields, shown};
use super::tables::{MOST_MESSAGES, MOST_TOOLS};
use super::tools;
use crate::error::Result;

/// The messages of a request, the oldest first.
pub(crate) fn messages(fields: &Fields<'_>) -> Result<Vec<Message>> {
    fields.required("messages")?;
    let list = fields.list("messages")?.unwrap_or_default();
    if list.is_empty() || list.len() > MOST_MESSAGES {
        let what = format!("{} messages: expected 1 to {MOST_MESSAGES}", list.len());
        return Err(fields.wrong("messages", what));
    }
    let each = list.iter().enumerate();
    each.map(|(at, value)| message(&Fields::of(value, format!("messages[{at}]"))?)).collect()
}

fn message(fields: &Fields<'_>) -> Result<Message> {
    let role = fields.required("role")?;
    let role = match role.as_str() {
        // What a system says has had several names.
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("tool") => "tool",
        _ => {
            let expected = "system, developer, user, assistant or tool";
            return Err(fields.expected("role", expected, role));
        }
    };
    let calls = if role == "assistant" { calls(fields)? } else { Vec::new() };
    let content = content(fields)?;
    if content.is_none() && calls.is_empty() {
        return Err(fields.wrong("content", "missing"));
    }
    let mut message = Message::new(role, content.unwrap_or_default());
    message.calls = calls;
    message.name = fields.text("name")?.map(str::to_owned);
    if role == "tool" {
        message.call_id = fields.text("tool_call_id")?.map(str::to_owned);
    }
    Ok(message)
}

/// What is said: a text, or the texts of parts one after the other.
fn content(fields: &Fields<'_>) -> Result<Option<String>> {
    match fields.get("content") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let each = parts.iter().enumerate();
            let texts = each.map(|(at, value)| {
                let part = Fields::of(value, fields.path(&format!("content[{at}]")))?;
                match part.required("type")?.as_str() {
                    Some("text") => {
                        let text = part.required("text")?;
                        text.as_str().ok_or_else(|| part.expected("text", "a text", text))
                    }
                    Some(other) => {
                        let other = shown(&Value::from(other));
                        let what =
                            format!("parts of type {other} cannot be read: this model reads text");
                        Err(part.wrong("type", what))
                    }
                    None => Err(part.expected("type", "text", part.required("type")?)),
                }
            });
            Ok(Some(texts.collect::<Result<Vec<_>>>()?.concat()))
        }
        Some(other) => Err(fields.expected("content", "a text or a list of parts", other)),
    }
}

/// The tools that the assistant has called.
fn calls(fields: &Fields<'_>) -> Result<Vec<ToolCall>> {
    let list = fields.list("tool_calls")?.unwrap_or_default();
    if list.len() > MOST_TOOLS {
        let what = format!("{} calls: at most {MOST_TOOLS}", list.len());
        return Err(fields.wrong("tool_calls", what));
    }
    let each = list.iter().enumerate();
    each.map(|(at, value)| call(&Fields::of(value, fields.path(&format!("tool_calls[{at}]")))?))
        .collect()
}

fn call(fields: &Fields<'_>) -> Result<ToolCall> {
    tools::check_type(fields, false)?;
    let function = Fields::of(fields.required("function")?, fields.path("function"))?;
    let name = tools::name(&function)?;
    let arguments = match function.get("arguments") {
        None => Value::Object(serde_json::Map::new()),
        // What is no JSON is passed on as the model has written it.
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Value::Object(map),
            _ => Value::from(text.as_str()),
        },
        Some(Value::Object(map)) => Value::Object(map.clone()),
        Some(other) => return Err(function.expected("arguments", "JSON as text", other)),
    };
    let id = fields.text("id")?.unwrap_or_default().to_owned();
    Ok(ToolCall { id, name, arguments })
}
