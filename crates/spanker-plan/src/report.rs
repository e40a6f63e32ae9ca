// SPDX-License-Identifier: Apache-2.0
//! What a search for a plan found, as JSON (`docs/plan-json.md` documents the fields) and in words.

mod lines;
mod why;

use serde_json::{Value, json};
use spanker_model::Model;
use spanker_topology::{Cluster, Seconds};

use crate::{
    Candidate, Choice, Explanation, PLAN_VERSION, Plan, PlanError, Prediction, Remedies, Request,
    Shard, Stage, Strategy, Terms,
};

/// Everything that was asked and found.
#[derive(Debug, Clone, Copy)]
pub struct PlanReport<'a> {
    /// The model.
    pub model: &'a Model,
    /// The cards and links.
    pub cluster: &'a Cluster,
    /// What the plan is for.
    pub request: &'a Request,
    /// The candidates.
    pub choice: &'a Choice,
    /// The candidate that is proposed and saved: the best that can be run, or with --copies the best of all.
    pub proposed: Option<&'a Candidate>,
    /// Why the best is the best.
    pub explained: Option<&'a Explanation>,
    /// What would make the model fit, if nothing does.
    pub remedy: Option<&'a Remedies>,
}

impl PlanReport<'_> {
    /// The schema of `spanker plan --json`.
    ///
    /// # Errors
    /// [`PlanError`] if a candidate is none for the model and the cards.
    pub fn to_json(&self) -> Result<Value, PlanError> {
        Ok(json!({
            "version": PLAN_VERSION,
            "model": {
                "name": self.model.name,
                "source": self.model.source,
                "layers": self.model.layers.len(),
                "parameters": self.model.parameters(),
                "weight_bytes": self.model.weight_bytes(),
                "read_bytes_per_token": self.model.read_per_token(),
            },
            "cluster": {
                "cards": self.cluster.cards(),
                "kinds": self.cluster.describe(),
                "topology": self.cluster.shape().name(),
                "notes": self.cluster.notes(),
                "profiles": (0..self.cluster.cards())
                    .map(|card| self.cluster.profile(card).name.clone()).collect::<Vec<_>>(),
            },
            "request": self.request,
            "exact": self.choice.exact,
            "fits": self.choice.best().is_some(),
            "candidates": self.choice.candidates.iter().map(Candidate::to_json).collect::<Vec<_>>(),
            "explanation": self.explained.map(explanation),
            "remedies": self.remedy.map(remedies),
            "run": self.run()?,
        }))
    }

    /// What `spanker run` does with the best candidate that it takes: one sequence.
    fn run(&self) -> Result<Option<Value>, PlanError> {
        let Some(best) = self.choice.best_to_run() else { return Ok(None) };
        let place = self.choice.candidates.iter().position(|candidate| candidate == best);
        let alone = self.alone(best)?;
        Ok(Some(json!({
            "candidate": place,
            "sequences": 1,
            "decode_ms_per_token": alone.token.millis(),
            "tokens_per_second": alone.tokens_per_second,
        })))
    }

    /// What a candidate does for one sequence, which is what a run has.
    ///
    /// # Errors
    /// [`PlanError`] if the candidate is none for the model and the cards.
    pub fn alone(&self, candidate: &Candidate) -> Result<Prediction, PlanError> {
        if self.request.sequences == 1 {
            return Ok(candidate.prediction.clone());
        }
        let request = Request { sequences: 1, ..self.request.clone() };
        let (model, cluster) = (self.model.clone(), self.cluster.clone());
        Ok(Plan::new(model, cluster, request, candidate.layout.clone())?.predict())
    }

    /// The plan of the candidate that is proposed.
    ///
    /// # Errors
    /// [`PlanError`] if the candidate is none for the model and the cards.
    pub fn proposed_plan(&self) -> Result<Option<Plan>, PlanError> {
        let PlanReport { model, cluster, request, .. } = *self;
        let plan = |best: &Candidate| {
            Plan::new(model.clone(), cluster.clone(), request.clone(), best.layout.clone())
        };
        self.proposed.map(plan).transpose()
    }

    /// The candidate of a strategy.
    fn candidate(&self, strategy: Strategy) -> Option<&Candidate> {
        self.choice.candidates.iter().find(|candidate| candidate.strategy == strategy)
    }

    /// Milliseconds of a token under the best layout, with every number at its good and bad end.
    #[must_use]
    pub fn band(&self) -> Option<(Seconds, Seconds)> {
        self.explained.map(|explained| explained.band)
    }
}

fn terms_json(terms: &Terms) -> Value {
    json!({
        "memory_ms": terms.memory.millis(),
        "compute_ms": terms.compute.millis(),
        "communication_ms": terms.communication.millis(),
        "fixed_ms": terms.fixed.millis(),
    })
}

