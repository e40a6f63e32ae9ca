// SPDX-License-Identifier: Apache-2.0
//! One line of results on logical cards of a GPU.

use serde::Serialize;
use spanker_scheduler::{Collective, DType};

use super::{Case, REPEATS, TURNS};
use crate::bench::samples::Sample;
use crate::sizes::human;

/// A line of the table, and the schema of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    collective: &'static str,
    fabric: &'static str,
    gpu: usize,
    name: String,
    /// One GPU emulates the cards.
    logical: bool,
    cards: usize,
    dtype: &'static str,
    op: &'static str,
    algorithm: &'static str,
    bytes_per_card: usize,
    count: usize,
    time_us: f64,
    /// Bytes read and written in the time.
    moved_gbps: f64,
    /// What copies moved in the same run, taking turns.
    copy_gbps: f64,
    of_copy: f64,
    /// The bytes at the rate of copies that were measured first, and a launch.
    predicted_us: f64,
    /// How far the prediction is from the time, in per cent of the time.
    error_percent: f64,
    pub(super) wrong: usize,
    repeats: usize,
}

/// What was measured of one size.
pub(super) struct Measured {
    pub(super) elements: usize,
    pub(super) seconds: f64,
    pub(super) copy_rate: f64,
    pub(super) wrong: usize,
}

impl Row {
    pub(super) fn new(case: &Case, dtype: DType, measured: &Measured) -> Row {
        let Measured { elements, seconds, copy_rate, wrong } = *measured;
        let bytes = elements * dtype.size();
        // Every buffer is read; all are written, or one.
        let written = if matches!(case.collective, Collective::AllReduce) { case.cards } else { 1 };
        let moved = (bytes * (case.cards + written)) as f64;
        let probed = case.probe.copy.bytes_per_second.max(1) as f64;
        let predicted = moved / probed + case.probe.launch_seconds;
        Row {
            collective: case.collective.name(),
            fabric: "cuda",
            gpu: case.gpu.index(),
            name: case.probe.name.clone(),
            logical: true,
            cards: case.cards,
            dtype: dtype.name(),
            op: case.op.name(),
            algorithm: "fused",
            bytes_per_card: bytes,
            count: elements,
            time_us: seconds * 1e6,
            moved_gbps: moved / seconds / 1e9,
            copy_gbps: copy_rate / 1e9,
            of_copy: moved / seconds / copy_rate,
            predicted_us: predicted * 1e6,
            error_percent: (predicted / seconds - 1.0) * 100.0,
            wrong,
            repeats: TURNS * REPEATS as usize,
        }
    }

    pub(super) fn header() -> String {
        let line = |cells: [&str; 11]| {
            let [size, count, dtype, op, time, moved, copy, of, predicted, error, wrong] = cells;
            format!(
                "{size:>8} {count:>11} {dtype:>5} {op:>9} {time:>11} {moved:>8} {copy:>8} {of:>8} \
                 {predicted:>11} {error:>7} {wrong:>7}"
            )
        };
        let names = [
            "size",
            "count",
            "type",
            "op",
            "time",
            "moved",
            "copy",
            "of copy",
            "predicted",
            "error",
            "#wrong",
        ];
        let units =
            ["(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(%)", ""];
        format!("{}\n{}", line(names), line(units))
    }

    /// The row as `spanker fit link` sees it.
    pub(in crate::bench) fn sample(&self) -> Sample {
        let (bytes, microseconds) = (self.bytes_per_card, self.time_us);
        Sample { ranks: self.cards, bytes, microseconds }
    }

    pub(super) fn text(&self) -> String {
        format!(
            "{:>8} {:>11} {:>5} {:>9} {:>11.2} {:>8.1} {:>8.1} {:>8.3} {:>11.2} {:>+7.2} {:>7}",
            human(self.bytes_per_card),
            self.count,
            self.dtype,
            self.op,
            self.time_us,
            self.moved_gbps,
            self.copy_gbps,
            self.of_copy,
            self.predicted_us,
            self.error_percent,
            self.wrong,
        )
    }
}
