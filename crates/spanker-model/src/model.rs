// SPDX-License-Identifier: Apache-2.0
//! A model as sizes, what follows from them, and the check that they fit together.

use serde::{Deserialize, Serialize};

use crate::error::printable;
use crate::wire::Wire;
use crate::{Layer, Matrix, Mixture, ModelError, Quant, Turning, Variant};

/// The most layers that a model may have.
pub const MAX_LAYERS: u64 = 4096;
/// The largest width of a layer: with the other bounds, no sum of bytes exceeds 2^63.
pub(crate) const MAX_WIDTH: u64 = 1 << 22;
/// The largest vocabulary.
pub(crate) const MAX_VOCAB: u64 = 1 << 26;
/// The longest context.
pub(crate) const MAX_CONTEXT: u64 = 1 << 25;
/// The most bytes of norms and biases in one place.
const MAX_OTHER_BYTES: u64 = 1 << 40;
/// The longest name, in bytes.
const MAX_TEXT: usize = 256;

/// A Llama-family model: its hyperparameters, and every matrix with its size as stored.
///
/// A model from this crate, or from JSON, is [valid](Model::validate). In JSON, runs of equal layers
/// are stored once.
///
/// ```
/// use spanker_model::{Model, Quant, builtin};
/// let model = builtin("smollm2-135m", Quant::Q8_0)?;
/// let text = serde_json::to_string(&model).expect("a model is JSON");
/// assert!(text.len() < 1500, "30 equal layers are stored once");
/// assert_eq!(serde_json::from_str::<Model>(&text).expect("valid"), model);
/// # Ok::<(), spanker_model::ModelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct Model {
    /// What people call it.
    pub name: String,
    /// The family as GGUF files name it: `llama`, `qwen3moe`, `gemma3`.
    pub architecture: String,
    /// Where the sizes come from: `built-in`, `gguf` or `config.json`.
    pub source: String,
    /// The width of the residual stream.
    pub hidden: u64,
    /// Attention heads.
    pub heads: u64,
    /// Heads that keys and values have.
    pub kv_heads: u64,
    /// Elements of one head.
    pub head_size: u64,
    /// The width of the feed-forward network; of a mixture, of one expert.
    pub ffn: u64,
    /// Tokens in the vocabulary.
    pub vocab: u64,
    /// The longest context that it was trained for.
    pub context: u64,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// The embedding table: vocabulary x width.
    pub embedding: Matrix,
    /// The output matrix: vocabulary x width.
    pub head: Matrix,
    /// Whether the head is the embedding table, which is then stored once.
    pub tied: bool,
    /// Whether queries, keys and values have biases.
    pub biases: bool,
    /// Whether each head of queries and keys is normed.
    pub head_norms: bool,
    /// Numbers of a head that rotary embeddings turn.
    pub rope_dims: u64,
    /// Bytes of the final norm and of tables for positions.
    pub other_bytes: u64,
    /// What its layers are a mixture of, if they are one.
    pub mixture: Option<Mixture>,
    /// What its family does differently from a plain Llama.
    pub variant: Variant,
}

/// The rows and columns of a layer's matrices, in the order of [`Layer::matrices`].
pub(crate) fn layer_shapes(hidden: u64, q: u64, kv: u64, ffn: u64) -> [(u64, u64); 7] {
    let (up, down) = ((ffn, hidden), (hidden, ffn));
    [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), up, up, down]
}

