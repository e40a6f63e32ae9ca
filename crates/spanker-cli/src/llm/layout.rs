// SPDX-License-Identifier: Apache-2.0
//! From flags to a plan: which card holds what.

use std::path::Path;

use spanker_model::{Model, Quant};
use spanker_plan::{Layout, Objective, Plan, Request, Split as Matrices, choose};
use spanker_topology::Cluster;

use super::Split;
use crate::{Usage, files};

/// More than any plan has.
const MOST_PLAN: u64 = 256 << 20;

/// What is asked of a run: one sequence, priced in the middle of the steps after the prompt.
pub(crate) fn request(context: usize, batch: usize, prompt: usize, steps: usize) -> Request {
    let (context, batch) = (context as u64, batch as u64);
    let position = (prompt as u64 + steps as u64 / 2).min(context - 1);
    let prompt = (prompt as u64).clamp(1, context);
    let kv = Quant::F16;
    Request { context, prompt, position, kv, batch, ..Request::new(Objective::Latency) }
}

/// The groups of a split over so many cards.
pub(crate) fn groups(split: Split, shares: &[f64]) -> Vec<Vec<(usize, f64)>> {
    let cards: Vec<(usize, f64)> = shares.iter().copied().enumerate().collect();
    match split {
        Split::Gather | Split::Reduce => vec![cards],
        Split::Pipeline => cards.into_iter().map(|card| vec![card]).collect(),
        Split::Mixed => {
            let (one, two) = cards.split_at(cards.len().div_ceil(2));
            [one, two].into_iter().filter(|part| !part.is_empty()).map(<[_]>::to_vec).collect()
        }
    }
}

/// A layout by order.
pub(crate) fn given(model: &Model, split: Split, shares: &[f64]) -> anyhow::Result<Layout> {
    let matrices = if split == Split::Reduce { Matrices::Reduce } else { Matrices::Gather };
    Layout::of_groups(model, matrices, &groups(split, shares))
        .map_err(|error| Usage(error.to_string()).into())
}

/// The shares that a flag gives, one for each card.
pub(crate) fn shares(flag: Option<&[f64]>, cards: usize) -> anyhow::Result<Vec<f64>> {
    match flag {
        None => Ok(vec![1.0; cards]),
        Some(shares) if shares.len() == cards => Ok(shares.to_vec()),
        Some(shares) => {
            let text = format!("--tensor-split has {} shares for {cards} cards", shares.len());
            Err(Usage(text).into())
        }
    }
}

/// The plan of a run: read from a file, by order, or the planner's best that gives the bits of one card.
pub(crate) fn plan(
    model: &Model,
    cluster: Cluster,
    request: Request,
    split: Option<Split>,
    shares: Option<&[f64]>,
) -> anyhow::Result<Plan> {
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    let layout = match (split, shares) {
        (None, None) => {
            let choice = choose(model, &cluster, &cards, &request)?;
            let exact = |layout: &Layout| {
                layout.not_runnable().is_none()
                    && layout.stages().all(|stage| stage.group.split != Matrices::Reduce)
            };
            let fits = |candidate: &&spanker_plan::Candidate| {
                candidate.prediction.fits() && exact(&candidate.layout)
            };
            match choice.candidates.iter().find(fits) {
                Some(candidate) => candidate.layout.clone(),
                None => anyhow::bail!(
                    "{} does not fit {} cards\nhint: 'spanker plan' says what would do",
                    model.name,
                    cards.len()
                ),
            }
        }
        (split, flag) => {
            given(model, split.unwrap_or(Split::Gather), &self::shares(flag, cards.len())?)?
        }
    };
    fitting(Plan::new(model.clone(), cluster, request, layout)?)
}

/// The plan, if every card has the memory that it allocates.
pub(crate) fn fitting(plan: Plan) -> anyhow::Result<Plan> {
    let memory = plan.predict().memory;
    let full = memory.iter().find(|memory| !memory.fits());
    if let Some(full) = full {
        let (needs, has) = (full.used(), full.capacity);
        anyhow::bail!(
            "card {} would need {needs} and has {has}\nhint: less context (--ctx-size), another split, or more cards; 'spanker plan' says what would do",
            full.card
        );
    }
    Ok(plan)
}

/// Reads a saved plan. Its prices become those of this run's request: it may have been made for another.
pub(crate) fn saved(path: &Path, request: Request) -> anyhow::Result<Plan> {
    let text = files::read(path, MOST_PLAN)?;
    let mut plan =
        Plan::from_json(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    plan.request = Request { kv: plan.request.kv, ..request };
    Ok(plan)
}
