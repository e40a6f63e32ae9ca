// SPDX-License-Identifier: Apache-2.0
//! Why the best plan is the best, as one would tell a colleague.

use spanker_plan::{Candidate, Exchanged, Explanation, Objective, Plan, Resource, Strategy};
use spanker_topology::{Bytes, Seconds};

use super::report::Report;
use super::table::{significant, words};
use crate::output::line;

pub(super) fn show(report: &Report<'_>) -> anyhow::Result<()> {
    let (Some(best), Some(explained)) = (report.proposed, report.explained) else {
        return Ok(());
    };
    line("\nwhy")?;
    binds(report, best, explained)?;
    others(report, best, explained)?;
    worth(report, explained)?;
    exchanges(report, best)?;
    context(report, best)?;
    trust(report)
}

fn percent(part: f64) -> String {
    format!("{:.0} %", 100.0 * part)
}

fn binds(report: &Report<'_>, best: &Candidate, explained: &Explanation) -> anyhow::Result<()> {
    let (what, part) = explained.binds;
    let time = match report.request.objective {
        Objective::Ttft => "the way to the first token",
        _ => "a token",
    };
    line(&format!("  What binds is {what}: {} of the time of {time}.", percent(part)))?;
    let terms = &best.prediction.terms;
    if best.layout.cards().len() > 1 && report.request.objective != Objective::Ttft {
        let alone = report.choice.candidates.iter().find(|c| c.strategy == Strategy::OneCard);
        if let Some(alone) = alone.filter(|_| best.layout.replicas.len() == 1) {
            let times = alone.prediction.token.0 / best.prediction.token.0;
            let cards = best.layout.cards().len();
            let note = if alone.prediction.fits() { "" } else { ", if it had the memory," };
            line(&format!(
                "  {cards} cards take {} where one{note} would take {}: {times:.1} times as fast. Links cost {} of it.",
                best.prediction.token,
                alone.prediction.token,
                percent(terms.communication.0 / terms.total().0),
            ))?;
        }
    }
    Ok(())
}

fn others(report: &Report<'_>, best: &Candidate, explained: &Explanation) -> anyhow::Result<()> {
    let find = |strategy: Strategy| {
        report.choice.candidates.iter().find(|candidate| candidate.strategy == strategy)
    };
    if let Some(next) = explained.runner_up.and_then(find) {
        let behind = 100.0 * (explained.runner_up_behind - 1.0);
        line(&format!("  Next comes {}, {behind:.1} % behind.", words(next)))?;
    }
    let Some(even) = &explained.break_even else { return Ok(()) };
    let Some(other) = find(even.against) else { return Ok(()) };
    let uses_links = best.layout.tensor_ways() > 1 || best.layout.pipeline_stages() > 1;
    if !uses_links {
        return Ok(());
    }
    let mut text = format!("  Against {} it is {:.1} times as fast", words(other), even.ahead);
    match (even.latency, even.ring_latency) {
        (Some(latency), Some(ring)) if (ring.0 / latency.0 - 1.0).abs() > 0.02 => {
            text += &format!(
                ", and ahead until the step latency passes {ring} with ring exchanges, {latency} with the best ones"
            );
        }
        (Some(latency), _) | (None, Some(latency)) => {
            text += &format!(", and ahead until the step latency passes {latency}");
        }
        (None, None) if even.always => text += ", and ahead at any step latency up to ten seconds",
        (None, None) => {}
    }
    let now = step_latency(report);
    line(&format!("{text}{}.", now.map_or_else(String::new, |now| format!(" (it is {now} now)"))))
}

/// The latency of the slowest wire.
fn step_latency(report: &Report<'_>) -> Option<Seconds> {
    report.cluster.wires().iter().map(|wire| wire.latency).reduce(Seconds::max)
}

fn worth(report: &Report<'_>, explained: &Explanation) -> anyhow::Result<()> {
    let mut gains: Vec<(Resource, f64)> = explained.sensitivity.clone();
    gains.sort_by(|a, b| b.1.total_cmp(&a.1));
    let alone = |wanted: Resource| gains.iter().find(|(r, _)| *r == wanted).map_or(0.0, |g| g.1);
    let apart = alone(Resource::MemoryBandwidth).max(alone(Resource::Compute));
    let both_say_more = alone(Resource::MemoryAndCompute) > apart + 0.5;
    let told: Vec<String> = gains
        .iter()
        .filter(|(resource, _)| both_say_more || *resource != Resource::MemoryAndCompute)
        .filter(|(_, gain)| *gain >= 0.05)
        .map(|(resource, gain)| format!("{} +{gain:.1} %", resource.name()))
        .collect();
    let unit = match report.request.objective {
        Objective::Ttft => "speed to the first token",
        _ => "tokens/s",
    };
    match told.is_empty() {
        true => line("  A tenth more of any one resource changes next to nothing."),
        false => line(&format!("  A tenth better, in {unit}: {}.", told.join(", "))),
    }
}

fn exchanges(report: &Report<'_>, best: &Candidate) -> anyhow::Result<()> {
    let (model, cluster) = (report.model.clone(), report.cluster.clone());
    let plan = Plan::new(model, cluster, report.request.clone(), best.layout.clone())?;
    let rows = report.request.prompt.min(report.request.batch) as usize;
    let (token, prompt) = (first(plan.exchanges()), first(plan.exchanges_of(rows)));
    if token.is_empty() {
        return Ok(());
    }
    line(&format!("  Exchanges: {}.", list(&token)))?;
    let algorithms = |list: &[Exchanged]| list.iter().map(|one| one.algorithm).collect::<Vec<_>>();
    if algorithms(&token)[..] == algorithms(&prompt)[..] {
        return Ok(());
    }
    line(&format!("  Exchanges of {rows} rows of a prompt: {}.", list(&prompt)))
}

/// The first stage whose cards exchange something.
fn first(stages: Vec<Vec<Exchanged>>) -> Vec<Exchanged> {
    stages.into_iter().find(|list| !list.is_empty()).unwrap_or_default()
}

fn list(exchanges: &[Exchanged]) -> String {
    let words = exchanges.iter().map(|exchange| {
        format!(
            "{} after {} ({}, {}, {})",
            exchange.collective,
            exchange.after,
            Bytes(exchange.bytes as u64),
            exchange.algorithm,
            exchange.time
        )
    });
    words.collect::<Vec<_>>().join("; ")
}

fn context(report: &Report<'_>, best: &Candidate) -> anyhow::Result<()> {
    let p = &best.prediction;
    if p.token_at_context.0 < p.token.0 * 1.005 {
        return Ok(());
    }
    let late = significant(p.tokens_per_second * p.token.0 / p.token_at_context.0);
    line(&format!(
        "  At the end of {} tokens of context it is {late} tokens/s: attention grows with it.",
        report.request.context
    ))
}

fn trust(report: &Report<'_>) -> anyhow::Result<()> {
    let mut seen: Vec<&str> = Vec::new();
    for card in 0..report.cluster.cards() {
        let profile = report.cluster.profile(card);
        if seen.contains(&profile.name.as_str()) {
            continue;
        }
        seen.push(&profile.name);
        let memory = &profile.memory.bandwidth;
        let link = profile.link.as_ref().map_or_else(String::new, |link| {
            let latency = &link.latency;
            format!(
                "; link latency {} {} (confidence {})",
                latency.value, latency.provenance, latency.confidence
            )
        });
        line(&format!(
            "  {} rests on: memory {} {} (confidence {}){link}.",
            profile.name, memory.value, memory.provenance, memory.confidence
        ))?;
    }
    Ok(())
}
