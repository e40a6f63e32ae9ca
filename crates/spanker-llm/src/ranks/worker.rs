// SPDX-License-Identifier: Apache-2.0
//! What every rank but the leader does: wait for an order, carry it out, wait for the next.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_fabric::{Fabric, FabricError};
use spanker_plan::{ExchangeTable, Mark, Plan};

use super::order::Order;
use super::part::{self, RankPart, Stepping};
use super::record;
use super::supply::Store;
use super::wire::{End, Wire};
use crate::card::{self, Report};
use crate::fingerprint;
use crate::layout;
use crate::runner::Asked;
use crate::{LlmError, Network};

/// What a rank brings along.
pub struct Worker<'n, B> {
    /// Its own copy of the model's file.
    pub network: &'n Arc<Network<B>>,
    /// What fills that copy, if it has holes; the leader has to be [`supplying`](super::Leader::supplying).
    pub store: Option<&'n dyn Store>,
    /// The plan whose layout it expects, if it knows one; another layout is refused.
    pub plan: Option<&'n Plan>,
    /// Threads that share its part.
    pub threads: usize,
    /// How long it waits for another rank in a step.
    pub timeout: Duration,
    /// How long it waits for an order of the leader.
    pub order_timeout: Duration,
}

/// Does what the leader says until that says that it is over.
///
/// # Errors
/// [`LlmError::Fabric`] with the group's fault, which names a rank: this one, if it has another model or plan
/// than the leader, or not the memory.
pub fn run_worker<B: AsRef<[u8]> + Send + Sync>(
    fabric: &mut dyn Fabric,
    worker: &Worker<'_, B>,
) -> Result<(), LlmError> {
    let mut wire = Wire::new(End::Lent(fabric), worker.timeout);
    wire.wait_for_orders(worker.order_timeout);
    let mut rank_part: Option<RankPart<B>> = None;
    // What was done in steps that were asked for nothing is told with the next that is.
    let mut untold = (Duration::ZERO, 0);
    let mut recorded: Option<Vec<Mark>> = None;
    let mut expected = worker.plan;
    loop {
        match wire.next()? {
            Order::Over => return Ok(wire.part()?),
            Order::Heartbeat { .. } | Order::Clock { .. } => {}
            Order::Record => recorded = Some(Vec::new()),
            Order::Collect => record::hand_over(&mut wire, recorded.as_mut())?,
            Order::Fetch { ranges } => {
                let Some(store) = worker.store else {
                    return Err(wire.refuse("its file has no holes".into()).into());
                };
                let ranges: Vec<_> = ranges.iter().map(|&[from, to]| from..to).collect();
                wire.fetch_chunks(store, &ranges)?;
            }
            Order::Plan { network, context, batch, filled, supplied, ranks, exchanges, json } => {
                // The last one's memory is free for this one.
                drop(rank_part.take());
                (untold, recorded) = ((Duration::ZERO, 0), None);
                let space = (context as usize, batch as usize, (filled, supplied));
                // Measurements have layouts of their own, and so has what follows a rank that was left out.
                let plan = if filled { None } else { expected.take() };
                let worker = Worker { plan, ..*worker };
                let order = (&json[..], &ranks[..], &exchanges[..]);
                rank_part = Some(take_part(&mut wire, &worker, network, space, order)?);
            }
            Order::Step { step, layers, salt } => {
                let begun = Instant::now();
                let Some(rank_part) = &mut rank_part else {
                    return Err(wire.refuse("there is no plan to run a step of".into()).into());
                };
                let traced = recorded.is_some();
                let ran = step.with(|step| {
                    layout::check(&rank_part.programs, rank_part.vocab, step)
                        .map_err(|error| wire.refuse(error.to_string()))?;
                    let of = Stepping { step, layers: &layers, salt, traced };
                    let ran = rank_part.step(&mut wire, of, begun)?;
                    let told = step.outputs() > 0 || rank_part.is_tapped();
                    Ok::<_, FabricError>((ran.report, Asked::of(step).past, told))
                });
                let (Some(report), past, told) = ran? else { continue };
                if let Some(recorded) = &mut recorded {
                    let (card, since) = (rank_part.number(), wire.clock(begun));
                    recorded.extend(record::by_clock(&report, card, past, since));
                }
                untold = (untold.0 + report.sync, untold.1 + report.sent);
                if told {
                    let (sync, sent) = std::mem::take(&mut untold);
                    let report = Report { sync, sent, ..report };
                    wire.report(rank_part.steps, &part::write(&report))?;
                }
            }
        }
    }
}

/// Lays out this rank's part of the leader's plan, if it agrees to it.
fn take_part<B: AsRef<[u8]> + Send + Sync>(
    wire: &mut Wire<'_>,
    worker: &Worker<'_, B>,
    network: u64,
    (context, batch, (filled, supplied)): (usize, usize, (bool, bool)),
    (json, ranks, exchanges): (&str, &[u32], &[u8]),
) -> Result<RankPart<B>, FabricError> {
    let own = worker.network.fingerprint();
    if own != network {
        return Err(wire.disagree("model", own, network));
    }
    let stamp = super::plan_stamp(json, exchanges);
    let rank = wire.rank();
    let plan = Plan::from_json(json).map_err(|error| error.to_string());
    // Prices are the leader's: it has measured the ranks.
    if let (Some(expected), Ok(plan)) = (worker.plan, &plan) {
        let number = |plan: &Plan| fingerprint(format!("{:?}", plan.layout).bytes());
        let (own, theirs) = (number(expected), number(plan));
        if own != theirs {
            return Err(wire.disagree("plan", own, theirs));
        }
    }
    let rank_part = plan.and_then(|plan| {
        let (network, threads) = (worker.network, worker.threads);
        let planned = super::planned(network, &plan, (context, batch), threads, filled);
        let rank_part = planned.and_then(|planned| {
            let groups = planned.stages().iter().map(|stage| stage.group.cards.len());
            let groups: Vec<usize> = groups.collect();
            let table = ExchangeTable::from_bytes(exchanges, &groups);
            let table = table.ok_or_else(|| LlmError::plan("its exchanges make no sense"))?;
            if supplied {
                let store = worker.store.ok_or_else(|| LlmError::plan("its file has no holes"))?;
                let ours = |card: usize| ranks.get(card).is_some_and(|&one| one as usize == rank);
                let needed = card::needed(network, &planned, &ours)?;
                wire.fetch_chunks(store, &needed)?;
            }
            RankPart::new(network, &planned, (rank, ranks), table, threads, filled)
        });
        rank_part.map_err(|error: LlmError| error.to_string())
    });
    let rank_part = rank_part.map_err(|reason| wire.refuse(reason))?;
    wire.settle(stamp, worker.network.bytes().len() as u64)?;
    if rank_part.ranks.contains(&rank) {
        let said = [rank_part.planned, rank_part.allocated()].map(u64::to_le_bytes).concat();
        wire.report(super::LAID_OUT, &said)?;
    }
    Ok(rank_part)
}
