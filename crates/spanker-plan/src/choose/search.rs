// SPDX-License-Identifier: Apache-2.0
//! The search for the best pipeline: which groups, in which order, with how many layers each.
//!
//! Groups are taken from a pool that is sorted by what a layer costs at least. A partial choice is given up
//! when even a free exchange, a perfect fit and the shortest hand-off could not make it better than the
//! best pipeline so far. Without a width the search is exhaustive up to that bound; with one it keeps the
//! most promising choices of each size only.

use std::borrow::Cow;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;

use crate::cost::pass::Passes;
use crate::cost::{Group, Pricer};
use crate::plan::{Layout, Stage};

use super::pool::{self, Classes, Entry, advance};
use super::split::{Score, StageCost, at_least, divide};

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
    /// Whether every class has one card: then a group's cards are known before its stage is.
    placed: bool,
    /// The groups of each set of cards.
    by_set: OnceCell<HashMap<&'a [u16], Vec<usize>>>,
    /// Hand-offs between groups whose cards are known.
    hops: RefCell<HashMap<(usize, usize), f64>>,
    /// Room for what the layers of a choice cost.
    scratch: RefCell<Vec<(f64, u32)>>,
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
            .map(|entry| pricer.host(&entry.group.cards, &entry.group.cards, false).total().0);
        // Without single cards in the pool nothing is known about the host's part.
        let host = steps * hosts.reduce(f64::min).unwrap_or(0.0);
        let least_ends = heads.fold(f64::INFINITY, f64::min) + host;
        Search {
            pricer,
            classes,
            pool,
            goal,
            limits,
            hop,
            least_ends,
            speeds,
            placed: classes.members.iter().all(|class| class.len() == 1),
            by_set: OnceCell::new(),
            hops: RefCell::default(),
            scratch: RefCell::default(),
            best: None,
            nodes: 0,
        }
    }

    /// The groups of each set of cards.
    fn by_set(&self) -> &HashMap<&'a [u16], Vec<usize>> {
        self.by_set.get_or_init(|| {
            let mut by_set: HashMap<&[u16], Vec<usize>> = HashMap::new();
            for (index, entry) in self.pool.iter().enumerate() {
                by_set.entry(&entry.takes).or_default().push(index);
            }
            by_set
        })
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
                let options: Option<Vec<Vec<usize>>> =
                    sets.map(|takes| self.by_set().get(takes.as_slice()).cloned()).collect();
                let Some(options) = options else { continue };
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
        let value = |search: &Self, chosen: &[usize], beat: f64| {
            let tensor = chosen.iter().any(|&index| search.pool[index].cards() > 1);
            let found = (tensor || !search.goal.need_tensor).then(|| search.evaluate(chosen, beat));
            found.flatten().map_or(f64::INFINITY, |(value, _)| value)
        };
        let all = (0..most).map(pick).map(|chosen| (value(self, &chosen, f64::INFINITY), chosen));
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
                    let changed = value(self, &chosen, least);
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

    /// What scores less than this beats the best.
    fn to_beat(&self) -> f64 {
        self.best.as_ref().map_or(self.limits.beat, |best| best.value) * (1.0 - 1e-9)
    }

    /// Whether a bound could still beat the best.
    fn hopeful(&self, bound: f64) -> bool {
        bound < self.to_beat()
    }

    /// The bound of a choice that could still beat the best. Groups are priced only where it could without.
    fn promising(&self, node: &Node, next: Option<f64>) -> Option<f64> {
        let least = |entry: &Entry| entry.least_layer();
        let bound = self.bound(node, next, least);
        if !self.hopeful(bound) || node.chosen.iter().all(|&index| self.pool[index].priced()) {
            return Some(bound).filter(|&bound| self.hopeful(bound));
        }
        let priced = |entry: &Entry| entry.layer(self.pricer, &self.goal.passes);
        Some(self.bound(node, next, priced)).filter(|&bound| self.hopeful(bound))
    }

    /// The least score of any pipeline with these groups, and further ones that cost at least `next` a
    /// layer, or none: every group has a layer, the cheapest have most, hand-offs and head are the
    /// shortest, and the cards that are left work as fast as they could alone.
    fn bound(&self, node: &Node, next: Option<f64>, layer: impl Fn(&Entry) -> f64) -> f64 {
        let layers = self.layers();
        let cost = |&index: &usize| {
            let entry = self.pool[index];
            let most = entry.most.iter().copied().max().unwrap_or(0);
            (layer(entry), most)
        };
        let further = next.map(|least| (least, u32::MAX));
        let groups = node.chosen.len() + usize::from(next.is_some());
        let Some(mut left) = layers.checked_sub(groups as u32) else { return f64::INFINITY };
        let mut sum = self.least_ends + self.hop * groups.saturating_sub(1) as f64;
        let mut scratch = self.scratch.borrow_mut();
        let costs = &mut *scratch;
        costs.clear();
        costs.extend(node.chosen.iter().map(cost));
        let mut speed: f64 = costs.iter().map(|(layer, _)| 1.0 / layer).sum();
        if let Some(least) = next {
            let more = (*self.goal.stages.end() - node.chosen.len()) as f64;
            let single = node.left.iter().zip(&self.speeds).filter(|(left, _)| **left > 0);
            let alone: f64 = single.map(|(&left, speed)| f64::from(left) * speed).sum();
            speed += alone.min(more / least);
        }
        costs.extend(further);
        costs.sort_by(|a, b| a.0.total_cmp(&b.0));
        for &mut (layer, most) in costs {
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
                found.extend(self.by_set().get(takes.as_slice()).into_iter().flatten().copied());
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
            if self.promising(node, Some(self.pool[index].at_least)).is_none() {
                return;
            }
            self.nodes += 1;
            let child = self.child(node, index);
            self.settle(&child);
            self.deepen(&child, index);
        }
    }

    fn widen(&mut self, root: Node, width: usize) {
        let mut level = vec![(root, 0)];
        for _ in 0..*self.goal.stages.end() {
            let mut options: Vec<(f64, usize, usize)> = Vec::new();
            for (at, (node, from)) in level.iter().enumerate() {
                for index in self.possible(node, *from) {
                    let least = self.pool[index].at_least;
                    let Some(bound) = self.promising(node, Some(least)) else { break };
                    options.push((bound, at, index));
                }
            }
            self.nodes += options.len() as u64;
            options.sort_by(|a, b| a.0.total_cmp(&b.0));
            options.truncate(width);
            let mut next = Vec::with_capacity(width);
            for (_, at, index) in options {
                let child = self.child(&level[at].0, index);
                self.settle(&child);
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
        if self.promising(node, None).is_none() || !self.optimistic(node) {
            return;
        }
        let mut order = node.chosen.clone();
        if stages <= 4 {
            permutations(&mut order, 0, &mut |order| self.try_order(order));
        } else {
            self.climb(order);
        }
    }

    /// Whether these groups could beat the best if hand-offs and head were the shortest and every place had room.
    fn optimistic(&self, node: &Node) -> bool {
        let cost = |&index: &usize| {
            let entry = self.pool[index];
            let layer = entry.layer(self.pricer, &self.goal.passes);
            let most = entry.most.iter().copied().max().unwrap_or(0);
            StageCost { layer, besides: 0.0, most }
        };
        let costs: Vec<StageCost> = node.chosen.iter().map(cost).collect();
        let apart = self.least_ends + self.hop * (costs.len() - 1) as f64;
        let found = divide(&costs, self.layers(), self.goal.score, apart, self.to_beat());
        found.is_some_and(|(value, _)| self.hopeful(value))
    }

    /// Swaps stages of a long pipeline while that helps.
    fn climb(&mut self, mut order: Vec<usize>) {
        order.sort_by_key(|&index| self.pool[index].group.cards[0]);
        let mut value = self.evaluate(&order, f64::INFINITY).map_or(f64::INFINITY, |found| found.0);
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
                    let swapped =
                        self.evaluate(&order, value).map_or(f64::INFINITY, |found| found.0);
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
        let Some((value, counts)) = self.evaluate(order, self.to_beat()) else { return };
        if self.hopeful(value) {
            self.best = Some(self.found(order, value, &counts));
        }
    }

    /// What these groups score in this order and the layers of each, if that could be less than `beat`.
    fn evaluate(&self, order: &[usize], beat: f64) -> Option<(f64, Vec<u32>)> {
        let cards = self.place(order);
        let (first, last) = (self.pool[order[0]], self.pool[order[order.len() - 1]]);
        if !first.priced_embed() || !last.priced_head() {
            let (costs, apart) = self.costs(order, &cards, false);
            if at_least(&costs, self.layers(), self.goal.score, apart) >= beat {
                return None;
            }
        }
        let (costs, apart) = self.costs(order, &cards, true);
        let found = divide(&costs, self.layers(), self.goal.score, apart, beat)?;
        found.0.is_finite().then_some(found)
    }

    /// What the stages cost in this order, and what belongs to none of them: either what they take, or the least that
    /// is known without pricing anything.
    fn costs(
        &self,
        order: &[usize],
        cards: &[Cow<'a, [usize]>],
        priced: bool,
    ) -> (Vec<StageCost>, f64) {
        let (pricer, passes, last) = (self.pricer, &self.goal.passes, order.len() - 1);
        let steps: f64 = passes.iter().map(|(_, count)| count).sum();
        let host = |read: bool| pricer.host(&cards[0], &cards[last], read).total().0;
        let mut apart = host(true);
        if steps > 1.0 {
            apart += (steps - 1.0) * host(false);
        }
        let cost = |(index, &number): (usize, &usize)| {
            let entry = self.pool[number];
            let mut besides = match index.checked_sub(1) {
                None if priced => entry.embed(pricer, passes),
                None => entry.least_embed(),
                Some(_) if !priced => self.hop,
                Some(before) => self.hop(order, cards, before),
            };
            if index == last {
                let head = if priced { entry.head(pricer, passes) } else { entry.least_head() };
                match self.goal.head_in_turn {
                    true => besides += head,
                    false => apart += head,
                }
            }
            let place = 2 * usize::from(index == 0) + usize::from(index == last);
            StageCost { layer: entry.layer(pricer, passes), besides, most: entry.most[place] }
        };
        let costs = order.iter().enumerate().map(cost).collect();
        (costs, apart)
    }

    /// What the hand-off behind a stage takes.
    fn hop(&self, order: &[usize], cards: &[Cow<'a, [usize]>], before: usize) -> f64 {
        let between = || {
            let (from, to) = (&cards[before], &cards[before + 1]);
            pool::sum(&self.goal.passes, |pass| self.pricer.hop(from, to, pass.rows()).0)
        };
        match self.placed {
            true => {
                let pair = (order[before], order[before + 1]);
                *self.hops.borrow_mut().entry(pair).or_insert_with(between)
            }
            false => between(),
        }
    }

    /// A pipeline of these groups with so many layers each.
    fn found(&self, order: &[usize], value: f64, counts: &[u32]) -> Found {
        let mut start = 0;
        let cards = self.place(order).into_iter();
        let stages = order.iter().zip(cards).zip(counts).map(|((&index, cards), &count)| {
            let layers = start..start + count as usize;
            start = layers.end;
            let group = Group { cards: cards.into_owned(), ..self.pool[index].group.clone() };
            Stage { group, layers }
        });
        Found { value, stages: stages.collect() }
    }

    /// Gives each group cards of its own: the next ones of each class, in the order of the stages.
    fn place(&self, order: &[usize]) -> Vec<Cow<'a, [usize]>> {
        if self.placed {
            return order.iter().map(|&index| Cow::from(&self.pool[index].group.cards)).collect();
        }
        let mut used = self.goal.before.clone();
        let mut next = |&stands_for: &usize| {
            let class = self.classes.members.iter().position(|c| c.contains(&stands_for));
            let class = class.expect("a group's cards are in a class");
            used[class] += 1;
            self.classes.members[class][used[class] - 1]
        };
        let groups = order.iter().map(|&index| &self.pool[index].group);
        groups.map(|group| group.cards.iter().map(&mut next).collect()).collect()
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
