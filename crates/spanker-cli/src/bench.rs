// SPDX-License-Identifier: Apache-2.0
//! `spanker bench`: flags, tables and JSON of what `spanker-bench` measures.

mod fixed;
mod model;
mod serve;
mod table;
mod targets;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use spanker_bench::{BenchTarget, Beside, Case, MethodChoice, SampleTable, Sizes, human, rows};
use spanker_engine::CardList;
use spanker_scheduler::{Collective, DType, ReduceOp, Threads};

use crate::{output, ranks, refuse, times, usage};

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
  spanker bench serve -m smollm2-135m --clients 1,4,16
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
    #[arg(long, value_enum, hide_possible_values = true)]
    fabric: Option<BenchFabric>,
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
    #[arg(long, default_value = "auto", value_parser = Threads::from_str)]
    threads: Threads,
    /// auto (fused, or on cards the cheapest by prediction), fused (one address space, no messages),
    /// messages (the message algorithm that suits the size), ring, recursive-doubling,
    /// halving-doubling, tree, one-shot or two-shot; with --fabric cuda native (NCCL between GPUs), with
    /// --fabric mpi native (MPI's own)
    #[arg(long, default_value = "auto", value_parser = MethodChoice::from_str)]
    algorithm: MethodChoice,
    /// Milliseconds to spend on each figure
    #[arg(long, default_value_t = 400, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    budget: u64,
    /// How long no card may get on with its work, with --fabric cards [default: 300ms], or one call may take,
    /// with --fabric mpi [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = times::timeout)]
    deadline: Option<Duration>,
    /// With --fabric cuda, compare every type, operation and odd length with the host's bits instead, and play what every fabric must do
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
    Serve(Box<serve::Args>),
}

impl Args {
    /// What is measured.
    fn name(&self) -> &str {
        self.collective.as_deref().unwrap_or_default()
    }

    /// Where collectives run.
    fn fabric(&self) -> BenchFabric {
        let usual = if ranks::launched().is_some() { BenchFabric::Mpi } else { BenchFabric::Host };
        self.fabric.unwrap_or(usual)
    }

    /// Whether this is work for the ranks that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        let alone = ["planner", "link", "claims"].contains(&self.name());
        match &self.kind {
            Some(Kind::Model(args)) => args.llm(None).takes_ranks(),
            Some(Kind::Serve(args)) => args.model.on.takes_ranks(),
            None => !alone && self.fabric() == BenchFabric::Mpi,
        }
    }
}

/// Where collectives run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum BenchFabric {
    Host,
    Cards,
    Cuda,
    Mpi,
}

/// A number that is more than nothing, and not too large.
fn count(most: u64) -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=most)
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.kind {
        Some(Kind::Model(args)) => return model::run(args),
        Some(Kind::Serve(args)) => return serve::run(args),
        None => {}
    }
    let samples = samples(args)?;
    match (args.name(), args.fabric()) {
        ("planner", _) => fixed::planner(args.json),
        ("link", _) => fixed::link(args.json),
        ("claims", _) => fixed::claims(args.json),
        (_, fabric) if args.check && fabric != BenchFabric::Cuda => {
            refuse("--check is for --fabric cuda")
        }
        (_, BenchFabric::Host) => targets::host(args, samples),
        (_, BenchFabric::Cards) => targets::cards(args, samples),
        #[cfg(feature = "cuda")]
        (_, BenchFabric::Cuda) => targets::cuda(args, samples),
        #[cfg(not(feature = "cuda"))]
        (_, BenchFabric::Cuda) => anyhow::bail!(
            "this spanker was built without CUDA\nhint: build it with 'cargo build --release --features cuda'"
        ),
        #[cfg(feature = "mpi")]
        (_, BenchFabric::Mpi) => targets::mpi(args, samples),
        #[cfg(not(feature = "mpi"))]
        (_, BenchFabric::Mpi) => Err(ranks::without_mpi()),
    }
}

