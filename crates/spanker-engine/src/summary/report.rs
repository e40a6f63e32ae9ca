// SPDX-License-Identifier: Apache-2.0
//! A summary as JSON and as text: by whose clock, where a token's time went, and how far it was from the prediction.

use std::time::Duration;

use serde_json::json;
use spanker_llm::Timing;
use spanker_plan::Exchanged;

use super::{FinishReason, Summary, off, rate};
use crate::ranks::TCP;

/// How far a time is from its prediction, in words.
fn slower(percent: f64) -> String {
    let word = if percent < 0.0 { "faster" } else { "slower" };
    format!("{:.1} % {word} than predicted", percent.abs())
}

/// What parts of the weights may differ by and count as the same: rows come in blocks.
const EQUAL: f64 = 1.05;
/// Cards whose parts are listed one by one.
const LISTED: usize = 8;

impl Summary<'_> {
    /// The summary for machines.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        to_json(self)
    }

    /// The summary for people, line by line.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        lines(self)
    }
}

fn to_json(summary: &Summary<'_>) -> serde_json::Value {
    let (all, middle) = summary.speeds();
    let step = summary.middle();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let predicted = summary.prediction.tokens_per_second;
    let (prompt, time) = (summary.answer.prompt_tokens, summary.answer.prompt.time());
    let audit = summary.audit.map(|log| {
        let found = log.found();
        let found: Vec<_> = found
            .iter()
            .map(|found| json!({ "card": found.card, "step": found.past, "what": found.what }))
            .collect();
        json!({ "fraction": log.fraction(), "checked": log.checked(), "found": found,
                "corrected_from": summary.answer.corrected_from })
    });
    json!({
        "version": 1,
        "text": summary.answer.text,
        "tokens": summary.answer.tokens,
        "ended": summary.answer.finish == Some(FinishReason::End),
        "finish_reason": summary.answer.finish.map(FinishReason::name),
        "clock": if summary.by_card_clocks() { "card" } else { "wall" },
        "strategy": summary.plan.layout.strategy().name(),
        "cards": summary.plan.layout.cards().len(),
        "cards_lost": summary.lost,
        "hosts": summary.place.map(|place| &place.hosts),
        "mpi": summary.place.filter(|place| place.library != TCP).map(|place| &place.library),
        "predicted_for": summary.profiles(),
        "prompt": { "tokens": prompt, "us": micros(time), "tokens_per_second": rate(prompt, time),
            "predicted_us": summary.prediction.ttft.0 * 1e6,
            "time_off_percent": off(time.as_secs_f64(), summary.prediction.ttft.0) },
        "generation": { "tokens": summary.answer.steps.len(), "tokens_per_second": all,
            "median_tokens_per_second": middle, "predicted_tokens_per_second": predicted,
            "off_percent": off(middle, predicted),
            "time_off_percent": off(predicted, middle) },
        "token": { "us": micros(step.time()), "sync_us": micros(step.sync),
            "compute_us": micros(step.time().saturating_sub(step.sync)), "bytes_sent": step.sent,
            "wall_us": micros(step.wall) },
        "shares": summary.shares().iter().map(|(card, part)| json!({ "card": card, "weights": part }))
            .collect::<Vec<_>>(),
        "memory": summary.memory.iter().map(|card| json!({ "card": card.card,
            "planned_bytes": card.planned, "allocated_bytes": card.allocated }))
            .collect::<Vec<_>>(),
        "exchanges": exchanges(&summary.plan.exchanges()),
        "prompt_exchanges": exchanges(&summary.plan.exchanges_of(piece(summary))),
        "audit": audit,
    })
}

/// Rows of the largest piece that the prompt went through in.
fn piece(summary: &Summary<'_>) -> usize {
    summary.answer.prompt_tokens.min(summary.plan.request.batch as usize).max(1)
}

/// How the cards of each stage exchange.
fn exchanges(stages: &[Vec<Exchanged>]) -> Vec<serde_json::Value> {
    let all = stages.iter().enumerate();
    let all = all.flat_map(|(stage, list)| list.iter().map(move |exchange| (stage, exchange)));
    let described = all.map(|(stage, exchange)| {
        json!({ "stage": stage, "after": exchange.after, "collective": exchange.collective,
                "bytes": exchange.bytes, "algorithm": exchange.algorithm,
                "predicted_us": exchange.time.0 * 1e6 })
    });
    described.collect()
}

