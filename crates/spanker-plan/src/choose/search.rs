// SPDX-License-Identifier: Apache-2.0
//! The search for the best pipeline: which groups, in which order, with how many layers each.
//!
//! Groups are taken from a pool that is sorted by what a layer costs at least. A partial choice is given up
//! when even a free exchange, a perfect fit and the shortest hand-off could not make it better than the
//! best pipeline so far. Without a width the search is exhaustive up to that bound; with one it keeps the
//! most promising choices of each size only.

use std::collections::HashMap;

use crate::cost::pass::{Pass, Passes};
use crate::cost::{Group, Pricer};
use crate::plan::{Layout, Stage};

use super::pool::{self, Classes, Entry, advance};
use super::split::{Score, StageCost, divide};

/// What is searched for.
pub(crate) struct Goal<'a> {
    pub(crate) score: Score,
    pub(crate) passes: Passes,
    /// Tokens that the host sends for one pass.
    /// Whether the head is part of the last stage's turn, or comes once after all.
    pub(crate) head_in_turn: bool,
    /// How many stages a pipeline may have.
    pub(crate) stages: std::ops::RangeInclusive<usize>,
    /// Which groups may be used.
    pub(crate) allow: &'a dyn Fn(&Group) -> bool,
    /// Whether at least one group must have several cards.
    pub(crate) need_tensor: bool,
    /// How many cards of each class may be used.
    pub(crate) available: Vec<u16>,
    /// How many cards of each class others use.
    pub(crate) before: Vec<usize>,
}

/// How far a search may go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Partial choices to look at before the search says that it is not exact.
    pub(crate) nodes: u64,
    /// Choices of each size to keep; all if none is given.
    pub(crate) width: Option<usize>,
    /// What somebody else has found already: only what scores better is of interest.
    pub(crate) beat: f64,
}

/// The best pipeline, and whether nothing can be better.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    pub(crate) value: f64,
    pub(crate) stages: Vec<Stage>,
}

pub(crate) struct Search<'a> {
    pricer: &'a Pricer<'a>,
    classes: &'a Classes,
    pool: Vec<&'a Entry>,
    goal: Goal<'a>,
    limits: Limits,
    /// The least that a hand-off costs.
    hop: f64,
    /// The least that the head and the host cost.
    least_ends: f64,
    /// The most layers per second that a card of each class could do by itself.
    speeds: Vec<f64>,
    /// The groups of each set of cards.
    by_set: HashMap<Vec<u16>, Vec<usize>>,
    best: Option<Found>,
    nodes: u64,
}

