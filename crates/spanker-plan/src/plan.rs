// SPDX-License-Identifier: Apache-2.0
//! Plans: which card holds what, and what that is predicted to cost.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use spanker_collective::Collective;
use spanker_model::{KvShape, Model};
use spanker_topology::{Bytes, Cluster, Seconds};

use crate::cost::memory::{Allocation, Footprint, Place};
use crate::cost::shard::{Shard, Split};
use crate::cost::{Group, Phase, Pricer};
use crate::program::{Buffer, CardLayout, Op, Part, Step, Terms, Want, card_layouts};
use crate::trace::Activity;
use crate::{PlanError, Request};

/// The version of saved plans and of `--json`.
pub const PLAN_VERSION: u32 = 1;

/// A run of layers on a group of cards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// The cards and what each holds.
    pub group: Group,
    /// The layers.
    pub layers: Range<usize>,
}

/// Which card holds what: copies of the model, each a pipeline of stages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// The stages of each copy of the model.
    pub replicas: Vec<Vec<Stage>>,
}

impl Layout {
    /// All stages.
    pub fn stages(&self) -> impl Iterator<Item = &Stage> {
        self.replicas.iter().flatten()
    }

    /// The cards that take part, in order.
    #[must_use]
    pub fn cards(&self) -> Vec<usize> {
        let mut cards: Vec<usize> =
            self.stages().flat_map(|stage| stage.group.cards.iter().copied()).collect();
        cards.sort_unstable();
        cards
    }

    /// Stages of the longest pipeline.
    #[must_use]
    pub fn pipeline_stages(&self) -> usize {
        self.replicas.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Cards of the largest group.
    #[must_use]
    pub fn tensor_ways(&self) -> usize {
        self.stages().map(|stage| stage.group.cards.len()).max().unwrap_or(0)
    }

    /// Why no runner takes this layout, if that is so: copies of a model are priced for serving, and a run has one.
    #[must_use]
    pub fn not_runnable(&self) -> Option<String> {
        let copies = self.replicas.len();
        (copies != 1).then(|| format!("{copies} copies of the model, and a run uses one"))
    }

    /// The name of this kind of layout.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        let split = |wanted| self.stages().any(|stage| stage.group.split == wanted);
        match (self.replicas.len(), self.pipeline_stages(), self.tensor_ways()) {
            (2.., _, _) => Strategy::Replicas,
            (_, 2.., 2..) => Strategy::TensorPipeline,
            (_, 2.., _) => Strategy::Pipeline,
            (_, _, 2..) if split(Split::Reduce) => Strategy::TensorReduce,
            (_, _, 2..) => Strategy::TensorGather,
            _ => Strategy::OneCard,
        }
    }

    /// Whether the layout is one of this model on this cluster: every layer once in each copy, every card
    /// in one place, every part of every matrix with exactly one rank.
    ///
    /// # Errors
    /// [`PlanError::Layout`] that says what is wrong.
    pub fn check(&self, model: &Model, cluster: &Cluster) -> Result<(), PlanError> {
        let wrong = |what: String| Err(PlanError::Layout { what });
        let cards = self.cards();
        if let Some(&card) = cards.iter().find(|&&card| card >= cluster.cards()) {
            return wrong(format!("there is no card {card}"));
        }
        if let Some(pair) = cards.windows(2).find(|pair| pair[0] == pair[1]) {
            return wrong(format!("card {} is in two places", pair[0]));
        }
        if self.replicas.is_empty() || self.replicas.iter().any(Vec::is_empty) {
            return wrong("a copy of the model has no stage".into());
        }
        for stages in &self.replicas {
            let mut next = 0;
            for stage in stages {
                if stage.layers.start != next || stage.layers.end <= next {
                    return wrong(format!("layers {:?} do not follow {next}", stage.layers));
                }
                next = stage.layers.end;
                stage.group.check(model)?;
            }
            if next != model.layers.len() {
                let layers = model.layers.len();
                return wrong(format!("the stages hold {next} layers of {layers}"));
            }
        }
        Ok(())
    }
}

