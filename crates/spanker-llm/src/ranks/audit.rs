// SPDX-License-Identifier: Apache-2.0
//! Checks of what ranks compute: every rank reports what its taps kept, and the leader computes it again.
//!
//! A rank reads its own copy of the model's file, from its own disk into its own memory, and its results come over a
//! network: whatever of this is wrong, the operators of that rank do not give the bits that the leader gets from its
//! copy.

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Instant;

use spanker_fabric::device::DeviceError;
use spanker_plan::{Buffer, CardLayout, Piece, Place, Plan, Programs, Taps};

use super::{Leader, OnRanks, part, planned};
use crate::audit::{AuditLog, Auditor, Found, Member, Written, disagreeing};
use crate::card::Report;
use crate::runner::{Asked, Step};
use crate::twice::Searched;
use crate::{LlmError, Network};

/// What the leader needs to check ranks.
pub(super) struct Audited {
    auditor: Auditor<'static>,
    /// The programs of all cards with weights where the layout has them: ranks have theirs in their files.
    programs: Programs,
    layouts: Vec<CardLayout>,
}

/// What is checked of a step.
#[derive(Debug)]
pub(super) struct Checked {
    taps: Vec<Taps>,
    written: Written,
    past: usize,
}

impl<'f, F, B> OnRanks<F, B>
where
    F: DerefMut<Target = Leader<'f>>,
    B: AsRef<[u8]> + Send + Sync + 'static,
{
    /// Compares from now on what ranks keep of their operators with what this rank makes of it: the part of them that
    /// the plan's request says. `log` gets what is found.
    ///
    /// # Errors
    /// [`LlmError::Plan`] if it is not the plan that was laid out.
    pub fn audit(
        &mut self,
        network: &Arc<Network<B>>,
        plan: &Plan,
        log: &AuditLog,
    ) -> Result<(), LlmError> {
        let space = self.rank_part.programs.space();
        let space = (space.context as usize, space.batch as usize);
        let planned = planned(network, plan, space, 1, false)?;
        let layouts = planned.cards();
        let mut weight = |member: usize, piece: &Piece| {
            let pieces = &layouts[member].weights.pieces;
            let known = pieces.iter().find(|(known, _)| known == piece);
            let offset = known.map_or(0, |(_, offset)| *offset);
            Place { buffer: Buffer::Weights.symbol(), offset }
        };
        let programs = planned.programs(network, (&mut weight, false), &mut |_, of| of.symbol());
        let auditor = Auditor::new(Arc::clone(network) as Arc<_>, space.0 as u64, log.clone());
        self.audited = Some(Audited { auditor, programs, layouts });
        Ok(())
    }
}

impl<F, B> OnRanks<F, B> {
    /// Computes again what ranks kept in a step, and compares it.
    pub(super) fn compare(
        &mut self,
        checked: &Checked,
        reports: &[Report],
    ) -> Result<(), LlmError> {
        let Some(Audited { auditor, layouts, .. }) = &mut self.audited else { return Ok(()) };
        auditor.forget(&checked.written);
        let (taps, past) = (&checked.taps, checked.past);
        for (at, (taps, report)) in taps.iter().zip(reports).enumerate() {
            let (kept, captured) = (taps.bytes, &report.captured[..]);
            if captured.len() as u64 != kept {
                let what = format!("taps of card {at} keep {} bytes, not {kept}", captured.len());
                return Err(LlmError::plan(what));
            }
            let member = Member { at, layout: &layouts[at], weights: Buffer::Weights.symbol() };
            if let Some(what) = auditor.check(member, taps, captured)? {
                return Err(self.blame(at, past, what));
            }
        }
        match disagreeing(taps, reports.iter().map(|report| &report.captured[..]))[..] {
            [] => Ok(()),
            [one] => {
                let what = "after a collective it has other bytes than the rest";
                Err(self.blame(one, past, what.into()))
            }
            _ => Err(LlmError::Unsure { past }),
        }
    }

    /// What is checked of a step, if anything is.
    pub(super) fn checked(&self, step: &Step<'_>, salt: u64) -> Option<Checked> {
        let audited = self.audited.as_ref()?;
        let (_, taps) = part::tapped(&audited.programs, step, salt);
        Some(Checked { taps, written: Written::of(step), past: Asked::of(step).past })
    }

    /// Tells the log of a rank that was found wrong, and makes the error.
    fn blame(&self, member: usize, past: usize, what: String) -> LlmError {
        let card = self.rank_part.ranks[member];
        if let Some(audited) = &self.audited {
            audited.auditor.log.add(Found { card, past, what: what.clone() });
        }
        DeviceError::wrong(card, what).into()
    }
}

impl<'f, F, B> Searched for OnRanks<F, B>
where
    F: DerefMut<Target = Leader<'f>>,
    B: AsRef<[u8]> + Send + Sync,
{
    fn attempt(&mut self, step: &Step<'_>, salt: u64) -> Result<(), LlmError> {
        self.go(step, (&[], salt), Instant::now())?;
        self.conclude().map(|_| ())
    }

    fn examine(&self, past: usize) -> LlmError {
        LlmError::Unsure { past }
    }
}
