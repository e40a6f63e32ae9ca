// SPDX-License-Identifier: Apache-2.0
//! The chooser against layouts that anybody would try first: stages of equally many neighbouring cards, and equal
//! copies of those. What is chosen is never worse.

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
        let place =
            Place { first: index == 0, last: index == last, sequences: pricer.request.sequences };
        let mut besides = match index {
            0 => sum(&|pass| pricer.embed(group, pass).total().0),
            _ => sum(&|pass| pricer.hop(&groups[index - 1], group, pass.rows()).0),
        };
        if index == last && head_in_turn {
            besides += pricer.head(group, passes[0].0.sequences).total().0;
        }
        let layer = sum(&|pass| pricer.mean_layer(group, pass).total().0);
        StageCost { layer, besides, most: pricer.capacity(group, place) }
    };
    let costs: Vec<StageCost> = groups.iter().enumerate().map(cost).collect();
    let (_, counts) = divide(&costs, pricer.model.layers.len() as u32, score, 0.0)?;
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

#[test]
fn probe() {
    let model = builtin("llama-2-70b", Quant::Q4_0).unwrap();
    let card = |index: u64| {
        let rate = BytesPerSecond(1_000_000_000 + 2_000_000_000 * index / 64);
        let mut card = Profile::builtin("rev-a").unwrap().with_memory_bandwidth(rate, "made up");
        card.memory.capacity.value = Bytes((1000 + 1000 * index / 64) << 20);
        card
    };
    let cluster = Cluster::new((0..64).map(card).collect(), Shape::Ring).unwrap();
    for objective in Objective::ALL {
        let sequences = if objective == Objective::Throughput { 8 } else { 1 };
        let request = Request { sequences, ..Request::new(objective) };
        println!("{objective}: {:?}", best(&model, &cluster, &request));
        let all: Vec<usize> = (0..64).collect();
        let choice = choose(&model, &cluster, &all, &request).unwrap();
        let pricer = Pricer::new(&model, &cluster, &request);
        for c in &choice.candidates {
            let sizes: Vec<usize> = c.layout.stages().map(|s| s.group.cards.len()).collect();
            let splits: Vec<Split> = c.layout.stages().map(|s| s.group.split).collect();
            let value = score(objective, &predict(&pricer, &c.layout));
            println!("   {} {} {:?} {value} {sizes:?} {splits:?}", c.strategy, c.prediction.fits(), c.prediction.tokens_per_second);
        }
    }
}
