// SPDX-License-Identifier: Apache-2.0
//! `spanker bench`: a collective over a range of sizes, checked and timed: in host memory beside its limit
//! and the original loop, on cards beside what was predicted; or a model, the planner, the link's frames,
//! the claims of work stealing.
//!
//! Everything that a row compares was measured in the same run, taking turns, and each figure is a
//! median.

/// Calls a function for the type that a [`DType`] names.
macro_rules! for_type {
    ($dtype:expr, $call:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F64 => $call::<f64>($($argument),*),
            DType::F16 => $call::<f16>($($argument),*),
            DType::Bf16 => $call::<bf16>($($argument),*),
            DType::I32 => $call::<i32>($($argument),*),
            DType::I64 => $call::<i64>($($argument),*),
            DType::U8 => $call::<u8>($($argument),*),
            DType::U32 => $call::<u32>($($argument),*),
            _ => $call::<f32>($($argument),*),
        }
    };
}

mod cards;
mod claims;
#[cfg(feature = "cuda")]
mod cuda;
mod data;
mod fused;
mod link;
mod messages;
mod model;
#[cfg(feature = "mpi")]
mod mpi;
mod origin;
mod planner;
mod row;
mod samples;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use spanker_scheduler::{
    Algorithm, Collective, DType, MAX_RANKS, ReduceOp, Team, Threads, bf16, f16, inproc,
};

use crate::directory::CardList;
use crate::sizes::{Sizes, human};
use crate::{DoesNotFit, Usage, fault, output, ranks};
use data::Sample;
use row::Row;
use samples::Samples;

/// Measure a collective, in host memory or on cards
///
/// Every result is checked (#wrong). In host memory, two columns compare within the run: "of limit" is the
/// time of an in-place read-modify-write stream over the same bytes with the same threads, over the time of
/// the collective; "vs origin" is the time of the original loop (a card-outer fold into a fresh buffer that
/// is copied to each card) over it. On cards, "predicted" is what the planner says for these cards and links,
/// and "error" how far that is from the time that was measured.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "Examples:
  spanker bench all-reduce --cards 4 --sizes 4K..64M
  spanker bench all-reduce --cards 3 --dtype bf16 --op max --threads 1
  spanker bench all-gather --algorithm ring --json
  spanker bench all-reduce --cards 2 --csv ar.csv && spanker bench all-reduce --cards 4 --csv ar.csv
  spanker fit link --samples ar.csv --out link.toml
  spanker bench all-reduce --fabric cards
  spanker bench all-reduce --fabric cards --cards 0,1,3 --sizes 8K,1M --algorithm two-shot
  spanker bench all-reduce --fabric cuda --cards 8 --sizes 64M,256M
  mpirun -n 4 spanker bench all-reduce --fabric mpi --algorithm native
  spanker bench model -m smollm2-135m -t 1,2
  spanker bench planner
  spanker bench link
  spanker bench claims")]
pub(crate) struct Args {
    #[command(subcommand)]
    kind: Option<Kind>,
    /// all-reduce, reduce-scatter, all-gather, broadcast, reduce, gather, scatter, all-to-all or
    /// barrier; or planner, which times planning and simulating instead, or link, which times the
    /// link's frames, or claims, which times taking work
    #[arg(required = true)]
    collective: Option<String>,
    /// Where it runs: host (buffers in host memory), cards (those that 'spanker cards' shows), cuda (logical
    /// cards that share GPU 0, or with --algorithm native one rank for each GPU) or mpi (the processes that
    /// mpirun has started, each of them one card) [default: host, or under mpirun mpi]
    #[arg(long, value_parser = Ground::from_str)]
    fabric: Option<Ground>,
    /// How many cards are in the group, or with --fabric cards which (0,1,3) [default: 4, or all]
    #[arg(long, value_name = "N|LIST")]
    cards: Option<CardList>,
    /// Bytes of a card's whole buffer: a list (4K,1M) or a range that doubles (4K..64M) [default:
    /// 4K..64M, or on cards 1K,8K,64K,1M,4M]
    #[arg(long)]
    sizes: Option<Sizes>,
    /// f32, f64, f16, bf16, i32, i64, u8 or u32
    #[arg(long, default_value = "f32", value_parser = DType::from_str)]
    dtype: DType,
    /// sum, product, max, min, avg, logsumexp (floats), or, and, xor (integers)
    #[arg(long, default_value = "sum", value_parser = ReduceOp::from_str)]
    op: ReduceOp,
    /// The card that has or gets everything, in rooted collectives [default: the first]
    #[arg(long, value_name = "CARD")]
    root: Option<usize>,
    /// Threads of the fused path: a number, or auto
    #[arg(long, default_value = "auto", value_parser = threads)]
    threads: Threads,
    /// auto (fused, or on cards the cheapest by prediction), fused (one address space, no messages),
    /// messages (the message algorithm that suits the size), ring, recursive-doubling,
    /// halving-doubling, tree, one-shot or two-shot; with --fabric cuda native (NCCL between GPUs), with
    /// --fabric mpi native (MPI's own)
    #[arg(long, default_value = "auto", value_parser = How::from_str)]
    algorithm: How,
    /// Milliseconds to spend on each figure
    #[arg(long, default_value_t = 400, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    budget: u64,
    /// How long no card may get on with its work, with --fabric cards [default: 300ms], or one call may take,
    /// with --fabric mpi [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = fault::detect)]
    deadline: Option<Duration>,
    /// With --fabric cuda, compare every type, operation and odd length with the host's bits instead
    #[arg(long)]
    check: bool,
    /// Add the rows of an all-reduce to a table here, which 'spanker fit link --samples' reads
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

/// What has flags of its own.
#[derive(Debug, clap::Subcommand)]
enum Kind {
    Model(model::Args),
}

impl Args {
    /// What is measured.
    fn name(&self) -> &str {
        self.collective.as_deref().unwrap_or_default()
    }

