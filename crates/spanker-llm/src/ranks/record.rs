// SPDX-License-Identifier: Apache-2.0
//! What all ranks did when, by the leader's clock.
//!
//! Every rank keeps what its card did, by its own clock, until the leader collects it: nothing is sent in the midst of
//! steps. Clocks are compared before the recording and when it is collected.

use std::time::Instant;

use spanker_collective::Rank;
use spanker_fabric::FabricError;
use spanker_plan::Mark;

use super::clock::{self, Conversion, Reading};
use super::marks;
use super::order::Order;
use super::wire::{LEADER, Wire};
use super::{Leader, LlmError};
use crate::card::Report;

/// The number under which ranks hand over what they recorded, and from here on its parts. Steps count from 1.
const COLLECTED: u64 = 1 << 63;

/// A recording on its way.
#[derive(Debug)]
pub(super) struct Recording {
    /// The other ranks with a card, and their clocks at the beginning.
    others: Vec<(Rank, Reading)>,
    /// What the leader's own card did.
    own: Vec<Mark>,
}

impl Recording {
    pub(super) fn keep(&mut self, marks: impl Iterator<Item = Mark>) {
        self.own.extend(marks);
    }
}

/// The marks of a step that began at `since` by its rank's clock.
pub(super) fn by_clock(
    report: &Report,
    card: Rank,
    token: usize,
    since: f64,
) -> impl Iterator<Item = Mark> {
    report.marks.iter().map(move |&(mut mark)| {
        mark.card = card as u32;
        mark.label.token = token as u32;
        mark.start += since;
        mark.end += since;
        mark
    })
}

/// Sends the leader what was recorded, and forgets it.
pub(super) fn hand_over(
    wire: &mut Wire<'_>,
    recorded: Option<&mut Vec<Mark>>,
) -> Result<(), FabricError> {
    let recorded = recorded.map(std::mem::take).unwrap_or_default();
    wire.report(COLLECTED, &(recorded.len() as u64).to_le_bytes())?;
    for (part, list) in (1..).zip(recorded.chunks(marks::MOST)) {
        wire.report(COLLECTED + part, &marks::write(list))?;
    }
    Ok(())
}

impl Leader<'_> {
    /// Lets these ranks record from now on what their cards do.
    pub(super) fn record(&mut self, ranks: &[Rank]) -> Result<(), LlmError> {
        self.order(&Order::Record)?;
        let others = ranks.iter().copied().filter(|&rank| rank != LEADER);
        let others = others.map(|rank| Ok((rank, self.read_clock(rank)?)));
        let others = others.collect::<Result<Vec<_>, LlmError>>()?;
        let now = self.wire.clock(Instant::now());
        self.origin.get_or_insert(now);
        self.recording = Some(Recording { others, own: Vec::new() });
        Ok(())
    }

    /// What all cards did since the recording began or marks were last asked for, in seconds since the first recording
    /// began. Nothing if there is no recording.
    ///
    /// Times of other ranks are converted to this rank's clock: see `ranks/clock.rs`. They are wrong by half of the
    /// shortest round trip of a message at most.
    ///
    /// # Errors
    /// [`LlmError::Fabric`] if a rank does not answer, or what it says makes no sense.
    pub fn marks(&mut self) -> Result<Vec<Mark>, LlmError> {
        let Some(mut recording) = self.recording.take() else { return Ok(Vec::new()) };
        let mut all = std::mem::take(&mut recording.own);
        let mut clocks = Vec::with_capacity(recording.others.len());
        for &(rank, first) in &recording.others {
            clocks.push(Conversion::new(first, self.read_clock(rank)?));
        }
        self.order(&Order::Collect)?;
        // Ranks without a card hand over nothing, and say so.
        for rank in (0..self.ranks()).filter(|&rank| rank != LEADER) {
            let list = self.collect_from(rank)?;
            let known = recording.others.iter().position(|&(other, _)| other == rank);
            let Some(conversion) = known.map(|at| clocks[at]) else { continue };
            all.extend(list.into_iter().map(|mark| Mark {
                start: conversion.ours(mark.start),
                end: conversion.ours(mark.end),
                ..mark
            }));
        }
        let origin = self.recording_since();
        all.iter_mut().for_each(|mark| {
            mark.start -= origin;
            mark.end -= origin;
        });
        self.recording = Some(recording);
        Ok(all)
    }

    /// When the first recording began, by this rank's clock.
    pub(super) fn recording_since(&self) -> f64 {
        self.origin.unwrap_or(0.0)
    }

    fn collect_from(&mut self, rank: Rank) -> Result<Vec<Mark>, LlmError> {
        let said = self.heard(|wire| wire.reports(COLLECTED, &[(rank, 8)]))?;
        let count = said.first().and_then(|message| message.bytes().first_chunk().copied());
        let mut left = u64::from_le_bytes(count.unwrap_or_default());
        let (mut list, mut part) = (Vec::new(), COLLECTED);
        while left > 0 {
            let some = left.min(marks::MOST as u64);
            part += 1;
            let from = [(rank, some * marks::BYTES as u64)];
            for message in self.heard(|wire| wire.reports(part, &from))? {
                match marks::read(message.bytes()) {
                    Some(marks) => list.extend(marks),
                    None => {
                        let what = format!("what rank {rank} recorded makes no sense");
                        return self.heard(|wire| Err(wire.refuse(what)));
                    }
                }
            }
            left -= some;
        }
        Ok(list)
    }

    fn read_clock(&mut self, rank: Rank) -> Result<Reading, LlmError> {
        let answers = (0..clock::QUESTIONS).map(|_| self.heard(|wire| wire.ask_time(rank)));
        let answers = answers.collect::<Result<Vec<_>, LlmError>>()?;
        Ok(clock::read(&answers).expect("there are questions"))
    }
}
