// SPDX-License-Identifier: Apache-2.0
//! Tiny models of every family: the same bits on any number of cards and on emulated ones, those of the definition on the
//! host, and no honest card accused. Windows are shorter than the prompt, which is longer than a block of the KV cache.

use std::sync::Arc;

use ggml_spanker::synthetic::{self, Sizes};
use serde_json::Value;
use spanker_llm::{
    AuditLog, Evaluator, InProcess, Network, OnCards, Rounding, RunLogits, Runner, run_logits,
};
use spanker_model::gguf::{Field, Writer};
use spanker_model::{Quant, builtin, gating_of};
use spanker_plan::{Layout, Objective, Plan, Request, Split};
use spanker_runtime::SpankerControl;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Pace, World, specs};

const CONTEXT: usize = 128;
const PROMPT: usize = 70;
const STEPS: usize = 3;
const BATCH: usize = 24;
const VOCAB: u64 = 263;

/// A family with awkward sizes.
#[derive(Debug, Clone, Copy)]
struct Tiny {
    architecture: &'static str,
    quant: Quant,
    layers: u64,
    /// Of queries, of keys and values, and their size.
    heads: [u64; 3],
    hidden: u64,
    ffn: u64,
    window: Option<u64>,
}

const fn tiny(architecture: &'static str, heads: [u64; 3], window: Option<u64>) -> Tiny {
    let (quant, layers, hidden, ffn) = (Quant::Q8_0, 2, 96, 160);
    Tiny { architecture, quant, layers, heads, hidden, ffn, window }
}

const FAMILIES: [Tiny; 12] = [
    Tiny { layers: 7, ..tiny("gemma3", [5, 1, 64], Some(33)) },
    tiny("gemma2", [6, 2, 32], Some(17)),
    tiny("gemma", [4, 1, 64], None),
    tiny("phi3", [3, 3, 32], Some(40)),
    Tiny { quant: Quant::Q4K, hidden: 256, ffn: 256, ..tiny("phi3", [4, 2, 64], None) },
    tiny("granite", [6, 3, 32], None),
    Tiny { layers: 5, ..tiny("smollm3", [6, 2, 32], None) },
    tiny("llama", [6, 2, 32], Some(65)),
    tiny("olmoe", [6, 2, 32], None),
    Tiny { layers: 3, ..tiny("gpt-oss", [6, 2, 32], Some(33)) },
    Tiny { quant: Quant::Mxfp4, ffn: 96, ..tiny("gpt-oss", [4, 1, 64], Some(20)) },
    tiny("granitemoe", [6, 3, 32], None),
];
/// Of [`FAMILIES`], a plain Llama with a window.
const LLAMA: Tiny = FAMILIES[7];

impl Tiny {
    fn file(&self) -> Vec<u8> {
        let mut file = Vec::new();
        synthetic::write(&self.writer(), &mut file, 5, |_| Ok(())).expect("memory");
        file
    }

    fn writer(&self) -> Writer {
        let like = builtin("tinyllama-1.1b", self.quant).expect("a shape");
        let [heads, kv_heads, head_size] = self.heads.map(Some);
        let mixed = gating_of(self.architecture).is_some_and(|_| self.architecture != "llama");
        let [experts, experts_used] = [5, 3].map(|count| mixed.then_some(count));
        let sizes = Sizes {
            layers: Some(self.layers),
            hidden: Some(self.hidden),
            heads,
            kv_heads,
            head_size,
            ffn: Some(self.ffn),
            vocab: Some(VOCAB),
            context: Some(512),
            window: self.window,
            experts,
            experts_used,
            ..Sizes::default()
        };
        synthetic::like(&like, self.architecture, self.quant, &sizes).expect("a model").0
    }

    fn network(&self) -> Arc<Network<Vec<u8>>> {
        Arc::new(Network::new(self.file()).unwrap_or_else(|error| panic!("{self:?}: {error}")))
    }
}

fn tokens() -> Vec<u32> {
    (0..PROMPT as u64).map(|at| ((at * 29 + 11) % VOCAB) as u32).collect()
}

