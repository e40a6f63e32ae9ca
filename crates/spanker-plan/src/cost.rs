// SPDX-License-Identifier: Apache-2.0
//! What a stage of a plan costs in time and memory on given cards.
//!
//! A *stage* is a run of layers on a group of cards. Its time is a fold over the program of one layer of each
//! kind, its memory the program's list of buffers; nothing is searched here, and no layer is described.

pub(crate) mod exchange;
pub(crate) mod memory;
pub(crate) mod method;
mod overhead;
pub(crate) mod pass;
pub(crate) mod shard;
pub(crate) mod table;
mod tally;

use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use spanker_collective::{Algorithm, Collective};
use spanker_model::{KvShape, Model};
use spanker_topology::{Bytes, Cluster, ExchangeKind, Kernels, Seconds};

use crate::Request;
use crate::plan::{Exchanged, name_of};
use crate::program::{
    Buffer, BufferIds, Context, Cost, Exchanging, Holder, Holding, Inputs, Member, Numerics, Op,
    Part, Piece, Sink, Sizing, Space, Step, Terms, Want, WindowCache, Writer, expected_audit,
    expected_of_gpu,
};
use crate::simulate::flow::Flow;
use crate::simulate::in_a_row;
use crate::simulate::network::Speeds;
use crate::work::BufferId;
use exchange::{AtLeast, PriceList, rank_order};
use memory::{Footprint, Place};
use method::PricedExchange;
use pass::Pass;
use shard::{Shard, Split, Units, shards};
use tally::{RankTally, Tally};

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
    /// Whether layers that follow each other are simulated as such.
    exact: bool,
    /// What all layers' types ask of the buffers.
    inputs: Inputs,
    /// What a card of each kind does of a layer in a second, for passes that were asked for.
    rates: RefCell<Vec<(Pass, Rc<[f64]>)>>,
    /// What one card would hold of everything.
    everything: OnceCell<Footprint>,
}

/// The op lists of a group's ranks.
pub(crate) type Lists = Vec<Vec<Op>>;

