// SPDX-License-Identifier: Apache-2.0
//! The groups that a search may use: sets of cards, each with ways to split matrices over them.
//!
//! Cards that nothing tells apart form a *class*: the same profile behind one switch, around one host, in
//! one mesh, or around a larger ring of equals. A set of cards is then a number from each class. Where
//! positions matter, every card is a class of its own.

use std::cell::OnceCell;

use spanker_topology::{Cluster, Shape};

use super::search::{classes_taken, even_runs, round};

use crate::cost::memory::Place;
use crate::cost::pass::{Pass, Passes};
use crate::cost::shard::Split;
use crate::cost::{Group, Pricer};

/// The most equal cards in a ring whose places are told apart.
const PLACED_CARDS: usize = 6;

/// Cards that nothing tells apart, and which of them may be used.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Classes {
    /// The cards of each class, in order.
    pub(crate) members: Vec<Vec<usize>>,
}

impl Classes {
    /// The classes of `cards` in a cluster.
    pub(crate) fn of(cluster: &Cluster, cards: &[usize]) -> Classes {
        let whole = cards.len() == cluster.cards();
        let intact = cluster.wires().len() == 2 * cluster.cards() || cluster.cards() <= 2;
        let alike = cards.iter().all(|&card| cluster.kind(card) == cluster.kind(cards[0]));
        let by_kind = match cluster.shape() {
            Shape::Switch | Shape::Star | Shape::Mesh => true,
            // In a small ring even the place of equals is tried; in a larger one groups are neighbours.
            Shape::Ring => whole && intact && alike && cards.len() > PLACED_CARDS,
            Shape::PointToPoint => whole && intact && alike,
            _ => false,
        };
        let mut members: Vec<Vec<usize>> = Vec::new();
        for &card in cards {
            let like = |class: &&mut Vec<usize>| cluster.kind(class[0]) == cluster.kind(card);
            match members.iter_mut().find(like).filter(|_| by_kind) {
                Some(class) => class.push(card),
                None => members.push(vec![card]),
            }
        }
        Classes { members }
    }

    /// The classes of the cards that may be used, one after the other: class by class, and as the cards come.
    pub(crate) fn orders(&self, available: &[u16]) -> Vec<Vec<usize>> {
        let classes = available.iter().enumerate();
        let by_class =
            classes.flat_map(|(class, &most)| std::iter::repeat_n(class, usize::from(most)));
        let members = self.members.iter().zip(available).enumerate();
        let mut cards: Vec<(usize, usize)> = members
            .flat_map(|(class, (cards, &most))| {
                cards[..usize::from(most)].iter().map(move |&card| (card, class))
            })
            .collect();
        cards.sort_unstable();
        vec![by_class.collect(), cards.into_iter().map(|(_, class)| class).collect()]
    }

    pub(crate) fn counts(&self) -> Vec<u16> {
        self.members.iter().map(|class| class.len() as u16).collect()
    }

    /// How many different sets there are, the empty one included.
    pub(crate) fn sets(&self) -> usize {
        self.members.iter().fold(1usize, |sets, class| sets.saturating_mul(class.len() + 1))
    }
}

/// A group, how many cards of each class it takes, and what it costs.
pub(crate) struct Entry {
    pub(crate) group: Group,
    pub(crate) takes: Vec<u16>,
    /// A layer without any exchange: never more than the layer costs.
    pub(crate) at_least: f64,
    /// The head without any exchange.
    pub(crate) head_at_least: f64,
    /// The most layers, by place: neither end, last, first, both.
    pub(crate) most: [u32; 4],
    layer: OnceCell<f64>,
    head: OnceCell<f64>,
    embed: OnceCell<f64>,
}

/// What passes take together.
pub(crate) fn sum(passes: &Passes, each: impl Fn(Pass) -> f64) -> f64 {
    passes.iter().map(|&(pass, count)| count * each(pass)).sum()
}

impl Entry {
    /// What a layer takes.
    pub(crate) fn layer(&self, pricer: &Pricer<'_>, passes: &Passes) -> f64 {
        *self
            .layer
            .get_or_init(|| sum(passes, |pass| pricer.mean_layer(&self.group, pass).total().0))
    }

    /// What a layer takes at least: what it takes, once that is known.
    pub(crate) fn least_layer(&self) -> f64 {
        self.layer.get().copied().unwrap_or(self.at_least)
    }

    /// Whether it is known what a layer takes.
    pub(crate) fn priced(&self) -> bool {
        self.layer.get().is_some()
    }

    /// Whether it is known what the head takes.
    pub(crate) fn priced_head(&self) -> bool {
        self.head.get().is_some()
    }

    /// Whether it is known what the embedding takes.
    pub(crate) fn priced_embed(&self) -> bool {
        self.embed.get().is_some()
    }

    /// What the head takes at least.
    pub(crate) fn least_head(&self) -> f64 {
        self.head.get().copied().unwrap_or(self.head_at_least)
    }

    /// What the embedding takes at least.
    pub(crate) fn least_embed(&self) -> f64 {
        self.embed.get().copied().unwrap_or(0.0)
    }

