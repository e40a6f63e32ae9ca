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
const COLLECTIVES: [Collective; 3] =
    [Collective::AllGather, Collective::AllReduce, Collective::Broadcast { root: 0 }];

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
    /// How ranks run a collective of so many bytes in messages, and what it takes. At which root it is does not count in
    /// the choice.
    pub(crate) fn in_messages(
        &self,
        cluster: &Cluster,
        collective: Collective,
        cards: &[usize],
        bytes: f64,
    ) -> (Algorithm, Seconds) {
        let chosen = self.only.unwrap_or_else(|| {
            self.best(cluster, collective.with_root(0), cards, size(place(bytes))).0
        });
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
        let row = COLLECTIVES.iter().position(|&known| known == collective.with_root(0));
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
