// SPDX-License-Identifier: Apache-2.0
//! Audits of models on the emulated kernel: cards that compute rightly are never blamed, whatever is looked at, and cards
//! that do not are found and named.

use std::sync::atomic::Ordering;

use spanker_llm::{LlmError, Runner, Searched, Step};
use spanker_model::Quant;
use spanker_plan::{Part, Split, Want};
use spanker_test_support::Recipe;

use super::super::machine::KERNEL_KV_TYPES;
use super::super::operands::kind;
use super::models::{Both, Groups, llama, mixture};
use super::{Fault, is_possible};

/// Nearly everything.
const MOST: f64 = 0.99;

fn alone() -> Groups {
    vec![vec![(0, 1.0)]]
}

fn two() -> Groups {
    vec![vec![(0, 1.0), (1, 1.0)]]
}

/// One card of which nearly everything is checked.
fn one(quant: Quant, kv: Quant) -> Both {
    Both::audited(&llama(quant), (Split::Gather, &alone(), kv), &[2], MOST)
}

#[test]
fn honest_cards_are_not_blamed_whatever_their_weights_and_cache_are() {
    if !is_possible() {
        return;
    }
    for quant in [Quant::Q4_0, Quant::Q5_1, Quant::Q8_0, Quant::Q4K, Quant::Q6K, Quant::F16] {
        for kv in KERNEL_KV_TYPES {
            let mut both = one(quant, kv);
            both.one_sequence(&format!("{quant}, {kv}"), &[3, 1], 19, 4);
            mixture(&mut both, &format!("{quant}, {kv}: a mixture"));
            assert!(both.log.checked() > 50, "{}", both.log.checked());
            assert!(both.log.found().is_empty());
        }
    }
}

#[test]
fn honest_cards_with_biases_head_norms_and_tied_tables_are_not_blamed() {
    if !is_possible() {
        return;
    }
    let plain = llama(Quant::Q4_0);
    let of = |name: &str| Recipe { architecture: name.into(), ..llama(Quant::Q8_0) };
    let odd = Recipe { tied: true, ..Recipe::llama(Quant::Q4_0, [3, 1, 32], 96, 160) };
    let all =
        [("plain", plain), ("biases", of("qwen2")), ("head norms", of("qwen3")), ("tied", odd)];
    for (what, recipe) in all {
        let layout = (Split::Gather, &alone(), Quant::F16);
        let mut both = Both::audited(&recipe, layout, &[2], MOST);
        both.one_sequence(what, &[3, 1], 9, 3);
        assert!(both.log.checked() > 10);
    }
}

#[test]
fn honest_groups_and_stages_are_not_blamed() {
    if !is_possible() {
        return;
    }
    let uneven = vec![vec![(0, 2.0), (1, 1.0)]];
    let stages = vec![vec![(0, 1.0)], vec![(1, 1.0)]];
    for (split, groups, devices) in [
        (Split::Gather, &two(), &[2][..]),
        (Split::Gather, &uneven, &[1, 2]),
        (Split::Reduce, &two(), &[2]),
        (Split::Gather, &stages, &[2, 1]),
    ] {
        let what = format!("{split:?} {groups:?}");
        let mut both =
            Both::audited(&llama(Quant::Q4_0), (split, groups, Quant::F16), devices, MOST);
        both.one_sequence(&what, &[3, 1], 7, 3);
        mixture(&mut both, &what);
        assert!(both.log.found().is_empty() && both.log.checked() > 50);
    }
}

#[test]
fn a_small_part_is_one_run_of_each_card_and_step_and_costs_one_more_gather() {
    if !is_possible() {
        return;
    }
    let layout = (Split::Gather, &alone(), Quant::F16);
    let mut both = Both::audited(&llama(Quant::Q4_0), layout, &[2], 0.01);
    both.one_sequence("1 %", &[3, 1], 5, 1);
    let of = |both: &Both| {
        let gathers = both.told[0].gathers.load(Ordering::Relaxed);
        [both.log.checked(), both.launches(0), both.launches(1), gathers]
    };
    let before = of(&both);
    for past in 6..16 {
        let part = Part::new(&[7], past, &[3, 1], Want::Logits);
        both.step("a token", &Step::of(&[part]));
    }
    let [checked, plain, streamed, gathers] = of(&both);
    // A run of operators, and two cells of the KV cache; the last step is compared in the next one.
    assert_eq!(checked - before[0], 3 * 10);
    let launched = (plain - before[1], streamed - before[2]);
    assert_eq!(launched, (10, 10), "the layers and the head, as without an audit");
    let gathered = gathers - before[3];
    assert!(
        (10..=20).contains(&gathered),
        "{gathered}: the end's with the run's, if that is in the last list"
    );
}

