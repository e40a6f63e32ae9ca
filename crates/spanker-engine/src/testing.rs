// SPDX-License-Identifier: Apache-2.0
//! A tiny model for tests of this crate. Its weights are the same every time, from a generator that everybody can write
//! down.

use std::io::Write;
use std::path::Path;

use spanker_model::Quant;
use spanker_model::gguf::{Field, Writer};

use crate::model::Model;

const HIDDEN: u64 = 160;
const VOCAB: u64 = 300;
const LAYERS: u32 = 4;

/// A tiny model with random weights.
pub(crate) fn model(folder: &Path) -> Model {
    let path = folder.join("x.gguf");
    write(&path, 1.0);
    Model::open(&path).expect("a model")
}

/// One whose layers add little to the embedding, so that a token follows mostly from the one before it: its texts soon
/// repeat themselves, more or less.
pub(crate) fn model_that_repeats(folder: &Path) -> Model {
    let path = folder.join("y.gguf");
    write(&path, 0.2);
    Model::open(&path).expect("a model")
}

/// Weights of layers are `size` times as large as others.
fn write(path: &Path, size: f32) {
    let mut writer = Writer::new();
    writer.put("general.architecture", Field::Text("llama")).expect("a key");
    for (key, size) in [
        ("llama.block_count", LAYERS),
        ("llama.context_length", 1024),
        ("llama.embedding_length", HIDDEN as u32),
        ("llama.feed_forward_length", 96),
        ("llama.attention.head_count", 5),
    ] {
        writer.put(key, Field::U32(size)).expect("a key");
    }
    writer.put("llama.attention.layer_norm_rms_epsilon", Field::F32(1e-5)).expect("a key");
    vocabulary(&mut writer);
    let mut tensor = |name: &str, shape: &[u64], quant| {
        writer.tensor(name, shape, quant).expect("a tensor");
    };
    tensor("token_embd.weight", &[HIDDEN, VOCAB], Quant::F32);
    tensor("output.weight", &[HIDDEN, VOCAB], Quant::F32);
    tensor("output_norm.weight", &[HIDDEN], Quant::F32);
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("attn_norm", &[HIDDEN][..]),
            ("ffn_norm", &[HIDDEN]),
            ("attn_q", &[HIDDEN, HIDDEN]),
            ("attn_k", &[HIDDEN, HIDDEN]),
            ("attn_v", &[HIDDEN, HIDDEN]),
            ("attn_output", &[HIDDEN, HIDDEN]),
            ("ffn_gate", &[HIDDEN, 96]),
            ("ffn_up", &[HIDDEN, 96]),
            ("ffn_down", &[96, HIDDEN]),
        ] {
            tensor(&format!("blk.{layer}.{name}.weight"), shape, Quant::F32);
        }
    }
    let sizes: Vec<u64> = writer.tensors().iter().map(|(_, tensor)| tensor.bytes).collect();
    let mut file = std::fs::File::create(path).expect("a file");
    let mut state = 1u32;
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    let weights = |at: usize, out: &mut dyn Write| {
        // Embedding, head and the last norm come first.
        let size = if at < 3 { 1.0 } else { size };
        let numbers = (0..sizes[at] / 4).map(|_| (size * number()).to_le_bytes());
        out.write_all(&numbers.flatten().collect::<Vec<u8>>())
    };
    writer.write(&mut file, weights).expect("a file that can be written");
}

/// Every byte is a token, and some words.
fn vocabulary(writer: &mut Writer) {
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let words = (256..VOCAB - 2).map(|word| format!(" w{word}"));
    let names: Vec<String> =
        bytes.chain(words).chain(["<s>".to_owned(), "</s>".to_owned()]).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let kinds: Vec<i32> = (0..VOCAB)
        .map(|token| match token {
            0..256 => 6,
            token if token + 2 < VOCAB => 1,
            _ => 3,
        })
        .collect();
    let scores: Vec<f32> = (0..VOCAB).map(|token| -(token as f32)).collect();
    writer.put("tokenizer.ggml.model", Field::Text("llama")).expect("a key");
    writer.put("tokenizer.ggml.tokens", Field::Texts(&names)).expect("a key");
    writer.put("tokenizer.ggml.token_type", Field::I32s(&kinds)).expect("a key");
    writer.put("tokenizer.ggml.scores", Field::F32s(&scores)).expect("a key");
    writer.put("tokenizer.ggml.bos_token_id", Field::U32(VOCAB as u32 - 2)).expect("a key");
    writer.put("tokenizer.ggml.eos_token_id", Field::U32(VOCAB as u32 - 1)).expect("a key");
}
