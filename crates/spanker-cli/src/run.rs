// SPDX-License-Identifier: Apache-2.0
//! `spanker run`: a prompt through a model that is split over cards, and how fast that was.

use std::io::Write;
use std::path::PathBuf;

use spanker_llm::{AuditLog, Front, InProcess, MemoryUse, Network, Recorder, Session};
use spanker_plan::{Plan, Request};

use crate::directory::CardList;
use crate::llm::cards::{Cards, Ongoing};
use crate::llm::compared::{self, Compared, Piece};
use crate::llm::generate::{Answer, GiveUp, Limits, Mend, generate};
use crate::llm::given::Audience;
use crate::llm::host::{self, Freshness};
use crate::llm::ranks::{self, Place};
use crate::llm::report::{self, Report};
use crate::llm::{self, AuditArgs, FabricKind, Loaded, SampleArgs, Split, layout};
use crate::{Usage, files, output};

/// Run a prompt through a model that is split over cards
///
/// The text comes as it is made; then how fast prompt and generation were, where a token's time went, and how
/// far that was from the prediction. With --fabric cards a card that dies is named, the model is laid out
/// again over the cards that are left, and the text goes on as it would have.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker fetch smollm2-135m
  spanker run -m smollm2-135m -p 'The three primary colours are' -n 32 --temp 0
  spanker run -m smollm2-135m -p 'Once upon a time' --cards 3 --seed 7
  spanker twin up --cards 4 --profile rev-a && spanker run -m smollm2-135m -p 'Hello' --fabric cards
  spanker run -m model.gguf -p 'Hello' --cards 2 -ts 3,1
  spanker run -m model.gguf -p 'Hello' --fabric cuda
  spanker plan model.gguf --cards 4 --out plan.json && spanker run -m model.gguf -p 'Hello' --plan plan.json
  mpirun -n 3 spanker run -m model.gguf -p 'Hello'             three processes, a card each
  mpirun -n 2 --host one,two spanker run -m model.gguf -p 'Hello' --split pipeline

Without --split the split is one that gives the tokens of one card. 'spanker verify' proves it.")]
pub(crate) struct Args {
    #[command(flatten)]
    llm: llm::Args,
    /// Cards: a number, or for --fabric cards a list as in 0,1,3 [default: 1 in-process, all cards]
    #[arg(long, value_name = "CARDS")]
    cards: Option<CardList>,
    /// The text to go on from
    #[arg(short, long)]
    prompt: String,
    /// Tokens to generate at most
    #[arg(short, long, default_value_t = 128, value_name = "TOKENS")]
    n_predict: usize,
    #[command(flatten)]
    sampling: SampleArgs,
    #[command(flatten)]
    audit: AuditArgs,
    /// How to split the model [default: the planner's best that gives the bits of one card]
    #[arg(long, value_enum)]
    split: Option<Split>,
    /// Run a saved plan
    #[arg(long, value_name = "FILE", conflicts_with_all = ["split", "tensor_split"])]
    plan: Option<PathBuf>,
    /// Go on after the model has ended the text
    #[arg(long)]
    ignore_eos: bool,
    /// Do not repeat the prompt before the text
    #[arg(long)]
    no_display_prompt: bool,
    /// Save what each card did when, as Perfetto shows it
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Lay the run beside its own prediction, operator by operator, and say where the time differs
    #[arg(long)]
    compare: bool,
    /// Save the logits after the prompt, as little-endian f32s in the order of tokens, to compare with
    /// other runtimes
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Whether what cards do is recorded.
    fn records(&self) -> bool {
        self.trace.is_some() || self.compare
    }

    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.llm.fabric() == FabricKind::Mpi
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match args.llm.fabric() {
        FabricKind::Inproc => in_threads(args),
        FabricKind::Cards => on_cards(args),
        FabricKind::Cuda => on_gpus(args),
        FabricKind::Mpi => {
            let expected = |loaded: &Loaded| match &args.plan {
                Some(path) => layout::saved(path, Ready::new(args, loaded)?.request).map(Some),
                None => Ok(None),
            };
            ranks::join(&args.llm, &expected, |loaded, front, place| {
                on_ranks(args, loaded, front, place)
            })
        }
    }
}

