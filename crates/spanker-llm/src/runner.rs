// SPDX-License-Identifier: Apache-2.0
//! What runs programs: one step of a sequence at a time, wherever the cards are.

use std::time::Duration;

use spanker_plan::Want;

use crate::LlmError;

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

impl Timing {
    /// One after the other.
    #[must_use]
    pub fn plus(self, other: Timing) -> Timing {
        Timing {
            wall: self.wall + other.wall,
            card: match (self.card, other.card) {
                (Some(one), Some(two)) => Some(one + two),
                (one, two) => one.or(two),
            },
            sync: self.sync + other.sync,
            sent: self.sent + other.sent,
        }
    }

    /// By the cards' clocks, or else by the host's.
    #[must_use]
    pub fn time(&self) -> Duration {
        self.card.unwrap_or(self.wall)
    }
}

/// What a card was planned to allocate for a model, and what it has allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// The card.
    pub card: usize,
    /// Bytes by the plan, in whole pages.
    pub planned: u64,
    /// Bytes by who allocated them.
    pub allocated: u64,
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
    /// [`LlmError::Context`], [`LlmError::Token`], [`LlmError::Plan`] and [`LlmError::Unsupported`] for a step
    /// that cannot be; [`LlmError::Device`] for a
    /// card and [`LlmError::Fabric`] for a rank that failed, after which this runner is of no more use.
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError>;

    /// Tokens that a step takes at most.
    fn batch(&self) -> usize;

    /// Lets cards that would lose timeout know that there is more to come. Most have nobody to tell.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if a rank does not answer.
    fn heartbeat(&mut self) -> Result<(), LlmError> {
        Ok(())
    }
}

/// Reads candidates of several cards, the best first: at most `k`.
pub(crate) fn candidates(bytes: &[u8], k: usize) -> Vec<(u32, f32)> {
    let pairs = bytes.as_chunks::<8>().0.iter().map(|&[a, b, c, d, e, f, g, h]| {
        (u32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]))
    });
    // A card with fewer logits than candidates fills up with a token that is none.
    merged(pairs.filter(|&(token, _)| token != u32::MAX).collect(), k)
}

/// The best of candidates of several cards, the best first.
pub(crate) fn merged(mut all: Vec<(u32, f32)>, k: usize) -> Vec<(u32, f32)> {
    let key = |value: f32| if value.is_nan() { f32::NEG_INFINITY } else { value };
    all.sort_by(|a, b| {
        key(b.1).total_cmp(&key(a.1)).then(a.1.is_nan().cmp(&b.1.is_nan())).then(a.0.cmp(&b.0))
    });
    all.truncate(k);
    all
}
