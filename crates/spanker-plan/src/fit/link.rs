// SPDX-License-Identifier: Apache-2.0
//! How long an all-reduce takes, fitted to all-reduces that were measured.
//!
//! Small messages cost `base + a (n - 1) + b n S` for n ranks and S bytes: a fixed part, a part for
//! every further rank, and bytes that meet on shared edges. Large ones cost what a ring costs,
//! `base + 2 (n - 1) alpha + 2 (n - 1) / n S / beta`. Between the two the logarithms are blended
//! around 512 KiB. A library that changes its algorithm with the size is neither, so samples count
//! the less for the small form the larger they are.
//!
//! All parameters are zero or more, residuals are relative, and one wild sample does not matter: its
//! pull is bounded, and if all others agree much better without it, it is rejected. Where the bytes
//! of more ranks contend for more than their share, `n` becomes a power of n.

mod toml;

use super::band::{LEAST_SCALE, Parameter, UNKNOWN_SCALE, doublings, robust_scale};
use super::file::bad;
use super::solve::{distance, dot, robust};
use super::{Band, LinkSample, LinkSamples};
use crate::PlanError;
use spanker_topology::Provenance;

const KIB: f64 = 1024.0;
/// The size at which a sample counts half for the small form, and the unit of its third column.
const SMALL: f64 = 128.0 * KIB;
/// The least size of samples for the large form.
const LARGE_FROM: f64 = 256.0 * KIB;
/// The size at which a sample counts half for the large form.
const LARGE: f64 = 1024.0 * KIB;
/// The size at which both forms have the same say.
const BLEND: f64 = 512.0 * KIB;
/// The residuals beyond which a sample's pull grows no more.
const SMALL_BEND: f64 = 0.05;
const LARGE_BEND: f64 = 0.1;
const ITERATIONS: usize = 25;
/// Fewer samples than this are too few to reject one, or to tell contention from noise.
const ENOUGH: usize = 6;
/// Powers of n to try where a plain n fits badly.
const EXPONENTS: [f64; 5] = [1.25, 1.5, 1.75, 2.0, 2.25];
/// How many rows all trials of leaving one sample out may visit. Only the samples with the largest
/// residuals are tried where there are many: among those no single one can hide by its pull.
const TRIAL_ROWS: usize = 2_000_000;

/// The form for small messages.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Small {
    base_us: f64,
    per_rank_us: f64,
    per_byte_us: f64,
    exponent: f64,
}

impl Small {
    fn new([base_us, per_rank_us, per_unit]: [f64; 3], exponent: f64) -> Small {
        Small { base_us, per_rank_us, per_byte_us: per_unit / SMALL, exponent }
    }

    fn columns(ranks: f64, bytes: f64, exponent: f64) -> [f64; 3] {
        [1.0, ranks - 1.0, ranks.powf(exponent) * bytes / SMALL]
    }

    fn time(&self, ranks: f64, bytes: f64) -> f64 {
        let coefficients = [self.base_us, self.per_rank_us, self.per_byte_us * SMALL];
        dot(&Small::columns(ranks, bytes, self.exponent), &coefficients)
    }
}

/// The form for large messages: a ring.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Large {
    base_us: f64,
    per_hop_us: f64,
    per_byte_us: f64,
}

impl Large {
    fn columns(ranks: f64, bytes: f64) -> [f64; 3] {
        let hops = 2.0 * (ranks - 1.0);
        [1.0, hops, hops / ranks * bytes / LARGE]
    }

    fn time(&self, ranks: f64, bytes: f64) -> f64 {
        let coefficients = [self.base_us, self.per_hop_us, self.per_byte_us * LARGE];
        dot(&Large::columns(ranks, bytes), &coefficients)
    }
}

/// A fitted model of all-reduces over some links.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkModel {
    provenance: Provenance,
    small: Small,
    large: Option<Large>,
    /// The scale of relative residuals of small and of large messages.
    scales: (f64, f64),
    /// What was sampled, ends included.
    ranks: (usize, usize),
    bytes: (u64, u64),
    samples: usize,
    rejected: Option<LinkSample>,
}

