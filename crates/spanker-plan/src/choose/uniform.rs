// SPDX-License-Identifier: Apache-2.0
//! The chooser against layouts that anybody would try first: stages of equally many neighbouring cards. What is
//! chosen is never worse.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg32;
use spanker_model::{Model, Quant, builtin};
use spanker_topology::{Bytes, BytesPerSecond, Cluster, Profile, Seconds, Shape};

use super::split::{Score, StageCost, divide};
use super::{choose, score};
use crate::cost::memory::Place;
use crate::cost::pass::{Pass, Passes};
use crate::cost::shard::Split;
use crate::cost::{Group, Pricer};
use crate::plan::{Layout, Stage, in_flight};
use crate::predict::predict;
use crate::{Objective, Request};

/// What a pipeline is priced by: its passes, what stages' times mean, and whether the head is part of a turn.
fn priced(request: &Request, stages: usize) -> (Passes, Score, bool) {
    match request.objective {
        Objective::Ttft => {
            let passes = Pass::prefill(request.sequences, request.prompt, request.batch);
            (passes.into(), Score::Sum, false)
        }
        objective => {
            let (batches, together) = in_flight(request, request.sequences, stages);
            let score = match objective {
                Objective::Throughput => Score::Turns(batches as f64),
                _ => Score::Sum,
            };
            ([(Pass::decode(together, request.position), 1.0)].into(), score, true)
        }
    }
}

/// The layout of these groups with the best division of layers.
fn divided(pricer: &Pricer<'_>, groups: Vec<Group>) -> Option<Layout> {
    let (passes, score, head_in_turn) = priced(pricer.request, groups.len());
    let sum = |each: &dyn Fn(Pass) -> f64| passes.iter().map(|&(p, n)| n * each(p)).sum::<f64>();
    let last = groups.len() - 1;
    let cost = |(index, group): (usize, &Group)| {
        let place = Place {
            first: index == 0,
            last: index == last,
            sequences: pricer.request.sequences,
            turns: 1,
        };
        let mut besides = match index {
            0 => sum(&|pass| pricer.embed(group, pass).total().0),
            _ => sum(&|pass| pricer.hop(&groups[index - 1].cards, &group.cards, pass.rows()).0),
        };
        if index == last && head_in_turn {
            besides += pricer.head(group, passes[0].0.sequences).total().0;
        }
        let layer = sum(&|pass| pricer.mean_layer(group, pass).total().0);
        StageCost { layer, besides, most: pricer.capacity(group, place) }
    };
    let costs: Vec<StageCost> = groups.iter().enumerate().map(cost).collect();
    let (_, counts) = divide(&costs, pricer.model.layers.len() as u32, score, 0.0, f64::INFINITY)?;
    let mut start = 0;
    let stages = groups.into_iter().zip(counts).map(|(group, count)| {
        let layers = start..start + count as usize;
        start = layers.end;
        Stage { group, layers }
    });
    Some(Layout { replicas: vec![stages.collect()] })
}

/// The best score of pipelines of equally large groups of neighbours that fit, with what it is.
pub(super) fn best(model: &Model, cluster: &Cluster, request: &Request) -> (f64, String) {
    let pricer = Pricer::new(model, cluster, request);
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    let mut best = (f64::INFINITY, "nothing".into());
    let sizes = (0..7).map(|doublings| 1usize << doublings).chain([cards.len()]);
    for size in sizes.filter(|&size| size <= cards.len()) {
        let most = (cards.len() / size).min(model.layers.len());
        for count in [most, most.div_ceil(2), most.div_ceil(4)] {
            let passes = priced(request, count).0;
            let splits: &[Split] =
                if size == 1 { &[Split::Whole] } else { &[Split::Gather, Split::Reduce] };
            for &split in splits {
                for aim in 0..3 {
                    // The slowest cards come first in many clusters: those that are left out.
                    let used = &cards[cards.len() - count * size..];
                    let groups = used.chunks(size).map(|run| {
                        let groups = pricer.groups(run, split, passes[0].0, request.sequences);
                        groups.into_iter().nth(aim)
                    });
                    let Some(groups) = groups.collect::<Option<Vec<Group>>>() else { continue };
                    let Some(layout) = divided(&pricer, groups) else { continue };
                    let prediction = predict(&pricer, &layout);
                    let value = score(request.objective, &prediction);
                    if prediction.fits() && value < best.0 {
                        best = (value, format!("{count} stages of {size}, {split:?}"));
                    }
                }
            }
        }
    }
    best
}

