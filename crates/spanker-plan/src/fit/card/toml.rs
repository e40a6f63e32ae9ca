// SPDX-License-Identifier: Apache-2.0
//! The file of a card model.

use serde::Deserialize;
use spanker_collective::MAX_RANKS;
use spanker_model::Quant;
use spanker_topology::Provenance;

use super::CardModel;
use crate::PlanError;
use crate::fit::file::{VERSION, amount, bad, parse, range, within};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "version")]
    _version: i64,
    #[serde(rename = "kind")]
    _kind: String,
    provenance: Provenance,
    card: CardTable,
    residual: Residual,
    sampled: Sampled,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CardTable {
    per_gigabyte_ms: f64,
    per_layer_ms: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Residual {
    scale: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sampled {
    samples: usize,
    cards: [usize; 2],
    layer_bytes: [f64; 2],
    models: Vec<String>,
    quants: Vec<Quant>,
}

/// A name as TOML writes text. Names of models have no control characters.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
}

impl CardModel {
    /// The model as a file that a person can read.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let CardModel { provenance, per_gigabyte_ms, per_layer_ms, scale, samples, .. } = self;
        let ((fewest, most), (least, largest)) = (self.cards, self.layer_bytes);
        let rate = self.memory_bandwidth();
        let models: Vec<String> = self.models.iter().map(|name| quoted(name)).collect();
        let models = models.join(", ");
        let quants: Vec<String> = self.quants.iter().map(|quant| format!("\"{quant}\"")).collect();
        let quants = quants.join(", ");
        format!(
            "# How long a card works on a token, without communication, fitted to measurements.
version = {VERSION}
kind = \"card\"
provenance = \"{provenance}\"

# per_gigabyte_ms (bytes of weights on the card) / 10^9 + per_layer_ms (layers)
[card]
per_gigabyte_ms = {per_gigabyte_ms:?} # {rate}
per_layer_ms = {per_layer_ms:?}

# The scale of relative residuals, which the bands follow
[residual]
scale = {scale:?}

# What the fit has seen; bands widen outside
[sampled]
samples = {samples}
cards = [{fewest}, {most}]
layer_bytes = [{least:?}, {largest:?}]
models = [{models}]
quants = [{quants}]
"
        )
    }

    /// Reads a model from its file.
    ///
    /// # Errors
    /// [`PlanError::File`] that names the field and its value.
    pub fn from_toml(text: &str) -> Result<CardModel, PlanError> {
        let file: File = parse(text, "card")?;
        let per_gigabyte_ms = amount("card.per_gigabyte_ms", file.card.per_gigabyte_ms)?;
        let per_layer_ms = amount("card.per_layer_ms", file.card.per_layer_ms)?;
        if per_gigabyte_ms + per_layer_ms <= 0.0 {
            return Err(bad("card: per_gigabyte_ms and per_layer_ms are both 0"));
        }
        let [least, most] = file.sampled.layer_bytes;
        within("sampled.layer_bytes", least, 1.0, 1e18)?;
        within("sampled.layer_bytes", most, 1.0, 1e18)?;
        Ok(CardModel {
            provenance: file.provenance,
            per_gigabyte_ms,
            per_layer_ms,
            scale: within("residual.scale", file.residual.scale, 0.0, 10.0)?,
            cards: range("sampled.cards", file.sampled.cards, (1, MAX_RANKS))?,
            layer_bytes: range("sampled.layer_bytes", [least, most], (1.0, 1e18))?,
            models: file.sampled.models.into_iter().collect(),
            quants: file.sampled.quants.into_iter().collect(),
            samples: file.sampled.samples,
        })
    }
}
