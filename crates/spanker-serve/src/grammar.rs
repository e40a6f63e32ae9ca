// SPDX-License-Identifier: Apache-2.0
//! Answers that a JSON schema describes: which tokens may come next. A schema becomes a parser on the edge's threads;
//! on the model's thread the parser walks the vocabulary as a tree of bytes.
//!
//! Schemas are hostile: their size, the work that goes into the parser and the work of each step are bounded, and what
//! the parser cannot hold an answer to is refused rather than ignored.

mod bounds;

use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use spanker_engine::Constraint;
use spanker_text::{Kind, Tokenizer};

/// What may be between the parts of an answer: models that are not sure go on with space for ever.
const SPACE: &str = r"[\x20\x0A\x0D\x09]{1,40}";
/// Bits of a word of a mask.
const WORD: usize = u32::BITS as usize;

/// What parsers of a model's answers are made with.
pub(crate) struct Grammars {
    factory: ParserFactory,
    ends: Arc<[u32]>,
    /// Words of a mask.
    words: usize,
}

impl Grammars {
    /// For a tokenizer and weights that have so many tokens.
    ///
    /// # Errors
    /// A sentence, for a vocabulary that the parsers cannot take.
    pub(crate) fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<Grammars, String> {
        let vocab = vocab.max(tokenizer.vocab());
        let ends: Arc<[u32]> = tokenizer.ends().into();
        let mut pieces: Vec<Vec<u8>> = (0..vocab).map(|token| piece(tokenizer, token)).collect();
        // Without a token that ends answers, one that does not exist stands for it.
        let last = [pieces.len() as u32];
        let stops = if ends.is_empty() { &last[..] } else { &ends };
        if ends.is_empty() {
            pieces.push(special(pieces.len()));
        }
        let info = TokRxInfo::new(pieces.len() as u32, stops[0]);
        let trie = TokTrie::from(&info, &pieces).with_eos_tokens(stops);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::json_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| error.to_string())?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            step_lexer_fuel: 100_000,
            step_max_items: 50_000,
            max_lexer_states: 20_000,
            max_grammar_size: 200_000,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Grammars { factory, ends, words: vocab.div_ceil(WORD) })
    }

    /// What holds an answer to a schema.
    ///
    /// # Errors
    /// A sentence, for a schema that no answer can be held to.
    pub(crate) fn build(&self, schema: &Value) -> Result<Grammar, String> {
        let mut schema = match schema {
            Value::Bool(true) => json!({}),
            Value::Object(_) => schema.clone(),
            _ => return Err("nothing can be said that it allows".into()),
        };
        bounds::check(&schema)?;
        schema["x-guidance"] = json!({ "whitespace_pattern": SPACE });
        let grammar = TopLevelGrammar::from_grammar(GrammarWithLexer::from_json_schema(schema));
        let mut fresh = Matcher::new(self.factory.create_parser(grammar));
        // What the first token may be, so that what is wrong comes out here.
        fresh.compute_mask().map_err(|error| sentence(&error.to_string()))?;
        let running = fresh.deep_clone();
        Ok(Grammar { fresh, running, ends: Arc::clone(&self.ends), words: self.words })
    }
}

/// A token's bytes in the tree: those of special tokens are not those of any text.
fn piece(tokenizer: &Tokenizer, token: usize) -> Vec<u8> {
    let number = token as u32;
    let bytes = tokenizer.piece(number);
    let is_text = matches!(
        tokenizer.kind(number),
        Some(Kind::Normal | Kind::UserDefined | Kind::Byte | Kind::Unused)
    );
    if is_text && !bytes.is_empty() { bytes.to_vec() } else { special(token) }
}

fn special(token: usize) -> Vec<u8> {
    let mut bytes = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    bytes.extend(format!("[{token}]").bytes());
    bytes
}

/// The first line of what the parser says, not longer than a sentence.
fn sentence(said: &str) -> String {
    const MOST: usize = 300;
    let line = said.lines().next().unwrap_or_default();
    if line.starts_with("panic") {
        return "it is more than the parser takes".into();
    }
    // Options of the parser are none of the schema's author.
    let line = line.split(". Enable ").next().unwrap_or_default();
    line.chars().filter(|one| !one.is_control()).take(MOST).collect()
}

/// What an answer is held to.
pub(crate) struct Grammar {
    /// Before any token.
    fresh: Matcher,
    running: Matcher,
    ends: Arc<[u32]>,
    words: usize,
}

impl Grammar {
    /// The same before any token, for another answer.
    pub(crate) fn restart(&self) -> Grammar {
        Grammar {
            fresh: self.fresh.deep_clone(),
            running: self.fresh.deep_clone(),
            ends: Arc::clone(&self.ends),
            words: self.words,
        }
    }
}

impl Constraint for Grammar {
    fn allowed(&mut self) -> Result<Option<Vec<u32>>, String> {
        let mask =
            self.running.compute_mask_or_eos().map_err(|error| sentence(&error.to_string()))?;
        let mut words = mask.as_slice().to_vec();
        words.resize(self.words, 0);
        Ok(Some(words))
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        // What ends the answer is no part of it.
        if self.ends.contains(&token) && self.running.is_stopped() {
            return Ok(());
        }
        self.running.consume_token(token).map_err(|error| sentence(&error.to_string()))
    }

    fn is_complete(&mut self) -> bool {
        self.running.is_stopped()
    }

    fn restarted(&self) -> Box<dyn Constraint> {
        Box::new(self.restart())
    }
}

#[cfg(test)]
mod tests;
