// SPDX-License-Identifier: Apache-2.0
//! What `spanker plan` found, and its JSON form. `docs/plan-json.md` documents the fields.

use serde_json::{Value, json};
use spanker_model::Model;
use spanker_plan::{
    Candidate, Choice, Explanation, PLAN_VERSION, Plan, Prediction, Remedies, Request, Stage, Terms,
};
use spanker_topology::{Cluster, Seconds};

/// Everything that was asked and found.
pub(crate) struct Report<'a> {
    pub(crate) model: &'a Model,
    pub(crate) cluster: &'a Cluster,
    pub(crate) request: &'a Request,
    pub(crate) choice: &'a Choice,
    /// The candidate that is proposed and saved: the best that can be run, or with --copies the best of all.
    pub(crate) proposed: Option<&'a Candidate>,
    pub(crate) explained: Option<&'a Explanation>,
    pub(crate) remedy: Option<&'a Remedies>,
}

impl Report<'_> {
    /// The schema of `--json`.
    pub(crate) fn to_json(&self) -> anyhow::Result<Value> {
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
            "candidates": self.choice.candidates.iter().map(candidate).collect::<Vec<_>>(),
            "explanation": self.explained.map(explanation),
            "remedies": self.remedy.map(remedies),
            "run": self.run()?,
        }))
    }

    /// What `spanker run` does with the best candidate that it takes: one sequence.
    fn run(&self) -> anyhow::Result<Option<Value>> {
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
    pub(crate) fn alone(&self, candidate: &Candidate) -> anyhow::Result<Prediction> {
        if self.request.sequences == 1 {
            return Ok(candidate.prediction.clone());
        }
        let request = Request { sequences: 1, ..self.request.clone() };
        let (model, cluster) = (self.model.clone(), self.cluster.clone());
        Ok(Plan::new(model, cluster, request, candidate.layout.clone())?.predict())
    }

    /// Milliseconds of a token under the best layout, with every number at its good and bad end.
    pub(crate) fn band(&self) -> Option<(Seconds, Seconds)> {
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

fn candidate(candidate: &Candidate) -> Value {
    let (layout, prediction) = (&candidate.layout, &candidate.prediction);
    let memory = &prediction.memory;
    json!({
        "strategy": candidate.strategy.name(),
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

fn stage_json(replica: usize, stage: &Stage) -> Value {
    let shards = &stage.group.shards;
    let ends = shards.last().map_or(1, |shard| shard.ffn.end.max(1));
    let share =
        |shard: &spanker_plan::Shard| (shard.ffn.end - shard.ffn.start) as f64 / ends as f64;
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
