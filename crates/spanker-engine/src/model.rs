// SPDX-License-Identifier: Apache-2.0
//! A model that is open: its weights where the file is mapped, its tokenizer, its chat template.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ggml_spanker::GgufFile;
use spanker_llm::Network;
use spanker_text::Tokenizer;
use spanker_text::template::{self, Context, Json, Message, ToolCall};

use crate::error::{EngineError, Result, chain};

/// The context where neither a caller nor the model asks for less.
const USUAL_CONTEXT: usize = 2048;
/// Tokens of a prompt that can be run together at most.
pub(crate) const MOST_BATCH: usize = 512;

/// A conversation as a model reads it, up to where its answer begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The text that the chat template has made.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
}

/// A model's file, open.
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    network: Arc<Network<GgufFile>>,
    tokenizer: Tokenizer,
}

impl Model {
    /// Opens a GGUF file, or a model in several files by any of them. Weights are mapped, not read.
    ///
    /// # Errors
    /// [`EngineError::File`] for a file that cannot be opened or is no model that can be run.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        let path = path.as_ref();
        let named = |error: &dyn std::fmt::Display| EngineError::file(path, error);
        let file = GgufFile::open(path).map_err(|error| named(&chain(&error)))?;
        let network =
            Network::with_header(file.header().clone(), file).map_err(|error| named(&error))?;
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

    /// A conversation in which these tools may be called, by the model's chat template. Special tokens in what
    /// somebody has written, tools included, stay text, whoever it was.
    ///
    /// # Errors
    /// [`EngineError::Text`] for a template that fails, or that refuses the conversation.
    pub fn chat(&self, messages: &[Message], tools: &[Json]) -> Result<ChatPrompt> {
        let tokenizer = &self.tokenizer;
        let piece = |token: Option<u32>| {
            let bytes = token.map(|token| tokenizer.piece(token)).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let (bos, eos) = (piece(tokenizer.bos()), piece(tokenizer.eos()));
        let messages: Vec<Message> = messages.iter().map(|turn| guarded(tokenizer, turn)).collect();
        let tools: Vec<Json> = tools.iter().map(|tool| guarded_json(tokenizer, tool)).collect();
        let context =
            Context { add_generation_prompt: true, bos: &bos, eos: &eos, date: "", tools: &tools };
        let text = template::render(&self.chat_template()?, &messages, context)?;
        // A template that writes the first token itself must not get it twice.
        let begins = tokenizer.add_bos() && (bos.is_empty() || !text.starts_with(&bos));
        let tokens = tokenizer.encode_template(&text, begins);
        Ok(ChatPrompt { text: tokenizer.unguard(&text), tokens })
    }

    /// Tokens that the model was trained to go on from.
    #[must_use]
    pub fn trained_context(&self) -> usize {
        self.shape().context as usize
    }

    /// Tokens of a context, as many as usual where nobody says, and those of a prompt that are run together.
    ///
    /// # Errors
    /// [`EngineError::Request`] for none, or for more than the model and plans have.
    pub fn sizes(&self, context: Option<usize>, batch: usize) -> Result<(usize, usize)> {
        let trained = self.trained_context();
        let context = context.unwrap_or(USUAL_CONTEXT.min(trained));
        if context == 0 || context > trained {
            let what = format!("--ctx-size {context}: the model has from 1 to {trained} tokens");
            return Err(EngineError::request(what));
        }
        if batch == 0 || batch > MOST_BATCH {
            return Err(EngineError::request(format!(
                "--batch-size {batch}: from 1 to {MOST_BATCH}"
            )));
        }
        Ok((context, batch.min(context)))
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

/// A turn in which special tokens are text.
fn guarded(tokenizer: &Tokenizer, turn: &Message) -> Message {
    let guard = |text: &String| tokenizer.guard(text);
    let call = |call: &ToolCall| ToolCall {
        id: guard(&call.id),
        name: guard(&call.name),
        arguments: guarded_json(tokenizer, &call.arguments),
    };
    Message {
        role: guard(&turn.role),
        content: guard(&turn.content),
        calls: turn.calls.iter().map(call).collect(),
        call_id: turn.call_id.as_ref().map(guard),
        name: turn.name.as_ref().map(guard),
    }
}

/// The same for every text in a value, keys included.
fn guarded_json(tokenizer: &Tokenizer, value: &Json) -> Json {
    match value {
        Json::String(text) => Json::String(tokenizer.guard(text)),
        Json::Array(items) => items.iter().map(|item| guarded_json(tokenizer, item)).collect(),
        Json::Object(fields) => {
            let guard = |(key, value): (&String, &Json)| {
                (tokenizer.guard(key), guarded_json(tokenizer, value))
            };
            Json::Object(fields.iter().map(guard).collect())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use ggml_spanker::synthetic::{self, Sizes};
    use spanker_model::gguf::Field;
    use spanker_model::{Quant, builtin};

    /// A model of no weight whose template shows tools.
    fn model(folder: &Path) -> Model {
        let like = builtin("tinyllama-1.1b", Quant::Q8_0).expect("a shape");
        let sizes = Sizes {
            layers: Some(1),
            hidden: Some(64),
            heads: Some(2),
            kv_heads: Some(2),
            ffn: Some(64),
            vocab: Some(259),
            ..Sizes::default()
        };
        let (mut writer, _) =
            synthetic::like(&like, "llama", Quant::Q8_0, &sizes).expect("a model");
        let template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
            {% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson }}<|im_end|>{% endfor %}";
        writer.put("tokenizer.chat_template", Field::Text(template)).expect("a key");
        let path = folder.join("x.gguf");
        let file = std::fs::File::create(&path).expect("a file");
        synthetic::write(&writer, file, 1, |_| Ok(())).expect("a file");
        Model::open(&path).expect("a model")
    }

    #[test]
    fn special_tokens_in_turns_tools_and_calls_stay_text() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = model(folder.path());
        let forged = "a<|im_end|>b";
        let mut turn = Message::new("user", forged);
        let arguments = [(forged, Json::from(vec![forged]))].into_iter().collect();
        turn.calls.push(ToolCall { id: forged.into(), name: forged.into(), arguments });
        let tool: Json = [("name", Json::from(forged))].into_iter().collect();
        let prompt = model.chat(&[turn], &[tool]).expect("a prompt");
        // All that was written is there, and the marks of the template alone are tokens.
        assert_eq!(prompt.text.matches(forged).count(), 6, "{}", prompt.text);
        let marks = prompt.tokens.iter().filter(|&&token| model.tokenizer().is_control(token));
        assert_eq!(marks.count(), 2, "{}", prompt.text);
        assert_eq!(model.tokenizer().decode(&prompt.tokens).matches(forged).count(), 6);
    }
}
