// SPDX-License-Identifier: Apache-2.0
//! What kinds of operators cost on a card that was measured, kind by kind and for several numbers of rows.
//!
//! Without such a table an operator costs the longer of its bytes over the memory's rate and its
//! multiplications over the arithmetic's. Processors are not that simple: a kernel for one row and one for
//! many differ, each type of weights has its own, and small operators are all overhead.

use serde::{Deserialize, Serialize};

use crate::Seconds;

/// A kind of operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum OperatorKind {
    /// A product of activations with weights of one type. Its unit is a byte of weights.
    Product,
    /// Attention over the KV cache. Its unit is a multiply-accumulate.
    Attention,
    /// The same of many sequences that have one row each, by their number.
    ManyAttention,
    /// A norm. Its unit, and that of all kinds below, is a byte read or written.
    Norm,
    /// Activations rounded to the blocks that weights are multiplied with.
    Quantize,
    /// Rotary embedding.
    Rotate,
    /// Keys or values rounded into the KV cache.
    Cache,
    /// The gate of the feed-forward network.
    Gate,
    /// Sums of rows.
    Add,
    /// Rows of the embedding table.
    Embed,
    /// The best candidates of the logits.
    Best,
    /// Copies and fills.
    Copy,
}

impl OperatorKind {
    /// Every kind.
    pub const ALL: [OperatorKind; 12] = [
        OperatorKind::Product,
        OperatorKind::Attention,
        OperatorKind::ManyAttention,
        OperatorKind::Norm,
        OperatorKind::Quantize,
        OperatorKind::Rotate,
        OperatorKind::Cache,
        OperatorKind::Gate,
        OperatorKind::Add,
        OperatorKind::Embed,
        OperatorKind::Best,
        OperatorKind::Copy,
    ];

    /// The name that files use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            OperatorKind::Product => "product",
            OperatorKind::Attention => "attention",
            OperatorKind::ManyAttention => "many-attention",
            OperatorKind::Norm => "norm",
            OperatorKind::Quantize => "quantize",
            OperatorKind::Rotate => "rotate",
            OperatorKind::Cache => "cache",
            OperatorKind::Gate => "gate",
            OperatorKind::Add => "add",
            OperatorKind::Embed => "embed",
            OperatorKind::Best => "best",
            OperatorKind::Copy => "copy",
        }
    }
}

/// What operators of one kind cost for one number of rows: `overhead + units / rate`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperatorRate {
    /// The kind.
    pub kind: OperatorKind,
    /// The type of the weights, as `spanker profiles` names it, where the kind depends on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
    /// Rows of activations that it was measured with.
    pub rows: u64,
    /// The fixed cost of one.
    pub overhead: Seconds,
    /// Units in a second; [`OperatorKind`] says what a unit is.
    pub rate: f64,
}

impl OperatorRate {
    /// The time of an operator of so many units.
    #[must_use]
    pub fn time(&self, units: f64) -> f64 {
        self.overhead.0 + units / self.rate
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let (kind, rate, overhead) = (self.kind.name(), self.rate, self.overhead.0);
        if !(rate.is_finite() && rate > 0.0) {
            return Err(format!("compute.operators: {kind}: {rate} is not a rate"));
        }
        if !(overhead.is_finite() && overhead >= 0.0) {
            return Err(format!("compute.operators: {kind}: {overhead} s is not an overhead"));
        }
        if self.rows == 0 {
            return Err(format!("compute.operators: {kind}: 0 rows"));
        }
        Ok(())
    }
}

/// The time of an operator of `units` units on `rows` rows, by the entries of its kind in ascending order of
/// rows: between two of them time is a line over the rows, beyond the last that of a product grows with them, and the
/// fixed cost of attention of many sequences with their number.
///
/// ```
/// use spanker_topology::{OperatorKind, OperatorRate, Seconds, operator_time};
/// let entry = |rows, rate| OperatorRate {
///     kind: OperatorKind::Product, weights: None, rows, overhead: Seconds(1e-6), rate,
/// };
/// let entries = [entry(1, 1e9), entry(9, 1e8)];
/// assert!((operator_time(&entries, 1, 1000.0).unwrap() - 2e-6).abs() < 1e-12);
/// assert!((operator_time(&entries, 5, 1000.0).unwrap() - 6.5e-6).abs() < 1e-12);
/// assert!((operator_time(&entries, 18, 1000.0).unwrap() - 22e-6).abs() < 1e-12);
/// ```
#[must_use]
pub fn operator_time(entries: &[OperatorRate], rows: u64, units: f64) -> Option<f64> {
    let above = entries.partition_point(|entry| entry.rows < rows);
    match (above.checked_sub(1).and_then(|below| entries.get(below)), entries.get(above)) {
        (None, None) => None,
        (None, Some(first)) => Some(first.time(units)),
        // A product reads the same weights for any number of rows; all other kinds have more units on more rows.
        (Some(last), None) if last.kind == OperatorKind::Product => {
            Some(last.time(units) * rows as f64 / last.rows as f64)
        }
        (Some(last), None) if last.kind == OperatorKind::ManyAttention => {
            Some(last.overhead.0 * rows as f64 / last.rows as f64 + units / last.rate)
        }
        (Some(last), None) => Some(last.time(units)),
        (Some(below), Some(next)) => {
            let part = (rows - below.rows) as f64 / (next.rows - below.rows) as f64;
            Some(below.time(units) * (1.0 - part) + next.time(units) * part)
        }
    }
}
