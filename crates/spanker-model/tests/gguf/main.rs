// SPDX-License-Identifier: Apache-2.0
//! GGUF headers: those of good files give their model, those of bad ones an error.

mod hostile;
mod round;
mod writer;

use std::cell::Cell;
use std::io::{self, Read};

use spanker_model::gguf::{Header, Value, ValueType};
use spanker_model::{Model, ModelError, Quant, builtin, builtin_names, from_config_json};

use writer::{Writer, array_value, counted, of_model, text_value, u32_value};

/// A model of a few kilobytes.
fn small() -> Model {
    let config = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 40, "max_position_embeddings": 128,
        "tie_word_embeddings": true}"#;
    from_config_json(config, "small", Quant::Q4_0).expect("a small model")
}

fn read(writer: &Writer) -> Result<Header, ModelError> {
    Header::read(writer.header().chain(io::repeat(0)), writer.file_bytes())
}

fn model_error(writer: &Writer) -> String {
    read(writer).expect("a good header").model().expect_err("a bad model").to_string()
}

/// Reads zeros after the header and counts what is taken.
struct Counting<'a, R>(R, &'a Cell<u64>);

impl<R: Read> Read for Counting<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        self.1.set(self.1.get() + read as u64);
        Ok(read)
    }
}

#[test]
fn every_built_in_model_survives_the_way_through_a_header() {
    for name in builtin_names() {
        for quant in [Quant::F16, Quant::Q4_0, Quant::Q4K, Quant::Q6K] {
            let model = builtin(name, quant).expect(name);
            let writer = of_model(&model);
            let header = read(&writer).expect(name);
            let stored: u64 = header.tensors().values().map(|tensor| tensor.bytes).sum();
            assert_eq!(stored, model.weight_bytes(), "{name} {quant}");
            let found = header.model().expect(name);
            assert_eq!(found.source, "gguf");
            assert_eq!(Model { source: "built-in".into(), ..found }, model);
        }
    }
}

#[test]
fn weights_are_never_read() {
    let writer = of_model(&builtin("llama-2-70b", Quant::Q4_0).expect("built in"));
    let (header, taken) = (writer.header(), Cell::new(0));
    let reader = Counting(header.chain(io::repeat(0)), &taken);
    Header::read(reader, writer.file_bytes()).expect("a good header");
    assert!(writer.file_bytes() > 38_000_000_000);
    assert!(taken.get() <= header.len() as u64 + (64 << 10), "{} taken", taken.get());
}

#[test]
fn layers_may_differ_in_type_and_the_head_may_stand_alone() {
    let mut model = small();
    model.layers[1].v.quant = Quant::Q8_0;
    model.layers[1].down.quant = Quant::F16;
    model.tied = false;
    model.head.quant = Quant::F32;
    let found = read(&of_model(&model)).expect("a good header").model().expect("a model");
    assert_eq!(Model { source: model.source.clone(), ..found }, model);
}

#[test]
fn header_keeps_small_metadata_and_the_size_of_large_ones() {
    let mut writer = Writer::new();
    writer.alignment = 64;
    writer.meta("general.alignment", u32_value(64));
    writer.meta("i8", [&1_u32.to_le_bytes()[..], &[0xff]].concat());
    writer.meta("f64", [&12_u32.to_le_bytes()[..], &2.5_f64.to_le_bytes()].concat());
    writer.meta("bool", [&7_u32.to_le_bytes()[..], &[1]].concat());
    writer.meta("not utf-8", [&8_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &[0xff]].concat());
    writer.meta("long", text_value(&"x".repeat(5000)));
    writer.meta("texts", array_value(8, 2, &[counted("ab"), counted("")].concat()));
    let inner = &array_value(2, 3, &[0; 6])[4..];
    writer.meta("nested", array_value(9, 2, &[inner, inner].concat()));
    writer.tensor("scalar", &[1], Quant::F32);
    writer.tensors[0].dims.clear();
    let header = read(&writer).expect("a good header");
    let bytes = writer.header();
    let place = |part: &[u8]| {
        bytes.windows(part.len()).position(|window| window == part).expect("a part") as u64
    };
    let values: Vec<(&str, &Value)> =
        header.metadata().iter().map(|(key, value)| (key.as_str(), value)).collect();
    assert_eq!(
        values,
        [
            ("bool", &Value::Bool(true)),
            ("f64", &Value::Float(2.5)),
            ("general.alignment", &Value::Unsigned(64)),
            ("i8", &Value::Signed(-1)),
            ("long", &Value::LongText { at: place(&[b'x'; 5000]), bytes: 5000 }),
            ("nested", &Value::Array { at: place(inner), element: ValueType::Array, len: 2 }),
            ("not utf-8", &Value::Text("\u{fffd}".into())),
            (
                "texts",
                &Value::Array { at: place(&counted("ab")), element: ValueType::Text, len: 2 }
            ),
        ]
    );
    assert_eq!((header.version(), header.alignment()), (3, 64));
    assert_eq!(header.data_offset(), writer.header().len() as u64);
    assert_eq!(header.tensors()["scalar"].bytes, 4);
}

