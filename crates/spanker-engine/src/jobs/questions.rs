// SPDX-License-Identifier: Apache-2.0
//! Prompts for a model as text, and what their answers say. Which backend answers is not decided here.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ggml_spanker::GgufFile;
use serde::Serialize;

use super::{JobError, Prompts};
use crate::error::{EngineError, Result};
use crate::model::Model;

/// Short prompts to try a model with, one on every line.
pub const PROMPTS: &str = "The three primary colours are\nThe capital of France is\nWater boils at
Once upon a time\nThe sun rises in the\nTwo and two make\nA haiku about the sea:\nThe opposite of cold is
Bread is made from\nThe largest planet is\nTo be or not to be,\nMy favourite season is";

/// Prompts for a model.
pub(super) struct Questions {
    model: Arc<Model>,
    texts: Vec<String>,
    pub(super) prompts: Arc<Prompts<GgufFile>>,
}

impl Questions {
    pub(super) fn new(model: Arc<Model>, texts: Vec<String>, tokens: usize) -> Result<Questions> {
        let tokenizer = model.tokenizer();
        let encode = |text: &String| tokenizer.encode(text, tokenizer.add_bos(), true);
        let words = texts.iter().map(encode).collect();
        let network = Arc::clone(model.network());
        let prompts = Prompts::new(network, words, tokens, tokenizer.ends());
        let prompts = prompts.map_err(|error| match error {
            JobError::Prompt { prompt, what } => {
                let what = format!("prompt '{}': {what}", OneLine(&texts[prompt]));
                EngineError::Prompt { what, hint: None }
            }
            other => other.into(),
        })?;
        Ok(Questions { model, texts, prompts: Arc::new(prompts) })
    }

    /// Reads every page of the model once: they cost most when they are first touched.
    pub(super) fn touch(&self) {
        let bytes = self.model.network().bytes().iter().step_by(4096);
        std::hint::black_box(bytes.fold(0u8, |sum, byte| sum ^ byte));
    }

    /// The prompt of median length.
    pub(super) fn typical(&self) -> usize {
        let prompts = self.prompts.prompts();
        let mut places: Vec<usize> = (0..prompts.len()).collect();
        places.sort_by_key(|&place| prompts[place].len());
        places[places.len() / 2]
    }

    /// What outputs say, in the order of the prompts.
    pub(super) fn read(&self, out: &[u8], missing: &[Range<usize>]) -> Vec<PromptAnswer> {
        let answer = |(item, (prompt, mut tokens)): (usize, (&String, Vec<u32>))| {
            let done = !missing.iter().any(|range| range.contains(&item));
            let count = tokens.len();
            tokens.retain(|&token| !self.model.tokenizer().is_end(token));
            let text = done.then(|| self.model.tokenizer().decode(&tokens));
            PromptAnswer { prompt: prompt.clone(), text, tokens: done.then_some(count) }
        };
        self.texts.iter().zip(self.prompts.answers(out)).enumerate().map(answer).collect()
    }
}

/// What came of a prompt. Shown as prompt and answer on one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PromptAnswer {
    /// The prompt.
    pub prompt: String,
    /// Nothing if nobody has answered.
    pub text: Option<String>,
    /// Tokens of the answer, with the one that ended it.
    pub tokens: Option<usize>,
}

impl fmt::Display for PromptAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.text.as_deref().unwrap_or("(no answer)");
        write!(f, "{} -> {}", OneLine(&self.prompt), OneLine(text))
    }
}

/// A text with its control characters as escapes.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|character| match character.is_control() {
            true => write!(f, "{}", character.escape_default()),
            false => write!(f, "{character}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_several_lines_are_shown_on_one() {
        let (prompt, text) = ("a".to_owned(), Some("b\n\u{1b}[2Jé".to_owned()));
        let answer = PromptAnswer { prompt: prompt.clone(), text, tokens: Some(3) };
        assert_eq!(answer.to_string(), "a -> b\\n\\u{1b}[2Jé");
        let none = PromptAnswer { prompt, text: None, tokens: None };
        assert_eq!(none.to_string(), "a -> (no answer)");
    }
}
