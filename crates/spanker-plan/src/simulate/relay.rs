// SPDX-License-Identifier: Apache-2.0
//! Collectives whose messages cards pass on, in virtual time: the order of crossings that cards' programs are
//! written from, with a time for each.
//!
//! A card's lanes send one message after the other in the order of its program, and a relay's part of that order
//! holds what it passes on as well as its own messages. So the ends of all crossings follow from the cards'
//! clocks alone, and one pass over the order finds them, once every rank has come to the collective. Where
//! lanes of several cards cross one shared resource, that resource too serves messages in this order.

use std::rc::Rc;

use spanker_collective::{Message, Rank};
use spanker_topology::Cluster;

use super::engine::{Engine, Item};
use super::flow::Flow;
use crate::program::{Action, Routes, Stride, Wiring, segments, stride};

/// Who passes on what in a group, and over which wires.
#[derive(Debug)]
pub(super) struct Relays {
    routes: Routes,
    /// The card of each rank, then cards outside the group that pass messages on.
    cards: Vec<usize>,
    /// The wire from each rank to each other, where there is one.
    wires: Vec<Option<usize>>,
    /// Whether there is a route between any two ranks.
    joined: bool,
    /// Whether there is a wire for every hop of every route.
    wired: bool,
}

impl Relays {
    /// Cards of a group pass messages on; only where these do not connect it, others do, too.
    pub(super) fn new(cluster: &Cluster, group: &[usize]) -> Relays {
        let mut cards = group.to_vec();
        let mut joined = true;
        let routes = Wiring::of(cluster, group).map(|wiring| wiring.routes());
        let routes = routes.unwrap_or_else(|_| {
            Routes::new(group.len(), |from, to| {
                let wires = cluster.route(group[from], group[to]);
                joined &= from == to || !wires.is_empty();
                let stops = wires.iter().map(|&wire| cluster.wires()[wire as usize].to);
                let stops = stops.map(|card| match cards.iter().position(|&known| known == card) {
                    Some(rank) => rank,
                    None => {
                        cards.push(card);
                        cards.len() - 1
                    }
                });
                std::iter::once(from).chain(stops).collect()
            })
        });
        let mut wires: Vec<Option<usize>> = vec![None; cards.len() * cards.len()];
        let rank = |card: usize| cards.iter().position(|&known| known == card);
        for (index, wire) in cluster.wires().iter().enumerate() {
            let (Some(from), Some(to)) = (rank(wire.from), rank(wire.to)) else { continue };
            // Of several wires the fastest is used.
            let best = &mut wires[from * cards.len() + to];
            if best.is_none_or(|best: usize| cluster.wires()[best].bandwidth <= wire.bandwidth) {
                *best = Some(index);
            }
        }
        let ranks = group.len();
        let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let hops = pairs.flat_map(|(from, to)| routes.of(from, to).windows(2));
        let wired = hops.map(|hop| hop[0] * cards.len() + hop[1]).all(|hop| wires[hop].is_some());
        Relays { routes, cards, wires, joined, wired }
    }
}

/// Which collectives are relayed in which groups.
#[derive(Debug)]
pub(super) struct Relaying {
    groups: usize,
    /// By flow and group, once it is known.
    known: Vec<Option<Option<Rc<Relays>>>>,
    /// Ranks of each group that have come to their collective and wait.
    present: Vec<usize>,
}

impl Relaying {
    pub(super) fn new(flows: usize, groups: usize) -> Relaying {
        Relaying { groups, known: vec![None; flows * groups], present: vec![0; groups] }
    }
}

/// A message of the level at hand.
#[derive(Debug, Clone, Copy)]
struct Travel<'a> {
    message: &'a Message,
    bytes: f64,
    segment: f64,
    /// Where the times of its segments begin in `received`.
    first: usize,
}

/// One collective on its way.
struct Passage<'e, 'a> {
    engine: &'e mut Engine<'a>,
    relays: &'e Relays,
    flow: &'a Flow,
    bytes: f64,
    members: usize,
    /// Whether nothing can go wrong.
    calm: bool,
    travels: Vec<Travel<'a>>,
    /// For each segment of a level's messages, when it came to where it is.
    received: Vec<f64>,
    /// Ranks that wait for something that never comes.
    stuck: Vec<bool>,
}

