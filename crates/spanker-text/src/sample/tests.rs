// SPDX-License-Identifier: Apache-2.0
//! What samplers choose, by their settings.

use super::{Penalties, Sampler, Settings, best, exp};
use proptest::prelude::*;

fn sampler(settings: Settings) -> Sampler {
    Sampler::new(settings).expect("good settings")
}

/// How often each of `logits` is chosen in 4000 draws.
fn counts(settings: Settings, logits: &[f32]) -> Vec<usize> {
    let mut sampler = sampler(settings);
    let mut counts = vec![0; logits.len()];
    for _ in 0..4000 {
        counts[sampler.choose(logits).expect("a token") as usize] += 1;
    }
    counts
}

const ALL: Settings = Settings { temperature: 1.0, top_k: 0, seed: 1, ..Settings::greedy() };

#[test]
fn exponential_is_that_of_the_system_nearly() {
    for step in 0..7400 {
        let x = -0.1 * f64::from(step);
        let error = (exp(x) / x.exp() - 1.0).abs();
        assert!(error < 1e-14 || x < -708.0, "{x}: {error}");
    }
    assert_eq!((exp(0.0), exp(-1e9), exp(f64::NEG_INFINITY), exp(f64::NAN)), (1.0, 0.0, 0.0, 0.0));
}

#[test]
fn greedy_takes_the_greatest_and_of_equals_the_first() {
    let mut greedy = sampler(Settings::greedy());
    assert_eq!(greedy.choose(&[1.0, 3.0, 3.0]), Ok(1));
    assert_eq!(greedy.choose(&[-0.0, 0.0]), Ok(0));
    assert_eq!(greedy.choose(&[f32::NAN, f32::NEG_INFINITY, -1e30]), Ok(2));
    assert_eq!(greedy.choose_from(&[(9, 2.0), (3, 1.0)]), Ok(9));
}

#[test]
fn draws_follow_the_probabilities() {
    let logits = [0.5_f32.ln(), 0.3_f32.ln(), 0.2_f32.ln()];
    for (count, share) in counts(ALL, &logits).iter().zip([0.5, 0.3, 0.2]) {
        let error = *count as f64 / 4000.0 - share;
        assert!(error.abs() < 0.03, "{count} of 4000 for {share}");
    }
    let cold = counts(Settings { temperature: 0.5, ..ALL }, &logits);
    assert!((cold[0] as f64 / 4000.0 - 0.25 / 0.38).abs() < 0.03, "{cold:?}");
}

#[test]
fn bounds_leave_out_what_they_should() {
    let logits = [0.5_f32.ln(), 0.3_f32.ln(), 0.15_f32.ln(), 0.05_f32.ln()];
    let chosen = |settings| counts(settings, &logits).iter().filter(|count| **count > 0).count();
    assert_eq!(chosen(ALL), 4);
    assert_eq!(chosen(Settings { top_k: 2, ..ALL }), 2);
    assert_eq!(chosen(Settings { top_p: 0.49, ..ALL }), 1);
    assert_eq!(chosen(Settings { top_p: 0.79, ..ALL }), 2);
    assert_eq!(chosen(Settings { top_p: 0.94, ..ALL }), 3);
    assert_eq!(chosen(Settings { min_p: 0.11, ..ALL }), 3);
    assert_eq!(chosen(Settings { min_p: 1.0, ..ALL }), 1);
}

#[test]
fn seed_decides_the_tokens_for_ever() {
    let logits: Vec<f32> = (0_u16..100).map(|at| f32::from(at % 17) * 0.3).collect();
    let mut sampler = sampler(Settings::usual(42));
    let tokens: Vec<u32> = (0..12).map(|_| sampler.choose(&logits).expect("a token")).collect();
    // Whoever changes these changes what every seed of every user means.
    assert_eq!(tokens, SEED_42);
}

const SEED_42: [u32; 12] = [31, 50, 15, 67, 33, 15, 50, 12, 15, 31, 16, 32];

#[test]
fn settings_that_mean_nothing_are_named() {
    for (settings, name) in [
        (Settings { temperature: -1.0, ..ALL }, "temperature -1"),
        (Settings { temperature: f64::NAN, ..ALL }, "temperature NaN"),
        (Settings { top_p: 0.0, ..ALL }, "top-p 0"),
        (Settings { top_p: 1.5, ..ALL }, "top-p 1.5"),
        (Settings { min_p: -0.1, ..ALL }, "min-p -0.1"),
        (Settings { min_p: f64::INFINITY, ..ALL }, "min-p inf"),
    ] {
        let error = Sampler::new(settings).expect_err(name).to_string();
        assert!(error.starts_with(name), "{error}");
    }
    assert!(sampler(ALL).choose(&[]).is_err());
    assert!(sampler(ALL).choose(&[f32::NAN, f32::NEG_INFINITY]).is_err());
}

