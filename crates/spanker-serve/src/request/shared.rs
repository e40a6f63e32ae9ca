// SPDX-License-Identifier: Apache-2.0
//! What every request for an answer has: how tokens are chosen, what ends it, what it has to be, how it comes.

use std::hash::BuildHasher;

use serde_json::{Value, json};
use spanker_text::{Penalties, Settings};

use super::Served;
use super::fields::{Fields, shown, whole};
use super::tables::{self, MOST_BIASED, MOST_STOP, MOST_STOPS};
use crate::error::{ApiError, Result};

/// What an answer has to be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    /// Any text.
    Text,
    /// JSON of this schema.
    Schema(Value),
}

/// What every request for an answer asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Wanted {
    /// Answers to each prompt.
    pub(crate) answers: usize,
    pub(crate) settings: Settings,
    /// Tokens of an answer at most; nothing goes on until the context is full.
    pub(crate) tokens: Option<usize>,
    pub(crate) stops: Vec<String>,
    pub(crate) ignore_end: bool,
    pub(crate) bias: Vec<(u32, f32)>,
    pub(crate) form: Form,
    /// Whether what other prompts began with is used again.
    pub(crate) reuse: bool,
    pub(crate) stream: bool,
    /// Whether a stream says in the end how many tokens there were.
    pub(crate) usage: bool,
    /// Whether every piece of a stream has timings.
    pub(crate) timings: bool,
}

impl Wanted {
    /// What the fields ask for.
    pub(super) fn of(fields: &Fields<'_>, served: &Served) -> Result<Wanted> {
        fields.refuse(&tables::REFUSED)?;
        check_model(fields, served)?;
        let tokens = fields.integer(&tables::MAX_TOKENS)?;
        let tokens = fields.integer(&tables::MAX_COMPLETION_TOKENS)?.or(tokens);
        let flag = |field| fields.flag(field).map(Option::unwrap_or_default);
        let answers = fields.integer(&tables::N)?.map_or(1, |count| count as usize);
        if answers > served.room {
            let what = format!("{answers} answers: at most {} are taken at a time", served.room);
            return Err(fields.wrong("n", what));
        }
        Ok(Wanted {
            answers,
            settings: settings(fields)?,
            tokens: tokens.map(|count| count as usize),
            stops: stops(fields)?,
            ignore_end: flag(&tables::IGNORE_EOS)?,
            bias: bias(fields, served)?,
            form: form(fields)?,
            reuse: fields.flag(&tables::CACHE_PROMPT)?.unwrap_or(true),
            stream: flag(&tables::STREAM)?,
            usage: usage(fields)?,
            timings: flag(&tables::TIMINGS_PER_TOKEN)?,
        })
    }
}

fn check_model(fields: &Fields<'_>, served: &Served) -> Result<()> {
    match fields.text("model")? {
        Some(name) if !served.names.iter().any(|known| known == name) => {
            let shown: String = name.chars().take(100).collect();
            Err(ApiError::model(&shown, &served.names[0]))
        }
        _ => Ok(()),
    }
}

/// How tokens are chosen: what is not said is as llama.cpp has it.
fn settings(fields: &Fields<'_>) -> Result<Settings> {
    let seed = fields.integer(&tables::SEED)?.filter(|&seed| seed != -1);
    let usual = Settings::usual(seed.map_or_else(any_seed, |seed| seed as u64));
    let number = |field, usual| fields.number(field).map(|given| given.unwrap_or(usual));
    let top_k = fields.integer(&tables::TOP_K)?.map(|count| count.max(0) as usize);
    Ok(Settings {
        temperature: number(&tables::TEMPERATURE, usual.temperature)?,
        top_k: top_k.unwrap_or(usual.top_k),
        // The best token has some probability.
        top_p: number(&tables::TOP_P, usual.top_p)?.max(f64::MIN_POSITIVE),
        min_p: number(&tables::MIN_P, usual.min_p)?,
        penalties: Penalties {
            repeat: number(&tables::REPEAT_PENALTY, usual.penalties.repeat)?,
            presence: number(&tables::PRESENCE_PENALTY, usual.penalties.presence)?,
            frequency: number(&tables::FREQUENCY_PENALTY, usual.penalties.frequency)?,
            last: usual.penalties.last,
        },
        seed: usual.seed,
    })
}

