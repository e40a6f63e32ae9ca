// SPDX-License-Identifier: Apache-2.0
//! Layers with a window keep what windows see, and no more: far beyond it, the bits are those of a host that keeps
//! everything, on threads, ranks and emulated cards, in pieces longer than the window, with guesses, after going back,
//! and with block tables. What is planned is allocated.

use std::sync::Arc;
use std::time::Duration;

use ggml_spanker::synthetic::{self, Sizes};
use spanker_fabric::Fabric;
use spanker_fabric::conformance::on_all;
use spanker_fabric::inproc::group;
use spanker_llm::{
    AuditLog, Evaluator, InProcess, Leader, LlmError, Network, OnCards, Outcome, Rounding,
    RunLogits, Runner, Session, Worker, run_logits, run_logits_guessing, run_worker,
};
use spanker_model::{KV_BLOCK, KvShape, Quant, builtin};
use spanker_plan::{Layout, Objective, Part, Plan, Request, Split, Step, Want, WindowCache};
use spanker_runtime::SpankerControl;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Pace, World, specs};

const CONTEXT: usize = 1024;
const BATCH: usize = 100;
const STEPS: usize = 6;
const VOCAB: u64 = 263;
const WINDOW: u64 = 33;

/// Five of six layers have the window.
fn gemma() -> Arc<Network<Vec<u8>>> {
    let like = builtin("tinyllama-1.1b", Quant::Q8_0).expect("a shape");
    let sizes = Sizes {
        layers: Some(7),
        hidden: Some(64),
        heads: Some(3),
        kv_heads: Some(1),
        head_size: Some(32),
        ffn: Some(96),
        vocab: Some(VOCAB),
        context: Some(CONTEXT as u64),
        window: Some(WINDOW),
        ..Sizes::default()
    };
    let writer = synthetic::like(&like, "gemma3", Quant::Q8_0, &sizes).expect("a model").0;
    let mut file = Vec::new();
    synthetic::write(&writer, &mut file, 3, |_| Ok(())).expect("memory");
    Arc::new(Network::new(file).expect("a model"))
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u64).map(|at| ((at * at + at * 29 + 11) % VOCAB) as u32).collect()
}

fn groups(cards: usize) -> Vec<Vec<(usize, f64)>> {
    vec![(0..cards).map(|card| (card, 1.0 + card as f64 / 3.0)).collect()]
}

fn stages(cards: usize) -> Vec<Vec<(usize, f64)>> {
    (0..cards).map(|card| vec![(card, 1.0)]).collect()
}

fn plan(network: &Network<Vec<u8>>, groups: &[Vec<(usize, f64)>], sequences: u64) -> Plan {
    let layout = Layout::of_groups(network.model(), Split::Gather, groups).expect("a layout");
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, layout.cards().len(), Shape::Ring).expect("cards");
    let (context, batch) = (CONTEXT as u64, BATCH as u64);
    let request = Request {
        sequences,
        context,
        batch,
        guesses: if sequences == 1 { 8 } else { 0 },
        ..Request::new(Objective::Latency)
    };
    Plan::new(network.model().clone(), cluster, request, layout).expect("a plan")
}

fn on_threads(network: &Arc<Network<Vec<u8>>>, plan: &Plan) -> InProcess<Vec<u8>> {
    InProcess::new(Arc::clone(network), plan, CONTEXT, BATCH, 2).expect("cards")
}

/// What the host gives, which keeps all keys and values.
fn defined(network: &Network<Vec<u8>>, prompt: &[u32]) -> RunLogits {
    let one = plan(network, &groups(1), 1);
    let host = Evaluator::new(network, &one.layout, Rounding::Nearest, 2).expect("a layout");
    run_logits(Box::new(host), prompt, STEPS, None).expect("logits")
}

#[track_caller]
fn assert_same(what: &str, found: &RunLogits, reference: &RunLogits) {
    assert_eq!(found.tokens, reference.tokens, "{what}");
    assert_eq!(found.difference(reference), None, "{what}");
}

#[test]
fn prompts_in_pieces_longer_than_the_window_have_the_bits_of_a_host_that_keeps_everything() {
    let (network, prompt) = (gemma(), tokens(700));
    let reference = defined(&network, &prompt);
    for groups in [groups(1), groups(3), stages(3)] {
        let plan = plan(&network, &groups, 1);
        let runner = on_threads(&network, &plan);
        let windows = runner.windows().expect("layers with a window");
        assert!(windows.blocks * KV_BLOCK < 400, "{windows:?}");
        let found = run_logits(Box::new(runner), &prompt, STEPS, None).expect("logits");
        assert_same(&format!("{groups:?}"), &found, &reference);
    }
}

