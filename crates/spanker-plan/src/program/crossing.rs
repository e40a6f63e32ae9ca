// SPDX-License-Identifier: Apache-2.0
//! The order in which the cards of a group go through a schedule whose messages other cards may have to pass on.
//!
//! A message is cut into segments and every segment takes one or more hops; each such crossing of a link is one
//! send on one card and one receive on the next. [`walk`] puts all crossings into one order: by level, then by
//! hop, then by message, then by segment. Each card does its part of that order and nothing else decides it.
//! Programs for cards are written by going through it, and the simulator prices a collective by going through
//! it, so a relay sends a segment on where its program says so in both.
//!
//! Not here: bytes, ports, clocks. Whoever walks knows them.

use spanker_collective::{Levels, Message, Rank};

use super::wiring::Routes;

/// The least bytes that a relayed message is cut into.
const SEGMENT: u64 = 8 << 10;
/// The most segments of a relayed message.
const SEGMENTS: u64 = 64;
/// What segments begin at a multiple of; every element's size divides it.
pub const SEGMENT_ALIGNMENT: u64 = 64;

/// What a relayed message of so many bytes is cut into, so that its hops overlap: the bytes of a segment, and how
/// many there are. The last one may be shorter.
///
/// ```
/// use spanker_plan::segments;
/// assert_eq!(segments(100), (100, 1));
/// assert_eq!(segments(20_000), (8192, 3));
/// assert_eq!(segments(1 << 20), (16_384, 64));
/// ```
#[must_use]
pub fn segments(bytes: u64) -> (u64, usize) {
    if bytes <= SEGMENT {
        return (bytes, 1);
    }
    let size = bytes.div_ceil(SEGMENTS).next_multiple_of(SEGMENT_ALIGNMENT).max(SEGMENT);
    (size, bytes.div_ceil(size) as usize)
}

/// One entry of the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'l> {
    /// A level begins; crossings name its messages by their place.
    Level {
        /// The messages.
        messages: &'l [Message],
    },
    /// A segment of a message goes over one link: a send on the card at the link's beginning, a receive on the
    /// card at its end. From the second hop on the send waits for the receive of the hop before.
    Cross {
        /// The message, by its place in the level.
        message: usize,
        /// The link, by its place on the message's route.
        hop: usize,
        /// The segment, from 0.
        segment: usize,
    },
    /// A card waits until all of its sends and receives have ended.
    Fence {
        /// The card's rank.
        rank: Rank,
    },
    /// The copies and folds after the messages of a step.
    Locals {
        /// The card's rank.
        rank: Rank,
        /// The step.
        step: usize,
    },
}

/// One entry of the order where the segments of a message that cross a link one after the other are one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stride<'l> {
    /// Segments of a message cross a link, from the first to the last.
    Segments { message: usize, hop: usize, count: usize },
    /// Anything else.
    Other(Action<'l>),
}

/// Goes through a schedule in the order in which cards do. `segments` says how many segments a relayed message
/// has; messages between neighbours are not cut.
///
/// Ranks on a route that are not in the schedule pass messages on and do nothing else.
pub fn walk<'l>(
    levels: &'l Levels,
    routes: &Routes,
    segments: impl FnMut(&Message) -> usize,
    mut visit: impl FnMut(Action<'l>),
) {
    stride(levels, routes, segments, |stride| match stride {
        Stride::Other(action) => visit(action),
        Stride::Segments { message, hop, count } => {
            (0..count).for_each(|segment| visit(Action::Cross { message, hop, segment }));
        }
    });
}

/// The same in longer strides.
pub(crate) fn stride<'l>(
    levels: &'l Levels,
    routes: &Routes,
    mut segments: impl FnMut(&Message) -> usize,
    mut take: impl FnMut(Stride<'l>),
) {
    let mut ranks = Ranks::new(levels, routes);
    ranks.finish_steps(0, &mut |action| take(Stride::Other(action)));
    for (before, messages) in levels.messages.iter().enumerate() {
        take(Stride::Other(Action::Level { messages }));
        let travels: Vec<(&[Rank], usize)> = messages
            .iter()
            .map(|message| {
                let route = routes.of(message.from, message.to);
                (route, if route.len() > 2 { segments(message) } else { 1 })
            })
            .collect();
        let longest = travels.iter().map(|(route, _)| route.len() - 1).max().unwrap_or(0);
        for hop in 0..longest {
            for (message, &(route, count)) in travels.iter().enumerate() {
                let Some(&[here, there]) = route.get(hop..hop + 2) else { continue };
                ranks.crossed(here, there, hop);
                take(Stride::Segments { message, hop, count });
            }
        }
        // The memory for what is passed on is used again in the next level.
        let mut visit = |action| take(Stride::Other(action));
        ranks.fence_relays(&mut visit);
        ranks.finish_steps(before + 1, &mut visit);
    }
}

