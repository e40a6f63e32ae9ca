// SPDX-License-Identifier: Apache-2.0
//! What a schedule takes on the cards' own memory. Prices of exchanges have the messages only: where a
//! schedule keeps contributions apart and folds them later, that comes on top, and where the memory is slower
//! than the links that it serves, what it lags behind.

use spanker_collective::{Local, Schedule, Step, Transfer};
use spanker_topology::{Cluster, Profile, Seconds};

/// The time that a schedule takes on the memory of these cards, which have their ranks in this order, on top
/// of the price of its messages.
///
/// The steps of the ranks go together, so every step takes what its slowest rank does: an operator's fixed
/// cost for each fold and copy, and the bytes that it touches at the speed of the card's memory. A fold of
/// `k` sources touches `k + 1` spans, a copy two. A send touches its span once, a receive once or, if it
/// folds, twice, while the messages are under way: only what that takes longer than the messages counts.
///
/// ```
/// use spanker_collective::{Algorithm, Collective, schedule};
/// use spanker_plan::local_work;
/// use spanker_topology::{Cluster, Profile, Shape};
/// let ring = Cluster::uniform(Profile::builtin("rev-a")?, 4, Shape::Ring)?;
/// let by = |algorithm| {
///     let steps = schedule(Collective::AllReduce, algorithm, 4, 1 << 18).unwrap();
///     local_work(&steps, 4, &ring, &[0, 1, 2, 3])
/// };
/// // A ring folds what comes in as it comes in.
/// assert_eq!(by(Algorithm::Ring).0, 0.0);
/// assert!(by(Algorithm::OneShot) > by(Algorithm::TwoShot));
/// # Ok::<(), spanker_topology::TopologyError>(())
/// ```
///
/// # Panics
/// If there are not as many cards as ranks, or a card is not in the cluster.
#[must_use]
pub fn local_work(
    schedule: &Schedule,
    bytes_per_element: usize,
    cluster: &Cluster,
    cards: &[usize],
) -> Seconds {
    assert_eq!(cards.len(), schedule.ranks(), "a card for each rank");
    let steps = (0..schedule.ranks()).map(|rank| schedule.program(rank).len()).max().unwrap_or(0);
    let step = |at: usize| {
        let on = |(rank, &card): (usize, &usize)| {
            let step = schedule.program(rank).get(at);
            let profile = cluster.profile(card);
            step.map_or(0.0, |step| {
                let lag = lag(step, bytes_per_element, cluster, cards, card);
                lag + of_step(step, bytes_per_element, profile)
            })
        };
        cards.iter().enumerate().map(on).fold(0.0, f64::max)
    };
    Seconds((0..steps).map(step).sum())
}

/// What the memory traffic of a step's messages takes longer than the messages themselves.
fn lag(step: &Step, element: usize, cluster: &Cluster, cards: &[usize], card: usize) -> f64 {
    let rate = cluster.profile(card).memory.bandwidth.value.0 as f64;
    let (mut touched, mut sending, mut receiving, mut latency) = (0.0, 0.0, 0.0, 0.0f64);
    for transfer in &step.transfers {
        let bytes = (transfer.span().len * element) as f64;
        let peer = cards[transfer.peer()];
        let (from, to, busy) = match transfer {
            Transfer::Send { .. } => (card, peer, &mut sending),
            Transfer::Recv { .. } => (peer, card, &mut receiving),
        };
        let folds = matches!(transfer, Transfer::Recv { fold: Some(_), .. });
        touched += if folds { 2.0 * bytes } else { bytes };
        latency = latency.max(cluster.latency(from, to).0);
        let wires = cluster.route(from, to).iter();
        let slowest = wires.map(|&wire| cluster.wires()[wire as usize].bandwidth.0).min();
        *busy += slowest.map_or(0.0, |slowest| bytes / slowest as f64);
    }
    (touched / rate - (latency + f64::max(sending, receiving))).max(0.0)
}

fn of_step(step: &Step, bytes_per_element: usize, profile: &Profile) -> f64 {
    let rate = profile.memory.bandwidth.value.0 as f64;
    let one = |local: &Local| {
        let (spans, elements) = match local {
            Local::Copy { into, .. } => (2, into.len),
            Local::Fold { sources, into } => (sources.len() + 1, into.len),
        };
        // Cards are not given work on nothing.
        if elements == 0 {
            return 0.0;
        }
        let bytes = (spans * elements * bytes_per_element) as f64;
        profile.compute.per_operator.value.0 + bytes / rate
    };
    step.locals.iter().map(one).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_collective::{Algorithm, Collective, schedule};
    use spanker_topology::{BytesPerSecond, Shape};

    fn profile() -> Profile {
        Profile::builtin("rev-a").unwrap()
    }

    fn work(algorithm: Algorithm, elements: usize, cluster: &Cluster) -> f64 {
        let cards: Vec<usize> = (0..cluster.cards()).collect();
        let steps = schedule(Collective::AllReduce, algorithm, cards.len(), elements).unwrap();
        local_work(&steps, 4, cluster, &cards).0
    }

    #[test]
    fn two_shot_folds_one_chunk_of_every_rank_and_the_ring_folds_nothing_later() {
        let ring = Cluster::uniform(profile(), 4, Shape::Ring).unwrap();
        let (rate, operator) =
            (profile().memory.bandwidth.value.0 as f64, profile().compute.per_operator.value.0);
        assert_eq!(work(Algorithm::Ring, 4096, &ring), 0.0);
        let expected = operator + 5.0 * 1024.0 * 4.0 / rate;
        let found = work(Algorithm::TwoShot, 4096, &ring);
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} against {expected}");
    }

    #[test]
    fn slowest_memory_of_a_group_decides() {
        let slow = profile().with_memory_bandwidth(BytesPerSecond(1_000_000_000), "a test");
        let even = Cluster::uniform(profile(), 4, Shape::Ring).unwrap();
        let cards = vec![profile(), slow.clone(), profile(), profile()];
        let mixed = Cluster::new(cards, Shape::Ring).unwrap();
        let all_slow = Cluster::uniform(slow, 4, Shape::Ring).unwrap();
        let [even, mixed, all_slow] =
            [even, mixed, all_slow].map(|cluster| work(Algorithm::OneShot, 1 << 20, &cluster));
        assert!(even < mixed);
        assert_eq!(mixed, all_slow);
    }

    #[test]
    fn memory_slower_than_the_links_lags_behind_them() {
        let slow = Profile::builtin("rev-a-x16").unwrap();
        let rate = slow.memory.bandwidth.value.0 as f64;
        let ring = Cluster::uniform(slow, 4, Shape::Ring).unwrap();
        // Three rounds that send, read and write a chunk, and three that send and write one.
        let chunk = (1 << 20) as f64;
        let message = 2e-6 + chunk / ring.wires()[0].bandwidth.0 as f64;
        let expected = 3.0 * (3.0 * chunk / rate - message) + 3.0 * (2.0 * chunk / rate - message);
        let found = work(Algorithm::Ring, 1 << 20, &ring);
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} against {expected}");
    }

    #[test]
    fn collective_without_elements_costs_nothing() {
        let ring = Cluster::uniform(profile(), 4, Shape::Ring).unwrap();
        assert_eq!(work(Algorithm::TwoShot, 0, &ring), 0.0);
    }
}