impl LinkModel {
    /// Fits a model to samples.
    ///
    /// Samples of one rank count, or of one size, leave parameters undetermined. Then the first of
    /// those that fit equally well keeps its say in the order base, per rank, per byte, and the
    /// others are zero: one rank count means that further ranks cost no latency, one size that bytes
    /// cost nothing. The bands are wide in that direction, and [`caveats`](LinkModel::caveats) says
    /// so.
    ///
    /// # Errors
    /// [`PlanError::File`] if no parameters fit.
    pub fn fit(samples: &LinkSamples) -> Result<LinkModel, PlanError> {
        let samples = samples.samples();
        let fitted = fit_small(samples).ok_or_else(|| bad("the samples fit no link"))?;
        let kept = |at: usize| Some(at) != fitted.rejected;
        let kept: Vec<LinkSample> =
            (0..samples.len()).filter(|at| kept(*at)).map(|at| samples[at]).collect();
        let ends = |of: fn(&LinkSample) -> u64| {
            let values = || kept.iter().map(of);
            (values().min().unwrap_or(1), values().max().unwrap_or(1))
        };
        let ranks = ends(|sample| sample.ranks as u64);
        let mut model = LinkModel {
            provenance: Provenance::Fitted,
            small: Small::new(fitted.coefficients, fitted.exponent),
            large: fit_large(&kept),
            scales: (LEAST_SCALE, LEAST_SCALE),
            ranks: (ranks.0 as usize, ranks.1 as usize),
            bytes: ends(|sample| sample.bytes),
            samples: samples.len(),
            rejected: fitted.rejected.map(|at| samples[at]),
        };
        model.scales = model.residual_scales(&kept);
        Ok(model)
    }

    /// The time of an all-reduce of `bytes` on each of `ranks` ranks, in microseconds.
    ///
    /// One rank alone has nothing to exchange and takes no time.
    #[must_use]
    pub fn predict(&self, ranks: usize, bytes: u64) -> Band {
        if ranks < 2 {
            return Band::ZERO;
        }
        let (n, size) = (ranks as f64, bytes as f64);
        // Where algorithms change over is less certain than the large form's say tells.
        let share = large_share(size).sqrt();
        let mut scale = self.scales.0 * (1.0 - share) + self.scales.1 * share;
        let contended = if self.small.exponent > 1.0 { CONTENDED } else { 1.0 };
        let wider = doublings(n, (self.ranks.0 as f64, self.ranks.1 as f64)) * contended;
        let larger = doublings(size, (0.0, self.bytes.1 as f64));
        // Below the smallest size the time hardly changes: it is latency.
        let smaller = doublings(size.max(1.0), (self.bytes.0 as f64, f64::MAX)) * BELOW;
        let one_count = self.ranks.0 == self.ranks.1 && wider > 0.0;
        let one_size = self.bytes.0 == self.bytes.1 && larger + smaller > 0.0;
        if one_count || one_size {
            scale = scale.max(UNKNOWN_SCALE);
        }
        Band::around(self.time(n, size), scale, wider + larger + smaller)
    }

    /// Where the numbers come from.
    #[must_use]
    pub fn provenance(&self) -> Provenance {
        self.provenance
    }

    /// The sample that was rejected, if one was.
    #[must_use]
    pub fn rejected(&self) -> Option<LinkSample> {
        self.rejected
    }

    /// What the samples leave open, in sentences.
    #[must_use]
    pub fn caveats(&self) -> Vec<String> {
        let mut caveats = Vec::new();
        if self.ranks.0 == self.ranks.1 {
            let ranks = self.ranks.0;
            caveats.push(format!(
                "all samples have {ranks} ranks: latency per rank is unknown and taken as none, \
                 so bands for other rank counts are wide"
            ));
        }
        if self.bytes.0 == self.bytes.1 {
            let bytes = self.bytes.0;
            caveats.push(format!(
                "all samples have {bytes} bytes: time per byte is unknown and taken as none, \
                 so bands for other sizes are wide"
            ));
        }
        caveats
    }