/// A seed that nobody has asked for.
fn any_seed() -> u64 {
    std::hash::RandomState::new().hash_one(()) >> 1
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>> {
    let name = tables::STOP.name;
    let check = |value: &Value, name: &str| match value.as_str() {
        Some(text) if (1..=MOST_STOP).contains(&text.chars().count()) => Ok(text.to_owned()),
        _ => {
            let what =
                format!("expected a text of 1 to {MOST_STOP} characters, got {}", shown(value));
            Err(fields.wrong(name, what))
        }
    };
    match fields.get(name) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MOST_STOPS => {
            let texts = list.iter().enumerate();
            texts.map(|(at, value)| check(value, &format!("{name}[{at}]"))).collect()
        }
        Some(Value::Array(list)) => {
            Err(fields.wrong(name, format!("{} texts: at most {MOST_STOPS}", list.len())))
        }
        Some(value) => Ok(vec![check(value, name)?]),
    }
}

fn bias(fields: &Fields<'_>, served: &Served) -> Result<Vec<(u32, f32)>> {
    let name = tables::LOGIT_BIAS.name;
    let Some(value) = fields.get(name) else { return Ok(Vec::new()) };
    let Some(map) = value.as_object().filter(|map| map.len() <= MOST_BIASED) else {
        let expected = format!("an object of at most {MOST_BIASED} tokens");
        return Err(fields.expected(name, &expected, value));
    };
    let entry = |(token, value): (&String, &Value)| {
        let number = token.parse().ok().filter(|&number| u64::from(number) < served.vocab);
        let Some(number) = number else {
            let shown = shown(&Value::from(token.as_str()));
            let what = format!("{shown} is no token of a vocabulary of {}", served.vocab);
            return Err(fields.wrong(name, what));
        };
        match value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias)) {
            Some(bias) => Ok((number, bias as f32)),
            None => {
                let name = format!("{name}.{number}");
                Err(fields.expected(&name, "a number from -100 to 100", value))
            }
        }
    };
    map.iter().map(entry).collect()
}

fn form(fields: &Fields<'_>) -> Result<Form> {
    let name = tables::RESPONSE_FORMAT.name;
    let Some(value) = fields.get(name) else { return Ok(Form::Text) };
    let format = Fields::of(value, fields.path(name))?;
    match format.required("type")?.as_str() {
        Some("text") => Ok(Form::Text),
        Some("json_object") => {
            let schema = format.get("schema").map(|_| schema(&format)).transpose()?;
            Ok(Form::Schema(schema.unwrap_or_else(|| json!({ "type": "object" }))))
        }
        Some("json_schema") => {
            let inner = Fields::of(format.required("json_schema")?, format.path("json_schema"))?;
            inner.text("name")?;
            Ok(Form::Schema(schema(&inner)?))
        }
        _ => {
            let expected = "text, json_object or json_schema";
            Err(format.expected("type", expected, format.required("type")?))
        }
    }
}

/// The schema in an object; `true` allows anything.
fn schema(fields: &Fields<'_>) -> Result<Value> {
    match fields.required("schema")? {
        value @ (Value::Object(_) | Value::Bool(_)) => Ok(value.clone()),
        other => Err(fields.expected("schema", "a JSON schema", other)),
    }
}

fn usage(fields: &Fields<'_>) -> Result<bool> {
    let name = tables::STREAM_OPTIONS.name;
    let Some(value) = fields.get(name) else { return Ok(false) };
    let options = Fields::of(value, fields.path(name))?;
    Ok(options.flag(&tables::INCLUDE_USAGE)?.unwrap_or(false))
}

/// A token of the vocabulary.
pub(super) fn token(value: &Value, served: &Served) -> Option<u32> {
    let token = whole(value).and_then(|token| u32::try_from(token).ok());
    token.filter(|&token| u64::from(token) < served.vocab)
}
