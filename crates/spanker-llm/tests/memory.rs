// SPDX-License-Identifier: Apache-2.0
//! What fits, fits: emulated cards with exactly the memory that a plan says run it, and cards with one byte less
//! are refused by the plan and by the load, whatever the model, the split and the room for tokens.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::sync::Arc;

use proptest::prelude::*;
use spanker_llm::{InProcess, LlmError, OnCards, Runner, Want};
use spanker_model::Quant;
use spanker_plan::{Layout, Objective, Plan, Request, Split};
use spanker_runtime::SpankerControl;
use spanker_test_support::Recipe;
use spanker_topology::{Bytes, Cluster, Profile, Shape};
use spanker_twin::{Pace, World, specs};

use splits::{Open, mixed, one_by_one, together};

/// A plan on cards with these bytes of memory for buffers each.
fn plan(
    model: &spanker_model::Model,
    layout: &Layout,
    shape: Shape,
    bytes: &[u64],
    request: &Request,
) -> Plan {
    let profiles = bytes.iter().map(|&bytes| {
        let mut profile = Profile::builtin("rev-a").expect("a profile");
        let reserved = profile.memory.reserved.value.0;
        profile.memory.capacity.value = Bytes(bytes + reserved);
        profile
    });
    let cluster = Cluster::new(profiles.collect(), shape).expect("cards");
    Plan::new(model.clone(), cluster, request.clone(), layout.clone()).expect("a plan")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn cards_exactly_large_enough_run_and_cards_one_byte_smaller_are_refused(
        quant in prop::sample::select(vec![Quant::Q4_0, Quant::Q4K, Quant::Q8_0, Quant::F16]),
        cards in 1usize..6,
        kind in 0usize..4,
        shape in prop::sample::select(vec![Shape::Ring, Shape::Star]),
        context in 2usize..70,
        batch in 1usize..20,
        short in 0usize..5,
    ) {
        let recipe = Recipe { layers: 5, ..Recipe::llama(quant, [8, 4, 64], 512, 768) };
        let network = Arc::new(recipe.network());
        // Two stages take two cards.
        let cards = if kind == 3 { cards.max(2) } else { cards };
        let shares = vec![1.0; cards];
        let (split, groups) = match kind {
            0 => (Split::Gather, together(&shares)),
            1 => (Split::Reduce, together(&shares)),
            2 => (Split::Gather, one_by_one(cards)),
            _ => (Split::Gather, mixed(cards)),
        };
        let layout = Layout::of_groups(network.model(), split, &groups).expect("a layout");
        let (context, batch) = (context, batch.min(context));
        let request = Request {
            context: context as u64,
            batch: batch as u64,
            prompt: 1,
            ..Request::new(Objective::Latency)
        };
        let ample = plan(network.model(), &layout, shape, &vec![1 << 32; cards], &request);
        let memory = ample.predict().memory;
        let needed: Vec<u64> = memory.iter().map(|card| card.footprint.total().0).collect();

        let exact = plan(network.model(), &layout, shape, &needed, &request);
        prop_assert!(exact.predict().fits());
        let world = World::new(specs(&exact.cluster, Pace::Card, 1).expect("cards"), 7);
        let controls: Vec<SpankerControl> = (0..cards).map(|card| world.control(card)).collect();
        let card = |index: usize| controls.get(index);
        let mut runner =
            OnCards::load(&network, &exact, context, batch, &card, &|_| ()).expect("it fits");
        for used in runner.memory().expect("cards answer") {
            prop_assert_eq!(used.planned, used.allocated, "card {}", used.card);
            prop_assert_eq!(used.planned, needed[used.card]);
        }
        // The largest step and a single token: nothing is allocated on the way.
        let tokens = vec![1; batch];
        let want = Want::Best(1024.min(recipe.vocab as u32));
        runner.step_alone(&tokens, 0, want).expect("a step");
        if batch < context {
            runner.step_alone(&[2], batch, Want::Best(1)).expect("a step");
        }
        for used in runner.memory().expect("cards answer") {
            prop_assert_eq!(used.planned, used.allocated, "card {} afterwards", used.card);
        }

        let short = short % cards;
        let mut less = needed.clone();
        less[short] -= 1;
        let tight = plan(network.model(), &layout, shape, &less, &request);
        prop_assert!(!tight.predict().fits());
        let world = World::new(specs(&tight.cluster, Pace::Card, 1).expect("cards"), 7);
        let controls: Vec<SpankerControl> = (0..cards).map(|card| world.control(card)).collect();
        let card = |index: usize| controls.get(index);
        let refused = OnCards::load(&network, &tight, context, batch, &card, &|_| ());
        match refused {
            Err(LlmError::Memory { card, .. }) => prop_assert_eq!(card, short),
            other => prop_assert!(false, "{:?}", other.map(|_| ())),
        }

        let threads = InProcess::new(Arc::clone(&network), &exact, context, batch, 1);
        for used in threads.expect("threads").memory() {
            prop_assert_eq!(used.planned, used.allocated, "thread {}", used.card);
        }
    }
}
