// SPDX-License-Identifier: Apache-2.0
//! `spanker bench model`: how fast a model takes a prompt and makes tokens, for every number of threads and
//! cards, beside the limit that reading its weights sets, or beside the prediction for cards.
//!
//! Rows of threads take turns. Cards are lent to one row at a time: their clocks go on for whoever uses them.

mod read;
mod row;

use std::time::{Duration, Instant};

use spanker_llm::{AuditLog, InProcess, Session, Want};
use spanker_plan::Plan;
use spanker_reduce::Team;

use crate::directory::CardList;
use crate::llm::cards::Cards;
use crate::llm::host::{self, Freshness};
use crate::llm::{self, FabricKind, Loaded, Split, layout};
use crate::{Usage, output};
use read::Weights;
use row::{Ground, Row};

/// Measure how fast a model runs: its prompt (pp) and its tokens (tg)
///
/// Tokens are generated after the prompt, the best one every time. Each figure is the median of the repeats,
/// which take turns between rows after one to warm up. "of limit" is the speed of tg over the speed at which
/// the same threads can read the weights of a token and add them up, measured in the same turns; on GPUs it is the
/// bandwidth of reads. "error" is how much longer than predicted it took: more than nothing is slower. With
/// --fabric cards, "card" is by the clocks of the cards and "wall" by this host's.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker bench model -m smollm2-135m -t 1,2
  spanker bench model -m smollm2-135m -t 2 --cards 1,2 --split gather
  spanker twin up --cards 4 --profile rev-a && spanker bench model -m smollm2-135m --fabric cards --cards 1,2,4
  spanker bench model -m model.gguf --fabric cuda")]
pub(super) struct Args {
    /// A .gguf file, or the name of a fetched model
    #[arg(short, long, value_name = "MODEL")]
    model: String,
    /// Tokens of the prompt
    #[arg(short = 'p', long = "n-prompt", default_value_t = 128, value_name = "TOKENS", value_parser = count(1 << 20))]
    prompt: u64,
    /// Tokens that are generated after it
    #[arg(short = 'n', long = "n-gen", default_value_t = 64, value_name = "TOKENS", value_parser = count(1 << 20))]
    generated: u64,
    /// Threads in all, one row for each number [default: as many as there are cores]
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = count(1024))]
    threads: Vec<u64>,
    /// Cards, one row for each number [default: 1 in-process, all cards]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count(256))]
    cards: Vec<u64>,
    /// Where the cards are
    #[arg(long, value_enum, default_value = "inproc")]
    fabric: FabricKind,
    /// How to split the model [default: gather, or for cards the planner's best with the bits of one card]
    #[arg(long, value_enum)]
    split: Option<Split>,
    /// Tokens of a prompt that are run together
    #[arg(short, long, default_value_t = 128, value_name = "TOKENS", value_parser = count(512))]
    batch_size: u64,
    /// Repeats, after one to warm up
    #[arg(short, long, default_value_t = 5, value_name = "N", value_parser = count(1000))]
    repeats: u64,
    /// Part of the cards' operators that this host computes again meanwhile, for --fabric cards; 0 is nothing
    #[arg(long, default_value_t = 0.0, value_name = "FRACTION", value_parser = llm::fraction)]
    audit: f64,
    /// How long cards may show no progress before they are given up, for --fabric cards
    #[arg(long, value_name = "TIME", value_parser = crate::fault::detect)]
    deadline: Option<Duration>,
    /// Print one JSON object per row instead of a table
    #[arg(long)]
    json: bool,
}

fn count(most: u64) -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=most)
}

