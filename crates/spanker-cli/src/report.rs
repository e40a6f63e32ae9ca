// SPDX-License-Identifier: Apache-2.0
//! `spanker report`, and `--report FILE` of other commands: a plan, its run and what would change them as one HTML page.

use std::path::{Path, PathBuf};

use anyhow::Context;
use spanker_engine::files;
use spanker_plan::{Origin, Trace, compare, read_perfetto};
use spanker_report::{Report, Source, scenarios};

use crate::shell::quoted;
use crate::{VERSION, llm, output};

/// The largest file of a trace, in bytes.
pub(crate) const MOST_TRACE: u64 = 512 << 20;

/// Write one HTML page about a plan: the split, memory, time, the run beside its prediction, and what would change it
///
/// The page fetches nothing and works offline. 'plan', 'simulate' and 'run' write the same with --report FILE.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker plan tinyllama-1.1b --cards 4 --out plan.json
  spanker report plan.json --out report.html               what is predicted, and what would change it
  spanker report plan.json both.json --out report.html     with what ran: from 'spanker run --compare --trace both.json'
  spanker run -m smollm2-135m -p 'Hello' --cards 2 --report report.html    the same in one go

Every what-if on the page is a plan that was searched for; --no-what-if leaves them out.")]
pub(crate) struct Args {
    /// A plan from 'spanker plan --out'
    plan: PathBuf,
    /// Traces of a prediction, of a run, or of both, from 'spanker simulate --trace' and 'spanker run --trace'
    #[arg(value_name = "TRACE", num_args = 0..=2)]
    traces: Vec<PathBuf>,
    /// Where the page goes
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Leave out what other cards, links and weights would give
    #[arg(long)]
    no_what_if: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let out = Some(args.out.clone());
    files::check_outputs([&out])?;
    let plan = llm::saved(&args.plan)?;
    let (mut predicted, mut measured) = (None, None);
    for path in &args.traces {
        for (origin, trace) in traces(path)? {
            let place = if origin == Origin::Predicted { &mut predicted } else { &mut measured };
            if place.replace(trace).is_some() {
                let shown = path.display();
                anyhow::bail!("{shown}: a second trace of the same kind ({origin:?})");
            }
        }
    }
    let comparison = match (&predicted, &measured) {
        (Some(predicted), Some(measured)) => Some(compare(predicted, measured)?),
        _ => None,
    };
    let report = Report {
        predicted: predicted.as_ref(),
        measured: measured.as_ref(),
        comparison: comparison.as_ref(),
        ..Report::of(&plan)
    };
    write(&args.out, &report, !args.no_what_if)?;
    log!("saved {}: open it in a browser", args.out.display());
    Ok(())
}

/// The traces of a file.
pub(crate) fn traces(path: &Path) -> anyhow::Result<Vec<(Origin, Trace)>> {
    let read = read_perfetto(&files::read(path, MOST_TRACE)?);
    read.with_context(|| path.display().to_string())
}

/// Writes the page about a plan, if `what_if` with plans for what might be different.
pub(crate) fn write(path: &Path, report: &Report<'_>, what_if: bool) -> anyhow::Result<()> {
    let text = "planning what might be ..";
    let mut progress = |done, all| output::progress_of(done as u64, all as u64, text);
    let scenarios = what_if.then(|| scenarios(report.plan, &mut progress)).transpose()?;
    output::progress_done();
    let words = std::env::args_os().skip(1).map(|word| quoted(&word.to_string_lossy()));
    // The program goes by its name alone.
    let command: Vec<String> = std::iter::once("spanker".to_owned()).chain(words).collect();
    let source = Source { commands: &[command.join(" ")], version: VERSION };
    let report = Report { scenarios: scenarios.as_ref(), source, ..*report };
    Ok(files::write(path, report.page()?)?)
}