/// What llama.cpp says of synthetic files, or numpy (`oracle/olmoe.py`) where llama.cpp knows no such shape: its most likely
/// token and 32 of its logits. It rounds in another order, so they are near and not the same.
#[test]
fn logits_of_every_family_are_near_those_of_llama_cpp() {
    let stored: Vec<Value> =
        serde_json::from_str(include_str!("vectors/families.json")).expect("JSON");
    assert_eq!(stored.len(), 15);
    for model in stored {
        let architecture = model["architecture"].as_str().expect("a name");
        let network = Arc::new(Network::new(of_vectors(&model)).expect("a model"));
        let one = plan(&network, Split::Gather, &together(1));
        for case in model["cases"].as_array().expect("cases") {
            let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).expect("tokens");
            let theirs: Vec<f32> = serde_json::from_value(case["logits"].clone()).expect("logits");
            let runner = InProcess::new(Arc::clone(&network), &one, CONTEXT, BATCH, 1);
            let found = run_logits(Box::new(runner.expect("a card")), &tokens, 1, None);
            let found = found.expect("logits");
            assert_eq!(Some(u64::from(found.tokens[0])), case["next"].as_u64(), "{architecture}");
            let square = theirs.iter().map(|logit| logit * logit).sum::<f32>();
            let typical = (square / theirs.len() as f32).sqrt();
            for (ours, theirs) in found.logits[0].iter().zip(&theirs) {
                let off = (ours - theirs).abs() / typical;
                assert!(off < 0.1, "{architecture}: {ours} where llama.cpp has {theirs}");
            }
        }
    }
}

/// The file that a line of `vectors/families.json` is about.
fn of_vectors(model: &Value) -> Vec<u8> {
    let size = |key: &str| model[key].as_u64();
    let sizes = Sizes {
        layers: size("layers"),
        hidden: Some(96),
        heads: size("heads"),
        kv_heads: size("kv_heads"),
        head_size: Some(32),
        ffn: size("ffn").or(Some(160)),
        vocab: Some(300),
        context: Some(256),
        window: size("window"),
        experts: size("experts"),
        experts_used: size("experts_used"),
        ..Sizes::default()
    };
    let architecture = model["architecture"].as_str().expect("a name");
    let quant = model["quant"].as_str().unwrap_or("q8_0").parse().expect("a type");
    let like = builtin("tinyllama-1.1b", quant).expect("a shape");
    let mut writer = synthetic::like(&like, architecture, quant, &sizes).expect("a model").0;
    if let Some(trained) = size("trained") {
        long_rope(&mut writer, trained as u32);
    }
    let mut file = Vec::new();
    synthetic::write(&writer, &mut file, 0, |_| Ok(())).expect("memory");
    file
}

/// Phi 3's factors of positions for contexts up to those of the training, and for longer ones.
fn long_rope(writer: &mut Writer, trained: u32) {
    for (key, field) in
        [("original_context_length", Field::U32(trained)), ("attn_factor", Field::F32(1.19))]
    {
        writer.put(&format!("phi3.rope.scaling.{key}"), field).expect("a key");
    }
    for name in ["long", "short"] {
        let name = format!("rope_factors_{name}.weight");
        writer.tensor(&name, &[16], Quant::F32).expect("a tensor");
    }
}

type Groups = Vec<Vec<(usize, f64)>>;

fn together(cards: usize) -> Groups {
    // Unequal, so that heads and blocks are shared out unevenly.
    vec![(0..cards).map(|card| (card, 1.0 + card as f64 / 3.0)).collect()]
}

fn one_by_one(cards: usize) -> Groups {
    (0..cards).map(|card| vec![(card, 1.0)]).collect()
}

fn plan(network: &Network<Vec<u8>>, split: Split, groups: &Groups) -> Plan {
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, layout.cards().len(), Shape::Ring).expect("cards");
    let request = Request { kv: Quant::F16, ..Request::new(Objective::Latency) };
    Plan::new(network.model().clone(), cluster, request, layout).expect("a plan")
}

fn logits(runner: Box<dyn Runner + '_>, fed: Option<&[u32]>) -> RunLogits {
    run_logits(runner, &tokens(), STEPS, fed).expect("logits")
}

fn threads(network: &Arc<Network<Vec<u8>>>, plan: &Plan, threads: usize) -> RunLogits {
    let runner = InProcess::new(Arc::clone(network), plan, CONTEXT, BATCH, threads);
    logits(Box::new(runner.expect("cards")), None)
}

#[track_caller]
fn assert_same(what: &str, found: &RunLogits, reference: &RunLogits) {
    assert_eq!(found.tokens, reference.tokens, "{what}");
    assert_eq!(found.difference(reference), None, "{what}");
}

