// SPDX-License-Identifier: Apache-2.0
//! Steps of several sequences, outputs and blocks, one after the other and at the same time.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "../../tests/support/splits.rs"]
mod splits;

use std::collections::VecDeque;
use std::sync::Arc;

use spanker_model::{KvShape, Quant};
use spanker_plan::{Layout, Objective, Split, Want};
use spanker_test_support::Recipe;
use spanker_topology::Shape;

use super::*;
use crate::runner::Part;
use splits::{Groups, Open, mixed, one_by_one, plan_of, together};

const CONTEXT: usize = 16;
const BATCH: usize = 12;

/// A network on threads with room for so many sequences of a step, and steps under way.
fn threads(
    network: &Arc<Network<Vec<u8>>>,
    split: Split,
    groups: &Groups,
    (sequences, kv): (u64, Quant),
) -> InProcess<Vec<u8>> {
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    let mut plan = plan_of(network, layout, Shape::Ring);
    plan.request.objective = Objective::Throughput;
    (plan.request.sequences, plan.request.kv) = (sequences, kv);
    InProcess::new(Arc::clone(network), &plan, CONTEXT, BATCH, 2).expect("threads")
}

/// Every layout that gives the bits of one card.
fn layouts() -> Vec<(Split, Groups)> {
    vec![
        (Split::Gather, together(&[1.0])),
        (Split::Gather, together(&[1.0, 1.0])),
        (Split::Gather, together(&[2.0, 1.0, 1.0])),
        (Split::Gather, one_by_one(2)),
        (Split::Gather, mixed(3)),
    ]
}

#[test]
fn sequences_of_one_step_get_what_each_asks_for_as_if_they_were_alone() {
    let dense = Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 192);
    for recipe in [dense.clone(), dense.mixture("qwen3moe", [5, 2, 0])] {
        are_as_if_alone(&Arc::new(recipe.network()));
    }
}

fn are_as_if_alone(network: &Arc<Network<Vec<u8>>>) {
    let part =
        |tokens: &'static [u32], block: &'static [u32], want| Part::new(tokens, 0, block, want);
    let parts = [
        part(&[5, 6, 7], &[4], Want::Best(3)),
        part(&[9], &[0], Want::Logits),
        part(&[1, 2], &[2], Want::Nothing),
        part(&[70, 3, 4, 4], &[1], Want::Best(40)),
        part(&[8], &[3], Want::Best(1)),
    ];
    for kv in KvShape::QUANTS {
        for (split, groups) in layouts() {
            let mut runner = threads(network, split, &groups, (5, kv));
            let found = runner.step(&Step::of(&parts)).expect("a step").outputs;
            let mut found = found.into_iter();
            for one in parts.iter().filter(|part| part.want != Want::Nothing) {
                let output = found.next().expect("an output for each part that asks");
                let mut runner = threads(network, split, &groups, (1, kv));
                let alone = runner.step(&Step::of(&[Part { blocks: &[0], ..*one }]));
                let alone = alone.expect("a step");
                assert_eq!(&output, alone.last(), "{groups:?}: {:?}", one.tokens);
                let length = match one.want {
                    Want::Best(k) => k as usize,
                    _ => 0,
                };
                assert_eq!(output.best.len(), length, "{groups:?}");
                assert_eq!(output.logits.is_some(), one.want == Want::Logits);
            }
            assert_eq!(found.next(), None);
        }
    }
}

#[test]
fn outputs_after_several_tokens_of_a_part_are_those_of_one_token_at_a_time() {
    let recipe = Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 192);
    let network = Arc::new(recipe.network());
    let tokens = [5, 6, 7, 8];
    for (split, groups) in layouts() {
        let mut runner = threads(&network, split, &groups, (4, Quant::F16));
        let together = Part { outputs: 3, ..Part::new(&tokens, 0, &[1], Want::Best(5)) };
        let found = runner.step(&Step::of(&[together])).expect("a step").outputs;
        let one = |(at, token): (usize, &u32)| {
            let part = [*token];
            let part = [Part::new(&part, at as u64, &[0], Want::Best(5))];
            runner.step(&Step::of(&part)).expect("a step").last().clone()
        };
        let alone: Vec<_> = tokens.iter().enumerate().map(one).collect();
        assert_eq!(found, alone[1..], "{groups:?}");
    }
}

