// SPDX-License-Identifier: Apache-2.0
//! Wires and what messages take on them: bytes, frames, hops, and what breaks.

use rand::Rng;
use rand_pcg::Pcg32;
use spanker_topology::{Cluster, ExchangeKind, MAX_CARDS, MESSAGE_HEAD};

use crate::program::Cost;

/// Frames that break, at random from a seed, and what each costs.
#[derive(Debug, Clone)]
pub(crate) struct Errors {
    pub(crate) dice: Pcg32,
    /// Bytes of data in a frame.
    pub(crate) payload: f64,
    /// The chance that a frame breaks.
    pub(crate) chance: f64,
    /// The time that a broken frame costs: itself and what was sent until its loss was known.
    pub(crate) penalty: f64,
}

impl Errors {
    /// The time that broken frames add to a message.
    fn delay(&mut self, bytes: f64) -> f64 {
        let expected = (bytes / self.payload).ceil().max(1.0) * self.chance;
        if expected > 30.0 {
            // So many that their number hardly varies.
            return expected * self.penalty;
        }
        // Knuth's way to draw a number of rare events.
        let (limit, mut product, mut broken) = ((-expected).exp(), 1.0, 0u32);
        loop {
            product *= self.dice.random::<f64>();
            if product <= limit {
                return f64::from(broken) * self.penalty;
            }
            broken += 1;
        }
    }
}

/// What messages take on a wire.
#[derive(Debug, Clone, Copy)]
struct WireTime {
    per_byte: f64,
    /// Bytes of data in a frame, and what a frame takes besides them.
    payload: f64,
    per_frame: f64,
    /// What a message's own head takes.
    head: f64,
}

impl WireTime {
    fn plain(rate: f64) -> WireTime {
        WireTime { per_byte: 1.0 / rate, payload: f64::INFINITY, per_frame: 0.0, head: 0.0 }
    }

    fn of(cluster: &Cluster, wire: &spanker_topology::Wire) -> WireTime {
        let rate = wire.bandwidth.0 as f64;
        let ends = [wire.from, wire.to].into_iter().filter(|&node| node < cluster.cards());
        let links: Vec<_> = ends.filter_map(|card| cluster.profile(card).link.as_ref()).collect();
        let framed = links.iter().filter_map(|link| link.framing).next();
        match framed.filter(|_| links.len() == 2) {
            None => WireTime::plain(rate),
            Some(framing) => {
                let payload = framing.payload as f64;
                let more =
                    framing.overhead as f64 + framing.ack_bytes as f64 / framing.ack_every as f64;
                let per_byte = payload / (payload + more) / rate;
                let head = MESSAGE_HEAD as f64 * per_byte;
                WireTime { per_byte, payload, per_frame: more * per_byte, head }
            }
        }
    }

    fn time(&self, bytes: f64) -> f64 {
        let frames = bytes / self.payload;
        // Many processors have no instruction for rounding up that a compiler may count on.
        let whole = frames as u64 as f64;
        let frames = if whole < frames { whole + 1.0 } else { whole.max(1.0) };
        bytes * self.per_byte + frames * self.per_frame + self.head
    }
}

/// What messages take on the wires of a cluster and exchanges in its cards' memories: computed once, used by
/// every run on that cluster.
#[derive(Debug)]
pub(crate) struct Speeds {
    /// What each wire takes, then each shared resource.
    times: Vec<WireTime>,
    /// For each card, what its memory takes for a byte of an exchange, and what a copy or fold costs to begin.
    memories: Vec<(f64, f64)>,
    /// Whether cards pass messages on themselves.
    relays: bool,
}

