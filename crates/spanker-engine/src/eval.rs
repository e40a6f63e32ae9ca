// SPDX-License-Identifier: Apache-2.0
//! How well a model knows texts: what each continuation costs it in bits, and whether it would have said it. Items come from
//! lines of JSON, and what was found of each is kept in a file, so that a run that was ended goes on where it was.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use spanker_llm::Want;

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::files;
use crate::model::Model;

/// A context and what follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvalItem {
    /// Its line in the file, from 1.
    pub line: usize,
    /// What the model reads.
    pub context: String,
    /// What it is to say.
    pub continuation: String,
}

/// More than any file of items has.
const MOST_ITEMS: u64 = 1 << 30;
/// The longest text of an item, in bytes.
const MOST_TEXT: usize = 16 << 20;

/// The items of a file, one JSON object on each line. An object has `context` and `continuation`, or `prompt` and
/// `completion`, itself or in its field `request`; or it has `text`, all of which is scored.
///
/// # Errors
/// [`EngineError::File`] with the line that is none of these, and for a file without items.
pub fn read_items(path: &Path, text: &str) -> Result<Vec<EvalItem>> {
    let mut items = Vec::new();
    for (line, json) in (1..).zip(text.lines()) {
        if json.trim().is_empty() {
            continue;
        }
        let wrong = |what: String| EngineError::file(path, format!("line {line}: {what}"));
        let value: Value = serde_json::from_str(json)
            .map_err(|error| wrong(format!("it is not JSON: {error}")))?;
        let (context, continuation) = item(&value).ok_or_else(|| {
            wrong(
                "expected 'context' and 'continuation', 'prompt' and 'completion', or 'text'"
                    .into(),
            )
        })?;
        if continuation.is_empty() || context.len() + continuation.len() > MOST_TEXT {
            let bytes = context.len() + continuation.len();
            return Err(wrong(format!("{bytes} bytes: expected 1 to {MOST_TEXT} to score")));
        }
        items.push(EvalItem { line, context, continuation });
    }
    match items.is_empty() {
        true => Err(EngineError::file(path, "it has no items")),
        false => Ok(items),
    }
}

/// The two texts of an object.
fn item(value: &Value) -> Option<(String, String)> {
    let value = value.get("request").unwrap_or(value);
    let text = |key: &str| value.get(key)?.as_str().map(str::to_owned);
    let both = |one: &str, two: &str| Some((text(one)?, text(two)?));
    both("context", "continuation")
        .or_else(|| both("prompt", "completion"))
        .or_else(|| Some((String::new(), text("text")?)))
}

/// What was found of an item.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The item's line in its file.
    pub line: usize,
    /// What the continuation costs, in bits.
    pub bits: f64,
    /// Its bytes.
    pub bytes: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Whether each of them was the model's first choice.
    pub correct: bool,
    /// Tokens of the context that were left out at its beginning for want of room.
    pub cut: u64,
}

/// The tokens of an item, and how many of the first are not scored.
fn tokens(model: &Model, item: &EvalItem) -> (Vec<u32>, usize) {
    let tokenizer = model.tokenizer();
    let encode = |text: &str| tokenizer.encode(text, tokenizer.add_bos(), false);
    let before = encode(&item.context);
    let all = encode(&[&item.context[..], &item.continuation].concat());
    // Where the last token of the context and the first of the rest are one, that one is scored.
    let same = before.iter().zip(&all).take_while(|(one, other)| one == other).count();
    // Something is read before the first choice.
    let known = same.min(all.len().saturating_sub(1)).max(1);
    (all, known)
}

/// What a model makes of an item.
///
/// # Errors
/// [`EngineError::Prompt`] for an item whose continuation does not fit the context, [`EngineError::File`] for a
/// tokenizer that does not go with the weights, and what a step fails with.
pub fn score(engine: &mut Engine<'_>, item: &EvalItem) -> Result<Score> {
    let model = engine.model();
    let (all, known) = tokens(model, item);
    let (line, bytes) = (item.line, item.continuation.len() as u64);
    let scored = all.len().saturating_sub(known);
    let room = engine.context();
    // The last token is only compared.
    if scored >= room {
        let what =
            format!("line {line}: {scored} tokens to score, and the context has room for {room}");
        return Err(EngineError::Prompt {
            what,
            hint: Some("give more room with --ctx-size".into()),
        });
    }
    let vocab = model.shape().vocab;
    if let Some(token) = all.iter().find(|&&token| u64::from(token) >= vocab) {
        let what = format!("its tokenizer has token {token}, its weights have {vocab}");
        return Err(EngineError::file(model.path(), what));
    }
    let begins = model.tokenizer().bos().filter(|bos| all.first() == Some(bos)).is_some();
    let cut = (all.len() - 1).saturating_sub(room);
    let mut read = all[..known].to_vec();
    // The token that begins a text stays.
    read.drain(usize::from(begins && cut > 0)..usize::from(begins && cut > 0) + cut);
    engine.cut(0);
    let mut total =
        Score { line, bits: 0.0, bytes, tokens: scored as u64, correct: true, cut: cut as u64 };
    for &token in &all[known..] {
        let outcome = engine.feed(&read, Want::Logits)?;
        let logits = outcome.last().logits.as_deref().unwrap_or_default();
        let (bits, first) = cost(logits, token);
        if !bits.is_finite() {
            let what = format!(
                "line {line}: the logits after {} tokens are no numbers",
                engine.tokens().len()
            );
            return Err(EngineError::file(model.path(), what));
        }
        total.bits += bits;
        total.correct &= first;
        read = vec![token];
    }
    Ok(total)
}

