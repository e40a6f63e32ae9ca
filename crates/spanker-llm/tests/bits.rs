// SPDX-License-Identifier: Apache-2.0
//! Logits do not depend on the number of cards, the split, the shares, the threads or the batches: compared
//! bit by bit with a model that is computed token by token with the kernels alone.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::sync::Arc;

use proptest::prelude::*;
use spanker_llm::{Evaluator, LlmError, Network, Outcome, Rounding, Runner};
use spanker_llm::{RunLogits, Session, Step, run_logits};
use spanker_model::Quant;
use spanker_plan::{Layout, Split};
use spanker_test_support::Recipe;
use spanker_topology::Shape;

use splits::{Open, together};
use splits::{STEPS, assert_same, best, mixed, one_by_one, plan, plan_of, prompt, run, threads};

/// Shapes that no number of cards divides.
fn awkward() -> Vec<Recipe> {
    let qwen = Recipe {
        architecture: "qwen2".into(),
        tied: true,
        ..Recipe::llama(Quant::Q8_0, [4, 2, 24], 64, 96)
    };
    vec![
        Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352),
        Recipe::llama(Quant::Q5_1, [9, 3, 32], 96, 224),
        Recipe::llama(Quant::Q4K, [4, 2, 64], 256, 512),
        Recipe::llama(Quant::F16, [3, 1, 10], 30, 37),
        qwen,
    ]
}

/// Mixtures of experts whose numbers no number of cards divides.
fn mixtures() -> Vec<Recipe> {
    vec![
        Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 96).mixture("qwen3moe", [7, 3, 0]),
        Recipe::llama(Quant::F16, [3, 1, 10], 30, 37).mixture("llama", [3, 3, 0]),
        Recipe::llama(Quant::Q4K, [4, 2, 64], 256, 256).mixture("qwen3moe", [5, 2, 0]),
        Recipe::llama(Quant::Q8_0, [4, 1, 24], 64, 32).mixture("qwen2moe", [5, 1, 96]),
    ]
}

/// What the kernels alone give for a prompt and greedy tokens after it.
fn expected(network: &Network<Vec<u8>>, plan: &spanker_plan::Plan, prompt: &[u32]) -> RunLogits {
    let host = Evaluator::new(network, &plan.layout, Rounding::Nearest, 1).expect("a layout");
    run_logits(Box::new(host), prompt, STEPS, None).expect("logits")
}

#[test]
fn gather_pipeline_and_mixed_have_the_bits_of_the_kernels_alone() {
    for recipe in awkward().into_iter().chain(mixtures()) {
        let recipe = Recipe { layers: 3, ..recipe };
        let network = Arc::new(recipe.network());
        let tokens = prompt(5, recipe.vocab);
        let one = plan(&network, Split::Gather, &together(&[1.0]));
        let reference = expected(&network, &one, &tokens);
        let mut layouts = vec![(Split::Gather, mixed(4)), (Split::Reduce, one_by_one(2))];
        layouts.extend((1..=5).map(|cards| (Split::Gather, together(&vec![1.0; cards]))));
        layouts.extend((2..=3).map(|cards| (Split::Gather, one_by_one(cards))));
        layouts.push((Split::Gather, mixed(3)));
        layouts.push((Split::Gather, mixed(5)));
        for (split, groups) in layouts {
            let what = format!("{}, {split:?} {groups:?}", recipe.name);
            let found = run(&network, &plan(&network, split, &groups), &tokens);
            assert_same(&what, &found, &reference);
        }
    }
}

#[test]
fn uneven_shares_have_the_bits_of_one_card() {
    for recipe in awkward().into_iter().chain(mixtures()) {
        let network = Arc::new(recipe.network());
        let tokens = prompt(4, recipe.vocab);
        let reference = run(&network, &plan(&network, Split::Gather, &together(&[1.0])), &tokens);
        for shares in [&[3.0, 1.0][..], &[1.0, 5.0, 2.0], &[0.01, 1.0, 1.0, 0.3]] {
            let what = format!("{}, {shares:?}", recipe.name);
            let uneven = plan(&network, Split::Gather, &together(shares));
            assert_same(&what, &run(&network, &uneven, &tokens), &reference);
        }
        let stages = vec![vec![(0, 3.0), (1, 1.0)], vec![(2, 1.0), (3, 2.0), (4, 0.1)]];
        let found = run(&network, &plan(&network, Split::Gather, &stages), &tokens);
        assert_same(&format!("{}, uneven stages", recipe.name), &found, &reference);
    }
}

