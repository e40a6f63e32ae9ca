// SPDX-License-Identifier: Apache-2.0
//! What can go wrong between ranks. The first fault of a group is the one that every rank reports.

use spanker_collective::Rank;

/// A fault of a group. After one, the group is of no more use: every later call reports the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// A rank went away: its thread ended or panicked, or its process is gone.
    #[error("rank {rank} died")]
    Died {
        /// The rank that is gone.
        rank: Rank,
    },
    /// A rank waited for another until its deadline.
    #[error("rank {rank}: deadline passed waiting {what} rank {peer}")]
    Deadline {
        /// The rank that waited.
        rank: Rank,
        /// The rank it waited for.
        peer: Rank,
        /// What it waited for, as in "to receive from".
        what: &'static str,
    },
    /// Two ranks do not mean the same call.
    #[error("rank {rank} and rank {peer} disagree on the {field}: {ours} and {theirs}")]
    Mismatch {
        /// The rank that noticed.
        rank: Rank,
        /// The rank whose message it was.
        peer: Rank,
        /// What they disagree on.
        field: &'static str,
        /// What `rank` means.
        ours: String,
        /// What `peer` means.
        theirs: String,
    },
    /// A message is not as long as its receiver expects.
    #[error("rank {rank}: message from rank {peer} has {actual} bytes, expected {expected}")]
    Length {
        /// The receiver.
        rank: Rank,
        /// The sender.
        peer: Rank,
        /// Bytes that the receiver expects.
        expected: usize,
        /// Bytes that came.
        actual: usize,
    },
    /// A message arrived with a wrong checksum.
    #[error("rank {rank}: message from rank {peer} is corrupt")]
    Corrupt {
        /// The receiver.
        rank: Rank,
        /// The sender.
        peer: Rank,
    },
    /// A message is missing: a later one from the same rank has come.
    #[error("rank {rank}: a message from rank {peer} was lost")]
    Lost {
        /// The receiver.
        rank: Rank,
        /// The sender.
        peer: Rank,
    },
    /// What carries the messages failed.
    #[error("rank {rank}: {reason}")]
    Failed {
        /// The rank that it told so.
        rank: Rank,
        /// What it said.
        reason: String,
    },
    /// A rank was asked for something that it cannot do.
    #[error("rank {rank}: {reason}")]
    Refused {
        /// The rank.
        rank: Rank,
        /// What was wrong with the request.
        reason: String,
    },
}
