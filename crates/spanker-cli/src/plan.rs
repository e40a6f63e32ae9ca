// SPDX-License-Identifier: Apache-2.0
//! `spanker plan`: which split of a model is fastest on which cards, whether it fits, and why.

use std::path::PathBuf;
use std::str::FromStr;

use spanker_engine::{
    CardList, DraftForecast, DraftSource, EngineError, Fabric, Freshness, MachineSet, MachineSets,
    ServedReport, ServiceOptions, ServicePlan, Wish, files,
};
use spanker_model::{KvShape, Model, Quant};
use spanker_plan::{Objective, Plan, PlanReport, Request, choose, explain, remedies};
use spanker_report::Report;
use spanker_topology::Cluster;

use crate::cluster::ClusterArgs;
use crate::llm::{self, DraftArgs, one_of};
use crate::workers::WorkerArgs;
use crate::{output, refuse, report};

/// Find the fastest way to split a model over cards, and say why
///
/// Prices tensor-parallel (gather and reduce), pipeline, mixed, replicated and one-card layouts, drops
/// cards that hurt, gives unequal cards unequal shares, and checks memory first.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker plan tinyllama-1.1b --quant q4_0 --profile rev-a --cards 4 --topology ring
  spanker plan model.gguf --profile rev-a*2,rev-a@1GB/s --explain
  spanker plan llama-2-70b --profile rev-a --cards 12 --objective throughput --concurrency 8
  spanker plan smollm2-135m --profile rev-a --cards 3 --draft lookup --acceptance 0.6
  spanker plan llama-3-8b --cluster cluster.toml --out plan.json   then: spanker simulate plan.json
  spanker plan tinyllama-1.1b --cards 4 --report report.html       as a page, with what would change it
  spanker plan smollm2-135m --fabric inproc --cards 2              for threads of this machine, as measured
  spanker plan smollm2-135m --workers one,two --key-file key --explain    which machines make it faster

