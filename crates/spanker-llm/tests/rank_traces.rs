// SPDX-License-Identifier: Apache-2.0
//! What all ranks did when reaches the leader, by one clock: every card, every operator of its program, no effect before
//! its cause. And profiles that are measured on ranks. Ranks are threads here, each with one end of a fabric.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use spanker_fabric::Fabric;
use spanker_fabric::conformance::on_all;
use spanker_fabric::inproc::group;
use spanker_llm::{Leader, Network, Session, Subject, Want, Worker, run_worker};
use spanker_model::Quant;
use spanker_plan::{
    Activity, Conditions, Layout, Mark, Plan, Request, Split, Trace, compare, simulate,
};
use spanker_test_support::Recipe;
use spanker_topology::{
    Bytes, Cluster, ExchangeKind, OperatorKind, Profile, Provenance, Seconds, Shape,
};

use splits::{CONTEXT, Open, mixed, one_by_one, plan, prompt, together};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Tokens of the prompt, and of a step at most.
const PROMPT: usize = 7;
const BATCH: usize = 4;
/// Tokens after the prompt.
const AFTER: usize = 3;

fn small() -> Recipe {
    Recipe { layers: 3, ..Recipe::llama(Quant::Q4_0, [4, 4, 32], 128, 256) }
}

/// Runs `lead` on rank 0 of a group whose other ranks are workers, and returns what it gives.
fn led<R: Send>(
    ranks: usize,
    network: &Arc<Network<Vec<u8>>>,
    lead: impl Fn(&mut Leader<'_>) -> R + Sync,
) -> R {
    let outcomes = on_all(group(ranks), |mut fabric| {
        if fabric.rank() > 0 {
            let worker = Worker {
                network,
                store: None,
                plan: None,
                threads: 1,
                timeout: TIMEOUT,
                order_timeout: TIMEOUT,
            };
            run_worker(&mut fabric, &worker).expect("the leader ends it");
            return None;
        }
        let mut leader = Leader::new(&mut fabric, TIMEOUT).expect("rank 0");
        Some(lead(&mut leader))
    });
    outcomes.into_iter().flatten().next().expect("rank 0 was there")
}

/// What all ranks did in a prompt and some tokens after it.
fn recorded(leader: &mut Leader<'_>, network: &Arc<Network<Vec<u8>>>, plan: &Plan) -> Vec<Mark> {
    let mut runner = leader.lay_out(network, plan, CONTEXT, BATCH, 1).expect("a layout");
    runner.record().expect("all are there");
    let mut session = Session::new(Box::new(runner));
    let mut fed = prompt(PROMPT, network.model().vocab);
    for _ in 0..=AFTER {
        let outcome = session.feed(&fed, Want::Best(1)).expect("a step");
        fed = vec![outcome.last().best[0].0];
    }
    drop(session);
    leader.marks().expect("all are there")
}

fn trace(cards: usize, marks: Vec<Mark>) -> Trace {
    let mut ends: BTreeMap<u32, f64> = BTreeMap::new();
    for mark in &marks {
        let end = ends.entry(mark.label.token).or_insert(0.0);
        *end = end.max(mark.end);
    }
    Trace { cards, tokens: ends.into_values().collect(), marks, incidents: vec![], events: 0 }
}

#[test]
fn trace_of_ranks_has_every_card_and_compares_with_the_prediction_in_causes_that_add_up() {
    let network = Arc::new(small().network());
    for groups in [together(&[1.0, 1.0]), together(&[1.0; 3]), one_by_one(2), mixed(3)] {
        let plan = plan(&network, Split::Gather, &groups);
        let request = Request {
            batch: BATCH as u64,
            prompt: PROMPT as u64,
            context: CONTEXT as u64,
            ..plan.request
        };
        let mut profile = plan.cluster.profile(0).clone();
        profile.link.as_mut().expect("a link").exchange = ExchangeKind::Messages;
        let ranks = plan.layout.cards().len();
        let cluster = Cluster::uniform(profile, ranks, Shape::Switch).expect("cards");
        let plan = Plan::new(plan.model, cluster, request, plan.layout).expect("a plan");
        let marks = led(ranks, &network, |leader| recorded(leader, &network, &plan));
        for card in 0..ranks as u32 {
            let mut own: Vec<&Mark> = marks.iter().filter(|mark| mark.card == card).collect();
            own.sort_by(|a, b| a.start.total_cmp(&b.start));
            assert!(own.windows(2).all(|pair| pair[0].end <= pair[1].start + 1e-9), "{groups:?}");
            assert!(own.iter().all(|mark| mark.start >= 0.0 && mark.end < 60.0));
        }
        let conditions = Conditions { prompt: true, ..Conditions::calm(AFTER as u32) };
        let predicted = simulate(&plan, &conditions).expect("a simulation");
        let comparison = compare(&predicted, &trace(ranks, marks.clone())).expect("one program");
        assert_eq!(comparison.cards.len(), ranks, "{groups:?}");
        assert_eq!(comparison.steps.len(), PROMPT.div_ceil(BATCH) + AFTER, "{groups:?}");
        for gap in comparison.cards.iter().map(|card| &card.gap).chain([&comparison.whole]) {
            assert!((gap.causes.total() - gap.seconds()).abs() < 1e-9, "{gap:?}");
            assert!(gap.causes.attributed() > 0.95, "{gap:?}");
        }
        // A rank whose marks did not arrive is noticed.
        let without: Vec<Mark> = marks.into_iter().filter(|mark| mark.card == 0).collect();
        assert!(compare(&predicted, &trace(ranks, without)).is_err(), "{groups:?}");
    }
}

#[test]
fn exchanges_of_two_ranks_end_after_both_have_come() {
    let network = Arc::new(small().network());
    let plan = plan(&network, Split::Gather, &together(&[1.0, 1.0]));
    let marks = led(2, &network, |leader| recorded(leader, &network, &plan));
    let exchanges = |card: u32| -> Vec<Mark> {
        let own = marks.iter().filter(|mark| mark.card == card);
        own.filter(|mark| mark.label.activity == Activity::Exchange).copied().collect()
    };
    let (here, there) = (exchanges(0), exchanges(1));
    assert!(!here.is_empty() && here.len() == there.len());
    for (one, other) in here.iter().zip(&there) {
        assert_eq!((one.op, one.label), (other.op, other.label));
        // Clocks are compared over messages between threads, which take less than this.
        let allowed = 1e-3;
        // Only a gather lets both wait: the root of a broadcast goes on.
        let both = one.start.max(other.start);
        assert!(one.end.max(other.end) + allowed >= both, "{one:?} {other:?}");
    }
}

#[test]
fn marks_are_forgotten_when_they_were_given_and_without_a_recording_there_are_none() {
    let network = Arc::new(small().network());
    let plan = plan(&network, Split::Gather, &together(&[1.0, 1.0]));
    let counts = led(3, &network, |leader| {
        let none = leader.marks().expect("nothing to ask for").len();
        let some = recorded(leader, &network, &plan).len();
        let again = leader.marks().expect("all are there").len();
        drop(leader.lay_out(&network, &plan, CONTEXT, BATCH, 1).expect("a layout"));
        [none, some, again, leader.marks().expect("nothing to ask for").len()]
    });
    assert!(counts[1] > 0);
    assert_eq!([counts[0], counts[2], counts[3]], [0; 3]);
}

#[test]
fn profile_of_ranks_is_measured_on_them_and_prices_messages() {
    let network = Arc::new(small().network());
    for groups in [together(&[1.0, 1.0]), one_by_one(2), mixed(3)] {
        let layout = Layout::of_groups(network.model(), Split::Gather, &groups).expect("a layout");
        let ranks = layout.cards().len();
        let subject = Subject { layout: &layout, batch: 16, threads: 1, memory: Bytes(8 << 30) };
        let (profile, after) = led(ranks, &network, |leader| {
            let profiles =
                leader.measure(&network, &subject, false, &mut |_| ()).expect("a profile");
            let [profile] = profiles.try_into().expect("one for all");
            // Prices of another day are replaced, those of sizes that are not measured again are not.
            let mut old = profile.clone();
            old.link.as_mut().expect("a link").latency.value = Seconds(1.0);
            let new = leader.refresh(&network, &subject, false, vec![old]).expect("a profile");
            let [new] = new.try_into().expect("one for all");
            let of = |profile: &Profile, rows: u64| {
                let all = profile.compute.operators.iter();
                all.filter(|entry| entry.kind == OperatorKind::Product && entry.rows == rows)
                    .cloned()
                    .collect::<Vec<_>>()
            };
            assert_eq!(new.compute.operators.len(), profile.compute.operators.len());
            assert_eq!(of(&new, 4), of(&profile, 4));
            assert_ne!(of(&new, 1), of(&profile, 1));
            assert!(new.link.expect("a link").latency.value.0 < 0.5);
            // Steps of a run come after it, on the same ranks.
            let plan = plan(&network, Split::Gather, &groups);
            (profile, recorded(leader, &network, &plan).len())
        });
        assert!(after > 0);
        assert_eq!(Profile::from_toml(&profile.to_toml()), Ok(profile.clone()));
        let link = profile.link.as_ref().expect("a link");
        assert_eq!(link.exchange, ExchangeKind::Messages);
        assert_eq!(link.latency.provenance, Provenance::Measured, "{groups:?}");
        assert!(!profile.compute.operators.is_empty());
        let cluster = Cluster::uniform(profile, ranks, Shape::Switch).expect("cards");
        let request = plan(&network, Split::Gather, &groups).request;
        let plan = Plan::new(network.model().clone(), cluster, request, layout.clone());
        let predicted = plan.expect("a plan").predict();
        assert!(predicted.tokens_per_second.is_finite() && predicted.tokens_per_second > 0.0);
    }
}

#[test]
fn ranks_on_machines_that_may_differ_have_profiles_of_their_own() {
    let network = Arc::new(small().network());
    let groups = together(&[1.0, 1.0, 1.0]);
    let layout = Layout::of_groups(network.model(), Split::Gather, &groups).expect("a layout");
    let subject = Subject { layout: &layout, batch: 16, threads: 1, memory: Bytes(8 << 30) };
    let profiles = led(3, &network, |leader| {
        let profiles = leader.measure(&network, &subject, true, &mut |_| ()).expect("profiles");
        assert_eq!(profiles.len(), 3);
        leader.refresh(&network, &subject, true, profiles).expect("profiles")
    });
    let operators = |at: usize| &profiles[at].compute.operators;
    assert!(operators(0) != operators(1) && operators(1) != operators(2));
    assert!(profiles.iter().all(|profile| profile.link == profiles[0].link));
}
