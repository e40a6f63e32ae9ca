// SPDX-License-Identifier: Apache-2.0
//! A tiny model of every family as a user makes, plans, runs and verifies it.

use crate::scratch::Scratch;

/// Families with awkward sizes; windows are shorter than the prompt.
const FAMILIES: [(&str, &str); 15] = [
    ("gemma3", "--layers 7 --heads 5 --kv-heads 1 --window 20"),
    ("gemma2", "--layers 3 --heads 6 --kv-heads 2 --window 20"),
    ("gemma", "--layers 2 --heads 3 --kv-heads 1"),
    ("phi3", "--layers 2 --heads 3 --kv-heads 3 --window 20"),
    ("granite", "--layers 2 --heads 6 --kv-heads 3"),
    ("smollm3", "--layers 5 --heads 6 --kv-heads 2"),
    ("mistral", "--layers 2 --heads 6 --kv-heads 2 --window 20"),
    ("llama", "--layers 2 --heads 6 --kv-heads 2 --experts 5 --experts-used 2"),
    ("qwen2", "--layers 2 --heads 5 --kv-heads 1"),
    ("qwen3", "--layers 2 --heads 6 --kv-heads 3"),
    ("qwen2moe", "--layers 2 --heads 6 --kv-heads 2 --experts 5 --shared-ffn 96"),
    ("qwen3moe", "--layers 2 --heads 6 --kv-heads 2 --experts 7 --experts-used 3"),
    ("olmoe", "--layers 2 --heads 6 --kv-heads 2 --experts 5 --experts-used 3"),
    ("gpt-oss", "--layers 3 --heads 6 --kv-heads 2 --experts 5 --experts-used 3 --window 20"),
    ("granitemoe", "--layers 2 --heads 6 --kv-heads 3 --experts 5 --experts-used 2"),
];
const PROMPT: &str = "-p abcdefghijklmnopqrstuvwxyz0123456789";

#[test]
fn every_family_is_planned_run_and_verified() {
    for (family, flags) in FAMILIES {
        let scratch = Scratch::new(&[]);
        scratch.text(&format!(
            "synth {family} --head-size 32 --hidden 96 --ffn 160 --vocab 300 --context 256 --quant q8_0 \
             --out m.gguf {flags}"
        ));
        scratch.text("plan m.gguf --profile rev-a --cards 3");
        let run = |cards: usize| {
            let line = format!("run -m m.gguf {PROMPT} -n 6 --temp 0 --ignore-eos --cards {cards}");
            scratch.json(&line)["tokens"].clone()
        };
        let alone = run(1);
        assert_eq!(alone.as_array().map(Vec::len), Some(6), "{family}: {alone}");
        assert_eq!(run(4), alone, "{family}");
        let text = scratch.text(&format!("verify -m m.gguf {PROMPT} -n 3 --cards 1..3"));
        assert!(text.contains("identical on"), "{family}: {text}");
    }
}
