// SPDX-License-Identifier: Apache-2.0
//! Ranks of a fabric give the bits of cards that are threads; a rank that dies, lags behind or means something else is
//! named to all others. Ranks are threads here, each with one end of a fabric and nothing else in common.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::sync::Arc;
use std::time::Duration;

use spanker_fabric::conformance::on_all;
use spanker_fabric::inproc::{Inproc, group};
use spanker_fabric::{Fabric, FabricError};
use spanker_llm::{
    Leader, LlmError, Network, RunLogits, Runner, Session, Want, Worker, run_logits, run_worker,
};
use spanker_model::Quant;
use spanker_plan::{Plan, Split};
use spanker_test_support::Recipe;
use spanker_topology::{BytesPerSecond, Cluster, ExchangeKind, Seconds, Shape};

use splits::{CONTEXT, Open, STEPS};
use splits::{assert_same, best, mixed, one_by_one, plan, prompt, run, threads, together};

/// Longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

fn small() -> Recipe {
    Recipe { layers: 5, ..Recipe::llama(Quant::Q4_0, [5, 5, 32], 160, 352) }
}

/// What a rank that is not the leader does.
fn worker(fabric: &mut Inproc, network: &Arc<Network<Vec<u8>>>) -> Result<(), LlmError> {
    run_worker(
        fabric,
        &Worker {
            network,
            store: None,
            plan: None,
            threads: 1,
            timeout: TIMEOUT,
            order_timeout: TIMEOUT,
        },
    )
}

