// SPDX-License-Identifier: Apache-2.0
//! Cards whose operators are computed a second time: honest ones are never accused, others are named.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::sync::Arc;

use spanker_llm::{
    AuditLog, LlmError, Network, OnCards, Outcome, Runner, Searched, Session, Step, Twice, Want,
};
use spanker_model::Quant;
use spanker_plan::{Buffer, Layout, Plan, Split};
use spanker_runtime::SpankerControl;
use spanker_test_support::Recipe;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Disturbance, Pace, World, specs};

use splits::{CONTEXT, Groups, Open, best, mixed, one_by_one, plan_of, prompt, threads, together};

type Tokens = Vec<Vec<(u32, f32)>>;

/// Cards in a ring, with a handle to each.
fn ring(cards: usize, seed: u64) -> (World, Vec<SpankerControl>) {
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, cards, Shape::Ring).expect("cards");
    let world = World::new(specs(&cluster, Pace::Card, 1).expect("cards"), seed);
    let controls = (0..cards).map(|card| world.control(card)).collect();
    (world, controls)
}

fn plan(network: &Network<Vec<u8>>, split: Split, groups: &Groups, audit: f64) -> Plan {
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    let mut plan = plan_of(network, layout, Shape::Ring);
    plan.request.audit = audit;
    plan
}

/// All splits of three cards.
fn splits() -> Vec<(Split, Groups)> {
    vec![
        (Split::Gather, together(&[1.0; 3])),
        (Split::Reduce, together(&[1.0; 3])),
        (Split::Gather, one_by_one(3)),
        (Split::Gather, mixed(3)),
    ]
}

/// Cards that are audited.
fn audited<'a>(
    network: &Arc<Network<Vec<u8>>>,
    plan: &Plan,
    batch: usize,
    controls: &'a [SpankerControl],
    log: &AuditLog,
) -> OnCards<'a> {
    let card = |index: usize| controls.get(index);
    let mut runner = OnCards::load(network, plan, CONTEXT, batch, &card, &|_| ()).expect("cards");
    runner.audit(network, log);
    runner
}

/// The same with everything computed twice.
fn twice<'a>(
    network: &Arc<Network<Vec<u8>>>,
    plan: &Plan,
    controls: &'a [SpankerControl],
    log: &AuditLog,
) -> Twice<'a> {
    Twice::new(Box::new(audited(network, plan, 3, controls, log)), threads(network, plan, 3, 1))
}

/// Candidates after a prompt, and the error that ended them if one did; `before` is done before each step.
fn tried(
    runner: Box<dyn Runner + '_>,
    prompt: &[u32],
    count: usize,
    before: &mut dyn FnMut(usize),
) -> (Tokens, Option<LlmError>) {
    let mut session = Session::new(runner);
    let mut fed = prompt.to_vec();
    let mut all = Vec::new();
    for at in 0..count {
        before(at);
        match session.feed(&fed, Want::Best(4)) {
            Ok(outcome) => {
                let best = outcome.last().best.clone();
                fed = vec![best[0].0];
                all.push(best);
            }
            Err(error) => return (all, Some(error)),
        }
    }
    (all, None)
}

fn accused(error: &LlmError) -> Option<usize> {
    match error {
        LlmError::Device(error) => error.card(),
        _ => None,
    }
}

