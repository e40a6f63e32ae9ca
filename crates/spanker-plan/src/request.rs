// SPDX-License-Identifier: Apache-2.0
//! What is asked of a plan.

use std::fmt;

use serde::{Deserialize, Serialize};
use spanker_model::Quant;

use crate::program::{Audit, USUAL_AUDIT};

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
    /// The part of the work that is computed a second time and compared: 0 is nothing, 1 everything.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub audit: f64,
}

/// Rows of a step where nobody asks for another number.
pub const USUAL_BATCH: u64 = 128;

fn is_nothing(part: &f64) -> bool {
    *part == 0.0
}

fn usual_batch() -> u64 {
    USUAL_BATCH
}

impl Request {
    /// One sequence of 2,048 tokens with 16-bit keys and values, priced at its first token.
    #[must_use]
    pub fn new(objective: Objective) -> Request {
        let (kv, batch) = (Quant::F16, USUAL_BATCH);
        let (sequences, context, prompt, position, audit) = (1, 2048, 512, 0, 0.0);
        Request { objective, sequences, context, prompt, position, kv, batch, audit }
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
        match self.kv {
            Quant::F16 => Ok(()),
            other => Err(format!("keys and values as {other}: f16 is what runs")),
        }
    }
}
