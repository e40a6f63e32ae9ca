// SPDX-License-Identifier: Apache-2.0
//! What a collective costs on given cards: every algorithm is timed on the link graph, the best one for
//! the size at hand wins.
//!
//! An algorithm's time comes from running its schedule through the same engine that simulates plans, so
//! hops, shared wires and odd group sizes need no formula of their own. Mostly it is a line over the bytes:
//! what it takes without bytes, and seconds for each byte; where it is not, some sizes are timed and lines
//! drawn between them. Where every rank does the same at the same time it equals the closed formulas:
//!
//! | all-reduce of S bytes | time |
//! |---|---|
//! | ring | base + 2(n-1) alpha + 2(n-1)/n S/beta |
//! | recursive doubling | base + log2(n) (alpha + S/beta) |
//! | halving-doubling | base + 2 log2(n) alpha + 2(n-1)/n S/beta |
//! | one-shot | base + alpha + (n-1) S/beta |
//! | two-shot | base + 2 alpha + 2(n-1)/n S/beta |

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use spanker_collective::{Algorithm, Collective, Transfer, schedule};
use spanker_topology::{Cluster, ExchangeKind, Seconds, Shape};

use super::Group;
use crate::program::{Exchanging, Overheads, Wiring};
use crate::simulate::engine::{Engine, Item, OUTSIDE};
use crate::simulate::flow::Flow;
use crate::trace::{Activity, Label};

/// One algorithm's time over the bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Price {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Bytes and seconds, from no bytes on. Between two points, and beyond the last, time is a line.
    points: Vec<(f64, f64)>,
}

impl Price {
    /// What `bytes` take.
    #[must_use]
    pub fn at(&self, bytes: f64) -> Seconds {
        let above = self.points.partition_point(|point| point.0 < bytes);
        let last = above.clamp(1, self.points.len() - 1);
        let ((x0, t0), (x1, t1)) = (self.points[last - 1], self.points[last]);
        Seconds(t0 + (bytes - x0) * (t1 - t0) / (x1 - x0))
    }
}

/// The cheapest of some prices for a number of bytes, and what that is.
#[must_use]
pub fn cheapest(prices: &[Price], bytes: f64) -> (Algorithm, Seconds) {
    let timed = prices.iter().map(|price| (price.algorithm, price.at(bytes)));
    timed.min_by(|a, b| a.1.0.total_cmp(&b.1.0)).expect("a collective has an algorithm")
}

/// The algorithms worth pricing for a collective: those with schedules of their own.
fn algorithms(collective: Collective) -> &'static [Algorithm] {
    match collective {
        Collective::AllReduce => &Algorithm::ALL,
        Collective::AllGather => {
            &[Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::Tree, Algorithm::OneShot]
        }
        _ => &[Algorithm::Ring, Algorithm::Tree, Algorithm::OneShot],
    }
}

/// Whether an algorithm gives the bits that a model's exchanges promise: sums in rank order.
pub(crate) fn serial(collective: Collective, algorithm: Algorithm) -> bool {
    !collective.reduces() || matches!(algorithm, Algorithm::OneShot | Algorithm::TwoShot)
}

/// How the cards of a group exchange activations, as their profile says.
pub(crate) fn kind_of(cluster: &Cluster, group: &Group) -> ExchangeKind {
    let link = cluster.profile(group.cards[0]).link.as_ref();
    link.map(|link| link.exchange).unwrap_or_default()
}

/// What a group needs to exchange activations in this way.
pub(crate) fn exchanging(cluster: &Cluster, group: &Group, kind: ExchangeKind) -> Exchanging {
    let overheads = match kind {
        ExchangeKind::Schedules if group.cards.len() > 1 => overheads(cluster, &group.cards),
        _ => Overheads::default(),
    };
    Exchanging { kind, overheads }
}

/// Elements of each rank in the schedules that memory is counted in.
const COUNTED: usize = 16;
/// What messages that are passed on begin at a multiple of.
const PASSED_ON: u64 = 64;

