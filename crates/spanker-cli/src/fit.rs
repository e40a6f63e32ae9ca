// SPDX-License-Identifier: Apache-2.0
//! `spanker fit`: models of a link and of a card from measurements.

use std::path::PathBuf;

use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use spanker_bench::human;
use spanker_engine::{files, shape};
use spanker_plan::{
    CardModel, CardSamples, FitReport, FitRow, LinkModel, LinkSamples, Parameter, PlanError,
};

use crate::output;

/// Fit a model of a link or a card to measurements
///
/// Every fit is shown beside the samples that it comes from. The file that --out writes is what
/// 'spanker predict' reads.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker fit link --samples all_reduce.csv --out link.toml
  spanker fit card --samples decode.csv --out card.toml")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Link(LinkArgs),
    Card(CardArgs),
}

/// Fit the time of an all-reduce over ranks and bytes
///
/// Samples are a CSV table of at least two all-reduces, better of some sizes on each of two rank
/// counts. A sample that all others contradict is left out and named. The samples decide whether one
/// algorithm holds for all sizes (ring, recursive doubling, one-shot) or small and large messages are
/// blended; the file says which.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example, all_reduce.csv:
  ranks,bytes,microseconds
  2,8192,6.8
  2,65536,9.2
  4,8192,13.5
  4,65536,16.9

  spanker fit link --samples all_reduce.csv --out link.toml
  spanker predict all-reduce --link link.toml --ranks 8 --bytes 8K")]
struct LinkArgs {
    #[command(flatten)]
    common: Common,
}

/// Fit the time that cards take for a token
///
/// Samples are a CSV table of decoding times at short context, better on two numbers of cards that share
/// every matrix. On three or more the fit can tell whether more cards are slower, and how that grows. Times
/// are without communication if 'spanker fit link' is to add it; a fifth column, transfer, has communication
/// apart. A model is a built-in name, a .gguf file or a config.json.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example, decode.csv:
  model,quant,cards,milliseconds
  llama-2-7b,q4_0,1,101.06
  llama-2-7b,q4_0,2,61.50

  spanker fit card --samples decode.csv --out card.toml
  spanker predict decode llama-2-70b --card card.toml --quant q4_0 --cards 4")]
struct CardArgs {
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
struct Common {
    /// The table of measurements
    #[arg(long, value_name = "CSV")]
    samples: PathBuf,
    /// Save the model here; the file is replaced whole or not at all
    #[arg(long, value_name = "TOML")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The largest table, in bytes.
const MOST_SAMPLES: u64 = 64 << 20;

/// The schema of `--json`.
#[derive(Debug, Serialize)]
struct Fitted {
    #[serde(flatten)]
    report: FitReport,
    out: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (What::Link(LinkArgs { common }) | What::Card(CardArgs { common })) = &args.what;
    files::check_outputs([&common.out])?;
    let text = files::read(&common.samples, MOST_SAMPLES)?;
    let fitted = match &args.what {
        What::Link(_) => link(&text),
        What::Card(_) => card(&text),
    };
    let (report, file) = fitted.with_context(|| common.samples.display().to_string())?;
    let next = match &args.what {
        What::Link(_) => "spanker predict all-reduce --link link.toml --ranks 8 --bytes 8K",
        What::Card(_) => "spanker predict decode llama-2-7b --card card.toml --cards 4",
    };
    let hint = format!("--out {}.toml saves the model, for {next}", report.kind);
    if let Some(path) = &common.out {
        files::write(path, file)?;
    }
    let out = common.out.as_ref().map(|path| path.display().to_string());
    let hint = out.is_none().then_some(hint);
    output::report(common.json, &Fitted { report, out, hint }, show)
}

/// A model of a link and its file.
fn link(text: &str) -> Result<(FitReport, String), PlanError> {
    let samples = LinkSamples::from_csv(text)?;
    let fitted = LinkModel::fit(&samples)?;
    Ok((FitReport::of_link(&samples, &fitted), fitted.to_toml()))
}

/// A model of cards and its file.
fn card(text: &str) -> Result<(FitReport, String), PlanError> {
    let find = |name: &str, quant| {
        shape::find(name, Some(quant)).map(|found| found.model).map_err(|error| error.to_string())
    };
    let samples = CardSamples::from_csv_with(text, find)?;
    let fitted = CardModel::fit(&samples)?;
    Ok((FitReport::of_card(&samples, &fitted), fitted.to_toml()))
}

fn cells(row: &FitRow, header: &[&str], unit: &str) -> Vec<String> {
    let cell = |name: &&str| match &row.sample[*name] {
        Value::String(text) => text.clone(),
        Value::Number(bytes) if *name == "bytes" => {
            let small = bytes.as_u64().and_then(|bytes| usize::try_from(bytes).ok());
            small.map_or_else(|| bytes.to_string(), human)
        }
        other => other.to_string(),
    };
    let mut cells: Vec<String> = header.iter().map(cell).collect();
    cells.extend([row.measured, row.predicted].map(|time| format!("{time:.2} {unit}")));
    cells.push(format!("{:+.1}%", row.error_percent));
    cells.push(if row.rejected { "rejected".into() } else { String::new() });
    cells
}

fn show(fitted: &Fitted) -> anyhow::Result<()> {
    let report = &fitted.report;
    let of: &[&str] =
        if report.kind == "link" { &["ranks", "bytes"] } else { &["model", "quant", "cards"] };
    let rows = report.samples.iter().map(|row| cells(row, of, report.unit));
    let header = [of, &["measured", "predicted", "error", ""]].concat();
    let right = ["ranks", "bytes", "cards", "measured", "predicted", "error"];
    output::table(&header, rows.collect(), &right)?;
    let (mean, worst) = (report.mean_error_percent, report.worst_error_percent);
    say!("\nerror: {mean:.1} % on average, {worst:.1} % at worst")?;
    say!("\nparameters ({})", report.provenance)?;
    let rows = report.parameters.iter().map(|Parameter { name, value, unit, meaning }| {
        let value = match value.abs() {
            v if v > 0.0 && v < 1e-3 => format!("{value:.4e}"),
            _ => format!("{value:.4}"),
        };
        vec![(*name).to_owned(), value, (*unit).to_owned(), meaning.clone()]
    });
    let header = ["name", "value", "unit", "meaning"];
    output::table(&header, rows.collect(), &["value"])?;
    for note in &report.notes {
        say!("\nnote: {note}")?;
    }
    match (&fitted.out, &fitted.hint) {
        (Some(out), _) => say!("\nsaved to {out}"),
        (None, Some(hint)) => say!("\nhint: {hint}"),
        (None, None) => Ok(()),
    }
}
