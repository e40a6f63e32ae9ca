// SPDX-License-Identifier: Apache-2.0
//! Ranks whose operators the leader computes a second time: honest ones are never accused, one that has other weights
//! or tells others something else than it has computed is named.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_fabric::conformance::on_all;
use spanker_fabric::inproc::{Inproc, group};
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool};
use spanker_llm::{
    AuditLog, Leader, LlmError, Network, OnRanks, Part, Runner, Session, Step, Twice, Want, Worker,
    run_worker,
};
use spanker_model::{KvShape, Quant};
use spanker_plan::{Objective, Plan, Split};
use spanker_test_support::Recipe;

use splits::{CONTEXT, Open, best, mixed, one_by_one, prompt, threads, together};

/// Longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

fn small() -> Recipe {
    Recipe { layers: 3, ..Recipe::llama(Quant::Q4_0, [6, 3, 32], 192, 352) }
}

fn plan(network: &Network<Vec<u8>>, split: Split, groups: &splits::Groups, audit: f64) -> Plan {
    let mut plan = splits::plan(network, split, groups);
    plan.request.audit = audit;
    plan
}

/// What a rank other than the leader brings: its copy of the file, and whether it tells others what it has computed.
struct Rank {
    network: Arc<Network<Vec<u8>>>,
    honest: bool,
}

/// Runs `lead` on rank 0 of a group of three.
fn led<R: Send>(ranks: &[Rank; 2], lead: impl Fn(&mut Leader<'_>) -> R + Sync) -> R {
    let outcomes = on_all(group(3), |mut fabric| {
        let Some(one) = fabric.rank().checked_sub(1) else {
            let mut leader = Leader::new(&mut fabric, TIMEOUT).expect("rank 0");
            return Some(lead(&mut leader));
        };
        let Rank { network, honest } = &ranks[one];
        let worker = Worker {
            network,
            store: None,
            plan: None,
            threads: 1,
            timeout: TIMEOUT,
            order_timeout: TIMEOUT,
        };
        let ended = match honest {
            true => run_worker(&mut fabric, &worker),
            false => run_worker(&mut Liar(fabric, Pool::default()), &worker),
        };
        ended.expect("the leader ends it");
        None
    });
    outcomes.into_iter().flatten().next().expect("rank 0 was there")
}

/// An end that changes a bit of what it sends to all others.
struct Liar(Inproc, Pool);

impl Fabric for Liar {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn ranks(&self) -> usize {
        self.0.ranks()
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(usize, Message)],
        receives: &[usize],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        let mut lie = |(to, message): &(usize, Message)| {
            let mut bytes = message.bytes().to_vec();
            // Reports go to rank 0 alone; what a collective moves goes to everybody.
            if sends.len() > 1 && bytes.len() > 64 {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x10;
            }
            (*to, self.1.write(bytes.len(), |out| out.copy_from_slice(&bytes)))
        };
        let sends: Vec<(usize, Message)> = sends.iter().map(&mut lie).collect();
        self.0.exchange(call, &sends, receives, deadline)
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        self.0.commit(call, deadline)
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.0.abort(error)
    }
}

/// Candidates until a step fails.
fn tried(runner: &mut dyn Runner, steps: usize) -> Option<LlmError> {
    (0..steps).find_map(|past| runner.step_alone(&[past as u32 % 60], past, Want::Best(2)).err())
}

#[test]
fn honest_ranks_are_never_accused_and_give_the_tokens_of_threads() {
    // What lies apart in the file is packed where it is computed again.
    let mixture = Recipe::llama(Quant::Q4_0, [6, 3, 32], 192, 96).mixture("qwen3moe", [5, 2, 0]);
    for recipe in [small(), Recipe { layers: 3, ..mixture }] {
        honest_ranks(&recipe);
    }
}

