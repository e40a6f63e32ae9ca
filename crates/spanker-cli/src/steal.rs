// SPDX-License-Identifier: Apache-2.0
//! `spanker steal`: one job over unequal backends, with faults if one likes; on real threads or in virtual time. How
//! items are given out is `spanker-steal`'s business; here are flags, backends to rehearse with, tables and JSON.

mod cards;
mod crew;
mod faults;
mod gpu;
mod live;
mod material;
mod origin;
mod outcome;
mod planned;
mod prepare;
mod questions;
#[cfg(feature = "mpi")]
mod ranks;
mod speed;
mod view;
mod work;

use std::time::Duration;

use spanker_steal::{Fault, Job, Options};

use crate::Usage;
use crew::{Crew, Kind};
use faults::{Hot, Named};
use material::Material;
use outcome::{Outcome, end};

/// How long a job whose items sleep ideally takes, in seconds, where nobody says how long an item does.
const IDEAL: f64 = 1.0;
/// The part that is done again by others when a backend computes wrong bytes.
const AUDIT: f64 = 0.02;

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
    backends: Crew,
    /// Where the backends are: threads of this process, or the ranks that mpirun started, one backend each
    #[arg(long, default_value = "threads", value_enum)]
    fabric: Ground,
    /// Items of the job, as in 1000000 or 1M; for matmul rows of the left operand [default: 1000000, or 4096 rows]
    #[arg(long, value_name = "N", value_parser = items)]
    items: Option<usize>,
    /// What an item is: sleep (nothing but time), hash (rounds of mixing), matmul (a row of a product) or prompts (an
    /// answer of a model)
    #[arg(long, default_value = "sleep", value_enum)]
    job: JobKind,
    #[command(flatten)]
    real: material::Flags,
    /// What an item takes at 1x, for sleep and --simulate; a cpu thread is 1x [default: what makes the whole job
    /// take a second, if all goes well]
    #[arg(long, value_name = "TIME", value_parser = faults::time)]
    item_time: Option<Duration>,
    /// Items that cost more: 0.9..1.0*10 makes the last tenth cost 10 times as much; may be given again
    #[arg(long, value_name = "PART*FACTOR", value_parser = faults::hot)]
    hot: Vec<Hot>,
    /// A backend that dies: emul1@0.5s; may be given again, as all faults, and without a time from the start
    #[arg(long, value_name = "NAME@TIME", value_parser = faults::kill)]
    kill: Vec<Named>,
    /// A backend that hangs: emul1@0.5s for ever, emul1@0.5s+2s for two seconds
    #[arg(long, value_name = "NAME@TIME", value_parser = faults::hang)]
    hang: Vec<Named>,
    /// A backend that slows down: emul1*8@0.5s takes 8 times as long from then on, emul1@0.5s 4 times
    #[arg(long, value_name = "NAME*FACTOR@TIME", value_parser = faults::slow)]
    slow: Vec<Named>,
    /// A backend that computes wrong bytes: emul1@0.5s
    #[arg(long, value_name = "NAME@TIME", value_parser = faults::corrupt)]
    corrupt: Vec<Named>,
    /// The part of the items, 0 to 1, that a second backend does again to compare [default: 0, or 0.02 with --corrupt]
    #[arg(long, value_name = "PART", value_parser = part)]
    audit: Option<f64>,
    /// Sums of the bytes are made where they are computed and checked where they arrive
    #[arg(long)]
    checksums: bool,
    /// How long a backend may have a chunk at least before others may take it [default: 20ms, or 30s for prompts]
    #[arg(long, value_name = "TIME", value_parser = faults::time)]
    lease: Option<Duration>,
    /// How long no backend may answer before the run gives up [default: 30s, or 600s for prompts]
    #[arg(long, value_name = "TIME", value_parser = faults::time)]
    patience: Option<Duration>,
    /// How long a chunk should take at most [default: 12ms]
    #[arg(long, value_name = "TIME", value_parser = faults::time)]
    cap: Option<Duration>,
    /// What every chunk of an emulated backend costs beside its items
    #[arg(long, default_value = "50us", value_name = "TIME", value_parser = faults::time)]
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
    #[arg(long, value_name = "PART", value_parser = part, requires = "simulate")]
    jitter: Option<f64>,
    /// Do not run the job by the origin's rule as well (nor is it run where that would take more than a minute)
    #[arg(long)]
    no_origin: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Where backends are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Ground {
    /// Threads of this process
    Threads,
    /// Processes, on one host or several
    Mpi,
}