fn stage_json(replica: usize, stage: &Stage) -> Value {
    let shards = &stage.group.shards;
    let ends = shards.last().map_or(1, |shard| shard.ffn.end.max(1));
    let share = |shard: &Shard| (shard.ffn.end - shard.ffn.start) as f64 / ends as f64;
    json!({
        "replica": replica,
        "cards": stage.group.cards,
        "split": stage.group.split,
        "layers": [stage.layers.start, stage.layers.end],
        "shares": shards.iter().map(share).collect::<Vec<_>>(),
        "heads": shards.iter().map(|shard| [shard.heads.start, shard.heads.end]).collect::<Vec<_>>(),
    })
}

fn explanation(explained: &Explanation) -> Value {
    json!({
        "binds": explained.binds.0,
        "binds_share": explained.binds.1,
        "runner_up": explained.runner_up.map(|strategy| strategy.name()),
        "runner_up_behind": explained.runner_up_behind,
        "break_even": explained.break_even.as_ref().map(|even| json!({
            "against": even.against.name(),
            "ahead": even.ahead,
            "step_latency_us": even.latency.map(Seconds::micros),
            "step_latency_us_if_ring": even.ring_latency.map(Seconds::micros),
        })),
        "gain_percent_from_a_tenth_more": explained.sensitivity.iter()
            .map(|(resource, gain)| (resource.name().replace(' ', "_"), json!(gain)))
            .collect::<serde_json::Map<_, _>>(),
        "low_ms": explained.band.0.millis(),
        "high_ms": explained.band.1.millis(),
    })
}

fn remedies(remedies: &Remedies) -> Value {
    json!({
        "card": remedies.card,
        "over_bytes": remedies.over.0,
        "needed_bytes": remedies.total.0.0,
        "usable_bytes": remedies.total.1.0,
        "cards": remedies.cards,
        "context": remedies.context,
        "quant": remedies.quant.map(|quant| quant.name()),
    })
}

impl Candidate {
    /// The candidate as `spanker plan --json` has it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let (layout, prediction) = (&self.layout, &self.prediction);
        let memory = &prediction.memory;
        json!({
            "strategy": self.strategy.name(),
            "tensor_ways": layout.tensor_ways(),
            "pipeline_stages": layout.pipeline_stages(),
            "replicas": layout.replicas.len(),
            "cards": layout.cards().len(),
            "card_ids": layout.cards(),
            "fits": prediction.fits(),
            "runnable": layout.not_runnable().is_none(),
            "not_runnable_because": layout.not_runnable(),
            "decode_ms_per_token": prediction.token.millis(),
            "decode_ms_per_token_at_context": prediction.token_at_context.millis(),
            "tokens_per_second": prediction.tokens_per_second,
            "ttft_ms": prediction.ttft.millis(),
            "load_ms": prediction.load.millis(),
            "waiting_ms": prediction.waiting.millis(),
            "prefill_pieces": prediction.prefill_pieces,
            "terms": terms_json(&prediction.terms),
            "prefill_terms": terms_json(&prediction.ttft_terms),
            "memory_bytes_per_card": memory.iter().map(|m| m.used().0).collect::<Vec<_>>(),
            "capacity_bytes_per_card": memory.iter().map(|m| m.capacity.0).collect::<Vec<_>>(),
            "memory": memory.iter().map(|m| json!({
                "card": m.card,
                "weights_bytes": m.footprint.weights.0,
                "kv_bytes": m.footprint.kv.0,
                "buffers_bytes": m.footprint.buffers.0,
                "reserved_bytes": m.reserved.0,
                "capacity_bytes": m.capacity.0,
            })).collect::<Vec<_>>(),
            "stages": layout.replicas.iter().enumerate().flat_map(|(replica, stages)| {
                stages.iter().map(move |stage| stage_json(replica, stage))
            }).collect::<Vec<_>>(),
        })
    }

    /// The layout in words.
    #[must_use]
    pub fn words(&self) -> String {
        let layout = &self.layout;
        let cards = layout.cards().len();
        match self.strategy {
            Strategy::OneCard => format!("everything on card {}", layout.cards()[0]),
            Strategy::TensorGather => format!("tensor-parallel over {cards} cards (gather)"),
            Strategy::TensorReduce => format!("tensor-parallel over {cards} cards (reduce)"),
            Strategy::Pipeline => format!("layer-split over {cards} cards"),
            Strategy::TensorPipeline => {
                let sizes: Vec<String> =
                    layout.stages().map(|stage| stage.group.cards.len().to_string()).collect();
                format!("stages of {} cards, tensor-parallel inside", sizes.join(" and "))
            }
            Strategy::Replicas => {
                format!("{} copies of the model on {cards} cards", layout.replicas.len())
            }
        }
    }
}

/// A number with about three digits.
#[must_use]
pub fn significant(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.01 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}
