// SPDX-License-Identifier: Apache-2.0
//! The table of candidates, and the answer in a sentence or two.

use spanker_plan::{Candidate, CardMemory, Objective, PlanReport, Remedies, Strategy, significant};
use spanker_topology::Bytes;

use crate::output::line;

pub(super) fn show(report: &PlanReport<'_>) -> anyhow::Result<()> {
    let (model, request) = (report.model, report.request);
    let quant = spanker_engine::shape::stored(model);
    line(&format!(
        "{} as {quant}: {} layers, {} of weights, {} read for a token",
        model.name,
        model.layers.len(),
        Bytes(model.weight_bytes()),
        Bytes(model.read_per_token()),
    ))?;
    let sequences = match request.sequences {
        1 => "one sequence".to_owned(),
        more => format!("{more} sequences"),
    };
    let wired = match report.cluster.cards() {
        1 => String::new(),
        _ => format!(", {}", report.cluster.shape()),
    };
    line(&format!(
        "{}{wired}; {sequences} of up to {} tokens; objective {}\n",
        report.cluster.describe(),
        request.context,
        request.objective
    ))?;
    line("                                                  ---- ms for a token ----")?;
    line(
        "  strategy        cards  split stages copies   tok/s  memory compute  links  fixed     ttft  fullest card",
    )?;
    for candidate in &report.choice.candidates {
        let proposed = report.proposed.is_some_and(|proposed| proposed == candidate);
        line(&row(candidate, if proposed { '*' } else { ' ' }))?;
    }
    line("")?;
    match (report.proposed, report.remedy) {
        (Some(best), _) => {
            answer(report, best)?;
            running(report, best)?;
        }
        (None, Some(remedy)) => infeasible(report, remedy)?,
        (None, None) => line("no layout of this model on these cards was found")?,
    }
    for note in report.cluster.notes() {
        line(&format!("note: {note}"))?;
    }
    if request.context > model.context {
        let (context, trained) = (request.context, model.context);
        line(&format!(
            "note: a context of {context} is longer than the {trained} it was trained for"
        ))?;
    }
    if !report.choice.exact {
        line("note: there are too many ways to try all; the most promising were kept")?;
    }
    Ok(())
}

fn row(candidate: &Candidate, mark: char) -> String {
    let (layout, p) = (&candidate.layout, &candidate.prediction);
    let fullest = p.memory.iter().max_by(|a, b| part(a).total_cmp(&part(b)));
    let fullest = fullest.map_or_else(String::new, |memory| {
        let percent = 100.0 * part(memory);
        let note = match p.fits() {
            false => "  does not fit",
            true if layout.not_runnable().is_some() => "  for spanker serve",
            true => "",
        };
        format!("{percent:>4.0} % of {}{note}", memory.capacity)
    });
    format!(
        "{mark} {:<15} {:>5} {:>6} {:>6} {:>6} {:>7} {:>7} {:>7} {:>6} {:>6} {:>8}  {fullest}",
        candidate.strategy,
        layout.cards().len(),
        layout.tensor_ways(),
        layout.pipeline_stages(),
        layout.replicas.len(),
        significant(p.tokens_per_second),
        significant(p.terms.memory.millis()),
        significant(p.terms.compute.millis()),
        significant(p.terms.communication.millis()),
        significant(p.terms.fixed.millis()),
        p.ttft.to_string(),
    )
}

fn part(memory: &CardMemory) -> f64 {
    memory.used().0 as f64 / memory.capacity.0 as f64
}

