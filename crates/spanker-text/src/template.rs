// SPDX-License-Identifier: Apache-2.0
//! Conversations as the text that a model was trained on: chat templates in Jinja.
//!
//! A template comes from a file and is hostile: it is rendered with a bound on its steps and on the
//! size of all that it computes (`meter`), and it reaches nothing but its arguments. There is no clock; a caller
//! that has one passes the date.

mod json;
mod meter;
mod print;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use minijinja::machinery::{
    CompiledTemplate, TemplateConfig, Token, Vm, WhitespaceConfig, make_string_output, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use regex::Regex;
pub use serde_json::Value as Json;
use spanker_model::gguf::Header;

use crate::TextError;
use crate::error::printable;
use meter::Meter;

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
/// What all texts and lists that a template makes may have together, in bytes, beyond so many times what it was given.
const MOST_MADE: usize = 16 << 20;
/// How many times a template may make what it was given: some pass on the whole conversation for each message.
const TIMES_GIVEN: usize = 256;

/// The most products in a template: the engine computes those of literals beforehand, up to 100 MB each.
const MOST_PRODUCTS: usize = 4;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What is said.
    pub content: String,
    /// The tools that the assistant calls.
    pub calls: Vec<ToolCall>,
    /// The call that a tool answers.
    pub call_id: Option<String>,
    /// The name of the tool or the person that speaks.
    pub name: Option<String>,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ToolCall {
    /// By what the tool's answer names the call.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// What it is called with: an object, or whatever text stands for one.
    pub arguments: Json,
}

impl Message {
    /// A turn.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        let (role, content) = (role.into(), content.into());
        Message { role, content, calls: Vec::new(), call_id: None, name: None }
    }

    /// As templates see it: what it does not have is undefined there.
    fn value(&self) -> Value {
        let mut fields = vec![
            ("role", Value::from(self.role.as_str())),
            ("content", Value::from(self.content.as_str())),
        ];
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|call| {
                let function = Value::from_iter([
                    ("name", Value::from(call.name.as_str())),
                    ("arguments", Value::from_serialize(&call.arguments)),
                ]);
                Value::from_iter([
                    ("id", Value::from(call.id.as_str())),
                    ("type", Value::from("function")),
                    ("function", function),
                ])
            });
            fields.push(("tool_calls", calls.collect::<Vec<_>>().into()));
        }
        let named = [("tool_call_id", &self.call_id), ("name", &self.name)];
        let named = named.iter().filter_map(|(key, text)| Some((*key, text.as_deref()?.into())));
        fields.into_iter().chain(named).collect()
    }

    /// Bytes of text in it.
    fn length(&self) -> usize {
        let calls = self
            .calls
            .iter()
            .map(|call| call.id.len() + call.name.len() + call.arguments.to_string().len());
        let named = [&self.call_id, &self.name].map(|text| text.as_ref().map_or(0, String::len));
        self.role.len() + self.content.len() + calls.sum::<usize>() + named.iter().sum::<usize>()
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
    /// The tools that the assistant may call, each as chat APIs describe one; a template sees none at all if this is
    /// empty.
    pub tools: &'a [Json],
}

/// A name that no template has in it.
const PROBE: &str = "zq_probe_zq";

/// Whether a template shows the assistant its tools.
#[must_use]
pub fn shows_tools(template: &str) -> bool {
    let text = |text: &str| Json::from(text);
    let parameter: Json = [("type", text("string"))].into_iter().collect();
    let parameters =
        [("type", text("object")), ("properties", [("x", parameter)].into_iter().collect())];
    let parameters = parameters.into_iter().collect();
    let function =
        [("name", text(PROBE)), ("description", text(PROBE)), ("parameters", parameters)];
    let function = function.into_iter().collect();
    let tool: Json = [("type", text("function")), ("function", function)].into_iter().collect();
    let (messages, tools) = ([Message::new("user", "Hello")], [tool]);
    let context =
        Context { add_generation_prompt: true, bos: "", eos: "", date: "", tools: &tools };
    render(template, &messages, context).is_ok_and(|text| text.contains(PROBE))
}

