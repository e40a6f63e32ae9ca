// SPDX-License-Identifier: Apache-2.0
//! Which card holds what: by order, or by the planner's choice among layouts that give the bits of one card.

use std::str::FromStr;

use spanker_model::{Model, Quant};
use spanker_plan::{Layout, Objective, Plan, Request, Split as Matrices, choose};
use spanker_topology::Cluster;

use crate::error::{EngineError, Result};

/// How a model is split over cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Tensor-parallel without partial sums: the bits of one card.
    Gather,
    /// Tensor-parallel with partial sums, added in card order.
    Reduce,
    /// Whole layers on each card.
    Pipeline,
    /// Two stages, each tensor-parallel.
    Mixed,
}

impl Split {
    /// Every split, those with the bits of one card first.
    pub const ALL: [Split; 4] = [Split::Gather, Split::Pipeline, Split::Mixed, Split::Reduce];

    /// In a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Split::Gather => "gather",
            Split::Reduce => "reduce",
            Split::Pipeline => "pipeline",
            Split::Mixed => "mixed",
        }
    }

    /// How matrices are split.
    #[must_use]
    pub fn matrices(self) -> Matrices {
        if self == Split::Reduce { Matrices::Reduce } else { Matrices::Gather }
    }

    /// The groups of a split over cards with these shares.
    #[must_use]
    pub fn groups(self, shares: &[f64]) -> Vec<Vec<(usize, f64)>> {
        let cards: Vec<(usize, f64)> = shares.iter().copied().enumerate().collect();
        match self {
            Split::Gather | Split::Reduce => vec![cards],
            Split::Pipeline => cards.into_iter().map(|card| vec![card]).collect(),
            Split::Mixed => {
                let (one, two) = cards.split_at(cards.len().div_ceil(2));
                [one, two].into_iter().filter(|part| !part.is_empty()).map(<[_]>::to_vec).collect()
            }
        }
    }

    /// The layout of a model over cards with these shares.
    ///
    /// # Errors
    /// [`EngineError::Request`] for shares that the model cannot be split into.
    pub fn layout(self, model: &Model, shares: &[f64]) -> Result<Layout> {
        Layout::of_groups(model, self.matrices(), &self.groups(shares))
            .map_err(|error| EngineError::request(error.to_string()))
    }
}

impl FromStr for Split {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Split::ALL.map(Split::name).join(", ");
        Split::ALL
            .into_iter()
            .find(|split| split.name() == text)
            .ok_or_else(|| format!("'{text}': expected one of {}", names()))
    }
}

/// What is wished of a layout. Nothing is the planner's choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wish {
    /// How the model is split.
    pub split: Option<Split>,
    /// How much each card gets.
    pub shares: Option<Vec<f64>>,
}

impl Wish {
    /// The layout that was asked for, if one was.
    pub(crate) fn layout(&self, model: &Model, cards: usize) -> Result<Option<Layout>> {
        if self.split.is_none() && self.shares.is_none() {
            return Ok(None);
        }
        let shares = match &self.shares {
            None => vec![1.0; cards],
            Some(shares) if shares.len() == cards => shares.clone(),
            Some(shares) => {
                let count = shares.len();
                let what = format!("--tensor-split has {count} shares for {cards} cards");
                return Err(EngineError::request(what));
            }
        };
        self.split.unwrap_or(Split::Gather).layout(model, &shares).map(Some)
    }
}

/// What is asked of a service: so many sequences at a time, priced in the middle of the context. Each of them has a row
/// of a step at least, and a step no more rows than a context, as plans have room for no more.
#[must_use]
pub fn serving_request(context: usize, batch: usize, parallel: usize) -> Request {
    let (context, batch) = (context as u64, batch.min(context).max(parallel) as u64);
    let (position, prompt) = (context / 2, (context / 2).max(1));
    let sequences = parallel as u64;
    Request { context, prompt, position, batch, sequences, ..Request::new(Objective::Throughput) }
}

/// The copies of a plan's model, each as a plan of its own.
///
/// # Errors
/// [`EngineError::Plan`] for a plan that does not fit together.
pub(crate) fn copies(plan: &Plan) -> Result<Vec<Plan>> {
    let count = plan.layout.replicas.len() as u64;
    let copy = |(at, stages): (usize, &Vec<spanker_plan::Stage>)| {
        let all = plan.request.sequences;
        let sequences = (all / count + u64::from((at as u64) < all % count)).max(1);
        let request = Request { sequences, ..plan.request.clone() };
        let layout = Layout { replicas: vec![stages.clone()] };
        Ok(Plan::new(plan.model.clone(), plan.cluster.clone(), request, layout)?)
    };
    plan.layout.replicas.iter().enumerate().map(copy).collect()
}

/// What is asked of a run: one sequence, priced in the middle of the steps after the prompt.
#[must_use]
pub fn request(context: usize, batch: usize, prompt: usize, steps: usize) -> Request {
    let (context, batch) = (context as u64, batch as u64);
    let position = (prompt as u64 + steps as u64 / 2).min(context - 1);
    let prompt = (prompt as u64).clamp(1, context);
    let kv = Quant::F16;
    Request { context, prompt, position, kv, batch, ..Request::new(Objective::Latency) }
}

/// The planner's best layout that can be run, gives the bits of one card and fits; where `apart` is false, cards share
/// something, so that every card is used if there is such a layout. With `copies`, a service may have several of the model.
pub(crate) fn best(
    model: &Model,
    cluster: &Cluster,
    request: &Request,
    apart: bool,
    copies: bool,
) -> Result<Layout> {
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    let choice = choose(model, cluster, &cards, request)?;
    // A run has one copy of the model, a service as many as serve it best.
    let copies = copies && request.objective == Objective::Throughput;
    let exact = |layout: &Layout| {
        (copies || layout.not_runnable().is_none())
            && layout.stages().all(|stage| stage.group.split != Matrices::Reduce)
    };
    let fit: Vec<&Layout> = choice
        .candidates
        .iter()
        .filter(|candidate| candidate.prediction.fits() && exact(&candidate.layout))
        .map(|candidate| &candidate.layout)
        .collect();
    let whole = fit.iter().find(|layout| layout.cards().len() == cards.len());
    let found = match (apart, whole) {
        (false, Some(whole)) => Some(*whole),
        (false, None) if !fit.is_empty() => {
            return Split::Gather.layout(model, &vec![1.0; cards.len()]);
        }
        _ => fit.first().copied(),
    };
    found.cloned().ok_or_else(|| EngineError::DoesNotFit {
        what: format!("{} does not fit {} cards", model.name, cards.len()),
        hint: Some("'spanker plan' says what would do".into()),
    })
}

/// The plan, if every card has the memory that it allocates. `numbers` are the devices'.
pub(crate) fn fitting(plan: Plan, numbers: &[usize]) -> Result<Plan> {
    let memory = plan.predict().memory;
    match memory.iter().find(|memory| !memory.fits()) {
        None => Ok(plan),
        Some(full) => {
            let (needs, has) = (full.used(), full.capacity);
            let card = numbers.get(full.card).copied().unwrap_or(full.card);
            Err(EngineError::DoesNotFit {
                what: format!("card {card} would need {needs} and has {has}"),
                hint: Some(
                    "less context (--ctx-size), another split, or more cards; 'spanker plan' says what would do"
                        .into(),
                ),
            })
        }
    }
}
