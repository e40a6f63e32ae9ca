// SPDX-License-Identifier: Apache-2.0
//! Many requests at a time, on cards that live and cards that do not: everybody gets the tokens that they would get alone.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use spanker_plan::Request;
use spanker_runtime::SpankerControl;
use spanker_scheduler::{DeviceError, Topology};
use spanker_text::Settings;
use spanker_topology::{Cluster, Profile, Shape};
use spanker_twin::{Disturbance, Pace, World, specs};

use super::*;
use crate::cards::{Cards, Devices};
use crate::engine::Engine;
use crate::generation::{Correction, Limits};
use crate::host::Backend;
use crate::layout::{Split, request};
use crate::ranks::RankPlace;
use crate::sampling::Sampling;
use crate::summary::FinishReason;
use crate::testing::model;

mod draft;
mod unwell;

const CONTEXT: usize = 320;

fn options() -> ServiceOptions {
    ServiceOptions {
        parallel: 4,
        context: CONTEXT,
        batch: 32,
        kv_memory: None,
        kv: Quant::F16,
        queue: 64,
        wish: Wish::default(),
        audit: None,
        reuse: true,
        draft: DraftSource::None,
    }
}

/// What a client asks for: prompts of all lengths, some of which begin like others.
fn asked(client: usize) -> (Vec<u32>, Settings, usize) {
    let shared = [0, 70, 150, 64][client % 4];
    let own = 3 + 29 * (client % 6);
    let token =
        |at: usize| if at < shared { 1 + at % 90 } else { 3 + (at * 7 + client * 31) % 250 };
    let prompt = (0..shared + own).map(|at| token(at) as u32).collect();
    let settings = match client % 3 {
        0 => Settings::greedy(),
        _ => Settings { temperature: 0.9, top_k: 40, min_p: 0.0, ..Settings::usual(client as u64) },
    };
    (prompt, settings, 9 + 13 * (client % 3))
}

fn limits(tokens: usize) -> Limits {
    Limits { ignore_end: true, ..Limits::tokens(tokens) }
}

fn ask(client: usize) -> Ask {
    let (prompt, settings, tokens) = asked(client);
    Ask::new(prompt, Sampling::new(settings).expect("settings"), limits(tokens))
}

/// A model in a folder that goes when both are dropped.
fn shared_model() -> (tempfile::TempDir, Arc<Model>) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model(folder.path());
    (folder, Arc::new(model))
}

/// What a client gets that nobody shares a card with.
fn alone(model: &Model, kv: Quant, client: usize) -> Vec<u32> {
    let (prompt, settings, tokens) = asked(client);
    let host = Host::threads(1, 1).expect("threads");
    let request = Request { kv, ..request(CONTEXT, 32, prompt.len(), tokens) };
    let plan = host.plan(model, &request, &Wish::default()).expect("a plan");
    let mut engine = Engine::load(&host, model, plan).expect("threads");
    let sampling = Sampling::new(settings).expect("settings");
    let mut generation = engine.generate(&prompt, sampling, limits(tokens)).expect("a prompt");
    generation.by_ref().for_each(|piece| drop(piece.expect("a piece")));
    generation.into_answer().0.tokens
}

/// Sends everything to a channel.
fn submit(service: &Service, ask: Ask) -> (Receiver<Update>, Taken) {
    let (sender, receiver) = channel();
    let taken = service.submit(ask, move |update| sender.send(update).is_ok());
    (receiver, taken.expect("room"))
}

/// Submits all before the service goes on: it waits at the first update, so that pauses of the thread that asks change
/// nothing.
fn submit_together(service: &Service, asks: Vec<Ask>) -> Vec<(Receiver<Update>, Taken)> {
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().expect("nobody panics");
    let one = |ask| {
        let ((sender, receiver), gate) = (channel(), Arc::clone(&gate));
        let deliver = move |update| {
            drop(gate.lock());
            sender.send(update).is_ok()
        };
        (receiver, service.submit(ask, deliver).expect("room"))
    };
    let all = asks.into_iter().map(one).collect();
    drop(held);
    all
}