impl Model {
    /// Parameters, the embedding table included and a tied head counted once.
    ///
    /// Norms and biases count as `f32`, in which GGUF files store them.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let layer = |layer: &Layer| layer.weights().saturating_add(layer.other_bytes / 4);
        let head = if self.tied { 0 } else { self.head.weights() };
        let rest = self.embedding.weights().saturating_add(head);
        let rest = rest.saturating_add(self.other_bytes / 4);
        self.layers.iter().map(layer).fold(rest, u64::saturating_add)
    }

    /// Bytes of all weights as stored; a tied head is stored once.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        let stored_apart = if self.tied { 0 } else { self.embedding.bytes() };
        let rest = self.head.bytes().saturating_add(self.other_bytes).saturating_add(stored_apart);
        self.layers.iter().map(Layer::bytes).fold(rest, u64::saturating_add)
    }

    /// Bytes of weights that decoding one token reads: all layers and the head, but not the
    /// embedding table, of which a token reads one row. Of a mixture, the experts that it meets.
    #[must_use]
    pub fn read_per_token(&self) -> u64 {
        let rest = self.head.bytes().saturating_add(self.other_bytes);
        let used = self.mixture.map_or(1, |mixture| mixture.used);
        self.layers.iter().map(|l| l.read_bytes(used)).fold(rest, u64::saturating_add)
    }

    /// Tables of angles that some layers' positions need: of the model, and of layers that have their own.
    #[must_use]
    pub fn turnings(layers: &[Layer]) -> u64 {
        if layers.iter().any(|layer| layer.turning == Turning::Local) { 2 } else { 1 }
    }

    /// Bytes that one token adds to the caches of all layers, which are stored in `kv`: a row of
    /// keys and a row of values in each.
    #[must_use]
    pub fn kv_bytes_per_token(&self, kv: Quant) -> u64 {
        let row = kv.row_bytes(self.kv_heads.saturating_mul(self.head_size));
        row.saturating_mul(2).saturating_mul(self.layers.len() as u64)
    }

    /// The model as if all its matrices were stored in `quant`; norms and biases stay.
    ///
    /// Where a row is no multiple of the block, another type [stands in](Quant::for_row), as in
    /// llama.cpp. Mixtures such as llama.cpp's `Q4_K_M` are not imitated.
    #[must_use]
    pub fn with_quant(&self, quant: Quant) -> Model {
        Model {
            layers: self.layers.iter().map(|layer| layer.with_quant(quant)).collect(),
            embedding: self.embedding.with_quant(quant),
            head: self.head.with_quant(quant),
            ..self.clone()
        }
    }

    /// Checks that all sizes are in bounds and fit together.
    ///
    /// After that no method of this model overflows, and neither does the product of
    /// [`kv_bytes_per_token`](Model::kv_bytes_per_token) and the context.
    ///
    /// # Errors
    ///
    /// Names the first part that is wrong, and its value.
    pub fn validate(&self) -> Result<(), ModelError> {
        self.check_texts()?;
        self.check_sizes()?;
        self.variant.check()?;
        for (at, layer) in self.layers.iter().enumerate() {
            self.check_layer(at, layer)?;
        }
        let table = (self.vocab, self.hidden);
        check_matrix(|| "embedding".to_owned(), &self.embedding, table)?;
        check_matrix(|| "head".to_owned(), &self.head, table)?;
        if self.tied && self.head != self.embedding {
            let (head, embedding) = (self.head.quant, self.embedding.quant);
            let reason = format!("tied, but stored as {head} and the embedding as {embedding}");
            return Err(ModelError::inconsistent("head", reason));
        }
        check_other(|| "model".to_owned(), self.other_bytes)
    }

    fn check_texts(&self) -> Result<(), ModelError> {
        for (what, text) in
            [("name", &self.name), ("architecture", &self.architecture), ("source", &self.source)]
        {
            if text.is_empty() || text.len() > MAX_TEXT || text.contains(char::is_control) {
                let text = printable(text);
                let reason = format!("'{text}' is not 1 to {MAX_TEXT} bytes of printable text");
                return Err(ModelError::inconsistent(what, reason));
            }
        }
        Ok(())
    }

    fn check_sizes(&self) -> Result<(), ModelError> {
        for (what, size, max) in [
            ("hidden", self.hidden, MAX_WIDTH),
            ("heads", self.heads, MAX_WIDTH),
            ("kv_heads", self.kv_heads, MAX_WIDTH),
            ("head_size", self.head_size, MAX_WIDTH),
            ("rope_dims", self.rope_dims, self.head_size),
            ("heads x head_size", self.heads.saturating_mul(self.head_size), MAX_WIDTH),
            ("ffn", self.ffn, MAX_WIDTH),
            ("vocab", self.vocab, MAX_VOCAB),
            ("context", self.context, MAX_CONTEXT),
            ("layers", self.layers.len() as u64, MAX_LAYERS),
        ] {
            if size == 0 || size > max {
                let reason = format!("{size} is not between 1 and {max}");
                return Err(ModelError::inconsistent(what, reason));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let reason = format!("{} do not divide {} heads", self.kv_heads, self.heads);
            return Err(ModelError::inconsistent("kv_heads", reason));
        }
        self.mixture.map_or(Ok(()), |mixture| mixture.check(self.ffn, MAX_WIDTH))
    }

    fn check_layer(&self, at: usize, layer: &Layer) -> Result<(), ModelError> {
        let (q, kv) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let shapes = layer_shapes(self.hidden, q, kv, self.ffn);
        for ((name, matrix), shape) in layer.matrices().into_iter().zip(shapes) {
            check_matrix(|| format!("layer {at} {name}"), matrix, shape)?;
        }
        self.check_experts(at, layer)?;
        if let Some(window) = layer.window.filter(|window| !(1..=MAX_CONTEXT).contains(window)) {
            let reason = format!("{window} is not between 1 and {MAX_CONTEXT}");
            return Err(ModelError::inconsistent(format!("layer {at} window"), reason));
        }
        check_other(|| format!("layer {at}"), layer.other_bytes)
    }
}

