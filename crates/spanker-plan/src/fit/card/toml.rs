// SPDX-License-Identifier: Apache-2.0
//! The file of a card model. Its fields are described in the module above.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde::Deserialize;
use spanker_collective::MAX_RANKS;
use spanker_model::Quant;
use spanker_topology::Provenance;

use super::CardModel;
use super::growth::{Exchange, Growth, Terms};
use crate::PlanError;
use crate::fit::band::LARGEST_SCALE;
use crate::fit::file::{VERSION, amount, bad, parse, printable, range, within};

/// The most rivals: each way to grow with each choice of terms.
const MOST_RIVALS: usize = 16;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "version")]
    _version: i64,
    #[serde(rename = "kind")]
    _kind: String,
    provenance: Provenance,
    card: CardTable,
    exchange: Option<ExchangeTable>,
    residual: Residual,
    #[serde(default)]
    rival: Vec<Rival>,
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
struct ExchangeTable {
    growth: String,
    per_layer_ms: f64,
    scale: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rival {
    per_gigabyte_ms: f64,
    per_layer_ms: f64,
    growth: Option<String>,
    exchange_per_layer_ms: Option<f64>,
    exchange_scale: Option<f64>,
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
    #[serde(default)]
    card_counts: Vec<usize>,
    layer_bytes: [f64; 2],
    models: Vec<String>,
    quants: Vec<Quant>,
}

/// A name as TOML writes text. Names of models have no control characters.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
}