impl Speeds {
    pub(crate) fn of(cluster: &Cluster) -> Speeds {
        let wires = cluster.wires().iter().map(|wire| WireTime::of(cluster, wire));
        let shared = cluster.shared().iter().enumerate().map(|(index, shared)| {
            let plain = WireTime::plain(shared.bandwidth.0 as f64);
            // The lanes of a card carry the frames of its wires.
            let wire = cluster.wires().iter().find(|wire| wire.shared == Some(index));
            let framed = wire
                .map(|wire| WireTime::of(cluster, wire))
                .filter(|_| wire.is_some_and(|wire| wire.bandwidth == shared.bandwidth));
            framed.unwrap_or(plain)
        });
        let times = wires.chain(shared).collect();
        let memory = |card: usize| {
            let profile = cluster.profile(card);
            let kind = profile.link.as_ref().map(|link| link.exchange).unwrap_or_default();
            match kind {
                ExchangeKind::Schedules => {
                    let cost = Cost::of(profile);
                    (cost.memory(1.0), cost.fixed())
                }
                // What was measured has it all.
                _ => (0.0, 0.0),
            }
        };
        let memories = (0..cluster.cards()).map(memory).collect();
        let kind = cluster.profile(0).link.as_ref().map(|link| link.exchange);
        let relays = kind.unwrap_or_default() == ExchangeKind::Schedules;
        Speeds { times, memories, relays }
    }

    pub(crate) fn memories(&self) -> &[(f64, f64)] {
        &self.memories
    }

    /// The least that a message from one card to another takes.
    pub(crate) fn least(&self, cluster: &Cluster, from: usize, to: usize, bytes: f64) -> f64 {
        let route = cluster.route(from, to);
        let slowest = route.iter().map(|&wire| self.times[wire as usize].time(bytes));
        cluster.latency(from, to).0 + slowest.fold(0.0, f64::max)
    }

    /// The least that messages (from, to, bytes) take together: each wire carries one after the other.
    pub(crate) fn least_of_all(
        &self,
        cluster: &Cluster,
        messages: impl Iterator<Item = (usize, usize, f64)>,
    ) -> f64 {
        let wires = cluster.wires();
        let mut loads = vec![0.0; self.times.len()];
        for (from, to, bytes) in messages {
            for &wire in cluster.route(from, to) {
                loads[wire as usize] += bytes;
                if let Some(shared) = wires[wire as usize].shared {
                    loads[wires.len() + shared] += bytes;
                }
            }
        }
        let busy = loads.iter().zip(&self.times).map(|(load, time)| load * time.per_byte);
        busy.fold(0.0, f64::max)
    }
}

/// Which wires and shared resources are busy until when.
pub(super) struct Network<'a> {
    cluster: &'a Cluster,
    speeds: &'a Speeds,
    free: Vec<f64>,
    pub(super) errors: Option<Errors>,
}

/// The least bytes that a relayed message is cut into, the most segments, and what they begin at a multiple of.
const SEGMENT: f64 = 8192.0;
const SEGMENTS: f64 = 64.0;
const SEGMENT_ALIGNMENT: f64 = 64.0;

/// The most wires of a route: no card comes twice.
const MAX_HOPS: usize = MAX_CARDS;

impl<'a> Network<'a> {
    pub(super) fn new(cluster: &'a Cluster, speeds: &'a Speeds) -> Self {
        Network { cluster, speeds, free: vec![0.0; speeds.times.len()], errors: None }
    }

    /// When the wire is free that a message from one card to another leaves by.
    pub(super) fn wire_free(&self, from: usize, to: usize) -> f64 {
        self.cluster.route(from, to).first().map_or(0.0, |&wire| self.free[wire as usize])
    }

    /// Whether cards between two others pass their messages on.
    fn relayed(&self, route: &[u32]) -> bool {
        let card = |&wire: &u32| self.cluster.wires()[wire as usize].to < self.cluster.cards();
        self.speeds.relays && route.len() > 1 && route[..route.len() - 1].iter().all(card)
    }

    /// What bytes take on a wire and what it shares, which is the other one's place if there is one.
    fn hop(&self, index: usize, bytes: f64) -> (f64, Option<usize>) {
        let wires = self.cluster.wires();
        let time = self.speeds.times[index].time(bytes);
        match wires[index].shared {
            None => (time, None),
            Some(shared) => {
                let shared = wires.len() + shared;
                (time.max(self.speeds.times[shared].time(bytes)), Some(shared))
            }
        }
    }

