// SPDX-License-Identifier: Apache-2.0
//! The targets where collectives are measured, as flags name them.

use spanker_bench::{Cards, HostMemory, Method, MethodChoice, SampleTable, human};
use spanker_engine::{EngineError, directory};
use spanker_scheduler::MAX_RANKS;

use super::{Args, CardList, case, check_flags, root, show, sizes};
use crate::{output, refuse, usage};

const NATIVE: &str = "--algorithm native is for --fabric mpi and --fabric cuda";

/// How many cards flags ask for, where cards are numbered from 0.
fn count(args: &Args, usual: usize) -> anyhow::Result<usize> {
    match &args.cards {
        None => Ok(usual),
        Some(CardList::Count(count)) => Ok(*count),
        Some(CardList::Indices(_)) => {
            refuse("--cards takes a number here, not a list: a list of cards is for --fabric cards")
        }
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// What is measured where, unless rows are JSON.
fn title(args: &Args, over: &str, text: &str) -> anyhow::Result<()> {
    match args.json {
        true => Ok(()),
        false => say!("# {} {text}; #wrong counts elements over all {over}", args.name()),
    }
}

pub(super) fn host(args: &Args, samples: Option<SampleTable>) -> anyhow::Result<()> {
    let cards = count(args, 4)?;
    check_flags(args, true, false)?;
    if cards == 0 || cards > MAX_RANKS {
        return refuse(format!("--cards {cards}: a group has 1 to {MAX_RANKS} cards"));
    }
    if args.algorithm == MethodChoice::Given(Method::Native) {
        return refuse(NATIVE);
    }
    let sizes = sizes(args, "4K..64M")?;
    let case = case(args, cards, root(args, cards, "cards")?)?;
    let mut host = HostMemory::new(case.collective, args.threads, args.algorithm);
    let largest = sizes.iter().copied().max().unwrap_or(0);
    host.check_memory(&case, largest).map_err(|error| EngineError::DoesNotFit {
        what: format!("--sizes {}: {error}", human(largest)),
        hint: None,
    })?;
    let path = match host.is_fused() {
        true => "in one address space, no messages",
        false => "as messages between threads",
    };
    let cores = cores();
    title(args, "cards", &format!("over {cards} cards, {path}; {cores} cores; medians"))?;
    show(args, &mut host, &case, &sizes, samples, true)
}

pub(super) fn cards(args: &Args, samples: Option<SampleTable>) -> anyhow::Result<()> {
    check_flags(args, false, true)?;
    let wanted = match args.algorithm {
        MethodChoice::Auto => None,
        MethodChoice::Given(Method::Schedule(algorithm)) => Some(algorithm),
        MethodChoice::Given(Method::Native) => return refuse(NATIVE),
        MethodChoice::Given(Method::Fused) | MethodChoice::Messages => {
            return refuse("--algorithm fused and messages are for --fabric host");
        }
    };
    let sizes = sizes(args, "1K,8K,64K,1M,4M")?;
    case(args, 1, 0)?;
    let folder = directory::find();
    let indices = directory::chosen(&folder, args.cards.as_ref())?;
    let list = directory::list(&indices);
    let root = match args.root {
        None => 0,
        Some(card) => indices
            .iter()
            .position(|&index| index == card)
            .ok_or_else(|| usage(format!("--root {card}: the group is {list}")))?,
    };
    let case = case(args, indices.len(), root)?;
    let topology = directory::open(&folder, &indices)?;
    let cards = Cards::new(&folder, &topology, case.collective, wanted, args.deadline);
    let mut cards = cards?;
    if let Some(reason) = cards.unpredicted() {
        output::note(format_args!("no prediction: {reason}"));
    }
    title(args, "cards", &format!("on cards {list} ({})", cards.nature()))?;
    show(args, &mut cards, &case, &sizes, samples, true)
}

#[cfg(feature = "cuda")]
pub(super) fn cuda(args: &Args, samples: Option<SampleTable>) -> anyhow::Result<()> {
    use spanker_bench::gpu;
    use spanker_scheduler::Collective;
    check_flags(args, false, false)?;
    if args.check {
        return check(args);
    }
    let sizes = sizes(args, "1M,16M,64M,256M")?;
    let plain = case(args, 1, args.root.unwrap_or(0))?.collective;
    let native = match args.algorithm {
        MethodChoice::Given(Method::Native) => true,
        MethodChoice::Auto | MethodChoice::Given(Method::Fused) => false,
        _ => return refuse("--fabric cuda has --algorithm fused and native"),
    };
    if native {
        return nccl(args, plain, &sizes, samples);
    }
    if !matches!(plain, Collective::AllReduce | Collective::Reduce { .. }) {
        return refuse(format!("{plain}: logical cards of one GPU have all-reduce and reduce"));
    }
    let (cards, most) = (count(args, 4)?, gpu::MOST_CARDS);
    if !(1..=most).contains(&cards) {
        return refuse(format!("--cards {cards}: a GPU is shared by 1 to {most}"));
    }
    let case = case(args, cards, root(args, cards, "cards")?)?;
    output::progress("measuring copies");
    let opened = gpu::LogicalCards::open();
    output::progress_done();
    let mut target = opened?;
    let (name, copy) = (&target.probe().name, target.probe().copy.bytes_per_second as f64 / 1e9);
    let text = format!(
        "over {cards} logical cards that share GPU 0 ({name}): one GPU emulates {cards}; copies move {copy:.0} GB/s; \
         medians"
    );
    title(args, "cards", &text)?;
    show(args, &mut target, &case, &sizes, samples, true)
}

#[cfg(feature = "cuda")]
fn nccl(
    args: &Args,
    plain: spanker_scheduler::Collective,
    sizes: &[usize],
    samples: Option<SampleTable>,
) -> anyhow::Result<()> {
    use spanker_bench::gpu::NcclRanks;
    if !NcclRanks::has(plain) {
        return refuse(format!(
            "{plain}: NCCL is used for all-reduce, all-gather, reduce-scatter and broadcast"
        ));
    }
    let there = spanker_cuda::gpu_count()?;
    let ranks = count(args, there)?;
    if ranks == 0 || ranks > there {
        return refuse(format!(
            "--cards {ranks}: NCCL has a rank for each GPU, and there are {there}"
        ));
    }
    let case = case(args, ranks, root(args, ranks, "ranks")?)?;
    let mut target = NcclRanks::open(ranks)?;
    let library = target.library();
    title(args, "ranks", &format!("over {ranks} GPUs by {library}; wall time; medians"))?;
    show(args, &mut target, &case, sizes, samples, true)
}

/// Every type, operation and odd length against the host's bits, and what every fabric must do.
#[cfg(feature = "cuda")]
fn check(args: &Args) -> anyhow::Result<()> {
    let checking = |dtype, op| output::progress(&format!("checking {op} of {dtype}"));
    let (mut wrong, mut table) = (0, output::Rows::new(args.json));
    for checked in spanker_bench::gpu::check(checking)? {
        output::progress_done();
        let checked = checked?;
        wrong += checked.wrong;
        table.add(&checked, super::table::checked)?;
    }
    anyhow::ensure!(wrong == 0, "{wrong} elements are wrong");
    conforms(args)
}

/// Whether ranks on the GPUs pass what every fabric must.
#[cfg(feature = "cuda")]
fn conforms(args: &Args) -> anyhow::Result<()> {
    use spanker_fabric::conformance;
    let gpus: Vec<usize> = (0..spanker_cuda::gpu_count()?).collect();
    output::progress("checking messages between ranks in the memory of GPUs");
    let group = |ranks| spanker_cuda::CudaFabric::group(&gpus, ranks).map_err(|e| e.to_string());
    let played = conformance::run(group);
    output::progress_done();
    let cases = played.map_err(|wrong| anyhow::anyhow!("messages between ranks: {wrong}"))?;
    match args.json {
        true => output::json(&serde_json::json!({ "conformance": cases, "gpus": gpus.len() })),
        false => say!(
            "messages in the memory of {} GPU(s): {cases} cases of the fabrics' suite pass",
            gpus.len()
        ),
    }
}

#[cfg(feature = "mpi")]
pub(super) fn mpi(args: &Args, samples: Option<SampleTable>) -> anyhow::Result<()> {
    if args.algorithm == MethodChoice::Given(Method::Fused) {
        return refuse("--algorithm fused is for --fabric host");
    }
    check_flags(args, false, true)?;
    let sizes = sizes(args, "4,64,1K,8K,64K,1M,4M,16M")?;
    case(args, 1, 0)?;
    let world = crate::ranks::world()?;
    match on_ranks(args, &world, &sizes, samples) {
        Err(error) if !world.speaks() && crate::exit_code(&error) != crate::USAGE => {
            Err(crate::Unspoken.into())
        }
        other => other,
    }
}

#[cfg(feature = "mpi")]
fn on_ranks(
    args: &Args,
    world: &spanker_fabric_mpi::World,
    sizes: &[usize],
    samples: Option<SampleTable>,
) -> anyhow::Result<()> {
    let ranks = world.ranks();
    let asked = count(args, ranks)?;
    if asked != ranks {
        return refuse(format!("--cards {asked}: there are {ranks} ranks, each of them one card"));
    }
    let case = case(args, ranks, root(args, ranks, "ranks")?)?;
    let speaks = world.rank() == 0;
    let target = spanker_bench::ranks::Ranks::new(world, args.algorithm, args.deadline);
    let mut target = target?;
    let mut hosts: Vec<&String> = world.hosts().iter().collect();
    hosts.sort();
    hosts.dedup();
    let (library, hosts, cores) = (world.library(), hosts.len(), cores());
    let text = format!(
        "over {ranks} ranks on {library} (hosts: {hosts}; {cores} cores here); predicted from other sizes close by, \
         timed by all ranks right before; medians"
    );
    let outcome = if speaks { title(args, "ranks", &text) } else { Ok(()) };
    let outcome = outcome.and_then(|()| show(args, &mut target, &case, sizes, samples, speaks));
    outcome.inspect_err(|error| {
        // A rank that fails on its own tells the others, so that all end with the same words.
        if !matches!(error.downcast_ref(), Some(spanker_bench::BenchError::Fabric(_))) {
            target.give_up(format!("{error:#}"));
        }
    })
}
