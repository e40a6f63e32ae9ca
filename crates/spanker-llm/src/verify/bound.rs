// SPDX-License-Identifier: Apache-2.0
//! How far rounding can bring a reduce split from one card.
//!
//! A reduce split adds the products of a row in another order. That alone changes a sum by a few units in the last
//! place of an f32. But activations are rounded again before every product, to 8-bit blocks whose quantum is the
//! block's largest magnitude over 127, and keys and values to f16: there, the smallest change may turn a rounding
//! the other way, by one whole quantum, and every rounding after it sees that. So the arithmetic bounds what each
//! rounding contributes, and not how many turn: at worst all of them do, independently of one card's.
//!
//! That worst case is computed and not estimated: an [`crate::Evaluator`] with [`crate::Rounding::Random`] runs
//! the same tokens and rounds every activation up or down at random. The differences of its logits from the reference
//! contain the model's layers, widths, norms, gates and attention as they are. The bound is [`Bound::MARGIN`]
//! times the greatest of [`Bound::SAMPLES`] such runs, for each step, in two measures: the greatest difference of
//! a logit, which a single wrong logit exceeds, and the root of the mean of squares over the vocabulary, which hardly
//! varies between samples and which an error spread over all logits exceeds first. It is a statistical bound, and no
//! proof: an honest split beyond it is improbable and not impossible, and one wrong weight among many may stay below
//! it. That is what [`examine_reduce`] compares bits with the definition for.

use std::fmt;

use super::{Difference, RunLogits};

/// What rounding explains at each step.
#[derive(Debug, Clone, PartialEq)]
pub struct Bound {
    /// For each step, of the difference of one logit.
    most: Vec<f64>,
    /// For each step, of the root of the mean of squares of all differences.
    mean: Vec<f64>,
}

/// How far a run is from a reference, where it is nearest to the bound or beyond it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distance {
    /// The greatest difference of two logits at any step.
    pub greatest: f64,
    /// Steps at which another token wins.
    pub other_tokens: usize,
    /// The step at which the run is nearest to its bound, from 0.
    pub step: usize,
    /// There, the greatest difference of two logits, and its bound.
    pub most: [f64; 2],
    /// There, the root of the mean of squares of all differences, and its bound.
    pub mean: [f64; 2],
}

impl Distance {
    /// The part of the bound that is used, of the measure that uses more of it.
    #[must_use]
    pub fn share(&self) -> f64 {
        share(self.most).max(share(self.mean))
    }
}

/// A distance over its bound. No distance is no part of a bound, even of one that is zero.
fn share([distance, bound]: [f64; 2]) -> f64 {
    if distance == 0.0 { 0.0 } else { distance / bound }
}

/// The token whose logits differ most at a step, by how much, and the root of the mean of squares of all differences.
fn apart(theirs: &[f32], ours: &[f32]) -> (usize, f64, f64) {
    let (mut at, mut most, mut squares) = (0, 0.0, 0.0);
    for (token, (a, b)) in theirs.iter().zip(ours).enumerate() {
        let distance = (f64::from(*a) - f64::from(*b)).abs();
        squares += distance * distance;
        if distance > most {
            (at, most) = (token, distance);
        }
    }
    (at, most, (squares / theirs.len().max(1) as f64).sqrt())
}

impl Bound {
    /// Runs with random roundings that a bound is taken from.
    pub const SAMPLES: u64 = 4;
    /// How many times the greatest distance of a sample is still accepted.
    pub const MARGIN: f64 = 2.5;

    /// What runs with random roundings show, which were fed the reference's tokens.
    ///
    /// # Errors
    /// What is missing or not a number in the reference or in a sample.
    pub fn new(reference: &RunLogits, samples: &[RunLogits]) -> Result<Bound, Difference> {
        let steps = reference.logits.len();
        let mut bound = Bound { most: vec![0.0; steps], mean: vec![0.0; steps] };
        for sample in samples {
            if let Some(mismatch) = sample.mismatch(reference) {
                return Err(mismatch);
            }
            for (step, (theirs, ours)) in reference.logits.iter().zip(&sample.logits).enumerate() {
                let (_, most, mean) = apart(theirs, ours);
                bound.most[step] = bound.most[step].max(Self::MARGIN * most);
                bound.mean[step] = bound.mean[step].max(Self::MARGIN * mean);
            }
        }
        Ok(bound)
    }