fn honest_ranks(recipe: &Recipe) {
    let network = Arc::new(recipe.network());
    let tokens = prompt(7, recipe.vocab);
    let honest = || Rank { network: Arc::clone(&network), honest: true };
    let layouts = [
        (Split::Gather, together(&[1.0; 3])),
        (Split::Reduce, together(&[1.0; 3])),
        (Split::Gather, one_by_one(3)),
        (Split::Gather, mixed(3)),
    ];
    for (split, groups) in layouts {
        for audit in [0.05, 0.6, 1.0] {
            let plan = plan(&network, split, &groups, audit);
            let expected = best(&mut Session::new(threads(&network, &plan, 3, 1)), &tokens, 9);
            let log = AuditLog::new(audit);
            let (found, memory) = led(&[honest(), honest()], |leader| {
                let mut runner = leader.lay_out(&network, &plan, CONTEXT, 3, 1).expect("a layout");
                runner.audit(&network, &plan, &log).expect("the same plan");
                let memory = runner.memory().to_vec();
                (best(&mut Session::new(Box::new(runner)), &tokens, 9), memory)
            });
            let what = format!("{split:?} {groups:?}, audit {audit}");
            assert_eq!(found, expected, "{what}");
            assert!(log.checked() > 9 && log.found().is_empty(), "{what}: {}", log.checked());
            for one in memory {
                assert_eq!(one.planned, one.allocated, "{what}, card {}", one.card);
            }
        }
    }
}

/// The error of a run with these ranks, and what the audit found.
fn wrong(ranks: &[Rank; 2], split: Split, audit: f64, twice: bool) -> (LlmError, AuditLog) {
    let network = Arc::new(small().network());
    let plan = plan(&network, split, &together(&[1.0; 3]), audit);
    let log = AuditLog::new(audit);
    let error = led(ranks, |leader| {
        let mut runner = leader.lay_out(&network, &plan, CONTEXT, 3, 1).expect("a layout");
        runner.audit(&network, &plan, &log).expect("the same plan");
        match twice {
            false => tried(&mut runner, CONTEXT),
            true => {
                let host = threads(&network, &plan, 3, 1);
                tried(&mut Twice::new(Box::new(runner), host), 4)
            }
        }
    });
    (error.expect("it is found"), log)
}

/// A copy of the file in which every row of one matrix has another scale.
fn corrupted() -> Arc<Network<Vec<u8>>> {
    let network = small().network();
    let header = network.header();
    let tensor = &header.tensors()["blk.1.ffn_up.weight"];
    let start = (header.data_offset() + tensor.offset) as usize;
    let range = start..start + tensor.bytes as usize;
    let row = tensor.quant.row_bytes(tensor.dims[0]) as usize;
    let mut file = network.bytes().to_vec();
    file[range].chunks_exact_mut(row).for_each(|row| row[1] ^= 0x04);
    Arc::new(Network::new(file).expect("the header is as it was"))
}

#[test]
fn rank_with_other_weights_is_named() {
    let honest = || Rank { network: Arc::new(small().network()), honest: true };
    for split in [Split::Gather, Split::Reduce] {
        for (audit, twice) in [(0.3, false), (1.0, true)] {
            let bad = Rank { network: corrupted(), honest: true };
            let (error, log) = wrong(&[honest(), bad], split, audit, twice);
            let text = error.to_string();
            assert!(text.contains("card 2"), "{split:?}, audit {audit}: {text}");
            let found = log.found();
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].card == 2 && found[0].what.contains("blk.1.ffn_up"), "{found:?}");
        }
    }
}

#[test]
fn rank_that_tells_others_something_else_than_it_has_is_named() {
    let network = Arc::new(small().network());
    let rank = |honest| Rank { network: Arc::clone(&network), honest };
    for split in [Split::Gather, Split::Reduce] {
        let (error, log) = wrong(&[rank(false), rank(true)], split, 0.01, false);
        let text = error.to_string();
        assert!(text.contains("card 1") && text.contains("other bytes"), "{split:?}: {text}");
        assert_eq!(log.found().len(), 1);
    }
}

