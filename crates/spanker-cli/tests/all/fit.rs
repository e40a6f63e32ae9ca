// SPDX-License-Identifier: Apache-2.0
//! `spanker fit` and `spanker predict` as a user runs them, over published measurements.

use std::fs;

use serde_json::Value;

use crate::scratch::{Scratch, number};

fn error_of(report: &Value, field: &str, measured: f64) -> f64 {
    let (low, high) = (number(report, "low"), number(report, "high"));
    assert!(low <= measured && measured <= high, "{measured} is not in {report}");
    (number(report, field) / measured - 1.0).abs()
}

const A100: &str = "ranks,bytes,microseconds
2,8192,11.0\n4,8192,14.7\n2,16384,12.8\n4,16384,16.3\n2,65536,13.0\n4,65536,17.8
2,1048576,40.8\n4,1048576,29.8\n2,16777216,128\n4,16777216,184\n";
const RTX: &str = "ranks,bytes,microseconds
2,8192,6.8\n4,8192,13.5\n2,16384,7.4\n4,16384,14.7\n2,65536,9.2\n4,65536,16.9
2,1048576,44.4\n4,1048576,86.1\n2,16777216,474\n4,16777216,1008\n";
const C3D: &str = "model,quant,cards,milliseconds
llama-2-7b,q4_0,1,101.06\nllama-2-7b,q4_0,2,61.50\n";

#[test]
fn published_links_foresee_eight_ranks() {
    for (table, measured) in [(A100, [21.3, 22.6, 28.1]), (RTX, [26.7, 27.0, 34.2])] {
        let scratch = Scratch::new(&[("samples.csv", table)]);
        scratch.text("fit link --samples samples.csv --out link.toml");
        let mut errors = 0.0;
        for (size, measured) in ["8K", "16K", "64K"].into_iter().zip(measured) {
            let line = format!("predict all-reduce --link link.toml --ranks 8 --bytes {size}");
            let report = scratch.json(&line);
            errors += error_of(&report, "microseconds", measured);
            assert_eq!((&report["ranks"], &report["provenance"]), (&8.into(), &"fitted".into()));
        }
        assert!(errors / 3.0 <= 0.08, "mean error {}", errors / 3.0);
    }
}

#[test]
fn a_ring_is_recognised_named_and_foreseen_on_more_cards() {
    // The table in docs/link-model.md.
    let table = "ranks,bytes,microseconds
2,4096,12.31\n2,65536,137.02\n2,1048576,2132.40\n2,16777216,34058.35
4,4096,24.47\n4,65536,211.54\n4,1048576,3204.60\n4,16777216,51093.52\n";
    let scratch = Scratch::new(&[("samples.csv", table)]);
    let text = scratch.text("fit link --samples samples.csv --out link.toml");
    assert!(text.contains("whole.per_hop_us") && text.contains("ring at 0.493 GB/s"), "{text}");
    let file = fs::read_to_string(scratch.path().join("link.toml")).unwrap();
    assert!(file.contains("form = \"ring\""), "{file}");
    for (ranks, size, expected) in [(2, "64K", 137.02), (8, "64K", 260.8), (8, "4K", 42.5)] {
        let line = format!("predict all-reduce --link link.toml --ranks {ranks} --bytes {size}");
        let error = error_of(&scratch.json(&line), "microseconds", expected);
        assert!(error < 0.01, "{ranks} cards, {size}: {error}");
    }
    fs::write(scratch.path().join("torus.toml"), file.replace("\"ring\"", "\"torus\"")).unwrap();
    let error = scratch.error(1, "predict all-reduce --link torus.toml --ranks 8 --bytes 64K");
    assert!(error.contains("torus.toml: form 'torus'") && error.contains("one-shot"), "{error}");
}

