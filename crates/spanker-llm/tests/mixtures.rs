// SPDX-License-Identifier: Apache-2.0
//! Mixtures that are made from dense models, so that they must say the same: experts are slices of the feed-forward
//! network, and every token meets all of them.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::io::Write;
use std::sync::Arc;

use spanker_llm::{Network, RunLogits};
use spanker_model::Quant;
use spanker_model::gguf::{Field, Writer};
use spanker_plan::Split;
use spanker_test_support::Recipe;

use splits::{Open, assert_same, plan, prompt, run, together};

const EXPERTS: usize = 4;

fn dense() -> Recipe {
    Recipe::llama(Quant::F32, [4, 2, 16], 64, 96)
}

/// Rows of a plain matrix.
fn rows(data: &[u8], cols: u64) -> Vec<&[u8]> {
    data.chunks_exact(4 * cols as usize).collect()
}

/// What a slice of down is multiplied with: routers of zeros weigh all experts equally.
fn scaled(data: &[u8], factor: f32) -> Vec<u8> {
    let numbers = data.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word) * factor);
    numbers.flat_map(f32::to_le_bytes).collect()
}

/// The file of a mixture whose experts are slices of the dense model's network, times `factor` on their way down.
fn sliced(recipe: &Recipe, factor: f32) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.put("general.architecture", Field::Text("llama")).expect("a key");
    let slice = recipe.ffn / EXPERTS as u64;
    for (key, size) in [
        ("block_count", recipe.layers as u64),
        ("context_length", 256),
        ("embedding_length", recipe.hidden),
        ("feed_forward_length", slice),
        ("attention.head_count", recipe.heads),
        ("attention.head_count_kv", recipe.kv_heads),
        ("attention.key_length", recipe.head_size),
        ("attention.value_length", recipe.head_size),
        ("rope.dimension_count", recipe.head_size),
        ("expert_count", EXPERTS as u64),
        ("expert_used_count", EXPERTS as u64),
    ] {
        writer.put(&format!("llama.{key}"), Field::U32(size as u32)).expect("a key");
    }
    for (key, value) in
        [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", recipe.base)]
    {
        writer.put(&format!("llama.{key}"), Field::F32(value)).expect("a key");
    }
    let mut all: Vec<(String, Vec<u64>, Vec<u8>)> = Vec::new();
    for (at, (name, dims, quant)) in recipe.tensors().into_iter().enumerate() {
        let data = recipe.data(at, &name, &dims, quant);
        let stacked = name.replace(".weight", "_exps.weight");
        if name.contains("ffn_down") {
            // Columns of every row.
            let width = 4 * slice as usize;
            let expert = |expert: usize| {
                let part = move |row: &[u8]| row[expert * width..][..width].to_vec();
                rows(&data, dims[0]).into_iter().flat_map(part).collect::<Vec<u8>>()
            };
            let stack = scaled(&(0..EXPERTS).flat_map(expert).collect::<Vec<u8>>(), factor);
            all.push((stacked, vec![slice, dims[1], EXPERTS as u64], stack));
        } else if name.contains("ffn_gate") || name.contains("ffn_up") {
            all.push((stacked, vec![dims[0], slice, EXPERTS as u64], data));
        } else {
            all.push((name, dims, data));
        }
    }
    for layer in 0..recipe.layers {
        let (name, dims) = (format!("blk.{layer}.ffn_gate_inp.weight"), vec![recipe.hidden, 4]);
        all.push((name, dims, vec![0; 4 * 4 * recipe.hidden as usize]));
    }
    for (name, dims, _) in &all {
        writer.tensor(name, dims, Quant::F32).expect("a tensor");
    }
    let mut file = Vec::new();
    let weights = |at: usize, out: &mut dyn Write| out.write_all(&all[at].2);
    writer.write(&mut file, weights).expect("memory");
    file
}

fn logits(file: Vec<u8>, cards: usize) -> RunLogits {
    let network = Arc::new(Network::new(file).expect("a network"));
    let plan = plan(&network, Split::Gather, &together(&vec![1.0; cards]));
    run(&network, &plan, &prompt(6, 71))
}

/// The largest difference of logits, of the largest logit.
fn off(one: &RunLogits, other: &RunLogits) -> f32 {
    let pairs = one.logits.iter().flatten().zip(other.logits.iter().flatten());
    let largest = one.logits.iter().flatten().fold(0.0f32, |most, logit| most.max(logit.abs()));
    pairs.fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

#[test]
fn experts_that_are_slices_of_a_dense_network_say_what_it_says() {
    let recipe = dense();
    let expected = logits(recipe.file(), 1);
    let found = logits(sliced(&recipe, EXPERTS as f32), 1);
    assert_eq!(found.tokens, expected.tokens);
    assert!(off(&expected, &found) < 1e-4, "{}", off(&expected, &found));
    for cards in 2..=5 {
        let split = logits(sliced(&recipe, EXPERTS as f32), cards);
        assert_same(&format!("{cards} cards"), &split, &found);
    }
    // Without the factor their sum is a quarter of the dense one, which is seen.
    let less = logits(sliced(&recipe, 1.0), 1);
    assert!(off(&expected, &less) > 1e-2, "{}", off(&expected, &less));
    assert_eq!(recipe.network().model().mixture, None);
}
