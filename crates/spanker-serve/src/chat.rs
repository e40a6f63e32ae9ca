// SPDX-License-Identifier: Apache-2.0
//! Answers to `/v1/chat/completions`: messages, with the tools that they call.

use serde_json::{Value, json};
use spanker_engine::{ServedPiece, Update};

use crate::assembly::{Assembly, usage};
use crate::error::{ApiError, Result};
use crate::head::{Head, unique};
use crate::reply::{Reply, finish_reason, wrong_text};
use crate::tools::{Event, Parser, Style};

/// How tools are called in the answers of a request.
#[derive(Debug, Clone)]
pub(crate) struct Calling {
    pub(crate) style: Style,
    /// Whether the answer has to be a call.
    pub(crate) forced: bool,
    /// Whether there may be several.
    pub(crate) parallel: bool,
    pub(crate) names: Vec<String>,
}

impl Calling {
    fn parser(&self) -> Parser {
        Parser::new(self.style, self.forced, self.names.clone())
    }
}

/// A call in an answer.
struct Call {
    id: String,
    name: String,
    arguments: String,
}

/// One of the answers.
struct Choice {
    assembly: Assembly,
    parser: Option<Parser>,
    /// Bytes of the text that were there when something was last sent.
    sent: usize,
    /// Tokens whose chances were sent.
    sent_tokens: usize,
    /// What is said, beside calls.
    content: String,
    calls: Vec<Call>,
    /// Whether it need not go on.
    is_over: bool,
    finish: Option<&'static str>,
}

/// The answers of a request.
pub(crate) struct Chat {
    head: Head,
    calling: Option<Calling>,
    choices: Vec<Choice>,
}

impl Chat {
    /// Before any of so many answers.
    pub(crate) fn new(
        head: Head,
        calling: Option<Calling>,
        answers: usize,
        prompt_tokens: usize,
    ) -> Chat {
        let choice = |_| Choice {
            assembly: Assembly::new(prompt_tokens, head.with_chances),
            parser: calling.as_ref().map(Calling::parser),
            sent: 0,
            sent_tokens: 0,
            content: String::new(),
            calls: Vec::new(),
            is_over: false,
            finish: None,
        };
        Chat { choices: (0..answers).map(choice).collect(), head, calling }
    }

    /// A chunk of an answer.
    fn chunk(&mut self, at: usize, delta: Value) -> Value {
        let choice = &mut self.choices[at];
        let chances = choice.assembly.chances.get(choice.sent_tokens..).unwrap_or_default();
        let logprobs = match self.head.with_chances && !chances.is_empty() {
            true => {
                let content: Vec<Value> = chances.iter().map(|token| token.for_chat()).collect();
                json!({ "content": content, "refusal": null })
            }
            false => Value::Null,
        };
        choice.sent = choice.assembly.text.len();
        choice.sent_tokens = choice.assembly.tokens;
        let timings = self.head.timings.then(|| choice.assembly.timings());
        let chunk = json!({
            "index": at, "delta": delta, "logprobs": logprobs, "finish_reason": choice.finish,
        });
        self.head.chunk(chunk, timings)
    }

    fn piece(
        &mut self,
        at: usize,
        piece: &ServedPiece,
        ended: &mut Vec<usize>,
    ) -> Result<Vec<Value>> {
        let Choice { assembly, parser, sent, sent_tokens, is_over, .. } = &mut self.choices[at];
        if let Some(correction) = &piece.corrects {
            let chances = self.head.with_chances && *sent_tokens > correction.token;
            if self.head.stream && (*sent > correction.text || chances) {
                return Err(wrong_text(correction));
            }
            assembly.correct(correction);
            if let (Some(parser), Some(calling)) = (parser.as_mut(), &self.calling) {
                *parser = calling.parser();
                // What comes of it was sent before.
                parser.push(&assembly.marked());
                *is_over = !calling.parallel && parser.calls() > 0;
            }
        }
        let tokenizer = self.head.model.tokenizer();
        let mark = piece.token.filter(|&token| tokenizer.is_control(token));
        let mark = mark.and_then(|token| parser.as_ref()?.mark(tokenizer.piece(token)));
        assembly.add(tokenizer, piece, mark);
        if *is_over || !self.head.stream {
            return Ok(Vec::new());
        }
        let events = match parser {
            None => vec![Event::Text(piece.text.clone())],
            Some(parser) => {
                let mut events = parser.push(&piece.text);
                events.extend(mark.map(|mark| parser.push(mark)).unwrap_or_default());
                events
            }
        };
        Ok(self.tell(at, events, ended))
    }