#[test]
fn published_cards_foresee_four_cards_and_a_large_model() {
    let rows = |name: &str, one: f64, two: f64| {
        format!("model,quant,cards,milliseconds\n{name},q4_0,1,{one}\n{name},q4_0,2,{two}\n")
    };
    for (name, one, two, four) in [
        ("llama-2-7b", 101.06, 61.50, 40.25),
        ("llama-2-7b", 434.84, 257.78, 163.42),
        ("llama-3-8b", 556.67, 362.73, 267.62),
    ] {
        let scratch = Scratch::new(&[("samples.csv", &rows(name, one, two))]);
        scratch.text("fit card --samples samples.csv --out card.toml");
        let line = format!("predict decode {name} --card card.toml --quant q4_0 --cards 4");
        let error = error_of(&scratch.json(&line), "milliseconds", four);
        assert!(error <= 0.05, "{name} {one}: {error}");
    }
    let scratch = Scratch::new(&[("samples.csv", C3D)]);
    scratch.text("fit card --samples samples.csv --out card.toml");
    for (cards, measured) in [(1, 907.25), (2, 475.5), (4, 264.0)] {
        let line = format!("predict decode llama-2-70b --card card.toml --cards {cards}");
        let error = error_of(&scratch.json(&line), "milliseconds", measured);
        assert!(error <= 0.1, "{cards} cards: {error}");
    }
}

