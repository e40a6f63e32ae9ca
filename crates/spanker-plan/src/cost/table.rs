// SPDX-License-Identifier: Apache-2.0
//! Which algorithm ranks run an exchange by, as a table over sizes: chosen once by price, and handed to every rank, so
//! that no two of them can choose differently.
//!
//! A size counts as the next power of two. Prices choose in the same way, so a run does what was priced.

use std::array;

use spanker_collective::{Algorithm, Collective};
use spanker_topology::{Cluster, ExchangeKind, Seconds};

use super::exchange::{PriceList, exchange_kind, usable};
use crate::plan::Plan;

/// Powers of two that are told apart: the first, and how many.
const FIRST: u32 = 6;
const SIZES: usize = 19;

/// The collectives that a model's exchanges are.
const COLLECTIVES: [Collective; 2] = [Collective::AllGather, Collective::AllReduce];

/// Where a size is in the table.
fn place(bytes: f64) -> usize {
    let bits = (bytes.max(1.0) as u64).next_power_of_two().trailing_zeros();
    (bits.saturating_sub(FIRST) as usize).min(SIZES - 1)
}

/// The bytes that stand for all sizes at a place of the table.
fn size(place: usize) -> f64 {
    (1u64 << (FIRST as usize + place)) as f64
}

impl PriceList {
    /// How ranks run a collective of so many bytes in messages, and what it takes.
    pub(crate) fn in_messages(
        &self,
        cluster: &Cluster,
        collective: Collective,
        cards: &[usize],
        bytes: f64,
    ) -> (Algorithm, Seconds) {
        let chosen = self
            .only
            .unwrap_or_else(|| self.best(cluster, collective, cards, size(place(bytes))).0);
        (chosen, self.by(cluster, collective, chosen, cards, bytes))
    }
}

/// The algorithms of a plan's exchanges in messages, by stage, collective and size.
///
/// ```
/// use spanker_collective::{Algorithm, Collective};
/// use spanker_plan::ExchangeTable;
/// let table = ExchangeTable::one_shot(2);
/// assert_eq!(table.algorithm(1, Collective::AllGather, 4096.0), Algorithm::OneShot);
/// assert_eq!(ExchangeTable::from_bytes(&table.to_bytes(), &[2, 3]), Some(table));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeTable {
    stages: Vec<[[Algorithm; SIZES]; COLLECTIVES.len()]>,
}

impl ExchangeTable {
    /// Everybody sends to everybody, whatever the size: what links are measured with.
    #[must_use]
    pub fn one_shot(stages: usize) -> ExchangeTable {
        ExchangeTable::all(stages, Algorithm::OneShot)
    }

    /// One algorithm whatever the size, and one-shot for sums that it would not add in rank order.
    #[must_use]
    pub fn all(stages: usize, algorithm: Algorithm) -> ExchangeTable {
        let row = COLLECTIVES.map(|collective| {
            let is_usable = usable(collective, 2).any(|usable| usable == algorithm);
            [if is_usable { algorithm } else { Algorithm::OneShot }; SIZES]
        });
        ExchangeTable { stages: vec![row; stages] }
    }

    /// The cheapest algorithms on the plan's links. Where those say that cards exchange directly, everybody sends to
    /// everybody, because that is what was priced.
    #[must_use]
    pub fn of(plan: &Plan) -> ExchangeTable {
        let (cluster, prices) = (&plan.cluster, PriceList::default());
        let stages = plan.layout.stages().map(|stage| {
            let cards = &stage.group.cards;
            let is_direct = exchange_kind(cluster, cards) == ExchangeKind::Direct;
            COLLECTIVES.map(|collective| {
                array::from_fn(|at| match is_direct || cards.len() < 2 {
                    true => Algorithm::OneShot,
                    false => prices.best(cluster, collective, cards, size(at)).0,
                })
            })
        });
        ExchangeTable { stages: stages.collect() }
    }

    /// The algorithm of a collective of so many bytes among the ranks of a stage.
    ///
    /// # Panics
    /// If there is no such stage, or models have no such collective.
    #[must_use]
    pub fn algorithm(&self, stage: usize, collective: Collective, bytes: f64) -> Algorithm {
        let row = COLLECTIVES.iter().position(|&known| known == collective);
        self.stages[stage][row.expect("a collective of models")][place(bytes)]
    }

