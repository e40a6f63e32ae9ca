// SPDX-License-Identifier: Apache-2.0
//! Plans for tiny models by order, and the bits that come of them.

use std::sync::Arc;

use spanker_llm::{InProcess, Network, RunLogits, Runner, Session, Want, run_logits};
use spanker_model::Quant;
use spanker_plan::{Layout, Objective, Plan, Request, Split};
use spanker_test_support::Recipe;
use spanker_topology::{Cluster, Profile, Shape};

/// Tokens that all tests have room for.
pub const CONTEXT: usize = 64;
/// Tokens that are compared after a prompt.
pub const STEPS: usize = 3;

/// What there are recipes for.
pub trait Open {
    fn network(&self) -> Network<Vec<u8>>;
}

impl Open for Recipe {
    fn network(&self) -> Network<Vec<u8>> {
        Network::new(self.file()).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

/// Groups of cards with their shares.
pub type Groups = Vec<Vec<(usize, f64)>>;

/// One group of cards with these shares.
pub fn together(shares: &[f64]) -> Groups {
    vec![shares.iter().copied().enumerate().collect()]
}

/// A stage for each card.
pub fn one_by_one(cards: usize) -> Groups {
    (0..cards).map(|card| vec![(card, 1.0)]).collect()
}

/// Two stages.
pub fn mixed(cards: usize) -> Groups {
    let all: Vec<(usize, f64)> = (0..cards).map(|card| (card, 1.0)).collect();
    let (one, two) = all.split_at(cards.div_ceil(2));
    vec![one.to_vec(), two.to_vec()]
}

pub fn plan_of(network: &Network<Vec<u8>>, layout: Layout, shape: Shape) -> Plan {
    let profile = Profile::builtin("rev-a").expect("a profile");
    let cluster = Cluster::uniform(profile, layout.cards().len(), shape).expect("cards");
    let request = Request { kv: Quant::F16, ..Request::new(Objective::Latency) };
    Plan::new(network.model().clone(), cluster, request, layout).expect("a plan")
}

pub fn plan(network: &Network<Vec<u8>>, split: Split, groups: &[Vec<(usize, f64)>]) -> Plan {
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    plan_of(network, layout, Shape::Switch)
}

/// Threads of this process.
pub fn threads(
    network: &Arc<Network<Vec<u8>>>,
    plan: &Plan,
    batch: usize,
    threads: usize,
) -> Box<dyn Runner> {
    let runner = InProcess::new(Arc::clone(network), plan, CONTEXT, batch, threads);
    Box::new(runner.expect("cards"))
}

/// The run_logits of a prompt on cards that are threads, one thread each.
pub fn run(network: &Arc<Network<Vec<u8>>>, plan: &Plan, prompt: &[u32]) -> RunLogits {
    run_logits(threads(network, plan, 3, 1), prompt, STEPS, None).expect("a run_logits")
}

/// Different tokens, all of a vocabulary.
pub fn prompt(length: usize, vocab: u64) -> Vec<u32> {
    (0..length as u64).map(|at| ((at * 29 + 11) % vocab) as u32).collect()
}

/// Every bit is that of the reference.
pub fn assert_same(what: &str, found: &RunLogits, reference: &RunLogits) {
    assert_eq!(found.tokens, reference.tokens, "{what}");
    let lengths =
        |run_logits: &RunLogits| run_logits.logits.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(lengths(found), lengths(reference), "{what}");
    assert_eq!(found.difference(reference), None, "{what}");
}

/// Tokens and candidates that a session gives after a prompt.
pub fn best(session: &mut Session<'_>, prompt: &[u32], count: usize) -> Vec<Vec<(u32, f32)>> {
    let mut fed = prompt.to_vec();
    let mut all = Vec::new();
    for _ in 0..count {
        let outcome = session.feed(&fed, Want::Best(4)).expect("a step");
        let best = outcome.last().best.clone();
        fed = vec![best[0].0];
        all.push(best);
    }
    all
}
