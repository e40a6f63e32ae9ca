// SPDX-License-Identifier: Apache-2.0
//! What commands that run models share: which model, on what, how tokens are chosen, and what is told meanwhile.

use std::path::Path;

use spanker_engine::{DraftModel, DraftSource, Event, Fabric, Host, Model, Sampling, Wish};
use spanker_plan::{Plan, Request};
use spanker_text::{Penalties, Settings};

use crate::directory::{self, CardList};
use crate::workers::WorkerArgs;
use crate::{Usage, output};
use spanker_engine::shape::{self, Found};
use spanker_engine::{files, models};
use spanker_model::{KvShape, Model as Shape, Quant};

/// The context where neither a flag nor the model asks for less.
const CONTEXT: usize = 2048;
/// Tokens of a prompt that can be run together at most.
const MOST_BATCH: usize = 512;
/// More than any plan has.
const MOST_PLAN: u64 = 256 << 20;

/// Where cards are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FabricKind {
    /// Threads of this process
    Inproc,
    /// The cards that are there: real ones, or a twin's
    Cards,
    /// NVIDIA's GPUs; more cards than there are GPUs share them
    Cuda,
    /// Processes that mpirun has started, on one host or several: each is a card
    Mpi,
    /// This machine and the workers of --workers, over the network: each is a card
    Tcp,
}

/// What flags mean for cards of one kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Takes {
    /// The work of a card is shared by threads that `--threads` counts.
    pub(crate) threads: bool,
    /// What cards compute can be computed again.
    pub(crate) audit: bool,
    /// Cards have a `--deadline` by which they must show progress.
    pub(crate) deadline: bool,
    /// As many hosts as one likes can be open at a time.
    pub(crate) many_hosts: bool,
    /// Who starts the process says how many cards there are.
    pub(crate) started: bool,
    /// Cards are machines or processes, whose number flags can make smaller and nothing else.
    pub(crate) machines: bool,
}

impl FabricKind {
    /// What flags mean for these cards.
    pub(crate) fn takes(self) -> Takes {
        let none = Takes {
            threads: false,
            audit: true,
            deadline: false,
            many_hosts: false,
            started: false,
            machines: false,
        };
        match self {
            FabricKind::Inproc => Takes { threads: true, audit: false, many_hosts: true, ..none },
            FabricKind::Cards => Takes { deadline: true, ..none },
            FabricKind::Cuda => none,
            FabricKind::Mpi => {
                Takes { threads: true, deadline: true, started: true, machines: true, ..none }
            }
            FabricKind::Tcp => Takes { threads: true, deadline: true, machines: true, ..none },
        }
    }
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

/// A type that keys and values can be stored as.
pub(crate) fn kept_as(text: &str) -> Result<Quant, String> {
    match text.parse() {
        Ok(quant) if KvShape::QUANTS.contains(&quant) => Ok(quant),
        _ => Err("expected f16, q8_0 or q4_0".into()),
    }
}

impl From<Split> for spanker_engine::Split {
    fn from(split: Split) -> Self {
        match split {
            Split::Gather => spanker_engine::Split::Gather,
            Split::Reduce => spanker_engine::Split::Reduce,
            Split::Pipeline => spanker_engine::Split::Pipeline,
            Split::Mixed => spanker_engine::Split::Mixed,
        }
    }
}

/// Which model, on what.
#[derive(Debug, Clone, clap::Args)]
// Commands have groups of this name, too, and a name must be unique.
#[group(skip)]
pub(crate) struct Args {
    /// A .gguf file, or the name of a fetched model
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: String,
    /// Tokens that there is room for, prompt and answer together [default: 2048, or what the model has]
    #[arg(short, long, value_name = "TOKENS")]
    pub(crate) ctx_size: Option<usize>,
    /// Threads in all, shared out over in-process cards; for --fabric mpi those of each process, for --fabric tcp those
    /// of this machine [default: as many as there are cores, shared out over the processes of a host]
    #[arg(short, long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Tokens of a prompt that are run together [default: 128, with --fabric cuda 512]
    #[arg(short, long, value_name = "TOKENS")]
    pub(crate) batch_size: Option<usize>,
    /// How keys and values are stored: f16, q8_0 in little more than half of the memory, or q4_0 in little more than a
    /// quarter of it
    #[arg(long, default_value = "f16", value_name = "TYPE", value_parser = kept_as)]
    pub(crate) kv: Quant,
    /// Where the cards are [default: tcp with --workers, mpi if mpirun has started several, else inproc]
    #[arg(long, value_enum)]
    pub(crate) fabric: Option<FabricKind>,
    /// How much each card gets, as in 2,2,1; also -ts. What came of it is in the report
    #[arg(long, value_name = "SHARES", value_delimiter = ',', visible_alias = "ts")]
    pub(crate) tensor_split: Option<Vec<f64>>,
    /// How long cards may show no progress before they are given up, for --fabric cards, mpi and tcp; for the last two
    /// more than a step takes [default for mpi: 60s, for tcp: 5s, more for large models]
    #[arg(long, value_name = "TIME", value_parser = crate::fault::detect)]
    pub(crate) deadline: Option<std::time::Duration>,
    #[command(flatten)]
    pub(crate) workers: WorkerArgs,
}

impl Args {
    /// A model on threads, with everything else as it usually is.
    pub(crate) fn usual(model: &str) -> Args {
        Args {
            model: model.to_owned(),
            ctx_size: None,
            threads: None,
            batch_size: None,
            kv: Quant::F16,
            fabric: Some(FabricKind::Inproc),
            tensor_split: None,
            deadline: None,
            workers: WorkerArgs::default(),
        }
    }

