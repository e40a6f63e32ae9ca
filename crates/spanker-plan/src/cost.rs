// SPDX-License-Identifier: Apache-2.0
//! What a stage of a plan costs in time and memory on given cards.
//!
//! A *stage* is a run of layers on a group of cards. Everything here is a formula over a model's matrices and
//! the cards' profiles; nothing is searched.

pub(crate) mod exchange;
pub(crate) mod local;
pub(crate) mod memory;
pub(crate) mod shard;
pub(crate) mod work;

use std::ops::Range;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use spanker_collective::{Algorithm, Collective};
use spanker_model::Model;
use spanker_topology::{Bytes, Cluster, Seconds};

use crate::Request;
use exchange::{PriceList, cheapest, rank_order};
use memory::{Footprint, Place};
use shard::{Shard, Split, Units, input_type, len, shards};
use work::{Pass, Speed, Terms};

/// Cards that hold the same layers together, and which part of them each has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The cards, in the order of their ranks.
    pub cards: Vec<usize>,
    /// How matrices are split between them.
    pub split: Split,
    /// What each rank holds.
    pub shards: Vec<Shard>,
}

/// What decides how much each card of a group gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Aim {
    /// Shares by speed alone.
    Speed,
    /// Shares by speed, but no more than a card can hold of all layers.
    Fit,
    /// Shares by memory alone.
    Memory,
}

/// Prices stages of one model on one cluster for one request.
pub(crate) struct Pricer<'a> {
    pub(crate) model: &'a Model,
    pub(crate) cluster: &'a Cluster,
    pub(crate) request: &'a Request,
    /// Layers that differ, and how many there are of each.
    kinds: Vec<(usize, usize)>,
    kind_of: Vec<usize>,
    speeds: Vec<Speed>,
    /// Shares come in units that depend on the split.
    units: [Units; 3],
    prices: Rc<PriceList>,
}

/// What follows a phase of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Exchange {
    pub(crate) collective: Collective,
    pub(crate) bytes: f64,
}

impl<'a> Pricer<'a> {
    pub(crate) fn new(model: &'a Model, cluster: &'a Cluster, request: &'a Request) -> Self {
        let mut kinds: Vec<(usize, usize)> = Vec::new();
        let mut kind_of = Vec::with_capacity(model.layers.len());
        for (index, layer) in model.layers.iter().enumerate() {
            let known = kinds.iter().position(|&(first, _)| model.layers[first] == *layer);
            let kind = known.unwrap_or_else(|| {
                kinds.push((index, 0));
                kinds.len() - 1
            });
            kinds[kind].1 += 1;
            kind_of.push(kind);
        }
        let speeds = (0..cluster.cards()).map(|card| Speed::of(cluster.profile(card))).collect();
        let units =
            [Split::Whole, Split::Gather, Split::Reduce].map(|split| Units::of(model, split));
        let prices = Rc::default();
        Pricer { model, cluster, request, kinds, kind_of, speeds, units, prices }
    }

    /// The same with prices of collectives from elsewhere: of one algorithm, or known from a cluster with
    /// the same wires.
    pub(crate) fn with_prices(mut self, prices: Rc<PriceList>) -> Self {
        self.prices = prices;
        self
    }

