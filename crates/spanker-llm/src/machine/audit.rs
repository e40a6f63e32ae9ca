// SPDX-License-Identifier: Apache-2.0
//! Checks of what a machine computes: in every step it captures inputs and results of a few of its instructions, and this
//! host computes them again.
//!
//! A step of one token takes as long as the host needs for that, so its captures are compared while the machine is at work
//! on the next step; those of longer steps at once.

use std::sync::Arc;

use spanker_fabric::device::DeviceError;
use spanker_plan::{Buffer, BufferId, CardLayout, Op, Programs};

use super::{Captures, Machine, OnMachine, Prepared};
use crate::audit::{AuditLog, Auditor, Found, Look, Looking, Member, Rows, Written};
use crate::runner::{Asked, Runner, Step};
use crate::twice::Searched;
use crate::{LlmError, Network};

/// What is needed to check a machine.
#[derive(Debug)]
pub(super) struct Audited {
    auditor: Auditor<'static>,
    members: Vec<Placed>,
    salt: u64,
    /// What is looked at in the step that is under way.
    begun: Option<Looked>,
    /// What was looked at in the last step, and what was captured of it.
    looked: Option<(Looked, Vec<Vec<u8>>)>,
}

/// What is looked at in a step.
#[derive(Debug)]
struct Looked {
    looks: Vec<Look>,
    programs: Arc<Vec<Vec<Op>>>,
    rows: Rows,
    written: Written,
    past: usize,
    bytes: Vec<u64>,
}

/// What a member holds, where its weights are, and the number of its card.
type Placed = (CardLayout, BufferId, usize);

impl Audited {
    /// Takes out what compares and counts, and has another in its place.
    pub(super) fn set_aside(&mut self) -> Auditor<'static> {
        let other = self.auditor.afresh();
        std::mem::replace(&mut self.auditor, other)
    }

    /// Compares and counts as before; what the other one was to compare is forgotten.
    pub(super) fn bring_back(&mut self, auditor: Auditor<'static>) {
        *self = Audited {
            auditor,
            members: std::mem::take(&mut self.members),
            begun: None,
            looked: None,
            ..*self
        };
    }
}

fn members(all: &[Placed]) -> Vec<Member<'_>> {
    let all = all.iter().enumerate();
    all.map(|(at, (layout, weights, _))| Member { at, layout, weights: *weights }).collect()
}

impl<M: Machine> OnMachine<M> {
    /// Compares from now on a part of what cards compute with what this host makes of it: as much as the request of the
    /// plan says that was loaded. `cards` are the numbers of the members' cards, `log` gets what is found.
    pub fn audit<B: AsRef<[u8]> + Send + Sync + 'static>(
        &mut self,
        network: &Arc<Network<B>>,
        cards: &[usize],
        log: &AuditLog,
    ) {
        let auditor =
            Auditor::new(Arc::clone(network) as Arc<_>, self.layout.space().context, log.clone());
        let members = self.cards.iter().zip(self.layout.members()).zip(cards);
        let members = members
            .map(|((layout, member), card)| {
                (layout.clone(), member.place(Buffer::Weights).buffer, *card)
            })
            .collect();
        let audited = Audited { auditor, members, salt: 0, begun: None, looked: None };
        self.audited = (!self.layout.space().audit.is_none()).then_some(audited);
    }

    /// Compares what was captured of the last step. The machine may be at work on the next one.
    pub(super) fn settle(&mut self) -> Result<(), LlmError> {
        let Some(audited) = &mut self.audited else { return Ok(()) };
        let Some((looked, captured)) = audited.looked.take() else { return Ok(()) };
        let Looked { looks, programs, rows, written, past, .. } = looked;
        let Audited { auditor, members: placed, .. } = audited;
        auditor.forget(&written);
        let wrong = auditor.compare(&looks, &programs, &members(placed), &rows, &captured)?;
        let Some((member, what)) = wrong else { return Ok(()) };
        let card = placed[member].2;
        auditor.log.add(Found { card, past, what: what.clone() });
        Err(DeviceError::wrong(card, what).into())
    }

    /// Takes what was captured of the step that is over. That of several tokens is compared at once.
    pub(super) fn collect(&mut self, step: &Step<'_>) -> Result<(), LlmError> {
        let Some(audited) = &mut self.audited else { return Ok(()) };
        let Some(looked) = audited.begun.take() else { return Ok(()) };
        let each = looked.bytes.iter().enumerate();
        let captured = each.map(|(member, &bytes)| self.machine.captured(member, bytes));
        let captured = captured.collect::<Result<_, _>>()?;
        audited.looked = Some((looked, captured));
        if step.rows() > 1 { self.settle() } else { Ok(()) }
    }
}

/// Chooses what is looked at in a step, and says what has to be captured for it. `whole` is the step with its copies.
pub(super) fn look<P>(
    audited: &mut Option<Audited>,
    layout: &Programs,
    ready: &Prepared<P>,
    (whole, step): (&Step<'_>, &Step<'_>),
) -> Result<Captures, LlmError> {
    let Some(audited) = audited else { return Ok(Captures::default()) };
    let rows = Rows::of(step);
    let (programs, labels, runs) = (&ready.ops[..], &ready.labels[..], &ready.runs[..]);
    let (rows_of, salt) = (&rows, audited.salt);
    let looking = Looking { layout, programs, labels, runs, step, rows: rows_of, salt };
    let (looks, bytes) = looking.choose(&audited.auditor, &members(&audited.members))?;
    let list = looks.iter().flat_map(Look::captures).collect();
    let place = |(member, bytes): (usize, &u64)| (layout.audit_place(member, step.turn), *bytes);
    let into = bytes.iter().enumerate().map(place).collect();
    let (programs, past) = (Arc::clone(&ready.ops), Asked::of(step).past);
    let written = Written::of(whole);
    audited.begun = Some(Looked { looks, programs, rows, written, past, bytes });
    Ok(Captures { list, into })
}

impl<M: Machine> Searched for OnMachine<M> {
    fn attempt(&mut self, step: &Step<'_>, salt: u64) -> Result<(), LlmError> {
        let with = |runner: &mut Self, salt: u64| {
            if let Some(audited) = &mut runner.audited {
                audited.salt = salt;
            }
        };
        with(self, salt);
        let done = self.step(step).and_then(|_| self.settle());
        with(self, 0);
        done
    }

    fn examine(&self, past: usize) -> LlmError {
        LlmError::Unsure { past }
    }
}
