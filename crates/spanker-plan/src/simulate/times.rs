// SPDX-License-Identifier: Apache-2.0
//! What a simulation took, beside what was predicted: the schema of `spanker simulate --json`.

use serde::Serialize;
use spanker_topology::Seconds;

use super::Conditions;
use crate::{Incident, Plan, Trace};

/// The prediction beside a simulation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimulationReport {
    version: u32,
    /// The predicted time of a token.
    pub predicted_ms_per_token: f64,
    /// The mean time of a token, from the start of the first.
    pub simulated_ms_per_token: Option<f64>,
    /// How much longer a token took than predicted.
    pub difference_percent: Option<f64>,
    /// The predicted speed.
    pub predicted_tokens_per_second: f64,
    /// Tokens per second of all sequences.
    pub simulated_tokens_per_second: Option<f64>,
    /// When the prompt should have been through, if there was one.
    pub predicted_ttft_ms: Option<f64>,
    /// When it was.
    pub simulated_ttft_ms: Option<f64>,
    /// When each token was there.
    pub tokens_ms: Vec<f64>,
    /// When everything was over.
    pub end_ms: f64,
    /// What happened.
    pub incidents: Vec<TimedIncident>,
    /// Steps, messages and pieces of work that were simulated.
    pub events: u64,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TimedIncident {
    /// When.
    pub at_ms: f64,
    /// What, in words.
    pub what: String,
}

impl SimulationReport {
    /// Of a plan that was simulated under some conditions.
    #[must_use]
    pub fn of(plan: &Plan, conditions: &Conditions, trace: &Trace) -> SimulationReport {
        // The prediction for the middle of the tokens that were simulated, wherever they begin.
        let begun = if conditions.prompt { plan.request.prompt } else { plan.request.position };
        let position = begun + u64::from(conditions.tokens.saturating_sub(1)) / 2;
        let mut there = plan.clone();
        there.request.position = position.min(plan.request.context - 1);
        let prediction = there.predict();
        let prompt =
            conditions.prompt.then(|| trace.incidents.iter().find(|i| i.what.contains("prompt")));
        let prompt = prompt.flatten().map(|incident| Seconds(incident.at));
        let begun = prompt.map_or(0.0, |at| at.0);
        // A pipeline that is shared gives its first token late and the others at its own pace.
        let steady = trace.tokens.len() / 2;
        let simulated = match (prediction.waiting > Seconds::ZERO, trace.tokens.last()) {
            (_, None) => None,
            (true, Some(&last)) if trace.tokens.len() > steady + 1 => {
                let since = trace.tokens[steady];
                Some((last - since) / (trace.tokens.len() - 1 - steady) as f64)
            }
            (_, Some(&last)) => Some((last - begun) / trace.tokens.len() as f64),
        };
        let difference = |simulated: f64| 100.0 * (simulated / prediction.token.0 - 1.0);
        let incident = |incident: &Incident| TimedIncident {
            at_ms: incident.at * 1e3,
            what: incident.what.clone(),
        };
        SimulationReport {
            version: 1,
            predicted_ms_per_token: prediction.token.millis(),
            simulated_ms_per_token: simulated.map(|time| time * 1e3),
            difference_percent: simulated.map(difference),
            predicted_tokens_per_second: prediction.tokens_per_second,
            simulated_tokens_per_second: simulated.map(|time| plan.request.sequences as f64 / time),
            predicted_ttft_ms: prompt.map(|_| prediction.ttft.millis()),
            simulated_ttft_ms: prompt.map(Seconds::millis),
            tokens_ms: trace.tokens.iter().map(|at| at * 1e3).collect(),
            end_ms: trace.end() * 1e3,
            incidents: trace.incidents.iter().map(incident).collect(),
            events: trace.events,
        }
    }

    /// The times in words, line by line.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let [predicted, simulated] = [self.predicted_ttft_ms, self.simulated_ttft_ms];
        let first = predicted.zip(simulated).map(|(predicted, simulated)| {
            let off = 100.0 * (simulated / predicted - 1.0);
            let [predicted, simulated] = [predicted, simulated].map(|ms| Seconds(ms / 1e3));
            format!("first token: predicted {predicted}, simulated {simulated} ({off:+.2} %)")
        });
        let token = self.simulated_ms_per_token.zip(self.difference_percent).map(|(ms, off)| {
            let [predicted, simulated] =
                [self.predicted_ms_per_token, ms].map(|ms| Seconds(ms / 1e3));
            let count = self.tokens_ms.len();
            let many = if count == 1 { "" } else { "s" };
            format!(
                "a token: predicted {predicted}, simulated {simulated} ({off:+.2} %) over {count} token{many}"
            )
        });
        first.into_iter().chain(token).collect()
    }
}
