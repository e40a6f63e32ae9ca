// SPDX-License-Identifier: Apache-2.0
//! Routes of least latency between all pairs of cards.

use crate::cluster::Wire;

/// The wires of the route from each card to each other, laid end to end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Routes {
    cards: usize,
    /// Where the route of a pair begins in `wires`; one entry more than pairs.
    begins: Vec<u32>,
    wires: Vec<u32>,
}

impl Routes {
    /// Finds all routes. `wires` may lead through one hub, the node after the last card. Of routes with
    /// equal latency the one with fewer wires wins, then one by its last wire's place in the list, so that
    /// routes are the same on every run.
    pub(crate) fn new(cards: usize, wires: &[Wire]) -> Routes {
        let mut leaving = vec![Vec::new(); cards + 1];
        for (index, wire) in wires.iter().enumerate() {
            leaving[wire.from].push(index);
        }
        let mut routes = Routes { cards, begins: vec![0], wires: Vec::new() };
        for from in 0..cards {
            let arrived_by = search(cards, wires, &leaving, from);
            for to in 0..cards {
                let first = routes.wires.len();
                let mut node = to;
                while node != from {
                    let Some(wire) = arrived_by[node] else { break };
                    routes.wires.push(wire as u32);
                    node = wires[wire].from;
                }
                routes.wires[first..].reverse();
                routes.begins.push(routes.wires.len() as u32);
            }
        }
        routes
    }

    pub(crate) fn path(&self, from: usize, to: usize) -> &[u32] {
        let pair = from * self.cards + to;
        &self.wires[self.begins[pair] as usize..self.begins[pair + 1] as usize]
    }
}

/// Dijkstra's search from one card; says by which wire each node is reached.
fn search(cards: usize, wires: &[Wire], leaving: &[Vec<usize>], from: usize) -> Vec<Option<usize>> {
    let mut arrived_by = vec![None; cards + 1];
    let mut distance = vec![(f64::INFINITY, usize::MAX); cards + 1];
    let mut done = vec![false; cards + 1];
    distance[from] = (0.0, 0);
    loop {
        let open = (0..=cards).filter(|&node| !done[node] && distance[node].1 != usize::MAX);
        let nearest = open.min_by(|&a, &b| distance[a].partial_cmp(&distance[b]).expect("no NaN"));
        let Some(node) = nearest else { return arrived_by };
        done[node] = true;
        for &index in &leaving[node] {
            let wire = &wires[index];
            let there = (distance[node].0 + wire.latency.0, distance[node].1 + 1);
            // Shapes list both directions of a link in turn, so of two ways round a ring the same one wins
            // from every card.
            let tie = there == distance[wire.to];
            let first = arrived_by[wire.to].is_some_and(|other: usize| index % 2 < other % 2);
            if there < distance[wire.to] || tie && first {
                distance[wire.to] = there;
                arrived_by[wire.to] = Some(index);
            }
        }
    }
}