/// What a row runs on.
struct Subject<'r> {
    cards: usize,
    threads: usize,
    plan: Plan,
    session: Session<'r>,
    /// Threads that read the weights and no more.
    readers: Option<Team>,
    load: Duration,
    row: Row,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    if args.fabric != FabricKind::Inproc && !args.threads.is_empty() {
        return Err(Usage("--threads is for --fabric inproc".into()).into());
    }
    if args.fabric != FabricKind::Cards && args.audit > 0.0 {
        return Err(Usage("--audit is for --fabric cards".into()).into());
    }
    if args.fabric != FabricKind::Cards && args.deadline.is_some() {
        return Err(Usage("--deadline is for --fabric cards".into()).into());
    }
    let ground = match args.fabric {
        FabricKind::Inproc => Ground::Threads,
        FabricKind::Cards => Ground::Cards,
        FabricKind::Cuda => Ground::Gpus,
        FabricKind::Mpi => {
            let text = "--fabric mpi: models are measured there by 'mpirun .. spanker run'";
            return Err(Usage(text.into()).into());
        }
    };
    let begun = Instant::now();
    let loaded = open(args)?;
    let opened = begun.elapsed();
    if !args.json {
        for line in row::header(ground, &loaded, args.repeats) {
            output::line(&line)?;
        }
    }
    match ground {
        Ground::Threads => {
            let mut subjects = threads(args, &loaded, opened)?;
            measure(args, &loaded, &mut subjects)?;
            show(args, &loaded, ground, &subjects)?;
        }
        Ground::Gpus => {
            let counts = if args.cards.is_empty() { vec![1] } else { args.cards.clone() };
            let most = counts.iter().max().copied().unwrap_or(1);
            let gpus = llm::gpu::Gpus::open(most as usize)?;
            for count in counts {
                on_gpus(args, &loaded, opened, &gpus, count as usize)?;
            }
        }
        Ground::Cards => {
            let counts: Vec<Option<CardList>> = match args.cards[..] {
                [] => vec![None],
                _ => {
                    args.cards.iter().map(|&count| Some(CardList::Count(count as usize))).collect()
                }
            };
            for list in counts {
                on_cards(args, &loaded, opened, list.as_ref())?;
            }
        }
    }
    if args.json { Ok(()) } else { output::line(&row::memory(&loaded)) }
}

fn open(args: &Args) -> anyhow::Result<Loaded> {
    let wanted = args.prompt + args.generated;
    Loaded::open(&llm::Args {
        model: args.model.clone(),
        ctx_size: Some(wanted as usize),
        threads: None,
        batch_size: args.batch_size as usize,
        fabric: Some(args.fabric),
        tensor_split: None,
        deadline: args.deadline,
    })
}

/// A subject for each number of cards and threads.
fn threads(
    args: &Args,
    loaded: &Loaded,
    opened: Duration,
) -> anyhow::Result<Vec<Subject<'static>>> {
    let or = |list: &[u64], usual: u64| if list.is_empty() { vec![usual] } else { list.to_vec() };
    let mut subjects = Vec::new();
    for cards in or(&args.cards, 1) {
        for threads in or(&args.threads, loaded.threads as u64) {
            // A card is a thread, so there are no fewer of these.
            let (cards, threads) = (cards as usize, threads.max(cards) as usize);
            if subjects.iter().any(|one: &Subject<'_>| (one.cards, one.threads) == (cards, threads))
            {
                continue;
            }
            let begun = Instant::now();
            let (model, split) = (loaded.network.model(), args.split.unwrap_or(Split::Gather));
            let layout = layout::given(model, split, &vec![1.0; cards])?;
            // A prediction of what this machine is like now.
            let request = request(args, loaded);
            let plan = host::plan(loaded, threads, layout, request, Freshness::Now)?;
            let network = std::sync::Arc::clone(&loaded.network);
            let runner = InProcess::new(network, &plan, loaded.context, loaded.batch, threads)?;
            let session = Session::new(Box::new(runner));
            let load = opened + begun.elapsed();
            let (readers, row) = (Some(Team::new(threads)), Row::default());
            subjects.push(Subject { cards, threads, plan, session, readers, load, row });
        }
    }
    Ok(subjects)
}

fn on_cards(
    args: &Args,
    loaded: &Loaded,
    opened: Duration,
    list: Option<&CardList>,
) -> anyhow::Result<()> {
    let begun = Instant::now();
    let cards = Cards::open(list, args.deadline)?;
    let plan = cards.plan(loaded, request(args, loaded), args.split, None)?;
    let runner = cards.runner(&cards.indices, loaded, &plan, None, &AuditLog::new(args.audit));
    let session = Session::new(runner.map_err(|error| cards.told(error))?.0);
    let mut subjects = [Subject {
        cards: cards.indices.len(),
        threads: 0,
        plan,
        session,
        readers: None,
        load: opened + begun.elapsed(),
        row: Row::default(),
    }];
    measure(args, loaded, &mut subjects).map_err(|error| {
        match error.downcast::<spanker_llm::LlmError>() {
            Ok(error) => cards.told(error),
            Err(error) => error,
        }
    })?;
    show(args, loaded, Ground::Cards, &subjects)
}

