// SPDX-License-Identifier: Apache-2.0
//! Workers in a file, for those who would write the same list again and again.
//!
//! ```toml
//! workers = ["two", "three:7078"]
//! key-file = "key"    # beside this file, unless the path says otherwise
//! ```

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::tcp::worker_addresses;
use crate::error::{EngineError, Result};

/// The longest file.
const MOST: u64 = 1 << 20;

/// Workers, and the key that they take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerList {
    /// Their addresses, each with a port.
    pub addresses: Vec<String>,
    /// The file with the key.
    pub key_file: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Written {
    workers: Vec<String>,
    key_file: Option<PathBuf>,
}

/// Reads a file of workers.
///
/// # Errors
/// [`EngineError::Request`] for a file that cannot be read or is no such list.
pub fn read_worker_list(path: &Path) -> Result<WorkerList> {
    let shown = path.display();
    let refused = |reason: &dyn std::fmt::Display| EngineError::Request {
        what: format!("{shown}: {reason}"),
        hint: Some("workers = [\"two\", \"three:7078\"] and key-file = \"key\"".into()),
    };
    let length = std::fs::metadata(path).map_err(|error| refused(&error))?.len();
    if length > MOST {
        return Err(refused(&format_args!("{length} bytes, at most {MOST}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| refused(&error))?;
    let written: Written =
        toml::from_str(&text).map_err(|error| refused(&error.message().to_owned()))?;
    let addresses =
        worker_addresses(&written.workers.join(",")).map_err(|error| refused(&error))?;
    let beside = path.parent().unwrap_or(Path::new(""));
    Ok(WorkerList { addresses, key_file: written.key_file.map(|file| beside.join(file)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_and_the_key_beside_their_file_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers.toml");
        std::fs::write(&path, "workers = [\"two\", \"three:9\"]\nkey-file = \"key\"\n").unwrap();
        let list = read_worker_list(&path).unwrap();
        assert_eq!(list.addresses, ["two:7077", "three:9"]);
        assert_eq!(list.key_file, Some(folder.path().join("key")));
        std::fs::write(&path, "workers = [\"two\"]\nkey-file = \"/etc/key\"\n").unwrap();
        assert_eq!(read_worker_list(&path).unwrap().key_file, Some("/etc/key".into()));
    }

    #[test]
    fn files_that_are_no_list_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("workers.toml");
        let missing = read_worker_list(&path).unwrap_err().to_string();
        assert!(missing.contains("workers.toml"), "{missing}");
        for text in ["workers = []", "worker = [\"two\"]", "workers = [\"a\", \"a\"]", "x"] {
            std::fs::write(&path, text).unwrap();
            let error = read_worker_list(&path).unwrap_err().to_string();
            assert!(error.contains("workers.toml"), "{text}: {error}");
        }
    }
}
