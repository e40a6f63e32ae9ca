// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a job. A run that ends early says what was done and what was not.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::claims::{MOST_BACKENDS, MOST_ITEMS};

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StealError {
    /// A job without items.
    #[error("the job has no items")]
    NoItems,
    /// Nobody to do the job.
    #[error("there is no backend to run {items} items on")]
    NoBackends {
        /// Items of the job.
        items: usize,
    },
    /// More backends than sets of them can hold.
    #[error("{backends} backends: a job has at most {MOST_BACKENDS}")]
    TooManyBackends {
        /// Backends as given.
        backends: usize,
    },
    /// More items than can be counted safely.
    #[error("{items} items: a job has at most {MOST_ITEMS}")]
    TooManyItems {
        /// Items as given.
        items: usize,
    },
    /// Items times bytes overflows.
    #[error("{items} items of {bytes} bytes are more than memory can be addressed")]
    Overflow {
        /// Items of the job.
        items: usize,
        /// Bytes of each output.
        bytes: usize,
    },
    /// The caller's memory does not fit the job.
    #[error("the output has {have} bytes, and {items} items of {bytes} bytes need {need}")]
    Output {
        /// Bytes as given.
        have: usize,
        /// Bytes that it takes.
        need: usize,
        /// Items of the job.
        items: usize,
        /// Bytes of each output.
        bytes: usize,
    },
    /// A part of the job's description makes no sense.
    #[error("{what}")]
    Job {
        /// What is wrong with which value.
        what: String,
    },
    /// There was no memory for the list.
    #[error("no memory for a list of {shards} shards")]
    Memory {
        /// Entries of the list.
        shards: usize,
    },
    /// Another run of the same scheduler is not over.
    #[error("the scheduler is busy with another run")]
    Busy,
    /// No backend is left that works.
    #[error("every backend is lost: {0}")]
    AllLost(Box<Unfinished>),
    /// No backend answers any more.
    #[error("no backend has answered for {waited:?}: {unfinished}")]
    Stalled {
        /// How long nothing happened.
        waited: Duration,
        /// What is done and what is not.
        unfinished: Box<Unfinished>,
    },
    /// These items fail wherever they are run.
    #[error("items {}..{} failed on every backend that works, last: {last}; {unfinished}", items.start, items.end)]
    Refused {
        /// The items.
        items: Range<usize>,
        /// What the last backend said.
        last: String,
        /// What is done and what is not.
        unfinished: Box<Unfinished>,
    },
    /// Backends gave different bytes, and there is nobody to decide.
    #[error("items {}..{} came out differently on {} and {}, and no other backend can decide; {unfinished}", items.start, items.end, backends[0], backends[1])]
    Disagreement {
        /// The items.
        items: Range<usize>,
        /// The names of the two.
        backends: [String; 2],
        /// What is done and what is not.
        unfinished: Box<Unfinished>,
    },
    /// Outputs that a reader has had turned out to be wrong.
    #[error("the outputs of items {}..{} were given out before their backend was found to give wrong bytes; a sample of 1 compares everything first", items.start, items.end)]
    Tainted {
        /// The items.
        items: Range<usize>,
    },
    /// The job was cancelled.
    #[error("cancelled: {0}")]
    Cancelled(Box<Unfinished>),
}

impl StealError {
    /// What was done and what was not, if the run had begun.
    #[must_use]
    pub fn unfinished(&self) -> Option<&Unfinished> {
        match self {
            StealError::AllLost(unfinished)
            | StealError::Cancelled(unfinished)
            | StealError::Stalled { unfinished, .. }
            | StealError::Refused { unfinished, .. }
            | StealError::Disagreement { unfinished, .. } => Some(unfinished),
            _ => None,
        }
    }
}

/// What is done of a job that did not end well.
#[derive(Debug, Clone, PartialEq)]
pub struct Unfinished {
    /// What happened until then. The outputs of items that are done are in the caller's memory.
    pub report: crate::Report,
    /// The items that are not done, in order.
    pub missing: Vec<Range<usize>>,
}

/// Ranges that a message names.
const NAMED: usize = 4;

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} items are done", self.report.done, self.report.items)?;
        for (place, range) in self.missing.iter().take(NAMED).enumerate() {
            let before = if place == 0 { "; not done: " } else { ", " };
            write!(f, "{before}{}..{}", range.start, range.end)?;
        }
        if self.missing.len() > NAMED {
            write!(f, " and {} more ranges", self.missing.len() - NAMED)?;
        }
        for backend in &self.report.backends {
            if let Some(why) = &backend.benched {
                write!(f, "; {}: {why}", backend.name)?;
            }
        }
        Ok(())
    }
}
