// SPDX-License-Identifier: Apache-2.0
//! `spanker steal`: one job over unequal backends, with faults if one likes; on real threads, ranks or in virtual time. The
//! engine prepares and runs it; here are flags, tables, JSON and progress.

#[cfg(feature = "mpi")]
mod ranks;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use spanker_engine::jobs::notation::{self, Hot, Named};
use spanker_engine::jobs::{
    self, BackendList, BackendShare, JobError, JobReport, JobRequest, JobWatch, Workload,
};
use spanker_engine::{EngineError, Model, files, models};
use spanker_steal::{BackendReport, Options, Report};
use spanker_twin::Signals;

use crate::{Unspoken, llm, output, refuse};

/// The part that is done again by others when a backend computes wrong bytes.
const AUDIT: f64 = 0.02;
/// Values that both operands of a product share, and rows of the right one, where nobody says.
const SIDE: usize = 1024;
/// Tokens of an answer where nobody says.
const TOKENS: usize = 16;
/// So many backends are shown while a job runs.
const MOST_LINES: usize = 20;
/// More bytes than any list of prompts has.
const MOST_BYTES: u64 = 64 << 20;
/// Split one job over unequal backends, whoever fails
///
/// Every backend takes chunks that suit its speed, which is measured as it goes, and every item is done exactly once:
/// what a backend held that died, hung or slowed down goes to the others. At the end every byte is compared with
/// what it should be. Efficiency is the shortest time in which these backends could do the job, over the time that
/// it took; the same job is then run by the origin's rule (equal units from a counter, no second try) to compare.
///
/// Emulated backends have an emulated speed and real bytes: they sleep for as long as their items would take. In
/// 'sleep' everybody does, so that any number of backends runs on any machine. In 'hash' the threads of cpu
/// backends compute; their speed is measured beforehand, alone, and 1x is that of one thread. All outputs are
/// computed once before the start, and emulated backends hand those out, so that they leave the processor alone.
///
/// 'matmul' is the same with rows of a product of two Q4_K matrices, and runs on cards as well: card:0 is the first
/// card that 'spanker cards' lists, and its speed is measured beforehand, alone, too. In 'prompts' an item is a prompt
/// for a model, cpu:N a copy of it on N threads and card:0 one on a card; how fast a copy is, is what one prompt takes
/// beforehand. Answers are compared only with --check, and nothing is run by the origin's rule.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  spanker steal --backends emul:1x,emul:2x,emul:4x,emul:8x              1 : 2 : 4 : 8, nobody waits
  spanker steal --backends emul:1x,emul:20x*7 --simulate                in virtual time: no waiting at all
  spanker steal --backends cpu:2,emul:4x --job hash                     threads that compute, beside an emulated one
  spanker steal --backends emul:1x*4 --kill emul1@0.5s --hang emul2@1s  losses
  spanker steal --backends cpu:1,emul:4x,emul:1x --slow emul0*8@0.2s    a backend that is throttled
  spanker steal --backends cpu:1,emul:4x*2 --corrupt emul1@0.2s         wrong bytes, found by doing some items again
  spanker steal --backends emul:1x*8 --hot 0.9..1.0*10                  the last tenth costs ten times as much
  spanker twin up --cards 2 && spanker steal --job matmul --backends cpu:1,card:0,card:1 --kill card1@0.1s
  spanker steal --job prompts -m smollm2-135m --backends cpu:1,cpu:1 --check
  spanker steal --job matmul --k 16384 --backends cpu:8,gpu:0           the processor and a GPU on one product
  mpirun -n 4 spanker steal --fabric mpi --backends emul:1x,emul:1x,emul:2x,emul:4x   a process for each