    /// As bytes, for other ranks.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let number = |wanted: &Algorithm| {
            let at = Algorithm::ALL.iter().position(|algorithm| algorithm == wanted);
            at.map_or(u8::MAX, |at| at as u8)
        };
        self.stages.iter().flatten().flatten().map(number).collect()
    }

    /// A table from bytes for stages of so many ranks each, or nothing if they are none: each entry is an algorithm that
    /// gives the bits that exchanges promise.
    #[must_use]
    pub fn from_bytes(bytes: &[u8], ranks: &[usize]) -> Option<ExchangeTable> {
        let (rows, rest) = bytes.as_chunks::<SIZES>();
        if !rest.is_empty() || rows.len() != ranks.len() * COLLECTIVES.len() {
            return None;
        }
        let mut table = ExchangeTable::one_shot(ranks.len());
        let known = table.stages.iter_mut().zip(ranks);
        let known = known.flat_map(|(stage, &ranks)| {
            stage.iter_mut().zip(COLLECTIVES).map(move |(row, collective)| (row, collective, ranks))
        });
        for ((row, collective, ranks), numbers) in known.zip(rows) {
            for (entry, &number) in row.iter_mut().zip(numbers) {
                let algorithm = *Algorithm::ALL.get(usize::from(number))?;
                let mut others = usable(collective, ranks);
                let is_usable =
                    algorithm == Algorithm::OneShot || others.any(|usable| usable == algorithm);
                *entry = is_usable.then_some(algorithm)?;
            }
        }
        Some(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_topology::{BytesPerSecond, Profile, Shape};

    use super::super::exchange::links_alone;
    use crate::{Layout, Objective, Request, Split};

    /// Ranks whose links take 2 us and 1 ms for a megabyte.
    fn ranks(count: usize, kind: ExchangeKind) -> Cluster {
        let mut profile: Profile = links_alone("rev-a");
        let link = profile.link.as_mut().unwrap();
        link.exchange = kind;
        link.bandwidth.value = BytesPerSecond(1_000_000_000);
        Cluster::uniform(profile, count, Shape::Switch).unwrap()
    }

    fn plan(count: usize, kind: ExchangeKind) -> Plan {
        let model = spanker_model::builtin("tinyllama-1.1b", spanker_model::Quant::Q4_0).unwrap();
        let group = (0..count).map(|card| (card, 1.0)).collect();
        let layout = Layout::of_groups(&model, Split::Reduce, &[group]).unwrap();
        Plan::new(model, ranks(count, kind), Request::new(Objective::Latency), layout).unwrap()
    }

    #[test]
    fn table_has_what_is_priced_and_other_algorithms_for_small_and_large_exchanges() {
        let (count, cards) = (5, [0, 1, 2, 3, 4]);
        let plan = plan(count, ExchangeKind::Messages);
        let (table, prices) = (ExchangeTable::of(&plan), PriceList::default());
        for collective in COLLECTIVES {
            for bytes in [1.0, 100.0, 4608.0, 65536.0, 70_000.0, 3e6, 5e8] {
                let (chosen, time) = prices.in_messages(&plan.cluster, collective, &cards, bytes);
                assert_eq!(chosen, table.algorithm(0, collective, bytes), "{collective} {bytes}");
                let alone = super::super::exchange::collective_time(
                    &plan.cluster,
                    collective,
                    chosen,
                    &cards,
                    bytes as u64,
                );
                assert_eq!(time, alone, "{collective} {bytes}");
            }
        }
        let of = |collective, bytes| table.algorithm(0, collective, bytes);
        assert_eq!(of(Collective::AllReduce, 256.0), Algorithm::OneShot);
        assert_eq!(of(Collective::AllReduce, 1e6), Algorithm::TwoShot);
    }

    #[test]
    fn cards_that_exchange_directly_are_priced_and_run_by_one_shot() {
        let table = ExchangeTable::of(&plan(5, ExchangeKind::Direct));
        assert_eq!(table, ExchangeTable::one_shot(1));
    }

    #[test]
    fn prediction_of_a_plan_takes_the_algorithms_of_its_table() {
        let plan = plan(5, ExchangeKind::Messages);
        let table = ExchangeTable::of(&plan);
        let mut seen = Vec::new();
        for rows in [1, 512] {
            for exchange in plan.exchanges_of(rows).concat() {
                let collective = COLLECTIVES.into_iter().find(|c| c.name() == exchange.collective);
                let of = table.algorithm(0, collective.unwrap(), exchange.bytes);
                assert_eq!(of.name(), exchange.algorithm, "{rows}: {exchange:?}");
                seen.push(of);
            }
        }
        assert!(seen.contains(&Algorithm::OneShot) && seen.contains(&Algorithm::TwoShot));
    }

    #[test]
    fn bytes_that_are_no_table_for_these_stages_are_refused() {
        let table = ExchangeTable::of(&plan(5, ExchangeKind::Messages));
        let bytes = table.to_bytes();
        assert_eq!(ExchangeTable::from_bytes(&bytes, &[5]).as_ref(), Some(&table));
        assert_eq!(ExchangeTable::from_bytes(&bytes, &[5, 5]), None);
        assert_eq!(ExchangeTable::from_bytes(&bytes[1..], &[5]), None);
        let changed = |at: usize, number: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = number;
            ExchangeTable::from_bytes(&bytes, &[5])
        };
        assert_eq!(changed(0, 200), None, "no algorithm");
        assert!(changed(0, 0).is_some(), "gathers by ring");
        assert_eq!(changed(SIZES, 0), None, "a ring does not add in rank order");
    }
}
