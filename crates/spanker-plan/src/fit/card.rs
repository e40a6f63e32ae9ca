// SPDX-License-Identifier: Apache-2.0
//! How long cards work on a token, fitted to decoding times that were measured.
//!
//! A token costs `X / B + f L + c g(n) L`: X bytes of weights that each card reads, B bytes per second that
//! reading sustains, L layers, f per layer that does not shrink with the share (launches, norms, waiting for
//! the slowest), and c per layer for what n cards exchange, which grows as g(n) does: n - 1, log2 n,
//! 2 (n - 1) / n or n (n - 1) / 2. The samples decide whether there is such a term and which. Where they were
//! taken without communication there is none, and communication is the link's.
//!
//! Divided by L the first two are a straight line over X / L, the bytes of a layer on each card. So a fit of
//! a small model on few cards is asked about a large one on many only where it has to be extended along
//! that line.
//!
//! # The file
//!
//! [`CardModel::to_toml`] writes and [`CardModel::from_toml`] reads, bit for bit:
//!
//! | field | says |
//! |---|---|
//! | `version`, `kind`, `provenance` | 1, `"card"`, `"fitted"` |
//! | `card.per_gigabyte_ms`, `card.per_layer_ms` | 10^12 / B, and f in milliseconds |
//! | `exchange.growth` | `"linear"`, `"log"`, `"share"` or `"pairs"`, in the order above; no `[exchange]` without the term |
//! | `exchange.per_layer_ms` | c in milliseconds: a layer's exchanges on two cards |
//! | `exchange.scale` | the scale of the exchanges' residuals, only where a `transfer` column gave them |
//! | `residual.scale` | the scale of relative residuals |
//! | `rival`, any number | another account that fits the samples as well, which bands cover: `per_gigabyte_ms`, `per_layer_ms` and, with an exchange term, `growth`, `exchange_per_layer_ms` and `exchange_scale` |
//! | `sampled.samples`, `sampled.models`, `sampled.quants` | how many, and of what |
//! | `sampled.cards`, `sampled.layer_bytes` | the least and the most |
//! | `sampled.card_counts` | every number of cards; files from before the exchange term lack it |

mod calibrate;
mod choose;
mod growth;
mod load;
mod toml;

use std::collections::BTreeSet;

use spanker_model::{Model, Quant};
use spanker_topology::{BytesPerSecond, Provenance, Seconds};

use super::band::{Parameter, UNKNOWN_SCALE, doublings, robust_scale};
use super::file::bad;
use super::{Band, CardSample, CardSamples};
use crate::PlanError;
use choose::{Point, choose, choose_exchange};
use growth::{GIGA, Terms};
use load::Load;

/// The scale where every sample went into a parameter and none is left to test them.
const UNTESTED_SCALE: f64 = 0.05;
/// What a model that was not sampled counts, in doublings: its shapes may suit the card less.
const OTHER_MODEL: f64 = 1.0;
/// What a type that was not sampled counts, in doublings: its kernels may be better or worse.
const OTHER_QUANT: f64 = 2.0;
/// With fewer numbers of cards the samples do not tell how exchanges grow.
const COUNTS_FOR_GROWTH: usize = 3;

/// The fastest memory, in bytes per second.
const FASTEST: f64 = 1e18;

/// A fitted model of one card, and of what cards exchange if the samples show it.
#[derive(Debug, Clone, PartialEq)]
pub struct CardModel {
    provenance: Provenance,
    terms: Terms,
    /// Other accounts that fit the samples as well.
    rivals: Vec<Terms>,
    /// The scale of relative residuals.
    scale: f64,
    /// What was sampled, ends included.
    cards: (usize, usize),
    /// Every number of cards; empty if the file does not have them.
    counts: BTreeSet<usize>,
    layer_bytes: (f64, f64),
    models: BTreeSet<String>,
    quants: BTreeSet<Quant>,
    samples: usize,
}

/// A predicted time per token in milliseconds, and its terms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CardTime {
    /// The time: the sum of the terms.
    pub time: Band,
    /// The part for reading weights.
    pub memory_ms: f64,
    /// The part that does not shrink with the share.
    pub fixed_ms: f64,
    /// The part for exchanges between the cards; 0 unless the samples show them.
    pub exchange_ms: f64,
}

/// How most of the model is stored.
fn main_quant(model: &Model) -> Option<Quant> {
    model.layers.first().map(|layer| layer.gate.quant)
}

