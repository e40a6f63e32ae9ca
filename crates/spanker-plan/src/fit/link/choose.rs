// SPDX-License-Identifier: Apache-2.0
//! Finds the parameters of each form, and the form that tells the samples best.
//!
//! The blended form is preferred: it is what libraries on switched fabrics do. One algorithm for all
//! sizes replaces it only where it fits much better, and no worse for small messages. Algorithms that
//! fit about as well as what was chosen become rivals, which predictions count with.

use super::LARGE_FROM;
use super::forms::{Algorithm, Form, Known, Small, large_weight, small_weight};
use crate::fit::LinkSample;
use crate::fit::solve::{distance, dot, robust};

/// The residuals beyond which a sample's pull grows no more.
const SMALL_BEND: f64 = 0.05;
const LARGE_BEND: f64 = 0.1;
const WHOLE_BEND: f64 = 0.05;
const ITERATIONS: usize = 25;
/// Fewer samples than this are too few to reject one, to tell contention from noise, or to leave the
/// blended form.
const ENOUGH: usize = 6;
/// Powers of n to try where a plain n fits badly.
const EXPONENTS: [f64; 5] = [1.25, 1.5, 1.75, 2.0, 2.25];
/// How many rows all trials of leaving one sample out may visit. Only the samples with the largest
/// residuals are tried where there are many: among those no single one can hide by its pull.
const TRIAL_ROWS: usize = 2_000_000;
/// The mean residual up to which the blended form is good enough, and by which another form may be
/// worse for small messages: it has all sizes to fit.
const GOOD: f64 = 0.01;
/// The share of the blended form's mean residual that another form must stay below, and below which
/// it wins even where the blended form is good enough.
const MUCH_BETTER: f64 = 0.6;
const FAR_BETTER: f64 = 0.05;
/// Mean residuals up to this are digits that a table leaves out.
const ROUNDED: f64 = 1e-5;
/// By how much more mean residual a form still fits as well as another.
const EQUALLY: f64 = 1e-3;
/// How far a prediction for twice the ranks is off for a rival to matter, as a logarithm.
const APART: f64 = 0.1;
/// The largest residual that counts for a mean: how wrong a form is does not matter beyond.
const WRONG: f64 = 0.5;

/// The form that tells the samples best.
pub(super) struct Choice {
    pub(super) form: Form,
    /// The sample that was left out.
    pub(super) rejected: Option<usize>,
    /// Other algorithms that fit as well.
    pub(super) rivals: Vec<Known>,
}

/// The blended form with its parameters, and the sample that was left out.
#[derive(Clone, Copy)]
struct Candidate {
    form: Form,
    rejected: Option<usize>,
}

/// The mean residuals of a form.
#[derive(Clone, Copy)]
struct Means {
    all: f64,
    /// Weighted for small messages.
    small: f64,
}

impl Means {
    fn of(form: &Form, samples: &[LinkSample]) -> Means {
        let (mut all, mut small) = ((0.0, 0.0), (0.0, 0.0));
        for sample in samples {
            let (ranks, bytes) = (sample.ranks as f64, sample.bytes as f64);
            let residual = distance(form.time(ranks, bytes) / sample.microseconds).min(WRONG);
            let weight = small_weight(bytes);
            all = (all.0 + residual, all.1 + 1.0);
            small = (small.0 + weight * residual, small.1 + weight);
        }
        Means { all: all.0 / all.1, small: small.0 / small.1 }
    }
}

/// Fits all forms and chooses one.
pub(super) fn choose(samples: &[LinkSample]) -> Option<Choice> {
    let blended = fit_blended(samples)?;
    // Samples of one rank count or one size tell no algorithm from another.
    let differ = |of: fn(&LinkSample) -> u64| {
        samples.iter().any(|sample| samples.first().is_some_and(|first| of(sample) != of(first)))
    };
    let telling = differ(|sample| sample.ranks as u64) && differ(|sample| sample.bytes);
    let all = Algorithm::ALL.iter().filter(|_| telling);
    let others: Vec<Contest> =
        all.filter_map(|algorithm| Contest::new(*algorithm, &blended, samples)).collect();
    let mut best: Option<&Contest> = None;
    for other in others.iter().filter(|other| samples.len() >= ENOUGH && other.is_won()) {
        if best.is_none_or(|best| other.theirs.all + EQUALLY < best.theirs.all) {
            best = Some(other);
        }
    }
    let (form, rejected, mean) = match best {
        None => (blended.form, blended.rejected, None),
        Some(best) => (Form::Whole(best.known), best.rejected, Some(best.theirs.all)),
    };
    let rival = |other: &&Contest| {
        let mean = mean.unwrap_or(other.blended.all);
        let as_well = other.theirs.all <= mean + EQUALLY;
        as_well && apart(&Form::Whole(other.known), &form, samples)
    };
    let rivals = others.iter().filter(rival).map(|other| other.known).collect();
    Some(Choice { form, rejected, rivals })
}