#[test]
fn every_family_has_the_same_bits_on_one_to_five_cards_and_by_definition() {
    for tiny in FAMILIES {
        let network = tiny.network();
        let one = plan(&network, Split::Gather, &together(1));
        let reference = threads(&network, &one, 1);
        assert!(reference.logits.iter().flatten().all(|logit| logit.is_finite()), "{tiny:?}");
        assert_same(&format!("{tiny:?}, 2 threads"), &threads(&network, &one, 2), &reference);
        let host = Evaluator::new(&network, &one.layout, Rounding::Nearest, 1).expect("a layout");
        assert_same(&format!("{tiny:?}, host"), &logits(Box::new(host), None), &reference);
        for cards in 2..=5 {
            let split = plan(&network, Split::Gather, &together(cards));
            let found = threads(&network, &split, cards);
            assert_same(&format!("{tiny:?}, {cards} cards"), &found, &reference);
        }
        let staged = plan(&network, Split::Gather, &one_by_one(2));
        assert_same(&format!("{tiny:?}, stages"), &threads(&network, &staged, 2), &reference);
    }
}

#[test]
fn reduce_splits_of_every_family_have_the_bits_of_their_parts() {
    for tiny in FAMILIES {
        let network = tiny.network();
        let plan = plan(&network, Split::Reduce, &together(3));
        let found = threads(&network, &plan, 3);
        let host = Evaluator::new(&network, &plan.layout, Rounding::Nearest, 1).expect("a layout");
        let defined = logits(Box::new(host), Some(&found.tokens));
        assert_same(&format!("{tiny:?}"), &found, &defined);
    }
}

#[test]
fn emulated_cards_run_every_family_with_the_same_bits_and_none_is_accused() {
    for tiny in FAMILIES {
        let network = tiny.network();
        let reference = threads(&network, &plan(&network, Split::Gather, &together(1)), 1);
        for (groups, audit) in [(together(2), 1.0), (one_by_one(2), 0.3)] {
            let mut plan = plan(&network, Split::Gather, &groups);
            plan.request.audit = audit;
            let specs = specs(&plan.cluster, Pace::Unshaped, 1).expect("cards");
            let world = World::new(specs, 3);
            let controls: Vec<SpankerControl> = (0..2).map(|card| world.control(card)).collect();
            let (log, card) = (AuditLog::new(0.0), |index: usize| controls.get(index));
            let mut runner =
                OnCards::load(&network, &plan, CONTEXT, BATCH, &card, &|_| ()).expect("cards");
            runner.audit(&network, &log);
            assert_same(&format!("{tiny:?}"), &logits(Box::new(runner), None), &reference);
            assert!(log.checked() > 20 && log.found().is_empty(), "{tiny:?}: {}", log.checked());
        }
    }
}

#[test]
fn windows_that_nothing_is_outside_of_change_nothing_and_others_do() {
    let of = |window: Option<u64>| {
        let network = Tiny { window, ..LLAMA }.network();
        threads(&network, &plan(&network, Split::Gather, &together(1)), 1)
    };
    let all = of(None);
    assert_same("a window as long as the context", &of(Some(CONTEXT as u64)), &all);
    assert_same("one that all is within", &of(Some((PROMPT + STEPS) as u64)), &all);
    for window in [1, 6, 64, 65] {
        assert!(of(Some(window)).difference(&all).is_some(), "a window of {window}");
    }
}