    /// What the head takes.
    pub(crate) fn head(&self, pricer: &Pricer<'_>, passes: &Passes) -> f64 {
        let sequences = passes[0].0.sequences;
        *self.head.get_or_init(|| pricer.head(&self.group, sequences).total().0)
    }

    /// What the embedding takes.
    pub(crate) fn embed(&self, pricer: &Pricer<'_>, passes: &Passes) -> f64 {
        *self.embed.get_or_init(|| sum(passes, |pass| pricer.embed(&self.group, pass).total().0))
    }

    pub(crate) fn cards(&self) -> usize {
        self.group.cards.len()
    }
}

/// What a pool is made for.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) passes: Passes,
    /// Sequences whose keys and values are kept.
    pub(crate) sequences: u64,
    /// Whether memory counts; without, every group holds every layer.
    pub(crate) memory: bool,
    /// How many cards of each class there are.
    pub(crate) available: Vec<u16>,
    /// The most cards of a group: every other stage has one at least.
    pub(crate) most_cards: usize,
    /// Whether a group has to hold all layers by itself.
    pub(crate) all_layers: bool,
}

impl Terms {
    /// Whether groups that hold so many layers, by place, can be part of any pipeline.
    fn useful(&self, most: [u32; 4], layers: u32) -> bool {
        match self.all_layers {
            true => most[3] >= layers,
            false => most.iter().any(|&most| most > 0),
        }
    }
}

/// The entries for one set of cards.
fn entries(
    pricer: &Pricer<'_>,
    cards: &[usize],
    takes: &[u16],
    terms: &Terms,
    out: &mut Vec<Entry>,
) {
    let layers = pricer.model.layers.len() as u32;
    let splits: &[Split] = match cards.len() {
        1 => &[Split::Whole],
        _ => &[Split::Gather, Split::Reduce],
    };
    let place = |first, last| Place { first, last, sequences: terms.sequences, turns: 1 };
    let places = [(false, false), (false, true), (true, false), (true, true)];
    let room =
        |group: &Group| pricer.capacities(group, places.map(|(first, last)| place(first, last)));
    for &split in splits {
        let mut by_speed = None;
        let enough = |group: &Group| by_speed.insert(room(group))[3] >= layers;
        let groups = pricer.groups_unless(cards, split, terms.passes[0].0, enough);
        for group in groups {
            let most = match terms.memory {
                // The first has shares by speed.
                true => by_speed.take().unwrap_or_else(|| room(&group)),
                false => [layers; 4],
            };
            if !terms.useful(most, layers) {
                continue;
            }
            let at_least = sum(&terms.passes, |pass| pricer.least_layer(&group, pass));
            let head_at_least = pricer.least_head(&group, terms.passes[0].0.sequences);
            let (layer, head, embed) = Default::default();
            let takes = takes.to_vec();
            out.push(Entry { group, takes, at_least, head_at_least, most, layer, head, embed });
        }
    }
}

/// Every set of cards, sorted by what a layer costs at least.
pub(crate) fn all(pricer: &Pricer<'_>, classes: &Classes, terms: &Terms) -> Vec<Entry> {
    let mut takes = vec![0u16; terms.available.len()];
    let mut pool = Vec::new();
    while advance(&mut takes, &terms.available) {
        if takes.iter().map(|&take| usize::from(take)).sum::<usize>() <= terms.most_cards {
            entries(pricer, &canonical(classes, &takes), &takes, terms, &mut pool);
        }
    }
    sorted(pool)
}

/// Runs of neighbours of some lengths, in the order of the cards and in the order of their classes, and what
/// stages of equally many cards consist of.
pub(crate) fn runs(pricer: &Pricer<'_>, classes: &Classes, terms: &Terms) -> Vec<Entry> {
    let mut pool = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let lengths = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192];
    for order in classes.orders(&terms.available) {
        let total = order.len();
        let short = lengths.into_iter().filter(|&length| length + 1 < total);
        let long = [total.saturating_sub(1), total].into_iter().filter(|&length| length > 0);
        let windows = short.chain(long).flat_map(|length| order.windows(length));
        let parts = (1..=total).filter(|&count| round(count));
        let even = parts.flat_map(|count| even_runs(&order, count));
        for run in windows.chain(even).filter(|run| run.len() <= terms.most_cards) {
            let takes = classes_taken(run, classes.members.len());
            if seen.insert(takes.clone()) {
                entries(pricer, &canonical(classes, &takes), &takes, terms, &mut pool);
            }
        }
    }
    sorted(pool)
}

fn sorted(mut pool: Vec<Entry>) -> Vec<Entry> {
    pool.sort_by(|a, b| a.at_least.total_cmp(&b.at_least));
    pool
}

/// The next combination of counts; false after the last.
pub(crate) fn advance(takes: &mut [u16], counts: &[u16]) -> bool {
    for (take, &count) in takes.iter_mut().zip(counts) {
        if *take < count {
            *take += 1;
            return true;
        }
        *take = 0;
    }
    false
}

/// The cards that stand for a set: the first of each class.
fn canonical(classes: &Classes, takes: &[u16]) -> Vec<usize> {
    let taken = classes.members.iter().zip(takes);
    taken.flat_map(|(class, &take)| class[..take as usize].iter().copied()).collect()
}
