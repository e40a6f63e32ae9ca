// SPDX-License-Identifier: Apache-2.0
//! A collective as data: for each rank, steps of messages and local work.
//!
//! A schedule says nothing about element types, operations, time or fabrics. It is what the verifier
//! proves, what an executor runs and what a cost model prices.

use std::hash::{Hash, Hasher};
use std::ops::Range;

use crate::{Algorithm, Collective, CollectiveError, MAX_RANKS, algorithm};

/// A participant's place in its group, from 0.
pub type Rank = usize;

/// Which of a rank's two buffers a [`Span`] lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The caller's buffer: the input and the result.
    Data,
    /// Working memory of the schedule. Its contents before and after mean nothing.
    Scratch,
}

/// A run of elements in one of a rank's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    /// The buffer.
    pub buffer: Buffer,
    /// The first element.
    pub start: usize,
    /// How many elements.
    pub len: usize,
}

impl Span {
    /// Elements `range` of the caller's buffer.
    #[must_use]
    pub fn data(range: Range<usize>) -> Self {
        Span { buffer: Buffer::Data, start: range.start, len: range.len() }
    }

    /// `len` elements of the working memory from `start`.
    #[must_use]
    pub fn scratch(start: usize, len: usize) -> Self {
        Span { buffer: Buffer::Scratch, start, len }
    }

    /// One past the last element, or `None` where that cannot be addressed.
    #[must_use]
    pub fn end(self) -> Option<usize> {
        self.start.checked_add(self.len)
    }

    /// Whether the two spans share an element.
    #[must_use]
    pub fn overlaps(self, other: Span) -> bool {
        self.buffer == other.buffer
            && self.len > 0
            && other.len > 0
            && self.start < other.start.saturating_add(other.len)
            && other.start < self.start.saturating_add(self.len)
    }
}

/// Which operand of a fold the incoming elements are. The order is part of the schedule because it
/// decides the bits: a rank that holds the later contributions folds the incoming ones in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Incoming {
    /// `local = incoming op local`.
    First,
    /// `local = local op incoming`.
    Second,
}

/// One message, seen from one of its two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// Sends the elements of `span`.
    Send {
        /// The receiver.
        to: Rank,
        /// What is sent.
        span: Span,
    },
    /// Receives as many elements as `span` has, and stores them or folds them in.
    Recv {
        /// The sender.
        from: Rank,
        /// Where the elements go.
        span: Span,
        /// `None` stores; `Some` folds into what is there.
        fold: Option<Incoming>,
    },
}

impl Transfer {
    /// The other end.
    #[must_use]
    pub fn peer(&self) -> Rank {
        match *self {
            Transfer::Send { to, .. } => to,
            Transfer::Recv { from, .. } => from,
        }
    }

    /// The local elements that the message reads or writes.
    #[must_use]
    pub fn span(&self) -> Span {
        match *self {
            Transfer::Send { span, .. } | Transfer::Recv { span, .. } => span,
        }
    }
}

/// Work on a rank's own buffers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Local {
    /// Copies `from` to `into`. The two do not overlap.
    Copy {
        /// The source.
        from: Span,
        /// The destination, equally long.
        into: Span,
    },
    /// `into = sources[0] op sources[1] op ..`, in that order, rounded once at the end. `into` may be
    /// one of the sources.
    Fold {
        /// The operands, equally long.
        sources: Vec<Span>,
        /// The destination, equally long.
        into: Span,
    },
}

/// Messages that run concurrently, then local work in order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Step {
    /// All are started before any is waited for. No two touch the same element unless both only
    /// read it.
    pub transfers: Vec<Transfer>,
    /// Runs when every transfer of the step has completed.
    pub locals: Vec<Local>,
}