#[test]
fn positions_of_long_contexts_have_other_factors_on_all_cards_and_by_definition() {
    let phi = Tiny { heads: [6, 2, 32], window: None, ..FAMILIES[3] };
    assert_eq!(phi.architecture, "phi3");
    let network = |trained: u32| {
        let (mut writer, mut file) = (phi.writer(), Vec::new());
        long_rope(&mut writer, trained);
        synthetic::write(&writer, &mut file, 5, |_| Ok(())).expect("memory");
        Arc::new(Network::new(file).expect("a model"))
    };
    let mut found = Vec::new();
    for trained in [CONTEXT as u32 - 1, CONTEXT as u32] {
        let network = network(trained);
        let one = plan(&network, Split::Gather, &together(1));
        let alone = threads(&network, &one, 1);
        let host = Evaluator::new(&network, &one.layout, Rounding::Nearest, 1).expect("a layout");
        let host = host.in_context(CONTEXT);
        assert_same("host", &logits(Box::new(host), None), &alone);
        let mut split = plan(&network, Split::Gather, &together(2));
        assert_same("2 cards", &threads(&network, &split, 2), &alone);
        split.request.audit = 1.0;
        let world = World::new(specs(&split.cluster, Pace::Unshaped, 1).expect("cards"), 3);
        let controls: Vec<SpankerControl> = (0..2).map(|card| world.control(card)).collect();
        let (log, card) = (AuditLog::new(0.0), |index: usize| controls.get(index));
        let mut runner =
            OnCards::load(&network, &split, CONTEXT, BATCH, &card, &|_| ()).expect("cards");
        runner.audit(&network, &log);
        assert_same("emulated cards", &logits(Box::new(runner), None), &alone);
        assert!(log.checked() > 20 && log.found().is_empty());
        found.push(alone);
    }
    assert!(found[0].difference(&found[1]).is_some(), "one token more is a long context");
}

#[test]
fn factors_of_long_contexts_that_are_not_whole_are_refused() {
    for (name, elements, said) in [
        ("rope_factors_long.weight", 16, "tensor rope_factors_short.weight is missing"),
        ("rope_factors_short.weight", 16, "tensor rope_factors_long.weight is missing"),
        ("rope_factors_short.weight", 15, "rope_factors_short.weight is not 16 positive numbers"),
    ] {
        let (mut writer, mut file) = (LLAMA.writer(), Vec::new());
        writer.tensor(name, &[elements], Quant::F32).expect("a tensor");
        synthetic::write(&writer, &mut file, 5, |_| Ok(())).expect("memory");
        let error = Network::new(file).expect_err(name).to_string();
        assert!(error.contains(said), "{error}");
    }
    let error = with("llama.rope.scaling.type", Field::Text("longrope")).expect_err("no factors");
    assert!(error.contains("'longrope'") && error.contains("rope_factors_short"), "{error}");
    let error = with("llama.rope.scaling.original_context_length", Field::F32(-4.0));
    assert!(error.is_ok(), "nobody reads it without factors");
}

/// A plain Llama with one more key.
fn with(key: &str, field: Field<'_>) -> Result<Network<Vec<u8>>, String> {
    one_more(Tiny { window: None, ..LLAMA }, key, field)
}

fn one_more(tiny: Tiny, key: &str, field: Field<'_>) -> Result<Network<Vec<u8>>, String> {
    let mut writer = tiny.writer();
    writer.put(key, field).expect("a key");
    let mut file = Vec::new();
    synthetic::write(&writer, &mut file, 5, |_| Ok(())).expect("memory");
    Network::new(file).map_err(|error| error.to_string())
}

#[test]
fn keys_that_are_absurd_are_errors_with_key_and_value() {
    for (key, field, value) in [
        ("llama.attention.sliding_window", Field::U32(u32::MAX), "4294967295"),
        ("llama.attention.sliding_window", Field::F32(-1.0), "-1"),
        ("llama.attention.sliding_window_pattern", Field::U32(5000), "5000"),
        ("llama.attention.sliding_window_pattern", Field::U32(0), "0"),
        ("llama.attn_logit_softcapping", Field::F32(-3.0), "-3"),
        ("llama.attn_logit_softcapping", Field::Text("x"), "x"),
        ("llama.final_logit_softcapping", Field::F32(f32::NAN), "NaN"),
        ("llama.embedding_scale", Field::F32(12.5), "12.5"),
        ("llama.residual_scale", Field::F32(f32::INFINITY), "inf"),
        ("llama.attention.scale", Field::F32(0.5), "0.5"),
        ("llama.logit_scale", Field::F32(-8.0), "-8"),
        ("llama.rope.scaling.factor", Field::F32(-2.0), "-2"),
        ("llama.rope.scaling.type", Field::Text("dynamic"), "'dynamic'"),
    ] {
        let error = with(key, field).expect_err(key);
        let named = error.contains(key) || key.ends_with("scaling.type");
        assert!(named && error.contains(value), "{key}: {error}");
    }
}