impl<'a> Engine<'a> {
    /// Who passes messages of a collective on, if anybody does.
    pub(super) fn relays(&mut self, flow: u32, group: u32) -> Option<Rc<Relays>> {
        if !self.network.cards_relay() {
            return None;
        }
        let at = flow as usize * self.relaying.groups + group as usize;
        if let Some(known) = &self.relaying.known[at] {
            return known.clone();
        }
        let cards = &self.groups[group as usize];
        let mut messages = self.flows[flow as usize].messages(1.0);
        let any = messages.any(|(from, to, _)| self.network.relayed(cards[from], cards[to]));
        let found = any.then(|| self.network.relays(cards));
        self.relaying.known[at] = Some(found.clone());
        found
    }

    /// A card has come to a collective that is relayed. When it was the last of its group, all go on.
    pub(super) fn join(&mut self, card: usize, group: u32, relays: &Relays) {
        let state = &mut self.cards[card];
        state.begun.get_or_insert(state.clock);
        state.issued = true;
        let present = &mut self.relaying.present[group as usize];
        *present += 1;
        let groups = self.groups;
        let members = &groups[group as usize];
        if *present < members.len() {
            return;
        }
        *present = 0;
        let Some(Item::Collective { flow, bytes, .. }) = self.item(card) else { return };
        let stuck = self.pass(relays, flow, bytes, members.len());
        for (&card, _) in members.iter().zip(stuck).filter(|(_, stuck)| !stuck) {
            let death = self.dies_at(card);
            if self.cards[card].clock >= death {
                self.cards[card].clock = death;
                self.cards[card].dead = true;
                continue;
            }
            let Some(Item::Collective { flow, group, bytes, label, op, .. }) = self.item(card)
            else {
                continue;
            };
            self.cards[card].issued = false;
            self.collective_done(card, (flow, group), bytes, (label, op));
            self.wake(card);
        }
    }

    /// Moves the clocks of all ranks over a collective. Says which of them got stuck in it.
    fn pass(&mut self, relays: &Relays, flow: u32, bytes: f64, members: usize) -> Vec<bool> {
        if !relays.joined {
            return vec![true; members];
        }
        let flow = &self.flows[flow as usize];
        let (travels, received) = (Vec::new(), Vec::new());
        let stuck = vec![false; relays.cards.len()];
        let disturbance = &self.disturbance;
        let safe = disturbance.death.is_empty() && disturbance.cut.is_empty();
        let calm = safe && relays.wired && !self.network.breaks();
        let mut passage =
            Passage { engine: self, relays, flow, bytes, members, calm, travels, received, stuck };
        let count = |message: &Message| cut(bytes * flow.fraction(message)).1;
        stride(flow.levels(), &relays.routes, count, |stride| passage.take(stride));
        passage.stuck.truncate(members);
        passage.stuck
    }
}

/// What a message that is passed on is cut into: the bytes of a segment, and how many there are.
fn cut(bytes: f64) -> (f64, usize) {
    let (size, count) = segments(bytes.round() as u64);
    (if count == 1 { bytes } else { size as f64 }, count)
}

