// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a request for a plan, with a plan, or with a file that is read.

use spanker_collective::CollectiveError;

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A collective's schedule could not be made, or is wrong.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A request that makes no sense.
    #[error("{what}")]
    Request {
        /// What is wrong, with the value.
        what: String,
    },
    /// A layout that is not one of its model on its cluster.
    #[error("the plan does not fit together: {what}")]
    Layout {
        /// What is wrong.
        what: String,
    },
    /// A file that is not a plan, a fit or a table of samples.
    #[error("{what}")]
    File {
        /// What is wrong, and where.
        what: String,
    },
}