/// Tokens from which on a run says something about its machine.
const ENOUGH_STEPS: usize = 8;

/// What a run begins with, wherever the cards are.
struct Ready {
    sampler: spanker_text::Sampler,
    prompt: Vec<u32>,
    limits: Limits,
    request: Request,
}

impl Ready {
    fn new(args: &Args, loaded: &Loaded) -> anyhow::Result<Ready> {
        let sampler = args.sampling.sampler()?;
        if args.n_predict == 0 {
            return Err(Usage("--n-predict 0: at least one token is generated".into()).into());
        }
        let prompt = loaded.encode(&args.prompt, true)?;
        let limits = Limits {
            tokens: args.n_predict,
            ignore_end: args.ignore_eos,
            keep_logits: args.logits.is_some(),
            audience: Audience::of(args.json),
        };
        let audit = args.audit.fraction(args.llm.fabric())?;
        let request = layout::request(loaded.context, loaded.batch, prompt.len(), args.n_predict);
        let request = Request { audit, ..request };
        Ok(Ready { sampler, prompt, limits, request })
    }

    /// Shows the prompt and what follows from it. The cards are given back before the report.
    fn answer<'r>(
        mut self,
        args: &Args,
        loaded: &Loaded,
        mut session: Session<'r>,
        mend: &mut dyn Mend<'r>,
    ) -> anyhow::Result<Answer> {
        show_prompt(args)?;
        let mut show = |text: &str| show(args, text);
        let Ready { sampler, prompt, limits, .. } = &mut self;
        generate(loaded, &mut session, prompt, sampler, *limits, mend, &mut show)
    }
}

fn in_threads(args: &Args) -> anyhow::Result<()> {
    let loaded = Loaded::open(&args.llm)?;
    let ready = Ready::new(args, &loaded)?;
    let request = ready.request.clone();
    let prompt = ready.prompt.clone();
    let shares = args.llm.tensor_split.as_deref();
    let plan = match &args.plan {
        Some(path) => host::priced(&loaded, loaded.threads, layout::saved(path, request)?)?,
        None => {
            let count = llm::thread_cards(args.cards.as_ref(), shares)?;
            let split = args.split.unwrap_or(Split::Gather);
            let model = loaded.network.model();
            let layout = layout::given(model, split, &layout::shares(shares, count)?)?;
            host::plan(&loaded, loaded.threads, layout, request, Freshness::Kept)?
        }
    };
    let mut runner = in_process(&loaded, &plan)?;
    let memory = runner.memory().to_vec();
    let recorder = args.records().then(Recorder::new);
    if let Some(recorder) = &recorder {
        runner.record(recorder);
    }
    let session = Session::new(Box::new(runner));
    let answer = ready.answer(args, &loaded, session, &mut GiveUp)?;
    if answer.steps.len() >= ENOUGH_STEPS {
        let predicted = 1.0 / plan.predict().tokens_per_second;
        let measured = report::median(&answer.steps).time().as_secs_f64();
        host::doubt(&loaded, &plan.layout, predicted, measured);
    }
    let pieces = vec![Piece::first(plan, prompt, recorder)];
    finish(args, &answer, &Ran { pieces, lost: 0, place: None, memory })
}

