// SPDX-License-Identifier: Apache-2.0
//! `spanker bench model`: how fast a model takes a prompt and makes tokens, for every number of threads and
//! cards, beside the limit that reading its weights sets, or beside the prediction for cards.
//!
//! Rows of threads take turns. Cards are lent to one row at a time: their clocks go on for whoever uses them.

mod read;
mod row;

use std::time::{Duration, Instant};

use spanker_engine::{Calibration, Engine, Host, Options};
use spanker_llm::Want;
use spanker_plan::{Plan, Request};
use spanker_reduce::Team;

use crate::directory::CardList;
use crate::llm::{self, FabricKind, Place, Split};
use crate::{Usage, output};
use read::Weights;
use row::Row;

/// Measure how fast a model runs: its prompt (pp) and its tokens (tg)
///
/// Tokens are generated after the prompt, the best one every time. Each figure is the median of the repeats,
/// which take turns between rows after one to warm up. "of limit" is the speed of tg over the speed at which
/// the same threads can read the weights of a token and add them up, measured in the same turns; on GPUs it is the
/// bandwidth of reads. "error" is how much longer than predicted it took: more than nothing is slower. What a prediction
/// for threads and ranks is made from is measured in the same turns, so that both meet the same neighbours. With
/// --fabric cards, "card" is by the clocks of the cards and "wall" by this host's.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker bench model -m smollm2-135m -t 1,2
  spanker bench model -m smollm2-135m -t 2 --cards 1,2 --split gather
  spanker twin up --cards 4 --profile rev-a && spanker bench model -m smollm2-135m --fabric cards --cards 1,2,4
  spanker bench model -m model.gguf --fabric cuda
  mpirun -n 2 spanker bench model -m smollm2-135m -t 1")]
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
    /// Where the cards are [default: mpi if mpirun has started several, else inproc]
    #[arg(long, value_enum)]
    fabric: Option<FabricKind>,
    /// How to split the model [default: the planner's best that gives the bits of one card]
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
    /// How long cards may show no progress before they are given up, for --fabric cards and mpi
    #[arg(long, value_name = "TIME", value_parser = crate::fault::detect)]
    deadline: Option<Duration>,
    /// Print one JSON object per row instead of a table
    #[arg(long)]
    json: bool,
}

fn count(most: u64) -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=most)
}

impl Args {
    /// The model and the place, for a number of threads.
    fn llm(&self, threads: Option<usize>) -> llm::Args {
        llm::Args {
            ctx_size: Some((self.prompt + self.generated) as usize),
            threads,
            batch_size: self.batch_size as usize,
            fabric: self.fabric,
            deadline: self.deadline,
            ..llm::Args::usual(&self.model)
        }
    }

    /// Whether this is work for all processes that a launcher has started.
    pub(super) fn takes_ranks(&self) -> bool {
        self.llm(None).takes_ranks()
    }
}

/// What a row runs on.
struct Subject<'p> {
    place: &'p Place,
    host: &'p Host,
    plan: Plan,
    engine: Option<Engine<'p>>,
    calibration: Calibration,
    /// Threads that read the weights and no more.
    readers: Option<Team>,
    load: Duration,
    row: Row,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let fabric = args.llm(None).fabric();
    let list = |most: Option<&u64>| most.map(|&count| CardList::Count(count as usize));
    if !matches!(fabric, FabricKind::Inproc | FabricKind::Mpi) && !args.threads.is_empty() {
        return Err(Usage("--threads is for --fabric inproc and mpi".into()).into());
    }
    if fabric == FabricKind::Mpi && (args.threads.len() > 1 || args.cards.len() > 1) {
        let text = "--fabric mpi: one number of threads and cards, because ranks are started once";
        return Err(Usage(text.into()).into());
    }
    if !matches!(fabric, FabricKind::Cards | FabricKind::Mpi) && args.audit > 0.0 {
        return Err(Usage("--audit is for --fabric cards and mpi".into()).into());
    }
    if !matches!(fabric, FabricKind::Cards | FabricKind::Mpi) && args.deadline.is_some() {
        return Err(Usage("--deadline is for --fabric cards and mpi".into()).into());
    }
    let begun = Instant::now();
    let threads = args.threads.first().map(|&threads| threads as usize);
    llm::on_host(&args.llm(threads), list(args.cards.iter().max()).as_ref(), None, |place| {
        let opened = begun.elapsed();
        if !args.json {
            for line in row::header(fabric, place, args.repeats) {
                output::line(&line)?;
            }
        }
        let hosts = hosts(args, place)?;
        let hosts: Vec<&Host> = match hosts.is_empty() {
            true => vec![&place.host],
            false => hosts.iter().collect(),
        };
        // Threads take turns; cards, GPUs and ranks are lent to one row at a time.
        let at_a_time = if fabric == FabricKind::Inproc { hosts.len() } else { 1 };
        for hosts in hosts.chunks(at_a_time.max(1)) {
            let subjects = hosts.iter().map(|&host| Subject::new(args, place, host, opened));
            let mut subjects = subjects.collect::<anyhow::Result<Vec<_>>>()?;
            measure(args, place, &mut subjects)?;
            show(args, fabric, &subjects)?;
        }
        if args.json { Ok(()) } else { output::line(&row::memory(place)) }
    })
}