/// One algorithm for all sizes against the blended form, both without the sample that the algorithm
/// rejects.
struct Contest {
    known: Known,
    rejected: Option<usize>,
    theirs: Means,
    blended: Means,
}

impl Contest {
    fn new(algorithm: Algorithm, blended: &Candidate, samples: &[LinkSample]) -> Option<Contest> {
        let (known, rejected) = fit_whole(samples, algorithm)?;
        let without = kept(samples, rejected);
        let blended = if rejected.is_none() { *blended } else { fit_blended(&without)? };
        let both = kept(&without, blended.rejected);
        let theirs = Means::of(&Form::Whole(known), &both);
        Some(Contest { known, rejected, theirs, blended: Means::of(&blended.form, &both) })
    }

    /// Whether the algorithm replaces the blended form.
    fn is_won(&self) -> bool {
        let (theirs, blended) = (self.theirs, self.blended);
        let better = theirs.all < MUCH_BETTER * blended.all && blended.all > GOOD;
        let far_better = theirs.all < FAR_BETTER * blended.all && blended.all > ROUNDED;
        (better || far_better) && theirs.small <= blended.small + GOOD
    }
}

/// All samples but the rejected one.
fn kept(samples: &[LinkSample], rejected: Option<usize>) -> Vec<LinkSample> {
    let numbered = samples.iter().enumerate();
    numbered.filter(|(at, _)| Some(*at) != rejected).map(|(_, sample)| *sample).collect()
}

/// Whether forms differ on rank counts that were not sampled, up to twice the largest.
///
/// As far as they agree on the samples, they differ most on the most ranks or between two counts.
fn apart(one: &Form, other: &Form, samples: &[LinkSample]) -> bool {
    samples.iter().any(|sample| {
        let bytes = sample.bytes as f64;
        [3 * sample.ranks / 2, 2 * sample.ranks].into_iter().any(|ranks| {
            let (one, other) = (one.time(ranks as f64, bytes), other.time(ranks as f64, bytes));
            distance(one / other) > APART
        })
    })
}

/// Fits the form that blends small and large messages.
fn fit_blended(samples: &[LinkSample]) -> Option<Candidate> {
    let Fitted { coefficients, exponent, rejected } = fit_small(samples)?;
    let (small, large) = (Small::new(coefficients, exponent), fit_large(&kept(samples, rejected)));
    Some(Candidate { form: Form::Blended { small, large }, rejected })
}

/// Fits an algorithm to all sizes; the index is of the sample that was left out.
fn fit_whole(samples: &[LinkSample], algorithm: Algorithm) -> Option<(Known, Option<usize>)> {
    let problem = Problem {
        rows: rows(samples, |ranks, bytes| algorithm.columns(ranks, bytes)),
        weights: vec![1.0; samples.len()],
        bend: WHOLE_BEND,
    };
    let (coefficients, rejected) = fit_robustly(&problem)?;
    Some((Known::new(algorithm, coefficients), rejected))
}

/// Relative rows: each is divided by its measured time.
fn rows(samples: &[LinkSample], columns: impl Fn(f64, f64) -> [f64; 3]) -> Vec<[f64; 3]> {
    let row = |sample: &LinkSample| {
        columns(sample.ranks as f64, sample.bytes as f64).map(|x| x / sample.microseconds)
    };
    samples.iter().map(row).collect()
}

/// The small form as fitted, and the sample that was left out.
#[derive(Debug, Clone, Copy)]
struct Fitted {
    coefficients: [f64; 3],
    exponent: f64,
    rejected: Option<usize>,
}

/// The rows and weights of a fit.
struct Problem {
    rows: Vec<[f64; 3]>,
    weights: Vec<f64>,
    bend: f64,
}

impl Problem {
    /// The fit of the small form.
    fn small(samples: &[LinkSample], exponent: f64) -> Problem {
        Problem {
            rows: rows(samples, |ranks, bytes| Small::columns(ranks, bytes, exponent)),
            weights: samples.iter().map(|sample| small_weight(sample.bytes as f64)).collect(),
            bend: SMALL_BEND,
        }
    }

    fn without(&self, at: usize) -> Vec<f64> {
        let mut weights = self.weights.clone();
        weights[at] = 0.0;
        weights
    }

    fn solve(&self, left_out: Option<usize>, iterations: usize) -> Option<[f64; 3]> {
        match left_out {
            None => robust(&self.rows, &self.weights, self.bend, iterations),
            Some(at) => robust(&self.rows, &self.without(at), self.bend, iterations),
        }
    }

