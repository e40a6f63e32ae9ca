// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with MPI itself, before and besides the faults of a group.

use spanker_fabric::FabricError;

/// A fault of MPI, or of how the program was started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// MPI refused a call.
    #[error("{call}: {message} (code {code})")]
    Call {
        /// MPI's name of it.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// That in MPI's words.
        message: String,
    },
    /// MPI was started before, or has been ended: it can be had once for each process.
    #[error("MPI can be started once for each process")]
    Again,
    /// The launcher of another MPI started this program, which sees itself alone.
    #[error(
        "this program was built for {library}, and {launcher} started {ranks} of it: each sees itself alone\nhint: start it with {right}"
    )]
    Launcher {
        /// The MPI that the program was built for.
        library: String,
        /// Who started it.
        launcher: &'static str,
        /// As how many ranks.
        ranks: usize,
        /// Who should have.
        right: &'static str,
    },
    /// Ranks run different versions.
    #[error("rank {rank} runs spanker {theirs}, rank 0 runs spanker {ours}")]
    Version {
        /// The first rank that differs.
        rank: usize,
        /// The version of rank 0.
        ours: String,
        /// The version of that rank.
        theirs: String,
    },
    /// A rank said something about itself that nobody can read.
    #[error("rank {rank} does not say what it runs: is it another program?")]
    Stranger {
        /// The rank.
        rank: usize,
    },
    /// A fault of the group.
    #[error(transparent)]
    Group(#[from] FabricError),
}
