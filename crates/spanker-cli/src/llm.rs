// SPDX-License-Identifier: Apache-2.0
//! What `run`, `chat` and `verify` share: the model's file, the cards, the plan, and what runs it.

pub(crate) mod cards;
pub(crate) mod compared;
pub(crate) mod generate;
pub(crate) mod given;
pub(crate) mod gpu;
pub(crate) mod host;
pub(crate) mod layout;
pub(crate) mod ranks;
pub(crate) mod report;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use ggml_spanker::GgufFile;
use spanker_llm::{AuditLog, Network, Runner, Twice};
use spanker_plan::Plan;
use spanker_text::{Sampler, Settings, Tokenizer};

use crate::directory::CardList;
use crate::{Usage, models, output};
use generate::Unmended;

/// The context where neither a flag nor the model asks for less.
const CONTEXT: usize = 2048;
/// The most threads that make sense.
const MOST_THREADS: usize = 1024;

/// Where cards are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FabricKind {
    /// Threads of this process
    Inproc,
    /// The cards that are there: real ones, or a twin's
    Cards,
    /// NVIDIA's graphics processors; more cards than there are processors share them
    Cuda,
    /// Processes that mpirun has started, on one host or several: each is a card
    Mpi,
}

/// How a model is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Split {
    /// Tensor-parallel without partial sums: the bits of one card
    Gather,
    /// Tensor-parallel with partial sums, added in card order
    Reduce,
    /// Whole layers on each card
    Pipeline,
    /// Two stages, each tensor-parallel
    Mixed,
}

/// Which model, on what.
#[derive(Debug, clap::Args)]
// Commands have groups of this name, too, and a name must be unique.
#[group(skip)]
pub(crate) struct Args {
    /// A .gguf file, or the name of a fetched model
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: String,
    /// Tokens that there is room for, prompt and answer together [default: 2048, or what the model has]
    #[arg(short, long, value_name = "TOKENS")]
    pub(crate) ctx_size: Option<usize>,
    /// Threads in all, shared out over in-process cards; for --fabric mpi those of each process [default: as many
    /// as there are cores, shared out over the processes of a host]
    #[arg(short, long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Tokens of a prompt that are run together
    #[arg(short, long, default_value_t = 128, value_name = "TOKENS")]
    pub(crate) batch_size: usize,
    /// Where the cards are [default: mpi if mpirun has started several, else inproc]
    #[arg(long, value_enum)]
    pub(crate) fabric: Option<FabricKind>,
    /// How much each card gets, as in 2,2,1
    #[arg(long, value_name = "SHARES", value_delimiter = ',', visible_alias = "ts")]
    pub(crate) tensor_split: Option<Vec<f64>>,
    /// How long cards may show no progress before they are given up, for --fabric cards and mpi; for mpi more than a
    /// step takes [default for mpi: 60s]
    #[arg(long, value_name = "TIME", value_parser = crate::fault::detect)]
    pub(crate) deadline: Option<std::time::Duration>,
}

impl Args {
    /// Where the cards are, by flag or by who started this process.
    pub(crate) fn fabric(&self) -> FabricKind {
        let usual =
            if crate::ranks::launched().is_some() { FabricKind::Mpi } else { FabricKind::Inproc };
        self.fabric.unwrap_or(usual)
    }
}

/// How much of the cards' work is computed a second time.
#[derive(Debug, clap::Args)]
pub(crate) struct AuditArgs {
    /// Part of the cards' operators that this host computes again and compares, from 0 to 1; 1 computes
    /// everything twice before anything is given out. For --fabric cuda and mpi 0 or 1 [default: 0.01 for --fabric
    /// cards, else 0]
    #[arg(long, value_name = "FRACTION", value_parser = fraction)]
    audit: Option<f64>,
}

impl AuditArgs {
    /// The part for cards of a kind.
    pub(crate) fn fraction(&self, fabric: FabricKind) -> anyhow::Result<f64> {
        match (fabric, self.audit) {
            (FabricKind::Cards, part) => Ok(part.unwrap_or(spanker_plan::USUAL_AUDIT)),
            (_, None | Some(0.0)) => Ok(0.0),
            // Their programs have no taps: a second runner is all that checks them.
            (FabricKind::Cuda | FabricKind::Mpi, Some(1.0)) => Ok(0.0),
            (FabricKind::Inproc, Some(part)) => {
                let text = format!("--audit {part}: threads of this process are not checked");
                Err(Usage(text).into())
            }
            (_, Some(part)) => {
                let text =
                    format!("--audit {part} is for --fabric cards; cuda and mpi have 0 and 1");
                Err(Usage(text).into())
            }
        }
    }

    /// A runner that has no taps, with everything computed twice if that is asked for.
    pub(crate) fn twice<'r>(
        &self,
        loaded: &Loaded,
        plan: &Plan,
        runner: Box<dyn Runner + 'r>,
    ) -> anyhow::Result<(Box<dyn Runner + 'r>, Unmended)> {
        if self.audit != Some(1.0) {
            return Ok((runner, Unmended(None)));
        }
        let log = AuditLog::new(1.0);
        let host = Box::new(crate::run::in_process(loaded, plan)?);
        Ok((Box::new(Twice::unnamed(runner, host, &log)), Unmended(Some(log))))
    }
}

