// SPDX-License-Identifier: Apache-2.0
//! What every object of an answer begins with: its number, when, and which model; and what of it is asked for.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use spanker_engine::Model;

/// What the edge runs, for clients that compare answers.
const FINGERPRINT: &str = concat!("spanker-", env!("CARGO_PKG_VERSION"));

/// What every object of an answer has.
pub(crate) struct Head {
    pub(crate) id: String,
    created: u64,
    name: String,
    pub(crate) model: Arc<Model>,
    /// What the object is, and a chunk of it.
    objects: [&'static str; 2],
    pub(crate) stream: bool,
    /// Whether a stream ends with the number of tokens.
    pub(crate) usage: bool,
    /// Whether every chunk has timings.
    pub(crate) timings: bool,
    /// Whether tokens come with their chances.
    pub(crate) with_chances: bool,
}

impl Head {
    /// For a new answer of the model with this name.
    pub(crate) fn new(
        (prefix, objects): (&str, [&'static str; 2]),
        (model, name): (Arc<Model>, String),
        wanted: &crate::request::Wanted,
        with_chances: bool,
    ) -> Head {
        Head {
            id: format!("{prefix}-{}", unique(24)),
            created: now(),
            name,
            model,
            objects,
            stream: wanted.stream,
            usage: wanted.usage,
            timings: wanted.timings,
            with_chances,
        }
    }

    fn object(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.name,
            "system_fingerprint": FINGERPRINT, "choices": choices,
        })
    }

    /// A chunk of a stream with one choice.
    pub(crate) fn chunk(&self, choice: Value, timings: Option<Value>) -> Value {
        let mut chunk = self.object(self.objects[1], Value::Array(vec![choice]));
        if self.usage {
            chunk["usage"] = Value::Null;
        }
        if let Some(timings) = timings {
            chunk["timings"] = timings;
        }
        chunk
    }

    /// The chunk that says how many tokens there were.
    pub(crate) fn last(&self, usage: Value) -> Value {
        let mut chunk = self.object(self.objects[1], json!([]));
        chunk["usage"] = usage;
        chunk
    }

    /// The whole answer.
    pub(crate) fn whole(&self, choices: Value, usage: Value, timings: Option<Value>) -> Value {
        let mut whole = self.object(self.objects[0], choices);
        whole["usage"] = usage;
        if let Some(timings) = timings {
            whole["timings"] = timings;
        }
        whole
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Letters and digits that have not been there before.
pub(crate) fn unique(length: usize) -> String {
    const LETTERS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (keys, number) = (std::hash::RandomState::new(), NEXT.fetch_add(1, Ordering::Relaxed));
    let mut text = String::with_capacity(length);
    for part in 0u64.. {
        let mut bits = keys.hash_one((number, part));
        for _ in 0..12 {
            if text.len() == length {
                return text;
            }
            text.push(char::from(LETTERS[(bits % 36) as usize]));
            bits /= 36;
        }
    }
    text
}
