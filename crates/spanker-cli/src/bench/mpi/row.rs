// SPDX-License-Identifier: Apache-2.0
//! One line of results between processes.

use serde::Serialize;
use spanker_scheduler::DType;

use super::Case;
use super::forecast::Way;
use super::pairs::Pairs;
use crate::bench::samples::Sample;
use crate::sizes::human;

/// A line of the table, and the schema of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    collective: &'static str,
    fabric: &'static str,
    ranks: usize,
    dtype: &'static str,
    op: &'static str,
    algorithm: &'static str,
    bytes_per_card: usize,
    count: usize,
    time_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    pub(super) wrong: usize,
    predicted_us: Option<f64>,
    /// How far the prediction is from the time, in per cent of the time.
    error_percent: Option<f64>,
    /// The time of `MPI_Allreduce` from C in the same run; `None` where there is no such comparison.
    plain_us: Option<f64>,
    /// How many times as fast as that: the median of comparisons that were made one right after the other.
    vs_mpi: Option<f64>,
    /// Between which values that median lies, with a confidence of 95 %.
    vs_mpi_range: Option<[f64; 2]>,
    repeats: usize,
    /// Whether the prediction would have been the same right after the row: if not, the machine has changed.
    pub(super) steady: bool,
}

/// What was measured of one size.
pub(super) struct Measured {
    pub(super) way: Way,
    pub(super) elements: usize,
    pub(super) seconds: f64,
    pub(super) versus: Option<Pairs>,
    pub(super) predicted: Option<f64>,
    pub(super) steady: bool,
    pub(super) wrong: usize,
    pub(super) repeats: usize,
}

impl Row {
    pub(super) fn new(case: &Case, dtype: DType, measured: &Measured) -> Row {
        let Measured { elements, seconds, versus, predicted, .. } = *measured;
        let bytes = elements * dtype.size();
        let algbw = bytes as f64 / seconds / 1e9;
        Row {
            collective: case.collective.name(),
            fabric: "mpi",
            ranks: case.ranks,
            dtype: dtype.name(),
            op: if case.collective.reduces() { case.op.name() } else { "none" },
            algorithm: measured.way.name(),
            bytes_per_card: bytes,
            count: elements,
            time_us: seconds * 1e6,
            algbw_gbps: algbw,
            busbw_gbps: algbw * case.collective.bus_factor(case.ranks),
            wrong: measured.wrong,
            predicted_us: predicted.map(|time| time * 1e6),
            error_percent: predicted.map(|time| (time / seconds - 1.0) * 100.0),
            plain_us: versus.map(|pairs| pairs.theirs * 1e6),
            vs_mpi: versus.map(|pairs| pairs.ratio),
            vs_mpi_range: versus.map(|pairs| pairs.range),
            repeats: measured.repeats,
            steady: measured.steady,
        }
    }

    pub(super) fn header() -> String {
        format!(
            "{:>8} {:>10} {:>5} {:>9} {:>18} {:>11} {:>8} {:>8} {:>7} {:>11} {:>7} {:>7}\n\
             {:>8} {:>10} {:>5} {:>9} {:>18} {:>11} {:>8} {:>8} {:>7} {:>11} {:>7} {:>7}",
            "size",
            "count",
            "type",
            "op",
            "algorithm",
            "time",
            "algbw",
            "busbw",
            "#wrong",
            "predicted",
            "error",
            "vs MPI",
            "(B)",
            "(elements)",
            "",
            "",
            "",
            "(us)",
            "(GB/s)",
            "(GB/s)",
            "",
            "(us)",
            "(%)",
            "",
        )
    }

    /// The row as `spanker fit link` sees it.
    pub(in crate::bench) fn sample(&self) -> Sample {
        let (bytes, microseconds) = (self.bytes_per_card, self.time_us);
        Sample { ranks: self.ranks, bytes, microseconds }
    }

    pub(super) fn text(&self) -> String {
        let shown = |value: Option<f64>, digits: usize, unit: &str| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}{unit}"))
        };
        format!(
            "{:>8} {:>10} {:>5} {:>9} {:>18} {:>11.2} {:>8.3} {:>8.3} {:>7} {:>11} {:>7} {:>7}",
            human(self.bytes_per_card),
            self.count,
            self.dtype,
            self.op,
            self.algorithm,
            self.time_us,
            self.algbw_gbps,
            self.busbw_gbps,
            self.wrong,
            shown(self.predicted_us, 2, ""),
            shown(self.error_percent, 0, ""),
            shown(self.vs_mpi, 2, "x"),
        )
    }
}
