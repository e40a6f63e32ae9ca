// SPDX-License-Identifier: Apache-2.0
//! A predicted time with its band, and what widens it.

use std::ops::{Add, Mul};

use serde::Serialize;

/// A predicted time and the band that should hold nine of ten measurements of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Band {
    /// The prediction.
    pub value: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Band {
    /// No time at all, for certain.
    pub const ZERO: Band = Band { value: 0.0, low: 0.0, high: 0.0 };

    /// `value` with the band of a relative scale `doublings` away from what was sampled.
    pub(super) fn around(value: f64, scale: f64, doublings: f64) -> Band {
        let factor = (NINE_OF_TEN * scale * (1.0 + doublings)).exp().min(WIDEST);
        Band { value, low: value / factor, high: value * factor }
    }
}

impl Add for Band {
    type Output = Band;
    /// The time of both. Their ends are added, as if both were off in the same direction.
    fn add(self, other: Band) -> Band {
        Band {
            value: self.value + other.value,
            low: self.low + other.low,
            high: self.high + other.high,
        }
    }
}

impl Mul<f64> for Band {
    type Output = Band;
    fn mul(self, times: f64) -> Band {
        Band { value: self.value * times, low: self.low * times, high: self.high * times }
    }
}

/// A parameter of a fitted model, for people.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parameter {
    /// Its name in the model's file, after the name of its section.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Its unit; empty for a plain number.
    pub unit: &'static str,
    /// What it says.
    pub meaning: String,
}

/// The quantile of the normal distribution that leaves five in a hundred on each side.
const NINE_OF_TEN: f64 = 1.645;
/// The widest band: beyond this it says nothing anyway.
const WIDEST: f64 = 1000.0;
/// How far published measurements of the same thing differ.
pub(super) const LEAST_SCALE: f64 = 0.05;
/// The largest scale: bands are as wide as they get long before.
pub(super) const LARGEST_SCALE: f64 = 10.0;
/// The least scale in a direction in which the samples do not differ.
pub(super) const UNKNOWN_SCALE: f64 = 0.25;

/// How many doublings `value` is outside the sampled range.
pub(super) fn doublings(value: f64, (least, most): (f64, f64)) -> f64 {
    (value / most).log2().max((least / value).log2()).max(0.0)
}

/// The robust scale of relative residuals, of which `parameters` were fitted away.
///
/// Without residuals to spare there is nothing to estimate from, and `unknown` stands in.
pub(super) fn robust_scale(residuals: &[(f64, f64)], parameters: usize, unknown: f64) -> f64 {
    let mut sorted: Vec<(f64, f64)> = residuals.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = sorted.iter().map(|(_, weight)| weight).sum();
    let spare = sorted.len() as f64 - parameters as f64;
    if spare < 1.0 || total <= 0.0 {
        return unknown;
    }
    let mut below = 0.0;
    let median = sorted.iter().find(|(_, weight)| {
        below += weight;
        below >= total / 2.0
    });
    let corrected = (sorted.len() as f64 / spare).sqrt();
    let scale = 1.4826 * corrected * median.map_or(0.0, |(residual, _)| *residual);
    scale.clamp(LEAST_SCALE, LARGEST_SCALE)
}
