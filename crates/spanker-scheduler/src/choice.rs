// SPDX-License-Identifier: Apache-2.0
//! Which schedule a collective on cards takes: of those that give the promised bits the cheapest, by the
//! planner's prices for the cluster that the cards form.

use std::collections::HashMap;

use spanker_collective::{Algorithm, Collective, DType, schedule, verify};
use spanker_plan::{Price, Wiring, price, prices};
use spanker_runtime::SpankerControl;
use spanker_topology::Cluster;

use crate::{Error, Result, Topology};

/// Groups up to this size have every algorithm proved; larger ones take those that are proved for all sizes.
const PROVED: usize = 8;
/// Cards up to which algorithms that send from everybody to everybody are timed.
const PRICED: usize = 64;
/// What is taken where nothing has a price: it has the bits of the serial fold, and sends no more than a ring.
const UNPRICED: Algorithm = Algorithm::TwoShot;

/// What is known of the prices on cards that are wired in one way.
#[derive(Debug, Default)]
pub(crate) struct Prices {
    wiring: Option<Wiring>,
    /// None if the planner does not know these cards.
    cluster: Option<Cluster>,
    /// By collective, and whether the bits of the serial fold are promised.
    known: HashMap<(Collective, bool), Vec<Price>>,
}

/// A collective as far as its price depends on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) collective: Collective,
    pub(crate) elements: usize,
    pub(crate) dtype: DType,
}

impl Wanted {
    /// Whether the order of the folds shows in the bits. Integers wrap, so it does not in theirs.
    fn is_serial(self) -> bool {
        self.collective.reduces() && self.dtype.is_float()
    }
}

impl Prices {
    /// The algorithms that give the promised bits, the cheapest first.
    ///
    /// # Errors
    /// [`Error::Device`] if a card does not answer.
    pub(crate) fn ranked(
        &mut self,
        cards: &Topology<SpankerControl>,
        wiring: &Wiring,
        wanted: Wanted,
    ) -> Result<Vec<Algorithm>> {
        let ranks: Vec<usize> = (0..wiring.ranks()).collect();
        if !(2..=PRICED).contains(&ranks.len()) {
            return Ok(vec![UNPRICED]);
        }
        if self.wiring.as_ref() != Some(wiring) {
            let cluster = match cards.cluster_of(&linked(wiring)) {
                Ok(cluster) => Some(cluster),
                // A profile that is not built in has no prices. The collective can run all the same.
                Err(Error::Topology(_)) => None,
                Err(error) => return Err(error),
            };
            *self = Prices { wiring: Some(wiring.clone()), cluster, known: HashMap::new() };
        }
        let Some(cluster) = &self.cluster else { return Ok(vec![UNPRICED]) };
        let key = (wanted.collective, wanted.is_serial());
        let known = match self.known.entry(key) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(priced(cluster, wanted, &ranks)?)
            }
        };
        let size = wanted.dtype.size();
        let bytes = (wanted.elements * size) as f64;
        let mut timed: Vec<(f64, Algorithm)> =
            known.iter().map(|price| (price.at(bytes).0, price.algorithm)).collect();
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(timed.into_iter().map(|(_, algorithm)| algorithm).collect())
    }
}

/// The prices of all algorithms that give the promised bits.
fn priced(cluster: &Cluster, wanted: Wanted, ranks: &[usize]) -> Result<Vec<Price>> {
    if !wanted.is_serial() {
        return Ok(prices(cluster, wanted.collective, ranks));
    }
    let mut serial = Vec::new();
    for algorithm in Algorithm::ALL {
        let always = matches!(algorithm, Algorithm::OneShot | Algorithm::TwoShot);
        if always || is_proved_serial(wanted.collective, algorithm, ranks.len())? {
            serial.push(price(cluster, wanted.collective, algorithm, ranks));
        }
    }
    Ok(serial)
}

/// Whether an algorithm is proved to fold in the order of the ranks in a group of this size. Algorithms deal in
/// whole chunks, so an element of each stands for all of it.
fn is_proved_serial(collective: Collective, algorithm: Algorithm, ranks: usize) -> Result<bool> {
    if ranks > PROVED {
        return Ok(false);
    }
    Ok(verify(&schedule(collective, algorithm, ranks, ranks)?)?.serial)
}

/// Pairs of ranks that are linked, the lower one first.
pub(crate) fn linked(wiring: &Wiring) -> Vec<(usize, usize)> {
    let all = (0..wiring.ranks()).flat_map(|a| (a + 1..wiring.ranks()).map(move |b| (a, b)));
    all.filter(|&(a, b)| wiring.port(a, b).is_some()).collect()
}
