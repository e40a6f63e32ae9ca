// SPDX-License-Identifier: Apache-2.0
//! What runs programs: one step of a sequence at a time, wherever the cards are.

use std::time::Duration;

use crate::LlmError;

/// What a step should give back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Nothing: more of the prompt follows.
    Nothing,
    /// The best candidates for the next token, at most so many of each card.
    Best(u32),
    /// All logits.
    Logits,
}

/// Tokens that go through the model together.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Tokens before them.
    pub past: usize,
    /// What is asked for after the last of them.
    pub want: Want,
}

/// Where a step's time went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timing {
    /// By the host's clock.
    pub wall: Duration,
    /// By the cards' clocks, where these show what the work costs.
    pub card: Option<Duration>,
    /// Of that (or of the wall time, without such clocks) on exchanges and waiting for other cards: the mean
    /// over cards.
    pub sync: Duration,
    /// Bytes that cards sent to other cards.
    pub sent: u64,
}

/// What a step gave back.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Candidates with their logits, best first, the lowest token first among equals.
    pub best: Vec<(u32, f32)>,
    /// All logits, if they were asked for.
    pub logits: Option<Vec<f32>>,
    /// Where the time went.
    pub timing: Timing,
}

/// Cards with a model on them, and one sequence.
pub trait Runner {
    /// Runs a step. Positions from `step.past` on are written; those before must have been.
    ///
    /// # Errors
    /// [`LlmError::Context`] and [`LlmError::Token`] for a step that cannot be; [`LlmError::Device`] for a
    /// card that failed, after which this runner is of no more use.
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError>;

    /// Tokens that a step takes at most.
    fn batch(&self) -> usize;
}
