// SPDX-License-Identifier: Apache-2.0
//! From a layout to what each card does: work, collectives, hand-offs.

use std::collections::HashMap;

use rand::Rng;
use rand_pcg::Pcg32;
use spanker_collective::{Algorithm, Collective};

use super::engine::Item;
use super::flow::Flow;
use crate::cost::shard::Split;
use crate::cost::work::Pass;
use crate::cost::{Exchange, Group, Pricer};
use crate::plan::{Layout, Stage, in_flight, served};
use crate::trace::{Activity, Label};

/// Programs for all cards, with the collectives and groups that they refer to.
pub(crate) struct Programs {
    pub(crate) items: Vec<Vec<Item>>,
    pub(crate) flows: Vec<Flow>,
    pub(crate) groups: Vec<Vec<usize>>,
}

/// What to write programs for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum What {
    /// So many tokens of every sequence, the first of which has this number and position.
    Decode { tokens: u32, number: u32, position: u64 },
    /// The prompt of every sequence in pieces, and the first token.
    Prompt { pieces: u64 },
}

/// Writes programs.
pub(crate) struct Writer<'a> {
    pricer: &'a Pricer<'a>,
    known: HashMap<(Collective, Algorithm, usize), u32>,
    programs: Programs,
    /// The largest part by which a piece of work may take longer, at random.
    jitter: f64,
    dice: Pcg32,
}

/// One pass of one micro-batch.
struct Wave {
    pass: Pass,
    token: u32,
    first: bool,
    last: bool,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(pricer: &'a Pricer<'a>, jitter: f64, dice: Pcg32) -> Self {
        let items = vec![Vec::new(); pricer.cluster.cards()];
        let programs = Programs { items, flows: Vec::new(), groups: Vec::new() };
        Writer { pricer, known: HashMap::new(), programs, jitter, dice }
    }

    pub(crate) fn write(mut self, layout: &Layout, what: What) -> Programs {
        let request = self.pricer.request;
        for (copy, stages) in layout.replicas.iter().enumerate() {
            // As the prediction has it: the last copies may serve fewer, or none.
            let served = served(request, layout, copy);
            let (batches, together) = in_flight(request, served.max(1), stages.len());
            match what {
                What::Decode { tokens, number, position } if served > 0 => {
                    for token in 0..tokens {
                        for batch in 0..batches {
                            let pass = Pass::decode(together, position + u64::from(token));
                            let (first, last) = (token == 0, token + 1 == tokens);
                            let wave = Wave { pass, token: number + token, first, last };
                            self.wave(stages, &wave, batch + 1 == batches);
                        }
                    }
                }
                What::Decode { .. } => {}
                What::Prompt { pieces } => self.prompt(stages, pieces),
            }
        }
        self.programs
    }

    fn prompt(&mut self, stages: &[Stage], pieces: u64) {
        let request = self.pricer.request;
        let sequences = match request.objective {
            crate::Objective::Throughput => 1,
            _ => request.sequences,
        };
        let pass = Pass::prefill(sequences, request.prompt, pieces);
        let (first, last) = (&stages[0].group, &stages[stages.len() - 1].group);
        let host = self.pricer.host(first, last, (request.prompt * sequences) as f64).total().0;
        let label = label(Activity::Host, 0, 0);
        for &card in &first.cards {
            self.programs.items[card].push(Item::Work { seconds: host, label });
        }
        for piece in 0..pieces {
            let end = piece + 1 == pieces;
            for index in 0..stages.len() {
                self.enter(stages, index, pass, 0);
                self.layers(&stages[index], pass, 0);
                if end && index + 1 == stages.len() {
                    let group = self.group(&stages[index].group);
                    self.head(&stages[index].group, group, pass.sequences, 0);
                    self.push(last.cards[0], Item::Done { token: 0 });
                }
                self.leave(stages, index, pass);
            }
        }
    }

    fn push(&mut self, card: usize, item: Item) {
        self.programs.items[card].push(item);
    }

    /// One micro-batch through all stages, and back to the host.
    fn wave(&mut self, stages: &[Stage], wave: &Wave, completes: bool) {
        let (first, last) = (&stages[0].group, &stages[stages.len() - 1].group);
        let host = self.pricer.host(first, last, wave.pass.rows()).total().0;
        let (back, token) = (last.cards[0], wave.token);
        let in_place = stages.len() == 1;
        for &card in &first.cards {
            let label = label(Activity::Host, 0, token);
            let wait = Item::Recv { from: back as u32, label };
            let item =
                if wave.first || in_place { Item::Work { seconds: host, label } } else { wait };
            self.push(card, item);
        }
        for index in 0..stages.len() {
            self.enter(stages, index, wave.pass, token);
            self.layers(&stages[index], wave.pass, token);
            if index + 1 == stages.len() {
                let group = self.group(&stages[index].group);
                self.head(&stages[index].group, group, wave.pass.sequences, token);
            }
            self.leave(stages, index, wave.pass);
        }
        if completes {
            self.push(back, Item::Done { token });
        }
        if !wave.last && !in_place {
            for &card in &first.cards {
                self.push(back, Item::Tell { to: card as u32, seconds: host });
            }
        }
    }