    /// Where collectives run.
    fn ground(&self) -> Ground {
        let usual = if ranks::launched().is_some() { Ground::Mpi } else { Ground::Host };
        self.fabric.unwrap_or(usual)
    }

    /// Whether this is work for the ranks that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        let alone = ["planner", "link", "claims"].contains(&self.name());
        match &self.kind {
            Some(Kind::Model(args)) => args.takes_ranks(),
            None => !alone && self.ground() == Ground::Mpi,
        }
    }
}

/// Where collectives run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ground {
    Host,
    Cards,
    Cuda,
    Mpi,
}

impl FromStr for Ground {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "host" => Ok(Ground::Host),
            "cards" => Ok(Ground::Cards),
            "cuda" => Ok(Ground::Cuda),
            "mpi" => Ok(Ground::Mpi),
            _ => Err("expected host, cards, cuda or mpi".into()),
        }
    }
}

/// How the collective is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Auto,
    Fused,
    Suited,
    Messages(Algorithm),
    /// What the fabric has for it by itself.
    Native,
}

impl FromStr for How {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(How::Auto),
            "fused" => Ok(How::Fused),
            "messages" => Ok(How::Suited),
            "native" => Ok(How::Native),
            _ => text.parse().map(How::Messages).map_err(|_| {
                let names = Algorithm::ALL.map(Algorithm::name).join(", ");
                format!(
                    "unknown algorithm '{text}' (expected auto, fused, messages, native, {names})"
                )
            }),
        }
    }
}

/// More threads than this help no machine that people have.
const MOST_THREADS: usize = 256;

fn threads(text: &str) -> Result<Threads, String> {
    match (text, text.parse::<usize>()) {
        ("auto", _) => Ok(Threads::Auto),
        (_, Ok(count @ 1..=MOST_THREADS)) => Ok(Threads::Exactly(count)),
        _ => Err(format!("'{text}' threads: expected auto or 1 to {MOST_THREADS}")),
    }
}

/// What is measured, apart from the size.
#[derive(Debug, Clone, Copy)]
struct Case {
    collective: Collective,
    cards: usize,
    op: ReduceOp,
    threads: Threads,
    how: How,
    budget: Duration,
}

/// How long a message may take before the bench gives up.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(Kind::Model(model)) = &args.kind {
        return model::run(model);
    }
    let mut samples = Samples::begin(args)?;
    match (args.name(), args.ground()) {
        ("planner", _) => return planner::run(args.json),
        ("link", _) => return link::run(args.json),
        ("claims", _) => return claims::run(args.json),
        (_, ground) if args.check && ground != Ground::Cuda => {
            return Err(Usage("--check is for --fabric cuda".into()).into());
        }
        (_, Ground::Cards) => return cards::run(args, samples),
        #[cfg(feature = "cuda")]
        (_, Ground::Cuda) => return cuda::run(args, samples),
        #[cfg(not(feature = "cuda"))]
        (_, Ground::Cuda) => anyhow::bail!(
            "this spanker was built without CUDA\nhint: build it with 'cargo build --release --features cuda'"
        ),
        #[cfg(feature = "mpi")]
        (_, Ground::Mpi) => return mpi::run(args, samples),
        #[cfg(not(feature = "mpi"))]
        (_, Ground::Mpi) => return Err(ranks::without_mpi().into()),
        _ => {}
    }
    let case = case(args)?;
    let sizes = sizes(args, case.collective, "4K..64M");
    check_memory(&case, sizes.iter().copied().max().unwrap_or(0))?;
    let own_team;
    let team = match args.threads {
        Threads::Exactly(count) if count > Team::global().threads() => {
            own_team = Team::new(count);
            &own_team
        }
        _ => Team::global(),
    };
    if !args.json {
        header(args, &case)?;
    }
    let mut wrong = 0;
    for (index, &size) in sizes.iter().enumerate() {
        if samples.is_useless() {
            break;
        }
        measuring(size, index, sizes.len());
        let row = measure(args.dtype, &case, team, size);
        output::progress_done();
        let row = row?;
        wrong += row.wrong;
        samples.add(row.sample())?;
        output::line(&if args.json { serde_json::to_string(&row)? } else { row.text() })?;
    }
    anyhow::ensure!(wrong == 0, "{wrong} elements are wrong");
    Ok(())
}

