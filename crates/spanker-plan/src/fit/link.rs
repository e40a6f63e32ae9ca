// SPDX-License-Identifier: Apache-2.0
//! How long an all-reduce takes, fitted to all-reduces that were measured.
//!
//! Two kinds of forms are fitted, for n ranks and S bytes.
//!
//! *Blended*, for libraries on switched fabrics. Small messages cost `base + a (n - 1) + b n S`: a
//! fixed part, a part for every further rank, and bytes that meet on shared edges. Large ones cost
//! what a ring costs. Between the two the logarithms are blended around 512 KiB. A library that
//! changes its algorithm with the size is neither, so samples count the less for the small form the
//! larger they are. Where the bytes of more ranks contend for more than their share, `n` becomes a
//! power of n.
//!
//! *One algorithm for all sizes*, for cards whose links are their own:
//!
//! | form | time |
//! |---|---|
//! | ring | `base + 2 (n - 1) alpha + 2 (n - 1) / n S / beta` |
//! | recursive-doubling | `base + ceil(log2 n) (alpha + S / beta)` |
//! | one-shot | `base + (n - 1) (alpha + S / beta)` |
//!
//! Which one it is, the residuals say. The blended form is kept unless its mean residual is more than
//! 1 % and one of these has less than 0.6 of that, or less than a twentieth of any, and is no worse
//! for small messages. Six samples on two rank counts are the least for that. The 0.6 was chosen with
//! published tables and rings with noise in sight.
//!
//! Some samples do not tell forms apart: small messages on 2 and 4 ranks cost the same blended and by
//! recursive doubling. Algorithms that fit as well as the form that was chosen, but differ from it on
//! other rank counts, are kept beside it as rivals: bands cover them, and a caveat names them.
//!
//! All parameters are zero or more, residuals are relative, and one wild sample does not matter: its
//! pull is bounded, and if all others agree much better without it, it is rejected.

mod calibrate;
mod choose;
mod forms;
mod toml;

use self::choose::{Choice, choose};
use self::forms::{Form, Known, Small, large_share, large_weight, small_weight};
use super::band::{LEAST_SCALE, Parameter, UNKNOWN_SCALE, doublings, robust_scale};
use super::file::bad;
use super::solve::distance;
use super::{Band, LinkSample, LinkSamples};
use crate::PlanError;
use spanker_topology::Provenance;

/// The least size of samples for the large form.
const LARGE_FROM: f64 = 256.0 * 1024.0;

