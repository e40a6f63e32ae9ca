// SPDX-License-Identifier: Apache-2.0
//! What can go wrong between a model's file and its text, with advice where there is some.

use std::path::{Path, PathBuf};

use spanker_llm::LlmError;
use spanker_plan::PlanError;
use spanker_topology::TopologyError;

/// A request that cannot be met, or a run that could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A request that makes no sense.
    #[error("{what}")]
    Request {
        /// What is wrong, with the value.
        what: String,
        /// What to do instead.
        hint: Option<String>,
    },
    /// The model does not fit the cards.
    #[error("{what}")]
    DoesNotFit {
        /// What lacks what.
        what: String,
        /// What would make it fit.
        hint: Option<String>,
    },
    /// A prompt that there is no room for.
    #[error("{what}")]
    Prompt {
        /// How long it is, and how much room there is.
        what: String,
        /// How to get more.
        hint: Option<String>,
    },
    /// Cards, processors or ranks that are not there, or not any more.
    #[error("{what}")]
    Unavailable {
        /// What is not there, and why.
        what: String,
        /// How to go on.
        hint: Option<String>,
    },
    /// A file that cannot be used.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file or folder that cannot be opened, read, written or made.
    #[error("cannot {doing}: {error}")]
    Io {
        /// What could not be done, with the path.
        doing: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// A model that could not be downloaded.
    #[error("cannot fetch {model}: {cause}")]
    Fetch {
        /// Its name.
        model: &'static str,
        /// Why.
        cause: Box<EngineError>,
    },
    /// Whoever asked for it has had enough.
    #[error("interrupted")]
    Interrupted,
    /// A plan that cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Traces that cannot be laid side by side.
    #[error(transparent)]
    Compare(#[from] spanker_plan::CompareError),
    /// Cards, links and profiles that do not go together.
    #[error("{what}")]
    Cluster {
        /// What is wrong.
        what: String,
    },
    /// A run that could not go on.
    #[error(transparent)]
    Run(#[from] LlmError),
    /// A job over unequal backends that cannot be.
    #[error(transparent)]
    Job(#[from] crate::jobs::JobError),
    /// The next token could not be chosen, or text could not be read.
    #[error(transparent)]
    Text(#[from] spanker_text::TextError),
}

impl EngineError {
    /// A request that makes no sense.
    #[must_use]
    pub fn request(what: impl Into<String>) -> EngineError {
        EngineError::Request { what: what.into(), hint: None }
    }

    pub(crate) fn unavailable(what: impl Into<String>, hint: Option<String>) -> EngineError {
        EngineError::Unavailable { what: what.into(), hint }
    }

    pub(crate) fn cluster(what: &dyn std::fmt::Display) -> EngineError {
        EngineError::Cluster { what: what.to_string() }
    }

    pub(crate) fn file(path: &Path, what: impl std::fmt::Display) -> EngineError {
        EngineError::File { path: path.to_path_buf(), what: what.to_string() }
    }

    /// The same as what is wrong with a file.
    pub(crate) fn in_file(self, path: &Path) -> EngineError {
        match self {
            EngineError::Request { what, hint } => {
                EngineError::Request { what: format!("{}: {what}", path.display()), hint }
            }
            other => EngineError::file(path, other),
        }
    }

    pub(crate) fn io(doing: impl Into<String>, error: std::io::Error) -> EngineError {
        EngineError::Io { doing: doing.into(), error }
    }

    /// Whether nothing went wrong: whoever asked for it has had enough.
    #[must_use]
    pub fn is_interrupt(&self) -> bool {
        match self {
            EngineError::Interrupted | EngineError::Job(crate::jobs::JobError::Interrupted) => true,
            EngineError::Fetch { cause, .. } => cause.is_interrupt(),
            _ => false,
        }
    }

    /// What to do about it, where that is known.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            EngineError::Request { hint, .. }
            | EngineError::DoesNotFit { hint, .. }
            | EngineError::Prompt { hint, .. }
            | EngineError::Unavailable { hint, .. } => hint.as_deref(),
            EngineError::Fetch { cause, .. } => cause.hint(),
            _ => None,
        }
    }
}

impl From<TopologyError> for EngineError {
    fn from(error: TopologyError) -> EngineError {
        EngineError::cluster(&error)
    }
}

/// What comes of a call.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// An error with what caused it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text += &format!(": {cause}");
        next = cause.source();
    }
    text
}
