// SPDX-License-Identifier: Apache-2.0
//! What a stage of a plan costs in time and memory on given cards.
//!
//! A *stage* is a run of layers on a group of cards. Its time is a fold over the program of one layer of each
//! kind, its memory the program's list of buffers; nothing is searched here, and no layer is described.

pub(crate) mod exchange;
pub(crate) mod memory;
pub(crate) mod pass;
pub(crate) mod shard;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use spanker_collective::{Algorithm, Collective};
use spanker_model::Model;
use spanker_topology::{Bytes, Cluster, ExchangeKind, Seconds};

use crate::Request;
use crate::plan::{Exchanged, name_of};
use crate::program::{
    BufferIds, Context, Cost, Exchanging, Holder, Holding, Member, Numerics, Op, Part, Piece,
    Space, Step, Terms, Want, Writer, expected_audit, load,
};
use crate::simulate::direct;
use crate::work::{BufferId, Work};
use exchange::{PriceList, rank_order, serial};
use memory::{Footprint, Place};
use pass::Pass;
use shard::{Shard, Split, Units, shards};

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
    /// By kind of card.
    costs: Vec<Cost>,
    /// Shares come in units that depend on the split.
    units: [Units; 3],
    prices: Rc<PriceList>,
    /// Whether collectives are timed for the very bytes that they carry.
    exact: bool,
    /// Hand-offs that were asked for before.
    hops: RefCell<HashMap<(Vec<usize>, Vec<usize>, u64), Seconds>>,
}

/// What all ranks of a group do together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Exchange {
    pub(crate) collective: Collective,
    pub(crate) bytes: f64,
}

