// SPDX-License-Identifier: Apache-2.0
//! A row of `spanker bench model`: its figures, as text and as JSON.

use serde_json::{Value, json};
use spanker_engine::Fabric;
use spanker_model::Quant;

use super::{Args, Subject};
use crate::llm::{FabricKind, Place};
use crate::output;

/// Whether rows have the limit that reading weights sets, measured by threads of this process.
pub(super) fn reads(fabric: FabricKind) -> bool {
    fabric == FabricKind::Inproc
}

/// What each repeat gave. Speeds are tokens per second.
#[derive(Debug, Default)]
pub(super) struct Row {
    pub(super) prompt_wall: Vec<f64>,
    pub(super) prompt_card: Vec<f64>,
    pub(super) wall: Vec<f64>,
    pub(super) card: Vec<f64>,
    /// Seconds of a token on exchanges and waiting.
    pub(super) sync: Vec<f64>,
    /// Bytes per second of plain reading.
    pub(super) bandwidths: Vec<f64>,
    /// Bytes of weights that a token reads.
    pub(super) bytes: u64,
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// The speed that reading sets a limit to, as a part of that limit.
fn of_limit(row: &Row) -> Option<f64> {
    let limit = median(&row.bandwidths)? / row.bytes.max(1) as f64;
    Some(median(&row.wall)? / limit)
}

/// What a file of the system says about this process, in bytes.
fn status(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = line.trim_start_matches(':').split_whitespace().next()?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Bytes of the file, of the keys and values of one sequence, and the most that the process had.
fn bytes(place: &Place) -> (u64, u64, Option<u64>) {
    let file = place.model.network().bytes().len() as u64;
    let keys = place.model.shape().kv_bytes_per_token(Quant::F16) * place.context as u64;
    (file, keys, status("VmHWM"))
}

pub(super) fn header(fabric: FabricKind, place: &Place, repeats: u64) -> Vec<String> {
    let model = place.model.shape();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut lines = vec![format!(
        "# {}, {}; {cores} cores; tokens/s, medians of {repeats}",
        model.name,
        output::bytes(place.model.network().bytes().len() as u64)
    )];
    lines.push(match fabric {
        FabricKind::Inproc | FabricKind::Mpi => format!(
            "{:>5} {:>7} {:>11} {:>11} {:>9} {:>11} {:>9} {:>10} {:>9} {:>9}",
            "cards",
            "threads",
            "pp",
            "tg",
            "of limit",
            "read (GB/s)",
            "sync (us)",
            "load (ms)",
            "pp error",
            "tg error"
        ),
        FabricKind::Cuda => format!(
            "{:>5} {:>11} {:>11} {:>9} {:>11} {:>11} {:>8} {:>10}",
            "cards", "pp", "tg", "of limit", "read (GB/s)", "predicted", "error", "load (ms)"
        ),
        FabricKind::Cards => format!(
            "{:>5} {:>9} {:>10} {:>10} {:>10} {:>8} {:>10} {:>10} {:>10}",
            "cards",
            "split",
            "pp card",
            "tg card",
            "predicted",
            "error",
            "pp wall",
            "tg wall",
            "load (ms)"
        ),
    });
    lines
}

/// How much longer a token takes than predicted, where both are speeds: more than nothing is slower.
fn error(predicted: f64, measured: Option<f64>) -> String {
    match measured {
        Some(measured) => format!("{:+.1} %", (predicted / measured - 1.0) * 100.0),
        None => "-".into(),
    }
}

/// The line about memory.
pub(super) fn memory(place: &Place) -> String {
    let (file, keys, peak) = bytes(place);
    let peak = peak.map_or_else(|| "not known".into(), output::bytes);
    let (file, keys) = (output::bytes(file), output::bytes(keys));
    format!("# most memory of this process: {peak}; file {file}, keys and values {keys} a row")
}

impl Subject<'_> {
    /// Tokens per second of the prompt, as predicted.
    fn prompt_rate(&self) -> f64 {
        self.plan.request.prompt as f64 / self.plan.predict().ttft.0
    }

    pub(super) fn text(&self, fabric: FabricKind) -> String {
        let figure = |values: &[f64], digits: usize| match median(values) {
            Some(value) => format!("{value:.digits$}"),
            None => "-".into(),
        };
        let row = &self.row;
        let load = self.load.as_secs_f64() * 1e3;
        match fabric {
            FabricKind::Inproc | FabricKind::Mpi => {
                let sync = median(&row.sync).unwrap_or(0.0) * 1e6;
                let read = median(&row.bandwidths).unwrap_or(0.0) / 1e9;
                format!(
                    "{:>5} {:>7} {:>11} {:>11} {:>9.2} {read:>11.2} {sync:>9.1} {load:>10.1} {:>9} {:>9}",
                    self.plan.layout.cards().len(),
                    self.host.thread_count(),
                    figure(&row.prompt_wall, 2),
                    figure(&row.wall, 2),
                    of_limit(row).unwrap_or(0.0),
                    error(self.prompt_rate(), median(&row.prompt_wall)),
                    error(self.plan.predict().tokens_per_second, median(&row.wall)),
                )
            }
            FabricKind::Cuda => {
                let predicted = self.plan.predict().tokens_per_second;
                let measured = median(&row.wall).unwrap_or(f64::NAN);
                let read = median(&row.bandwidths).unwrap_or(0.0) / 1e9;
                format!(
                    "{:>5} {:>11} {measured:>11.2} {:>9.2} {read:>11.1} {predicted:>11.2} {:>+6.1} % {load:>10.1}",
                    self.plan.layout.cards().len(),
                    figure(&row.prompt_wall, 2),
                    of_limit(row).unwrap_or(0.0),
                    (predicted / measured - 1.0) * 100.0,
                )
            }
            FabricKind::Cards => {
                let predicted = self.plan.predict().tokens_per_second;
                let error = error(predicted, median(&row.card));
                format!(
                    "{:>5} {:>9} {:>10} {:>10} {predicted:>10.3} {error:>8} {:>10} {:>10} {load:>10.1}",
                    self.plan.layout.cards().len(),
                    self.plan.layout.strategy().name(),
                    figure(&row.prompt_card, 3),
                    figure(&row.card, 3),
                    figure(&row.prompt_wall, 3),
                    figure(&row.wall, 3),
                )
            }
        }
    }

    pub(super) fn to_json(&self, args: &Args) -> Value {
        let place = self.place;
        let row = &self.row;
        let (file, keys, peak) = bytes(place);
        let prediction = self.plan.predict();
        let on_processor = matches!(self.host.fabric(), Fabric::Inproc | Fabric::Mpi);
        let micros = |rate: Option<f64>| rate.map(|rate| 1e6 / rate);
        json!({
            "version": 1,
            "model": place.model.shape().name,
            "cards": self.plan.layout.cards().len(),
            "threads": on_processor.then_some(self.host.thread_count()),
            "strategy": self.plan.layout.strategy().name(),
            "repeats": args.repeats,
            "prompt": { "tokens": args.prompt, "tokens_per_second": median(&row.prompt_wall),
                "card_tokens_per_second": median(&row.prompt_card), "each": row.prompt_wall,
                "predicted_tokens_per_second": self.prompt_rate() },
            "generation": { "tokens": args.generated, "tokens_per_second": median(&row.wall),
                "card_tokens_per_second": median(&row.card), "each": row.wall,
                "predicted_tokens_per_second": prediction.tokens_per_second },
            "token": { "wall_us": micros(median(&row.wall)), "card_us": micros(median(&row.card)),
                "sync_us": median(&row.sync).map(|seconds| seconds * 1e6) },
            "limit": { "bytes_per_token": row.bytes, "read_bytes_per_second": median(&row.bandwidths),
                "of_limit": of_limit(row) },
            "load_ms": self.load.as_secs_f64() * 1e3,
            "memory": { "file_bytes": file, "kv_bytes": keys, "peak_bytes": peak },
        })
    }
}