fn list<T>(all: impl IntoIterator<Item = T>, text: impl Fn(T) -> String) -> String {
    all.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

impl ExchangeTable {
    /// The term, checked; `name` gives the name of a field in messages.
    fn read(self, name: impl Fn(&str) -> String) -> Result<Exchange, PlanError> {
        let growth = Growth::named(&self.growth).ok_or_else(|| {
            let (field, found) = (name("growth"), printable(&self.growth));
            bad(format!("{field} '{found}': expected {}", list(Growth::ALL, |g| g.name().into())))
        })?;
        let per_layer_ms = amount(&name("per_layer_ms"), self.per_layer_ms)?;
        let scale = self
            .scale
            .map(|scale| within(&name("scale"), scale, 0.0, LARGEST_SCALE))
            .transpose()?;
        Ok(Exchange { growth, per_layer_ms, scale })
    }
}

impl Rival {
    fn read(self) -> Result<Terms, PlanError> {
        let exchange = match (self.growth, self.exchange_per_layer_ms) {
            (None, None) => None,
            (Some(growth), Some(per_layer_ms)) => {
                let table = ExchangeTable { growth, per_layer_ms, scale: self.exchange_scale };
                Some(table.read(|field| format!("rival.{field}"))?)
            }
            _ => return Err(bad("rival: growth and exchange_per_layer_ms come together")),
        };
        let per_gigabyte_ms = amount("rival.per_gigabyte_ms", self.per_gigabyte_ms)?;
        let per_layer_ms = amount("rival.per_layer_ms", self.per_layer_ms)?;
        Ok(Terms { per_gigabyte_ms, per_layer_ms, exchange })
    }
}

/// The sections of the terms: the chosen ones.
fn terms_text(terms: &Terms, rate: &str) -> String {
    let Terms { per_gigabyte_ms, per_layer_ms, exchange } = terms;
    let mut text = format!(
        "# per_gigabyte_ms (bytes of weights on the card) / 10^9 + per_layer_ms (layers)
[card]
per_gigabyte_ms = {per_gigabyte_ms:?} # {rate}
per_layer_ms = {per_layer_ms:?}
"
    );
    if let Some(Exchange { growth, per_layer_ms, scale }) = exchange {
        let (name, formula) = (growth.name(), growth.formula());
        let _ = write!(
            text,
            "
# plus per_layer_ms (layers) times {formula} for what n cards exchange
[exchange]
growth = \"{name}\"
per_layer_ms = {per_layer_ms:?}
"
        );
        if let Some(scale) = scale {
            let _ = writeln!(text, "scale = {scale:?}");
        }
    }
    text
}

/// The sections of other accounts of the samples.
fn rivals_text(rivals: &[Terms]) -> String {
    let mut text = String::new();
    if !rivals.is_empty() {
        text.push_str("\n# Other accounts that fit the samples as well, which the bands cover\n");
    }
    for Terms { per_gigabyte_ms, per_layer_ms, exchange } in rivals {
        let _ = write!(
            text,
            "[[rival]]\nper_gigabyte_ms = {per_gigabyte_ms:?}\nper_layer_ms = {per_layer_ms:?}\n"
        );
        if let Some(Exchange { growth, per_layer_ms, scale }) = exchange {
            let name = growth.name();
            let _ = write!(text, "growth = \"{name}\"\nexchange_per_layer_ms = {per_layer_ms:?}\n");
            if let Some(scale) = scale {
                let _ = writeln!(text, "exchange_scale = {scale:?}");
            }
        }
    }
    text
}

impl CardModel {
    /// The model as a file that a person can read.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let CardModel { provenance, scale, samples, .. } = self;
        let ((fewest, most), (least, largest)) = (self.cards, self.layer_bytes);
        let terms = terms_text(&self.terms, &self.memory_bandwidth().to_string());
        let rivals = rivals_text(&self.rivals);
        let models = list(&self.models, |name| quoted(name));
        let quants = list(&self.quants, |quant| format!("\"{quant}\""));
        let counts = match self.counts.is_empty() {
            true => String::new(),
            false => format!("card_counts = [{}]\n", list(&self.counts, usize::to_string)),
        };
        format!(
            "# How long cards work on a token, fitted to measurements.
version = {VERSION}
kind = \"card\"
provenance = \"{provenance}\"

{terms}
# The scale of relative residuals, which the bands follow
[residual]
scale = {scale:?}
{rivals}
# What the fit has seen; bands widen outside
[sampled]
samples = {samples}
cards = [{fewest}, {most}]
{counts}layer_bytes = [{least:?}, {largest:?}]
models = [{models}]
quants = [{quants}]
"
        )
    }

    /// Reads a model from its file, also from one that was written before there were exchange terms.
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
        let exchange = file.exchange.map(|table| table.read(|field| format!("exchange.{field}")));
        let exchange = exchange.transpose()?;
        if file.rival.len() > MOST_RIVALS {
            let count = file.rival.len();
            return Err(bad(format!("rival: {count} of them, at most {MOST_RIVALS}")));
        }
        let rivals = file.rival.into_iter().map(Rival::read).collect::<Result<_, _>>()?;
        let [least, most] = file.sampled.layer_bytes;
        within("sampled.layer_bytes", least, 1.0, 1e18)?;
        within("sampled.layer_bytes", most, 1.0, 1e18)?;
        let cards = range("sampled.cards", file.sampled.cards, (1, MAX_RANKS))?;
        let counts: BTreeSet<usize> = file.sampled.card_counts.into_iter().collect();
        let ends = counts.first().copied().zip(counts.last().copied());
        if let Some((fewest, most)) = ends.filter(|ends| *ends != cards) {
            return Err(bad(format!(
                "sampled.card_counts from {fewest} to {most} are not those of sampled.cards [{}, {}]",
                cards.0, cards.1
            )));
        }
        Ok(CardModel {
            provenance: file.provenance,
            terms: Terms { per_gigabyte_ms, per_layer_ms, exchange },
            rivals,
            scale: within("residual.scale", file.residual.scale, 0.0, LARGEST_SCALE)?,
            cards,
            counts,
            layer_bytes: range("sampled.layer_bytes", [least, most], (1.0, 1e18))?,
            models: file.sampled.models.into_iter().collect(),
            quants: file.sampled.quants.into_iter().collect(),
            samples: file.sampled.samples,
        })
    }
}