fn on_gpus(args: &Args) -> anyhow::Result<()> {
    let loaded = Loaded::open(&args.llm)?;
    let ready = Ready::new(args, &loaded)?;
    let request = ready.request.clone();
    let prompt = ready.prompt.clone();
    let shares = args.llm.tensor_split.as_deref();
    let (gpus, plan) = match &args.plan {
        Some(path) => {
            let plan = layout::saved(path, request)?;
            let count = plan.layout.cards().last().map_or(1, |card| card + 1);
            let gpus = llm::gpu::Gpus::open(count)?;
            let cluster = gpus.cluster(&loaded, count)?;
            // The layout stays, its prices are those of the GPUs that are here.
            (gpus, Plan::new(plan.model, cluster, plan.request, plan.layout)?)
        }
        None => {
            let count = llm::thread_cards(args.cards.as_ref(), shares)?;
            let gpus = llm::gpu::Gpus::open(count)?;
            let split = args.split.unwrap_or(Split::Gather);
            let cluster = gpus.cluster_for(&loaded, split, count)?;
            let plan = layout::plan(loaded.network.model(), cluster, request, Some(split), shares)?;
            (gpus, plan)
        }
    };
    let recorder = args.records().then(Recorder::new);
    let (runner, memory) = gpus.recorded_runner(&loaded, &plan, recorder.as_ref())?;
    let (runner, mut mend) = args.audit.twice(&loaded, &plan, runner)?;
    let answer = ready.answer(args, &loaded, Session::new(runner), &mut mend)?;
    let pieces = vec![Piece::first(plan, prompt, recorder)];
    finish(args, &answer, &Ran { pieces, lost: 0, place: None, memory })
}

/// The front of a run whose cards are processes.
fn on_ranks(
    args: &Args,
    loaded: &Loaded,
    front: &mut Front<'_>,
    place: &Place,
) -> anyhow::Result<()> {
    let ready = Ready::new(args, loaded)?;
    let request = ready.request.clone();
    let prompt = ready.prompt.clone();
    let (plan, priced) = match &args.plan {
        Some(path) => {
            // All ranks have read this very plan, and compare it; what it costs here is for the report alone.
            let plan = layout::saved(path, request)?;
            spanker_llm::check_plan(&loaded.network, &plan)?;
            let priced =
                ranks::plan(loaded, front, place, plan.layout.clone(), plan.request.clone())?;
            (plan, priced)
        }
        None => {
            let shares = args.llm.tensor_split.as_deref();
            let count = ranks::cards(args.cards.as_ref(), shares, place)?;
            let (model, split) = (loaded.network.model(), args.split.unwrap_or(Split::Gather));
            let layout = layout::given(model, split, &layout::shares(shares, count)?)?;
            let plan = ranks::plan(loaded, front, place, layout, request)?;
            (plan.clone(), plan)
        }
    };
    let (context, batch) = (loaded.context, loaded.batch);
    let mut runner = front.lay_out(&loaded.network, &plan, context, batch, loaded.threads)?;
    let memory = runner.memory().to_vec();
    if args.records() {
        runner.record()?;
    }
    let (runner, mut mend) = args.audit.twice(loaded, &plan, Box::new(runner))?;
    let answer = ready.answer(args, loaded, Session::new(runner), &mut mend)?;
    let recorder = match args.records() {
        true => Some(Recorder::from(front.marks()?)),
        false => None,
    };
    let pieces = vec![Piece::first(priced, prompt, recorder)];
    finish(args, &answer, &Ran { pieces, lost: 0, place: Some(place), memory })
}

/// The cards as threads.
pub(crate) fn in_process(
    loaded: &Loaded,
    plan: &Plan,
) -> anyhow::Result<InProcess<ggml_spanker::GgufFile>> {
    let network: std::sync::Arc<Network<_>> = std::sync::Arc::clone(&loaded.network);
    Ok(InProcess::new(network, plan, loaded.context, loaded.batch, loaded.threads)?)
}

