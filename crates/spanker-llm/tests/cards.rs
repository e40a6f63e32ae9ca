// SPDX-License-Identifier: Apache-2.0
//! Models on emulated cards in virtual time: the bits of threads, and what happens when a card is lost.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::sync::Arc;

use spanker_llm::{LlmError, Loading, Network, OnCards, Recorder, Session, Want, run_logits};
use spanker_model::Quant;
use spanker_plan::{Layout, Plan, Split};
use spanker_runtime::SpankerControl;
use spanker_test_support::Recipe;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Disturbance, Pace, World, specs};

use splits::{
    CONTEXT, Groups, Open, STEPS, assert_same, best, mixed, one_by_one, plan, plan_of, prompt,
};
use splits::{run, threads, together};

/// Cards in a ring, with a handle to each.
fn ring(cards: usize) -> (World, Vec<SpankerControl>) {
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, cards, Shape::Ring).expect("cards");
    let world = World::new(specs(&cluster, Pace::Card, 1).expect("cards"), 7);
    let controls = (0..cards).map(|card| world.control(card)).collect();
    (world, controls)
}

fn ring_plan(network: &Network<Vec<u8>>, split: Split, groups: &Groups) -> Plan {
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    plan_of(network, layout, Shape::Ring)
}

fn load<'a>(
    network: &Network<Vec<u8>>,
    plan: &Plan,
    batch: usize,
    controls: &[&'a SpankerControl],
) -> Result<OnCards<'a>, LlmError> {
    let card = |index: usize| controls.get(index).copied();
    OnCards::load(network, plan, CONTEXT, batch, &card, &|_| ())
}

#[test]
fn every_split_on_cards_has_the_bits_of_threads() {
    let recipes = [
        Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352),
        Recipe { tied: true, ..Recipe::llama(Quant::F16, [3, 1, 10], 30, 37) },
        Recipe { architecture: "qwen3".into(), ..Recipe::llama(Quant::Q4K, [4, 2, 64], 256, 256) },
        Recipe::llama(Quant::Q4_0, [5, 1, 32], 160, 96).mixture("qwen3moe", [7, 3, 0]),
        Recipe::llama(Quant::Q8_0, [4, 2, 24], 64, 32).mixture("qwen2moe", [5, 2, 96]),
    ];
    for recipe in recipes {
        let recipe = Recipe { layers: 3, ..recipe };
        let network = Arc::new(recipe.network());
        let tokens = prompt(5, recipe.vocab);
        for (split, groups) in [
            (Split::Gather, together(&[1.0; 3])),
            (Split::Gather, together(&[3.0, 1.0])),
            (Split::Reduce, together(&[1.0; 3])),
            (Split::Gather, one_by_one(3)),
            (Split::Gather, mixed(4)),
        ] {
            let what = format!("{}, {split:?} {groups:?}", recipe.name);
            let plan = ring_plan(&network, split, &groups);
            let (_world, controls) = ring(plan.layout.cards().len());
            let controls: Vec<&SpankerControl> = controls.iter().collect();
            let runner = load(&network, &plan, 3, &controls).expect("cards");
            let found = run_logits(Box::new(runner), &tokens, STEPS, None).expect("logits");
            assert_same(&what, &found, &run(&network, &plan, &tokens));
        }
    }
}

#[test]
fn cards_that_have_nothing_of_a_matrix_do_their_part_all_the_same() {
    let few = Recipe { vocab: 3, ..Recipe::llama(Quant::Q4_0, [2, 1, 16], 32, 32) };
    let network = Arc::new(few.network());
    let tokens = prompt(6, few.vocab);
    for split in [Split::Gather, Split::Reduce] {
        let plan = ring_plan(&network, split, &together(&[1.0; 5]));
        let (_world, controls) = ring(5);
        let handles: Vec<&SpankerControl> = controls.iter().collect();
        let on_cards = || load(&network, &plan, 3, &handles).expect("cards");
        let found = run_logits(Box::new(on_cards()), &tokens, STEPS, None).expect("logits");
        assert_same(&format!("{split:?}"), &found, &run(&network, &plan, &tokens));
        let expected = best(&mut Session::new(threads(&network, &plan, 3, 1)), &tokens, 3);
        let found = best(&mut Session::new(Box::new(on_cards())), &tokens, 3);
        assert_eq!(found, expected, "{split:?}");
    }
}

