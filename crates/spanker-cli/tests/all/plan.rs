// SPDX-License-Identifier: Apache-2.0
//! `spanker plan`, `simulate` and `profiles` as a user runs them: numbers, JSON, files, exit codes.

use serde_json::{Value, json};

use crate::gguf::Gguf;
use crate::scratch::{Scratch, number};

/// The best candidate of `spanker plan`.
fn best_of(scratch: &Scratch, line: &str) -> Value {
    scratch.json(&format!("plan {line}"))["candidates"][0].clone()
}

fn list<'a>(value: &'a Value, field: &str) -> &'a Vec<Value> {
    value[field].as_array().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// The part of the feed-forward network that each card of the first stage has.
fn shares(candidate: &Value) -> Vec<f64> {
    let shares = list(&candidate["stages"][0], "shares").iter();
    shares.map(|share| share.as_f64().expect("a number")).collect()
}

/// Everything that JSON promises about one candidate.
fn check_candidate(line: &str, candidate: &Value) {
    for field in ["tensor_ways", "pipeline_stages", "replicas", "cards"] {
        assert!(candidate[field].as_u64().is_some_and(|count| count > 0), "{line}: {field}");
    }
    for field in ["decode_ms_per_token", "tokens_per_second", "ttft_ms", "load_ms"] {
        assert!(number(candidate, field) > 0.0, "{line}: {field} in {candidate}");
    }
    assert!(candidate["strategy"].is_string(), "{line}");
    let terms = ["memory_ms", "compute_ms", "communication_ms", "fixed_ms"];
    let terms: f64 = terms.iter().map(|term| number(&candidate["terms"], term)).sum();
    let total = number(candidate, "decode_ms_per_token");
    let sum = terms + number(candidate, "waiting_ms");
    assert!((sum / total - 1.0).abs() < 1e-9, "{line}: {sum} is not {total}");
    let used = list(candidate, "memory_bytes_per_card");
    let capacities = list(candidate, "capacity_bytes_per_card");
    assert_eq!(used.len() as u64, candidate["cards"].as_u64().unwrap(), "{line}");
    assert_eq!(used.len(), capacities.len(), "{line}");
    let within = |(used, capacity): (&Value, &Value)| used.as_u64() <= capacity.as_u64();
    assert_eq!(candidate["fits"], used.iter().zip(capacities).all(within), "{line}: {candidate}");
}

/// What an objective minimises.
fn cost(objective: &str, candidate: &Value) -> f64 {
    match objective {
        "throughput" => -number(candidate, "tokens_per_second"),
        "ttft" => number(candidate, "ttft_ms"),
        _ => number(candidate, "decode_ms_per_token"),
    }
}

#[test]
fn four_cards_on_a_ring_are_best_tensor_parallel() {
    let scratch = Scratch::new(&[]);
    let line = "plan tinyllama-1.1b --quant q4_0 --profile rev-a --cards 4 --topology ring";
    let report = scratch.json(line);
    assert_eq!((&report["version"], &report["fits"]), (&json!(1), &json!(true)));
    let best = &report["candidates"][0];
    assert_eq!((&best["tensor_ways"], &best["pipeline_stages"]), (&json!(4), &json!(1)));
    assert!((12.8..13.4).contains(&number(best, "tokens_per_second")), "{best}");
    let plain = list(&report, "candidates").iter().find(|c| c["strategy"] == "pipeline");
    let plain = number(plain.expect("layer-split is listed"), "tokens_per_second");
    assert!((3.38..3.48).contains(&plain), "{plain}");
    let text = scratch.text(&format!("{line} --explain"));
    for words in [
        "tensor-parallel over 4 cards",
        "13.0 tokens/s",
        "layer-split",
        "would give 3.39 tokens/s",
        "What binds is memory bandwidth: 98 %",
        "3.8 times as fast",
        "Next comes",
        "memory bandwidth and compute together +9.7 %",
        "rests on: memory 2 GB/s published",
    ] {
        assert!(text.contains(words), "'{words}' is not in {text}");
    }
}

#[test]
fn eight_cards_and_the_published_weights_agree_with_the_formulas() {
    let scratch = Scratch::new(&[]);
    for (line, low, high) in [
        ("tinyllama-1.1b --cards 1", 3.38, 3.46),
        ("tinyllama-1.1b --cards 2", 6.6, 6.9),
        ("tinyllama-1.1b --cards 8", 23.5, 26.0),
        ("llama-2-7b --cards 8", 4.0, 4.3),
    ] {
        let rate = number(&best_of(&scratch, line), "tokens_per_second");
        assert!((low..high).contains(&rate), "{line}: {rate}");
    }
}