#[test]
fn version_2_is_read_and_others_are_errors() {
    let mut writer = of_model(&small());
    writer.version = 2;
    assert_eq!(read(&writer).expect("version 2").version(), 2);
    for (version, reason) in [
        (0, "version 0 is not 2 or 3"),
        (1, "version 1 is not 2 or 3"),
        (4, "version 4 is not 2 or 3"),
        (3_u32.swap_bytes(), "the file is big endian, only little endian is supported"),
    ] {
        writer.version = version;
        let error = read(&writer).expect_err("a bad version").to_string();
        assert_eq!(error, format!("gguf: byte 4: {reason}"));
    }
}

#[test]
fn missing_tensors_and_metadata_are_named() {
    let writer = of_model(&small());
    for info in &writer.tensors {
        let mut without = writer.clone();
        without.tensors.retain(|other| other.name != info.name);
        let expected = format!("gguf: tensor '{}': missing", info.name);
        assert_eq!(model_error(&without), expected);
    }
    for key in ["block_count", "embedding_length", "attention.head_count", "context_length"] {
        let mut without = writer.clone();
        without.set(&format!("llama.{key}"), None);
        assert_eq!(model_error(&without), format!("gguf: metadata 'llama.{key}': missing"));
    }
    let mut without = writer.clone();
    without.set("general.architecture", None);
    assert_eq!(model_error(&without), "gguf: metadata 'general.architecture': missing");
}

#[test]
fn metadata_that_contradict_the_tensors_are_errors() {
    let writer = of_model(&small());
    for (key, value, expected) in [
        ("block_count", 1, "gguf: tensor 'blk.1.attn_k.weight': the model has 1 layers"),
        ("block_count", 3, "gguf: tensor 'blk.2.attn_norm.weight': missing"),
        ("embedding_length", 32, "layer 0 q: 64 x 64, expected 64 x 32"),
        ("attention.head_count", 8, "layer 0 q: 64 x 64, expected 128 x 64"),
        ("attention.head_count_kv", 3, "kv_heads: 3 do not divide 4 heads"),
        ("feed_forward_length", 97, "layer 0 gate: 96 x 64, expected 97 x 64"),
        (
            "attention.value_length",
            8,
            "gguf: metadata 'llama.attention.value_length': 8, and keys have 16",
        ),
        (
            "context_length",
            0,
            "gguf: metadata 'llama.context_length': Unsigned(0) is not a whole number between 1 \
             and 33554432",
        ),
    ] {
        let mut changed = writer.clone();
        changed.set(&format!("llama.{key}"), Some(u32_value(value)));
        assert_eq!(model_error(&changed), expected);
    }
}

#[test]
fn other_kinds_of_models_are_errors_that_say_so() {
    let writer = of_model(&small());
    let mut other = writer.clone();
    other.set("general.architecture", Some(text_value("gpt2\x1b[2J")));
    let expected = "architecture 'gpt2\\u{1b}[2J' is not supported: expected one of: llama, qwen2, \
                    qwen3, qwen2moe, qwen3moe, gemma, gemma2, gemma3, phi3, granite, smollm3, \
                    olmoe, gpt-oss, granitemoe";
    assert_eq!(model_error(&other), expected);

    let mut per_layer = writer.clone();
    let heads = array_value(4, 2, &[4, 0, 0, 0, 4, 0, 0, 0]);
    per_layer.set("llama.attention.head_count", Some(heads));
    assert!(model_error(&per_layer).contains("layers of different shapes"));

    let mut split = writer.clone();
    split.meta("split.count", u32_value(3));
    assert!(model_error(&split).contains("one of 3 parts"));

    let mut fused = writer.clone();
    fused.tensor("blk.0.attn_qkv.weight", &[64, 128], Quant::Q4_0);
    let expected = "gguf: tensor 'blk.0.attn_qkv.weight': unknown in this architecture";
    assert_eq!(model_error(&fused), expected);

    let mut latent = writer;
    latent.set("general.architecture", Some(text_value("deepseek2")));
    let expected = "architecture 'deepseek2' is not supported: its latent attention is not there";
    assert_eq!(model_error(&latent), expected);
}

/// A small mixture with a shared expert.
fn mixture() -> Model {
    let mut model = builtin("qwen1.5-moe-a2.7b", Quant::Q4_0).expect("a model");
    model.layers.truncate(2);
    model
}

