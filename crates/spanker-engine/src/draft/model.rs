// SPDX-License-Identifier: Apache-2.0
//! Guesses of a small model with the same vocabulary, on threads of this process. Whatever it says, the text is that of the
//! large one; if it fails, there are no guesses.

use std::path::Path;
use std::time::Instant;

use spanker_llm::{LlmError, Session, Want};
use spanker_plan::Request;

use crate::error::{EngineError, Result};
use crate::host::Host;
use crate::layout::{self, Split};
use crate::model::Model;
use crate::threads::on_threads;

/// Tokens of a prompt that it runs together.
const BATCH: usize = 128;
/// What a new measurement of a guess counts for among those before.
const NEW: f64 = 0.2;

/// A small model that guesses what a large one will say.
#[derive(Debug)]
pub struct DraftModel {
    session: Session<'static>,
    context: usize,
    /// Seconds of a guess, as far as that is known.
    guess: Option<f64>,
    /// What went wrong; it guesses nothing any more.
    failed: Option<LlmError>,
}

impl DraftModel {
    /// Loads a model for a target with so much context, on so many threads.
    ///
    /// # Errors
    /// What opening it fails with; [`EngineError::Request`] for another vocabulary, with the first token that differs, and
    /// for a context that it was not made for; [`EngineError::DoesNotFit`] if there is less memory than it takes.
    pub fn load(path: &Path, target: &Model, context: usize, threads: usize) -> Result<DraftModel> {
        let model = Model::open(path)?;
        if let Some(what) = difference(&model, target) {
            let shown = path.display();
            return Err(EngineError::request(format!("--draft {shown}: {what}")));
        }
        let context = context.min(model.trained_context());
        let request = layout::request(context, BATCH.min(context), 1, 1);
        let host = Host::threads(threads, 1)?;
        let layout = Split::Gather.layout(model.shape(), &[1.0])?;
        let plan = host.plan_untimed(&model, &request, layout)?;
        fits(path, &model, &request)?;
        let runner = on_threads(&model, &plan, threads)?;
        let session = Session::new(Box::new(runner));
        Ok(DraftModel { session, context, guess: None, failed: None })
    }

    /// What a guess takes, in seconds, as far as that is known.
    #[must_use]
    pub fn guess_seconds(&self) -> f64 {
        self.guess.unwrap_or(0.0)
    }

    /// Why it guesses nothing any more.
    #[must_use]
    pub fn failed(&self) -> Option<&LlmError> {
        self.failed.as_ref()
    }

    /// What follows a text by this model: at most `most` tokens, the best one every time.
    pub fn guess(&mut self, text: &[u32], most: usize) -> Vec<u32> {
        let most = most.min(self.context.saturating_sub(text.len()));
        if most == 0 || self.failed.is_some() {
            return Vec::new();
        }
        self.try_guess(text, most).unwrap_or_else(|error| {
            self.session.release();
            self.failed = Some(error);
            Vec::new()
        })
    }

