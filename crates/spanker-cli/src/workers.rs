// SPDX-License-Identifier: Apache-2.0
//! `spanker worker`, `spanker workers` and `spanker key`: machines that work for others, and what they share.

use std::path::PathBuf;

use serde_json::json;
use spanker_engine::{
    EngineError, ListedWorker, WorkerEvent, WorkerKey, WorkerOptions, WorkerServer, list_workers,
    read_key, worker_addresses,
};
use spanker_twin::Signals;

use crate::{output, refuse};

/// Which workers, and the key that they take.
#[derive(Debug, Clone, Default, clap::Args)]
#[group(skip)]
pub(crate) struct WorkerArgs {
    /// The workers of --fabric tcp: HOST or HOST:PORT, several with commas [default: $SPANKER_WORKERS]
    #[arg(long, value_name = "LIST")]
    workers: Option<String>,
    /// The key that this machine and its workers share, from 'spanker key new' [default: $SPANKER_KEY_FILE]
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

/// A variable that is set to something.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The key of a flag, or of the environment.
fn key_of(flag: Option<&PathBuf>) -> anyhow::Result<Option<WorkerKey>> {
    let path = flag.cloned().or_else(|| variable("SPANKER_KEY_FILE").map(PathBuf::from));
    Ok(path.map(|path| read_key(&path)).transpose()?)
}

impl WorkerArgs {
    /// Whether a flag names workers.
    pub(crate) fn are_named(&self) -> bool {
        self.workers.is_some()
    }

    /// Refuses flags that are for another fabric.
    pub(crate) fn refuse(&self) -> anyhow::Result<()> {
        match self.workers.is_some() || self.key_file.is_some() {
            true => refuse("--workers and --key-file are for --fabric tcp"),
            false => Ok(()),
        }
    }

    /// Where workers are.
    pub(crate) fn addresses(&self) -> anyhow::Result<Vec<String>> {
        let named = self.workers.clone().or_else(|| variable("SPANKER_WORKERS"));
        Ok(worker_addresses(&named.unwrap_or_default())?)
    }

