// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a vocabulary, a template or a request for the next token.

use spanker_model::ModelError;

/// An error of this crate. Text that came from a file is escaped and shortened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The file's metadata could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A kind of vocabulary or splitting that is not understood.
    #[error("{what} '{name}' is not supported (expected one of: {expected})")]
    Unsupported {
        /// The key that names it.
        what: &'static str,
        /// The name as given.
        name: String,
        /// The names that are understood.
        expected: String,
    },
    /// A vocabulary whose parts do not fit together.
    #[error("{what}: {reason}")]
    Vocabulary {
        /// The part, such as `tokenizer.ggml.scores` or `token 7`.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A chat template that cannot be rendered.
    #[error("chat template: {reason}")]
    Template {
        /// What is wrong with it.
        reason: String,
    },
    /// A setting of the sampler that means nothing.
    #[error("{setting} {value}: expected {expected}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// No token can be chosen.
    #[error("no token to choose from: every one of {candidates} logits is not a number or -inf")]
    NoCandidate {
        /// How many there were.
        candidates: usize,
    },
}

impl TextError {
    pub(crate) fn vocabulary(what: impl Into<String>, reason: impl Into<String>) -> Self {
        TextError::Vocabulary { what: what.into(), reason: reason.into() }
    }
}

/// The longest piece of foreign text in a message, in characters.
const SHOWN: usize = 200;

/// Foreign text for a message: control characters escaped, long text cut.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars().take(SHOWN) {
        match c {
            '"' | '\'' | '\\' => shown.push(c),
            _ => shown.extend(c.escape_debug()),
        }
    }
    if text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    shown
}
