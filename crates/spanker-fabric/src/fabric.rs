// SPDX-License-Identifier: Apache-2.0
//! The interface between schedules and what moves bytes.
//!
//! A fabric knows ranks, messages, deadlines and faults. It knows nothing about collectives: [`Call`]
//! is carried along so that ranks notice when they do not mean the same thing, and compared as a whole.

use std::time::Instant;

use spanker_collective::{Algorithm, Collective, DType, Rank, ReduceOp};

use crate::{FabricError, Message, ReceiveBuffer};

/// One rank's end of a group.
///
/// Implementations pass [`crate::conformance`].
pub trait Fabric {
    /// This end's place in the group.
    fn rank(&self) -> Rank;

    /// Ranks in the group.
    fn ranks(&self) -> usize;

    /// Sends every message of `sends` and receives one from each rank of `receives`, all concurrently.
    /// Returns when all are complete, with the received messages in the order of `receives`. Messages between
    /// two ranks arrive in the order in which they were sent.
    ///
    /// # Errors
    /// The group's first fault; at the latest at `deadline` there is one.
    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError>;

    /// Whether [`Fabric::exchange_into`] receives messages of `bytes` bytes directly into the given buffers. Where it
    /// would copy them there, callers that have a choice use [`Fabric::exchange`].
    fn receives_in_place(&self, _bytes: usize) -> bool {
        false
    }

    /// As [`Fabric::exchange`], but the message of a rank is received into the buffer beside it, where there is one,
    /// and returned as that buffer, frozen. After an error the buffers are lost.
    ///
    /// # Errors
    /// As [`Fabric::exchange`], and [`FabricError::Length`] for a message that is not as long as its buffer.
    fn exchange_into(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: Vec<(Rank, Option<ReceiveBuffer>)>,
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        let from: Vec<Rank> = receives.iter().map(|(from, _)| *from).collect();
        let mut messages = self.exchange(call, sends, &from, deadline)?;
        for (message, (peer, buffer)) in messages.iter_mut().zip(receives) {
            let Some(mut buffer) = buffer else { continue };
            let (rank, expected, actual) = (self.rank(), buffer.size(), message.bytes().len());
            if expected != actual {
                return Err(self.abort(FabricError::Length { rank, peer, expected, actual }));
            }
            buffer.bytes_mut().copy_from_slice(message.bytes());
            *message = buffer.freeze();
        }
        Ok(messages)
    }

    /// Agrees that `call` is complete: either every rank gets `Ok`, or every rank that is left gets
    /// the same error. Ranks that committed different calls get [`FabricError::Mismatch`], also where
    /// no message passed between them.
    ///
    /// # Errors
    /// The group's first fault; at the latest at `deadline` there is one.
    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError>;

    /// Waits until every rank has called this: a barrier.
    ///
    /// # Errors
    /// The group's first fault; at the latest at `deadline` there is one, also if a rank never gets here.
    fn barrier(&mut self, deadline: Instant) -> Result<(), FabricError> {
        self.commit(&Call::BARRIER, deadline)
    }

    /// Gives up the group because of `error`, and returns the group's first fault, which every rank
    /// will report.
    fn abort(&mut self, error: FabricError) -> FabricError;
}

/// What a rank takes part in. Every message carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// What is computed.
    pub collective: Collective,
    /// How.
    pub algorithm: Algorithm,
    /// Of how many elements.
    pub elements: usize,
    /// Of which type.
    pub dtype: DType,
    /// By which operation.
    pub op: ReduceOp,
    /// The fingerprint of the schedule.
    pub plan: u64,
}

impl Call {
    /// What ranks take part in that wait for each other and nothing else.
    pub const BARRIER: Call = Call {
        collective: Collective::Barrier,
        algorithm: Algorithm::OneShot,
        elements: 0,
        dtype: DType::U8,
        op: ReduceOp::Sum,
        plan: 0,
    };

    /// The error for a message of `theirs` that came from `peer`, if the two calls differ.
    #[must_use]
    pub fn mismatch(&self, theirs: &Call, rank: Rank, peer: Rank) -> Option<FabricError> {
        if self == theirs {
            return None;
        }
        let show = |collective: Collective| match collective.root() {
            Some(root) => format!("{collective} at root {root}"),
            None => collective.to_string(),
        };
        let fields = [
            ("collective", show(self.collective), show(theirs.collective)),
            ("number of elements", self.elements.to_string(), theirs.elements.to_string()),
            ("element type", self.dtype.to_string(), theirs.dtype.to_string()),
            ("operation", self.op.to_string(), theirs.op.to_string()),
            ("algorithm", self.algorithm.to_string(), theirs.algorithm.to_string()),
            ("schedule", format!("{:016x}", self.plan), format!("{:016x}", theirs.plan)),
        ];
        let (field, ours, theirs) = fields.into_iter().find(|(_, ours, theirs)| ours != theirs)?;
        Some(FabricError::Mismatch { rank, peer, field, ours, theirs })
    }
}
