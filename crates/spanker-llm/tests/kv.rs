// SPDX-License-Identifier: Apache-2.0
//! Keys and values as Q4_0: attention over them against plain loops, and models with them on any number of cards, which
//! allocate what was planned.

use std::sync::Arc;

use ggml_spanker::ops::{self, AttendScratch, KvView, Queries};
use ggml_spanker::synthetic::{self, Sizes};
use ggml_spanker::{KV_BLOCK, KvShape, decode, encode};
use spanker_llm::{AuditLog, InProcess, Network, OnCards, RunLogits, run_logits};
use spanker_model::{Quant, builtin, gating_of};
use spanker_plan::{Layout, Objective, Plan, Request, Split};
use spanker_runtime::SpankerControl;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Pace, World, specs};

/// Numbers that look random, from -1 to 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// What a head is once it was stored, by GGML's blocks.
fn stored(head: &[f32]) -> Vec<f64> {
    let mut blocks = vec![0; Quant::Q4_0.row_bytes(head.len() as u64) as usize];
    encode(Quant::Q4_0, head, &mut blocks).expect("whole blocks");
    let mut out = vec![0.0; head.len()];
    decode(Quant::Q4_0, &blocks, &mut out).expect("whole blocks");
    out.into_iter().map(f64::from).collect()
}

#[test]
fn attention_over_four_bits_is_what_plain_loops_make_of_ggml_s_blocks() {
    for (heads, size, positions) in [(1, 32, 1), (2, 64, 70), (3, 96, 130), (1, 128, 64)] {
        let shape = KvShape { heads, head_size: size as u64, quant: Quant::Q4_0 };
        let (width, block) = (heads as usize * size, shape.block_bytes() as usize);
        let blocks = KvShape::blocks_for(positions as u64) as usize;
        // What was in a block before does not matter, and blocks are in any order.
        let mut cache = vec![0x5A; blocks * block];
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let rows = |which: u64| numbers(positions * width, 3 * size as u64 + which);
        let (keys, values) = (rows(0), rows(1));
        for at in 0..positions {
            let start = table[at / KV_BLOCK as usize] as usize * block;
            let row = at * width..(at + 1) * width;
            let into = &mut cache[start..start + block];
            ops::keep(shape, at, &keys[row.clone()], &values[row], into);
        }
        let (query, scale) = (numbers(size, 7), 0.2f32);
        for head in 0..heads as usize {
            let of = |rows: &[f32], at: usize| stored(&rows[at * width + head * size..][..size]);
            let score = |at: usize| {
                let pairs = of(&keys, at).into_iter().zip(&query);
                pairs.map(|(key, query)| key * f64::from(*query)).sum::<f64>() * f64::from(scale)
            };
            let weights: Vec<f64> = (0..positions).map(|at| score(at).exp()).collect();
            let all: f64 = weights.iter().sum();
            let mut expected = vec![0.0; size];
            for (at, weight) in weights.iter().enumerate() {
                let value = of(&values, at);
                expected.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight / all * v);
            }
            let queries = Queries::plain(&query, 1, positions - 1, scale);
            let view = KvView { cache: &cache, table: &table, shape, head };
            let mut out = vec![0.0; size];
            ops::attend(queries, view, &mut AttendScratch::default(), &mut out);
            for (found, expected) in out.iter().zip(&expected) {
                let off = (f64::from(*found) - expected).abs();
                assert!(off < 1e-5, "{shape:?}, {positions}: {found} and not {expected}");
            }
        }
    }
}

#[test]
fn numbers_that_are_none_are_seen_where_they_are_read() {
    let shape = KvShape { heads: 1, head_size: 64, quant: Quant::Q4_0 };
    for (bad, seen) in [(f32::NAN, true), (f32::INFINITY, true), (1.0, false)] {
        let mut cache = vec![0; shape.block_bytes() as usize];
        let mut values = numbers(64, 1);
        values[40] = bad;
        ops::keep(shape, 0, &numbers(64, 2), &values, &mut cache);
        let (query, mut out) = (numbers(64, 3), vec![0.0; 64]);
        let view = KvView { cache: &cache, table: &[0], shape, head: 0 };
        ops::attend(
            Queries::plain(&query, 1, 0, 1.0),
            view,
            &mut AttendScratch::default(),
            &mut out,
        );
        assert!(out[..32].iter().all(|value| value.is_finite()), "the other block of the head");
        assert_eq!(out[32..].iter().all(|value| value.is_nan()), seen, "{bad}");
    }
}