    /// The embedding, or what the stage before hands over.
    fn enter(&mut self, stages: &[Stage], index: usize, pass: Pass, token: u32) {
        let group = &stages[index].group;
        let Some(before) = index.checked_sub(1) else {
            if let Some(exchange) = self.pricer.embedding(group, pass.rows()) {
                let number = self.group(group);
                self.exchange(group, number, exchange, label(Activity::Exchange, 0, token));
            }
            return;
        };
        let layer = stages[index].layers.start as u32;
        let messages = self.pricer.hop_messages(&stages[before].group, group, pass.rows());
        for (from, to, _) in messages {
            let label = label(Activity::Handoff, layer, token);
            self.push(to, Item::Recv { from: from as u32, label });
        }
    }

    fn leave(&mut self, stages: &[Stage], index: usize, pass: Pass) {
        let Some(next) = stages.get(index + 1) else { return };
        let messages = self.pricer.hop_messages(&stages[index].group, &next.group, pass.rows());
        for (from, to, bytes) in messages {
            self.push(from, Item::Send { to: to as u32, bytes });
        }
    }

    fn work(&mut self, card: usize, seconds: f64, label: Label) {
        let late = if self.jitter > 0.0 { self.jitter * self.dice.random::<f64>() } else { 0.0 };
        self.push(card, Item::Work { seconds: seconds * (1.0 + late), label });
    }

    fn layers(&mut self, stage: &Stage, pass: Pass, token: u32) {
        let group = &stage.group;
        let number = if group.split == Split::Whole { 0 } else { self.group(group) };
        let kinds = [Activity::Attention, Activity::Output, Activity::Up, Activity::Down];
        for layer in stage.layers.clone() {
            let phases: Vec<[f64; 4]> = (0..group.cards.len())
                .map(|rank| {
                    let (shard, card) = (&group.shards[rank], group.cards[rank]);
                    let phases = self.pricer.phases(layer, group.split, shard, card, pass);
                    phases.map(|terms| terms.total().0)
                })
                .collect();
            let exchanges = self.pricer.exchanges(layer, group, pass.rows());
            for (phase, exchange) in exchanges.into_iter().enumerate() {
                for (rank, &card) in group.cards.iter().enumerate() {
                    let label = label(kinds[phase], layer as u32, token);
                    self.work(card, phases[rank][phase], label);
                }
                if let Some(exchange) = exchange {
                    let label = label(Activity::Exchange, layer as u32, token);
                    self.exchange(group, number, exchange, label);
                }
            }
        }
    }

    fn head(&mut self, group: &Group, number: u32, sequences: f64, token: u32) {
        let layers = self.pricer.model.layers.len() as u32;
        for (rank, &card) in group.cards.iter().enumerate() {
            let terms = self.pricer.head_part(&group.shards[rank], card, sequences);
            self.work(card, terms.total().0, label(Activity::Head, layers, token));
        }
        if let Some(exchange) = self.pricer.candidates(group, sequences) {
            self.exchange(group, number, exchange, label(Activity::Exchange, layers, token));
        }
    }

    fn exchange(&mut self, group: &Group, number: u32, exchange: Exchange, label: Label) {
        let (algorithm, _) = self.pricer.best(group, exchange);
        let flow = self.flow(exchange.collective, algorithm, group.cards.len());
        let base = self.pricer.cluster.base(&group.cards).0;
        for (rank, &card) in group.cards.iter().enumerate() {
            if base > 0.0 {
                self.push(card, Item::Work { seconds: base, label });
            }
            let (rank, bytes) = (rank as u32, exchange.bytes);
            self.push(card, Item::Collective { flow, rank, group: number, bytes, label });
        }
    }

    fn flow(&mut self, collective: Collective, algorithm: Algorithm, ranks: usize) -> u32 {
        let flows = &mut self.programs.flows;
        *self.known.entry((collective, algorithm, ranks)).or_insert_with(|| {
            flows.push(Flow::new(collective, algorithm, ranks));
            flows.len() as u32 - 1
        })
    }

    fn group(&mut self, group: &Group) -> u32 {
        let groups = &mut self.programs.groups;
        let known = groups.iter().position(|cards| *cards == group.cards);
        known.unwrap_or_else(|| {
            groups.push(group.cards.clone());
            groups.len() - 1
        }) as u32
    }
}

fn label(activity: Activity, layer: u32, token: u32) -> Label {
    Label { activity, layer, token }
}