#[test]
fn honest_cards_of_every_type_and_split_are_never_accused() {
    let with =
        |architecture: &str, recipe: Recipe| Recipe { architecture: architecture.into(), ..recipe };
    let recipes = [
        Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352),
        Recipe::llama(Quant::Q8_0, [4, 2, 32], 128, 256),
        with("qwen2", Recipe::llama(Quant::Q4K, [4, 2, 64], 256, 256)),
        with("qwen3", Recipe::llama(Quant::Q6K, [4, 2, 64], 256, 256)),
        with("qwen2", Recipe::llama(Quant::F32, [4, 2, 16], 64, 96)),
        Recipe { tied: true, ..Recipe::llama(Quant::F16, [3, 1, 10], 30, 37) },
        with("qwen3", Recipe::llama(Quant::Q4_1, [4, 4, 32], 128, 160)),
        Recipe::llama(Quant::Q4_0, [5, 1, 32], 160, 96).mixture("qwen3moe", [7, 3, 0]),
        Recipe::llama(Quant::Q8_0, [4, 2, 24], 64, 32).mixture("qwen2moe", [5, 2, 96]),
    ];
    for recipe in recipes {
        let recipe = Recipe { layers: 3, ..recipe };
        let network = Arc::new(recipe.network());
        for (split, groups) in splits() {
            for (batch, audit) in [(1, 0.05), (4, 1.0), (3, 0.6)] {
                let plan = plan(&network, split, &groups, audit);
                let (_world, controls) = ring(3, 7);
                let log = AuditLog::new(0.0);
                let runner = audited(&network, &plan, batch, &controls, &log);
                let tokens = prompt(9, recipe.vocab);
                let (found, error) = tried(Box::new(runner), &tokens, 6, &mut |_| ());
                let what = format!("{}, {split:?} {groups:?}, audit {audit}", recipe.name);
                assert!(error.is_none(), "{what}: {error:?}");
                let right = best(&mut Session::new(threads(&network, &plan, 3, 1)), &tokens, 6);
                assert_eq!(found, right, "{what}");
                assert!(log.checked() >= 3 * 6, "{what}: {}", log.checked());
                assert!(log.found().is_empty());
            }
        }
    }
}

/// A small model with layers for all.
fn small() -> Recipe {
    Recipe { layers: 3, ..Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352) }
}

#[test]
fn two_hundred_runs_with_one_garbling_card_of_three_find_and_name_it() {
    let network = Arc::new(small().network());
    let alone = plan(&network, Split::Gather, &together(&[1.0]), 0.0);
    let text = |found: &Tokens| -> Vec<u32> { found.iter().map(|best| best[0].0).collect() };
    for seed in 0..200u64 {
        let (split, groups) = splits().swap_remove((seed % 4) as usize);
        let (card, from) = ((seed / 4 % 3) as usize, (seed / 12 % 6) as usize);
        let what = format!("seed {seed}: card {card} from step {from}, {split:?} {groups:?}");
        let tokens = prompt(5 + (seed % 5) as usize, small().vocab);
        let given = plan(&network, split, &groups, spanker_plan::USUAL_AUDIT);
        let (world, controls) = ring(3, seed);
        let log = AuditLog::new(0.0);
        let runner = audited(&network, &given, 3, &controls, &log);
        let (before, error) = tried(Box::new(runner), &tokens, 8, &mut |at| {
            if at == from {
                world.disturb(Disturbance::Garble(card));
            }
        });
        let error = error.unwrap_or_else(|| panic!("{what}: not found"));
        assert_eq!(accused(&error), Some(card), "{what}: {error}");
        let found = log.found();
        assert_eq!((found.len(), found[0].card), (1, card), "{what}");
        // Those that are left compute everything again: the text of one card, which no token departs from that
        // was given out before.
        let left: Vec<&SpankerControl> =
            (0..3).filter(|&other| other != card).map(|other| &controls[other]).collect();
        let two = plan(&network, Split::Gather, &together(&[1.0; 2]), spanker_plan::USUAL_AUDIT);
        let handle = |index: usize| left.get(index).copied();
        let mut runner =
            OnCards::load(&network, &two, CONTEXT, 3, &handle, &|_| ()).expect("two cards");
        runner.audit(&network, &log);
        let (again, error) = tried(Box::new(runner), &tokens, 8, &mut |_| ());
        assert!(error.is_none(), "{what}: {error:?}");
        let one = best(&mut Session::new(threads(&network, &alone, 3, 1)), &tokens, 8);
        assert_eq!(text(&again), text(&one), "{what}");
        assert_eq!(before.len(), from, "{what}: found too late");
    }
}

#[test]
fn garbling_card_is_named_before_anything_wrong_comes_out_where_all_is_computed_twice() {
    let network = Arc::new(small().network());
    let tokens = prompt(7, small().vocab);
    for (split, groups) in splits() {
        for card in 0..3 {
            let plan = plan(&network, split, &groups, 1.0);
            let right = best(&mut Session::new(threads(&network, &plan, 3, 1)), &tokens, 6);
            let (world, controls) = ring(3, 7);
            let log = AuditLog::new(0.0);
            let runner = twice(&network, &plan, &controls, &log);
            let (found, error) = tried(Box::new(runner), &tokens, 6, &mut |at| {
                if at == 2 {
                    world.disturb(Disturbance::Garble(card));
                }
            });
            assert_eq!(found, right[..2], "{split:?} {groups:?}, card {card}");
            let error = error.expect("a card that garbles");
            assert_eq!(accused(&error), Some(card), "{error}");
        }
    }
}