/// What can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum JobKind {
    /// Items take time, and nothing else
    Sleep,
    /// Items are hashed
    Hash,
    /// Items are rows of a product
    Matmul,
    /// Items are prompts for a model
    Prompts,
}

impl JobKind {
    fn name(self) -> &'static str {
        match self {
            JobKind::Sleep => "sleep",
            JobKind::Hash => "hash",
            JobKind::Matmul => "matmul",
            JobKind::Prompts => "prompts",
        }
    }

    /// Items where nobody says how many.
    fn items(self) -> usize {
        if self == JobKind::Matmul { 4096 } else { 1_000_000 }
    }

    /// How a run deals with time where nobody says. Answers take as long as they like, and a copy that is lost says
    /// so itself.
    fn options(self) -> Options {
        let (lease, patience) = (Duration::from_secs(30), Duration::from_secs(600));
        match self {
            JobKind::Prompts => Options { lease, patience, ..Options::STANDARD },
            _ => Options::STANDARD,
        }
    }
}

/// Reads `1000000`, `1_000_000` and `1M`.
fn items(text: &str) -> Result<usize, String> {
    let bad = || format!("'{text}': expected a number of items above zero, as in 1000000 or 1M");
    let units = [("k", 1000), ("M", 1_000_000), ("G", 1_000_000_000)];
    let unit = units.into_iter().find(|(unit, _)| text.ends_with(unit));
    let digits = unit.map_or(text, |(unit, _)| text.trim_end_matches(unit)).replace('_', "");
    let count = digits.parse::<usize>().map_err(|_| bad())?;
    count.checked_mul(unit.map_or(1, |(_, unit)| unit)).filter(|count| *count > 0).ok_or_else(bad)
}

/// Reads a part of a whole.
fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(part) if (0.0..=1.0).contains(&part) => Ok(part),
        _ => Err(format!("'{text}': expected a part from 0 to 1")),
    }
}

/// Refuses times that no run could keep to.
fn within(flag: &str, time: Duration, least: Duration, most: Duration) -> Result<(), Usage> {
    if (least..=most).contains(&time) {
        return Ok(());
    }
    Err(Usage(format!("{flag} {time:?}: expected {least:?} to {most:?}")))
}

impl Args {
    /// Whether this is the work of all ranks together.
    pub(crate) fn takes_ranks(&self) -> bool {
        self.fabric == Ground::Mpi
    }

    /// How the run deals with time, trouble and trust, if that makes sense.
    fn options(&self) -> Result<Options, Usage> {
        const HOUR: Duration = Duration::from_secs(3600);
        let standard = self.job.options();
        let options = Options {
            cap: self.cap.unwrap_or(standard.cap),
            lease: self.lease.unwrap_or(standard.lease),
            patience: self.patience.unwrap_or(standard.patience),
            checksums: self.checksums,
            sample: self.audit.unwrap_or(if self.corrupt.is_empty() { 0.0 } else { AUDIT }),
            seed: self.seed,
            ..standard
        };
        within("--cap", options.cap, Duration::from_micros(10), HOUR)?;
        within("--lease", options.lease, Duration::from_millis(1), HOUR)?;
        within("--patience", options.patience, options.lease, 24 * HOUR)?;
        within("--launch", self.launch, Duration::ZERO, Duration::from_secs(60))?;
        if let Some(time) = self.item_time {
            within("--item-time", time, Duration::from_nanos(1), HOUR)?;
        }
        Ok(options)
    }