#[test]
fn mixtures_that_weigh_in_other_ways_or_lack_tensors_are_errors_with_their_names() {
    let tiny = |architecture: &'static str| {
        let known = FAMILIES.into_iter().find(|tiny| tiny.architecture == architecture);
        Tiny { window: None, ..known.expect(architecture) }
    };
    for (architecture, key, field, said) in [
        ("gpt-oss", "expert_gating_func", Field::U32(2), ["(2)", "only 3 (softmax of the chosen)"]),
        ("gpt-oss", "expert_weights_scale", Field::F32(2.5), ["(2.5)", "only 1"]),
        (
            "gpt-oss",
            "attention.sliding_window",
            Field::U32(u32::MAX),
            ["4294967295", "not a whole number"],
        ),
        ("gpt-oss", "rope.scaling.yarn_beta_fast", Field::F32(-1.0), ["-1", "not a number"]),
        ("olmoe", "expert_gating_func", Field::U32(3), ["(3)", "only 1 (softmax)"]),
        ("olmoe", "expert_weights_norm", Field::Bool(true), ["(true)", "only false"]),
        ("granitemoe", "expert_group_count", Field::U32(4), ["(4)", "only 1"]),
        ("granitemoe", "interleave_moe_layer_step", Field::U32(2), ["(2)", "only 1"]),
    ] {
        let key = format!("{architecture}.{key}");
        let error = one_more(tiny(architecture), &key, field);
        let Err(error) = error else { panic!("{key}: it is no error") };
        let named = said.iter().all(|part| error.contains(part));
        assert!(error.contains(&key) && named, "{key}: {error}");
    }
    for (architecture, tensor, other) in [
        ("gpt-oss", "blk.1.ffn_up_exps.bias", "blk.1.ffn_uq_exps.bias"),
        ("gpt-oss", "blk.0.ffn_gate_inp.bias", "blk.0.ffn_gate_imp.bias"),
        ("gpt-oss", "blk.1.attn_sinks.weight", "blk.1.attn_sinkz.weight"),
        ("gpt-oss", "blk.1.post_attention_norm.weight", "blk.1.past_attention_norm.weight"),
        ("olmoe", "blk.0.attn_q_norm.weight", "blk.0.attn_q_morm.weight"),
        ("olmoe", "blk.1.attn_k_norm.weight", "blk.1.attn_k_morm.weight"),
    ] {
        let mut file = tiny(architecture).file();
        let at = file.windows(tensor.len()).position(|bytes| bytes == tensor.as_bytes());
        let at = at.expect(tensor);
        file[at..at + tensor.len()].copy_from_slice(other.as_bytes());
        let error = Network::new(file).expect_err(tensor).to_string();
        assert!(error.contains(tensor) || error.contains(other), "{tensor}: {error}");
    }
}

#[test]
fn experts_that_every_token_meets_are_refused_where_the_family_has_none() {
    for tiny in FAMILIES.into_iter().filter(|tiny| tiny.architecture == "granitemoe") {
        let (mut writer, mut file) = (tiny.writer(), Vec::new());
        let name = "blk.1.ffn_up_shexp.weight";
        writer.tensor(name, &[tiny.hidden, 64], Quant::Q8_0).expect("a tensor");
        synthetic::write(&writer, &mut file, 5, |_| Ok(())).expect("memory");
        let error = Network::new(file).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains("unknown in this architecture"), "{error}");
    }
}

#[test]
fn what_writes_no_text_is_refused_by_name() {
    for (key, field, what) in [
        ("llama.pooling_type", Field::U32(1), "embedding model"),
        ("llama.pooling_type", Field::U32(3), "embedding model"),
        ("llama.pooling_type", Field::U32(4), "reranker"),
        ("llama.attention.causal", Field::Bool(false), "embedding model"),
    ] {
        let error = with(key, field).expect_err(key);
        assert!(error.contains("'llama'") && error.contains(what), "{error}");
    }
    for (architecture, what) in [
        ("bert", "embedding model"),
        ("nomic-bert", "embedding model"),
        ("gemma-embedding", "embedding model"),
        ("clip", "vision"),
        ("qwen2vl", "vision"),
        ("deepseek2", "latent attention"),
        ("llama4", "temperatures"),
        ("mamba", "expected one of"),
    ] {
        let mut writer = Writer::new();
        writer.put("general.architecture", Field::Text(architecture)).expect("a key");
        let mut file = Vec::new();
        writer.write(&mut file, |_, _| Ok(())).expect("memory");
        let error = Network::new(file).expect_err(architecture).to_string();
        assert!(error.contains(&format!("'{architecture}'")) && error.contains(what), "{error}");
    }
}
