// SPDX-License-Identifier: Apache-2.0
//! Files of models with random weights.

use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

use ggml_spanker::synthetic::{self, Sizes};
use serde::Serialize;
use spanker_model::{Model, Quant};

use crate::error::{EngineError, Result};
use crate::files::{self, Draft};

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Synthesized {
    /// Where it is.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// Where the generator began.
    pub seed: u64,
    /// How many tensors it has.
    pub tensors: usize,
    /// What the model is called.
    pub name: String,
    /// Its family, as GGUF files name it.
    pub architecture: String,
    /// How weights are stored.
    pub quant: Quant,
    /// Layers.
    pub layers: usize,
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
    /// Positions that it is said to know.
    pub context: u64,
    /// Whether the head is the embedding table.
    pub tied: bool,
    /// Experts of a layer; 0 without.
    pub experts: u64,
    /// Experts that a token meets; 0 without.
    pub experts_used: u64,
}

/// Writes a model with random weights as large as `like` but for `sizes`; the same arguments give the same file. It has its
/// name when it is complete. `watch` gets how many bytes of how many are done, and says whether to go on.
///
/// # Errors
/// [`EngineError::Request`] for sizes that no model has or a file that cannot be written, [`EngineError::Io`] while it is
/// written, [`EngineError::Interrupted`] when `watch` ends it.
pub fn synthesize(
    path: &Path,
    (like, architecture): (&Model, &str),
    quant: Quant,
    sizes: &Sizes,
    seed: u64,
    watch: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Synthesized> {
    files::check_output(path)?;
    let (writer, model) = synthetic::like(like, architecture, quant, sizes)
        .map_err(|error| EngineError::request(format!("--{error}")))?;
    let failed = |error| EngineError::io(format!("write {}", path.display()), error);
    let mut draft = Draft::new(path).map_err(failed)?;
    let (mut done, mut goes_on) = (0, true);
    let written = synthetic::write(&writer, BufWriter::new(draft.file()), seed, |bytes| {
        done += bytes;
        goes_on = watch(done, writer.file_bytes());
        if goes_on { Ok(()) } else { Err(io::Error::other("interrupted")) }
    });
    if !goes_on {
        return Err(EngineError::Interrupted);
    }
    written.and_then(|()| draft.finish()).map_err(failed)?;
    Ok(Synthesized {
        path: path.to_path_buf(),
        bytes: writer.file_bytes(),
        seed,
        tensors: writer.tensors().len(),
        architecture: architecture.to_owned(),
        quant,
        layers: model.layers.len(),
        hidden: model.hidden,
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_size: model.head_size,
        ffn: model.ffn,
        vocab: model.vocab,
        context: model.context,
        tied: model.tied,
        experts: model.mixture.map_or(0, |own| own.experts),
        experts_used: model.mixture.map_or(0, |own| own.used),
        name: model.name,
    })
}
