// SPDX-License-Identifier: Apache-2.0
//! What a run tells about its speed: by whose clock, where a token's time went, and how far it was from the
//! prediction.

use std::ops::Range;

use serde_json::json;
use spanker_llm::{MemoryUse, Timing};
use spanker_plan::{Plan, Prediction};

use super::generate::Answer;
use super::ranks::Place;

/// A run beside its prediction.
pub(crate) struct Report<'a> {
    pub(crate) answer: &'a Answer,
    pub(crate) plan: &'a Plan,
    pub(crate) prediction: Prediction,
    /// How many cards were lost on the way. Then the plan changed.
    pub(crate) lost: usize,
    /// The steps that the prediction is for: those on one layout, the one that was computed anew left out.
    pub(crate) steps: Range<usize>,
    /// Where the cards are, if they are processes.
    pub(crate) place: Option<&'a Place>,
    /// What each card was planned to allocate, and what it has.
    pub(crate) memory: &'a [MemoryUse],
}

/// The step in the middle: steps differ by noise and by what was mended.
pub(crate) fn median(steps: &[Timing]) -> Timing {
    let mut sorted = steps.to_vec();
    sorted.sort_by_key(Timing::time);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

fn rate(count: usize, time: std::time::Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

/// How far a time is from its prediction, in words.
pub(crate) fn slower(percent: f64) -> String {
    let word = if percent < 0.0 { "faster" } else { "slower" };
    format!("{:.1} % {word} than predicted", percent.abs())
}

impl Report<'_> {
    fn cards(&self) -> bool {
        self.answer.prompt.card.is_some()
    }

    /// Tokens per second: of all steps, and of the step in the middle.
    fn speeds(&self) -> (f64, f64) {
        let total = self.answer.steps.iter().map(Timing::time).sum();
        (rate(self.answer.steps.len(), total), rate(1, self.middle().time()))
    }

    /// The step in the middle of those that the prediction is for.
    fn middle(&self) -> Timing {
        median(self.answer.steps.get(self.steps.clone()).unwrap_or_default())
    }

    /// The kinds of cards that the prediction is for.
    fn profiles(&self) -> String {
        let cluster = &self.plan.cluster;
        let mut names: Vec<&str> = self
            .plan
            .layout
            .cards()
            .iter()
            .map(|&card| cluster.profile(card).name.as_str())
            .collect();
        names.sort_unstable();
        names.dedup();
        names.join(" and ")
    }

    /// How far a measurement is from a prediction, in percent. Of times, more than nothing is slower than predicted;
    /// of speeds (`generation.off_percent`), faster.
    fn off(measured: f64, predicted: f64) -> f64 {
        if predicted > 0.0 { (measured / predicted - 1.0) * 100.0 } else { 0.0 }
    }

    pub(crate) fn to_json(&self) -> serde_json::Value {
        let (all, middle) = self.speeds();
        let step = self.middle();
        let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let predicted = self.prediction.tokens_per_second;
        let (prompt, time) = (self.answer.prompt_tokens, self.answer.prompt.time());
        let audit = self.answer.audit.as_ref().map(|log| {
            let found = log.found();
            let found: Vec<_> = found
                .iter()
                .map(|found| json!({ "card": found.card, "step": found.past, "what": found.what }))
                .collect();
            json!({ "fraction": log.fraction(), "checked": log.checked(), "found": found,
                "corrected_from": self.answer.corrected_from })
        });
        json!({
            "version": 1,
            "text": self.answer.text,
            "tokens": self.answer.tokens,
            "ended": self.answer.ended,
            "clock": if self.cards() { "card" } else { "wall" },
            "strategy": self.plan.layout.strategy().name(),
            "cards": self.plan.layout.cards().len(),
            "cards_lost": self.lost,
            "hosts": self.place.map(|place| &place.hosts),
            "mpi": self.place.map(|place| &place.library),
            "predicted_for": self.profiles(),
            "prompt": { "tokens": prompt, "us": micros(time), "tokens_per_second": rate(prompt, time),
                "predicted_us": self.prediction.ttft.0 * 1e6,
                "time_off_percent": Self::off(time.as_secs_f64(), self.prediction.ttft.0) },
            "generation": { "tokens": self.answer.steps.len(), "tokens_per_second": all,
                "median_tokens_per_second": middle, "predicted_tokens_per_second": predicted,
                "off_percent": Self::off(middle, predicted),
                "time_off_percent": Self::off(predicted, middle) },
            "token": { "us": micros(step.time()), "sync_us": micros(step.sync),
                "compute_us": micros(step.time().saturating_sub(step.sync)), "bytes_sent": step.sent,
                "wall_us": micros(step.wall) },
            "memory": self.memory.iter().map(|card| json!({ "card": card.card,
                "planned_bytes": card.planned, "allocated_bytes": card.allocated }))
                .collect::<Vec<_>>(),
            "audit": audit,
        })
    }

    /// What was checked, in words.
    fn audit(&self) -> Option<String> {
        let log = self.answer.audit.as_ref()?;
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
        let what = match (log.fraction() >= 1.0, self.plan.request.audit > 0.0) {
            (false, _) => format!("{checked} operators"),
            (true, true) => format!("everything and {checked} operators"),
            (true, false) => format!("all of {checked} steps"),
        };
        Some(format!("audit       {what} computed again here, {wrong}"))
    }

    /// The report for people, line by line.
    pub(crate) fn lines(&self) -> Vec<String> {
        let clock = if self.cards() { "card time" } else { "wall time" };
        let layout = &self.plan.layout;
        let mut lines = vec![format!(
            "{} on {} card{}, {clock}{}",
            layout.strategy(),
            layout.cards().len(),
            if layout.cards().len() == 1 { "" } else { "s" },
            self.place.map(|place| format!("; {}", place.words())).unwrap_or_default(),
        )];
        let (prompt, time) = (self.answer.prompt_tokens, self.answer.prompt.time());
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        lines.push(format!(
            "prompt      {prompt:>5} tokens {:>10.2} ms {:>9.2} tok/s   predicted {:>9.2} ms ({})",
            ms(time),
            rate(prompt, time),
            self.prediction.ttft.0 * 1e3,
            slower(Self::off(ms(time), self.prediction.ttft.0 * 1e3)),
        ));
        if self.answer.steps.is_empty() {
            return lines;
        }
        let (all, middle) = self.speeds();
        let total = self.answer.steps.iter().map(Timing::time).sum();
        lines.push(format!(
            "generation  {:>5} tokens {:>10.2} ms {all:>9.2} tok/s",
            self.answer.steps.len(),
            ms(total),
        ));
        let step = self.middle();
        lines.push(format!(
            "a token     {:.3} ms = compute {:.3} + sync {:.3}, {} bytes between cards",
            ms(step.time()),
            ms(step.time().saturating_sub(step.sync)),
            ms(step.sync),
            step.sent,
        ));
        let predicted = self.prediction.tokens_per_second;
        lines.push(format!(
            "predicted   {predicted:.2} tok/s for {}, measured {middle:.2} ({})",
            self.profiles(),
            slower(Self::off(predicted, middle))
        ));
        lines.extend(self.audit());
        if self.cards() {
            lines.push(format!("this host   {:.2} tok/s by its own clock", rate(1, step.wall)));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_above_the_prediction_are_slower_and_speeds_above_it_faster() {
        // Predicted 10 tokens/s, measured 8: a token takes a quarter longer.
        assert_eq!(slower(Report::off(0.125, 0.1)), "25.0 % slower than predicted");
        assert_eq!(slower(Report::off(10.0, 8.0)), "25.0 % slower than predicted");
        assert_eq!(slower(Report::off(8.0, 10.0)), "20.0 % faster than predicted");
        assert!((Report::off(8.0, 10.0) + 20.0).abs() < 1e-9);
    }
}
