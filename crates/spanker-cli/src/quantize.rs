// SPDX-License-Identifier: Apache-2.0
//! `spanker quantize`: a model with its matrices stored as another type.

use std::path::PathBuf;

use ggml_spanker::ENCODE_TYPES;
use spanker_engine::{models, quantize};
use spanker_model::Quant;
use spanker_twin::Signals;

use crate::{llm, output};

/// Store a model's matrices as another type
///
/// Rounding is plain: every weight becomes the nearest value that its block has, and none counts more than another. Files made
/// with an importance matrix say more at 4 bits and fewer. Vectors, norms and the choice of experts stay as they are; rows
/// that are no whole blocks of the type become q8_0, or f16. A model in several files becomes one.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker quantize model-f16.gguf model-q4_0.gguf --type q4_0
  spanker eval lambada -m model-q4_0.gguf --limit 500         what it costs, in bits per byte")]
pub(crate) struct Args {
    /// A .gguf file, a folder with one model, or the name of a fetched model
    #[arg(value_name = "IN")]
    input: String,
    /// The file to write
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// How matrices are stored
    #[arg(long = "type", value_name = "TYPE", value_parser = llm::quant_of(&ENCODE_TYPES))]
    quant: Quant,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let input = models::find(&args.input)?;
    let signals = Signals::take()?;
    let mut watch = output::watch(&signals, format!("{} as {}", args.input, args.quant));
    let report = quantize(&input, &args.out, args.quant, &mut watch);
    output::progress_done();
    let report = report?;
    if report.again {
        output::note("the input was rounded already: the errors of both add up");
    }
    if args.json {
        return output::json(&report);
    }
    let (new, old) = (output::bytes(report.bytes), output::bytes(report.input_bytes));
    let kinds = report.tensors.iter().map(|(kind, count)| format!("{count} {kind}"));
    let kinds = kinds.collect::<Vec<_>>().join(", ");
    let shown = args.out.display();
    say!("{shown}: {new} from {old}; tensors: {kinds}; rounded plainly, not by importance")?;
    if let Some(first) = report.others.first() {
        let (count, quant) = (report.others.len(), report.quant);
        output::note(format_args!(
            "{count} matrices, such as {first}, have rows that are no whole {quant} blocks: they have another type"
        ));
    }
    Ok(())
}