/// Shows which size is measured, and how long the rest takes.
fn measuring(size: usize, at: usize, sizes: usize) {
    let text = format!("measuring {} ({}/{sizes})", human(size), at + 1);
    output::progress_of(at as u64, sizes as u64, &text);
}

/// The sizes of the rows. A barrier moves nothing, so it has one row whatever was asked for.
fn sizes(args: &Args, collective: Collective, usual: &str) -> Vec<usize> {
    if collective == Collective::Barrier {
        return vec![0];
    }
    let chosen = args.sizes.clone().map_or_else(|| usual.parse(), Ok);
    chosen.map_or_else(|_| Vec::new(), |Sizes(sizes)| sizes)
}

/// The collective, if it is defined for the type, over this many cards.
fn collective(args: &Args, root: usize, sizes: &[usize]) -> Result<Collective, Usage> {
    let collective = match args.name().parse::<Collective>() {
        Ok(collective) => collective.with_root(root),
        Err(error) => return Err(Usage(error.to_string())),
    };
    if collective.reduces() && !args.op.is_defined_for(args.dtype) {
        return Err(Usage(format!("--op {} is not defined for --dtype {}", args.op, args.dtype)));
    }
    let element = args.dtype.size();
    match sizes.iter().find(|&&size| size < element && size > 0) {
        Some(size) => {
            Err(Usage(format!("--sizes {size}: less than one element of {element} bytes")))
        }
        None => Ok(collective),
    }
}

fn case(args: &Args) -> anyhow::Result<Case> {
    let usage = |text: String| Err(Usage(text).into());
    let cards = match &args.cards {
        None => 4,
        Some(CardList::Count(count)) => *count,
        Some(CardList::Indices(_)) => {
            return usage("--cards: a list of cards is for --fabric cards".into());
        }
    };
    if args.deadline.is_some() {
        return usage("--deadline is for --fabric cards and mpi".into());
    }
    if cards == 0 || cards > MAX_RANKS {
        return usage(format!("--cards {cards}: a group has 1 to {MAX_RANKS} cards"));
    }
    let root = args.root.unwrap_or(0);
    let kind = collective(args, root, &[])?;
    let collective = collective(args, root, &sizes(args, kind, "4K..64M"))?;
    if root >= cards {
        return usage(format!("--root {root}: there are cards 0 to {}", cards - 1));
    }
    let how = match (collective, args.algorithm) {
        (Collective::Barrier, How::Auto | How::Fused) => How::Suited,
        (_, How::Native) => {
            return usage("--algorithm native is for --fabric mpi and --fabric cuda".into());
        }
        (_, How::Auto) => How::Fused,
        (_, how) => how,
    };
    let (op, threads) = (args.op, args.threads);
    let budget = Duration::from_millis(args.budget);
    Ok(Case { collective, cards, op, threads, how, budget })
}

/// Refuses what the machine cannot hold, instead of being killed half-way.
fn check_memory(case: &Case, largest: usize) -> anyhow::Result<()> {
    // Inputs, outputs and the original loop's buffer; messages are also on the way and being folded,
    // and every rank has a thread with its stack and its part of the schedule.
    let (copies, each) = if case.how == How::Fused { (3, 0) } else { (8, 1 << 20) };
    let needed = largest.saturating_mul(copies).saturating_add(each).saturating_mul(case.cards);
    let Some(available) = spanker_engine::memory::available() else { return Ok(()) };
    if needed <= available {
        return Ok(());
    }
    let (needed, available) = (needed >> 20, available >> 20);
    let text = format!(
        "{} cards of {} need about {needed} MiB, and {available} MiB are available",
        case.cards,
        human(largest)
    );
    Err(DoesNotFit(text).into())
}

fn measure(dtype: DType, case: &Case, team: &Team, size: usize) -> anyhow::Result<Row> {
    for_type!(dtype, measure_as(case, team, size))
}

fn measure_as<T: Sample>(case: &Case, team: &Team, size: usize) -> anyhow::Result<Row> {
    let len = size / size_of::<T>();
    match case.how {
        How::Auto | How::Fused => fused::measure::<T>(case, team, len),
        How::Messages(algorithm) => messages::measure::<T>(case, algorithm, team, len),
        How::Suited | How::Native => {
            let algorithm = inproc::suited(case.collective, case.cards, size);
            messages::measure::<T>(case, algorithm, team, len)
        }
    }
}

fn header(args: &Args, case: &Case) -> anyhow::Result<()> {
    let path = match case.how {
        How::Fused => "in one address space, no messages",
        _ => "as messages between threads",
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    output::line(&format!(
        "# {} over {} cards, {path}; {cores} cores; medians; #wrong counts elements over all cards",
        args.name(),
        case.cards
    ))?;
    output::line(&Row::header())
}
