// SPDX-License-Identifier: Apache-2.0
//! A writer of GGUF headers, right and wrong ones. It writes no weights.

use spanker_model::{Model, Quant};

/// A value of the metadata, as its bytes with its type before them.
pub fn u32_value(value: u32) -> Vec<u8> {
    [4_u32.to_le_bytes(), value.to_le_bytes()].concat()
}

/// A text.
pub fn text_value(text: &str) -> Vec<u8> {
    [&8_u32.to_le_bytes()[..], &counted(text)].concat()
}

/// An array of `len` elements of the type `element`, whose bytes are `body`.
pub fn array_value(element: u32, len: u64, body: &[u8]) -> Vec<u8> {
    [&9_u32.to_le_bytes()[..], &element.to_le_bytes(), &len.to_le_bytes(), body].concat()
}

/// A text with its length before it.
pub fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

#[derive(Debug, Clone)]
pub struct Info {
    pub name: String,
    pub dims: Vec<u64>,
    pub id: u32,
    pub offset: u64,
}

/// A header as it is about to be written.
#[derive(Debug, Clone)]
pub struct Writer {
    pub version: u32,
    pub alignment: u64,
    pub metadata: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<Info>,
    /// The end of the last tensor, from the beginning of the data.
    pub data_bytes: u64,
}

impl Writer {
    pub fn new() -> Self {
        let (metadata, tensors) = (Vec::new(), Vec::new());
        Writer { version: 3, alignment: 32, metadata, tensors, data_bytes: 0 }
    }

    pub fn meta(&mut self, key: &str, value: Vec<u8>) {
        self.metadata.push((key.to_owned(), value));
    }

    /// Replaces the value at `key`, or removes it.
    pub fn set(&mut self, key: &str, value: Option<Vec<u8>>) {
        self.metadata.retain(|(name, _)| name != key);
        self.metadata.extend(value.map(|value| (key.to_owned(), value)));
    }

    /// Adds a tensor behind the others.
    pub fn tensor(&mut self, name: &str, dims: &[u64], quant: Quant) {
        let offset = self.data_bytes.next_multiple_of(self.alignment);
        let rows: u64 = dims[1..].iter().product();
        self.data_bytes = offset + rows * quant.row_bytes(dims[0]);
        let id = quant.ggml_id().expect("a type of GGML");
        self.tensors.push(Info { name: name.to_owned(), dims: dims.to_vec(), id, offset });
    }