Backends are named by kind and place: cpu0, emul0, emul1; card0 is the first card given. Ctrl-C ends the run and tells what was done.")]
pub(crate) struct Args {
    /// Who does it, up to 128: cpu:N (N threads), emul:4x (4 times the base speed), emul:20x*7 (seven of them),
    /// card:0 (a card, for matmul and prompts), gpu:0 (a GPU, for matmul)
    #[arg(long, value_name = "LIST")]
    backends: BackendList,
    /// Where the backends are: threads of this process, or the ranks that mpirun started, one backend each
    #[arg(long, default_value = "threads", value_parser = ["threads", "mpi"])]
    fabric: String,
    /// Items of the job, as in 1000000 or 1M; for matmul rows of the left operand [default: 1000000, or 4096 rows]
    #[arg(long, value_name = "N", value_parser = notation::items)]
    items: Option<usize>,
    /// What an item is: sleep (nothing but time), hash (rounds of mixing), matmul (a row of a product) or prompts (an
    /// answer of a model)
    #[arg(long, default_value = "sleep", value_parser = ["sleep", "hash", "matmul", "prompts"])]
    job: String,
    #[command(flatten)]
    of_job: OfJob,
    /// What an item takes at 1x, for sleep and --simulate; a cpu thread is 1x [default: what makes the whole job
    /// take a second, if all goes well]
    #[arg(long, value_name = "TIME", value_parser = notation::time)]
    item_time: Option<Duration>,
    /// Items that cost more: 0.9..1.0*10 makes the last tenth cost 10 times as much; may be given again
    #[arg(long, value_name = "PART*FACTOR", value_parser = notation::hot)]
    hot: Vec<Hot>,
    /// A backend that dies: emul1@0.5s; may be given again, as all faults, and without a time from the start
    #[arg(long, value_name = "NAME@TIME", value_parser = notation::kill)]
    kill: Vec<Named>,
    /// A backend that hangs: emul1@0.5s for ever, emul1@0.5s+2s for two seconds
    #[arg(long, value_name = "NAME@TIME", value_parser = notation::hang)]
    hang: Vec<Named>,
    /// A backend that slows down: emul1*8@0.5s takes 8 times as long from then on, emul1@0.5s 4 times
    #[arg(long, value_name = "NAME*FACTOR@TIME", value_parser = notation::slow)]
    slow: Vec<Named>,
    /// A backend that computes wrong bytes: emul1@0.5s
    #[arg(long, value_name = "NAME@TIME", value_parser = notation::corrupt)]
    corrupt: Vec<Named>,
    /// The part of the items, 0 to 1, that a second backend does again to compare [default: 0, or 0.02 with --corrupt]
    #[arg(long, value_name = "PART", value_parser = llm::fraction)]
    audit: Option<f64>,
    /// Sums of the bytes are made where they are computed and checked where they arrive
    #[arg(long)]
    checksums: bool,
    /// How long a backend may have a chunk at least before others may take it [default: 20ms, or 30s for prompts]
    #[arg(long, value_name = "TIME", value_parser = notation::time)]
    lease: Option<Duration>,
    /// How long no backend may answer before the run gives up [default: 30s, or 600s for prompts]
    #[arg(long, value_name = "TIME", value_parser = notation::time)]
    patience: Option<Duration>,
    /// How long a chunk should take at most [default: 12ms]
    #[arg(long, value_name = "TIME", value_parser = notation::time)]
    cap: Option<Duration>,
    /// What every chunk of an emulated backend costs beside its items
    #[arg(long, default_value = "50us", value_name = "TIME", value_parser = notation::time)]
    launch: Duration,
    /// Speeds and launch costs are told beforehand, not found out
    #[arg(long)]
    told: bool,
    /// What chance starts from: which items are done again, and jitter
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The same in virtual time: nothing sleeps, and the same seed gives the same run
    #[arg(long)]
    simulate: bool,
    /// The largest part by which a chunk may take longer, at random, with --simulate
    #[arg(long, value_name = "PART", value_parser = llm::fraction, requires = "simulate")]
    jitter: Option<f64>,
    /// Do not run the job by the origin's rule as well (nor is it run where that would take more than a minute)
    #[arg(long)]
    no_origin: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Flags for one job each.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
struct OfJob {
    /// Values of a row, for matmul: a multiple of 256 [default: 1024]
    #[arg(long, value_name = "K")]
    k: Option<usize>,
    /// Rows of the right operand, and so values of an output, for matmul [default: 1024]
    #[arg(long, value_name = "N")]
    n: Option<usize>,
    /// The model, for prompts: a .gguf file, or the name of a fetched model
    #[arg(short, long, value_name = "MODEL")]
    model: Option<String>,
    /// A file with a prompt on every line, for prompts [default: a dozen short ones]
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Tokens of an answer at most, for prompts [default: 16]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Answer all prompts once more beforehand, in one process, and compare every token
    #[arg(long)]
    check: bool,
}

impl OfJob {
    /// Refuses flags of other jobs.
    fn check(&self, kind: &str) -> anyhow::Result<()> {
        let flags = [
            ("--k", self.k.is_some(), "matmul"),
            ("--n", self.n.is_some(), "matmul"),
            ("--model", self.model.is_some(), "prompts"),
            ("--prompts", self.prompts.is_some(), "prompts"),
            ("--tokens", self.tokens.is_some(), "prompts"),
            ("--check", self.check, "prompts"),
        ];
        match flags.into_iter().find(|(_, given, of)| *given && *of != kind) {
            Some((flag, _, job)) => refuse(format!("{flag} is for --job {job}")),
            None => Ok(()),
        }
    }

