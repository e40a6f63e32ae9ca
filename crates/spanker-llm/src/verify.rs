// SPDX-License-Identifier: Apache-2.0
//! Whether two ways to run a model give the same tokens and the same logits, and where not.
//!
//! [`RunLogits::difference`] is for what must be the same to the last bit. [`RunLogits::distance`] is for a reduce split,
//! whose sums are rounded in another order than those of one card: it must stay within a [`Bound`]. Neither
//! accepts what is missing or not a finite number, in the reference as little as in what is examined.

mod bound;

use std::collections::VecDeque;
use std::fmt;

use spanker_plan::Want;

use crate::runner::Runner;
use crate::{LlmError, Session};
pub use bound::{Bound, Distance, Fault, examine_reduce};

/// Logits after each token, and the token that has the greatest.
#[derive(Debug, Clone, PartialEq)]
pub struct RunLogits {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The logits before each of them.
    pub logits: Vec<Vec<f32>>,
}

/// One of the two runs that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The run that others are compared with.
    Reference,
    /// The run that is examined.
    Found,
}

/// How two runs differ. Pairs are of the reference and of what was examined, in this order.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Difference {
    /// The numbers of tokens and of vectors of logits are not all the same, or there are none.
    Steps {
        /// Tokens of each run.
        tokens: [usize; 2],
        /// Vectors of logits of each run.
        logits: [usize; 2],
    },
    /// At a step there are not as many logits, or none.
    Length {
        /// The step, from 0.
        step: usize,
        /// Logits of each run.
        lengths: [usize; 2],
    },
    /// A logit is not a finite number.
    NotFinite {
        /// Whose it is.
        side: Side,
        /// The step, from 0.
        step: usize,
        /// The token whose logit it is.
        token: u32,
        /// The logit.
        value: f32,
    },
    /// A logit has other bits.
    Logit {
        /// The step, from 0.
        step: usize,
        /// The token whose logit it is.
        token: u32,
        /// The logit in each run.
        values: [f32; 2],
        /// The token that each run goes on with.
        tokens: [u32; 2],
    },
    /// Another token follows although all logits are the same.
    Token {
        /// The step, from 0.
        step: usize,
        /// The token of each run.
        tokens: [u32; 2],
    },
    /// Another token wins than the reference's, and rounding cannot have made it so.
    Winner {
        /// The step, from 0.
        step: usize,
        /// The token of each run.
        tokens: [u32; 2],
        /// How far apart the reference has the two.
        gap: f64,
        /// How far apart rounding can bring them together: twice the bound of a logit.
        bound: f64,
    },
    /// A logit is further from the reference's than the bound.
    Beyond {
        /// The step, from 0.
        step: usize,
        /// The token whose logit it is.
        token: u32,
        /// The logit in each run.
        values: [f32; 2],
        /// The bound of their difference.
        bound: f64,
    },
    /// The logits of a step are further from the reference's, as a root of the mean of squares, than the bound.
    BeyondMean {
        /// The step, from 0.
        step: usize,
        /// Their distance.
        distance: f64,
        /// Its bound.
        bound: f64,
    },
}

impl Difference {
    /// What kind of difference it is, in one word for programs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Difference::Steps { .. } => "steps",
            Difference::Length { .. } => "length",
            Difference::NotFinite { .. } => "not-finite",
            Difference::Logit { .. } => "logit",
            Difference::Token { .. } | Difference::Winner { .. } => "token",
            Difference::Beyond { .. } | Difference::BeyondMean { .. } => "bound",
        }
    }

    /// The tokens that the runs go on with where they differ, if that is known.
    #[must_use]
    pub fn tokens(&self) -> Option<[u32; 2]> {
        match *self {
            Difference::Logit { tokens, .. }
            | Difference::Token { tokens, .. }
            | Difference::Winner { tokens, .. } => Some(tokens),
            _ => None,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Steps { tokens: [a, b], logits: [c, d] } => {
                write!(f, "{b} tokens and logits of {d} steps, {a} and {c} expected")
            }
            Difference::Length { step, lengths: [a, b] } => {
                write!(f, "step {step} has {b} logits, {a} expected")
            }
            Difference::NotFinite { side, step, token, value } => {
                let whose = if *side == Side::Reference { "the reference's " } else { "" };
                write!(f, "step {step}: {whose}logit of token {token} is {value}")
            }
            Difference::Logit { step, token, values: [a, b], .. } => {
                write!(f, "differs first at step {step}, logit {token}: {a} expected, {b} here")
            }
            Difference::Token { step, tokens: [a, b] } => {
                write!(f, "step {step}: token {b} follows, {a} expected")
            }
            Difference::Winner { step, tokens: [a, b], gap, bound } => write!(
                f,
                "step {step}: token {b} wins over {a}, which leads by {gap:.2e} in the reference; rounding explains {bound:.2e}"
            ),
            Difference::Beyond { step, token, values: [a, b], bound } => write!(
                f,
                "step {step}, logit {token}: {a} expected, {b} here; rounding explains {bound:.2e}"
            ),
            Difference::BeyondMean { step, distance, bound } => write!(
                f,
                "step {step}: logits are {distance:.2e} (rms) from the reference; rounding explains {bound:.2e}"
            ),
        }
    }
}