    /// Where the cards are, by flag or by who started this process.
    pub(crate) fn fabric(&self) -> FabricKind {
        let usual = match crate::ranks::launched() {
            _ if self.workers.are_named() => FabricKind::Tcp,
            Some(_) => FabricKind::Mpi,
            None => FabricKind::Inproc,
        };
        self.fabric.unwrap_or(usual)
    }

    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.fabric().takes().started
    }

    /// The layout that flags ask for.
    pub(crate) fn wish(&self, split: Option<Split>) -> Wish {
        Wish { split: split.map(Into::into), shares: self.tensor_split.clone() }
    }

    /// Tokens that there is room for with this model, and those of a prompt that are run together.
    pub(crate) fn sizes(&self, model: &Model) -> anyhow::Result<(usize, usize)> {
        let trained = model.trained_context();
        let context = self.ctx_size.unwrap_or(CONTEXT.min(trained));
        if context == 0 || context > trained {
            let text = format!("--ctx-size {context}: the model has from 1 to {trained} tokens");
            return Err(Usage(text).into());
        }
        // Tiles of many rows keep all of a GPU busy.
        let is_gpu = self.fabric() == FabricKind::Cuda;
        let usual = if is_gpu { MOST_BATCH } else { spanker_plan::USUAL_BATCH as usize };
        let batch = self.batch_size.unwrap_or(usual);
        if batch == 0 || batch > MOST_BATCH {
            return Err(Usage(format!("--batch-size {batch}: from 1 to {MOST_BATCH}")).into());
        }
        Ok((context, batch.min(context)))
    }

    fn cores(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.unwrap_or(cores)
    }

    /// How many cards flags ask for where cards are numbered from 0.
    fn count(&self, list: Option<&CardList>) -> anyhow::Result<Option<usize>> {
        match (list, &self.tensor_split) {
            (None, shares) => Ok(shares.as_ref().map(Vec::len)),
            (Some(CardList::Count(count)), _) => Ok(Some(*count)),
            (Some(CardList::Indices(_)), _) => {
                Err(Usage("--cards takes a number here, a list is for --fabric cards".into())
                    .into())
            }
        }
    }

    /// The first so many machines or processes, or all.
    fn first(host: Host, count: Option<usize>) -> anyhow::Result<Host> {
        Ok(match count {
            Some(count) => host.with_cards(count)?,
            None => host,
        })
    }

    /// The place that flags name.
    pub(crate) fn host(&self, cards: Option<&CardList>) -> anyhow::Result<Host> {
        let one = |count: Option<usize>| count.unwrap_or(1);
        let fabric = self.fabric();
        if fabric != FabricKind::Tcp {
            self.workers.refuse()?;
        }
        let host = match fabric {
            FabricKind::Inproc => Host::threads(self.cores(), one(self.count(cards)?))?,
            FabricKind::Cuda if self.threads.is_some() || self.deadline.is_some() => {
                let text = "--threads and --deadline are not there for --fabric cuda";
                return Err(Usage(text.into()).into());
            }
            FabricKind::Cuda => Host::gpus(one(self.count(cards)?))?,
            FabricKind::Cards => {
                Host::cards(&directory::find(), cards, self.deadline, self.cores())?
            }
            FabricKind::Mpi => {
                Self::first(Host::ranks(self.deadline, self.threads)?, self.count(cards)?)?
            }
            FabricKind::Tcp => {
                let (addresses, key) = (self.workers.addresses()?, self.workers.key()?);
                let host = Host::workers(addresses, key, self.deadline, self.cores())?;
                Self::first(host, self.count(cards)?)?
            }
        };
        Ok(host.observed(tell))
    }
}

