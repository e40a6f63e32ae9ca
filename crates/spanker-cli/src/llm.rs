// SPDX-License-Identifier: Apache-2.0
//! What commands that run models share: which model, on what, how tokens are chosen, and what is told meanwhile.

use std::path::Path;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use spanker_engine::shape::{self, Found};
use spanker_engine::{
    CardList, DraftModel, DraftSource, Engine, Event, Fabric, Host, Model, Options, Sampling,
    Split, Wish, directory, files, models,
};
use spanker_model::{KvShape, Model as Shape, Quant};
use spanker_plan::{Plan, Request};
use spanker_text::{Penalties, Settings};

use crate::workers::WorkerArgs;
use crate::{output, refuse, usage};

/// More than any plan has.
const MOST_PLAN: u64 = 256 << 20;

/// What flags mean for cards of one kind.
#[derive(Debug, Clone, Copy, Default)]
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

/// What flags mean for cards of a fabric.
pub(crate) fn takes(fabric: Fabric) -> Takes {
    let none = Takes { audit: true, ..Takes::default() };
    match fabric {
        Fabric::Inproc => Takes { threads: true, many_hosts: true, ..Takes::default() },
        Fabric::Cards => Takes { deadline: true, ..none },
        Fabric::Cuda => none,
        Fabric::Mpi => {
            Takes { threads: true, deadline: true, started: true, machines: true, ..none }
        }
        Fabric::Tcp => Takes { threads: true, deadline: true, machines: true, ..none },
    }
}

/// One of some values of the engine, by its name.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let names = PossibleValuesParser::new(all.iter().map(|&one| name(one)));
    names.try_map(move |text| {
        all.iter().copied().find(|&one| name(one) == text).ok_or("there is no such value")
    })
}

/// One of some types of weights.
pub(crate) fn quant_of(all: &'static [Quant]) -> impl Fn(&str) -> Result<Quant, String> + Clone {
    move |text| match text.parse() {
        Ok(quant) if all.contains(&quant) => Ok(quant),
        _ => {
            let names: Vec<&str> = all.iter().map(|quant| quant.name()).collect();
            let names = names.join(", ");
            Err(format!("unknown weight type '{text}' (expected one of: {names})"))
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
    /// Tokens of a prompt that are run together
    #[arg(short, long, default_value_t = spanker_plan::USUAL_BATCH as usize, value_name = "TOKENS")]
    pub(crate) batch_size: usize,
    /// How keys and values are stored: f16, q8_0 in little more than half of the memory, or q4_0 in little more than a
    /// quarter of it
    #[arg(long, default_value = "f16", value_name = "TYPE", value_parser = quant_of(&KvShape::QUANTS))]
    pub(crate) kv: Quant,
    /// Where the cards are: threads of this process (inproc), those that 'spanker cards' shows, GPUs (cuda), the processes that
    /// mpirun has started, or --workers (tcp) [default: tcp with --workers, mpi under mpirun, else inproc]
    #[arg(long, value_parser = one_of(&Fabric::ALL, Fabric::name))]
    pub(crate) fabric: Option<Fabric>,
    /// How much each card gets, as in 2,2,1; also -ts. What came of it is in the report
    #[arg(long, value_name = "SHARES", value_delimiter = ',', visible_alias = "ts")]
    pub(crate) tensor_split: Option<Vec<f64>>,
    /// How long cards may show no progress before they are given up, for --fabric cards, mpi and tcp; for the last two
    /// more than a step takes [default for mpi: 60s, for tcp: 5s, more for large models]
    #[arg(long, value_name = "TIME", value_parser = crate::times::timeout)]
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
            batch_size: spanker_plan::USUAL_BATCH as usize,
            kv: Quant::F16,
            fabric: Some(Fabric::Inproc),
            tensor_split: None,
            deadline: None,
            workers: WorkerArgs::default(),
        }
    }

    /// Where the cards are, by flag or by who started this process.
    pub(crate) fn fabric(&self) -> Fabric {
        let usual = match crate::ranks::launched() {
            _ if self.workers.are_named() => Fabric::Tcp,
            Some(_) => Fabric::Mpi,
            None => Fabric::Inproc,
        };
        self.fabric.unwrap_or(usual)
    }

    /// What flags mean for these cards.
    pub(crate) fn takes(&self) -> Takes {
        takes(self.fabric())
    }

    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.takes().started
    }

    /// Tokens that there is room for with this model, and those of a prompt that are run together.
    pub(crate) fn sizes(&self, model: &Model) -> anyhow::Result<(usize, usize)> {
        Ok(model.sizes(self.ctx_size, self.batch_size)?)
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
                refuse("--cards takes a number here, a list is for --fabric cards")
            }
        }
    }

    /// The place that flags name.
    pub(crate) fn host(&self, cards: Option<&CardList>) -> anyhow::Result<Host> {
        let one = |count: Option<usize>| count.unwrap_or(1);
        let fabric = self.fabric();
        if fabric != Fabric::Tcp {
            self.workers.refuse()?;
        }
        let host = match fabric {
            Fabric::Inproc => Host::threads(self.cores(), one(self.count(cards)?))?,
            Fabric::Cuda if self.threads.is_some() || self.deadline.is_some() => {
                let text = "--threads and --deadline are not there for --fabric cuda";
                return refuse(text);
            }
            Fabric::Cuda => Host::gpus(one(self.count(cards)?))?,
            Fabric::Cards => Host::cards(&directory::find(), cards, self.deadline, self.cores())?,
            Fabric::Mpi => Host::ranks(self.deadline, self.threads)?,
            Fabric::Tcp => {
                let (addresses, key) = (self.workers.addresses()?, self.workers.key()?);
                Host::workers(addresses, key, self.deadline, self.cores())?
            }
        };
        // The first so many machines or processes, or all.
        let first = if self.takes().machines { self.count(cards)? } else { None };
        let host = match first {
            Some(count) => host.with_cards(count)?,
            None => host,
        };
        Ok(host.observed(tell))
    }
}

