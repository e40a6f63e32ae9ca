// SPDX-License-Identifier: Apache-2.0
//! What fits does fit: an allocator replays every plan, card by card, piece by piece.

use proptest::prelude::*;
use spanker_model::{Model, Quant, builtin};
use spanker_plan::{ALIGNMENT, Arena, Objective, Plan, Request, choose};
use spanker_topology::{Bytes, BytesPerSecond, Cluster, Profile, Shape};

/// A model of a random shape in the Llama family, some layers stored more finely than others.
fn model() -> impl Strategy<Value = Model> {
    let names =
        vec!["smollm2-135m", "tinyllama-1.1b", "qwen2.5-0.5b", "llama-3.2-1b", "llama-2-7b"];
    let quants = vec![Quant::Q4_0, Quant::Q4K, Quant::Q8_0, Quant::F16];
    (
        prop::sample::select(names),
        prop::sample::select(quants.clone()),
        prop::sample::select(quants),
        1usize..8,
        any::<bool>(),
    )
        .prop_map(|(name, quant, finer, every, tied)| {
            let mut model = builtin(name, quant).unwrap();
            model.layers.truncate(12);
            for layer in model.layers.iter_mut().step_by(every) {
                layer.down = layer.down.with_quant(finer);
                layer.v = layer.v.with_quant(finer);
            }
            if tied {
                model.head = model.embedding;
                model.tied = true;
            }
            model.validate().unwrap();
            model
        })
}

fn profile((rate, capacity, reserved): (u64, u64, u64)) -> Profile {
    let mut card = Profile::builtin("rev-a").unwrap();
    card.memory.bandwidth.value = BytesPerSecond(rate * 1_000_000);
    card.memory.capacity.value = Bytes(capacity << 20);
    card.memory.reserved.value = Bytes(reserved << 20);
    card
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn no_plan_that_fits_exceeds_a_card_when_its_allocations_are_replayed(
        model in model(),
        cards in prop::collection::vec((200u64..3000, 80u64..3000, 1u64..64), 1..6),
        shape in prop::sample::select(vec![Shape::Ring, Shape::Switch, Shape::Star]),
        objective in prop::sample::select(Objective::ALL.to_vec()),
        sequences in 1u64..9,
        context in 1u64..8192,
    ) {
        let cluster = Cluster::new(cards.iter().copied().map(profile).collect(), shape).unwrap();
        let prompt = context.min(300);
        let request = Request { sequences, context, prompt, ..Request::new(objective) };
        let all: Vec<usize> = (0..cards.len()).collect();
        let choice = choose(&model, &cluster, &all, &request).unwrap();
        for candidate in &choice.candidates {
            let layout = candidate.layout.clone();
            let plan = Plan::new(model.clone(), cluster.clone(), request.clone(), layout).unwrap();
            let mut everything_fits = true;
            for (card, pieces) in plan.allocations() {
                let mut arena = Arena::new(cluster.profile(card).usable());
                everything_fits &= pieces.iter().all(|piece| arena.allocate(piece.bytes).is_some());
                let rounded: u64 =
                    pieces.iter().map(|piece| piece.bytes.0.next_multiple_of(ALIGNMENT)).sum();
                let stated = candidate.prediction.memory.iter().find(|m| m.card == card).unwrap();
                prop_assert_eq!(rounded, stated.footprint.total().0, "card {}", card);
            }
            prop_assert_eq!(candidate.prediction.fits(), everything_fits, "{}", candidate.strategy);
            // A saved plan says the same when it is read again.
            let again = Plan::from_json(&plan.to_json()).unwrap();
            prop_assert!(again == plan, "a plan changes when it is saved");
            prop_assert!(again.predict() == candidate.prediction, "and so does its prediction");
        }
    }
}

#[test]
fn keys_and_values_that_no_runner_keeps_are_refused_by_name() {
    let model = builtin("smollm2-135m", Quant::Q4_0).unwrap();
    let cluster = Cluster::uniform(Profile::builtin("rev-a").unwrap(), 1, Shape::Ring).unwrap();
    let refused = |model: &Model, kv: Quant| {
        let request = Request { kv, ..Request::new(Objective::Latency) };
        choose(model, &cluster, &[0], &request).unwrap_err().to_string()
    };
    assert!(refused(&model, Quant::Q4K).contains("q4_k"));
    // Heads of another number than whole blocks.
    let odd = Model { head_size: 72, heads: 8, kv_heads: 8, ..model };
    let error = refused(&odd, Quant::Q8_0);
    assert!(error.contains("q8_0") && error.contains("72"), "{error}");
}

#[test]
fn edited_plans_are_refused_with_what_is_wrong() {
    let model = builtin("smollm2-135m", Quant::Q4_0).unwrap();
    let cluster = Cluster::uniform(Profile::builtin("rev-a").unwrap(), 3, Shape::Ring).unwrap();
    let request = Request::new(Objective::Latency);
    let best = choose(&model, &cluster, &[0, 1, 2], &request).unwrap().candidates.remove(0);
    let plan = Plan::new(model, cluster, request, best.layout).unwrap();
    let good: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    type Edit = fn(&mut serde_json::Value);
    let edits: [(Edit, &str); 9] = [
        (|plan| plan["version"] = 2.into(), "version 2"),
        (|plan| plan["kind"] = "trace".into(), "kind"),
        (|plan| plan["layout"]["replicas"] = serde_json::json!([]), "no stage"),
        (|plan| plan["layout"]["replicas"][0][0]["group"]["cards"][1] = 7.into(), "no card 7"),
        (|plan| plan["layout"]["replicas"][0][0]["group"]["cards"][1] = 0.into(), "two places"),
        (|plan| plan["layout"]["replicas"][0][0]["layers"]["end"] = 29.into(), "29 layers of 30"),
        (
            |plan| plan["layout"]["replicas"][0][0]["group"]["shards"][0]["ffn"]["end"] = 5.into(),
            "5",
        ),
        (|plan| plan["request"]["context"] = 0.into(), "context of 0"),
        (|plan| plan["cluster"]["wires"][0]["bandwidth"] = (-5).into(), "-5"),
    ];
    for (edit, named) in edits {
        let mut edited = good.clone();
        edit(&mut edited);
        let error = Plan::from_json(&edited.to_string()).unwrap_err().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
    for text in ["", "{}", "[]", "null", "{\"kind\":\"plan\",\"version\":1}"] {
        assert!(Plan::from_json(text).is_err(), "{text}");
    }
}
