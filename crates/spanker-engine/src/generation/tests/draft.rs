// SPDX-License-Identifier: Apache-2.0
//! Answers with guesses are those without: on any number of cards, by any sampling, whatever ends them, and on cards that
//! turn out to be wrong. Faults that are planted are found.

use spanker_plan::Part;
use spanker_text::Penalties;

use super::*;
use crate::draft::{DraftCounts, DraftModel, Fault, MOST_GUESSES, PLANTED};
use crate::engine::Options;
use crate::layout::Split;
use crate::testing::model_that_repeats;

/// Tokens of the prompt and of what there is room for.
const PROMPT: usize = 24;
const CONTEXT: usize = 160;

/// Something to go on from that repeats itself, and how.
fn talk(seed: u64) -> (Vec<u32>, Settings, Limits) {
    let period = 3 + seed as usize % 7;
    let prompt = (0..PROMPT).map(|at| 3 + ((at % period) * 17 + seed as usize * 31) as u32 % 250);
    let penalties = match seed % 5 {
        4 => Penalties { repeat: 1.2, frequency: 0.1, last: 16, ..Penalties::NONE },
        _ => Penalties::NONE,
    };
    let settings = match seed % 3 {
        0 => Settings { penalties, ..Settings::greedy() },
        flat => {
            let temperature = if flat == 1 { 0.3 } else { 1.0 };
            Settings { temperature, top_k: 12, min_p: 0.0, penalties, ..Settings::usual(seed) }
        }
    };
    let limits =
        Limits { ignore_end: seed.is_multiple_of(2), ..Limits::tokens(30 + seed as usize % 40) };
    (prompt.collect(), settings, limits)
}

/// What came of a talk: the answer, as a reader has it who takes corrections, and the sequence that is left on the cards.
#[derive(Debug, PartialEq)]
struct Told {
    tokens: Vec<u32>,
    read: String,
    finish: Option<FinishReason>,
    left: Vec<u32>,
}

fn told(
    host: &Host,
    model: &Model,
    (seed, split): (u64, Option<Split>),
    draft: DraftSource,
) -> (Told, Option<DraftCounts>) {
    let (prompt, settings, limits) = talk(seed);
    let request = Request { guesses: draft.most(), ..request(CONTEXT, 32, PROMPT, 30) };
    let plan = host.plan(model, &request, &Wish { split, shares: None }).expect("a plan");
    let options = Options { draft, ..Options::default() };
    let mut engine = Engine::load_with(host, model, plan, options).expect("cards");
    let mut sampling = Sampling::new(settings).expect("settings");
    let (mut told, mut counts) = (Vec::new(), None);
    // A second answer goes on where the first has ended.
    for turn in 0..2 {
        let next = &prompt[..if turn == 0 { PROMPT } else { 5 }];
        let mut generation = engine.generate(next, sampling, limits.clone()).expect("a prompt");
        let mut read = String::new();
        for piece in &mut generation {
            let piece = piece.expect("a piece");
            if let Some(correction) = piece.corrects {
                read.truncate(correction.text);
            }
            read += &piece.text;
        }
        let (answer, after) = generation.into_answer();
        assert_eq!(read, answer.text);
        if let Some(draft) = &answer.draft {
            assert_eq!(draft.guesses.len(), answer.steps.len());
            assert_eq!(draft.guesses.iter().sum::<usize>() as u64, draft.counts.guessed);
            let generated = answer.tokens.len() - 1;
            let ended = usize::from(answer.finish == Some(FinishReason::End));
            assert_eq!(answer.generated(), generated + ended, "{draft:?}");
            counts = Some(draft.counts.plus(counts.unwrap_or_default()));
        }
        sampling = after;
        told.push((answer.tokens, read, answer.finish));
    }
    let left = engine.tokens().to_vec();
    let [(mut tokens, mut read, _), (more, last, finish)] = <[_; 2]>::try_from(told).expect("two");
    tokens.extend(more);
    read += &last;
    (Told { tokens, read, finish, left }, counts)
}

