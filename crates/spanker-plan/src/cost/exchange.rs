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

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use spanker_collective::{Algorithm, Collective};
use spanker_topology::{Cluster, ExchangeKind, Kernels, Seconds, Shape};

use super::Group;
use super::overhead::{Counts, overheads};
use crate::program::{Exchanging, Overheads};
use crate::simulate::engine::{Engine, Item, OUTSIDE};
use crate::simulate::flow::Flow;
use crate::simulate::network::Speeds;
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

/// What a group needs to exchange activations in this way.
pub(crate) fn exchanging(cluster: &Cluster, group: &Group, kind: ExchangeKind) -> Exchanging {
    let overheads = match kind {
        ExchangeKind::Schedules if group.cards.len() > 1 => {
            overheads(cluster, &group.cards, &Counts::default())
        }
        _ => Overheads::default(),
    };
    let kernels = kernels(cluster, &group.cards);
    Exchanging { kind, overheads, kernels }
}

/// Where the cards of a group have their kernels.
pub(crate) fn kernels(cluster: &Cluster, cards: &[usize]) -> Kernels {
    cluster.profile(cards[0]).kernels
}

/// How cards exchange activations.
pub(crate) fn exchange_kind(cluster: &Cluster, cards: &[usize]) -> ExchangeKind {
    let link = cluster.profile(cards[0]).link.as_ref();
    link.map(|link| link.exchange).unwrap_or_default()
}

/// What it takes until every rank of a stage has its message: `(from, to, bytes)` for each. Cards in between
/// pass a message on when they have all of it.
fn hop(cluster: &Cluster, speeds: &Speeds, messages: &[(usize, usize, f64)]) -> Seconds {
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
    let ended = Engine::new(cluster, speeds, &[], &[], &programs).run(&[]);
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
    let flow = Rc::new(Flow::new(collective, algorithm, cards.len()));
    let speeds = Speeds::of(cluster);
    cluster.base(cards) + Seconds(timed(cluster, &speeds, &flow, cards, bytes as f64))
}

/// Bytes that stand for "many" when the slope is measured.
const MANY: f64 = 1e9;

/// Bytes that are timed where time is no line.
const BETWEEN: [f64; 7] = [1e3, 4e3, 1.6e4, 6.4e4, 2.56e5, 1e6, 1.6e7];

/// How far time may be from a line over the bytes that is taken for one.
const LINE: f64 = 0.005;