impl Model {
    /// A layer has experts if and only if the model is a mixture, and as many as that says.
    fn check_experts(&self, at: usize, layer: &Layer) -> Result<(), ModelError> {
        let (count, shared) = self.mixture.map_or((0, 0), |m| (m.experts, m.shared));
        let has = layer.experts.map_or(0, |experts| experts.count);
        if has != count {
            let reason = format!("{has}, and the model has {count}");
            return Err(ModelError::inconsistent(format!("layer {at} experts"), reason));
        }
        let Some(experts) = layer.experts else { return Ok(()) };
        let router = (count, self.hidden);
        check_matrix(|| format!("layer {at} router"), &experts.router, router)?;
        if experts.shared.is_some() != (shared > 0) {
            let (has, of) = (experts.shared.map_or(0, |own| own.gate.rows), shared);
            let reason = format!("width {has}, and the model's is {of}");
            return Err(ModelError::inconsistent(format!("layer {at} shared expert"), reason));
        }
        let Some(own) = experts.shared else { return Ok(()) };
        let (up, down) = ((shared, self.hidden), (self.hidden, shared));
        let shapes = [(1, self.hidden), up, up, down];
        for ((name, matrix), shape) in own.matrices().into_iter().zip(shapes) {
            check_matrix(|| format!("layer {at} {name}"), matrix, shape)?;
        }
        Ok(())
    }
}

fn check_matrix(
    what: impl Fn() -> String,
    matrix: &Matrix,
    (rows, cols): (u64, u64),
) -> Result<(), ModelError> {
    if (matrix.rows, matrix.cols) != (rows, cols) {
        let reason = format!("{} x {}, expected {rows} x {cols}", matrix.rows, matrix.cols);
        return Err(ModelError::inconsistent(what(), reason));
    }
    let block = matrix.quant.block();
    if !cols.is_multiple_of(block) {
        let reason = format!("rows of {cols} are not whole {} blocks of {block}", matrix.quant);
        return Err(ModelError::inconsistent(what(), reason));
    }
    Ok(())
}

fn check_other(what: impl Fn() -> String, bytes: u64) -> Result<(), ModelError> {
    if bytes > MAX_OTHER_BYTES {
        let reason = format!("{bytes} is more than {MAX_OTHER_BYTES}");
        return Err(ModelError::inconsistent(format!("{} other_bytes", what()), reason));
    }
    Ok(())
}
