// SPDX-License-Identifier: Apache-2.0
//! `spanker probe`: what the links between cards take, measured, beside what their profiles say; with GPUs, what their
//! memory, launches and ways to the host and each other take; with threads and processes, what each kind of operator
//! of a model takes.

#[cfg(feature = "cuda")]
mod cuda;
mod machine;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use spanker_bench::{LinkProbe, probe_links, save_links};
use spanker_scheduler::LinkState;
use spanker_topology::{BytesPerSecond, Seconds};

use crate::bench::failure;
use crate::directory::{self, CardList};
use crate::sizes::{Sizes, human};
use crate::workers::WorkerArgs;
use crate::{Usage, fault, output};
use spanker_engine::files;

/// Measure every link between cards
///
/// Messages of several sizes go over every link that is up, in both directions, and a line is fitted:
/// latency plus bytes over bandwidth. Cards in card time are measured by their own clocks; others by half a
/// ping-pong, median of five. What comes out is kept beside the cards' devices, and 'spanker cards' shows it.
///
/// With --fabric cuda it is GPUs: copies, reads and writes in their memory, copies from and to the host, launches, and
/// copies between every two of them. --save writes a profile that --profile of the other commands takes.
///
/// With --fabric inproc it is this machine, with threads as cards: real steps of the model are run, and what each kind
/// of operator takes on each number of rows is fitted. 'run' and 'bench model' do the same when they first meet a
/// model, and keep it in the user's cache; this measures again and replaces what was kept. With --fabric mpi, under
/// mpirun, it is a rank, and the messages between the ranks; with --fabric tcp each of the machines, and the messages
/// between them.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker probe
  spanker probe --cards 0,1 --sizes 64..4M
  spanker probe --json
  spanker probe --fabric inproc -m smollm2-135m --threads 2 --save here.toml
  mpirun -n 2 spanker probe --fabric mpi -m smollm2-135m
  spanker probe --fabric tcp --workers one,two --key-file key -m smollm2-135m
  spanker probe --fabric cuda --save gpu.toml && spanker plan llama-2-7b --profile gpu.toml --cards 1")]
pub(crate) struct Args {
    /// What is measured: cards (those that 'spanker cards' shows), cuda (GPUs), inproc (threads of this machine), mpi
    /// (processes that mpirun has started) or tcp (this machine and --workers)
    #[arg(long, default_value = "cards", value_parser = ["cards", "cuda", "inproc", "mpi", "tcp"])]
    fabric: String,
    #[command(flatten)]
    workers: WorkerArgs,
    /// With --fabric inproc, mpi and tcp, the model: a .gguf file, or the name of a fetched one [default: smollm2-135m]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<String>,
    /// With --fabric inproc, threads in all; with mpi those of each process, with tcp those of this machine [default: as many as there are cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// With --fabric inproc, cuda and mpi, write the profile to this file: of one card, or of GPU 0
    #[arg(long, value_name = "TOML")]
    save: Option<PathBuf>,
    /// With --fabric cuda, let this many logical cards share GPU 0: the profile is that of one of them
    #[arg(long, value_name = "K")]
    gpus: Option<usize>,
    /// The cards: a list (0,1,3) or how many [default: all that answer; with --fabric inproc 1]
    #[arg(long, value_name = "LIST|N")]
    cards: Option<CardList>,
    /// Bytes of the messages: a list (64,4K) or a range that doubles (64..4M)
    #[arg(long, default_value = "64,256,1K,4K,16K,64K,256K,1M,4M")]
    sizes: Sizes,
    /// How long no card may get on with its work
    #[arg(long, default_value = "300ms", value_name = "TIME", value_parser = fault::detect)]
    deadline: Duration,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.fabric == "mpi"
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    files::check_outputs([&args.save])?;
    let refuse = |text: &str| Err(Usage(text.into()).into());
    let machine = matches!(args.fabric.as_str(), "inproc" | "mpi" | "tcp");
    if (args.model.is_some() || args.threads.is_some()) && !machine {
        return refuse("--model and --threads are for --fabric inproc, mpi and tcp");
    }
    if args.fabric != "tcp" {
        args.workers.refuse()?;
    }
    if args.fabric == "cuda" {
        #[cfg(feature = "cuda")]
        return cuda::run(args);
        #[cfg(not(feature = "cuda"))]
        anyhow::bail!("--fabric cuda: this program was built without it");
    }
    if args.gpus.is_some() {
        return refuse("--gpus and the logical cards that it asks for are for --fabric cuda");
    }
    match (machine, &args.save) {
        (true, _) => machine::run(args),
        (false, None) => links(args),
        (false, Some(_)) => refuse(
            "--save is for --fabric inproc, cuda, mpi and tcp: what links take is kept beside the cards",
        ),
    }
}

