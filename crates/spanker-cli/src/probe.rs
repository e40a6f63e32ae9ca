// SPDX-License-Identifier: Apache-2.0
//! `spanker probe`: what the links between cards take, measured, beside what their profiles say; with GPUs, what their
//! memory, launches and ways to the host and each other take; with threads and processes, what each kind of operator
//! of a model takes.

#[cfg(feature = "cuda")]
mod cuda;
mod machine;

use std::path::PathBuf;
use std::time::Duration;

use spanker_bench::{LinkProbe, LinkSurvey, Sizes, SkippedLink, human, survey_links};
use spanker_engine::{CardList, Fabric, directory, files};
use spanker_topology::{BytesPerSecond, Seconds};

use crate::llm::{self, one_of};
use crate::workers::WorkerArgs;
use crate::{output, refuse, times};

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
    #[arg(long, default_value = "cards", value_parser = one_of(&Fabric::ALL, Fabric::name))]
    pub(crate) fabric: Fabric,
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
    #[arg(long, default_value = "300ms", value_name = "TIME", value_parser = times::timeout)]
    deadline: Duration,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    files::check_outputs([&args.save])?;
    let machine = llm::takes(args.fabric).threads;
    if (args.model.is_some() || args.threads.is_some()) && !machine {
        return refuse("--model and --threads are for --fabric inproc, mpi and tcp");
    }
    if args.fabric != Fabric::Tcp {
        args.workers.refuse()?;
    }
    if args.fabric == Fabric::Cuda {
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
    let begins = |(from, to): (usize, usize), (at, all): (usize, usize), size: usize| {
        output::progress(&format!("link {from} -> {to} ({}/{all}): {}", at + 1, human(size)));
    };
    let (folder, list) = (directory::find(), args.cards.as_ref());
    let survey = survey_links(&folder, list, &args.sizes.0, args.deadline, begins);
    output::progress_done();
    output::report(args.json, &survey?, show)
}

fn show(survey: &LinkSurvey) -> anyhow::Result<()> {
    say!("{} ({})\n", survey.directory, survey.nature)?;
    let header =
        ["link", "bandwidth", "profile", "differs", "latency", "profile", "differs", "worst fit"];
    output::table(&header, survey.links.iter().filter_map(row).collect(), &header[1..])?;
    for LinkProbe { from, to, .. } in survey.links.iter().filter(|link| link.line.is_none()) {
        say!("{from} -> {to}  no line explains the samples: --json has them")?;
    }
    let mut skipped = survey.skipped.iter();
    skipped.try_for_each(|SkippedLink { from, to, state }| {
        say!("{from} -> {to}  not measured: it is {state}")
    })
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
