// SPDX-License-Identifier: Apache-2.0
//! `spanker synth`: models with random weights, for benchmarks and tests. They say nothing sensible.

use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use ggml_spanker::WEIGHT_TYPES;
use ggml_spanker::synthetic::{self, Sizes};
use serde_json::json;
use spanker_model::gguf::Writer;
use spanker_model::{Quant, builtin};
use spanker_twin::Signals;

use crate::{Interrupted, Usage, output};
use spanker_engine::files::{self, Draft};

/// The architectures that there are.
const FAMILIES: [&str; 4] = ["llama", "qwen2", "qwen2moe", "qwen3moe"];

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
  spanker synth qwen3moe --hidden 256 --heads 4 --kv-heads 2 --ffn 96 --experts 8 --experts-used 2 --layers 2 --vocab 512 --out mixture.gguf
  spanker synth gemma3 --layers 7 --hidden 160 --heads 5 --kv-heads 1 --head-size 64 --ffn 352 --vocab 512 --window 70 --out g.gguf
  spanker synth llama --hidden 160 --heads 5 --kv-heads 5 --ffn 352 --layers 2 --vocab 512 --out odd.gguf")]
pub(crate) struct Args {
    /// The family of models: llama, which may have experts, and with --like a qwen2.5 is qwen2 unless --arch says another
    #[arg(value_name = "FAMILY", value_parser = synthetic::FAMILIES)]
    family: String,
    /// The built-in model that it is as large as
    #[arg(long, value_name = "MODEL", default_value = "tinyllama-1.1b")]
    like: String,
    /// The architecture, that of the model it is like unless given; qwen2 has biases
    #[arg(long, value_name = "ARCH", value_parser = FAMILIES)]
    arch: Option<String>,
    /// How weights are stored: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k to q6_k, iq4_nl, iq4_xs, iq2_xxs, iq2_xs,
    /// iq3_xxs, mxfp4, tq1_0 or tq2_0
    #[arg(long, value_name = "TYPE", default_value = "q4_0", value_parser = quant)]
    quant: Quant,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Where the generator begins
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    sizes: SizeArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Sizes that replace those of the model that is imitated.
#[derive(Debug, clap::Args)]
struct SizeArgs {
    /// Layers
    #[arg(long, value_name = "N")]
    layers: Option<u64>,
    /// Width of the hidden state
    #[arg(long, value_name = "N")]
    hidden: Option<u64>,
    /// Heads of queries
    #[arg(long, value_name = "N")]
    heads: Option<u64>,
    /// Heads of keys and values
    #[arg(long, value_name = "N")]
    kv_heads: Option<u64>,
    /// Width of a head, an even number; hidden / heads if one of them is given and this is not
    #[arg(long, value_name = "N")]
    head_size: Option<u64>,
    /// Width of the feed-forward network, or of one expert
    #[arg(long, value_name = "N")]
    ffn: Option<u64>,
    /// Tokens of the vocabulary, at least 259
    #[arg(long, value_name = "N")]
    vocab: Option<u64>,
    /// Positions that the model is said to know
    #[arg(long, value_name = "N")]
    context: Option<u64>,
    /// Experts of a layer
    #[arg(long, value_name = "N")]
    experts: Option<u64>,
    /// Experts that a token meets
    #[arg(long, value_name = "N")]
    experts_used: Option<u64>,
    /// Width of the expert that every token of qwen2moe meets
    #[arg(long, value_name = "N")]
    shared_ffn: Option<u64>,
    /// Positions that a token sees: in every layer, of gemma2 in every second, of gemma3 in five of six
    #[arg(long, value_name = "N")]
    window: Option<u64>,
}

impl SizeArgs {
    fn sizes(&self) -> Sizes {
        let SizeArgs { layers, hidden, heads, kv_heads, head_size, ffn, vocab, context, .. } =
            *self;
        let SizeArgs { experts, experts_used, shared_ffn, window, .. } = *self;
        Sizes {
            layers,
            hidden,
            heads,
            kv_heads,
            head_size,
            ffn,
            vocab,
            context,
            experts,
            experts_used,
            shared_ffn,
            window,
        }
    }
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
    let (named, window) = synthetic::family(&args.family);
    // A plain llama is of the architecture of what it is like.
    let family = (args.family != "llama").then_some(named);
    let architecture = args.arch.as_deref().or(family).unwrap_or(&like.architecture);
    let sizes = args.sizes.sizes();
    let sizes = Sizes { window: sizes.window.or(window), ..sizes };
    let (writer, model) = synthetic::like(&like, architecture, args.quant, &sizes)
        .map_err(|error| Usage(format!("--{error}")))?;
    let shown = args.out.display();
    write(args, &writer).with_context(|| format!("cannot write {shown}"))?;
    let (name, layers, quant, seed) = (&model.name, model.layers.len(), args.quant, args.seed);
    if args.json {
        return output::line(
            &json!({
                "path": args.out, "bytes": writer.file_bytes(), "seed": seed,
                "tensors": writer.tensors().len(), "name": name, "architecture": architecture,
                "quant": quant, "layers": layers, "hidden": model.hidden, "heads": model.heads,
                "kv_heads": model.kv_heads, "head_size": model.head_size, "ffn": model.ffn,
                "vocab": model.vocab, "context": model.context, "tied": model.tied,
                "experts": model.mixture.map_or(0, |own| own.experts),
                "experts_used": model.mixture.map_or(0, |own| own.used),
            })
            .to_string(),
        );
    }
    let size = output::bytes(writer.file_bytes());
    output::line(&format!("{shown}: {name}, {layers} layers, {quant}, {size}, seed {seed}"))
}

/// Writes the file, all of it or nothing.
fn write(args: &Args, writer: &Writer) -> anyhow::Result<()> {
    let signals = Signals::take()?;
    let mut draft = Draft::new(&args.out)?;
    let (all, start) = (writer.file_bytes(), Instant::now());
    let (mut done, mut shown) = (0, start);
    let written = synthetic::write(writer, BufWriter::new(draft.file()), args.seed, |bytes| {
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
    });
    output::progress_done();
    match written {
        Ok(()) => Ok(draft.finish()?),
        Err(error) if error.get_ref().is_some_and(|inner| inner.is::<Interrupted>()) => {
            Err(Interrupted.into())
        }
        Err(error) => Err(error.into()),
    }
}