    fn residual(&self, at: usize, coefficients: &[f64; 3]) -> f64 {
        distance(dot(&self.rows[at], coefficients))
    }

    /// The weighted sum of residuals, each at most `cap`, and of the weights.
    fn residuals(&self, coefficients: &[f64; 3], left_out: Option<usize>, cap: f64) -> (f64, f64) {
        let counted = (0..self.rows.len()).filter(|at| Some(*at) != left_out);
        counted.fold((0.0, 0.0), |(sum, weights), at| {
            let weight = self.weights[at];
            (sum + weight * self.residual(at, coefficients).min(cap), weights + weight)
        })
    }

    /// The sample without which all others agree much better, if there is one.
    fn outlier(&self, all: &[f64; 3]) -> Option<usize> {
        let count = self.rows.len();
        if count < ENOUGH {
            return None;
        }
        let mut candidates: Vec<usize> =
            (0..count).filter(|at| self.weights[*at] >= 0.05).collect();
        let trials = (TRIAL_ROWS / count).max(8);
        if candidates.len() > trials {
            let weighted = |at: usize| self.weights[at] * self.residual(at, all);
            candidates.sort_by(|a, b| weighted(*b).total_cmp(&weighted(*a)).then(a.cmp(b)));
            candidates.truncate(trials);
        }
        let mut best: Option<(f64, usize, f64)> = None;
        for at in candidates {
            let Some(found) = self.solve(Some(at), 6) else { continue };
            let (sum, _) = self.residuals(&found, Some(at), 1.0);
            if best.is_none_or(|(least, ..)| sum < least) {
                best = Some((sum, at, self.residual(at, &found)));
            }
        }
        let (before, _) = self.residuals(all, None, 1.0);
        best.filter(|(sum, _, own)| *own > 0.35 && *sum < 0.5 * before).map(|(_, at, _)| at)
    }
}

/// Solves a fit, without a sample that spoils it.
fn fit_robustly(problem: &Problem) -> Option<([f64; 3], Option<usize>)> {
    let all = problem.solve(None, ITERATIONS)?;
    match problem.outlier(&all) {
        None => Some((all, None)),
        Some(at) => Some((problem.solve(Some(at), ITERATIONS)?, Some(at))),
    }
}

/// Fits the small form with a power of n, without a sample that spoils it.
fn fit_power(problem: &Problem, exponent: f64) -> Option<Fitted> {
    let (coefficients, rejected) = fit_robustly(problem)?;
    Some(Fitted { coefficients, exponent, rejected })
}

/// Fits the small form; where a plain n fits badly, with the power of n that fits much better.
fn fit_small(samples: &[LinkSample]) -> Option<Fitted> {
    let plain = Problem::small(samples, 1.0);
    let fitted = fit_power(&plain, 1.0)?;
    let mean = |problem: &Problem, coefficients: &[f64; 3]| {
        let (sum, weights) = problem.residuals(coefficients, fitted.rejected, WRONG);
        sum / weights
    };
    let plainly = mean(&plain, &fitted.coefficients);
    if samples.len() < ENOUGH || plainly.is_nan() || plainly <= 0.08 {
        return Some(fitted);
    }
    let mut best: Option<(f64, Fitted)> = None;
    for exponent in EXPONENTS {
        let problem = Problem::small(samples, exponent);
        let Some(coefficients) = problem.solve(fitted.rejected, ITERATIONS) else { continue };
        let mean = mean(&problem, &coefficients);
        if best.is_none_or(|(least, _)| mean < least) {
            best = Some((mean, Fitted { coefficients, exponent, ..fitted }));
        }
    }
    match best.filter(|(mean, _)| *mean < 0.6 * plainly) {
        None => Some(fitted),
        Some((_, found)) if found.rejected.is_some() => Some(found),
        Some((_, found)) => fit_power(&Problem::small(samples, found.exponent), found.exponent),
    }
}

/// Fits the large form, if there are two sizes for it.
fn fit_large(kept: &[LinkSample]) -> Option<Known> {
    let large: Vec<LinkSample> =
        kept.iter().filter(|sample| sample.bytes as f64 >= LARGE_FROM).copied().collect();
    let first = large.first()?.bytes;
    if large.iter().all(|sample| sample.bytes == first) {
        return None;
    }
    let rows = rows(&large, |ranks, bytes| Algorithm::Ring.columns(ranks, bytes));
    let weights: Vec<f64> = large.iter().map(|sample| large_weight(sample.bytes as f64)).collect();
    let coefficients = robust(&rows, &weights, LARGE_BEND, ITERATIONS)?;
    Some(Known::new(Algorithm::Ring, coefficients))
}
