// SPDX-License-Identifier: Apache-2.0
//! From the programs of a layout's cards to what the engine runs: each operator with its price, each exchange
//! with its schedule. What a layer does is said by the programs alone.

use std::collections::HashMap;
use std::rc::Rc;

use rand::Rng;
use rand_pcg::Pcg32;
use spanker_collective::{Algorithm, Collective};
use spanker_model::KvShape;
use spanker_topology::{ExchangeKind, Kernels, Shape};

use super::engine::{Item, OUTSIDE};
use super::flow::Flow;
use crate::cost::exchange;
use crate::cost::method::ExchangeMethod;
use crate::cost::pass::Pass;
use crate::cost::{Group, Lists, Pricer};
use crate::plan::{Layout, Stage, in_flight, sequences_per_replica, served};
use crate::program::{Load, Op, Part, Programs, Reach, Step, Terms, Want, Wiring, load};
use crate::trace::{Activity, Label, Parts};
use crate::work::Work;

/// Programs for all cards, with the collectives and groups that they refer to.
pub(crate) struct Items {
    pub(crate) items: Vec<Vec<Item>>,
    pub(crate) flows: Vec<Rc<Flow>>,
    pub(crate) groups: Vec<Vec<usize>>,
    /// What each collective is, by the number of its flow.
    pub(crate) collectives: Vec<(Collective, Algorithm)>,
}

/// What to write programs for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum What {
    /// So many tokens of every sequence, the first of which has this number and position.
    Decode { tokens: u32, number: u32, position: u64 },
    /// The prompt of every sequence in pieces, and the first token.
    Prompt,
}

/// Writes programs.
pub(crate) struct Writer<'a> {
    pricer: &'a Pricer<'a>,
    known: HashMap<(Collective, Algorithm, usize), u32>,
    items: Items,
    /// The largest part by which a piece of work may take longer, at random.
    jitter: f64,
    dice: Pcg32,
    /// Whether every operator is an item of its own.
    apart: bool,
    /// Room for a program.
    priced: Vec<Priced>,
}

/// An entry of a program with its price.
#[derive(Debug, Clone, Copy)]
enum Priced {
    /// An operator, which others may be put together with.
    Work { terms: Terms, bytes: f64, label: Label, op: u32 },
    /// Anything else.
    Item(Item),
}

/// What a program is priced for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Given {
    /// Tokens before the step.
    token: u32,
    /// How far back its rows look.
    reach: Reach,
}

/// One step of one micro-batch.
struct Wave<'w> {
    parts: &'w [Part<'w>],
    token: u32,
    /// Whether the host tells the first stage by itself; else the card that had the last result does.
    first: bool,
    last: bool,
    completes: bool,
}