impl<'a> Passage<'_, 'a> {
    fn take(&mut self, stride: Stride<'a>) {
        match stride {
            Stride::Segments { message, hop, count } if self.calm => {
                self.cross_calmly(message, hop, count);
            }
            Stride::Segments { message, hop, count } => {
                (0..count).for_each(|segment| self.cross(message, hop, segment));
            }
            Stride::Other(Action::Level { messages }) => self.level(messages),
            Stride::Other(Action::Cross { message, hop, segment }) => {
                self.cross(message, hop, segment);
            }
            Stride::Other(Action::Fence { rank }) => self.fence(rank),
            Stride::Other(Action::Locals { rank, step }) => {
                if !self.stuck[rank] {
                    let card = self.relays.cards[rank];
                    self.engine.locals(card, &self.flow.program(rank)[step], self.bytes);
                }
            }
        }
    }

    fn level(&mut self, messages: &'a [Message]) {
        self.travels.clear();
        let mut first = 0;
        for message in messages {
            let bytes = self.bytes * self.flow.fraction(message);
            let relayed = self.relays.routes.of(message.from, message.to).len() > 2;
            let (segment, count) = if relayed { cut(bytes) } else { (bytes, 1) };
            self.travels.push(Travel { message, bytes, segment, first });
            first += count;
        }
        self.received.clear();
        self.received.resize(first, 0.0);
    }

    fn cross(&mut self, message: usize, hop: usize, segment: usize) {
        let Travel { message, bytes, segment: size, first } = self.travels[message];
        let route = self.relays.routes.of(message.from, message.to);
        let (here, there) = (route[hop], route[hop + 1]);
        let last = hop + 2 == route.len();
        let bytes = size.min(bytes - size * segment as f64).max(0.0);
        let came = self.received[first + segment];
        let (left, arrival) = self.transfer(here, there, bytes, came);
        self.engine.events += 1;
        if here < self.members {
            self.engine.touch(self.relays.cards[here], bytes, left);
        }
        let mut end = arrival;
        if there < self.members {
            let card = self.relays.cards[there];
            let times = if last && message.fold.is_some() { 2.0 } else { 1.0 };
            end = end.max(self.engine.cards[card].clock);
            self.engine.touch(card, times * bytes, end);
        }
        self.received[first + segment] = end;
    }

    /// The same for all segments of a message where nothing can go wrong: what they have in common is looked up
    /// once.
    fn cross_calmly(&mut self, message: usize, hop: usize, count: usize) {
        let Travel { message, bytes, segment: size, first } = self.travels[message];
        let route = self.relays.routes.of(message.from, message.to);
        let (here, there) = (route[hop], route[hop + 1]);
        let cards = &self.relays.cards;
        let Some(wire) = self.relays.wires[here * cards.len() + there] else { return };
        let twice = hop + 2 == route.len() && message.fold.is_some();
        let times = if twice { 2.0 } else { 1.0 };
        let Engine { network, cards: states, events, .. } = &mut *self.engine;
        let state = |rank: usize| match rank < self.members {
            true => {
                (states[cards[rank]].clock, states[cards[rank]].touched, states[cards[rank]].left)
            }
            false => (0.0, 0.0, 0.0),
        };
        let (issued, mut touched_here, mut left_here) = state(here);
        let (clock, mut touched_there, mut left_there) = state(there);
        let (mut busy, latency) = network.lane(wire);
        // All but the last are equally long.
        let mut carried = size;
        let mut time = if count > 1 { network.lane_time(wire, size) } else { 0.0 };
        for (segment, came) in self.received[first..first + count].iter_mut().enumerate() {
            if segment + 1 == count {
                carried = size.min(bytes - size * segment as f64).max(0.0);
                time = network.lane_time(wire, carried);
            }
            busy = came.max(issued).max(busy) + time;
            let end = (busy + latency).max(clock);
            *came = end;
            touched_here += carried;
            left_here = left_here.max(busy);
            touched_there += times * carried;
            left_there = left_there.max(end);
        }
        network.occupy(wire, busy);
        *events += count as u64;
        for (rank, touched, left) in
            [(here, touched_here, left_here), (there, touched_there, left_there)]
        {
            if rank < self.members {
                let state = &mut states[cards[rank]];
                (state.touched, state.left) = (touched, left);
            }
        }
    }

    /// When bytes that came at `came` have left a card, and when they are at the next one.
    fn transfer(&mut self, here: Rank, there: Rank, bytes: f64, came: f64) -> (f64, f64) {
        let never = (f64::INFINITY, f64::INFINITY);
        let card = self.relays.cards[here];
        let issued = if here < self.members { self.engine.cards[card].clock } else { 0.0 };
        let ready = came.max(issued);
        let death = self.engine.dies_at(card);
        if self.stuck[here] || ready >= death {
            return never;
        }
        let Some(wire) = self.relays.wires[here * self.relays.cards.len() + there] else {
            return never;
        };
        let (left, arrival) = self.engine.network.cross(wire, bytes, ready);
        if left >= death {
            return never;
        }
        let cut = self.engine.disturbance.cut.get(wire).is_some_and(|&cut| cut <= arrival);
        (left, if cut { f64::INFINITY } else { arrival })
    }

    fn fence(&mut self, rank: Rank) {
        if rank >= self.members || self.stuck[rank] {
            return;
        }
        let card = self.relays.cards[rank];
        if self.engine.cards[card].left.is_finite() {
            self.engine.catch_up(card);
        } else {
            self.engine.cards[card].left = 0.0;
            self.stuck[rank] = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use spanker_collective::{Algorithm, Collective};
    use spanker_topology::{Profile, Shape};

    use super::*;
    use crate::simulate::engine::{Disturbance, Ended, OUTSIDE};
    use crate::simulate::network::Speeds;
    use crate::trace::{Activity, Label};

    const CARDS: usize = 5;

    /// An all-reduce of so many bytes on a ring of five, with halves that go two hops.
    fn run(bytes: f64, starts: &[f64], disturbance: impl Fn(&Cluster) -> Disturbance) -> Ended {
        let card = Profile::builtin("rev-a").unwrap();
        let cluster = Cluster::uniform(card, CARDS, Shape::Ring).unwrap();
        let flow = Flow::new(Collective::AllReduce, Algorithm::RecursiveDoubling, CARDS);
        let label = Label { activity: Activity::Exchange, layer: 0, token: 0 };
        let item = |rank: usize| {
            let (rank, op) = (rank as u32, OUTSIDE);
            vec![Item::Collective { flow: 0, rank, group: 0, bytes, label, op }; 2]
        };
        let programs: Vec<Vec<Item>> = (0..CARDS).map(item).collect();
        let (speeds, groups) = (Speeds::of(&cluster), [(0..CARDS).collect::<Vec<usize>>()]);
        let flows = [Rc::new(flow)];
        let engine = Engine::new(&cluster, &speeds, &flows, &groups, &programs);
        engine.disturbed(disturbance(&cluster)).run(starts)
    }

    #[test]
    fn relayed_collectives_in_a_row_end_and_a_late_rank_makes_them_late() {
        let calm = run(65536.0, &[], |_| Disturbance::default());
        assert!(calm.complete && calm.clocks.iter().all(|clock| clock.is_finite()));
        let late = run(65536.0, &[0.0, 0.0, 1.0, 0.0, 0.0], |_| Disturbance::default());
        let end = |ended: &Ended| ended.clocks.iter().copied().fold(0.0, f64::max);
        assert!(late.complete && end(&late) > 1.0 + end(&calm) / 2.0, "{late:?}");
    }

    #[test]
    fn messages_that_nothing_can_happen_to_cross_as_their_segments_do_one_by_one() {
        let starts = [0.0, 2e-4, 0.0, 1e-5, 3e-3];
        for bytes in [0.0, 100.0, 65536.0, 1e6, 12_345_678.0] {
            // Deaths that never come are looked for all the same, segment by segment.
            let never = Disturbance { death: vec![f64::INFINITY; CARDS], ..Disturbance::default() };
            let one_by_one = run(bytes, &starts, |_| never.clone());
            assert_eq!(run(bytes, &starts, |_| Disturbance::default()), one_by_one, "{bytes}");
        }
    }

    #[test]
    fn relay_that_dies_leaves_its_group_stuck_with_clocks_that_are_times() {
        let whole = run(65536.0, &[], |_| Disturbance::default());
        let end = whole.clocks.iter().copied().fold(0.0, f64::max);
        for part in [0.0, 0.1, 0.5, 0.9] {
            for card in 0..CARDS {
                let death = |_: &Cluster| {
                    let mut death = vec![f64::INFINITY; CARDS];
                    death[card] = part * end;
                    Disturbance { death, ..Disturbance::default() }
                };
                let ended = run(65536.0, &[], death);
                // A card that is done by then has nothing left to stop.
                let stops = part * end < whole.clocks[card];
                assert_eq!(ended.complete, !stops, "card {card} at {part}");
                let most = ended.clocks.iter().copied().fold(0.0, f64::max);
                assert!(most <= end, "card {card} at {part}: {most} of {end}");
            }
        }
    }

    #[test]
    fn wire_that_is_cut_stops_what_is_passed_on_over_it() {
        let cut = |cluster: &Cluster| {
            let joins = |from: usize, to: usize| (from, to) == (1, 2) || (from, to) == (2, 1);
            let cut = |wire: &spanker_topology::Wire| match joins(wire.from, wire.to) {
                true => 0.0,
                false => f64::INFINITY,
            };
            let cut = cluster.wires().iter().map(cut).collect();
            Disturbance { cut, ..Disturbance::default() }
        };
        let ended = run(65536.0, &[], cut);
        assert!(!ended.complete && ended.clocks.iter().all(|clock| clock.is_finite()));
    }
}
