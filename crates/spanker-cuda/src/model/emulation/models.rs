// SPDX-License-Identifier: Apache-2.0
//! Models on the emulated kernel have the bits that they have on threads: whatever the type of weights, the split, the mixture
//! of sequences, and where their blocks of keys and values lie.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use spanker_llm::{AuditLog, InProcess, Network, OnMachine, Output, Runner, Step};
use spanker_model::Quant;
use spanker_plan::{Layout, Objective, Part, Plan, Request, Split, Want};
use spanker_test_support::Recipe;
use spanker_topology::{Cluster, Profile, Shape};

use super::super::device::Device;
use super::super::machine::{KERNEL_KV_TYPES, KERNEL_TYPES};
use super::super::operands::{self, Instruction};
use super::{Change, Emulated, Told, is_possible};
use crate::Processors;

pub(super) const CONTEXT: usize = 192;
/// Rows of a step: more than two tiles.
pub(super) const BATCH: usize = 136;
/// Sequences of a step, and blocks of the KV cache.
const SEQUENCES: u64 = 6;
const BLOCKS: u64 = 12;

/// Groups of cards with their shares.
pub(super) type Groups = Vec<Vec<(usize, f64)>>;

/// A model that runs on both.
pub(super) struct Both {
    pub(super) emulated: OnMachine<Processors>,
    threads: InProcess<Vec<u8>>,
    pub(super) told: Vec<Arc<Told>>,
    /// What was checked of the emulation.
    pub(super) log: AuditLog,
}

fn bits(output: &Output) -> Option<Vec<u32>> {
    output.logits.as_ref().map(|all| all.iter().map(|one| one.to_bits()).collect())
}

fn plan(network: &Network<Vec<u8>>, split: Split, groups: &Groups, kv: Quant) -> Plan {
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, layout.cards().len(), Shape::Switch).expect("cards");
    let request = Request {
        kv,
        context: CONTEXT as u64,
        prompt: 64,
        sequences: SEQUENCES,
        blocks: Some(BLOCKS),
        ..Request::new(Objective::Throughput)
    };
    Plan::new(network.model().clone(), cluster, request, layout).expect("a plan")
}

impl Both {
    /// `multiprocessors` of each of so many devices.
    pub(super) fn new(
        recipe: &Recipe,
        layout: (Split, &Groups, Quant),
        multiprocessors: &[u32],
    ) -> Both {
        Both::audited(recipe, layout, multiprocessors, 0.0)
    }

    /// The same with a part of what the emulation does checked.
    pub(super) fn audited(
        recipe: &Recipe,
        (split, groups, kv): (Split, &Groups, Quant),
        multiprocessors: &[u32],
        audit: f64,
    ) -> Both {
        let network = Arc::new(Network::new(recipe.file()).expect("a network"));
        let mut plan = plan(&network, split, groups, kv);
        plan.request.audit = audit;
        let (mut devices, mut told) = (Vec::<Box<dyn Device>>::new(), Vec::new());
        for &count in multiprocessors {
            let (device, of) = Emulated::new(count);
            devices.push(Box::new(device));
            told.push(of);
        }
        let cards: Vec<usize> = groups.iter().flatten().map(|card| card.0).collect();
        let cards = Processors::of(devices, &cards).expect("devices");
        let emulated = OnMachine::load(&network, &plan, CONTEXT, BATCH, cards, &|_| ());
        let mut emulated = emulated.expect("a model on the emulation");
        for used in emulated.memory() {
            assert_eq!(used.planned, used.allocated, "card {}", used.card);
        }
        let log = AuditLog::new(audit);
        let cards: Vec<usize> = groups.iter().flatten().map(|card| card.0).collect();
        emulated.audit(&network, &cards, &log);
        let threads = InProcess::new(network, &plan, CONTEXT, BATCH, 1).expect("threads");
        Both { emulated, threads, told, log }
    }

