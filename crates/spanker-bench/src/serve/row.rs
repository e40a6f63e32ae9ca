// SPDX-License-Identifier: Apache-2.0
//! A row of a server's benchmark: its figures beside the prediction, and the schema of `--json`.

use serde::Serialize;
use spanker_engine::{Arrivals, Forecast, ServiceLoad};

use super::LoadSeen;

/// Times in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Times {
    /// The middle one.
    pub p50_ms: f64,
    /// What all but one of a hundred stay below.
    pub p99_ms: f64,
}

impl Times {
    fn of(seconds: [f64; 2]) -> Times {
        let [p50_ms, p99_ms] = seconds.map(|seconds| 1e3 * seconds);
        Times { p50_ms, p99_ms }
    }
}

/// What was foretold of a row.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ServeForecast {
    /// Tokens of answers in a second.
    pub tokens_per_second: f64,
    /// To the first token.
    pub first: Times,
    /// Between tokens.
    pub between: Times,
    /// The part of the prompts' tokens that was there already.
    pub cached: f64,
    /// Steps of the model.
    pub steps: usize,
}

/// What a server of this process did meanwhile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OwnSteps {
    /// Steps of the model.
    pub steps: u64,
    /// What they took by the cards' clocks, in seconds, where these show what work costs.
    pub card_seconds: Option<f64>,
}

/// What clients of a server saw, and what was foretold.
#[derive(Debug, Clone, Serialize)]
pub struct ServeRow {
    version: u32,
    /// How many clients asked.
    pub clients: usize,
    /// Requests of each.
    pub requests: usize,
    /// Requests in a second, where they came by the clock.
    pub rate: Option<f64>,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Of these, those that all prompts began with.
    pub shared: usize,
    /// Tokens of an answer.
    pub answer: usize,
    /// Tokens of answers in a second, of all clients together.
    pub tokens_per_second: f64,
    /// The same by the cards' clocks, where these show what work costs and the server is this process.
    pub card_tokens_per_second: Option<f64>,
    /// Steps of the model, where the server is this process.
    pub steps: Option<u64>,
    /// To the first token.
    pub first: Times,
    /// Between tokens.
    pub between: Times,
    /// The part of the prompts' tokens that was there already, if the server says so.
    pub cached: Option<f64>,
    /// Requests that were answered.
    pub answered: usize,
    /// Requests that were refused because too many waited.
    pub refused: usize,
    /// What became of the others.
    pub failed: Vec<String>,
    /// What was foretold, if it is known what the server does.
    pub predicted: Option<ServeForecast>,
    /// How much slower it was than foretold, in per cent of what was measured, by the cards' clocks where these show
    /// what work costs: more than nothing is slower.
    pub error_percent: Option<f64>,
}

impl ServeRow {
    /// A row.
    #[must_use]
    pub fn new(
        load: ServiceLoad,
        seen: &LoadSeen,
        own: Option<OwnSteps>,
        forecast: Option<&Forecast>,
    ) -> ServeRow {
        let rate = match load.arrivals {
            Arrivals::Open { rate, .. } => Some(rate),
            Arrivals::Closed => None,
        };
        let predicted = forecast.map(|forecast| ServeForecast {
            tokens_per_second: forecast.tokens_per_second,
            first: Times::of(forecast.first),
            between: Times::of(forecast.between),
            cached: forecast.reused,
            steps: forecast.steps,
        });
        let card = own.and_then(|own| own.card_seconds).filter(|seconds| *seconds > 0.0);
        let card = card.map(|seconds| seen.tokens as f64 / seconds);
        let measured = card.unwrap_or(seen.tokens_per_second);
        let error = |of: ServeForecast| (of.tokens_per_second / measured - 1.0) * 100.0;
        ServeRow {
            version: 1,
            clients: load.clients,
            requests: load.requests,
            rate,
            prompt: load.prompt,
            shared: load.shared,
            answer: load.answer,
            tokens_per_second: seen.tokens_per_second,
            card_tokens_per_second: card,
            steps: own.map(|own| own.steps),
            first: Times::of(seen.first),
            between: Times::of(seen.between),
            cached: seen.reused,
            answered: seen.answered,
            refused: seen.refused,
            failed: seen.failed.clone(),
            predicted,
            error_percent: predicted.filter(|_| measured > 0.0).map(error),
        }
    }
}