/// A piece of a step that is priced by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The embedding, on the first group.
    Embed,
    /// A layer.
    Layer(usize),
    /// The head, on the last group.
    Head,
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
            inputs: Inputs::of(model, 0..model.layers.len()),
            rates: RefCell::default(),
            everything: OnceCell::new(),
        }
    }

    /// The same with prices of collectives from elsewhere: of one algorithm, or known from a cluster with
    /// the same wires.
    pub(crate) fn with_prices(mut self, prices: Rc<PriceList>) -> Self {
        self.prices = prices;
        self
    }

    /// The messages of a collective by an algorithm.
    pub(crate) fn flow(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        ranks: usize,
    ) -> Rc<Flow> {
        self.prices.flow(collective, algorithm, ranks)
    }

    /// The prices of exchanges, for others on the same cluster.
    pub(crate) fn prices(&self) -> Rc<PriceList> {
        Rc::clone(&self.prices)
    }

    /// The same with layers simulated in a row, for predictions that somebody reads. A search prices each
    /// exchange as if all ranks began it together, which takes at least about as long.
    pub(crate) fn exactly(mut self) -> Self {
        self.exact = true;
        self
    }

    pub(crate) fn speeds(&self) -> &Speeds {
        self.prices.speeds(self.cluster)
    }

    pub(crate) fn cost_of(&self, card: usize) -> &Cost {
        &self.costs[self.cluster.kind(card)]
    }

    /// What a card has to have room for, by the request.
    pub(crate) fn space(&self, sequences: u64, turns: u64) -> Space {
        let Request { context, batch, kv, .. } = *self.request;
        let (audit, blocks) = (self.request.taps(), self.request.blocks_for(sequences));
        let batch = batch.min(context).max(sequences);
        let outputs = self.request.outputs_for(sequences);
        Space { context, batch, sequences, outputs, turns, blocks, kv, audit }
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
        let everything = Place { first: true, last: true, sequences, turns: 1 };
        let enough =
            |group: &Group| self.capacity(group, everything) as usize >= self.model.layers.len();
        self.groups_unless(cards, split, pass, enough)
    }

    /// The same, where somebody else says whether the cards have room enough with shares by speed.
    pub(crate) fn groups_unless(
        &self,
        cards: &[usize],
        split: Split,
        pass: Pass,
        enough: impl FnOnce(&Group) -> bool,
    ) -> Vec<Group> {
        let mut groups: Vec<Group> =
            self.group(cards, split, Aim::Speed, pass).into_iter().collect();
        if cards.len() == 1 || groups.first().is_some_and(enough) {
            return groups;
        }
        for aim in [Aim::Fit, Aim::Memory] {
            let group = self.group(cards, split, aim, pass);
            groups.extend(group.filter(|group| !groups.contains(group)));
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
        let by_kind = self.rates(pass);
        let rates: Vec<f64> = cards.iter().map(|&card| by_kind[self.cluster.kind(card)]).collect();
        if aim == Aim::Speed {
            return Some(rates);
        }
        let all = self.everything.get_or_init(|| {
            let sequences = self.request.sequences;
            let place = Place { first: true, last: true, sequences, turns: 1 };
            self.footprint(0..self.model.layers.len(), &self.alone(cards[0]), 0, place)
        });
        let shared = (all.weights + all.kv).0 as f64;
        let room = |card| (usable(card) - all.buffers.0 as f64).max(0.0) / shared;
        // A little less than there is, because shares come in whole units.
        let caps: Vec<f64> = cards.iter().map(|card| 0.995 * room(card)).collect();
        fill(&rates, &caps)
    }

    /// How many layers a card of each kind does in a second, by its memory and arithmetic.
    fn rates(&self, pass: Pass) -> Rc<[f64]> {
        if let Some((_, known)) = self.rates.borrow().iter().find(|(known, _)| *known == pass) {
            return Rc::clone(known);
        }
        let rate = |kind: usize| {
            let card = (0..self.cluster.cards()).find(|&card| self.cluster.kind(card) == kind);
            let alone = self.alone(card.unwrap_or(0));
            let terms = self.work(&alone, Phase::Layer(self.kinds[0].0), pass);
            1.0 / (terms.memory + terms.compute).0
        };
        let rates: Rc<[f64]> = (0..self.costs.len()).map(rate).collect();
        self.rates.borrow_mut().push((pass, Rc::clone(&rates)));
        rates
    }

    /// How a group exchanges activations.
    pub(crate) fn exchange_kind(&self, group: &Group) -> ExchangeKind {
        exchange::exchange_kind(self.cluster, &group.cards)
    }

    fn exchanging(&self, group: &Group) -> Exchanging {
        self.prices.exchanging(self.cluster, &group.cards)
    }

    /// What each rank of a group has for a piece of a step.
    fn members(&self, group: &Group, piece: Phase) -> Vec<Member> {
        let mut put = |_: &Piece, _: u64| crate::work::Place { buffer: BufferId(0), offset: 0 };
        let member = |rank: usize| {
            let (shard, split) = (&group.shards[rank], group.split);
            let mut holder =
                Holder { model: self.model, shard, split, put: &mut put, in_file: false };
            let mut holding = Holding { layers: Vec::new(), embedding: None, head: None };
            match piece {
                Phase::Embed => holding.embedding = Some(holder.embedding()),
                Phase::Layer(layer) => holding.layers = vec![holder.layer(layer)],
                Phase::Head => holding.head = Some(holder.head()),
            }
            let (card, shard) = (group.cards[rank], shard.clone());
            Member { card, stage: 0, rank, shard, buffers: BufferIds::symbols(), holding }
        };
        (0..group.cards.len()).map(member).collect()
    }

    /// Writes a piece of a group's programs.
    fn write<S: Sink>(&self, group: &Group, piece: Phase, step: &Step<'_>, sink: S) -> S {
        let members = self.members(group, piece);
        let of = Context {
            model: self.model,
            numerics: Numerics::default(),
            space: self.space(step.parts.len() as u64, 1),
            stages: &[(group.split, self.exchange_kind(group))],
            members: &members,
        };
        let mut writer = Writer::new(of, step, sink);
        let all = 0..members.len();
        match piece {
            Phase::Embed => {
                writer.data(all.clone());
                writer.embed(all);
            }
            Phase::Layer(layer) => writer.layer(0, all, 0, layer),
            Phase::Head => writer.head(0, all),
        }
        writer.programs
    }

    /// The programs of a group's ranks for a piece of a step.
    pub(crate) fn lists(&self, group: &Group, piece: Phase, step: &Step<'_>) -> Lists {
        self.write(group, piece, step, vec![Vec::new(); group.cards.len()])
    }

    /// What a piece of a step takes on a group: the work phase after phase, each as long as its slowest card,
    /// and apart from that the exchanges between the phases.
    fn fold(&self, group: &Group, piece: Phase, step: &Step<'_>) -> Tally<'_> {
        let ranks = group.cards.iter().map(|&card| RankTally::new(self.cost_of(card))).collect();
        let (phases, exchanges) = (Vec::with_capacity(8), Vec::new());
        let tally = Tally { ranks, phases, exchanges, reach: step.reach() };
        let mut tally = self.write(group, piece, step, tally);
        tally.close();
        tally
    }

    /// What an exchange of a group takes.
    pub(crate) fn exchange_time(&self, group: &Group, op: &Op) -> Seconds {
        self.exchange(group, op).map_or(Seconds::ZERO, |exchange| exchange.time)
    }

    /// How a group runs an exchange, and what it takes. Nothing for what is none.
    pub(crate) fn exchange(&self, group: &Group, op: &Op) -> Option<PricedExchange> {
        self.prices.exchange(self.cluster, &group.cards, op)
    }

    /// An exchange in words and numbers.
    pub(crate) fn describe(
        &self,
        group: &Group,
        op: &Op,
        after: &'static str,
    ) -> Option<Exchanged> {
        let PricedExchange { collective, bytes, method, time } = self.exchange(group, op)?;
        let (collective, algorithm) = (name_of(collective), method.name());
        Some(Exchanged { after, collective, bytes, algorithm, time })
    }

    /// What a pass takes, by what it takes for some numbers of sequences.
    fn by_sequences(&self, pass: Pass, terms: impl Fn(&Step<'_>) -> Terms) -> Terms {
        let tokens = vec![0; pass.tokens as usize];
        let blocks = vec![0; KvShape::blocks_for(pass.past + pass.tokens) as usize];
        let part = Part {
            tokens: &tokens,
            past: pass.past,
            blocks: &blocks,
            windowed: &[],
            want: Want::Best(1),
            outputs: 1,
        };
        let at = |sequences: u64| terms(&Step::of(&vec![part; sequences as usize]));
        let (most, half) = (MANY_SEQUENCES, MANY_SEQUENCES / 2);
        if pass.sequences > most {
            // Time is a line over sequences long before that.
            let part = (pass.sequences - half) as f64 / half as f64;
            return at(half).towards(at(most), part);
        }
        at(pass.sequences.max(1))
    }

    /// Whether layers that follow each other are simulated as such.
    pub(crate) fn is_exact(&self) -> bool {
        self.exact
    }

    /// A piece of a pass on a group if exchanges were free.
    fn work(&self, group: &Group, piece: Phase, pass: Pass) -> Terms {
        self.by_sequences(pass, |step| self.fold(group, piece, step).work())
    }

    /// A piece of a pass on a group.
    fn both(&self, group: &Group, piece: Phase, pass: Pass) -> Terms {
        self.by_sequences(pass, |step| {
            let tally = self.fold(group, piece, step);
            let mut terms = tally.work();
            for exchange in &tally.exchanges {
                terms.communication += self.exchange_time(group, exchange);
            }
            terms
        })
    }

    /// One layer on a group.
    pub(crate) fn layer(&self, layer: usize, group: &Group, pass: Pass) -> Terms {
        self.both(group, Phase::Layer(layer), pass)
    }

    /// The mean layer on a group.
    pub(crate) fn mean_layer(&self, group: &Group, pass: Pass) -> Terms {
        self.mean(|layer| self.layer(layer, group, pass))
    }

    /// The least that a mean layer takes on a group: its work, and of exchanges what the busiest wire carries.
    pub(crate) fn least_layer(&self, group: &Group, pass: Pass) -> f64 {
        let least = |step: &Step<'_>, layer: usize| {
            let tally = self.fold(group, Phase::Layer(layer), step);
            let mut terms = tally.work();
            let mut known = None;
            for exchange in &tally.exchanges {
                terms.communication += self.least_exchange(group, exchange, &mut known);
            }
            terms
        };
        self.mean(|layer| self.by_sequences(pass, |step| least(step, layer))).total().0
    }

    /// The least that an exchange of a group takes, without a simulation. `known` is the line over the bytes of the
    /// group's exchange before.
    fn least_exchange(
        &self,
        group: &Group,
        op: &Op,
        known: &mut Option<(Collective, AtLeast)>,
    ) -> Seconds {
        let Op::Collective { collective, fold, elements, .. } = op else { return Seconds::ZERO };
        let bytes = *elements as f64 * fold.size() as f64;
        let at_least = match *known {
            Some((same, at_least)) if same == *collective => at_least,
            _ => self.prices.at_least(self.cluster, *collective, &group.cards),
        };
        *known = Some((*collective, at_least));
        at_least.of(bytes)
    }

    fn mean(&self, terms: impl Fn(usize) -> Terms) -> Terms {
        let sum = self.kinds.iter().fold(Terms::default(), |sum, &(layer, count)| {
            sum.plus(terms(layer).times(count as f64))
        });
        sum.times(1.0 / self.model.layers.len() as f64)
    }

    /// A run of layers on a group.
    pub(crate) fn layers(&self, layers: Range<usize>, group: &Group, pass: Pass) -> Terms {
        let kinds = self.kinds.iter().zip(self.counts(layers)).filter(|(_, count)| *count > 0);
        kinds.fold(Terms::default(), |sum, (&(layer, _), count)| {
            sum.plus(self.layer(layer, group, pass).times(count as f64))
        })
    }

    /// A stage: its layers, the embedding on the first one and the head on the last, if it is asked for.
    pub(crate) fn stage(
        &self,
        layers: Range<usize>,
        group: &Group,
        pass: Pass,
        (first, head): (bool, bool),
    ) -> Terms {
        if self.exact && group.cards.len() > 1 {
            return self
                .by_sequences(pass, |step| self.in_a_row(&layers, group, step, (first, head)));
        }
        let mut terms = self.layers(layers, group, pass);
        if first {
            terms = terms.plus(self.embed(group, pass));
        }
        if head {
            terms = terms.plus(self.head(group, pass.sequences));
        }
        terms
    }

    /// The same, simulated as it follows each other: what is not work is communication.
    fn in_a_row(
        &self,
        layers: &Range<usize>,
        group: &Group,
        step: &Step<'_>,
        (first, head): (bool, bool),
    ) -> Terms {
        let priced =
            |piece: Phase| (self.fold(group, piece, step).work(), self.lists(group, piece, step));
        let kinds: Vec<(Terms, Lists)> =
            self.kinds.iter().map(|&(layer, _)| priced(Phase::Layer(layer))).collect();
        let embed = first.then(|| priced(Phase::Embed));
        let head = head.then(|| priced(Phase::Head));
        let each = layers.clone().map(|layer| &kinds[self.kind_of[layer]]);
        let ends = embed.iter().chain(&head);
        let mut terms =
            each.clone().chain(ends).fold(Terms::default(), |sum, (work, _)| sum.plus(*work));
        let lists: Vec<&Lists> = each.map(|(_, lists)| lists).collect();
        let (embed, head) = (embed.as_ref().map(|(_, e)| e), head.as_ref().map(|(_, h)| h));
        let whole = in_a_row(self, group, step, embed, &lists, head);
        terms.communication = (whole - terms.total()).max(Seconds::ZERO);
        terms
    }

    /// How many of some layers there are of each kind.
    fn counts(&self, layers: Range<usize>) -> Vec<u64> {
        let mut counts = vec![0; self.kinds.len()];
        layers.for_each(|layer| counts[self.kind_of[layer]] += 1);
        counts
    }

    /// The head for the last token of every sequence, and the exchange of the ranks' candidates.
    pub(crate) fn head(&self, group: &Group, sequences: u64) -> Terms {
        let pass = Pass { sequences, tokens: 1, past: 0 };
        self.both(group, Phase::Head, pass)
    }

    /// The head on a group if exchanges were free.
    pub(crate) fn least_head(&self, group: &Group, sequences: u64) -> f64 {
        let pass = Pass { sequences, tokens: 1, past: 0 };
        self.work(group, Phase::Head, pass).total().0
    }

    /// Rows of the embedding table, which the card that has a row gives to the others.
    pub(crate) fn embed(&self, group: &Group, pass: Pass) -> Terms {
        self.both(group, Phase::Embed, pass)
    }

    /// A step from the host to the cards, and if somebody reads it, its result back.
    pub(crate) fn host(&self, first: &[usize], last: &[usize], read: bool) -> Terms {
        let back = match read {
            true => self.cluster.upload(last[0], Bytes(8 * last.len() as u64)),
            false => Seconds::ZERO,
        };
        let audit = self.audit(last, self.model.layers.len() as u64);
        Terms { fixed: self.word(first) + back + audit.fixed, ..audit }
    }

    /// A word from the host to the cards that begin a step.
    pub(crate) fn word(&self, first: &[usize]) -> Seconds {
        let latency = |card: usize| self.cluster.profile(card).host.latency.value;
        first.iter().map(|&card| latency(card)).fold(Seconds::ZERO, Seconds::max)
    }

    /// What taps take, and the host's reading of what they kept, on the cards that end a step. Others are read
    /// while these compute.
    fn audit(&self, last: &[usize], layers: u64) -> Terms {
        let audit = self.request.taps();
        if audit.is_none() {
            return Terms::default();
        }
        let position = self.request.position;
        // A graphics processor captures what it has at hand: pieces are gathered once, and read besides the results.
        let (_, bytes) = match exchange::kernels(self.cluster, last) {
            Kernels::Gpu { .. } => expected_of_gpu(self.model, audit, layers, position),
            _ => expected_audit(self.model, audit, layers, position),
        };
        let on = |&card: &usize| Terms {
            memory: Seconds(self.cost_of(card).memory(2.0 * bytes as f64)),
            fixed: self.cluster.upload(card, Bytes(bytes)),
            ..Terms::default()
        };
        last.iter().map(on).fold(Terms::default(), Terms::later)
    }

    /// From one stage to the next: every rank of the next gets the activations from one of this.
    pub(crate) fn hop(&self, from: &[usize], to: &[usize], rows: f64) -> Seconds {
        let bytes = rows * self.model.hidden as f64 * 4.0;
        let ranks = to.iter().enumerate();
        let pairs = ranks.map(|(rank, &card)| (nearest(self.cluster, from, card, rank), card));
        self.prices.hop(self.cluster, pairs.collect(), bytes)
    }

    /// The least that any hand-off between some cards takes.
    pub(crate) fn least_hop(&self, cards: &[usize], rows: f64) -> f64 {
        let bytes = rows * self.model.hidden as f64 * 4.0;
        self.prices.least_hop(self.cluster, cards, bytes)
    }

    /// What a rank's memory is filled with when it has `layers`.
    pub(crate) fn footprint(
        &self,
        layers: Range<usize>,
        group: &Group,
        rank: usize,
        place: Place,
    ) -> Footprint {
        let space = self.space(place.sequences, place.turns);
        let inputs = Inputs::of(self.model, layers.clone());
        let exchanging = self.exchanging(group);
        let sizing = Sizing::new(self.model, group, inputs, space, place.ends(), exchanging);
        let (shard, split) = (&group.shards[rank], group.split);
        let ends = memory::ends(self.model, shard, split, place.ends());
        let weights =
            self.kinds.iter().zip(self.counts(layers)).fold(ends, |sum, (kind, count)| {
                let each = memory::per_layer(self.model, kind.0, shard, split, space).weights.0;
                sum.saturating_add(each.saturating_mul(count))
            });
        memory::buffers(&sizing, rank).and(Buffer::Weights, weights)
    }

    /// How many layers a group can hold, whichever they are.
    pub(crate) fn capacity(&self, group: &Group, place: Place) -> u32 {
        self.capacities(group, [place])[0]
    }

    /// The same in several places.
    pub(crate) fn capacities<const N: usize>(&self, group: &Group, places: [Place; N]) -> [u32; N] {
        let (model, split) = (self.model, group.split);
        let exchanging = self.exchanging(group);
        let sizings = places.map(|place| {
            let space = self.space(place.sequences, place.turns);
            Sizing::new(model, group, self.inputs, space, place.ends(), exchanging)
        });
        let mut most = [model.layers.len() as u64; N];
        for (rank, &card) in group.cards.iter().enumerate() {
            let usable = self.cluster.profile(card).usable().0;
            let shard = &group.shards[rank];
            let space = self.space(places[0].sequences, 1);
            let kinds = self.kinds.iter();
            let each = kinds.map(|kind| memory::per_layer(model, kind.0, shard, split, space));
            let each: Vec<Footprint> = each.collect();
            let largest = each.iter().copied().max_by_key(|each| each.total()).unwrap_or_default();
            for ((place, sizing), most) in places.iter().zip(&sizings).zip(&mut most) {
                let weights = Bytes(memory::ends(model, shard, split, place.ends()));
                let buffers = memory::buffers(sizing, rank).buffers;
                let fixed = Footprint { weights, kv: Bytes(0), buffers };
                // What layers without a window keep would be counted for all.
                let fit = match WindowCache::of(model, space) {
                    Some(_) => {
                        let layers = self.kind_of.iter().map(|&kind| each[kind]);
                        memory::most_in_a_row(fixed, layers, usable)
                    }
                    None => memory::most_layers(fixed, largest, usable),
                };
                *most = (*most).min(fit);
            }
        }
        most.map(|most| most as u32)
    }
}

/// Sequences beyond which time is taken as a line over them.
const MANY_SEQUENCES: u64 = 64;

/// The card of `from` that sends to a rank of the next stage: the nearest, and of equals the one
/// with the same place.
fn nearest(cluster: &Cluster, from: &[usize], to: usize, rank: usize) -> usize {
    let count = from.len();
    let by_distance = |&a: &usize, &b: &usize| {
        cluster.latency(from[a], to).0.total_cmp(&cluster.latency(from[b], to).0)
    };
    let turned = (0..count).map(|step| (rank + step) % count);
    from[turned.min_by(by_distance).unwrap_or(0)]
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