#[test]
fn cards_that_run_a_model_leave_no_memory_behind() {
    let recipe = Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352);
    let network = recipe.network();
    let plan = ring_plan(&network, Split::Reduce, &together(&[1.0; 3]));
    let (_world, controls) = ring(3);
    let free = || -> Vec<u64> {
        controls.iter().map(|card| card.info().expect("an answer").available).collect()
    };
    let before = free();
    let handles: Vec<&SpankerControl> = controls.iter().collect();
    let runner = load(&network, &plan, 3, &handles).expect("cards");
    let used = free();
    assert!(used.iter().zip(&before).all(|(used, before)| used < before), "{used:?}");
    run_logits(Box::new(runner), &prompt(5, recipe.vocab), 2, None).expect("logits");
    assert_eq!(free(), before);
}

#[test]
fn card_that_is_lost_is_named_and_the_others_go_on_with_the_same_tokens() {
    let recipe = Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352);
    let network = Arc::new(recipe.network());
    let tokens = prompt(7, recipe.vocab);
    let three = ring_plan(&network, Split::Gather, &together(&[1.0; 3]));
    let two = plan(&network, Split::Gather, &together(&[1.0; 2]));
    let undisturbed = best(&mut Session::new(threads(&network, &three, 3, 1)), &tokens, 6);
    let (world, controls) = ring(3);
    let all: Vec<&SpankerControl> = controls.iter().collect();
    let runner = load(&network, &three, 3, &all).expect("cards");
    let mut session = Session::new(Box::new(runner));
    let mut found = best(&mut session, &tokens, 3);
    world.disturb(Disturbance::Kill(1));
    let next = [found[2][0].0];
    let error = session.feed(&next, Want::Best(4)).expect_err("a card is dead");
    let LlmError::Device(lost) = &error else { panic!("{error}") };
    assert_eq!(lost.card(), Some(1), "{error}");
    assert!(error.to_string().contains("card 1"), "{error}");
    session.release();
    let left = [all[0], all[2]];
    let runner = load(&network, &two, 4, &left).expect("the cards that are left");
    let outcome = session.go_on(Box::new(runner), Want::Best(4)).expect("a step");
    let last = outcome.last().best.clone();
    let next = [last[0].0];
    found.push(last);
    found.extend(best(&mut session, &next, 2));
    assert_eq!(found, undisturbed);
}

#[test]
fn card_that_is_lost_while_a_model_is_loaded_is_named_and_the_others_are_free_again() {
    let recipe = Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352);
    let network = recipe.network();
    let plan = ring_plan(&network, Split::Gather, &together(&[1.0; 3]));
    let (world, controls) = ring(3);
    let free = |card: usize| controls[card].info().expect("an answer").available;
    let before = [free(0), free(2)];
    let card = |index: usize| controls.get(index);
    let killing = |_: Loading| world.disturb(Disturbance::Kill(1));
    let error = OnCards::load(&network, &plan, CONTEXT, 3, &card, &killing).expect_err("a death");
    let LlmError::Device(lost) = &error else { panic!("{error}") };
    assert_eq!(lost.card(), Some(1), "{error}");
    assert_eq!([free(0), free(2)], before);
}

#[test]
fn plans_for_other_cards_or_another_model_are_refused() {
    let recipe = Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352);
    let network = recipe.network();
    let plan = ring_plan(&network, Split::Gather, &together(&[1.0; 3]));
    let (_world, controls) = ring(3);
    let handles: Vec<&SpankerControl> = controls.iter().take(2).collect();
    let error = load(&network, &plan, 3, &handles).expect_err("two handles");
    assert_eq!(error.to_string(), "plan: it uses card 2, which is not there");
    let other = Recipe { ffn: 384, ..recipe }.network();
    let handles: Vec<&SpankerControl> = controls.iter().collect();
    let error = load(&other, &plan, 3, &handles).expect_err("another model's plan");
    let text = error.to_string();
    assert!(text.contains("with ffn 352, the file has 384"), "{text}");
}

#[test]
fn recorded_steps_have_marks_of_every_card() {
    let recipe = Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352);
    let network = recipe.network();
    for groups in [together(&[1.0; 3]), one_by_one(2)] {
        let plan = ring_plan(&network, Split::Gather, &groups);
        let cards = plan.layout.cards().len();
        let (_world, controls) = ring(cards);
        let handles: Vec<&SpankerControl> = controls.iter().collect();
        let mut runner = load(&network, &plan, 3, &handles).expect("cards");
        let recorder = Recorder::new();
        runner.record(&recorder).expect("cards that answer");
        run_logits(Box::new(runner), &prompt(4, recipe.vocab), 2, None).expect("logits");
        let marks = recorder.marks();
        for card in 0..cards {
            let own: Vec<_> = marks.iter().filter(|mark| mark.card as usize == card).collect();
            assert!(!own.is_empty(), "card {card} of {cards}");
            assert!(own.iter().all(|mark| mark.start <= mark.end && mark.end.is_finite()));
        }
    }
}
