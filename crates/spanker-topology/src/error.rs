// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a profile or a cluster.

use crate::Shape;

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A name that no built-in profile has.
    #[error("unknown profile '{name}' (built in: {known}; or the path of a TOML file)")]
    UnknownProfile {
        /// The name as given.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// A file that is not what it should be.
    #[error("{what}: {message}")]
    Toml {
        /// What was read.
        what: &'static str,
        /// What is wrong, and where.
        message: String,
    },
    /// A cluster needs cards, and not too many.
    #[error("a cluster of {cards} cards: between 1 and {max} are possible", max = crate::MAX_CARDS)]
    Cards {
        /// Cards as given.
        cards: usize,
    },
    /// A link that names a card that is not there.
    #[error("link {from}-{to}: there is no card {missing} (the cluster has {cards})")]
    MissingCard {
        /// One end.
        from: usize,
        /// The other.
        to: usize,
        /// The end that does not exist.
        missing: usize,
        /// Cards in the cluster.
        cards: usize,
    },
    /// A link that makes no sense.
    #[error("link {from}-{to}: {message}")]
    Link {
        /// One end.
        from: usize,
        /// The other.
        to: usize,
        /// What is wrong.
        message: String,
    },
    /// Cards that cannot reach each other.
    #[error("card {from} cannot reach card {to}: the links leave them apart")]
    Disconnected {
        /// A card.
        from: usize,
        /// A card that it cannot reach.
        to: usize,
    },
    /// A shape that these cards cannot form.
    #[error("{shape} of {cards} cards: {reason}")]
    Shape {
        /// The shape that was asked for.
        shape: Shape,
        /// Cards in the cluster.
        cards: usize,
        /// Why not, and what would do.
        reason: String,
    },
}
