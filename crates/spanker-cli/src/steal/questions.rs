// SPDX-License-Identifier: Apache-2.0
//! Prompts for a model, from a file or built in, and what their answers say. Who answers is not decided here.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ggml_spanker::GgufFile;
use serde_json::{Value, json};
use spanker_jobs::{JobError, Prompts};

use spanker_engine::Model;

use crate::{files, models};

/// More than any list of prompts has.
const MOST_BYTES: u64 = 64 << 20;
/// What there is to answer where nobody says.
const BUILT_IN: [&str; 12] = [
    "The three primary colours are",
    "The capital of France is",
    "Water boils at",
    "Once upon a time",
    "The sun rises in the",
    "Two and two make",
    "A haiku about the sea:",
    "The opposite of cold is",
    "Bread is made from",
    "The largest planet is",
    "To be or not to be,",
    "My favourite season is",
];

/// Prompts for a model.
pub(super) struct Questions {
    model: Model,
    texts: Vec<String>,
    pub(super) prompts: Arc<Prompts<GgufFile>>,
    pub(super) tokens: usize,
}

impl Questions {
    /// The prompts of a file, or those that are built in, for a model as `spanker run` finds it.
    pub(super) fn open(
        model: &str,
        file: Option<&Path>,
        tokens: usize,
    ) -> anyhow::Result<Questions> {
        let from = file.map_or("built in".to_owned(), |file| file.display().to_string());
        let texts: Vec<String> = match file {
            None => BUILT_IN.map(str::to_owned).to_vec(),
            Some(file) => {
                let text = files::read(file, MOST_BYTES)?;
                let lines = text.lines().filter(|line| !line.trim().is_empty());
                lines.map(str::to_owned).collect()
            }
        };
        if texts.is_empty() {
            anyhow::bail!("{from}: no prompts, expected one on every line");
        }
        let model = Model::open(models::find(model)?)?;
        let tokenizer = model.tokenizer();
        let encode = |text: &String| tokenizer.encode(text, tokenizer.add_bos(), true);
        let words = texts.iter().map(encode).collect();
        let network = Arc::clone(model.network());
        let prompts = Prompts::new(network, words, tokens, tokenizer.ends());
        let prompts = prompts.map_err(|error| match error {
            JobError::Prompt { prompt, what } => {
                anyhow::anyhow!("{from}: prompt '{}': {what}", one_line(&texts[prompt]))
            }
            other => other.into(),
        })?;
        Ok(Questions { model, texts, prompts: Arc::new(prompts), tokens })
    }

    /// Reads every page of the model once: they cost most when they are first touched.
    pub(super) fn touch(&self) {
        let bytes = self.model.network().bytes().iter().step_by(4096);
        std::hint::black_box(bytes.fold(0u8, |sum, byte| sum ^ byte));
    }

    /// The prompt that is neither among the long nor among the short ones.
    pub(super) fn typical(&self) -> usize {
        let prompts = self.prompts.prompts();
        let mut places: Vec<usize> = (0..prompts.len()).collect();
        places.sort_by_key(|&place| prompts[place].len());
        places[places.len() / 2]
    }

    /// What outputs say, in the order of the prompts.
    pub(super) fn read(&self, out: &[u8], missing: &[Range<usize>]) -> Vec<Answer> {
        let answer = |(item, (prompt, mut tokens)): (usize, (&String, Vec<u32>))| {
            let done = !missing.iter().any(|range| range.contains(&item));
            let count = tokens.len();
            tokens.retain(|&token| !self.model.tokenizer().is_end(token));
            let text = done.then(|| self.model.tokenizer().decode(&tokens));
            Answer { prompt: prompt.clone(), text, tokens: count }
        };
        self.texts.iter().zip(self.prompts.answers(out)).enumerate().map(answer).collect()
    }
}

/// What came of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    prompt: String,
    /// Nothing if nobody has answered.
    text: Option<String>,
    /// With the one that ended it.
    tokens: usize,
}

impl Answer {
    pub(super) fn to_json(&self) -> Value {
        let tokens = self.text.as_ref().map(|_| self.tokens);
        json!({ "prompt": self.prompt, "text": self.text, "tokens": tokens })
    }

    /// Prompt and answer without line breaks.
    pub(super) fn line(&self) -> String {
        let text = self.text.as_deref().map_or_else(|| "(no answer)".to_owned(), one_line);
        format!("{} -> {text}", one_line(&self.prompt))
    }
}

/// A text with its control characters as escapes.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() {
            line.extend(letter.escape_default());
        } else {
            line.push(letter);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_several_lines_are_shown_on_one() {
        let prompt = "a".to_owned();
        let answer =
            Answer { prompt: prompt.clone(), text: Some("b\n\u{1b}[2Jé".into()), tokens: 3 };
        assert_eq!(answer.line(), "a -> b\\n\\u{1b}[2Jé");
        let none = Answer { prompt, text: None, tokens: 0 };
        assert_eq!(none.line(), "a -> (no answer)");
        assert_eq!(none.to_json()["tokens"], Value::Null);
    }
}