#[test]
fn rank_that_is_wrong_in_the_midst_of_a_pipeline_is_left_out_and_the_others_go_on() {
    let recipe = small();
    let network = Arc::new(recipe.network());
    let tokens = prompt(5, recipe.vocab);
    let ranks = [
        // Its stage has the layer.
        Rank { network: corrupted(), honest: true },
        Rank { network: Arc::clone(&network), honest: true },
    ];
    // Three steps at a time, each of another sequence.
    let mut whole = plan(&network, Split::Gather, &one_by_one(3), 0.3);
    whole.request.objective = Objective::Throughput;
    whole.request.sequences = 3;
    let rest = plan(&network, Split::Gather, &together(&[1.0; 2]), 0.3);
    let expected = best(&mut Session::new(threads(&network, &rest, 3, 1)), &tokens, 6);
    let log = AuditLog::new(0.3);
    let (error, found) = led(&ranks, |leader| {
        let mut runner = leader.lay_out(&network, &whole, CONTEXT, 3, 1).expect("a layout");
        runner.audit(&network, &whole, &log).expect("the same plan");
        assert_eq!(runner.depth(), 3);
        let each = KvShape::blocks_for(CONTEXT as u64) as u32;
        let mut begin = |number: u32| {
            let (turn, past) = (number % 3, u64::from(number / 3));
            let blocks: Vec<u32> = (turn * each..(turn + 1) * each).collect();
            let parts = [Part::new(&tokens[..1], past, &blocks, Want::Best(2))];
            let step = Step { turn: turn.into(), ..Step::of(&parts) };
            runner.begin(&step).expect("it begins");
            // Two are under way when the first of three is looked at.
            if number < 2 { Ok(()) } else { runner.end().map(|_| ()) }
        };
        let error = (0..3 * CONTEXT as u32).find_map(|number| begin(number).err());
        let error = error.expect("other weights");
        drop(runner);
        // The same group, without the rank that was wrong.
        let runner =
            OnRanks::lay_out(leader, &network, &rest, &[0, 2], (CONTEXT, 3), 1, &mut |_, _| {});
        let mut runner = runner.expect("a layout");
        runner.audit(&network, &rest, &log).expect("the same plan");
        (error, best(&mut Session::new(Box::new(runner)), &tokens, 6))
    });
    assert!(error.to_string().contains("card 1"), "{error}");
    assert_eq!(found, expected);
}

#[test]
fn plan_runs_on_the_ranks_that_are_named_for_it() {
    let recipe = small();
    let network = Arc::new(recipe.network());
    let tokens = prompt(5, recipe.vocab);
    // Rank 1 has other weights, and nothing to do.
    let ranks = [
        Rank { network: corrupted(), honest: true },
        Rank { network: Arc::clone(&network), honest: true },
    ];
    let plan = plan(&network, Split::Gather, &together(&[1.0; 2]), 0.3);
    let expected = best(&mut Session::new(threads(&network, &plan, 3, 1)), &tokens, 9);
    let log = AuditLog::new(0.3);
    let (found, unknown) = led(&ranks, |leader| {
        let unknown = OnRanks::lay_out(
            &mut *leader,
            &network,
            &plan,
            &[0, 3],
            (CONTEXT, 3),
            1,
            &mut |_, _| {},
        );
        let unknown = unknown.map(|_| ()).expect_err("there is no rank 3").to_string();
        let runner =
            OnRanks::lay_out(leader, &network, &plan, &[0, 2], (CONTEXT, 3), 1, &mut |_, _| {});
        let mut runner = runner.expect("a layout");
        runner.audit(&network, &plan, &log).expect("the same plan");
        (best(&mut Session::new(Box::new(runner)), &tokens, 9), unknown)
    });
    assert_eq!(found, expected);
    assert!(log.found().is_empty());
    assert_eq!(unknown, "plan: it uses card 1, and there are 2 ranks");
}
