// SPDX-License-Identifier: Apache-2.0
//! Wires and what messages take on them: bytes, frames, hops, and what breaks.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use rand::Rng;
use rand_pcg::Pcg32;
use spanker_topology::{Cluster, ExchangeKind, MESSAGE_HEAD, Shape};

use super::relay::Relays;
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

    /// A wire between a card and a hub. Messages of cards with frames have heads there, too.
    fn at_hub(cluster: &Cluster, wire: &spanker_topology::Wire) -> WireTime {
        let per_byte = 1.0 / cluster.part_at_hub(wire).0 as f64;
        let card = wire.from.min(wire.to);
        let link = cluster.profile(card).link.as_ref();
        let framed = link.is_some_and(|link| link.framing.is_some());
        let head = if framed { MESSAGE_HEAD as f64 * per_byte } else { 0.0 };
        WireTime { per_byte, payload: f64::INFINITY, per_frame: 0.0, head }
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
    /// Whether cards send around a hub, each with its own part of what all share there.
    hub: bool,
    /// Who passes on what in which group, for groups that were asked for.
    passing: RefCell<HashMap<Vec<usize>, Rc<Relays>>>,
}

impl Speeds {
    pub(crate) fn of(cluster: &Cluster) -> Speeds {
        let kind = cluster.profile(0).link.as_ref().map(|link| link.exchange);
        let relays = kind.unwrap_or_default() == ExchangeKind::Schedules;
        let hub = relays && matches!(cluster.shape(), Shape::Star | Shape::Switch);
        let wires = cluster.wires().iter().map(|wire| match hub {
            true => WireTime::at_hub(cluster, wire),
            false => WireTime::of(cluster, wire),
        });
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
        Speeds { times, memories, relays, hub, passing: RefCell::default() }
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

impl<'a> Network<'a> {
    pub(super) fn new(cluster: &'a Cluster, speeds: &'a Speeds) -> Self {
        Network { cluster, speeds, free: vec![0.0; speeds.times.len()], errors: None }
    }

    /// When the wire is free that a message from one card to another leaves by.
    pub(super) fn wire_free(&self, from: usize, to: usize) -> f64 {
        self.cluster.route(from, to).first().map_or(0.0, |&wire| self.free[wire as usize])
    }

    /// Whether cards between two others pass their messages on.
    pub(super) fn relayed(&self, from: usize, to: usize) -> bool {
        let route = self.cluster.route(from, to);
        let card = |&wire: &u32| self.cluster.wires()[wire as usize].to < self.cluster.cards();
        self.speeds.relays && route.len() > 1 && route[..route.len() - 1].iter().all(card)
    }

    /// A message around a hub: the sender's wire is busy with it at the rate that a card has there.
    fn through_hub(&mut self, route: &[u32], bytes: f64, at: f64) -> (f64, f64) {
        let wires = self.cluster.wires();
        let times = route.iter().map(|&wire| self.speeds.times[wire as usize].time(bytes));
        let delay = self.errors.as_mut().map_or(0.0, |errors| errors.delay(bytes));
        let time = times.fold(0.0, f64::max) + delay;
        let latency: f64 = route.iter().map(|&wire| wires[wire as usize].latency.0).sum();
        let Some(&first) = route.first() else { return (at, at) };
        let left = at.max(self.free[first as usize]) + time;
        self.free[first as usize] = left;
        (left, left + latency)
    }

    /// Whether cards pass messages on to cards that are not their neighbours.
    pub(super) fn cards_relay(&self) -> bool {
        self.speeds.relays && !self.speeds.hub
    }

    /// Who passes on messages between these cards.
    pub(super) fn relays(&self, cards: &[usize]) -> Rc<Relays> {
        let known = self.speeds.passing.borrow().get(cards).cloned();
        known.unwrap_or_else(|| {
            let relays = Rc::new(Relays::new(self.cluster, cards));
            self.speeds.passing.borrow_mut().insert(cards.to_vec(), Rc::clone(&relays));
            relays
        })
    }

    /// Whether frames break.
    pub(super) fn breaks(&self) -> bool {
        self.errors.is_some()
    }

    /// A wire: until when it and what it shares are busy, and its latency.
    pub(super) fn lane(&self, wire: usize) -> (f64, f64) {
        let wires = self.cluster.wires();
        let shared = wires[wire].shared.map_or(0.0, |shared| self.free[wires.len() + shared]);
        (shared.max(self.free[wire]), wires[wire].latency.0)
    }

    /// What bytes take on a wire that nothing breaks on.
    pub(super) fn lane_time(&self, wire: usize, bytes: f64) -> f64 {
        let wires = self.cluster.wires();
        let shared = wires[wire].shared.map(|shared| wires.len() + shared);
        let slower = shared.map_or(0.0, |shared| self.speeds.times[shared].time(bytes));
        self.speeds.times[wire].time(bytes).max(slower)
    }

    /// A wire and what it shares are busy until then.
    pub(super) fn occupy(&mut self, wire: usize, left: f64) {
        self.free[wire] = left;
        let wires = self.cluster.wires();
        if let Some(shared) = wires[wire].shared {
            self.free[wires.len() + shared] = left;
        }
    }

    /// Bytes over one wire, when it and what it shares are free: when they have left, and when they are there.
    pub(super) fn cross(&mut self, wire: usize, bytes: f64, ready: f64) -> (f64, f64) {
        let (busy, latency) = self.lane(wire);
        let late = self.errors.as_mut().map_or(0.0, |errors| errors.delay(bytes));
        let left = ready.max(busy) + self.lane_time(wire, bytes) + late;
        self.occupy(wire, left);
        (left, left + latency)
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
        if self.speeds.hub {
            return Some(self.through_hub(route, bytes, at));
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