/// The most that any schedule of a model's exchanges needs besides the data, on any card of a group.
fn overheads(cluster: &Cluster, cards: &[usize]) -> Overheads {
    let ranks = cards.len();
    let wiring = Wiring::of(cluster, cards).ok();
    let mut most = Overheads::default();
    for collective in
        [Collective::AllGather, Collective::AllReduce, Collective::Broadcast { root: 0 }]
    {
        for &algorithm in algorithms(collective).iter().filter(|&&a| serial(collective, a)) {
            let Ok(schedule) = schedule(collective, algorithm, ranks, ranks * COUNTED) else {
                continue;
            };
            let whole = schedule.data_len().max(1) as f64;
            most.working = most.working.max(schedule.scratch_len() as f64 / whole);
            let Some(wiring) = &wiring else { continue };
            let mut passed = vec![(0usize, 0u64); ranks];
            for from in 0..ranks {
                for step in schedule.program(from) {
                    for transfer in &step.transfers {
                        let Transfer::Send { to, span } = *transfer else { continue };
                        let route = wiring.route(from, to);
                        for &rank in &route[1..route.len() - 1] {
                            passed[rank].0 += span.len;
                            passed[rank].1 += 1;
                        }
                    }
                }
            }
            for (elements, messages) in passed {
                most.passed_on = most.passed_on.max(elements as f64 / whole);
                most.slack = most.slack.max(PASSED_ON * (messages + 1));
            }
        }
    }
    // Chunks of a buffer that does not divide evenly are an element longer.
    most.slack += 8 * (ranks * ranks) as u64;
    most
}

/// What it takes until every rank of a stage has its message: `(from, to, bytes)` for each. Cards in between
/// pass a message on when they have all of it.
pub(crate) fn hop(cluster: &Cluster, messages: &[(usize, usize, f64)]) -> Seconds {
    let label = Label { activity: Activity::Handoff, layer: 0, token: 0 };
    let hub = matches!(cluster.shape(), Shape::Star | Shape::Switch);
    let link = cluster.profile(0).link.as_ref();
    let passed_on = link.map(|link| link.exchange).unwrap_or_default() == ExchangeKind::Schedules;
    let mut programs = vec![Vec::new(); cluster.cards()];
    for &(from, to, bytes) in messages {
        let wires = cluster.route(from, to).iter().map(|&wire| &cluster.wires()[wire as usize]);
        let stops: Vec<usize> = match hub || !passed_on {
            true => vec![from, to],
            false => std::iter::once(from).chain(wires.map(|wire| wire.to)).collect(),
        };
        for pair in stops.windows(2) {
            let (here, there, op) = (pair[0], pair[1], OUTSIDE);
            programs[here].push(Item::Send { to: there as u32, bytes, label, op });
            programs[there].push(Item::Recv { from: here as u32, label, op });
        }
    }
    let ended = Engine::new(cluster, &[], &[], &programs).run(&[]);
    match ended.complete {
        true => Seconds(ended.clocks.into_iter().fold(0.0, f64::max)),
        false => Seconds(f64::INFINITY),
    }
}

/// What one collective takes on these cards, in this order of ranks, from a standing start.
#[must_use]
pub fn collective_time(
    cluster: &Cluster,
    collective: Collective,
    algorithm: Algorithm,
    cards: &[usize],
    bytes: u64,
) -> Seconds {
    let flow = Flow::new(collective, algorithm, cards.len());
    cluster.base(cards) + Seconds(timed(cluster, &flow, cards, bytes as f64))
}

/// Bytes that stand for "many" when the slope is measured.
const MANY: f64 = 1e9;

/// Bytes that are timed where time is no line.
const BETWEEN: [f64; 7] = [1e3, 4e3, 1.6e4, 6.4e4, 2.56e5, 1e6, 1.6e7];

/// How far time may be from a line over the bytes that is taken for one.
const LINE: f64 = 0.005;

