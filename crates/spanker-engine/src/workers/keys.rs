// SPDX-License-Identifier: Apache-2.0
//! Keys of workers, with errors that say what to do.

use std::path::Path;

pub use spanker_fabric_tcp::Key as WorkerKey;

use super::tcp::explained;
use crate::error::Result;

/// A key that nobody has yet.
///
/// # Errors
/// [`crate::EngineError::Unavailable`] if the system has no random numbers.
pub fn new_key() -> Result<WorkerKey> {
    WorkerKey::generate().map_err(|error| explained(&error))
}

/// The key in a file, which its owner alone must be able to read.
///
/// # Errors
/// [`crate::EngineError::Request`] with the path and the reason.
pub fn read_key(path: &Path) -> Result<WorkerKey> {
    WorkerKey::read(path).map_err(|error| explained(&error))
}

/// Writes a key to a file that does not exist yet.
///
/// # Errors
/// [`crate::EngineError::Request`] with the path and the reason.
pub fn write_key(key: &WorkerKey, path: &Path) -> Result<()> {
    key.write(path).map_err(|error| explained(&error))
}