Times are predictions: the profiles say where their numbers come from ('spanker profiles rev-a').
--json prints {\"version\": 1, \"candidates\": [..]}, best first; docs/plan-json.md has the fields.")]
pub(crate) struct Args {
    /// A name (of a fetched model, else of a built-in shape), a .gguf file or a config.json
    model: String,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Plan for what is here, as it was measured: threads of this machine (inproc), the cards that are there, GPUs
    /// (cuda), the processes that mpirun has started, or this machine and --workers (tcp). The model is then a .gguf file
    /// or a fetched one
    #[arg(long, value_parser = one_of(&Fabric::ALL, Fabric::name), conflicts_with_all = ["quant", "profile", "cluster", "topology", "card", "link"])]
    pub(crate) fabric: Option<Fabric>,
    #[command(flatten)]
    workers: WorkerArgs,
    /// With --fabric inproc, threads in all; with mpi those of each process, with tcp those of this machine [default: as
    /// many as there are cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// How weights are stored [default: as in the .gguf file or the fetched model, else q4_0]
    #[arg(long, value_parser = Quant::from_str)]
    quant: Option<Quant>,
    /// Tokens that each sequence must have room for
    #[arg(long = "ctx-size", alias = "context", default_value_t = 2048, value_name = "TOKENS")]
    context: u64,
    /// Sequences that are decoded together
    #[arg(long, default_value_t = 1, value_name = "N")]
    batch: u64,
    /// Sequences that are served at the same time, for --objective throughput, with what 'spanker serve --parallel N'
    /// would do [default: one for each card]
    #[arg(long, value_name = "N", conflicts_with = "batch")]
    concurrency: Option<u64>,
    /// Tokens of the prompt for the time to the first token [default: 512, or the context if shorter]
    #[arg(long, value_name = "TOKENS")]
    prompt: Option<u64>,
    /// Tokens already there when the priced token is decoded
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    at: u64,
    /// Tokens of a prompt that are run together, as 'spanker run' does
    #[arg(long, default_value_t = spanker_plan::USUAL_BATCH, value_name = "TOKENS")]
    batch_size: u64,
    /// Part of the cards' operators that a run checks, as its --audit: 0 is nothing [default: 0; for what 'spanker
    /// serve' would do its own]
    #[arg(long, value_name = "FRACTION", value_parser = llm::fraction)]
    audit: Option<f64>,
    /// How keys and values are stored: f16, q8_0 in little more than half of the memory, or q4_0 in little more than a
    /// quarter of it
    #[arg(long, default_value = "f16", value_name = "TYPE", value_parser = llm::quant_of(&KvShape::QUANTS))]
    kv: Quant,
    #[command(flatten)]
    draft: DraftArgs,
    /// With --draft, how likely a guess is to be right if those before it were
    #[arg(long, value_name = "PART", value_parser = llm::fraction, requires = "draft")]
    acceptance: Option<f64>,
    /// With --draft, a text to guess instead, token by token as a run would; the model is then a .gguf file or a fetched one
    #[arg(long, value_name = "FILE", conflicts_with = "acceptance", requires = "draft")]
    draft_text: Option<PathBuf>,
    /// What to be best at: latency, throughput or ttft (time to the first token)
    #[arg(long, default_value = "latency", value_parser = one_of(&Objective::ALL, Objective::name))]
    objective: Objective,
    /// Say what binds, what comes next, where that would change, and what each resource is worth
    #[arg(long)]
    explain: bool,
    /// Save the best plan that can be run, for 'spanker run --plan' and 'spanker simulate'
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a page about the best plan that can be run, with what other cards, links and weights would give
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Propose and save also several copies of the model, which 'spanker serve' and 'spanker simulate' run and 'spanker run' does not
    #[arg(long)]
    copies: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    files::check_outputs([&args.out, &args.report])?;
    let named = args.workers.are_named().then_some(Fabric::Tcp);
    let Some(fabric) = args.fabric.or(named) else {
        if args.threads.is_some() {
            return refuse("--threads is for --fabric inproc, mpi and tcp");
        }
        let (shape, cluster) = (llm::shape(&args.model, args.quant)?, args.cluster.build()?);
        let served = |options: &ServiceOptions| ServicePlan::on_cluster(&shape, &cluster, options);
        return plan(args, &shape, &cluster, &served, None);
    };
    let here = llm::Args {
        fabric: Some(fabric),
        threads: args.threads,
        ctx_size: Some(usize::try_from(args.context)?),
        batch_size: usize::try_from(args.batch_size)?,
        workers: args.workers.clone(),
        ..llm::Args::usual(&args.model)
    };
    let count = args.cluster.cards().map(CardList::Count);
    llm::on_host(&here, count.as_ref(), None, |place| {
        let (host, model) = (&place.host, &place.model);
        let layout = host.usual_layout(model, host.card_count())?;
        let cluster = host.cluster(model, &place.request(1, 1), &layout, Freshness::Kept)?;
        let served = |options: &ServiceOptions| ServicePlan::on_host(host, model, options);
        let machines = (host.fabric() == Fabric::Tcp).then(|| host.machine_names());
        plan(args, model.shape(), &cluster, &served, machines.as_deref())
    })
}

/// What a service with these options would do.
type Served<'s> = dyn Fn(&ServiceOptions) -> spanker_engine::Result<ServicePlan> + 's;