/// Runs `lead` on rank 0 of a group whose other ranks are workers, and returns what it gives. All ranks end well.
fn led<R: Send>(
    ranks: usize,
    network: &Arc<Network<Vec<u8>>>,
    lead: impl Fn(&mut Leader<'_>) -> R + Sync,
) -> R {
    let outcomes = on_all(group(ranks), |mut fabric| {
        if fabric.rank() > 0 {
            worker(&mut fabric, network).expect("the leader ends it");
            return None;
        }
        let mut leader = Leader::new(&mut fabric, TIMEOUT).expect("rank 0");
        Some(lead(&mut leader))
    });
    outcomes.into_iter().flatten().next().expect("rank 0 was there")
}

fn logits_of(
    leader: &mut Leader<'_>,
    network: &Arc<Network<Vec<u8>>>,
    plan: &Plan,
    tokens: &[u32],
) -> RunLogits {
    let runner = leader.lay_out(network, plan, CONTEXT, 3, 1).expect("a layout");
    run_logits(Box::new(runner), tokens, STEPS, None).expect("logits")
}

#[test]
fn ranks_have_the_bits_of_threads_for_every_split_and_number() {
    let recipe = small();
    let network = Arc::new(recipe.network());
    let tokens = prompt(7, recipe.vocab);
    for ranks in 1..=5 {
        let mut layouts = vec![
            (Split::Gather, together(&vec![1.0; ranks])),
            (Split::Reduce, together(&vec![1.0; ranks])),
            (Split::Gather, one_by_one(ranks)),
        ];
        if ranks > 2 {
            layouts.push((Split::Gather, mixed(ranks)));
            layouts.push((Split::Reduce, mixed(ranks)));
        }
        for (split, groups) in layouts {
            let plan = plan(&network, split, &groups);
            let found = led(ranks, &network, |leader| logits_of(leader, &network, &plan, &tokens));
            let what = format!("{ranks} ranks, {split:?} {groups:?}");
            assert_same(&what, &found, &run(&network, &plan, &tokens));
            if split == Split::Gather {
                let one = splits::plan(&network, Split::Gather, &together(&[1.0]));
                assert_same(&what, &found, &run(&network, &one, &tokens));
            }
        }
    }
}

/// The same plan for ranks whose links are that slow, which exchange in messages.
fn over_links(plan: Plan, latency: f64, bandwidth: u64) -> Plan {
    let mut profile = plan.cluster.profile(0).clone();
    let link = profile.link.as_mut().expect("a link");
    link.exchange = ExchangeKind::Messages;
    link.latency.value = Seconds(latency);
    (link.bandwidth.value, link.framing) = (BytesPerSecond(bandwidth), None);
    let cluster = Cluster::uniform(profile, plan.cluster.cards(), Shape::Switch).expect("cards");
    Plan::new(plan.model, cluster, plan.request, plan.layout).expect("a plan")
}

#[test]
fn ranks_have_the_bits_of_threads_whatever_their_links_make_the_cheapest_algorithms() {
    let recipe = small();
    let network = Arc::new(recipe.network());
    let tokens = prompt(7, recipe.vocab);
    let mut algorithms: Vec<&str> = Vec::new();
    for ranks in 2..=6 {
        let uneven: Vec<f64> = (1..=ranks).map(|share| share as f64).collect();
        for (split, groups) in [
            (Split::Gather, together(&uneven)),
            (Split::Reduce, together(&vec![1.0; ranks])),
            (Split::Reduce, mixed(ranks)),
        ] {
            let plan = plan(&network, split, &groups);
            let reference = run(&network, &plan, &tokens);
            for (latency, bandwidth) in [(1e-3, 100_000_000_000), (1e-9, 1 << 20)] {
                let plan = over_links(plan.clone(), latency, bandwidth);
                let used = [1, 3].map(|rows| plan.exchanges_of(rows).concat()).concat();
                algorithms.extend(used.iter().map(|exchange| exchange.algorithm));
                let found =
                    led(ranks, &network, |leader| logits_of(leader, &network, &plan, &tokens));
                let what = format!("{ranks} ranks, {split:?} {groups:?}, {latency} s");
                assert_same(&what, &found, &reference);
            }
        }
    }
    algorithms.sort_unstable();
    algorithms.dedup();
    for used in ["one-shot", "two-shot", "ring"] {
        assert!(algorithms.contains(&used), "{used} of {algorithms:?}");
    }
}

#[test]
fn candidates_of_a_last_stage_elsewhere_reach_the_front() {
    let recipe = small();
    let network = Arc::new(recipe.network());
    let tokens = prompt(5, recipe.vocab);
    for groups in [one_by_one(3), mixed(3), mixed(4), together(&[3.0, 1.0])] {
        let plan = plan(&network, Split::Gather, &groups);
        let expected = best(&mut Session::new(threads(&network, &plan, 3, 1)), &tokens, 4);
        let ranks = plan.layout.cards().len();
        let (found, sent) = led(ranks, &network, |leader| {
            let runner = leader.lay_out(&network, &plan, CONTEXT, 3, 1).expect("a layout");
            let mut session = Session::new(Box::new(runner));
            let found = best(&mut session, &tokens, 4);
            session.heartbeat().expect("all are there");
            let timing = session.feed(&[1], Want::Best(1)).expect("a step").timing;
            (found, timing.sent)
        });
        assert_eq!(found, expected, "{groups:?}");
        assert!(sent > 0, "{groups:?}: what other ranks send is counted");
    }
}

#[test]
fn ranks_without_a_card_wait_and_the_front_need_not_have_one() {
    let recipe = small();
    let network = Arc::new(recipe.network());
    let tokens = prompt(4, recipe.vocab);
    let reference = run(&network, &plan(&network, Split::Gather, &together(&[1.0])), &tokens);
    let whole = plan(&network, Split::Gather, &together(&[1.0; 4]));
    for groups in [vec![vec![(0, 1.0), (1, 1.0)]], vec![vec![(3, 1.0)], vec![(1, 1.0), (2, 1.0)]]] {
        let layout = spanker_plan::Layout::of_groups(network.model(), Split::Gather, &groups);
        let (cluster, request) = (whole.cluster.clone(), whole.request.clone());
        let plan = Plan::new(network.model().clone(), cluster, request, layout.expect("a layout"));
        let plan = plan.expect("a plan");
        let found = led(4, &network, |leader| logits_of(leader, &network, &plan, &tokens));
        assert_same(&format!("{groups:?}"), &found, &reference);
    }
}

#[test]
fn plans_one_after_the_other_run_on_the_same_ranks() {
    let recipe = small();
    let network = Arc::new(recipe.network());
    let tokens = prompt(4, recipe.vocab);
    let plans = [
        plan(&network, Split::Gather, &together(&[1.0; 3])),
        plan(&network, Split::Reduce, &together(&[1.0; 3])),
        plan(&network, Split::Gather, &one_by_one(2)),
    ];
    let found = led(3, &network, |leader| {
        plans.iter().map(|plan| logits_of(leader, &network, plan, &tokens)).collect::<Vec<_>>()
    });
    for (found, plan) in found.iter().zip(&plans) {
        assert_same("one of three", found, &run(&network, plan, &tokens));
    }
}

#[test]
fn steps_and_plans_that_cannot_be_leave_the_ranks_as_they_were() {
    let recipe = small();
    let network = Arc::new(recipe.network());
    let two = plan(&network, Split::Gather, &together(&[1.0; 2]));
    let five = plan(&network, Split::Gather, &together(&[1.0; 5]));
    let texts = led(2, &network, |leader| {
        let many = leader.lay_out(&network, &five, CONTEXT, 3, 1).expect_err("too many cards");
        let mut runner = leader.lay_out(&network, &two, CONTEXT, 3, 1).expect("a layout");
        let mut step =
            |tokens: &[u32], past| runner.step_alone(tokens, past, Want::Best(1)).map(|_| ());
        let token = step(&[9999], 0).expect_err("no such token");
        let context = step(&[1, 2], CONTEXT).expect_err("no room");
        step(&[1, 2], 0).expect("the ranks are as they were");
        [many, token, context].map(|error| error.to_string())
    });
    assert_eq!(texts[0], "plan: it uses card 2, and there are 2 ranks");
    assert_eq!(texts[1], "token 9999 is not in a vocabulary of 71");
    assert_eq!(texts[2], "66 tokens do not fit a context of 64");
}

/// Runs steps on three ranks until there is a fault; `act` plays rank 2. Returns everybody's error.
fn disturbed(
    network: &Arc<Network<Vec<u8>>>,
    act: impl Fn(Inproc) -> Option<LlmError> + Sync,
) -> Vec<LlmError> {
    let plan = plan(network, Split::Gather, &together(&[1.0; 3]));
    let outcomes = on_all(group(3), |mut fabric| match fabric.rank() {
        2 => act(fabric),
        1 => Some(worker(&mut fabric, network).expect_err("a fault")),
        _ => {
            let mut leader = Leader::new(&mut fabric, TIMEOUT).expect("rank 0");
            let mut lead = || -> Result<(), LlmError> {
                let mut runner = leader.lay_out(network, &plan, CONTEXT, 3, 1)?;
                for past in 0..CONTEXT {
                    runner.step_alone(&[1], past, Want::Best(1))?;
                }
                Ok(())
            };
            Some(lead().expect_err("a fault"))
        }
    });
    outcomes.into_iter().flatten().collect()
}

/// An end that dies after so many exchanges.
struct Mortal {
    inner: Option<Inproc>,
    left: usize,
}

impl Fabric for Mortal {
    fn rank(&self) -> usize {
        2
    }

    fn ranks(&self) -> usize {
        3
    }

    fn exchange(
        &mut self,
        call: &spanker_fabric::Call,
        sends: &[(usize, spanker_fabric::Message)],
        receives: &[usize],
        deadline: std::time::Instant,
    ) -> Result<Vec<spanker_fabric::Message>, FabricError> {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => self.inner = None,
        }
        let gone = FabricError::Died { rank: 2 };
        self.inner
            .as_mut()
            .map_or(Err(gone), |inner| inner.exchange(call, sends, receives, deadline))
    }

    fn commit(
        &mut self,
        call: &spanker_fabric::Call,
        deadline: std::time::Instant,
    ) -> Result<(), FabricError> {
        let gone = FabricError::Died { rank: 2 };
        self.inner.as_mut().map_or(Err(gone), |inner| inner.commit(call, deadline))
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.inner.as_mut().map_or(error.clone(), |inner| inner.abort(error))
    }
}

