// SPDX-License-Identifier: Apache-2.0
//! `spanker profiles`: which kinds of cards are known, and where their numbers come from.

use std::fmt::Display;
use std::path::Path;

use spanker_engine::profile;
use spanker_topology::{Profile, Value};

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
    output::line(&output::table(&["name", "what it is"], rows, &[]))
}

fn show(profile: &Profile) -> anyhow::Result<()> {
    output::line(&format!("{}: {}", profile.name, profile.summary))?;
    output::line(&format!("wired as a {} unless told otherwise\n", profile.topology))?;
    let (memory, compute, host) = (&profile.memory, &profile.compute, &profile.host);
    let mut rows = vec![
        row("memory capacity", &memory.capacity),
        row("memory reserved", &memory.reserved),
        row("memory bandwidth", &memory.bandwidth),
        row("compute", &compute.rate),
        row("fixed per operator", &compute.per_operator),
        row("fixed per token", &compute.per_token),
    ];
    rows.extend(compute.first_use.as_ref().map(|first_use| row("first use", first_use)));
    let plain = |name: &str, value: String, source: &str| {
        vec![name.into(), value, String::new(), String::new(), String::new(), source.into()]
    };
    if !compute.operators.is_empty() {
        let count = compute.operators.len().to_string();
        rows.push(plain("by operator", count, "rates: --toml lists them"));
    }
    if let Some(link) = &profile.link {
        rows.push(row("link, one direction", &link.bandwidth));
        if link.framing.is_some() {
            let rate = link.sustained(link.lanes.value).to_string();
            rows.push(plain("link, sustained", rate, "after framing"));
        }
        rows.extend(link.fabric.as_ref().map(|fabric| row("shared fabric", fabric)));
        rows.extend([
            row("bit error rate", &link.bit_error_rate),
            row("lanes", &link.lanes),
            row("ports", &link.ports),
            row("link latency", &link.latency),
            row("collective base", &link.base),
            row("link round trip", &link.round_trip),
            row("link training", &link.training),
            plain("exchanges", link.exchange.name().into(), ""),
        ]);
    }
    rows.extend([row("host bandwidth", &host.bandwidth), row("host latency", &host.latency)]);
    rows.extend(profile.power_watts.as_ref().map(|power| row("power (W)", power)));
    let header = ["number", "value", "range", "provenance", "confidence", "source"];
    output::line(&output::table(&header, rows, &["value"]))
}

fn row<T: Display>(name: &str, value: &Value<T>) -> Vec<String> {
    let range = match (&value.low, &value.high) {
        (None, None) => String::new(),
        (low, high) => {
            let end = |end: &Option<T>| end.as_ref().map_or_else(|| "?".into(), T::to_string);
            format!("{} to {}", end(low), end(high))
        }
    };
    let (provenance, confidence) = (value.provenance.to_string(), value.confidence.to_string());
    let number = value.value.to_string();
    vec![name.into(), number, range, provenance, confidence, value.source.to_string()]
}
