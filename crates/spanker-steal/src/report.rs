// SPDX-License-Identifier: Apache-2.0
//! What happened in a run: how much each backend did, how fast, and what went wrong.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// So many incidents are kept; more are counted only.
pub(crate) const MOST_INCIDENTS: usize = 1000;

/// A run, or what there is of it so far.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Items of the job.
    pub items: usize,
    /// Items whose outputs were accepted and stand.
    pub done: usize,
    /// Items whose outputs were accepted more than once without having been thrown out before. Always zero:
    /// it is counted apart from everything that sees to it.
    pub duplicated: usize,
    /// Items that were thrown out after all, and done again by somebody else.
    pub redone: usize,
    /// Items that a second backend did to compare.
    pub audited: usize,
    /// From the first claim to the last acceptance.
    pub elapsed: Duration,
    /// Each backend, in the order in which they were given.
    pub backends: Vec<BackendReport>,
    /// What went wrong, in order; the first thousand.
    pub incidents: Vec<Incident>,
    /// Incidents beyond those.
    pub more_incidents: usize,
}

/// What one backend did.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendReport {
    /// Its kind and its place among those of its kind, such as `cpu0`.
    pub name: String,
    /// Items whose outputs were accepted from it and stand.
    pub items: usize,
    /// Tasks whose outputs were accepted.
    pub chunks: usize,
    /// Items a second while it works, of all its tasks together, as estimated in the end. Zero if nothing is known.
    pub rate: f64,
    /// Items of its last task.
    pub last_chunk: usize,
    /// Why it gets no more work, if so.
    pub benched: Option<String>,
}

/// Something that went wrong, and cost no more than what it says.
#[derive(Debug, Clone, PartialEq)]
pub struct Incident {
    /// Since the start of the run.
    pub at: Duration,
    /// The name of the backend.
    pub backend: String,
    /// What it was.
    pub kind: IncidentKind,
    /// The items that it is about.
    pub items: Range<usize>,
    /// More about it.
    pub what: String,
}

/// Kinds of incidents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum IncidentKind {
    /// The backend said that it failed, or panicked: others do the items.
    Failed,
    /// The lease ran out, and somebody else has taken the items.
    Expired,
    /// An answer for a lease that was lost, or never was: refused.
    Refused,
    /// The answer was for other items than the lease: refused.
    Lied,
    /// The bytes were wrong.
    WrongBytes,
    /// A timing that cannot be true: not believed.
    Implausible,
    /// Items that nobody held and nobody had done: given out again.
    Swept,
    /// The backend gets no more work.
    Benched,
}

impl IncidentKind {
    /// The kind in a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            IncidentKind::Failed => "failed",
            IncidentKind::Expired => "expired",
            IncidentKind::Refused => "refused",
            IncidentKind::Lied => "lied",
            IncidentKind::WrongBytes => "wrong bytes",
            IncidentKind::Implausible => "implausible",
            IncidentKind::Swept => "swept",
            IncidentKind::Benched => "benched",
        }
    }
}

impl fmt::Display for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.backend, self.kind.name())?;
        if !self.items.is_empty() {
            write!(f, ", items {}..{}", self.items.start, self.items.end)?;
        }
        if self.what.is_empty() { Ok(()) } else { write!(f, ": {}", self.what) }
    }
}
