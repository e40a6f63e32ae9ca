// SPDX-License-Identifier: Apache-2.0
//! `spanker probe`: what the links between cards take, measured, beside what their profiles say; with GPUs, what their
//! memory, launches and ways to the host and each other take; with threads and processes, what each kind of operator
//! of a model takes.

#[cfg(feature = "cuda")]
mod cuda;
mod machine;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use serde::Serialize;
use spanker_plan::Line;
use spanker_runtime::SpankerControl;
use spanker_scheduler::{
    Deadline, DeviceError, DeviceGroup, Link, LinkEnd, LinkState, ProbedLink, Topology, load_links,
    save_links,
};
use spanker_topology::{BytesPerSecond, Seconds};

use crate::directory::{self, CardList};
use crate::sizes::{Sizes, human};
use crate::{Usage, fault, files, output};

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
/// mpirun, it is a rank, and the messages between the ranks.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker probe
  spanker probe --cards 0,1 --sizes 64..4M
  spanker probe --json
  spanker probe --fabric inproc -m smollm2-135m --threads 2 --save here.toml
  mpirun -n 2 spanker probe --fabric mpi -m smollm2-135m
  spanker probe --fabric cuda --save gpu.toml && spanker plan llama-2-7b --profile gpu.toml --cards 1")]
pub(crate) struct Args {
    /// What is measured: cards (those that 'spanker cards' shows), cuda (GPUs), inproc (threads of this machine) or
    /// mpi (processes that mpirun has started)
    #[arg(long, default_value = "cards", value_parser = ["cards", "cuda", "inproc", "mpi"])]
    fabric: String,
    /// With --fabric inproc and mpi, the model: a .gguf file, or the name of a fetched one [default: smollm2-135m]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<String>,
    /// With --fabric inproc, threads in all; with mpi those of each process [default: as many as there are cores]
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

/// The schema of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    directory: String,
    /// What the cards are and whose clock times are by.
    nature: &'static str,
    links: Vec<Probed>,
    /// Links that were not measured, because they are not up.
    skipped: Vec<Skipped>,
}

#[derive(Debug, Serialize)]
struct Skipped {
    from: usize,
    to: usize,
    state: String,
}

#[derive(Debug, Serialize)]
struct Probed {
    from: usize,
    to: usize,
    /// Nothing where no line explains the samples.
    bandwidth_bytes_per_second: Option<u64>,
    latency_ns: Option<f64>,
    /// How far the line is from a sample at most, as a share of the sample.
    worst_residual: Option<f64>,
    profile_bandwidth_bytes_per_second: Option<u64>,
    profile_latency_ns: u128,
    samples: Vec<Sample>,
    #[serde(skip)]
    ends: (LinkEnd, LinkEnd),
    #[serde(skip)]
    line: Option<Line>,
}

#[derive(Debug, Serialize)]
struct Sample {
    bytes: u64,
    seconds: f64,
}

impl Args {
    /// Whether this is work for all processes that a launcher has started.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.fabric == "mpi"
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    files::check_outputs([&args.save])?;
    if (args.model.is_some() || args.threads.is_some())
        && !matches!(args.fabric.as_str(), "inproc" | "mpi")
    {
        return Err(Usage("--model and --threads are for --fabric inproc and mpi".into()).into());
    }
    if args.fabric == "cuda" {
        #[cfg(feature = "cuda")]
        return cuda::run(args);
        #[cfg(not(feature = "cuda"))]
        anyhow::bail!("--fabric cuda: this program was built without it");
    }
    if args.gpus.is_some() {
        return Err(Usage(
            "--gpus and the logical cards that it asks for are for --fabric cuda".into(),
        )
        .into());
    }
    if matches!(args.fabric.as_str(), "inproc" | "mpi") {
        return machine::run(args);
    }
    if args.save.is_some() {
        let text =
            "--save is for --fabric inproc, cuda and mpi: what links take is kept beside the cards";
        return Err(Usage(text.into()).into());
    }
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
    let info = first.info().map_err(|error| directory::blamed(&folder, &indices, error))?;
    let nature = directory::nature(info.pace);
    let (up, down): (Vec<&Link>, Vec<&Link>) =
        cards.links().iter().partition(|link| link.state == LinkState::Up);
    anyhow::ensure!(!up.is_empty(), "no link is up between cards {}", directory::list(&indices));
    let mut links = Vec::with_capacity(up.len());
    for (at, link) in up.iter().enumerate() {
        let ends = (link.local_sail, link.remote_sail);
        let place = format!("{}/{}", at + 1, up.len());
        let probed = probe(&cards, ends, args, &place);
        output::progress_done();
        links.push(probed.map_err(|error| fault::told(&cards, error))?);
    }
    let index = |place: usize| cards.indices()[place];
    let skipped = down.iter().map(|link| Skipped {
        from: index(link.local_sail),
        to: index(link.remote_sail),
        state: link.state.to_string(),
    });
    let skipped = skipped.collect();
    let report = Report { directory: folder.display().to_string(), nature, links, skipped };
    save(&folder, &report.links)?;
    match args.json {
        true => output::line(&serde_json::to_string(&report)?),
        false => show(&report),
    }
}