/// How long one collective takes from a standing start.
fn timed(cluster: &Cluster, flow: &Flow, cards: &[usize], bytes: f64) -> f64 {
    let label = Label { activity: Activity::Exchange, layer: 0, token: 0 };
    let mut programs = vec![Vec::new(); cluster.cards()];
    for (rank, &card) in cards.iter().enumerate() {
        let rank = rank as u32;
        let op = OUTSIDE;
        programs[card].push(Item::Collective { flow: 0, rank, group: 0, bytes, label, op });
    }
    let groups = [cards.to_vec()];
    let ended = Engine::new(cluster, std::slice::from_ref(flow), &groups, &programs).run(&[]);
    match ended.complete {
        true => ended.clocks.into_iter().fold(0.0, f64::max),
        false => f64::INFINITY,
    }
}

/// Every algorithm of a collective on these cards, in this order of ranks.
///
/// ```
/// use spanker_collective::Collective;
/// use spanker_plan::{cheapest, prices};
/// use spanker_topology::{Cluster, Profile, Shape};
/// let ring = Cluster::uniform(Profile::builtin("rev-a")?, 4, Shape::Ring)?;
/// let all = prices(&ring, Collective::AllReduce, &[0, 1, 2, 3]);
/// let (algorithm, time) = cheapest(&all, 1048576.0);
/// assert_eq!((algorithm.name(), time.micros().round()), ("ring", 3205.0));
/// # Ok::<(), spanker_topology::TopologyError>(())
/// ```
#[must_use]
pub fn prices(cluster: &Cluster, collective: Collective, cards: &[usize]) -> Vec<Price> {
    let all = algorithms(collective).iter().copied();
    // Everyone to everyone in a large group is many messages to time, and never the best.
    let direct = |a: &Algorithm| matches!(a, Algorithm::OneShot | Algorithm::TwoShot);
    let worth: Vec<Algorithm> = all.filter(|a| cards.len() <= 64 || !direct(a)).collect();
    prices_of(&worth, cluster, collective, cards)
}

/// One algorithm of a collective on these cards, also one whose schedule has another name too.
#[must_use]
pub fn price(
    cluster: &Cluster,
    collective: Collective,
    algorithm: Algorithm,
    cards: &[usize],
) -> Price {
    prices_of(&[algorithm], cluster, collective, cards).remove(0)
}

fn prices_of(
    algorithms: &[Algorithm],
    cluster: &Cluster,
    collective: Collective,
    cards: &[usize],
) -> Vec<Price> {
    let base = cluster.base(cards);
    let flows = algorithms.iter().map(|&algorithm| {
        let flow = Flow::new(collective, algorithm, cards.len());
        let time = |bytes: f64| (bytes, base.0 + timed(cluster, &flow, cards, bytes));
        let points = vec![time(0.0), time(MANY)];
        (Price { algorithm, points }, flow)
    });
    let mut priced: Vec<(Price, Flow)> = flows.collect();
    // Time over bytes never bends down: it is at most the line, and at least the larger of its two parts.
    let at_most = |bytes: f64| priced.iter().map(|(price, _)| price.at(bytes).0).reduce(f64::min);
    let limits = BETWEEN.map(|bytes| at_most(bytes).unwrap_or(0.0));
    for (price, flow) in &mut priced {
        let time = |bytes: f64| (bytes, base.0 + timed(cluster, flow, cards, bytes));
        let [(_, none), (_, many)] = price.points[..] else { continue };
        let at_least = |bytes: f64| none.max(many / MANY * bytes);
        let hopeless = BETWEEN.iter().zip(limits).all(|(&bytes, limit)| at_least(bytes) > limit);
        if hopeless || !many.is_finite() {
            continue;
        }
        let (bytes, middle) = time(BETWEEN[2]);
        if (price.at(bytes).0 - middle).abs() > middle * LINE {
            let between = BETWEEN.map(time);
            price.points.splice(1..1, between);
        }
    }
    priced.into_iter().map(|(price, _)| price).collect()
}

