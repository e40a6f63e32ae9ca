// SPDX-License-Identifier: Apache-2.0
//! What files of each family have besides sizes and plain matrices: keys of the header, and tensors of a layer.

use spanker_model::ModelError;
use spanker_model::gguf::{Field, Writer, ffn_norm};

use super::Shape;

/// What a file is of: a family's architecture, and whether it has a window that the architecture alone does not say.
///
/// ```
/// use ggml_spanker::synthetic::family;
/// assert_eq!(family("mistral"), ("llama", Some(4096)));
/// assert_eq!(family("gemma3"), ("gemma3", Some(512)));
/// ```
#[must_use]
pub fn family(name: &str) -> (&str, Option<u64>) {
    match name {
        "mistral" => ("llama", Some(4096)),
        "gemma2" => (name, Some(4096)),
        "gemma3" => (name, Some(512)),
        "gpt-oss" => (name, Some(128)),
        _ => (name, None),
    }
}

/// The families that there are files of.
pub const FAMILIES: [&str; 15] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2moe",
    "qwen3moe",
    "olmoe",
    "gpt-oss",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "granite",
    "granitemoe",
    "smollm3",
];

impl Shape {
    /// Keys that only this family has.
    pub(super) fn family_keys(&self, writer: &mut Writer) -> Result<(), ModelError> {
        let architecture = &self.architecture;
        let mut put =
            |key: &str, field: Field<'_>| writer.put(&format!("{architecture}.{key}"), field);
        if let Some(window) = self.window {
            // Every size is at most 2^24.
            put("attention.sliding_window", Field::U32(window as u32))?;
        }
        match architecture.as_str() {
            "gemma2" => {
                put("attn_logit_softcapping", Field::F32(50.0))?;
                put("final_logit_softcapping", Field::F32(30.0))?;
            }
            "gpt-oss" => {
                put("rope.scaling.type", Field::Text("yarn"))?;
                put("rope.scaling.factor", Field::F32(32.0))?;
                put("rope.scaling.original_context_length", Field::U32(4096))?;
            }
            "granite" | "granitemoe" => {
                put("embedding_scale", Field::F32(12.0))?;
                put("residual_scale", Field::F32(0.22))?;
                put("attention.scale", Field::F32(1.0 / self.head_size as f32))?;
                put("logit_scale", Field::F32(8.0))?;
            }
            _ => {}
        }
        let base = match architecture.as_str() {
            "gemma3" => 1e6,
            "gpt-oss" => 150_000.0,
            _ => 10_000.0,
        };
        put("rope.freq_base", Field::F32(base))
    }

    /// The matrices of a layer: name, rows and columns.
    pub(super) fn matrices(&self) -> Vec<(&'static str, u64, u64)> {
        let (q, kv) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let (hidden, ffn) = (self.hidden, self.ffn);
        if self.architecture == "phi3" {
            return vec![
                ("attn_qkv", q + 2 * kv, hidden),
                ("attn_output", hidden, q),
                ("ffn_up", 2 * ffn, hidden),
                ("ffn_down", hidden, ffn),
            ];
        }
        vec![
            ("attn_q", q, hidden),
            ("attn_k", kv, hidden),
            ("attn_v", kv, hidden),
            ("attn_output", hidden, q),
            ("ffn_gate", ffn, hidden),
            ("ffn_up", ffn, hidden),
            ("ffn_down", hidden, ffn),
        ]
    }

    /// The norms and biases of a layer, and their lengths.
    pub(super) fn vectors(&self) -> Vec<(&'static str, u64)> {
        let (q, kv) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let architecture = self.architecture.as_str();
        let mut list =
            vec![("attn_norm.weight", self.hidden), (ffn_norm(architecture), self.hidden)];
        if architecture == "gpt-oss" {
            list.extend([("attn_output.bias", self.hidden), ("attn_sinks.weight", self.heads)]);
            list.push(("ffn_gate_inp.bias", self.mixture.map_or(0, |own| own.experts)));
        }
        if architecture == "olmoe" {
            list.extend([("attn_q_norm.weight", q), ("attn_k_norm.weight", kv)]);
        }
        if architecture.starts_with("qwen2") || architecture == "gpt-oss" {
            list.extend([("attn_q.bias", q), ("attn_k.bias", kv), ("attn_v.bias", kv)]);
        }
        if architecture.starts_with("qwen3") || architecture == "gemma3" {
            let size = self.head_size;
            list.extend([("attn_q_norm.weight", size), ("attn_k_norm.weight", size)]);
        }
        if ["gemma2", "gemma3"].contains(&architecture) {
            let norms = ["post_attention_norm.weight", "post_ffw_norm.weight"];
            list.extend(norms.map(|norm| (norm, self.hidden)));
        }
        list
    }
}
