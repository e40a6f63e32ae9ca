// SPDX-License-Identifier: Apache-2.0
//! What a rank has of a plan that is laid out: its member, if it has one, and what its card says after a step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::FabricError;
use spanker_plan::{ExchangeTable, Op, Place, Programs, Taps};

use super::exchange::{Exchanges, Neighbours};
use super::wire::Wire;
use crate::card::{self, Card, Report, Stopped, Task, allocate};
use crate::layout::Planned;
use crate::measure::keep_layers;
use crate::runner::{Given, Step};
use crate::{LlmError, Network};

/// A rank's part of a plan.
pub(super) struct RankPart<B> {
    pub(super) programs: Programs,
    pub(super) vocab: u64,
    /// The rank of every member.
    pub(super) ranks: Vec<Rank>,
    /// This rank's member and card, and how that meets the others of its stage.
    card: Option<(usize, Card<B>, Exchanges)>,
    /// Bytes that its card was planned to allocate.
    pub(super) planned: u64,
    /// Steps so far.
    pub(super) steps: u64,
}

/// What this rank has of a step that it has run.
pub(super) struct Ran {
    /// What its card says, if it has one.
    pub(super) report: Option<Report>,
    /// Bytes that taps of each member's card kept.
    pub(super) tapped: Vec<u64>,
}

/// Which step it is: its tokens, the layers that it goes through (all if there are none), which operators are tapped,
/// and whether it says what it does when.
#[derive(Clone, Copy)]
pub(super) struct Stepping<'s> {
    pub(super) step: &'s Step<'s>,
    pub(super) layers: &'s [u32],
    pub(super) salt: u64,
    pub(super) traced: bool,
}

impl<B: AsRef<[u8]> + Send + Sync> RankPart<B> {
    /// Lays out this rank's part of a plan, and reads it once, so that steps do not wait for a disk. To be measured,
    /// it is `filled` with numbers, as in the midst of a run.
    pub(super) fn new(
        network: &Arc<Network<B>>,
        planned: &Planned<'_>,
        (rank, ranks): (Rank, &[u32]),
        table: ExchangeTable,
        threads: usize,
        filled: bool,
    ) -> Result<Self, LlmError> {
        let rank_of = |card: usize| ranks.get(card).map_or(usize::MAX, |&rank| rank as usize);
        let (programs, memories) = allocate(network, planned, &|card| rank_of(card) == rank)?;
        let layouts = planned.cards();
        let ranks: Vec<Rank> =
            programs.members().iter().map(|member| rank_of(member.card)).collect();
        let member = ranks.iter().position(|&one| one == rank);
        let card = member.zip(memories.into_iter().next()).map(|(member, mut memory)| {
            if filled {
                memory.fill();
            }
            card::touch(network, &programs, member);
            let staging = layouts[member].host.unwrap_or_default();
            let mut card = Card::new(memory, threads, staging);
            if filled {
                card.hold_team_together();
            }
            let place = &programs.members()[member];
            let group = ranks[programs.groups()[place.stage].clone()].to_vec();
            let exchanges = Exchanges::new(table, place.stage, group, place.rank);
            (member, card, exchanges)
        });
        let planned = member.map_or(0, |member| layouts[member].bytes());
        let vocab = network.model().vocab;
        Ok(RankPart { programs, vocab, ranks, card, planned, steps: 0 })
    }

    /// The plan's number of this rank's card, or of none.
    pub(super) fn number(&self) -> usize {
        let member = self.card.as_ref().map(|(member, ..)| &self.programs.members()[*member]);
        member.map_or(usize::MAX, |member| member.card)
    }

    /// Whether cards keep what operators read and wrote.
    pub(super) fn is_tapped(&self) -> bool {
        !self.programs.space().audit.is_none()
    }

    /// The programs of all cards for a step through some layers, or all if there are none.
    pub(super) fn programs_of(&self, of: Stepping<'_>) -> (Vec<Vec<Op>>, Vec<Taps>) {
        let (mut programs, taps) = tapped(&self.programs, of.step, of.salt);
        if !of.layers.is_empty() {
            programs.iter_mut().for_each(|program| keep_layers(program, of.layers));
        }
        (programs, taps)
    }

