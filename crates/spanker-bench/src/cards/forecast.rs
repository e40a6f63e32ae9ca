// SPDX-License-Identifier: Apache-2.0
//! What a collective on cards will take by the planner: its messages, and the folds and copies that the cards do
//! on their own.

use spanker_plan::{Price, collective_time, price, prices};
use spanker_runtime::{Pace, SpankerControl};
use spanker_scheduler::{
    Algorithm, Collective, Error, ReduceOp, Topology, chunk, planner::Cluster,
};
use spanker_topology::Seconds;

/// Prices up to this factor apart count as equal.
const ALIKE: f64 = 1.001;

/// Prices of algorithms on given cards.
#[derive(Debug)]
pub(super) struct PriceForecast {
    collective: Collective,
    ranks: Vec<usize>,
    /// What starting a collective costs and prices contain, where cards do not show it: emulated ones start at
    /// a common time.
    unseen: Seconds,
    /// Nothing for cards without a pace: nobody knows what this host takes.
    priced: Option<(Cluster, Vec<Price>)>,
    /// The algorithm where nothing is priced.
    usual: Algorithm,
    /// Why nothing is priced, where cards have a pace.
    pub(super) unpredicted: Option<String>,
}

impl PriceForecast {
    /// Prices the algorithm that is wanted, or all.
    pub(super) fn new(
        cards: &Topology<SpankerControl>,
        pace: Pace,
        collective: Collective,
        wanted: Option<Algorithm>,
    ) -> Result<PriceForecast, Error> {
        let ranks: Vec<usize> = (0..cards.n_sails()).collect();
        let usual = wanted.unwrap_or(Algorithm::Ring);
        let (unseen, priced) = (Seconds::ZERO, None);
        let unpriced =
            PriceForecast { collective, ranks, unseen, priced, usual, unpredicted: None };
        if pace == Pace::Unshaped {
            return Ok(unpriced);
        }
        let cluster = match cards.cluster() {
            Ok(cluster) => cluster,
            // Cards with a profile of somebody's own can be measured all the same.
            Err(Error::Topology(error)) => {
                return Ok(PriceForecast { unpredicted: Some(error.to_string()), ..unpriced });
            }
            Err(error) => return Err(error),
        };
        let ranks = &unpriced.ranks;
        let priced = match wanted {
            Some(algorithm) => vec![price(&cluster, collective, algorithm, ranks)],
            None => prices(&cluster, collective, ranks),
        };
        let unseen = if pace == Pace::Real { Seconds::ZERO } else { cluster.base(ranks) };
        Ok(PriceForecast { unseen, priced: Some((cluster, priced)), ..unpriced })
    }

    /// The algorithm for a size, and what it will take.
    pub(super) fn of(
        &self,
        elements: usize,
        element: usize,
        op: ReduceOp,
    ) -> (Algorithm, Option<Seconds>) {
        let Some((cluster, priced)) = &self.priced else { return (self.usual, None) };
        let bytes = (elements * element) as u64;
        let times = priced.iter().map(|price| price.at(bytes as f64).0);
        let least = times.fold(f64::INFINITY, f64::min);
        // Of equals the first: the ring, whose messages nobody has to pass on.
        let best = priced.iter().find(|price| price.at(bytes as f64).0 <= least * ALIKE);
        let Some(algorithm) = best.map(|price| price.algorithm) else { return (self.usual, None) };
        let whole = collective_time(cluster, self.collective, algorithm, &self.ranks, bytes);
        let time = Seconds(whole.0 - self.unseen.0);
        let averaged = if op == ReduceOp::Avg && self.collective.reduces() {
            self.division(cluster, elements, element)
        } else {
            Seconds::ZERO
        };
        (algorithm, Some(time + averaged))
    }

    /// An average is a sum that every card divides at the end, where it has a result.
    fn division(&self, cluster: &Cluster, elements: usize, element: usize) -> Seconds {
        let ranks = self.ranks.len();
        let on = |rank: usize| {
            let results = match self.collective {
                Collective::ReduceScatter => chunk(elements, ranks, rank).len(),
                Collective::Reduce { root } if root != rank => 0,
                _ => elements,
            };
            let card = cluster.profile(rank);
            let bytes = (2 * results * element) as f64;
            let fixed = if results > 0 { card.compute.per_operator.value.0 } else { 0.0 };
            fixed + bytes / card.memory.bandwidth.value.0 as f64
        };
        Seconds((0..ranks).map(on).fold(0.0, f64::max))
    }
}