/// What a plan says that does not fit, which is exit code 3.
fn unfit(scratch: &Scratch, line: &str) -> String {
    let output = scratch.run(line);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{line}: {errors}");
    assert!(errors.contains("does not fit on"), "{errors}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_model_that_does_not_fit_says_by_how_much_and_what_would_do() {
    let scratch = Scratch::new(&[]);
    let line = "plan llama-2-70b --quant q4_0 --profile rev-a --cards 8";
    let report = unfit(&scratch, &format!("{line} --json"));
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["fits"], false);
    assert_eq!(report["remedies"]["cards"], 10);
    assert!(number(&report["remedies"], "over_bytes") > 5e8, "{}", report["remedies"]);
    assert!(number(&report["remedies"], "needed_bytes") > 38.8e9);
    assert!(list(&report, "candidates").iter().all(|candidate| candidate["fits"] == false));
    let text = unfit(&scratch, line);
    assert!(text.contains("it does not fit: card") && text.contains("over its memory"), "{text}");
    assert!(text.contains("10 cards (2 more of rev-a)"), "{text}");
    // Smaller types could be planned and not run.
    assert!(report["remedies"]["quant"].is_null() && !text.contains("weights as q"), "{text}");

    let failed = scratch.run(&format!("{line} --out plan.json"));
    let errors = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(3), "{errors}");
    assert!(errors.contains("plan.json was not written"), "{errors}");
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
    // What was said to be enough is enough, and one less is not.
    assert_eq!(best_of(&scratch, "llama-2-70b --cards 10")["fits"], true);
    unfit(&scratch, "plan llama-2-70b --cards 9");
}

#[test]
fn a_context_that_cannot_fit_names_one_that_does() {
    let scratch = Scratch::new(&[]);
    let report = unfit(&scratch, "plan llama-2-7b --cards 1 --context 4096 --json");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["fits"], false);
    let context = report["remedies"]["context"].as_u64().expect("a context");
    assert!(context < 4096);
    scratch.text(&format!("plan llama-2-7b --cards 1 --ctx-size {context}"));
    unfit(&scratch, &format!("plan llama-2-7b --cards 1 --context {}", context + 1));
}

