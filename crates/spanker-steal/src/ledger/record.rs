// SPDX-License-Identifier: Apache-2.0
//! What the ledger tells: reports, incidents, and what is not done.

use std::ops::Range;
use std::time::Duration;

use super::{Ledger, Standing};
use crate::error::Unfinished;
use crate::report::{BackendReport, Incident, IncidentKind, MOST_INCIDENTS, Report};

impl Ledger {
    /// What happened so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let backend = |member: &Standing| BackendReport {
            name: member.name.clone(),
            items: member.done.len(),
            chunks: member.chunks,
            rate: member.rate.items_per_second() * member.capabilities.lanes() as f64,
            last_chunk: member.last_chunk,
            benched: member.benched.clone(),
        };
        Report {
            items: self.items,
            done: self.done.len(),
            duplicated: self.duplicated,
            redone: self.redone,
            audited: self.audited,
            elapsed: self.accepted,
            backends: self.members.iter().map(backend).collect(),
            incidents: self.incidents.clone(),
            more_incidents: self.more_incidents,
        }
    }

    pub(super) fn unfinished(&self) -> Box<Unfinished> {
        let missing = self.done.gaps(0..self.items).collect();
        Box::new(Unfinished { report: self.report(), missing })
    }

    pub(super) fn note(
        &mut self,
        backend: usize,
        kind: IncidentKind,
        items: Range<usize>,
        what: String,
        at: Duration,
    ) {
        if self.incidents.len() >= MOST_INCIDENTS {
            self.more_incidents += 1;
            return;
        }
        let name = self.members.get(backend).map_or("nobody", |member| &member.name);
        self.incidents.push(Incident { at, backend: name.to_owned(), kind, items, what });
    }
}
