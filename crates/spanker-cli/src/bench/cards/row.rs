// SPDX-License-Identifier: Apache-2.0
//! One line of results on cards.

use serde::Serialize;
use spanker_runtime::Pace;
use spanker_scheduler::{Algorithm, DType};
use spanker_topology::Seconds;

use super::Case;
use crate::bench::samples::Sample;
use crate::directory;
use crate::sizes::human;

/// A line of the table, and the schema of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    collective: &'static str,
    fabric: &'static str,
    cards: Vec<usize>,
    emulated: bool,
    pace: &'static str,
    /// Whose clock the time is by: `card` or `wall`.
    clock: &'static str,
    dtype: &'static str,
    op: &'static str,
    algorithm: &'static str,
    bytes_per_card: usize,
    count: usize,
    time_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    /// `None` for cards whose pace is that of this host.
    predicted_us: Option<f64>,
    /// How far the prediction is from the time, in per cent of the time.
    error_percent: Option<f64>,
    pub(super) wrong: usize,
    repeats: usize,
}

/// What was measured of one size.
pub(super) struct Measured {
    pub(super) algorithm: Algorithm,
    pub(super) elements: usize,
    pub(super) seconds: f64,
    pub(super) repeats: usize,
    pub(super) predicted: Option<Seconds>,
    pub(super) wrong: usize,
}

impl Row {
    pub(super) fn new(case: &Case<'_>, dtype: DType, measured: &Measured) -> Row {
        let Measured { elements, seconds, .. } = *measured;
        let bytes = elements * dtype.size();
        let algbw = bytes as f64 / seconds / 1e9;
        let error = |Seconds(predicted): Seconds| (predicted / seconds - 1.0) * 100.0;
        Row {
            collective: case.collective.name(),
            fabric: "cards",
            cards: case.cards.indices().to_vec(),
            emulated: case.pace != Pace::Real,
            pace: directory::pace(case.pace),
            clock: if case.pace == Pace::CardTime { "card" } else { "wall" },
            dtype: dtype.name(),
            op: if case.collective.reduces() { case.op.name() } else { "none" },
            algorithm: measured.algorithm.name(),
            bytes_per_card: bytes,
            count: elements,
            time_us: seconds * 1e6,
            algbw_gbps: algbw,
            busbw_gbps: algbw * case.collective.bus_factor(case.group.ranks()),
            predicted_us: measured.predicted.map(|Seconds(predicted)| predicted * 1e6),
            error_percent: measured.predicted.map(error),
            wrong: measured.wrong,
            repeats: measured.repeats,
        }
    }

    pub(super) fn header(case: &Case<'_>) -> String {
        let clock = if case.pace == Pace::CardTime { "card time" } else { "wall time" };
        format!(
            "{:>8} {:>10} {:>5} {:>9} {:>18} {:>11} {:>8} {:>8} {:>11} {:>7} {:>7}\n\
             {:>8} {:>10} {:>5} {:>9} {:>18} {:>11} {:>8} {:>8} {:>11} {:>7} {:>7}",
            "size",
            "count",
            "type",
            "op",
            "algorithm",
            clock,
            "algbw",
            "busbw",
            "predicted",
            "error",
            "#wrong",
            "(B)",
            "(elements)",
            "",
            "",
            "",
            "(us)",
            "(GB/s)",
            "(GB/s)",
            "(us)",
            "(%)",
            "",
        )
    }

    /// The row as `spanker fit link` sees it.
    pub(in crate::bench) fn sample(&self) -> Sample {
        let (bytes, microseconds) = (self.bytes_per_card, self.time_us);
        Sample { ranks: self.cards.len(), bytes, microseconds }
    }

    pub(super) fn text(&self) -> String {
        let figure = |value: Option<f64>, signed: bool| match value {
            Some(value) if signed => format!("{value:+.2}"),
            Some(value) => format!("{value:.2}"),
            None => "-".to_owned(),
        };
        format!(
            "{:>8} {:>10} {:>5} {:>9} {:>18} {:>11.2} {:>8.3} {:>8.3} {:>11} {:>7} {:>7}",
            human(self.bytes_per_card),
            self.count,
            self.dtype,
            self.op,
            self.algorithm,
            self.time_us,
            self.algbw_gbps,
            self.busbw_gbps,
            figure(self.predicted_us, false),
            figure(self.error_percent, true),
            self.wrong,
        )
    }
}