fn network(architecture: &str) -> Arc<Network<Vec<u8>>> {
    let experts = gating_of(architecture).filter(|_| architecture != "llama").map(|_| 5);
    let sizes = Sizes {
        layers: Some(2),
        hidden: Some(96),
        heads: Some(6),
        kv_heads: Some(2),
        head_size: Some(32),
        ffn: Some(160),
        vocab: Some(263),
        context: Some(256),
        window: (architecture == "gpt-oss").then_some(33),
        experts,
        experts_used: experts.map(|_| 3),
        ..Sizes::default()
    };
    let like = builtin("tinyllama-1.1b", Quant::Q8_0).expect("a shape");
    let made = synthetic::like(&like, architecture, Quant::Q8_0, &sizes).expect("a model");
    let mut file = Vec::new();
    synthetic::write(&made.0, &mut file, 5, |_| Ok(())).expect("memory");
    Arc::new(Network::new(file).expect("a model"))
}

fn plan(network: &Network<Vec<u8>>, split: Split, cards: usize, kv: Quant) -> Plan {
    let groups = [(0..cards).map(|card| (card, 1.0 + card as f64 / 3.0)).collect::<Vec<_>>()];
    let layout = Layout::of_groups(network.model(), split, &groups).expect("a layout");
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, cards, Shape::Ring).expect("cards");
    let request = Request { kv, ..Request::new(Objective::Latency) };
    Plan::new(network.model().clone(), cluster, request, layout).expect("a plan")
}

const CONTEXT: usize = 128;
const BATCH: usize = 24;

fn tokens() -> Vec<u32> {
    (0..70).map(|at| (at * 29 + 11) % 263).collect()
}

/// What threads make of a prompt; they have allocated what was planned.
fn threads(network: &Arc<Network<Vec<u8>>>, plan: &Plan) -> RunLogits {
    let cards = plan.layout.cards().len();
    let runner = InProcess::new(Arc::clone(network), plan, CONTEXT, BATCH, cards);
    let runner = runner.expect("cards");
    for used in runner.memory() {
        assert_eq!(used.planned, used.allocated, "card {} of {cards}", used.card);
    }
    run_logits(Box::new(runner), &tokens(), 3, None).expect("logits")
}

#[test]
fn cards_allocate_what_is_planned_and_give_the_bits_of_one_with_every_type_of_keys() {
    for architecture in ["llama", "gpt-oss", "olmoe"] {
        let network = network(architecture);
        let mut found: Vec<RunLogits> = Vec::new();
        let mut bytes = Vec::new();
        for kv in KvShape::QUANTS {
            let one = threads(&network, &plan(&network, Split::Gather, 1, kv));
            for cards in 2..=5 {
                let split = threads(&network, &plan(&network, Split::Gather, cards, kv));
                assert_eq!(split.tokens, one.tokens, "{architecture}, {kv}, {cards} cards");
                assert_eq!(split.difference(&one), None, "{architecture}, {kv}, {cards} cards");
            }
            threads(&network, &plan(&network, Split::Reduce, 3, kv));
            assert!(found.iter().all(|other| other.difference(&one).is_some()), "{kv}");
            let runner = InProcess::new(
                Arc::clone(&network),
                &plan(&network, Split::Gather, 1, kv),
                CONTEXT,
                BATCH,
                1,
            );
            bytes.push(runner.expect("a card").memory()[0].allocated);
            found.push(one);
        }
        assert!(bytes[0] > bytes[1] && bytes[1] > bytes[2], "{bytes:?}");
    }
}

#[test]
fn emulated_cards_keep_four_bits_as_threads_do_and_none_is_accused() {
    let network = network("llama");
    let reference = threads(&network, &plan(&network, Split::Gather, 1, Quant::Q4_0));
    let mut plan = plan(&network, Split::Gather, 2, Quant::Q4_0);
    plan.request.audit = 1.0;
    let world = World::new(specs(&plan.cluster, Pace::Unshaped, 1).expect("cards"), 3);
    let controls: Vec<SpankerControl> = (0..2).map(|card| world.control(card)).collect();
    let (log, card) = (AuditLog::new(0.0), |index: usize| controls.get(index));
    let runner = OnCards::load(&network, &plan, CONTEXT, BATCH, &card, &|_| ());
    let mut runner = runner.expect("cards");
    runner.audit(&network, &log);
    let found = run_logits(Box::new(runner), &tokens(), 3, None).expect("logits");
    assert_eq!((found.difference(&reference), found.tokens), (None, reference.tokens.clone()));
    assert!(log.checked() > 20 && log.found().is_empty(), "{}", log.checked());
}
