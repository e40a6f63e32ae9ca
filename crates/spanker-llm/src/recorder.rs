// SPDX-License-Identifier: Apache-2.0
//! What cards did when, kept for a trace. Runners write to it, whoever asked for it reads it.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use spanker_plan::Mark;

/// Marks of a run. Copies write to the same list.
#[derive(Debug, Clone, Default)]
pub struct Recorder {
    marks: Arc<Mutex<Vec<Mark>>>,
    /// What cards' clocks showed when the run began, in picoseconds.
    origin: Arc<OnceLock<u64>>,
}

impl Recorder {
    /// An empty list.
    #[must_use]
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// An empty list for what another runner does in the same run: times count from the same moment, so what
    /// cards did before a loss comes before what they did after it.
    #[must_use]
    pub fn successor(&self) -> Recorder {
        Recorder { marks: Arc::default(), origin: Arc::clone(&self.origin) }
    }

    /// The clock's time that the run counts from: that of the first runner which asks.
    pub(crate) fn origin(&self, clock: u64) -> u64 {
        *self.origin.get_or_init(|| clock)
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

impl From<Vec<Mark>> for Recorder {
    fn from(marks: Vec<Mark>) -> Recorder {
        Recorder { marks: Arc::new(Mutex::new(marks)), origin: Arc::default() }
    }
}