    /// The header up to where the data begins.
    pub fn header(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            bytes.extend(counted(key));
            bytes.extend(value);
        }
        for info in &self.tensors {
            bytes.extend(counted(&info.name));
            bytes.extend((info.dims.len() as u32).to_le_bytes());
            bytes.extend(info.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            bytes.extend(info.id.to_le_bytes());
            bytes.extend(info.offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(self.alignment as usize), 0);
        bytes
    }

    /// The size of the file.
    pub fn file_bytes(&self) -> u64 {
        self.header().len() as u64 + self.data_bytes
    }
}

/// The header of a file that holds `model`.
pub fn of_model(model: &Model) -> Writer {
    whole(model)
}

/// What layers of OLMoE and gpt-oss have besides.
fn vectors_of(model: &Model) -> Vec<(&'static str, Vec<u64>)> {
    let (heads, kv) = (model.heads * model.head_size, model.kv_heads * model.head_size);
    let (experts, ffn) = (model.mixture.map_or(0, |own| own.experts), model.ffn);
    match model.architecture.as_str() {
        "olmoe" => vec![("attn_q_norm.weight", vec![heads]), ("attn_k_norm.weight", vec![kv])],
        "gpt-oss" => vec![
            ("attn_output.bias", vec![model.hidden]),
            ("attn_sinks.weight", vec![model.heads]),
            ("ffn_gate_inp.bias", vec![experts]),
            ("ffn_gate_exps.bias", vec![ffn, experts]),
            ("ffn_up_exps.bias", vec![ffn, experts]),
            ("ffn_down_exps.bias", vec![model.hidden, experts]),
        ],
        _ => Vec::new(),
    }
}

/// What comes before the tensors.
fn header(model: &Model) -> Writer {
    let arch = &model.architecture;
    let mut writer = Writer::new();
    writer.meta("general.architecture", text_value(arch));
    writer.meta("general.name", text_value(&model.name));
    for (key, value) in [
        ("block_count", model.layers.len() as u64),
        ("embedding_length", model.hidden),
        ("feed_forward_length", model.ffn),
        ("context_length", model.context),
        ("attention.head_count", model.heads),
        ("attention.head_count_kv", model.kv_heads),
        ("attention.key_length", model.head_size),
        ("attention.value_length", model.head_size),
    ] {
        writer.meta(&format!("{arch}.{key}"), u32_value(value as u32));
    }
    if let Some(mixture) = model.mixture {
        for (key, value) in [
            ("expert_count", mixture.experts),
            ("expert_used_count", mixture.used),
            ("expert_feed_forward_length", model.ffn),
            ("expert_shared_feed_forward_length", mixture.shared),
        ] {
            if value > 0 {
                writer.meta(&format!("{arch}.{key}"), u32_value(value as u32));
            }
        }
    }
    if let Some(window) = model.layers.iter().find_map(|layer| layer.window) {
        writer.meta(&format!("{arch}.attention.sliding_window"), u32_value(window as u32));
    }
    let tokens: Vec<u8> = ["<s>", "", "a"].iter().flat_map(|token| counted(token)).collect();
    writer.meta("tokenizer.ggml.tokens", array_value(8, 3, &tokens));
    writer.meta("tokenizer.ggml.scores", array_value(6, 3, &[0; 12]));
    writer
}

fn whole(model: &Model) -> Writer {
    let arch = &model.architecture;
    let mut writer = header(model);
    let table = [model.hidden, model.vocab];
    writer.tensor("token_embd.weight", &table, model.embedding.quant);
    for (at, layer) in model.layers.iter().enumerate() {
        let names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
        for (name, (_, matrix)) in names.into_iter().zip(layer.matrices()) {
            let dims = [matrix.cols, matrix.rows];
            match layer.experts.filter(|_| name.starts_with("ffn")) {
                None => writer.tensor(&format!("blk.{at}.{name}.weight"), &dims, matrix.quant),
                Some(experts) => {
                    let dims = [matrix.cols, matrix.rows, experts.count];
                    writer.tensor(&format!("blk.{at}.{name}_exps.weight"), &dims, matrix.quant);
                }
            }
            let biased = arch.starts_with("qwen2") || arch == "gpt-oss";
            if biased && ["attn_q", "attn_k", "attn_v"].contains(&name) {
                writer.tensor(&format!("blk.{at}.{name}.bias"), &dims[1..], Quant::F32);
            }
        }
        if arch.starts_with("qwen3") {
            for norm in ["attn_q_norm", "attn_k_norm"] {
                writer.tensor(&format!("blk.{at}.{norm}.weight"), &[model.head_size], Quant::F32);
            }
        }
        if let Some(experts) = layer.experts {
            let names = ["gate_inp", "gate_inp_shexp", "gate_shexp", "up_shexp", "down_shexp"];
            for (name, (_, matrix)) in names.into_iter().zip(experts.always()) {
                let dims = [matrix.cols, matrix.rows];
                let dims = if name == "gate_inp_shexp" { &dims[..1] } else { &dims[..] };
                writer.tensor(&format!("blk.{at}.ffn_{name}.weight"), dims, matrix.quant);
            }
        }
        let ffn_norm = if arch == "gpt-oss" { "post_attention_norm" } else { "ffn_norm" };
        for norm in ["attn_norm", ffn_norm] {
            writer.tensor(&format!("blk.{at}.{norm}.weight"), &[model.hidden], Quant::F32);
        }
        for (name, dims) in vectors_of(model) {
            writer.tensor(&format!("blk.{at}.{name}"), &dims, Quant::F32);
        }
    }
    writer.tensor("output_norm.weight", &[model.hidden], Quant::F32);
    if !model.tied {
        writer.tensor("output.weight", &table, model.head.quant);
    }
    writer
}