proptest! {
    #[test]
    fn any_logits_and_settings_give_a_usable_token(
        logits in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 1..60),
        temperature in 0.0..5.0_f64, top_k in 0_usize..70, top_p in 0.01..=1.0_f64,
        min_p in 0.0..=1.0_f64, seed: u64,
    ) {
        let settings = Settings { temperature, top_k, top_p, min_p, seed, ..ALL };
        let usable = logits.iter().any(|logit| *logit > f32::NEG_INFINITY);
        match sampler(settings).choose(&logits) {
            Ok(token) => prop_assert!(logits[token as usize] > f32::NEG_INFINITY),
            Err(_) => prop_assert!(!usable),
        }
    }

    #[test]
    fn best_candidates_are_the_first_of_all_sorted(
        logits in prop::collection::vec(-4_i8..4, 0..60), count in 0_usize..70,
    ) {
        let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(count);
        prop_assert_eq!(&best(&logits, count), &all);
        let mut sampler = sampler(Settings { top_k: count, ..Settings::usual(3) });
        if count > 0 && !logits.is_empty() {
            prop_assert_eq!(sampler.clone().choose(&logits), sampler.choose_from(&all));
        }
    }
}

/// A greedy sampler that has accepted these tokens.
fn penalized(penalties: Penalties, accepted: &[u32]) -> Sampler {
    let mut sampler = sampler(Settings { penalties, ..Settings::greedy() });
    accepted.iter().for_each(|&token| sampler.accept(token));
    sampler
}

#[test]
fn penalties_lower_what_came_before_as_llama_cpp_does() {
    // Positive logits are divided and negative ones multiplied: 4 / 2 < 3, and -1 * 2 < -1.5.
    let repeat = Penalties { repeat: 2.0, ..Penalties::NONE };
    assert_eq!(penalized(repeat, &[0]).choose(&[4.0, 3.0]), Ok(1));
    assert_eq!(penalized(repeat, &[0]).choose(&[4.0, 1.9]), Ok(0));
    assert_eq!(penalized(repeat, &[0]).choose(&[-1.0, -1.5]), Ok(1));
    // Once, however often it came; and for each time.
    let presence = Penalties { presence: 1.0, ..Penalties::NONE };
    assert_eq!(penalized(presence, &[0, 0, 0]).choose(&[4.0, 2.9]), Ok(0));
    let frequency = Penalties { frequency: 0.5, ..Penalties::NONE };
    assert_eq!(penalized(frequency, &[0, 0, 0]).choose(&[4.0, 2.9]), Ok(1));
    assert_eq!(penalized(frequency, &[0, 0]).choose(&[4.0, 2.9]), Ok(0));
}

#[test]
fn penalties_forget_what_is_further_back() {
    let penalties = Penalties { presence: 5.0, last: 2, ..Penalties::NONE };
    assert_eq!(penalized(penalties, &[0, 1]).choose(&[4.0, 3.0, 0.5]), Ok(2));
    assert_eq!(penalized(penalties, &[0, 1, 2]).choose(&[4.0, 3.0, 0.5]), Ok(0));
    let none = Penalties { last: 0, ..penalties };
    assert_eq!(penalized(none, &[0]).choose(&[4.0, 3.0]), Ok(0));
}

#[test]
fn penalties_that_are_no_numbers_are_refused() {
    for (penalties, name) in [
        (Penalties { repeat: 0.0, ..Penalties::NONE }, "repeat-penalty"),
        (Penalties { repeat: f64::INFINITY, ..Penalties::NONE }, "repeat-penalty"),
        (Penalties { presence: f64::NAN, ..Penalties::NONE }, "presence-penalty"),
        (Penalties { frequency: f64::NEG_INFINITY, ..Penalties::NONE }, "frequency-penalty"),
    ] {
        let error =
            Sampler::new(Settings { penalties, ..Settings::greedy() }).expect_err("no number");
        assert!(error.to_string().contains(name), "{error}");
    }
}

proptest! {
    /// Whoever gets the best candidates alone chooses what whoever gets all logits does.
    #[test]
    fn wanted_candidates_are_enough_with_penalties(
        logits in prop::collection::vec(-9.0f32..9.0, 1..60),
        accepted in prop::collection::vec(0u32..60, 0..30),
        (repeat, presence, frequency) in (0.5f64..3.0, -1.0f64..2.0, -1.0f64..2.0),
        (last, top_k, seed) in (0usize..20, 0usize..8, any::<u64>()),
    ) {
        let penalties = Penalties { repeat, presence, frequency, last };
        let settings = Settings { top_k, penalties, ..Settings::usual(seed) };
        let mut one = sampler(settings);
        accepted.iter().for_each(|&token| one.accept(token));
        let mut other = one.clone();
        let few = best(&logits, one.wanted(logits.len()));
        prop_assert_eq!(one.choose_from(&few), other.choose_from(&best(&logits, logits.len())));
    }
}
