// SPDX-License-Identifier: Apache-2.0
//! What cards did when, kept for a trace. Runners write to it, whoever asked for it reads it.

use std::sync::{Arc, Mutex, PoisonError};

use spanker_plan::Mark;

/// Marks of a run. Copies write to the same list.
#[derive(Debug, Clone, Default)]
pub struct Recorder {
    marks: Arc<Mutex<Vec<Mark>>>,
}

impl Recorder {
    /// An empty list.
    #[must_use]
    pub fn new() -> Recorder {
        Recorder::default()
    }

    pub(crate) fn add(&self, marks: impl IntoIterator<Item = Mark>) {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner).extend(marks);
    }

    /// Everything so far, in seconds since the run began.
    #[must_use]
    pub fn marks(&self) -> Vec<Mark> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
