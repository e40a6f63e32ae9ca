// SPDX-License-Identifier: Apache-2.0
//! What the header of each family says besides sizes: windows, scales, caps, and which layers know positions. And what is
//! refused by name, because it would only look like a model that writes text.

use super::{Header, Value};
use crate::error::printable;
use crate::model::MAX_CONTEXT;
use crate::{Activation, ModelError, Number, Turning, Variant};

/// The architectures that are understood. Mistral's files say `llama`.
const KNOWN: [&str; 14] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen2moe",
    "qwen3moe",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "granite",
    "smollm3",
    "olmoe",
    "gpt-oss",
    "granitemoe",
];

/// Architectures that are something else, and what.
const OTHERS: [(&str, &str); 17] = [
    ("bert", EMBEDDING),
    ("modern-bert", EMBEDDING),
    ("nomic-bert", EMBEDDING),
    ("nomic-bert-moe", EMBEDDING),
    ("neo-bert", EMBEDDING),
    ("jina-bert-v2", EMBEDDING),
    ("jina-bert-v3", EMBEDDING),
    ("gemma-embedding", EMBEDDING),
    ("llama-embed", EMBEDDING),
    ("t5encoder", EMBEDDING),
    ("clip", VISION),
    ("mmproj", VISION),
    ("qwen2vl", VISION),
    ("qwen3vl", VISION),
    ("qwen3vlmoe", VISION),
    ("llama4", "its chunks of attention and its temperatures are not there"),
    ("deepseek2", "its latent attention is not there"),
];
const EMBEDDING: &str = "it is an embedding model, which writes no text";
const RERANKER: &str = "it is a reranker, which writes no text";
const VISION: &str = "it is a vision model";

/// Layers after whose window all positions are seen again: in how many layers there is one that sees everything, the last
/// of each such run. Where there is none of it, all layers have the window.
const fn full_every(architecture: &str) -> Option<u64> {
    match architecture.as_bytes() {
        b"gemma2" | b"gpt-oss" => Some(2),
        b"gemma3" => Some(6),
        _ => None,
    }
}

/// A window that the family has where the file names none.
const fn usual_window(architecture: &str) -> Option<u64> {
    match architecture.as_bytes() {
        b"gemma2" => Some(4096),
        _ => None,
    }
}

/// What a layer does with positions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Positions {
    window: Option<u64>,
    full_every: Option<u64>,
    /// In so many layers there is one that knows no positions, the last of each such run.
    unturned_every: Option<u64>,
    /// Whether layers with a window have angles of their own.
    local: bool,
}

impl Positions {
    /// The window and the angles of a layer.
    pub(super) fn of(&self, layer: u64) -> (Option<u64>, Turning) {
        let ends =
            |every: Option<u64>| every.is_some_and(|every| (layer + 1).is_multiple_of(every));
        let window = self.window.filter(|_| !ends(self.full_every));
        let turning = match window {
            _ if ends(self.unturned_every) => Turning::None,
            Some(_) if self.local => Turning::Local,
            _ => Turning::Global,
        };
        (window, turning)
    }
}

impl Header {
    /// Refuses what would only look like a model of this kind.
    pub(super) fn check_kind(&self, architecture: &str) -> Result<(), ModelError> {
        let refused = |reason: &str| Err(ModelError::unsupported(architecture, reason));
        if let Some((_, what)) = OTHERS.iter().find(|(name, _)| *name == architecture) {
            return refused(what);
        }
        let count = |key: &str| self.metadata.get(key).and_then(Value::as_u64).unwrap_or(0);
        if !KNOWN.contains(&architecture) {
            return refused(&format!("expected one of: {}", KNOWN.join(", ")));
        }
        match count(&format!("{architecture}.pooling_type")) {
            0 => {}
            4 => return refused(RERANKER),
            _ => return refused(EMBEDDING),
        }
        if self.tensors.keys().any(|name| name.starts_with("cls.")) {
            return refused(RERANKER);
        }
        let causal = self.metadata.get(&format!("{architecture}.attention.causal"));
        if causal.and_then(Value::as_bool) == Some(false) {
            return refused(EMBEDDING);
        }
        if self.tensors.keys().any(|name| name.starts_with("v.blk.") || name.starts_with("mm.")) {
            return refused(VISION);
        }
        let parts = count("split.count");
        if parts > 1 {
            let reason = format!("the file is one of {parts} parts, which must be merged first");
            return Err(ModelError::metadata("split.count", reason));
        }
        Ok(())
    }

