// SPDX-License-Identifier: Apache-2.0
//! What would be, if: the model planned anew for one card more or less, other links, other weights, another context,
//! more sequences. Each answer is a search for the best plan, not an extrapolation.

use serde_json::{Value, json};
use spanker_model::{Model, Quant};
use spanker_plan::{Objective, Plan, PlanError, Request, choose};
use spanker_topology::Cluster;

/// Types of weights that people choose among.
const QUANTS: [Quant; 4] = [Quant::Q8_0, Quant::Q6K, Quant::Q4K, Quant::Q4_0];
/// Sequences at the same time.
const SEQUENCES: [u64; 4] = [1, 4, 16, 64];
/// Searches for clusters of up to so many cards take milliseconds.
const FEW_CARDS: usize = 8;
/// As many combinations as are searched for few cards, and for more.
const MOST: (usize, usize) = (240, 24);

/// Something that can be changed, with what it can be changed to.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// What it is.
    pub name: &'static str,
    /// The choices in words.
    pub choices: Vec<String>,
    /// The choice that is as planned.
    pub present: usize,
}

/// One combination of choices, planned.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// The choice on each axis.
    pub choices: Vec<usize>,
    /// The kind of layout, the tokens per second over all sequences, milliseconds of a token and to the first token; nothing
    /// where no layout fits.
    pub best: Option<(String, f64, f64, f64)>,
}

/// What can be changed, and what came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenarios {
    /// What can be changed.
    pub axes: Vec<Axis>,
    /// What was planned: the present one first, then those that differ from it by one choice, then by more.
    pub planned: Vec<Scenario>,
}

impl Scenarios {
    pub(crate) fn to_json(&self) -> Value {
        let axis = |axis: &Axis| json!({ "name": axis.name, "choices": axis.choices, "present": axis.present });
        let planned = |scenario: &Scenario| match &scenario.best {
            Some((strategy, rate, token, first)) => {
                json!([scenario.choices, strategy, rate, token, first])
            }
            None => json!([scenario.choices]),
        };
        json!({
            "axes": self.axes.iter().map(axis).collect::<Vec<_>>(),
            "planned": self.planned.iter().map(planned).collect::<Vec<_>>(),
        })
    }
}

/// What an axis changes.
#[derive(Clone)]
enum Change {
    Cluster(Cluster),
    Links(f64),
    Weights(Quant),
    Context(u64),
    Sequences(u64),
    Nothing,
}

struct Choices {
    axis: Axis,
    changes: Vec<Change>,
}

impl Choices {
    fn new(name: &'static str) -> Choices {
        Choices { axis: Axis { name, choices: Vec::new(), present: 0 }, changes: Vec::new() }
    }

    fn add(&mut self, words: String, change: Change) {
        if matches!(change, Change::Nothing) {
            self.axis.present = self.changes.len();
        }
        self.axis.choices.push(words);
        self.changes.push(change);
    }
}