/// What was checked, in words.
fn audit(summary: &Summary<'_>) -> Option<String> {
    let log = summary.audit?;
    let found = log.found();
    let mut wrong: Vec<String> = found.iter().map(|found| found.card.to_string()).collect();
    wrong.sort_unstable();
    wrong.dedup();
    let wrong = match wrong.len() {
        0 => "no card was wrong".to_owned(),
        1 => format!("card {} was wrong", wrong[0]),
        _ => format!("cards {} were wrong", wrong.join(",")),
    };
    let checked = log.checked();
    let what = match log.fraction() >= 1.0 {
        false => format!("{checked} operators"),
        true => format!("everything and {checked} operators"),
    };
    Some(format!("audit       {what} computed again here, {wrong}"))
}

fn lines(summary: &Summary<'_>) -> Vec<String> {
    let clock = if summary.by_card_clocks() { "card time" } else { "wall time" };
    let layout = &summary.plan.layout;
    let mut lines = vec![format!(
        "{} on {} card{}, {clock}{}",
        layout.strategy(),
        layout.cards().len(),
        if layout.cards().len() == 1 { "" } else { "s" },
        summary.place.map(|place| format!("; {}", place.words())).unwrap_or_default(),
    )];
    lines.extend(shares(&summary.shares()));
    let (prompt, time) = (summary.answer.prompt_tokens, summary.answer.prompt.time());
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    lines.push(format!(
        "prompt      {prompt:>5} tokens {:>10.2} ms {:>9.2} tok/s   predicted {:>9.2} ms ({})",
        ms(time),
        rate(prompt, time),
        summary.prediction.ttft.0 * 1e3,
        slower(off(ms(time), summary.prediction.ttft.0 * 1e3)),
    ));
    if summary.answer.steps.is_empty() {
        return lines;
    }
    let (all, middle) = summary.speeds();
    let total = summary.answer.steps.iter().map(Timing::time).sum();
    lines.push(format!(
        "generation  {:>5} tokens {:>10.2} ms {all:>9.2} tok/s",
        summary.answer.steps.len(),
        ms(total),
    ));
    let step = summary.middle();
    lines.push(format!(
        "a token     {:.3} ms = compute {:.3} + sync {:.3}, {} bytes between cards",
        ms(step.time()),
        ms(step.time().saturating_sub(step.sync)),
        ms(step.sync),
        step.sent,
    ));
    let predicted = summary.prediction.tokens_per_second;
    lines.push(format!(
        "predicted   {predicted:.2} tok/s for {}, measured {middle:.2} ({})",
        summary.profiles(),
        slower(off(predicted, middle))
    ));
    lines.extend(audit(summary));
    if summary.by_card_clocks() {
        lines.push(format!("this host   {:.2} tok/s by its own clock", rate(1, step.wall)));
    }
    lines
}

/// Parts of the weights, where cards do not have the same.
fn shares(cards: &[(usize, f64)]) -> Option<String> {
    let parts = || cards.iter().map(|(_, part)| *part);
    let (least, most) = (parts().fold(f64::INFINITY, f64::min), parts().fold(0.0, f64::max));
    if cards.len() < 2 || most <= least * EQUAL {
        return None;
    }
    if cards.len() > LISTED {
        let (least, most) = (least * 100.0, most * 100.0);
        return Some(format!("weights     {least:.1} to {most:.1} % on each card"));
    }
    let list = cards.iter().map(|(card, part)| format!("card {card} {:.1} %", part * 100.0));
    Some(format!("weights     {}", list.collect::<Vec<_>>().join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_listed_where_cards_have_different_ones() {
        assert_eq!(shares(&[(0, 1.0)]), None);
        assert_eq!(shares(&[(0, 0.5), (1, 0.5)]), None);
        let text = shares(&[(0, 0.75), (2, 0.25)]);
        assert_eq!(text.as_deref(), Some("weights     card 0 75.0 %, card 2 25.0 %"));
        let many: Vec<(usize, f64)> = (0..9).map(|card| (card, 0.1 + card as f64 / 90.0)).collect();
        assert_eq!(shares(&many).as_deref(), Some("weights     10.0 to 18.9 % on each card"));
    }

    #[test]
    fn times_above_the_prediction_are_slower_and_speeds_above_it_faster() {
        // Predicted 10 tokens/s, measured 8: a token takes a quarter longer.
        assert_eq!(slower(off(0.125, 0.1)), "25.0 % slower than predicted");
        assert_eq!(slower(off(10.0, 8.0)), "25.0 % slower than predicted");
        assert_eq!(slower(off(8.0, 10.0)), "20.0 % faster than predicted");
        assert!((off(8.0, 10.0) + 20.0).abs() < 1e-9);
    }
}