fn plan(
    args: &Args,
    model: &Model,
    cluster: &Cluster,
    served: &Served<'_>,
    machines: Option<&[String]>,
) -> anyhow::Result<()> {
    let request = asked(args, cluster)?;
    let cards: Vec<usize> = (0..cluster.cards()).collect();
    output::progress("searching for the best plan ..");
    let choice = choose(model, cluster, &cards, &request).map_err(crate::of_plan)?;
    // JSON explains the best of all candidates; people read about the plan that they are given.
    let given = if args.json || args.copies { choice.clone() } else { choice.to_run() };
    let explained = explain(model, cluster, &request, &given);
    let remedy = remedies(model, cluster, &cards, &request, &choice);
    let serving = args.concurrency.map(|parallel| serving(args, parallel, model, served));
    let serving = serving.transpose()?.flatten();
    output::progress_done();
    let report = PlanReport {
        model,
        cluster,
        request: &request,
        choice: &choice,
        proposed: if args.copies { choice.best() } else { choice.best_to_run() },
        explained: explained.as_ref(),
        remedy: remedy.as_ref(),
    };
    let proposed = report.proposed_plan()?;
    let machines = machines.map(|names| MachineSets::of(names, model, cluster, &request));
    let machines = machines.transpose()?;
    let drafted = proposed.as_ref().map(|plan| drafted(args, plan)).transpose()?.flatten();
    let written = proposed.as_ref().map_or(Ok(Vec::new()), |plan| write(args, plan))?;
    show(args, &report, &Beside { serving, machines, drafted, written })?;
    if proposed.is_some() {
        return Ok(());
    }
    let unwritten = |path: &PathBuf| format!(": {} was not written", path.display());
    let unwritten = args.out.as_ref().map_or_else(String::new, unwritten);
    let cards = output::count(cluster.cards(), "card");
    let what = format!("{} does not fit on {cards}{unwritten}", model.name);
    Err(EngineError::DoesNotFit { what, hint: None }.into())
}

/// What is asked of a plan.
fn asked(args: &Args, cluster: &Cluster) -> anyhow::Result<Request> {
    if args.concurrency.is_some() && args.objective != Objective::Throughput {
        return refuse(
            "--concurrency is for --objective throughput; --batch says what is decoded together",
        );
    }
    let sequences = match (args.objective, args.concurrency) {
        (_, Some(concurrency)) => concurrency,
        (Objective::Throughput, None) if args.batch == 1 => cluster.cards() as u64,
        _ => args.batch,
    };
    Ok(Request {
        objective: args.objective,
        sequences,
        blocks: None,
        context: args.context,
        prompt: args.prompt.unwrap_or(512.min(args.context)),
        position: args.at,
        kv: args.kv,
        batch: args.batch_size,
        guesses: args.draft.of_text()?.most(),
        audit: args.audit.unwrap_or(0.0),
    })
}