/// Where a tensor of a layer begins in a card's buffer of weights, and its bytes.
fn piece(plan: &Plan, card: usize, name: &str) -> (u64, u64) {
    let space = spanker_plan::Space::of(CONTEXT as u64, 3, 1, plan.request.taps());
    let kind = Some(spanker_topology::ExchangeKind::Schedules);
    let stages = &plan.layout.replicas[0];
    let layouts = spanker_plan::card_layouts(&plan.model, &plan.cluster, stages, space, kind, None);
    let pieces = &layouts[card].weights.pieces;
    let at = pieces.iter().position(|(piece, _)| piece.name() == name).expect("a piece");
    let end = pieces.get(at + 1).map_or(layouts[card].weights.bytes, |(_, start)| *start);
    (pieces[at].1, end - pieces[at].1)
}

/// Changes bytes of a buffer of a card.
fn change(
    runner: &OnCards<'_>,
    controls: &[SpankerControl],
    card: usize,
    buffer: Buffer,
    at: u64,
    bytes: usize,
    with: impl Fn(&mut [u8]),
) {
    let place = runner.place(card, buffer).expect("a buffer");
    let mut content = vec![0; bytes];
    controls[card].read(place.buffer, at, &mut content).expect("an answer");
    with(&mut content);
    controls[card].write(place.buffer, at, &content).expect("an answer");
}

#[test]
fn wrong_weight_row_on_a_card_is_found_where_operators_are_sampled_and_where_all_is_twice() {
    let network = Arc::new(small().network());
    let tokens = prompt(7, small().vocab);
    for (audit, steps) in [(0.2, 40), (1.0, 8)] {
        let plan = plan(&network, Split::Gather, &together(&[1.0; 3]), audit);
        let (start, _) = piece(&plan, 1, "blk.1.attn_v.weight");
        let (_world, controls) = ring(3, 7);
        let log = AuditLog::new(0.0);
        let runner = audited(&network, &plan, 3, &controls, &log);
        let row = Quant::Q4_0.row_bytes(160) as usize;
        // The scale of every block of the first row.
        let spoil = |row: &mut [u8]| row.iter_mut().step_by(18).for_each(|byte| *byte ^= 0x55);
        change(&runner, &controls, 1, Buffer::Weights, start, row, spoil);
        let runner: Box<dyn Runner> = match audit < 1.0 {
            true => Box::new(runner),
            false => Box::new(Twice::new(Box::new(runner), threads(&network, &plan, 3, 1))),
        };
        let (_, error) = tried(runner, &tokens, steps, &mut |_| ());
        let error = error.unwrap_or_else(|| panic!("audit {audit}: not found"));
        assert_eq!(accused(&error), Some(1), "{error}");
        let text = error.to_string();
        assert!(text.contains("blk.1.attn_v.weight") || text.contains("layer 1"), "{text}");
    }
}

#[test]
fn matrices_of_a_card_that_were_swapped_are_found() {
    let network = Arc::new(small().network());
    let tokens = prompt(7, small().vocab);
    let plan = plan(&network, Split::Gather, &together(&[1.0; 3]), 0.1);
    let (gate, bytes) = piece(&plan, 2, "blk.0.ffn_gate.weight");
    let (up, same) = piece(&plan, 2, "blk.0.ffn_up.weight");
    assert_eq!(bytes, same);
    let (_world, controls) = ring(3, 7);
    let log = AuditLog::new(0.0);
    let runner = audited(&network, &plan, 3, &controls, &log);
    let place = runner.place(2, Buffer::Weights).expect("a buffer");
    let mut both = [gate, up].map(|start| {
        let mut content = vec![0; bytes as usize];
        controls[2].read(place.buffer, start, &mut content).expect("an answer");
        content
    });
    both.reverse();
    for (start, content) in [gate, up].into_iter().zip(&both) {
        controls[2].write(place.buffer, start, content).expect("an answer");
    }
    let (_, error) = tried(Box::new(runner), &tokens, 40, &mut |_| ());
    let error = error.expect("another matrix");
    assert_eq!(accused(&error), Some(2), "{error}");
}