    /// The groups that these cards can form with a split: shares by speed, and where that would overfill a
    /// card with all layers, also by speed under the cards' memory, and by memory.
    pub(crate) fn groups(
        &self,
        cards: &[usize],
        split: Split,
        pass: Pass,
        sequences: u64,
    ) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        let everything = Place { first: true, last: true, sequences };
        for aim in [Aim::Speed, Aim::Fit, Aim::Memory] {
            let group = self.group(cards, split, aim, pass);
            groups.extend(group.filter(|group| !groups.contains(group)));
            let by_speed = groups.first().map(|group| self.capacity(group, everything));
            let enough = by_speed.is_some_and(|most| most as usize >= self.model.layers.len());
            if enough || cards.len() == 1 {
                break;
            }
        }
        groups
    }

    /// Puts a group together, or says that these cards cannot hold the model's layers by this aim.
    fn group(&self, cards: &[usize], split: Split, aim: Aim, pass: Pass) -> Option<Group> {
        let cards = rank_order(self.cluster, cards);
        let weights = self.weights(&cards, split, aim, pass)?;
        let units = self.units[split as usize];
        let shards = shards(self.model, split, units, &weights);
        Some(Group { cards, split, shards })
    }

    fn whole(&self) -> Shard {
        let units = self.units[Split::Whole as usize];
        shards(self.model, Split::Whole, units, &[1.0]).swap_remove(0)
    }

    fn weights(&self, cards: &[usize], split: Split, aim: Aim, pass: Pass) -> Option<Vec<f64>> {
        let usable = |&card: &usize| self.cluster.profile(card).usable().0 as f64;
        if aim == Aim::Memory {
            return Some(cards.iter().map(usable).collect());
        }
        let whole = self.whole();
        let time = |&card: &usize| {
            let phases = self.phases(self.kinds[0].0, Split::Whole, &whole, card, pass);
            phases.iter().map(|terms| (terms.memory + terms.compute).0).sum::<f64>()
        };
        let rates: Vec<f64> = cards.iter().map(|card| 1.0 / time(card)).collect();
        if aim == Aim::Speed {
            return Some(rates);
        }
        let place = Place { first: true, last: true, sequences: self.request.sequences };
        let fixed = memory::fixed(self.model, self.request, split, &whole, place);
        let layers = self.model.layers.iter().map(|layer| {
            let sequences = self.request.sequences;
            memory::per_layer(self.model, layer, self.request, Split::Whole, &whole, sequences)
        });
        let all = fixed.weights + layers.map(Footprint::total).sum();
        let room = |card| (usable(card) - fixed.buffers.0 as f64).max(0.0) / all.0 as f64;
        // A little less than there is, because shares come in whole units.
        let caps: Vec<f64> = cards.iter().map(|card| 0.995 * room(card)).collect();
        fill(&rates, &caps)
    }

    /// The four phases of a layer on one card.
    pub(crate) fn phases(
        &self,
        layer: usize,
        split: Split,
        shard: &Shard,
        card: usize,
        pass: Pass,
    ) -> [Terms; 4] {
        let content = &self.model.layers[layer];
        work::layer(self.model, content, split, shard, self.speeds[card], self.request, pass)
    }

    /// What the ranks exchange after each phase of a layer.
    pub(crate) fn exchanges(
        &self,
        layer: usize,
        group: &Group,
        rows: f64,
    ) -> [Option<Exchange>; 4] {
        let (model, content) = (self.model, &self.model.layers[layer]);
        let ranks = group.cards.len() as f64;
        let most = |part: fn(&Shard) -> &Range<u64>| {
            group.shards.iter().map(|shard| len(part(shard))).max().unwrap_or(0) as f64
        };
        match group.split {
            Split::Whole => [None; 4],
            Split::Gather => {
                // A collective's chunks are equal: unequal shares are padded to the largest.
                let gather = |elements: f64, each: f64| {
                    let bytes = rows * ranks * elements * each;
                    Some(Exchange { collective: Collective::AllGather, bytes })
                };
                let head_size = model.head_size as f64;
                [
                    gather(most(|s| &s.heads) * head_size, input_type(content.o.quant).0),
                    gather(most(|s| &s.output), 4.0),
                    gather(most(|s| &s.ffn), input_type(content.down.quant).0),
                    gather(most(|s| &s.down), 4.0),
                ]
            }
            Split::Reduce => {
                let bytes = rows * model.hidden as f64 * 4.0;
                let sum = Some(Exchange { collective: Collective::AllReduce, bytes });
                [None, sum, None, sum]
            }
        }
    }

    /// The cheapest way to do an exchange within a group.
    pub(crate) fn best(&self, group: &Group, exchange: Exchange) -> (Algorithm, Seconds) {
        let prices = self.prices.get(self.cluster, exchange.collective, &group.cards);
        cheapest(&prices, exchange.bytes)
    }

    /// One layer on a group without its exchanges: phase after phase, each as long as its slowest card.
    fn layer_work(&self, layer: usize, group: &Group, pass: Pass) -> Terms {
        let mut ranks = group.shards.iter().zip(&group.cards).map(|(shard, &card)| {
            let [a, b, c, d] = self.phases(layer, group.split, shard, card, pass);
            match group.split {
                Split::Gather => [a, b, c, d],
                // Nobody waits for anybody inside a half.
                _ => [a.plus(b), c.plus(d), Terms::default(), Terms::default()],
            }
        });
        let first = ranks.next().unwrap_or_default();
        let slowest = ranks.fold(first, |slowest, phases| {
            std::array::from_fn(|phase| slowest[phase].later(phases[phase]))
        });
        slowest.into_iter().fold(Terms::default(), Terms::plus)
    }

    /// One layer on a group.
    pub(crate) fn layer(&self, layer: usize, group: &Group, pass: Pass) -> Terms {
        let mut sum = self.layer_work(layer, group, pass);
        for exchange in self.exchanges(layer, group, pass.rows()).into_iter().flatten() {
            sum.communication += self.best(group, exchange).1;
        }
        sum
    }

    /// The mean layer on a group.
    pub(crate) fn mean_layer(&self, group: &Group, pass: Pass) -> Terms {
        self.mean(|layer| self.layer(layer, group, pass))
    }

    /// The mean layer on a group if exchanges were free.
    pub(crate) fn least_layer(&self, group: &Group, pass: Pass) -> f64 {
        self.mean(|layer| self.layer_work(layer, group, pass)).total().0
    }

    fn mean(&self, terms: impl Fn(usize) -> Terms) -> Terms {
        let sum = self.kinds.iter().fold(Terms::default(), |sum, &(layer, count)| {
            sum.plus(terms(layer).times(count as f64))
        });
        sum.times(1.0 / self.model.layers.len() as f64)
    }

    /// A run of layers on a group.
    pub(crate) fn layers(&self, layers: Range<usize>, group: &Group, pass: Pass) -> Terms {
        let mut counts = vec![0.0; self.kinds.len()];
        layers.for_each(|layer| counts[self.kind_of[layer]] += 1.0);
        let kinds = self.kinds.iter().zip(counts).filter(|(_, count)| *count > 0.0);
        kinds.fold(Terms::default(), |sum, (&(layer, _), count)| {
            sum.plus(self.layer(layer, group, pass).times(count))
        })
    }

    /// The head, and the exchange of each rank's candidates: value and index.
    pub(crate) fn head(&self, group: &Group, sequences: f64) -> Terms {
        let mut terms = self.head_work(group, sequences);
        if let Some(exchange) = self.candidates(group, sequences) {
            terms.communication += self.best(group, exchange).1;
        }
        terms
    }

    fn head_work(&self, group: &Group, sequences: f64) -> Terms {
        let ranks = group.shards.iter().zip(&group.cards);
        let parts = ranks.map(|(shard, &card)| self.head_part(shard, card, sequences));
        parts.reduce(Terms::later).unwrap_or_default()
    }

    /// The head on a group if exchanges were free.
    pub(crate) fn least_head(&self, group: &Group, sequences: f64) -> f64 {
        self.head_work(group, sequences).total().0
    }

    pub(crate) fn head_part(&self, shard: &Shard, card: usize, sequences: f64) -> Terms {
        work::head(self.model, shard, self.speeds[card], sequences)
    }

    pub(crate) fn candidates(&self, group: &Group, sequences: f64) -> Option<Exchange> {
        let bytes = 8.0 * sequences * group.cards.len() as f64;
        let exchange = Exchange { collective: Collective::AllGather, bytes };
        (group.cards.len() > 1).then_some(exchange)
    }

    /// The card that has the token's row of the embedding table tells the others.
    pub(crate) fn embedding(&self, group: &Group, rows: f64) -> Option<Exchange> {
        let bytes = rows * self.model.hidden as f64 * 4.0;
        let exchange = Exchange { collective: Collective::Broadcast { root: 0 }, bytes };
        (group.cards.len() > 1).then_some(exchange)
    }

    pub(crate) fn embed(&self, group: &Group, rows: f64) -> Terms {
        let exchange = self.embedding(group, rows);
        let communication = exchange.map_or(Seconds::ZERO, |e| self.best(group, e).1);
        Terms { communication, ..Terms::default() }
    }

    /// Tokens from the host, the result back to it, and what a token costs the card besides.
    pub(crate) fn host(&self, first: &Group, last: &Group, rows: f64) -> Terms {
        let ids = Bytes((rows * 4.0) as u64);
        let up = first.cards.iter().map(|&card| self.cluster.upload(card, ids));
        let back = self.cluster.profile(last.cards[0]);
        let up = up.fold(Seconds::ZERO, Seconds::max);
        let fixed = up + back.host.latency.value + back.compute.per_token.value;
        Terms { fixed, ..Terms::default() }
    }

    /// From one stage to the next: every rank of the next gets the activations from one of this.
    pub(crate) fn hop(&self, from: &Group, to: &Group, rows: f64) -> Seconds {
        self.cluster.round(&self.hop_messages(from, to, rows))
    }

    pub(crate) fn hop_messages(
        &self,
        from: &Group,
        to: &Group,
        rows: f64,
    ) -> Vec<(usize, usize, f64)> {
        let bytes = rows * self.model.hidden as f64 * 4.0;
        let pairs = to.cards.iter().enumerate();
        pairs.map(|(rank, &card)| (nearest(self.cluster, from, card, rank), card, bytes)).collect()
    }

    /// What a rank's memory is filled with when it has `layers`.
    pub(crate) fn footprint(
        &self,
        layers: Range<usize>,
        group: &Group,
        rank: usize,
        place: Place,
    ) -> Footprint {
        let shard = &group.shards[rank];
        let mut sum = memory::fixed(self.model, self.request, group.split, shard, place);
        for layer in layers {
            let content = &self.model.layers[layer];
            let sequences = place.sequences;
            let each =
                memory::per_layer(self.model, content, self.request, group.split, shard, sequences);
            sum.weights = sum.weights + each.weights;
            sum.kv = sum.kv + each.kv;
        }
        sum
    }

    /// How many layers a group can hold, whichever they are.
    pub(crate) fn capacity(&self, group: &Group, place: Place) -> u32 {
        self.capacities(group, [place])[0]
    }

    /// The same in several places.
    pub(crate) fn capacities<const N: usize>(&self, group: &Group, places: [Place; N]) -> [u32; N] {
        let mut least = [self.model.layers.len() as u64; N];
        for (shard, &card) in group.shards.iter().zip(&group.cards) {
            let usable = self.cluster.profile(card).usable().0;
            let sequences = places[0].sequences;
            let each = self.kinds.iter().map(|&(layer, _)| {
                let (content, split) = (&self.model.layers[layer], group.split);
                memory::per_layer(self.model, content, self.request, split, shard, sequences)
                    .total()
            });
            let each = each.max().map_or(1, |bytes| bytes.0.max(1));
            for (least, place) in least.iter_mut().zip(places) {
                let fixed = memory::fixed(self.model, self.request, group.split, shard, place);
                *least = (*least).min(usable.saturating_sub(fixed.total().0) / each);
            }
        }
        least.map(|layers| layers as u32)
    }
}