    /// How far a run is from the reference, within the bound or not.
    ///
    /// # Errors
    /// What is missing or not a finite number in one of the two, as then nothing can be measured.
    pub fn measure(
        &self,
        found: &RunLogits,
        reference: &RunLogits,
    ) -> Result<Distance, Difference> {
        if let Some(mismatch) = found.mismatch(reference) {
            return Err(mismatch);
        }
        let steps = reference.logits.len();
        if self.most.len() != steps {
            let counts = [self.most.len(), steps];
            return Err(Difference::Steps { tokens: counts, logits: counts });
        }
        let pairs = reference.logits.iter().zip(&found.logits).enumerate();
        let mut nearest = self.at(0, &reference.logits[0], &found.logits[0]).1;
        let mut greatest: f64 = 0.0;
        for (step, (theirs, ours)) in pairs {
            let here = self.at(step, theirs, ours).1;
            greatest = greatest.max(here.greatest);
            if here.share() > nearest.share() {
                nearest = here;
            }
        }
        let tokens = reference.tokens.iter().zip(&found.tokens);
        let other_tokens = tokens.filter(|(theirs, ours)| theirs != ours).count();
        Ok(Distance { greatest, other_tokens, ..nearest })
    }

    /// The token whose logits differ most at a step, and how far the step is from the reference's.
    fn at(&self, step: usize, theirs: &[f32], ours: &[f32]) -> (usize, Distance) {
        let (token, most, mean) = apart(theirs, ours);
        let distance = Distance {
            greatest: most,
            other_tokens: 0,
            step,
            most: [most, self.most[step]],
            mean: [mean, self.mean[step]],
        };
        (token, distance)
    }
}

impl RunLogits {
    /// How far this is from a reference whose tokens it was fed, if rounding explains it.
    ///
    /// # Errors
    /// What is missing, what is not a finite number, a token that wins although the reference has it further behind
    /// than rounding explains, and logits beyond the bound: the first of these, in this order.
    pub fn distance(&self, reference: &RunLogits, bound: &Bound) -> Result<Distance, Difference> {
        let distance = bound.measure(self, reference)?;
        self.winners(reference, bound)?;
        for (step, (theirs, ours)) in reference.logits.iter().zip(&self.logits).enumerate() {
            let (token, here) = bound.at(step, theirs, ours);
            let ([most, most_bound], [mean, mean_bound]) = (here.most, here.mean);
            if most > most_bound {
                let (values, bound) = ([theirs[token], ours[token]], most_bound);
                return Err(Difference::Beyond { step, token: token as u32, values, bound });
            }
            if mean > mean_bound {
                return Err(Difference::BeyondMean { step, distance: mean, bound: mean_bound });
            }
        }
        Ok(distance)
    }

    /// Refuses a token that wins although the reference has it too far behind.
    fn winners(&self, reference: &RunLogits, bound: &Bound) -> Result<(), Difference> {
        for (step, theirs) in reference.logits.iter().enumerate() {
            let tokens = [reference.tokens[step], self.tokens[step]];
            if tokens[0] == tokens[1] {
                continue;
            }
            let logit =
                |token: u32| theirs.get(token as usize).copied().map_or(f64::NAN, f64::from);
            let gap = logit(tokens[0]) - logit(tokens[1]);
            // Each of the two moves by its bound at most. A token without a logit has a gap that is no number.
            let bound = 2.0 * bound.most[step];
            if gap.is_nan() || gap > bound {
                return Err(Difference::Winner { step, tokens, gap, bound });
            }
        }
        Ok(())
    }
}

/// Why a reduce split fails.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// Two runs are not the same.
    Repeat(Difference),
    /// The logits are not those of its partial sums added in card order.
    Sum(Difference),
    /// It is not as near to one card as it must be.
    Reference(Difference),
}

impl Fault {
    /// What kind of fault it is, in one word for programs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Repeat(_) => "repeat",
            Fault::Sum(_) => "sum",
            Fault::Reference(difference) => difference.kind(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Repeat(difference) => write!(f, "does not repeat: {difference}"),
            Fault::Sum(difference) => {
                write!(f, "is not the sum of its parts in card order: {difference}")
            }
            Fault::Reference(difference) => difference.fmt(f),
        }
    }
}

/// Examines two runs of a reduce split that were fed the reference's tokens.
///
/// `defined` is what its layout is defined to give, by an [`crate::Evaluator`]: this comparison finds a card that
/// computes or exchanges something else, by however little. The bound finds a definition that is wrong: a layout
/// that leaves columns out, weights of another file.
///
/// # Errors
/// The first fault.
pub fn examine_reduce(
    runs: [&RunLogits; 2],
    defined: &RunLogits,
    reference: &RunLogits,
    bound: &Bound,
) -> Result<Distance, Fault> {
    let [found, again] = runs;
    if let Some(mismatch) = found.mismatch(reference) {
        return Err(Fault::Reference(mismatch));
    }
    if let Some(difference) = again.difference(found) {
        return Err(Fault::Repeat(difference));
    }
    if let Some(difference) = found.difference(defined) {
        return Err(Fault::Sum(difference));
    }
    found.distance(reference, bound).map_err(Fault::Reference)
}
