// SPDX-License-Identifier: Apache-2.0
//! What a rank has of a plan that is laid out: its member, if it has one, and what its card says after a step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::FabricError;
use spanker_plan::{Buffer, ExchangeTable, Op, Part, Programs, Taps, Want};

use super::exchange::{Exchanges, Neighbours};
use super::wire::{LEADER, Wire};
use crate::card::{self, Card, Report, Stopped, Task, allocate};
use crate::layout::{self, Planned};
use crate::measure::keep_layers;
use crate::runner::Step;
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
    /// Bytes that taps of each member's card kept in the last step.
    tapped: Vec<u64>,
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
        let (vocab, tapped) = (network.model().vocab, vec![0; ranks.len()]);
        Ok(RankPart { programs, vocab, ranks, card, planned, steps: 0, tapped })
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
    ) -> Result<Option<Report>, FabricError> {
        self.steps += 1;
        if self.card.is_none() && !self.is_tapped() {
            return Ok(None);
        }
        let (programs, taps) = self.programs_of(of);
        self.tapped.iter_mut().zip(&taps).for_each(|(bytes, taps)| *bytes = taps.bytes);
        let Some((member, card, exchanges)) = &mut self.card else { return Ok(None) };
        let parts = [layout::part(of.step)];
        let read = self.programs.wanted(*member, &spanker_plan::Step { parts: &parts }, 0);
        let place = &self.programs.members()[*member];
        let captured = taps.get(*member).map(|taps| (place.place(Buffer::Audit), taps.bytes));
        let task = Task { step: self.steps, traced: of.traced, read, captured, begun };
        let mut peers = Neighbours::new(wire, exchanges, &self.ranks, self.steps);
        match card.run(&programs[*member], &mut peers, task) {
            Ok(report) => Ok(Some(report)),
            Err(Stopped::Fault(fault)) => Err(fault),
            Err(Stopped::Panicked) => Err(wire.refuse("its card has panicked".into())),
        }
    }

    /// Bytes that this rank's card has allocated.
    pub(super) fn allocated(&self) -> u64 {
        self.card.as_ref().map_or(0, |(_, card, _)| card.allocated())
    }

    /// The ranks whose reports the leader waits for, with their bytes.
    pub(super) fn expected(&self, want: Want) -> Vec<(Rank, u64)> {
        let parts = [Part { sequence: 0, tokens: &[], past: 0, want }];
        let step = spanker_plan::Step { parts: &parts };
        let read =
            |member: usize| self.programs.wanted(member, &step, 0).map_or(0, |(_, bytes)| bytes);
        let members = self.ranks.iter().enumerate().filter(|&(_, &rank)| rank != LEADER);
        members.map(|(member, &rank)| (rank, HEAD + read(member) + self.tapped[member])).collect()
    }

    /// What a member's card reported.
    pub(super) fn read(&self, member: usize, bytes: &[u8]) -> Report {
        read(bytes, self.tapped[member])
    }
}

/// The programs of all cards for a step, with what taps in them check.
pub(super) fn tapped(programs: &Programs, step: &Step<'_>, salt: u64) -> (Vec<Vec<Op>>, Vec<Taps>) {
    let parts = [layout::part(step)];
    let whole = spanker_plan::Step { parts: &parts };
    programs.audited(&whole, &|from, to| vec![from, to], salt)
}

/// Bytes of a report before what was asked for.
const HEAD: u64 = 16;

/// A report as bytes.
pub(super) fn write(report: &Report) -> Vec<u8> {
    let nanos = u64::try_from(report.sync.as_nanos()).unwrap_or(u64::MAX);
    let mut bytes = [nanos.to_le_bytes(), report.sent.to_le_bytes()].concat();
    bytes.extend_from_slice(report.read.as_deref().unwrap_or(&[]));
    bytes.extend_from_slice(&report.captured);
    bytes
}

/// A report from bytes, of which there are as many as a report has at least, and so many from taps.
fn read(bytes: &[u8], captured: u64) -> Report {
    let (head, rest) = bytes.split_at(HEAD as usize);
    let word = |at: usize| head.as_chunks().0.get(at).map_or(0, |&word| u64::from_le_bytes(word));
    let (asked, captured) = rest.split_at(rest.len() - captured as usize);
    let read = (!asked.is_empty()).then(|| asked.to_vec());
    let (sync, captured) = (Duration::from_nanos(word(0)), captured.to_vec());
    Report { sync, sent: word(1), marks: Vec::new(), read, captured }
}
