// SPDX-License-Identifier: Apache-2.0
//! The fields of every request, with what they may be.

use serde_json::{Value, json};

use super::fields::{Field, Refused};
use super::schemas::{
    logit_bias, messages, prompt, response_format, stop, tokens, tool_choice, tools,
};

/// Texts that end an answer, at most.
pub(crate) const MOST_STOPS: usize = 16;
/// Bytes of such a text, at most.
pub(crate) const MOST_STOP: usize = 512;
/// Tokens whose logits are moved, at most.
pub(crate) const MOST_BIASED: usize = 1024;
/// Messages of a conversation, at most.
pub(crate) const MOST_MESSAGES: usize = 4096;
/// Tools, at most.
pub(crate) const MOST_TOOLS: usize = 128;
/// Characters of a tool's name, at most.
pub(crate) const MOST_NAME: usize = 64;
/// Answers to a request, at most.
pub(crate) const MOST_ANSWERS: usize = 128;
/// More than any context has.
const MOST_TOKENS: i64 = 1 << 31;

pub(crate) const MODEL: Field = Field::other(
    "model",
    || json!({ "type": ["string", "null"] }),
    "The model: as /v1/models names it.",
);
pub(crate) const MAX_TOKENS: Field =
    Field::integer("max_tokens", 1, MOST_TOKENS, "Tokens of the answer at most.");
pub(crate) const MAX_COMPLETION_TOKENS: Field = Field::integer(
    "max_completion_tokens",
    1,
    MOST_TOKENS,
    "Tokens of the answer at most; goes before max_tokens.",
);
pub(crate) const TEMPERATURE: Field = Field::number(
    "temperature",
    0.0,
    100.0,
    "How flat probabilities are made; 0 takes the best token.",
);
pub(crate) const TOP_P: Field =
    Field::number("top_p", 0.0, 1.0, "Only the best tokens that together have this probability.");
pub(crate) const TOP_K: Field =
    Field::integer("top_k", -1, MOST_TOKENS, "Only so many of the best tokens; 0 and -1 take all.");
pub(crate) const MIN_P: Field =
    Field::number("min_p", 0.0, 1.0, "Only tokens with this share of the best one's probability.");
pub(crate) const SEED: Field = Field::integer(
    "seed",
    i64::MIN,
    i64::MAX,
    "The same seed gives the same answer; -1 is as if there were none.",
);
pub(crate) const STOP: Field = Field::other("stop", stop, "Texts that end the answer.");
pub(crate) const N: Field = Field::integer("n", 1, MOST_ANSWERS as i64, "Answers to each prompt.");
pub(crate) const STREAM: Field = Field::flag("stream", "Whether the answer comes piece by piece.");
pub(crate) const STREAM_OPTIONS: Field = Field::other(
    "stream_options",
    || json!({ "type": ["object", "null"], "properties": { "include_usage": INCLUDE_USAGE.schema() } }),
    "How it comes.",
);
pub(crate) const INCLUDE_USAGE: Field =
    Field::flag("include_usage", "Whether a last piece says how many tokens there were.");
pub(crate) const LOGIT_BIAS: Field =
    Field::other("logit_bias", logit_bias, "What is added to the logits of tokens.");
pub(crate) const PRESENCE_PENALTY: Field =
    Field::number("presence_penalty", -2.0, 2.0, "Taken from logits of tokens that came before.");
pub(crate) const FREQUENCY_PENALTY: Field =
    Field::number("frequency_penalty", -2.0, 2.0, "The same for each time that they came.");
pub(crate) const REPEAT_PENALTY: Field = Field::number(
    "repeat_penalty",
    0.01,
    100.0,
    "Divides the positive logits of tokens that came before and multiplies negative ones.",
);
pub(crate) const RESPONSE_FORMAT: Field = Field::other(
    "response_format",
    response_format,
    "What the answer has to be: text, a JSON object, or what a JSON schema says.",
);
pub(crate) const IGNORE_EOS: Field =
    Field::flag("ignore_eos", "Whether the answer goes on after the model has ended it.");
pub(crate) const CACHE_PROMPT: Field =
    Field::flag("cache_prompt", "Whether what other prompts began with is used again.");
pub(crate) const TIMINGS_PER_TOKEN: Field =
    Field::flag("timings_per_token", "Whether every piece has timings.");