/// A host for each number of cards and threads; none where the one that is open is all.
fn hosts(args: &Args, place: &Place) -> anyhow::Result<Vec<Host>> {
    let or = |list: &[u64], usual: usize| match list.is_empty() {
        true => vec![usual],
        false => list.iter().map(|&one| one as usize).collect(),
    };
    let (counts, threads) =
        (or(&args.cards, place.host.card_count()), or(&args.threads, place.host.thread_count()));
    if counts.len() * threads.len() == 1 {
        return Ok(Vec::new());
    }
    let inproc = args.llm(None).fabric() == FabricKind::Inproc;
    let mut rows: Vec<(usize, Option<usize>)> = Vec::new();
    for &count in &counts {
        for &threads in &threads {
            // A card is a thread, so there are no fewer of these.
            let row = (count, inproc.then_some(threads.max(count)));
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
    }
    let host = |(count, threads): (usize, Option<usize>)| {
        args.llm(threads).host(Some(&CardList::Count(count)))
    };
    rows.into_iter().map(host).collect()
}

impl<'p> Subject<'p> {
    fn new(
        args: &Args,
        place: &'p Place,
        host: &'p Host,
        opened: Duration,
    ) -> anyhow::Result<Subject<'p>> {
        let begun = Instant::now();
        let model = &place.model;
        let (prompt, generated) = (args.prompt as usize, args.generated as usize);
        let request = Request { audit: args.audit, ..place.request(prompt, generated) };
        let plan = host.plan(model, &request, &args.llm(None).wish(args.split))?;
        let calibration = Calibration::new(host, model, &plan)?;
        let planned = begun.elapsed();
        let readers = row::reads(args.llm(None).fabric()).then(|| Team::new(host.thread_count()));
        let row = Row { bandwidths: host.gpu_read_rate()?.into_iter().collect(), ..Row::default() };
        let load = opened + planned;
        let mut subject =
            Subject { place, host, plan, engine: None, calibration, readers, load, row };
        let begun = Instant::now();
        subject.load(args)?;
        subject.load += begun.elapsed();
        Ok(subject)
    }

    fn load(&mut self, args: &Args) -> anyhow::Result<&mut Engine<'p>> {
        let options = Options { record: false, audit: args.audit };
        let (host, model) = (self.host, &self.place.model);
        Ok(match self.engine.take() {
            Some(engine) => self.engine.insert(engine),
            None => {
                let engine = Engine::load_with(host, model, self.plan.clone(), options)?;
                self.engine.insert(engine)
            }
        })
    }

    /// Measures what predictions are made from.
    fn calibrate(&mut self) -> anyhow::Result<()> {
        if self.host.rank_place().is_some() {
            // Ranks hold one layout at a time.
            self.engine = None;
        }
        Ok(self.calibration.round(self.host, &self.place.model, &self.plan)?)
    }
}

/// Lets the subjects take turns.
fn measure(args: &Args, place: &Place, subjects: &mut [Subject<'_>]) -> anyhow::Result<()> {
    let network = place.model.network();
    let weights = Weights::of(network);
    // Tokens of no meaning: what is asked of the cards does not depend on them.
    let vocab = network.model().vocab;
    let prompt: Vec<u32> = (0..args.prompt).map(|at| ((100 + 7 * at) % vocab) as u32).collect();
    for turn in 0..=args.repeats {
        for subject in &mut *subjects {
            output::progress(&format!("turn {turn} of {}", args.repeats));
            let warm = turn > 0;
            if let Some(team) = &subject.readers {
                let seconds = weights.read(network.bytes(), team);
                subject.row.bandwidths.extend(warm.then_some(weights.bytes() as f64 / seconds));
            }
            subject.calibrate()?;
            let mut row = std::mem::take(&mut subject.row);
            let engine = subject.load(args)?;
            once(engine, &prompt, args.generated, warm.then_some(&mut row))?;
            subject.row = row;
        }
    }
    output::progress_done();
    for subject in subjects {
        subject.row.bytes = weights.bytes();
        subject.plan = subject.calibration.priced(&subject.plan)?;
    }
    Ok(())
}

/// One prompt, and tokens after it.
fn once(
    engine: &mut Engine<'_>,
    prompt: &[u32],
    generated: u64,
    row: Option<&mut Row>,
) -> anyhow::Result<()> {
    engine.cut(0);
    let begun = Instant::now();
    let mut outcome = engine.feed(prompt, Want::Best(1))?;
    let (prompt_wall, prompt_card) = (begun.elapsed(), outcome.timing.card);
    let begun = Instant::now();
    let (mut sync, mut card) = (Duration::ZERO, None);
    for _ in 0..generated {
        let token = outcome.best.first().map_or(0, |&(token, _)| token);
        outcome = engine.feed(&[token], Want::Best(1))?;
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

fn show(args: &Args, fabric: FabricKind, subjects: &[Subject<'_>]) -> anyhow::Result<()> {
    for subject in subjects {
        let text = match args.json {
            true => subject.to_json(args).to_string(),
            false => subject.text(fabric),
        };
        output::line(&text)?;
    }
    Ok(())
}
