// SPDX-License-Identifier: Apache-2.0
//! Prompts over replicas of tiny models, on threads and on emulated cards: the tokens of one replica, whoever made them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spanker_engine::jobs::{JobError, NO_TOKEN, Prompts, Replica};
use spanker_fabric::device::Deadline;
use spanker_llm::Network;
use spanker_model::Quant;
use spanker_runtime::ABI_VERSION_MINOR;
use spanker_steal::{Backend, Options, Report, StealError, WorkStealingScheduler};
use spanker_test_support::Recipe;
use spanker_twin::{Disturbance, World};

use super::watched::watched;
use super::{faults, fill, world, world_of};

const TOKENS: usize = 6;

fn network() -> Arc<Network<Vec<u8>>> {
    let recipe = Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352);
    Arc::new(Network::new(recipe.file()).expect("a model"))
}

/// Prompts of different lengths and tokens.
fn words(count: usize) -> Vec<Vec<u32>> {
    let word = |prompt: usize, at: usize| ((prompt * 37 + at * 29 + 11) % 71) as u32;
    (0..count).map(|prompt| (0..=prompt % 9).map(|at| word(prompt, at)).collect()).collect()
}

fn prompts(count: usize, ends: &[u32]) -> Arc<Prompts<Vec<u8>>> {
    Arc::new(Prompts::new(network(), words(count), TOKENS, ends).expect("prompts"))
}

fn threads(prompts: &Arc<Prompts<Vec<u8>>>, threads: usize) -> Arc<dyn Backend> {
    Arc::new(Replica::in_process(Arc::clone(prompts), threads).expect("threads"))
}

fn on_card(prompts: &Arc<Prompts<Vec<u8>>>, world: &World, card: usize) -> Arc<dyn Backend> {
    let (card, prompts) = (world.control(card), Arc::clone(prompts));
    Arc::new(Replica::on_card(prompts, card, Deadline::USUAL).expect("a card"))
}

fn run(prompts: &Prompts<Vec<u8>>, backends: Vec<Arc<dyn Backend>>) -> (Vec<u8>, Report) {
    let mut out = vec![0; prompts.prompts().len() * TOKENS * 4];
    let scheduler = WorkStealingScheduler::new(backends);
    let report = scheduler.run(&prompts.job(), &mut out).expect("a run");
    assert_eq!((report.done, report.duplicated), (prompts.prompts().len(), 0));
    (out, report)
}

/// Every prompt alone on a replica of its own.
fn one_by_one(prompts: &Prompts<Vec<u8>>) -> Vec<Vec<u32>> {
    let alone = |prompt: &Vec<u32>| {
        let network = Arc::clone(prompts.network());
        let one = Prompts::new(network, vec![prompt.clone()], TOKENS, &[]).expect("a prompt");
        let one = Arc::new(one);
        let mut out = vec![0; TOKENS * 4];
        threads(&one, 1).run(0..1, &mut out).expect("an answer");
        one.answers(&out).next().expect("an answer")
    };
    prompts.prompts().iter().map(alone).collect()
}

#[test]
fn two_replicas_on_threads_give_the_tokens_of_every_prompt_alone() {
    let prompts = prompts(24, &[]);
    let (out, report) = run(&prompts, vec![threads(&prompts, 1), threads(&prompts, 2)]);
    assert!(faults(&report).is_empty(), "{report:?}");
    let answers: Vec<Vec<u32>> = prompts.answers(&out).collect();
    assert_eq!(answers, one_by_one(&prompts));
    assert!(answers.iter().all(|answer| answer.len() == TOKENS));
    assert!(answers.iter().any(|answer| answer != &answers[0]));
}

#[test]
fn replicas_on_cards_give_the_tokens_of_threads() {
    let prompts = prompts(12, &[]);
    let world = world(3);
    let (alone, _) = run(&prompts, vec![threads(&prompts, 1)]);
    let (card, report) = run(&prompts, vec![on_card(&prompts, &world, 1)]);
    assert_eq!(card, alone);
    assert!(faults(&report).is_empty(), "{report:?}");
    let all =
        vec![threads(&prompts, 1), on_card(&prompts, &world, 0), on_card(&prompts, &world, 2)];
    assert_eq!(all.iter().map(|one| one.id()).collect::<Vec<_>>(), ["cpu", "card", "card"]);
    let (together, report) = run(&prompts, all);
    assert_eq!(together, alone);
    assert!(faults(&report).is_empty(), "{report:?}");
}

#[test]
fn answer_that_ends_is_filled_up_and_the_end_is_part_of_it() {
    let plain = prompts(8, &[]);
    let answers = one_by_one(&plain);
    let end = answers[3][2];
    let (out, _) = run(&plain, vec![threads(&plain, 1)]);
    let ended = prompts(8, &[end]);
    let (cut, _) = run(&ended, vec![threads(&ended, 1)]);
    for (place, (whole, short)) in answers.iter().zip(ended.answers(&cut)).enumerate() {
        let length = whole.iter().position(|&token| token == end).map_or(TOKENS, |at| at + 1);
        assert_eq!(short, whole[..length], "prompt {place}");
        let bytes = &cut[place * TOKENS * 4..(place + 1) * TOKENS * 4];
        assert!(bytes[length * 4..].iter().all(|&byte| byte == 0xff), "prompt {place}");
    }
    assert_ne!(out, cut);
    assert_eq!(NO_TOKEN, u32::MAX);
}