#[test]
fn answers_with_guesses_are_those_without_on_any_number_of_cards() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model_that_repeats(folder.path());
    let mut all = DraftCounts::default();
    for seed in 0..20 {
        let one = Host::threads(1, 1).expect("threads");
        let (plain, none) = told(&one, &model, (seed, None), DraftSource::None);
        assert!(none.is_none());
        let splits = [Split::Gather, Split::Pipeline, Split::Mixed];
        let (cards, split) = (1 + seed as usize % 4, splits[seed as usize / 4 % 3]);
        let host = Host::threads(1, cards).expect("threads");
        let (drafted, counts) = told(&host, &model, (seed, Some(split)), DraftSource::LookupAlways);
        assert_eq!(drafted, plain, "seed {seed}, {split:?} on {cards} cards");
        all = all.plus(counts.expect("guesses"));
    }
    assert!(all.accepted > 20 && all.refused() > 20, "{all:?}");
}

#[test]
fn answers_with_guesses_are_right_after_cards_were_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model_that_repeats(folder.path());
    for seed in 0..6 {
        let one = Host::threads(1, 1).expect("threads");
        let (plain, _) = told(&one, &model, (seed, None), DraftSource::None);
        for (wrong_from, found_at) in [(99, 2), (1, 2), (1, 3)] {
            let host = lying(wrong_from, found_at);
            let (drafted, _) = told(&host, &model, (seed, None), DraftSource::LookupAlways);
            let what = format!("seed {seed}, wrong from step {wrong_from}, found at {found_at}");
            assert_eq!((&drafted.tokens, &drafted.left), (&plain.tokens, &plain.left), "{what}");
        }
    }
}

/// Seeds at which an answer with guesses differs from that without.
fn differing(model: &Model, host: &Host) -> usize {
    let one = Host::threads(1, 1).expect("threads");
    let differs = |seed: &u64| {
        PLANTED.with(|planted| {
            let fault = planted.take();
            let (plain, _) = told(&one, model, (*seed, None), DraftSource::None);
            planted.set(fault);
            let (drafted, _) = told(host, model, (*seed, None), DraftSource::LookupAlways);
            drafted != plain
        })
    };
    (0..9).filter(differs).count()
}

#[test]
fn guess_that_is_accepted_wrongly_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, host) = (model_that_repeats(folder.path()), Host::threads(1, 1).expect("threads"));
    assert_eq!(differing(&model, &host), 0);
    PLANTED.set(Some(Fault::AcceptsTooMuch));
    let found = differing(&model, &host);
    PLANTED.set(None);
    assert!(found > 0);
}

#[test]
fn random_numbers_that_are_drawn_for_refused_guesses_are_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, host) = (model_that_repeats(folder.path()), Host::threads(1, 1).expect("threads"));
    PLANTED.set(Some(Fault::DrawsTooMuch));
    let found = differing(&model, &host);
    PLANTED.set(None);
    assert!(found > 0);
}

/// Threads that never forget what was written behind a sequence: a step goes on where the longest one before it ended.
struct Unforgetting(crate::threads::Threads);

struct Unforgotten<'h> {
    inner: Box<dyn Runner + 'h>,
    /// Where the last step's rows began by its own count and in truth, and where they ended.
    last: (u64, u64, u64),
}

impl Runner for Unforgotten<'_> {
    fn begin(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        let part = step.parts[0];
        let rows = part.tokens.len() as u64;
        let past = if part.past == 0 { 0 } else { self.last.2 };
        // Out of room, it does what it is asked to.
        let past = if past + rows > CONTEXT as u64 { part.past } else { past };
        self.last = (part.past, past, past + rows);
        let blocks: Vec<u32> = (0..(CONTEXT as u32).div_ceil(64)).collect();
        self.inner.begin(&Step { parts: &[Part { past, blocks: &blocks, ..part }], ..*step })
    }

    fn end(&mut self) -> Result<Outcome, LlmError> {
        self.inner.end()
    }

    fn batch(&self) -> usize {
        self.inner.batch()
    }
}

