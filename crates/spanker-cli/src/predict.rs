// SPDX-License-Identifier: Apache-2.0
//! `spanker predict`: how long something takes, by models that were fitted, with its band.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Serialize;
use spanker_collective::MAX_RANKS;
use spanker_model::Quant;
use spanker_plan::{Band, CardModel, LinkModel, PlanError, decode_time};

use crate::sizes::{bytes, human};
use crate::{Usage, files, model, output};

/// Predict times with fitted models
///
/// A prediction comes with a band that should hold nine of ten measurements. It is the wider the
/// further the question is from what the model was fitted to.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker predict all-reduce --link link.toml --ranks 8 --bytes 8K
  spanker predict decode llama-2-70b --card card.toml --quant q4_0 --cards 4 --link link.toml

'spanker fit' makes link.toml and card.toml from measurements.")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    AllReduce(AllReduceArgs),
    Decode(DecodeArgs),
}

/// Predict the time of one all-reduce
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:
  spanker predict all-reduce --link link.toml --ranks 8 --bytes 8K")]
struct AllReduceArgs {
    /// The model of the links, from 'spanker fit link'
    #[arg(long, value_name = "TOML")]
    link: PathBuf,
    /// Ranks that take part
    #[arg(long, value_name = "N")]
    ranks: usize,
    /// Bytes of each rank's buffer: a number, or one with K, M or G
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    bytes: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Predict the time of one token, tensor parallel
///
/// All cards share every matrix. With --link each layer has two all-reduces of its activations in
/// f32; without it communication is in the prediction if the samples of the card's fit show it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker predict decode llama-2-70b --card card.toml --quant q4_0 --cards 4
  spanker predict decode model.gguf --card card.toml --cards 4 --link link.toml --json")]
struct DecodeArgs {
    /// A name (of a fetched model, else of a built-in shape), a .gguf file or a config.json
    model: String,
    /// The model of the cards, from 'spanker fit card'
    #[arg(long, value_name = "TOML")]
    card: PathBuf,
    /// How weights are stored [default: as in the .gguf file or the fetched model, else q4_0]
    #[arg(long, value_parser = Quant::from_str)]
    quant: Option<Quant>,
    /// Cards that share the model
    #[arg(long, default_value_t = 1, value_name = "N")]
    cards: usize,
    /// The model of the links between them, from 'spanker fit link'
    #[arg(long, value_name = "TOML")]
    link: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The largest file of a fitted model, in bytes.
const MOST_FIT: u64 = 1 << 20;

/// The schema of `--json` for an all-reduce.
#[derive(Debug, Serialize)]
struct AllReduce {
    microseconds: f64,
    low: f64,
    high: f64,
    ranks: usize,
    bytes: usize,
    provenance: String,
}

/// The schema of `--json` for a token.
#[derive(Debug, Serialize)]
struct Decode {
    milliseconds: f64,
    low: f64,
    high: f64,
    memory_ms: f64,
    fixed_ms: f64,
    communication_ms: f64,
    model: String,
    quant: String,
    cards: usize,
    provenance: String,
    notes: Vec<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        What::AllReduce(args) => all_reduce(args),
        What::Decode(args) => decode(args),
    }
}

/// Reads a fitted model.
fn read<M>(path: &Path, parse: fn(&str) -> Result<M, PlanError>) -> anyhow::Result<M> {
    let text = files::read(path, MOST_FIT)?;
    parse(&text).map_err(|error| anyhow::Error::new(error).context(path.display().to_string()))
}

fn check_group(flag: &str, count: usize) -> anyhow::Result<()> {
    if (1..=MAX_RANKS).contains(&count) {
        return Ok(());
    }
    Err(Usage(format!("{flag} {count}: a group has 1 to {MAX_RANKS} of them")).into())
}

fn all_reduce(args: &AllReduceArgs) -> anyhow::Result<()> {
    check_group("--ranks", args.ranks)?;
    let link = read(&args.link, LinkModel::from_toml)?;
    let Band { value, low, high } = link.predict(args.ranks, args.bytes as u64);
    let (ranks, bytes, provenance) = (args.ranks, args.bytes, link.provenance().to_string());
    if args.json {
        let report = AllReduce { microseconds: value, low, high, ranks, bytes, provenance };
        return output::json(&report);
    }
    let size = human(bytes);
    output::line(&format!(
        "all-reduce of {size} on {ranks} ranks: {value:.2} us ({low:.2} to {high:.2}, {provenance})"
    ))?;
    notes(&link.caveats())
}

fn decode(args: &DecodeArgs) -> anyhow::Result<()> {
    check_group("--cards", args.cards)?;
    let shape = model::load(&args.model, args.quant)?;
    let card = read(&args.card, CardModel::from_toml)?;
    let link = args.link.as_deref().map(|path| read(path, LinkModel::from_toml)).transpose()?;
    let found = decode_time(&card, link.as_ref(), &shape, args.cards);
    let Band { value, low, high } = found.time;
    // Where weights are stored in several types, the file says more than one name can.
    let stored = || shape.layers.first().map(|layer| layer.gate.quant.to_string());
    let quant = args.quant.map(|quant| quant.to_string()).or_else(stored).unwrap_or_default();
    let report = Decode {
        milliseconds: value,
        low,
        high,
        memory_ms: found.memory_ms,
        fixed_ms: found.fixed_ms,
        communication_ms: found.communication_ms,
        model: shape.name.clone(),
        quant,
        cards: args.cards,
        provenance: card.provenance().to_string(),
        notes: found.notes,
    };
    if args.json {
        return output::json(&report);
    }
    show(&report, &card, link.is_some())?;
    notes(&report.notes)
}

fn show(report: &Decode, card: &CardModel, linked: bool) -> anyhow::Result<()> {
    let Decode { milliseconds, low, high, model, quant, cards, provenance, .. } = report;
    let word = if *cards == 1 { "card" } else { "cards" };
    output::line(&format!(
        "{model} {quant} on {cards} {word}: {milliseconds:.2} ms per token \
         ({low:.2} to {high:.2}, {provenance})"
    ))?;
    let fitted = card.exchange_per_layer(*cards).is_some();
    let calls = match (linked, fitted, *cards) {
        (_, _, 1) => "one card has nobody to talk to",
        (true, _, _) => "two all-reduces in each layer",
        (false, true, _) => "fitted to the samples; grows with the cards",
        (false, false, _) => "not included: --link link.toml adds it",
    };
    let term = |name: &str, time: f64, about: &str| {
        vec![name.to_owned(), format!("{time:.2}"), about.to_owned()]
    };
    let rows = vec![
        term("memory", report.memory_ms, &format!("weights at {}", card.memory_bandwidth())),
        term("fixed", report.fixed_ms, "does not shrink with more cards"),
        term("communication", report.communication_ms, calls),
    ];
    output::line(&output::table(&["part", "ms", "about"], rows, &["ms"]))
}

fn notes(caveats: &[String]) -> anyhow::Result<()> {
    caveats.iter().try_for_each(|note| output::line(&format!("note: {note}")))
}