fn on_cards(args: &Args) -> anyhow::Result<()> {
    let loaded = Loaded::open(&args.llm)?;
    let ready = Ready::new(args, &loaded)?;
    let request = ready.request.clone();
    let prompt = ready.prompt.clone();
    let cards = Cards::open(args.cards.as_ref(), args.llm.deadline)?;
    let shares = args.llm.tensor_split.as_deref();
    let plan = match &args.plan {
        Some(path) => layout::saved(path, request)?,
        None => cards.plan(&loaded, request, args.split, shares)?,
    };
    let (recorder, log) = (args.records().then(Recorder::new), AuditLog::new(plan.request.audit));
    let left = cards.indices.clone();
    let runner = cards.runner(&left, &loaded, &plan, recorder.as_ref(), &log);
    let (runner, memory) = runner.map_err(|error| cards.told(error))?;
    let session = Session::new(runner);
    let pieces = vec![Piece::first(plan.clone(), prompt, recorder)];
    let mut ongoing = Ongoing { cards: &cards, plan, left, lost: 0, pieces, log, memory };
    let answer = ready.answer(args, &loaded, session, &mut ongoing)?;
    let Ongoing { lost, pieces, memory, .. } = ongoing;
    finish(args, &answer, &Ran { pieces, lost, place: None, memory })
}

/// The prompt, once everything is ready to go on from it.
fn show_prompt(args: &Args) -> anyhow::Result<()> {
    if args.no_display_prompt { Ok(()) } else { show(args, &args.prompt) }
}

/// Text as it comes, unless it is printed in one piece later.
fn show(args: &Args, text: &str) -> anyhow::Result<()> {
    if args.json {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// How an answer came about.
struct Ran<'a> {
    /// The layouts that it was made on, one after the other.
    pieces: Vec<Piece>,
    /// Cards that were lost on the way.
    lost: usize,
    place: Option<&'a Place>,
    /// What each card was planned to allocate, and what it has.
    memory: Vec<MemoryUse>,
}

fn finish(args: &Args, answer: &Answer, ran: &Ran<'_>) -> anyhow::Result<()> {
    let Ran { pieces, lost, place, memory } = ran;
    if let (Some(path), Some(logits)) = (&args.logits, &answer.logits) {
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        let mut draft = files::Draft::new(path)?;
        draft.file().write_all(&bytes)?;
        draft.finish()?;
    }
    // A plan is priced for the prompt and the steps that there were; after a loss, each by the layout that did it.
    let prompt = answer.prompt_tokens;
    let (number, steps) = compared::last_with_steps(pieces, prompt, answer.steps.len());
    let reader = &pieces[compared::reader_of(pieces, prompt)];
    let mut prediction = pieces[number].priced(prompt, &steps)?.predict_prompt(&pieces[0].tokens);
    prediction.ttft = reader.priced(prompt, &steps)?.predict_prompt(&reader.tokens).ttft;
    let compared = if args.compare { Some(Compared::new(pieces)?) } else { None };
    let comparison = compared.as_ref().and_then(|compared| {
        let noted = |error: &anyhow::Error| eprintln!("note: no comparison: {error}");
        compared.comparison().inspect_err(noted).ok().map(|comparison| (compared, comparison))
    });
    let plan = &pieces[pieces.len() - 1].plan;
    let report = Report { answer, plan, prediction, lost: *lost, steps, place: *place, memory };
    if args.json {
        let mut json = report.to_json();
        if let Some((_, comparison)) = &comparison {
            json["compare"] = crate::compare::to_json(comparison);
            compared::describe(pieces, &mut json["compare"]["pieces"]);
        }
        output::line(&json.to_string())?;
    } else {
        output::line("")?;
        output::line("")?;
        let compared = comparison
            .iter()
            .flat_map(|(compared, comparison)| crate::compare::lines(comparison, compared.names()));
        for line in report.lines().into_iter().chain(compared) {
            output::line(&line)?;
        }
    }
    if let Some(path) = &args.trace {
        let text = match &compared {
            Some(both) => both.to_perfetto(),
            None => compared::alone(pieces),
        };
        files::write(path, &text)?;
        if !args.json {
            let shown = path.display();
            output::line(&format!("saved {shown}: open it at https://ui.perfetto.dev"))?;
        }
    }
    Ok(())
}
