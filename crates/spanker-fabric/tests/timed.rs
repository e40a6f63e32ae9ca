// SPDX-License-Identifier: Apache-2.0
//! What lowered programs take on the wires of a ring, against the planner's price.

use std::collections::{HashMap, VecDeque};

use spanker_collective::{Collective, DType, ReduceOp, schedule};
use spanker_fabric::device::{Lowered, lower};
use spanker_plan::Wiring;
use spanker_plan::prices;
use spanker_runtime::Work;
use spanker_topology::{BytesPerSecond, Cluster, Profile, Seconds, Shape};

/// A card on its way through its program; all times in seconds.
#[derive(Debug, Default, Clone)]
struct Card {
    next: usize,
    /// When the descriptors from the last fence on were started.
    issued: f64,
    lanes_free: f64,
    done: Vec<Option<f64>>,
}

/// When the last card is done, if links take `latency` and cards send on their lanes one message at a time.
fn makespan(lowered: &Lowered, wiring: &Wiring, rate: f64, latency: f64) -> f64 {
    let ranks = lowered.ranks();
    let mut cards: Vec<Card> = (0..ranks)
        .map(|rank| Card { done: vec![None; lowered.program(rank).len()], ..Card::default() })
        .collect();
    // When messages arrive, and where they are waited for, by receiver and port.
    let mut arrived: HashMap<(usize, u32), VecDeque<f64>> = HashMap::new();
    let mut waiting: HashMap<(usize, u32), VecDeque<(usize, f64)>> = HashMap::new();
    let peer = |rank: usize, port: u32| {
        let there = (0..ranks).find(|&to| wiring.port(rank, to) == Some(port)).expect("a peer");
        (there, wiring.port(there, rank).expect("a link"))
    };
    loop {
        let before: usize = cards.iter().map(|card| card.next).sum();
        for (rank, card) in cards.iter_mut().enumerate() {
            while let Some(descriptor) = lowered.program(rank).get(card.next) {
                let (at, issued) = (card.next, card.issued);
                match descriptor.work {
                    Work::Send { length, port, .. } => {
                        let after = descriptor.after.map_or(Some(0.0), |a| card.done[a as usize]);
                        let Some(after) = after else { break };
                        let start = issued.max(after).max(card.lanes_free);
                        let sent = start + length as f64 / rate;
                        card.lanes_free = sent;
                        card.done[at] = Some(sent);
                        arrived.entry(peer(rank, port)).or_default().push_back(sent + latency);
                    }
                    Work::Receive { port, .. } => {
                        waiting.entry((rank, port)).or_default().push_back((at, issued));
                    }
                    _ => {
                        let all = card.done[..at].iter().copied();
                        let all = all.collect::<Option<Vec<f64>>>();
                        let Some(all) = all else { break };
                        card.issued = all.into_iter().fold(issued, f64::max);
                        card.done[at] = Some(card.issued);
                    }
                }
                card.next += 1;
            }
        }
        let mut met = false;
        for (&(rank, port), queue) in &mut waiting {
            let came = arrived.entry((rank, port)).or_default();
            while let (Some(&(at, issued)), Some(&time)) = (queue.front(), came.front()) {
                cards[rank].done[at] = Some(time.max(issued));
                queue.pop_front();
                came.pop_front();
                met = true;
            }
        }
        let complete = (0..ranks).all(|rank| cards[rank].next == lowered.program(rank).len());
        if complete {
            return cards.iter().map(|card| card.issued).fold(0.0, f64::max);
        }
        assert!(met || before < cards.iter().map(|card| card.next).sum(), "no card goes on");
    }
}

#[test]
fn programs_on_a_ring_take_what_the_planner_predicts_unless_cards_relay() {
    // Only the links take time here.
    let mut profile = Profile::builtin("rev-a").unwrap();
    profile.memory.bandwidth.value = BytesPerSecond(u64::MAX);
    profile.compute.per_operator.value = Seconds::ZERO;
    let link = profile.link.as_mut().unwrap();
    link.bandwidth.value = link.sustained(link.lanes.value);
    link.framing = None;
    let wanted = [Collective::AllReduce, Collective::AllGather, Collective::Broadcast { root: 0 }];
    let mut equal = 0;
    for (ranks, collective) in [2usize, 3, 4, 8].into_iter().flat_map(|n| wanted.map(|c| (n, c))) {
        let cluster = Cluster::uniform(profile.clone(), ranks, Shape::Ring).unwrap();
        let cards: Vec<usize> = (0..ranks).collect();
        let around = |card| (card, 0, (card + 1) % ranks, 1);
        let wiring =
            Wiring::from_links(ranks, &cards.iter().copied().map(around).collect::<Vec<_>>())
                .unwrap();
        let wire = &cluster.wires()[0];
        for price in prices(&cluster, collective, &cards) {
            for elements in [240usize, 15_360, 245_760] {
                let schedule = schedule(collective, price.algorithm, ranks, elements).unwrap();
                let lowered = lower(&schedule, &wiring, DType::F32, ReduceOp::Sum).unwrap();
                let base = cluster.base(&cards).0;
                let took =
                    base + makespan(&lowered, &wiring, wire.bandwidth.0 as f64, wire.latency.0);
                let ratio = took / price.at(elements as f64 * 4.0).0;
                let case = format!("{collective} {} {ranks} x {elements}", price.algorithm);
                if cards.iter().all(|&rank| lowered.relay_bytes(rank) == 0) {
                    assert!((ratio - 1.0).abs() < 1e-3, "{case}: {ratio}");
                    equal += 1;
                } else {
                    // Lanes of a card are given out in the order of its program here and as segments come
                    // in the planner.
                    assert!((0.6..1.5).contains(&ratio), "{case}: {ratio}");
                }
            }
        }
    }
    assert!(equal > 50, "{equal}");
}