/// A part from 0 to 1.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    let part: f64 = text.parse().map_err(|_| format!("'{text}' is not a number"))?;
    match (0.0..=1.0).contains(&part) {
        true => Ok(part),
        false => Err(format!("{part} is not between 0 and 1")),
    }
}

/// How tokens are chosen, with the names and values that llama.cpp has.
#[derive(Debug, clap::Args)]
pub(crate) struct SampleArgs {
    /// Temperature; 0 always takes the best token
    #[arg(long, default_value_t = 0.8, value_name = "T")]
    temp: f64,
    /// Choose among the best K
    #[arg(long, default_value_t = 40, value_name = "K")]
    top_k: usize,
    /// Choose among the best that together have this probability
    #[arg(long, default_value_t = 0.95, value_name = "P")]
    top_p: f64,
    /// Leave out what is less likely than this part of the best
    #[arg(long, default_value_t = 0.05, value_name = "P")]
    min_p: f64,
    /// Seed: the same seed gives the same text [default: from the clock]
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
}

impl SampleArgs {
    pub(crate) fn sampler(&self) -> anyhow::Result<Sampler> {
        let clock = || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(0, |now| now.as_nanos() as u64)
        };
        let seed = self.seed.unwrap_or_else(clock);
        let settings = Settings {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed,
        };
        Sampler::new(settings).map_err(|error| Usage(error.to_string()).into())
    }
}

/// A model that is open.
pub(crate) struct Loaded {
    pub(crate) path: PathBuf,
    pub(crate) network: Arc<Network<GgufFile>>,
    pub(crate) tokenizer: Tokenizer,
    /// Tokens that there is room for.
    pub(crate) context: usize,
    pub(crate) batch: usize,
    pub(crate) threads: usize,
}

impl Loaded {
    /// Opens the model that flags name.
    pub(crate) fn open(args: &Args) -> anyhow::Result<Loaded> {
        if args.fabric() == FabricKind::Cuda && (args.threads.is_some() || args.deadline.is_some())
        {
            let text = "--threads and --deadline are not there for --fabric cuda";
            return Err(Usage(text.into()).into());
        }
        let path = models::find(&args.model)?;
        let named = || path.display().to_string();
        let file = GgufFile::open(&path).with_context(named)?;
        let network = Network::new(file).with_context(named)?;
        let tokenizer =
            Tokenizer::from_gguf(network.header(), network.bytes()).with_context(named)?;
        let trained = reach(&network);
        let context = args.ctx_size.unwrap_or(CONTEXT.min(trained));
        if context == 0 || context > trained {
            let text = format!("--ctx-size {context}: the model has from 1 to {trained} tokens");
            return Err(Usage(text).into());
        }
        if args.batch_size == 0 || args.batch_size > 512 {
            return Err(Usage(format!("--batch-size {}: from 1 to 512", args.batch_size)).into());
        }
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = args.threads.unwrap_or(cores);
        if threads == 0 || threads > MOST_THREADS {
            return Err(Usage(format!("--threads {threads}: from 1 to {MOST_THREADS}")).into());
        }
        let network = Arc::new(network);
        let batch = args.batch_size.min(context);
        Ok(Loaded { path, network, tokenizer, context, batch, threads })
    }

    /// A text as tokens, which must leave room for one more.
    pub(crate) fn encode(&self, text: &str, special: bool) -> anyhow::Result<Vec<u32>> {
        let tokens = self.tokenizer.encode(text, self.tokenizer.add_bos(), special);
        if tokens.is_empty() {
            return Err(Usage("the prompt has no tokens".into()).into());
        }
        if tokens.len() >= self.context {
            let (count, context) = (tokens.len(), self.context);
            anyhow::bail!(
                "the prompt has {count} tokens, and the context has room for {context} with the answer\nhint: give more room with --ctx-size"
            );
        }
        let vocab = self.network.model().vocab;
        if let Some(token) = tokens.iter().find(|&&token| u64::from(token) >= vocab) {
            anyhow::bail!(
                "{}: its tokenizer has token {token}, its weights have {vocab}",
                self.path.display()
            );
        }
        Ok(tokens)
    }
}

/// Tokens that a model was trained to look back on: its context, or its window if that is shorter.
fn reach(network: &Network<GgufFile>) -> usize {
    let model = network.model();
    let window =
        network.header().number(&format!("{}.attention.sliding_window", model.architecture));
    let window = window.filter(|&window| window >= 1.0).map_or(u64::MAX, |window| window as u64);
    model.context.min(window) as usize
}

/// How many cards a flag asks for where cards are threads.
pub(crate) fn thread_cards(
    list: Option<&CardList>,
    shares: Option<&[f64]>,
) -> anyhow::Result<usize> {
    let count = match (list, shares) {
        (None, None) => 1,
        (None, Some(shares)) => shares.len(),
        (Some(CardList::Count(count)), _) => *count,
        (Some(CardList::Indices(_)), _) => {
            let text = "--cards takes a number for --fabric inproc, a list is for --fabric cards";
            return Err(Usage(text.into()).into());
        }
    };
    if count == 0 || count > 256 {
        return Err(Usage(format!("--cards {count}: from 1 to 256 cards can be threads")).into());
    }
    Ok(count)
}

/// Says what is going on, where someone watches.
pub(crate) fn loading(at: spanker_llm::Loading) {
    let percent = at.done * 100 / at.total.max(1);
    output::progress(&format!("loading {} MB onto the cards: {percent} %", at.total / 1_000_000));
}
