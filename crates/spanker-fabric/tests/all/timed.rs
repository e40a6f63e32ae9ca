// SPDX-License-Identifier: Apache-2.0
//! What lowered programs take on the wires of a ring, against the planner's price.

use std::collections::HashMap;

use spanker_collective::{Algorithm, Collective, DType, ReduceOp, schedule};
use spanker_fabric::device::{Lowered, RELAY, lower};
use spanker_plan::{Wiring, collective_time};
use spanker_runtime::{Descriptor, Work};
use spanker_topology::{BytesPerSecond, Cluster, Profile, Seconds, Shape};

/// When a card sends on what it has received for others.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Relays {
    /// Where its program says so, as the ABI has it.
    InOrder,
    /// When it comes, whatever the card's program is at. No card does that: it is the fault that the comparison
    /// is for.
    AsSegmentsCome,
}

/// Whether a descriptor passes something on.
fn passes_on(descriptor: &Descriptor) -> bool {
    match descriptor.work {
        Work::Send { from: place, .. } | Work::Receive { into: place, .. } => place.buffer == RELAY,
        _ => false,
    }
}

/// A card on its way through its program; all times in seconds.
#[derive(Debug, Default, Clone)]
struct Card {
    next: usize,
    /// When the descriptors from the last fence on were started.
    issued: f64,
    lanes_free: f64,
    done: Vec<Option<f64>>,
    /// Sends that were started and have not left, with their start.
    sends: Vec<(usize, f64)>,
}

impl Card {
    /// Starts everything that passes something on, whatever comes before it.
    fn issue_relays(&mut self, program: &[Descriptor], arrived: &mut HashMap<u32, Arrival>) {
        for (at, descriptor) in program.iter().enumerate().filter(|(_, one)| passes_on(one)) {
            self.done[at] = Some(0.0);
            match descriptor.work {
                Work::Receive { tag, .. } => arrived.entry(tag).or_default().awaited = Some(0.0),
                _ => self.sends.push((at, 0.0)),
            }
        }
    }

    /// Starts descriptors up to the next one that waits. `arrived` is by tag.
    fn issue(&mut self, program: &[Descriptor], arrived: &mut HashMap<u32, Arrival>) {
        while let Some(descriptor) = program.get(self.next) {
            match descriptor.work {
                // It was started on its own.
                _ if self.done[self.next].is_some() => {}
                Work::Send { .. } => self.sends.push((self.next, self.issued)),
                Work::Receive { tag, .. } => {
                    arrived.entry(tag).or_default().awaited = Some(self.issued);
                }
                _ => {
                    let ends = (0..self.next).map(|at| match program[at].work {
                        Work::Receive { tag, .. } if self.done[at].is_none() => arrived[&tag].end(),
                        _ => self.done[at],
                    });
                    let Some(ends) = ends.collect::<Option<Vec<f64>>>() else { return };
                    self.issued = ends.into_iter().fold(self.issued, f64::max);
                    self.done[self.next] = Some(self.issued);
                }
            }
            self.next += 1;
        }
    }

    /// The send that goes next, and when.
    fn first_send(
        &self,
        program: &[Descriptor],
        arrived: &HashMap<u32, Arrival>,
        relays: Relays,
    ) -> Option<(f64, usize)> {
        let ready = |&(at, issued): &(usize, f64)| {
            let before = program[at].after.map(|after| match program[after as usize].work {
                Work::Receive { tag, .. } => arrived.get(&tag).and_then(Arrival::end),
                _ => self.done[after as usize],
            });
            let before = before.unwrap_or(Some(0.0))?;
            Some((before.max(issued).max(self.lanes_free), at))
        };
        match relays {
            Relays::InOrder => self.sends.first().and_then(ready),
            Relays::AsSegmentsCome => {
                self.sends.iter().filter_map(ready).min_by(|a, b| a.0.total_cmp(&b.0))
            }
        }
    }
}

/// When a message came, and when its receive was started.
#[derive(Debug, Default, Clone, Copy)]
struct Arrival {
    came: Option<f64>,
    awaited: Option<f64>,
}

impl Arrival {
    fn end(&self) -> Option<f64> {
        Some(self.came?.max(self.awaited?))
    }
}