#[test]
fn card_that_dies_is_named_and_the_other_replica_answers_its_prompts() {
    let prompts = prompts(12, &[]);
    let (alone, _) = run(&prompts, vec![threads(&prompts, 1)]);
    let world = world(2);
    let died = Arc::new(AtomicBool::new(false));
    let (tell, dying) = (Arc::clone(&died), world.clone());
    let card = watched(on_card(&prompts, &world, 1), move |_| {
        dying.disturb(Disturbance::Kill(1));
        tell.store(true, Ordering::Release);
    });
    let other = watched(threads(&prompts, 1), move |_| {
        while !died.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    });
    let (out, report) = run(&prompts, vec![card, other]);
    assert_eq!(out, alone);
    let benched = report.backends[0].benched.as_deref().expect("a dead card");
    assert!(benched.contains("card 1 is gone"), "{benched}");
    assert_eq!((report.backends[0].items, report.backends[1].items), (0, 12));
}

#[test]
fn cancelled_run_ends_between_two_tokens() {
    let many = Prompts::new(network(), words(4), 200, &[]).expect("prompts");
    let many = Arc::new(many);
    let job = many.job();
    let cancel = job.canceller();
    let replica = watched(threads(&many, 1), move |_| cancel.cancel());
    let mut out = vec![0; 4 * 200 * 4];
    let scheduler = WorkStealingScheduler::new(vec![replica]);
    let error = scheduler.run(&job, &mut out).expect_err("a run that was cancelled");
    assert!(matches!(error, StealError::Cancelled(_)), "{error}");
    assert_eq!(error.unfinished().map(|left| left.report.done), Some(0));
}

#[test]
fn disagreeing_card_is_found_out_by_samples() {
    let prompts = prompts(8, &[]);
    let (alone, _) = run(&prompts, vec![threads(&prompts, 1)]);
    let world = world(2);
    world.disturb(Disturbance::Garble(1));
    let backends = vec![threads(&prompts, 1), on_card(&prompts, &world, 1)];
    let mut out = vec![0; alone.len()];
    let options = Options { sample: 1.0, ..Options::STANDARD };
    let job = prompts.job().options(options);
    let report = WorkStealingScheduler::new(backends).run(&job, &mut out).expect("a run");
    assert_eq!(out, alone);
    assert!(report.backends[1].benched.is_some(), "{report:?}");
}

#[test]
fn prompts_that_cannot_be_run_are_refused_and_named() {
    let network = network();
    let refused = |prompts: Vec<Vec<u32>>, tokens| {
        let error = Prompts::new(Arc::clone(&network), prompts, tokens, &[]);
        error.expect_err("no job").to_string()
    };
    assert_eq!(refused(vec![], 4), "nothing to do: 0 prompts with answers of 4 tokens");
    assert_eq!(refused(vec![vec![1]], 0), "nothing to do: 1 prompts with answers of 0 tokens");
    assert_eq!(refused(vec![vec![1], vec![]], 4), "prompt 1: it is empty");
    let long = "prompt 0: 253 tokens and 4 of an answer do not fit a context of 256";
    assert_eq!(refused(vec![vec![1; 253]], 4), long);
    let more = refused(vec![vec![1]], usize::MAX);
    assert!(more.ends_with("do not fit a context of 256"), "{more}");
    let odd = "prompt 2: token 71 is not in a vocabulary of 71";
    assert_eq!(refused(vec![vec![1], vec![2], vec![3, 71]], 4), odd);
    assert!(Prompts::new(network, vec![vec![1; 252]], 4, &[]).is_ok());
}

#[test]
fn prompts_that_are_not_there_are_refused_and_the_replica_goes_on() {
    let prompts = prompts(3, &[]);
    let replica = threads(&prompts, 1);
    for (items, bytes) in [(2..4, 2 * TOKENS * 4), (0..2, TOKENS * 4), (0..1, 0)] {
        let failure = replica.run(items.clone(), &mut vec![0; bytes]).expect_err("no such prompts");
        assert!(!failure.is_lasting(), "{items:?}: {failure}");
    }
    let mut out = vec![0; TOKENS * 4];
    replica.run(2..3, &mut out).expect("an answer");
    assert_eq!(prompts.answers(&out).next().as_ref(), one_by_one(&prompts).last());
}

#[test]
fn card_without_room_for_the_model_is_refused() {
    let world = world(2);
    let card = world.control(0);
    fill(&card);
    let error = Replica::on_card(prompts(2, &[]), card, Deadline::USUAL).expect_err("no memory");
    assert!(matches!(error, JobError::Model(_)), "{error}");
    assert!(error.to_string().starts_with("card 0 needs "), "{error}");
}

#[test]
fn card_of_a_version_without_the_operators_of_a_model_is_refused_by_name_and_newer_ones_answer() {
    let prompts = prompts(2, &[]);
    let expected = run(&prompts, vec![threads(&prompts, 1)]).0;
    for minor in 0..=ABI_VERSION_MINOR + 1 {
        let world = world_of(2, Some(minor));
        if minor >= 4 {
            assert_eq!(run(&prompts, vec![on_card(&prompts, &world, 0)]).0, expected, "0.{minor}");
            continue;
        }
        let (card, prompts) = (world.control(0), Arc::clone(&prompts));
        let error = Replica::on_card(prompts, card, Deadline::USUAL).expect_err("too old");
        let needed =
            if minor < 3 { "work EMBED needs ABI 0.3.0" } else { "work WRITE needs ABI 0.4.0" };
        let named = format!("a card: {needed}, the card speaks 0.{minor}.0");
        assert_eq!(error.to_string(), named);
    }
}
