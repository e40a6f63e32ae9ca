// SPDX-License-Identifier: Apache-2.0
//! What cards did when, from their own flight recorders: an entry for each operator and each fence, in the
//! order of the program.

use spanker_fabric::device::DeviceGroup;
use spanker_plan::{Activity, Label, Mark};
use spanker_runtime::{Descriptor, SpankerControl, Work, abi};

use crate::program::Lowering;
use crate::{LlmError, Recorder};

/// Marks of a trace as they grow.
#[derive(Debug)]
pub(super) struct Log {
    recorder: Recorder,
    /// The clock when recording began, in picoseconds.
    origin: u64,
    /// The last entry that was read from each seat.
    seen: Vec<u64>,
    /// For each seat of the step in hand: from which descriptor on it does what.
    phases: Vec<Vec<(usize, Activity, u32)>>,
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
        let phases = vec![Vec::new(); seen.len()];
        Ok(Log { recorder: recorder.clone(), origin, seen, phases })
    }

    /// From descriptor `at` on, a seat does this.
    pub(super) fn mark(&mut self, seat: usize, at: usize, activity: Activity, layer: u32) {
        self.phases[seat].push((at, activity, layer));
    }

    /// Adds a step that is over. Where a card's recorder no longer has all of it, nothing is added for that
    /// card.
    pub(super) fn keep(
        &mut self,
        group: &DeviceGroup<'_>,
        lowering: &Lowering,
        programs: &[Vec<Descriptor>],
        token: usize,
    ) -> Result<(), LlmError> {
        for (seat, program) in programs.iter().enumerate() {
            let phases = std::mem::take(&mut self.phases[seat]);
            let records = group.request(seat, SpankerControl::records)?;
            let done: Vec<u64> = records
                .iter()
                .filter(|record| {
                    record.sequence > self.seen[seat] && record.kind == abi::RECORD_DONE
                })
                .map(|record| record.card_time_ps)
                .collect();
            self.seen[seat] = records.last().map_or(0, |record| record.sequence);
            let noted = |one: &&(usize, &Descriptor)| {
                !matches!(one.1.work, Work::Send { .. } | Work::Receive { .. })
            };
            let steps: Vec<(usize, &Descriptor)> = program.iter().enumerate().collect();
            let steps: Vec<_> = steps.iter().filter(noted).collect();
            if steps.len() != done.len() {
                continue;
            }
            let seconds = |ps: u64| ps.saturating_sub(self.origin) as f64 * 1e-12;
            let mut marks: Vec<Mark> = Vec::new();
            let mut before = None;
            for (&&(at, descriptor), end) in steps.iter().zip(&done) {
                let phase = phases.iter().rfind(|(from, _, _)| *from <= at);
                let (activity, layer) = phase.map_or((Activity::Host, 0), |&(_, a, l)| (a, l));
                let activity = match descriptor.work {
                    Work::Fence { .. } if activity != Activity::Handoff => Activity::Exchange,
                    _ => activity,
                };
                let label = Label { activity, layer, token: token as u32 };
                let (start, end) = (before.unwrap_or(*end), *end);
                before = Some(end);
                match marks.last_mut() {
                    Some(last) if last.label == label => last.end = seconds(end),
                    _ => {
                        let card = lowering.seats[seat].card as u32;
                        marks.push(Mark::outside(card, label, seconds(start), seconds(end)));
                    }
                }
            }
            self.recorder.add(marks);
        }
        Ok(())
    }
}
