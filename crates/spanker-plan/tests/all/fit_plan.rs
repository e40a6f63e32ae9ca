// SPDX-License-Identifier: Apache-2.0
//! A planner that is given a fitted card prices a token as the fit predicts it.

use proptest::prelude::*;
use spanker_model::{Model, Quant, builtin};
use spanker_plan::{
    CardModel, CardSamples, Objective, Plan, Prediction, Request, Strategy as Split, choose,
};
use spanker_topology::{Bytes, BytesPerSecond, Cluster, Profile, Provenance, Seconds, Shape};

/// A card that was sampled on one model; all terms in milliseconds: the whole memory time, the fixed time,
/// and exchanges on two cards.
fn fitted(model: &Model, memory: f64, fixed: f64, exchange: f64) -> CardModel {
    let line = |n: usize| {
        let work = memory / n as f64 + fixed;
        format!("{},q4_0,{n},{work:?},{:?}\n", model.name, exchange * (n as f64 - 1.0))
    };
    let rows: String = [1, 2, 4].map(line).concat();
    let table = format!("model,quant,cards,milliseconds,transfer\n{rows}");
    CardModel::fit(&CardSamples::from_csv(&table).expect("a table")).expect("a fit")
}

/// Cards with memory for everything.
fn cluster(profile: &str, cards: usize, shape: Shape) -> Cluster {
    let mut profile = Profile::builtin(profile).expect("built in");
    profile.memory.capacity.value = Bytes(1 << 42);
    let shape = if cards == 1 { Shape::Switch } else { shape };
    Cluster::uniform(profile, cards, shape).expect("a cluster")
}

/// What the layout that splits every matrix over all cards is predicted to do.
fn split_over_all(model: &Model, cluster: &Cluster) -> Prediction {
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    let wanted = if cards.len() == 1 { Split::OneCard } else { Split::TensorGather };
    let request = Request { position: 0, ..Request::new(Objective::Latency) };
    // The best split leaves cards out where more of them hurt: here links are free, so none is left out.
    let free = cluster.with_changed_wires(|wire| {
        (wire.bandwidth, wire.latency) = (BytesPerSecond(1 << 50), Seconds(1e-12));
    });
    let free = free.with_changed_shared(|shared, _| shared.bandwidth = BytesPerSecond(1 << 50));
    let choice = choose(model, &free, &cards, &request).expect("a choice");
    let mut all = choice.candidates.into_iter();
    let found = all.find(|candidate| candidate.strategy == wanted).expect("a layout");
    assert_eq!(found.layout.replicas[0][0].group.cards.len(), cards.len());
    let plan = Plan::new(model.clone(), cluster.clone(), request, found.layout).expect("a plan");
    plan.predict()
}

/// A time without its communication, in milliseconds.
fn work(prediction: &Prediction) -> f64 {
    let terms = prediction.terms;
    (terms.total().0 - terms.communication.0) * 1e3
}

fn shape() -> impl Strategy<Value = Shape> {
    prop::sample::select(vec![Shape::Ring, Shape::Switch, Shape::Star])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn planned_token_takes_what_the_fit_predicts(
        name in prop::sample::select(vec!["smollm2-135m", "tinyllama-1.1b", "llama-2-7b", "llama-3-8b"]),
        quant in prop::sample::select(vec![Quant::Q4_0, Quant::Q8_0, Quant::F16]),
        profile in prop::sample::select(vec!["rev-a", "rpi5-gbe", "h200-nvlink"]),
        memory in 1.0..2000.0f64,
        fixed in 0.0..0.5f64,
        cards in 1..9usize,
        shape in shape(),
    ) {
        let card = fitted(&builtin("llama-2-7b", Quant::Q4_0).expect("built in"), memory, fixed * memory, 0.0);
        let model = builtin(name, quant).expect("built in");
        let bare = cluster(profile, cards, shape);
        let (known, assumed) = card.calibrate_cluster(&bare, false);
        let expected = card.predict(&model, cards);
        let found = split_over_all(&model, &known);
        let (planned, fitted) = (work(&found), expected.time.value);
        prop_assert!((planned / fitted - 1.0).abs() < 0.03, "planned {planned}, fitted {fitted}");
        prop_assert_eq!(found.terms.compute.0, 0.0);
        let said = assumed.join("\n");
        for left in ["prompts and batches (ttft)", "memory capacity", "host link"] {
            prop_assert!(said.contains(left), "{}", said);
        }
        prop_assert_eq!(said.contains("links between cards"), cards > 1);
    }

    #[test]
    fn planned_exchanges_take_what_the_fit_predicts(
        memory in 100.0..2000.0f64,
        exchange in 0.02..0.3f64,
        cards in 2..9usize,
        shape in shape(),
    ) {
        let model = builtin("llama-2-7b", Quant::Q4_0).expect("built in");
        let card = fitted(&model, memory, 0.1 * memory, exchange * memory);
        let (known, assumed) = card.calibrate_cluster(&cluster("rev-a", cards, shape), false);
        prop_assert!(assumed.iter().any(|text| text.starts_with("links: latency alone")));
        let planned = split_over_all(&model, &known).token.0 * 1e3;
        let fitted = card.predict(&model, cards).time.value;
        prop_assert!((planned / fitted - 1.0).abs() < 0.03, "planned {planned}, fitted {fitted}");
    }
}

#[test]
fn published_card_plans_what_it_predicts_on_a_profile_that_is_far_slower() {
    // rev-a's own arithmetic would make this 482 ms on four cards and 1,855 on one.
    let model = builtin("llama-2-7b", Quant::Q4_0).expect("built in");
    let table =
        "model,quant,cards,milliseconds\nllama-2-7b,q4_0,1,101.06\nllama-2-7b,q4_0,2,61.50\n";
    let card = CardModel::fit(&CardSamples::from_csv(table).expect("a table")).expect("a fit");
    for (cards, measured) in [(1, 101.06), (2, 61.50), (4, 41.72)] {
        let (known, _) = card.calibrate_cluster(&cluster("rev-a", cards, Shape::Ring), false);
        let planned = work(&split_over_all(&model, &known));
        assert!((planned / measured - 1.0).abs() < 0.02, "{cards} cards: {planned} ms");
    }
}

#[test]
fn calibrated_profile_says_what_is_fitted_and_keeps_arithmetic_that_is_faster() {
    let model = builtin("llama-2-7b", Quant::Q4_0).expect("built in");
    let card = fitted(&model, 100.0, 10.0, 0.0);
    let slow = Profile::builtin("rev-a").expect("built in");
    let (known, _) = card.calibrate(&slow);
    assert_eq!(known.compute.rate.provenance, Provenance::Fitted);
    assert!(known.compute.rate.source.contains("prompt speed is not known"), "{known:?}");
    assert_eq!((known.host.latency.value.0, known.compute.per_token.value.0), (0.0, 0.0));
    assert_eq!(known.memory.capacity, slow.memory.capacity);
    assert_eq!((&known.host.bandwidth, &known.link), (&slow.host.bandwidth, &slow.link));
    let fast = Profile::builtin("h200-nvlink").expect("built in");
    let (known, assumed) = card.calibrate(&fast);
    assert_eq!(known.compute.rate, fast.compute.rate);
    assert!(assumed[0].contains("as in profile h200-nvlink"), "{assumed:?}");
}