impl Group {
    /// Whether each part of a layer is with exactly one rank, and none is out of bounds.
    fn check(&self, model: &Model) -> Result<(), PlanError> {
        let wrong = |what: String| Err(PlanError::Layout { what });
        let ranks = self.cards.len();
        if ranks == 0 || self.shards.len() != ranks {
            return wrong(format!("{ranks} cards have {} shards", self.shards.len()));
        }
        if self.split == Split::Whole && ranks > 1 {
            return wrong(format!("{ranks} cards hold whole matrices"));
        }
        let whole = self.split == Split::Reduce;
        let sharing = model.heads / model.kv_heads;
        let shared = model.mixture.map_or(0, |own| own.shared);
        let mut ends = [0u64; 6];
        for shard in &self.shards {
            let Shard { heads, ffn, vocab, shared, output, down, .. } = shard;
            for (index, run) in [heads, ffn, vocab, shared, output, down].into_iter().enumerate() {
                let whole_rows = whole && index >= 4;
                let start = if whole_rows { 0 } else { ends[index] };
                let cut_short = whole_rows && run.end != model.hidden;
                if run.start != start || run.end < run.start || cut_short {
                    return wrong(format!("a shard holds {run:?} where {start}.. should begin"));
                }
                ends[index] = run.end;
            }
            let needed = match shard.heads.is_empty() {
                true => 0..0,
                false => shard.heads.start / sharing..shard.heads.end.div_ceil(sharing),
            };
            if shard.kv_heads != needed {
                let (has, heads) = (&shard.kv_heads, &shard.heads);
                return wrong(format!("heads {heads:?} need KV heads {needed:?} and have {has:?}"));
            }
        }
        let hidden = model.hidden;
        let expected = [model.heads, model.ffn, model.vocab, shared, hidden, hidden];
        if ends == expected {
            Ok(())
        } else {
            wrong(format!("shards end at {ends:?} and not at {expected:?}"))
        }
    }
}

/// A kind of layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Strategy {
    /// One card has everything.
    OneCard,
    /// Every matrix split by rows over the cards, inputs gathered.
    TensorGather,
    /// Every matrix split by rows or columns over the cards, sums reduced.
    TensorReduce,
    /// Whole layers on each card.
    Pipeline,
    /// Groups of cards have whole layers, which each group splits.
    TensorPipeline,
    /// Several copies of the model.
    Replicas,
}

impl Strategy {
    /// The name that tables and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::OneCard => "one-card",
            Strategy::TensorGather => "tensor-gather",
            Strategy::TensorReduce => "tensor-reduce",
            Strategy::Pipeline => "pipeline",
            Strategy::TensorPipeline => "tensor-pipeline",
            Strategy::Replicas => "replicas",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a plan fills one card's memory with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CardMemory {
    /// The card.
    pub card: usize,
    /// The model's part.
    pub footprint: Footprint,
    /// What is never there for a model.
    pub reserved: Bytes,
    /// What there is.
    pub capacity: Bytes,
}

impl CardMemory {
    /// Everything, the reserved part included.
    #[must_use]
    pub fn used(&self) -> Bytes {
        self.footprint.total() + self.reserved
    }

    /// Whether it fits.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.used() <= self.capacity
    }
}

/// A collective of a plan: which, how large, and by which algorithm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exchanged {
    /// After which phase of a layer, or for what.
    pub after: &'static str,
    /// The collective's name.
    pub collective: &'static str,
    /// Bytes that it carries in total.
    pub bytes: f64,
    /// The algorithm's name.
    pub algorithm: &'static str,
    /// What it takes.
    pub time: Seconds,
}

/// What a layout is predicted to do.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// From token to token of one sequence.
    pub token: Seconds,
    /// Where that time goes.
    pub terms: Terms,
    /// The part of it in which a sequence waits for others to pass a stage.
    pub waiting: Seconds,
    /// The same at the last token of the context.
    pub token_at_context: Seconds,
    /// Tokens per second over all sequences.
    pub tokens_per_second: f64,
    /// From the prompt to the first token.
    pub ttft: Seconds,
    /// Where that time goes.
    pub ttft_terms: Terms,
    /// Pieces in which the prompt goes through.
    pub prefill_pieces: u64,
    /// Until all weights are on the cards, over the host links.
    pub load: Seconds,
    /// What each card holds.
    pub memory: Vec<CardMemory>,
}

