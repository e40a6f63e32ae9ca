// SPDX-License-Identifier: Apache-2.0
//! How long a card works on a token, fitted to decoding times that were measured.
//!
//! A token costs `X / B + f L`: X bytes of weights that each card reads, B bytes per second that
//! reading sustains, L layers, and f per layer that does not shrink with the share (launches, norms,
//! waiting for the slowest). Communication is not in it: that is the link's.
//!
//! Divided by L this is a straight line over X / L, the bytes of a layer on each card. So a fit of a
//! small model on few cards is asked about a large one on many only where it has to be extended along
//! that line.

mod toml;

use std::collections::BTreeSet;

use spanker_model::{Layer, Model, Quant};
use spanker_topology::{BytesPerSecond, Provenance, Seconds};

use super::band::{Parameter, UNKNOWN_SCALE, doublings, robust_scale};
use super::file::bad;
use super::solve::{distance, dot, robust};
use super::{Band, CardSample, CardSamples};
use crate::PlanError;

/// The unit of the bytes' column.
const GIGA: f64 = 1e9;
/// The residual beyond which a sample's pull grows no more.
const BEND: f64 = 0.05;
/// With fewer samples there is no majority to be robust with.
const ENOUGH: usize = 4;
/// The operators of a layer that have a fixed cost: one for each matrix.
const OPERATORS: f64 = 7.0;
/// The scale where every sample went into a parameter and none is left to test them.
const UNTESTED_SCALE: f64 = 0.05;
/// What a model that was not sampled counts, in doublings: its shapes may suit the card less.
const OTHER_MODEL: f64 = 1.0;
/// What a type that was not sampled counts, in doublings: its kernels may be better or worse.
const OTHER_QUANT: f64 = 2.0;

/// The fastest memory, in bytes per second.
const FASTEST: f64 = 1e18;

/// A fitted model of one card.
#[derive(Debug, Clone, PartialEq)]
pub struct CardModel {
    provenance: Provenance,
    /// Milliseconds to read a gigabyte. It is 0 where more bytes took no longer.
    per_gigabyte_ms: f64,
    per_layer_ms: f64,
    /// The scale of relative residuals.
    scale: f64,
    /// What was sampled, ends included.
    cards: (usize, usize),
    layer_bytes: (f64, f64),
    models: BTreeSet<String>,
    quants: BTreeSet<Quant>,
    samples: usize,
}

/// A predicted time per token in milliseconds, and its terms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CardTime {
    /// The time, without communication.
    pub time: Band,
    /// The part for reading weights.
    pub memory_ms: f64,
    /// The part that does not shrink with the share.
    pub fixed_ms: f64,
}

/// The bytes of weights that each of `cards` cards reads for a token.
///
/// Keys and values are split by their heads, so a share never shrinks below one head's; norms and
/// biases are whole on every card.
fn bytes_per_card(model: &Model, cards: usize) -> f64 {
    let share = 1.0 / cards.max(1) as f64;
    let kv_share = share.max(1.0 / model.kv_heads.max(1) as f64);
    let layer = |layer: &Layer| {
        let split = [&layer.q, &layer.o, &layer.gate, &layer.up, &layer.down];
        let split: f64 = split.iter().map(|matrix| matrix.bytes() as f64).sum();
        let kv = (layer.k.bytes() as f64) + (layer.v.bytes() as f64);
        split * share + kv * kv_share + layer.other_bytes as f64
    };
    let layers: f64 = model.layers.iter().map(layer).sum();
    layers + model.head.bytes() as f64 * share + model.other_bytes as f64
}

/// The number of layers, at least 1.
fn layers(model: &Model) -> f64 {
    model.layers.len().max(1) as f64
}

/// How most of the model is stored.
fn main_quant(model: &Model) -> Option<Quant> {
    model.layers.first().map(|layer| layer.gate.quant)
}