/// What a command says on standard error while it succeeds.
fn remarks(scratch: &Scratch, line: &str) -> String {
    let output = scratch.run(line);
    assert!(output.status.success(), "{line}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn a_plan_with_a_fitted_card_takes_what_the_fit_predicts_and_says_what_is_assumed() {
    let scratch = Scratch::new(&[("samples.csv", C3D), ("link.csv", RTX)]);
    scratch.text("fit card --samples samples.csv --out card.toml");
    scratch.text("fit link --samples link.csv --out link.toml");
    // rev-a's own arithmetic would make this 482 ms on four cards and 1,855 on one.
    for cards in [1, 2, 4] {
        let flags = format!("llama-2-7b --card card.toml --cards {cards}");
        let fitted = number(&scratch.json(&format!("predict decode {flags}")), "milliseconds");
        // One card has too little memory with the usual context.
        let report = scratch.json(&format!("plan {flags} --profile rev-a --ctx-size 128"));
        let strategy = if cards == 1 { "one-card" } else { "tensor-gather" };
        let all = report["candidates"].as_array().expect("candidates");
        let found = all.iter().find(|c| c["strategy"] == strategy).expect("a layout");
        let links = number(&found["terms"], "communication_ms");
        let planned = number(found, "decode_ms_per_token") - links;
        assert!((planned / fitted - 1.0).abs() < 0.03, "{cards}: {planned} against {fitted}");
    }
    let line = "plan llama-2-7b --cards 4 --card card.toml";
    let said = remarks(&scratch, line);
    for left in ["ttft", "memory capacity", "host link", "links between cards", "card.toml"] {
        assert!(said.contains(left), "{left} is not in {said}");
    }
    let said = remarks(&scratch, &format!("{line} --link link.toml"));
    assert!(said.contains("ttft") && !said.contains("links between cards"), "{said}");
    assert_eq!(remarks(&scratch, "plan llama-2-7b --cards 4"), "");
}

#[test]
fn cards_that_slow_each_other_down_are_predicted_and_planned_so() {
    let table = "model,quant,cards,milliseconds
tinyllama-1.1b,q4_0,1,100\ntinyllama-1.1b,q4_0,2,110\n";
    let scratch = Scratch::new(&[("samples.csv", table), ("link.csv", RTX)]);
    let text = scratch.text("fit card --samples samples.csv --out card.toml");
    assert!(text.contains("exchange.per_layer_ms"), "{text}");
    assert!(text.contains("note: samples have 1 and 2 cards only"), "{text}");
    let at = |cards: usize| {
        scratch.json(&format!("predict decode tinyllama-1.1b --card card.toml --cards {cards}"))
    };
    let time = |cards| number(&at(cards), "milliseconds");
    assert!(time(2) < time(3) && 2.0 * time(2) < time(6), "{} {}", time(3), time(6));
    assert!(number(&at(6), "high") > 400.0 && number(&at(6), "communication_ms") > 200.0);
    assert!(at(6)["notes"][0].as_str().is_some_and(|note| note.contains("1 and 2 cards only")));
    let report = scratch.json("plan tinyllama-1.1b --cards 3 --card card.toml");
    let all = report["candidates"].as_array().expect("candidates");
    let gather = all.iter().find(|c| c["strategy"] == "tensor-gather").expect("a layout");
    // Three cards are slower than two, which the planner's best split may therefore use.
    let cards = gather["cards"].as_u64().expect("a number") as usize;
    let planned = number(gather, "decode_ms_per_token");
    assert!((planned / time(cards) - 1.0).abs() < 0.03, "{planned} on {cards}");
    let best = number(&report["candidates"][0], "decode_ms_per_token");
    assert!(best < 1.05 * time(1), "a card alone takes {}: {best}", time(1));
    // A link's fit takes the place of the exchanges.
    scratch.text("fit link --samples link.csv --out link.toml");
    let line = "predict decode tinyllama-1.1b --card card.toml --cards 6 --link link.toml";
    assert!(number(&scratch.json(line), "milliseconds") < 30.0);
    assert!(scratch.text(line).contains("--link takes their place"));
}

#[test]
fn a_transfer_column_is_fitted_apart() {
    let table = "model,quant,cards,milliseconds,transfer
llama-2-7b,q4_0,1,101.06,0.19\nllama-2-7b,q4_0,2,61.50,7.62\nllama-2-7b,q4_0,4,40.25,12.81\n";
    let scratch = Scratch::new(&[("apart.csv", table), ("bad.csv", &table.replace("7.62", "-1"))]);
    let report = scratch.json("fit card --samples apart.csv --out card.toml");
    assert!((number(&report["samples"][1], "measured") - 69.12).abs() < 1e-9, "{report}");
    let four = scratch.json("predict decode llama-2-7b --card card.toml --cards 4");
    assert!((number(&four, "communication_ms") / 12.81 - 1.0).abs() < 0.25, "{four}");
    assert!((number(&four, "memory_ms") + number(&four, "fixed_ms") - 40.25).abs() < 2.0, "{four}");
    let error = scratch.error(1, "fit card --samples bad.csv");
    assert!(error.contains("line 3: transfer '-1'"), "{error}");
}

#[test]
fn a_link_adds_two_all_reduces_in_each_layer() {
    let scratch = Scratch::new(&[("link.csv", RTX), ("card.csv", C3D)]);
    scratch.text("fit link --samples link.csv --out link.toml");
    scratch.text("fit card --samples card.csv --out card.toml");
    let alone = scratch.json("predict decode llama-2-7b --card card.toml --cards 4");
    let line = "predict decode llama-2-7b --card card.toml --cards 4 --link link.toml";
    let linked = scratch.json(line);
    let once = scratch.json("predict all-reduce --link link.toml --ranks 4 --bytes 16K");
    assert_eq!(number(&alone, "communication_ms"), 0.0);
    let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-9);
    let added = |of_once| 64.0 * number(&once, of_once) / 1e3;
    for (end, of_once) in [("milliseconds", "microseconds"), ("low", "low")] {
        near(number(&linked, end), number(&alone, end) + added(of_once));
    }
    // Alone, the fit of one and two cards does not know whether four are slowed down by exchanges.
    assert!(number(&linked, "high") < number(&alone, "high") + added("high"));
    near(number(&linked, "communication_ms"), 64.0 * number(&once, "microseconds") / 1e3);
    let terms = ["memory_ms", "fixed_ms", "communication_ms"].map(|term| number(&linked, term));
    near(number(&linked, "milliseconds"), terms.iter().sum());
    for (field, value) in [("model", "llama-2-7b"), ("quant", "q4_0"), ("provenance", "fitted")] {
        assert_eq!(linked[field], value);
    }
    assert_eq!(linked["cards"], 4);
    let one = scratch.json("predict decode llama-2-7b --card card.toml --cards 1 --link link.toml");
    assert_eq!(number(&one, "communication_ms"), 0.0);
    let text = scratch.text(line);
    assert!(text.contains("memory") && text.contains("two all-reduces"), "{text}");
    let text = scratch.text("predict all-reduce --link link.toml --ranks 4 --bytes 16K");
    assert!(text.starts_with("all-reduce of 16K on 4 ranks: "), "{text}");
}

