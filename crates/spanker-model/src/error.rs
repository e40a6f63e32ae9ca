// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a model, or with the file that describes one.

use std::io;

/// An error of this crate.
///
/// Text that came from a file is escaped and shortened, so that a message is safe to print.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A name that nothing answers to.
    #[error("unknown {what} '{name}' (expected one of: {expected})")]
    Unknown {
        /// The kind of thing that was named.
        what: &'static str,
        /// The name as given.
        name: String,
        /// The names that exist.
        expected: String,
    },
    /// A kind of model that cannot be described here.
    #[error("architecture '{architecture}' is not supported: {reason}")]
    Unsupported {
        /// The architecture as the file names it.
        architecture: String,
        /// Why not.
        reason: String,
    },
    /// A model whose parts do not fit together, or are out of bounds.
    #[error("{what}: {reason}")]
    Inconsistent {
        /// The part, such as `hidden` or `layer 3 k`.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A `config.json` that is no JSON object.
    #[error("config.json: {reason}")]
    Json {
        /// What the parser says.
        reason: String,
    },
    /// A field of a `config.json` that is missing or absurd.
    #[error("config.json: {field}: {reason}")]
    Field {
        /// The field.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A GGUF file that is malformed.
    #[error("gguf: byte {offset}: {reason}")]
    Gguf {
        /// Where in the file.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// A key of a GGUF file's metadata that is missing or absurd.
    #[error("gguf: metadata '{key}': {reason}")]
    Metadata {
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor of a GGUF file that is missing or has the wrong shape.
    #[error("gguf: tensor '{name}': {reason}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that is no part, or not the expected one, of a model in several files.
    #[error("part '{name}': {reason}")]
    Part {
        /// The file's name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The reader failed.
    #[error("gguf: byte {offset}: reading failed: {reason}")]
    Read {
        /// How far the reader came.
        offset: u64,
        /// The kind of failure.
        kind: io::ErrorKind,
        /// What the reader says.
        reason: String,
    },
}

impl ModelError {
    pub(crate) fn unknown(what: &'static str, name: &str, expected: &[&str]) -> Self {
        ModelError::Unknown { what, name: printable(name), expected: expected.join(", ") }
    }

    pub(crate) fn unsupported(architecture: &str, reason: impl Into<String>) -> Self {
        ModelError::Unsupported { architecture: printable(architecture), reason: reason.into() }
    }

    pub(crate) fn inconsistent(what: impl Into<String>, reason: impl Into<String>) -> Self {
        ModelError::Inconsistent { what: what.into(), reason: reason.into() }
    }

    pub(crate) fn field(field: &str, reason: impl Into<String>) -> Self {
        ModelError::Field { field: field.to_owned(), reason: reason.into() }
    }

    pub(crate) fn gguf(offset: u64, reason: impl Into<String>) -> Self {
        ModelError::Gguf { offset, reason: reason.into() }
    }

    pub(crate) fn metadata(key: &str, reason: impl Into<String>) -> Self {
        ModelError::Metadata { key: printable(key), reason: reason.into() }
    }

    pub(crate) fn tensor(name: &str, reason: impl Into<String>) -> Self {
        ModelError::Tensor { name: printable(name), reason: reason.into() }
    }

    pub(crate) fn part(name: &str, reason: impl Into<String>) -> Self {
        ModelError::Part { name: printable(name), reason: reason.into() }
    }
}

/// The longest piece of foreign text in a message, in characters.
const SHOWN: usize = 100;

/// Foreign text for a message: control characters escaped, long text cut.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars().take(SHOWN) {
        // Quotes stay; what moves the cursor or hides does not.
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

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn foreign_text_is_escaped_and_cut() {
        assert_eq!(printable("blk.0"), "blk.0");
        assert_eq!(printable("a\x1b[2J\n"), "a\\u{1b}[2J\\n");
        assert_eq!(printable(&"x".repeat(5000)), format!("{}...", "x".repeat(100)));
    }
}
