// SPDX-License-Identifier: Apache-2.0
//! What is asked of a plan.

use std::fmt;

use serde::{Deserialize, Serialize};
use spanker_model::{KvShape, Model, Quant};

use crate::program::{Audit, Space, USUAL_AUDIT, WindowCache};

/// What a plan should be best at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Objective {
    /// The shortest time from token to token.
    Latency,
    /// The most tokens per second over all sequences.
    Throughput,
    /// The shortest time to the first token of a prompt.
    Ttft,
}

impl Objective {
    /// Every objective, in the order in which help texts list them.
    pub const ALL: [Objective; 3] = [Objective::Latency, Objective::Throughput, Objective::Ttft];

    /// The name that flags and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Objective::Latency => "latency",
            Objective::Throughput => "throughput",
            Objective::Ttft => "ttft",
        }
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is asked of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// What it should be best at.
    pub objective: Objective,
    /// Sequences at a time: decoded together for latency, served at the same time for throughput.
    pub sequences: u64,
    /// Tokens that each sequence must have room for.
    pub context: u64,
    /// Tokens of the prompt that the time to the first token is for.
    pub prompt: u64,
    /// Tokens that are already there when the priced token is decoded.
    pub position: u64,
    /// How keys and values are stored.
    pub kv: Quant,
    /// Rows that a card works on at a time: longer prompts go through in pieces.
    #[serde(default = "usual_batch")]
    pub batch: u64,
    /// Guessed tokens of all sequences of a copy that a step can check at most: rows whose results are asked for besides
    /// one of each sequence.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub guesses: u64,
    /// Blocks of keys and values that all sequences of a copy of the model share; nothing for what they need at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
    /// The part of the work that is computed a second time and compared: 0 is nothing, 1 everything.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub audit: f64,
}

/// Rows of a step where nobody asks for another number.
pub const USUAL_BATCH: u64 = 128;

fn is_nothing(part: &f64) -> bool {
    *part == 0.0
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn usual_batch() -> u64 {
    USUAL_BATCH
}

impl Request {
    /// One sequence of 2,048 tokens with 16-bit keys and values, priced at its first token.
    #[must_use]
    pub fn new(objective: Objective) -> Request {
        let (kv, batch) = (Quant::F16, USUAL_BATCH);
        let (sequences, context, prompt, position, blocks) = (1, 2048, 512, 0, None);
        let (audit, guesses) = (0.0, 0);
        Request {
            objective,
            sequences,
            context,
            prompt,
            position,
            kv,
            batch,
            guesses,
            blocks,
            audit,
        }
    }

    /// Blocks of keys and values for so many sequences.
    #[must_use]
    pub fn blocks_for(&self, sequences: u64) -> u64 {
        self.blocks.unwrap_or_else(|| sequences.saturating_mul(KvShape::blocks_for(self.context)))
    }

    /// Bytes that keys and values of a model take on all cards together, where each of its heads is on one.
    #[must_use]
    pub fn kv_bytes(&self, model: &Model) -> u64 {
        let Request { context, sequences, kv, .. } = *self;
        let batch = self.batch.min(context).max(sequences);
        let of = Space::of(context, batch, sequences, Audit::NONE);
        let space = Space { kv, blocks: self.blocks_for(sequences), ..of };
        let kept = KvShape { heads: model.kv_heads, head_size: model.head_size, quant: kv };
        let windows = WindowCache::of(model, space);
        let blocks =
            model.layers.iter().map(|layer| WindowCache::of_layer(windows, layer.window, space));
        blocks.fold(0u64, u64::saturating_add).saturating_mul(kept.block_bytes())
    }

    /// Rows of a step that something is asked for at most, where so many sequences go through together.
    #[must_use]
    pub fn outputs_for(&self, sequences: u64) -> u64 {
        sequences.saturating_add(self.guesses).min(self.batch.min(self.context).max(sequences))
    }

    /// How many operators of a step are checked on each card. Where everything is computed twice, these say
    /// which card was wrong.
    #[must_use]
    pub fn taps(&self) -> Audit {
        if self.audit >= 1.0 { Audit::of(USUAL_AUDIT) } else { Audit::of(self.audit) }
    }

    /// What is wrong with the request, if anything.
    ///
    /// # Errors
    /// A sentence that names the value.
    pub fn check(&self) -> Result<(), String> {
        let bound = |what: &str, value: u64, low: u64, high: u64| match value {
            v if (low..=high).contains(&v) => Ok(()),
            v => Err(format!("{what} {v} is not between {low} and {high}")),
        };
        bound("a batch of", self.sequences, 1, 1 << 16)?;
        bound("a context of", self.context, 1, 1 << 25)?;
        bound("steps of", self.batch, 1, 1 << 16)?;
        bound("guesses", self.guesses, 0, 1 << 16)?;
        bound("a prompt of", self.prompt, 1, 1 << 25)?;
        if !(0.0..=1.0).contains(&self.audit) {
            return Err(format!("an audit of {} is not between 0 and 1", self.audit));
        }
        if self.prompt > self.context {
            let (prompt, context) = (self.prompt, self.context);
            return Err(format!("a prompt of {prompt} tokens exceeds the context of {context}"));
        }
        if self.position >= self.context {
            let (position, context) = (self.position, self.context);
            return Err(format!("position {position} is not inside the context of {context}"));
        }
        let one = KvShape::blocks_for(self.context);
        if let Some(blocks) = self.blocks.filter(|&blocks| blocks < one) {
            let context = self.context;
            return Err(format!(
                "{blocks} blocks of keys and values, and a context of {context} needs {one}"
            ));
        }
        KvShape { heads: 1, head_size: 32, quant: self.kv }.check()
    }

    /// The same for a model, whose heads must have room for what keys and values are stored as.
    ///
    /// # Errors
    /// A sentence that names the value.
    pub fn check_for(&self, model: &Model) -> Result<(), String> {
        self.check()?;
        KvShape { heads: 1, head_size: model.head_size, quant: self.kv }.check()
    }
}