#[test]
fn a_fit_shows_each_sample_the_parameters_and_the_errors() {
    let scratch = Scratch::new(&[("link.csv", A100), ("card.csv", C3D)]);
    let text = scratch.text("fit link --samples link.csv");
    for shown in ["16M", "small.base_us", "9.57", "fixed, per call", "on average", "hint: --out"] {
        assert!(text.contains(shown), "{shown} is not in\n{text}");
    }
    assert_eq!(scratch.names(), ["card.csv", "link.csv"], "nothing is written without --out");
    let report = scratch.json("fit link --samples link.csv");
    assert_eq!(report["samples"].as_array().map(Vec::len), Some(10));
    assert_eq!(report["samples"][0]["ranks"], 2);
    assert_eq!((&report["kind"], &report["out"]), (&"link".into(), &Value::Null));
    assert!(number(&report, "mean_error_percent") <= number(&report, "worst_error_percent"));
    let report = scratch.json("fit card --samples card.csv --out card.toml");
    assert_eq!((&report["kind"], &report["out"]), (&"card".into(), &"card.toml".into()));
    assert!(number(&report, "worst_error_percent") < 1e-6, "two samples, two parameters");
    assert_eq!(report["samples"][1]["model"], "llama-2-7b");
    let text = scratch.text("fit card --samples card.csv --out card.toml");
    assert!(text.contains("GB/s") && text.contains("saved to card.toml"), "{text}");
    assert_eq!(scratch.names(), ["card.csv", "card.toml", "link.csv"]);
}

#[test]
fn a_rejected_sample_and_what_is_unknown_are_said() {
    let scratch = Scratch::new(&[
        ("wild.csv", &RTX.replace("4,16384,14.7", "4,16384,44.1")),
        ("narrow.csv", "ranks,bytes,microseconds\n2,4096,5\n2,8192,6\n"),
        ("one.csv", "model,quant,cards,milliseconds\nllama-2-7b,q4_0,1,100\n"),
    ]);
    let text = scratch.text("fit link --samples wild.csv");
    assert!(text.contains("rejected") && text.contains("44.1 us for 16384 bytes"), "{text}");
    let report = scratch.json("fit link --samples wild.csv");
    assert_eq!(report["samples"][3]["rejected"], true, "{report}");
    let text = scratch.text("fit link --samples narrow.csv --out link.toml");
    assert!(text.contains("note: all samples have 2 ranks"), "{text}");
    let text = scratch.text("predict all-reduce --link link.toml --ranks 8 --bytes 8K");
    assert!(text.contains("note: all samples have 2 ranks"), "{text}");
    let text = scratch.text("fit card --samples one.csv");
    assert!(text.contains("fixed cost is unknown"), "{text}");
}

