// SPDX-License-Identifier: Apache-2.0
//! `spanker compare`: a predicted trace beside a measured one, and where the difference comes from.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::Context;
use spanker_engine::files;
use spanker_plan::{CompareError, Origin, Trace, compare};

use crate::report::{MOST_TRACE, traces};
use crate::{output, ranges, refuse};

/// What to do about traces of different things.
const OTHER: &str = "predict what ran: 'spanker run --compare' does; or give 'spanker plan' the fabric, the cards and --prompt with \
                     the prompt's tokens, and 'spanker simulate' --prompt";

/// Compare a predicted trace with a measured one and say where the difference comes from
///
/// Steps and operators of the two are matched by number. A gap is measured minus predicted: positive means
/// slower than predicted. The causes add up to it: memory, compute, link latency, link bandwidth,
/// waiting for a card, the host, time that is not in the program, and what is left unexplained. The column
/// of the whole follows the critical path of the run; the others are the same time as each card saw it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker run -m smollm2-135m -p 'Hello' --cards 2 --compare --trace both.json    a table, and a file with both traces
  spanker compare both.json both.json --tokens 8..15 --json                       the same from the file, for some tokens
  spanker compare predicted.json measured.json                                    from two files

A prediction by itself has the prompt's length, not its tokens: 'spanker plan --prompt N --out plan.json' and
'spanker simulate plan.json --prompt --trace predicted.json' are for a run with N tokens of prompt.

docs/compare.md says how causes are found and what --json prints.")]
pub(crate) struct Args {
    /// A trace from 'spanker simulate --trace'
    predicted: PathBuf,
    /// A trace from 'spanker run --trace', or from another simulation
    measured: PathBuf,
    /// Tokens to compare: a number or a range as in 8..15, both ends included [default: all]
    #[arg(long, value_name = "FROM..TO", value_parser = ranges::tokens)]
    tokens: Option<RangeInclusive<u32>>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let predicted = read(&args.predicted, &[Origin::Predicted])?;
    // A simulation under other conditions may stand for the run.
    let measured = read(&args.measured, &[Origin::Measured, Origin::Predicted])?;
    let mut comparison = compare(&predicted, &measured).map_err(|error| match error {
        // Programs of a prompt and of a token differ, and so do those of threads and of cards.
        CompareError::Cards { .. } | CompareError::Tokens { .. } | CompareError::Beyond { .. } => {
            anyhow::anyhow!("{error}\nhint: {OTHER}")
        }
        error => error.into(),
    })?;
    if let Some(range) = &args.tokens {
        comparison = comparison.of_tokens(range);
        if comparison.steps.is_empty() {
            let why = comparison.left_out.first().map_or("the traces have none", |left| &left.why);
            let (from, to) = (range.start(), range.end());
            return refuse(format!("--tokens {from}..{to}: no step to compare: {why}"));
        }
    }
    if args.json {
        return output::line(&comparison.to_json().to_string());
    }
    comparison.lines(&[]).iter().try_for_each(|line| output::line(line))
}

/// Reads the trace of a file that is of the first of these origins.
fn read(path: &Path, origins: &[Origin]) -> anyhow::Result<Trace> {
    let mut traces = traces(path)?;
    let wanted = |origin: &Origin| traces.iter().position(|(found, _)| found == origin);
    match origins.iter().find_map(wanted) {
        Some(index) => Ok(traces.swap_remove(index).1),
        // The traces are the other way round.
        None => Trace::from_perfetto(&files::read(path, MOST_TRACE)?, origins[0])
            .with_context(|| path.display().to_string()),
    }
}