/// A partial choice.
#[derive(Debug, Clone)]
struct Node {
    chosen: Vec<usize>,
    left: Vec<u16>,
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        pricer: &'a Pricer<'a>,
        classes: &'a Classes,
        pool: &'a [Entry],
        goal: Goal<'a>,
        limits: Limits,
    ) -> Self {
        // Every other stage has a card at least.
        let cards: usize = goal.available.iter().copied().map(usize::from).sum();
        let most_cards = (cards + 1).saturating_sub(*goal.stages.start());
        let possible = |entry: &&Entry| entry.cards() <= most_cards && (goal.allow)(&entry.group);
        let pool: Vec<&Entry> = pool.iter().filter(possible).collect();
        let singles = pool.iter().filter(|entry| entry.cards() == 1);
        let per_class = |class: usize| {
            let of_class = singles.clone().filter(move |entry| entry.takes[class] == 1);
            // Where single cards are not allowed nothing is known about them.
            let speeds = of_class.map(|entry| 1.0 / entry.at_least);
            speeds.reduce(f64::max).unwrap_or(f64::INFINITY)
        };
        let speeds = (0..goal.available.len()).map(per_class).collect();
        let cards: Vec<usize> = classes.members.concat();
        let hop = pool::sum(&goal.passes, |pass| pricer.least_hop(&cards, pass.rows()));
        let steps: f64 = goal.passes.iter().map(|(_, count)| count).sum();
        let heads = pool.iter().map(|entry| entry.head_at_least);
        let hosts = pool
            .iter()
            .filter(|entry| entry.cards() == 1)
            .map(|entry| pricer.host(&entry.group, &entry.group, false).total().0);
        // Without single cards in the pool nothing is known about the host's part.
        let host = steps * hosts.reduce(f64::min).unwrap_or(0.0);
        let least_ends = heads.fold(f64::INFINITY, f64::min) + host;
        let mut by_set: HashMap<Vec<u16>, Vec<usize>> = HashMap::new();
        for (index, entry) in pool.iter().enumerate() {
            by_set.entry(entry.takes.clone()).or_default().push(index);
        }
        let (best, nodes) = (None, 0);
        Search { pricer, classes, pool, goal, limits, hop, least_ends, speeds, by_set, best, nodes }
    }

    /// The best of the pipelines that one would try first: stages of equally many cards, which follow each other
    /// in the order of the classes or of the cards, with one way to split for all or the best one for each.
    pub(crate) fn even(mut self) -> Option<Found> {
        let mut orders = self.classes.orders(&self.goal.available);
        orders.dedup();
        let stages = self.goal.stages.clone();
        for order in &orders {
            for count in stages.clone().filter(|&count| count <= order.len() && round(count)) {
                let runs = even_runs(order, count);
                let sets = runs.map(|run| classes_taken(run, self.goal.available.len()));
                let options: Option<Vec<&Vec<usize>>> =
                    sets.map(|takes| self.by_set.get(&takes)).collect();
                let Some(options) = options else { continue };
                let options: Vec<Vec<usize>> = options.into_iter().cloned().collect();
                self.settle_even(&options);
            }
        }
        self.best
    }

    /// Finds the best way to split each of some sets of cards: one for all of them, then stage by stage.
    fn settle_even(&mut self, options: &[Vec<usize>]) {
        let most = options.iter().map(Vec::len).max().unwrap_or(0);
        let pick = |way: usize| {
            let each = options.iter().map(|ways| ways[way.min(ways.len() - 1)]);
            each.collect::<Vec<usize>>()
        };
        let value = |search: &Self, chosen: &[usize]| {
            let tensor = chosen.iter().any(|&index| search.pool[index].cards() > 1);
            let found = (tensor || !search.goal.need_tensor).then(|| search.evaluate(chosen));
            found.flatten().map_or(f64::INFINITY, |found| found.value)
        };
        let all = (0..most).map(pick).map(|chosen| (value(self, &chosen), chosen));
        let Some((mut least, mut chosen)) = all.min_by(|a, b| a.0.total_cmp(&b.0)) else { return };
        if least.is_infinite() {
            return;
        }
        self.nodes += most as u64;
        // What is far from the best stays far.
        if self.hopeful(least / NEAR) {
            for (stage, ways) in options.iter().enumerate().filter(|(_, ways)| ways.len() > 1) {
                for &way in ways {
                    let before = std::mem::replace(&mut chosen[stage], way);
                    let changed = value(self, &chosen);
                    match changed < least {
                        true => least = changed,
                        false => chosen[stage] = before,
                    }
                }
            }
        }
        self.try_order(&chosen);
    }

    /// The best pipeline, whether the search saw enough to be sure, and how much it saw.
    pub(crate) fn run(mut self) -> (Option<Found>, bool, u64) {
        let root = Node { chosen: Vec::new(), left: self.goal.available.clone() };
        match self.limits.width {
            None => {
                self.deepen(&root, 0);
                let exact = self.nodes < self.limits.nodes;
                (self.best, exact, self.nodes)
            }
            Some(width) => {
                self.widen(root, width);
                (self.best, false, self.nodes)
            }
        }
    }

    fn layers(&self) -> u32 {
        self.pricer.model.layers.len() as u32
    }

    /// Whether a bound could still beat the best.
    fn hopeful(&self, bound: f64) -> bool {
        let best = self.best.as_ref().map_or(self.limits.beat, |best| best.value);
        bound < best * (1.0 - 1e-9)
    }

    /// The least score of any pipeline with these groups, and further ones that cost at least `next` a
    /// layer, or none: every group has a layer, the cheapest have most, hand-offs and head are the
    /// shortest, and the cards that are left work as fast as they could alone.
    fn bound(&self, node: &Node, next: Option<f64>) -> f64 {
        let layers = self.layers();
        let cost = |&index: &usize| {
            let entry = self.pool[index];
            let most = entry.most.iter().copied().max().unwrap_or(0);
            (entry.layer(self.pricer, &self.goal.passes), most)
        };
        let further = next.map(|least| (least, u32::MAX));
        let groups = node.chosen.len() + usize::from(next.is_some());
        let Some(mut left) = layers.checked_sub(groups as u32) else { return f64::INFINITY };
        let mut sum = self.least_ends + self.hop * groups.saturating_sub(1) as f64;
        let mut costs: Vec<(f64, u32)> = node.chosen.iter().map(cost).collect();
        let mut speed: f64 = costs.iter().map(|(layer, _)| 1.0 / layer).sum();
        if let Some(least) = next {
            let more = (*self.goal.stages.end() - node.chosen.len()) as f64;
            let single = node.left.iter().zip(&self.speeds).filter(|(left, _)| **left > 0);
            let alone: f64 = single.map(|(&left, speed)| f64::from(left) * speed).sum();
            speed += alone.min(more / least);
        }
        costs.extend(further);
        costs.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (layer, most) in costs {
            let taken = most.saturating_sub(1).min(left);
            sum += layer * f64::from(taken + 1);
            left -= taken;
        }
        match left {
            0 => self.goal.score.value(sum, f64::from(layers) / speed),
            _ => f64::INFINITY,
        }
    }

    /// The groups from `from` on that the cards left by a choice are enough for, cheapest first.
    fn possible(&self, node: &Node, from: usize) -> Vec<usize> {
        let sets =
            node.left.iter().fold(1usize, |sets, &n| sets.saturating_mul(usize::from(n) + 1));
        let mut indices: Vec<usize> = if sets < self.pool.len() / 4 {
            let mut takes = vec![0u16; node.left.len()];
            let mut found = Vec::new();
            while advance(&mut takes, &node.left) {
                found.extend(self.by_set.get(&takes).into_iter().flatten().copied());
            }
            found
        } else {
            let fits = |entry: &Entry| entry.takes.iter().zip(&node.left).all(|(t, l)| t <= l);
            return (from..self.pool.len()).filter(|&index| fits(self.pool[index])).collect();
        };
        indices.retain(|&index| index >= from);
        indices.sort_unstable();
        indices
    }

    fn child(&self, node: &Node, index: usize) -> Node {
        let mut child = node.clone();
        child.chosen.push(index);
        for (left, take) in child.left.iter_mut().zip(&self.pool[index].takes) {
            *left -= take;
        }
        child
    }

    fn deepen(&mut self, node: &Node, from: usize) {
        let cards: usize = node.left.iter().copied().map(usize::from).sum();
        let enough = node.chosen.len() + cards >= *self.goal.stages.start();
        let full = node.chosen.len() >= *self.goal.stages.end();
        if full || !enough || self.nodes >= self.limits.nodes {
            return;
        }
        for index in self.possible(node, from) {
            // The pool is sorted: where one is hopeless, those that follow are.
            if !self.hopeful(self.bound(node, Some(self.pool[index].at_least))) {
                return;
            }
            self.nodes += 1;
            let child = self.child(node, index);
            if self.hopeful(self.bound(&child, None)) {
                self.settle(&child);
            }
            self.deepen(&child, index);
        }
    }

    fn widen(&mut self, root: Node, width: usize) {
        let mut level = vec![(root, 0)];
        for _ in 0..*self.goal.stages.end() {
            let mut options: Vec<(f64, usize, usize)> = Vec::new();
            for (at, (node, from)) in level.iter().enumerate() {
                for index in self.possible(node, *from) {
                    let bound = self.bound(node, Some(self.pool[index].at_least));
                    if !self.hopeful(bound) {
                        break;
                    }
                    options.push((bound, at, index));
                }
            }
            self.nodes += options.len() as u64;
            options.sort_by(|a, b| a.0.total_cmp(&b.0));
            options.truncate(width);
            let mut next = Vec::with_capacity(width);
            for (_, at, index) in options {
                let child = self.child(&level[at].0, index);
                if self.hopeful(self.bound(&child, None)) {
                    self.settle(&child);
                }
                next.push((child, index));
            }
            if next.is_empty() {
                return;
            }
            level = next;
        }
    }

    /// Finds the best order and division for these groups, and keeps it if it beats the best.
    fn settle(&mut self, node: &Node) {
        let stages = node.chosen.len();
        if stages < *self.goal.stages.start() {
            return;
        }
        if self.goal.need_tensor && node.chosen.iter().all(|&index| self.pool[index].cards() == 1) {
            return;
        }
        if !self.optimistic(node).is_some_and(|value| self.hopeful(value)) {
            return;
        }
        let mut order = node.chosen.clone();
        if stages <= 4 {
            permutations(&mut order, 0, &mut |order| self.try_order(order));
        } else {
            self.climb(order);
        }
    }

    /// The best score of these groups if hand-offs and head were the shortest and every place had room.
    fn optimistic(&self, node: &Node) -> Option<f64> {
        let cost = |&index: &usize| {
            let entry = self.pool[index];
            let layer = entry.layer(self.pricer, &self.goal.passes);
            let most = entry.most.iter().copied().max().unwrap_or(0);
            StageCost { layer, besides: 0.0, most }
        };
        let costs: Vec<StageCost> = node.chosen.iter().map(cost).collect();
        let apart = self.least_ends + self.hop * (costs.len() - 1) as f64;
        divide(&costs, self.layers(), self.goal.score, apart).map(|(value, _)| value)
    }

    /// Swaps stages of a long pipeline while that helps.
    fn climb(&mut self, mut order: Vec<usize>) {
        order.sort_by_key(|&index| self.pool[index].group.cards[0]);
        let mut value = self.evaluate(&order).map_or(f64::INFINITY, |found| found.value);
        self.try_order(&order);
        // Order moves a hand-off or the head, not the bulk: what is far off stays far off. Very long
        // pipelines are of single cards or of equals, where it hardly matters.
        let near = self.best.as_ref().is_none_or(|best| value < best.value * 1.02);
        let mut improved = near && order.len() <= 8;
        while improved {
            improved = false;
            for a in 0..order.len() {
                for b in a + 1..order.len() {
                    if order[a] == order[b] {
                        continue;
                    }
                    order.swap(a, b);
                    let swapped = self.evaluate(&order).map_or(f64::INFINITY, |found| found.value);
                    if swapped < value * (1.0 - 1e-12) {
                        value = swapped;
                        improved = true;
                        self.try_order(&order);
                    } else {
                        order.swap(a, b);
                    }
                }
            }
        }
    }

    fn try_order(&mut self, order: &[usize]) {
        if let Some(found) = self.evaluate(order).filter(|found| self.hopeful(found.value)) {
            self.best = Some(found);
        }
    }

    fn evaluate(&self, order: &[usize]) -> Option<Found> {
        let groups = self.place(order);
        let last = order.len() - 1;
        let (first, end) = (&groups[0], &groups[last]);
        let steps: f64 = self.goal.passes.iter().map(|(_, count)| count).sum();
        let host = |read: bool| self.pricer.host(first, end, read).total().0;
        let mut apart = (steps - 1.0) * host(false) + host(true);
        let cost = |(index, &entry): (usize, &usize)| {
            let entry = self.pool[entry];
            let (pricer, passes) = (self.pricer, &self.goal.passes);
            let mut besides = match index.checked_sub(1) {
                None => entry.embed(pricer, passes),
                Some(before) => {
                    let hop = |pass: Pass| {
                        self.pricer.hop(&groups[before], &groups[index], pass.rows()).0
                    };
                    pool::sum(&self.goal.passes, hop)
                }
            };
            if index == last {
                if self.goal.head_in_turn {
                    besides += entry.head(pricer, passes);
                } else {
                    apart += entry.head(pricer, passes);
                }
            }
            let place = 2 * usize::from(index == 0) + usize::from(index == last);
            StageCost { layer: entry.layer(pricer, passes), besides, most: entry.most[place] }
        };
        let costs: Vec<StageCost> = order.iter().enumerate().map(cost).collect();
        let (value, counts) = divide(&costs, self.layers(), self.goal.score, apart)?;
        if !value.is_finite() {
            return None;
        }
        let mut start = 0;
        let stages = groups.into_iter().zip(counts).map(|(group, count)| {
            let layers = start..start + count as usize;
            start = layers.end;
            Stage { group, layers }
        });
        Some(Found { value, stages: stages.collect() })
    }

    /// Gives each group cards of its own: the next ones of each class, in the order of the stages.
    fn place(&self, order: &[usize]) -> Vec<Group> {
        let mut used = self.goal.before.clone();
        let mut groups = Vec::with_capacity(order.len());
        for &index in order {
            let mut group = self.pool[index].group.clone();
            for card in &mut group.cards {
                let stands_for = *card;
                let class = self.classes.members.iter().position(|c| c.contains(&stands_for));
                let class = class.expect("a group's cards are in a class");
                *card = self.classes.members[class][used[class]];
                used[class] += 1;
            }
            groups.push(group);
        }
        groups
    }
}

