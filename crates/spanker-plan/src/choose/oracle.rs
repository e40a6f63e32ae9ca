// SPDX-License-Identifier: Apache-2.0
//! The chooser against brute force: every ordered choice of disjoint groups, every split and share of each,
//! every division of layers, priced by the prediction itself.

use proptest::prelude::*;
use spanker_model::{Model, Quant, builtin};
use spanker_topology::{
    Bytes, BytesPerSecond, Cluster, Profile, Seconds, Shape, TopologyError, Wire,
};

use super::{Choice, choose, score};
use crate::cost::pass::Pass;
use crate::cost::shard::Split;
use crate::cost::{Group, Pricer};
use crate::plan::{Layout, Stage, in_flight};
use crate::predict::predict;
use crate::{Objective, Request, Strategy};

/// A model that is small enough to enumerate.
fn model(layers: usize) -> Model {
    let mut model = builtin("smollm2-135m", Quant::Q4_0).unwrap();
    model.layers.truncate(layers);
    model
}

/// Every list of disjoint, non-empty groups of cards, in every order.
fn lists_of_groups(cards: &[usize]) -> Vec<Vec<Vec<usize>>> {
    let mut all = Vec::new();
    let subsets = 1usize << cards.len();
    for mask in 1..subsets {
        let taken = |index: &usize| mask & (1 << index) != 0;
        let pick = |keep: bool| -> Vec<usize> {
            (0..cards.len()).filter(|i| taken(i) == keep).map(|i| cards[i]).collect()
        };
        let (first, rest) = (pick(true), pick(false));
        all.push(vec![first.clone()]);
        for mut tail in lists_of_groups(&rest) {
            tail.insert(0, first.clone());
            all.push(tail);
        }
    }
    all
}

fn divisions(stages: usize, layers: usize) -> Vec<Vec<usize>> {
    if stages == 1 {
        return vec![vec![layers]];
    }
    let firsts = 1..=(layers + 1).saturating_sub(stages);
    let tails = |first: usize| {
        divisions(stages - 1, layers - first).into_iter().map(move |mut tail| {
            tail.insert(0, first);
            tail
        })
    };
    firsts.flat_map(tails).collect()
}

fn passes(request: &Request, stages: usize) -> Vec<Pass> {
    match request.objective {
        Objective::Ttft => {
            let pieces = Pass::prefill(request.sequences, request.prompt, request.batch);
            vec![pieces[0].0]
        }
        _ => {
            let together = in_flight(request, request.sequences, stages).1;
            vec![Pass::decode(together, request.position)]
        }
    }
}

/// Every group that these cards can form.
fn groups(pricer: &Pricer<'_>, cards: &[usize], pass: Pass) -> Vec<Group> {
    let splits: &[Split] =
        if cards.len() == 1 { &[Split::Whole] } else { &[Split::Gather, Split::Reduce] };
    let sequences = pricer.request.sequences;
    splits.iter().flat_map(|&split| pricer.groups(cards, split, pass, sequences)).collect()
}

/// The best score of any layout with one copy of the model on some cards that fits.
fn brute_force(model: &Model, cluster: &Cluster, cards: &[usize], request: &Request) -> f64 {
    let pricer = Pricer::new(model, cluster, request);
    let mut best = f64::INFINITY;
    for lists in lists_of_groups(cards) {
        if lists.len() > model.layers.len() {
            continue;
        }
        for pass in passes(request, lists.len()) {
            let options: Vec<Vec<Group>> =
                lists.iter().map(|cards| groups(&pricer, cards, pass)).collect();
            let mut combinations: Vec<Vec<Group>> = vec![Vec::new()];
            for option in &options {
                combinations = combinations
                    .iter()
                    .flat_map(|done| {
                        option.iter().map(move |group| {
                            let mut longer = done.clone();
                            longer.push(group.clone());
                            longer
                        })
                    })
                    .collect();
            }
            for (combination, division) in combinations.iter().flat_map(|c| {
                divisions(lists.len(), model.layers.len()).into_iter().map(move |d| (c, d))
            }) {
                let mut start = 0;
                let stages = combination.iter().zip(division).map(|(group, count)| {
                    let layers = start..start + count;
                    start = layers.end;
                    Stage { group: group.clone(), layers }
                });
                let layout = Layout { replicas: vec![stages.collect()] };
                let prediction = predict(&pricer, &layout);
                if prediction.fits() {
                    best = best.min(score(request.objective, &prediction));
                }
            }
        }
    }
    best
}

/// A card with a certain memory rate and capacity.
fn card(megabytes_per_second: u64, megabytes: u64) -> Profile {
    let mut card = Profile::builtin("rev-a").unwrap();
    card.memory.bandwidth.value = BytesPerSecond(megabytes_per_second * 1_000_000);
    card.memory.capacity.value = Bytes(megabytes << 20);
    card.memory.reserved.value = Bytes(1 << 20);
    card
}