impl CardModel {
    /// Fits a model to samples.
    ///
    /// Samples that all have the same bytes in a layer on a card (one model on one number of cards)
    /// cannot tell the terms apart. Then all time is memory's, bands elsewhere are wide, and
    /// [`caveats`](CardModel::caveats) says so.
    ///
    /// An exchange term is there if the samples support it: if it explains more than the noise of
    /// measurements, or if more cards were no faster. How it grows takes three numbers of cards to tell;
    /// with fewer it is linear, and the bands cover the others. Where the samples have a
    /// [`transfer`](CardSample::transfer_ms), that alone decides about exchanges, and the rest is work.
    ///
    /// # Errors
    /// [`PlanError::File`] if no parameters fit.
    pub fn fit(samples: &CardSamples) -> Result<CardModel, PlanError> {
        let samples = samples.samples();
        let load = |sample: &CardSample| Load::of(&sample.shape, sample.cards);
        let work: Vec<Point> =
            samples.iter().map(|s| Point { load: load(s), ms: s.milliseconds }).collect();
        let apart = samples.iter().any(|sample| sample.transfer_ms.is_some());
        let chosen = if apart { choose::plain(&work) } else { choose(&work) };
        let mut chosen = chosen.ok_or_else(|| bad("the samples fit no card"))?;
        let transfer = |sample: &CardSample| {
            let ms = sample.transfer_ms.filter(|ms| sample.cards > 1 && *ms > 0.0)?;
            Some(Point { load: load(sample), ms })
        };
        let transfers: Vec<Point> = samples.iter().filter_map(transfer).collect();
        if let Some((exchange, rivals)) = choose_exchange(&transfers, chosen.terms) {
            chosen.terms.exchange = Some(exchange);
            chosen.rivals = rivals;
        }
        let counts: BTreeSet<usize> = samples.iter().map(|sample| sample.cards).collect();
        let per_layer = || work.iter().map(|point| point.load.layer_bytes());
        Ok(CardModel {
            provenance: Provenance::Fitted,
            terms: chosen.terms,
            rivals: chosen.rivals,
            scale: robust_scale(&chosen.residuals, chosen.parameters, UNTESTED_SCALE),
            cards: (counts.first().copied().unwrap_or(1), counts.last().copied().unwrap_or(1)),
            counts,
            layer_bytes: (
                per_layer().fold(f64::INFINITY, f64::min),
                per_layer().fold(0.0, f64::max),
            ),
            models: samples.iter().map(|sample| sample.shape.name.clone()).collect(),
            quants: samples.iter().filter_map(|sample| main_quant(&sample.shape)).collect(),
            samples: samples.len(),
        })
    }

    /// The time per token of a model that `cards` cards share, in milliseconds. Communication is in it if
    /// the samples showed it.
    ///
    /// How far that is from what was sampled is the larger of two distances: in cards, and in bytes of
    /// a layer on each card. A model that was not sampled counts as one doubling more, and a type that
    /// was not sampled as two. The band is that of all accounts that fit the samples equally well.
    #[must_use]
    pub fn predict(&self, model: &Model, cards: usize) -> CardTime {
        let load = Load::of(model, cards);
        let ends = (self.cards.0 as f64, self.cards.1 as f64);
        // A layer's bytes are sums in another order than when they were sampled.
        let (least, most) = self.layer_bytes;
        let along = doublings(load.layer_bytes(), (least * (1.0 - 1e-9), most * (1.0 + 1e-9)));
        let mut away = doublings(load.cards, ends).max(along);
        let mut scale = self.scale;
        let one_count = self.counts.len() == 1 && !self.counts.contains(&cards.max(1));
        let blind = self.one_point() || self.terms.per_gigabyte_ms <= 0.0;
        if one_count || (blind && away > 0.0) {
            scale = scale.max(UNKNOWN_SCALE);
        }
        if !self.models.contains(&model.name) {
            away += OTHER_MODEL;
        }
        if main_quant(model).is_some_and(|quant| !self.quants.contains(&quant)) {
            away += OTHER_QUANT;
        }
        let around = |terms: &Terms| match terms.exchange.and_then(|exchange| exchange.scale) {
            None => Band::around(terms.ms(load), scale, away),
            Some(apart) => {
                let work = terms.memory_ms(load) + terms.fixed_ms(load);
                let exchange = terms.exchange_ms(load);
                Band::around(work, scale, away) + Band::around(exchange, apart, away)
            }
        };
        let rivals = self.rivals.iter().map(around);
        let time = rivals.fold(around(&self.terms), |band, rival| Band {
            low: band.low.min(rival.low),
            high: band.high.max(rival.high),
            ..band
        });
        let terms = &self.terms;
        CardTime {
            time,
            memory_ms: terms.memory_ms(load),
            fixed_ms: terms.fixed_ms(load),
            exchange_ms: terms.exchange_ms(load),
        }
    }

