// SPDX-License-Identifier: Apache-2.0
//! `spanker fit`: models of a link and of a card from measurements.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};
use spanker_plan::{
    CardModel, CardSamples, LinkModel, LinkSample, LinkSamples, Parameter, PlanError,
};

use crate::output;
use crate::sizes::human;
use spanker_engine::{files, shape};

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

/// What is shown, and the schema of `--json`.
#[derive(Debug, Default, Serialize)]
struct Report {
    kind: &'static str,
    provenance: String,
    unit: &'static str,
    parameters: Vec<Parameter>,
    samples: Vec<Row>,
    mean_error_percent: f64,
    worst_error_percent: f64,
    notes: Vec<String>,
    out: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

/// A sample beside what the model says.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    sample: Value,
    measured: f64,
    predicted: f64,
    error_percent: f64,
    rejected: bool,
}

impl Row {
    fn new(sample: Value, measured: f64, predicted: f64) -> Row {
        let error_percent = 100.0 * (predicted / measured - 1.0);
        Row { sample, measured, predicted, error_percent, rejected: false }
    }

    fn cells(&self, header: &[&str], unit: &str) -> Vec<String> {
        let cell = |name: &&str| match &self.sample[*name] {
            Value::String(text) => text.clone(),
            Value::Number(bytes) if *name == "bytes" => {
                let small = bytes.as_u64().and_then(|bytes| usize::try_from(bytes).ok());
                small.map_or_else(|| bytes.to_string(), human)
            }
            other => other.to_string(),
        };
        let mut cells: Vec<String> = header.iter().map(cell).collect();
        cells.extend([self.measured, self.predicted].map(|time| format!("{time:.2} {unit}")));
        cells.push(format!("{:+.1}%", self.error_percent));
        cells.push(if self.rejected { "rejected".into() } else { String::new() });
        cells
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (What::Link(LinkArgs { common }) | What::Card(CardArgs { common })) = &args.what;
    files::check_outputs([&common.out])?;
    match &args.what {
        What::Link(args) => link(&args.common),
        What::Card(args) => card(&args.common),
    }
}

fn link(args: &Common) -> anyhow::Result<()> {
    let text = files::read(&args.samples, MOST_SAMPLES)?;
    let of_file = |error| named(&args.samples, error);
    let samples = LinkSamples::from_csv(&text).map_err(of_file)?;
    let fitted = LinkModel::fit(&samples).map_err(of_file)?;
    let row = |&LinkSample { ranks, bytes, microseconds }: &LinkSample| {
        let predicted = fitted.predict(ranks, bytes).value;
        Row::new(json!({ "ranks": ranks, "bytes": bytes }), microseconds, predicted)
    };
    let mut rows: Vec<Row> = samples.samples().iter().map(row).collect();
    let mut notes = fitted.caveats();
    if let Some(wild) = fitted.rejected() {
        let at = samples.samples().iter().position(|sample| *sample == wild);
        if let Some(row) = at.and_then(|at| rows.get_mut(at)) {
            row.rejected = true;
        }
        notes.push(format!(
            "one sample was rejected, {} us for {} bytes on {} ranks: all others agree much better \
             without it",
            wild.microseconds, wild.bytes, wild.ranks
        ));
    }
    let report = Report {
        kind: "link",
        provenance: fitted.provenance().to_string(),
        unit: "us",
        parameters: fitted.parameters(),
        samples: rows,
        notes,
        ..Report::default()
    };
    let next = "spanker predict all-reduce --link link.toml --ranks 8 --bytes 8K";
    finish(report, args, &fitted.to_toml(), next)
}

fn card(args: &Common) -> anyhow::Result<()> {
    let text = files::read(&args.samples, MOST_SAMPLES)?;
    let of_file = |error| named(&args.samples, error);
    let find = |name: &str, quant| {
        shape::find(name, Some(quant)).map(|found| found.model).map_err(|error| error.to_string())
    };
    let samples = CardSamples::from_csv_with(&text, find).map_err(of_file)?;
    let fitted = CardModel::fit(&samples).map_err(of_file)?;
    let row = |sample: &spanker_plan::CardSample| {
        let predicted = fitted.predict(&sample.shape, sample.cards).time.value;
        let (model, quant, cards) = (&sample.model, sample.quant.to_string(), sample.cards);
        let measured = sample.milliseconds + sample.transfer_ms.unwrap_or(0.0);
        Row::new(json!({ "model": model, "quant": quant, "cards": cards }), measured, predicted)
    };
    let report = Report {
        kind: "card",
        provenance: fitted.provenance().to_string(),
        unit: "ms",
        parameters: fitted.parameters(),
        samples: samples.samples().iter().map(row).collect(),
        notes: fitted.caveats(),
        ..Report::default()
    };
    let next = "spanker predict decode llama-2-7b --card card.toml --cards 4";
    finish(report, args, &fitted.to_toml(), next)
}

fn named(path: &Path, error: PlanError) -> anyhow::Error {
    anyhow::Error::new(error).context(path.display().to_string())
}

/// Saves the model, if asked to, and shows the report.
fn finish(mut report: Report, args: &Common, file: &str, next: &str) -> anyhow::Result<()> {
    let errors =
        || report.samples.iter().filter(|row| !row.rejected).map(|r| r.error_percent.abs());
    (report.mean_error_percent, report.worst_error_percent) =
        (errors().sum::<f64>() / errors().count().max(1) as f64, errors().fold(0.0, f64::max));
    match &args.out {
        Some(path) => {
            files::write(path, file)?;
            report.out = Some(path.display().to_string());
        }
        None => {
            report.hint = Some(format!("--out {}.toml saves the model, for {next}", report.kind));
        }
    }
    if args.json {
        return output::json(&report);
    }
    show(&report)
}

fn show(report: &Report) -> anyhow::Result<()> {
    let of: &[&str] =
        if report.kind == "link" { &["ranks", "bytes"] } else { &["model", "quant", "cards"] };
    let rows = report.samples.iter().map(|row| row.cells(of, report.unit));
    let header = [of, &["measured", "predicted", "error", ""]].concat();
    let right = ["ranks", "bytes", "cards", "measured", "predicted", "error"];
    output::line(&output::table(&header, rows.collect(), &right))?;
    let (mean, worst) = (report.mean_error_percent, report.worst_error_percent);
    output::line(&format!("\nerror: {mean:.1} % on average, {worst:.1} % at worst"))?;
    output::line(&format!("\nparameters ({})", report.provenance))?;
    let rows = report.parameters.iter().map(|Parameter { name, value, unit, meaning }| {
        let value = match value.abs() {
            v if v > 0.0 && v < 1e-3 => format!("{value:.4e}"),
            _ => format!("{value:.4}"),
        };
        vec![(*name).to_owned(), value, (*unit).to_owned(), meaning.clone()]
    });
    let header = ["name", "value", "unit", "meaning"];
    output::line(&output::table(&header, rows.collect(), &["value"]))?;
    for note in &report.notes {
        output::line(&format!("\nnote: {note}"))?;
    }
    match (&report.out, &report.hint) {
        (Some(out), _) => output::line(&format!("\nsaved to {out}")),
        (None, Some(hint)) => output::line(&format!("\nhint: {hint}")),
        (None, None) => Ok(()),
    }
}