/// Runs a few steps on cards of which something is wrong: the card that is named, and what is said of it.
fn found(both: &mut Both, fault: &dyn Fn(&Both)) -> (usize, String) {
    let tokens: Vec<u32> = (0..40).map(|at| (at * 29 + 11) % 71).collect();
    let part = Part::new(&tokens[..9], 0, &[3, 1], Want::Logits);
    both.step("before", &Step::of(&[part]));
    both.step("one token", &Step::of(&[Part::new(&tokens[9..10], 9, &[3, 1], Want::Logits)]));
    fault(both);
    let mut steps = vec![];
    for past in 10..22 {
        steps.push(past..past + 1);
    }
    steps.push(22..30);
    steps.push(30..38);
    for step in steps {
        let part = Part::new(&tokens[step.clone()], step.start as u64, &[3, 1], Want::Logits);
        if let Err(error) = both.emulated.step(&Step::of(&[part])) {
            let LlmError::Device(error) = error else { panic!("{error}") };
            let named = both.log.found().last().expect("a card that was wrong").clone();
            assert!(error.to_string().contains(&format!("card {}", named.card)), "{error}");
            return (named.card, named.what);
        }
    }
    (usize::MAX, "nothing".into())
}

#[test]
fn a_card_with_wrong_results_of_any_kind_of_instruction_is_found() {
    if !is_possible() {
        return;
    }
    for (quant, of) in [
        (Quant::Q4_0, kind::STREAMED),
        (Quant::Q4_0, kind::ATTEND),
        (Quant::Q8_0, kind::VECTOR),
        (Quant::Q8_0, kind::ATTEND),
        (Quant::Q4K, kind::MATMUL),
        (Quant::F16, kind::NORM),
    ] {
        let mut both = one(quant, Quant::F16);
        let (card, what) = found(&mut both, &|both| both.told[0].set(Some(Fault::Results(of))));
        assert_eq!(card, 0, "{quant}, instructions of kind {of}: {what}");
        eprintln!("{quant}, {of}: {what}");
        // Nobody looks, and nothing is found.
        let layout = (Split::Gather, &alone(), Quant::F16);
        let mut both = Both::audited(&llama(quant), layout, &[2], 0.0);
        let (card, _) = found(&mut both, &|both| both.told[0].set(Some(Fault::Results(of))));
        assert_eq!(card, usize::MAX);
    }
}

#[test]
fn changed_weights_and_a_changed_cache_are_found() {
    if !is_possible() {
        return;
    }
    for quant in [Quant::Q4_0, Quant::Q8_0, Quant::Q6K] {
        for (what, step) in [("weights", 61), ("KV cache", 2)] {
            let mut both = one(quant, Quant::F16);
            let (card, said) = found(&mut both, &|both| both.told[0].spoil(what, 0, step));
            assert_eq!(card, 0, "{quant}, {what}: {said}");
            eprintln!("{quant}, {what}: {said}");
        }
    }
}

#[test]
fn the_card_of_a_group_that_is_wrong_is_named() {
    if !is_possible() {
        return;
    }
    for split in [Split::Gather, Split::Reduce] {
        for wrong in 0..2 {
            let layout = (split, &two(), Quant::F16);
            let mut both = Both::audited(&llama(Quant::Q4_0), layout, &[2, 2], MOST);
            let fault = |both: &Both| both.told[wrong].spoil("weights", 0, 61);
            let (card, said) = found(&mut both, &fault);
            assert_eq!(card, wrong, "{split:?}: {said}");
            // What it gets from the others arrives with other bits.
            let mut both = Both::audited(&llama(Quant::Q4_0), layout, &[2, 2], MOST);
            let fault = |both: &Both| both.told[wrong].set(Some(Fault::Written("activations")));
            let (card, said) = found(&mut both, &fault);
            assert_eq!(card, wrong, "{split:?}: {said}");
            assert!(said.contains("after an exchange"), "{said}");
        }
        // Cards that share a device are in one list. The memory that is changed is the first one's.
        let layout = (split, &two(), Quant::F16);
        let mut both = Both::audited(&llama(Quant::Q4_0), layout, &[2], MOST);
        let (card, said) = found(&mut both, &|both| both.told[0].spoil("weights", 0, 61));
        assert_eq!(card, 0, "{split:?}: {said}");
    }
}

#[test]
fn a_step_that_is_searched_looks_at_more_and_names_the_card_at_once() {
    if !is_possible() {
        return;
    }
    let layout = (Split::Gather, &alone(), Quant::F16);
    let mut both = Both::audited(&llama(Quant::Q4_0), layout, &[2], 0.01);
    both.one_sequence("before", &[3, 1], 5, 2);
    let part = [Part::new(&[7], 7, &[3, 1], Want::Logits)];
    let step = Step::of(&part);
    both.emulated.attempt(&step, 1).expect("an honest card");
    both.told[0].set(Some(Fault::Results(kind::STREAMED)));
    let wrong = both.emulated.attempt(&step, 2).expect_err("a card that is wrong");
    assert!(wrong.to_string().contains("card 0"), "{wrong}");
}