/// Measures the links between cards.
fn links(args: &Args) -> anyhow::Result<()> {
    let folder = directory::find();
    let indices = match &args.cards {
        // Without a word about cards, those that are left are measured.
        None => directory::alive(&folder),
        Some(_) => directory::chosen(&folder, args.cards.as_ref())?,
    };
    if indices.is_empty() {
        let first = directory::first(&folder);
        anyhow::bail!("no cards that answer at {}\nhint: {}", first.display(), directory::HINT);
    }
    let cards = directory::open(&folder, &indices)?;
    let first = cards.sails().first().context("a topology has a card")?;
    let info = first.info().map_err(|error| directory::blamed(&folder, &indices, &error))?;
    let nature = directory::nature(info.pace);
    let down = cards.links().iter().filter(|link| link.state != LinkState::Up);
    let mut links = Vec::new();
    let begins = |(from, to): (usize, usize), (at, all): (usize, usize), size: usize| {
        output::progress(&format!("link {from} -> {to} ({}/{all}): {}", at + 1, human(size)));
    };
    for link in probe_links(&cards, &args.sizes.0, args.deadline, begins) {
        output::progress_done();
        links.push(link.map_err(failure)?);
    }
    anyhow::ensure!(!links.is_empty(), "no link is up between cards {}", directory::list(&indices));
    save_links(&folder, &links).map_err(failure)?;
    let index = |place: usize| cards.indices()[place];
    // Links that were not measured, because they are not up.
    let skipped: Vec<(usize, usize, String)> = down
        .map(|link| (index(link.local_sail), index(link.remote_sail), link.state.to_string()))
        .collect();
    if args.json {
        let skip = |(from, to, state): &(usize, usize, String)| json!({ "from": from, "to": to, "state": state });
        return output::json(&json!({
            "directory": folder.display().to_string(), "nature": nature, "links": links,
            "skipped": skipped.iter().map(skip).collect::<Vec<_>>(),
        }));
    }
    output::line(&format!("{} ({nature})\n", folder.display()))?;
    let header =
        ["link", "bandwidth", "profile", "differs", "latency", "profile", "differs", "worst fit"];
    let rows = links.iter().filter_map(row).collect();
    output::line(&output::table(&header, rows, &header[1..]))?;
    for LinkProbe { from, to, .. } in links.iter().filter(|link| link.line.is_none()) {
        output::line(&format!("{from} -> {to}  no line explains the samples: --json has them"))?;
    }
    for (from, to, state) in &skipped {
        output::line(&format!("{from} -> {to}  not measured: it is {state}"))?;
    }
    Ok(())
}

/// A link beside its profile, where a line explains its samples.
fn row(link: &LinkProbe) -> Option<Vec<String>> {
    let line = link.line?;
    let differs = |found: f64, said: f64| match said > 0.0 {
        true => format!("{:+.1} %", (found / said - 1.0) * 100.0),
        false => "-".into(),
    };
    let rate = link.profile_bandwidth_bytes_per_second.unwrap_or(0);
    let latency = link.profile_latency_ns as f64 / 1e9;
    let said = |known: bool, text: String| if known { text } else { "-".into() };
    Some(vec![
        format!("{} -> {}", link.from, link.to),
        line.bandwidth.to_string(),
        said(rate > 0, BytesPerSecond(rate).to_string()),
        differs(line.bandwidth.0 as f64, rate as f64),
        line.latency.to_string(),
        said(latency > 0.0, Seconds(latency).to_string()),
        differs(line.latency.0, latency),
        format!("{:.1} %", line.worst * 100.0),
    ])
}