impl Prediction {
    /// Whether every card has the memory that it needs.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.memory.iter().all(CardMemory::fits)
    }
}

/// A layout with its prediction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Candidate {
    /// What kind of layout it is.
    pub strategy: Strategy,
    /// Which card holds what.
    pub layout: Layout,
    /// What that costs.
    pub prediction: Prediction,
}

/// Everything that it takes to simulate or run: the model, the cluster, the request and the layout.
///
/// It is saved as JSON. Reading one checks it; a prediction is computed, not believed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    version: u32,
    kind: String,
    /// The model.
    pub model: Model,
    /// The cards and links.
    pub cluster: Cluster,
    /// What was asked for.
    pub request: Request,
    /// Which card holds what.
    pub layout: Layout,
}

impl Plan {
    /// A plan from its parts.
    ///
    /// # Errors
    /// [`PlanError::Layout`] if the parts do not belong together.
    pub fn new(
        model: Model,
        cluster: Cluster,
        request: Request,
        layout: Layout,
    ) -> Result<Plan, PlanError> {
        request.check_for(&model).map_err(|what| PlanError::Request { what })?;
        layout.check(&model, &cluster)?;
        Ok(Plan { version: PLAN_VERSION, kind: "plan".into(), model, cluster, request, layout })
    }

    /// Reads a saved plan.
    ///
    /// # Errors
    /// [`PlanError::File`] with the place for text that is not a plan, [`PlanError::Layout`] for a plan
    /// that makes no sense.
    pub fn from_json(text: &str) -> Result<Plan, PlanError> {
        let bad = |what: String| PlanError::File { what };
        #[derive(Deserialize)]
        struct Head {
            version: Option<u32>,
            kind: Option<String>,
        }
        let head: Head = serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
        match (head.kind.as_deref(), head.version) {
            (Some("plan"), Some(PLAN_VERSION)) => {}
            (Some("plan"), Some(other)) => {
                return Err(bad(format!("version {other} is not {PLAN_VERSION}")));
            }
            _ => return Err(bad("it has no \"kind\": \"plan\" and version".into())),
        }
        let plan: Plan = serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
        Plan::new(plan.model, plan.cluster, plan.request, plan.layout)
    }

