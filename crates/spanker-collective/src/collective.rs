// SPDX-License-Identifier: Apache-2.0
//! The collectives and the algorithms, by name.
//!
//! What each name means as a sequence of messages is in [`crate::schedule`].

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::{CollectiveError, Rank};

/// What a group of ranks does together.
///
/// Every rank has one buffer, `data`. For a collective of `len` elements over `n` ranks, chunk `i`
/// is [`chunk`]`(len, n, i)`: nearly equal, in rank order, the first ones longer by one when `len` is
/// not a multiple of `n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// Before: a contribution of `len` on each rank. After: the reduction of all, on each rank.
    AllReduce,
    /// Before: a contribution of `len` on each rank. After: rank `r` has the reduction of chunk `r`,
    /// in place.
    ReduceScatter,
    /// Before: rank `r` has chunk `r`, in place. After: each rank has all chunks.
    AllGather,
    /// Before: the root has `len`. After: each rank has it.
    Broadcast {
        /// The rank that has the data.
        root: Rank,
    },
    /// Before: a contribution of `len` on each rank. After: the reduction, on the root.
    Reduce {
        /// The rank that gets the result.
        root: Rank,
    },
    /// Before: rank `r` has chunk `r`, in place. After: the root has all chunks.
    Gather {
        /// The rank that gets the chunks.
        root: Rank,
    },
    /// Before: the root has all chunks. After: rank `r` has chunk `r`, in place.
    Scatter {
        /// The rank that has the chunks.
        root: Rank,
    },
    /// Before: each rank has `n` chunks, chunk `j` meant for rank `j`. After: rank `j` has the `n`
    /// blocks meant for it, in rank order, from the start of its buffer. When `len` is not a
    /// multiple of `n` the buffer is longer than `len`: see [`Collective::data_len`].
    AllToAll,
    /// No data. No rank leaves before every rank has entered.
    Barrier,
}

impl Collective {
    /// Every collective, rooted ones at rank 0, in the order in which help texts list them.
    pub const ALL: [Collective; 9] = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast { root: 0 },
        Collective::Reduce { root: 0 },
        Collective::Gather { root: 0 },
        Collective::Scatter { root: 0 },
        Collective::AllToAll,
        Collective::Barrier,
    ];

    /// The name that flags, tables and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::AllGather => "all-gather",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Reduce { .. } => "reduce",
            Collective::Gather { .. } => "gather",
            Collective::Scatter { .. } => "scatter",
            Collective::AllToAll => "all-to-all",
            Collective::Barrier => "barrier",
        }
    }

    /// The root of a rooted collective.
    #[must_use]
    pub const fn root(self) -> Option<Rank> {
        match self {
            Collective::Broadcast { root }
            | Collective::Reduce { root }
            | Collective::Gather { root }
            | Collective::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// The same collective at another root. Collectives without a root stay as they are.
    ///
    /// ```
    /// use spanker_collective::Collective;
    /// let reduce = Collective::Reduce { root: 0 };
    /// assert_eq!(reduce.with_root(2), Collective::Reduce { root: 2 });
    /// assert_eq!(Collective::Barrier.with_root(2), Collective::Barrier);
    /// ```
    #[must_use]
    pub const fn with_root(self, root: Rank) -> Self {
        match self {
            Collective::Broadcast { .. } => Collective::Broadcast { root },
            Collective::Reduce { .. } => Collective::Reduce { root },
            Collective::Gather { .. } => Collective::Gather { root },
            Collective::Scatter { .. } => Collective::Scatter { root },
            other => other,
        }
    }

    /// Whether contributions are combined by an operation rather than only moved.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce { .. }
        )
    }

    /// Elements that each rank's `data` must have: `len`, except that an all-to-all of a
    /// length that `ranks` does not divide leaves `ranks` equal blocks of the longest chunk.
    #[must_use]
    pub const fn data_len(self, ranks: usize, len: usize) -> Option<usize> {
        match self {
            Collective::AllToAll if ranks > 0 => len.div_ceil(ranks).checked_mul(ranks),
            Collective::Barrier => Some(0),
            _ => Some(len),
        }
    }

    /// Bus bandwidth over algorithm bandwidth, as the tables of collective benchmarks define it:
    /// the share of the buffer that must cross each rank's link.
    ///
    /// ```
    /// use spanker_collective::Collective;
    /// assert_eq!(Collective::AllReduce.bus_factor(4), 1.5);
    /// assert_eq!(Collective::AllGather.bus_factor(4), 0.75);
    /// ```
    #[must_use]
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks.max(1) as f64;
        match self {
            Collective::AllReduce => 2.0 * (n - 1.0) / n,
            Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Gather { .. }
            | Collective::Scatter { .. }
            | Collective::AllToAll => (n - 1.0) / n,
            Collective::Broadcast { .. } | Collective::Reduce { .. } | Collective::Barrier => 1.0,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Collective {
    type Err = CollectiveError;

    fn from_str(text: &str) -> Result<Self, CollectiveError> {
        Collective::ALL.into_iter().find(|collective| collective.name() == text).ok_or_else(|| {
            CollectiveError::unknown("collective", text, Collective::ALL.map(Collective::name))
        })
    }
}

/// A family of ways to run a collective as messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Neighbour to neighbour, one chunk at a time: few bytes per link, many rounds.
    Ring,
    /// The set that a rank has heard of doubles each round: few rounds.
    RecursiveDoubling,
    /// Halve the data while reducing, double it while gathering: few rounds and few bytes.
    HalvingDoubling,
    /// A binomial tree through one rank.
    Tree,
    /// Everyone to everyone at once: one round, the most bytes.
    OneShot,
    /// Everyone sends chunk `i` to rank `i`, which answers everyone: two rounds, few bytes.
    TwoShot,
}

impl Algorithm {
    /// Every algorithm, in the order in which help texts list them.
    pub const ALL: [Algorithm; 6] = [
        Algorithm::Ring,
        Algorithm::RecursiveDoubling,
        Algorithm::HalvingDoubling,
        Algorithm::Tree,
        Algorithm::OneShot,
        Algorithm::TwoShot,
    ];

    /// The name that flags, tables and JSON use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Tree => "tree",
            Algorithm::OneShot => "one-shot",
            Algorithm::TwoShot => "two-shot",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = CollectiveError;

    fn from_str(text: &str) -> Result<Self, CollectiveError> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == text).ok_or_else(|| {
            CollectiveError::unknown("algorithm", text, Algorithm::ALL.map(Algorithm::name))
        })
    }
}

/// The elements of chunk `index` when `len` elements are dealt to `count` ranks.
///
/// ```
/// use spanker_collective::chunk;
/// assert_eq!([chunk(7, 3, 0), chunk(7, 3, 1), chunk(7, 3, 2)], [0..3, 3..5, 5..7]);
/// ```
///
/// # Panics
/// If `count` is zero.
#[must_use]
pub const fn chunk(len: usize, count: usize, index: usize) -> Range<usize> {
    let share = len / count;
    let longer = len % count;
    let start = index * share + if index < longer { index } else { longer };
    let extra = if index < longer { 1 } else { 0 };
    start..start + share + extra
}