#[test]
fn ranks_keep_windows_and_have_the_same_bits() {
    let (network, prompt) = (gemma(), tokens(500));
    let reference = defined(&network, &prompt);
    let plan = plan(&network, &groups(2), 1);
    let timeout = Duration::from_secs(60);
    let found = on_all(group(2), |mut fabric| {
        if fabric.rank() > 0 {
            let (store, plan, threads, order_timeout) = (None, None, 1, timeout);
            let network = &network;
            let worker = Worker { network, store, plan, threads, timeout, order_timeout };
            run_worker(&mut fabric, &worker).expect("the leader ends it");
            return None;
        }
        let mut leader = Leader::new(&mut fabric, timeout).expect("rank 0");
        let runner = leader.lay_out(&network, &plan, CONTEXT, BATCH, 1).expect("a layout");
        Some(run_logits(Box::new(runner), &prompt, STEPS, None).expect("logits"))
    });
    assert_same("two ranks", &found.into_iter().flatten().next().expect("rank 0"), &reference);
}

#[test]
fn emulated_cards_keep_windows_and_none_is_accused() {
    let (network, prompt) = (gemma(), tokens(420));
    let reference = defined(&network, &prompt);
    for (groups, audit) in [(groups(2), 1.0), (stages(2), 0.3)] {
        let mut plan = plan(&network, &groups, 1);
        plan.request.audit = audit;
        let specs = specs(&plan.cluster, Pace::Unshaped, 1).expect("cards");
        let world = World::new(specs, 3);
        let controls: Vec<SpankerControl> = (0..2).map(|card| world.control(card)).collect();
        let (log, card) = (AuditLog::new(0.0), |index: usize| controls.get(index));
        let mut runner =
            OnCards::load(&network, &plan, CONTEXT, BATCH, &card, &|_| ()).expect("cards");
        for used in runner.memory().expect("cards answer") {
            assert_eq!(used.planned, used.allocated, "card {}", used.card);
        }
        runner.audit(&network, &log);
        let found = run_logits(Box::new(runner), &prompt, STEPS, None).expect("logits");
        assert_same(&format!("{groups:?}"), &found, &reference);
        assert!(log.checked() > 20 && log.found().is_empty(), "{}", log.checked());
    }
}

#[test]
fn memory_of_layers_with_a_window_does_not_grow_with_the_context_and_is_what_is_allocated() {
    let network = gemma();
    for (groups, sequences) in [(groups(1), 1), (groups(2), 1), (stages(2), 1), (groups(2), 3)] {
        let plan = plan(&network, &groups, sequences);
        for used in on_threads(&network, &plan).memory() {
            assert_eq!(used.planned, used.allocated, "{groups:?} {sequences}");
        }
    }
    // One layer of seven keeps all positions.
    let plan = plan(&network, &groups(1), 1);
    let kept = KvShape { heads: 1, head_size: 32, quant: Quant::F16 }.block_bytes();
    let windows = on_threads(&network, &plan).windows().expect("windows");
    let blocks = CONTEXT as u64 / KV_BLOCK + 6 * windows.blocks;
    let memory = plan.predict().memory;
    assert_eq!(memory[0].footprint.kv.0, (blocks * kept).next_multiple_of(4096));
    assert_eq!(windows, WindowCache { window: WINDOW, blocks: 3 + 3 });
    // A model without windows of this shape has seven times all of them.
    let mut plain = plan.clone();
    plain.model.layers.iter_mut().for_each(|layer| layer.window = None);
    let all = plain.predict().memory[0].footprint.kv.0;
    assert!(all > 2 * memory[0].footprint.kv.0, "{all}");
}

#[test]
fn refused_guesses_write_over_nothing_that_is_seen() {
    let (network, prompt) = (gemma(), tokens(500));
    let reference = {
        let one = plan(&network, &groups(1), 1);
        run_logits(Box::new(on_threads(&network, &one)), &prompt, 150, None).expect("logits")
    };
    let all: Vec<u32> = prompt.iter().chain(&reference.tokens).copied().collect();
    let runner = on_threads(&network, &plan(&network, &groups(2), 1));
    // Right ones, and then wrong ones, as many as a step has rows for outputs.
    let mut guess = |so_far: &[u32]| {
        let right = so_far.len() % 4;
        let own = all[so_far.len().min(all.len())..].iter().take(right).copied();
        own.chain([VOCAB as u32 - 1, 0, 1, 2]).collect()
    };
    let (found, [guessed, right]) =
        run_logits_guessing(Box::new(runner), &prompt, 150, &mut guess).expect("logits");
    assert!(right > 20 && guessed > 2 * right, "{right} of {guessed}");
    assert_same("guesses", &found, &reference);
}

/// Says nothing about windows: what is written over counts as kept.
struct Forgetful(InProcess<Vec<u8>>);

impl Runner for Forgetful {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        self.0.begin(step)
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        self.0.end()
    }

    fn batch(&self) -> usize {
        self.0.batch()
    }
}

/// The logits after a sequence was cut to some tokens and one follows, and how many tokens were computed for it.
fn after_cut<'r>(runner: Box<dyn Runner + 'r>, whole: &[u32], length: usize) -> Vec<f32> {
    let mut session = Session::new(runner);
    session.feed(whole, Want::Nothing).expect("a prompt");
    session.cut(length);
    let outcome = session.feed(&[7], Want::Logits).expect("a step");
    assert_eq!(session.tokens().len(), length + 1);
    outcome.last().logits.clone().expect("logits")
}