#[test]
fn keys_and_values_that_change_on_a_card_are_found() {
    let network = Arc::new(small().network());
    let tokens = prompt(7, small().vocab);
    for audit in [0.05, 1.0] {
        let plan = plan(&network, Split::Gather, &together(&[1.0; 3]), audit);
        let (_world, controls) = ring(3, 7);
        let log = AuditLog::new(0.0);
        let runner = audited(&network, &plan, 1, &controls, &log);
        let place = runner.place(0, Buffer::Kv).expect("a buffer");
        // Two of five heads of three layers, 64 positions, keys and values.
        let bytes = 3 * 2 * 64 * 2 * 32 * 2;
        let mut spoil = |at: usize| {
            if at == 4 {
                let mut content = vec![0; bytes];
                controls[0].read(place.buffer, 0, &mut content).expect("an answer");
                content.iter_mut().for_each(|byte| *byte ^= 0x11);
                controls[0].write(place.buffer, 0, &content).expect("an answer");
            }
        };
        let runner: Box<dyn Runner> = match audit < 1.0 {
            true => Box::new(runner),
            false => Box::new(Twice::new(Box::new(runner), threads(&network, &plan, 1, 1))),
        };
        let (found, error) = tried(runner, &tokens, 12, &mut spoil);
        let error = error.unwrap_or_else(|| panic!("audit {audit}: not found"));
        assert_eq!(accused(&error), Some(0), "audit {audit}: {error}");
        assert_eq!(found.len(), 4, "audit {audit}: {error}");
    }
}

/// A runner that gives another token once it has done so many steps.
struct Liar {
    inner: Box<dyn Runner>,
    steps: usize,
}

impl Runner for Liar {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        self.inner.begin(step)
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        let mut outcome = self.inner.end()?;
        // Three pieces of the prompt and two tokens are right.
        if self.steps == 0 {
            // A unit in the last place of one logit.
            let logit = &mut outcome.outputs[0].best[3].1;
            *logit = f32::from_bits(logit.to_bits() ^ 1);
        }
        self.steps = self.steps.saturating_sub(1);
        Ok(outcome)
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }
}

impl Searched for Liar {
    fn attempt(&mut self, step: &Step<'_>, _: u64) -> Result<(), LlmError> {
        self.inner.step(step).map(|_| ())
    }

    fn examine(&self, past: usize) -> LlmError {
        LlmError::Unsure { past }
    }
}

#[test]
fn runner_whose_search_finds_nobody_gives_nothing_out_that_this_host_does_not() {
    let network = Arc::new(small().network());
    let tokens = prompt(7, small().vocab);
    let plan = plan(&network, Split::Gather, &together(&[1.0; 2]), 0.0);
    let runner = || threads(&network, &plan, 3, 1);
    let right = best(&mut Session::new(runner()), &tokens, 6);
    let honest = Liar { inner: runner(), steps: usize::MAX };
    let honest = Twice::new(Box::new(honest), runner());
    let (found, error) = tried(Box::new(honest), &tokens, 6, &mut |_| ());
    assert!(error.is_none() && found == right, "{error:?}");
    let liar = Liar { inner: runner(), steps: 5 };
    let liar = Twice::new(Box::new(liar), runner());
    let (found, error) = tried(Box::new(liar), &tokens, 6, &mut |_| ());
    assert_eq!(found, right[..3]);
    assert!(matches!(error, Some(LlmError::Unsure { past: 9 })), "{error:?}");
}

#[test]
fn cards_allocate_what_is_planned_with_an_audit() {
    let network = Arc::new(small().network());
    for (split, groups) in splits() {
        for audit in [0.0, spanker_plan::USUAL_AUDIT, 0.5, 1.0] {
            let mut plan = plan(&network, split, &groups, audit);
            plan.request.context = CONTEXT as u64;
            plan.request.prompt = 7;
            plan.request.batch = 3;
            let (_world, controls) = ring(3, 7);
            let free = || -> Vec<u64> {
                controls.iter().map(|card| card.info().expect("an answer").available).collect()
            };
            let before = free();
            let runner = audited(&network, &plan, 3, &controls, &AuditLog::new(audit));
            let memory = plan.predict().memory;
            for (card, (before, after)) in before.iter().zip(free()).enumerate() {
                let planned = memory[card].footprint.total().0;
                assert_eq!(before - after, planned, "{split:?} {groups:?}, audit {audit}");
            }
            drop(runner);
            assert_eq!(free(), before);
        }
    }
}