/// A fitted model of all-reduces over some links.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkModel {
    provenance: Provenance,
    form: Form,
    /// Algorithms that fit the samples as well as the form.
    rivals: Vec<Known>,
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
        let Choice { form, rejected, rivals } =
            choose(samples).ok_or_else(|| bad("the samples fit no link"))?;
        let kept: Vec<LinkSample> =
            (0..samples.len()).filter(|at| Some(*at) != rejected).map(|at| samples[at]).collect();
        let ends = |of: fn(&LinkSample) -> u64| {
            let values = || kept.iter().map(of);
            (values().min().unwrap_or(1), values().max().unwrap_or(1))
        };
        let ranks = ends(|sample| sample.ranks as u64);
        let mut model = LinkModel {
            provenance: Provenance::Fitted,
            form,
            rivals,
            scales: (LEAST_SCALE, LEAST_SCALE),
            ranks: (ranks.0 as usize, ranks.1 as usize),
            bytes: ends(|sample| sample.bytes),
            samples: samples.len(),
            rejected: rejected.map(|at| samples[at]),
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
        let contended = if self.form.contended() { CONTENDED } else { 1.0 };
        let wider = doublings(n, (self.ranks.0 as f64, self.ranks.1 as f64)) * contended;
        let larger = doublings(size, (0.0, self.bytes.1 as f64));
        // Below the smallest size the time hardly changes: it is latency.
        let smaller = doublings(size.max(1.0), (self.bytes.0 as f64, f64::MAX)) * BELOW;
        let one_count = self.ranks.0 == self.ranks.1 && wider > 0.0;
        let one_size = self.bytes.0 == self.bytes.1 && larger + smaller > 0.0;
        if one_count || one_size {
            scale = scale.max(UNKNOWN_SCALE);
        }
        let around = |time| Band::around(time, scale, wider + larger + smaller);
        let rivals = self.rivals.iter().map(|rival| around(rival.time(n, size)));
        rivals.fold(around(self.form.time(n, size)), |band, rival| Band {
            low: band.low.min(rival.low),
            high: band.high.max(rival.high),
            ..band
        })
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
        if !self.rivals.is_empty() {
            let names: Vec<&str> = self.rivals.iter().map(|rival| rival.algorithm.name()).collect();
            caveats.push(format!(
                "the samples fit {} as well as the form that was chosen, {}: bands for other rank \
                 counts cover all of them, and samples of a further one tell them apart",
                names.join(" and "),
                self.form.name()
            ));
        }
        caveats
    }

    /// The parameters, for people.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        match &self.form {
            Form::Whole(known) => known_parameters(known, WHOLE).to_vec(),
            Form::Blended { small, large } => {
                let large = large.iter().flat_map(|large| known_parameters(large, LARGE));
                small_parameters(small).into_iter().chain(large).collect()
            }
        }
    }

    /// The scales of residuals, as seen from small and from large messages.
    fn residual_scales(&self, kept: &[LinkSample]) -> (f64, f64) {
        let residual = |sample: &LinkSample| {
            let time = self.form.time(sample.ranks as f64, sample.bytes as f64);
            distance(time / sample.microseconds)
        };
        let weighted = |weight: fn(f64) -> f64, from: f64| -> Vec<(f64, f64)> {
            let sized = kept.iter().filter(|sample| sample.bytes as f64 >= from);
            sized.map(|sample| (residual(sample), weight(sample.bytes as f64))).collect()
        };
        let parameters = self.form.parameters();
        if let Form::Whole(_) = self.form {
            // One algorithm for all sizes is as certain at all sizes.
            let scale = robust_scale(&weighted(|_| 1.0, 0.0), parameters.0, UNTESTED_SCALE);
            return (scale, scale);
        }
        let small = robust_scale(&weighted(small_weight, 0.0), parameters.0, UNTESTED_SCALE);
        let large = weighted(large_weight, LARGE_FROM);
        if large.is_empty() {
            return (small, small.max(UNSEEN_LARGE_SCALE));
        }
        let large = robust_scale(&large, parameters.1, UNTESTED_SCALE).max(LARGE_SCALE);
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

/// The names of the parameters of one algorithm: for all sizes, and for large messages.
const WHOLE: [&str; 3] = ["whole.base_us", "whole.per_hop_us", "whole.per_byte_us"];
const LARGE: [&str; 3] = ["large.base_us", "large.per_hop_us", "large.per_byte_us"];

fn entry(name: &'static str, value: f64, unit: &'static str, meaning: &str) -> Parameter {
    Parameter { name, value, unit, meaning: meaning.to_owned() }
}

fn known_parameters(known: &Known, [base, hop, byte]: [&'static str; 3]) -> [Parameter; 3] {
    let Known { algorithm, base_us, per_hop_us, per_byte_us } = *known;
    let rate = match per_byte_us {
        0.0 => "bytes are free".to_owned(),
        cost => format!("{} at {:.3} GB/s", algorithm.name(), 1e-3 / cost),
    };
    [
        entry(base, base_us, "us", "fixed, per call"),
        entry(hop, per_hop_us, "us", algorithm.hops()),
        entry(byte, per_byte_us, "us/B", &rate),
    ]
}

fn small_parameters(small: &Small) -> [Parameter; 4] {
    let Small { base_us, per_rank_us, per_byte_us, exponent } = *small;
    let growth = match exponent {
        1.0 => "bytes cost this times the ranks",
        _ => "the links contend: bytes cost this times ranks^exponent",
    };
    [
        entry("small.base_us", base_us, "us", "fixed, per call"),
        entry("small.per_rank_us", per_rank_us, "us", "for every rank after the first"),
        entry("small.per_byte_us", per_byte_us, "us/B", growth),
        entry("small.exponent", exponent, "", "how the cost of bytes grows with ranks"),
    ]
}
