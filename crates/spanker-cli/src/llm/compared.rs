// SPDX-License-Identifier: Apache-2.0
//! A run beside its own prediction, operator by operator: the same plan, prompt and steps in virtual time.

use spanker_plan::{
    Comparison, Conditions, Mark, Origin, Plan, Trace, compare, perfetto_of_both, simulate,
};

/// A run's trace and the trace that was predicted for it.
pub(crate) struct Compared {
    predicted: Trace,
    measured: Trace,
}

impl Compared {
    /// Simulates a plan for a prompt and so many steps after it. `marks` are what the cards did.
    pub(crate) fn new(
        plan: &Plan,
        prompt: &[u32],
        steps: usize,
        marks: Vec<Mark>,
    ) -> anyhow::Result<Compared> {
        let conditions = Conditions {
            prompt: true,
            prompt_tokens: prompt.to_vec(),
            ..Conditions::calm(u32::try_from(steps)?)
        };
        let predicted = simulate(plan, &conditions)?;
        Ok(Compared { predicted, measured: measured(plan, marks) })
    }

    /// Where the run's time differs from the predicted one.
    pub(crate) fn comparison(&self) -> anyhow::Result<Comparison> {
        Ok(compare(&self.predicted, &self.measured)?)
    }

    /// Both traces in one file.
    pub(crate) fn to_perfetto(&self) -> String {
        perfetto_of_both(&self.predicted, &self.measured)
    }
}

/// What cards did as a trace, with the ends of all steps.
pub(crate) fn measured(plan: &Plan, marks: Vec<Mark>) -> Trace {
    let cards = plan.layout.cards().last().map_or(0, |card| card + 1);
    let events = marks.len() as u64;
    let mut ends: std::collections::BTreeMap<u32, f64> = std::collections::BTreeMap::new();
    for mark in &marks {
        let end = ends.entry(mark.label.token).or_insert(0.0);
        *end = end.max(mark.end);
    }
    let tokens = ends.into_values().collect();
    Trace { cards, tokens, marks, incidents: Vec::new(), events }
}

/// The file of a measured trace alone.
pub(crate) fn alone(plan: &Plan, marks: Vec<Mark>) -> String {
    measured(plan, marks).to_perfetto(Origin::Measured)
}