/// The table that rows are added to, if one is wanted.
fn samples(args: &Args) -> anyhow::Result<Option<SampleTable>> {
    let Some(path) = &args.csv else { return Ok(None) };
    if args.name() != "all-reduce" || args.check {
        let name = args.name();
        return refuse(format!("--csv is for all-reduce, which is fitted, not for {name}"));
    }
    Ok(Some(SampleTable::open(path)?))
}

/// Measures all sizes and shows their rows, if this process is the one that speaks.
fn show<P: BenchTarget>(
    args: &Args,
    target: &mut P,
    case: &Case,
    sizes: &[usize],
    mut samples: Option<SampleTable>,
    speaks: bool,
) -> anyhow::Result<()> {
    let measuring = |at: usize, size: usize| {
        if speaks {
            let text = format!("measuring {} ({}/{})", human(size), at + 1, sizes.len());
            output::progress_of(at as u64, sizes.len() as u64, &text);
        }
    };
    let (mut wrong, mut unsteady) = (0, Vec::new());
    let mut table = output::Rows::new(args.json);
    for row in rows(target, case, sizes, measuring) {
        output::progress_done();
        let row = row?;
        wrong += row.wrong;
        if !speaks {
            continue;
        }
        samples.as_mut().map_or(Ok(()), |samples| samples.add(&row))?;
        table.add(&row, table::cells)?;
        match row.beside {
            // Other ranks measure all rows, and wait for this one.
            Beside::Ranks { steady, .. } => {
                unsteady.extend((!steady).then(|| human(row.bytes_per_card)));
            }
            // Further rows are of use to nobody.
            _ if samples.is_none() && output::is_unread() => break,
            _ => {}
        }
    }
    target.verdict(wrong)?;
    if !unsteady.is_empty() {
        let list = unsteady.join(", ");
        output::note(format_args!("this machine changed while these sizes were measured: {list}"));
    }
    Ok(())
}

/// The sizes of the rows. A barrier moves nothing, so it has one row whatever was asked for.
fn sizes(args: &Args, usual: &str) -> anyhow::Result<Vec<usize>> {
    if named(args)? == Collective::Barrier {
        return Ok(vec![0]);
    }
    let Sizes(sizes) = args.sizes.clone().map_or_else(|| usual.parse(), Ok).map_err(usage)?;
    let least = args.dtype.size();
    match sizes.iter().find(|&&size| size < least) {
        Some(size) => refuse(format!("--sizes {size}: less than one element of {least} bytes")),
        None => Ok(sizes),
    }
}

fn named(args: &Args) -> anyhow::Result<Collective> {
    args.name().parse::<Collective>().map_err(|error| usage(error.to_string()))
}

/// What is measured over so many cards, if it is defined for the type.
fn case(args: &Args, ranks: usize, root: usize) -> anyhow::Result<Case> {
    let collective = named(args)?.with_root(root);
    if collective.reduces() && !args.op.is_defined_for(args.dtype) {
        return refuse(format!("--op {} is not defined for --dtype {}", args.op, args.dtype));
    }
    let budget = Duration::from_millis(args.budget);
    Ok(Case { collective, op: args.op, dtype: args.dtype, ranks, budget })
}

/// The root among so many cards.
fn root(args: &Args, ranks: usize, what: &str) -> anyhow::Result<usize> {
    match args.root.unwrap_or(0) {
        root if root < ranks => Ok(root),
        root => refuse(format!("--root {root}: there are {what} 0 to {}", ranks - 1)),
    }
}

/// Refuses flags that a target has no use for.
fn check_flags(args: &Args, threads: bool, deadline: bool) -> anyhow::Result<()> {
    match (args.threads, args.deadline) {
        (Threads::Exactly(_), _) if !threads => refuse("--threads is for --fabric host"),
        (_, Some(_)) if !deadline => refuse("--deadline is for --fabric cards and mpi"),
        _ => Ok(()),
    }
}
