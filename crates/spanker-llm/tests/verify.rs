// SPDX-License-Identifier: Apache-2.0
//! What `verify` must accept and must not: honest splits of random models, and planted faults.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::ops::Range;
use std::sync::Arc;

use ggml_spanker::WEIGHT_TYPES;
use proptest::prelude::*;
use spanker_llm::{
    Bound, Difference, Distance, Evaluator, Fault, LlmError, Network, OnCards, Outcome, Output,
    Rounding, RunLogits, Runner, Side, Step, examine_reduce, run_logits,
};
use spanker_model::Quant;
use spanker_plan::{Layout, Plan, Split};
use spanker_test_support::Recipe;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Disturbance, Pace, World, specs};

use splits::{CONTEXT, Open, STEPS, plan, plan_of, prompt, run, threads, together};

/// A model, its logits on one card, and what rounding explains.
struct Case {
    recipe: Recipe,
    network: Arc<Network<Vec<u8>>>,
    tokens: Vec<u32>,
    reference: RunLogits,
    bound: Bound,
}

impl Case {
    fn new(recipe: &Recipe) -> Case {
        let network = Arc::new(recipe.network());
        let tokens = prompt(5, recipe.vocab);
        let one = plan(&network, Split::Gather, &together(&[1.0]));
        let reference = run(&network, &one, &tokens);
        let sample = |seed| {
            let rounding = Rounding::Random { seed, parts: 5 };
            let host = Evaluator::new(&network, &one.layout, rounding, 1).expect("a layout");
            run_logits(Box::new(host), &tokens, STEPS, Some(&reference.tokens)).expect("logits")
        };
        let samples: Vec<RunLogits> = (0..Bound::SAMPLES).map(sample).collect();
        let bound = Bound::new(&reference, &samples).expect("numbers");
        Case { recipe: recipe.clone(), network, tokens, reference, bound }
    }

    fn reduce(&self, shares: &[f64]) -> Plan {
        plan(&self.network, Split::Reduce, &together(shares))
    }

    /// What a runner gives for the reference's tokens.
    fn fed(&self, runner: Box<dyn Runner + '_>) -> RunLogits {
        run_logits(runner, &self.tokens, STEPS, Some(&self.reference.tokens)).expect("logits")
    }

    fn defined(&self, plan: &Plan) -> RunLogits {
        let host = Evaluator::new(&self.network, &plan.layout, Rounding::Nearest, 1);
        self.fed(Box::new(host.expect("a layout")))
    }

    /// Examines what runners give that `runner` makes.
    fn examine<'r>(
        &self,
        plan: &Plan,
        runner: impl Fn() -> Box<dyn Runner + 'r>,
    ) -> Result<Distance, Fault> {
        let runs = [self.fed(runner()), self.fed(runner())];
        examine_reduce([&runs[0], &runs[1]], &self.defined(plan), &self.reference, &self.bound)
    }

    /// The same model with other bytes in one tensor.
    fn corrupted(&self, tensor: &str, spoil: impl Fn(&mut [u8], &Tensor)) -> Arc<Network<Vec<u8>>> {
        let mut file = self.recipe.file();
        let header = self.network.header();
        let found = &header.tensors()[tensor];
        let start = (header.data_offset() + found.offset) as usize;
        let rows = found.dims[1] as usize;
        let shape = Tensor { quant: found.quant, rows, row: found.bytes as usize / rows };
        spoil(&mut file[start..start + found.bytes as usize], &shape);
        Arc::new(Network::new(file).expect("a model"))
    }

    /// How much of the bound a reduce split on another network uses: above 1 it is found by the bound alone.
    fn share(&self, network: &Arc<Network<Vec<u8>>>, plan: &Plan) -> f64 {
        let found = self.fed(threads(network, plan, 3, 1));
        self.bound.measure(&found, &self.reference).expect("numbers").share()
    }
}

struct Tensor {
    quant: Quant,
    rows: usize,
    /// Bytes.
    row: usize,
}

impl Tensor {
    /// Bytes of columns within a row.
    fn columns(&self, columns: &Range<u64>) -> Range<usize> {
        let bytes = |at: u64| (at / self.quant.block() * self.quant.block_bytes()) as usize;
        bytes(columns.start)..bytes(columns.end)
    }
}

