// SPDX-License-Identifier: Apache-2.0
//! The crate's error.

use std::path::PathBuf;

use spanker_collective::{CollectiveError, DType, ReduceOp};
use spanker_fabric::FabricError;
use spanker_fabric::device::DeviceError;
use spanker_plan::PlanError;
use spanker_reduce::ReduceError;
use spanker_topology::TopologyError;

/// What can go wrong with a topology or a collective over it.
///
/// The enum grows, so a `match` in another crate needs a `_` arm:
///
/// ```compile_fail,E0004
/// use spanker_scheduler::Error;
/// fn name(error: Error) -> &'static str {
///     match error {
///         Error::NoSails => "no cards",
///         Error::TopologyMismatch { .. } => "count",
///         Error::ShapeMismatch { .. } => "length",
///         Error::NotImplemented(_) => "not implemented",
///         Error::Runtime(_) => "card",
///         Error::UndefinedOperation { .. } => "operation",
///         Error::Reduce(_) => "buffers",
///         Error::Plan(_) => "schedule",
///         Error::Fabric(_) => "fabric",
///         Error::Device(_) => "cards",
///         Error::Topology(_) => "profiles and wires",
///         Error::Links { .. } => "saved links",
///     }
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No card was found.
    #[error("no cards found at {}/spanker0 and on", crate::device_directory().display())]
    NoSails,
    /// The number of buffers is not the number of cards.
    #[error("{actual} buffers for {expected} cards")]
    TopologyMismatch {
        /// Cards in the topology.
        expected: usize,
        /// Buffers given.
        actual: usize,
    },
    /// A buffer is not as long as the others.
    #[error("card {sail}: buffer has {actual} elements, expected {expected}")]
    ShapeMismatch {
        /// The first card that differs.
        sail: usize,
        /// Elements it must have.
        expected: usize,
        /// Elements it has.
        actual: usize,
    },
    /// The cards of this topology cannot do this yet.
    #[error("not implemented: {0}")]
    NotImplemented(&'static str),
    /// A card could not be opened or did not answer.
    #[error(transparent)]
    Runtime(#[from] spanker_runtime::Error),
    /// The operation is not defined for the element type.
    #[error("operation {op} is not defined for {dtype}")]
    UndefinedOperation {
        /// The operation.
        op: ReduceOp,
        /// The element type.
        dtype: DType,
    },
    /// Anything else that is wrong with the buffers of a collective.
    #[error(transparent)]
    Reduce(ReduceError),
    /// A schedule could not be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Ranks failed each other.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A card or a link of a group failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The cards' profiles or wires are none that the planner knows.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// What is known of the links could not be read or written.
    #[error("{}: {reason}", path.display())]
    Links {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl From<CollectiveError> for Error {
    fn from(error: CollectiveError) -> Self {
        Error::Plan(error.into())
    }
}

impl From<ReduceError> for Error {
    fn from(error: ReduceError) -> Self {
        match error {
            ReduceError::Length { card, expected, actual } => {
                Error::ShapeMismatch { sail: card, expected, actual }
            }
            ReduceError::Counts { inputs, outputs } => {
                Error::TopologyMismatch { expected: inputs, actual: outputs }
            }
            ReduceError::Undefined { op, dtype } => Error::UndefinedOperation { op, dtype },
            other => Error::Reduce(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_schedule_that_cannot_be_made_says_why_as_a_plan_error() {
        let none = || -> Result<_> {
            let (collective, ring) = (crate::Collective::AllReduce, crate::Algorithm::Ring);
            Ok(crate::schedule(collective, ring, 0, 1)?)
        };
        let error = none().unwrap_err();
        assert!(matches!(error, Error::Plan(PlanError::Collective(_))), "{error:?}");
        assert!(error.to_string().starts_with("all-reduce over 0 ranks"), "{error}");
    }
}
