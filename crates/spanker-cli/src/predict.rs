// SPDX-License-Identifier: Apache-2.0
//! `spanker predict`: how long something takes, by models that were fitted, with its band.

use std::path::PathBuf;
use std::str::FromStr;

use serde_json::json;
use spanker_bench::{bytes, human};
use spanker_collective::MAX_RANKS;
use spanker_engine::{read_fit, shape};
use spanker_model::Quant;
use spanker_plan::{Band, CardModel, DecodeTime, LinkModel, decode_time};

use crate::{llm, output, refuse};

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

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        What::AllReduce(args) => all_reduce(args),
        What::Decode(args) => decode(args),
    }
}

fn check_group(flag: &str, count: usize) -> anyhow::Result<()> {
    if (1..=MAX_RANKS).contains(&count) {
        return Ok(());
    }
    refuse(format!("{flag} {count}: a group has 1 to {MAX_RANKS} of them"))
}

fn all_reduce(args: &AllReduceArgs) -> anyhow::Result<()> {
    check_group("--ranks", args.ranks)?;
    let link = read_fit(&args.link, LinkModel::from_toml)?;
    let Band { value, low, high } = link.predict(args.ranks, args.bytes as u64);
    let (ranks, bytes, provenance) = (args.ranks, args.bytes, link.provenance().to_string());
    if args.json {
        return output::json(&json!({
            "microseconds": value, "low": low, "high": high, "ranks": ranks, "bytes": bytes,
            "provenance": provenance,
        }));
    }
    let size = human(bytes);
    say!(
        "all-reduce of {size} on {ranks} ranks: {value:.2} us ({low:.2} to {high:.2}, {provenance})"
    )?;
    notes(&link.caveats())
}

fn decode(args: &DecodeArgs) -> anyhow::Result<()> {
    check_group("--cards", args.cards)?;
    let shape = llm::shape(&args.model, args.quant)?;
    let card = read_fit(&args.card, CardModel::from_toml)?;
    let link = args.link.as_deref().map(|path| read_fit(path, LinkModel::from_toml)).transpose()?;
    let found = decode_time(&card, link.as_ref(), &shape, args.cards);
    let Band { value, low, high } = found.time;
    // Where weights are stored in several types, the file says more than one name can.
    let quant = args.quant.map_or_else(|| shape::stored(&shape), Quant::name);
    let (model, cards, provenance) = (&shape.name, args.cards, card.provenance().to_string());
    let DecodeTime { memory_ms, fixed_ms, communication_ms, .. } = found;
    if args.json {
        return output::json(&json!({
            "milliseconds": value, "low": low, "high": high, "memory_ms": memory_ms,
            "fixed_ms": fixed_ms, "communication_ms": communication_ms, "model": model,
            "quant": quant, "cards": cards, "provenance": provenance, "notes": found.notes,
        }));
    }
    say!(
        "{model} {quant} on {}: {value:.2} ms per token ({low:.2} to {high:.2}, {provenance})",
        output::count(cards, "card")
    )?;
    let fitted = card.exchange_per_layer(cards).is_some();
    let calls = match (link.is_some(), fitted, cards) {
        (_, _, 1) => "one card has nobody to talk to",
        (true, _, _) => "two all-reduces in each layer",
        (false, true, _) => "fitted to the samples; grows with the cards",
        (false, false, _) => "not included: --link link.toml adds it",
    };
    let term = |name: &str, time: f64, about: &str| {
        vec![name.to_owned(), format!("{time:.2}"), about.to_owned()]
    };
    let rows = vec![
        term("memory", memory_ms, &format!("weights at {}", card.memory_bandwidth())),
        term("fixed", fixed_ms, "does not shrink with more cards"),
        term("communication", communication_ms, calls),
    ];
    output::table(&["part", "ms", "about"], rows, &["ms"])?;
    notes(&found.notes)
}

fn notes(caveats: &[String]) -> anyhow::Result<()> {
    caveats.iter().try_for_each(|note| say!("note: {note}"))
}