/// A small model of every type that is rounded in its own way.
fn every_type(seed: u64) -> Vec<Recipe> {
    let shape = |quant: Quant| match quant.block() {
        256 => Recipe::llama(quant, [4, 4, 256], 256, 1024),
        _ => Recipe::llama(quant, [4, 4, 32], 128, 256),
    };
    // The blocks of IQ4_NL are rounded as those of MXFP4 are, those of other types of 256 as those of Q2_K.
    let likes = [Quant::Iq4Nl, Quant::Q3K, Quant::Iq4Xs, Quant::Iq2Xxs, Quant::Iq2Xs];
    let likes = [&likes[..], &[Quant::Iq3Xxs, Quant::Tq1_0, Quant::Tq2_0]].concat();
    let types = WEIGHT_TYPES.into_iter().filter(move |quant| !likes.contains(quant));
    types.map(|quant| Recipe { seed, ..shape(quant) }).collect()
}

/// Wrong weight rows, swapped ranks and dropped terms of a split over equal cards, each in one tensor of one layer.
fn planted(case: &Case, plan: &Plan) -> Vec<(String, Arc<Network<Vec<u8>>>)> {
    let size = case.recipe.head_size;
    let shards = &plan.layout.replicas[0][0].group.shards;
    let heads = shards[..2].iter().map(|shard| shard.heads.start * size..shard.heads.end * size);
    let ffn = shards[..2].iter().map(|shard| shard.ffn.clone());
    let mut all = Vec::new();
    for (tensor, columns) in [
        ("blk.0.attn_output.weight", heads.collect::<Vec<_>>()),
        ("blk.1.ffn_down.weight", ffn.collect()),
    ] {
        let swapped = case.corrupted(tensor, |bytes, shape| {
            let (a, b) = (shape.columns(&columns[0]), shape.columns(&columns[1]));
            for row in bytes.chunks_exact_mut(shape.row) {
                let (left, right) = row.split_at_mut(b.start);
                left[a.clone()].swap_with_slice(&mut right[..b.len()]);
            }
        });
        all.push((format!("swapped ranks, {tensor}"), swapped));
        let dropped = case.corrupted(tensor, |bytes, shape| {
            for row in bytes.chunks_exact_mut(shape.row) {
                row[shape.columns(&columns[1])].fill(0);
            }
        });
        all.push((format!("dropped term, {tensor}"), dropped));
    }
    for tensor in ["output.weight", "blk.0.attn_output.weight", "blk.1.ffn_down.weight"] {
        let wrong = case.corrupted(tensor, |bytes, shape| {
            bytes.copy_within(shape.row..2 * shape.row, (shape.rows - 1) * shape.row);
        });
        all.push((format!("wrong row, {tensor}"), wrong));
    }
    all
}

/// Runs a good split, and gives back what it was asked for after something was done to it.
struct Spoiled<F> {
    inner: Box<dyn Runner>,
    spoil: F,
}

impl<F: FnMut(&mut Output)> Runner for Spoiled<F> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        self.inner.begin(step)
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        let mut outcome = self.inner.end()?;
        for output in outcome.outputs.iter_mut().filter(|output| output.logits.is_some()) {
            (self.spoil)(output);
        }
        Ok(outcome)
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }
}

fn q4_0() -> Case {
    Case::new(&Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352))
}