    /// Chunks of what has come of an answer.
    fn tell(&mut self, at: usize, events: Vec<Event>, ended: &mut Vec<usize>) -> Vec<Value> {
        let mut chunks = Vec::new();
        for event in events {
            if self.choices[at].is_over {
                break;
            }
            let choice = &mut self.choices[at];
            let call = choice.calls.len();
            let delta = match event {
                Event::Text(text) if text.is_empty() => continue,
                Event::Text(text) => json!({ "content": text }),
                Event::Call { name } => {
                    let function = json!({ "name": name, "arguments": "" });
                    let id = unique(9);
                    let begun = json!({ "index": call, "id": id, "type": "function", "function": function });
                    choice.calls.push(Call { id, name, arguments: String::new() });
                    json!({ "tool_calls": [begun] })
                }
                Event::Arguments(text) => {
                    let function = json!({ "arguments": text });
                    json!({ "tool_calls": [{ "index": call.saturating_sub(1), "function": function }] })
                }
                Event::End => {
                    if self.calling.as_ref().is_some_and(|calling| !calling.parallel) {
                        choice.is_over = true;
                        ended.push(at);
                    }
                    continue;
                }
            };
            chunks.push(self.chunk(at, delta));
        }
        let choice = &self.choices[at];
        let chances = self.head.with_chances && choice.assembly.tokens > choice.sent_tokens;
        // Tokens without text of their own are told of as well where somebody counts them.
        if chunks.is_empty()
            && !choice.is_over
            && (self.head.timings || chances && choice.parser.is_none())
        {
            chunks.push(self.chunk(at, json!({ "content": "" })));
        }
        chunks
    }

    fn done(
        &mut self,
        at: usize,
        done: spanker_engine::Done,
        ended: &mut Vec<usize>,
    ) -> Result<Vec<Value>> {
        let reason = done.reason;
        self.choices[at].assembly.done = Some(done);
        let mut chunks = Vec::new();
        if self.head.stream {
            let held = self.choices[at].parser.as_mut().map(Parser::finish).unwrap_or_default();
            chunks = self.tell(at, held, ended);
        } else {
            self.read(at);
        }
        let choice = &mut self.choices[at];
        let cut = matches!(
            reason,
            spanker_engine::FinishReason::Length | spanker_engine::FinishReason::Context
        );
        choice.finish = Some(match choice.calls.is_empty() || (cut && !choice.is_over) {
            true => finish_reason(reason)?,
            false => "tool_calls",
        });
        if self.head.stream {
            let timings = choice.assembly.timings();
            let mut chunk = self.chunk(at, json!({}));
            chunk["timings"] = timings;
            chunks.push(chunk);
        }
        Ok(chunks)
    }

    /// What a whole answer says and calls.
    fn read(&mut self, at: usize) {
        let Choice { assembly, content, calls, .. } = &mut self.choices[at];
        let Some(calling) = &self.calling else {
            content.clone_from(&assembly.text);
            return;
        };
        let mut parser = calling.parser();
        let mut events = parser.push(&assembly.marked());
        events.extend(parser.finish());
        for event in events {
            match event {
                Event::Text(text) => content.push_str(&text),
                Event::Call { name } => {
                    calls.push(Call { id: unique(9), name, arguments: String::new() });
                }
                Event::Arguments(text) => {
                    if let Some(call) = calls.last_mut() {
                        call.arguments += &text;
                    }
                }
                Event::End if !calling.parallel => break,
                Event::End => {}
            }
        }
    }

    fn usage(&self) -> Value {
        let (prompt, cached) =
            self.choices.first().map_or((0, 0), |one| one.assembly.prompt_tokens());
        usage(prompt, cached, self.choices.iter().map(|choice| choice.assembly.tokens).sum())
    }
}

impl Reply for Chat {
    fn hear(&mut self, at: usize, update: Update, ended: &mut Vec<usize>) -> Result<Vec<Value>> {
        match update {
            Update::Begun { cached_tokens } => {
                self.choices[at].assembly.begin(cached_tokens);
                let first = json!({ "role": "assistant", "content": "" });
                Ok(self.head.stream.then(|| self.chunk(at, first)).into_iter().collect())
            }
            Update::Piece(piece) => self.piece(at, &piece, ended),
            Update::Done(done) => self.done(at, done, ended),
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
            let calls = choice.calls.iter().map(|Call { id, name, arguments }| {
                json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
            });
            let calls: Vec<Value> = calls.collect();
            let is_said = calls.is_empty() || !choice.content.is_empty();
            let content = is_said.then_some(choice.content.as_str());
            let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            let chances: Vec<Value> =
                choice.assembly.chances.iter().map(|token| token.for_chat()).collect();
            let logprobs = with_chances.then(|| json!({ "content": chances, "refusal": null }));
            json!({
                "index": at, "message": message, "logprobs": logprobs, "finish_reason": choice.finish,
            })
        };
        let choices = self.choices.iter().enumerate().map(choice).collect();
        let timings = (self.choices.len() == 1).then(|| self.choices[0].assembly.timings());
        self.head.whole(choices, self.usage(), timings)
    }
}
