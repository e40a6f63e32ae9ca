// SPDX-License-Identifier: Apache-2.0
//! Which port of which card leads to which other card of a group, and how messages get to cards that are
//! not neighbours. It does not choose an order of the cards: ranks are what the caller says.

use spanker_collective::Rank;
use spanker_topology::{Cluster, Shape};

/// The links between the cards of a group, and a route between any two of them.
///
/// ```
/// use spanker_plan::Wiring;
/// // A ring of four: port 0 of each card leads to port 1 of the next.
/// let ring = Wiring::from_links(4, &[(0, 0, 1, 1), (1, 0, 2, 1), (2, 0, 3, 1), (3, 0, 0, 1)])?;
/// assert_eq!(ring.port(3, 0), Some(0));
/// assert_eq!(ring.port(0, 2), None);
/// // Of two ways equally long the same one is taken from every card.
/// assert_eq!((ring.route(0, 2), ring.route(2, 0)), (vec![0, 1, 2], vec![2, 3, 0]));
/// # Ok::<(), spanker_plan::Apart>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wiring {
    /// The port of `[from][to]`, for neighbours.
    ports: Vec<Vec<Option<u32>>>,
    /// From which rank a message of `[from]` reaches `[to]`.
    arrives_from: Vec<Vec<Rank>>,
}

/// A link: a rank, its port, the rank at the other end and the port there.
pub type RankLink = (Rank, u32, Rank, u32);

/// Two ranks that nothing connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("nothing connects rank {from} with rank {to}")]
pub struct Apart {
    /// One of them.
    pub from: Rank,
    /// The other one.
    pub to: Rank,
}

impl Wiring {
    /// The wiring of a list of links. Of several links between two ranks the first is used.
    ///
    /// # Errors
    /// [`Apart`] names two ranks that nothing connects.
    ///
    /// # Panics
    /// If a link names a rank outside the group.
    pub fn from_links(ranks: usize, links: &[RankLink]) -> Result<Self, Apart> {
        let mut ports = vec![vec![None; ranks]; ranks];
        for &(here, port, there, back) in links {
            // Both directions of a pair use the same link.
            if here != there && ports[here][there].is_none() && ports[there][here].is_none() {
                ports[here][there] = Some(port);
                ports[there][here] = Some(back);
            }
        }
        let places = places(&ports);
        let mut arrives_from = Vec::with_capacity(ranks);
        for from in 0..ranks {
            let reached = search(&ports, &places, from);
            if let Some(to) = (0..ranks).find(|&to| reached[to].is_none()) {
                return Err(Apart { from, to });
            }
            arrives_from.push(reached.into_iter().flatten().collect());
        }
        Ok(Wiring { ports, arrives_from })
    }

    /// The wiring of cards of a cluster as a group of their own: only they pass messages on. Around a hub
    /// every card has a port to every other.
    ///
    /// # Errors
    /// [`Apart`] names two ranks that nothing connects without other cards.
    pub fn of(cluster: &Cluster, cards: &[usize]) -> Result<Self, Apart> {
        let hub = matches!(cluster.shape(), Shape::Star | Shape::Switch);
        let joined = |from: usize, to: usize| {
            hub || cluster.wires().iter().any(|wire| (wire.from, wire.to) == (from, to))
        };
        let mut links = Vec::new();
        for (here, &one) in cards.iter().enumerate() {
            for (there, &other) in cards.iter().enumerate().skip(here + 1) {
                if joined(one, other) {
                    links.push((here, there as u32, there, here as u32));
                }
            }
        }
        Wiring::from_links(cards.len(), &links)
    }

    /// Cards in the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ports.len()
    }

    /// The port of `from` that leads to `to`, if they are neighbours.
    ///
    /// # Panics
    /// If a rank is not in the group.
    #[must_use]
    pub fn port(&self, from: Rank, to: Rank) -> Option<u32> {
        self.ports[from][to]
    }

    /// The ranks between two others that pass their messages on, from the last to the first.
    pub(crate) fn between(&self, from: Rank, to: Rank) -> impl Iterator<Item = Rank> + '_ {
        let before = move |&rank: &Rank| Some(self.arrives_from[from][rank]);
        std::iter::successors(before(&to), before).take_while(move |&rank| rank != from)
    }

    /// The ranks that a message passes, both ends included: the fewest that do.
    ///
    /// # Panics
    /// If a rank is not in the group.
    #[must_use]
    pub fn route(&self, from: Rank, to: Rank) -> Vec<Rank> {
        let mut route = vec![to];
        while let Some(&last) = route.last().filter(|&&last| last != from) {
            route.push(self.arrives_from[from][last]);
        }
        route.reverse();
        route
    }

    /// The routes between any two ranks.
    #[must_use]
    pub fn routes(&self) -> Routes {
        Routes::new(self.ranks(), |from, to| self.route(from, to))
    }
}

