// SPDX-License-Identifier: Apache-2.0
//! What families do differently: between products, in attention, and with positions. A plain Llama is the default.

use serde::{Deserialize, Serialize};

use crate::ModelError;

/// A finite number, by its bits, so that models can be compared and hashed.
///
/// ```
/// use spanker_model::Number;
/// assert_eq!(Number::new(0.5).map(Number::get), Some(0.5));
/// assert_eq!(Number::new(f32::NAN), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "f32", into = "f32")]
pub struct Number(u32);

impl Number {
    /// One.
    pub const ONE: Number = Number(0x3F80_0000);

    /// A number, if it is finite.
    #[must_use]
    pub fn new(value: f32) -> Option<Number> {
        // Both zeros are one number.
        value.is_finite().then(|| Number((value + 0.0).to_bits()))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> f32 {
        f32::from_bits(self.0)
    }

    /// Its bits.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl TryFrom<f32> for Number {
    type Error = String;

    fn try_from(value: f32) -> Result<Self, String> {
        Number::new(value).ok_or_else(|| format!("{value} is not finite"))
    }
}

impl From<Number> for f32 {
    fn from(number: Number) -> f32 {
        number.get()
    }
}

/// What the gate of a feed-forward network does to what opens it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Activation {
    /// `gate / (1 + exp(-gate)) * up`.
    #[default]
    Silu,
    /// The same with `gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) / 2` (Gemma).
    Gelu,
    /// `g / (1 + exp(-1.702 g)) * (u + 1)`, where g is the gate up to 7 and u the way up from -7 to 7 (gpt-oss).
    ClampedSilu,
}

impl Activation {
    /// All of them, each at the place that is its number in the ABI.
    pub const ALL: [Activation; 3] = [Activation::Silu, Activation::Gelu, Activation::ClampedSilu];

    /// Its number in the ABI.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// By its number.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Activation> {
        Self::ALL.get(code as usize).copied()
    }
}

/// Which angles turn the queries and keys of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Turning {
    /// Those of the model.
    #[default]
    Global,
    /// Those of layers with a window, which have a base of their own (Gemma 3).
    Local,
    /// None: the layer knows no positions (SmolLM3).
    None,
}

/// What a family does differently from a plain Llama.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Variant {
    /// What gates do.
    pub activation: Activation,
    /// Whether what attention and the feed-forward network give is normed before it is added.
    pub post_norms: bool,
    /// Whether attention's output has a bias.
    pub output_bias: bool,
    /// Whether every head has a score that no position has: what goes there is lost.
    pub sinks: bool,
    /// Whether queries and keys are normed as whole rows, all heads together (OLMoE).
    pub row_norms: bool,
    /// Whether routers and experts have biases (gpt-oss).
    pub expert_biases: bool,
    /// Whether the file has queries, keys and values in one matrix.
    pub fused_qkv: bool,
    /// Whether the file has gate and up in one matrix.
    pub fused_gate_up: bool,
    /// What rows of the embedding table are multiplied with.
    pub embedding_scale: Option<Number>,
    /// What products of queries and keys are multiplied with, if not 1 by the root of the head's size.
    pub attention_scale: Option<Number>,
    /// What is multiplied with before it is added to the residual stream.
    pub residual_scale: Option<Number>,
    /// What logits are multiplied with.
    pub logit_scale: Option<Number>,
    /// What scores of queries and keys come near to, and never pass.
    pub attention_cap: Option<Number>,
    /// What logits come near to, and never pass.
    pub logit_cap: Option<Number>,
}

impl Variant {
    /// Whether it is a plain Llama.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        *self == Variant::default()
    }

    /// What products of queries and keys are multiplied with in heads of a size: the bits of an f32.
    #[must_use]
    pub fn score_scale(&self, head_size: u64) -> u32 {
        match self.attention_scale {
            Some(scale) => scale.bits(),
            None => (1.0 / (head_size as f32).sqrt()).to_bits(),
        }
    }

    /// Caps and scales must be positive.
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        for (what, number) in [
            ("embedding_scale", self.embedding_scale),
            ("attention_scale", self.attention_scale),
            ("residual_scale", self.residual_scale),
            ("logit_scale", self.logit_scale),
            ("attention_cap", self.attention_cap),
            ("logit_cap", self.logit_cap),
        ] {
            if let Some(number) = number.filter(|number| number.get() <= 0.0) {
                let reason = format!("{} is not positive", number.get());
                return Err(ModelError::inconsistent(what, reason));
            }
        }
        Ok(())
    }
}