/// A collective of a given length over a given number of ranks, as steps for each rank.
///
/// ```
/// use spanker_collective::{Algorithm, Collective, schedule, verify};
/// let ring = schedule(Collective::AllReduce, Algorithm::Ring, 3, 1000)?;
/// let proof = verify(&ring)?;
/// assert_eq!(proof.rounds, 4); // 2 (n - 1)
/// # Ok::<(), spanker_collective::CollectiveError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Schedule {
    collective: Collective,
    algorithm: Algorithm,
    elements: usize,
    data: usize,
    scratch: usize,
    programs: Vec<Vec<Step>>,
    fingerprint: u64,
}

impl Schedule {
    /// Assembles a schedule from its parts, as a reader of saved schedules or a new algorithm does.
    /// Nothing is checked here: [`crate::verify`] does that.
    #[must_use]
    pub fn from_parts(
        collective: Collective,
        algorithm: Algorithm,
        elements: usize,
        data: usize,
        scratch: usize,
        programs: Vec<Vec<Step>>,
    ) -> Self {
        let mut hasher = std::hash::DefaultHasher::new();
        (collective, algorithm, elements, data, scratch, &programs).hash(&mut hasher);
        let fingerprint = hasher.finish();
        Schedule { collective, algorithm, elements, data, scratch, programs, fingerprint }
    }

    /// What the schedule computes.
    #[must_use]
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// The algorithm that built it.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// A number that schedules with different steps do not share, so that ranks can check whether they
    /// follow the same one. It is not stable between builds.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Ranks in the group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.programs.len()
    }

    /// Elements of the collective.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements that each rank's `data` must have.
    #[must_use]
    pub fn data_len(&self) -> usize {
        self.data
    }

    /// Elements that each rank's `scratch` must have.
    #[must_use]
    pub fn scratch_len(&self) -> usize {
        self.scratch
    }

    /// The steps of one rank.
    ///
    /// # Panics
    /// If `rank` is not in the group.
    #[must_use]
    pub fn program(&self, rank: Rank) -> &[Step] {
        &self.programs[rank]
    }
}

/// Builds the schedule of `collective` by `algorithm` over `ranks` ranks and `elements` elements.
///
/// | | ring | recursive-doubling | halving-doubling | tree | one-shot | two-shot |
/// |---|---|---|---|---|---|---|
/// | all-reduce | reduce-scatter, all-gather | pairwise exchange | halving, doubling | reduce, broadcast | all to all | scatter, gather |
/// | reduce-scatter | ring | halving | halving | reduce, scatter | direct | direct |
/// | all-gather | ring | doubling | doubling | gather, broadcast | direct | direct |
/// | broadcast | pipelined chain | tree | scatter, doubling | tree | direct | scatter, gather |
/// | reduce | pipelined chain | tree | halving, gather | tree | direct | scatter, gather |
/// | gather, scatter | chain | tree | tree | tree | direct | direct |
/// | all-to-all | rotation | Bruck | Bruck | Bruck | direct | direct |
/// | barrier | two laps | dissemination | dissemination | tree | all to all | through rank 0 |
///
/// All work for any number of ranks from 1 and any length from 0.
///
/// # Errors
/// [`CollectiveError::Ranks`] for no ranks or too many, [`CollectiveError::Root`] for a root outside the group,
/// [`CollectiveError::TooLarge`] where a buffer of the schedule could not be addressed.
pub fn schedule(
    collective: Collective,
    algorithm: Algorithm,
    ranks: usize,
    elements: usize,
) -> Result<Schedule, CollectiveError> {
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(CollectiveError::Ranks { collective, ranks });
    }
    if let Some(root) = collective.root().filter(|&root| root >= ranks) {
        return Err(CollectiveError::Root { collective, root, ranks });
    }
    // The largest scratch is one-shot's: a slot of the whole length for each peer.
    let addressable = elements
        .checked_add(ranks)
        .and_then(|padded| padded.checked_mul(ranks + 1))
        .is_some_and(|most| most <= isize::MAX as usize);
    if !addressable {
        return Err(CollectiveError::TooLarge { collective, elements, ranks });
    }
    Ok(algorithm::build(collective, algorithm, ranks, elements))
}