#[test]
fn more_cards_than_heads_blocks_or_tokens_have_the_bits_of_one_card() {
    let few = Recipe { vocab: 5, ..Recipe::llama(Quant::Q4_0, [2, 1, 16], 32, 32) };
    let network = Arc::new(few.network());
    let tokens = prompt(6, few.vocab);
    let reference = run(&network, &plan(&network, Split::Gather, &together(&[1.0])), &tokens);
    for cards in [3, 5, 8] {
        let shares = vec![1.0; cards];
        let wide = plan(&network, Split::Gather, &together(&shares));
        assert_same(&format!("{cards} cards"), &run(&network, &wide, &tokens), &reference);
        let sums = plan(&network, Split::Reduce, &together(&shares));
        let what = format!("{cards} cards, sums");
        assert_same(&what, &run(&network, &sums, &tokens), &expected(&network, &sums, &tokens));
        // Cards without a token have no candidates, and what is best is found all the same.
        let candidates = |plan| best(&mut Session::new(threads(&network, plan, 3, 1)), &tokens, 3);
        let one = plan(&network, Split::Gather, &together(&[1.0]));
        assert_eq!(candidates(&wide), candidates(&one), "{cards} cards");
    }
}

#[test]
fn threads_and_batches_do_not_change_bits() {
    let dense = Recipe::llama(Quant::Q4_0, [9, 3, 32], 96, 224);
    let [mixture, .., shared] = &mixtures()[..] else { unreachable!("there are four") };
    for recipe in [&dense, mixture, shared] {
        same_with_any_threads_and_batches(recipe);
    }
}

fn same_with_any_threads_and_batches(recipe: &Recipe) {
    let network = Arc::new(recipe.network());
    let tokens = prompt(40, recipe.vocab);
    let reference = run(&network, &plan(&network, Split::Gather, &together(&[1.0])), &tokens);
    for (cards, counts) in [(1, &[1, 2, 3, 7][..]), (3, &[1, 5, 8])] {
        let plan = plan(&network, Split::Gather, &together(&vec![1.0; cards]));
        for &count in counts {
            for batch in [1, 3, 128] {
                let runner = threads(&network, &plan, batch, count);
                let found = run_logits(runner, &tokens, STEPS, None).expect("logits");
                let what = format!("{cards} cards, {count} threads, batches of {batch}");
                assert_same(&what, &found, &reference);
            }
        }
    }
}

#[test]
fn sums_of_parts_repeat_and_are_folded_in_card_order() {
    for recipe in awkward().into_iter().chain(mixtures()) {
        let network = Arc::new(recipe.network());
        let tokens = prompt(4, recipe.vocab);
        for shares in [&[1.0, 1.0][..], &[1.0; 3], &[2.0, 1.0, 1.0, 3.0]] {
            let what = format!("{}, {shares:?}", recipe.name);
            let sums = plan(&network, Split::Reduce, &together(shares));
            let found = run(&network, &sums, &tokens);
            assert_same(&what, &found, &expected(&network, &sums, &tokens));
            assert_same(&what, &run(&network, &sums, &tokens), &found);
        }
    }
}

#[test]
fn plan_that_cuts_blocks_of_activations_has_the_bits_of_one_card() {
    let recipe = Recipe::llama(Quant::Q4_0, [2, 1, 16], 32, 160);
    let network = Arc::new(recipe.network());
    let tokens = prompt(5, recipe.vocab);
    let reference = run(&network, &plan(&network, Split::Gather, &together(&[1.0])), &tokens);
    let mut layout =
        Layout::of_groups(network.model(), Split::Gather, &together(&[1.0; 2])).expect("a layout");
    let shards = &mut layout.replicas[0][0].group.shards;
    (shards[0].ffn, shards[1].ffn) = (0..101, 101..160);
    (shards[0].down, shards[1].down) = (0..3, 3..32);
    let cut = plan_of(&network, layout, Shape::Switch);
    assert_same("cut blocks", &run(&network, &cut, &tokens), &reference);
}

