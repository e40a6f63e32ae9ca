// SPDX-License-Identifier: Apache-2.0
//! A row of a model's benchmark: its figures, and the schema of `--json`.

use serde::Serialize;
use spanker_engine::{Fabric, Host, Model};
use spanker_model::Quant;
use spanker_plan::Plan;

use super::{Repeats, Work};
use crate::turns::median;

/// How fast a model ran on a host. Speeds are tokens per second, medians of the repeats.
#[derive(Debug, Clone, Serialize)]
pub struct ModelRow {
    version: u32,
    model: String,
    /// How many cards share the model.
    pub cards: usize,
    /// Threads in all; nothing where cards are not on this processor.
    pub threads: Option<usize>,
    /// How the model is split.
    pub strategy: &'static str,
    repeats: u64,
    /// The prompt.
    pub prompt: Phase,
    /// The tokens after it.
    pub generation: Phase,
    /// One of those.
    pub token: TokenTime,
    /// What reading the weights allows.
    pub limit: Limit,
    /// Milliseconds until the model was ready.
    pub load_ms: f64,
    /// What it takes.
    pub memory: Memory,
}

/// A part of the work.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    /// How many tokens.
    pub tokens: u64,
    /// By the host's clock.
    pub tokens_per_second: Option<f64>,
    /// By the clocks of cards that have some.
    pub card_tokens_per_second: Option<f64>,
    /// Each repeat, by the host's clock.
    pub each: Vec<f64>,
    /// By the plan, with what was measured in the same turns.
    pub predicted_tokens_per_second: f64,
}

impl Phase {
    /// How much longer it took than predicted, in per cent: more than nothing is slower.
    #[must_use]
    pub fn error_percent(&self, measured: Option<f64>) -> Option<f64> {
        measured.map(|measured| (self.predicted_tokens_per_second / measured - 1.0) * 100.0)
    }
}

/// Microseconds of a token.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct TokenTime {
    /// By the host's clock.
    pub wall_us: Option<f64>,
    /// By the clocks of cards.
    pub card_us: Option<f64>,
    /// On exchanges and waiting.
    pub sync_us: Option<f64>,
}

/// What reading the weights allows.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Limit {
    /// Bytes of weights that a token reads.
    pub bytes_per_token: u64,
    /// How fast they can be read.
    pub read_bytes_per_second: Option<f64>,
    /// The speed as a part of what that allows.
    pub of_limit: Option<f64>,
}

/// Bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Memory {
    /// The model's file.
    pub file_bytes: u64,
    /// The KV cache of one sequence.
    pub kv_bytes: u64,
    /// The most that this process has had; nothing where the system does not say.
    pub peak_bytes: Option<u64>,
}

impl Memory {
    /// As it is by now.
    #[must_use]
    pub fn of(model: &Model, context: usize) -> Memory {
        Memory {
            file_bytes: model.network().bytes().len() as u64,
            kv_bytes: model.shape().kv_bytes_per_token(Quant::F16) * context as u64,
            peak_bytes: peak_bytes(),
        }
    }
}

fn peak_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

pub(super) fn row(
    host: &Host,
    model: &Model,
    plan: &Plan,
    work: &Work,
    repeats: Repeats,
    load_ms: f64,
) -> ModelRow {
    let prediction = plan.predict();
    let (wall, card) = (median(&repeats.wall), median(&repeats.card));
    let read = median(&repeats.bandwidths);
    let micros = |rate: Option<f64>| rate.map(|rate| 1e6 / rate);
    let on_processor = matches!(host.fabric(), Fabric::Inproc | Fabric::Mpi | Fabric::Tcp);
    ModelRow {
        version: 1,
        model: model.shape().name.clone(),
        cards: plan.layout.cards().len(),
        threads: on_processor.then_some(host.thread_count()),
        strategy: plan.layout.strategy().name(),
        repeats: work.repeats,
        prompt: Phase {
            tokens: work.request.prompt,
            tokens_per_second: median(&repeats.prompt_wall),
            card_tokens_per_second: median(&repeats.prompt_card),
            each: repeats.prompt_wall,
            predicted_tokens_per_second: plan.request.prompt as f64 / prediction.ttft.0,
        },
        generation: Phase {
            tokens: work.generated as u64,
            tokens_per_second: wall,
            card_tokens_per_second: card,
            each: repeats.wall,
            predicted_tokens_per_second: prediction.tokens_per_second,
        },
        token: TokenTime {
            wall_us: micros(wall),
            card_us: micros(card),
            sync_us: median(&repeats.sync).map(|seconds| seconds * 1e6),
        },
        limit: Limit {
            bytes_per_token: repeats.bytes,
            read_bytes_per_second: read,
            of_limit: read.zip(wall).map(|(read, wall)| wall * repeats.bytes.max(1) as f64 / read),
        },
        load_ms,
        memory: Memory::of(model, work.request.context as usize),
    }
}
