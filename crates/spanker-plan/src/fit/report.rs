// SPDX-License-Identifier: Apache-2.0
//! A fit beside the samples that it comes from: the schema of `spanker fit --json`.

use serde::Serialize;
use serde_json::{Value, json};

use super::{CardModel, CardSample, CardSamples, LinkModel, LinkSample, LinkSamples, Parameter};

/// A fit beside its samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FitReport {
    /// What was fitted: `link` or `card`.
    pub kind: &'static str,
    /// Where the model comes from.
    pub provenance: String,
    /// The unit of times.
    pub unit: &'static str,
    /// The model's parameters.
    pub parameters: Vec<Parameter>,
    /// Each sample beside what the model says.
    pub samples: Vec<FitRow>,
    /// How far samples are from the model, in the mean.
    pub mean_error_percent: f64,
    /// The same at worst.
    pub worst_error_percent: f64,
    /// What the fit does not know, in sentences.
    pub notes: Vec<String>,
}

/// A sample beside what the model says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FitRow {
    /// What was measured.
    #[serde(flatten)]
    pub sample: Value,
    /// The time of it.
    pub measured: f64,
    /// What the model says.
    pub predicted: f64,
    /// How much longer that is.
    pub error_percent: f64,
    /// All other samples contradict it.
    pub rejected: bool,
}

impl FitRow {
    fn new(sample: Value, measured: f64, predicted: f64) -> FitRow {
        let error_percent = 100.0 * (predicted / measured - 1.0);
        FitRow { sample, measured, predicted, error_percent, rejected: false }
    }
}

impl FitReport {
    fn new(kind: &'static str, samples: Vec<FitRow>) -> FitReport {
        let kept = || samples.iter().filter(|row| !row.rejected).map(|r| r.error_percent.abs());
        FitReport {
            kind,
            provenance: String::new(),
            unit: "",
            parameters: Vec::new(),
            mean_error_percent: kept().sum::<f64>() / kept().count().max(1) as f64,
            worst_error_percent: kept().fold(0.0, f64::max),
            samples,
            notes: Vec::new(),
        }
    }

    /// A model of a link beside the samples that it was fitted to.
    #[must_use]
    pub fn of_link(samples: &LinkSamples, fitted: &LinkModel) -> FitReport {
        let rejected = fitted.rejected();
        let row = |sample: &LinkSample| {
            let LinkSample { ranks, bytes, microseconds } = *sample;
            let predicted = fitted.predict(ranks, bytes).value;
            FitRow::new(json!({ "ranks": ranks, "bytes": bytes }), microseconds, predicted)
        };
        let mut rows: Vec<FitRow> = samples.samples().iter().map(row).collect();
        let wild = samples.samples().iter().position(|sample| Some(*sample) == rejected);
        if let Some(row) = wild.and_then(|at| rows.get_mut(at)) {
            row.rejected = true;
        }
        let mut notes = fitted.caveats();
        notes.extend(rejected.map(|LinkSample { ranks, bytes, microseconds }| {
            format!(
                "one sample was rejected, {microseconds} us for {bytes} bytes on {ranks} ranks: all others agree much \
                 better without it"
            )
        }));
        FitReport {
            provenance: fitted.provenance().to_string(),
            unit: "us",
            parameters: fitted.parameters(),
            notes,
            ..FitReport::new("link", rows)
        }
    }

    /// A model of cards beside the samples that it was fitted to.
    #[must_use]
    pub fn of_card(samples: &CardSamples, fitted: &CardModel) -> FitReport {
        let row = |sample: &CardSample| {
            let predicted = fitted.predict(&sample.shape, sample.cards).time.value;
            let (model, quant, cards) = (&sample.model, sample.quant.to_string(), sample.cards);
            let measured = sample.milliseconds + sample.transfer_ms.unwrap_or(0.0);
            FitRow::new(
                json!({ "model": model, "quant": quant, "cards": cards }),
                measured,
                predicted,
            )
        };
        FitReport {
            provenance: fitted.provenance().to_string(),
            unit: "ms",
            parameters: fitted.parameters(),
            notes: fitted.caveats(),
            ..FitReport::new("card", samples.samples().iter().map(row).collect())
        }
    }
}
