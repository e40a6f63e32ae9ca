// SPDX-License-Identifier: Apache-2.0
//! The shape of a model by its name: fetched, built in, a GGUF file, or a `config.json`. Weights are not opened.

use std::path::{Path, PathBuf};

use ggml_spanker::GgufFile;
use spanker_model::{Model, Quant, builtin, builtin_names, from_config_json};

use crate::error::{EngineError, Result, chain};
use crate::models::has_ending;
use crate::{files, models};

/// How weights are stored where nobody says.
const DEFAULT_QUANT: Quant = Quant::Q4_0;
/// More than any `config.json` has.
const MOST_CONFIG: u64 = 16 << 20;

/// A shape, and the file that it was read from where only its name was given.
#[derive(Debug)]
pub struct Found {
    /// The shape.
    pub model: Model,
    /// The file of a model that was fetched, and that a built-in shape has the name of as well.
    pub fetched: Option<PathBuf>,
}

/// The model that `text` names: a built-in name, the path of a `.gguf` file (any part of a model in several), of a
/// `config.json`, or of the folder that holds one of these; a `.gguf` file goes before a `config.json`.
///
/// A GGUF file says how its weights are stored, unless `quant` replaces it. A name without `quant` means the file
/// that was fetched, if one was, because that is what a run of this name uses; else it is the built-in shape in `q4_0`.
///
/// # Errors
/// [`EngineError::Request`] for a name that nothing has, [`EngineError::File`] for a file that describes no model.
pub fn find(text: &str, quant: Option<Quant>) -> Result<Found> {
    if quant.is_none()
        && !has_ending(Path::new(text), "gguf")
        && let Some(path) = models::fetched(text)?
    {
        return Ok(Found { model: from_gguf(&path)?, fetched: Some(path) });
    }
    Ok(Found { model: load(text, quant)?, fetched: None })
}

/// The same without what was fetched.
fn load(text: &str, given: Option<Quant>) -> Result<Model> {
    let path = Path::new(text);
    if has_ending(path, "gguf") {
        return of_file(path, given);
    }
    let quant = given.unwrap_or(DEFAULT_QUANT);
    if has_ending(path, "json") {
        return from_config(path, quant);
    }
    match builtin(text, quant) {
        Ok(model) => Ok(model),
        Err(_) if path.is_dir() => match models::in_folder(path)? {
            Some(file) => of_file(&file, given),
            None => from_config(&path.join("config.json"), quant),
        },
        Err(_) if path.exists() => {
            Err(EngineError::file(path, "expected a .gguf file or a config.json"))
        }
        Err(_) => {
            let names = builtin_names().join(", ");
            let expected = "expected a .gguf file, a config.json or one of";
            Err(EngineError::request(format!("unknown model '{text}' ({expected}: {names})")))
        }
    }
}

/// How most of a model's weights are stored.
#[must_use]
pub fn stored(model: &Model) -> &'static str {
    model.layers.first().map_or("?", |layer| layer.up.quant.name())
}

/// The shape that the header of a GGUF file describes.
///
/// # Errors
/// [`EngineError::File`] for a file that cannot be read or describes no model.
pub fn from_gguf(path: &Path) -> Result<Model> {
    let file = GgufFile::open(path).map_err(|error| EngineError::file(path, chain(&error)))?;
    file.header().model().map_err(|error| EngineError::file(path, error))
}

/// The same with weights that are stored as `quant` says, if it says anything.
fn of_file(path: &Path, quant: Option<Quant>) -> Result<Model> {
    let model = from_gguf(path)?;
    Ok(match quant {
        Some(quant) => model.with_quant(quant),
        None => model,
    })
}

fn from_config(path: &Path, quant: Quant) -> Result<Model> {
    let text = files::read(path, MOST_CONFIG)?;
    // Every model's file has the same name, so its folder tells more.
    let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let folder = full.parent().and_then(Path::file_name);
    let stem = full.file_stem().filter(|stem| *stem != "config");
    let name = stem.or(folder).map_or_else(|| "model".into(), |name| name.to_string_lossy());
    from_config_json(&text, &name, quant).map_err(|error| EngineError::file(path, error))
}