    /// The same without exchanges: for use beside a model of the links, which stands for them.
    #[must_use]
    pub fn without_exchange(&self) -> CardModel {
        let terms = Terms { exchange: None, ..self.terms };
        CardModel { terms, rivals: Vec::new(), counts: BTreeSet::new(), ..self.clone() }
    }

    /// What a layer's exchanges take on this many cards, if the samples show any.
    #[must_use]
    pub fn exchange_per_layer(&self, cards: usize) -> Option<Seconds> {
        let load = Load { bytes: 0.0, layers: 1.0, cards: cards.max(1) as f64 };
        self.terms.exchange.map(|exchange| Seconds(exchange.ms(load) / 1e3))
    }

    /// What reading weights sustains; at most 10^18 bytes per second, which stands for no bound.
    #[must_use]
    pub fn memory_bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond((GIGA / self.terms.per_gigabyte_ms * 1e3).clamp(1.0, FASTEST) as u64)
    }

    /// The fixed cost of one of the operators of a layer that a calibrated card charges for: four products and
    /// attention, each an equal part of the layer's.
    #[must_use]
    pub fn per_operator(&self) -> Seconds {
        Seconds(self.terms.per_layer_ms / 1e3 / calibrate::CHARGED)
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
        if self.terms.per_gigabyte_ms <= 0.0 {
            caveats.push(
                "more bytes took no longer: the rate of the memory is unknown and taken as \
                 unbounded"
                    .to_owned(),
            );
        }
        caveats.extend(self.growth_caveat());
        caveats
    }

    /// What the samples leave open about more cards.
    fn growth_caveat(&self) -> Option<String> {
        let counts: Vec<String> = self.counts.iter().map(usize::to_string).collect();
        let growth = self.terms.exchange.map(|exchange| exchange.growth);
        if counts.is_empty() {
            return None;
        }
        if counts.len() < COUNTS_FOR_GROWTH {
            let (next, only) = (self.cards.1 + 1, counts.join(" and "));
            let word = if only == "1" { "card" } else { "cards" };
            return Some(match growth {
                None => format!(
                    "samples have {only} {word} only: whether {next} and more are slower is not known, \
                     so bands there are wide"
                ),
                Some(growth) => format!(
                    "samples have {only} {word} only: how much slower {next} and more are is not known \
                     and taken as {}, so bands there are wide",
                    growth.name()
                ),
            });
        }
        let name = |terms: &Terms| terms.exchange.map_or("none", |exchange| exchange.growth.name());
        let chosen = name(&self.terms);
        let names: BTreeSet<&str> =
            self.rivals.iter().map(name).filter(|name| *name != chosen).collect();
        (!names.is_empty()).then(|| {
            format!(
                "the samples fit exchanges that grow in other ways ({}) as well as the chosen one \
                 ({chosen}): bands for other numbers of cards cover all of them",
                names.into_iter().collect::<Vec<_>>().join(", ")
            )
        })
    }

    /// The parameters, for people.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameter> {
        let rate = match self.terms.per_gigabyte_ms {
            0.0 => "more bytes took no longer".to_owned(),
            _ => format!("weights are read at {}", self.memory_bandwidth()),
        };
        let fixed = format!("does not shrink with the share; {} per operator", self.per_operator());
        let entry = |name, value, unit, meaning| Parameter { name, value, unit, meaning };
        let mut parameters = vec![
            entry("card.per_gigabyte_ms", self.terms.per_gigabyte_ms, "ms/GB", rate),
            entry("card.per_layer_ms", self.terms.per_layer_ms, "ms", fixed),
        ];
        if let Some(exchange) = self.terms.exchange {
            let growth = exchange.growth.formula();
            let meaning = format!("exchanges of a layer on 2 cards; on n cards times {growth}");
            parameters.push(entry("exchange.per_layer_ms", exchange.per_layer_ms, "ms", meaning));
        }
        parameters
    }

    /// Whether all samples are at one place of the line.
    fn one_point(&self) -> bool {
        self.layer_bytes.1 <= self.layer_bytes.0 * (1.0 + 1e-6)
    }
}