    /// Until when a wire and what it shares are busy.
    fn busy(&self, wire: usize, shared: Option<usize>) -> f64 {
        shared.map_or(0.0, |shared| self.free[shared]).max(self.free[wire])
    }

    fn occupy(&mut self, wire: usize, shared: Option<usize>, until: f64) {
        self.free[wire] = until;
        if let Some(shared) = shared {
            self.free[shared] = until;
        }
    }

    /// One segment over all wires of a route: when it has left the first wire, and when it is there.
    fn segment(&mut self, route: &[u32], bytes: f64, at: f64) -> (f64, f64) {
        let (mut left, mut ready) = (at, at);
        for (place, &wire) in route.iter().enumerate() {
            let wire = wire as usize;
            let (time, shared) = self.hop(wire, bytes);
            let gone = ready.max(self.busy(wire, shared)) + time;
            self.occupy(wire, shared, gone);
            if place == 0 {
                left = gone;
            }
            ready = gone + self.cluster.wires()[wire].latency.0;
        }
        (left, ready)
    }

    /// Segments of one size over all wires of a route, one after the other on each: when the last has left
    /// the first wire, and when it is there.
    ///
    /// Segment `s` has passed wire `h` when the slowest way to get there is done: wait until some wire `j` is
    /// free, cross all wires from `j` to `h` once and the slowest of them `s` times more.
    fn segments(&mut self, route: &[u32], bytes: f64, count: usize, at: f64) -> (f64, f64) {
        let wires = self.cluster.wires();
        let more = (count - 1) as f64;
        let mut passed: [(f64, f64); MAX_HOPS] = [(0.0, 0.0); MAX_HOPS];
        let (mut left, mut arrival) = (at, at);
        for (place, &wire) in route.iter().enumerate() {
            let wire = wire as usize;
            let (time, shared) = self.hop(wire, bytes);
            let free = self.busy(wire, shared);
            let start = if place == 0 { free.max(at) } else { free };
            // For each wire so far: when it could begin plus one crossing up to here, and the slowest one.
            passed[place] = (start, 0.0);
            let mut end = 0.0f64;
            for (begun, slowest) in &mut passed[..=place] {
                *begun += time;
                *slowest = slowest.max(time);
                end = end.max(*begun + more * *slowest);
            }
            let latency = wires[wire].latency.0;
            passed[..=place].iter_mut().for_each(|(begun, _)| *begun += latency);
            self.occupy(wire, shared, end);
            if place == 0 {
                left = end;
            }
            arrival = end + latency;
        }
        (left, arrival)
    }

    /// A message that cards pass on, segment by segment.
    fn relay(&mut self, route: &[u32], bytes: f64, at: f64) -> (f64, f64) {
        let size = match bytes <= SEGMENT {
            true => bytes,
            false => {
                let part = (bytes / SEGMENTS / SEGMENT_ALIGNMENT).ceil() * SEGMENT_ALIGNMENT;
                part.max(SEGMENT)
            }
        };
        let whole = if size > 0.0 { (bytes / size) as usize } else { 0 };
        let rest = bytes - size * whole as f64;
        let (mut left, mut arrival) = (at, at);
        if whole > 1 && self.apart(route) {
            (left, arrival) = self.segments(route, size, whole, at);
        } else {
            for _ in 0..whole {
                (left, arrival) = self.segment(route, size, at);
            }
        }
        if rest > 0.0 || whole == 0 {
            (left, arrival) = self.segment(route, rest, at);
        }
        (left, arrival)
    }

    /// Whether no two wires of a route share anything.
    fn apart(&self, route: &[u32]) -> bool {
        let shared = |&wire: &u32| self.cluster.wires()[wire as usize].shared;
        route.iter().enumerate().all(|(place, wire)| {
            shared(wire).is_none()
                || !route[..place].iter().any(|other| shared(other) == shared(wire))
        })
    }

