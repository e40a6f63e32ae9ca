// SPDX-License-Identifier: Apache-2.0
//! What is predicted for emulated cards is what they take: every split on rings and stars of one to five cards,
//! with prediction, simulation and card time beside each other; and no card hears of a token before the host
//! knew it.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::sync::Arc;

use spanker_llm::{Network, OnCards, Recorder, Session, Want};
use spanker_model::Quant;
use spanker_plan::{Conditions, Layout, Mark, Objective, Plan, Request, Split, compare, simulate};
use spanker_runtime::SpankerControl;
use spanker_test_support::Recipe;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Pace, World, specs};

use splits::{Groups, Open, mixed, one_by_one, together};

const STEPS: usize = 4;
const PROMPT: usize = 11;
const BATCH: usize = 8;

/// A run on emulated cards: the prompt's and the mean token's card time in seconds, and what cards did.
struct Measured {
    prompt: f64,
    token: f64,
    marks: Vec<Mark>,
}

fn plan_for(network: &Network<Vec<u8>>, shape: Shape, split: Split, groups: &Groups) -> Plan {
    let cards = groups.iter().map(Vec::len).sum();
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, cards, shape).expect("cards");
    let request = Request {
        context: 64,
        prompt: PROMPT as u64,
        position: (PROMPT + STEPS / 2) as u64,
        batch: BATCH as u64,
        ..Request::new(Objective::Latency)
    };
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    Plan::new(network.model().clone(), cluster, request, layout).expect("a plan")
}

fn measure(network: &Arc<Network<Vec<u8>>>, plan: &Plan, prompt: &[u32]) -> Measured {
    let world = World::new(specs(&plan.cluster, Pace::Card, 1).expect("cards"), 7);
    let controls: Vec<SpankerControl> =
        (0..plan.cluster.cards()).map(|card| world.control(card)).collect();
    let card = |index: usize| controls.get(index);
    let mut runner = OnCards::load(network, plan, 64, BATCH, &card, &|_| ()).expect("cards");
    let recorder = Recorder::new();
    runner.record(&recorder).expect("cards answer");
    let mut session = Session::new(Box::new(runner));
    let first = session.feed(prompt, Want::Best(1)).expect("a prompt").timing;
    let seconds = |time: std::time::Duration| time.as_secs_f64();
    let mut token = 0.0;
    for _ in 0..STEPS {
        let timing = session.feed(&[1], Want::Best(1)).expect("a token").timing;
        token += seconds(timing.card.expect("card time"));
    }
    let prompt = seconds(first.card.expect("card time"));
    Measured { prompt, token: token / STEPS as f64, marks: recorder.marks() }
}

fn off(measured: f64, predicted: f64) -> f64 {
    measured / predicted - 1.0
}

/// Large enough that work, not messages, takes most of the time, as in models that people run.
fn network(quant: Quant) -> Arc<Network<Vec<u8>>> {
    let recipe = Recipe { layers: 5, vocab: 320, ..Recipe::llama(quant, [8, 4, 64], 512, 1536) };
    Arc::new(recipe.network())
}

fn every_split(cards: usize) -> Vec<(&'static str, Split, Groups)> {
    let shares = vec![1.0; cards];
    let mut all = vec![("pipeline", Split::Gather, one_by_one(cards))];
    if cards > 1 {
        all.push(("gather", Split::Gather, together(&shares)));
        all.push(("reduce", Split::Reduce, together(&shares)));
        all.push(("mixed", Split::Gather, mixed(cards)));
    }
    all
}

#[test]
fn card_time_of_every_split_is_what_was_predicted() {
    let mut worst: Vec<String> = Vec::new();
    for quant in [Quant::Q4_0, Quant::Q8_0, Quant::F16, Quant::Q4K] {
        let network = network(quant);
        let tokens: Vec<u32> = (0..PROMPT as u32).map(|at| at * 7 % 200).collect();
        for shape in [Shape::Ring, Shape::Star] {
            for cards in 1..=5 {
                for (name, split, groups) in every_split(cards) {
                    let plan = plan_for(&network, shape, split, &groups);
                    let found = measure(&network, &plan, &tokens);
                    let predicted = plan.predict_first();
                    let token = off(found.token, predicted.token.0);
                    let prompt = off(found.prompt, predicted.ttft.0);
                    // The rank that hands over may be a message ahead of the others of its stage.
                    let stages = plan.layout.pipeline_stages() as f64;
                    let ahead = match name {
                        "mixed" => (stages - 1.0) * plan.cluster.latency(0, 1).0,
                        _ => 0.0,
                    };
                    let spare = ahead / predicted.token.0;
                    if token.abs() > 0.01 + spare || prompt.abs() > 0.02 {
                        worst.push(format!(
                            "{quant} {name} on {cards} cards, {shape}: token {:+.2} %, prompt {:+.2} %",
                            token * 100.0,
                            prompt * 100.0
                        ));
                    }
                }
            }
        }
    }
    assert!(worst.is_empty(), "{}", worst.join("\n"));
}

#[test]
fn no_card_begins_a_token_before_the_host_knew_the_one_before() {
    let network = network(Quant::Q4_0);
    let tokens: Vec<u32> = (0..PROMPT as u32).collect();
    for shape in [Shape::Ring, Shape::Star] {
        for cards in 1..=5 {
            for (name, split, groups) in every_split(cards) {
                let plan = plan_for(&network, shape, split, &groups);
                let found = measure(&network, &plan, &tokens);
                let what = format!("{name} on {cards} cards, {shape}");
                let mut steps: Vec<u32> = found.marks.iter().map(|m| m.label.token).collect();
                steps.sort_unstable();
                steps.dedup();
                assert_eq!(steps.len(), PROMPT.div_ceil(BATCH) + STEPS, "{what}");
                for pair in steps.windows(2) {
                    let of = |step: u32| found.marks.iter().filter(move |m| m.label.token == step);
                    let ended = of(pair[0]).map(|mark| mark.end).fold(0.0, f64::max);
                    let begun = of(pair[1]).map(|mark| mark.start).fold(f64::INFINITY, f64::min);
                    assert!(begun >= ended, "{what}: step {} at {begun}, {ended}", pair[1]);
                }
            }
        }
    }
}

#[test]
fn run_and_simulation_have_the_same_operators_and_every_gap_has_a_cause() {
    let network = network(Quant::Q4_0);
    let tokens: Vec<u32> = (0..PROMPT as u32).map(|at| at * 31 % 200).collect();
    for cards in [1, 3, 4] {
        for (name, split, groups) in every_split(cards) {
            let plan = plan_for(&network, Shape::Ring, split, &groups);
            let found = measure(&network, &plan, &tokens);
            let conditions = Conditions { prompt: true, ..Conditions::calm(STEPS as u32) };
            let predicted = simulate(&plan, &conditions).expect("a simulation");
            let measured = spanker_plan::Trace { marks: found.marks, ..predicted.clone() };
            let comparison = compare(&predicted, &measured)
                .unwrap_or_else(|error| panic!("{name} on {cards} cards: {error}"));
            assert!(comparison.left_out.is_empty(), "{name}: {:?}", comparison.left_out);
            let whole = comparison.whole;
            assert!(
                whole.percent().is_some_and(|gap| gap.abs() < 2.0),
                "{name} on {cards} cards: {whole:?}"
            );
        }
    }
}