impl RunLogits {
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

    /// The first logit that is not a finite number.
    #[must_use]
    pub fn not_finite(&self, side: Side) -> Option<Difference> {
        self.logits.iter().enumerate().find_map(|(step, logits)| {
            let token = logits.iter().position(|logit| !logit.is_finite())?;
            let value = logits[token];
            Some(Difference::NotFinite { side, step, token: token as u32, value })
        })
    }

    /// The first difference from a reference; nothing if every token and every bit is the same, and every logit is
    /// there and a finite number.
    #[must_use]
    pub fn difference(&self, reference: &RunLogits) -> Option<Difference> {
        self.mismatch(reference).or_else(|| {
            (0..reference.logits.len()).find_map(|step| {
                let (theirs, ours) = (&reference.logits[step], &self.logits[step]);
                let tokens = [reference.tokens[step], self.tokens[step]];
                let mut pairs = theirs.iter().zip(ours);
                match pairs.position(|(a, b)| a.to_bits() != b.to_bits()) {
                    Some(at) => {
                        let values = [theirs[at], ours[at]];
                        Some(Difference::Logit { step, token: at as u32, values, tokens })
                    }
                    None if tokens[0] != tokens[1] => Some(Difference::Token { step, tokens }),
                    None => None,
                }
            })
        })
    }

    /// What is missing or not a number in one of two runs.
    fn mismatch(&self, reference: &RunLogits) -> Option<Difference> {
        let tokens = [reference.tokens.len(), self.tokens.len()];
        let logits = [reference.logits.len(), self.logits.len()];
        let steps = tokens[0];
        if steps == 0 || tokens.into_iter().chain(logits).any(|count| count != steps) {
            return Some(Difference::Steps { tokens, logits });
        }
        // Every step has a logit for each token of one vocabulary.
        let vocab = reference.logits[0].len();
        for (step, (theirs, ours)) in reference.logits.iter().zip(&self.logits).enumerate() {
            let lengths = [theirs.len(), ours.len()];
            if vocab == 0 || lengths.into_iter().any(|length| length != vocab) {
                return Some(Difference::Length { step, lengths });
            }
        }
        reference.not_finite(Side::Reference).or_else(|| self.not_finite(Side::Found))
    }
}

fn greatest(logits: &[f32]) -> u32 {
    ggml_spanker::ops::best(logits, 1).first().map_or(0, |best| best.0)
}

/// The same with guesses of what follows, which steps check: `guess` makes them from all tokens so far. Gives how many there
/// were as well, and how many were right.
///
/// # Errors
/// What [`Runner::step`] fails with.
pub fn run_logits_guessing(
    runner: Box<dyn Runner + '_>,
    prompt: &[u32],
    count: usize,
    guess: &mut dyn FnMut(&[u32]) -> Vec<u32>,
) -> Result<(RunLogits, [usize; 2]), LlmError> {
    let mut session = Session::new(runner);
    let mut run_logits = RunLogits { tokens: Vec::new(), logits: Vec::new() };
    let mut outputs = VecDeque::from(session.feed(prompt, Want::Logits)?.outputs);
    let mut counts = [0, 0];
    loop {
        let logits = outputs.pop_front().unwrap_or_default().logits.unwrap_or_default();
        let next = greatest(&logits);
        run_logits.tokens.push(next);
        run_logits.logits.push(logits);
        let left = count.saturating_sub(run_logits.tokens.len());
        if left == 0 {
            return Ok((run_logits, counts));
        }
        if session.accept(next) {
            counts[1] += 1;
            continue;
        }
        let all: Vec<u32> = session.tokens().iter().copied().chain([next]).collect();
        let mut guesses = guess(&all);
        // A step gives a token more than it accepts.
        guesses.truncate(left - 1);
        outputs = session.check(next, &guesses, Want::Logits)?.outputs.into();
        counts[0] += outputs.len().saturating_sub(1);
    }
}

/// Runs a prompt and `count` tokens, at least one. With `fed`, these tokens follow whatever the logits say.
///
/// A runner that gives no logits back leaves an empty vector, which no comparison accepts.
///
/// # Errors
/// What [`Runner::step`] fails with.
pub fn run_logits(
    runner: Box<dyn Runner + '_>,
    prompt: &[u32],
    count: usize,
    fed: Option<&[u32]>,
) -> Result<RunLogits, LlmError> {
    let mut session = Session::new(runner);
    let mut run_logits = RunLogits { tokens: Vec::new(), logits: Vec::new() };
    let mut outcome = session.feed(prompt, Want::Logits)?;
    loop {
        let output = outcome.outputs.pop().unwrap_or_default();
        let logits = output.logits.unwrap_or_default();
        run_logits.tokens.push(greatest(&logits));
        run_logits.logits.push(logits);
        let step = run_logits.tokens.len() - 1;
        if run_logits.tokens.len() >= count {
            return Ok(run_logits);
        }
        let next = fed.and_then(|fed| fed.get(step).copied()).unwrap_or(run_logits.tokens[step]);
        outcome = session.feed(&[next], Want::Logits)?;
    }
}