/// Prices that were asked for before. Groups that look alike to every algorithm share an entry.
#[derive(Debug, Default)]
pub(crate) struct PriceList {
    known: RefCell<HashMap<Key, Rc<Vec<Price>>>>,
    /// The only algorithm, where not the best one is wanted.
    only: Option<Algorithm>,
    overheads: RefCell<HashMap<Vec<u32>, Overheads>>,
    exact: RefCell<HashMap<(Key, Algorithm, u64), Seconds>>,
}

type Key = (Collective, Vec<u32>);

impl PriceList {
    /// Prices of one algorithm.
    pub(crate) fn only(algorithm: Algorithm) -> PriceList {
        PriceList { only: Some(algorithm), ..PriceList::default() }
    }

    /// How a group exchanges.
    pub(crate) fn exchanging(&self, cluster: &Cluster, group: &Group) -> Exchanging {
        let kind = kind_of(cluster, group);
        if kind != ExchangeKind::Schedules || group.cards.len() < 2 {
            return Exchanging { kind, overheads: Overheads::default() };
        }
        let looks = looks(cluster, &group.cards);
        if let Some(&overheads) = self.overheads.borrow().get(&looks) {
            return Exchanging { kind, overheads };
        }
        let fresh = exchanging(cluster, group, kind);
        self.overheads.borrow_mut().insert(looks, fresh.overheads);
        fresh
    }

    /// What an algorithm takes for the very bytes that it carries.
    pub(crate) fn exact(
        &self,
        cluster: &Cluster,
        collective: Collective,
        algorithm: Algorithm,
        cards: &[usize],
        bytes: f64,
    ) -> Seconds {
        let key = ((collective, looks(cluster, cards)), algorithm, bytes as u64);
        if let Some(&known) = self.exact.borrow().get(&key) {
            return known;
        }
        let time = collective_time(cluster, collective, algorithm, cards, bytes as u64);
        self.exact.borrow_mut().insert(key, time);
        time
    }

    pub(crate) fn get(
        &self,
        cluster: &Cluster,
        collective: Collective,
        cards: &[usize],
    ) -> Rc<Vec<Price>> {
        let key = (collective, looks(cluster, cards));
        if let Some(known) = self.known.borrow().get(&key) {
            return Rc::clone(known);
        }
        let fresh = Rc::new(match self.only {
            Some(algorithm) => prices_of(&[algorithm], cluster, collective, cards),
            None => prices(cluster, collective, cards),
        });
        self.known.borrow_mut().insert(key, Rc::clone(&fresh));
        fresh
    }
}

/// What tells groups apart. On equal wires only the distances between successive ranks count in a ring,
/// and only the number of cards around a hub or in a mesh.
fn looks(cluster: &Cluster, cards: &[usize]) -> Vec<u32> {
    let wires = cluster.wires();
    let same_kind = cards.iter().all(|&card| cluster.kind(card) == cluster.kind(cards[0]));
    let plain = |index: usize| {
        let (wire, first) = (&wires[index], &wires[index % 2]);
        (wire.bandwidth, wire.latency) == (first.bandwidth, first.latency)
    };
    let whole = match cluster.shape() {
        Shape::Ring => wires.len() == 2 * cluster.cards(),
        Shape::Star | Shape::Switch => wires.len() == 2 * cluster.cards(),
        Shape::Mesh => wires.len() == cluster.cards() * (cluster.cards() - 1),
        _ => false,
    };
    let base_alike = same_kind || cluster.base(cards) == Seconds::ZERO;
    if !whole || !base_alike || !(0..wires.len()).all(plain) {
        return cards.iter().map(|&card| card as u32).collect();
    }
    match cluster.shape() {
        // The number of cards first, so that no list of cards can look like it.
        Shape::Ring => {
            let next = |rank: usize| cards[(rank + 1) % cards.len()];
            let hops = (0..cards.len()).map(|r| cluster.route(cards[r], next(r)).len() as u32);
            std::iter::once(u32::MAX).chain(hops).collect()
        }
        _ => vec![u32::MAX, cards.len() as u32],
    }
}