/// What a token costs in bits after these logits, and whether it is the first choice.
fn cost(logits: &[f32], token: u32) -> (f64, bool) {
    let Some(&own) = logits.get(token as usize) else { return (f64::INFINITY, false) };
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    let bits = (sum.ln() - f64::from(own - most)) / std::f64::consts::LN_2;
    let first = logits.iter().position(|&logit| logit == most) == Some(token as usize);
    (bits, first)
}

/// What was found of all items so far.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Tally {
    /// Items.
    pub items: usize,
    /// Those all of whose tokens were the model's first choice.
    pub correct: usize,
    /// Bytes of their continuations.
    pub bytes: u64,
    /// Tokens of these.
    pub tokens: u64,
    /// What they cost together, in bits.
    pub bits: f64,
    /// Items whose context was cut at its beginning for want of room.
    pub cut: usize,
}

impl Tally {
    /// Adds an item.
    pub fn add(&mut self, score: &Score) {
        self.items += 1;
        self.correct += usize::from(score.correct);
        self.bytes += score.bytes;
        self.tokens += score.tokens;
        self.bits += score.bits;
        self.cut += usize::from(score.cut > 0);
    }

    /// Bits for each byte of the continuations.
    #[must_use]
    pub fn bits_per_byte(&self) -> f64 {
        self.bits / self.bytes as f64
    }

    /// What is known, in a few words.
    #[must_use]
    pub fn words(&self) -> String {
        let (bits, right) = (self.bits_per_byte(), 100.0 * self.accuracy());
        format!("{bits:.4} bits per byte, {right:.1} % right")
    }

    /// The part of the items all of whose tokens were the model's first choice.
    #[must_use]
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.items as f64
    }
}

/// What an evaluation is of: the first line of its file. Two that differ do not go on from each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvalOf {
    /// The model's file, by its header and length.
    pub model: String,
    /// The items, by their SHA-256.
    pub items: String,
    /// Tokens of context.
    pub context: usize,
    /// How keys and values are stored.
    pub kv: String,
}

impl EvalOf {
    /// What is evaluated, from the text of all items.
    #[must_use]
    pub fn new(model: &Model, items: &str, context: usize, kv: &str) -> EvalOf {
        let items = Sha256::digest(items.as_bytes());
        let items = items.iter().map(|byte| format!("{byte:02x}")).collect();
        let model = format!("{:016x}", model.network().fingerprint());
        EvalOf { model, items, context, kv: kv.to_owned() }
    }
}

/// An evaluation: items that are still to be scored, and what was found of the others.
#[derive(Debug)]
pub struct Evaluation {
    /// What it is of.
    pub of: EvalOf,
    /// What was found so far.
    pub tally: Tally,
    /// Items that were scored before.
    pub resumed: usize,
    items: Vec<EvalItem>,
    ledger: Option<Ledger>,
}

impl Evaluation {
    /// Reads the first `limit` items of a file. With `out`, what is found is kept there, and what was kept counts.
    ///
    /// # Errors
    /// As [`read_items`] and [`Ledger::open`].
    pub fn open(
        (path, limit): (&Path, usize),
        model: &Model,
        (context, kv): (usize, &str),
        out: Option<&Path>,
    ) -> Result<Evaluation> {
        let text = files::read(path, MOST_ITEMS)?;
        let mut items = read_items(path, &text)?;
        items.truncate(limit);
        let of = EvalOf::new(model, &text, context, kv);
        let (mut tally, mut ledger) = (Tally::default(), None);
        if let Some(out) = out {
            let (opened, scores) = Ledger::open(out, &of)?;
            let known = |line: usize| scores.iter().find(|score| score.line == line);
            items.retain(|item| known(item.line).inspect(|score| tally.add(score)).is_none());
            ledger = Some(opened);
        }
        Ok(Evaluation { of, resumed: tally.items, tally, items, ledger })
    }