#[test]
fn plan_that_cuts_blocks_of_weights_is_refused() {
    let recipe = Recipe::llama(Quant::Q4_0, [2, 1, 16], 32, 160);
    let network = Arc::new(recipe.network());
    let mut layout =
        Layout::of_groups(network.model(), Split::Reduce, &together(&[1.0; 2])).expect("a layout");
    let shards = &mut layout.replicas[0][0].group.shards;
    (shards[0].ffn, shards[1].ffn) = (0..101, 101..160);
    let cut = plan_of(&network, layout, Shape::Switch);
    let error = spanker_llm::InProcess::new(network, &cut, 8, 8, 1).expect_err("cut blocks");
    let text = error.to_string();
    assert!(text.contains("tensor blk.0.ffn_down.weight: column 101 is inside a block"), "{text}");
}

/// A runner that is lost after some steps.
struct Mortal {
    inner: Box<dyn Runner>,
    left: usize,
}

impl Runner for Mortal {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        self.left = self.left.checked_sub(1).ok_or(LlmError::Panicked { card: 1 })?;
        self.inner.begin(step)
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        self.inner.end()
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }
}

#[test]
fn session_that_goes_on_after_a_loss_gives_the_same_tokens() {
    let recipe = Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352);
    let network = Arc::new(recipe.network());
    let tokens = prompt(7, recipe.vocab);
    let three = plan(&network, Split::Gather, &together(&[1.0; 3]));
    let two = plan(&network, Split::Gather, &one_by_one(2));
    let undisturbed = best(&mut Session::new(threads(&network, &three, 3, 1)), &tokens, 6);
    // The prompt is three steps; it dies in the prompt, after it, and between two tokens.
    for steps in [0, 1, 3, 5] {
        let inner = threads(&network, &three, 3, 1);
        let mut session = Session::new(Box::new(Mortal { inner, left: steps }));
        let mut fed = tokens.clone();
        let (mut found, mut losses) = (Vec::new(), 0);
        while found.len() < 6 {
            let outcome = session.feed(&fed, spanker_llm::Want::Best(4)).or_else(|error| {
                assert_eq!(error.to_string(), "card 1: its thread has panicked");
                losses += 1;
                session.release();
                session.go_on(threads(&network, &two, 4, 1), spanker_llm::Want::Best(4))
            });
            let outcome = outcome.expect("the second runner lives");
            let best = outcome.last().best.clone();
            fed = vec![best[0].0];
            found.push(best);
        }
        assert_eq!((losses, &found), (1, &undisturbed), "lost after {steps} steps");
        assert_eq!(session.tokens().len(), tokens.len() + 5);
    }
}

proptest! {
    // Few cases, because each runs several models; a failure prints its seed and its case.
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_shapes_shares_and_batches_have_the_bits_of_one_card(
        quant in prop::sample::select(vec![Quant::Q4_0, Quant::Q5_0, Quant::Q8_0, Quant::F32, Quant::Bf16]),
        (group, kv_heads) in (1u64..4, 1u64..4),
        half_head in 1u64..12,
        (hidden, ffn) in (1u64..5, 1u64..9),
        seed in 1u64..1000,
        shares in prop::collection::vec(0.1f64..4.0, 2..6),
        batch in 1usize..9,
        length in 1usize..12,
    ) {
        let unit = quant.block();
        // Rows of blocks are whole; heads then are 32 numbers, or as many as they like.
        let head_size = if unit == 32 { 32 } else { 2 * half_head };
        let shape = [group * kv_heads, kv_heads, head_size];
        let recipe = Recipe {
            seed,
            ..Recipe::llama(quant, shape, hidden * unit.max(7), ffn * unit.max(5))
        };
        let network = Arc::new(recipe.network());
        let tokens = prompt(length, recipe.vocab);
        let one = run(&network, &plan(&network, Split::Gather, &together(&[1.0])), &tokens);
        prop_assume!(shares.len() as u64 <= recipe.hidden);
        let split = plan(&network, Split::Gather, &together(&shares));
        let found = run_logits(threads(&network, &split, batch, 2), &tokens, STEPS, None).expect("logits");
        prop_assert_eq!(found.difference(&one), None, "{}", recipe.name);
        let (stage, rest) = shares.split_at(shares.len() / 2);
        let stages = vec![
            stage.iter().copied().enumerate().collect(),
            rest.iter().copied().enumerate().map(|(at, share)| (at + stage.len(), share)).collect(),
        ];
        let found = run(&network, &plan(&network, Split::Gather, &stages), &tokens);
        prop_assert_eq!(found.difference(&one), None, "{}", recipe.name);
        let sums = plan(&network, Split::Reduce, &together(&shares));
        let found = run(&network, &sums, &tokens);
        prop_assert_eq!(found.difference(&expected(&network, &sums, &tokens)), None, "{}", recipe.name);
    }
}