/// Cards that differ at random, and a request.
fn seeded(seed: u64, cards: usize, objective: Objective) -> (Model, Cluster, Request) {
    let mut dice = Pcg32::seed_from_u64(seed);
    let model = builtin("tinyllama-1.1b", Quant::Q4_0).unwrap();
    let shape = [Shape::Ring, Shape::Switch, Shape::Star][dice.random_range(0..3)];
    let latency = [1e-6, 2e-5, 2e-4][dice.random_range(0..3)];
    let each = model.weight_bytes() as f64 / cards as f64 * dice.random_range(1.3..6.0);
    let kinds = if dice.random_bool(0.5) { cards } else { dice.random_range(1..4) };
    let mut card = |_| {
        let rate = BytesPerSecond(dice.random_range(500_000_000..4_000_000_000));
        let mut card = Profile::builtin("rev-a").unwrap().with_memory_bandwidth(rate, "seeded");
        let capacity = each * dice.random_range(0.6..1.4) + 100e6;
        card.memory.capacity.value = Bytes(capacity as u64);
        card.link.as_mut().unwrap().latency.value = Seconds(latency);
        card
    };
    let kinds: Vec<Profile> = (0..kinds).map(&mut card).collect();
    let profiles = (0..cards).map(|index| kinds[index % kinds.len()].clone()).collect();
    let sequences = match objective {
        Objective::Throughput => [2, 8, cards as u64][seed as usize % 3],
        _ => 1,
    };
    let request = Request { sequences, ..Request::new(objective) };
    (model, Cluster::new(profiles, shape).unwrap(), request)
}

/// Whether what is chosen is as good as the best uniform pipeline, both by the prices that the search compares.
fn check(model: &Model, cluster: &Cluster, request: &Request, name: &str) {
    let all: Vec<usize> = (0..cluster.cards()).collect();
    let choice = choose(model, cluster, &all, request).unwrap();
    let pricer = Pricer::new(model, cluster, request);
    let fitting = choice.candidates.iter().filter(|candidate| candidate.prediction.fits());
    let chosen = fitting
        .map(|candidate| score(request.objective, &predict(&pricer, &candidate.layout)))
        .fold(f64::INFINITY, f64::min);
    let (uniform, what) = best(model, cluster, request);
    let limit = uniform + uniform.abs() * 1e-9;
    assert!(chosen <= limit || uniform.is_infinite(), "{name}: {chosen} behind {uniform}, {what}");
}

#[test]
fn chosen_plans_of_many_different_cards_are_no_worse_than_uniform_pipelines() {
    let counts = [8, 12, 16, 24, 32, 48, 64];
    for (seed, objective) in (0u64..).zip(Objective::ALL.into_iter().cycle()).take(14) {
        let cards = counts[seed as usize % counts.len()];
        let (model, cluster, request) = seeded(seed, cards, objective);
        check(&model, &cluster, &request, &format!("seed {seed}, {cards} cards, {objective}"));
    }
}

#[test]
fn sixty_four_different_cards_serve_eight_sequences_no_slower_than_four_equal_stages() {
    let model = builtin("llama-2-70b", Quant::Q4_0).unwrap();
    let card = |index: u64| {
        let rate = BytesPerSecond(1_000_000_000 + 2_000_000_000 * index / 64);
        let mut card = Profile::builtin("rev-a").unwrap().with_memory_bandwidth(rate, "made up");
        card.memory.capacity.value = Bytes((1000 + 1000 * index / 64) << 20);
        card
    };
    let cluster = Cluster::new((0..64).map(card).collect(), Shape::Ring).unwrap();
    let request = Request { sequences: 8, ..Request::new(Objective::Throughput) };
    check(&model, &cluster, &request, "64 different cards");
}