    /// One card.
    fn alone(recipe: &Recipe, kv: Quant) -> Both {
        Both::new(recipe, (Split::Gather, &vec![vec![(0, 1.0)]], kv), &[2])
    }

    /// What both make of a step.
    fn both(&mut self, step: &Step<'_>) -> [Vec<Output>; 2] {
        let found = self.emulated.step(step).expect("a step").outputs;
        [found, self.threads.step(step).expect("a step").outputs]
    }

    /// Whether both make the same of a step.
    pub(super) fn is_same(&mut self, step: &Step<'_>) -> bool {
        let [found, expected] = self.both(step);
        found
            .iter()
            .zip(&expected)
            .all(|(found, expected)| found.best == expected.best && bits(found) == bits(expected))
    }

    pub(super) fn step(&mut self, what: &str, step: &Step<'_>) {
        let [found, expected] = self.both(step);
        assert_eq!(found.len(), expected.len(), "{what}");
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.best, expected.best, "{what}, output {at}");
            assert!(bits(found) == bits(expected), "{what}, output {at}: logits");
        }
    }

    pub(super) fn launches(&self, kernel: usize) -> u64 {
        self.told.iter().map(|told| told.launches[kernel].load(Ordering::Relaxed)).sum()
    }

    /// A prompt, and then tokens one at a time.
    pub(super) fn one_sequence(&mut self, what: &str, blocks: &[u32], prompt: usize, more: usize) {
        let tokens: Vec<u32> = (0..(prompt + more) as u32).map(|at| (at * 29 + 11) % 71).collect();
        let part = Part::new(&tokens[..prompt], 0, blocks, Want::Logits);
        self.step(&format!("{what}: a prompt of {prompt}"), &Step::of(&[part]));
        for past in prompt..prompt + more {
            let part = Part::new(&tokens[past..=past], past as u64, blocks, Want::Logits);
            self.step(&format!("{what}: a token after {past}"), &Step::of(&[part]));
        }
    }
}

/// A mixture of sequences with prompts, single tokens, guesses, prefixes in blocks that several share, and a copied block.
pub(super) fn mixture(both: &mut Both, what: &str) {
    let tokens: Vec<u32> = (0..200).map(|at| (at * 31 + 5) % 71).collect();
    let part = |at: usize, count: usize, past: u64, blocks: &'static [u32], want| {
        Part::new(&tokens[at..at + count], past, blocks, want)
    };
    // A prompt in two pieces, the first with the beginning of another.
    let parts = [part(0, 33, 0, &[7, 2], Want::Nothing), part(90, 5, 0, &[5], Want::Best(3))];
    both.step(&format!("{what}: two prompts"), &Step::of(&parts));
    let parts = [part(95, 1, 5, &[5], Want::Logits), part(33, 35, 33, &[7, 2], Want::Best(4))];
    both.step(&format!("{what}: a token and more of a prompt"), &Step::of(&parts));
    // Others go on from the same first block; one of them from a copy of the second.
    let parts = [
        part(68, 1, 68, &[7, 2], Want::Logits),
        Part { outputs: 3, ..part(120, 3, 64, &[7, 0], Want::Best(2)) },
        part(130, 2, 68, &[7, 9], Want::Logits),
        part(96, 1, 6, &[5], Want::Nothing),
        part(140, 4, 0, &[11], Want::Best(70)),
    ];
    let step = Step { copies: &[[2, 9]], ..Step::of(&parts) };
    both.step(&format!("{what}: five sequences"), &step);
    // Single tokens of all, in another order.
    let parts = [
        part(150, 1, 4, &[11], Want::Best(1)),
        part(69, 1, 69, &[7, 2], Want::Best(1)),
        part(132, 1, 70, &[7, 9], Want::Logits),
        part(123, 1, 67, &[7, 0], Want::Best(9)),
    ];
    both.step(&format!("{what}: single tokens"), &Step::of(&parts));
}