#[test]
fn planted_faults_are_beyond_the_bound_and_honest_splits_far_below_it() {
    let (mut honest, mut rank, mut row): (f64, f64, f64) = (0.0, f64::MAX, f64::MAX);
    for recipe in [7, 8, 9].into_iter().flat_map(every_type) {
        let case = Case::new(&recipe);
        for cards in 2..=4 {
            let plan = case.reduce(&vec![1.0; cards]);
            let found = case.examine(&plan, || threads(&case.network, &plan, 3, 1));
            let share = found.unwrap_or_else(|fault| panic!("{}: {fault}", recipe.name)).share();
            honest = honest.max(share);
        }
        let plan = case.reduce(&[1.0; 2]);
        for (what, network) in planted(&case, &plan) {
            let share = case.share(&network, &plan);
            let least = if what.starts_with("wrong row") { &mut row } else { &mut rank };
            *least = least.min(share);
            // Whatever its size, a fault is not what the good weights add up to.
            let found = case.examine(&plan, || threads(&network, &plan, 3, 1));
            assert!(matches!(found, Err(Fault::Sum(_))), "{}, {what}: {found:?}", recipe.name);
        }
    }
    println!("of the bound: honest {honest:.3}, ranks from {rank:.2}, rows from {row:.2}");
    // docs/models.md has these numbers. One wrong row among hundreds may be below what rounding explains; that it is
    // found is the work of the bits.
    assert!(honest < 0.2 && rank > 2.0, "honest {honest}, swapped or dropped {rank}");
    assert!(row > 0.1, "{row}");
}

#[test]
fn deep_model_in_which_roundings_turn_stays_below_the_bound() {
    let mut greatest: f64 = 0.0;
    for quant in [Quant::Q4_0, Quant::Q8_0, Quant::F16] {
        let recipe = Recipe { layers: 24, ..Recipe::llama(quant, [8, 4, 32], 256, 512) };
        let case = Case::new(&recipe);
        for cards in 2..=5 {
            let plan = case.reduce(&vec![1.0; cards]);
            let found = case.examine(&plan, || threads(&case.network, &plan, 3, 1));
            let share = found.unwrap_or_else(|fault| panic!("{}: {fault}", recipe.name)).share();
            assert!(share < 0.7, "{quant}, {cards} cards: {share}");
            greatest = greatest.max(share);
        }
    }
    println!("of the bound: {greatest:.3}");
    assert!(greatest > 0.0, "something is rounded the other way");
}

#[test]
fn run_whose_every_rounding_goes_a_random_way_is_within_the_bound() {
    let mut greatest: f64 = 0.0;
    for recipe in every_type(21) {
        let case = Case::new(&recipe);
        let one = plan(&case.network, Split::Gather, &together(&[1.0]));
        for seed in 1000..1016 {
            let rounding = Rounding::Random { seed, parts: 5 };
            let host = Evaluator::new(&case.network, &one.layout, rounding, 1).expect("a layout");
            let found = case.fed(Box::new(host));
            let distance = found.distance(&case.reference, &case.bound);
            let share = distance.unwrap_or_else(|far| panic!("{}: {far}", recipe.name)).share();
            greatest = greatest.max(share);
        }
    }
    println!("of the bound: {greatest:.3}");
    assert!((0.3..0.8).contains(&greatest), "{greatest}");
}

#[test]
fn garbled_card_fails_every_split_in_which_it_takes_part() {
    let case = q4_0();
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, 3, Shape::Ring).expect("cards");
    for split in [Split::Reduce, Split::Gather] {
        let groups = together(&[1.0; 3]);
        let layout = Layout::of_groups(case.network.model(), split, &groups).expect("a layout");
        let plan = plan_of(&case.network, layout, Shape::Ring);
        for garbled in [None, Some(0), Some(1), Some(2)] {
            let world = World::new(specs(&cluster, Pace::Card, 1).expect("cards"), 7);
            let controls: Vec<_> = (0..3).map(|card| world.control(card)).collect();
            let on_cards = || -> Box<dyn Runner + '_> {
                let card = |index: usize| controls.get(index);
                let loaded = OnCards::load(&case.network, &plan, CONTEXT, 3, &card, &|_| ());
                Box::new(loaded.expect("cards"))
            };
            garbled.into_iter().for_each(|card| world.disturb(Disturbance::Garble(card)));
            let holds = match split {
                Split::Reduce => case.examine(&plan, on_cards).is_ok(),
                _ => case.fed(on_cards()).difference(&case.reference).is_none(),
            };
            assert_eq!(holds, garbled.is_none(), "{split:?}, card {garbled:?}");
        }
    }
}