/// Plans a model anew under changes of what `plan` is for. `progress` hears how many of how many plans are made.
///
/// # Errors
/// [`PlanError`] if the plan itself makes no sense.
pub fn scenarios(
    plan: &Plan,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Scenarios, PlanError> {
    let Plan { model, cluster, request, .. } = plan;
    let axes: Vec<Choices> = [
        cards(cluster),
        links(cluster),
        weights(model),
        contexts(request, model),
        sequences(request),
    ]
    .into_iter()
    .filter(|axis| axis.changes.len() > 1)
    .collect();
    let most = if cluster.cards() <= FEW_CARDS { MOST.0 } else { MOST.1 };
    let combinations = combinations(&axes, most);
    let all = combinations.len();
    let mut planned = Vec::with_capacity(all);
    for (done, choices) in combinations.into_iter().enumerate() {
        progress(done, all);
        let best = planned_with(plan, &axes, &choices)?;
        planned.push(Scenario { choices, best });
    }
    progress(all, all);
    Ok(Scenarios { axes: axes.into_iter().map(|choices| choices.axis).collect(), planned })
}

fn cards(cluster: &Cluster) -> Choices {
    let mut axis = Choices::new("cards");
    let count = cluster.cards();
    let shape = cluster.shape();
    let profiles: Vec<_> = (0..count).map(|card| cluster.profile(card).clone()).collect();
    let words =
        |count: usize| if count == 1 { "1 card".to_owned() } else { format!("{count} cards") };
    // Wires that were listed one by one do not say where another card would be.
    let rebuilt =
        Cluster::new(profiles.clone(), shape).ok().filter(|same| same.wires() == cluster.wires());
    if rebuilt.is_some() && count > 1 {
        let fewer = profiles[..count - 1].to_vec();
        if let Ok(fewer) = Cluster::new(fewer, shape) {
            axis.add(words(count - 1), Change::Cluster(fewer));
        }
    }
    axis.add(words(count), Change::Nothing);
    if let (Some(_), Some(last)) = (rebuilt, profiles.last().cloned()) {
        let more = profiles.iter().cloned().chain([last]).collect();
        if let Ok(more) = Cluster::new(more, shape) {
            axis.add(words(count + 1), Change::Cluster(more));
        }
    }
    axis
}

fn links(cluster: &Cluster) -> Choices {
    let mut axis = Choices::new("links");
    if !cluster.wires().is_empty() {
        axis.add("half as fast".into(), Change::Links(0.5));
    }
    axis.add("as they are".into(), Change::Nothing);
    if !cluster.wires().is_empty() {
        axis.add("twice as fast".into(), Change::Links(2.0));
    }
    axis
}

fn weights(model: &Model) -> Choices {
    let mut axis = Choices::new("weights");
    axis.add("as they are".into(), Change::Nothing);
    for quant in QUANTS {
        // A model of that type is the present one.
        if model.with_quant(quant).weight_bytes() != model.weight_bytes() {
            axis.add(quant.name().to_owned(), Change::Weights(quant));
        }
    }
    axis
}

fn contexts(request: &Request, model: &Model) -> Choices {
    let mut axis = Choices::new("context");
    let valid = |context: u64| {
        let changed = Request { context, ..request.clone() };
        changed.check_for(model).is_ok()
    };
    for context in [request.context / 2, request.context, request.context * 2, request.context * 8]
    {
        if context == request.context {
            axis.add(format!("{context} tokens"), Change::Nothing);
        } else if context > 0 && valid(context) {
            axis.add(format!("{context} tokens"), Change::Context(context));
        }
    }
    axis
}

fn sequences(request: &Request) -> Choices {
    let mut axis = Choices::new("at the same time");
    let mut counts: Vec<u64> = SEQUENCES.into_iter().chain([request.sequences]).collect();
    counts.sort_unstable();
    counts.dedup();
    for count in counts {
        let words = if count == 1 { "1 sequence".to_owned() } else { format!("{count} sequences") };
        match count == request.sequences {
            true => axis.add(words, Change::Nothing),
            false => axis.add(words, Change::Sequences(count)),
        }
    }
    axis
}

/// The present choices, then all that differ in one place, then in two, and so on, as far as `most` goes.
fn combinations(axes: &[Choices], most: usize) -> Vec<Vec<usize>> {
    let present: Vec<usize> = axes.iter().map(|choices| choices.axis.present).collect();
    let mut all = vec![Vec::new()];
    for choices in axes {
        let longer = |found: &Vec<usize>| {
            let longer = (0..choices.changes.len()).map(|choice| [&found[..], &[choice]].concat());
            longer.collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
    }
    let differences =
        |choices: &[usize]| choices.iter().zip(&present).filter(|(a, b)| a != b).count();
    all.sort_by_key(|choices| differences(choices));
    all.truncate(most.max(1));
    all
}

/// The best plan under these choices.
fn planned_with(
    plan: &Plan,
    axes: &[Choices],
    choices: &[usize],
) -> Result<Option<(String, f64, f64, f64)>, PlanError> {
    let (mut model, mut cluster) = (plan.model.clone(), plan.cluster.clone());
    let (mut request, mut faster) = (plan.request.clone(), 1.0);
    for (axis, &choice) in axes.iter().zip(choices) {
        match &axis.changes[choice] {
            Change::Cluster(other) => cluster = other.clone(),
            Change::Links(factor) => faster = *factor,
            Change::Weights(quant) => model = model.with_quant(*quant),
            Change::Context(context) => request.context = *context,
            Change::Sequences(count) => {
                request.sequences = *count;
                request.objective =
                    if *count > 1 { Objective::Throughput } else { Objective::Latency };
            }
            Change::Nothing => {}
        }
    }
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    let found = choose(&model, &with_links(&cluster, faster), &cards, &request)?;
    let best = if request.sequences > 1 { found.best() } else { found.best_to_run() };
    Ok(best.map(|best| {
        let predicted = &best.prediction;
        (
            best.words(),
            predicted.tokens_per_second,
            predicted.token.millis(),
            predicted.ttft.millis(),
        )
    }))
}

/// The same cards with links that carry `factor` times as much.
fn with_links(cluster: &Cluster, factor: f64) -> Cluster {
    if factor == 1.0 {
        return cluster.clone();
    }
    let faster = |rate: &mut spanker_topology::BytesPerSecond| {
        rate.0 = ((rate.0 as f64 * factor) as u64).max(1);
    };
    let wires = cluster.with_changed_wires(|wire| faster(&mut wire.bandwidth));
    wires.with_changed_shared(|shared, _| faster(&mut shared.bandwidth))
}