/// What 'spanker serve' with as many requests at a time would do; nothing if it does not fit.
fn serving(
    args: &Args,
    parallel: u64,
    model: &Model,
    served: &Served<'_>,
) -> anyhow::Result<Option<ServedReport>> {
    let context = usize::try_from(args.context.min(model.context))?;
    let options = ServiceOptions {
        parallel: usize::try_from(parallel)?,
        context,
        batch: usize::try_from(args.batch_size)?.min(context),
        kv_memory: None,
        kv: args.kv,
        queue: 0,
        wish: Wish::default(),
        audit: args.audit,
        reuse: true,
        draft: args.draft.source(),
    };
    match served(&options) {
        Ok(found) => Ok(Some(ServedReport::new(found, &options))),
        Err(EngineError::DoesNotFit { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What is said beside the candidates.
struct Beside {
    serving: Option<ServedReport>,
    machines: Option<MachineSets>,
    drafted: Option<(DraftForecast, String)>,
    written: Vec<String>,
}

/// Prints a plan as people or programs want it.
fn show(args: &Args, report: &PlanReport<'_>, beside: &Beside) -> anyhow::Result<()> {
    let Beside { serving, machines, drafted, written } = beside;
    if args.json {
        let mut json = report.to_json()?;
        json["serve"] = serde_json::to_value(serving)?;
        if let Some(machines) = machines {
            json["machines"] = serde_json::to_value(machines)?;
        }
        if let Some((forecast, _)) = drafted {
            json["draft"] = serde_json::to_value(forecast)?;
            json["draft"]["source"] = args.draft.source().name().into();
        }
        return output::json(&json);
    }
    let mut lines = report.lines()?;
    if let Some(serving) = serving {
        lines.push(String::new());
        lines.extend(serving.lines());
    }
    output::lines(&lines)?;
    if args.explain {
        machines.as_ref().map_or(Ok(()), show_machines)?;
        let reasons = report.reasons()?;
        if !reasons.is_empty() {
            output::line("\nwhy")?;
        }
        reasons.iter().try_for_each(|reason| say!("  {reason}"))?;
    }
    if let Some((forecast, of)) = drafted {
        let DraftForecast { length, tokens_per_step, tokens_per_second, gained, .. } = forecast;
        say!(
            "guesses {of}: {length:.1} in a step, {tokens_per_step:.2} tokens a step, {tokens_per_second:.2} tokens/s, {gained:.2} times as fast"
        )?;
    }
    written.iter().try_for_each(|written| say!("\n{written}"))
}

fn show_machines(found: &MachineSets) -> anyhow::Result<()> {
    let alone = found.sets.first().and_then(|set| set.tokens_per_second);
    let row = |set: &MachineSet| {
        let rate = set.tokens_per_second;
        let times = rate.zip(alone).map(|(rate, alone)| format!("{:.2}x", rate / alone));
        let rate = rate.map_or_else(|| "does not fit".into(), |rate| format!("{rate:.1}"));
        vec![set.machines.join(" + "), rate, times.unwrap_or_default()]
    };
    let header = ["machines", "tokens/s", "to this one alone"];
    output::line("")?;
    output::table(&header, found.sets.iter().map(row).collect(), &header[1..])?;
    if let Some(best) = &found.best {
        say!("\nbest: {}", best.machines.join(" + "))?;
    }
    output::lines(&found.left_out)
}

/// What is assumed of guesses where nobody says: about half are right.
const ACCEPTANCE: f64 = 0.5;
/// More than any text has that is guessed.
const MOST_TEXT: u64 = 16 << 20;

/// What guesses will gain with a plan, and what that is for, in words.
fn drafted(args: &Args, plan: &Plan) -> anyhow::Result<Option<(DraftForecast, String)>> {
    if args.draft.source() == DraftSource::None {
        return Ok(None);
    }
    let Some(path) = &args.draft_text else {
        let part = args.acceptance.unwrap_or(ACCEPTANCE);
        let of = format!("where each guess is right with {:.0} %", 100.0 * part);
        return Ok(Some((DraftForecast::assumed(plan, part), of)));
    };
    let text = files::read(path, MOST_TEXT)?;
    let model = spanker_engine::Model::open(spanker_engine::models::find(&args.model)?)?;
    let mut tokens = model.encode(&text, true, usize::MAX)?;
    tokens.truncate(usize::try_from(args.context)?);
    let (first, rest) = tokens.split_at(tokens.len().min(1));
    let of = format!("for the {} tokens of {}", tokens.len(), path.display());
    Ok(Some((DraftForecast::of_text(plan, first, rest), of)))
}

/// Writes a plan and the page about it where they are wanted. Returns what there is to say about that.
fn write(args: &Args, plan: &Plan) -> anyhow::Result<Vec<String>> {
    let mut written = Vec::new();
    if let Some(path) = &args.out {
        files::write(path, plan.to_json())?;
        let shown = path.display();
        let run = match plan.layout.not_runnable() {
            None => format!(" or spanker run --plan {shown}"),
            Some(_) => String::new(),
        };
        written.push(format!("saved {shown}: try spanker simulate {shown}{run}"));
    }
    if let Some(path) = &args.report {
        report::write(path, &Report::of(plan), true)?;
        written.push(format!("saved {}: open it in a browser", path.display()));
    }
    Ok(written)
}
