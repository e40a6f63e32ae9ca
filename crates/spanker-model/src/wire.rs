// SPDX-License-Identifier: Apache-2.0
//! A model as JSON has it: runs of equal layers are stored once, and what is read is checked.

use serde::{Deserialize, Serialize};

use crate::{Layer, MAX_LAYERS, Matrix, Mixture, Model, ModelError, Variant};

/// `count` equal layers in a row.
#[derive(Debug, Serialize, Deserialize)]
struct Run {
    count: u64,
    layer: Layer,
}

/// [`Model`] with its layers in runs.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Wire {
    name: String,
    architecture: String,
    source: String,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_size: u64,
    ffn: u64,
    vocab: u64,
    context: u64,
    layers: Vec<Run>,
    embedding: Matrix,
    head: Matrix,
    tied: bool,
    #[serde(default)]
    biases: bool,
    #[serde(default)]
    head_norms: bool,
    /// All numbers of a head where absent.
    #[serde(default)]
    rope_dims: Option<u64>,
    other_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mixture: Option<Mixture>,
    /// A plain Llama's where absent.
    #[serde(default, skip_serializing_if = "Variant::is_plain")]
    variant: Variant,
}

impl From<Model> for Wire {
    fn from(model: Model) -> Self {
        let runs = model.layers.chunk_by(|one, next| one == next);
        let runs = runs.map(|run| Run { count: run.len() as u64, layer: run[0] });
        Wire {
            layers: runs.collect(),
            name: model.name,
            architecture: model.architecture,
            source: model.source,
            hidden: model.hidden,
            heads: model.heads,
            kv_heads: model.kv_heads,
            head_size: model.head_size,
            ffn: model.ffn,
            vocab: model.vocab,
            context: model.context,
            embedding: model.embedding,
            head: model.head,
            tied: model.tied,
            biases: model.biases,
            head_norms: model.head_norms,
            rope_dims: Some(model.rope_dims),
            other_bytes: model.other_bytes,
            mixture: model.mixture,
            variant: model.variant,
        }
    }
}

impl TryFrom<Wire> for Model {
    type Error = ModelError;

    fn try_from(wire: Wire) -> Result<Self, ModelError> {
        // The count is checked before anything is made that large.
        let count = wire.layers.iter().fold(0, |sum: u64, run| sum.saturating_add(run.count));
        if count > MAX_LAYERS {
            let reason = format!("{count} is not between 1 and {MAX_LAYERS}");
            return Err(ModelError::inconsistent("layers", reason));
        }
        let expand = |run: &Run| (0..run.count).map(move |_| run.layer).collect::<Vec<_>>();
        let model = Model {
            layers: wire.layers.iter().flat_map(expand).collect(),
            name: wire.name,
            architecture: wire.architecture,
            source: wire.source,
            hidden: wire.hidden,
            heads: wire.heads,
            kv_heads: wire.kv_heads,
            head_size: wire.head_size,
            ffn: wire.ffn,
            vocab: wire.vocab,
            context: wire.context,
            embedding: wire.embedding,
            head: wire.head,
            tied: wire.tied,
            biases: wire.biases,
            head_norms: wire.head_norms,
            rope_dims: wire.rope_dims.unwrap_or(wire.head_size),
            other_bytes: wire.other_bytes,
            mixture: wire.mixture,
            variant: wire.variant,
        };
        model.validate()?;
        Ok(model)
    }
}
