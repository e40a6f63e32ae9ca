// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a twin.

use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TwinError {
    /// The system refused something.
    #[error("cannot {what}")]
    System {
        /// What was tried, with the thing it was tried on.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A directory that a twin must not use.
    #[error("{}: {reason}", dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Someone else's twin, or one's own, has the directory.
    #[error("a twin is up in {} ({})", dir.display(), supervisor(*.pid))]
    Up {
        /// The directory.
        dir: PathBuf,
        /// The process of its supervisor, if it has said so.
        pid: Option<u32>,
    },
    /// Nobody has the directory.
    #[error("no twin is up in {}", dir.display())]
    Down {
        /// The directory.
        dir: PathBuf,
    },
    /// A cluster that cannot be emulated.
    #[error("{0}")]
    Cluster(String),
    /// A card or a link that is not there.
    #[error("{0}")]
    Unknown(String),
    /// Something did not do what was asked.
    #[error("{0}")]
    Failed(String),
    /// What a supervisor in another process said.
    #[error("{message}")]
    Reported {
        /// Its error.
        message: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// A signal, or the end of the program that asked, before the twin was up.
    #[error("interrupted before the twin was up")]
    Interrupted,
}

fn supervisor(pid: Option<u32>) -> String {
    pid.map_or_else(
        || "it is just starting or ending".into(),
        |pid| format!("supervisor pid {pid}"),
    )
}

impl TwinError {
    /// What to do about it, where that is known.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            TwinError::Up { .. } => {
                Some("'spanker twin down' takes it down, '--replace' does so first")
            }
            TwinError::Down { .. } => Some("'spanker twin up --cards 4' starts one"),
            TwinError::Directory { .. } => Some("SPANKER_DEV_DIR names another directory"),
            TwinError::Reported { hint, .. } => hint.as_deref(),
            _ => None,
        }
    }

    /// The error with what it comes from, in one line, for another process.
    pub(crate) fn whole(&self) -> String {
        match self {
            TwinError::System { source, .. } => format!("{self}: {source}"),
            _ => self.to_string(),
        }
    }

    pub(crate) fn directory(dir: &Path, reason: impl Into<String>) -> TwinError {
        TwinError::Directory { dir: dir.to_path_buf(), reason: reason.into() }
    }
}

/// Says what was tried when the system refused it.
pub(crate) trait Tried<T> {
    /// Names what was tried.
    fn tried(self, what: impl FnOnce() -> String) -> Result<T, TwinError>;
}

impl<T, E: Into<io::Error>> Tried<T> for Result<T, E> {
    fn tried(self, what: impl FnOnce() -> String) -> Result<T, TwinError> {
        self.map_err(|source| TwinError::System { what: what(), source: source.into() })
    }
}
