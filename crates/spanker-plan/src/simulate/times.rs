// SPDX-License-Identifier: Apache-2.0
//! What a simulation took, beside what was predicted.

use spanker_topology::Seconds;

use super::Conditions;
use crate::{Plan, Trace};

/// The prediction beside a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedTimes {
    /// The predicted time of a token.
    pub predicted: Seconds,
    /// The predicted speed, in tokens per second.
    pub predicted_rate: f64,
    /// The mean time of a token, from the start of the first.
    pub simulated: Option<Seconds>,
    /// Tokens per second of all sequences.
    pub simulated_rate: Option<f64>,
    /// When the prompt was through, and when it should have been.
    pub prompt: Option<(Seconds, Seconds)>,
}

impl SimulatedTimes {
    /// Of a plan that was simulated under some conditions.
    #[must_use]
    pub fn of(plan: &Plan, conditions: &Conditions, trace: &Trace) -> SimulatedTimes {
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
        SimulatedTimes {
            predicted: prediction.token,
            predicted_rate: prediction.tokens_per_second,
            simulated: simulated.map(Seconds),
            simulated_rate: simulated.map(|time| plan.request.sequences as f64 / time),
            prompt: prompt.map(|at| (at, prediction.ttft)),
        }
    }

    /// How much longer a token took than predicted, in per cent.
    #[must_use]
    pub fn difference_percent(&self) -> Option<f64> {
        self.simulated.map(|simulated| 100.0 * (simulated.0 / self.predicted.0 - 1.0))
    }
}
