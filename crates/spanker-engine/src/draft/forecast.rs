// SPDX-License-Identifier: Apache-2.0
//! What guesses will gain, before anything runs: for an acceptance that is assumed, or for a text that is there already, over
//! which the same choices are made as in a run.

use serde::Serialize;
use spanker_plan::{Plan, Reach, StepPrices};

use super::{DraftCounts, Drafter, MOST_GUESSES, lengths};

/// What guesses will gain.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DraftForecast {
    /// Guesses of a step, in the mean.
    pub length: f64,
    /// Tokens that a step gives, in the mean.
    pub tokens_per_step: f64,
    /// Of guesses, the part that is right.
    pub acceptance: f64,
    /// Tokens in a second with guesses.
    pub tokens_per_second: f64,
    /// How many times as fast that is as without.
    pub gained: f64,
}

/// What a step of one sequence takes by a plan: rows, and the tokens before them.
fn price(prices: &StepPrices, rows: usize, past: u64) -> f64 {
    let rows = rows as u64;
    prices.time(rows, rows, &Reach::of([(rows, past)])).0
}

/// Guesses that a step of a plan has room for.
fn room(plan: &Plan) -> usize {
    (plan.request.outputs_for(1) as usize).saturating_sub(1).min(MOST_GUESSES)
}

impl DraftForecast {
    /// Where each guess is right with this probability, whatever came before it: the best length at a plan's position.
    #[must_use]
    pub fn assumed(plan: &Plan, acceptance: f64) -> DraftForecast {
        let prices = StepPrices::new(plan);
        let of = |rows: usize| price(&prices, rows, plan.request.position);
        let mut chance = 1.0;
        let chances: Vec<f64> = (0..room(plan))
            .map(|_| {
                chance *= acceptance;
                chance
            })
            .collect();
        let length = lengths(std::slice::from_ref(&chances), chances.len(), |n| of(1 + n))[0];
        let tokens = 1.0 + chances[..length].iter().sum::<f64>();
        let rate = tokens / of(1 + length);
        DraftForecast {
            length: length as f64,
            tokens_per_step: tokens,
            acceptance,
            tokens_per_second: rate,
            gained: rate * of(1),
        }
    }

    /// Of a text that follows a prompt, token by token as it would be made, with guesses from what came before.
    #[must_use]
    pub fn of_text(plan: &Plan, prompt: &[u32], text: &[u32]) -> DraftForecast {
        let prices = StepPrices::new(plan);
        let (mut drafter, most) = (Drafter::new(prompt), room(plan));
        let (mut with, mut without, mut steps) = (0.0, 0.0, 0usize);
        // The first token comes with the prompt.
        let mut made = text.len().min(1);
        text[..made].iter().for_each(|&token| drafter.push(token));
        while made < text.len() {
            let past = (prompt.len() + made) as u64 - 1;
            let left = text.len() - made;
            let (mut guess, chances) = drafter.guess(most.min(left - 1));
            let count = lengths(&[chances], guess.tokens.len(), |n| price(&prices, 1 + n, past));
            guess.tokens.truncate(count[0]);
            let same = guess.tokens.iter().zip(&text[made..]).take_while(|(a, b)| a == b).count();
            drafter.note(guess.tokens.len(), same);
            with += price(&prices, 1 + guess.tokens.len(), past);
            for &token in &text[made..][..1 + same] {
                without += price(&prices, 1, (prompt.len() + made) as u64 - 1);
                drafter.push(token);
                made += 1;
            }
            steps += 1;
        }
        let DraftCounts { guessed, accepted, .. } = drafter.counts;
        let part = |of: f64, all: f64| if all > 0.0 { of / all } else { 0.0 };
        let tokens = text.len().saturating_sub(1) as f64;
        DraftForecast {
            length: part(guessed as f64, steps as f64),
            tokens_per_step: part(tokens, steps as f64),
            acceptance: part(accepted as f64, guessed as f64),
            tokens_per_second: part(tokens, with),
            gained: if with > 0.0 { without / with } else { 1.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use spanker_model::{Quant, builtin};
    use spanker_plan::{Layout, Objective, Request, Split};
    use spanker_topology::{Cluster, MacsPerSecond, Profile, Shape};

    use super::*;

    fn plan(cards: usize, guesses: u64) -> Plan {
        let model = builtin("smollm2-135m", Quant::Q4_0).expect("a model");
        let mut profile = Profile::builtin("rev-a").expect("a profile");
        // Reading weights is what takes long, so that rows cost little.
        profile.compute.rate.value = MacsPerSecond(60e9);
        let cluster = Cluster::uniform(profile, cards, Shape::Ring).expect("cards");
        let groups = [(0..cards).map(|card| (card, 1.0)).collect()];
        let layout = Layout::of_groups(&model, Split::Gather, &groups).expect("a layout");
        let request = Request { guesses, ..Request::new(Objective::Latency) };
        Plan::new(model, cluster, request, layout).expect("a plan")
    }

    #[test]
    fn guesses_gain_more_the_likelier_they_are_and_nothing_where_they_are_wrong_or_have_no_room() {
        let plan = plan(3, 15);
        let gains = [0.0, 0.4, 0.6, 0.8, 0.95].map(|part| DraftForecast::assumed(&plan, part));
        assert!(gains[0].length == 0.0 && (gains[0].gained - 1.0).abs() < 1e-9, "{gains:?}");
        assert!(gains.windows(2).all(|pair| pair[0].gained <= pair[1].gained), "{gains:?}");
        assert!(gains[4].gained > 1.5 && gains[4].length > gains[1].length, "{gains:?}");
        let none = DraftForecast::assumed(&self::plan(3, 0), 0.9);
        assert!(none.length == 0.0 && (none.gained - 1.0).abs() < 1e-9, "{none:?}");
    }

    #[test]
    fn text_that_copies_its_prompt_gains_and_text_that_does_not_loses_next_to_nothing() {
        let plan = plan(3, 15);
        let prompt: Vec<u32> = (0..200).map(|at| (at * 37 % 1009) as u32).collect();
        let copy = DraftForecast::of_text(&plan, &prompt, &prompt[20..180]);
        assert!(copy.gained > 1.5 && copy.acceptance > 0.8, "{copy:?}");
        // Pairs of tokens come again, and something else follows them.
        let prose: Vec<u32> =
            (0..400).map(|at| if at % 3 < 2 { at % 3 } else { at * 7 % 983 }).collect();
        let prose = DraftForecast::of_text(&plan, &prompt, &prose);
        assert!(prose.gained > 0.98, "{prose:?}");
        assert_eq!(DraftForecast::of_text(&plan, &prompt, &[7]).gained, 1.0);
    }
}