/// What both kinds of answers have.
pub(crate) const SHARED: [&Field; 20] = [
    &MODEL,
    &MAX_TOKENS,
    &TEMPERATURE,
    &TOP_P,
    &TOP_K,
    &MIN_P,
    &SEED,
    &STOP,
    &N,
    &STREAM,
    &STREAM_OPTIONS,
    &LOGIT_BIAS,
    &PRESENCE_PENALTY,
    &FREQUENCY_PENALTY,
    &REPEAT_PENALTY,
    &RESPONSE_FORMAT,
    &IGNORE_EOS,
    &CACHE_PROMPT,
    &TIMINGS_PER_TOKEN,
    &MAX_COMPLETION_TOKENS,
];

pub(crate) const MESSAGES: Field =
    Field::other("messages", messages, "The conversation, the oldest message first.");
pub(crate) const LOGPROBS: Field =
    Field::flag("logprobs", "Whether every token comes with its log probability.");
pub(crate) const TOP_LOGPROBS: Field =
    Field::integer("top_logprobs", 0, 20, "So many of the likeliest tokens come with theirs.");
pub(crate) const TOOLS: Field = Field::other("tools", tools, "Functions that the model may call.");
pub(crate) const TOOL_CHOICE: Field = Field::other(
    "tool_choice",
    tool_choice,
    "Whether it calls one: none, auto, required, or the one that is named.",
);
pub(crate) const PARALLEL_TOOL_CALLS: Field =
    Field::flag("parallel_tool_calls", "Whether it may call several at a time.");

/// What a chat has beside these.
pub(crate) const CHAT: [&Field; 6] =
    [&MESSAGES, &LOGPROBS, &TOP_LOGPROBS, &TOOLS, &TOOL_CHOICE, &PARALLEL_TOOL_CALLS];

pub(crate) const PROMPT: Field = Field::other("prompt", prompt, "What the answer follows.");
pub(crate) const COMPLETION_LOGPROBS: Field = Field::integer(
    "logprobs",
    0,
    20,
    "Every token comes with its log probability, and so many of the likeliest ones.",
);
pub(crate) const ECHO: Field = Field::flag("echo", "Whether the answer begins with the prompt.");

/// What a completion has beside these.
pub(crate) const COMPLETION: [&Field; 3] = [&PROMPT, &COMPLETION_LOGPROBS, &ECHO];

pub(crate) const CONTENT: Field =
    Field::other("content", || json!({ "type": "string" }), "The text.");
pub(crate) const ADD_SPECIAL: Field =
    Field::flag("add_special", "Whether the token that begins a text comes first.");
pub(crate) const PARSE_SPECIAL: Field = Field::flag(
    "parse_special",
    "Whether special tokens that the text spells are tokens; true if not given.",
);
pub(crate) const WITH_PIECES: Field =
    Field::flag("with_pieces", "Whether every token comes with its text.");

/// What /tokenize has.
pub(crate) const TOKENIZE: [&Field; 4] = [&CONTENT, &ADD_SPECIAL, &PARSE_SPECIAL, &WITH_PIECES];

pub(crate) const TOKENS: Field = Field::other("tokens", tokens, "The tokens.");

/// What /detokenize has.
pub(crate) const DETOKENIZE: [&Field; 1] = [&TOKENS];

/// What /apply-template has.
pub(crate) const TEMPLATE: [&Field; 2] = [&MESSAGES, &TOOLS];

/// Fields of answers that cannot be done.
pub(crate) const REFUSED: [Refused; 2] = [
    Refused {
        name: "grammar",
        why: "grammars in GBNF are not there; response_format takes a JSON schema",
        harmless: is_nothing,
    },
    Refused {
        name: "json_schema",
        why: "a schema belongs into response_format",
        harmless: is_nothing,
    },
];

/// Fields of chats that cannot be done.
pub(crate) const REFUSED_CHAT: [Refused; 4] = [
    Refused { name: "audio", why: "only text is generated", harmless: is_nothing },
    Refused {
        name: "modalities",
        why: "only text is generated",
        harmless: |value| *value == json!(["text"]),
    },
    Refused {
        name: "functions",
        why: "functions have become tools: send them as tools",
        harmless: is_nothing,
    },
    Refused { name: "web_search_options", why: "nothing is looked up here", harmless: is_nothing },
];

/// Fields of completions that cannot be done.
pub(crate) const REFUSED_COMPLETION: [Refused; 2] = [
    Refused {
        name: "suffix",
        why: "text is not put between two others here",
        harmless: is_nothing,
    },
    Refused {
        name: "best_of",
        why: "answers are not chosen among here: ask for n of them",
        harmless: |value| *value == json!(1),
    },
];

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}