pub(super) fn llama(quant: Quant) -> Recipe {
    Recipe::llama(quant, [4, 2, 64], 256, 512)
}

#[test]
fn a_model_of_every_type_of_weights_has_the_bits_of_threads() {
    if !is_possible() {
        return;
    }
    for quant in KERNEL_TYPES {
        let mut both = Both::alone(&llama(quant), Quant::F16);
        both.one_sequence(&quant.to_string(), &[3, 1], 19, 3);
        let streamed = both.launches(1);
        assert_eq!(streamed > 0, quant == Quant::Q4_0, "{quant}: {streamed} streamed");
    }
}

#[test]
fn prompts_on_tensor_cores_have_the_bits_of_threads_whatever_their_rows_and_widths() {
    if !is_possible() {
        return;
    }
    let types = [Quant::Q4_0, Quant::Q8_0, Quant::Q4K];
    for (quant, kv) in types.into_iter().zip(KERNEL_KV_TYPES.into_iter().cycle()) {
        let mut both = Both::alone(&llama(quant), kv);
        // Tiles that begin within a block of the cache, and end in another.
        let tokens: Vec<u32> = (0..180).map(|at| (at * 31 + 5) % 71).collect();
        let mut past = 0;
        for count in [40, 17, 123] {
            let some = &tokens[past..past + count];
            let part = Part::new(some, past as u64, &[7, 2, 5], Want::Logits);
            both.step(&format!("{quant}, {kv}: {count} after {past}"), &Step::of(&[part]));
            past += count;
        }
        // A tile with the end of one sequence and the start of the next.
        let parts = [
            Part::new(&tokens[..100], 0, &[1, 3], Want::Logits),
            Part::new(&tokens[100..135], 0, &[4], Want::Logits),
        ];
        both.step(&format!("{quant}, {kv}: two sequences"), &Step::of(&parts));
    }
    // Widths of an odd number of blocks.
    let recipe = Recipe { tied: true, ..Recipe::llama(Quant::Q4_0, [3, 1, 64], 192, 160) };
    Both::alone(&recipe, Quant::F16).one_sequence("hidden 192", &[0, 1], 21, 1);
}

#[test]
fn a_product_on_tensor_cores_whose_inputs_lie_in_another_order_has_other_bits() {
    if !is_possible() {
        return;
    }
    let faults: [Change; 3] = [
        |instructions| {
            let all = instructions.iter_mut().filter_map(Instruction::get_mut::<operands::Pack>);
            all.for_each(|op| op.is_interleaved ^= 1);
        },
        |instructions| {
            let all = instructions.iter_mut().filter_map(Instruction::get_mut::<operands::Matmul>);
            all.for_each(|op| op.weights += 16);
        },
        |instructions| {
            let all = instructions.iter_mut().filter_map(Instruction::get_mut::<operands::Attend>);
            all.for_each(|op| op.scale ^= 1 << 20);
        },
    ];
    for fault in faults {
        let mut both = Both::alone(&llama(Quant::Q4_0), Quant::F16);
        let tokens: Vec<u32> = (0..30).collect();
        let part = || Part::new(&tokens, 0, &[3], Want::Logits);
        assert!(both.is_same(&Step::of(&[part()])));
        *both.told[0].change.lock().expect("no other thread") = Some(fault);
        assert!(!both.is_same(&Step::of(&[part()])));
    }
}

#[test]
fn weights_that_kernels_do_not_compute_with_are_refused_by_name() {
    let types = ggml_spanker::WEIGHT_TYPES.into_iter();
    for quant in types.filter(|quant| !KERNEL_TYPES.contains(quant)) {
        let network = Network::new(llama(quant).file()).expect("a network");
        let groups = vec![vec![(0, 1.0)]];
        let plan = plan(&network, Split::Gather, &groups, Quant::F16);
        let (device, _) = Emulated::new(2);
        let cards = Processors::of(vec![Box::new(device)], &[0]).expect("a device");
        let refused = OnMachine::load(&network, &plan, CONTEXT, BATCH, cards, &|_| ());
        let Err(error) = refused else { panic!("kernels for {quant}") };
        let error = error.to_string();
        let expected = format!("weights of type {quant} on this GPU");
        assert!(error.contains(&expected) && error.contains("tensor "), "{error}");
    }
}

