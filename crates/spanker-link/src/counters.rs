// SPDX-License-Identifier: Apache-2.0
//! What a link counts.

/// Totals since an end was made. Frames are data frames and notices unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Frames sent for the first time.
    pub sent: u64,
    /// Frames sent again.
    pub replayed: u64,
    /// Frames that the peer has acknowledged.
    pub acked: u64,
    /// Frames delivered to the caller.
    pub delivered: u64,
    /// Broken frames of any kind, and runs of garbage.
    pub corrupt: u64,
    /// Frames that had been delivered before.
    pub duplicate: u64,
    /// Frames that came while an earlier one was missing.
    pub out_of_order: u64,
    /// Frames of any kind that do not belong to this session.
    pub stale: u64,
    /// Frames that the peer had no credit for, or that are longer than a slot.
    pub overrun: u64,
    /// Acknowledgements that travelled alone.
    pub acks_sent: u64,
    /// Requests for a replay that this end sent.
    pub naks_sent: u64,
    /// Requests for a replay that the peer sent.
    pub naks_received: u64,
    /// Times that the retry timer ran out.
    pub timeouts: u64,
    /// Trainings begun.
    pub trainings: u64,
    /// Trainings that did not come to an end in time.
    pub failed_trainings: u64,
    /// Times that the policy shrank frames.
    pub shrinks: u64,
    /// Times that the policy halved the lanes.
    pub halvings: u64,
}