fn probe(
    cards: &Topology<SpankerControl>,
    (from, to): (usize, usize),
    args: &Args,
    place: &str,
) -> Result<Probed, DeviceError> {
    let (here, there) = (&cards.sails()[from], &cards.sails()[to]);
    let group = DeviceGroup::new(&[here, there])?;
    let deadline = Deadline { detect: args.deadline, ..Deadline::USUAL };
    let mut samples = Vec::with_capacity(args.sizes.0.len());
    for &size in &args.sizes.0 {
        let (a, b) = (group.index(0), group.index(1));
        output::progress(&format!("link {a} -> {b} ({place}): {}", human(size)));
        let bytes = size as u64;
        let seconds = group.message_time(0, 1, bytes, &deadline)?.as_secs_f64();
        samples.push(Sample { bytes, seconds });
    }
    let line = Line::fit(&samples.iter().map(|s| (s.bytes, s.seconds)).collect::<Vec<_>>());
    let (sent, came) = (group.end(0, 1), group.end(1, 0));
    let said = sent.and_then(|(_, port)| here.port(port).ok());
    let end = |end: Option<(u64, u32)>| {
        let (serial, port) = end.unwrap_or_default();
        LinkEnd { serial, port }
    };
    Ok(Probed {
        from: group.index(0),
        to: group.index(1),
        bandwidth_bytes_per_second: line.map(|line| line.bandwidth.0),
        latency_ns: line.map(|line| line.latency.0 * 1e9),
        worst_residual: line.map(|line| line.worst),
        profile_bandwidth_bytes_per_second: said.and_then(|port| port.bandwidth),
        profile_latency_ns: said.map_or(0, |port| port.latency.as_nanos()),
        samples,
        ends: (end(sent), end(came)),
        line,
    })
}

fn show(report: &Report) -> anyhow::Result<()> {
    output::line(&format!("{} ({})\n", report.directory, report.nature))?;
    output::line(&format!(
        "link      {:>10} {:>10} {:>7}  {:>9} {:>9} {:>7}  {:>9}",
        "bandwidth", "profile", "differs", "latency", "profile", "differs", "worst fit"
    ))?;
    for link in &report.links {
        let name = format!("{} -> {}", link.from, link.to);
        let Some(line) = link.line else {
            output::line(&format!("{name:<8}  no line explains the samples: --json has them"))?;
            continue;
        };
        let differs = |found: f64, said: f64| match said > 0.0 {
            true => format!("{:+.1} %", (found / said - 1.0) * 100.0),
            false => "-".into(),
        };
        let rate = link.profile_bandwidth_bytes_per_second.unwrap_or(0);
        let latency = link.profile_latency_ns as f64 / 1e9;
        let said = |known: bool, text: String| if known { text } else { "-".into() };
        output::line(&format!(
            "{name:<8}  {:>10} {:>10} {:>7}  {:>9} {:>9} {:>7}  {:>7.1} %",
            line.bandwidth.to_string(),
            said(rate > 0, BytesPerSecond(rate).to_string()),
            differs(line.bandwidth.0 as f64, rate as f64),
            line.latency.to_string(),
            said(latency > 0.0, Seconds(latency).to_string()),
            differs(line.latency.0, latency),
            line.worst * 100.0,
        ))?;
    }
    for Skipped { from, to, state } in &report.skipped {
        output::line(&format!("{:<8}  not measured: it is {state}", format!("{from} -> {to}")))?;
    }
    Ok(())
}

/// Keeps what was found out, and what is known of other links.
fn save(folder: &Path, links: &[Probed]) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let fresh = links.iter().filter_map(|link| {
        let ((from, to), line) = (link.ends, link.line?);
        let (bandwidth, latency) = (line.bandwidth, line.latency);
        Some(ProbedLink { from, to, bandwidth, latency, fitted: now })
    });
    let fresh: Vec<ProbedLink> = fresh.collect();
    // What was saved before and makes no sense is replaced.
    let mut all = load_links(folder).unwrap_or_default();
    all.retain(|old| !fresh.iter().any(|new| (new.from, new.to) == (old.from, old.to)));
    all.extend(fresh);
    Ok(save_links(folder, &all)?)
}
