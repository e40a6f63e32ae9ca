// SPDX-License-Identifier: Apache-2.0
//! Steps of several sequences, which no runner's interface has yet.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "../../tests/support/splits.rs"]
mod splits;

use std::sync::Arc;
use std::time::Instant;

use spanker_model::Quant;
use spanker_plan::{Layout, Part, Split, Step, Want};
use spanker_test_support::Recipe;
use spanker_topology::Shape;

use super::*;
use splits::{Groups, Open, mixed, one_by_one, plan_of, together};

const CONTEXT: usize = 16;
const BATCH: usize = 12;

/// A network on threads with room for so many sequences.
fn threads(
    network: &Arc<Network<Vec<u8>>>,
    split: Split,
    groups: &Groups,
    sequences: u64,
) -> InProcess<Vec<u8>> {
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    let plan = plan_of(network, layout, Shape::Ring);
    let mut planned = planned(network, &plan, CONTEXT, BATCH, 2).expect("a plan");
    planned.space.sequences = sequences;
    let (programs, memories) = card::allocate(network, &planned, &|_| true).expect("memory");
    let layouts = planned.cards();
    InProcess::start(Arc::clone(network), programs, &layouts, memories, 2, false).expect("threads")
}

/// What a step gives back for each of its parts.
fn run(runner: &mut InProcess<Vec<u8>>, step: &Step<'_>) -> Vec<Outcome> {
    runner.programs.check(step).expect("a step that can be");
    let programs = Arc::new(runner.programs.step(step, &|from, to| vec![from, to]));
    let mut one = |part: usize| {
        let programs = Arc::clone(&programs);
        let reports = runner.go_for(programs, (step, part), false, Instant::now());
        let reports = reports.expect("a step");
        Outcome { timing: Default::default(), ..outcome(step.parts[part].want, &reports) }
    };
    (0..step.parts.len()).map(&mut one).collect()
}

fn outcome(want: Want, reports: &[Report]) -> Outcome {
    card::outcome(want, Duration::ZERO, reports)
}

#[test]
fn sequences_of_one_step_get_what_each_asks_for_as_if_they_were_alone() {
    let recipe = Recipe::llama(Quant::Q4_0, [4, 2, 32], 128, 192);
    let network = Arc::new(recipe.network());
    let part = |sequence, tokens: &'static [u32], want| Part { sequence, tokens, past: 0, want };
    let parts = [
        part(0, &[5, 6, 7], Want::Best(3)),
        part(2, &[9], Want::Logits),
        part(1, &[1, 2], Want::Nothing),
        part(3, &[70, 3, 4, 4], Want::Best(40)),
        part(4, &[8], Want::Best(1)),
    ];
    for (split, groups) in [
        (Split::Gather, together(&[1.0])),
        (Split::Gather, together(&[1.0, 1.0])),
        (Split::Gather, together(&[2.0, 1.0, 1.0])),
        (Split::Gather, one_by_one(2)),
        (Split::Gather, mixed(3)),
    ] {
        let together = run(&mut threads(&network, split, &groups, 5), &Step { parts: &parts });
        for (one, outcome) in parts.iter().zip(together) {
            let alone = Part { sequence: 0, ..*one };
            let mut runner = threads(&network, split, &groups, 1);
            let expected = run(&mut runner, &Step { parts: &[alone] });
            assert_eq!(outcome, expected[0], "{groups:?}: sequence {}", one.sequence);
            let length = match one.want {
                Want::Best(k) => k as usize,
                _ => 0,
            };
            assert_eq!(outcome.best.len(), length, "{groups:?}");
            assert_eq!(outcome.logits.is_some(), one.want == Want::Logits);
        }
    }
}
