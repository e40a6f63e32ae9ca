// SPDX-License-Identifier: Apache-2.0
//! From a header to a model: which tensor is which matrix.

use super::experts::{EXPERTS, is_bias, is_matrix};
use super::family::Positions;
use super::{Header, Tensor, Value};
use crate::error::printable;
use crate::model::{MAX_CONTEXT, MAX_WIDTH};
use crate::{Layer, MAX_LAYERS, Matrix, Mixture, Model, ModelError, Variant};

/// The matrices of a layer, in the order of [`Layer::matrices`].
const MATRICES: [&str; 7] = [
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
];
/// Queries, keys and values in one matrix, in this order.
const FUSED: &str = "attn_qkv.weight";
/// The norm before attention.
const ATTENTION_NORM: &str = "attn_norm.weight";
/// The norms of what attention and the feed-forward network give, where there are such.
const POST_NORMS: [&str; 2] = ["post_attention_norm.weight", "post_ffw_norm.weight"];
const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";
const FINAL_NORM: &str = "output_norm.weight";

/// The longest name that is taken from a file, in characters.
const MAX_NAME: usize = 64;

impl Header {
    /// The model that the file holds.
    ///
    /// Understood are the architectures `llama` (which the files of Mistral and Mixtral say, too), `qwen2`, `qwen3`,
    /// `qwen2moe`, `qwen3moe`, `gemma`, `gemma2`, `gemma3`, `phi3`, `granite`, `granitemoe`, `smollm3`, `olmoe` and
    /// `gpt-oss`. Without `output.weight`, the head is the embedding table.
    ///
    /// # Errors
    ///
    /// An architecture that is not understood, a file that is one part of several, metadata that is missing or absurd, or a tensor that is missing, unknown or of the
    /// wrong shape; the error names it.
    pub fn model(&self) -> Result<Model, ModelError> {
        let architecture = self.architecture()?;
        self.check_kind(architecture)?;
        let size = |key: &str, max| self.size(&format!("{architecture}.{key}"), max);
        let missing = |key: &str| ModelError::metadata(&format!("{architecture}.{key}"), "missing");
        let required = |key: &str, max| size(key, max)?.ok_or_else(|| missing(key));

        let layers = required("block_count", MAX_LAYERS)?;
        let hidden = required("embedding_length", MAX_WIDTH)?;
        let heads = required("attention.head_count", MAX_WIDTH)?;
        let kv_heads = size("attention.head_count_kv", MAX_WIDTH)?.unwrap_or(heads);
        let head_size = size("attention.key_length", MAX_WIDTH)?.unwrap_or(hidden / heads);
        let value_size = size("attention.value_length", MAX_WIDTH)?.unwrap_or(head_size);
        if value_size != head_size {
            let reason = format!("{value_size}, and keys have {head_size}");
            let key = format!("{architecture}.attention.value_length");
            return Err(ModelError::metadata(&key, reason));
        }
        let mixture = self.mixture(architecture)?;
        let ffn = match mixture {
            Some(_) => self.expert_width(architecture)?,
            None => required("feed_forward_length", MAX_WIDTH)?,
        };
        let variant = self.variant(architecture, [layers, hidden, heads])?;
        let others = self.other_bytes(layers, mixture, &variant)?;
        if variant.row_norms {
            self.tensor("blk.0.attn_q_norm.weight")?;
        }
        let positions = self.positions(architecture)?;
        let rows = [heads * head_size, kv_heads * head_size];
        let cuts = Cuts { variant, ffn_norm: ffn_norm(architecture), rows, hidden, ffn, mixture };
        let embedding = self.matrix(EMBEDDING)?;
        let tied = !self.tensors.contains_key(HEAD);
        let model = Model {
            name: self.name(architecture),
            architecture: architecture.to_owned(),
            source: "gguf".to_owned(),
            hidden,
            heads,
            kv_heads,
            head_size,
            ffn,
            vocab: embedding.rows,
            context: required("context_length", MAX_CONTEXT)?,
            layers: (0..layers)
                .zip(others.layers)
                .map(|(at, bytes)| self.layer(at, bytes, &cuts, &positions))
                .collect::<Result<_, _>>()?,
            embedding,
            head: if tied { embedding } else { self.matrix(HEAD)? },
            tied,
            biases: self.tensors.contains_key("blk.0.attn_q.bias"),
            head_norms: self.tensors.contains_key("blk.0.attn_q_norm.weight"),
            rope_dims: size("rope.dimension_count", MAX_WIDTH)?.unwrap_or(head_size),
            other_bytes: others.model,
            mixture,
            variant,
        };
        model.validate()?;
        Ok(model)
    }