#[test]
fn experts_that_are_missing_or_absurd_are_errors_that_name_key_and_value() {
    let writer = of_model(&mixture());
    let metadata = |key: &str| format!("gguf: metadata 'qwen2moe.{key}': ");
    for (key, value, expected) in [
        ("expert_count", Some(0), "Unsigned(0) is not a whole number between 1 and 1024"),
        ("expert_count", Some(u32::MAX), "Unsigned(4294967295) is not a whole number between"),
        ("expert_count", None, "missing"),
        ("expert_used_count", Some(0), "Unsigned(0) is not a whole number between 1 and 60"),
        ("expert_used_count", Some(61), "Unsigned(61) is not a whole number between 1 and 60"),
        ("expert_used_count", None, "missing"),
        ("expert_feed_forward_length", Some(0), "Unsigned(0) is not a whole number between 1"),
        ("expert_shared_feed_forward_length", Some(0), "Unsigned(0) is not a whole number"),
        ("expert_weights_scale", Some(3), "Unsigned(3), and only 1 is understood"),
        ("expert_weights_norm", Some(1), "Unsigned(1), and only false is understood"),
        ("expert_gating_func", Some(2), "Unsigned(2), and only 1 (softmax) is understood"),
        ("expert_group_count", Some(4), "Unsigned(4), and only 1 is understood"),
        ("leading_dense_block_count", Some(1), "Unsigned(1), and only 0 is understood"),
    ] {
        let mut changed = writer.clone();
        changed.set(&format!("qwen2moe.{key}"), value.map(u32_value));
        let error = model_error(&changed);
        assert!(error.starts_with(&format!("{}{expected}", metadata(key))), "{error}");
    }
    for (key, value, expected) in [
        (
            "expert_count",
            61,
            "gguf: tensor 'blk.0.ffn_gate_exps.weight': 60 experts, and the model has 61",
        ),
        ("expert_feed_forward_length", 64, "layer 0 gate: 1408 x 2048, expected 64 x 2048"),
        (
            "expert_shared_feed_forward_length",
            64,
            "layer 0 shared gate: 5632 x 2048, expected 64 x 2048",
        ),
    ] {
        let mut changed = writer.clone();
        changed.set(&format!("qwen2moe.{key}"), Some(u32_value(value)));
        assert_eq!(model_error(&changed), expected);
    }
}

#[test]
fn tensors_of_experts_that_are_missing_or_of_another_shape_are_named() {
    let writer = of_model(&mixture());
    for name in ["gate_inp", "gate_exps", "up_exps", "down_exps", "gate_inp_shexp", "up_shexp"] {
        let name = format!("blk.1.ffn_{name}.weight");
        let mut without = writer.clone();
        without.tensors.retain(|tensor| tensor.name != name);
        assert_eq!(model_error(&without), format!("gguf: tensor '{name}': missing"));
        let mut flat = writer.clone();
        let tensor = flat.tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor");
        tensor.dims = vec![32];
        assert!(
            model_error(&flat).contains(&name) || model_error(&flat).contains("layer 1"),
            "{name}"
        );
    }
    let dense = of_model(&small());
    let mut counted = dense.clone();
    counted.meta("llama.expert_count", u32_value(8));
    assert_eq!(model_error(&counted), "gguf: metadata 'llama.expert_used_count': missing");
    let mut stacked = dense.clone();
    stacked.tensor("blk.0.ffn_up_exps.weight", &[64, 96, 8], Quant::Q4_0);
    assert_eq!(model_error(&stacked), "gguf: metadata 'llama.expert_count': missing");
    let mut other = stacked.clone();
    other.set("general.architecture", Some(text_value("qwen2")));
    let expected = "gguf: tensor 'blk.0.ffn_up_exps.weight': qwen2 has no experts";
    for key in ["block_count", "embedding_length", "context_length", "attention.head_count"] {
        other.meta(&format!("qwen2.{key}"), u32_value(2));
    }
    assert_eq!(model_error(&other), expected);
    // A dense file that says so.
    let mut none = dense;
    none.meta("llama.expert_count", u32_value(0));
    assert!(read(&none).expect("a header").model().is_ok_and(|model| model.mixture.is_none()));
}

#[test]
fn name_of_a_model_is_fit_to_print() {
    let mut writer = of_model(&small());
    for (given, name) in [
        ("\x1b[31mred\r\n", "[31mred"),
        ("", "llama"),
        (&"\u{1f600}".repeat(500), &"\u{1f600}".repeat(64)),
    ] {
        writer.set("general.name", Some(text_value(given)));
        assert_eq!(read(&writer).expect("a header").model().expect("a model").name, name);
    }
    writer.set("general.name", None);
    assert_eq!(read(&writer).expect("a header").model().expect("a model").name, "llama");
}
