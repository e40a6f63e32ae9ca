// SPDX-License-Identifier: Apache-2.0
//! Whether two ways to run a model give the same tokens and the same logits, and where not.

use spanker_plan::Want;

use crate::runner::Runner;
use crate::{LlmError, Session};

/// Logits after each token, and the token that has the greatest.
#[derive(Debug, Clone, PartialEq)]
pub struct Trail {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The logits before each of them.
    pub logits: Vec<Vec<f32>>,
}

/// Where two trails part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// The step, from 0.
    pub step: usize,
    /// The token of each trail there.
    pub tokens: [u32; 2],
    /// The first logit whose bits differ.
    pub at: u32,
    /// Its value in each trail.
    pub values: [f32; 2],
}

/// How far two trails are apart.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Distance {
    /// The greatest difference of two logits.
    pub most: f32,
    /// Steps at which the greatest logit is another token's.
    pub other_tokens: usize,
    /// Of these, steps at which the reference's two best are further apart than twice the greatest difference
    /// of logits at that step. Rounding alone makes none.
    pub beyond_rounding: usize,
}

impl Trail {
    /// A number that is the same for the same bits: FNV-1a over all logits of a step.
    #[must_use]
    pub fn hash(&self, step: usize) -> u64 {
        crate::fingerprint(self.logits[step].iter().flat_map(|logit| logit.to_bits().to_le_bytes()))
    }

    /// A hash of all steps.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        (0..self.logits.len()).fold(0, |all: u64, step| all.rotate_left(7) ^ self.hash(step))
    }

    /// The first difference from a reference; nothing if every token and every bit is the same.
    #[must_use]
    pub fn difference(&self, reference: &Trail) -> Option<Difference> {
        let steps = reference.logits.iter().zip(&self.logits).enumerate();
        for (step, (theirs, ours)) in steps {
            let differs = theirs.iter().zip(ours).position(|(a, b)| a.to_bits() != b.to_bits());
            if let Some(at) = differs {
                let tokens = [reference.tokens[step], self.tokens[step]];
                return Some(Difference {
                    step,
                    tokens,
                    at: at as u32,
                    values: [theirs[at], ours[at]],
                });
            }
        }
        let (ours, theirs) = (self.tokens.len(), reference.tokens.len());
        (ours != theirs).then(|| {
            // One of them ends where the other goes on.
            let step = ours.min(theirs);
            let token = |trail: &Trail| trail.tokens.get(step).copied().unwrap_or(u32::MAX);
            Difference {
                step,
                tokens: [token(reference), token(self)],
                at: 0,
                values: [f32::NAN; 2],
            }
        })
    }

    /// How far this is from a reference whose tokens it was fed.
    #[must_use]
    pub fn distance(&self, reference: &Trail) -> Distance {
        let mut distance = Distance::default();
        for (step, (theirs, ours)) in reference.logits.iter().zip(&self.logits).enumerate() {
            let apart = theirs.iter().zip(ours).map(|(a, b)| (a - b).abs()).fold(0.0, further);
            distance.most = distance.most.max(apart);
            if greatest(ours) != reference.tokens[step] {
                distance.other_tokens += 1;
                let best = ggml_spanker::ops::best(theirs, 2);
                let gap = best[0].1 - best.get(1).map_or(f32::NEG_INFINITY, |second| second.1);
                distance.beyond_rounding += usize::from(gap > 2.0 * apart);
            }
        }
        distance
    }
}

/// The greater of two distances; what is not a number is infinitely far.
fn further(one: f32, two: f32) -> f32 {
    if one.is_nan() || two.is_nan() { f32::INFINITY } else { one.max(two) }
}

fn greatest(logits: &[f32]) -> u32 {
    ggml_spanker::ops::best(logits, 1).first().map_or(0, |best| best.0)
}

/// Runs a prompt and `count` tokens, at least one. With `fed`, these tokens follow whatever the logits say.
///
/// # Errors
/// What [`Runner::step`] fails with.
pub fn trail(
    runner: Box<dyn Runner + '_>,
    prompt: &[u32],
    count: usize,
    fed: Option<&[u32]>,
) -> Result<Trail, LlmError> {
    let mut session = Session::new(runner);
    let mut trail = Trail { tokens: Vec::new(), logits: Vec::new() };
    let mut outcome = session.feed(prompt, Want::Logits)?;
    loop {
        let logits = outcome.logits.take().unwrap_or_default();
        trail.tokens.push(greatest(&logits));
        trail.logits.push(logits);
        let step = trail.tokens.len() - 1;
        if trail.tokens.len() >= count {
            return Ok(trail);
        }
        let next = fed.and_then(|fed| fed.get(step).copied()).unwrap_or(trail.tokens[step]);
        outcome = session.feed(&[next], Want::Logits)?;
    }
}