/// The card of `from` that sends to a rank of the next stage: the nearest, and of equals the one
/// with the same place.
fn nearest(cluster: &Cluster, from: &Group, to: usize, rank: usize) -> usize {
    let count = from.cards.len();
    let by_distance = |&a: &usize, &b: &usize| {
        cluster.latency(from.cards[a], to).0.total_cmp(&cluster.latency(from.cards[b], to).0)
    };
    let turned = (0..count).map(|step| (rank + step) % count);
    from.cards[turned.min_by(by_distance).unwrap_or(0)]
}

/// Shares in proportion to `rates`, none above its cap; nothing if the caps leave something over.
fn fill(rates: &[f64], caps: &[f64]) -> Option<Vec<f64>> {
    if caps.iter().sum::<f64>() < 1.0 {
        return None;
    }
    let mut capped = vec![false; rates.len()];
    loop {
        let taken: f64 = caps.iter().zip(&capped).filter(|(_, full)| **full).map(|(c, _)| c).sum();
        let free: f64 = rates.iter().zip(&capped).filter(|(_, full)| !**full).map(|(r, _)| r).sum();
        let share = |rank: usize| match capped[rank] {
            true => caps[rank],
            false => (1.0 - taken) * rates[rank] / free,
        };
        let over: Vec<usize> =
            (0..rates.len()).filter(|&r| !capped[r] && share(r) > caps[r]).collect();
        if over.is_empty() {
            return Some((0..rates.len()).map(share).collect());
        }
        over.into_iter().for_each(|rank| capped[rank] = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_speed_until_a_card_is_full() {
        assert_eq!(fill(&[2.0, 2.0, 1.0], &[1.0; 3]), Some(vec![0.4, 0.4, 0.2]));
        let tight = fill(&[2.0, 2.0, 1.0], &[0.3, 1.0, 1.0]).unwrap();
        assert!((tight[0] - 0.3).abs() < 1e-12);
        assert!((tight[1] / tight[2] - 2.0).abs() < 1e-12);
        assert_eq!(fill(&[1.0, 1.0], &[0.4, 0.5]), None);
    }
}