impl CardModel {
    /// Fits a model to samples.
    ///
    /// Samples that all have the same bytes in a layer on a card (one model on one number of cards)
    /// cannot tell the two terms apart. Then all time is memory's, bands elsewhere are wide, and
    /// [`caveats`](CardModel::caveats) says so. Where more bytes took no longer, all time is fixed and
    /// the memory's rate is without bound.
    ///
    /// # Errors
    /// [`PlanError::File`] if no parameters fit.
    pub fn fit(samples: &CardSamples) -> Result<CardModel, PlanError> {
        let samples = samples.samples();
        let columns = |sample: &CardSample| {
            let bytes = bytes_per_card(&sample.shape, sample.cards);
            [bytes / GIGA, layers(&sample.shape)]
        };
        let columns: Vec<[f64; 2]> = samples.iter().map(columns).collect();
        let relative =
            |(row, sample): (&[f64; 2], &CardSample)| row.map(|x| x / sample.milliseconds);
        let rows: Vec<[f64; 2]> = columns.iter().zip(samples).map(relative).collect();
        let iterations = if samples.len() >= ENOUGH { 25 } else { 1 };
        let found = robust(&rows, &vec![1.0; rows.len()], BEND, iterations)
            .ok_or_else(|| bad("the samples fit no card"))?;
        let residuals: Vec<(f64, f64)> =
            rows.iter().map(|row| (distance(dot(row, &found)), 1.0)).collect();
        let parameters = found.iter().filter(|c| **c > 0.0).count();
        let cards = || samples.iter().map(|sample| sample.cards);
        let per_layer = || columns.iter().map(|[gigabytes, layers]| gigabytes * GIGA / layers);
        Ok(CardModel {
            provenance: Provenance::Fitted,
            per_gigabyte_ms: found[0],
            per_layer_ms: found[1],
            scale: robust_scale(&residuals, parameters, UNTESTED_SCALE),
            cards: (cards().min().unwrap_or(1), cards().max().unwrap_or(1)),
            layer_bytes: (
                per_layer().fold(f64::INFINITY, f64::min),
                per_layer().fold(0.0, f64::max),
            ),
            models: samples.iter().map(|sample| sample.shape.name.clone()).collect(),
            quants: samples.iter().filter_map(|sample| main_quant(&sample.shape)).collect(),
            samples: samples.len(),
        })
    }

    /// The time per token of a model that `cards` cards share, in milliseconds and without
    /// communication.
    ///
    /// How far that is from what was sampled is the larger of two distances: in cards, and in bytes of
    /// a layer on each card. A model that was not sampled counts as one doubling more, and a type that
    /// was not sampled as two.
    #[must_use]
    pub fn predict(&self, model: &Model, cards: usize) -> CardTime {
        let (bytes, layers) = (bytes_per_card(model, cards), layers(model));
        let memory_ms = self.per_gigabyte_ms * bytes / GIGA;
        let fixed_ms = self.per_layer_ms * layers;
        let ends = (self.cards.0 as f64, self.cards.1 as f64);
        // A layer's bytes are sums in another order than when they were sampled.
        let (least, most) = self.layer_bytes;
        let along = doublings(bytes / layers, (least * (1.0 - 1e-9), most * (1.0 + 1e-9)));
        let mut away = doublings(cards.max(1) as f64, ends).max(along);
        let mut scale = self.scale;
        if (self.one_point() || self.per_gigabyte_ms <= 0.0) && away > 0.0 {
            scale = scale.max(UNKNOWN_SCALE);
        }
        if !self.models.contains(&model.name) {
            away += OTHER_MODEL;
        }
        if main_quant(model).is_some_and(|quant| !self.quants.contains(&quant)) {
            away += OTHER_QUANT;
        }
        CardTime { time: Band::around(memory_ms + fixed_ms, scale, away), memory_ms, fixed_ms }
    }

    /// What reading weights sustains; at most 10^18 bytes per second, which stands for no bound.
    #[must_use]
    pub fn memory_bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond((GIGA / self.per_gigabyte_ms * 1e3).clamp(1.0, FASTEST) as u64)
    }

    /// The fixed cost of one of a layer's seven matrix products: a seventh of the layer's.
    #[must_use]
    pub fn per_operator(&self) -> Seconds {
        Seconds(self.per_layer_ms / 1e3 / OPERATORS)
    }

    /// Where the numbers come from.
    #[must_use]
    pub fn provenance(&self) -> Provenance {
        self.provenance
    }

    /// What the samples leave open, in sentences.
    #[must_use]
    pub fn caveats(&self) -> Vec<String> {
        let mut caveats = Vec::new();
        if self.one_point() {
            let cards = self.cards.0;
            caveats.push(format!(
                "all samples have the same bytes in a layer on each card (cards: {cards}): the fixed \
                 cost is unknown and taken as none, so bands elsewhere are wide"
            ));
        }
        if self.per_gigabyte_ms <= 0.0 {
            caveats.push(
                "more bytes took no longer: the rate of the memory is unknown and taken as \
                 unbounded"
                    .to_owned(),
            );
        }
        caveats
    }

    /// The parameters, for people.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        let rate = match self.per_gigabyte_ms {
            0.0 => "more bytes took no longer".to_owned(),
            _ => format!("weights are read at {}", self.memory_bandwidth()),
        };
        let fixed = format!("does not shrink with the share; {} per operator", self.per_operator());
        let entry = |name, value, unit, meaning| Parameter { name, value, unit, meaning };
        vec![
            entry("card.per_gigabyte_ms", self.per_gigabyte_ms, "ms/GB", rate),
            entry("card.per_layer_ms", self.per_layer_ms, "ms", fixed),
        ]
    }

    /// Whether all samples are at one place of the line.
    fn one_point(&self) -> bool {
        self.layer_bytes.1 <= self.layer_bytes.0 * (1.0 + 1e-6)
    }
}
