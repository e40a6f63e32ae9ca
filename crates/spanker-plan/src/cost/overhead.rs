// SPDX-License-Identifier: Apache-2.0
//! What schedules need besides the data that they move: working memory, and memory for messages that cards pass on.
//!
//! A schedule is counted once for each number of ranks; who passes its messages on depends on the cards.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use spanker_collective::{Algorithm, Collective, Transfer, schedule};
use spanker_topology::Cluster;

use super::exchange::usable;
use crate::program::{Overhead, Overheads, Wiring};

/// Elements of each rank in the schedules that memory is counted in.
const COUNTED: usize = 16;
/// What messages that are passed on begin at a multiple of.
const PASSED_ON: u64 = 64;

/// A schedule as far as memory goes.
#[derive(Debug, Default)]
struct Counted {
    /// Elements of the data.
    whole: f64,
    /// Elements of working memory.
    working: usize,
    /// Every message: from which rank, to which, and its elements.
    messages: Vec<(usize, usize, usize)>,
}

impl Counted {
    fn new(collective: Collective, algorithm: Algorithm, ranks: usize) -> Option<Counted> {
        let schedule = schedule(collective, algorithm, ranks, ranks * COUNTED).ok()?;
        let mut messages = Vec::new();
        for from in 0..ranks {
            let transfers = schedule.program(from).iter().flat_map(|step| &step.transfers);
            messages.extend(transfers.filter_map(|transfer| match *transfer {
                Transfer::Send { to, span } => Some((from, to, span.len)),
                Transfer::Recv { .. } => None,
            }));
        }
        let whole = schedule.data_len().max(1) as f64;
        Some(Counted { whole, working: schedule.scratch_len(), messages })
    }
}

/// A collective, an algorithm and the number of ranks.
type Key = (Collective, Algorithm, usize);

/// Schedules that were counted.
#[derive(Debug, Default)]
pub(super) struct Counts(RefCell<HashMap<Key, Option<Rc<Counted>>>>);

impl Counts {
    fn of(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        ranks: usize,
    ) -> Option<Rc<Counted>> {
        let mut known = self.0.borrow_mut();
        let counted = known
            .entry((collective, algorithm, ranks))
            .or_insert_with(|| Counted::new(collective, algorithm, ranks).map(Rc::new));
        counted.clone()
    }
}

/// The most that any schedule of a model's exchanges needs besides the data, on any card of a group.
pub(super) fn overheads(cluster: &Cluster, cards: &[usize], counts: &Counts) -> Overheads {
    let (ranks, wiring) = (cards.len(), Wiring::of(cluster, cards).ok());
    let most = |collective: Collective| {
        let all = usable(collective, ranks);
        let counted = all.filter_map(|algorithm| counts.of(collective, algorithm, ranks));
        let each = counted.map(|counted| overhead(&counted, ranks, &wiring));
        each.fold(Overhead::default(), |most, one| Overhead {
            working: most.working.max(one.working),
            passed_on: most.passed_on.max(one.passed_on),
            slack: most.slack.max(one.slack),
        })
    };
    Overheads { gather: most(Collective::AllGather), reduce: most(Collective::AllReduce) }
}

/// What one schedule needs besides the data.
fn overhead(counted: &Counted, ranks: usize, wiring: &Option<Wiring>) -> Overhead {
    let mut passed = vec![(0usize, 0u64); ranks];
    if let Some(wiring) = wiring {
        for &(from, to, elements) in &counted.messages {
            for rank in wiring.between(from, to) {
                passed[rank].0 += elements;
                passed[rank].1 += 1;
            }
        }
    }
    let elements = passed.iter().map(|passed| passed.0).max().unwrap_or(0);
    let messages = passed.iter().map(|passed| passed.1).max().unwrap_or(0);
    Overhead {
        working: counted.working as f64 / counted.whole,
        passed_on: elements as f64 / counted.whole,
        // Chunks of a buffer that does not divide evenly are an element longer.
        slack: PASSED_ON * (messages + 1) + 8 * (ranks * ranks) as u64,
    }
}
