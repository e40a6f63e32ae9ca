// SPDX-License-Identifier: Apache-2.0
//! Answers to `/v1/completions`: text that follows other text.

use serde_json::{Value, json};
use spanker_engine::{ServedPiece, Update};

use crate::assembly::{Assembly, for_completion, usage};
use crate::error::{ApiError, Result};
use crate::head::Head;
use crate::reply::{Reply, finish_reason, wrong_text};

/// One of the answers.
struct Choice {
    /// The prompt, if answers begin with it.
    echo: String,
    assembly: Assembly,
    /// Characters of the answer's tokens that were sent with their chances.
    offset: usize,
    finish: Option<&'static str>,
}

/// The answers of a request.
pub(crate) struct Completion {
    head: Head,
    choices: Vec<Choice>,
    /// Answers to each prompt: the first of each counts the prompt's tokens.
    each: usize,
}

impl Completion {
    /// Before any answer. `prompts` has for each answer the tokens of its prompt, and its text if answers begin with it.
    pub(crate) fn new(head: Head, prompts: Vec<(usize, String)>, each: usize) -> Completion {
        let choice = |(tokens, echo): (usize, String)| Choice {
            assembly: Assembly::new(tokens, head.with_chances),
            offset: echo.chars().count(),
            echo,
            finish: None,
        };
        Completion { choices: prompts.into_iter().map(choice).collect(), head, each }
    }

    /// A chunk with text of an answer, and the chances of the tokens that are new.
    fn chunk(&mut self, at: usize, text: &str, from: usize) -> Value {
        let choice = &mut self.choices[at];
        let tokens = choice.assembly.chances.get(from..).unwrap_or_default();
        let logprobs = match self.head.with_chances && !tokens.is_empty() {
            true => for_completion(tokens, choice.offset),
            false => Value::Null,
        };
        let length = |token: &crate::assembly::TokenChances| {
            String::from_utf8_lossy(&token.chosen.0).chars().count()
        };
        choice.offset += tokens.iter().map(length).sum::<usize>();
        let chunk = json!({
            "text": text, "index": at, "logprobs": logprobs, "finish_reason": choice.finish,
        });
        let timings = self.head.timings.then(|| choice.assembly.timings());
        self.head.chunk(chunk, timings)
    }

    fn piece(&mut self, at: usize, piece: &ServedPiece) -> Result<Vec<Value>> {
        let Choice { assembly, .. } = &mut self.choices[at];
        if let Some(correction) = &piece.corrects {
            let sent = assembly.text.len() > correction.text;
            let chances = self.head.with_chances && assembly.tokens > correction.token;
            if self.head.stream && (sent || chances) {
                return Err(wrong_text(correction));
            }
            assembly.correct(correction);
        }
        let from = assembly.chances.len();
        assembly.add(self.head.model.tokenizer(), piece, None);
        let new = !piece.text.is_empty() || assembly.chances.len() > from || self.head.timings;
        if !self.head.stream || !new {
            return Ok(Vec::new());
        }
        Ok(vec![self.chunk(at, &piece.text, from)])
    }

    /// Tokens of prompts, of these without work, and of answers.
    fn usage(&self) -> Value {
        let first = self.choices.iter().step_by(self.each.max(1));
        let (mut prompt, mut cached) = (0, 0);
        for choice in first {
            let (tokens, without) = choice.assembly.prompt_tokens();
            (prompt, cached) = (prompt + tokens, cached + without);
        }
        let answers = self.choices.iter().map(|choice| choice.assembly.tokens);
        usage(prompt, cached, answers.sum())
    }
}

impl Reply for Completion {
    fn hear(&mut self, at: usize, update: Update, _: &mut Vec<usize>) -> Result<Vec<Value>> {
        let choice = &mut self.choices[at];
        match update {
            Update::Begun { cached_tokens } => {
                choice.assembly.begin(cached_tokens);
                if !self.head.stream || choice.echo.is_empty() {
                    return Ok(Vec::new());
                }
                let echo = choice.echo.clone();
                Ok(vec![self.chunk(at, &echo, usize::MAX)])
            }
            Update::Piece(piece) => self.piece(at, &piece),
            Update::Done(done) => {
                choice.finish = Some(finish_reason(done.reason)?);
                choice.assembly.done = Some(done);
                if !self.head.stream {
                    return Ok(Vec::new());
                }
                let timings = choice.assembly.timings();
                let mut chunk = self.chunk(at, "", usize::MAX);
                chunk["timings"] = timings;
                Ok(vec![chunk])
            }
            Update::Failed { what, is_request } => Err(ApiError::failed(&what, is_request)),
            _ => Ok(Vec::new()),
        }
    }

    fn last(&mut self) -> Option<Value> {
        self.head.usage.then(|| self.head.last(self.usage()))
    }

    fn whole(&mut self) -> Value {
        let with_chances = self.head.with_chances;
        let choice = |(at, choice): (usize, &Choice)| {
            let Choice { echo, assembly, finish, .. } = choice;
            let chances = &assembly.chances;
            let logprobs = if with_chances {
                for_completion(chances, echo.chars().count())
            } else {
                Value::Null
            };
            json!({
                "text": format!("{echo}{}", assembly.text), "index": at, "logprobs": logprobs,
                "finish_reason": finish,
            })
        };
        let choices = self.choices.iter().enumerate().map(choice).collect();
        let timings = (self.choices.len() == 1).then(|| self.choices[0].assembly.timings());
        self.head.whole(choices, self.usage(), timings)
    }
}
