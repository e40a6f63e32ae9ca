// SPDX-License-Identifier: Apache-2.0
//! How an exchange of a model is run, and what it takes: the one place that plans, simulations and runs ask.
//!
//! | cards exchange | method | price |
//! |---|---|---|
//! | by schedules on padded buffers | the cheapest schedule for the very size | its schedule, simulated on the wires |
//! | in messages | the cheapest schedule for the next power of two | its schedule, simulated on the wires |
//! | directly | one-shot | its schedule, simulated on the wires |
//! | in shared memory | shared memory | base + latency until all are there, then S/bandwidth to read all parts |
//!
//! Shared memory is a schedule of its own: a rank writes its part once and reads all of them, so S counts once and not
//! for each receiver.

use spanker_collective::{Algorithm, Collective};
use spanker_topology::{Cluster, ExchangeKind, Seconds};

use super::exchange::{PriceList, exchange_kind};
use crate::program::Op;

/// How an exchange is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExchangeMethod {
    /// By the schedule of an algorithm.
    Schedule(Algorithm),
    /// In one memory: everybody leaves a part there and reads all others'.
    SharedMemory,
}

impl ExchangeMethod {
    /// The name that tables and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ExchangeMethod::Schedule(algorithm) => algorithm.name(),
            ExchangeMethod::SharedMemory => "shared-memory",
        }
    }
}

/// An exchange with how it is run and what that takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PricedExchange {
    pub(crate) collective: Collective,
    /// Bytes of the whole.
    pub(crate) bytes: f64,
    pub(crate) method: ExchangeMethod,
    pub(crate) time: Seconds,
}

/// The collective that an exchange is in messages of this kind, and its bytes. Parts count as long as the longest.
pub(crate) fn collective_of(op: &Op, ranks: usize) -> (Collective, f64) {
    match op {
        Op::Gather { parts, rows, .. } => {
            let longest = parts.iter().map(super::shard::len).max().unwrap_or(0);
            (Collective::AllGather, (*rows * longest) as f64 * ranks as f64)
        }
        Op::Fold { elements, .. } => (Collective::AllReduce, *elements as f64 * 4.0),
        Op::Collective { collective, fold, elements, .. } => {
            (*collective, *elements as f64 * fold.size() as f64)
        }
        _ => (Collective::AllGather, 0.0),
    }
}

impl PriceList {
    /// How the cards of a group run an exchange, and what it takes. Nothing for what is none.
    pub(crate) fn exchange(
        &self,
        cluster: &Cluster,
        cards: &[usize],
        op: &Op,
    ) -> Option<PricedExchange> {
        if !op.is_exchange() {
            return None;
        }
        let (collective, bytes) = collective_of(op, cards.len());
        let (method, time) = match exchange_kind(cluster, cards) {
            ExchangeKind::SharedMemory => {
                // What is read are the parts of all ranks, also where they are added up.
                let read = op.exchanged_bytes(cards.len());
                let time = shared_memory(cluster, cards, read);
                return Some(PricedExchange {
                    collective,
                    bytes: read,
                    method: ExchangeMethod::SharedMemory,
                    time,
                });
            }
            ExchangeKind::Direct => {
                let only = Algorithm::OneShot;
                (only, self.by(cluster, collective, only, cards, bytes))
            }
            ExchangeKind::Messages => self.in_messages(cluster, collective, cards, bytes),
            _ => self.best(cluster, collective, cards, bytes),
        };
        Some(PricedExchange { collective, bytes, method: ExchangeMethod::Schedule(method), time })
    }
}

/// What an exchange in one memory takes: everybody is there, and then reads.
fn shared_memory(cluster: &Cluster, cards: &[usize], bytes: f64) -> Seconds {
    let Some(link) = &cluster.profile(cards[0]).link else { return Seconds::ZERO };
    let reading = Seconds(bytes / link.bandwidth.value.0 as f64);
    link.base.value + link.latency.value + reading
}
