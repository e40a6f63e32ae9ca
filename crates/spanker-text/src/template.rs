// SPDX-License-Identifier: Apache-2.0
//! Conversations as the text that a model was trained on: chat templates in Jinja.
//!
//! A template comes from a file and is hostile: it is rendered with a bound on its steps and on the
//! size of its text, and it reaches nothing but its arguments. What it keeps in variables meanwhile is
//! bounded only by its steps. There is no clock; a caller that has one passes the date.

use std::collections::BTreeMap;

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use minijinja_contrib::pycompat::unknown_method_callback;
use spanker_model::gguf::Header;

use crate::TextError;
use crate::error::printable;

/// The template of files that have none: ChatML.
pub const CHATML: &str = "{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// The key of a file's template.
const KEY: &str = "tokenizer.chat_template";
/// The most steps of a template: a long conversation takes some thousands.
const FUEL: u64 = 1_000_000;
/// The longest template, in bytes.
const LONGEST: usize = 1 << 20;
/// The longest text that a template may make beyond what it was given, in bytes.
const MOST_ADDED: usize = 16 << 20;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A turn.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }
}

/// What a template is told beside the conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context<'a> {
    /// Whether the text ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// The token that begins a text, as text; empty for none.
    pub bos: &'a str,
    /// The token that ends a text, as text; empty for none.
    pub eos: &'a str,
    /// Today, as templates are shown it, such as `26 Jul 2024`; empty if the caller knows none.
    pub date: &'a str,
}

/// The template of a file, or [`CHATML`] if it has none.
///
/// # Errors
///
/// A template that is no text, or bytes that end before it does.
pub fn of(header: &Header, bytes: &[u8]) -> Result<String, TextError> {
    if header.metadata().contains_key(KEY) {
        Ok(header.text(bytes, KEY)?)
    } else {
        Ok(CHATML.to_owned())
    }
}

/// The text of a conversation by a template.
///
/// Templates have what Python's Jinja gives them: methods such as `.strip()`, `raise_exception` and
/// `strftime_now`, which answers with [`Context::date`] whatever the format.
///
/// ```
/// use spanker_text::template::{CHATML, Context, Message, render};
/// let context = Context { add_generation_prompt: true, bos: "", eos: "", date: "" };
/// let text = render(CHATML, &[Message::new("user", "Hello")], context)?;
/// assert_eq!(text, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
/// # Ok::<(), spanker_text::TextError>(())
/// ```
///
/// # Errors
///
/// A template that is malformed, takes too many steps, makes too long a text, or raises an error of its
/// own, such as for a role that the model does not know.
pub fn render(
    template: &str,
    messages: &[Message],
    context: Context<'_>,
) -> Result<String, TextError> {
    if template.len() > LONGEST {
        let reason = format!("{} bytes: expected at most {LONGEST}", template.len());
        return Err(TextError::Template { reason });
    }
    let environment = environment(context.date);
    let turn = |message: &Message| {
        let (role, content) = (message.role.clone(), message.content.clone());
        Value::from(BTreeMap::from([("role", role), ("content", content)]))
    };
    let turns: Vec<Value> = messages.iter().map(turn).collect();
    let arguments = Value::from(BTreeMap::from([
        ("messages", Value::from(turns)),
        ("add_generation_prompt", Value::from(context.add_generation_prompt)),
        ("bos_token", Value::from(context.bos)),
        ("eos_token", Value::from(context.eos)),
    ]));
    let given: usize = messages.iter().map(|turn| turn.role.len() + turn.content.len()).sum();
    let mut text = Bounded { text: Vec::new(), left: given.saturating_mul(2) + MOST_ADDED };
    let rendered = environment
        .template_from_str(template)
        .and_then(|template| template.render_captured_to(arguments, &mut text).map(drop));
    rendered.map_err(|error| TextError::Template { reason: said(&error) })?;
    Ok(String::from_utf8_lossy(&text.text).into_owned())
}

fn environment(date: &str) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(64);
    environment.set_undefined_behavior(UndefinedBehavior::Chainable);
    // As the library does that models are published with.
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_function("raise_exception", |reason: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, reason))
    });
    let date = date.to_owned();
    environment.add_function("strftime_now", move |_: String| date.clone());
    environment
}

/// The error and what caused it, in one line.
fn said(error: &Error) -> String {
    match error.kind() {
        ErrorKind::OutOfFuel => return format!("it takes more than {FUEL} steps"),
        // Nothing but the bound refuses text.
        ErrorKind::WriteFailure => return "its text is too long".to_owned(),
        _ => {}
    }
    let line = error.line().map_or_else(String::new, |line| format!("line {line}: "));
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    format!("{line}{}", printable(&what))
}

/// A text that does not grow beyond its bound.
struct Bounded {
    text: Vec<u8>,
    left: usize,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.left.checked_sub(bytes.len()) {
            Some(left) => {
                self.left = left;
                self.text.extend_from_slice(bytes);
                Ok(bytes.len())
            }
            None => Err(std::io::ErrorKind::FileTooLarge.into()),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