impl Backend for Unforgetting {
    fn fabric(&self) -> Fabric {
        self.0.fabric()
    }

    fn indices(&self) -> Vec<usize> {
        self.0.indices()
    }

    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn cluster(
        &self,
        model: &Model,
        request: &Request,
        layout: &Layout,
        freshness: Freshness,
        observer: &Watch,
    ) -> Result<Cluster> {
        self.0.cluster(model, request, layout, freshness, observer)
    }

    fn measures_layouts(&self) -> bool {
        self.0.measures_layouts()
    }

    fn load<'h>(&'h self, left: &[usize], load: &Load<'_>) -> Result<Loaded<'h>, LlmError> {
        let Loaded { runner, memory } = self.0.load(left, load)?;
        let runner = Box::new(Unforgotten { inner: runner, last: (0, 0, 0) });
        Ok(Loaded { runner, memory })
    }
}

#[test]
fn refused_guesses_that_stay_in_the_cache_are_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model_that_repeats(folder.path());
    let host = Host::test(Unforgetting(crate::threads::Threads::new(1, 1)));
    assert!(differing(&model, &host) > 0);
}

#[test]
fn step_has_no_more_guesses_than_there_is_room_or_need_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, host) = (model_that_repeats(folder.path()), Host::threads(1, 1).expect("threads"));
    for (context, batch, guesses) in [(40, 32, 15), (64, 2, 15), (64, 8, 3), (64, 1, 15)] {
        let request = Request { guesses, ..request(context, batch, 4, 30) };
        let plan = host.plan(&model, &request, &Wish::default()).expect("a plan");
        let options = Options { draft: DraftSource::LookupAlways, ..Options::default() };
        let mut engine = Engine::load_with(&host, &model, plan, options).expect("cards");
        let limits = Limits { ignore_end: true, ..Limits::default() };
        let generation = engine.generate(&[5, 6, 5, 6], Sampling::greedy(), limits);
        let mut generation = generation.expect("a prompt");
        generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
        let (answer, _) = generation.into_answer();
        assert_eq!(answer.finish, Some(FinishReason::Context));
        assert_eq!(answer.tokens.len(), context - 4 + 1);
        let draft = answer.draft.expect("guesses");
        let most = draft.guesses.iter().max().copied().unwrap_or(0);
        let possible = (guesses as usize).min(batch - 1).min(MOST_GUESSES);
        assert!(most <= possible, "{most} of {possible} in a context of {context}");
    }
}

#[test]
fn guesses_of_a_draft_model_change_no_token_whatever_becomes_of_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model_that_repeats(folder.path());
    let other = crate::testing::model(folder.path());
    let host = Host::threads(1, 1).expect("threads");
    let request = Request { guesses: 15, ..request(CONTEXT, 32, PROMPT, 30) };
    let plan = host.plan(&model, &request, &Wish::default()).expect("a plan");
    for seed in 0..6 {
        let (prompt, settings, limits) = talk(seed);
        let mut engine = Engine::load(&host, &model, plan.clone()).expect("cards");
        let mut tokens = Vec::new();
        // Without, the model itself, one that has nothing to say about it, and one with too small a context.
        for draft in 0..4 {
            let context = if draft == 3 { PROMPT + 4 } else { CONTEXT };
            let small = [&model, &model, &other, &model][draft];
            if draft > 0 {
                let small = DraftModel::load(small.path(), &model, context, 1);
                engine.set_draft_model(small.expect("a draft"));
            }
            engine.cut(0);
            let sampling = Sampling::new(settings).expect("settings");
            let mut generation = engine.generate(&prompt, sampling, limits.clone()).expect("run");
            generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
            tokens.push(generation.into_answer().0.tokens);
        }
        assert!(tokens.iter().all(|one| *one == tokens[0]), "seed {seed}: {tokens:?}");
    }
}