    /// The key, if there is one.
    pub(crate) fn key(&self) -> anyhow::Result<Option<WorkerKey>> {
        key_of(self.key_file.as_ref())
    }
}

/// Work for leaders on other machines
///
/// Waits for a leader, that is a command with --fabric tcp that names this worker, does what it says, and waits for the
/// next one. A worker needs no copy of the model: it gets the parts that it holds once, keeps them in its cache, and
/// checks every piece. With the same file at hand (--model, or one that 'spanker fetch' got) it reads that.
///
/// Everything is encrypted, and a leader has to have the key; without a key only this machine can be the leader.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker key new key && spanker worker --listen 0.0.0.0:7077 --key-file key    on every other machine
  spanker run -m smollm2-135m -p Hello --workers one,two --key-file key         on the first one
  spanker worker                                                                for this machine alone")]
pub(crate) struct Args {
    /// Where to listen: HOST:PORT; port 0 is any that is free, and printed
    #[arg(long, default_value = "127.0.0.1:7077", value_name = "ADDRESS")]
    listen: String,
    /// The key that leaders have, from 'spanker key new' [default: $SPANKER_KEY_FILE]
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// What 'spanker workers' calls this machine [default: its host name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Memory that a model may take, as in 512M or 16G [default: all]
    #[arg(long, value_name = "BYTES", value_parser = spanker_bench::bytes)]
    memory: Option<usize>,
    /// Threads to compute with [default: as many as there are cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// A model that is here, as a .gguf file; may be given several times
    #[arg(short, long, value_name = "FILE")]
    model: Vec<PathBuf>,
    /// Bytes of models that came over the network to keep at most; what was used longest ago goes
    #[arg(long, default_value = "64G", value_name = "BYTES", value_parser = spanker_bench::bytes)]
    cache_limit: usize,
}

pub(crate) fn work(args: &Args) -> anyhow::Result<()> {
    // Before any thread is started, which would take signals itself.
    let signals = Signals::take()?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let options = WorkerOptions {
        name: args.name.clone().unwrap_or_else(host),
        threads: args.threads.map_or(cores, usize::from),
        memory: args.memory.map(|bytes| bytes as u64),
        files: args.model.clone(),
        cache_limit: args.cache_limit as u64,
    };
    let server = WorkerServer::bind(&args.listen, key_of(args.key_file.as_ref())?, options)?;
    std::thread::spawn(move || {
        loop {
            let [] = signals.wait([], None);
            if signals.caught().end {
                // Leaders see the connection end, and go on without this worker.
                std::process::exit(0);
            }
        }
    });
    log!("listening on {}", server.address());
    server.run(&tell);
    Ok(())
}

/// Says what happens on a worker.
fn tell(event: &WorkerEvent<'_>) {
    match event {
        WorkerEvent::Joined { leader, rank, ranks } => {
            log!("{leader} leads: rank {rank} of {ranks}");
        }
        WorkerEvent::Opened { model, is_own } => {
            let from = if *is_own { "a file of this machine" } else { "the cache and the leader" };
            log!("{model} from {from}");
        }
        WorkerEvent::Left { fetched, error } => {
            let got = match fetched {
                0 => "no weights came over the network".to_owned(),
                bytes => format!("{} of weights came over the network", output::bytes(*bytes)),
            };
            match error {
                None => log!("done; {got}"),
                Some(error) => log!("{error}; {got}"),
            }
            output::said_line("waiting for the next leader");
        }
        _ => {}
    }
}

/// Show the workers that answer: what they are, what the links to them take, and what they have in their caches
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker workers --workers one,two --key-file key
  spanker workers --workers 127.0.0.1:7077 --json")]
pub(crate) struct ListArgs {
    #[command(flatten)]
    workers: WorkerArgs,
    /// Print one JSON object for each worker
    #[arg(long)]
    json: bool,
}

pub(crate) fn list(args: &ListArgs) -> anyhow::Result<()> {
    let addresses = args.workers.addresses()?;
    let key = args.workers.key()?;
    let list = list_workers(&addresses, key.as_ref());
    if args.json {
        list.iter().try_for_each(|worker| output::json(&to_json(worker)))?;
    } else {
        let header = [
            "worker",
            "name",
            "cores",
            "threads",
            "memory",
            "version",
            "round trip",
            "bandwidth",
            "state",
        ];
        let rows = list.iter().map(row).collect();
        output::table(&header, rows, &header[2..5])?;
        for worker in &list {
            let cached = worker.answer.iter().flat_map(|(info, _)| &info.cached);
            for model in cached {
                let (held, all) = (output::bytes(model.held), output::bytes(model.length));
                let name = &worker.address;
                say!("{name} has {held} of {all} of {}", model.name)?;
            }
        }
    }
    let silent = list.iter().filter(|worker| worker.answer.is_err()).count();
    match silent {
        0 => Ok(()),
        silent => {
            let what = format!("{silent} of {} workers did not answer", list.len());
            let hint = "is 'spanker worker' running there, with the same key?".to_owned();
            Err(EngineError::Unavailable { what, hint: Some(hint) }.into())
        }
    }
}

fn row(worker: &ListedWorker) -> Vec<String> {
    match &worker.answer {
        Ok((info, link)) => vec![
            worker.address.clone(),
            info.name.clone(),
            info.cores.to_string(),
            info.threads.to_string(),
            output::bytes(info.memory),
            info.version.clone(),
            format!("{:.0} us", link.round_trip * 1e6),
            format!("{:.0} MB/s", link.bandwidth / 1e6),
            if info.busy { "busy" } else { "free" }.into(),
        ],
        Err(why) => {
            let mut row = vec![worker.address.clone()];
            row.resize(8, "-".to_owned());
            row.push(why.lines().next().unwrap_or_default().to_owned());
            row
        }
    }
}

fn to_json(worker: &ListedWorker) -> serde_json::Value {
    match &worker.answer {
        Ok((info, link)) => json!({
            "address": worker.address, "answers": true, "name": info.name, "version": info.version,
            "processor": info.processor, "cores": info.cores, "threads": info.threads,
            "memory": info.memory, "busy": info.busy, "cached": info.cached,
            "round_trip_us": link.round_trip * 1e6, "bytes_per_second": link.bandwidth,
        }),
        Err(why) => json!({ "address": worker.address, "answers": false, "error": why }),
    }
}

/// Make a key for workers and their leaders
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker key new key && scp key two:    the same file on every machine
  spanker key new                        prints it instead")]
pub(crate) struct KeyArgs {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Debug, clap::Subcommand)]
enum KeyCommand {
    /// Make a new key
    New {
        /// Write it to this file, which must not exist, for its owner alone [default: print it]
        file: Option<PathBuf>,
        /// The same
        #[arg(long, value_name = "FILE", conflicts_with = "file")]
        out: Option<PathBuf>,
    },
}

pub(crate) fn key(args: &KeyArgs) -> anyhow::Result<()> {
    let KeyCommand::New { file, out } = &args.command;
    let key = spanker_engine::new_key()?;
    match file.as_ref().or(out.as_ref()) {
        None => output::line(&key.to_hex()),
        Some(path) => {
            spanker_engine::write_key(&key, path)?;
            log!("saved {}", path.display());
            Ok(())
        }
    }
}