    /// Where prompts are from.
    fn source(&self) -> String {
        self.prompts.as_ref().map_or("built in".to_owned(), |file| file.display().to_string())
    }

    /// The prompts of a file, or those that are built in, for a model as `spanker run` finds it.
    fn prompts(&self) -> anyhow::Result<Workload> {
        let Some(model) = &self.model else {
            return refuse("--job prompts needs a model: -m MODEL");
        };
        let tokens = self.tokens.unwrap_or(TOKENS);
        let text = match &self.prompts {
            None => jobs::PROMPTS.to_owned(),
            Some(file) => files::read(file, MOST_BYTES)?,
        };
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let texts: Vec<String> = lines.map(str::to_owned).collect();
        if texts.is_empty() {
            anyhow::bail!("{}: no prompts, expected one on every line", self.source());
        }
        let model = Arc::new(Model::open(models::find(model)?)?);
        Ok(Workload::Prompts { model, texts, tokens, check: self.check })
    }
}

impl Args {
    /// Whether this is the work of all ranks together.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.fabric == "mpi"
    }

    /// What the items are.
    fn workload(&self) -> anyhow::Result<Workload> {
        self.of_job.check(&self.job)?;
        let items = |usual: usize| self.items.unwrap_or(usual);
        Ok(match &*self.job {
            "sleep" => Workload::Sleep { items: items(1_000_000) },
            "hash" => Workload::Hash { items: items(1_000_000) },
            "matmul" => Workload::Matmul {
                rows: items(4096),
                k: self.of_job.k.unwrap_or(SIDE),
                n: self.of_job.n.unwrap_or(SIDE),
            },
            _ if self.items.is_some() => {
                let text = "--items is for other jobs: with --job prompts an item is a prompt";
                return refuse(text);
            }
            _ => self.of_job.prompts()?,
        })
    }

    /// What is asked for.
    fn request(&self) -> anyhow::Result<JobRequest> {
        let workload = self.workload()?;
        let standard = workload.options();
        let faults = [&self.kill, &self.hang, &self.slow, &self.corrupt];
        Ok(JobRequest {
            backends: self.backends.clone(),
            faults: faults.into_iter().flatten().cloned().collect(),
            hot: self.hot.clone(),
            item_time: self.item_time,
            launch: self.launch,
            told: self.told,
            seed: self.seed,
            options: Options {
                cap: self.cap.unwrap_or(standard.cap),
                lease: self.lease.unwrap_or(standard.lease),
                patience: self.patience.unwrap_or(standard.patience),
                checksums: self.checksums,
                sample: self.audit.unwrap_or(if self.corrupt.is_empty() { 0.0 } else { AUDIT }),
                seed: self.seed,
                ..standard
            },
            simulate: self.simulate,
            jitter: self.jitter.unwrap_or(0.0),
            origin: !self.no_origin,
            workload,
        })
    }
}

