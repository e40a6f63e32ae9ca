// SPDX-License-Identifier: Apache-2.0
//! Ranks without the model's file ask for the bytes that they need, and for all of them: with everything else of the
//! file overwritten, the logits are the same.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use spanker_fabric::Fabric;
use spanker_fabric::conformance::on_all;
use spanker_fabric::inproc::group;
use spanker_llm::{Leader, Network, OnRanks, RunLogits, Store, Worker, run_logits, run_worker};
use spanker_model::Quant;
use spanker_plan::{Plan, Split};
use spanker_test_support::Recipe;

use splits::{CONTEXT, Open, STEPS, mixed, one_by_one, plan, prompt, run, together};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A file that is whole, and what was asked of it.
struct Asked {
    length: u64,
    ranges: RefCell<Vec<Range<u64>>>,
}

impl Store for Asked {
    fn length(&self) -> u64 {
        self.length
    }

    fn missing(&self, ranges: &[Range<u64>]) -> Result<Vec<u64>, String> {
        self.ranges.borrow_mut().extend_from_slice(ranges);
        Ok(Vec::new())
    }

    fn put(&self, number: u64, _: &[u8]) -> Result<(), String> {
        Err(format!("chunk {number} was not asked for"))
    }

    fn complete(&self) -> Result<(), String> {
        Ok(())
    }
}

type Net = Arc<Network<Vec<u8>>>;

/// The logits of a plan on ranks that have these files, and what each rank asked for.
fn run_with(files: &[Net], plan: &Plan, tokens: &[u32]) -> (RunLogits, Vec<Vec<Range<u64>>>) {
    let outcomes = on_all(group(files.len()), |mut fabric| {
        let rank = fabric.rank();
        let network = &files[rank];
        if rank > 0 {
            let length = network.bytes().len() as u64;
            let asked = Asked { length, ranges: RefCell::default() };
            let (store, timeout, order_timeout) = (Some(&asked as &dyn Store), TIMEOUT, TIMEOUT);
            let worker = Worker { network, store, plan: None, threads: 1, timeout, order_timeout };
            run_worker(&mut fabric, &worker).expect("the leader ends it");
            return (None, asked.ranges.into_inner());
        }
        let mut leader = Leader::new(&mut fabric, TIMEOUT).expect("rank 0").supplying();
        let ranks: Vec<usize> = (0..files.len()).collect();
        let space = (CONTEXT, 3);
        let progress = &mut |_, _| {};
        let runner = OnRanks::lay_out(&mut leader, network, plan, &ranks, space, 1, progress);
        let runner = runner.expect("a layout");
        (Some(run_logits(Box::new(runner), tokens, STEPS, None).expect("logits")), Vec::new())
    });
    let (mut logits, mut asked) = (None, Vec::new());
    for (found, ranges) in outcomes {
        logits = logits.or(found);
        asked.push(ranges);
    }
    (logits.expect("rank 0 was there"), asked)
}

/// A file with other bytes everywhere but in its header and these ranges.
fn with_holes(whole: &Net, ranges: &[Range<u64>]) -> Net {
    let mut bytes = vec![0x77; whole.bytes().len()];
    let header = 0..whole.header().data_offset();
    for range in ranges.iter().chain([&header]) {
        let range = range.start as usize..range.end as usize;
        bytes[range.clone()].copy_from_slice(&whole.bytes()[range]);
    }
    Arc::new(Network::new(bytes).expect("a network"))
}

#[test]
fn ranks_ask_for_all_that_they_need_and_less_than_the_file() {
    let recipe = Recipe { layers: 5, ..Recipe::llama(Quant::Q4_0, [6, 6, 32], 192, 352) };
    let whole = Arc::new(recipe.network());
    let tokens = prompt(7, recipe.vocab);
    for (split, groups) in [
        (Split::Gather, together(&[1.0, 1.0, 1.0])),
        (Split::Reduce, together(&[1.0, 2.0, 1.0])),
        (Split::Gather, one_by_one(3)),
        (Split::Gather, mixed(3)),
    ] {
        let plan = plan(&whole, split, &groups);
        let expected = run(&whole, &plan, &tokens);
        let files = vec![Arc::clone(&whole); 3];
        let (found, asked) = run_with(&files, &plan, &tokens);
        splits::assert_same("whole files", &found, &expected);
        let total = |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
        let length = whole.bytes().len() as u64;
        assert!(asked[1..].iter().all(|ranges| (1..length).contains(&total(ranges))));
        let holes = asked.iter().map(|ranges| with_holes(&whole, ranges));
        let mut files: Vec<Net> = holes.collect();
        files[0] = Arc::clone(&whole);
        let (found, _) = run_with(&files, &plan, &tokens);
        splits::assert_same("files with holes", &found, &expected);
        // The same with the first range left out: what is read there is noticed.
        files[2] = with_holes(&whole, &asked[2][1..]);
        let (found, _) = run_with(&files, &plan, &tokens);
        assert_ne!(found.fingerprint(), expected.fingerprint(), "{split:?} {groups:?}");
    }
}