    /// The parameters, for people.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        let entry = |name, value, unit, meaning: &str| Parameter {
            name,
            value,
            unit,
            meaning: meaning.to_owned(),
        };
        let Small { base_us, per_rank_us, per_byte_us, exponent } = self.small;
        let growth = match exponent {
            1.0 => "bytes cost this times the ranks".to_owned(),
            _ => "the links contend: bytes cost this times ranks^exponent".to_owned(),
        };
        let mut all = vec![
            entry("small.base_us", base_us, "us", "fixed, per call"),
            entry("small.per_rank_us", per_rank_us, "us", "for every rank after the first"),
            entry("small.per_byte_us", per_byte_us, "us/B", &growth),
            entry("small.exponent", exponent, "", "how the cost of bytes grows with ranks"),
        ];
        if let Some(Large { base_us, per_hop_us, per_byte_us }) = self.large {
            let rate = match per_byte_us {
                0.0 => "bytes are free".to_owned(),
                cost => format!("a ring at {:.3} GB/s", 1e-3 / cost),
            };
            all.extend([
                entry("large.base_us", base_us, "us", "fixed, per call"),
                entry("large.per_hop_us", per_hop_us, "us", "for each of 2 (ranks - 1) hops"),
                entry("large.per_byte_us", per_byte_us, "us/B", &rate),
            ]);
        }
        all
    }

    fn time(&self, ranks: f64, bytes: f64) -> f64 {
        let small = self.small.time(ranks, bytes);
        let Some(large) = self.large else { return small };
        let (share, large) = (large_share(bytes), large.time(ranks, bytes));
        // A form may predict nothing at all only if a file says so.
        let log = |time: f64| time.max(f64::MIN_POSITIVE).ln();
        ((1.0 - share) * log(small) + share * log(large)).exp()
    }

    /// The scales of residuals, as seen from small and from large messages.
    fn residual_scales(&self, kept: &[LinkSample]) -> (f64, f64) {
        let residual = |sample: &LinkSample| {
            let time = self.time(sample.ranks as f64, sample.bytes as f64);
            distance(time / sample.microseconds)
        };
        let weighted = |weight: fn(f64) -> f64, from: f64| -> Vec<(f64, f64)> {
            let sized = kept.iter().filter(|sample| sample.bytes as f64 >= from);
            sized.map(|sample| (residual(sample), weight(sample.bytes as f64))).collect()
        };
        let counted = |coefficients: [f64; 3]| coefficients.iter().filter(|c| **c > 0.0).count();
        let Small { base_us, per_rank_us, per_byte_us, .. } = self.small;
        let parameters = counted([base_us, per_rank_us, per_byte_us]);
        let small = robust_scale(&weighted(small_weight, 0.0), parameters, UNTESTED_SCALE);
        let large = weighted(large_weight, LARGE_FROM);
        if large.is_empty() {
            return (small, small.max(UNSEEN_LARGE_SCALE));
        }
        let parameters = self.large.map_or(0, |Large { base_us, per_hop_us, per_byte_us }| {
            counted([base_us, per_hop_us, per_byte_us])
        });
        let large = robust_scale(&large, parameters, UNTESTED_SCALE).max(LARGE_SCALE);
        (small, large.max(small))
    }
}

/// The scale where every sample went into a parameter and none is left to test them.
const UNTESTED_SCALE: f64 = 0.1;
/// The least scale of large messages, whose published measurements differ more.
const LARGE_SCALE: f64 = 0.12;
/// The least scale of large messages where none was sampled.
const UNSEEN_LARGE_SCALE: f64 = 0.15;
/// What a doubling of ranks counts where links contend, in doublings.
const CONTENDED: f64 = 2.0;
/// What a halving below the smallest size counts, in doublings.
const BELOW: f64 = 0.25;

fn small_weight(bytes: f64) -> f64 {
    1.0 / (1.0 + (bytes / SMALL).powi(2))
}

fn large_weight(bytes: f64) -> f64 {
    1.0 / (1.0 + (LARGE / bytes).powi(2))
}

/// The say of the large form.
fn large_share(bytes: f64) -> f64 {
    1.0 / (1.0 + (BLEND / bytes).powi(2))
}