#[test]
fn rank_that_dies_anywhere_is_named_to_all_others() {
    let recipe = Recipe { layers: 2, ..small() };
    let network = Arc::new(recipe.network());
    for left in [0, 1, 2, 5, 9, 13, 40] {
        let errors = disturbed(&network, |fabric| {
            let mut fabric = Mortal { inner: Some(fabric), left };
            let (network, timeout) = (&network, TIMEOUT);
            let _ = run_worker(
                &mut fabric,
                &Worker {
                    network,
                    store: None,
                    plan: None,
                    threads: 1,
                    timeout,
                    order_timeout: timeout,
                },
            );
            None
        });
        assert_eq!(errors.len(), 2);
        for error in errors {
            assert_eq!(error.to_string(), "rank 2 died", "after {left} exchanges");
            assert!(matches!(error, LlmError::Fabric(FabricError::Died { rank: 2 })));
        }
    }
}

#[test]
fn rank_with_another_plan_or_model_is_told_so_and_so_are_all_others() {
    let network = Arc::new(small().network());
    let other = plan(&network, Split::Gather, &one_by_one(3));
    let errors = disturbed(&network, |mut fabric| {
        let (plan, timeout) = (Some(&other), TIMEOUT);
        let worker = Worker {
            network: &network,
            store: None,
            plan,
            threads: 1,
            timeout,
            order_timeout: timeout,
        };
        Some(run_worker(&mut fabric, &worker).expect_err("another plan"))
    });
    assert_eq!(errors.len(), 3);
    for error in &errors {
        let text = error.to_string();
        assert!(text.starts_with("rank 2 and rank 0 disagree on the plan: "), "{text}");
    }
    let strange = Arc::new(Recipe { seed: 5, base: 500.0, ..small() }.network());
    let errors = disturbed(&network, |mut fabric| {
        Some(worker(&mut fabric, &strange).expect_err("another model"))
    });
    assert_eq!(errors.len(), 3);
    for error in &errors {
        let text = error.to_string();
        assert!(text.starts_with("rank 2 and rank 0 disagree on the model: "), "{text}");
    }
}