    /// Items in all.
    #[must_use]
    pub fn all(&self) -> usize {
        self.resumed + self.items.len()
    }

    /// About how many tokens the longest context of what is to be scored has; nothing where all is scored.
    #[must_use]
    pub fn longest(&self) -> Option<usize> {
        self.items.iter().map(|item| item.context.len() / 4).max()
    }

    /// Scores what is left. `watch` gets what was found so far, and says whether to go on.
    ///
    /// # Errors
    /// As [`score`], [`EngineError::Io`] for what cannot be kept, [`EngineError::Interrupted`] when `watch` ends it.
    pub fn run(
        &mut self,
        engine: &mut Engine<'_>,
        mut watch: impl FnMut(&Tally) -> bool,
    ) -> Result<()> {
        for item in &self.items {
            if !watch(&self.tally) {
                return Err(EngineError::Interrupted);
            }
            let score = score(engine, item)?;
            if let Some(ledger) = &mut self.ledger {
                ledger.keep(&score)?;
            }
            self.tally.add(&score);
        }
        Ok(())
    }
}

/// The file that keeps what was found, a line for each item.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    name: String,
}

/// More than any such file has.
const MOST_LEDGER: u64 = 1 << 30;

impl Ledger {
    /// Opens a file or begins it, and gives what it has. A last line that was not written to its end is dropped.
    ///
    /// # Errors
    /// [`EngineError::File`] for a file that is of something else or is none of these, [`EngineError::Io`] for one that
    /// cannot be read or written.
    pub fn open(path: &Path, of: &EvalOf) -> Result<(Ledger, Vec<Score>)> {
        let name = path.display().to_string();
        let failed = |error| EngineError::io(format!("write {name}"), error);
        let mut options = OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).open(path).map_err(failed)?;
        let mut text = Vec::new();
        Read::by_ref(&mut file).take(MOST_LEDGER).read_to_end(&mut text).map_err(failed)?;
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        if whole < text.len() {
            // Only what a ledger can have lost: other files stay as they are.
            if whole > 0
                || text.len() > 4096
                || !b"{\"of\":".starts_with(&text[..text.len().min(6)])
            {
                Self::header(path, &text[..whole], of)?;
            }
            file.set_len(whole as u64).map_err(failed)?;
            text.truncate(whole);
        }
        let mut ledger = Ledger { file, name };
        if text.is_empty() {
            ledger.line(&serde_json::json!({ "of": of }))?;
            return Ok((ledger, Vec::new()));
        }
        let rest = Self::header(path, &text, of)?;
        let scores = (2..).zip(rest.lines()).map(|(line, json)| {
            serde_json::from_str(json).map_err(|error| {
                EngineError::file(path, format!("line {line}: it is no item's result: {error}"))
            })
        });
        let scores = scores.collect::<Result<_>>()?;
        Ok((ledger, scores))
    }

    /// Compares the first line, and gives the others.
    fn header<'t>(path: &Path, text: &'t [u8], of: &EvalOf) -> Result<&'t str> {
        let other = |what: &str| {
            let hint = "name another file for another evaluation";
            EngineError::file(path, format!("{what}\nhint: {hint}"))
        };
        let text = std::str::from_utf8(text).map_err(|_| other("it is no evaluation"))?;
        let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
        let first: Value = serde_json::from_str(first).unwrap_or_default();
        let found: EvalOf = serde_json::from_value(first["of"].clone())
            .map_err(|_| other("it is no evaluation"))?;
        let fields = [
            ("model", &found.model, &of.model),
            ("items", &found.items, &of.items),
            ("context", &found.context.to_string(), &of.context.to_string()),
            ("kv", &found.kv, &of.kv),
        ];
        match fields.iter().find(|(_, found, wanted)| found != wanted) {
            Some((field, found, wanted)) => Err(other(&format!(
                "it is of another evaluation: {field} is {found}, not {wanted}"
            ))),
            None => Ok(rest),
        }
    }

    /// Keeps what was found of an item.
    ///
    /// # Errors
    /// [`EngineError::Io`] if it cannot be written.
    pub fn keep(&mut self, score: &Score) -> Result<()> {
        self.line(score)
    }

    fn line(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(value).unwrap_or_default();
        line.push('\n');
        // In one piece, so that whoever ends the process leaves whole lines.
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|error| EngineError::io(format!("write {}", self.name), error))
    }
}

#[cfg(test)]
mod tests;