/// A place to run, and a model that is open.
pub(crate) struct Place {
    pub(crate) host: Host,
    pub(crate) model: Model,
    /// Tokens that there is room for.
    pub(crate) context: usize,
    /// Tokens of a prompt that are run together.
    pub(crate) batch: usize,
    /// How keys and values are stored.
    kv: Quant,
}

impl Place {
    fn new(args: &Args, host: Host, model: Model) -> anyhow::Result<Place> {
        let (context, batch) = args.sizes(&model)?;
        Ok(Place { host, model, context, batch, kv: args.kv })
    }

    /// A text as tokens, which leave room for one more.
    pub(crate) fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        Ok(self.model.encode(text, true, self.context)?)
    }

    /// What is asked of a run of so many tokens.
    pub(crate) fn request(&self, prompt: usize, steps: usize) -> Request {
        let request = spanker_engine::request(self.context, self.batch, prompt, steps);
        Request { kv: self.kv, ..request }
    }
}

/// Opens a place and a model as flags say, and calls `lead` with them, on the process that leads; other processes that a
/// launcher has started do what that one says. `plan` is a saved plan on whose layout all have to agree.
pub(crate) fn on_host(
    args: &Args,
    cards: Option<&CardList>,
    plan: Option<&Path>,
    lead: impl FnOnce(&Place) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    // A plan says how many cards it is for, where cards are as many as one likes.
    let planned = match (plan, cards, args.fabric()) {
        (Some(path), None, FabricKind::Inproc | FabricKind::Cuda) => {
            let last = saved(path)?.layout.cards().last().map_or(1, |card| card + 1);
            Some(CardList::Count(last))
        }
        _ => None,
    };
    let host = args.host(cards.or(planned.as_ref()))?;
    let model = host.open_with(|| Model::open(models::find(&args.model)?));
    if host.fabric() != Fabric::Mpi {
        return lead(&Place::new(args, host, model?)?);
    }
    // Ending MPI could wait for ranks that never come: a rank that cannot go on ends its process.
    let model = model.unwrap_or_else(|error| crate::ranks::leave(&host, &error.into()));
    if !host.leads() {
        let expected = plan.map(saved).transpose();
        let followed = expected.inspect_err(|error| host.give_up(&format!("{error:#}")));
        let followed = followed.and_then(|plan| Ok(host.follow(&model, plan.as_ref())?));
        return followed.or_else(|error| crate::ranks::leave(&host, &error));
    }
    let place = Place::new(args, host, model)?;
    lead(&place).or_else(|error| {
        place.host.give_up(&format!("{error:#}"));
        crate::ranks::leave(&place.host, &error)
    })
}

/// The shape that a name or a path means; which of two it is, where that is not plain, is said.
pub(crate) fn shape(text: &str, quant: Option<Quant>) -> anyhow::Result<Shape> {
    let Found { model, fetched } = shape::find(text, quant)?;
    if let Some(path) = fetched {
        let (shown, stored) = (path.display(), shape::stored(&model));
        output::note(format_args!(
            "{text} is the fetched {shown} ({stored}); with --quant it is the built-in shape"
        ));
    }
    Ok(model)
}

/// A plan from a file.
pub(crate) fn saved(path: &Path) -> anyhow::Result<Plan> {
    let text = files::read(path, MOST_PLAN)?;
    Plan::from_json(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))
}

/// Tells people what a host is doing.
fn tell(event: &Event<'_>) {
    match event {
        Event::Measuring { rows } => {
            output::progress(&format!("measuring this machine: {rows} rows .."));
        }
        Event::MeasuringGpus => output::progress("measuring the GPU .."),
        Event::Loading { done, total } => {
            let (percent, megabytes) = (done * 100 / (*total).max(1), total / 1_000_000);
            output::progress(&format!("loading {megabytes} MB onto the cards: {percent} %"));
        }
        Event::Prompt { done, total } => {
            let text = format!("reading a prompt of {total} tokens");
            output::progress_of(*done as u64, *total as u64, &text);
        }
        Event::Done => output::progress_done(),
        Event::Lost { error, left } => {
            let (list, many) = (directory::list(left), if left.len() == 1 { "" } else { "s" });
            output::said_line(format_args!("\n{error}: going on with card{many} {list}"));
        }
        Event::Resumed { plan, after, tokens } => {
            let (strategy, time) = (plan.layout.strategy(), after.as_secs_f64());
            output::said_line(format_args!(
                "{strategy} again after {time:.2} s, with {tokens} tokens computed anew"
            ));
        }
        Event::Note(text) => output::note(text),
        _ => {}
    }
}