#[test]
fn widths_that_no_slot_has_give_the_bits_of_threads() {
    if !is_possible() {
        return;
    }
    let recipe = Recipe { tied: true, ..Recipe::llama(Quant::Q4_0, [3, 1, 32], 96, 160) };
    let mut both = Both::alone(&recipe, Quant::F16);
    both.one_sequence("hidden 96", &[0, 1], 5, 2);
    assert_eq!(both.launches(1), 0);
}

#[test]
fn a_token_whose_weights_are_prefetched_has_the_bits_of_threads_over_blocks_of_the_cache() {
    if !is_possible() {
        return;
    }
    for kv in KERNEL_KV_TYPES {
        let mut both = Both::alone(&llama(Quant::Q4_0), kv);
        let blocks = [9, 4, 6];
        both.one_sequence(&format!("{kv}"), &blocks, 40, 1);
        let tokens: Vec<u32> = (0..40).collect();
        let part = Part::new(&tokens[..22], 41, &blocks, Want::Nothing);
        both.step("up to the first block's end", &Step::of(&[part]));
        let streamed = both.launches(1);
        for past in 63..67 {
            let part = Part::new(&tokens[..1], past, &blocks, Want::Logits);
            both.step(&format!("{kv}: a token after {past}"), &Step::of(&[part]));
        }
        assert_eq!(both.launches(1) - streamed, 4, "each is one launch");
    }
}

#[test]
fn mixtures_of_sequences_have_the_bits_of_threads_with_keys_and_values_of_either_type() {
    if !is_possible() {
        return;
    }
    for quant in [Quant::Q4_0, Quant::Q8_0, Quant::Q4K, Quant::F16] {
        for kv in KERNEL_KV_TYPES {
            let mut both = Both::alone(&llama(quant), kv);
            mixture(&mut both, &format!("{quant}, {kv}"));
            let copies = both.told[0].copies.load(Ordering::Relaxed);
            assert_eq!(copies, 2, "one for each layer");
        }
    }
}

#[test]
fn groups_and_stages_of_cards_have_the_bits_of_threads() {
    if !is_possible() {
        return;
    }
    let two = vec![vec![(0, 1.0), (1, 1.0)]];
    let uneven = vec![vec![(0, 2.0), (1, 1.0)]];
    let stages = vec![vec![(0, 1.0)], vec![(1, 1.0)]];
    // Cards that share a device, and cards that have one each.
    for (split, groups, devices) in [
        (Split::Gather, &two, &[2][..]),
        (Split::Gather, &uneven, &[1, 2]),
        (Split::Reduce, &two, &[2]),
        (Split::Gather, &stages, &[2, 1]),
    ] {
        let what = format!("{split:?} {groups:?}");
        let mut both = Both::new(&llama(Quant::Q4_0), (split, groups, Quant::F16), devices);
        both.one_sequence(&what, &[3, 1], 7, 2);
        mixture(&mut both, &what);
    }
}

#[test]
fn steps_of_one_shape_share_a_program_whatever_their_tokens_blocks_and_positions() {
    if !is_possible() {
        return;
    }
    let mut both = Both::alone(&llama(Quant::Q4_0), Quant::F16);
    // Single tokens of different sequences, which one program serves one after the other.
    for turn in 0..3u32 {
        for (sequence, blocks) in [[1, 2], [8, 3]].iter().enumerate() {
            let token = [turn * 7 + sequence as u32];
            let part = Part::new(&token, u64::from(turn), blocks, Want::Logits);
            both.step(&format!("turn {turn}, sequence {sequence}"), &Step::of(&[part]));
        }
    }
}