/// One copy of the model as the simulation runs it.
struct Copy<'c> {
    stages: &'c [Stage],
    programs: Programs,
    wiring: Option<Wiring>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(pricer: &'a Pricer<'a>, jitter: f64, dice: Pcg32, apart: bool) -> Self {
        let items = vec![Vec::new(); pricer.cluster.cards()];
        let items = Items { items, flows: Vec::new(), groups: Vec::new(), collectives: Vec::new() };
        let (known, priced) = (HashMap::new(), Vec::new());
        Writer { pricer, known, items, jitter, dice, apart, priced }
    }

    pub(crate) fn write(mut self, layout: &Layout, what: What) -> Items {
        let request = self.pricer.request;
        for (copy, stages) in layout.replicas.iter().enumerate() {
            // As the prediction has it: the last copies may serve fewer, or none.
            let served = served(request, layout, copy);
            let (batches, _) = in_flight(request, served.max(1), stages.len());
            let copy = self.copy(stages, sequences_per_replica(request, layout).max(1));
            match what {
                What::Decode { tokens, number, position } if served > 0 => {
                    for token in 0..tokens {
                        for batch in 0..batches {
                            let together = served / batches + u64::from(batch < served % batches);
                            let past = position + u64::from(token);
                            let blocks = vec![0; KvShape::blocks_for(past + 1) as usize];
                            let want = Want::Best(1);
                            let part = Part {
                                tokens: &[0],
                                past,
                                blocks: &blocks,
                                windowed: &[],
                                want,
                                outputs: 1,
                            };
                            let parts = vec![part; together as usize];
                            let wave = Wave {
                                parts: &parts,
                                token: number + token,
                                first: token == 0,
                                last: token + 1 == tokens,
                                completes: batch + 1 == batches,
                            };
                            self.wave(&copy, &wave);
                        }
                    }
                }
                What::Decode { .. } => {}
                What::Prompt => self.prompt(&copy),
            }
        }
        self.items
    }

    fn copy<'c>(&self, stages: &'c [Stage], sequences: u64) -> Copy<'c> {
        let Pricer { model, cluster, .. } = *self.pricer;
        let turns = in_flight(self.pricer.request, sequences, stages.len()).0;
        let space = self.pricer.space(sequences, turns);
        let programs = Programs::symbolic(model, cluster, stages, space);
        let cards: Vec<usize> = programs.members().iter().map(|member| member.card).collect();
        let link = cluster.profile(cards[0]).link.as_ref();
        let kind = link.map(|link| link.exchange).unwrap_or_default();
        let hub = matches!(cluster.shape(), Shape::Star | Shape::Switch);
        let neighbours = stages.len() > 1 && kind == ExchangeKind::Schedules && !hub;
        let wiring = neighbours.then(|| Wiring::of(cluster, &cards).ok()).flatten();
        Copy { stages, programs, wiring }
    }

    fn prompt(&mut self, copy: &Copy<'_>) {
        let request = self.pricer.request;
        let sequences = match request.objective {
            crate::Objective::Throughput => 1,
            _ => request.sequences,
        };
        let pieces = Pass::pieces(sequences, request.prompt, request.batch);
        let count = pieces.len();
        for (piece, pass) in pieces.into_iter().enumerate() {
            let end = piece + 1 == count;
            let tokens = vec![0; pass.tokens as usize];
            let blocks = vec![0; KvShape::blocks_for(pass.past + pass.tokens) as usize];
            let want = if end { Want::Best(1) } else { Want::Nothing };
            let past = pass.past;
            let part =
                Part { tokens: &tokens, past, blocks: &blocks, windowed: &[], want, outputs: 1 };
            let parts = vec![part; sequences as usize];
            let wave =
                Wave { parts: &parts, token: 0, first: piece == 0, last: end, completes: end };
            self.wave(copy, &wave);
        }
    }

    fn push(&mut self, card: usize, item: Item) {
        self.items.items[card].push(item);
    }

    /// One micro-batch through all stages, and back to the host.
    fn wave(&mut self, copy: &Copy<'_>, wave: &Wave<'_>) {
        let stages = copy.stages;
        let (first, last) = (&stages[0].group, &stages[stages.len() - 1].group);
        let read = wave.parts.iter().any(|part| part.want != Want::Nothing);
        let down = self.pricer.word(&first.cards).0;
        let back = self.pricer.host(&first.cards, &last.cards, read).total().0 - down;
        let (home, token, op) = (last.cards[0], wave.token, OUTSIDE);
        let in_place = stages.len() == 1;
        // Steps are told apart by how many tokens come before them, as in a run.
        let step = wave.parts.first().map_or(0, |part| part.past as u32);
        let label = Label { activity: Activity::Host, layer: 0, token: step };
        for &card in &first.cards {
            if wave.first || in_place {
                self.outside(card, down, label);
            } else {
                self.push(card, Item::Recv { from: home as u32, label, op });
            }
        }
        let direct = |from: usize, to: usize| vec![from, to];
        let routed = |from: usize, to: usize| match &copy.wiring {
            Some(wiring) => wiring.route(from, to),
            None => direct(from, to),
        };
        let parts = Step::of(wave.parts);
        // A graphics processor has no taps in its programs; what it captures is part of the host's price.
        let lists = match exchange::kernels(self.pricer.cluster, &first.cards) {
            Kernels::Gpu { .. } => copy.programs.plain(&parts, &routed),
            _ => copy.programs.step(&parts, &routed),
        };
        let members = copy.programs.members();
        for (one, list) in members.iter().zip(&lists) {
            let group = &copy.stages[one.stage].group;
            let cards = |member: usize| members[member].card;
            let given = Given { token: label.token, reach: parts.reach() };
            self.member((group, one.rank), &cards, list, given);
        }
        if back > 0.0 {
            self.outside(home, back, label);
        }
        if wave.completes {
            self.push(home, Item::Done { token });
        }
        if !wave.last && !in_place {
            for &card in &first.cards {
                self.push(home, Item::Tell { to: card as u32, seconds: down });
            }
        }
    }

    /// Time on a card that is no operator's.
    fn outside(&mut self, card: usize, seconds: f64, label: Label) {
        let parts = Parts { fixed: seconds, ..Parts::default() };
        self.push(card, Item::Work { seconds, bytes: 0.0, label, op: OUTSIDE, parts });
    }

    /// Pieces of a step one after the other on a group, with a note after some of them.
    pub(crate) fn row(
        mut self,
        group: &Group,
        pieces: &[&Lists],
        reach: Reach,
        noted: [usize; 2],
    ) -> Items {
        // Layers that are alike are priced once. Nobody reads what is noted of them but when they are done.
        let mut known: Vec<(*const Lists, Vec<Priced>)> = Vec::new();
        for (rank, &card) in group.cards.iter().enumerate() {
            known.clear();
            for (at, &lists) in pieces.iter().enumerate() {
                let token = at as u32;
                let alike = known.iter().position(|(one, _)| std::ptr::eq(*one, lists));
                let alike = alike.unwrap_or_else(|| {
                    let mut priced = Vec::new();
                    let cards = |member| group.cards[member];
                    let given = Given { token, reach };
                    self.price((group, rank), &cards, &lists[rank], given, &mut priced);
                    known.push((lists, priced));
                    known.len() - 1
                });
                self.put(card, &known[alike].1);
                if noted.contains(&(at + 1)) {
                    self.push(card, Item::Done { token });
                }
            }
        }
        self.items
    }

    /// The program of one rank; `cards` says where the members are that it names.
    fn member(
        &mut self,
        (group, rank): (&Group, usize),
        cards: &dyn Fn(usize) -> usize,
        list: &[Op],
        given: Given,
    ) {
        let mut priced = std::mem::take(&mut self.priced);
        self.price((group, rank), cards, list, given, &mut priced);
        self.put(group.cards[rank], &priced);
        priced.clear();
        self.priced = priced;
    }

    /// Puts entries behind what a card has.
    fn put(&mut self, card: usize, entries: &[Priced]) {
        for entry in entries {
            match *entry {
                Priced::Work { terms, bytes, label, op } => {
                    self.work(card, terms, bytes, label, op);
                }
                Priced::Item(item) => self.push(card, item),
            }
        }
    }

    /// The same program with prices, before its operators are put together.
    fn price(
        &mut self,
        (group, rank): (&Group, usize),
        cards: &dyn Fn(usize) -> usize,
        list: &[Op],
        Given { token, reach }: Given,
        out: &mut Vec<Priced>,
    ) {
        let card = group.cards[rank];
        let mut label = Label { activity: Activity::Host, layer: 0, token };
        let mut before: Option<&Work> = None;
        // Taps belong to the operator before them: numbers are those of a program without.
        let mut next = 0u32;
        for content in list {
            let op = match content {
                Op::Tap(_) => next.saturating_sub(1),
                _ => next,
            };
            next = op + 1;
            match content {
                Op::Mark { activity, layer } => {
                    label = Label { activity: *activity, layer: *layer, token };
                }
                Op::Work(work) | Op::Tap(work) => {
                    if let Some(load) = load(work, before, &reach) {
                        let terms = self.pricer.cost_of(card).operator(&load);
                        out.push(Priced::Work { terms, bytes: load.bytes as f64, label, op });
                    }
                    before = Some(work);
                }
                Op::Data { length, .. } => {
                    let terms = self.pricer.cost_of(card).operator(&Load::data(*length));
                    out.push(Priced::Work { terms, bytes: *length as f64, label, op });
                }
                Op::Send { to, length, .. } => {
                    before = None;
                    let (to, bytes) = (cards(*to) as u32, *length as f64);
                    let label = Label { activity: Activity::Handoff, ..label };
                    out.push(Priced::Item(Item::Send { to, bytes, label, op }));
                }
                Op::Receive { from, .. } => {
                    before = None;
                    let from = cards(*from) as u32;
                    let label = Label { activity: Activity::Handoff, ..label };
                    out.push(Priced::Item(Item::Recv { from, label, op }));
                }
                exchange => {
                    before = None;
                    let label = Label { activity: Activity::Exchange, ..label };
                    self.exchange((group, rank), exchange, label, op, out);
                }
            }
        }
    }

    fn work(&mut self, card: usize, terms: Terms, bytes: f64, label: Label, op: u32) {
        let late = if self.jitter > 0.0 { self.jitter * self.dice.random::<f64>() } else { 0.0 };
        let terms = terms.times(1.0 + late);
        let seconds = terms.total().0;
        let parts = Parts {
            memory: terms.memory.0,
            compute: terms.compute.0,
            fixed: terms.fixed.0,
            ..Parts::default()
        };
        if !self.apart
            && let Some(Item::Work { seconds: so_far, bytes: touched, op: known, .. }) =
                self.items.items[card].last_mut()
            && *known != OUTSIDE
        {
            *so_far += seconds;
            *touched += bytes;
            return;
        }
        self.push(card, Item::Work { seconds, bytes, label, op, parts });
    }

    fn exchange(
        &mut self,
        (group, rank): (&Group, usize),
        op: &Op,
        label: Label,
        number: u32,
        out: &mut Vec<Priced>,
    ) {
        let Some(priced) = self.pricer.exchange(group, op) else { return };
        let (collective, ranks) = (priced.collective, group.cards.len());
        let (algorithm, bytes, after) = match priced.method {
            ExchangeMethod::Schedule(algorithm) => (algorithm, priced.bytes, 0.0),
            // Everybody is there, and then reads.
            ExchangeMethod::SharedMemory => {
                let latency = self.pricer.cluster.latency(group.cards[0], group.cards[1]);
                (Algorithm::OneShot, 0.0, (priced.time.0 - latency.0).max(0.0))
            }
        };
        let flow = self.flow(collective, algorithm, ranks);
        let index = self.group(group);
        let shared = after > 0.0;
        let base = if shared { 0.0 } else { self.pricer.cluster.base(&group.cards).0 };
        let rank = rank as u32;
        if base > 0.0 {
            let parts = Parts { latency: base, ..Parts::default() };
            let (seconds, bytes) = (base, 0.0);
            out.push(Priced::Item(Item::Work { seconds, bytes, label, op: number, parts }));
        }
        let collective = Item::Collective { flow, rank, group: index, bytes, label, op: number };
        out.push(Priced::Item(collective));
        if shared {
            let parts = Parts { bandwidth: after, ..Parts::default() };
            let (seconds, bytes) = (after, 0.0);
            out.push(Priced::Item(Item::Work { seconds, bytes, label, op: number, parts }));
        }
    }

    fn flow(&mut self, collective: Collective, algorithm: Algorithm, ranks: usize) -> u32 {
        let (items, pricer) = (&mut self.items, self.pricer);
        *self.known.entry((collective, algorithm, ranks)).or_insert_with(|| {
            items.flows.push(pricer.flow(collective, algorithm, ranks));
            items.collectives.push((collective, algorithm));
            items.flows.len() as u32 - 1
        })
    }

    fn group(&mut self, group: &Group) -> u32 {
        let groups = &mut self.items.groups;
        let known = groups.iter().position(|cards| *cards == group.cards);
        known.unwrap_or_else(|| {
            groups.push(group.cards.clone());
            groups.len() - 1
        }) as u32
    }
}