fn answer(report: &PlanReport<'_>, best: &Candidate) -> anyhow::Result<()> {
    let p = &best.prediction;
    let rate = significant(p.tokens_per_second);
    let first = match report.request.objective {
        Objective::Ttft => format!("{}: first token after {}", best.words(), p.ttft),
        _ => format!("{}: {rate} tokens/s", best.words()),
    };
    let band =
        report.band().filter(|(low, high)| high > low).map_or_else(String::new, |(low, high)| {
            format!(" ({} for a token, {low} to {high} over the profiles' ranges)", p.token)
        });
    line(&format!("{first}{band}"))?;
    let plain = report.choice.candidates.iter().find(|c| c.strategy == Strategy::Pipeline);
    let plain =
        plain.filter(|plain| best.strategy != Strategy::Pipeline && plain.prediction.fits());
    if let Some(plain) = plain {
        let rate = significant(plain.prediction.tokens_per_second);
        line(&format!("{} would give {rate} tokens/s", plain.words()))?;
    }
    if best.layout.cards().len() < report.cluster.cards() {
        let used = best.layout.cards();
        let unused: Vec<usize> =
            (0..report.cluster.cards()).filter(|card| !used.contains(card)).collect();
        line(&format!("left out, because they would not help: cards {unused:?}"))?;
    }
    let uneven = best.layout.stages().any(|stage| {
        let sizes = stage.group.shards.iter().map(|shard| shard.ffn.end - shard.ffn.start);
        let (least, most) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
        most as f64 > 1.02 * least as f64
    });
    if uneven || best.layout.pipeline_stages() > 1 {
        shares(best)?;
    }
    line(&format!("loading the weights over the host links takes {}", p.load))
}

/// What of this a run does, where that is less than what was priced.
fn running(report: &PlanReport<'_>, proposed: &Candidate) -> anyhow::Result<()> {
    if let Some(why) = proposed.layout.not_runnable() {
        return line(&format!("'spanker serve' runs this, 'spanker run' does not: {why}"));
    }
    if report.request.sequences > 1 {
        let rate = significant(report.alone(proposed)?.tokens_per_second);
        let sequences = report.request.sequences;
        line(&format!(
            "'spanker run' has one sequence at a time: {rate} tokens/s; the table is for {sequences} at a time"
        ))?;
    }
    let better = report.choice.best().filter(|best| *best != proposed);
    if let Some((best, why)) = better.and_then(|best| Some((best, best.layout.not_runnable()?))) {
        let rate = significant(best.prediction.tokens_per_second);
        let text = format!("{} would give {rate} tokens/s with 'spanker serve'", best.words());
        line(&format!("{text}: {why} (--copies proposes it here)"))?;
    }
    Ok(())
}

/// Who holds what, where that is not the same for all.
fn shares(best: &Candidate) -> anyhow::Result<()> {
    for (copy, stages) in best.layout.replicas.iter().enumerate() {
        for stage in stages {
            let whole = stage.group.shards.last().map_or(1, |shard| shard.ffn.end.max(1));
            let each = stage.group.cards.iter().zip(&stage.group.shards).map(|(card, shard)| {
                let part = (shard.ffn.end - shard.ffn.start) as f64 / whole as f64;
                format!("card {card}: {:.0} %", 100.0 * part)
            });
            let name = match best.layout.replicas.len() {
                1 => String::new(),
                _ => format!("copy {copy}, "),
            };
            let each: Vec<String> = each.collect();
            let (first, last) = (stage.layers.start, stage.layers.end - 1);
            line(&format!("  {name}layers {first} to {last}: {}", each.join(", ")))?;
        }
    }
    Ok(())
}

fn infeasible(report: &PlanReport<'_>, remedy: &Remedies) -> anyhow::Result<()> {
    let (needed, usable) = remedy.total;
    line(&format!(
        "it does not fit: card {} would be {} over its memory; the model, its context and buffers need {needed}, the cards have {usable} for them",
        remedy.card, remedy.over
    ))?;
    let kind = &report.cluster.profile(report.cluster.cards() - 1).name;
    let mut would: Vec<String> = Vec::new();
    if let Some(cards) = remedy.cards {
        would.push(format!("{cards} cards ({} more of {kind})", cards - report.cluster.cards()));
    }
    if let Some(context) = remedy.context {
        would.push(format!("a context of {context} tokens instead of {}", report.request.context));
    }
    if let Some(quant) = remedy.quant {
        would.push(format!("weights as {quant}"));
    }
    match would.is_empty() {
        true => {
            line("neither 256 cards, nor a shorter context, nor a smaller quantisation would do")
        }
        false => line(&format!("what would do: {}", would.join("; or "))),
    }
}
