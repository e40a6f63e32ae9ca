// SPDX-License-Identifier: Apache-2.0
//! The inter-card link as the hardware defines it, and graphs of links.

use std::fmt;
use std::time::Duration;

use crate::BytesPerSecond;

/// Lanes of one inter-card link.
pub const INTERCARD_LANES: usize = 4;
/// Bits that a lane transfers at a time.
pub const INTERCARD_LANE_WIDTH: usize = 32;
/// Bits that all lanes transfer at a time.
pub const INTERCARD_BUS_WIDTH: usize = INTERCARD_LANES * INTERCARD_LANE_WIDTH;

/// The state of a link, in the hardware's two-bit encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkState {
    /// No signal.
    Down,
    /// The two ends are finding each other.
    Training,
    /// Carries data.
    Up,
    /// Gave up. The hardware calls this state FAULT.
    Error,
}

impl LinkState {
    /// The hardware's encoding: DOWN 0, TRAINING 1, UP 2, FAULT 3.
    ///
    /// ```
    /// use spanker_topology::LinkState;
    /// assert_eq!(LinkState::Error.bits(), 3);
    /// assert_eq!(LinkState::from_bits(2), Some(LinkState::Up));
    /// assert_eq!(LinkState::from_bits(4), None);
    /// ```
    #[must_use]
    pub const fn bits(self) -> u8 {
        match self {
            LinkState::Down => 0,
            LinkState::Training => 1,
            LinkState::Up => 2,
            LinkState::Error => 3,
        }
    }

    /// The state that `bits` encodes, if two bits can.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<LinkState> {
        match bits {
            0 => Some(LinkState::Down),
            1 => Some(LinkState::Training),
            2 => Some(LinkState::Up),
            3 => Some(LinkState::Error),
            _ => None,
        }
    }
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            LinkState::Down => "down",
            LinkState::Training => "training",
            LinkState::Up => "up",
            LinkState::Error => "error",
        })
    }
}

/// A directed link from one card to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Link {
    /// The card that sends.
    pub local_sail: usize,
    /// The card that receives.
    pub remote_sail: usize,
    /// Whether it carries data.
    pub state: LinkState,
    /// What it sustains, where that is known.
    pub bandwidth: Option<BytesPerSecond>,
    /// The time of a small message, where that is known.
    pub latency: Option<Duration>,
}

impl Link {
    /// A link of which nothing but the state is known.
    #[must_use]
    pub const fn new(local_sail: usize, remote_sail: usize, state: LinkState) -> Self {
        Link { local_sail, remote_sail, state, bandwidth: None, latency: None }
    }
}

/// Every card linked to every other, all links up: n(n - 1) directed links.
#[must_use]
pub fn mesh(cards: usize) -> Vec<Link> {
    (0..cards)
        .flat_map(|local| {
            (0..cards)
                .filter(move |&remote| remote != local)
                .map(move |remote| Link::new(local, remote, LinkState::Up))
        })
        .collect()
}

/// The link from one card to another, if there is one.
#[must_use]
pub fn find(links: &[Link], local: usize, remote: usize) -> Option<&Link> {
    links.iter().find(|link| link.local_sail == local && link.remote_sail == remote)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_states_keep_their_bits_both_ways() {
        for bits in 0..=255 {
            match LinkState::from_bits(bits) {
                Some(state) => assert_eq!(state.bits(), bits),
                None => assert!(bits > 3),
            }
        }
    }

    #[test]
    fn mesh_links_each_ordered_pair_exactly_once() {
        for cards in 0..6 {
            let links = mesh(cards);
            assert_eq!(links.len(), cards * cards.saturating_sub(1));
            for local in 0..cards {
                for remote in 0..cards {
                    let found = links
                        .iter()
                        .filter(|l| (l.local_sail, l.remote_sail) == (local, remote))
                        .count();
                    assert_eq!(found, usize::from(local != remote));
                }
            }
        }
    }
}