#[test]
fn run_that_differs_from_the_one_before_does_not_repeat() {
    let case = q4_0();
    let plan = case.reduce(&[1.0; 2]);
    let (found, mut again) = (case.defined(&plan), case.defined(&plan));
    again.logits[1][7] = f32::from_bits(again.logits[1][7].to_bits() ^ 1);
    let fault = examine_reduce([&found, &again], &found, &case.reference, &case.bound).unwrap_err();
    assert!(fault.to_string().starts_with("does not repeat: differs first at step 1, logit 7"));
    assert_eq!(fault.kind(), "repeat");
}

#[test]
fn weights_that_are_not_numbers_fail_every_split_and_the_reference() {
    let case = q4_0();
    // The scale of the first block of a row is the first number of the row.
    let poisoned = case.corrupted("blk.1.ffn_down.weight", |bytes, shape| {
        bytes[3 * shape.row..][..2].copy_from_slice(&0x7E00u16.to_le_bytes());
    });
    let one = plan(&poisoned, Split::Gather, &together(&[1.0]));
    let reference = run(&poisoned, &one, &case.tokens);
    for (split, cards) in [(Split::Gather, 1), (Split::Gather, 3), (Split::Reduce, 3)] {
        let plan = plan(&poisoned, split, &together(&vec![1.0; cards]));
        let found = case.fed(threads(&poisoned, &plan, 3, 1));
        // Against good weights it is what was examined, against the same weights the reference.
        for (against, expected) in [(&case.reference, Side::Found), (&reference, Side::Reference)] {
            let nan = |difference: Difference| match difference {
                Difference::NotFinite { side, step: 0, token: 0, value } => {
                    assert!(side == expected && value.is_nan(), "{difference}");
                }
                other => panic!("{other}"),
            };
            nan(found.difference(against).expect("a difference"));
            nan(found.distance(against, &case.bound).expect_err("a difference"));
            nan(match examine_reduce([&found; 2], &found, against, &case.bound) {
                Err(Fault::Reference(difference)) => difference,
                other => panic!("{other:?}"),
            });
        }
    }
    assert!(Bound::new(&reference, std::slice::from_ref(&reference)).is_err());
    let text = reference.difference(&case.reference).expect("a difference").to_string();
    assert_eq!(text, "step 0: logit of token 0 is NaN");
}

#[test]
fn one_logit_that_is_not_finite_is_named() {
    let case = q4_0();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut found = case.reference.clone();
        found.logits[2][5] = value;
        for difference in [
            found.difference(&case.reference).expect("a difference"),
            found.difference(&found).expect("a difference"),
            found.distance(&case.reference, &case.bound).expect_err("a difference"),
        ] {
            assert_eq!(difference.kind(), "not-finite", "{difference}");
            assert!(difference.to_string().contains("logit of token 5 is "), "{difference}");
        }
    }
}

#[test]
fn logits_that_are_missing_fail_every_split() {
    let case = q4_0();
    let reduce = case.reduce(&[1.0; 2]);
    let one = plan(&case.network, Split::Gather, &together(&[1.0]));
    type Spoil = fn(&mut Output);
    let faults: [(&str, Spoil); 4] = [
        ("short", |output| output.logits.as_mut().unwrap().truncate(70)),
        ("long", |output| output.logits.as_mut().unwrap().push(0.0)),
        ("empty", |output| output.logits.as_mut().unwrap().clear()),
        ("none", |output| output.logits = None),
    ];
    for (what, spoil) in faults {
        let runner = |plan| -> Box<dyn Runner> {
            Box::new(Spoiled { inner: threads(&case.network, plan, 3, 1), spoil })
        };
        let found = case.fed(runner(&one));
        let difference = found.difference(&case.reference).expect("a difference");
        assert_eq!(difference.kind(), "length", "{what}: {difference}");
        let fault = case.examine(&reduce, || runner(&reduce)).expect_err(what);
        assert_eq!(fault.kind(), "length", "{what}: {fault}");
        // Two runs without logits are not the same run.
        if what == "empty" || what == "none" {
            assert_eq!(found.difference(&found).map(|same| same.kind()), Some("length"), "{what}");
        }
    }
    let cuts: [fn(&mut RunLogits); 4] = [
        |run| run.logits.truncate(2),
        |run| run.tokens.truncate(2),
        |run| (run.logits.truncate(2), run.tokens.truncate(2)).0,
        |run| (run.logits.clear(), run.tokens.clear()).0,
    ];
    for (at, cut) in cuts.into_iter().enumerate() {
        let mut found = case.reference.clone();
        cut(&mut found);
        let one = found.difference(&case.reference).expect("a difference");
        let other = case.reference.difference(&found).expect("a difference");
        let third = found.distance(&case.reference, &case.bound).expect_err("a difference");
        assert_eq!([one, other, third].map(|found| found.kind()), ["steps"; 3], "cut {at}");
    }
    let nothing = RunLogits { tokens: Vec::new(), logits: Vec::new() };
    assert_eq!(nothing.difference(&nothing).map(|same| same.kind()), Some("steps"));
}