/// How long one collective takes from a standing start.
fn timed(cluster: &Cluster, speeds: &Speeds, flow: &Rc<Flow>, cards: &[usize], bytes: f64) -> f64 {
    let label = Label { activity: Activity::Exchange, layer: 0, token: 0 };
    let mut programs = vec![Vec::new(); cluster.cards()];
    for (rank, &card) in cards.iter().enumerate() {
        let rank = rank as u32;
        let op = OUTSIDE;
        programs[card].push(Item::Collective { flow: 0, rank, group: 0, bytes, label, op });
    }
    let groups = [cards.to_vec()];
    let ended =
        Engine::new(cluster, speeds, std::slice::from_ref(flow), &groups, &programs).run(&[]);
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
    let (base, speeds) = (cluster.base(cards), Speeds::of(cluster));
    let flows = algorithms.iter().map(|&algorithm| {
        let flow = Rc::new(Flow::new(collective, algorithm, cards.len()));
        let time = |bytes: f64| (bytes, base.0 + timed(cluster, &speeds, &flow, cards, bytes));
        let points = vec![time(0.0), time(MANY)];
        (Price { algorithm, points }, flow)
    });
    let mut priced: Vec<(Price, Rc<Flow>)> = flows.collect();
    // Time over bytes never bends down: it is at most the line, and at least the larger of its two parts.
    let at_most = |bytes: f64| priced.iter().map(|(price, _)| price.at(bytes).0).reduce(f64::min);
    let limits = BETWEEN.map(|bytes| at_most(bytes).unwrap_or(0.0));
    for (price, flow) in &mut priced {
        let time = |bytes: f64| (bytes, base.0 + timed(cluster, &speeds, flow, cards, bytes));
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

/// The most ranks that add everyone's whole buffer by themselves: each more takes another buffer on every card.
const ONE_SHOT_SUMS: usize = 8;
/// The most ranks that send to each other directly: in a large group that is many messages, and never the best.
const DIRECT: usize = 64;

/// The algorithms that a plan may use for a collective of so many ranks.
pub(super) fn usable(collective: Collective, ranks: usize) -> impl Iterator<Item = Algorithm> {
    let worth = move |a: &Algorithm| match a {
        Algorithm::OneShot if collective.reduces() => ranks <= ONE_SHOT_SUMS,
        // Sums in rank order have no other way in a large group.
        Algorithm::TwoShot if collective.reduces() => true,
        Algorithm::OneShot | Algorithm::TwoShot => ranks <= DIRECT,
        _ => true,
    };
    let all = algorithms(collective).iter().copied();
    all.filter(move |&a| serial(collective, a)).filter(worth)
}

/// What exchanges of models take on one cluster, each timed once. Groups that look alike to every algorithm share
/// an entry.
///
/// Plans and runs choose their algorithms here, so that a run does what was priced.
///
/// ```
/// use spanker_collective::Collective;
/// use spanker_plan::PriceList;
/// use spanker_topology::{Cluster, Profile, Shape};
/// let ring = Cluster::uniform(Profile::builtin("rev-a")?, 4, Shape::Ring)?;
/// let prices = PriceList::default();
/// let (algorithm, _) = prices.best(&ring, Collective::AllGather, &[0, 1, 2, 3], 65536.0);
/// assert_eq!(algorithm.name(), "ring");
/// # Ok::<(), spanker_topology::TopologyError>(())
/// ```
#[derive(Debug, Default)]
pub struct PriceList {
    /// The only algorithm, where not the best one is wanted.
    pub(super) only: Option<Algorithm>,
    speeds: OnceCell<Speeds>,
    regular: OnceCell<bool>,
    flows: RefCell<HashMap<(Collective, Algorithm, usize), Rc<Flow>>>,
    counts: Counts,
    overheads: RefCell<HashMap<Vec<u32>, Overheads>>,
    times: RefCell<HashMap<Key, (Algorithm, Seconds)>>,
    /// What certain algorithms take.
    by: RefCell<HashMap<(Algorithm, Key), Seconds>>,
    /// Seconds that each byte of a collective takes at least.
    at_least: RefCell<HashMap<(Collective, Vec<u32>), f64>>,
    hops: RefCell<HashMap<HopKey, Seconds>>,
}

/// The least that a collective takes, as a line over its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AtLeast {
    base: f64,
    per_byte: f64,
}

impl AtLeast {
    pub(crate) fn of(self, bytes: f64) -> Seconds {
        Seconds(self.base + self.per_byte * bytes)
    }
}

/// The collective, what the group looks like and the bits of the bytes.
type Key = (Collective, Vec<u32>, u64);
/// The cards on both sides and the bits of the bytes.
type HopKey = (Vec<(usize, usize)>, u64);

impl PriceList {
    /// Prices of one algorithm.
    pub(crate) fn only(algorithm: Algorithm) -> PriceList {
        PriceList { only: Some(algorithm), ..PriceList::default() }
    }

    pub(crate) fn speeds(&self, cluster: &Cluster) -> &Speeds {
        self.speeds.get_or_init(|| Speeds::of(cluster))
    }

    /// How a group exchanges.
    pub(crate) fn exchanging(&self, cluster: &Cluster, cards: &[usize]) -> Exchanging {
        let (kind, kernels) = (exchange_kind(cluster, cards), kernels(cluster, cards));
        if kind != ExchangeKind::Schedules || cards.len() < 2 {
            return Exchanging { kind, overheads: Overheads::default(), kernels };
        }
        let looks = self.wiring(cluster, cards);
        if let Some(&overheads) = self.overheads.borrow().get(&looks) {
            return Exchanging { kind, overheads, kernels };
        }
        let overheads = overheads(cluster, cards, &self.counts);
        self.overheads.borrow_mut().insert(looks, overheads);
        Exchanging { kind, overheads, kernels }
    }

    /// The best algorithm for a collective of so many bytes among these cards, in this order of ranks, and what it
    /// takes. Sums are added in rank order. The cluster must always be the same one.
    pub fn best(
        &self,
        cluster: &Cluster,
        collective: Collective,
        cards: &[usize],
        bytes: f64,
    ) -> (Algorithm, Seconds) {
        let key = (collective, self.looks(cluster, cards), bytes.to_bits());
        if let Some(&known) = self.times.borrow().get(&key) {
            return known;
        }
        let fresh = match self.only {
            Some(only) => {
                let flow = self.flow(collective, only, cards.len());
                (only, timed(cluster, self.speeds(cluster), &flow, cards, bytes))
            }
            None => self.cheapest(cluster, collective, cards, bytes),
        };
        let timed = (fresh.0, cluster.base(cards) + Seconds(fresh.1));
        self.times.borrow_mut().insert(key, timed);
        timed
    }

    fn cheapest(
        &self,
        cluster: &Cluster,
        collective: Collective,
        cards: &[usize],
        bytes: f64,
    ) -> (Algorithm, f64) {
        let speeds = self.speeds(cluster);
        let mut best: Option<(Algorithm, f64)> = None;
        for algorithm in usable(collective, cards.len()) {
            let flow = self.flow(collective, algorithm, cards.len());
            if let Some((_, time)) = best {
                let messages = flow.messages(bytes).map(|(a, b, n)| (cards[a], cards[b], n));
                if speeds.least_of_all(cluster, messages) >= time {
                    continue;
                }
            }
            let time = timed(cluster, speeds, &flow, cards, bytes);
            if best.is_none_or(|(_, least)| time < least) {
                best = Some((algorithm, time));
            }
        }
        best.expect("a collective has an algorithm")
    }

    /// The least that a collective could take by any algorithm: what the busiest wire carries. It costs little where
    /// `best` simulates every message.
    pub(crate) fn at_least(
        &self,
        cluster: &Cluster,
        collective: Collective,
        cards: &[usize],
    ) -> AtLeast {
        let key = (collective, self.wiring(cluster, cards));
        let known = self.at_least.borrow().get(&key).copied();
        let per_byte = known.unwrap_or_else(|| {
            let busiest = |algorithm: Algorithm| {
                let flow = self.flow(collective, algorithm, cards.len());
                let messages = flow.messages(1.0).map(|(a, b, n)| (cards[a], cards[b], n));
                self.speeds(cluster).least_of_all(cluster, messages)
            };
            let all = match self.only {
                Some(only) => busiest(only),
                None => {
                    let each = usable(collective, cards.len()).map(busiest);
                    each.reduce(f64::min).unwrap_or(0.0)
                }
            };
            self.at_least.borrow_mut().insert(key, all);
            all
        });
        AtLeast { base: cluster.base(cards).0, per_byte }
    }

    /// What a collective takes by a certain algorithm.
    pub(crate) fn by(
        &self,
        cluster: &Cluster,
        collective: Collective,
        algorithm: Algorithm,
        cards: &[usize],
        bytes: f64,
    ) -> Seconds {
        let key = (algorithm, (collective, self.looks(cluster, cards), bytes.to_bits()));
        if let Some(&known) = self.by.borrow().get(&key) {
            return known;
        }
        let flow = self.flow(collective, algorithm, cards.len());
        let time = timed(cluster, self.speeds(cluster), &flow, cards, bytes);
        let time = cluster.base(cards) + Seconds(time);
        self.by.borrow_mut().insert(key, time);
        time
    }

    pub(crate) fn flow(
        &self,
        collective: Collective,
        algorithm: Algorithm,
        ranks: usize,
    ) -> Rc<Flow> {
        let mut flows = self.flows.borrow_mut();
        let flow = flows
            .entry((collective, algorithm, ranks))
            .or_insert_with(|| Rc::new(Flow::new(collective, algorithm, ranks)));
        Rc::clone(flow)
    }

    /// What it takes until every message (from, to) of so many bytes has arrived.
    pub(crate) fn hop(&self, cluster: &Cluster, pairs: Vec<(usize, usize)>, bytes: f64) -> Seconds {
        let key = (pairs, bytes.to_bits());
        if let Some(&known) = self.hops.borrow().get(&key) {
            return known;
        }
        let messages: Vec<(usize, usize, f64)> =
            key.0.iter().map(|&(from, to)| (from, to, bytes)).collect();
        let time = hop(cluster, self.speeds(cluster), &messages);
        self.hops.borrow_mut().insert(key, time);
        time
    }

    /// The least that a message of so many bytes between any two of the cards takes.
    pub(crate) fn least_hop(&self, cluster: &Cluster, cards: &[usize], bytes: f64) -> f64 {
        let speeds = self.speeds(cluster);
        let reached = |from: usize, to: usize| from != to && cluster.reaches(from, to);
        let pairs = cards.iter().flat_map(|&from| cards.iter().map(move |&to| (from, to)));
        let times = pairs.filter(|&(from, to)| reached(from, to));
        let least = times.map(|(from, to)| speeds.least(cluster, from, to, bytes)).reduce(f64::min);
        least.unwrap_or(0.0)
    }

    /// What tells groups apart: their wiring and, on equal wires, what the cards' memories take.
    fn looks(&self, cluster: &Cluster, cards: &[usize]) -> Vec<u32> {
        let mut looks = self.wiring(cluster, cards);
        if looks[0] == ALIKE {
            let same_kind = cards.iter().all(|&card| cluster.kind(card) == cluster.kind(cards[0]));
            let kinds = if same_kind { &cards[..1] } else { cards };
            looks.extend(kinds.iter().map(|&card| cluster.kind(card) as u32));
        }
        looks
    }

    /// What tells the wiring of groups apart: on equal wires only the distances between successive ranks
    /// count in a ring, and only the number of cards around a hub or in a mesh.
    fn wiring(&self, cluster: &Cluster, cards: &[usize]) -> Vec<u32> {
        let same_kind = cards.iter().all(|&card| cluster.kind(card) == cluster.kind(cards[0]));
        let base_alike = same_kind || cluster.base(cards) == Seconds::ZERO;
        if !base_alike || !*self.regular.get_or_init(|| regular(cluster)) {
            return cards.iter().map(|&card| card as u32).collect();
        }
        let mut looks = Vec::with_capacity(2 * cards.len() + 2);
        looks.extend([ALIKE, cards.len() as u32]);
        if cluster.shape() == Shape::Ring {
            let next = |rank: usize| cards[(rank + 1) % cards.len()];
            let hops = (0..cards.len()).map(|r| cluster.route(cards[r], next(r)).len() as u32);
            looks.extend(hops);
        }
        looks
    }
}

/// What looks of groups on equal wires begin with, so that no list of cards can look like it.
const ALIKE: u32 = u32::MAX;

/// Whether all wires of a cluster are alike, and all of its shape are there.
fn regular(cluster: &Cluster) -> bool {
    let wires = cluster.wires();
    let plain = |index: usize| {
        let (wire, first) = (&wires[index], &wires[index % 2]);
        (wire.bandwidth, wire.latency) == (first.bandwidth, first.latency)
    };
    let whole = match cluster.shape() {
        Shape::Ring | Shape::Star | Shape::Switch => wires.len() == 2 * cluster.cards(),
        Shape::Mesh => wires.len() == cluster.cards() * (cluster.cards() - 1),
        _ => false,
    };
    whole && (0..wires.len()).all(plain)
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

/// A built-in card whose memory and operators take no time and whose links have no frames: what is left are
/// the latency and the rate of the closed formulas.
#[cfg(test)]
pub(crate) fn links_alone(name: &str) -> spanker_topology::Profile {
    let mut card = spanker_topology::Profile::builtin(name).unwrap();
    card.memory.bandwidth.value = spanker_topology::BytesPerSecond(u64::MAX);
    card.compute.per_operator.value = Seconds::ZERO;
    let link = card.link.as_mut().unwrap();
    // The rate that frames leave.
    link.bandwidth.value = link.sustained(link.lanes.value);
    link.framing = None;
    card
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_topology::Profile;

    fn switch(cards: usize) -> Cluster {
        Cluster::uniform(links_alone("rev-a"), cards, Shape::Switch).unwrap()
    }

    #[test]
    fn timed_all_reduce_equals_the_closed_formulas_where_only_the_links_take_time() {
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
    fn memory_frames_and_operators_make_an_all_reduce_longer() {
        let time = |card: Profile| {
            let cluster = Cluster::uniform(card, 4, Shape::Ring).unwrap();
            collective_time(
                &cluster,
                Collective::AllReduce,
                Algorithm::TwoShot,
                &[0, 1, 2, 3],
                4096,
            )
        };
        let bare = time(links_alone("rev-a"));
        let slower: [fn(&mut Profile, &Profile); 3] = [
            |card, real| card.memory = real.memory.clone(),
            |card, real| card.compute = real.compute.clone(),
            |card, real| card.link = real.link.clone(),
        ];
        for change in slower {
            let mut card = links_alone("rev-a");
            change(&mut card, &Profile::builtin("rev-a").unwrap());
            let longer = time(card);
            assert!(longer > bare, "{longer} against {bare}");
        }
    }

    #[test]
    fn groups_of_cards_with_other_memories_have_other_times() {
        // The same wiring twice: cards 0 and 1 are slow, cards 2 and 3 fast.
        let fast = Profile::builtin("rev-a").unwrap();
        let rate = spanker_topology::BytesPerSecond(500_000_000);
        let slow = fast.clone().with_memory_bandwidth(rate, "a test");
        let cluster =
            Cluster::new(vec![slow.clone(), slow, fast.clone(), fast], Shape::Ring).unwrap();
        let (prices, bytes) = (PriceList::default(), 65536.0);
        for cards in [[0, 1], [2, 3], [1, 2]] {
            let (algorithm, time) = prices.best(&cluster, Collective::AllReduce, &cards, bytes);
            let alone =
                collective_time(&cluster, Collective::AllReduce, algorithm, &cards, bytes as u64);
            assert_eq!(time, alone, "{cards:?}");
        }
        let of = |cards: &[usize]| prices.best(&cluster, Collective::AllReduce, cards, bytes).1;
        assert!(of(&[0, 1]) > of(&[2, 3]));
    }

    #[test]
    fn best_algorithm_of_large_and_small_groups_is_the_shortest_of_the_usable_ones() {
        for shape in [Shape::Ring, Shape::Switch, Shape::Star] {
            for ranks in [2usize, 3, 5, 9, 70] {
                let profile = Profile::builtin("rev-a").unwrap();
                let cluster = Cluster::uniform(profile, ranks, shape).unwrap();
                let cards: Vec<usize> = (0..ranks).collect();
                for collective in [Collective::AllGather, Collective::AllReduce] {
                    let (prices, bytes) = (PriceList::default(), 4096 * ranks as u64);
                    let best = prices.best(&cluster, collective, &cards, bytes as f64);
                    let timed = |a| collective_time(&cluster, collective, a, &cards, bytes);
                    let least = usable(collective, ranks).map(timed).reduce(Seconds::min).unwrap();
                    assert_eq!(best.1, least, "{shape} {ranks} {collective:?} {}", best.0);
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
