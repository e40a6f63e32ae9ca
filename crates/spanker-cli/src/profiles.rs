// SPDX-License-Identifier: Apache-2.0
//! `spanker profiles`: which kinds of cards are known, and where their numbers come from.

use std::path::Path;

use spanker_engine::profile;
use spanker_topology::{Number, Profile};

use crate::output;

/// Show the built-in card profiles, or one of them with the source of every number
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker profiles                  the names
  spanker profiles rev-a            every number with its source and confidence
  spanker profiles rev-a --json     the same for machines
  spanker profiles rev-a --toml     the same as a file that --profile takes")]
pub(crate) struct Args {
    /// A built-in name or the path of a .toml file
    name: Option<String>,
    /// Print JSON: one object for each profile
    #[arg(long)]
    json: bool,
    /// Print the profile as a file that --profile of other commands takes
    #[arg(long, requires = "name", conflicts_with = "json")]
    toml: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let profiles = match &args.name {
        Some(name) => vec![profile(name, Path::new("."))?],
        None => Profile::builtin_names()
            .iter()
            .map(|name| Profile::builtin(name))
            .collect::<Result<_, _>>()?,
    };
    if args.toml {
        return output::line(profiles[0].to_toml().trim_end());
    }
    if args.json {
        return profiles.iter().try_for_each(output::json);
    }
    if args.name.is_some() {
        return show(&profiles[0]);
    }
    let row = |profile: &Profile| vec![profile.name.clone(), profile.summary.clone()];
    let rows = profiles.iter().map(row).collect();
    output::table(&["name", "what it is"], rows, &[])
}

fn show(profile: &Profile) -> anyhow::Result<()> {
    say!("{}: {}", profile.name, profile.summary)?;
    say!("wired as a {} unless told otherwise\n", profile.topology)?;
    let row = |number: Number| {
        let Number { name, value, range, provenance, confidence, source } = number;
        vec![name.into(), value, range, provenance, confidence, source]
    };
    let header = ["number", "value", "range", "provenance", "confidence", "source"];
    output::table(&header, profile.numbers().into_iter().map(row).collect(), &["value"])
}
