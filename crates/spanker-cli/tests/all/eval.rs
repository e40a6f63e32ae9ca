// SPDX-License-Identifier: Apache-2.0
//! `spanker eval` as a user runs it: figures, runs that are ended and go on, exit codes.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::scratch::{Scratch, number};

/// A tiny model `m.gguf`, and so many items.
fn scratch(items: usize) -> Scratch {
    let scratch = Scratch::new(&[]);
    scratch.text(
        "synth llama --layers 2 --hidden 64 --heads 2 --kv-heads 1 --ffn 96 --vocab 300 --context 128 --out m.gguf",
    );
    let lines: String = (0..items)
        .map(|item| {
            format!("{{\"context\": \"item {item} is\", \"continuation\": \" so{item}\"}}\n")
        })
        .collect();
    scratch.put("items.jsonl", lines.as_bytes());
    scratch
}

#[test]
fn evaluation_is_the_same_on_any_cards_and_in_pieces() {
    let scratch = scratch(6);
    let whole = scratch.json("eval items.jsonl -m m.gguf");
    assert_eq!((whole["items"].as_u64(), whole["bytes"].as_u64()), (Some(6), Some(24)));
    let bits = number(&whole, "bits_per_byte");
    assert!((bits - number(&whole, "bits") / 24.0).abs() < 1e-12 && bits > 4.0, "{whole}");
    let split = scratch.json("eval items.jsonl -m m.gguf --cards 3 --split gather");
    assert_eq!(split["bits"], whole["bits"]);
    // Three items, then the others, then none.
    let first = scratch.json("eval items.jsonl -m m.gguf --out o.jsonl --limit 3");
    assert_eq!((first["items"].as_u64(), first["resumed"].as_u64()), (Some(3), Some(0)));
    let rest = scratch.json("eval items.jsonl -m m.gguf --out o.jsonl");
    assert_eq!((rest["items"].as_u64(), rest["resumed"].as_u64()), (Some(6), Some(3)));
    assert!((number(&rest, "bits") - number(&whole, "bits")).abs() < 1e-9);
    let kept = fs::read(scratch.path().join("o.jsonl")).expect("a file");
    let text = scratch.text("eval items.jsonl -m m.gguf --out o.jsonl");
    assert!(text.contains("bits per byte") && text.contains("of 6 items"), "{text}");
    assert_eq!(fs::read(scratch.path().join("o.jsonl")).expect("a file"), kept);
    let error = scratch.error(1, "eval items.jsonl -m m.gguf --out o.jsonl --kv q8_0");
    assert!(error.contains("kv is f16, not q8_0"), "{error}");
    let error = scratch.error(1, "eval items.jsonl -m m.gguf --out items.jsonl");
    assert!(error.contains("items.jsonl: it is no evaluation"), "{error}");
}

#[test]
fn evaluation_that_is_interrupted_goes_on_where_it_was() {
    let scratch = scratch(100_000);
    let mut command = scratch.command();
    command.args("eval items.jsonl -m m.gguf --out o.jsonl".split(' '));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let lines =
        || fs::read_to_string(scratch.path().join("o.jsonl")).map_or(0, |t| t.lines().count());
    let begun = Instant::now();
    while lines() < 5 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no item is scored");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = Pid::from_raw(child.id() as i32).expect("a process");
    kill_process(pid, Signal::INT).expect("a signal");
    let output = child.wait_with_output().expect("an end");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{error}");
    assert!(error.contains("of 100000 items") && error.contains("goes on"), "{error}");
    let done = lines() - 1;
    let rest = format!("eval items.jsonl -m m.gguf --out o.jsonl --limit {}", done + 2);
    let report = scratch.json(&rest);
    assert_eq!(report["resumed"].as_u64(), Some(done as u64));
    assert_eq!(report["items"].as_u64(), Some(done as u64 + 2));
}

#[test]
fn items_that_make_no_sense_are_named() {
    let scratch = scratch(1);
    scratch.put("bad.jsonl", b"{\"text\": \"a\"}\n{\"question\": \"b\"}\n");
    let error = scratch.error(1, "eval bad.jsonl -m m.gguf");
    assert!(error.contains("bad.jsonl: line 2: expected 'context'"), "{error}");
    let error = scratch.error(1, "eval none.jsonl -m m.gguf");
    assert!(error.contains("none.jsonl"), "{error}");
    assert!(scratch.error(2, "eval items.jsonl -m m.gguf --limit 0").contains("--limit 0"));
    let long = format!("{{\"text\": \"{}\"}}", "x".repeat(300));
    scratch.put("long.jsonl", long.as_bytes());
    let error = scratch.error(1, "eval long.jsonl -m m.gguf");
    assert!(error.contains("line 1: ") && error.contains("room for 128"), "{error}");
}
