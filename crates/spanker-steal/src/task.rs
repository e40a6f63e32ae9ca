// SPDX-License-Identifier: Apache-2.0
//! A task: items that a backend has under a lease, with memory for their outputs. It knows how to answer, and answers
//! even if it is forgotten.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::backend::Failure;
use crate::claims::{Claims, Piece};
use crate::job::Cancel;
use crate::ledger::Token;
use crate::ledger::audit::unit_sums;
use crate::sync::run::{Clock, Condvar, Mutex, SyncSender};

/// What lanes and tasks tell whoever keeps the ledger.
pub(crate) enum Message {
    Claimed {
        token: Token,
        piece: Piece,
        at: Duration,
    },
    Completed {
        token: Token,
        items: Range<usize>,
        out: Vec<u8>,
        sums: Option<Vec<u32>>,
        at: Duration,
    },
    Failed {
        token: Token,
        failure: Failure,
        out: Vec<u8>,
        at: Duration,
    },
}

/// How to answer, for all tasks of a lane.
pub(crate) struct Line {
    pub(crate) sender: SyncSender<Message>,
    pub(crate) clock: Clock,
    pub(crate) claims: Arc<Claims>,
    pub(crate) cancel: Cancel,
    /// The bytes of one item and the items of one unit.
    pub(crate) bytes: usize,
    pub(crate) grain: usize,
    pub(crate) checksums: bool,
    /// Whether the lane's task has been answered.
    answered: Mutex<bool>,
    bell: Condvar,
}

impl Line {
    pub(crate) fn new(
        sender: SyncSender<Message>,
        clock: Clock,
        claims: Arc<Claims>,
        job: &crate::Job,
    ) -> Line {
        Line {
            sender,
            clock,
            claims,
            cancel: job.canceller(),
            bytes: job.bytes,
            grain: job.unit(),
            checksums: job.options.checksums,
            answered: Mutex::new(true),
            bell: Condvar::new(),
        }
    }

    /// A task on this line, which has no other now.
    pub(crate) fn task(
        self: &Arc<Self>,
        token: Token,
        items: Range<usize>,
        mut out: Vec<u8>,
    ) -> Task {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = false;
        out.resize(items.len() * self.bytes, 0);
        Task { token, items, out, line: Arc::clone(self), answered: false }
    }

    /// Sends a message. Nobody listens after the end of a run, and that is fine.
    pub(crate) fn tell(&self, message: Message) -> bool {
        self.sender.send(message).is_ok()
    }

    /// Waits until the lane's task has been answered, however long that takes: a lane has one task at a time.
    pub(crate) fn wait(&self) {
        let mut answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        while !*answered {
            answered = self.bell.wait(answered).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn answered(&self) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.bell.notify_all();
    }
}

/// Items for a backend to do, and the memory for their outputs.
///
/// It may be kept, sent to another thread and answered from there. One that is dropped has failed.
pub struct Task {
    token: Token,
    items: Range<usize>,
    out: Vec<u8>,
    line: Arc<Line>,
    answered: bool,
}

impl Task {
    /// The items to do.
    #[must_use]
    pub fn items(&self) -> Range<usize> {
        self.items.clone()
    }

    /// Where the outputs go, in order of the items.
    pub fn output(&mut self) -> &mut [u8] {
        &mut self.out
    }

    /// Whether anyone still waits for it: not after the run has ended or was cancelled.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        !self.line.claims.is_closed() && !self.line.cancel.is_cancelled()
    }

    /// The sums of each unit's bytes, where the job wants them.
    #[must_use]
    pub fn sums(&self) -> Option<Vec<u32>> {
        let Line { checksums, grain, bytes, .. } = *self.line;
        checksums.then(|| unit_sums(&self.out, self.items.len(), grain, bytes))
    }

    /// The outputs are there. If the lease is lost by now, they do not count.
    pub fn complete(self) {
        let (items, sums) = (self.items(), self.sums());
        self.complete_as(items, sums);
    }

    /// The same for a backend that says itself what it has done, and where the job wants checksums, with what sums of
    /// each unit's bytes ([`unit_sum`](crate::unit_sum)), made where the bytes were. Items other than those of
    /// the task are refused, and so are bytes that do not have these sums.
    pub fn complete_as(mut self, items: Range<usize>, sums: Option<Vec<u32>>) {
        self.answered = true;
        let out = std::mem::take(&mut self.out);
        let at = self.line.clock.elapsed();
        self.line.tell(Message::Completed { token: self.token, items, out, sums, at });
    }

    /// The outputs will not come.
    pub fn fail(mut self, failure: Failure) {
        self.answer(failure);
    }

    fn answer(&mut self, failure: Failure) {
        self.answered = true;
        let out = std::mem::take(&mut self.out);
        let at = self.line.clock.elapsed();
        self.line.tell(Message::Failed { token: self.token, failure, out, at });
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if !self.answered {
            let panicking = std::thread::panicking();
            let what = if panicking { "panicked" } else { "dropped its task without an answer" };
            self.answer(Failure::passing(what));
        }
        self.line.answered();
    }
}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").field("items", &self.items).finish_non_exhaustive()
    }
}