#[test]
fn odd_numbers_of_cards_and_unequal_cards_get_uneven_shares() {
    let scratch = Scratch::new(&[]);
    let rate = |line: &str| number(&best_of(&scratch, line), "tokens_per_second");
    for cards in [3, 5] {
        let best = best_of(&scratch, &format!("tinyllama-1.1b --cards {cards}"));
        assert_eq!(best["cards"], cards, "{best}");
        let all = shares(&best);
        assert!((all.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{all:?}");
        assert!(all.iter().all(|share| (share * f64::from(cards) - 1.0).abs() < 0.05), "{all:?}");
        let fewer = rate(&format!("tinyllama-1.1b --cards {}", cards - 1));
        assert!(number(&best, "tokens_per_second") > fewer, "{cards} cards");
    }
    let best = best_of(&scratch, "tinyllama-1.1b --profile rev-a*2,rev-a@1GB/s");
    let expected = [0.4, 0.4, 0.2];
    assert_eq!(best["cards"], 3);
    for (share, expected) in shares(&best).iter().zip(expected) {
        assert!((share - expected).abs() < 0.02, "{best}");
    }
    let between = number(&best, "tokens_per_second");
    assert!(
        between > rate("tinyllama-1.1b --cards 2") && between < rate("tinyllama-1.1b --cards 3")
    );
    // The order of the cards is not what counts.
    let turned = best_of(&scratch, "tinyllama-1.1b --profile rev-a@1GB/s,rev-a*2");
    assert!((number(&turned, "tokens_per_second") / between - 1.0).abs() < 0.01);
}

#[test]
fn a_card_that_hurts_is_left_out_and_named() {
    let scratch = Scratch::new(&[]);
    let line = "tinyllama-1.1b --profile rev-a*2,rev-a@5MB/s";
    assert_eq!(best_of(&scratch, line)["card_ids"], json!([0, 1]));
    let text = scratch.text(&format!("plan {line}"));
    assert!(text.contains("would not help: cards [2]"), "{text}");
    // Links that take longer than they save leave one card.
    let profile = include_str!("../../../spanker-topology/profiles/rev-a.toml");
    scratch.put("far.toml", profile.replacen("\"2 us\"", "\"500 ms\"", 1).as_bytes());
    let alone = best_of(&scratch, "tinyllama-1.1b --profile far.toml --cards 4");
    assert_eq!((&alone["strategy"], &alone["cards"]), (&json!("one-card"), &json!(1)));
}

#[test]
fn every_objective_on_every_shape_keeps_the_promises_of_its_json() {
    let scratch = Scratch::new(&[]);
    for objective in ["latency", "throughput", "ttft"] {
        for shape in ["ring", "switch", "star", "mesh", "point-to-point"] {
            let cards = if shape == "point-to-point" { 2 } else { 3 };
            let line = format!(
                "plan smollm2-360m --cards {cards} --topology {shape} --objective {objective} --context 512"
            );
            let report = scratch.json(&line);
            assert_eq!(report["version"], 1);
            assert_eq!(report["cluster"]["topology"], shape);
            assert_eq!(report["request"]["objective"], objective);
            let candidates = list(&report, "candidates");
            candidates.iter().for_each(|candidate| check_candidate(&line, candidate));
            let fitting: Vec<f64> = candidates
                .iter()
                .filter(|candidate| candidate["fits"] == true)
                .map(|candidate| cost(objective, candidate))
                .collect();
            // Of layouts that give the first token equally early, the one that decodes faster comes first.
            let slack = if objective == "ttft" { 1.005 } else { 1.0 };
            let sorted = fitting.windows(2).all(|pair| pair[0] <= pair[1] * slack);
            assert!(sorted, "{line}: {fitting:?}");
            let explained = &report["explanation"];
            assert!(number(explained, "low_ms") <= number(explained, "high_ms"), "{line}");
            assert!(scratch.text(&format!("{line} --explain")).contains("What binds is"), "{line}");
        }
    }
}

#[test]
fn what_is_asked_for_changes_the_answer_as_one_expects() {
    let scratch = Scratch::new(&[]);
    let best = |flags: &str| best_of(&scratch, &format!("tinyllama-1.1b --cards 2 {flags}"));
    let time = |flags: &str| number(&best(flags), "decode_ms_per_token");
    assert!(time("--quant q8_0") > 1.5 * time("--quant q4_0"));
    assert!(time("--at 2000") > time("--at 0"));
    assert!(number(&best("--prompt 64"), "ttft_ms") < number(&best("--prompt 512"), "ttft_ms"));
    let rate = |flags: &str| number(&best(flags), "tokens_per_second");
    assert!(rate("--batch 4") > rate("--batch 1"));
    let memory = |flags: &str| best(flags)["memory_bytes_per_card"][0].as_u64().unwrap();
    assert!(memory("--context 2048") > memory("--context 64"));
    // Throughput serves one sequence for each card unless told otherwise.
    let report = scratch.json("plan tinyllama-1.1b --cards 2 --objective throughput");
    assert_eq!(report["request"]["sequences"], 2);
    let report =
        scratch.json("plan tinyllama-1.1b --cards 2 --objective throughput --concurrency 5");
    assert_eq!(report["request"]["sequences"], 5);
}

#[test]
fn a_tenth_more_of_what_a_plan_uses_is_worth_something_on_every_shape() {
    let scratch = Scratch::new(&[]);
    for shape in ["ring", "switch", "star", "mesh"] {
        let report = scratch.json(&format!("plan tinyllama-1.1b --cards 4 --topology {shape}"));
        let gains = &report["explanation"]["gain_percent_from_a_tenth_more"];
        for resource in ["memory_bandwidth", "link_bandwidth", "link_latency"] {
            assert!(number(gains, resource) > 0.0, "{shape}: {resource} in {gains}");
        }
    }
}

const LINE_OF_THREE: &str = "cards = [{ profile = 'rev-a', count = 3 }]
[[links]]\nbetween = [0, 1]\n[[links]]\nbetween = [1, 2]\nbandwidth = '480 MB/s'\nlatency = '3 us'\n";

#[test]
fn cluster_files_describe_cards_links_and_what_they_share() {
    let mixed = "topology = 'switch'\n[[cards]]\nprofile = 'rev-a'\ncount = 2
[[cards]]\nprofile = 'own.toml'\nmemory_bandwidth = '1 GB/s'\nmemory_capacity = '8 GiB'\n";
    let shared = "cards = [{ profile = 'rev-a', count = 3 }]
[[links]]\nbetween = [0, 1]\nshared = 'b'\n[[links]]\nbetween = [1, 2]\nshared = 'b'
[[shared]]\nname = 'b'\nbandwidth = '20 MB/s'\n";
    let own = include_str!("../../../spanker-topology/profiles/rev-a.toml");
    let scratch = Scratch::new(&[
        ("line.toml", LINE_OF_THREE),
        ("in/mixed.toml", mixed),
        ("in/own.toml", own),
        ("shared.toml", shared),
    ]);
    let report = scratch.json("plan tinyllama-1.1b --cluster line.toml");
    assert_eq!(report["cluster"]["topology"], "links");
    assert_eq!(report["candidates"][0]["cards"], 3);
    // A profile's path is from where the cluster file is.
    let best = best_of(&scratch, "tinyllama-1.1b --cluster in/mixed.toml");
    assert_eq!(best["capacity_bytes_per_card"][2], 8u64 << 30);
    assert!(shares(&best)[2] < 0.25, "{best}");
    let ring = scratch.json("plan tinyllama-1.1b --cluster in/mixed.toml --topology ring");
    assert_eq!(ring["cluster"]["topology"], "ring");
    let links = |line: &str| number(&best_of(&scratch, line)["terms"], "communication_ms");
    let (free, tight) = (
        links("tinyllama-1.1b --cluster line.toml"),
        links("tinyllama-1.1b --cluster shared.toml"),
    );
    assert!(tight > 3.0 * free, "{tight} against {free}");
}

#[test]
fn fits_calibrate_cards_and_links() {
    let link = "ranks,bytes,microseconds\n2,8192,11.0\n4,8192,14.7\n2,65536,13.0\n4,65536,17.8
2,1048576,40.8\n4,1048576,49.8\n2,16777216,128\n4,16777216,184\n";
    let card =
        "model,quant,cards,milliseconds\nllama-2-7b,q4_0,1,101.06\nllama-2-7b,q4_0,2,61.50\n";
    let scratch = Scratch::new(&[("link.csv", link), ("card.csv", card)]);
    scratch.text("fit link --samples link.csv --out link.toml");
    scratch.text("fit card --samples card.csv --out card.toml");
    let alone = best_of(&scratch, "llama-2-7b --profile h200-nvlink --card card.toml");
    assert!((number(&alone, "decode_ms_per_token") / 101.06 - 1.0).abs() < 0.02, "{alone}");
    let four = best_of(&scratch, "llama-2-7b --profile h200-nvlink --cards 4 --card card.toml");
    assert!((36.0..46.0).contains(&number(&four, "decode_ms_per_token")), "{four}");
    // These links are hundreds of times as fast as the profile's, whatever the shape; what is left is what cards read
    // and write in their own memory.
    for shape in ["ring", "switch", "star", "mesh"] {
        let line = format!("smollm2-135m --cards 4 --topology {shape} --objective ttft");
        let prefill = |flags: &str| {
            let report = scratch.json(&format!("plan {line} {flags}"));
            let all = list(&report, "candidates").iter();
            let gather = all.clone().find(|c| c["strategy"] == "tensor-gather").expect("gather");
            number(&gather["prefill_terms"], "communication_ms")
        };
        let (before, after) = (prefill(""), prefill("--link link.toml"));
        assert!(after < before / 2.0, "{shape}: {after} against {before}");
    }
    let text =
        scratch.text("plan llama-2-7b --cards 2 --card card.toml --link link.toml --explain");
    assert!(text.contains("fitted (confidence medium)"), "{text}");
}

#[test]
fn gguf_files_bring_their_own_sizes_and_types() {
    let scratch = Scratch::new(&[]);
    scratch.put("tiny.gguf", &Gguf::GOOD.bytes());
    let report = scratch.json("plan tiny.gguf --cards 2");
    assert_eq!((&report["model"]["name"], &report["model"]["layers"]), (&json!("tiny"), &json!(2)));
    assert_eq!(report["model"]["source"], "gguf");
    let stored: u64 = Gguf::GOOD.tensors().iter().map(|tensor| tensor.3).sum();
    assert_eq!(report["model"]["weight_bytes"], stored);
    let larger = scratch.json("plan tiny.gguf --cards 2 --quant f16");
    assert!(number(&larger["model"], "weight_bytes") > 3.0 * stored as f64);
    scratch.text("plan tiny.gguf --cards 2 --out plan.json");
    assert!(scratch.text("simulate plan.json").contains("a token: predicted"));
}

#[test]
fn gguf_files_that_are_cut_wrong_or_hostile_are_refused_by_name() {
    let scratch = Scratch::new(&[]);
    let good = Gguf::GOOD.bytes();
    let mut many = good.clone();
    many[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    for (name, bytes, named) in [
        ("empty.gguf", Vec::new(), "magic"),
        ("text.gguf", b"not a model at all".to_vec(), "'not '"),
        ("header.gguf", good[..100].to_vec(), "ends at byte 100"),
        ("data.gguf", good[..good.len() - 64].to_vec(), "beyond the file"),
        ("many.gguf", many, "18446744073709551615"),
        ("missing.gguf", Gguf { without: "ffn_up", ..Gguf::GOOD }.bytes(), "ffn_up"),
        ("norm.gguf", Gguf { without: "output_norm", ..Gguf::GOOD }.bytes(), "output_norm"),
        ("heads.gguf", Gguf { heads: 5, ..Gguf::GOOD }.bytes(), "5"),
        ("layers.gguf", Gguf { layers: 0, ..Gguf::GOOD }.bytes(), "block_count"),
    ] {
        scratch.put(name, &bytes);
        let error = scratch.error(1, &format!("plan {name} --out plan.json"));
        assert!(error.contains(name) && error.contains(named), "{name}: {error}");
    }
    assert!(!scratch.names().contains(&"plan.json".to_owned()));
}

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048}"#;

#[test]
fn a_config_json_is_the_model_that_it_describes() {
    let scratch = Scratch::new(&[("tiny/config.json", CONFIG)]);
    let rate = |line: &str| number(&best_of(&scratch, line), "tokens_per_second");
    let built_in = rate("tinyllama-1.1b --cards 3");
    for path in ["tiny/config.json", "tiny"] {
        assert!((rate(&format!("{path} --cards 3")) / built_in - 1.0).abs() < 1e-9, "{path}");
    }
    let report = scratch.json("plan tiny --cards 1");
    assert_eq!(report["model"]["source"], "config.json");
    for (from, to, named) in [
        ("\"hidden_size\": 2048,", "", "hidden_size: missing"),
        ("32000", "-1", "vocab_size: -1"),
        ("32000", "1e99", "vocab_size"),
        ("22", "99999999999", "num_hidden_layers: 99999999999"),
        ("LlamaForCausalLM", "GPT2LMHeadModel", "GPT2LMHeadModel"),
        ("{", "", "bad.json"),
    ] {
        scratch.put("bad.json", CONFIG.replacen(from, to, 1).as_bytes());
        let error = scratch.error(1, "plan bad.json");
        assert!(error.contains("bad.json") && error.contains(named), "{from}: {error}");
    }
}

#[test]
fn simulated_plans_agree_with_their_predictions() {
    let scratch = Scratch::new(&[]);
    for line in [
        "tinyllama-1.1b --cards 4",
        "tinyllama-1.1b --cards 1",
        "tinyllama-1.1b --cards 3 --topology switch --batch 2",
        "tinyllama-1.1b --profile rev-a*2,rev-a@1GB/s",
        "tinyllama-1.1b --cards 4 --topology mesh --at 1000",
        "tinyllama-1.1b --cards 4 --objective throughput",
        "tinyllama-1.1b --cards 4 --topology star --objective throughput",
        "llama-3-8b --cards 4 --topology star --objective throughput --concurrency 8",
        "llama-2-7b --cards 3 --objective ttft",
    ] {
        let best = best_of(&scratch, &format!("{line} --copies --out plan.json"));
        let run = scratch.json("simulate plan.json --tokens 8");
        let off = number(&run, "difference_percent");
        assert!(off.abs() < 1.0, "{line}: {off} %");
        let predicted = number(&run, "predicted_ms_per_token");
        // The prediction is for the middle of the tokens that were simulated.
        assert!((predicted / number(&best, "decode_ms_per_token") - 1.0).abs() < 0.01, "{line}");
        assert_eq!(list(&run, "tokens_ms").len(), 8);
    }
    let best = best_of(&scratch, "llama-2-7b --cards 3 --objective ttft --out plan.json");
    let run = scratch.json("simulate plan.json --prompt");
    let (simulated, predicted) = (number(&run, "simulated_ttft_ms"), number(&best, "ttft_ms"));
    assert!((simulated / predicted - 1.0).abs() < 0.01, "{simulated} against {predicted}");
    assert!(scratch.text("simulate plan.json").contains("a token: predicted"));
}

#[test]
fn copies_that_serve_unequal_numbers_are_simulated_as_predicted() {
    let scratch = Scratch::new(&[]);
    for concurrency in [3, 5] {
        scratch.text(&format!(
            "plan llama-2-7b --quant q4_k --profile what-if-3g125 --cards 6 --topology switch \
             --objective throughput --concurrency {concurrency} --copies --out plan.json"
        ));
        let run = scratch.json("simulate plan.json --tokens 8");
        let off = number(&run, "difference_percent");
        assert!(off.abs() < 1.0, "{concurrency} sequences: {off} %");
    }
}

#[test]
fn plans_of_several_copies_are_proposed_only_when_they_are_asked_for() {
    let scratch = Scratch::new(&[]);
    let line = "plan tinyllama-1.1b --cards 4 --topology star --objective throughput";
    let report = scratch.json(&format!("{line} --out plan.json"));
    let candidates = list(&report, "candidates");
    assert_eq!(candidates[0]["strategy"], "replicas", "the best of all comes first: {report}");
    for candidate in candidates {
        let one = candidate["replicas"] == 1;
        assert_eq!(candidate["runnable"], one, "{candidate}");
        assert_eq!(candidate["not_runnable_because"].is_null(), one, "{candidate}");
    }
    let place = report["run"]["candidate"].as_u64().expect("a candidate can be run");
    let proposed = &candidates[place as usize];
    assert_eq!(proposed["runnable"], true);
    assert!(candidates[..place as usize].iter().all(|better| better["runnable"] == false));
    // A run has one sequence, so it does not reach what four together do.
    assert_eq!(report["run"]["sequences"], 1);
    let alone = number(&report["run"], "tokens_per_second");
    assert!(alone < number(proposed, "tokens_per_second"), "{report}");
    let copies = |scratch: &Scratch| {
        let saved: Value = serde_json::from_str(&scratch.read("plan.json")).expect("a plan");
        list(&saved["layout"], "replicas").len()
    };
    assert_eq!(copies(&scratch), 1);
    let text = scratch.text(&format!("{line} --out plan.json"));
    assert!(text.contains("for spanker serve"), "{text}");
    assert!(text.contains("spanker run --plan plan.json"), "{text}");
    let starred: Vec<&str> = text.lines().filter(|line| line.starts_with('*')).collect();
    assert!(starred.len() == 1 && !starred[0].contains("replicas"), "{text}");
    let text = scratch.text(&format!("{line} --copies --out plan.json"));
    assert!(copies(&scratch) > 1 && text.contains("'spanker serve' runs this"), "{text}");
    assert!(!text.contains("spanker run --plan"), "{text}");
}

#[test]
fn a_killed_card_leads_to_a_new_plan_that_the_trace_shows() {
    let scratch = Scratch::new(&[]);
    scratch.text("plan tinyllama-1.1b --cards 4 --out plan.json");
    let line = "simulate plan.json --tokens 3 --fail card2@50ms --trace trace.json";
    let run = scratch.json(line);
    let told: Vec<&str> =
        list(&run, "incidents").iter().map(|i| i["what"].as_str().expect("text")).collect();
    assert_eq!(told[0], "card 2 dies");
    assert!(told[1].contains("new plan") && told[1].contains("[0, 1, 3]"), "{told:?}");
    assert_eq!(list(&run, "tokens_ms").len(), 3);
    assert!(list(&run, "tokens_ms").is_sorted_by(|a, b| a.as_f64() <= b.as_f64()));
    // After the loss three cards decode as fast as a plan for three.
    let times = list(&run, "tokens_ms");
    let late = times[2].as_f64().unwrap() - times[1].as_f64().unwrap();
    let three = number(&best_of(&scratch, "tinyllama-1.1b --cards 3"), "decode_ms_per_token");
    assert!((0.95..1.2).contains(&(late / three)), "{late} against {three}");

    let trace: Value = serde_json::from_str(&scratch.read("trace.json")).expect("JSON");
    let events = list(&trace, "traceEvents");
    let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    let ends = spans.iter().map(|e| number(e, "ts") + number(e, "dur")).fold(0.0, f64::max);
    assert!((ends / 1e3 / number(&run, "end_ms") - 1.0).abs() < 1e-6);
    let last = spans.iter().filter(|e| e["tid"] == 2).map(|e| number(e, "ts") + number(e, "dur"));
    assert!(last.fold(0.0, f64::max) <= 50_000.001, "card 2 works after its death");
    assert!(
        spans.iter().any(|e| e["name"] == "reload") && spans.iter().any(|e| e["name"] == "stall")
    );
    let named = events.iter().filter(|e| e["ph"] == "M" && e["name"] == "thread_name").count();
    assert_eq!(named, 4);
    assert!(events.iter().any(|e| e["ph"] == "i" && e["name"] == "card 2 dies"));
    let text = scratch.text(line);
    assert!(text.contains("new plan: tensor-gather on cards [0, 1, 3]"), "{text}");
}

#[test]
fn losses_that_cannot_be_survived_fail_and_say_why() {
    let scratch = Scratch::new(&[]);
    scratch.text("plan llama-2-7b --cards 2 --out two.json");
    let failed = scratch.run("simulate two.json --fail card1@10ms --json");
    let errors = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(1), "{errors}");
    assert!(errors.contains("does not fit on the 1 cards"), "{errors}");
    let run: Value = serde_json::from_slice(&failed.stdout).expect("what happened, as JSON");
    assert!(list(&run, "tokens_ms").is_empty(), "{run}");
    scratch.text("plan tinyllama-1.1b --cards 2 --out two.json");
    let all = scratch.run("simulate two.json --fail card0@1ms --fail card1@1ms");
    assert_eq!(all.status.code(), Some(1));
    // A ring without one of its links is a line.
    scratch.text("plan tinyllama-1.1b --cards 3 --out three.json");
    let run = scratch.json("simulate three.json --fail link0-1@5ms --tokens 2");
    assert_eq!(run["incidents"][0]["what"], "link 0-1 dies");
    assert_eq!(list(&run, "tokens_ms").len(), 2);
}

#[test]
fn trouble_slows_a_run_and_the_same_seed_repeats_it() {
    let scratch = Scratch::new(&[]);
    scratch.text("plan tinyllama-1.1b --cards 4 --out plan.json");
    let time = |flags: &str| {
        number(&scratch.json(&format!("simulate plan.json {flags}")), "simulated_ms_per_token")
    };
    let calm = time("");
    assert!(time("--slow card1*1.5") > 1.3 * calm);
    assert!(time("--ber 1e-4") > calm);
    assert!(time("--jitter 0.1 --seed 1") > 1.01 * calm);
    let same = |left: f64, right: f64| (left - right).abs() < 1e-12;
    assert!(same(time("--jitter 0.1 --seed 1"), time("--jitter 0.1 --seed 1")));
    assert!(!same(time("--jitter 0.1 --seed 1"), time("--jitter 0.1 --seed 2")));
    let line = "plan llama-3-8b --profile rev-a*2,rev-a@1GB/s*2 --objective throughput";
    assert_eq!(scratch.json(line), scratch.json(line));
}

#[test]
fn bad_requests_exit_with_2_and_name_the_value() {
    let scratch = Scratch::new(&[]);
    scratch.text("plan tinyllama-1.1b --cards 2 --out plan.json");
    for (flags, named) in [
        ("--cards 0", "--cards 0"),
        ("--cards -1", "-1"),
        ("--cards 257", "--cards 257"),
        ("--cards 99999999999999999999", "99999999999999999999"),
        ("--cards NaN", "NaN"),
        ("--context 0", "context of 0"),
        ("--context 99999999999", "99999999999"),
        ("--batch 0", "batch of 0"),
        ("--batch 70000", "70000"),
        ("--prompt 0", "prompt of 0"),
        ("--prompt 5000", "prompt of 5000"),
        ("--at 2048", "position 2048"),
        ("--kv q4_1", "q4_1"),
        ("--kv f32", "expected one of: f16, q8_0, q4_0"),
        ("--quant q9_z", "q9_z"),
        ("--objective fast", "fast"),
        ("--topology torus", "torus"),
        ("--topology links", "--cluster"),
        ("--topology mesh --cards 8", "mesh of 8"),
        ("--topology point-to-point --cards 3", "point-to-point of 3"),
        ("--profile nope", "nope"),
        ("--profile rev-a@-1GB/s", "-1GB/s"),
        ("--profile rev-a@0", "'0'"),
        ("--profile rev-a@NaN", "NaN"),
        ("--profile rev-a*0", "rev-a*0"),
        ("--profile rev-a*2 --cards 3", "--cards 3"),
        ("--profile rev-a*200,rev-a*200", "400"),
        ("--profile rev-a,rev-a-gbe-only --topology ring", "rev-a-gbe-only"),
        ("--concurrency 4 --batch 2", "--batch"),
        ("--cluster a.toml --cards 3", "--cards"),
    ] {
        let error = scratch.error(2, &format!("plan tinyllama-1.1b {flags} --out new.json"));
        assert!(error.contains(named), "{flags}: {error}");
    }
    let error = scratch.error(2, "plan gpt-5");
    assert!(error.contains("unknown model 'gpt-5'") && error.contains("tinyllama-1.1b"), "{error}");
    for (flags, named) in [
        ("--tokens 0", "0 tokens"),
        ("--tokens 999999", "999999"),
        ("--jitter nan", "NaN"),
        ("--jitter 11", "11"),
        ("--ber 1", "bit error rate of 1"),
        ("--fail card9@1ms", "card 9"),
        ("--fail card1", "card1"),
        ("--fail card1@-1ms", "-1ms"),
        ("--fail link0-9@1ms", "0-9"),
        ("--slow card0*0", "0 times"),
        ("--slow card0*nan", "NaN"),
        ("--deadline 1e300", "1e300"),
    ] {
        let error = scratch.error(2, &format!("simulate plan.json {flags} --trace new.json"));
        assert!(error.contains(named), "{flags}: {error}");
    }
    assert_eq!(scratch.names(), ["plan.json"]);
}

#[test]
fn cluster_files_and_profiles_that_make_no_sense_are_refused_by_name() {
    let two = "cards = [{ profile = 'rev-a', count = 2 }]\n";
    let link = |rest: &str| format!("{two}[[links]]\n{rest}\n");
    let profile = include_str!("../../../spanker-topology/profiles/rev-a.toml");
    let scratch = Scratch::new(&[]);
    for (text, named) in [
        (String::new(), "cards"),
        ("cards = []".into(), "0 cards"),
        ("cards = [{ profile = 'rev-a', count = 9999999999 }]".into(), "9999999999"),
        ("cards = [{ profile = 'rev-a', memory_capacity = '1 MB' }]".into(), "1 MB"),
        (link("between = [0, 7]"), "no card 7"),
        (link("between = [0, -1]"), "-1"),
        (link("between = [0, 0]"), "0-0"),
        (link("between = [0, 1]\none_way = true"), "cannot reach"),
        (link("between = [0, 1]\nbandwidth = '-1 GB/s'"), "-1 GB/s"),
        (link("between = [0, 1]\nlatency = 'nan'"), "nan"),
        (link("between = [0, 1]\nshared = 'x'"), "'x'"),
        (LINE_OF_THREE.replace("count = 3", "count = 4"), "cannot reach card 3"),
    ] {
        scratch.put("cluster.toml", text.as_bytes());
        let error = scratch.error(1, "plan tinyllama-1.1b --cluster cluster.toml --out plan.json");
        assert!(error.contains("cluster.toml") && error.contains(named), "{text}: {error}");
    }
    for (from, to, named) in [
        ("\"2 GB/s\"", "\"-2 GB/s\"", "-2 GB/s"),
        ("\"2 GB/s\"", "nan", "NaN"),
        ("\"2 GB/s\"", "0", "'0'"),
        ("\"3.6 GMAC/s\"", "\"1e-300 MAC/s\"", "1e-300"),
        ("\"2 us\"", "1e308", "not a time"),
        ("\"4 GiB\"", "\"1 MB\"", "1 MB"),
        ("value = 25.0", "value = nan", "power_watts"),
        ("value = 0.0", "value = nan", "bit_error_rate"),
        ("payload = 2048", "payload = 0", "framing"),
    ] {
        scratch.put("own.toml", profile.replacen(from, to, 1).as_bytes());
        for line in ["plan tinyllama-1.1b --profile own.toml --out plan.json", "profiles own.toml"]
        {
            let error = scratch.error(1, line);
            assert!(error.contains("own.toml") && error.contains(named), "{to}: {error}");
        }
    }
    assert_eq!(scratch.names(), ["cluster.toml", "own.toml"]);
}

#[test]
fn a_profile_without_latency_has_a_band_all_the_same() {
    let profile = include_str!("../../../spanker-topology/profiles/rev-a.toml");
    let scratch = Scratch::new(&[("own.toml", &profile.replacen("\"2 us\"", "\"0 us\"", 1))]);
    let report = scratch.json("plan tinyllama-1.1b --profile own.toml --cards 4");
    let explained = &report["explanation"];
    assert!(number(explained, "low_ms") < number(explained, "high_ms"), "{explained}");
}

/// Puts a value where a JSON pointer points.
fn edited(plan: &Value, pointer: &str, value: Value) -> String {
    let mut plan = plan.clone();
    *plan.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
    plan.to_string()
}

#[test]
fn edited_and_hostile_plans_are_refused_by_name() {
    let scratch = Scratch::new(&[]);
    scratch.text("plan tinyllama-1.1b --cards 4 --out plan.json");
    let plan: Value = serde_json::from_str(&scratch.read("plan.json")).expect("JSON");
    let group = "/layout/replicas/0/0/group";
    let card = "/cluster/profiles/0";
    for (pointer, value, named) in [
        ("/version", json!(2), "version 2"),
        ("/kind", json!("trace"), "plan"),
        ("/request/sequences", json!(0), "batch of 0"),
        ("/request/sequences", json!(u64::MAX), "18446744073709551615"),
        ("/request/context", json!(1u64 << 40), "1099511627776"),
        ("/request/kv", json!("q5_0"), "q5_0"),
        ("/model/layers/0/count", json!(1u64 << 62), "4611686018427387904"),
        ("/model/hidden", json!(7), "7"),
        ("/cluster/cards", json!([]), "0 cards"),
        ("/cluster/cards", json!([0, 0, 0, 9]), "profile 9"),
        ("/cluster/wires", json!([]), "cannot reach"),
        ("/cluster/wires/0/to", json!(99), "99"),
        ("/cluster/wires/0/bandwidth", json!(0), "'0'"),
        ("/cluster/wires/0/latency", json!(-1), "'-1'"),
        ("/layout/replicas", json!([]), "no stage"),
        ("/layout/replicas/0/0/layers/end", json!(21), "21 layers of 22"),
        ("/layout/replicas/0/0/layers/end", json!(u64::MAX), "18446744073709551615"),
    ] {
        scratch.put("edited.json", edited(&plan, pointer, value).as_bytes());
        let error = scratch.error(1, "simulate edited.json --trace trace.json");
        assert!(error.contains("edited.json") && error.contains(named), "{pointer}: {error}");
    }
    for (pointer, value, named) in [
        (format!("{group}/cards/3"), json!(9), "no card 9"),
        (format!("{group}/cards/3"), json!(0), "card 0 is in two places"),
        (format!("{group}/split"), json!("whole"), "whole"),
        (format!("{group}/split"), json!("reduce"), "shard"),
        (format!("{group}/shards/0/heads/end"), json!(u64::MAX), "18446744073709551615"),
        (format!("{group}/shards/0/ffn/start"), json!(9), "9"),
        (format!("{card}/memory/reserved/value"), json!(1u64 << 40), "reserved"),
        (format!("{card}/link/framing/payload"), json!(0), "framing"),
        (format!("{card}/link/lanes/value"), json!(0), "lanes"),
    ] {
        scratch.put("edited.json", edited(&plan, &pointer, value).as_bytes());
        let error = scratch.error(1, "simulate edited.json --ber 1e-6 --trace trace.json");
        assert!(error.contains("edited.json") && error.contains(named), "{pointer}: {error}");
    }
    for text in ["", "{", "[]", "null", &"[".repeat(100_000)] {
        scratch.put("edited.json", text.as_bytes());
        assert!(scratch.error(1, "simulate edited.json").contains("edited.json"));
    }
    assert_eq!(scratch.names(), ["edited.json", "plan.json"]);
}

#[test]
fn files_that_are_missing_or_in_the_way_are_named() {
    let scratch = Scratch::new(&[("taken/x", "")]);
    for line in [
        "plan none.gguf",
        "plan none.json",
        "plan tinyllama-1.1b --cluster none.toml",
        "plan tinyllama-1.1b --profile none.toml",
        "plan tinyllama-1.1b --card none.toml",
        "plan tinyllama-1.1b --link none.toml",
        "simulate none.json",
        "profiles none.toml",
    ] {
        assert!(scratch.error(1, line).contains("none."), "{line}");
    }
    scratch.put("zero.toml", &vec![0; 2 << 20]);
    assert!(scratch.error(1, "plan tinyllama-1.1b --link zero.toml").contains("more than"));
    assert!(scratch.error(2, "plan tinyllama-1.1b --out taken").contains("cannot write taken"));
    scratch.text("plan tinyllama-1.1b --cards 2 --out plan.json");
    assert!(scratch.error(2, "simulate plan.json --trace taken").contains("cannot write taken"));
    assert_eq!(scratch.names(), ["plan.json", "taken", "zero.toml"]);
}

#[test]
fn profiles_show_where_every_number_comes_from() {
    let scratch = Scratch::new(&[]);
    let names = scratch.text("profiles");
    for name in ["rev-a", "rev-a-x16", "rev-a-3lane", "rev-a-gbe-only", "what-if-3g125"] {
        assert!(names.lines().any(|line| line.split_whitespace().next() == Some(name)), "{name}");
        let text = scratch.text(&format!("profiles {name}"));
        assert!(text.contains("memory bandwidth") && text.contains("confidence"), "{text}");
    }
    let lines = scratch.text("profiles --json");
    assert_eq!(lines.lines().count() + 1, names.lines().count(), "a header and a line for each");
    for line in lines.lines() {
        let profile: Value = serde_json::from_str(line).expect("JSON");
        assert!(profile["memory"]["bandwidth"]["source"].is_string(), "{profile}");
    }
    assert!(scratch.error(2, "profiles nope").contains("unknown profile 'nope'"));
}

#[test]
fn help_teaches_each_command() {
    let scratch = Scratch::new(&[]);
    for (line, words) in [
        ("--help", &["spanker plan", "spanker simulate", "spanker profiles"][..]),
        ("plan --help", &["--profile", "--topology", "--objective", "--explain", "Examples"]),
        ("simulate --help", &["--fail", "--trace", "--seed", "perfetto", "Examples"]),
        ("profiles --help", &["Examples", "--json"]),
    ] {
        let text = scratch.text(line);
        words.iter().for_each(|word| assert!(text.contains(word), "{word} is not in {line}"));
    }
}
