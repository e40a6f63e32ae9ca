// SPDX-License-Identifier: Apache-2.0
//! Tools: how a model is told of them, how it writes that it calls one, and the grammar of an answer that has to be a
//! call.

mod call;
mod parser;

use serde_json::{Value, json};
use spanker_text::template::{self, Message};

use crate::request::{Tools, Use};

pub(crate) use parser::{Event, Parser};

/// How a model writes that it calls a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>`, as Hermes and Qwen do.
    Tags,
    /// `[TOOL_CALLS]` and a list, or a name and its arguments, as Mistral does.
    List,
    /// An object `{"name": .., "parameters": ..}` and nothing else, as Llama 3 does.
    Object,
}

/// What a chat template has for tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Abilities {
    style: Style,
    /// Whether it shows them; else a system message has to.
    shows_tools: bool,
    /// Whether it shows system messages; else the first message has to.
    shows_system: bool,
}

impl Abilities {
    /// What a template has.
    pub(crate) fn of(source: &str) -> Abilities {
        let shows_tools = template::shows_tools(source);
        let style = match shows_tools {
            true if source.contains("[TOOL_CALLS]") => Style::List,
            true if source.contains("<tool_call>") => Style::Tags,
            true if source.contains("\"parameters\":") || source.contains("<|python_tag|>") => {
                Style::Object
            }
            _ => Style::Tags,
        };
        Abilities { style, shows_tools, shows_system: template::shows_system(source) }
    }

    /// How calls are written in answers of a request.
    pub(crate) fn style(self) -> Style {
        self.style
    }

    /// The conversation and the tools as the template takes them.
    pub(crate) fn prepare(
        self,
        messages: Vec<Message>,
        tools: &[Value],
    ) -> (Vec<Message>, Vec<Value>) {
        if self.shows_tools {
            return (messages, tools.to_vec());
        }
        let mut messages: Vec<Message> = messages.into_iter().map(spelled).collect();
        if !tools.is_empty() {
            self.tell(&mut messages, &preface(tools));
        }
        (messages, Vec::new())
    }

    /// Puts a text where the model reads it first.
    fn tell(self, messages: &mut Vec<Message>, text: &str) {
        let role = if self.shows_system { "system" } else { "user" };
        match messages.iter_mut().find(|message| message.role == role) {
            Some(first) if self.shows_system => {
                first.content = format!("{}\n\n{text}", first.content)
            }
            Some(first) => first.content = format!("{text}\n\n{}", first.content),
            None => messages.insert(0, Message::new(role, text)),
        }
    }
}

/// A message whose calls and answers of tools are text, for templates that know neither.
fn spelled(message: Message) -> Message {
    if message.role == "tool" {
        let content = format!("<tool_response>\n{}\n</tool_response>", message.content);
        return Message::new("user", content);
    }
    let calls = message.calls.iter().map(|call| {
        let call = json!({ "name": call.name, "arguments": call.arguments });
        format!("<tool_call>\n{call}\n</tool_call>")
    });
    let said = Some(message.content.clone()).filter(|said| !said.is_empty());
    let lines: Vec<String> = said.into_iter().chain(calls).collect();
    Message { content: lines.join("\n"), calls: Vec::new(), ..message }
}

/// What a model is told of tools by whose template it does not hear of them.
fn preface(tools: &[Value]) -> String {
    let list: Vec<String> = tools.iter().map(Value::to_string).collect();
    format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query. Here are their signatures, \
         within <tools></tools>:\n<tools>\n{}\n</tools>\n\nFor each function call, return a JSON object with its name and \
         arguments within <tool_call></tool_call>:\n<tool_call>\n{{\"name\": <function-name>, \"arguments\": \
         <args-json-object>}}\n</tool_call>",
        list.join("\n")
    )
}

/// The schema of an answer that has to be a call; nothing if it need not be.
pub(crate) fn schema(tools: &Tools) -> Option<Value> {
    if tools.choice != Use::Required {
        return None;
    }
    let call = |tool: &crate::request::Tool| {
        let any = || json!({ "type": "object" });
        json!({
            "type": "object",
            "properties": {
                "name": { "const": tool.name },
                "arguments": tool.parameters.clone().unwrap_or_else(any),
            },
            "required": ["name", "arguments"],
            "additionalProperties": false,
        })
    };
    let calls: Vec<Value> = tools.callable().iter().map(call).collect();
    Some(match <[Value; 1]>::try_from(calls) {
        Ok([one]) => one,
        Err(several) => json!({ "anyOf": several }),
    })
}