    fn try_guess(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, LlmError> {
        let same = self.session.tokens().iter().zip(text).take_while(|(a, b)| a == b).count();
        // The last token is run again, so that something follows it.
        self.session.cut(same.min(text.len().saturating_sub(1)));
        let known = self.session.tokens().len();
        let mut guesses = Vec::with_capacity(most);
        let begun = Instant::now();
        let mut outcome = self.session.feed(&text[known..], Want::Best(1))?;
        if text.len() - known <= 2 {
            self.note(begun.elapsed().as_secs_f64());
        }
        while let Some(&(token, _)) = outcome.last().best.first() {
            guesses.push(token);
            if guesses.len() == most {
                break;
            }
            let begun = Instant::now();
            outcome = self.session.feed(&[token], Want::Best(1))?;
            self.note(begun.elapsed().as_secs_f64());
        }
        Ok(guesses)
    }

    /// A guess took so many seconds.
    fn note(&mut self, took: f64) {
        self.guess = Some(self.guess.map_or(took, |known| known + NEW * (took - known)));
    }
}

/// Whether there is memory for a model's weights and its keys and values.
fn fits(path: &Path, model: &Model, request: &Request) -> Result<()> {
    let cache = Request { sequences: 1, ..request.clone() }.kv_bytes(model.shape());
    let needs = (model.network().bytes().len() as u64).saturating_add(cache);
    match crate::memory::available() {
        Some(has) if needs > has as u64 => {
            let shown = path.display();
            let what = format!("--draft {shown}: it needs {needs} bytes, {has} are free");
            let hint = Some("a smaller draft model, or --draft lookup, which needs none".into());
            Err(EngineError::DoesNotFit { what, hint })
        }
        _ => Ok(()),
    }
}

/// The first thing in which two vocabularies differ.
fn difference(draft: &Model, target: &Model) -> Option<String> {
    let (one, other) = (draft.tokenizer(), target.tokenizer());
    let sizes = [draft.shape().vocab, target.shape().vocab];
    if sizes[0] != sizes[1] || one.vocab() != other.vocab() {
        let [has, needs] = sizes;
        return Some(format!("its vocabulary has {has} tokens, the model's {needs}"));
    }
    let differs = |token: &u32| {
        one.piece(*token) != other.piece(*token) || one.kind(*token) != other.kind(*token)
    };
    if let Some(token) = (0..one.vocab() as u32).find(differs) {
        let [has, needs] =
            [one, other].map(|of| String::from_utf8_lossy(of.piece(token)).into_owned());
        return Some(format!("its token {token} is {has:?}, the model's {needs:?}"));
    }
    (one.bos() != other.bos() || one.ends() != other.ends())
        .then(|| "texts begin or end with other tokens than the model's".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn draft_model_says_what_it_would_say_itself_wherever_the_text_goes() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = testing::model_that_repeats(folder.path());
        let mut draft = DraftModel::load(model.path(), &model, 64, 1).expect("a draft");
        let text = [5, 6, 7, 8];
        let guesses = draft.guess(&text, 6);
        assert_eq!(guesses.len(), 6);
        // The same one by one, after texts that have nothing to do with it.
        let mut all = text.to_vec();
        for (at, guess) in guesses.iter().enumerate() {
            draft.guess(&[9, 9, at as u32], 2);
            assert_eq!(draft.guess(&all, 1), [*guess]);
            all.push(*guess);
        }
        assert_eq!(draft.guess(&[1; 62], 9).len(), 2, "the context is full");
        assert_eq!(draft.guess(&[1; 64], 9), [0u32; 0]);
        assert!(draft.guess_seconds() > 0.0 && draft.failed().is_none());
    }

    #[test]
    fn draft_that_fails_guesses_nothing_from_then_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = testing::model(folder.path());
        let mut draft = DraftModel::load(model.path(), &model, 64, 1).expect("a draft");
        // No token of its vocabulary.
        assert_eq!(draft.guess(&[5, 100_000], 3), [0u32; 0]);
        assert!(draft.failed().is_some());
        assert_eq!(draft.guess(&[5, 6], 3), [0u32; 0]);
    }

    #[test]
    fn drafts_that_cannot_guess_for_a_model_are_refused_before_they_are_loaded() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = testing::model(folder.path());
        let refused = |path: &Path| DraftModel::load(path, &model, 64, 1).expect_err("no draft");
        // Another token, a file that is cut, something else, nothing.
        let bytes = std::fs::read(model.path()).expect("a file");
        let at = bytes.windows(5).position(|part| part == b" w270").expect("a token");
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).expect("a file");
            path
        };
        let mut other = bytes.clone();
        other[at..at + 5].copy_from_slice(b" v270");
        let error = refused(&write("other.gguf", &other)).to_string();
        assert!(error.contains("its token 270 is \" v270\", the model's \" w270\""), "{error}");
        refused(&write("cut.gguf", &bytes[..bytes.len() / 2]));
        refused(&write("text.gguf", b"no model at all"));
        refused(&folder.path().join("none.gguf"));
        let mut family = bytes.clone();
        let at = family.windows(5).position(|part| part == b"llama").expect("its name");
        family[at..at + 5].copy_from_slice(b"lanai");
        refused(&write("family.gguf", &family));
    }
}
