// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a request for a schedule, or with a schedule.

use crate::{Algorithm, Collective, Rank};

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A name that nothing answers to.
    #[error("unknown {what} '{name}' (expected one of: {expected})")]
    Unknown {
        /// The kind of thing that was named.
        what: &'static str,
        /// The name as given.
        name: String,
        /// The names that exist.
        expected: String,
    },
    /// A group needs at least one rank.
    #[error("{collective} over {ranks} ranks: a group has between 1 and {max} ranks", max = crate::MAX_RANKS)]
    Ranks {
        /// The collective that was asked for.
        collective: Collective,
        /// The rank count as given.
        ranks: usize,
    },
    /// The root is not a rank of the group.
    #[error("{collective}: root {root} is not one of {ranks} ranks")]
    Root {
        /// The collective that was asked for.
        collective: Collective,
        /// The root as given.
        root: Rank,
        /// Ranks in the group.
        ranks: usize,
    },
    /// More elements than a schedule can address.
    #[error("{collective} of {elements} elements over {ranks} ranks is too large to address")]
    TooLarge {
        /// The collective that was asked for.
        collective: Collective,
        /// Elements as given.
        elements: usize,
        /// Ranks in the group.
        ranks: usize,
    },
    /// A schedule that the verifier refused.
    #[error("{algorithm} {collective}: {flaw}")]
    Refused {
        /// The schedule's collective.
        collective: Collective,
        /// The schedule's algorithm.
        algorithm: Algorithm,
        /// What is wrong with it.
        flaw: crate::Flaw,
    },
}

impl CollectiveError {
    pub(crate) fn unknown<const N: usize>(
        what: &'static str,
        name: &str,
        expected: [&str; N],
    ) -> Self {
        CollectiveError::Unknown { what, name: name.to_owned(), expected: expected.join(", ") }
    }
}
