// SPDX-License-Identifier: Apache-2.0
//! What a search found as people read it: the table of candidates, and the answer in a sentence or two.

use spanker_topology::Bytes;

use super::{PlanReport, significant};
use crate::{Candidate, CardMemory, Objective, PlanError, Remedies, Strategy};

impl PlanReport<'_> {
    /// The table of candidates and the answer, line by line.
    ///
    /// # Errors
    /// [`PlanError`] if a candidate is none for the model and the cards.
    pub fn lines(&self) -> Result<Vec<String>, PlanError> {
        let mut lines = asked(self).to_vec();
        lines.extend([
            "                                                  ---- ms for a token ----".into(),
            "  strategy        cards  split stages copies   tok/s  memory compute  links  fixed     ttft  fullest card"
                .into(),
        ]);
        lines.extend(self.choice.candidates.iter().map(|candidate| {
            let proposed = self.proposed.is_some_and(|proposed| proposed == candidate);
            row(candidate, if proposed { '*' } else { ' ' })
        }));
        lines.push(String::new());
        match (self.proposed, self.remedy) {
            (Some(best), _) => {
                lines.extend(answer(self, best));
                lines.extend(running(self, best)?);
            }
            (None, Some(remedy)) => lines.extend(infeasible(self, remedy)),
            (None, None) => lines.push("no layout of this model on these cards was found".into()),
        }
        lines.extend(notes(self));
        Ok(lines)
    }
}

/// The model, the cards and the request.
fn asked(report: &PlanReport<'_>) -> [String; 2] {
    let (model, request, cluster) = (report.model, report.request, report.cluster);
    let quant = model.layers.first().map_or("?", |layer| layer.up.quant.name());
    let sequences = match request.sequences {
        1 => "one sequence".to_owned(),
        more => format!("{more} sequences"),
    };
    let wired = match cluster.cards() {
        1 => String::new(),
        _ => format!(", {}", cluster.shape()),
    };
    [
        format!(
            "{} as {quant}: {} layers, {} of weights, {} read for a token",
            model.name,
            model.layers.len(),
            Bytes(model.weight_bytes()),
            Bytes(model.read_per_token()),
        ),
        format!(
            "{}{wired}; {sequences} of up to {} tokens; objective {}\n",
            cluster.describe(),
            request.context,
            request.objective
        ),
    ]
}

/// What else there is to know.
fn notes(report: &PlanReport<'_>) -> Vec<String> {
    let (context, trained) = (report.request.context, report.model.context);
    let mut notes = report.cluster.notes().to_vec();
    if context > trained {
        notes.push(format!(
            "a context of {context} is longer than the {trained} it was trained for"
        ));
    }
    if !report.choice.exact {
        notes.push("there are too many ways to try all; the most promising were kept".into());
    }
    notes.iter().map(|note| format!("note: {note}")).collect()
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

fn answer(report: &PlanReport<'_>, best: &Candidate) -> Vec<String> {
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
    let mut lines = vec![format!("{first}{band}")];
    let plain = report.candidate(Strategy::Pipeline);
    if let Some(plain) =
        plain.filter(|plain| plain.strategy != best.strategy && plain.prediction.fits())
    {
        let rate = significant(plain.prediction.tokens_per_second);
        lines.push(format!("{} would give {rate} tokens/s", plain.words()));
    }
    if best.layout.cards().len() < report.cluster.cards() {
        let used = best.layout.cards();
        let unused: Vec<usize> =
            (0..report.cluster.cards()).filter(|card| !used.contains(card)).collect();
        lines.push(format!("left out, because they would not help: cards {unused:?}"));
    }
    let uneven = best.layout.stages().any(|stage| {
        let sizes = stage.group.shards.iter().map(|shard| shard.ffn.end - shard.ffn.start);
        let (least, most) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
        most as f64 > 1.02 * least as f64
    });
    if uneven || best.layout.pipeline_stages() > 1 {
        lines.extend(shares(best));
    }
    lines.push(format!("loading the weights over the host links takes {}", p.load));
    lines
}

/// What of this a run does, where that is less than what was priced.
fn running(report: &PlanReport<'_>, proposed: &Candidate) -> Result<Vec<String>, PlanError> {
    if let Some(why) = proposed.layout.not_runnable() {
        return Ok(vec![format!("'spanker serve' runs this, 'spanker run' does not: {why}")]);
    }
    let mut lines = Vec::new();
    if report.request.sequences > 1 {
        let rate = significant(report.alone(proposed)?.tokens_per_second);
        let sequences = report.request.sequences;
        lines.push(format!(
            "'spanker run' has one sequence at a time: {rate} tokens/s; the table is for {sequences} at a time"
        ));
    }
    let better = report.choice.best().filter(|best| *best != proposed);
    if let Some((best, why)) = better.and_then(|best| Some((best, best.layout.not_runnable()?))) {
        let rate = significant(best.prediction.tokens_per_second);
        let words = best.words();
        lines.push(format!(
            "{words} would give {rate} tokens/s with 'spanker serve': {why} (--copies proposes it here)"
        ));
    }
    Ok(lines)
}

/// Who holds what, where that is not the same for all.
fn shares(best: &Candidate) -> Vec<String> {
    let copies = best.layout.replicas.iter().enumerate();
    let stages = copies.flat_map(|(copy, stages)| stages.iter().map(move |stage| (copy, stage)));
    let words = stages.map(|(copy, stage)| {
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
        format!("  {name}layers {first} to {last}: {}", each.join(", "))
    });
    words.collect()
}

fn infeasible(report: &PlanReport<'_>, remedy: &Remedies) -> [String; 2] {
    let (needed, usable) = remedy.total;
    let lacks = format!(
        "it does not fit: card {} would be {} over its memory; the model, its context and buffers need {needed}, the cards have {usable} for them",
        remedy.card, remedy.over
    );
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
    let would = match would.is_empty() {
        true => {
            "neither 256 cards, nor a shorter context, nor a smaller quantisation would do".into()
        }
        false => format!("what would do: {}", would.join("; or ")),
    };
    [lacks, would]
}