#[test]
fn other_token_is_accepted_only_where_rounding_explains_it() {
    let case = q4_0();
    let best = ggml_spanker::ops::best(&case.reference.logits[1], 71);
    let with = |token: u32| {
        let mut found = case.reference.clone();
        found.tokens[1] = token;
        found
    };
    let (first, last) = (best[0].0, best[70].0);
    assert_eq!(first, case.reference.tokens[1]);
    let difference = with(last).difference(&case.reference).expect("a difference");
    assert_eq!(difference, Difference::Token { step: 1, tokens: [first, last] });
    for token in [last, 71, u32::MAX] {
        let fault = with(token).distance(&case.reference, &case.bound).expect_err("no tie");
        assert!(matches!(fault, Difference::Winner { step: 1, .. }), "{fault}");
    }
    // A reference whose two best are equal has a tie.
    let second = best[1].0;
    let mut tied = case.reference.clone();
    tied.logits[1][second as usize] = best[0].1;
    let mut found = tied.clone();
    found.tokens[1] = second;
    assert_eq!(found.distance(&tied, &case.bound).expect("a tie").other_tokens, 1);
}

#[test]
fn single_wrong_logit_is_beyond_the_bound_and_named() {
    let case = q4_0();
    let mut found = case.reference.clone();
    found.logits[2][9] -= 1.0;
    let fault = found.distance(&case.reference, &case.bound).expect_err("a wrong logit");
    assert!(matches!(fault, Difference::Beyond { step: 2, token: 9, .. }), "{fault}");
    // The same amount over all logits is found by their mean, where each of them is below its bound.
    let most = case.bound.measure(&found, &case.reference).expect("numbers").most[1];
    let mut found = case.reference.clone();
    let signs = [1.0, -1.0].into_iter().cycle();
    found.logits[2]
        .iter_mut()
        .zip(signs)
        .for_each(|(logit, sign)| *logit += 0.9 * sign * most as f32);
    let fault = found.distance(&case.reference, &case.bound).expect_err("wrong logits");
    assert!(
        matches!(fault, Difference::Winner { .. } | Difference::BeyondMean { step: 2, .. }),
        "{fault}"
    );
}

proptest! {
    // Few cases, because each runs several models; a failure prints its seed and its case.
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn honest_reduce_split_of_a_random_model_of_any_type_holds(
        quant in prop::sample::select(WEIGHT_TYPES.to_vec()),
        architecture in prop::sample::select(vec!["llama", "qwen2", "qwen3"]),
        (group, kv_heads) in (1u64..3, 1u64..4),
        (hidden, ffn) in (1u64..4, 1u64..6),
        layers in 1usize..4,
        seed in 1u64..100_000,
        shares in prop::collection::vec(0.3f64..3.0, 2..6),
    ) {
        let unit = quant.block().max(32);
        let shape = [group * kv_heads, kv_heads, if unit == 256 { 64 } else { 32 }];
        let (rows, wide) = (shape[0] * shape[2], ffn * unit);
        prop_assume!(rows.is_multiple_of(quant.block()));
        let recipe = Recipe {
            seed,
            layers,
            architecture: architecture.into(),
            ..Recipe::llama(quant, shape, hidden * unit, wide)
        };
        let case = Case::new(&recipe);
        let plan = case.reduce(&shares);
        let found = case.examine(&plan, || threads(&case.network, &plan, 3, 1));
        prop_assert!(found.is_ok(), "{}: {}", recipe.name, found.unwrap_err());
    }
}
