// SPDX-License-Identifier: Apache-2.0
//! One answer as it comes: its text, its tokens with their chances, what was wrong of it and is right now, and how long
//! it took.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use spanker_engine::{Chance, Correction, Done, ServedPiece};
use spanker_text::Tokenizer;

/// What stands for a probability of nothing: JSON has no infinity.
const LEAST_LOGPROB: f32 = -9999.0;

/// A token with its chances, as people read them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenChances {
    pub(crate) chosen: (Vec<u8>, f32),
    pub(crate) best: Vec<(Vec<u8>, f32)>,
}

impl TokenChances {
    fn of(tokenizer: &Tokenizer, token: u32, chances: &[Chance]) -> TokenChances {
        let named = |chance: &Chance| {
            let bytes = tokenizer.piece(chance.token).to_vec();
            (bytes, if chance.logprob.is_finite() { chance.logprob } else { LEAST_LOGPROB })
        };
        let (chosen, best) = match chances.split_first() {
            Some((chosen, best)) => (named(chosen), best.iter().map(named).collect()),
            None => ((tokenizer.piece(token).to_vec(), LEAST_LOGPROB), Vec::new()),
        };
        TokenChances { chosen, best }
    }

    /// As chats have it.
    pub(crate) fn for_chat(&self) -> Value {
        let one = |(bytes, logprob): &(Vec<u8>, f32)| json!({ "token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes });
        let mut entry = one(&self.chosen);
        entry["top_logprobs"] = self.best.iter().map(one).collect();
        entry
    }
}

/// Tokens with their chances, as completions have them; the first begins after so many characters.
pub(crate) fn for_completion(tokens: &[TokenChances], mut offset: usize) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut offsets = Vec::new();
    for token in tokens {
        offsets.push(offset);
        offset += text(&token.chosen.0).chars().count();
    }
    let best = |token: &TokenChances| -> Value {
        let chosen = std::iter::once(&token.chosen).filter(|_| token.best.is_empty());
        let best = token.best.iter().chain(chosen);
        best.map(|(bytes, logprob)| (text(bytes), Value::from(*logprob))).collect()
    };
    json!({
        "tokens": tokens.iter().map(|token| text(&token.chosen.0)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.chosen.1).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(best).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

/// An answer as it comes.
#[derive(Debug)]
pub(crate) struct Assembly {
    pub(crate) text: String,
    /// Marks that are special tokens, which the text does not have: where, before which token, and as what.
    marks: Vec<(usize, usize, &'static str)>,
    /// Tokens up to now.
    pub(crate) tokens: usize,
    /// Their chances, if they were asked for.
    pub(crate) chances: Vec<TokenChances>,
    with_chances: bool,
    prompt_tokens: usize,
    cached_tokens: usize,
    begun: Option<Instant>,
    first: Option<Instant>,
    pub(crate) done: Option<Done>,
}

impl Assembly {
    pub(crate) fn new(prompt_tokens: usize, with_chances: bool) -> Assembly {
        Assembly {
            text: String::new(),
            marks: Vec::new(),
            tokens: 0,
            chances: Vec::new(),
            with_chances,
            prompt_tokens,
            cached_tokens: 0,
            begun: None,
            first: None,
            done: None,
        }
    }

    /// Its turn has come.
    pub(crate) fn begin(&mut self, cached_tokens: usize) {
        self.cached_tokens = cached_tokens;
        self.begun = Some(Instant::now());
    }

    /// Takes back what was wrong.
    pub(crate) fn correct(&mut self, correction: &Correction) {
        self.text.truncate(correction.text);
        self.tokens = correction.token;
        self.chances.truncate(correction.token);
        self.marks.retain(|(at, token, _)| *token < correction.token && *at <= correction.text);
    }

    /// Adds what is new. A correction comes before.
    pub(crate) fn add(
        &mut self,
        tokenizer: &Tokenizer,
        piece: &ServedPiece,
        mark: Option<&'static str>,
    ) {
        self.text += &piece.text;
        let Some(token) = piece.token else { return };
        self.first.get_or_insert_with(Instant::now);
        if let Some(mark) = mark {
            self.marks.push((self.text.len(), self.tokens, mark));
        }
        self.tokens += 1;
        if self.with_chances {
            self.chances.push(TokenChances::of(tokenizer, token, &piece.chances));
        }
    }

    /// The text with its marks.
    pub(crate) fn marked(&self) -> String {
        let mut marked = String::with_capacity(self.text.len());
        let mut from = 0;
        for (at, _, mark) in &self.marks {
            marked += self.text.get(from..*at).unwrap_or_default();
            marked += mark;
            from = *at;
        }
        marked + self.text.get(from..).unwrap_or_default()
    }

    /// Tokens of the prompt, and those of them that need not be computed.
    pub(crate) fn prompt_tokens(&self) -> (usize, usize) {
        match &self.done {
            Some(done) => (done.prompt_tokens, done.cached_tokens),
            None => (self.prompt_tokens, self.cached_tokens),
        }
    }

    /// How long it took up to now, as llama.cpp says it.
    pub(crate) fn timings(&self) -> Value {
        let (prompt_tokens, cached) = self.prompt_tokens();
        let (prompt, generation, tokens) = match (&self.done, self.begun, self.first) {
            (Some(done), ..) => (done.prompt, done.generation, done.tokens),
            (None, Some(begun), Some(first)) => (first - begun, first.elapsed(), self.tokens),
            _ => (Duration::ZERO, Duration::ZERO, 0),
        };
        let prompt_n = prompt_tokens.saturating_sub(cached);
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let each = |time: Duration, count: usize| milliseconds(time) / count.max(1) as f64;
        let rate = |time: Duration, count: usize| match time.as_secs_f64() {
            0.0 => 0.0,
            seconds => count as f64 / seconds,
        };
        json!({
            "cache_n": cached,
            "prompt_n": prompt_n,
            "prompt_ms": milliseconds(prompt),
            "prompt_per_token_ms": each(prompt, prompt_n),
            "prompt_per_second": rate(prompt, prompt_n),
            "predicted_n": tokens,
            "predicted_ms": milliseconds(generation),
            "predicted_per_token_ms": each(generation, tokens),
            "predicted_per_second": rate(generation, tokens),
        })
    }
}

/// How many tokens there were: of prompts, of these without work, and of answers.
pub(crate) fn usage(prompt: usize, cached: usize, answer: usize) -> Value {
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}