/// Whether a template shows the assistant what a system message says.
#[must_use]
pub fn shows_system(template: &str) -> bool {
    let messages = [Message::new("system", PROBE), Message::new("user", "Hello")];
    let context = Context { add_generation_prompt: true, bos: "", eos: "", date: "", tools: &[] };
    render(template, &messages, context).is_ok_and(|text| text.contains(PROBE))
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
/// let context = Context { add_generation_prompt: true, bos: "", eos: "", date: "", tools: &[] };
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
    let turns: Vec<Value> = messages.iter().map(Message::value).collect();
    let mut arguments = BTreeMap::from([
        ("messages", Value::from(turns)),
        ("add_generation_prompt", Value::from(context.add_generation_prompt)),
        ("bos_token", Value::from(context.bos)),
        ("eos_token", Value::from(context.eos)),
    ]);
    if !context.tools.is_empty() {
        arguments.insert("tools", Value::from_serialize(context.tools));
    }
    let arguments = Value::from(arguments);
    let template = &unmarked(template);
    let tools = context.tools.iter().map(|tool| tool.to_string().len());
    let given: usize = messages.iter().map(Message::length).chain(tools).sum();
    let budget = MOST_MADE.saturating_add(given.saturating_mul(TIMES_GIVEN));
    let rendered = metered(template, arguments, context.date, budget);
    rendered.map_err(|error| TextError::Template { reason: said(&error) })
}

/// The template without the marks around what a model is trained on: they print nothing.
fn unmarked(template: &str) -> Cow<'_, str> {
    static MARK: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").ok());
    let Some(mark) = &*MARK else { return Cow::Borrowed(template) };
    mark.replace_all(template, |found: &regex::Captures<'_>| {
        // White space around them goes as around any block.
        let block = if found.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {block} {}%}}", &found[1], &found[3])
    })
}

/// Renders a template that makes at most `budget` bytes of texts and lists.
fn metered(template: &str, root: Value, date: &str, budget: usize) -> Result<String, Error> {
    let config = TemplateConfig {
        syntax_config: SyntaxConfig,
        // As the library does that models are published with.
        ws_config: WhitespaceConfig {
            keep_trailing_newline: false,
            lstrip_blocks: true,
            trim_blocks: true,
        },
        default_auto_escape: Arc::new(|_| AutoEscape::None),
    };
    // Products of literals are computed by the compiler, where nothing bounds them.
    let products = tokenize(template, false, config.syntax_config.clone(), config.ws_config)
        .filter(|token| matches!(token, Ok((Token::Mul | Token::Pow, _))));
    if products.count() > MOST_PRODUCTS {
        let reason = format!("more than {MOST_PRODUCTS} products");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    // Once to know which filters and methods there are, once to call others in their place.
    let compile = || CompiledTemplate::new("<string>", template, &config);
    let (names, longest) = {
        let compiled = compile()?;
        let parts = || std::iter::once(&compiled.instructions).chain(compiled.blocks.values());
        let names: Vec<Vec<String>> = parts().map(meter::names).collect();
        (names, parts().map(meter::longest_raw).max().unwrap_or(0))
    };
    let mut compiled = compile()?;
    let rewritten = std::iter::once(&mut compiled.instructions).chain(compiled.blocks.values_mut());
    let meter = Meter::new(budget);
    rewritten.zip(&names).try_for_each(|(part, names)| meter.rewrite(part, names))?;

    let mut environment = environment(date);
    meter.install(&mut environment, &names.concat());
    // Text of the template itself is not paid for: its steps are bounded instead.
    let most = budget / longest.max(1);
    environment.set_fuel(Some(FUEL.min(most as u64)));
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    let (root, vm) = (root, Vm::new(&environment));
    vm.eval(&compiled.instructions, root, &compiled.blocks, &mut out, AutoEscape::None)?;
    Ok(text)
}

fn environment(date: &str) -> Environment<'_> {
    let mut environment = Environment::new();
    environment.set_recursion_limit(64);
    environment.set_undefined_behavior(UndefinedBehavior::Chainable);
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
        ErrorKind::OutOfFuel => return "it takes too many steps".to_owned(),
        // Nothing but the bound refuses text.
        ErrorKind::WriteFailure => return meter::SPENT.to_owned(),
        _ => {}
    }
    let line = error.line().map_or_else(String::new, |line| format!("line {line}: "));
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    format!("{line}{}", printable(&what))
}