/// How far from the best a pipeline may be for which ways to split are tried stage by stage.
const NEAR: f64 = 1.2;

/// Numbers of stages and copies that are tried where there are many cards.
pub(crate) fn round(count: usize) -> bool {
    let round = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
    round.contains(&count)
}

/// Divides a list into runs that are as equally long as can be.
pub(crate) fn even_runs<T>(list: &[T], count: usize) -> impl Iterator<Item = &[T]> {
    let at = move |run: usize| run * list.len() / count;
    (0..count).map(move |run| &list[at(run)..at(run + 1)])
}

/// How many of each class a list of classes has.
pub(crate) fn classes_taken(list: &[usize], classes: usize) -> Vec<u16> {
    let mut takes = vec![0; classes];
    list.iter().for_each(|&class| takes[class] += 1);
    takes
}

/// Calls `visit` with every order of `items`; equal neighbours are not told apart twice.
fn permutations(items: &mut Vec<usize>, fixed: usize, visit: &mut dyn FnMut(&[usize])) {
    if fixed + 1 >= items.len() {
        return visit(items);
    }
    for index in fixed..items.len() {
        if items[fixed..index].contains(&items[index]) {
            continue;
        }
        items.swap(fixed, index);
        permutations(items, fixed + 1, visit);
        items.swap(fixed, index);
    }
}

/// One copy of the model.
pub(crate) fn layout(stages: Vec<Stage>) -> Layout {
    Layout { replicas: vec![stages] }
}
