// SPDX-License-Identifier: Apache-2.0
//! Models with random weights, as large as real ones, for benchmarks and tests: their shapes, and the GGUF files that
//! hold them. They say nothing sensible.

mod blocks;
mod family;

use std::io::{self, Write};

use spanker_model::gguf::{Field, Header, Writer};
use spanker_model::{MAX_EXPERTS, MAX_LAYERS, Mixture, Model, ModelError, Quant, gating_of};

pub use family::{FAMILIES, family};

/// The tokens with a meaning, which come last.
const MARKS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// The fewest tokens: every byte and the marks.
const LEAST_VOCAB: u64 = 256 + MARKS.len() as u64;
/// The largest size that a flag takes. The writer and the reader have bounds of their own.
const MOST: u64 = 1 << 24;

/// Sizes that replace those of the model that is imitated.
#[derive(Debug, Clone, Default)]
pub struct Sizes {
    /// Layers.
    pub layers: Option<u64>,
    /// Width of the hidden state.
    pub hidden: Option<u64>,
    /// Heads of queries.
    pub heads: Option<u64>,
    /// Heads of keys and values.
    pub kv_heads: Option<u64>,
    /// Width of a head, an even number; hidden / heads if one of them is given and this is not.
    pub head_size: Option<u64>,
    /// Width of the feed-forward network.
    pub ffn: Option<u64>,
    /// Tokens of the vocabulary, at least 259.
    pub vocab: Option<u64>,
    /// Positions that the model is said to know.
    pub context: Option<u64>,
    /// Experts of a layer; of a mixture only.
    pub experts: Option<u64>,
    /// Experts that a token meets.
    pub experts_used: Option<u64>,
    /// Width of the expert that every token meets, where the architecture has one.
    pub shared_ffn: Option<u64>,
    /// Positions that a token sees, in layers that have a window.
    pub window: Option<u64>,
}

/// The file of a model as large as `like` with some sizes replaced, without its weights, which [`write()`] makes; and the
/// model that it describes.
///
/// # Errors
/// [`ModelError::Inconsistent`] names a size that is out of bounds or does not go with another.
pub fn like(
    like: &Model,
    architecture: &str,
    quant: Quant,
    sizes: &Sizes,
) -> Result<(Writer, Model), ModelError> {
    let shape = Shape::of(like, architecture, quant, sizes)?;
    let mut writer = Writer::new();
    shape.metadata(&mut writer)?;
    shape.tokenizer(&mut writer)?;
    shape.tensors(&mut writer)?;
    let header = writer.header();
    let model = Header::read(&header[..], writer.file_bytes())?.model()?;
    Ok((writer, model))
}

/// The sizes of a model.
struct Shape {
    name: String,
    /// As GGUF files name it: says which tensors there are besides plain matrices.
    architecture: String,
    quant: Quant,
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_size: u64,
    ffn: u64,
    vocab: u64,
    context: u64,
    window: Option<u64>,
    tied: bool,
    mixture: Option<Mixture>,
}