/// When the last card is done, if links take `latency` and cards send on their lanes one message at a time.
fn makespan(lowered: &Lowered, rate: f64, latency: f64, relays: Relays) -> f64 {
    let programs: Vec<&[Descriptor]> =
        (0..lowered.ranks()).map(|rank| lowered.program(rank)).collect();
    let mut cards: Vec<Card> = programs
        .iter()
        .map(|program| Card { done: vec![None; program.len()], ..Card::default() })
        .collect();
    let mut arrived: HashMap<u32, Arrival> = HashMap::new();
    if relays == Relays::AsSegmentsCome {
        for (card, program) in cards.iter_mut().zip(&programs) {
            card.issue_relays(program, &mut arrived);
        }
    }
    loop {
        for (card, program) in cards.iter_mut().zip(&programs) {
            card.issue(program, &mut arrived);
        }
        let sends =
            cards.iter().zip(&programs).enumerate().filter_map(|(rank, (card, program))| {
                let (start, at) = card.first_send(program, &arrived, relays)?;
                Some((start, rank, at))
            });
        let Some((start, rank, at)) = sends.min_by(|a, b| a.0.total_cmp(&b.0)) else {
            let complete = cards.iter().zip(&programs).all(|(card, all)| card.next == all.len());
            assert!(complete, "no card goes on");
            return cards.iter().map(|card| card.issued).fold(0.0, f64::max);
        };
        let Work::Send { length, tag, .. } = programs[rank][at].work else {
            unreachable!("only sends are listed");
        };
        let left = start + length as f64 / rate;
        let card = &mut cards[rank];
        card.lanes_free = left;
        card.done[at] = Some(left);
        card.sends.retain(|&(index, _)| index != at);
        arrived.entry(tag).or_default().came = Some(left + latency);
    }
}

/// Cards of which only the links take time.
fn links_alone() -> Profile {
    let mut profile = Profile::builtin("rev-a").unwrap();
    profile.memory.bandwidth.value = BytesPerSecond(u64::MAX);
    profile.compute.per_operator.value = Seconds::ZERO;
    let link = profile.link.as_mut().unwrap();
    link.bandwidth.value = link.sustained(link.lanes.value);
    link.framing = None;
    profile
}

/// For collectives on rings: the case, whether cards relay, and the time of the programs over the planner's.
fn ratios(relays: Relays) -> Vec<(String, bool, f64)> {
    let wanted = [Collective::AllReduce, Collective::AllGather, Collective::Broadcast { root: 0 }];
    let mut ratios = Vec::new();
    for (ranks, collective) in [2usize, 3, 4, 5, 8].into_iter().flat_map(|n| wanted.map(|c| (n, c)))
    {
        let cluster = Cluster::uniform(links_alone(), ranks, Shape::Ring).unwrap();
        let cards: Vec<usize> = (0..ranks).collect();
        let around: Vec<_> = (0..ranks).map(|card| (card, 0, (card + 1) % ranks, 1)).collect();
        let wiring = Wiring::from_links(ranks, &around).unwrap();
        let wire = &cluster.wires()[0];
        for algorithm in Algorithm::ALL {
            for elements in [240usize, 15_360, 245_760] {
                let schedule = schedule(collective, algorithm, ranks, elements).unwrap();
                let lowered = lower(&schedule, &wiring, DType::F32, ReduceOp::Sum).unwrap();
                let base = cluster.base(&cards).0;
                let rate = wire.bandwidth.0 as f64;
                let took = base + makespan(&lowered, rate, wire.latency.0, relays);
                let bytes = elements as u64 * 4;
                let time = collective_time(&cluster, collective, algorithm, &cards, bytes).0;
                let relayed = cards.iter().any(|&rank| lowered.relay_bytes(rank) > 0);
                let case = format!("{collective} {algorithm} {ranks} x {elements}");
                ratios.push((case, relayed, took / time));
            }
        }
    }
    ratios
}

#[test]
fn programs_on_a_ring_take_what_the_planner_predicts_also_where_cards_relay() {
    let ratios = ratios(Relays::InOrder);
    for (case, _, ratio) in &ratios {
        assert!((ratio - 1.0).abs() < 1e-3, "{case}: {ratio}");
    }
    let relayed = ratios.iter().filter(|(_, relayed, _)| *relayed).count();
    assert!(relayed > 50 && ratios.len() - relayed > 50, "{relayed} of {}", ratios.len());
}

#[test]
fn relays_that_send_segments_on_as_they_come_do_not_take_what_the_planner_predicts() {
    let ratios = ratios(Relays::AsSegmentsCome);
    let far = ratios.iter().filter(|(_, relayed, ratio)| *relayed && (ratio - 1.0).abs() > 0.05);
    for (case, _, ratio) in far.clone() {
        println!("{case}: {ratio:.3}");
    }
    assert!(far.count() > 10);
}
