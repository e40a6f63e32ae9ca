// SPDX-License-Identifier: Apache-2.0
//! A model as a command names it: built in, a GGUF file, or a `config.json`.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, bail};
use spanker_model::gguf::Header;
use spanker_model::{Model, Quant, builtin, builtin_names, from_config_json};

use crate::{Usage, files};

/// How weights are stored where nobody says.
const DEFAULT_QUANT: Quant = Quant::Q4_0;
/// More than any `config.json` has.
const MOST_CONFIG: u64 = 16 << 20;

/// The model that `text` names: a built-in name, the path of a `.gguf` file, or the path of a
/// `config.json` or of the folder that holds one.
///
/// A GGUF file says how its weights are stored, unless `quant` replaces it; else it is `q4_0` where
/// `quant` does not say.
pub(crate) fn load(text: &str, quant: Option<Quant>) -> anyhow::Result<Model> {
    let path = Path::new(text);
    let ends = |ending: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending));
    if ends("gguf") {
        let model = from_gguf(path).with_context(|| path.display().to_string())?;
        return Ok(quant.map_or_else(|| model.clone(), |quant| model.with_quant(quant)));
    }
    let quant = quant.unwrap_or(DEFAULT_QUANT);
    if ends("json") {
        return from_config(path, quant);
    }
    match builtin(text, quant) {
        Ok(model) => Ok(model),
        Err(_) if path.is_dir() => from_config(&path.join("config.json"), quant),
        Err(_) if path.exists() => {
            bail!("{}: expected a .gguf file or a config.json", path.display())
        }
        Err(_) => {
            let names = builtin_names().join(", ");
            let expected = "expected a .gguf file, a config.json or one of";
            Err(Usage(format!("unknown model '{text}' ({expected}: {names})")).into())
        }
    }
}

fn from_gguf(path: &Path) -> anyhow::Result<Model> {
    let file = File::open(path).context("cannot open it")?;
    let about = file.metadata().context("cannot read it")?;
    if !about.is_file() {
        bail!("it is not a regular file");
    }
    Ok(Header::read(BufReader::new(file), about.len())?.model()?)
}

fn from_config(path: &Path, quant: Quant) -> anyhow::Result<Model> {
    let text = files::read(path, MOST_CONFIG)?;
    // Every model's file has the same name, so its folder tells more.
    let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let folder = full.parent().and_then(Path::file_name);
    let stem = full.file_stem().filter(|stem| *stem != "config");
    let name = stem.or(folder).map_or_else(|| "model".into(), |name| name.to_string_lossy());
    from_config_json(&text, &name, quant).with_context(|| path.display().to_string())
}