    /// What goes wrong with each backend, in order of time.
    fn faults(&self, names: &[String]) -> Result<Vec<Vec<Fault>>, Usage> {
        let mut faults = vec![Vec::new(); names.len()];
        let all = [&self.kill, &self.hang, &self.slow, &self.corrupt];
        for Named { backend, fault } in all.into_iter().flatten() {
            let place = names.iter().position(|name| name == backend).ok_or_else(|| {
                Usage(format!("there is no backend '{backend}': there are {}", names.join(", ")))
            })?;
            faults[place].push(*fault);
        }
        faults.iter_mut().for_each(|faults| faults.sort_by_key(|fault| fault.at));
        Ok(faults)
    }

    /// What is asked for, with the faults sorted out.
    fn setup(&self) -> anyhow::Result<Setup> {
        let options = self.options()?;
        let names = self.backends.names();
        let faults = self.faults(&names)?;
        let (material, job) = Material::of(self, options)?;
        let items = job.items();
        let hot = self.hot.iter().map(|hot| hot.items(items)).collect();
        Ok(Setup {
            kind: self.job,
            material,
            job,
            kinds: self.backends.0.clone(),
            names,
            faults,
            hot,
            base: match self.item_time {
                Some(time) => 1.0 / time.as_secs_f64(),
                None => items as f64 / (IDEAL * self.backends.speeds()),
            },
            launch: self.launch,
            told: self.told,
            jitter: self.jitter.unwrap_or(0.0),
            seed: self.seed,
            threads: self.backends.cpu_threads(),
            origin: !self.no_origin && self.job != JobKind::Prompts,
            quiet: self.json,
        })
    }
}

/// What is asked for.
struct Setup {
    kind: JobKind,
    material: Material,
    job: Job,
    kinds: Vec<Kind>,
    names: Vec<String>,
    /// What goes wrong with each backend, in order of time.
    faults: Vec<Vec<Fault>>,
    hot: Vec<(std::ops::Range<usize>, f64)>,
    /// Items a second at 1x, where items sleep.
    base: f64,
    launch: Duration,
    told: bool,
    jitter: f64,
    seed: u64,
    /// Threads of all cpu backends.
    threads: usize,
    origin: bool,
    /// Nothing is shown before the end.
    quiet: bool,
}

impl Setup {
    /// Tasks that a backend works on at a time. A copy of a model answers one prompt after the other.
    fn lanes(&self, kind: Kind) -> usize {
        if self.kind == JobKind::Prompts { 1 } else { kind.lanes() }
    }
}

/// Runs it over ranks.
#[cfg(not(feature = "mpi"))]
fn over_ranks(_: &Args) -> anyhow::Result<()> {
    Err(crate::ranks::without_mpi().into())
}

#[cfg(feature = "mpi")]
use ranks::run as over_ranks;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.takes_ranks() {
        return over_ranks(args);
    }
    let setup = args.setup()?;
    let outcome: Outcome = if args.simulate { planned::run(&setup) } else { live::run(&setup)? };
    if args.json {
        crate::output::line(&outcome.to_json(&setup).to_string())?;
    } else {
        outcome.show(&setup)?;
    }
    end(outcome, &setup)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_read_with_and_without_units() {
        assert_eq!(items("1000000"), Ok(1_000_000));
        assert_eq!(items("1_000"), Ok(1000));
        assert_eq!((items("3k"), items("2M")), (Ok(3000), Ok(2_000_000)));
        for bad in
            ["", "0", "0M", "-1", "1.5", "M", "nan", "99999999999999999999", "99999999999999G"]
        {
            assert!(items(bad).is_err(), "{bad}");
        }
    }
}