/// The small form as fitted, and the sample that was left out.
#[derive(Debug, Clone, Copy)]
struct Fitted {
    coefficients: [f64; 3],
    exponent: f64,
    rejected: Option<usize>,
}

/// The rows and weights of a fit of the small form.
struct Problem {
    rows: Vec<[f64; 3]>,
    weights: Vec<f64>,
}

impl Problem {
    fn new(samples: &[LinkSample], exponent: f64) -> Problem {
        let row = |sample: &LinkSample| {
            let (ranks, bytes) = (sample.ranks as f64, sample.bytes as f64);
            Small::columns(ranks, bytes, exponent).map(|x| x / sample.microseconds)
        };
        Problem {
            rows: samples.iter().map(row).collect(),
            weights: samples.iter().map(|sample| small_weight(sample.bytes as f64)).collect(),
        }
    }

    fn without(&self, at: usize) -> Vec<f64> {
        let mut weights = self.weights.clone();
        weights[at] = 0.0;
        weights
    }

    fn solve(&self, left_out: Option<usize>, iterations: usize) -> Option<[f64; 3]> {
        match left_out {
            None => robust(&self.rows, &self.weights, SMALL_BEND, iterations),
            Some(at) => robust(&self.rows, &self.without(at), SMALL_BEND, iterations),
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

/// Fits the small form, without a sample that spoils it.
fn fit_robustly(problem: &Problem, exponent: f64) -> Option<Fitted> {
    let coefficients = problem.solve(None, ITERATIONS)?;
    let Some(at) = problem.outlier(&coefficients) else {
        return Some(Fitted { coefficients, exponent, rejected: None });
    };
    let coefficients = problem.solve(Some(at), ITERATIONS)?;
    Some(Fitted { coefficients, exponent, rejected: Some(at) })
}

/// Fits the small form; where a plain n fits badly, with the power of n that fits much better.
fn fit_small(samples: &[LinkSample]) -> Option<Fitted> {
    let plain = Problem::new(samples, 1.0);
    let fitted = fit_robustly(&plain, 1.0)?;
    let mean = |problem: &Problem, coefficients: &[f64; 3]| {
        let (sum, weights) = problem.residuals(coefficients, fitted.rejected, 0.5);
        sum / weights
    };
    let plainly = mean(&plain, &fitted.coefficients);
    if samples.len() < ENOUGH || plainly.is_nan() || plainly <= 0.08 {
        return Some(fitted);
    }
    let mut best: Option<(f64, Fitted)> = None;
    for exponent in EXPONENTS {
        let problem = Problem::new(samples, exponent);
        let Some(coefficients) = problem.solve(fitted.rejected, ITERATIONS) else { continue };
        let mean = mean(&problem, &coefficients);
        if best.is_none_or(|(least, _)| mean < least) {
            best = Some((mean, Fitted { coefficients, exponent, ..fitted }));
        }
    }
    match best.filter(|(mean, _)| *mean < 0.6 * plainly) {
        None => Some(fitted),
        Some((_, found)) if found.rejected.is_some() => Some(found),
        Some((_, found)) => fit_robustly(&Problem::new(samples, found.exponent), found.exponent),
    }
}

/// Fits the large form, if there are two sizes for it.
fn fit_large(kept: &[LinkSample]) -> Option<Large> {
    let large: Vec<&LinkSample> =
        kept.iter().filter(|sample| sample.bytes as f64 >= LARGE_FROM).collect();
    let first = large.first()?.bytes;
    if large.iter().all(|sample| sample.bytes == first) {
        return None;
    }
    let row = |sample: &&LinkSample| {
        Large::columns(sample.ranks as f64, sample.bytes as f64).map(|x| x / sample.microseconds)
    };
    let rows: Vec<[f64; 3]> = large.iter().map(row).collect();
    let weights: Vec<f64> = large.iter().map(|sample| large_weight(sample.bytes as f64)).collect();
    let [base_us, per_hop_us, per_unit] = robust(&rows, &weights, LARGE_BEND, ITERATIONS)?;
    Some(Large { base_us, per_hop_us, per_byte_us: per_unit / LARGE })
}