/// A part of a step: what goes through it, and the op lists of a group's ranks.
pub(crate) type Lists = Vec<Vec<Op>>;

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
        let most = (0..cluster.cards()).map(|card| cluster.kind(card) + 1).max().unwrap_or(0);
        let first = |kind| (0..cluster.cards()).find(|&card| cluster.kind(card) == kind);
        let cost = |kind| Cost::of(cluster.profile(first(kind).unwrap_or(0)));
        let units =
            [Split::Whole, Split::Gather, Split::Reduce].map(|split| Units::of(model, split));
        Pricer {
            model,
            cluster,
            request,
            kinds,
            kind_of,
            costs: (0..most).map(cost).collect(),
            units,
            prices: Rc::default(),
            exact: false,
            hops: RefCell::default(),
        }
    }

    /// The same with prices of collectives from elsewhere: of one algorithm, or known from a cluster with
    /// the same wires.
    pub(crate) fn with_prices(mut self, prices: Rc<PriceList>) -> Self {
        self.prices = prices;
        self
    }

    /// The same with every collective timed for the very bytes that it carries.
    pub(crate) fn exactly(mut self) -> Self {
        self.exact = true;
        self
    }

    pub(crate) fn cost_of(&self, card: usize) -> &Cost {
        &self.costs[self.cluster.kind(card)]
    }

    /// What a card has to have room for, by the request.
    pub(crate) fn space(&self, sequences: u64) -> Space {
        let Request { context, batch, .. } = *self.request;
        let audit = self.request.taps();
        Space { context, batch: batch.min(context).max(sequences), sequences, audit }
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
        let weights = self.weights(&cards, aim, pass)?;
        let units = self.units[split as usize];
        let shards = shards(self.model, split, units, &weights);
        Some(Group { cards, split, shards })
    }

    /// A group of one card that has everything.
    fn alone(&self, card: usize) -> Group {
        let units = self.units[Split::Whole as usize];
        let shards = shards(self.model, Split::Whole, units, &[1.0]);
        Group { cards: vec![card], split: Split::Whole, shards }
    }

    fn weights(&self, cards: &[usize], aim: Aim, pass: Pass) -> Option<Vec<f64>> {
        let usable = |&card: &usize| self.cluster.profile(card).usable().0 as f64;
        if aim == Aim::Memory {
            return Some(cards.iter().map(usable).collect());
        }
        let time = |&card: &usize| {
            let terms = self.layer_work(self.kinds[0].0, &self.alone(card), pass);
            (terms.memory + terms.compute).0
        };
        let rates: Vec<f64> = cards.iter().map(|card| 1.0 / time(card)).collect();
        if aim == Aim::Speed {
            return Some(rates);
        }
        let place = Place { first: true, last: true, sequences: self.request.sequences };
        let alone = self.alone(cards[0]);
        let all = self.footprint(0..self.model.layers.len(), &alone, 0, place);
        let shared = (all.weights + all.kv).0 as f64;
        let room = |card| (usable(card) - all.buffers.0 as f64).max(0.0) / shared;
        // A little less than there is, because shares come in whole units.
        let caps: Vec<f64> = cards.iter().map(|card| 0.995 * room(card)).collect();
        fill(&rates, &caps)
    }

    /// How a group exchanges activations.
    pub(crate) fn exchange_kind(&self, group: &Group) -> ExchangeKind {
        self.exchanging(group).kind
    }

    fn exchanging(&self, group: &Group) -> Exchanging {
        self.prices.exchanging(self.cluster, group)
    }

    /// The programs of a group's ranks for a part of a step, which `write` writes.
    fn lists(
        &self,
        group: &Group,
        layers: &[usize],
        ends: (bool, bool),
        step: &Step<'_>,
        write: impl Fn(&mut Writer<'_>),
    ) -> Lists {
        let mut put = |_: &Piece, _: u64| crate::work::Place { buffer: BufferId(0), offset: 0 };
        let member = |rank: usize| {
            let (shard, split) = (&group.shards[rank], group.split);
            let mut holder = Holder { model: self.model, shard, split, put: &mut put };
            let holding = Holding {
                layers: layers.iter().map(|&layer| holder.layer(layer)).collect(),
                embedding: ends.0.then(|| holder.embedding()),
                head: ends.1.then(|| holder.head()),
            };
            let (card, shard) = (group.cards[rank], shard.clone());
            Member { card, stage: 0, rank, shard, buffers: BufferIds::symbols(), holding }
        };
        let members: Vec<Member> = (0..group.cards.len()).map(member).collect();
        let of = Context {
            model: self.model,
            numerics: Numerics::default(),
            space: self.space(step.parts.len() as u64),
            stages: &[(group.split, self.exchanging(group).kind)],
            members: &members,
        };
        let mut writer = Writer::new(of, step);
        write(&mut writer);
        writer.programs
    }

    /// One layer on a group.
    pub(crate) fn layer_lists(&self, layer: usize, group: &Group, step: &Step<'_>) -> Lists {
        let members = 0..group.cards.len();
        self.lists(group, &[layer], (false, false), step, |writer| {
            writer.layer(0, members.clone(), 0, layer);
        })
    }

    /// The embedding on the first group.
    pub(crate) fn embed_lists(&self, group: &Group, step: &Step<'_>) -> Lists {
        let members = 0..group.cards.len();
        self.lists(group, &[], (true, false), step, |writer| writer.embed(members.clone()))
    }

    /// The head on the last group.
    pub(crate) fn head_lists(&self, group: &Group, step: &Step<'_>) -> Lists {
        let members = 0..group.cards.len();
        self.lists(group, &[], (false, true), step, |writer| writer.head(0, members.clone()))
    }

    /// What a part of a step takes on a group: the work phase after phase, each as long as its slowest card,
    /// and apart from that the exchanges between the phases.
    fn fold(&self, group: &Group, lists: &Lists) -> (Terms, Seconds) {
        let mut phases: Vec<Terms> = Vec::new();
        let mut exchanged = Seconds::ZERO;
        for (rank, list) in lists.iter().enumerate() {
            let cost = self.cost_of(group.cards[rank]);
            let (mut sum, mut phase) = (Terms::default(), 0);
            let mut before: Option<&Work> = None;
            let mut close = |sum: Terms, phase: usize| match phases.get_mut(phase) {
                Some(slowest) => *slowest = slowest.later(sum),
                None => phases.push(sum),
            };
            for op in list {
                match op {
                    Op::Work(work) => {
                        if let Some(load) = load(work, before) {
                            sum = sum.plus(cost.operator(&load));
                        }
                        before = Some(work);
                    }
                    Op::Mark { .. } | Op::Tap(_) => {}
                    exchange => {
                        before = None;
                        close(std::mem::take(&mut sum), phase);
                        phase += 1;
                        if rank == 0 {
                            exchanged += self.exchange_time(group, exchange);
                        }
                    }
                }
            }
            close(sum, phase);
        }
        (phases.into_iter().fold(Terms::default(), Terms::plus), exchanged)
    }

    /// What an exchange of a group takes.
    pub(crate) fn exchange_time(&self, group: &Group, op: &Op) -> Seconds {
        if let Op::Collective { collective, dtype, elements, .. } = op {
            let bytes = *elements as f64 * dtype.size() as f64;
            return self.best(group, Exchange { collective: *collective, bytes }).1;
        }
        if !op.is_exchange() {
            return Seconds::ZERO;
        }
        let (collective, bytes) = direct(op, group.cards.len());
        if self.exchange_kind(group) == ExchangeKind::SharedMemory {
            let Some(link) = &self.cluster.profile(group.cards[0]).link else {
                return Seconds::ZERO;
            };
            let reading = Seconds(bytes / link.bandwidth.value.0 as f64);
            return link.base.value + link.latency.value + reading;
        }
        let prices = self.prices.get(self.cluster, collective, &group.cards);
        let direct = prices.iter().find(|price| price.algorithm == Algorithm::OneShot);
        direct.or(prices.first()).map_or(Seconds::ZERO, |price| price.at(bytes))
    }

    /// An exchange in words and numbers.
    pub(crate) fn describe(&self, group: &Group, op: &Op, after: &'static str) -> Exchanged {
        let (collective, algorithm, bytes) = match op {
            Op::Collective { collective, dtype, elements, .. } => {
                let bytes = *elements as f64 * dtype.size() as f64;
                let best = self.best(group, Exchange { collective: *collective, bytes });
                (*collective, best.0.name(), bytes)
            }
            other => {
                let (collective, bytes) = direct(other, group.cards.len());
                (collective, self.exchange_kind(group).name(), bytes)
            }
        };
        let time = self.exchange_time(group, op);
        Exchanged { after, collective: name_of(collective), bytes, algorithm, time }
    }

    /// The cheapest way to do a collective within a group. Sums are added in rank order, which two algorithms
    /// do.
    pub(crate) fn best(&self, group: &Group, exchange: Exchange) -> (Algorithm, Seconds) {
        let Exchange { collective, bytes } = exchange;
        let prices = self.prices.get(self.cluster, collective, &group.cards);
        let usable = prices.iter().filter(|price| serial(collective, price.algorithm));
        let timed = usable.map(|price| (price.algorithm, price.at(bytes)));
        let (algorithm, time) =
            timed.min_by(|a, b| a.1.0.total_cmp(&b.1.0)).expect("a collective has an algorithm");
        match self.exact {
            true => {
                let prices = &self.prices;
                let time = prices.exact(self.cluster, collective, algorithm, &group.cards, bytes);
                (algorithm, time)
            }
            false => (algorithm, time),
        }
    }

    /// What a pass takes, by what it takes for whole numbers of sequences.
    fn by_sequences(&self, pass: Pass, terms: impl Fn(&Step<'_>) -> Terms) -> Terms {
        let tokens = self.tokens(pass.tokens);
        let at = |sequences: u64| {
            let part = |sequence: u64| Part {
                sequence,
                tokens: &tokens,
                past: pass.past,
                want: Want::Best(1),
            };
            let parts: Vec<Part<'_>> = (0..sequences).map(part).collect();
            terms(&Step { parts: &parts })
        };
        let (most, half) = (MANY_SEQUENCES, MANY_SEQUENCES / 2);
        if pass.sequences > most as f64 {
            // Time is a line over sequences long before that.
            let part = (pass.sequences - half as f64) / half as f64;
            return at(half).towards(at(most), part);
        }
        let least = pass.sequences.floor().max(1.0);
        let part = pass.sequences - least;
        let first = at(least as u64);
        if part > 1e-9 { first.towards(at(least as u64 + 1), part) } else { first }
    }

    /// Tokens that stand for any: spread over the vocabulary.
    pub(crate) fn tokens(&self, count: u64) -> Vec<u32> {
        (0..count).map(|at| (at.wrapping_mul(0x9E37_79B1) % self.model.vocab) as u32).collect()
    }

    fn layer_work(&self, layer: usize, group: &Group, pass: Pass) -> Terms {
        self.by_sequences(pass, |step| self.fold(group, &self.layer_lists(layer, group, step)).0)
    }

    fn both(&self, group: &Group, pass: Pass, lists: impl Fn(&Step<'_>) -> Lists) -> Terms {
        self.by_sequences(pass, |step| {
            let (mut terms, exchanged) = self.fold(group, &lists(step));
            terms.communication += exchanged;
            terms
        })
    }

    /// One layer on a group.
    pub(crate) fn layer(&self, layer: usize, group: &Group, pass: Pass) -> Terms {
        self.both(group, pass, |step| self.layer_lists(layer, group, step))
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

    /// The head for the last token of every sequence, and the exchange of the ranks' candidates.
    pub(crate) fn head(&self, group: &Group, sequences: f64) -> Terms {
        let pass = Pass { sequences, tokens: 1, past: 0 };
        self.both(group, pass, |step| self.head_lists(group, step))
    }

    /// The head on a group if exchanges were free.
    pub(crate) fn least_head(&self, group: &Group, sequences: f64) -> f64 {
        let pass = Pass { sequences, tokens: 1, past: 0 };
        let work = |step: &Step<'_>| self.fold(group, &self.head_lists(group, step)).0;
        self.by_sequences(pass, work).total().0
    }

    /// Rows of the embedding table, which the card that has a row gives to the others.
    pub(crate) fn embed(&self, group: &Group, pass: Pass) -> Terms {
        self.both(group, pass, |step| self.embed_lists(group, step))
    }

    /// A step from the host to the cards, and if somebody reads it, its result back.
    pub(crate) fn host(&self, first: &Group, last: &Group, read: bool) -> Terms {
        let back = match read {
            true => self.cluster.upload(last.cards[0], Bytes(8 * last.cards.len() as u64)),
            false => Seconds::ZERO,
        };
        let audit = self.audit(last, self.model.layers.len() as u64);
        Terms { fixed: self.word(first) + back + audit.fixed, ..audit }
    }

    /// A word from the host to the cards that begin a step.
    pub(crate) fn word(&self, first: &Group) -> Seconds {
        let latency = |card: usize| self.cluster.profile(card).host.latency.value;
        first.cards.iter().map(|&card| latency(card)).fold(Seconds::ZERO, Seconds::max)
    }

    /// What taps take, and the host's reading of what they kept, on the cards that end a step. Others are read
    /// while these compute.
    fn audit(&self, last: &Group, layers: u64) -> Terms {
        let audit = self.request.taps();
        if audit.is_none() {
            return Terms::default();
        }
        let (_, bytes) = expected_audit(self.model, audit, layers, self.request.position);
        let on = |&card: &usize| Terms {
            memory: Seconds(self.cost_of(card).memory(2.0 * bytes as f64)),
            fixed: self.cluster.upload(card, Bytes(bytes)),
            ..Terms::default()
        };
        last.cards.iter().map(on).fold(Terms::default(), Terms::later)
    }

    /// From one stage to the next: every rank of the next gets the activations from one of this.
    pub(crate) fn hop(&self, from: &Group, to: &Group, rows: f64) -> Seconds {
        let key = (from.cards.clone(), to.cards.clone(), rows.to_bits());
        if let Some(&known) = self.hops.borrow().get(&key) {
            return known;
        }
        let time = exchange::hop(self.cluster, &self.hop_messages(from, to, rows));
        self.hops.borrow_mut().insert(key, time);
        time
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
        let exchanging = self.exchanging(group);
        let space = self.space(place.sequences);
        memory::footprint(self.model, layers, group, rank, space, place, exchanging)
    }

    /// How many layers a group can hold, whichever they are.
    pub(crate) fn capacity(&self, group: &Group, place: Place) -> u32 {
        self.capacities(group, [place])[0]
    }

    /// The same in several places.
    pub(crate) fn capacities<const N: usize>(&self, group: &Group, places: [Place; N]) -> [u32; N] {
        let exchanging = self.exchanging(group);
        places.map(|place| {
            let space = self.space(place.sequences);
            let ranks = group.cards.iter().enumerate().map(|(rank, &card)| {
                let usable = self.cluster.profile(card).usable().0;
                let each = self
                    .kinds
                    .iter()
                    .map(|&(layer, _)| memory::per_layer(self.model, layer, group, rank, space));
                let each = each.max_by_key(|each| each.total());
                let fixed = memory::fixed(self.model, group, rank, space, place, exchanging);
                memory::most_layers(fixed, each.unwrap_or_default(), usable)
            });
            ranks.min().unwrap_or(0).min(self.model.layers.len() as u64) as u32
        })
    }
}

/// Sequences beyond which time is taken as a line over them.
const MANY_SEQUENCES: u64 = 64;

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
