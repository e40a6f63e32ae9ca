// SPDX-License-Identifier: Apache-2.0
//! Hyperparameters, and the model that follows from them when all matrices share one type.

use crate::model::layer_shapes;
use crate::{Experts, Layer, Matrix, Mixture, Model, ModelError, Quant, Turning, Variant};

/// Bytes of an element of a norm or a bias: GGUF files store them as `f32`.
const OTHER_ELEMENT: u64 = 4;

/// What a layer has besides matrices and its two norms.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Extras {
    /// A bias on queries, keys and values.
    pub(crate) qkv_bias: bool,
    /// A bias on attention's output.
    pub(crate) o_bias: bool,
    /// A bias on gate, up and down.
    pub(crate) ffn_bias: bool,
    /// A norm over each head of queries and of keys, shared by the heads.
    pub(crate) qk_norm: bool,
    /// A window, and in how many layers there is one without, the last of each such run.
    pub(crate) window: Option<(u64, u64)>,
}

/// The hyperparameters that determine a model's sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) architecture: &'static str,
    pub(crate) layers: u64,
    pub(crate) hidden: u64,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head_size: u64,
    pub(crate) ffn: u64,
    pub(crate) vocab: u64,
    pub(crate) context: u64,
    pub(crate) tied: bool,
    pub(crate) extras: Extras,
    pub(crate) mixture: Option<Mixture>,
    pub(crate) variant: Variant,
}

impl Shape {
    fn layer(&self, at: u64, quant: Quant) -> Layer {
        let (q, kv) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let shapes = layer_shapes(self.hidden, q, kv, self.ffn);
        let [q_, k, v, o, gate, up, down] =
            shapes.map(|(rows, cols)| Matrix { rows, cols, quant: Quant::F32 }.with_quant(quant));
        let of = |present: bool, elements: u64| if present { elements } else { 0 };
        let others = 2 * self.hidden
            + of(self.extras.qkv_bias, q + 2 * kv)
            + of(self.extras.o_bias, self.hidden)
            + of(self.extras.ffn_bias, 2 * self.ffn + self.hidden)
            + of(self.extras.qk_norm && !self.variant.row_norms, 2 * self.head_size)
            + of(self.extras.qk_norm && self.variant.row_norms, q + kv)
            + of(self.variant.sinks, self.heads)
            + self
                .mixture
                .filter(|_| self.variant.expert_biases)
                .map_or(0, |mixture| mixture.experts * (1 + 2 * self.ffn + self.hidden));
        let experts = self.mixture.map(|mixture| Experts::new(mixture, self.hidden, quant));
        let other_bytes = others * OTHER_ELEMENT;
        let window = self.extras.window.filter(|(_, every)| !(at + 1).is_multiple_of(*every));
        let (window, turning) = (window.map(|(window, _)| window), Turning::Global);
        Layer { q: q_, k, v, o, gate, up, down, other_bytes, experts, window, turning }
    }

    /// The model with all matrices in `quant`. The caller has checked that each size is in bounds.
    pub(crate) fn model(
        &self,
        name: &str,
        source: &str,
        quant: Quant,
    ) -> Result<Model, ModelError> {
        let table = Matrix { rows: self.vocab, cols: self.hidden, quant: Quant::F32 };
        let model = Model {
            name: name.to_owned(),
            architecture: self.architecture.to_owned(),
            source: source.to_owned(),
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_size: self.head_size,
            ffn: self.ffn,
            vocab: self.vocab,
            context: self.context,
            layers: (0..self.layers).map(|at| self.layer(at, quant)).collect(),
            embedding: table.with_quant(quant),
            head: table.with_quant(quant),
            tied: self.tied,
            biases: self.extras.qkv_bias,
            head_norms: self.extras.qk_norm,
            rope_dims: self.head_size,
            other_bytes: self.hidden * OTHER_ELEMENT,
            mixture: self.mixture,
            variant: self.variant,
        };
        model.validate()?;
        Ok(model)
    }
}
