// SPDX-License-Identifier: Apache-2.0
//! `spanker bench model`: how fast a model takes a prompt and makes tokens, for every number of threads and
//! cards.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use spanker_bench::{DraftRow, DraftWork, Memory, ModelRow, Task, Work, drafts, model};
use spanker_engine::{CardList, DraftSource, Fabric, Host, Wish, files};
use spanker_plan::Request;

use super::count;
use crate::llm::{self, DraftArgs, Place, SplitArgs};
use crate::output::{self, Cell, figure, percent};
use crate::refuse;

/// Measure how fast a model runs: its prompt (pp) and its tokens (tg)
///
/// Tokens are generated after the prompt, the best one every time. Each figure is the median of the repeats,
/// which take turns between rows after one to warm up. "of limit" is the speed of tg over the speed at which
/// the same threads can read the weights of a token and add them up, measured in the same turns; on GPUs it is the
/// bandwidth of reads. "error" is how much longer than predicted it took: more than nothing is slower. What a prediction
/// for threads and ranks is made from is measured in the same turns, so that both meet the same neighbours. With
/// --fabric cards, "card" is by the clocks of the cards and "wall" by this host's.
///
/// With --draft, what guesses gain is measured instead: answers to tasks of copying, editing and listing, and prose, of -n
/// tokens each, with guesses and without in turns, on one number of cards and threads.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker bench model -m smollm2-135m -t 1,2
  spanker bench model -m smollm2-135m -t 2 --cards 1,2 --split gather
  spanker twin up --cards 4 --profile rev-a && spanker bench model -m smollm2-135m --fabric cards --cards 1,2,4
  spanker bench model -m model.gguf --fabric cuda
  spanker bench model -m smollm2-135m -t 2 -n 4 --repeats 1 --draft lookup
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
    #[arg(long, value_parser = llm::one_of(&Fabric::ALL, Fabric::name))]
    fabric: Option<Fabric>,
    #[command(flatten)]
    split: SplitArgs,
    /// Tokens of a prompt that are run together
    #[arg(short, long, default_value_t = 128, value_name = "TOKENS", value_parser = count(512))]
    batch_size: u64,
    /// Repeats, after one to warm up
    #[arg(short, long, default_value_t = 5, value_name = "N", value_parser = count(1000))]
    repeats: u64,
    /// Part of the cards' operators that this host computes again meanwhile, for --fabric cards, cuda and mpi; 0 is
    /// nothing
    #[arg(long, default_value_t = 0.0, value_name = "FRACTION", value_parser = llm::fraction)]
    audit: f64,
    /// How long cards may show no progress before they are given up, for --fabric cards and mpi
    #[arg(long, value_name = "TIME", value_parser = crate::times::timeout)]
    deadline: Option<Duration>,
    #[command(flatten)]
    draft: DraftArgs,
    /// With --draft, other tasks: a line '=== kind name' before each prompt
    #[arg(long, value_name = "FILE", requires = "draft")]
    tasks: Option<PathBuf>,
    /// Print one JSON object per row instead of a table
    #[arg(long)]
    json: bool,
}

/// Tokens that the prompt of a task has at most.
const TASK: usize = 768;
/// More than any file of tasks has.
const MOST_TASKS: u64 = 16 << 20;

impl Args {
    /// The model and the place, for a number of threads.
    pub(super) fn llm(&self, threads: Option<usize>) -> llm::Args {
        llm::Args {
            ctx_size: Some(match self.draft.source() {
                DraftSource::None => (self.prompt + self.generated) as usize,
                _ => TASK + self.generated as usize,
            }),
            threads,
            batch_size: self.batch_size as usize,
            fabric: self.fabric,
            deadline: self.deadline,
            ..llm::Args::usual(&self.model)
        }
    }

