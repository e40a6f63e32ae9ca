// SPDX-License-Identifier: Apache-2.0
//! What is asked of a plan.

use std::fmt;

use serde::{Deserialize, Serialize};
use spanker_model::Quant;

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
}

impl Request {
    /// One sequence of 2,048 tokens with 16-bit keys and values, priced at its first token.
    #[must_use]
    pub fn new(objective: Objective) -> Request {
        Request { objective, sequences: 1, context: 2048, prompt: 512, position: 0, kv: Quant::F16 }
    }

    /// Tokens of a prompt that a card works on at a time.
    #[must_use]
    pub fn prefill_tokens(&self) -> u64 {
        self.prompt.clamp(1, MAX_PREFILL)
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
        bound("a prompt of", self.prompt, 1, 1 << 25)?;
        if self.prompt > self.context {
            let (prompt, context) = (self.prompt, self.context);
            return Err(format!("a prompt of {prompt} tokens exceeds the context of {context}"));
        }
        if self.position >= self.context {
            let (position, context) = (self.position, self.context);
            return Err(format!("position {position} is not inside the context of {context}"));
        }
        match self.kv {
            Quant::F32 | Quant::F16 | Quant::Bf16 | Quant::Q8_0 => Ok(()),
            other => {
                Err(format!("keys and values as {other}: f32, f16, bf16 and q8_0 are possible"))
            }
        }
    }
}

/// The most tokens of a prompt that a card works on at a time: longer prompts go through in pieces.
pub(crate) const MAX_PREFILL: u64 = 512;