    /// When a message that is ready at `at` has left and when it arrives, or nothing if a wire has died on it.
    pub(super) fn send(
        &mut self,
        from: u32,
        to: u32,
        bytes: f64,
        at: f64,
        cut: &[f64],
    ) -> Option<(f64, f64)> {
        let wires = self.cluster.wires();
        let mut start = at;
        let mut slowest = 0.0f64;
        let mut latency = 0.0;
        let route = self.cluster.route(from as usize, to as usize);
        if route.is_empty() && from != to {
            return None;
        }
        if self.relayed(route) {
            // A frame that breaks on any of the wires makes the message late.
            let late = |errors: &mut Errors| route.iter().map(|_| errors.delay(bytes)).sum();
            let delay: f64 = self.errors.as_mut().map_or(0.0, late);
            let (left, arrival) = self.relay(route, bytes, at + delay);
            let lost = !cut.is_empty() && route.iter().any(|&wire| cut[wire as usize] <= arrival);
            return (!lost).then_some((left, arrival));
        }
        for &index in route {
            let index = index as usize;
            let wire = &wires[index];
            start = start.max(self.free[index]);
            slowest = slowest.max(self.speeds.times[index].time(bytes));
            latency += wire.latency.0;
            if let Some(shared) = wire.shared {
                start = start.max(self.free[wires.len() + shared]);
                slowest = slowest.max(self.speeds.times[wires.len() + shared].time(bytes));
            }
        }
        let delay = self.errors.as_mut().map_or(0.0, |errors| errors.delay(bytes));
        for &index in route {
            let index = index as usize;
            self.free[index] = start + delay + self.speeds.times[index].time(bytes);
            if let Some(shared) = wires[index].shared {
                let shared = wires.len() + shared;
                self.free[shared] = start + self.speeds.times[shared].time(bytes);
            }
        }
        let left = route.first().map_or(at, |&wire| self.free[wire as usize]);
        let arrival = start + latency + delay + slowest;
        let lost = !cut.is_empty() && route.iter().any(|&wire| cut[wire as usize] <= arrival);
        (!lost).then_some((left, arrival))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use spanker_topology::{Profile, Seconds, Shape};

    proptest! {
        #[test]
        fn segments_of_one_size_take_as_long_at_once_as_one_by_one(
            free in prop::collection::vec(0.0f64..1e-3, 24),
            latencies in prop::collection::vec(0.0f64..1e-4, 16),
            slower in prop::collection::vec(1u64..9, 16),
            (from, hops) in (0usize..8, 2usize..5),
            count in 1usize..70,
            bytes in 64.0f64..20_000.0,
            at in 0.0f64..1e-3,
        ) {
            let ring = Cluster::uniform(Profile::builtin("rev-a").unwrap(), 8, Shape::Ring).unwrap();
            let mut index = 0;
            let cluster = ring.with_changed_wires(|wire| {
                wire.latency = Seconds(latencies[index] + 1e-6);
                wire.bandwidth.0 /= slower[index];
                index += 1;
            });
            let speeds = Speeds::of(&cluster);
            let route = cluster.route(from, (from + hops) % 8);
            let network = || Network { free: free.clone(), ..Network::new(&cluster, &speeds) };
            let (mut at_once, mut one_by_one) = (network(), network());
            prop_assert!(at_once.apart(route));
            let (left, arrival) = at_once.segments(route, bytes, count, at);
            let mut last = (0.0, 0.0);
            (0..count).for_each(|_| last = one_by_one.segment(route, bytes, at));
            prop_assert!((left - last.0).abs() < 1e-12, "{left} against {}", last.0);
            prop_assert!((arrival - last.1).abs() < 1e-12, "{arrival} against {}", last.1);
            for (one, other) in at_once.free.iter().zip(&one_by_one.free) {
                prop_assert!((one - other).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn whole_frames_are_counted_as_such_and_a_byte_more_takes_another() {
        let time = WireTime { per_byte: 0.0, payload: 2048.0, per_frame: 1.0, head: 0.0 };
        for (bytes, frames) in [(0.0, 1.0), (1.0, 1.0), (2048.0, 1.0), (2049.0, 2.0), (8192.0, 4.0)]
        {
            assert_eq!(time.time(bytes), frames, "{bytes}");
        }
        assert_eq!(WireTime::plain(1e9).time(1e9), 1.0);
    }
}