#[test]
fn copied_blocks_go_on_as_their_originals_do() {
    let recipe = Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 192);
    let network = Arc::new(recipe.network());
    for (split, groups) in layouts() {
        let mut runner = threads(&network, split, &groups, (3, Quant::F16));
        let prompt = [Part::new(&[5, 6, 7], 0, &[2], Want::Nothing)];
        runner.step(&Step::of(&prompt)).expect("a step");
        let next = |block: &'static [u32]| Part::new(&[9], 3, block, Want::Logits);
        let parts = [next(&[0]), next(&[2])];
        let step = Step { copies: &[[2, 0]], ..Step::of(&parts) };
        let found = runner.step(&step).expect("a step").outputs;
        assert_eq!(found[0], found[1], "{groups:?}");
        // Without the copy the block is empty, and the answer another.
        let mut runner = threads(&network, split, &groups, (3, Quant::F16));
        runner.step(&Step::of(&prompt)).expect("a step");
        let found = runner.step(&Step::of(&parts)).expect("a step").outputs;
        assert_ne!(found[0], found[1], "{groups:?}");
    }
}

#[test]
fn steps_under_way_in_a_pipeline_give_what_they_give_one_after_the_other() {
    let recipe = Recipe { layers: 4, ..Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 192) };
    let network = Arc::new(recipe.network());
    for groups in [one_by_one(2), one_by_one(3), mixed(4), together(&[1.0, 1.0])] {
        let mut runner = threads(&network, Split::Gather, &groups, (6, Quant::F16));
        let depth = runner.depth();
        assert_eq!(depth, groups.len(), "{groups:?}");
        let mut alone = threads(&network, Split::Gather, &groups, (6, Quant::F16));
        let token = |turn: usize, past: u64| [(turn as u32 * 7 + past as u32 * 3) % 190];
        let mut waiting = VecDeque::new();
        for at in 0..4 * depth as u64 {
            let (turn, past) = ((at as usize) % depth, at / depth as u64);
            let (tokens, blocks) = (token(turn, past), [turn as u32]);
            let part = [Part::new(&tokens, past, &blocks, Want::Best(4))];
            if waiting.len() == depth {
                let outcome = runner.end().expect("a step");
                assert_eq!(Some(outcome.outputs), waiting.pop_front(), "{groups:?}");
            }
            runner.begin(&Step { turn: turn as u64, ..Step::of(&part) }).expect("a step");
            waiting.push_back(alone.step(&Step::of(&part)).expect("a step").outputs);
        }
        while let Some(expected) = waiting.pop_front() {
            assert_eq!(runner.end().expect("a step").outputs, expected, "{groups:?}");
        }
        assert!(runner.end().is_err(), "nothing is under way");
    }
}

#[test]
fn cards_end_that_are_dropped_while_a_step_is_under_way() {
    let recipe = Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 192);
    let network = Arc::new(recipe.network());
    for (split, groups) in layouts() {
        let mut runner = threads(&network, split, &groups, (1, Quant::F16));
        let part = [Part::new(&[5, 6, 7], 0, &[0], Want::Best(1))];
        runner.begin(&Step::of(&part)).expect("a step");
        drop(runner);
    }
}

#[test]
fn steps_with_numbers_that_no_card_has_are_refused() {
    let recipe = Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 192);
    let network = Arc::new(recipe.network());
    let mut runner = threads(&network, Split::Gather, &together(&[1.0]), (2, Quant::F16));
    let part = Part::new(&[5], 0, &[0], Want::Best(1));
    let far = |past: u64| Part { past, ..part };
    let many = |outputs: u64| Part { outputs, ..part };
    for parts in [
        vec![far(u64::MAX)],
        vec![far(u64::MAX - 63)],
        vec![many(u64::MAX), many(2)],
        vec![many(2)],
        vec![Part { blocks: &[u32::MAX], ..part }],
    ] {
        runner.begin(&Step::of(&parts)).expect_err("no such step");
    }
    for copy in [[0, 2], [2, 0], [u32::MAX, 0]] {
        let (parts, copies) = ([part], [copy]);
        let step = Step { copies: &copies, ..Step::of(&parts) };
        let error = runner.begin(&step).expect_err("no such block").to_string();
        assert!(error.contains("of 2 blocks"), "{error}");
    }
    runner.step(&Step::of(&[part])).expect("a step");
}