/// The order in which a group's cards take part: as they are wired. Index order follows the wires of
/// every regular shape; in a list of links the nearest card comes next, and pairs of hops are swapped
/// while that shortens the round.
pub(crate) fn rank_order(cluster: &Cluster, cards: &[usize]) -> Vec<usize> {
    let mut order = cards.to_vec();
    order.sort_unstable();
    if cluster.shape() != Shape::Links || order.len() < 4 {
        return order;
    }
    for place in 1..order.len() {
        let here = order[place - 1];
        let distance = |&at: &usize| cluster.latency(here, order[at]).0;
        let next = (place..order.len()).min_by(|a, b| distance(a).total_cmp(&distance(b)));
        order.swap(place, next.unwrap_or(place));
    }
    let hop = |a: usize, b: usize| cluster.latency(a, b).0.max(cluster.latency(b, a).0);
    let n = order.len();
    let mut improved = true;
    while improved {
        improved = false;
        for i in 0..n - 1 {
            for j in i + 2..n {
                let (a, b) = (order[i], order[i + 1]);
                let (c, d) = (order[j], order[(j + 1) % n]);
                if hop(a, c) + hop(b, d) < hop(a, b) + hop(c, d) - 1e-15 {
                    order[i + 1..=j].reverse();
                    improved = true;
                }
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_topology::Profile;

    fn switch(cards: usize) -> Cluster {
        Cluster::uniform(Profile::builtin("rev-a").unwrap(), cards, Shape::Switch).unwrap()
    }

    #[test]
    fn timed_all_reduce_equals_the_closed_formulas_where_nothing_is_shared() {
        for n in [2usize, 4, 8] {
            let cluster = switch(n);
            let cards: Vec<usize> = (0..n).collect();
            let (alpha, beta) = (2e-6, cluster.wires()[0].bandwidth.0 as f64);
            let (ranks, rounds) = (n as f64, (n as f64).log2());
            for bytes in [0.0, 4096.0, 1048576.0] {
                let share = 2.0 * (ranks - 1.0) / ranks * bytes / beta;
                for price in prices(&cluster, Collective::AllReduce, &cards) {
                    let expected = match price.algorithm {
                        Algorithm::Ring => 2.0 * (ranks - 1.0) * alpha + share,
                        Algorithm::RecursiveDoubling => rounds * (alpha + bytes / beta),
                        Algorithm::HalvingDoubling => 2.0 * rounds * alpha + share,
                        Algorithm::OneShot => alpha + (ranks - 1.0) * bytes / beta,
                        Algorithm::TwoShot => 2.0 * alpha + share,
                        Algorithm::Tree => continue,
                        other => panic!("no formula for {other}"),
                    };
                    let actual = price.at(bytes).0;
                    assert!(
                        (actual - expected).abs() < 1e-9 + expected * 1e-6,
                        "{} n={n} bytes={bytes}: {actual} against {expected}",
                        price.algorithm
                    );
                }
            }
        }
    }

    #[test]
    fn rank_order_of_a_scrambled_ring_follows_its_wires() {
        let profile = Profile::builtin("rev-a").unwrap();
        let around = [0, 3, 1, 4, 2, 5];
        let toml: String = (0..6)
            .map(|i| format!("[[links]]\nbetween = [{}, {}]\n", around[i], around[(i + 1) % 6]))
            .collect();
        let text = format!("cards = [{{ profile = 'rev-a', count = 6 }}]\n{toml}");
        let find = |_: &str| Ok::<_, spanker_topology::TopologyError>(profile.clone());
        let cluster = Cluster::from_toml(&text, None, find).unwrap();
        let order = rank_order(&cluster, &[0, 1, 2, 3, 4, 5]);
        for rank in 0..6 {
            let hops = cluster.route(order[rank], order[(rank + 1) % 6]).len();
            assert_eq!(hops, 1, "{order:?}");
        }
    }
}
