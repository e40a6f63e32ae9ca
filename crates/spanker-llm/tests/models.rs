// SPDX-License-Identifier: Apache-2.0
//! Whole models against logits that numpy computed (`oracle/make_vectors.py`). Both sides make the weights
//! from a seed, each by its own code; a checksum says that they are the same.
//!
//! Plain weights: within 5e-4 of the logits' standard deviation. Weights in blocks meet activations that are
//! rounded to 8 bits: within 4 % of numpy that rounds them likewise. Eight of ten cases of both kinds are
//! within 1e-5. The others are where f32 sums fall on two sides of a half: a key or value of 16 bits is a unit
//! off, or an activation of 8 bits is a whole step off.
//!
//! Against numpy that does not round activations at all, the root mean square is within 10 % and each logit
//! within 25 %: a block is rounded to its largest value over 254, which is about 1 % of its values' deviation
//! and is made again by five products one after another for each layer.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/stored.rs"]
mod stored;

use std::sync::Arc;

use serde_json::Value;
use spanker_llm::{InProcess, Network, Session, Want};
use spanker_plan::{Layout, Objective, Plan, Request, Split};
use spanker_test_support::Recipe;
use spanker_topology::{Cluster, Profile, Shape};

use stored::{floats, list};

fn models() -> Vec<(Recipe, Value)> {
    let stored: Value = serde_json::from_str(include_str!("vectors/models.json")).expect("JSON");
    let read = |model: &Value| {
        let recipe = serde_json::from_value(model["recipe"].clone()).expect("a recipe");
        (recipe, model.clone())
    };
    list(&stored).iter().map(read).collect()
}

/// Logits after each list of tokens.
fn logits(recipe: &Recipe, prompts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let network = Arc::new(Network::new(recipe.file()).expect("a model"));
    let model = network.model().clone();
    let layout = Layout::of_groups(&model, Split::Gather, &[vec![(0, 1.0)]]).expect("a layout");
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, 1, Shape::Switch).expect("a card");
    let request = Request { kv: spanker_model::Quant::F16, ..Request::new(Objective::Latency) };
    let plan = Plan::new(model, cluster, request, layout).expect("a plan");
    let run = |tokens: &Vec<u32>| {
        // Batches that cut the longest prompt.
        let runner = InProcess::new(Arc::clone(&network), &plan, 32, 8, 1).expect("a card");
        let outcome = Session::new(Box::new(runner)).feed(tokens, Want::Logits).expect("a step");
        outcome.last().logits.clone().expect("logits")
    };
    prompts.iter().map(run).collect()
}

/// The largest difference and the root of the mean square, both over the expected values' deviation.
fn off(found: &[f32], expected: &[f32]) -> (f64, f64) {
    assert_eq!(found.len(), expected.len());
    let count = expected.len() as f64;
    let mean = expected.iter().map(|value| f64::from(*value)).sum::<f64>() / count;
    let square = |sum: f64, value: f64| sum + value * value;
    let apart = |value: &f32| f64::from(*value) - mean;
    let deviation = (expected.iter().map(apart).fold(0.0, square) / count).sqrt();
    let pairs = || found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b));
    let most = pairs().fold(0.0, |most: f64, off| most.max(off.abs()));
    (most / deviation, (pairs().fold(0.0, square) / count).sqrt() / deviation)
}

#[test]
fn logits_of_every_kind_of_model_are_those_of_numpy() {
    let (mut cases_in_all, mut close) = (0, 0);
    for (recipe, stored) in models() {
        let name = &recipe.name;
        let checksum = format!("{:016x}", recipe.checksum());
        assert_eq!(stored["checksum"], checksum, "{name}: other weights");
        let cases = list(&stored["cases"]);
        let tokens = |case: &Value| serde_json::from_value(case["tokens"].clone()).expect("tokens");
        let prompts: Vec<Vec<u32>> = cases.iter().map(tokens).collect();
        for (case, found) in cases.iter().zip(logits(&recipe, &prompts)) {
            let tokens = list(&case["tokens"]).len();
            let (most, square) = off(&found, &floats(&case["logits"]));
            let blocks = recipe.quant.block() > 1;
            let (most, bound) = match blocks {
                true => {
                    assert!(most <= 0.25 && square <= 0.10, "{name}, {tokens}: {most}, {square}");
                    (off(&found, &floats(&case["rounded"])).0, 0.04)
                }
                false => (most, 5e-4),
            };
            assert!(most <= bound, "{name}, {tokens} tokens: off by {most}");
            cases_in_all += 1;
            close += u32::from(most <= 1e-5);
        }
    }
    assert!(10 * close >= 8 * cases_in_all, "{close} of {cases_in_all} cases are close");
}

#[test]
fn stored_models_cover_what_files_can_be() {
    let models = models();
    let any = |what: &dyn Fn(&Recipe) -> bool| models.iter().any(|(recipe, _)| what(recipe));
    // Those that are unpacked before they are multiplied are in ggml-spanker's tests.
    let types = ggml_spanker::WEIGHT_TYPES.into_iter();
    for quant in types.take_while(|quant| *quant != ggml_spanker::Quant::Q2K) {
        assert!(any(&|recipe| recipe.quant == quant), "{quant}");
    }
    for architecture in ["llama", "qwen2", "qwen3"] {
        assert!(any(&|recipe| recipe.architecture == architecture), "{architecture}");
    }
    assert!(any(&|recipe| recipe.tied) && any(&|recipe| !recipe.tied));
    assert!(any(&|recipe| recipe.heads > recipe.kv_heads && recipe.head_size % 32 != 0));
    assert!(any(&|recipe| recipe.freqs) && any(&|recipe| recipe.linear.is_some()));
}
