// SPDX-License-Identifier: Apache-2.0
//! `spanker models`: the names that commands take for a model, what was fetched, and what of it fits and how fast.

use std::path::Path;

use serde::Serialize;
use spanker_engine::{ClusterSpec, FitPlace, Listed, list_models};
use spanker_model::Quant;

use crate::{cluster, output};

/// List models: built-in shapes, and files that were fetched
///
/// A built-in shape is what 'spanker plan' knows the sizes of; a file can be run. A name that is both means the file.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker models
  spanker models --fit                               which fit this machine, and how fast by its memory
  spanker models --fit --profile rev-a --cards 4     which fit these cards, and how fast as 'spanker plan' says")]
pub(crate) struct Args {
    /// Say which fit, and how many tokens a second are predicted
    #[arg(long)]
    fit: bool,
    /// For these cards instead of this machine, as in 'spanker plan'
    #[arg(long, value_name = "LIST", requires = "fit")]
    profile: Option<String>,
    /// How many cards of that kind
    #[arg(long, value_name = "N", requires = "profile")]
    cards: Option<usize>,
    /// How weights of built-in shapes are stored
    #[arg(long, default_value = "q4_0", value_parser = <Quant as std::str::FromStr>::from_str)]
    quant: Quant,
    /// Tokens of context that there must be room for
    #[arg(long, default_value_t = 2048, value_name = "TOKENS", requires = "fit")]
    ctx_size: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The schema of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    models: Vec<Listed>,
    /// Where predictions come from; nothing without `--fit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let place = match (args.fit, &args.profile) {
        (false, _) => None,
        (true, Some(profile)) => {
            let profiles = profile.clone();
            let spec = ClusterSpec { profiles, cards: args.cards, ..ClusterSpec::default() };
            Some(FitPlace::Cards(Box::new(cluster::build(&spec)?)))
        }
        (true, None) => {
            output::progress("measuring this machine's memory");
            Some(FitPlace::here())
        }
    };
    let fit = place.as_ref().map(|place| (place, args.ctx_size));
    let predicting = |name: &str| output::progress(&format!("predicting {name}"));
    let listed = list_models(args.quant, fit, predicting)?;
    output::progress_done();
    let report = Report { models: listed, source: place.as_ref().map(FitPlace::words) };
    output::report(args.json, &report, show)
}

fn show(report: &Report) -> anyhow::Result<()> {
    let mut header = vec!["name", "kind", "type", "parameters", "size"];
    if report.source.is_some() {
        header.extend(["fits", "tokens/s"]);
    }
    header.push("file");
    let row = |listed: &Listed| {
        let mut row = vec![
            listed.name.clone(),
            listed.kind.to_owned(),
            listed.quant.to_owned(),
            format!("{:.2} B", listed.parameters as f64 / 1e9),
            output::bytes(listed.weight_bytes),
        ];
        if let Some(fit) = &listed.fit {
            row.push(if fit.fits { "yes" } else { "no" }.to_owned());
            row.push(output::figure(fit.predicted_tokens_per_second, 1, ""));
        }
        let fetch = || if listed.fetchable { "spanker fetch" } else { "-" }.to_owned();
        row.push(
            listed.path.as_deref().map_or_else(fetch, |path: &Path| path.display().to_string()),
        );
        row
    };
    let rows = report.models.iter().map(row).collect();
    output::table(&header, rows, &["parameters", "size", "tokens/s"])?;
    match &report.source {
        Some(source) => say!("\npredicted for {source}"),
        None => Ok(()),
    }
}
