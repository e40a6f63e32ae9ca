// SPDX-License-Identifier: Apache-2.0
//! What runs programs: steps of any number of sequences, wherever the cards are.

use std::time::Duration;

use spanker_model::KvShape;
pub use spanker_plan::{Part, Step};
use spanker_plan::{Want, WindowCache};

use crate::LlmError;

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

/// What was asked for after a token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Output {
    /// Candidates with their logits, best first, the lowest token first among equals.
    pub best: Vec<(u32, f32)>,
    /// All logits, if they were asked for.
    pub logits: Option<Vec<f32>>,
}

/// What a step gave back.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// What its parts asked for, part by part.
    pub outputs: Vec<Output>,
    /// Where the time went.
    pub timing: Timing,
    /// How long each card of the plan exchanged and waited for others, where that is known.
    pub waits: Vec<(usize, Duration)>,
}

impl Outcome {
    /// What was asked for last; nothing if nothing was.
    #[must_use]
    pub fn last(&self) -> &Output {
        const NOTHING: &Output = &Output { best: Vec::new(), logits: None };
        self.outputs.last().unwrap_or(NOTHING)
    }
}

/// Cards with a model on them, and the KV cache of any number of sequences.
pub trait Runner {
    /// Begins a step. Positions of its parts are written; those before must have been, by steps that have begun. No more
    /// than [`Runner::depth`] steps are under way at a time, and none in which a sequence needs another's output.
    ///
    /// # Errors
    /// [`LlmError::Context`], [`LlmError::Token`], [`LlmError::Plan`] and [`LlmError::Unsupported`] for a step
    /// that cannot be; [`LlmError::Device`] for a card and [`LlmError::Fabric`] for a rank that failed, after which this
    /// runner is of no more use.
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError>;

    /// Waits for the step that began first of those under way.
    ///
    /// # Errors
    /// As [`Runner::begin`].
    fn end(&mut self) -> Result<Outcome, LlmError>;

    /// Tokens that a step takes at most.
    fn batch(&self) -> usize;

    /// Steps that can be under way at a time: in a pipeline one for each stage.
    fn depth(&self) -> usize {
        1
    }

    /// What layers with a window keep, where that is not everything: a sequence that goes back to an earlier position must
    /// not have written over what is seen from there.
    fn windows(&self) -> Option<WindowCache> {
        None
    }

    /// Runs a step.
    ///
    /// # Errors
    /// As [`Runner::begin`].
    fn step(&mut self, step: &Step<'_>) -> Result<Outcome, LlmError> {
        self.begin(step)?;
        self.end()
    }

    /// Runs tokens of the only sequence that there is, whose blocks are all in order.
    ///
    /// # Errors
    /// As [`Runner::begin`].
    fn step_alone(&mut self, tokens: &[u32], past: usize, want: Want) -> Result<Outcome, LlmError> {
        let blocks = KvShape::blocks_for((past + tokens.len()) as u64) as u32;
        let blocks: Vec<u32> = (0..blocks).collect();
        self.step(&Step::of(&[Part::new(tokens, past as u64, &blocks, want)]))
    }

    /// Lets cards that would lose timeout know that there is more to come. Most have nobody to tell.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if a rank does not answer.
    fn heartbeat(&mut self) -> Result<(), LlmError> {
        Ok(())
    }
}

/// What a step asks for, without its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Tokens before the step: those of its first part.
    pub(crate) past: usize,
    /// What is asked for, for each output.
    wants: Vec<Want>,
}

impl Asked {
    pub(crate) fn of(step: &Step<'_>) -> Asked {
        let past = step.parts.first().map_or(0, |part| part.past as usize);
        let wants = step.parts.iter().flat_map(|part| (0..part.asked()).map(|_| part.want));
        Asked { past, wants: wants.collect() }
    }
}

/// What cards of the last stage give back for a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Given {
    /// Candidates of all cards.
    pub(crate) best: Vec<u8>,
    /// Logits of each card.
    pub(crate) logits: Vec<Vec<u8>>,
}

impl Given {
    /// What was asked for, output by output.
    pub(crate) fn outputs(&self, asked: &Asked) -> Vec<Output> {
        let count = asked.wants.len();
        let part = |bytes: &[u8], at: usize| {
            let each = bytes.len() / count;
            at * each..(at + 1) * each
        };
        let output = |(at, want): (usize, &Want)| match *want {
            Want::Nothing => Output::default(),
            Want::Best(k) => {
                let best = candidates(&self.best[part(&self.best, at)], k as usize);
                Output { best, logits: None }
            }
            Want::Logits => {
                let words = self.logits.iter().flat_map(|card| {
                    card[part(card, at)].as_chunks().0.iter().map(|&word| f32::from_le_bytes(word))
                });
                Output { best: Vec::new(), logits: Some(words.collect()) }
            }
        };
        asked.wants.iter().enumerate().map(output).collect()
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
