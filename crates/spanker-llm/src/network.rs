// SPDX-License-Identifier: Apache-2.0
//! A model's file as a network: its shape, its numbers, and where each tensor lies.

use std::ops::Range;

use ggml_spanker::WEIGHT_TYPES;
use ggml_spanker::ops::Pairs;
use spanker_model::gguf::{Header, Tensor, Value, ffn_norm};
use spanker_model::{Model, Quant};

use crate::LlmError;

mod rope;

/// How positions turn queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Numbers of a head that turn.
    pub dims: usize,
    /// How they pair up.
    pub pairs: Pairs,
    /// The angle of a pair for one position, in radians.
    pub angles: Vec<f64>,
    /// Other ones for contexts that are longer than those of the training, where the file has such.
    pub long: Option<LongRope>,
    /// The same in layers with a window, where these have a base of their own.
    pub local: Option<Vec<f64>>,
    /// What cosines and sines are multiplied with.
    pub scale: f64,
}

/// Angles of long contexts.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// Tokens of a context up to which the others hold.
    pub trained: usize,
    /// The angle of a pair for one position, in radians.
    pub angles: Vec<f64>,
}

impl Rope {
    /// Cosines and sines of positions of a context of so many tokens, `[cos 0, sin 0, ..]` for each, by the angles of the
    /// model or by those of layers with a window.
    #[must_use]
    pub fn table(&self, context: usize, positions: Range<usize>, local: bool) -> Vec<f32> {
        let angles = self.local.as_ref().filter(|_| local);
        // Other bases are for near positions, which nobody has to stretch.
        let scale = if angles.is_some() { 1.0 } else { self.scale };
        let long = self.long.as_ref().filter(|long| context > long.trained);
        let usual = long.map_or(&self.angles, |long| &long.angles);
        let angles = angles.unwrap_or(usual);
        let turn = |position: usize| {
            angles.iter().flat_map(move |angle| {
                let (sin, cos) = (position as f64 * angle).sin_cos();
                [(cos * scale) as f32, (sin * scale) as f32]
            })
        };
        positions.flat_map(turn).collect()
    }

    /// The tables of all positions of a context: of the model, and of layers with a window.
    pub(crate) fn tables(&self, context: usize) -> Vec<f32> {
        let mut tables = self.table(context, 0..context, false);
        if self.local.is_some() {
            tables.extend(self.table(context, 0..context, true));
        }
        tables
    }
}

/// A model and the bytes of its file.
///
/// `B` is what holds the bytes: a memory map, or a vector in tests.
#[derive(Debug)]
pub struct Network<B> {
    bytes: B,
    header: Header,
    model: Model,
    /// The small number in norms.
    pub(crate) epsilon: f32,
    pub(crate) rope: Rope,
}

impl<B: AsRef<[u8]>> Network<B> {
    /// Reads the shape and the numbers of a model. The weights stay where they are.
    ///
    /// # Errors
    /// [`LlmError::Model`] for a file that is no model of a known kind, [`LlmError::Type`] for a tensor of a
    /// type that cannot be computed with, [`LlmError::Unsupported`] for a feature that is not there.
    pub fn new(bytes: B) -> Result<Self, LlmError> {
        let file = bytes.as_ref();
        let header = Header::read(file, file.len() as u64)?;
        Network::with_header(header, bytes)
    }

    /// The same with a header that has been read: that of a model in parts is not at the beginning of its bytes alone.
    ///
    /// # Errors
    /// As [`Network::new`].
    pub fn with_header(header: Header, bytes: B) -> Result<Self, LlmError> {
        let file = bytes.as_ref();
        let model = header.model()?;
        let architecture = model.architecture.clone();
        for (name, tensor) in header.tensors() {
            if !WEIGHT_TYPES.contains(&tensor.quant) {
                return Err(LlmError::Type { tensor: name.clone(), quant: tensor.quant });
            }
            let vector = tensor.dims.iter().filter(|&&dim| dim > 1).count() <= 1;
            if vector && tensor.quant != Quant::F32 {
                let quant = tensor.quant;
                let what = format!("tensor {name}: a vector of type {quant}, and not f32");
                return Err(LlmError::unsupported(what));
            }
        }
        let number = |key: &str| match header.metadata().get(&format!("{architecture}.{key}")) {
            Some(Value::Float(value)) => Some(*value),
            Some(value) => value.as_u64().map(|value| value as f64),
            None => None,
        };
        let epsilon = number("attention.layer_norm_rms_epsilon").unwrap_or(1e-5) as f32;
        if !(epsilon.is_finite() && epsilon >= 0.0) {
            return Err(LlmError::unsupported(format!("norms with an epsilon of {epsilon}")));
        }
        let rope = rope::read(&header, file, &model)?;
        let network = Network { header, model, epsilon, rope, bytes };
        network.check_vectors()?;
        Ok(network)
    }