#[test]
fn silent_front_is_given_up_and_one_that_beats_is_not() {
    let network = Arc::new(small().network());
    let timeout = Duration::from_millis(1500);
    let everyone_done = std::sync::Barrier::new(3);
    let errors = on_all(group(3), |mut fabric| {
        let outcome = if fabric.rank() == 0 {
            let mut leader = Leader::new(&mut fabric, TIMEOUT).expect("rank 0");
            for _ in 0..8 {
                std::thread::sleep(timeout / 7);
                leader.heartbeat().expect("they are patient enough");
            }
            // From here on it is there, but says nothing.
            everyone_done.wait();
            leader.heartbeat()
        } else {
            let worker = Worker {
                network: &network,
                store: None,
                plan: None,
                threads: 1,
                timeout,
                order_timeout: timeout,
            };
            let outcome = run_worker(&mut fabric, &worker);
            everyone_done.wait();
            outcome
        };
        outcome.expect_err("a fault").to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert!(errors[0].ends_with("deadline passed waiting to receive from rank 0"), "{}", errors[0]);
}

#[test]
fn front_that_gives_up_ends_all_others_with_its_words() {
    let network = Arc::new(small().network());
    let errors = on_all(group(3), |mut fabric| {
        if fabric.rank() > 0 {
            return worker(&mut fabric, &network).expect_err("it gives up").to_string();
        }
        let mut leader = Leader::new(&mut fabric, TIMEOUT).expect("rank 0");
        leader.ping(100_000).expect("all are there");
        leader.give_up("no such file");
        leader.heartbeat().expect_err("it gave up").to_string()
    });
    assert_eq!(errors, ["rank 0: no such file"; 3]);
}

#[test]
fn front_that_is_not_rank_0_is_refused() {
    let mut ends = group(2);
    let error = Leader::new(&mut ends[1], TIMEOUT).expect_err("rank 1");
    assert_eq!(error.to_string(), "rank 1 cannot be the leader, which is rank 0");
}