/// How much of the cards' work is computed a second time.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct AuditArgs {
    /// Part of the cards' operators that this host computes again and compares, from 0 to 1; 1 computes
    /// everything twice before anything is given out [default: 0.01 for --fabric cards and cuda, else 0]
    #[arg(long, value_name = "FRACTION", value_parser = fraction)]
    pub(crate) audit: Option<f64>,
}

/// Where guesses of what follows come from.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DraftArgs {
    /// Guess what follows, and check guesses in the same step: none; lookup, from what followed earlier in prompt and answer;
    /// or a small model with the same vocabulary (run, chat, bench model). The tokens are the same; how many are guessed
    /// is decided by what a step takes and how many were right
    #[arg(long, default_value = "none", value_name = "none|lookup|MODEL")]
    draft: String,
}

impl DraftArgs {
    /// The source, where no model may be one.
    pub(crate) fn of_text(&self) -> anyhow::Result<DraftSource> {
        self.draft.parse().map_err(|_| {
            let text = format!(
                "--draft {}: expected none or lookup; a draft model is for run, chat and bench model",
                self.draft
            );
            Usage(text).into()
        })
    }

    /// The source.
    pub(crate) fn source(&self) -> DraftSource {
        self.draft.parse().unwrap_or(DraftSource::Model)
    }

    /// The small model that guesses for a large one, if one does.
    pub(crate) fn load(&self, place: &Place) -> anyhow::Result<Option<DraftModel>> {
        if self.source() != DraftSource::Model {
            return Ok(None);
        }
        let path = models::find(&self.draft)?;
        let threads = place.host.thread_count();
        Ok(Some(DraftModel::load(&path, &place.model, place.context, threads)?))
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

/// What is chosen by unless flags say otherwise.
const USUAL: Settings = Settings::usual(0);

/// How tokens are chosen, with the names and values that llama.cpp has.
#[derive(Debug, clap::Args)]
pub(crate) struct SampleArgs {
    /// Temperature; 0 always takes the best token
    #[arg(long, default_value_t = USUAL.temperature, value_name = "T")]
    temp: f64,
    /// Choose among the best K
    #[arg(long, default_value_t = USUAL.top_k, value_name = "K")]
    top_k: usize,
    /// Choose among the best that together have this probability
    #[arg(long, default_value_t = USUAL.top_p, value_name = "P")]
    top_p: f64,
    /// Leave out what is less likely than this part of the best
    #[arg(long, default_value_t = USUAL.min_p, value_name = "P")]
    min_p: f64,
    /// Divides the logits of tokens that came before (positive ones; negative ones are multiplied); 1 changes nothing
    #[arg(long, default_value_t = USUAL.penalties.repeat, value_name = "N")]
    repeat_penalty: f64,
    /// Tokens that count as having come before: the last N, those of the prompt included
    #[arg(long, default_value_t = USUAL.penalties.last, value_name = "N")]
    repeat_last_n: usize,
    /// Taken from the logits of tokens that came before
    #[arg(long, default_value_t = USUAL.penalties.presence, value_name = "N", allow_negative_numbers = true)]
    presence_penalty: f64,
    /// Taken from the logits of tokens for each time that they came before
    #[arg(long, default_value_t = USUAL.penalties.frequency, value_name = "N", allow_negative_numbers = true)]
    frequency_penalty: f64,
    /// Seed: the same seed gives the same text [default: from the clock, and shown]
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
    /// End the text where this comes; may be given several times
    #[arg(long = "stop", value_name = "TEXT")]
    pub(crate) stops: Vec<String>,
}

impl SampleArgs {
    /// How tokens are chosen; the seed is said if nobody gave it and it matters.
    pub(crate) fn sampling(&self) -> anyhow::Result<Sampling> {
        let clock = || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(0, |now| now.as_nanos() as u64)
        };
        let seed = self.seed.unwrap_or_else(|| clock() % 1_000_000_000);
        let settings = Settings {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            penalties: Penalties {
                repeat: self.repeat_penalty,
                presence: self.presence_penalty,
                frequency: self.frequency_penalty,
                last: self.repeat_last_n,
            },
            seed,
        };
        let sampling = Sampling::new(settings).map_err(|error| Usage(error.to_string()))?;
        if self.seed.is_none() && self.temp > 0.0 {
            output::note(format_args!("seed {seed}: the same text again with --seed {seed}"));
        }
        Ok(sampling)
    }
}

/// What fabric a host's cards are on, as `--json` has it.
pub(crate) fn fabric_words(fabric: Fabric) -> &'static str {
    match fabric {
        Fabric::Inproc => "in process",
        Fabric::Cards => "on cards",
        Fabric::Cuda => "on GPUs",
        Fabric::Mpi => "on ranks",
        Fabric::Tcp => "on workers",
    }
}