    /// Runs this rank's program for a step that has begun; without a card there is no report. What it did when is
    /// in seconds since then, if it is traced.
    pub(super) fn step(
        &mut self,
        wire: &mut Wire<'_>,
        of: Stepping<'_>,
        begun: Instant,
    ) -> Result<Ran, FabricError> {
        self.steps += 1;
        let mut tapped = vec![0; self.ranks.len()];
        if self.card.is_none() && !self.is_tapped() {
            return Ok(Ran { report: None, tapped });
        }
        let (programs, taps) = self.programs_of(of);
        tapped.iter_mut().zip(&taps).for_each(|(bytes, taps)| *bytes = taps.bytes);
        let Some((member, card, exchanges)) = &mut self.card else {
            return Ok(Ran { report: None, tapped });
        };
        let wanted = self.programs.wanted(*member, of.step);
        let place = self.programs.audit_place(*member, of.step.turn);
        let captured = taps.get(*member).map(|taps| (place, taps.bytes));
        let task = Task { step: self.steps, traced: of.traced, wanted, captured, begun };
        let tables = self.programs.tables(of.step);
        let mut peers = Neighbours::new(wire, exchanges, &self.ranks, self.steps);
        match card.run((&programs[*member], &tables), &mut peers, task) {
            Ok(report) => Ok(Ran { report: Some(report), tapped }),
            Err(Stopped::Fault(fault)) => Err(fault),
            Err(Stopped::Panicked) => Err(wire.refuse("its card has panicked".into())),
        }
    }

    /// Bytes that this rank's card has allocated.
    pub(super) fn allocated(&self) -> u64 {
        self.card.as_ref().map_or(0, |(_, card, _)| card.allocated())
    }

    /// What each member's card reports of a step, in bytes: candidates, logits, and what taps kept.
    pub(super) fn expected(&self, step: &Step<'_>, tapped: &[u64]) -> Vec<[u64; 3]> {
        let bytes = |read: Option<(Place, u64)>| read.map_or(0, |(_, bytes)| bytes);
        let member = |(member, &tapped): (usize, &u64)| {
            let wanted = self.programs.wanted(member, step);
            [bytes(wanted.best), bytes(wanted.logits), tapped]
        };
        tapped.iter().enumerate().map(member).collect()
    }
}

/// The programs of all cards for a step, with what taps in them check.
pub(super) fn tapped(programs: &Programs, step: &Step<'_>, salt: u64) -> (Vec<Vec<Op>>, Vec<Taps>) {
    programs.audited(step, &|from, to| vec![from, to], salt)
}

/// Bytes of a report before what was asked for.
const HEAD: u64 = 16;

/// A report as bytes.
pub(super) fn write(report: &Report) -> Vec<u8> {
    let nanos = u64::try_from(report.sync.as_nanos()).unwrap_or(u64::MAX);
    let mut bytes = [nanos.to_le_bytes(), report.sent.to_le_bytes()].concat();
    bytes.extend_from_slice(&report.given.best);
    report.given.logits.iter().for_each(|logits| bytes.extend_from_slice(logits));
    bytes.extend_from_slice(&report.captured);
    bytes
}

/// Bytes of a report with so much in it.
pub(super) fn length(parts: [u64; 3]) -> u64 {
    HEAD + parts.iter().sum::<u64>()
}

/// A report from bytes, of which there are as many as a report with these parts has.
pub(super) fn read(bytes: &[u8], [best, logits, _]: [u64; 3]) -> Report {
    let (head, rest) = bytes.split_at(HEAD as usize);
    let word = |at: usize| head.as_chunks().0.get(at).map_or(0, |&word| u64::from_le_bytes(word));
    let (best, rest) = rest.split_at(best as usize);
    let (logits, captured) = rest.split_at(logits as usize);
    let logits = (!logits.is_empty()).then(|| logits.to_vec());
    let given = Given { best: best.to_vec(), logits: logits.into_iter().collect() };
    let (sync, captured) = (Duration::from_nanos(word(0)), captured.to_vec());
    Report { sync, sent: word(1), marks: Vec::new(), given, captured }
}
