// SPDX-License-Identifier: Apache-2.0
//! `spanker simulate`: a saved plan in virtual time, with faults if one likes.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use anyhow::Context;
use serde_json::json;
use spanker_plan::{
    Conditions, Fault, Incident, Origin, Plan, PlanError, SimulatedTimes, Slow, Trace, simulate,
};
use spanker_topology::Seconds;

use crate::report::{self, Subject};
use crate::{Usage, output};
use spanker_engine::files;

/// More than any plan has.
const MOST_PLAN: u64 = 64 << 20;

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
    #[arg(long, value_name = "WHAT@WHEN", value_parser = fault)]
    fail: Vec<Fault>,
    /// A card that is slower: card1*1.5, or card1*1.5@10ms from then on; may be given again
    #[arg(long, value_name = "CARD*FACTOR", value_parser = slow)]
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

/// Reads `card2@50ms` and `link0-1@20ms`.
fn fault(text: &str) -> Result<Fault, String> {
    let bad = || format!("'{text}' is not like card2@50ms or link0-1@20ms");
    let (what, when) = text.split_once('@').ok_or_else(bad)?;
    let at = when.parse::<Seconds>().map_err(|error| error.to_string())?;
    if let Some(card) = what.strip_prefix("card") {
        return Ok(Fault::Card { card: card.parse().map_err(|_| bad())?, at });
    }
    let (from, to) = what.strip_prefix("link").and_then(|l| l.split_once('-')).ok_or_else(bad)?;
    let end = |text: &str| text.parse().map_err(|_| bad());
    Ok(Fault::Link { from: end(from)?, to: end(to)?, at })
}

/// Reads `card1*1.5` and `card1*1.5@10ms`.
fn slow(text: &str) -> Result<Slow, String> {
    let bad = || format!("'{text}' is not like card1*1.5 or card1*1.5@10ms");
    let (what, from) = match text.split_once('@') {
        None => (text, Seconds::ZERO),
        Some((what, from)) => (what, from.parse().map_err(|_| bad())?),
    };
    let (card, factor) =
        what.strip_prefix("card").and_then(|c| c.split_once('*')).ok_or_else(bad)?;
    let card = card.parse().map_err(|_| bad())?;
    Ok(Slow { card, factor: factor.parse().map_err(|_| bad())?, from })
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    files::check_outputs([&args.trace, &args.report])?;
    let text = files::read(&args.plan, MOST_PLAN)?;
    let plan = Plan::from_json(&text).with_context(|| args.plan.display().to_string())?;
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
    let trace = simulate(&plan, &conditions).map_err(|error| match error {
        PlanError::Request { what } => anyhow::Error::from(Usage(what)),
        other => other.into(),
    })?;
    let wall = begun.elapsed().as_secs_f64();
    output::progress_done();
    if let Some(path) = &args.trace {
        files::write(path, trace.to_perfetto(Origin::Predicted))?;
    }
    if let Some(path) = &args.report {
        report::write(path, &Subject { predicted: Some(&trace), ..Subject::of(&plan) })?;
    }
    let times = SimulatedTimes::of(&plan, &conditions, &trace);
    match args.json {
        true => output::json(&to_json(&times, &trace, wall))?,
        false => show(&times, &trace, wall, args)?,
    }
    if trace.tokens.len() < tokens as usize {
        let reason = trace.incidents.last().map_or("nothing happened", |last| &last.what);
        anyhow::bail!("{} of {tokens} tokens: {reason}", trace.tokens.len());
    }
    Ok(())
}

fn to_json(times: &SimulatedTimes, trace: &Trace, wall: f64) -> serde_json::Value {
    json!({
        "version": 1,
        "predicted_ms_per_token": times.predicted.millis(),
        "simulated_ms_per_token": times.simulated.map(Seconds::millis),
        "difference_percent": times.difference_percent(),
        "predicted_tokens_per_second": times.predicted_rate,
        "simulated_tokens_per_second": times.simulated_rate,
        "predicted_ttft_ms": times.prompt.map(|(_, predicted)| predicted.millis()),
        "simulated_ttft_ms": times.prompt.map(|(simulated, _)| simulated.millis()),
        "tokens_ms": trace.tokens.iter().map(|at| at * 1e3).collect::<Vec<_>>(),
        "end_ms": trace.end() * 1e3,
        "incidents": trace.incidents.iter()
            .map(|i| json!({ "at_ms": i.at * 1e3, "what": i.what })).collect::<Vec<_>>(),
        "events": trace.events,
        "wall_seconds": wall,
    })
}

fn show(times: &SimulatedTimes, trace: &Trace, wall: f64, args: &Args) -> anyhow::Result<()> {
    output::line(trace.to_chart(args.width.clamp(10, 400)).trim_end())?;
    output::line("")?;
    let row = |incident: &Incident| vec![Seconds(incident.at).to_string(), incident.what.clone()];
    if !trace.incidents.is_empty() {
        let rows = trace.incidents.iter().map(row).collect();
        output::line(&output::table(&["at", "what happened"], rows, &["at"]))?;
    }
    if let Some((simulated, predicted)) = times.prompt {
        let off = 100.0 * (simulated.0 / predicted.0 - 1.0);
        output::line(&format!(
            "first token: predicted {predicted}, simulated {simulated} ({off:+.2} %)"
        ))?;
    }
    if let (Some(simulated), Some(off)) = (times.simulated, times.difference_percent()) {
        let count = trace.tokens.len();
        output::line(&format!(
            "a token: predicted {}, simulated {simulated} ({off:+.2} %) over {count} {}",
            times.predicted,
            if count == 1 { "token" } else { "tokens" }
        ))?;
    }
    let rate = trace.events as f64 / wall / 1e6;
    output::line(&format!("{} events in {} ({rate:.1} M/s)", trace.events, Seconds(wall)))?;
    let saved = [&args.trace, &args.report].into_iter().flatten();
    saved.into_iter().try_for_each(|path| output::line(&format!("saved {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_and_slow_cards_are_read_as_people_write_them() {
        assert_eq!(fault("card2@50ms"), Ok(Fault::Card { card: 2, at: Seconds(0.050) }));
        assert_eq!(fault("link0-1@2s"), Ok(Fault::Link { from: 0, to: 1, at: Seconds(2.0) }));
        let wanted = Slow { card: 1, factor: 1.5, from: Seconds(0.010) };
        assert_eq!(slow("card1*1.5@10ms"), Ok(wanted));
        for bad in ["card2", "card@1s", "disk1@1s", "link0@1s", "card1@soon", "card-1@1s"] {
            assert!(fault(bad).is_err(), "{bad}");
        }
        for bad in ["card1", "1*2", "card1*fast", "card1*2@never"] {
            assert!(slow(bad).is_err(), "{bad}");
        }
    }
}