fn on_gpus(
    args: &Args,
    loaded: &Loaded,
    opened: Duration,
    gpus: &llm::gpu::Gpus,
    cards: usize,
) -> anyhow::Result<()> {
    let begun = Instant::now();
    let split = args.split.unwrap_or(Split::Gather);
    let cluster = gpus.cluster_for(loaded, split, cards)?;
    let request = request(args, loaded);
    let plan = layout::plan(loaded.network.model(), cluster, request, Some(split), None)?;
    let session = Session::new(gpus.runner(loaded, &plan)?.0);
    let load = opened + begun.elapsed();
    let row = Row { bandwidths: vec![gpus.read_rate()?], ..Row::default() };
    let mut subjects = [Subject { cards, threads: 0, plan, session, readers: None, load, row }];
    measure(args, loaded, &mut subjects)?;
    show(args, loaded, Ground::Gpus, &subjects)
}

fn request(args: &Args, loaded: &Loaded) -> spanker_plan::Request {
    let (prompt, generated) = (args.prompt as usize, args.generated as usize);
    let request = layout::request(loaded.context, loaded.batch, prompt, generated);
    spanker_plan::Request { audit: args.audit, ..request }
}

/// Lets the subjects take turns.
fn measure(args: &Args, loaded: &Loaded, subjects: &mut [Subject<'_>]) -> anyhow::Result<()> {
    let weights = Weights::of(&loaded.network);
    // Tokens of no meaning: what is asked of the cards does not depend on them.
    let vocab = loaded.network.model().vocab;
    let prompt: Vec<u32> = (0..args.prompt).map(|at| ((100 + 7 * at) % vocab) as u32).collect();
    for turn in 0..=args.repeats {
        for subject in &mut *subjects {
            output::progress(&format!("turn {turn} of {}", args.repeats));
            let warm = turn > 0;
            if let Some(team) = &subject.readers {
                let seconds = weights.read(loaded.network.bytes(), team);
                subject.row.bandwidths.extend(warm.then_some(weights.bytes() as f64 / seconds));
            }
            let mut row = std::mem::take(&mut subject.row);
            once(&mut subject.session, &prompt, args.generated, warm.then_some(&mut row))?;
            subject.row = row;
        }
    }
    output::progress_done();
    subjects.iter_mut().for_each(|subject| subject.row.bytes = weights.bytes());
    Ok(())
}

/// One prompt, and tokens after it.
fn once(
    session: &mut Session<'_>,
    prompt: &[u32],
    generated: u64,
    row: Option<&mut Row>,
) -> Result<(), spanker_llm::LlmError> {
    session.cut(0);
    let begun = Instant::now();
    let mut outcome = session.feed(prompt, Want::Best(1))?;
    let (prompt_wall, prompt_card) = (begun.elapsed(), outcome.timing.card);
    let begun = Instant::now();
    let (mut sync, mut card) = (Duration::ZERO, None);
    for _ in 0..generated {
        let token = outcome.best.first().map_or(0, |&(token, _)| token);
        outcome = session.feed(&[token], Want::Best(1))?;
        sync += outcome.timing.sync;
        card = outcome.timing.card.map(|time| time + card.unwrap_or_default());
    }
    let wall = begun.elapsed();
    if let Some(row) = row {
        let rate = |count: u64, time: Duration| count as f64 / time.as_secs_f64();
        let tokens = prompt.len() as u64;
        row.prompt_wall.push(rate(tokens, prompt_wall));
        row.prompt_card.extend(prompt_card.map(|time| rate(tokens, time)));
        row.wall.push(rate(generated, wall));
        row.card.extend(card.map(|time| rate(generated, time)));
        row.sync.push(sync.as_secs_f64() / generated as f64);
    }
    Ok(())
}

fn show(
    args: &Args,
    loaded: &Loaded,
    ground: Ground,
    subjects: &[Subject<'_>],
) -> anyhow::Result<()> {
    for subject in subjects {
        let text = match args.json {
            true => subject.to_json(args, loaded).to_string(),
            false => subject.text(ground),
        };
        output::line(&text)?;
    }
    Ok(())
}
