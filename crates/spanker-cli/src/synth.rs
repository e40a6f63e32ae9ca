// SPDX-License-Identifier: Apache-2.0
//! `spanker synth`: models with random weights, for benchmarks and tests. They say nothing sensible.

use std::path::PathBuf;

use ggml_spanker::WEIGHT_TYPES;
use ggml_spanker::synthetic::{self, Sizes};
use spanker_engine::{Synthesized, synthesize};
use spanker_model::{Quant, builtin};
use spanker_twin::Signals;

use crate::{llm, output, usage};

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
    #[arg(long, value_name = "TYPE", default_value = "q4_0", value_parser = llm::quant_of(&WEIGHT_TYPES))]
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

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let like = builtin(&args.like, args.quant).map_err(|error| usage(error.to_string()))?;
    let (named, window) = synthetic::family(&args.family);
    // A plain llama is of the architecture of what it is like.
    let family = (args.family != "llama").then_some(named);
    let architecture = args.arch.as_deref().or(family).unwrap_or(&like.architecture);
    let sizes = args.sizes.sizes();
    let sizes = Sizes { window: sizes.window.or(window), ..sizes };
    let signals = Signals::take()?;
    let mut watch = output::watch(&signals, format!("writing {}", args.out.display()));
    let like = (&like, architecture);
    let written = synthesize(&args.out, like, args.quant, &sizes, args.seed, &mut watch);
    output::progress_done();
    output::report(args.json, &written?, |written| {
        let Synthesized { path, name, layers, quant, bytes, seed, .. } = written;
        let (path, size) = (path.display(), output::bytes(*bytes));
        say!("{path}: {name}, {layers} layers, {quant}, {size}, seed {seed}")
    })
}