#[test]
fn going_back_gives_the_same_bits_and_is_computed_anew_where_the_window_was_written_over() {
    let (network, whole) = (gemma(), tokens(900));
    let one = plan(&network, &groups(1), 1);
    let mut lost = 0;
    for length in [1, 60, 350, 640, 800, 890, 899] {
        let alone: Vec<u32> = whole[..length].iter().copied().chain([7]).collect();
        let reference = defined(&network, &alone);
        let found = after_cut(Box::new(on_threads(&network, &one)), &whole, length);
        assert_eq!(found, reference.logits[0], "cut to {length}");
        // The fault that this is for: going on as if nothing was written over.
        let runner = Forgetful(on_threads(&network, &one));
        lost += usize::from(after_cut(Box::new(runner), &whole, length) != reference.logits[0]);
    }
    assert!((3..6).contains(&lost), "{lost} of 7 were written over");
}

/// A sequence with its two block tables.
struct Tabled {
    tokens: Vec<u32>,
    blocks: Vec<u32>,
    windowed: Vec<u32>,
}

#[test]
fn sequences_with_tables_of_their_own_are_as_if_alone_and_copies_go_on_as_their_originals() {
    let network = gemma();
    let plan = plan(&network, &groups(2), 3);
    let mut runner = on_threads(&network, &plan);
    let windows = runner.windows().expect("windows");
    // Blocks of the one are scattered, those of windows are used in turns of their own.
    let table = |first: u64, step: u64, count: u64, of: u64| -> Vec<u32> {
        (0..count).map(|at| ((first + at * step) % of) as u32).collect()
    };
    let of = |seed: usize, first: u64| Tabled {
        tokens: tokens(330 + seed).split_off(seed),
        blocks: table(first, 5, 6, 48),
        windowed: table(first % 3, 3, 6, windows.blocks - windows.blocks % 3),
    };
    let sequences = [of(9, 0), of(5, 1)];
    for start in (0..330).step_by(30) {
        let parts = sequences.iter().map(|own| {
            let end = (start + 30).min(own.tokens.len());
            let part = Part::new(&own.tokens[start..end], start as u64, &own.blocks, Want::Nothing);
            Part { windowed: &own.windowed, ..part }
        });
        let parts: Vec<Part<'_>> = parts.collect();
        runner.step(&Step::of(&parts)).expect("a step");
    }
    // The last block of the first is copied, and both go on.
    let first = &sequences[0];
    let copied = (first.tokens.len() as u64 / KV_BLOCK) as usize;
    let mut copy = (first.blocks.clone(), first.windowed.clone());
    (copy.0[copied], copy.1[copied]) = (47, windows.blocks as u32 - 1);
    assert!(!first.windowed.contains(&copy.1[copied]));
    let past = first.tokens.len() as u64;
    let next = |blocks, windowed| Part { windowed, ..Part::new(&[3], past, blocks, Want::Logits) };
    let mut other = next(&sequences[1].blocks, &sequences[1].windowed);
    other.past = sequences[1].tokens.len() as u64;
    let parts = [next(&first.blocks, &first.windowed), next(&copy.0, &copy.1), other];
    let copies = [[first.blocks[copied], copy.0[copied]]];
    let windowed_copies = [[first.windowed[copied], copy.1[copied]]];
    let step = Step { copies: &copies, windowed_copies: &windowed_copies, ..Step::of(&parts) };
    let found = runner.step(&step).expect("a step").outputs;
    for (output, own) in [(0, first), (1, first), (2, &sequences[1])] {
        let whole: Vec<u32> = own.tokens.iter().copied().chain([3]).collect();
        let logits = &defined(&network, &whole).logits[0];
        assert_eq!(found[output].logits.as_ref(), Some(logits), "output {output}");
    }
    // With another's blocks in layers with a window, the answer is another.
    let wrong = Part { windowed: &sequences[1].windowed, ..parts[1] };
    let other = runner.step(&Step::of(&[wrong])).expect("a step").outputs;
    assert_ne!(other[0].logits, found[1].logits);
}

#[test]
fn steps_without_tables_for_windows_are_refused() {
    let network = gemma();
    let plan = plan(&network, &groups(1), 2);
    let mut runner = on_threads(&network, &plan);
    let part = Part::new(&[1], 0, &[0], Want::Best(1));
    let other = Part::new(&[1], 0, &[1], Want::Best(1));
    let mut refused = |parts: &[Part<'_>], copies: &[[u32; 2]]| {
        let step = Step { windowed_copies: copies, ..Step::of(parts) };
        runner.step(&step).expect_err("it cannot be").to_string()
    };
    assert!(refused(&[part, other], &[]).contains("without blocks for layers with windows"));
    let far = Part { windowed: &[99], ..part };
    assert!(refused(&[far], &[]).contains("block 99 of"));
    let short = Part { windowed: &[0], blocks: &[0, 1], ..part };
    assert!(refused(&[short], &[]).contains("1 blocks of layers with windows for 2"));
    assert!(refused(&[part], &[[0, 77]]).contains("block 77 of"));
}