    /// The plan as JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a plan has no keys that JSON lacks")
    }

    /// What the plan is predicted to do.
    #[must_use]
    pub fn predict(&self) -> Prediction {
        let pricer = Pricer::new(&self.model, &self.cluster, &self.request).exactly();
        crate::predict::predict(&pricer, &self.layout)
    }

    /// The same with what the first prompt of a run takes besides.
    #[must_use]
    pub fn predict_first(&self) -> Prediction {
        let mut prediction = self.predict();
        let first_use = |card: usize| {
            let compute = &self.cluster.profile(card).compute;
            compute.first_use.as_ref().map_or(Seconds::ZERO, |value| value.value)
        };
        let cards = self.layout.cards();
        let first = cards.into_iter().map(first_use).fold(Seconds::ZERO, Seconds::max);
        prediction.ttft += first;
        prediction.ttft_terms.fixed += first;
        prediction
    }

    /// What each card allocates, in order: card, then buffers.
    #[must_use]
    pub fn allocations(&self) -> Vec<(usize, Vec<Allocation>)> {
        let sequences = sequences_per_replica(&self.request, &self.layout);
        let pricer = Pricer::new(&self.model, &self.cluster, &self.request);
        let cards = self.layout.replicas.iter().flat_map(|stages| {
            let turns = in_flight(&self.request, sequences, stages.len()).0;
            let space = pricer.space(sequences, turns);
            card_layouts(&self.model, &self.cluster, stages, space, None, None)
        });
        let list = |card: &CardLayout| {
            let allocation = |(buffer, bytes): (Buffer, u64)| Allocation {
                name: buffer.name().into(),
                bytes: Bytes(bytes),
            };
            card.allocations().map(allocation).collect()
        };
        let mut lists: Vec<(usize, Vec<Allocation>)> =
            cards.map(|card| (card.card, list(&card))).collect();
        lists.sort_by_key(|(card, _)| *card);
        lists
    }

    /// The collectives of one layer, of the head and of the embedding when a token is generated, with the algorithm chosen
    /// for each, stage by stage.
    #[must_use]
    pub fn exchanges(&self) -> Vec<Vec<Exchanged>> {
        self.exchanges_of(1)
    }

    /// The same for a piece of a prompt of so many rows: what is larger may have another algorithm.
    #[must_use]
    pub fn exchanges_of(&self, rows: usize) -> Vec<Vec<Exchanged>> {
        let pricer = Pricer::new(&self.model, &self.cluster, &self.request);
        let sequences = if rows > 1 { 1 } else { sequences_at_once(&self.request, &self.layout) };
        let tokens = vec![0; rows.max(1)];
        let blocks = vec![0; KvShape::blocks_for(tokens.len() as u64) as usize];
        let want = Want::Best(1);
        let part =
            Part { tokens: &tokens, past: 0, blocks: &blocks, windowed: &[], want, outputs: 1 };
        let parts = vec![part; sequences.max(1) as usize];
        let step = Step::of(&parts);
        let describe = |stage: &Stage| {
            let group = &stage.group;
            let mut ops =
                pricer.lists(group, Phase::Layer(stage.layers.start), &step).swap_remove(0);
            ops.extend(pricer.lists(group, Phase::Embed, &step).swap_remove(0));
            ops.extend(pricer.lists(group, Phase::Head, &step).swap_remove(0));
            let mut after = "";
            let mut described = Vec::new();
            for op in &ops {
                match op {
                    Op::Mark { activity: Activity::Embed, .. } => after = "embedding",
                    Op::Mark { activity, .. } => after = activity.name(),
                    op => described.extend(pricer.describe(group, op, after)),
                }
            }
            described
        };
        self.layout.stages().map(describe).collect()
    }
}

pub(crate) fn name_of(collective: Collective) -> &'static str {
    match collective {
        Collective::AllReduce => "all-reduce",
        Collective::AllGather => "all-gather",
        _ => "collective",
    }
}

/// Sequences that each copy of the model serves.
pub(crate) fn sequences_per_replica(request: &Request, layout: &Layout) -> u64 {
    request.sequences.div_ceil(layout.replicas.len().max(1) as u64)
}

/// How many of all sequences a copy of the model serves: as equal as can be.
pub(crate) fn served(request: &Request, layout: &Layout, copy: usize) -> u64 {
    let copies = layout.replicas.len().max(1) as u64;
    request.sequences / copies + u64::from((copy as u64) < request.sequences % copies)
}

/// How many micro-batches are under way in a pipeline, and how many sequences the largest of them has.
///
/// The largest sets the pace: its next token begins when it has passed all stages, and others wait behind it.
pub(crate) fn in_flight(request: &Request, sequences: u64, stages: usize) -> (u64, u64) {
    match request.objective {
        crate::Objective::Throughput => {
            let batches = (stages as u64).min(sequences).max(1);
            (batches, sequences.div_ceil(batches))
        }
        _ => (1, sequences),
    }
}

/// Steps that are under way at a time in a pipeline of so many stages.
#[must_use]
pub fn steps_under_way(request: &Request, stages: usize) -> u64 {
    in_flight(request, request.sequences, stages).0
}

/// Sequences that go through a stage together.
fn sequences_at_once(request: &Request, layout: &Layout) -> u64 {
    let each = sequences_per_replica(request, layout);
    in_flight(request, each, layout.pipeline_stages()).1
}

/// Where a stage stands.
pub(crate) fn place(request: &Request, layout: &Layout, index: usize, stages: usize) -> Place {
    let sequences = sequences_per_replica(request, layout);
    let turns = in_flight(request, sequences, stages).0;
    Place { first: index == 0, last: index + 1 == stages, sequences, turns }
}