/// The tokens of an answer as a reader has them who takes corrections, and how it went.
fn read(updates: &Receiver<Update>) -> (Vec<u32>, Vec<Correction>, Done) {
    let (mut tokens, mut corrections) = (Vec::new(), Vec::new());
    loop {
        match updates.recv_timeout(Duration::from_secs(120)).expect("an update") {
            Update::Begun { .. } => {}
            Update::Piece(piece) => {
                if let Some(correction) = piece.corrects {
                    tokens.truncate(correction.token);
                    corrections.push(correction);
                }
                tokens.extend(piece.token);
            }
            Update::Done(done) => return (tokens, corrections, done),
            Update::Failed { what, .. } => panic!("{what}"),
        }
    }
}

/// What `clients` get that ask at the same time, and again when all have their answers.
fn assert_same(what: &str, service: &Service, expected: &[Vec<u32>]) {
    for round in 0..2 {
        let all = submit_together(service, (0..expected.len()).map(ask).collect());
        for (client, (updates, _)) in all.iter().enumerate() {
            let (tokens, _, done) = read(updates);
            assert_eq!(tokens, expected[client], "{what}, client {client}, round {round}");
            assert_eq!(done.tokens, tokens.len());
        }
    }
    idle(service);
}

/// The status when nothing is under way: nobody's, and nobody's blocks.
fn idle(service: &Service) -> Status {
    for _ in 0..500 {
        let status = service.status();
        if status.running + status.waiting + status.kv.used == 0 {
            return status;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{:?}", service.status());
}

fn on_threads(model: &Arc<Model>, options: ServiceOptions, cards: usize) -> Service {
    Service::start(Arc::clone(model), options, move || Host::threads(1, cards)).expect("a service")
}

#[test]
fn clients_get_the_tokens_that_each_would_get_alone() {
    let (_folder, model) = shared_model();
    let mut put_back = 0;
    for kv in [Quant::F16, Quant::Q8_0, Quant::Q4_0] {
        let expected: Vec<Vec<u32>> = (0..7).map(|client| alone(&model, kv, client)).collect();
        for (cards, split, reuse, blocks) in [
            (1, None, true, None),
            // One block more than a context needs: somebody is put back, as often as this machine's prices let two begin.
            (1, None, true, Some(6)),
            (1, None, false, Some(8)),
            (2, Some(Split::Gather), true, None),
            (3, Some(Split::Pipeline), true, None),
            (5, Some(Split::Gather), false, Some(9)),
            (4, Some(Split::Mixed), true, Some(7)),
        ] {
            let what = format!("{kv:?}, {cards} cards, {split:?}, {reuse}, {blocks:?}");
            // The bytes of a block: four layers of five heads.
            let each =
                4 * 5 * spanker_model::KvShape { heads: 1, head_size: 32, quant: kv }.block_bytes();
            let kv_memory = blocks.map(|blocks| blocks * each);
            let wish = Wish { split, shares: None };
            let options = ServiceOptions { kv, reuse, kv_memory, wish, ..options() };
            let service = on_threads(&model, options, cards);
            assert_same(&what, &service, &expected);
            let status = service.status();
            assert!(blocks.is_some() || status.put_back == 0, "{what}");
            put_back += status.put_back;
            assert_eq!(status.cached_tokens > 0, reuse, "{what}");
            assert_eq!((status.answered, status.failed), (14, 0), "{what}");
        }
    }
    assert!(put_back > 0, "nobody was ever put back");
}

/// What a service does on ranks that are threads, with the model laid out over all of them, until it ends in order. What the
/// work returns is dropped after the service.
fn on_ranks<T>(count: usize, split: Split, work: impl FnOnce(&Service) -> T) {
    let (_folder, model) = shared_model();
    on_ranks_with((count, split), &model, options(), work);
}

/// The same with other options.
fn on_ranks_with<T>(
    (count, split): (usize, Split),
    model: &Arc<Model>,
    options: ServiceOptions,
    work: impl FnOnce(&Service) -> T,
) {
    let mut ranks = spanker_fabric::inproc::group(count).into_iter();
    let host = move |fabric| {
        let (hosts, library) = (vec!["here".to_owned(); count], "threads".to_owned());
        // Longer than a busy machine keeps a thread waiting.
        let timeout = Duration::from_secs(30);
        let place = RankPlace { hosts, library, here: count, timeout };
        Host::ranks_of(Box::new(fabric), place, 1).expect("a host")
    };
    let first = ranks.next().expect("a rank");
    let workers: Vec<_> = ranks
        .map(|rank| {
            let path = model.path().to_owned();
            std::thread::spawn(move || {
                let host = host(rank);
                let model = host.open(&path).expect("a model");
                host.follow(&model, None).expect("an end in order");
            })
        })
        .collect();
    let options = ServiceOptions { wish: Wish { split: Some(split), shares: None }, ..options };
    let open = move || Ok(host(first));
    let service = Service::start(Arc::clone(model), options, open).expect("a service");
    let kept = work(&service);
    drop(service);
    drop(kept);
    workers.into_iter().for_each(|worker| worker.join().expect("a rank"));
}

#[test]
fn ranks_answer_as_threads_do_though_the_model_is_opened_before_its_host() {
    let (_folder, model) = shared_model();
    let expected: Vec<Vec<u32>> = (0..7).map(|client| alone(&model, Quant::F16, client)).collect();
    // In the last one ranks report on a step while the leader is in the next.
    for (count, split) in [(2, Split::Gather), (3, Split::Pipeline), (4, Split::Mixed)] {
        let what = format!("{count} ranks, {split:?}");
        on_ranks(count, split, |service| assert_same(&what, service, &expected));
    }
}

#[test]
fn ranks_are_there_after_nobody_has_asked_for_longer_than_they_wait() {
    on_ranks(2, Split::Gather, |service| {
        std::thread::sleep(Duration::from_secs(3));
        let (updates, _) = submit(service, ask(0));
        assert!(!read(&updates).0.is_empty());
    });
}

#[test]
fn blocks_are_free_after_the_only_client_has_gone_in_the_middle_of_a_prompt() {
    on_ranks(3, Split::Pipeline, |service| {
        // Clients with long prompts, of which several pieces are under way.
        for client in [2, 6, 10, 14, 18, 22] {
            let (updates, taken) = submit(service, ask(client));
            while !matches!(updates.recv(), Ok(Update::Begun { .. })) {}
            taken.stop.stop();
            drop(updates);
            idle(service);
        }
    });
}

/// Emulated cards in virtual time, and which of them were asked whether they are there.
struct Emulated(World, Mutex<Vec<usize>>);

impl Devices for Emulated {
    fn open(&self, indices: &[usize]) -> Result<Topology<SpankerControl>> {
        let controls = indices.iter().map(|&card| self.0.control(card)).collect();
        Topology::of_cards(controls).map_err(|error| self.blamed(indices, &error))
    }

    fn alive(&self, among: &[usize]) -> Vec<usize> {
        self.1.lock().expect("one asks at a time").extend(among);
        among.iter().copied().filter(|&card| self.0.control(card).info().is_ok()).collect()
    }

    fn blamed(&self, _: &[usize], error: &dyn std::fmt::Display) -> EngineError {
        EngineError::unavailable(error.to_string(), None)
    }
}

const CARDS: usize = 4;

fn emulated(is_split: bool, seed: u64) -> Arc<Emulated> {
    let mut profile = Profile::builtin("rev-a").expect("a profile");
    // As fast as this can be emulated.
    profile.compute.rate.value.0 *= 50.0;
    if let Some(link) = profile.link.as_mut().filter(|_| !is_split) {
        link.latency.value.0 = 2e-3;
    }
    emulated_as(profile, seed)
}

fn emulated_as(profile: Profile, seed: u64) -> Arc<Emulated> {
    let cluster = Cluster::uniform(profile, CARDS, Shape::Ring).expect("cards");
    let world = World::new(specs(&cluster, Pace::Card, 1).expect("cards"), seed);
    Arc::new(Emulated(world, Mutex::default()))
}

/// A service on emulated cards in a ring; a message from one to the next takes a few microseconds, or longer than a model
/// that is not split.
fn on_cards(model: &Arc<Model>, options: ServiceOptions, seed: u64) -> (Service, World) {
    let devices = emulated(options.wish.split.is_some(), seed);
    on_devices(model, options, devices)
}

fn on_devices(
    model: &Arc<Model>,
    options: ServiceOptions,
    devices: Arc<Emulated>,
) -> (Service, World) {
    let world = devices.0.clone();
    let open = move || {
        let topology = devices.open(&(0..CARDS).collect::<Vec<_>>())?;
        Ok(Host::test(Cards::of(devices, topology, Some(Duration::from_millis(300)), 1)))
    };
    (Service::start(Arc::clone(model), options, open).expect("a service"), world)
}

#[test]
fn clients_of_emulated_cards_get_the_tokens_of_threads() {
    let (_folder, model) = shared_model();
    let expected: Vec<Vec<u32>> = (0..7).map(|client| alone(&model, Quant::F16, client)).collect();
    for split in [Some(Split::Gather), Some(Split::Pipeline), None] {
        let options = ServiceOptions { wish: Wish { split, shares: None }, ..options() };
        let (service, _world) = on_cards(&model, options, 3);
        assert_same(&format!("{split:?}"), &service, &expected);
        let copies = if split.is_none() { CARDS } else { 1 };
        let status = service.status();
        assert_eq!(status.copies, copies, "{split:?} {}", status.layout);
        // Blocks for as many contexts as there are answers at a time, however many copies share them.
        assert_eq!(status.kv.total, 4 * CONTEXT / 64, "{split:?}");
    }
}

#[test]
fn emulated_cards_serve_as_many_tokens_by_their_clocks_as_was_foretold() {
    let (_folder, model) = shared_model();
    let (clients, prompt, answer) = (16, 40, 24);
    let arrivals = crate::batch::Arrivals::Closed;
    let load = ServiceLoad { clients, prompt, shared: 0, answer, requests: 1, arrivals };
    for split in [Some(Split::Gather), Some(Split::Pipeline), None] {
        let wish = Wish { split, shares: None };
        let options = ServiceOptions { wish, parallel: clients, ..options() };
        let cards = emulated_as(Profile::builtin("rev-a").expect("a profile"), 3);
        let (service, _world) = on_devices(&model, options, cards);
        let foretold = service.forecast(load);
        let ask = |client: usize| {
            let tokens = (0..prompt).map(|at| (3 + (at * 7 + client * 31) % 250) as u32);
            Ask::new(tokens.collect(), Sampling::greedy(), limits(answer))
        };
        let all = submit_together(&service, (0..clients).map(ask).collect());
        all.iter().for_each(|(updates, _)| drop(read(updates)));
        let status = idle(&service);
        let seconds = status.card_seconds.iter().copied().fold(0.0, f64::max);
        let measured = status.tokens as f64 / seconds;
        let off = foretold.tokens_per_second / measured - 1.0;
        let steps = (status.steps, foretold.steps);
        assert!(off.abs() < 0.1, "{split:?}: {off:+.3}, {measured} tokens/s, {steps:?} steps");
    }
}

#[test]
fn copies_of_a_model_share_the_memory_for_keys_and_values() {
    let (_folder, model) = shared_model();
    let kept = spanker_model::KvShape { heads: 5, head_size: 32, quant: Quant::F16 };
    let blocks = |blocks: u64| {
        let kv_memory = Some(blocks * 4 * kept.block_bytes());
        let (service, _world) = on_cards(&model, ServiceOptions { kv_memory, ..options() }, 3);
        let status = service.status();
        assert_eq!(status.copies, CARDS, "{}", status.layout);
        status.kv.total
    };
    assert_eq!(blocks(27), 24);
    // Each has room for a context.
    assert_eq!(blocks(6), 20);
}

#[test]
fn card_that_was_lost_is_not_asked_among_those_that_are_left() {
    let devices = emulated(true, 5);
    let all: Vec<usize> = (0..CARDS).collect();
    let topology = devices.open(&all).expect("cards");
    let cards = Cards::of(devices.clone(), topology, Some(Duration::from_millis(300)), 1);
    let error = DeviceError::wrong(2, "it hangs".to_owned()).into();
    assert_eq!(cards.survivors(&error, &all), Some(vec![0, 1, 3]));
    // It would keep everybody waiting until its time is up.
    assert_eq!(*devices.1.lock().expect("asked"), [0, 1, 3]);
}

#[test]
fn lost_cards_cost_nobody_a_token() {
    let (_folder, model) = shared_model();
    let expected: Vec<Vec<u32>> = (0..7).map(|client| alone(&model, Quant::F16, client)).collect();
    for seed in 0..12 {
        let card = seed as usize % CARDS;
        // The last one is copies of the model.
        let split = [Split::Gather, Split::Pipeline, Split::Mixed].get(seed as usize % 4).copied();
        let fault = match seed / 4 % 3 {
            0 => Disturbance::Kill(card),
            1 => Disturbance::Stick(card),
            _ => Disturbance::Garble(card),
        };
        let what = format!("seed {seed}: {fault:?}, {split:?}");
        let wish = Wish { split, shares: None };
        let (service, world) = on_cards(&model, ServiceOptions { wish, ..options() }, seed);
        let mut left = 2 + 5 * (seed % 4);
        let disturb = move |update: &Update| {
            left = left.saturating_sub(u64::from(matches!(update, Update::Piece(_))));
            if left == 0 {
                world.disturb(fault);
                left = u64::MAX;
            }
        };
        let disturb = Arc::new(Mutex::new(disturb));
        let all: Vec<_> = (0..7)
            .map(|client| {
                let (sender, receiver) = channel();
                let disturb = Arc::clone(&disturb);
                let deliver = move |update| {
                    disturb.lock().expect("nobody panics")(&update);
                    sender.send(update).is_ok()
                };
                service.submit(ask(client), deliver).expect("room");
                receiver
            })
            .collect();
        for (client, updates) in all.iter().enumerate() {
            let (tokens, ..) = read(updates);
            assert_eq!(tokens, expected[client], "{what}, client {client}");
        }
        let status = idle(&service);
        assert_eq!((status.cards_lost, status.answered, status.failed), (1, 7, 0), "{what}");
        assert_eq!(status.cards[card].state, CardState::Lost, "{what}");
    }
}

#[test]
fn card_that_is_well_again_is_taken_in_while_answers_are_given() {
    let (_folder, model) = shared_model();
    let expected = alone(&model, Quant::F16, 2);
    let wish = Wish { split: Some(Split::Gather), shares: None };
    let (service, world) = on_cards(&model, ServiceOptions { wish, ..options() }, 3);
    let state = |card: usize| service.status().cards[card].state;
    for fault in [Disturbance::Kill(1), Disturbance::Stick(1), Disturbance::Garble(1)] {
        let until = |lost: bool| {
            for _ in 0..200 {
                let (tokens, ..) = read(&submit(&service, ask(2)).0);
                assert_eq!(tokens, expected, "{fault:?}");
                if (state(1) == CardState::Lost) == lost {
                    return;
                }
            }
            panic!("{fault:?}: {:?}", service.status());
        };
        world.disturb(fault);
        until(true);
        world.disturb(Disturbance::Restore(1));
        until(false);
    }
    let status = service.status();
    assert_eq!((status.cards_lost, status.cards_back, status.failed), (3, 3, 0), "{status:?}");
}

#[test]
fn card_that_goes_and_comes_back_while_nobody_asks_is_missed_and_taken_in() {
    let (_folder, model) = shared_model();
    let wish = Wish { split: Some(Split::Gather), shares: None };
    let (service, world) = on_cards(&model, ServiceOptions { wish, ..options() }, 3);
    let until = |is_so: &dyn Fn(&Status) -> bool| {
        for _ in 0..3000 {
            if is_so(&service.status()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{:?}", service.status());
    };
    world.disturb(Disturbance::Kill(2));
    until(&|status| status.cards[2].state == CardState::Lost && status.cards_lost == 1);
    assert_eq!(read(&submit(&service, ask(2)).0).0, alone(&model, Quant::F16, 2));
    world.disturb(Disturbance::Restore(2));
    until(&|status| status.cards_back == 1);
    assert_eq!(service.status().recomputed, 0);
}

#[test]
fn requests_that_nobody_waits_for_leave_nothing_behind() {
    let (_folder, model) = shared_model();
    let service = on_threads(&model, options(), 1);
    let endless = || Ask { limits: limits(300), ..ask(1) };
    // Somebody stops, somebody hangs up, somebody hangs up before their turn.
    let (first, taken) = submit(&service, endless());
    let mut heard = 0;
    let hangs_up = move |_| {
        heard += 1;
        heard < 4
    };
    service.submit(endless(), hangs_up).expect("room");
    let waiting: Vec<_> = (0..6).map(|_| submit(&service, endless())).collect();
    while !matches!(first.recv().expect("an update"), Update::Piece(_)) {}
    taken.stop.stop();
    let (_, _, done) = read(&first);
    assert_eq!(done.reason, FinishReason::Stopped);
    for (updates, taken) in waiting {
        taken.stop.stop();
        drop(updates);
    }
    let status = idle(&service);
    // Some may have been faster.
    assert!(status.cancelled >= 2 && status.cancelled + status.answered == 8, "{status:?}");
    // Everything that is asked afterwards is answered as if nothing had been.
    let (tokens, ..) = read(&submit(&service, ask(3)).0);
    assert_eq!(tokens, alone(&model, Quant::F16, 3));
}

#[test]
fn requests_that_end_in_a_pipeline_leave_no_step_and_no_block_behind() {
    let (_folder, model) = shared_model();
    let wish = Wish { split: Some(Split::Pipeline), shares: None };
    let service = on_threads(&model, ServiceOptions { wish, ..options() }, 4);
    for _ in 0..8 {
        let all: Vec<_> = (0..4)
            .map(|client| submit(&service, Ask { limits: limits(150), ..ask(client) }))
            .collect();
        while !matches!(all[0].0.recv().expect("an update"), Update::Piece(_)) {}
        all.iter().for_each(|(_, taken)| taken.stop.stop());
        // Other requests do not have to come for this.
        assert_eq!(idle(&service).kv.used, 0);
    }
}

#[test]
fn ranks_of_a_service_that_ends_amid_answers_end_in_order() {
    for split in [Split::Gather, Split::Pipeline] {
        on_ranks(2, split, |service| {
            let all: Vec<_> = (0..4)
                .map(|client| submit(service, Ask { limits: limits(150), ..ask(client) }))
                .collect();
            while !matches!(all[3].0.recv().expect("an update"), Update::Piece(_)) {}
            // They listen until the service has ended.
            all
        });
    }
}

#[test]
fn forecast_of_a_service_that_shares_nothing_reuses_nothing() {
    let (_folder, model) = shared_model();
    let load = ServiceLoad {
        clients: 2,
        prompt: 200,
        shared: 190,
        answer: 4,
        requests: 2,
        arrivals: crate::batch::Arrivals::Closed,
    };
    for reuse in [true, false] {
        let service = on_threads(&model, ServiceOptions { reuse, ..options() }, 1);
        let forecast = service.forecast(load);
        assert_eq!(forecast.reused > 0.0, reuse, "{forecast:?}");
    }
}

#[test]
fn requests_beyond_the_queue_are_refused_with_the_time_to_wait() {
    let (_folder, model) = shared_model();
    let few = ServiceOptions { parallel: 1, queue: 2, ..options() };
    let service = on_threads(&model, few, 1);
    // The first one lasts until the fourth has been refused.
    let first = Ask { limits: limits(300), ..ask(0) };
    let asks = std::iter::once(first).chain((1..3).map(ask));
    let taken: Vec<_> = asks.map(|ask| submit(&service, ask)).collect();
    match service.submit(ask(4), |_| true) {
        Err(Refusal::Full { waiting, retry_after }) => {
            assert!((2..=3).contains(&waiting), "{waiting}");
            assert!(retry_after >= Duration::from_secs(1), "{retry_after:?}");
        }
        other => panic!("{other:?}"),
    }
    taken.iter().for_each(|(updates, _)| drop(read(updates)));
    let status = idle(&service);
    assert_eq!((status.refused, status.answered), (1, 3));
    service.drain();
    assert!(matches!(service.submit(ask(0), |_| true), Err(Refusal::Ending)));
}

#[test]
fn requests_that_make_no_sense_are_refused_by_name() {
    let (_folder, model) = shared_model();
    let service = on_threads(&model, options(), 1);
    let refused = |change: &dyn Fn(&mut Ask)| {
        let mut ask = ask(0);
        change(&mut ask);
        match service.submit(ask, |_| true) {
            Err(Refusal::Invalid(error)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    for (change, words) in [
        (&(|ask: &mut Ask| ask.prompt.clear()) as &dyn Fn(&mut Ask), "no tokens"),
        (&|ask| ask.prompt = vec![1; CONTEXT], "the prompt has 320 tokens"),
        (&|ask| ask.prompt = vec![300], "token 300 of a vocabulary of 300"),
        (&|ask| ask.limits.tokens = Some(0), "0 tokens"),
        (&|ask| ask.bias = vec![(3, f32::NAN)], "a bias of NaN for token 3"),
        (&|ask| ask.bias = vec![(301, 1.0)], "token 301"),
        (&|ask| ask.chances = Some(21), "21 alternatives"),
    ] {
        let found = refused(change);
        assert!(found.contains(words), "{found}");
    }
    assert_eq!(idle(&service).waiting, 0);
}

#[test]
fn memory_for_keys_and_values_that_holds_no_context_is_refused() {
    let (_folder, model) = shared_model();
    let options = ServiceOptions { kv_memory: Some(4096), ..options() };
    let error = Service::start(model, options, || Host::threads(1, 1)).expect_err("no room");
    assert!(
        error.to_string().contains("--kv-memory 4096: a context of 320 tokens takes"),
        "{error}"
    );
}

#[test]
fn tokens_are_as_likely_in_company_as_alone() {
    let (_folder, model) = shared_model();
    let service = on_threads(&model, options(), 2);
    let chances = |client: usize, company: usize| {
        let others: Vec<_> = (0..company).map(|other| submit(&service, ask(other + 1))).collect();
        let asked = Ask { chances: Some(3), ..ask(client) };
        let (updates, _) = submit(&service, asked);
        let mut all = Vec::new();
        while let Ok(update) = updates.recv() {
            match update {
                Update::Piece(piece) => all.extend(piece.chances),
                Update::Done(_) => break,
                _ => {}
            }
        }
        others.iter().for_each(|(updates, _)| drop(read(updates)));
        all
    };
    let alone = chances(0, 0);
    assert_eq!(alone.len() % 4, 0);
    assert!(alone.iter().all(|chance| chance.logprob <= 0.0 && chance.logprob.is_finite()));
    assert_eq!(chances(0, 3), alone);
}