fn cluster(cards: &[(u64, u64)], shape: usize, latency: f64) -> Cluster {
    let profiles: Vec<Profile> = cards
        .iter()
        .map(|&(rate, capacity)| {
            let mut profile = card(rate, capacity);
            profile.link.as_mut().unwrap().latency.value = Seconds(latency);
            profile
        })
        .collect();
    let built: Result<Cluster, TopologyError> = match shape {
        0 => Cluster::new(profiles, Shape::Ring),
        1 => Cluster::new(profiles, Shape::Switch),
        2 => Cluster::new(profiles, Shape::Star),
        _ => {
            // A chain whose links differ.
            let wires = (1..cards.len()).flat_map(|to| {
                let wire = |from, to: usize| Wire {
                    from,
                    to,
                    bandwidth: BytesPerSecond(100_000_000 * (1 + to.min(from)) as u64),
                    latency: Seconds(latency * to.max(from) as f64),
                    shared: None,
                };
                [wire(to - 1, to), wire(to, to - 1)]
            });
            Cluster::with_wires(profiles, wires.collect(), Vec::new())
        }
    };
    built.unwrap()
}

/// The most tokens in a second that two copies of the model give together, each on cards of its own and each
/// serving half of the sequences.
fn two_copies(model: &Model, cluster: &Cluster, request: &Request) -> Option<f64> {
    let half = Request { sequences: request.sequences / 2, ..request.clone() };
    let cards = cluster.cards();
    let rates: Vec<f64> = (0..1usize << cards)
        .map(|mask| {
            let taken: Vec<usize> = (0..cards).filter(|card| mask & (1 << card) != 0).collect();
            // Scores of throughput are rates below zero; where nothing fits there is none.
            -brute_force(model, cluster, &taken, &half)
        })
        .collect();
    let pairs = (1..1usize << cards).flat_map(|one| (1..one).map(move |other| (one, other)));
    let apart = pairs.filter(|(one, other)| one & other == 0);
    let both = apart.map(|(one, other)| rates[one] + rates[other]);
    both.reduce(f64::max).filter(|rate| rate.is_finite())
}

/// What a layout scores by the prices that the search compares.
fn searched(choice: &Choice, pricer: &Pricer<'_>, wanted: impl Fn(Strategy) -> bool) -> f64 {
    let objective = pricer.request.objective;
    let candidates = choice.candidates.iter().filter(|candidate| wanted(candidate.strategy));
    let fitting = candidates.filter(|candidate| candidate.prediction.fits());
    let scores = fitting.map(|candidate| score(objective, &predict(pricer, &candidate.layout)));
    scores.fold(f64::INFINITY, f64::min)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn nothing_that_fits_is_better_than_the_choice(
        cards in prop::collection::vec((300u64..4000, 20u64..120), 1..5),
        layers in 2usize..5,
        shape in 0usize..4,
        latency in prop::sample::select(vec![1e-6, 1e-4, 3e-3]),
        objective in prop::sample::select(Objective::ALL.to_vec()),
        sequences in 1u64..5,
        equal in any::<bool>(),
    ) {
        let cards = if equal { vec![cards[0]; cards.len()] } else { cards };
        let model = model(layers);
        let cluster = cluster(&cards, shape, latency);
        let request = Request { sequences, context: 512, prompt: 256, ..Request::new(objective) };
        let all: Vec<usize> = (0..cards.len()).collect();
        let choice = choose(&model, &cluster, &all, &request).unwrap();
        // Both by the prices that the search compares: what is reported also knows how layers overlap.
        let pricer = Pricer::new(&model, &cluster, &request);
        let chosen = searched(&choice, &pricer, |strategy| strategy != Strategy::Replicas);
        let best = brute_force(&model, &cluster, &all, &request);
        prop_assert!(choice.exact, "small cases are searched completely");
        if best.is_infinite() {
            prop_assert!(chosen.is_infinite());
        } else {
            let (low, high) = (best.abs() * (1.0 - 1e-9), best.abs() * (1.0 + 1e-9));
            prop_assert!((low..=high).contains(&chosen.abs()), "chose {chosen}, best is {best}");
        }
    }
    #[test]
    fn no_two_copies_that_fit_give_more_tokens_than_the_choice(
        cards in prop::collection::vec((300u64..4000, 60u64..200), 2..5),
        layers in 2usize..4,
        shape in 0usize..4,
        latency in prop::sample::select(vec![1e-6, 1e-4, 3e-3]),
        sequences in prop::sample::select(vec![2u64, 4]),
    ) {
        let model = model(layers);
        let cluster = cluster(&cards, shape, latency);
        let request = Request { sequences, context: 512, ..Request::new(Objective::Throughput) };
        let all: Vec<usize> = (0..cards.len()).collect();
        let choice = choose(&model, &cluster, &all, &request).unwrap();
        let pricer = Pricer::new(&model, &cluster, &request);
        let chosen = -searched(&choice, &pricer, |strategy| strategy == Strategy::Replicas);
        if let Some(best) = two_copies(&model, &cluster, &request) {
            prop_assert!(chosen >= best * (1.0 - 1e-9), "chose {chosen}, two copies give {best}");
        }
    }
}