#[test]
fn hostile_tables_exit_with_1_and_name_file_line_and_value() {
    let header = "ranks,bytes,microseconds";
    for (table, said) in [
        (String::new(), "the table is empty"),
        ("a,b,c\n1,2,3\n".into(), "header 'a,b,c'"),
        (format!("{header}\n2,8192,6.8\n"), "1 samples"),
        (format!("{header}\n2,8192,6.8\n2,8192,-1\n"), "line 3: microseconds '-1'"),
        (format!("{header}\n2,8192,nan\n"), "line 2: microseconds 'nan'"),
        (format!("{header}\n1,8192,2\n"), "line 2: ranks '1'"),
        (format!("{header}\n2,0,2\n"), "line 2: bytes '0'"),
        (format!("{header}\n2,8192\n"), "2 columns"),
    ] {
        let scratch = Scratch::new(&[("bad.csv", &table), ("link.toml", "kept")]);
        let error = scratch.error(1, "fit link --samples bad.csv --out link.toml");
        assert!(error.contains("bad.csv") && error.contains(said), "{table:?}: {error}");
        assert_eq!(scratch.names(), ["bad.csv", "link.toml"], "nothing is left behind");
        assert_eq!(fs::read_to_string(scratch.path().join("link.toml")).unwrap(), "kept");
    }
    let scratch = Scratch::new(&[
        ("bad.csv", "model,quant,cards,milliseconds\nllama-9,q4_0,1,5\n"),
        ("file.csv", "model,quant,cards,milliseconds\nmissing.gguf,q4_0,1,5\n"),
    ]);
    fs::write(scratch.path().join("bytes.csv"), [0xff, 0xfe, 0, 1]).unwrap();
    let error = scratch.error(1, "fit card --samples bad.csv");
    assert!(error.contains("line 2: model 'llama-9'") && error.contains("llama-2-7b"), "{error}");
    assert!(scratch.error(1, "fit card --samples file.csv").contains("missing.gguf"));
    assert!(scratch.error(1, "fit link --samples bytes.csv").contains("bytes.csv: byte 0"));
}

#[test]
fn out_leaves_nothing_behind_where_it_cannot_write() {
    let scratch = Scratch::new(&[("link.csv", A100)]);
    fs::create_dir(scratch.path().join("taken")).unwrap();
    for out in ["taken", "missing/link.toml", "taken/.."] {
        let error = scratch.error(2, &format!("fit link --samples link.csv --out {out}"));
        assert!(error.contains(&format!("cannot write {out}")), "{error}");
    }
    assert_eq!(scratch.names(), ["link.csv", "taken"]);
    assert_eq!(fs::read_dir(scratch.path().join("taken")).unwrap().count(), 0);
}

#[test]
fn missing_and_hostile_files_exit_with_1_and_are_named() {
    let scratch = Scratch::new(&[
        ("link.csv", A100),
        ("card.csv", C3D),
        ("empty.toml", ""),
        ("noise.toml", "\u{1}\u{2} = ["),
        ("broken.gguf", "GGUX"),
        ("config.json", "{\"architectures\": 3}"),
        ("notes.txt", "no model"),
    ]);
    scratch.text("fit link --samples link.csv --out link.toml");
    scratch.text("fit card --samples card.csv --out card.toml");
    let good = fs::read_to_string(scratch.path().join("link.toml")).unwrap();
    let negative = good.replacen("base_us = ", "base_us = -", 1);
    fs::write(scratch.path().join("negative.toml"), negative).unwrap();
    for (line, said) in [
        ("fit link --samples none.csv", "none.csv"),
        ("fit card --samples none.csv", "none.csv"),
        ("predict all-reduce --link none.toml --ranks 2 --bytes 1K", "none.toml"),
        (
            "predict all-reduce --link empty.toml --ranks 2 --bytes 1K",
            "empty.toml: kind is missing",
        ),
        ("predict all-reduce --link noise.toml --ranks 2 --bytes 1K", "noise.toml"),
        ("predict all-reduce --link card.toml --ranks 2 --bytes 1K", "card.toml: kind 'card'"),
        ("predict all-reduce --link negative.toml --ranks 2 --bytes 1K", "small.base_us -9.5"),
        ("predict decode llama-2-7b --card link.toml", "link.toml: kind 'link'"),
        ("predict decode llama-2-7b --card none.toml", "none.toml"),
        ("predict decode llama-2-7b --card card.toml --link none.toml", "none.toml"),
        ("predict decode none.gguf --card card.toml", "none.gguf"),
        ("predict decode broken.gguf --card card.toml", "broken.gguf: gguf: byte 0"),
        ("predict decode none/config.json --card card.toml", "none/config.json"),
        ("predict decode config.json --card card.toml", "config.json: "),
        ("predict decode notes.txt --card card.toml", "notes.txt: expected a .gguf file"),
    ] {
        let error = scratch.error(1, line);
        assert!(error.contains(said), "{line}: {error}");
    }
}