/// What has to be known of each rank on the way through an order.
struct Ranks<'l> {
    ends: &'l [Vec<usize>],
    /// For each rank, the first step that is not complete.
    steps: Vec<usize>,
    /// Whether there were crossings since the last fence.
    open: Vec<bool>,
    /// Whether it has passed something on in this level.
    relays: Vec<bool>,
}

impl<'l> Ranks<'l> {
    fn new(levels: &'l Levels, routes: &Routes) -> Ranks<'l> {
        let count = routes.ranks();
        let (steps, open) = (vec![0; levels.ends.len()], vec![false; count]);
        Ranks { ends: &levels.ends, steps, open, relays: vec![false; count] }
    }

    fn crossed(&mut self, here: Rank, there: Rank, hop: usize) {
        self.open[here] = true;
        self.open[there] = true;
        self.relays[here] |= hop > 0;
    }

    fn fence(&mut self, rank: Rank, visit: &mut impl FnMut(Action<'l>)) {
        if std::mem::take(&mut self.open[rank]) {
            visit(Action::Fence { rank });
        }
    }

    fn fence_relays(&mut self, visit: &mut impl FnMut(Action<'l>)) {
        for rank in 0..self.relays.len() {
            if std::mem::take(&mut self.relays[rank]) {
                self.fence(rank, visit);
            }
        }
    }

    /// What follows the messages of every step that ends at this level: a fence, local work.
    fn finish_steps(&mut self, level: usize, visit: &mut impl FnMut(Action<'l>)) {
        for rank in 0..self.steps.len() {
            while self.ends[rank].get(self.steps[rank]) == Some(&level) {
                let step = self.steps[rank];
                self.steps[rank] += 1;
                self.fence(rank, visit);
                visit(Action::Locals { rank, step });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use spanker_collective::{Algorithm, Collective, levels, schedule};

    use super::*;
    use crate::program::Wiring;

    fn line(ranks: usize) -> Routes {
        let links: Vec<_> = (1..ranks).map(|rank| (rank - 1, 1, rank, 0)).collect();
        Wiring::from_links(ranks, &links).unwrap().routes()
    }

    #[test]
    fn order_of_a_line_has_every_hop_after_the_one_before_and_a_fence_behind_every_relay() {
        let routes = line(5);
        for algorithm in [Algorithm::RecursiveDoubling, Algorithm::TwoShot, Algorithm::Tree] {
            let schedule = schedule(Collective::AllReduce, algorithm, 5, 100).unwrap();
            let levels = levels(&schedule).unwrap();
            let (mut level, mut crossings): (&[Message], Vec<(usize, usize, usize)>) =
                (&[], Vec::new());
            let mut unfenced = [false; 5];
            let mut steps = [0; 5];
            walk(
                &levels,
                &routes,
                |_| 3,
                |action| match action {
                    Action::Level { messages } => {
                        assert_eq!(
                            unfenced, [false; 5],
                            "{algorithm}: relayed in the level before"
                        );
                        (level, crossings) = (messages, Vec::new());
                    }
                    Action::Cross { message, hop, segment } => {
                        let before = (message, hop.wrapping_sub(1), segment);
                        assert!(hop == 0 || crossings.contains(&before), "{algorithm}: {before:?}");
                        crossings.push((message, hop, segment));
                        let route = routes.of(level[message].from, level[message].to);
                        assert!(segment < if route.len() > 2 { 3 } else { 1 });
                        unfenced[route[hop]] |= hop > 0;
                    }
                    Action::Fence { rank } => unfenced[rank] = false,
                    Action::Locals { rank, step } => {
                        assert_eq!(steps[rank], step);
                        steps[rank] += 1;
                    }
                },
            );
            let whole: Vec<usize> = (0..5).map(|rank| schedule.program(rank).len()).collect();
            assert_eq!(steps.to_vec(), whole, "{algorithm}");
        }
    }
}
