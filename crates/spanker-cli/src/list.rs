// SPDX-License-Identifier: Apache-2.0
//! `spanker models`: the names that commands take for a model, what was fetched, and what of it fits and how fast.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use spanker_model::{Model, Quant, builtin, builtin_names};
use spanker_plan::{Objective, Request, choose};
use spanker_topology::{BytesPerSecond, Cluster};

use crate::cluster::ClusterArgs;
use crate::models::{self, KNOWN};
use crate::{model, output};

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

#[derive(Debug, Serialize)]
struct Listed {
    name: String,
    /// `file` for one that can be run, `built-in` for a shape.
    kind: &'static str,
    quant: &'static str,
    parameters: u64,
    weight_bytes: u64,
    /// The file; for a model that can be fetched and was not, nothing.
    path: Option<PathBuf>,
    /// Whether `spanker fetch` gets it.
    fetchable: bool,
    #[serde(flatten)]
    fit: Option<Fit>,
}

#[derive(Debug, Serialize)]
struct Fit {
    fits: bool,
    /// Nothing for what does not fit.
    predicted_tokens_per_second: Option<f64>,
}

/// What models are to fit.
enum Place {
    /// This machine: bytes that are free and bytes that it reads in a second.
    Here {
        free: Option<u64>,
        rate: BytesPerSecond,
    },
    Cards(Box<Cluster>),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let place = match (args.fit, &args.profile) {
        (false, _) => None,
        (true, Some(profile)) => {
            let cluster = ClusterArgs::of(profile, args.cards).build()?;
            Some(Place::Cards(Box::new(cluster)))
        }
        (true, None) => {
            let free = spanker_engine::memory::available().map(|bytes| bytes as u64);
            Some(Place::Here { free, rate: measured_rate() })
        }
    };
    let mut listed = Vec::new();
    for name in builtin_names() {
        let known = models::known(name);
        // What lies in the place of a model and is none is said by the commands that want it.
        let path = models::fetched(name).ok().flatten();
        let shape = match &path {
            Some(path) => model::load(&path.display().to_string(), None)?,
            None => builtin(name, args.quant)?,
        };
        listed.push(list(name, &shape, path, known.is_some(), args, place.as_ref())?);
    }
    for known in KNOWN.iter().filter(|known| !builtin_names().contains(&known.name)) {
        if let Some(path) = models::fetched(known.name)? {
            let shape = model::load(&path.display().to_string(), None)?;
            listed.push(list(known.name, &shape, Some(path), true, args, place.as_ref())?);
        }
    }
    output::progress_done();
    let report = Report { models: listed, source: place.as_ref().map(source) };
    match args.json {
        true => output::line(&serde_json::to_string(&report)?),
        false => show(&report),
    }
}

fn list(
    name: &str,
    shape: &Model,
    path: Option<PathBuf>,
    fetchable: bool,
    args: &Args,
    place: Option<&Place>,
) -> anyhow::Result<Listed> {
    output::progress(&format!("predicting {name}"));
    Ok(Listed {
        name: name.to_owned(),
        kind: if path.is_some() { "file" } else { "built-in" },
        quant: model::stored(shape),
        parameters: shape.parameters(),
        weight_bytes: shape.weight_bytes(),
        path,
        fetchable,
        fit: place.map(|place| fit(shape, args.ctx_size, place)).transpose()?,
    })
}

/// Whether a model fits, and the tokens that it then gives in a second.
fn fit(shape: &Model, context: u64, place: &Place) -> anyhow::Result<Fit> {
    let rate = match place {
        Place::Here { free, rate } => {
            let cache = shape.kv_bytes_per_token(Quant::F16).saturating_mul(context);
            let needed = shape.weight_bytes().saturating_add(cache);
            let fits = free.is_none_or(|free| needed <= free);
            fits.then(|| rate.0 as f64 / shape.read_per_token() as f64)
        }
        Place::Cards(cluster) => {
            let request = Request {
                objective: Objective::Latency,
                sequences: 1,
                context,
                prompt: context.min(512),
                position: 0,
                kv: Quant::F16,
                batch: spanker_plan::USUAL_BATCH,
                audit: 0.0,
            };
            let cards: Vec<usize> = (0..cluster.cards()).collect();
            let choice = choose(shape, cluster, &cards, &request)?;
            choice.best_to_run().map(|best| best.prediction.tokens_per_second)
        }
    };
    Ok(Fit { fits: rate.is_some(), predicted_tokens_per_second: rate })
}

/// How fast all threads together read memory that no cache holds: what a token takes at least.
fn measured_rate() -> BytesPerSecond {
    const BYTES: usize = 256 << 20;
    const TURNS: u32 = 3;
    output::progress("measuring this machine's memory");
    let words = vec![1u64; BYTES / 8];
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let read = || {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for part in words.chunks(words.len().div_ceil(threads)) {
                scope.spawn(move || {
                    std::hint::black_box(part.iter().fold(0u64, |sum, word| sum ^ word));
                });
            }
        });
        begun.elapsed().as_secs_f64()
    };
    let best = (0..TURNS).map(|_| read()).fold(f64::INFINITY, f64::min);
    BytesPerSecond((BYTES as f64 / best) as u64)
}

fn source(place: &Place) -> String {
    match place {
        Place::Here { free, rate } => {
            let free = free.map_or_else(|| "?".to_owned(), output::bytes);
            format!(
                "this machine, {free} free; by its memory alone: it reads {rate}, measured now, and a token reads all weights"
            )
        }
        Place::Cards(cluster) => {
            let kinds = crate::cluster::describe(cluster);
            format!("the best plan for {kinds} by their profiles, as 'spanker plan' finds it")
        }
    }
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
            let rate = fit.predicted_tokens_per_second;
            row.push(rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}")));
        }
        let fetch = || if listed.fetchable { "spanker fetch" } else { "-" }.to_owned();
        row.push(
            listed.path.as_deref().map_or_else(fetch, |path: &Path| path.display().to_string()),
        );
        row
    };
    let rows = report.models.iter().map(row).collect();
    output::line(&output::table(&header, rows, &["parameters", "size", "tokens/s"]))?;
    match &report.source {
        Some(source) => output::line(&format!("\npredicted for {source}")),
        None => Ok(()),
    }
}