impl Shape {
    fn of(
        like: &Model,
        architecture: &str,
        quant: Quant,
        sizes: &Sizes,
    ) -> Result<Shape, ModelError> {
        let heads = sizes.heads.unwrap_or(like.heads);
        let hidden = sizes.hidden.unwrap_or(like.hidden);
        let head_size = match sizes.head_size {
            Some(size) => size,
            None if sizes.heads.is_none() && sizes.hidden.is_none() => like.head_size,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let reason = format!("do not divide hidden {hidden}: a head-size is needed, too");
                return Err(inconsistent("heads", heads, reason));
            }
        };
        // Fewer heads than the other model's keys have get keys of their own.
        let kv_heads = sizes.kv_heads.unwrap_or_else(|| {
            let fits = heads > 0 && heads.is_multiple_of(like.kv_heads);
            if fits { like.kv_heads } else { heads }
        });
        let shape = Shape {
            name: format!("synthetic {}", like.name),
            architecture: architecture.to_owned(),
            quant,
            layers: sizes.layers.unwrap_or(like.layers.len() as u64),
            hidden,
            heads,
            kv_heads,
            head_size,
            ffn: sizes.ffn.unwrap_or(like.ffn),
            vocab: sizes.vocab.unwrap_or(like.vocab),
            context: sizes.context.unwrap_or(like.context),
            window: sizes.window,
            tied: like.tied || architecture.starts_with("gemma"),
            mixture: mixture(like, architecture, sizes)?,
        };
        shape.check()?;
        Ok(shape)
    }

    fn check(&self) -> Result<(), ModelError> {
        for (what, size, least, most) in [
            ("layers", self.layers, 1, MAX_LAYERS),
            ("hidden", self.hidden, 1, MOST),
            ("heads", self.heads, 1, MOST),
            ("kv-heads", self.kv_heads, 1, MOST),
            ("head-size", self.head_size, 2, MOST),
            ("ffn", self.ffn, 1, MOST),
            ("vocab", self.vocab, LEAST_VOCAB, MOST),
            ("context", self.context, 1, MOST),
            ("window", self.window.unwrap_or(1), 1, MOST),
        ] {
            if !(least..=most).contains(&size) {
                return Err(inconsistent(what, size, format!("expected {least} to {most}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let reason = format!("do not divide heads {}", self.heads);
            return Err(inconsistent("kv-heads", self.kv_heads, reason));
        }
        if let Some(own) = self.mixture {
            for (what, size, least, most) in [
                ("experts", own.experts, 1, MAX_EXPERTS),
                ("experts-used", own.used, 1, own.experts),
                ("shared-ffn", own.shared, 0, MOST),
            ] {
                if !(least..=most).contains(&size) {
                    return Err(inconsistent(what, size, format!("expected {least} to {most}")));
                }
            }
        }
        if !self.head_size.is_multiple_of(2) {
            let reason = "rotary embeddings turn pairs, so it is even".into();
            return Err(inconsistent("head-size", self.head_size, reason));
        }
        Ok(())
    }

    fn metadata(&self, writer: &mut Writer) -> Result<(), ModelError> {
        let architecture = &self.architecture;
        writer.put("general.architecture", Field::Text(architecture))?;
        writer.put("general.name", Field::Text(&self.name))?;
        writer.put("general.file_type", Field::U32(file_type(self.quant)))?;
        writer.put("general.quantization_version", Field::U32(2))?;
        for (key, size) in [
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_size),
            ("attention.value_length", self.head_size),
            ("rope.dimension_count", self.head_size),
            ("vocab_size", self.vocab),
        ] {
            // Every size is at most 2^24.
            writer.put(&format!("{architecture}.{key}"), Field::U32(size as u32))?;
        }
        let of_experts = self.mixture.map(|own| {
            [
                ("expert_count", own.experts),
                ("expert_used_count", own.used),
                ("expert_feed_forward_length", self.ffn),
                ("expert_shared_feed_forward_length", own.shared),
            ]
        });
        for (key, size) in of_experts.into_iter().flatten().filter(|(_, size)| *size > 0) {
            writer.put(&format!("{architecture}.{key}"), Field::U32(size as u32))?;
        }
        let epsilon = format!("{architecture}.attention.layer_norm_rms_epsilon");
        writer.put(&epsilon, Field::F32(1e-5))?;
        self.family_keys(writer)
    }

    /// Bytes, then words that no text has, then the marks.
    fn tokenizer(&self, writer: &mut Writer) -> Result<(), ModelError> {
        let fill = self.vocab - LEAST_VOCAB;
        let mut tokens = spelled_bytes();
        tokens.extend((0..fill).map(|at| format!("\u{120}t{at}")));
        tokens.extend(MARKS.map(str::to_owned));
        let mut kinds = vec![1; tokens.len()];
        kinds[tokens.len() - MARKS.len()..].fill(3);
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        // Every size is at most 2^24.
        let end = (self.vocab - MARKS.len() as u64) as u32;
        for (key, field) in [
            ("model", Field::Text("gpt2")),
            ("pre", Field::Text("gpt-2")),
            ("tokens", Field::Texts(&tokens)),
            ("token_type", Field::I32s(&kinds)),
            ("merges", Field::Texts(&[])),
            ("bos_token_id", Field::U32(end)),
            ("eos_token_id", Field::U32(end)),
            ("eot_token_id", Field::U32(end + 2)),
            ("add_bos_token", Field::Bool(false)),
            ("add_space_prefix", Field::Bool(false)),
        ] {
            writer.put(&format!("tokenizer.ggml.{key}"), field)?;
        }
        Ok(())
    }

    fn tensors(&self, writer: &mut Writer) -> Result<(), ModelError> {
        // Only experts of gpt-oss are stored as MXFP4.
        let dense = match (&self.architecture[..], self.quant) {
            ("gpt-oss", Quant::Mxfp4) => Quant::Q8_0,
            (_, quant) => quant,
        };
        let mut matrix = |name: &str, rows: u64, cols: u64| {
            writer.tensor(&format!("{name}.weight"), &[cols, rows], dense.for_row(cols))
        };
        matrix("token_embd", self.vocab, self.hidden)?;
        if !self.tied {
            matrix("output", self.vocab, self.hidden)?;
        }
        for layer in 0..self.layers {
            for (name, rows, cols) in self.matrices() {
                if self.mixture.is_some() && name.starts_with("ffn") {
                    continue;
                }
                matrix(&format!("blk.{layer}.{name}"), rows, cols)?;
            }
        }
        for layer in 0..self.layers {
            self.experts(writer, layer)?;
        }
        for layer in 0..self.layers {
            for (name, length) in self.vectors() {
                writer.tensor(&format!("blk.{layer}.{name}"), &[length], Quant::F32)?;
            }
        }
        writer.tensor("output_norm.weight", &[self.hidden], Quant::F32)
    }

    /// The feed-forward half of a layer of a mixture.
    fn experts(&self, writer: &mut Writer, layer: u64) -> Result<(), ModelError> {
        let Some(Mixture { experts, shared, .. }) = self.mixture else { return Ok(()) };
        let (hidden, ffn, plain) = (self.hidden, self.ffn, Quant::F32);
        let name = |rest: &str| format!("blk.{layer}.{rest}.weight");
        let stored = |cols: u64| self.quant.for_row(cols);
        writer.tensor(&name("ffn_gate_inp"), &[hidden, experts], plain)?;
        for (rest, rows, cols) in
            [("ffn_gate", ffn, hidden), ("ffn_up", ffn, hidden), ("ffn_down", hidden, ffn)]
        {
            let stack = name(&format!("{rest}_exps"));
            writer.tensor(&stack, &[cols, rows, experts], stored(cols))?;
        }
        if self.architecture == "gpt-oss" {
            for (rest, width) in [("gate", ffn), ("up", ffn), ("down", hidden)] {
                let bias = format!("blk.{layer}.ffn_{rest}_exps.bias");
                writer.tensor(&bias, &[width, experts], plain)?;
            }
        }
        if shared == 0 {
            return Ok(());
        }
        writer.tensor(&name("ffn_gate_inp_shexp"), &[hidden], plain)?;
        for (rest, rows, cols) in
            [("ffn_gate", shared, hidden), ("ffn_up", shared, hidden), ("ffn_down", hidden, shared)]
        {
            writer.tensor(&name(&format!("{rest}_shexp")), &[cols, rows], stored(cols))?;
        }
        Ok(())
    }
}

/// What a model of this architecture is a mixture of, if it is one.
fn mixture(like: &Model, architecture: &str, sizes: &Sizes) -> Result<Option<Mixture>, ModelError> {
    let asked = sizes.experts.or(sizes.experts_used).or(sizes.shared_ffn);
    let dense = architecture == "llama" && like.mixture.is_none() && asked.is_none();
    let Some(gating) = gating_of(architecture).filter(|_| !dense) else {
        return match asked {
            Some(size) => {
                let reason = format!("{architecture} has no experts");
                Err(inconsistent("experts", size, reason))
            }
            None => Ok(None),
        };
    };
    let known = like.mixture.unwrap_or(Mixture { experts: 8, used: 2, gating, shared: 0 });
    let shared = match architecture {
        "qwen2moe" => {
            let usual = if known.shared > 0 { known.shared } else { like.ffn };
            sizes.shared_ffn.unwrap_or(usual)
        }
        _ => match sizes.shared_ffn {
            None => 0,
            Some(width) => {
                let reason = format!("{architecture} has no shared expert");
                return Err(inconsistent("shared-ffn", width, reason));
            }
        },
    };
    let experts = sizes.experts.unwrap_or(known.experts);
    let used = sizes.experts_used.unwrap_or(known.used.min(experts));
    Ok(Some(Mixture { experts, used, gating, shared }))
}

/// Writes a file with random weights: the same seed gives the same bytes. `progress` is called with how many more bytes of
/// weights are there, and can end it.
///
/// # Errors
/// What the output or `progress` fails with.
pub fn write(
    writer: &Writer,
    out: impl Write,
    seed: u64,
    mut progress: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    writer.write(out, |at, out| {
        let (name, tensor) = &writer.tensors()[at];
        blocks::write(out, seed, at, (name, tensor), &mut progress)
    })
}

fn inconsistent(what: &str, size: u64, reason: String) -> ModelError {
    ModelError::Inconsistent { what: format!("{what} {size}"), reason }
}

/// What spells each byte in a byte-level vocabulary: itself where it can be seen, else a letter from
/// 256 on.
fn spelled_bytes() -> Vec<String> {
    let mut unseen = 256..;
    (0_u32..256)
        .map(|byte| match byte {
            0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => byte,
            _ => unseen.next().unwrap_or(byte),
        })
        .filter_map(char::from_u32)
        .map(String::from)
        .collect()
}

/// The number by which GGUF files say what most of their weights are.
#[must_use]
pub fn file_type(quant: Quant) -> u32 {
    match quant {
        Quant::F16 => 1,
        Quant::Q4_0 => 2,
        Quant::Q4_1 => 3,
        Quant::Q8_0 => 7,
        Quant::Q5_0 => 8,
        Quant::Q5_1 => 9,
        Quant::Q4K => 14,
        Quant::Q5K => 16,
        Quant::Q6K => 18,
        Quant::Q2K => 10,
        Quant::Q3K => 12,
        Quant::Iq2Xxs => 19,
        Quant::Iq2Xs => 20,
        Quant::Iq3Xxs => 23,
        Quant::Iq4Nl => 25,
        Quant::Iq4Xs => 30,
        Quant::Tq1_0 => 36,
        Quant::Tq2_0 => 37,
        Quant::Bf16 => 32,
        Quant::Mxfp4 => 38,
        _ => 0,
    }
}