    /// What the family does differently from a plain Llama.
    pub(super) fn variant(
        &self,
        architecture: &str,
        [layers, hidden, heads]: [u64; 3],
    ) -> Result<Variant, ModelError> {
        let number = |key: &str| self.positive(&format!("{architecture}.{key}"));
        let has = |name: &str| self.tensors.contains_key(&format!("blk.0.{name}"));
        let (gemma, phi) = (architecture.starts_with("gemma"), architecture == "phi3");
        let mut variant = Variant {
            activation: match architecture {
                "gpt-oss" => Activation::ClampedSilu,
                _ if gemma => Activation::Gelu,
                _ => Activation::Silu,
            },
            post_norms: gemma && architecture != "gemma",
            output_bias: has("attn_output.bias"),
            sinks: has("attn_sinks.weight"),
            row_norms: architecture == "olmoe",
            expert_biases: architecture == "gpt-oss",
            fused_qkv: phi && has("attn_qkv.weight"),
            fused_gate_up: phi && !has("ffn_gate.weight"),
            attention_cap: number("attn_logit_softcapping")?,
            logit_cap: number("final_logit_softcapping")?,
            ..Variant::default()
        };
        if architecture == "gemma2" {
            variant.attention_cap = variant.attention_cap.or_else(|| Number::new(50.0));
            variant.logit_cap = variant.logit_cap.or_else(|| Number::new(30.0));
        }
        if gemma {
            variant.embedding_scale = Number::new((hidden as f32).sqrt());
        }
        // The largest of each generation divides by another root.
        if matches!((architecture, layers), ("gemma2", 46) | ("gemma3", 62)) {
            variant.attention_scale = Number::new(1.0 / ((hidden / heads) as f32).sqrt());
        }
        let scales = ["embedding_scale", "attention.scale", "residual_scale", "logit_scale"];
        let [embedding, attention, residual, logits] = scales.map(number);
        let [embedding, attention, residual, logits] = [embedding?, attention?, residual?, logits?];
        if architecture.starts_with("granite") {
            variant.embedding_scale = embedding;
            variant.attention_scale = attention;
            variant.residual_scale = residual;
            variant.logit_scale = logits.and_then(|scale| Number::new(1.0 / scale.get()));
            return Ok(variant);
        }
        for (key, scale) in scales.into_iter().zip([embedding, attention, residual, logits]) {
            if let Some(scale) = scale.filter(|scale| *scale != Number::ONE) {
                let reason = format!("{}: {architecture} is known without it", scale.get());
                return Err(ModelError::metadata(&format!("{architecture}.{key}"), reason));
            }
        }
        Ok(variant)
    }

    /// What layers do with positions.
    pub(super) fn positions(&self, architecture: &str) -> Result<Positions, ModelError> {
        let key = format!("{architecture}.attention.sliding_window");
        let window = match self.metadata.get(&key).map(|value| (value, value.as_u64())) {
            None => usual_window(architecture),
            Some((_, Some(0))) => None,
            Some((_, Some(window))) if window <= MAX_CONTEXT => Some(window),
            Some((value, _)) => {
                let value = printable(&format!("{value:?}"));
                let reason = format!("{value} is not a whole number up to {MAX_CONTEXT}");
                return Err(ModelError::metadata(&key, reason));
            }
        };
        let pattern = format!("{architecture}.attention.sliding_window_pattern");
        let every = match self.size(&pattern, crate::MAX_LAYERS)? {
            // One in one: no layer has a window.
            Some(1) => Some(1),
            given => given.or_else(|| full_every(architecture)),
        };
        let turned = self.flag(&format!("{architecture}.rope.scaling.finetuned")).unwrap_or(true);
        let unturned_every = match architecture {
            "smollm3" => Some(4),
            "granite" | "granitemoe" if !turned => Some(1),
            _ => None,
        };
        let local = architecture == "gemma3";
        Ok(Positions { window, full_every: every, unturned_every, local })
    }

    /// The positive number at `key`, if there is one and it is not 0.
    fn positive(&self, key: &str) -> Result<Option<Number>, ModelError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let number = value.as_f64().and_then(|number| Number::new(number as f32));
        match number.filter(|number| number.get() >= 0.0) {
            Some(number) => Ok(Some(number).filter(|number| number.get() > 0.0)),
            None => {
                let value = printable(&format!("{value:?}"));
                Err(ModelError::metadata(key, format!("{value} is no positive number")))
            }
        }
    }
}
