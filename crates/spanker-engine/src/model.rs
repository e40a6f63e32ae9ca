// SPDX-License-Identifier: Apache-2.0
//! A model that is open: its weights where the file is mapped, its tokenizer, its chat template.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ggml_spanker::GgufFile;
use spanker_llm::Network;
use spanker_text::{Tokenizer, template};

use crate::error::{EngineError, Result};

/// A model's file, open.
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    network: Arc<Network<GgufFile>>,
    tokenizer: Tokenizer,
}

impl Model {
    /// Opens a GGUF file. Weights are mapped, not read.
    ///
    /// # Errors
    /// [`EngineError::File`] for a file that cannot be opened or is no model that can be run.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        let path = path.as_ref();
        let named = |error: &dyn std::fmt::Display| EngineError::file(path, error);
        let file = GgufFile::open(path).map_err(|error| named(&chain(&error)))?;
        let network = Network::new(file).map_err(|error| named(&error))?;
        let tokenizer = Tokenizer::from_gguf(network.header(), network.bytes());
        let tokenizer = tokenizer.map_err(|error| named(&error))?;
        Ok(Model { path: path.to_path_buf(), network: Arc::new(network), tokenizer })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The weights and what it takes to compute with them.
    #[must_use]
    pub fn network(&self) -> &Arc<Network<GgufFile>> {
        &self.network
    }

    /// Layers, heads and sizes, as the planner needs them.
    #[must_use]
    pub fn shape(&self) -> &spanker_model::Model {
        self.network.model()
    }

    /// From text to tokens and back.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The source of the chat template.
    ///
    /// # Errors
    /// [`EngineError::Text`] for a file that has none.
    pub fn chat_template(&self) -> Result<String> {
        Ok(template::of(self.network.header(), self.network.bytes())?)
    }

    /// Tokens that the model was trained to look back on: its context, or its window if that is shorter.
    #[must_use]
    pub fn trained_context(&self) -> usize {
        let shape = self.shape();
        let key = format!("{}.attention.sliding_window", shape.architecture);
        let window = self.network.header().number(&key).filter(|&window| window >= 1.0);
        shape.context.min(window.map_or(u64::MAX, |window| window as u64)) as usize
    }

    /// A prompt as tokens, which must leave room for one more in a context. With `special`, special tokens that are
    /// spelled out in the text are tokens.
    ///
    /// # Errors
    /// [`EngineError::Request`] for a prompt without tokens, [`EngineError::Prompt`] for too many, [`EngineError::File`] for a
    /// tokenizer that does not go with the weights.
    pub fn encode(&self, text: &str, special: bool, context: usize) -> Result<Vec<u32>> {
        let tokens = self.tokenizer.encode(text, self.tokenizer.add_bos(), special);
        if tokens.is_empty() {
            return Err(EngineError::request("the prompt has no tokens"));
        }
        if tokens.len() >= context {
            let count = tokens.len();
            return Err(EngineError::Prompt {
                what: format!(
                    "the prompt has {count} tokens, and the context has room for {context} with the answer"
                ),
                hint: Some("give more room with --ctx-size".into()),
            });
        }
        let vocab = self.shape().vocab;
        match tokens.iter().find(|&&token| u64::from(token) >= vocab) {
            Some(token) => {
                let what = format!("its tokenizer has token {token}, its weights have {vocab}");
                Err(EngineError::file(&self.path, what))
            }
            None => Ok(tokens),
        }
    }
}

/// An error with what caused it, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text += &format!(": {cause}");
        next = cause.source();
    }
    text
}