/// The ranks on the way between any two of a group, laid end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    ends: usize,
    ranks: usize,
    /// Where the route of a pair begins in `stops`; one entry more than pairs.
    begins: Vec<usize>,
    stops: Vec<Rank>,
}

impl Routes {
    /// The routes between `ends` ranks, each from `route`; ranks beyond those only pass messages on.
    pub(crate) fn new(ends: usize, mut route: impl FnMut(Rank, Rank) -> Vec<Rank>) -> Routes {
        let mut routes = Routes { ends, ranks: ends, begins: vec![0], stops: Vec::new() };
        for from in 0..ends {
            for to in 0..ends {
                routes.stops.extend(route(from, to));
                routes.begins.push(routes.stops.len());
            }
        }
        routes.ranks = routes.stops.iter().fold(ends, |most, &rank| most.max(rank + 1));
        routes
    }

    /// Ranks of the group, and of those outside that pass messages on.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The ranks that a message passes, both ends included.
    ///
    /// # Panics
    /// If a rank is not in the group.
    #[must_use]
    pub fn of(&self, from: Rank, to: Rank) -> &[Rank] {
        assert!(to < self.ends, "rank {to} of {}", self.ends);
        let pair = from * self.ends + to;
        &self.stops[self.begins[pair]..self.begins[pair + 1]]
    }
}

/// The place of each rank on its way round, if the links form one ring; else its number.
fn places(ports: &[Vec<Option<u32>>]) -> Vec<usize> {
    let ranks = ports.len();
    let numbers: Vec<usize> = (0..ranks).collect();
    let neighbours = |rank: Rank| (0..ranks).filter(move |&other| ports[rank][other].is_some());
    if (0..ranks).any(|rank| neighbours(rank).count() != 2) {
        return numbers;
    }
    let mut places = vec![usize::MAX; ranks];
    let mut here = 0;
    for place in 0..ranks {
        places[here] = place;
        match neighbours(here).find(|&next| places[next] == usize::MAX) {
            Some(next) => here = next,
            None if place + 1 == ranks => return places,
            None => break,
        }
    }
    numbers
}

/// From which rank each rank is reached, by the fewest hops from `from`. Of equal routes the one that goes
/// up by places wins, so that on a ring all cards send the same way round and share the load.
fn search(ports: &[Vec<Option<u32>>], places: &[usize], from: Rank) -> Vec<Option<Rank>> {
    let ranks = ports.len();
    let mut best: Vec<Option<(usize, usize, Rank)>> = vec![None; ranks];
    best[from] = Some((0, 0, from));
    let mut layer = vec![from];
    let mut hops = 0;
    while !layer.is_empty() {
        hops += 1;
        let mut next = Vec::new();
        for &node in &layer {
            let turned = best[node].map_or(0, |(_, turned, _)| turned);
            for to in (0..ranks).filter(|&to| ports[node][to].is_some()) {
                let turn = (places[to] + ranks - places[node]) % ranks;
                let there = (hops, turned + turn, node);
                if best[to].is_none() {
                    next.push(to);
                }
                if best[to].is_none_or(|known| there < known) {
                    best[to] = Some(there);
                }
            }
        }
        layer = next;
    }
    best.into_iter().map(|known| known.map(|(_, _, node)| node)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_on_a_scrambled_ring_go_the_same_way_round_from_every_card() {
        let around = [0, 3, 1, 4, 2, 5];
        let links: Vec<RankLink> = (0..6).map(|i| (around[i], 0, around[(i + 1) % 6], 1)).collect();
        let wiring = Wiring::from_links(6, &links).unwrap();
        for i in 0..6 {
            let route = wiring.route(around[i], around[(i + 3) % 6]);
            let forward: Vec<Rank> = (0..4).map(|hop| around[(i + hop) % 6]).collect();
            assert_eq!(route, forward);
        }
    }

    #[test]
    fn two_links_between_the_same_cards_are_one_neighbour() {
        let wiring = Wiring::from_links(2, &[(0, 0, 1, 1), (1, 0, 0, 1)]).unwrap();
        assert_eq!((wiring.port(0, 1), wiring.port(1, 0)), (Some(0), Some(1)));
    }
}