    /// What the model is.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What the file says before its weights.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    /// A number that is the same for the same length, header and places of tensors: files of ranks that work together
    /// are compared by it, weights are not looked at.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let header = self.header.data_offset().min(self.bytes().len() as u64) as usize;
        let length = (self.bytes().len() as u64).to_le_bytes();
        // The header of a model in parts is the first part's alone.
        let tensors = self.header.tensors().iter().flat_map(|(name, tensor)| {
            let place = [&tensor.dims[..], &[tensor.offset, tensor.bytes]].concat();
            name.bytes().chain(place.into_iter().flat_map(u64::to_le_bytes))
        });
        let header = self.bytes()[..header].iter().copied();
        crate::fingerprint(length.into_iter().chain(header).chain(tensors))
    }

    /// How positions turn queries and keys.
    #[must_use]
    pub fn rope(&self) -> &Rope {
        &self.rope
    }

    /// A tensor and where it lies in the file.
    pub(crate) fn tensor(&self, name: &str) -> Result<(&Tensor, Range<usize>), LlmError> {
        let missing = || LlmError::unsupported(format!("tensor {name} is missing"));
        let tensor = self.header.tensors().get(name).ok_or_else(missing)?;
        Ok((tensor, range(&self.header, tensor)))
    }

    /// Whether every vector that is used is there and as long as it must be, and no other is.
    fn check_vectors(&self) -> Result<(), LlmError> {
        let model = &self.model;
        let (q, kv) = (model.heads * model.head_size, model.kv_heads * model.head_size);
        let mut used = vec![("output_norm.weight".to_owned(), model.hidden)];
        for at in 0..model.layers.len() {
            let mut add = |name: &str, length| used.push((format!("blk.{at}.{name}"), length));
            add("attn_norm.weight", model.hidden);
            add(ffn_norm(&model.architecture), model.hidden);
            if model.variant.post_norms {
                add("post_attention_norm.weight", model.hidden);
                add("post_ffw_norm.weight", model.hidden);
            }
            if model.variant.output_bias {
                add("attn_output.bias", model.hidden);
            }
            if model.variant.sinks {
                add("attn_sinks.weight", model.heads);
            }
            if model.biases {
                add("attn_q.bias", q);
                add("attn_k.bias", kv);
                add("attn_v.bias", kv);
            }
            if model.mixture.is_some_and(|own| own.shared > 0) {
                add("ffn_gate_inp_shexp.weight", model.hidden);
            }
            if let Some(mixture) = model.mixture.filter(|_| model.variant.expert_biases) {
                add("ffn_gate_inp.bias", mixture.experts);
            }
            if model.head_norms {
                let whole = model.variant.row_norms;
                add("attn_q_norm.weight", if whole { q } else { model.head_size });
                add("attn_k_norm.weight", if whole { kv } else { model.head_size });
            }
        }
        for (name, length) in &used {
            let (tensor, _) = self.tensor(name)?;
            let elements: u64 = tensor.dims.iter().product();
            if elements != *length {
                let what = format!("tensor {name} has {elements} elements and not {length}");
                return Err(LlmError::unsupported(what));
            }
        }
        let known = |name: &String| {
            let of_positions = rope::FACTORS.contains(&name.as_str());
            of_positions || used.iter().any(|(used, _)| used == name)
        };
        let vectors = self.header.tensors().iter().filter(|(_, tensor)| tensor.dims.len() < 2);
        match vectors.map(|(name, _)| name).find(|name| !known(name)) {
            Some(name) => {
                let what =
                    format!("tensor {name} is unknown in architecture {}", model.architecture);
                Err(LlmError::unsupported(what))
            }
            None => Ok(()),
        }
    }
}

/// Where a tensor lies; the header's reader has checked that it is in the file.
pub(crate) fn range(header: &Header, tensor: &Tensor) -> Range<usize> {
    let start = (header.data_offset() + tensor.offset) as usize;
    start..start + tensor.bytes as usize
}
