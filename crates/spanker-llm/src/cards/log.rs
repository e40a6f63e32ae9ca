// SPDX-License-Identifier: Apache-2.0
//! What cards did when, from their own flight recorders: an entry for each operator and each fence, in the
//! order of the program.

use spanker_fabric::device::DeviceGroup;
use spanker_plan::{Activity, Label, Mark, Op, Programs};
use spanker_runtime::{Descriptor, SpankerControl, Work, abi};

use crate::{LlmError, Recorder};

/// Marks of a trace as they grow.
#[derive(Debug)]
pub(super) struct Log {
    recorder: Recorder,
    /// The clock when the run began, in picoseconds.
    origin: u64,
    /// The last entry that was read from each member.
    seen: Vec<u64>,
}

/// What the entries of a step will be of, for each member.
#[derive(Debug)]
pub(super) struct StepLog(Vec<MemberLog>);

/// The same for one member.
#[derive(Debug, Default)]
struct MemberLog {
    /// From which descriptor on it is at which operator.
    ops: Vec<At>,
    /// The descriptors that are noted when they are done, and which of them are fences.
    noted: Vec<(usize, bool)>,
}

impl StepLog {
    pub(super) fn new(members: usize) -> StepLog {
        StepLog((0..members).map(|_| MemberLog::default()).collect())
    }

    /// From a descriptor on, a member is at this operator of its program.
    pub(super) fn op(&mut self, member: usize, descriptor: usize, number: usize, op: &Op) {
        let list = &mut self.0[member].ops;
        let before = list.last().copied();
        let (activity, layer) = match (op, before) {
            (Op::Mark { activity, layer }, _) => (*activity, *layer),
            (_, Some(before)) => (before.activity, before.layer),
            (_, None) => (Activity::Host, 0),
        };
        list.push(At { descriptor, op: number as u32, activity, layer });
    }

    /// The whole program of a member.
    pub(super) fn program(&mut self, member: usize, program: &[Descriptor]) {
        let noted = program.iter().enumerate().filter_map(|(at, one)| match one.work {
            Work::Send { .. } | Work::Receive { .. } => None,
            Work::Fence { .. } => Some((at, true)),
            _ => Some((at, false)),
        });
        self.0[member].noted = noted.collect();
    }
}

/// An operator of the step in hand.
#[derive(Debug, Clone, Copy)]
struct At {
    /// Its first descriptor.
    descriptor: usize,
    op: u32,
    activity: Activity,
    layer: u32,
}

impl Log {
    pub(super) fn new(
        group: &DeviceGroup<'_>,
        recorder: &Recorder,
        origin: u64,
    ) -> Result<Log, LlmError> {
        let last = |rank| {
            let records = group.request(rank, SpankerControl::records)?;
            Ok(records.last().map_or(0, |record| record.sequence))
        };
        let seen = (0..group.ranks()).map(last).collect::<Result<Vec<u64>, LlmError>>()?;
        let origin = recorder.origin(origin);
        Ok(Log { recorder: recorder.clone(), origin, seen })
    }

    /// Adds a step that is over. Where a card's recorder no longer has all of it, nothing is added for that
    /// card.
    pub(super) fn keep(
        &mut self,
        group: &DeviceGroup<'_>,
        layout: &Programs,
        step: StepLog,
        token: usize,
    ) -> Result<(), LlmError> {
        for (member, MemberLog { ops, noted }) in step.0.into_iter().enumerate() {
            let records = group.request(member, SpankerControl::records)?;
            let fresh = records.iter().filter(|record| record.sequence > self.seen[member]);
            let done = fresh.clone().filter(|record| record.kind == abi::RECORD_DONE);
            // What follows is of the next step.
            let done: Vec<_> = done.take(noted.len()).collect();
            let last = done.last().filter(|_| done.len() == noted.len());
            let last = last.copied().or(records.last()).map(|record| record.sequence);
            let done: Vec<u64> = done.iter().map(|record| record.card_time_ps).collect();
            let begun = fresh.clone().find(|record| record.kind == abi::RECORD_SUBMITTED);
            let begun = begun.map(|record| record.card_time_ps);
            self.seen[member] = last.unwrap_or(0);
            if noted.len() != done.len() {
                continue;
            }
            let seconds = |ps: u64| ps.saturating_sub(self.origin) as f64 * 1e-12;
            let card = layout.members()[member].card as u32;
            let mut marks: Vec<Mark> = Vec::new();
            let mut before = begun.unwrap_or_else(|| done.first().copied().unwrap_or(0));
            for (&(at, fence), &ended) in noted.iter().zip(&done) {
                let index = ops.partition_point(|op| op.descriptor <= at);
                let Some(op) = index.checked_sub(1).map(|index| ops[index]) else {
                    // The word from the host comes before the first operator.
                    before = ended;
                    continue;
                };
                let exchange = fence
                    || marks.last().is_some_and(|last| {
                        last.op == op.op && last.label.activity == Activity::Exchange
                    });
                let activity = match op.activity {
                    Activity::Handoff => Activity::Handoff,
                    _ if exchange => Activity::Exchange,
                    activity => activity,
                };
                let label = Label { activity, layer: op.layer, token: token as u32 };
                let (start, end) = (seconds(before), seconds(ended));
                before = ended;
                match marks.last_mut() {
                    Some(last) if last.op == op.op => {
                        last.end = end;
                        last.label = label;
                    }
                    _ => {
                        marks.push(Mark { card, label, op: op.op, ops: 1, start, end, parts: None })
                    }
                }
            }
            self.recorder.add(marks);
        }
        Ok(())
    }
}
