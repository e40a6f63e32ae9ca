// SPDX-License-Identifier: Apache-2.0
//! A model as a command names it: fetched, built in, a GGUF file, or a `config.json`.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, bail};
use spanker_model::gguf::Header;
use spanker_model::{Model, Quant, builtin, builtin_names, from_config_json};

use crate::{Usage, files, models, output};

/// How weights are stored where nobody says.
const DEFAULT_QUANT: Quant = Quant::Q4_0;
/// More than any `config.json` has.
const MOST_CONFIG: u64 = 16 << 20;

/// The model that `text` names: a built-in name, the path of a `.gguf` file, or the path of a
/// `config.json` or of the folder that holds one.
///
/// A GGUF file says how its weights are stored, unless `quant` replaces it. A name without `quant` means the file
/// that was fetched, if one was, because that is what a run of this name uses; else it is the built-in shape in `q4_0`.
pub(crate) fn load(text: &str, quant: Option<Quant>) -> anyhow::Result<Model> {
    let path = Path::new(text);
    let ends = |ending: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending));
    if ends("gguf") {
        let model = from_gguf(path).with_context(|| path.display().to_string())?;
        return Ok(quant.map_or_else(|| model.clone(), |quant| model.with_quant(quant)));
    }
    if quant.is_none()
        && let Some(path) = models::fetched(text)?
    {
        let model = from_gguf(&path).with_context(|| path.display().to_string())?;
        let (shown, stored) = (path.display(), stored(&model));
        output::note(format_args!(
            "{text} is the fetched {shown} ({stored}); with --quant it is the built-in shape"
        ));
        return Ok(model);
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

/// How most of a model's weights are stored.
pub(crate) fn stored(model: &Model) -> &'static str {
    model.layers.first().map_or("?", |layer| layer.up.quant.name())
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