    fn wish(&self) -> Wish {
        Wish { split: self.split.split, shares: None }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let takes = args.llm(None).takes();
    let list = |most: Option<&u64>| most.map(|&count| CardList::Count(count as usize));
    if !takes.threads && !args.threads.is_empty() {
        return refuse("--threads is for --fabric inproc, mpi and tcp");
    }
    if takes.machines && (args.threads.len() > 1 || args.cards.len() > 1) {
        return refuse(
            "--fabric mpi and tcp: one number of threads and cards, ranks are started once",
        );
    }
    if !takes.audit && args.audit > 0.0 {
        return refuse("--audit is for --fabric cards, cuda, mpi and tcp");
    }
    if !takes.deadline && args.deadline.is_some() {
        return refuse("--deadline is for --fabric cards, mpi and tcp");
    }
    let begun = Instant::now();
    let threads = args.threads.first().map(|&threads| threads as usize);
    llm::on_host(&args.llm(threads), list(args.cards.iter().max()).as_ref(), None, |place| {
        let opened = begun.elapsed();
        if args.draft.source() != DraftSource::None {
            return drafting(args, place);
        }
        let (prompt, generated) = (args.prompt as usize, args.generated as usize);
        let request = Request { audit: args.audit, ..place.request(prompt, generated) };
        let wish = args.wish();
        let work = Work { request, generated, repeats: args.repeats, wish };
        let mut table = output::Rows::new(args.json);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let size = output::bytes(place.model.network().bytes().len() as u64);
        let (name, repeats) = (&place.model.shape().name, args.repeats);
        table.line(&format!("# {name}, {size}; {cores} cores; tokens/s, medians of {repeats}"))?;
        let hosts = hosts(args, place)?;
        let hosts: Vec<&Host> = match hosts.is_empty() {
            true => vec![&place.host],
            false => hosts.iter().collect(),
        };
        // Threads take turns; cards, GPUs and ranks are lent to one row at a time.
        let at_a_time = if takes.many_hosts { hosts.len() } else { 1 };
        let turn = |turn| output::progress(&format!("turn {turn} of {}", args.repeats));
        for hosts in hosts.chunks(at_a_time.max(1)) {
            let rows = model(&place.model, hosts, &work, opened, turn);
            output::progress_done();
            rows?.iter().try_for_each(|row| table.add(row, cells))?;
        }
        table.line(&memory(place))
    })
}

/// What guesses gain, task by task, and of each kind of task together.
fn drafting(args: &Args, place: &Place) -> anyhow::Result<()> {
    if args.threads.len() > 1 || args.cards.len() > 1 {
        return refuse("--draft takes one number of threads and cards");
    }
    let tasks = match &args.tasks {
        None => Task::usual(),
        Some(path) => Task::parse(&files::read(path, MOST_TASKS)?)
            .map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?,
    };
    let (source, generated) = (args.draft.source(), args.generated as usize);
    let request = place.request(TASK / 2, generated);
    let request = Request { audit: args.audit, guesses: source.most(), ..request };
    let wish = args.wish();
    let work = DraftWork { request, generated, repeats: args.repeats, wish, source };
    let mut table = output::Rows::new(args.json);
    let small = args.draft.load(place)?;
    let show = |row: &DraftRow| table.add(row, task_cells);
    let kinds = drafts(&place.host, &place.model, &tasks, &work, small, show)?;
    if args.json {
        return Ok(());
    }
    kinds.iter().try_for_each(|kind| {
        let (name, gained, count) = (&kind.kind, kind.gained(), kind.tasks);
        say!("# {name}: {gained:.2} times as fast over {count} tasks")
    })
}

fn task_cells(row: &DraftRow) -> Vec<Cell> {
    let clock = if row.clock == "card" { "(card tok/s)" } else { "(tok/s)" };
    vec![
        Cell::of("kind", "", 5, &row.kind),
        Cell::of("task", "", 26, &row.name),
        Cell::of("prompt", "(tokens)", 8, row.prompt_tokens),
        Cell::of("guessed", "", 7, row.guessed),
        Cell::of("right", "", 5, row.accepted),
        Cell::of("without", clock, 12, format!("{:.2}", row.plain_tokens_per_second)),
        Cell::of("with", clock, 12, format!("{:.2}", row.draft_tokens_per_second)),
        Cell::of("gained", "", 7, format!("{:.2}x", row.gained)),
        Cell::of("predicted", "", 9, format!("{:.2}x", row.predicted_gain)),
    ]
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
    let many_hosts = args.llm(None).takes().many_hosts;
    // A card is a thread, so there are no fewer of these.
    let threads = |count: usize| threads.iter().map(move |threads| (count, *threads.max(&count)));
    let mut rows = Vec::new();
    for (count, threads) in counts.iter().flat_map(|&count| threads(count)) {
        let row = (count, many_hosts.then_some(threads));
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    let host = |(count, threads)| args.llm(threads).host(Some(&CardList::Count(count)));
    rows.into_iter().map(host).collect()
}

/// The line about memory.
fn memory(place: &Place) -> String {
    let Memory { file_bytes, kv_bytes, peak_bytes } = Memory::of(&place.model, place.context);
    let peak = peak_bytes.map_or_else(|| "not known".into(), output::bytes);
    let (file, cache) = (output::bytes(file_bytes), output::bytes(kv_bytes));
    format!("# most memory of this process: {peak}; file {file}, KV cache {cache} a row")
}

/// Columns by what was measured: threads and what they read, clocks of cards, or the bandwidth of a GPU.
fn cells(row: &ModelRow) -> Vec<Cell> {
    let (prompt, tokens) = (&row.prompt, &row.generation);
    let [pp, tg] = [prompt, tokens].map(|phase| phase.tokens_per_second);
    let cell = |name, width, value: Option<f64>, digits| {
        Cell::of(name, "", width, figure(value, digits, ""))
    };
    let predicted = Some(tokens.predicted_tokens_per_second);
    let load = cell("load (ms)", 10, Some(row.load_ms), 1);
    let mut cells = vec![Cell::of("cards", "", 5, row.cards)];
    if let (None, Some(card)) = (row.threads, tokens.card_tokens_per_second) {
        cells.extend([
            Cell::of("split", "", 9, row.strategy),
            cell("pp card", 10, prompt.card_tokens_per_second, 3),
            cell("tg card", 10, Some(card), 3),
            cell("predicted", 10, predicted, 3),
            Cell::of("error", "", 8, percent(tokens.error_percent(Some(card)))),
            cell("pp wall", 10, pp, 3),
            cell("tg wall", 10, tg, 3),
            load,
        ]);
        return cells;
    }
    cells.extend(row.threads.map(|threads| Cell::of("threads", "", 7, threads)));
    cells.extend([
        cell("pp", 11, pp, 2),
        cell("tg", 11, tg, 2),
        cell("of limit", 9, row.limit.of_limit.or(Some(0.0)), 2),
        cell("read (GB/s)", 11, Some(row.limit.read_bytes_per_second.unwrap_or(0.0) / 1e9), 2),
    ]);
    match row.threads {
        Some(_) => cells.extend([
            cell("sync (us)", 9, row.token.sync_us.or(Some(0.0)), 1),
            load,
            Cell::of("pp error", "", 9, percent(prompt.error_percent(pp))),
            Cell::of("tg error", "", 9, percent(tokens.error_percent(tg))),
        ]),
        None => cells.extend([
            cell("predicted", 11, predicted, 2),
            Cell::of("error", "", 8, percent(tokens.error_percent(tg))),
            load,
        ]),
    }
    cells
}