/// Runs something that is watched: what it does is shown unless `quiet`, and an interrupt stops it.
fn watched<T>(interrupt: Option<Signals>, quiet: bool, run: impl FnOnce(&JobWatch<'_>) -> T) -> T {
    let stopped = AtomicBool::new(false);
    let outcome = run(&JobWatch {
        stop: &|| {
            if interrupt.as_ref().is_some_and(|signals| signals.caught().end) {
                stopped.store(true, Ordering::Relaxed);
            }
            stopped.load(Ordering::Relaxed)
        },
        progress: &|text| match text {
            _ if quiet => {}
            "" => output::progress_done(),
            text => output::progress(text),
        },
        report: &|report| {
            if !quiet {
                output::progress(&so_far(report));
            }
        },
        note: &|text| output::said_line(text),
    });
    output::progress_done();
    outcome
}

/// How far a run is: a line for every backend, where there are not too many.
fn so_far(report: &Report) -> String {
    let part = 100.0 * report.done as f64 / report.items.max(1) as f64;
    let first = format!("{part:5.1} % of {} items", report.items);
    let more = report.backends.len().saturating_sub(MOST_LINES);
    let more = (more > 0).then(|| format!("and {more} more"));
    let backends = report.backends.iter().take(MOST_LINES).map(line);
    std::iter::once(first).chain(backends).chain(more).collect::<Vec<_>>().join("\n")
}

/// Less than 80 columns.
fn line(backend: &BackendReport) -> String {
    let BackendReport { name, items, last_chunk, benched, .. } = backend;
    let speed = rate(backend.rate);
    let state = match benched {
        Some(why) => format!("benched: {why}"),
        None if backend.rate > 0.0 => "working".to_owned(),
        None => "starting".to_owned(),
    };
    let state: String = state.chars().take(20).collect();
    format!("{name:<8}{speed:>14}/s  chunk {last_chunk:>9}  {items:>12} items  {state}")
}

/// An error of the engine as the command tells it.
fn failure(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::Job(JobError::Ended) => Unspoken.into(),
        other => other.into(),
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.takes_ranks() {
        #[cfg(feature = "mpi")]
        return ranks::run(args);
        #[cfg(not(feature = "mpi"))]
        return Err(crate::ranks::without_mpi());
    }
    let job = args.request()?.prepare().map_err(|error| match error {
        error @ EngineError::Prompt { .. } => {
            anyhow::Error::from(error).context(args.of_job.source())
        }
        error => error.into(),
    })?;
    // Threads that are started later leave interrupts to this. Virtual time passes quickly, and ends as any program does.
    let interrupt = if args.simulate { None } else { Some(Signals::take()?) };
    let report = watched(interrupt, args.json, |watch| job.run(watch)).map_err(failure)?;
    output::report(args.json, &report, show)?;
    match report.failure() {
        _ if report.interrupted => Err(EngineError::Interrupted.into()),
        Some(what) => Err(anyhow::anyhow!(what)),
        None => Ok(()),
    }
}

fn show(report: &JobReport) -> anyhow::Result<()> {
    say!("# {}", report.title())?;
    let header = ["backend", "items", "share", "chunks", "mean chunk", "items/s", "state"];
    let row = |backend: &BackendShare| {
        vec![
            backend.name.clone(),
            backend.items.to_string(),
            format!("{:.1} %", report.totals.percent(backend.items)),
            backend.chunks.to_string(),
            backend.items.checked_div(backend.chunks).unwrap_or(0).to_string(),
            rate(backend.rate),
            backend.state(),
        ]
    };
    output::table(&header, report.backends.iter().map(row).collect(), &header[1..6])?;
    output::line("")?;
    output::lines(&report.lines())
}

/// Items a second, with a fraction where it matters.
fn rate(rate: f64) -> String {
    if rate < 100.0 && rate > 0.0 { format!("{rate:.2}") } else { format!("{rate:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_terminal_do_not_wrap() {
        let backend = BackendReport {
            name: "emul127".into(),
            items: 999_999_999_999,
            chunks: 1,
            rate: 1e13,
            last_chunk: 999_999_999,
            benched: Some("a very long story about what went wrong here".into()),
        };
        assert!(line(&backend).len() < 90, "{}", line(&backend).len());
    }
}