    fn architecture(&self) -> Result<&str, ModelError> {
        let key = "general.architecture";
        let value = self.metadata.get(key).ok_or_else(|| ModelError::metadata(key, "missing"))?;
        value.as_str().ok_or_else(|| ModelError::metadata(key, "not a short text"))
    }

    /// The number between 1 and `max` at `key`, if there is one.
    pub(super) fn size(&self, key: &str, max: u64) -> Result<Option<u64>, ModelError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Array { .. }) => {
                Err(ModelError::metadata(key, "an array: layers of different shapes"))
            }
            Some(value) => match value.as_u64().filter(|size| (1..=max).contains(size)) {
                Some(size) => Ok(Some(size)),
                None => {
                    let value = printable(&format!("{value:?}"));
                    let reason = format!("{value} is not a whole number between 1 and {max}");
                    Err(ModelError::metadata(key, reason))
                }
            },
        }
    }

    /// What the file calls the model, without what a terminal would obey.
    fn name(&self, architecture: &str) -> String {
        let given = self.metadata.get("general.name").and_then(Value::as_str).unwrap_or("");
        let name: String = given.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
        let name = name.trim();
        if name.is_empty() { architecture.to_owned() } else { name.to_owned() }
    }

    pub(super) fn tensor(&self, name: &str) -> Result<&Tensor, ModelError> {
        self.tensors.get(name).ok_or_else(|| ModelError::tensor(name, "missing"))
    }

    pub(super) fn matrix(&self, name: &str) -> Result<Matrix, ModelError> {
        let tensor = self.tensor(name)?;
        match tensor.dims[..] {
            [cols, rows] => Ok(Matrix { rows, cols, quant: tensor.quant }),
            _ => Err(ModelError::tensor(name, format!("{:?} is not a matrix", tensor.dims))),
        }
    }

    fn layer(
        &self,
        at: u64,
        other_bytes: u64,
        cuts: &Cuts,
        positions: &Positions,
    ) -> Result<Layer, ModelError> {
        let post = POST_NORMS.into_iter().filter(|_| cuts.variant.post_norms);
        for norm in [ATTENTION_NORM, cuts.ffn_norm].into_iter().chain(post) {
            self.tensor(&format!("blk.{at}.{norm}"))?;
        }
        let matrix = |name: &str| self.matrix(&format!("blk.{at}.{name}"));
        let [q, k, v, o, gate, up, down] = MATRICES;
        let [rows, kv] = cuts.rows;
        let [q, k, v] = match cuts.variant.fused_qkv {
            true => self.parts(&format!("blk.{at}.{FUSED}"), [rows, kv, kv])?,
            false => [matrix(q)?, matrix(k)?, matrix(v)?],
        };
        let [gate, up, down] = match cuts.mixture {
            None if cuts.variant.fused_gate_up => {
                let [gate, up] = self.parts(&format!("blk.{at}.{up}"), [cuts.ffn; 2])?;
                [gate, up, matrix(down)?]
            }
            None => [matrix(gate)?, matrix(up)?, matrix(down)?],
            Some(Mixture { experts, .. }) => {
                let [gate, up, down] = EXPERTS.map(|name| format!("blk.{at}.{name}"));
                let stack = |name: &str| self.stack(name, experts);
                [stack(&gate)?, stack(&up)?, stack(&down)?]
            }
        };
        let o = matrix(o)?;
        let (window, turning) = positions.of(at);
        let experts = cuts.mixture.map(|mixture| self.experts(at, mixture)).transpose()?;
        if let Some(mixture) = cuts.mixture.filter(|_| cuts.variant.expert_biases) {
            self.expert_biases(at, (mixture, cuts.ffn, cuts.hidden))?;
        }
        Ok(Layer { q, k, v, o, gate, up, down, other_bytes, experts, window, turning })
    }

    /// Matrices that a file has as one, each with so many of its rows.
    fn parts<const N: usize>(&self, name: &str, rows: [u64; N]) -> Result<[Matrix; N], ModelError> {
        let whole = self.matrix(name)?;
        let expected = rows.iter().fold(0, |sum: u64, rows| sum.saturating_add(*rows));
        if whole.rows != expected {
            let reason = format!("{} rows, expected {expected}", whole.rows);
            return Err(ModelError::tensor(name, reason));
        }
        Ok(rows.map(|rows| Matrix { rows, ..whole }))
    }

    /// Bytes of what is neither a known matrix nor an unknown one: vectors, such as norms and biases.
    fn other_bytes(
        &self,
        layers: u64,
        mixture: Option<Mixture>,
        variant: &Variant,
    ) -> Result<Others, ModelError> {
        let fused = variant.fused_qkv;
        self.tensor(FINAL_NORM)?;
        let mut others = Others { layers: vec![0; layers as usize], model: 0 };
        for (name, tensor) in &self.tensors {
            let mut vectors = false;
            let (place, known) = match layer_of(name) {
                Some((at, rest)) => {
                    let place = usize::try_from(at).ok().and_then(|at| others.layers.get_mut(at));
                    let place = place.ok_or_else(|| {
                        ModelError::tensor(name, format!("the model has {layers} layers"))
                    })?;
                    vectors = variant.expert_biases && is_bias(rest);
                    let dense = if mixture.is_some() { &MATRICES[..4] } else { &MATRICES[..] };
                    let of_experts = mixture.is_some_and(|own| is_matrix(rest, own));
                    let known = dense.contains(&rest) || of_experts;
                    (place, known || fused && rest == FUSED)
                }
                None => (&mut others.model, [EMBEDDING, HEAD].contains(&name.as_str())),
            };
            if known {
                continue;
            }
            if !vectors && tensor.dims.iter().filter(|dim| **dim > 1).count() > 1 {
                return Err(ModelError::tensor(name, "unknown in this architecture"));
            }
            *place = place.saturating_add(tensor.bytes);
        }
        Ok(others)
    }
}

/// The name that an architecture's files have for the norm before the feed-forward network.
///
/// ```
/// assert_eq!(spanker_model::gguf::ffn_norm("llama"), "ffn_norm.weight");
/// ```
#[must_use]
pub fn ffn_norm(architecture: &str) -> &'static str {
    match architecture {
        "gpt-oss" => "post_attention_norm.weight",
        _ => "ffn_norm.weight",
    }
}

/// How matrices lie in tensors.
struct Cuts {
    variant: Variant,
    /// The name of the norm before the feed-forward network.
    ffn_norm: &'static str,
    /// Rows of queries, and of keys.
    rows: [u64; 2],
    hidden: u64,
    ffn: u64,
    mixture: Option<Mixture>,
}

/// Bytes of vectors, by where they belong.
struct Others {
    layers: Vec<u64>,
    model: u64,
}

/// The layer of a tensor `blk.<layer>.<rest>`, and the rest.
pub(super) fn layer_of(name: &str) -> Option<(u64, &str)> {
    let (digits, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    // Only one spelling of a number is a layer's: "01" and "+1" are not.
    let at: u64 = digits.parse().ok()?;
    (at.to_string() == digits).then_some((at, rest))
}