#[test]
fn a_config_file_or_its_folder_is_a_model() {
    let config = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096}"#;
    let scratch = Scratch::new(&[("card.csv", C3D)]);
    fs::create_dir(scratch.path().join("mine")).unwrap();
    fs::write(scratch.path().join("mine/config.json"), config).unwrap();
    scratch.text("fit card --samples card.csv --out card.toml");
    let known = scratch.json("predict decode llama-2-7b --card card.toml --cards 2");
    for model in ["mine/config.json", "mine"] {
        let found = scratch.json(&format!("predict decode {model} --card card.toml --cards 2"));
        assert_eq!(found["milliseconds"], known["milliseconds"]);
        assert_eq!(found["model"], "mine");
    }
    let wider = scratch.json("predict decode mine --card card.toml --cards 2 --quant f16");
    assert!(number(&wider, "memory_ms") > 3.0 * number(&known, "memory_ms"));
    assert_eq!(wider["quant"], "f16");
}

#[test]
fn bad_requests_exit_with_2_and_name_the_value() {
    let scratch = Scratch::new(&[("link.csv", A100), ("card.csv", C3D)]);
    scratch.text("fit link --samples link.csv --out link.toml");
    scratch.text("fit card --samples card.csv --out card.toml");
    for (line, said) in [
        ("fit", "Usage"),
        ("fit link", "--samples"),
        ("fit lnik --samples link.csv", "lnik"),
        ("predict", "Usage"),
        ("predict all-reduce --ranks 2 --bytes 1K", "--link"),
        ("predict all-reduce --link link.toml --ranks 0 --bytes 1K", "--ranks 0"),
        ("predict all-reduce --link link.toml --ranks 9999 --bytes 1K", "--ranks 9999"),
        ("predict all-reduce --link link.toml --ranks two --bytes 1K", "two"),
        ("predict all-reduce --link link.toml --ranks 2 --bytes 0", "size '0' is zero"),
        ("predict all-reduce --link link.toml --ranks 2 --bytes 4Q", "size '4Q'"),
        ("predict decode llama-2-7b --card card.toml --cards 0", "--cards 0"),
        ("predict decode llama-2-7b --card card.toml --quant q9", "q9"),
        ("predict decode llama-9 --card card.toml", "unknown model 'llama-9'"),
        ("predict decode llama-9 --card card.toml", "llama-2-70b"),
        ("predict decode --card card.toml", "MODEL"),
    ] {
        let error = scratch.error(2, line);
        assert!(error.contains(said), "{line}: {error}");
    }
}

#[test]
fn help_teaches_each_command_with_an_example() {
    let scratch = Scratch::new(&[]);
    for (line, said) in [
        ("--help", "spanker predict --help"),
        ("fit --help", "spanker fit link --samples all_reduce.csv --out link.toml"),
        ("fit link --help", "ranks,bytes,microseconds"),
        ("fit card --help", "model,quant,cards,milliseconds"),
        ("predict --help", "spanker predict all-reduce --link link.toml --ranks 8 --bytes 8K"),
        ("predict all-reduce --help", "--bytes 8K"),
        ("predict decode --help", "--link link.toml"),
    ] {
        assert!(scratch.text(line).contains(said), "{line}");
    }
}
