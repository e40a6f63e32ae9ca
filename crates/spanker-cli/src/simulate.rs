// SPDX-License-Identifier: Apache-2.0
//! `spanker simulate`: a saved plan in virtual time, with faults if one likes.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use serde::Serialize;
use spanker_engine::files;
use spanker_plan::{Conditions, Fault, Incident, Origin, SimulationReport, Slow, Trace, simulate};
use spanker_report::Report;
use spanker_topology::Seconds;

use crate::{llm, output, report};

/// Run a saved plan in virtual time and compare it with its prediction
///
/// Nothing is measured here: the simulator follows every operator and message over the links with the
/// profiles' numbers. Messages that meet on a link wait for each other; cards and links may die.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  spanker plan tinyllama-1.1b --cards 4 --out plan.json
  spanker simulate plan.json
  spanker simulate plan.json --fail card2@50ms --trace trace.json    open it in ui.perfetto.dev
  spanker simulate plan.json --slow card1*1.5 --ber 1e-6 --seed 7 --tokens 16")]
pub(crate) struct Args {
    /// A plan from 'spanker plan --out'
    plan: PathBuf,
    /// Save everything that every card did, in the JSON form that Perfetto opens
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write a page about the plan and this simulation
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// What chance starts from: the same seed gives the same run
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Something that dies: card2@50ms, or link0-1@20ms; may be given again
    #[arg(long, value_name = "WHAT@WHEN", value_parser = Fault::from_str)]
    fail: Vec<Fault>,
    /// A card that is slower: card1*1.5, or card1*1.5@10ms from then on; may be given again
    #[arg(long, value_name = "CARD*FACTOR", value_parser = Slow::from_str)]
    slow: Vec<Slow>,
    /// The largest part by which a piece of work may take longer, at random
    #[arg(long, default_value_t = 0.0, value_name = "PART")]
    jitter: f64,
    /// The chance that a bit flips on a link, where the profile knows frames
    #[arg(long, default_value_t = 0.0, value_name = "RATE")]
    ber: f64,
    /// Tokens of each sequence to decode [default: 1; 8 where sequences share a pipeline]
    #[arg(long, value_name = "N")]
    tokens: Option<u32>,
    /// Begin with the prompt
    #[arg(long)]
    prompt: bool,
    /// How long after the last sign of life a loss is noticed
    #[arg(long, default_value = "10ms", value_name = "TIME", value_parser = Seconds::from_str)]
    deadline: Seconds,
    /// Columns of the chart
    #[arg(long, default_value_t = 72, value_name = "N")]
    width: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    files::check_outputs([&args.trace, &args.report])?;
    let plan = llm::saved(&args.plan)?;
    // A pipeline gives its first token late and the others at its own pace.
    let shared = plan.predict().waiting > Seconds::ZERO;
    let tokens = args.tokens.unwrap_or(if shared { 8 } else { 1 });
    let conditions = Conditions {
        tokens,
        prompt: args.prompt,
        seed: args.seed,
        jitter: args.jitter,
        slow: args.slow.clone(),
        bit_error_rate: args.ber,
        faults: args.fail.clone(),
        deadline: args.deadline,
        record: args.trace.is_some() || args.report.is_some() || !args.json,
    };
    output::progress("simulating ..");
    let begun = Instant::now();
    let trace = simulate(&plan, &conditions).map_err(crate::of_plan)?;
    let wall = begun.elapsed().as_secs_f64();
    output::progress_done();
    if let Some(path) = &args.trace {
        files::write(path, trace.to_perfetto(Origin::Predicted))?;
    }
    if let Some(path) = &args.report {
        report::write(path, &Report { predicted: Some(&trace), ..Report::of(&plan) }, true)?;
    }
    let report = SimulationReport::of(&plan, &conditions, &trace);
    output::report(args.json, &Simulated { report, wall_seconds: wall }, |simulated| {
        show(simulated, &trace, args)
    })?;
    if trace.tokens.len() < tokens as usize {
        let reason = trace.incidents.last().map_or("nothing happened", |last| &last.what);
        anyhow::bail!("{} of {tokens} tokens: {reason}", trace.tokens.len());
    }
    Ok(())
}

/// The schema of `--json`.
#[derive(Debug, Serialize)]
struct Simulated {
    #[serde(flatten)]
    report: SimulationReport,
    wall_seconds: f64,
}

fn show(simulated: &Simulated, trace: &Trace, args: &Args) -> anyhow::Result<()> {
    output::line(trace.to_chart(args.width.clamp(10, 400)).trim_end())?;
    output::line("")?;
    let row = |incident: &Incident| vec![Seconds(incident.at).to_string(), incident.what.clone()];
    if !trace.incidents.is_empty() {
        let rows = trace.incidents.iter().map(row).collect();
        output::table(&["at", "what happened"], rows, &["at"])?;
    }
    output::lines(&simulated.report.lines())?;
    let wall = simulated.wall_seconds;
    let rate = trace.events as f64 / wall / 1e6;
    say!("{} events in {} ({rate:.1} M/s)", trace.events, Seconds(wall))?;
    let mut saved = [&args.trace, &args.report].into_iter().flatten();
    saved.try_for_each(|path| say!("saved {}", path.display()))
}
