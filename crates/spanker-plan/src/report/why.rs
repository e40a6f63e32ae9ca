// SPDX-License-Identifier: Apache-2.0
//! Why the best plan is the best, as one would tell a colleague.

use spanker_topology::{Bytes, Seconds};

use super::{PlanReport, significant};
use crate::{Candidate, Exchanged, Explanation, Objective, Plan, PlanError, Resource, Strategy};

impl PlanReport<'_> {
    /// Why the plan that is proposed is the best, line by line; nothing without such a plan.
    ///
    /// # Errors
    /// [`PlanError`] if the plan is none for the model and the cards.
    pub fn reasons(&self) -> Result<Vec<String>, PlanError> {
        let (Some(best), Some(explained)) = (self.proposed, self.explained) else {
            return Ok(Vec::new());
        };
        let mut lines = vec![binds(self, explained)];
        lines.extend(alone(self, best));
        lines.extend(others(self, best, explained));
        lines.push(worth(self, explained));
        lines.extend(exchanges(self, best)?);
        lines.extend(context(self, best));
        lines.extend(trust(self));
        Ok(lines)
    }
}

fn percent(part: f64) -> String {
    format!("{:.0} %", 100.0 * part)
}

fn binds(report: &PlanReport<'_>, explained: &Explanation) -> String {
    let (what, part) = explained.binds;
    let time = match report.request.objective {
        Objective::Ttft => "the way to the first token",
        _ => "a token",
    };
    format!("What binds is {what}: {} of the time of {time}.", percent(part))
}

/// How several cards compare with one.
fn alone(report: &PlanReport<'_>, best: &Candidate) -> Option<String> {
    let cards = best.layout.cards().len();
    if cards < 2 || report.request.objective == Objective::Ttft || best.layout.replicas.len() > 1 {
        return None;
    }
    let alone = report.candidate(Strategy::OneCard)?;
    let terms = &best.prediction.terms;
    let times = alone.prediction.token.0 / best.prediction.token.0;
    let note = if alone.prediction.fits() { "" } else { ", if it had the memory," };
    Some(format!(
        "{cards} cards take {} where one{note} would take {}: {times:.1} times as fast. Links cost {} of it.",
        best.prediction.token,
        alone.prediction.token,
        percent(terms.communication.0 / terms.total().0),
    ))
}

fn others(report: &PlanReport<'_>, best: &Candidate, explained: &Explanation) -> Vec<String> {
    let next = explained.runner_up.and_then(|strategy| report.candidate(strategy)).map(|next| {
        let behind = 100.0 * (explained.runner_up_behind - 1.0);
        format!("Next comes {}, {behind:.1} % behind.", next.words())
    });
    next.into_iter().chain(ahead(report, best, explained)).collect()
}

/// How far the best is ahead of another, and until when.
fn ahead(report: &PlanReport<'_>, best: &Candidate, explained: &Explanation) -> Option<String> {
    let even = explained.break_even.as_ref()?;
    let other = report.candidate(even.against)?;
    if best.layout.tensor_ways() < 2 && best.layout.pipeline_stages() < 2 {
        return None;
    }
    let mut text = format!("Against {} it is {:.1} times as fast", other.words(), even.ahead);
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
    Some(format!("{text}{}.", now.map_or_else(String::new, |now| format!(" (it is {now} now)"))))
}

/// The latency of the slowest wire.
fn step_latency(report: &PlanReport<'_>) -> Option<Seconds> {
    report.cluster.wires().iter().map(|wire| wire.latency).reduce(Seconds::max)
}

fn worth(report: &PlanReport<'_>, explained: &Explanation) -> String {
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
        true => "A tenth more of any one resource changes next to nothing.".into(),
        false => format!("A tenth better, in {unit}: {}.", told.join(", ")),
    }
}

fn exchanges(report: &PlanReport<'_>, best: &Candidate) -> Result<Vec<String>, PlanError> {
    let (model, cluster) = (report.model.clone(), report.cluster.clone());
    let plan = Plan::new(model, cluster, report.request.clone(), best.layout.clone())?;
    let rows = report.request.prompt.min(report.request.batch) as usize;
    let (token, prompt) = (first(plan.exchanges()), first(plan.exchanges_of(rows)));
    if token.is_empty() {
        return Ok(Vec::new());
    }
    let mut lines = vec![format!("Exchanges: {}.", list(&token))];
    let algorithms = |list: &[Exchanged]| list.iter().map(|one| one.algorithm).collect::<Vec<_>>();
    if algorithms(&token)[..] != algorithms(&prompt)[..] {
        lines.push(format!("Exchanges of {rows} rows of a prompt: {}.", list(&prompt)));
    }
    Ok(lines)
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

fn context(report: &PlanReport<'_>, best: &Candidate) -> Option<String> {
    let p = &best.prediction;
    if p.token_at_context.0 < p.token.0 * 1.005 {
        return None;
    }
    let late = significant(p.tokens_per_second * p.token.0 / p.token_at_context.0);
    let context = report.request.context;
    let text = "attention grows with it.";
    Some(format!("At the end of {context} tokens of context it is {late} tokens/s: {text}"))
}

/// Where the numbers of each kind of card come from.
fn trust(report: &PlanReport<'_>) -> Vec<String> {
    let mut seen: Vec<&str> = Vec::new();
    let mut lines = Vec::new();
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
        lines.push(format!(
            "{} rests on: memory {} {} (confidence {}){link}.",
            profile.name, memory.value, memory.provenance, memory.confidence
        ));
    }
    lines
}
