// SPDX-License-Identifier: Apache-2.0
//! `spanker synth`: models with random weights, for benchmarks and tests. They say nothing sensible.

mod blocks;
mod shape;

use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use ggml_spanker::WEIGHT_TYPES;
use serde::Serialize;
use spanker_model::gguf::Writer;
use spanker_model::{Quant, builtin};
use spanker_twin::Signals;

use crate::files::Draft;
use crate::{Interrupted, Usage, files, output};
use shape::{Shape, Sizes};

/// Write a model with random weights, as large as a real one
///
/// The file is a valid GGUF with a vocabulary of bytes, so that every program that runs such models runs
/// it, as fast as the model that it imitates. What it says makes no sense. The same flags and seed give
/// the same file.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker synth llama --like tinyllama-1.1b --quant q4_0 --out tiny.gguf
  spanker synth llama --like llama-3-8b --layers 4 --quant q4_k --out part.gguf
  spanker synth llama --like qwen2.5-0.5b --quant q8_0 --out qwen.gguf
  spanker synth llama --hidden 160 --heads 5 --kv-heads 5 --ffn 352 --layers 2 --vocab 512 --out odd.gguf")]
pub(crate) struct Args {
    /// The family of models: llama, or qwen2 for --arch qwen2
    #[arg(value_name = "FAMILY", value_parser = ["llama", "qwen2"])]
    family: String,
    /// The built-in model that it is as large as
    #[arg(long, value_name = "MODEL", default_value = "tinyllama-1.1b")]
    like: String,
    /// The architecture, that of the model it is like unless given; qwen2 has biases
    #[arg(long, value_name = "ARCH", value_parser = ["llama", "qwen2"])]
    arch: Option<String>,
    /// How weights are stored: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k or q6_k
    #[arg(long, value_name = "TYPE", default_value = "q4_0", value_parser = quant)]
    quant: Quant,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Where the generator begins
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    sizes: Sizes,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was written.
#[derive(Debug, Serialize)]
struct Report {
    path: PathBuf,
    bytes: u64,
    seed: u64,
    tensors: usize,
    #[serde(flatten)]
    shape: Shape,
}

fn quant(text: &str) -> Result<Quant, String> {
    match text.parse() {
        Ok(quant) if WEIGHT_TYPES.contains(&quant) => Ok(quant),
        _ => {
            let names = WEIGHT_TYPES.map(Quant::name).join(", ");
            Err(format!("unknown weight type '{text}' (expected one of: {names})"))
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    files::check_output(&args.out)?;
    let like = builtin(&args.like, args.quant).map_err(|error| Usage(error.to_string()))?;
    let family = (args.family == "qwen2").then_some("qwen2");
    let architecture = args.arch.as_deref().or(family).unwrap_or(&like.architecture);
    let shape = Shape::of(&like, architecture, args.quant, &args.sizes)?;
    let writer = shape.file()?;
    let shown = args.out.display();
    write(args, &writer).with_context(|| format!("cannot write {shown}"))?;
    let report = Report {
        path: args.out.clone(),
        bytes: writer.file_bytes(),
        seed: args.seed,
        tensors: writer.tensors().len(),
        shape,
    };
    if args.json {
        return output::line(&serde_json::to_string(&report)?);
    }
    let (shape, size) = (&report.shape, output::bytes(report.bytes));
    output::line(&format!(
        "{shown}: {}, {} layers, {}, {size}, seed {}",
        shape.name, shape.layers, shape.quant, args.seed
    ))
}

/// Writes the file, all of it or nothing.
fn write(args: &Args, writer: &Writer) -> anyhow::Result<()> {
    let signals = Signals::take()?;
    let mut draft = Draft::new(&args.out)?;
    let (all, start) = (writer.file_bytes(), Instant::now());
    let (mut done, mut shown) = (0, start);
    let written = writer.write(BufWriter::new(draft.file()), |at, out| {
        let (name, tensor) = &writer.tensors()[at];
        blocks::write(out, args.seed, at, (name, tensor), |bytes| {
            done += bytes;
            if signals.caught().end {
                return Err(io::Error::other(Interrupted));
            }
            if shown.elapsed() > Duration::from_secs(1) {
                shown = Instant::now();
                let text = format!("{} of {}", output::bytes(done), output::bytes(all));
                output::progress_of(done, all, &text);
            }
            Ok(())
        })
    });
    output::progress_done();
    match written {
        Ok(()) => draft.finish(),
        Err(error) if error.get_ref().is_some_and(|inner| inner.is::<Interrupted>()) => {
            Err(Interrupted.into())
        }
        Err(error) => Err(error.into()),
    }
}
