// SPDX-License-Identifier: Apache-2.0
//! A service that guesses gives everybody the tokens that they would get without, alone: on threads, emulated cards and
//! ranks, at any load, with cards that are lost. `SPANKER_ANSWERS=10000` makes as many answers.

use super::*;
use crate::draft::DraftSource;
use crate::testing::model_that_repeats;

/// Answers that are compared where nobody asks for another number.
const ANSWERS: usize = 96;

/// A model whose texts repeat themselves, in a folder that goes when both are dropped.
fn repeating() -> (tempfile::TempDir, Arc<Model>) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model_that_repeats(folder.path());
    (folder, Arc::new(model))
}

fn drafting() -> ServiceOptions {
    ServiceOptions { draft: DraftSource::LookupAlways, parallel: 8, ..options() }
}

/// What a client asks for: a prompt that repeats itself, so that there is something to guess.
fn asking(seed: u64) -> (Vec<u32>, Settings, usize) {
    let (period, length) = (2 + seed as usize % 9, 8 + seed as usize * 13 % 90);
    let token = |at: usize| 3 + ((at % period) * 41 + seed as usize / 3 * 7) as u32 % 250;
    let settings = match seed % 3 {
        0 => Settings::greedy(),
        flat => {
            let temperature = if flat == 1 { 0.3 } else { 1.0 };
            Settings { temperature, top_k: 12, min_p: 0.0, ..Settings::usual(seed) }
        }
    };
    ((0..length).map(token).collect(), settings, 12 + seed as usize * 7 % 60)
}

/// What clients get without guesses, each alone on one card.
fn without(model: &Model, seeds: std::ops::Range<u64>) -> Vec<Vec<u32>> {
    let host = Host::threads(1, 1).expect("threads");
    let plan = host.plan(model, &request(CONTEXT, 32, 64, 64), &Wish::default()).expect("a plan");
    let mut engine = Engine::load(&host, model, plan).expect("threads");
    let one = |seed: u64| {
        let (prompt, settings, tokens) = asking(seed);
        engine.cut(0);
        let sampling = Sampling::new(settings).expect("settings");
        let mut generation = engine.generate(&prompt, sampling, limits(tokens)).expect("a prompt");
        generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
        generation.into_answer().0.tokens
    };
    seeds.map(one).collect()
}

/// What so many clients get at the same time is what each gets without guesses. A card is lost on the way if `fault` says
/// after how many pieces, and how.
fn assert_equal(
    what: &str,
    service: &Service,
    (seeds, expected): (std::ops::Range<u64>, &[Vec<u32>]),
    fault: Option<(World, Disturbance, u64)>,
) {
    let fault = Arc::new(Mutex::new(fault));
    let asked = seeds.clone().map(|seed| {
        let (sender, receiver) = channel();
        let fault = Arc::clone(&fault);
        let deliver = move |update| {
            let mut fault = fault.lock().expect("nobody panics");
            if let (Some((world, how, left)), Update::Piece(_)) = (&mut *fault, &update) {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    world.disturb(*how);
                    *fault = None;
                }
            }
            sender.send(update).is_ok()
        };
        let (prompt, settings, tokens) = asking(seed);
        let sampling = Sampling::new(settings).expect("settings");
        service.submit(Ask::new(prompt, sampling, limits(tokens)), deliver).expect("room");
        receiver
    });
    let asked: Vec<_> = asked.collect();
    for ((seed, updates), expected) in seeds.zip(asked).zip(expected) {
        let (tokens, ..) = read(&updates);
        assert_eq!(&tokens, expected, "{what}, seed {seed}");
    }
    idle(service);
}

#[test]
fn clients_of_a_service_that_guesses_get_the_tokens_of_one_that_does_not() {
    let (_folder, model) = repeating();
    let answers = std::env::var("SPANKER_ANSWERS").ok();
    let answers = answers.map_or(ANSWERS, |text| text.parse().expect("SPANKER_ANSWERS: a number"));
    let (mut seed, mut counts, mut lost) = (0u64, [0; 3], 0);
    let mut round = 0;
    while (seed as usize) < answers {
        // A few rounds of answers on each service.
        let cards = 1 + round % 4;
        let emulated = round % 3 == 2;
        let split = match cards {
            1 => Split::Gather,
            _ => [Split::Gather, Split::Pipeline, Split::Mixed][round / 4 % 3],
        };
        let kv_memory = (round % 5 == 3).then(|| {
            let shape = spanker_model::KvShape { heads: 1, head_size: 32, quant: Quant::F16 };
            4 * 5 * 7 * shape.block_bytes()
        });
        let wish = Wish { split: Some(split), shares: None };
        // By what they cost in some.
        let draft = [DraftSource::LookupAlways, DraftSource::Lookup][usize::from(round % 7 == 5)];
        let reuse = usize::is_multiple_of(round, 2);
        let options = ServiceOptions { wish, kv_memory, reuse, draft, ..drafting() };
        let (service, world) = match emulated {
            false => (on_threads(&model, options, cards), None),
            true => {
                let (service, world) = on_cards(&model, options, seed);
                (service, Some(world))
            }
        };
        for turn in 0..3 {
            let clients = 1 + (round + turn) as u64 % 8;
            let seeds = seed..seed + clients;
            let expected = without(&model, seeds.clone());
            let fault = world.clone().filter(|_| turn == 1).map(|world| {
                let card = round % CARDS;
                let how = [Disturbance::Kill(card), Disturbance::Garble(card)][round / 3 % 2];
                (world, how, 2 + seed % 9)
            });
            let what =
                format!("{split:?} on {cards} cards ({emulated}), fault {}", fault.is_some());
            assert_equal(&what, &service, (seeds, &expected), fault);
            seed += clients;
        }
        let status = idle(&service);
        assert_eq!(status.failed, 0);
        lost += status.cards_lost;
        let draft = status.draft;
        counts = [counts[0] + draft.guessed, counts[1] + draft.accepted, counts[2] + draft.steps];
        assert_eq!(draft.refused() + draft.accepted, draft.guessed);
        round += 1;
    }
    let [guessed, accepted, steps] = counts;
    assert!(accepted > 20 && guessed > accepted + 20 && steps > 10, "{counts:?}");
    assert!(lost > 0 || answers < ANSWERS, "{lost} cards were lost");
}

#[test]
fn service_on_ranks_guesses_as_one_on_threads_does() {
    let (_folder, model) = repeating();
    let expected = without(&model, 0..5);
    for (count, split) in [(2, Split::Gather), (3, Split::Pipeline)] {
        on_ranks_with((count, split), &model, drafting(), |service| {
            assert_equal(&format!("{count} ranks"), service, (0..5, &expected), None);
        });
    }
}
