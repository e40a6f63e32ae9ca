// SPDX-License-Identifier: Apache-2.0
//! What audits checked and found, kept for a report. Runners write to it, whoever asked for it reads it.

use std::sync::{Arc, Mutex, PoisonError};

/// A card that was wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The card's index.
    pub card: usize,
    /// Tokens before the step in which it was found.
    pub past: usize,
    /// What was wrong.
    pub what: String,
}

/// What audits of a run checked and found. Copies write to the same list.
#[derive(Debug, Clone, Default)]
pub struct AuditLog {
    fraction: f64,
    state: Arc<Mutex<(u64, Vec<Found>)>>,
}

impl AuditLog {
    /// Nothing was checked yet; this part is going to be.
    #[must_use]
    pub fn new(fraction: f64) -> AuditLog {
        AuditLog { fraction, ..AuditLog::default() }
    }

    /// The part that is checked: see `Request::audit`.
    #[must_use]
    pub fn fraction(&self) -> f64 {
        self.fraction
    }

    pub(crate) fn count(&self, checked: u64) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0 += checked;
    }

    pub(crate) fn add(&self, found: Found) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1.push(found);
    }

    /// Operators that were checked; where only whole steps are compared, steps.
    #[must_use]
    pub fn checked(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// Cards that were wrong, in the order in which they were found.
    #[must_use]
    pub fn found(&self) -> Vec<Found> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }
}
