// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a job before anybody works on it, and over ranks. What goes wrong later is a
//! [`Failure`] of one backend.

use spanker_fabric::FabricError;
use spanker_llm::LlmError;
use spanker_plan::PlanError;
use spanker_steal::{Failure, StealError};

/// A job or a backend that cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// Dimensions that are not those of a product, or that do not fit its operands.
    #[error(transparent)]
    Product(#[from] ggml_spanker::Error),
    /// There is nothing to do.
    #[error("nothing to do: {what}")]
    Nothing {
        /// What there is none of.
        what: String,
    },
    /// There is no memory for an operand.
    #[error("no memory for {bytes} bytes of {what}")]
    Memory {
        /// What it is for.
        what: &'static str,
        /// How much it would be.
        bytes: u64,
    },
    /// A prompt that cannot be run.
    #[error("prompt {prompt}: {what}")]
    Prompt {
        /// Which one, from 0.
        prompt: usize,
        /// What is wrong with it.
        what: String,
    },
    /// A card refused or failed what was asked of it.
    #[error("{card}: {what}")]
    Card {
        /// The card's name.
        card: String,
        /// What was asked, and what came of it.
        what: String,
        /// The card's own error.
        source: spanker_runtime::Error,
    },
    /// The model cannot be run there.
    #[error(transparent)]
    Model(#[from] LlmError),
    /// The model cannot be laid out on one card.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The system gives no thread.
    #[error("no thread for {what}: {reason}")]
    Thread {
        /// What it is for.
        what: String,
        /// What the system says.
        reason: String,
    },
    /// A backend failed before the job began.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// The items cannot be shared out.
    #[error(transparent)]
    Steal(#[from] StealError),
    /// The job was stopped before there was anything to report.
    #[error("interrupted")]
    Interrupted,
    /// Ranks do not agree, or one is lost.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// MPI failed.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] spanker_fabric_mpi::MpiError),
    /// A rank could not go on, or its job is not done.
    #[error("{what}")]
    Rank {
        /// What was wrong.
        what: String,
    },
    /// Rank 0 has ended the job, and knows why.
    #[error("rank 0 has ended the job")]
    Ended,
}

impl JobError {
    /// The system gives no thread.
    pub(crate) fn thread(what: &str, error: &dyn std::fmt::Display) -> JobError {
        JobError::Thread { what: what.to_owned(), reason: error.to_string() }
    }
}