/// A model on cards, in a layout.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub(crate) struct PlaceArgs {
    #[command(flatten)]
    pub(crate) llm: Args,
    /// Cards: a number, or for --fabric cards a list as in 0,1,3 [default: 1 in-process, all cards]
    #[arg(long, value_name = "CARDS")]
    cards: Option<CardList>,
    #[command(flatten)]
    split: SplitArgs,
}

/// How a model is split.
#[derive(Debug, Clone, Copy, clap::Args)]
#[group(skip)]
pub(crate) struct SplitArgs {
    /// How to split the model: gather (tensor-parallel, the bits of one card), reduce (the same with partial sums, added in
    /// card order), pipeline (whole layers) or mixed (two stages, each tensor-parallel) [default: the planner's best that
    /// gives the bits of one card]
    #[arg(long, value_parser = one_of(&Split::ALL, Split::name))]
    pub(crate) split: Option<Split>,
}

impl PlaceArgs {
    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.llm.takes_ranks()
    }

    /// The layout that flags ask for.
    pub(crate) fn wish(&self) -> Wish {
        Wish { split: self.split.split, shares: self.llm.tensor_split.clone() }
    }

    /// The place that flags name.
    pub(crate) fn host(&self) -> anyhow::Result<Host> {
        self.llm.host(self.cards.as_ref())
    }

    /// As [`on_host`].
    pub(crate) fn lead(
        &self,
        plan: Option<&Path>,
        lead: impl FnOnce(&Place) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        on_host(&self.llm, self.cards.as_ref(), plan, lead)
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

    /// The model on the cards, by the plan that `plan` makes for a request, with what flags say is computed a second time
    /// and guessed.
    pub(crate) fn load(
        &self,
        (audit, draft): (&AuditArgs, &DraftArgs),
        request: Request,
        record: bool,
        plan: impl FnOnce(&Request) -> anyhow::Result<Plan>,
    ) -> anyhow::Result<Engine<'_>> {
        let audit = self.host.audit(audit.audit)?;
        let (draft, small) = (draft.source(), draft.load(self)?);
        let plan = plan(&Request { audit, guesses: draft.most(), ..request })?;
        let options = Options { record, audit, draft };
        let mut engine = Engine::load_with(&self.host, &self.model, plan, options)?;
        if let Some(small) = small {
            engine.set_draft_model(small);
        }
        Ok(engine)
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
        (Some(path), None, Fabric::Inproc | Fabric::Cuda) => {
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
            log!("\n{error}: going on with card{many} {list}");
        }
        Event::Resumed { plan, after, tokens } => {
            let (strategy, time) = (plan.layout.strategy(), after.as_secs_f64());
            log!("{strategy} again after {time:.2} s, with {tokens} tokens computed anew");
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
            usage(text)
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
        let sampling = Sampling::new(settings).map_err(|error| usage(error.to_string()))?;
        if self.seed.is_none() && self.temp > 0.0 {
            output::note(format_args!("seed {seed}: the same text again with --seed {seed}"));
        }
        Ok(sampling)
    }
}
