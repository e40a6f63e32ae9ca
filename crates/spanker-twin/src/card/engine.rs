// SPDX-License-Identifier: Apache-2.0
//! Work in order, on the card's clock.
//!
//! The clock shows when the next descriptor starts. Operators move it on by what they cost. Transfers do not:
//! they end when their bytes have gone or come, and a fence moves the clock to the latest end of everything
//! before it. Between two fences the memory serves operators and transfers together: a fence is not before
//! all their traffic could have passed.

use std::collections::VecDeque;

use spanker_plan::load;
use spanker_runtime::{Descriptor, Fault, Place, Work, abi};

use super::compute::{SLICE, reach};
use super::costs::later;
use super::port::{Receive, TransferId};
use super::traffic::{kind, uses};
use super::{Card, ClientId};
use crate::spec::Pace;

/// Slices of operators in one call, about a millisecond together.
const SLICES: u64 = 8;
/// The cost of starting an operator, in bytes that could be moved meanwhile.
const START: u64 = 4 << 10;

/// The end of a transfer that has not ended.
pub(super) const OPEN: u64 = u64::MAX;

/// Work of one request.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(super) ticket: u64,
    pub(super) job: u64,
    pub(super) client: ClientId,
    pub(super) work: Vec<Descriptor>,
    /// The next descriptor to start.
    next: usize,
    /// When each transfer ended, once it has started.
    ended: Vec<u64>,
    /// Transfers that have started and not ended.
    open: usize,
    /// Of these, sends at each port.
    open_sends: Vec<u32>,
    /// The latest end so far.
    end: u64,
}

impl Submission {
    pub(super) fn new(
        ticket: u64,
        job: u64,
        client: ClientId,
        work: Vec<Descriptor>,
        ports: usize,
    ) -> Submission {
        let ended = vec![OPEN; work.len()];
        let open_sends = vec![0; ports];
        Submission { ticket, job, client, work, next: 0, ended, open: 0, open_sends, end: 0 }
    }

    /// What it counts for in the queue, by the memory that it needs: a descriptor for one, four sources of a
    /// reduction for one more, and the submission itself for one.
    pub(super) fn weight(&self) -> usize {
        let sources = |one: &Descriptor| match &one.work {
            Work::Reduce { sources, .. } => sources.len(),
            _ => 0,
        };
        self.work.iter().map(|one| 1 + sources(one) / 4).sum::<usize>() + 1
    }

    /// Whether bytes that it sent at a port are not known to have arrived.
    pub(super) fn sends_on(&self, port: usize) -> bool {
        self.open_sends[port] > 0
    }

    /// Whether its work uses a buffer.
    pub(super) fn uses(&self, buffer: u64) -> bool {
        self.work.iter().any(|one| uses(&one.work, buffer))
    }
}

/// A send that was started.
#[derive(Debug)]
pub(crate) struct Send {
    pub(super) id: TransferId,
    pub(super) job: u64,
    pub(super) after: Option<TransferId>,
    pub(super) issued: u64,
    pub(super) port: usize,
    pub(super) from: Place,
    pub(super) length: u64,
    pub(super) tag: u32,
    /// Bytes passed to the link, and when the last of them has left; nothing before the first frame.
    pub(super) sent: Option<(u64, u64)>,
}

/// Lanes that send one message at a time.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    pub(super) queue: VecDeque<Send>,
    /// Card time at which they are free.
    pub(super) free: u64,
}

/// Why the next descriptor does not start.
enum Stop {
    /// It did, or there is none.
    Nothing,
    /// It waits for something.
    Waits,
    /// It is at work and needs more calls.
    Busy,
}

impl Card {
    /// The lanes that a port sends on.
    pub(super) fn lane_of(&self, port: usize) -> usize {
        if self.ports[port].spec.shared_lanes { 0 } else { port + 1 }
    }

    /// Adds work to the queue.
    pub(super) fn enqueue(&mut self, submission: Submission) {
        if self.queue.is_empty() {
            // The request itself crosses the host link.
            self.clock = match self.spec.pace {
                Pace::Card => later(self.clock, self.costs.host(0)),
                _ => self.clock.max(self.wall()),
            };
            self.horizon = self.clock;
            self.own = self.clock;
            self.epoch = (self.clock, 0);
        }
        self.note(abi::RECORD_SUBMITTED, 0, submission.ticket, submission.work.len() as u64);
        self.queued += submission.weight();
        self.queue.push_back(submission);
    }

    /// Starts descriptors. Says whether anything happened, and whether an operator wants more calls.
    pub(super) fn issue(&mut self) -> (bool, bool) {
        let mut happened = false;
        let mut budget = SLICES * SLICE;
        while let Some(submission) = self.queue.get(self.cursor) {
            let Some(descriptor) = submission.work.get(submission.next) else {
                self.cursor += 1;
                continue;
            };
            let ticket = submission.ticket;
            let after = descriptor.after.map(|at| TransferId { ticket, index: at as usize });
            let stop = match &descriptor.work {
                Work::Send { .. } | Work::Receive { .. } => self.start_transfer(after),
                Work::Fence { not_before_ps } => self.fence(*not_before_ps),
                _ => self.operate(after, &mut budget),
            };
            match stop {
                Stop::Nothing => {
                    happened = true;
                    self.progress += 1;
                }
                Stop::Waits => break,
                Stop::Busy => {
                    self.progress += 1;
                    // What is complete is complete, however long the rest takes.
                    self.settle();
                    return (true, true);
                }
            }
        }
        self.settle();
        (happened, false)
    }

    /// Moves on to the next descriptor of the submission at the cursor.
    fn passed(&mut self) {
        let (cursor, clock) = (self.cursor, self.clock);
        let submission = &mut self.queue[cursor];
        submission.next += 1;
        submission.end = submission.end.max(clock);
        self.counters.work += 1;
    }

    /// When a transfer of a submission that is still queued ended.
    pub(super) fn ended(&self, id: TransferId) -> Option<u64> {
        let first = self.queue.front()?.ticket;
        let at = usize::try_from(id.ticket.checked_sub(first)?).ok()?;
        // Tickets of failed jobs leave gaps.
        let near = self.queue.get(at).filter(|s| s.ticket == id.ticket);
        let submission = near.or_else(|| self.queue.iter().find(|s| s.ticket == id.ticket))?;
        submission.ended.get(id.index).copied().filter(|&end| end != OPEN)
    }

    fn start_transfer(&mut self, after: Option<TransferId>) -> Stop {
        let issued = self.time();
        let submission = &mut self.queue[self.cursor];
        let (job, index) = (submission.job, submission.next);
        let id = TransferId { ticket: submission.ticket, index };
        submission.open += 1;
        match submission.work[index].work {
            Work::Send { from, length, port, tag } => {
                let port = port as usize;
                submission.open_sends[port] += 1;
                let send = Send { id, job, after, issued, port, from, length, tag, sent: None };
                let lane = self.lane_of(port);
                self.lanes[lane].queue.push_back(send);
                self.count_traffic(length);
            }
            Work::Receive { into, length, port, tag, landing } => {
                let touched = match landing {
                    spanker_runtime::Landing::Store => length,
                    _ => 2 * length,
                };
                self.count_traffic(touched);
                let receive = Receive { id, job, after, issued, into, length, tag, landing };
                self.ports[port as usize].receives.push_back(receive);
            }
            _ => unreachable!("only transfers are started here"),
        }
        self.outstanding += 1;
        self.passed();
        Stop::Nothing
    }

    fn count_traffic(&mut self, bytes: u64) {
        self.epoch.1 = self.epoch.1.saturating_add(bytes);
        self.counters.memory_bytes = self.counters.memory_bytes.saturating_add(bytes);
    }

    fn fence(&mut self, not_before: u64) -> Stop {
        if self.outstanding > 0 {
            return Stop::Waits;
        }
        let memory = later(self.epoch.0, self.costs.memory(self.epoch.1));
        let own = self.clock.max(self.own).max(memory);
        let end = own.max(self.horizon).max(not_before);
        if self.spec.pace == Pace::Wall && end > self.wall() {
            return Stop::Waits;
        }
        if self.spec.pace == Pace::Unshaped {
            self.clock = self.wall();
        } else {
            let waited = self.horizon.saturating_sub(own);
            self.counters.waiting_ps = self.counters.waiting_ps.saturating_add(waited);
            self.clock = end;
        }
        self.horizon = self.clock;
        self.own = self.clock;
        self.epoch = (self.clock, 0);
        let ticket = self.queue[self.cursor].ticket;
        self.note(abi::RECORD_DONE, 0, ticket, u64::from(abi::WORK_FENCE));
        self.passed();
        Stop::Nothing
    }

    /// When a paced card may go on.
    pub(super) fn pace_timer(&self) -> Option<u64> {
        if self.spec.pace != Pace::Wall || self.outstanding > 0 || self.stuck {
            return None;
        }
        let submission = self.queue.get(self.cursor)?;
        let Work::Fence { not_before_ps } = submission.work.get(submission.next)?.work else {
            return None;
        };
        let memory = later(self.epoch.0, self.costs.memory(self.epoch.1));
        let end = self.clock.max(self.own).max(memory).max(self.horizon).max(not_before_ps);
        Some(end.div_ceil(1000))
    }

    /// Works on the operator at the cursor, as far as the budget of bytes goes.
    fn operate(&mut self, after: Option<TransferId>, budget: &mut u64) -> Stop {
        let waited = match after {
            None => 0,
            Some(id) => match self.ended(id) {
                None => return Stop::Waits,
                Some(end) => end,
            },
        };
        if *budget == 0 {
            return Stop::Busy;
        }
        let submission = &self.queue[self.cursor];
        let ticket = submission.ticket;
        let work = &submission.work[submission.next].work;
        let mut done = self.done.take().unwrap_or(0);
        loop {
            let slice = self.alu.slice(&mut self.memory, work, done);
            *budget = budget.saturating_sub(slice.spent);
            match slice.next {
                None => break,
                Some(next) => done = next,
            }
            if *budget == 0 {
                self.done = Some(done);
                return Stop::Busy;
            }
        }
        *budget = budget.saturating_sub(START);
        let before = submission.next.checked_sub(1).map(|at| &submission.work[at].work);
        let kind = kind(work);
        let reach = reach(&self.memory, work);
        let (bytes, macs, cost) = match load(work, before, &reach) {
            Some(load) => (load.bytes, load.macs, self.costs.work(&load)),
            None => (0, 0, 0),
        };
        self.clock = self.ends(later(self.clock.max(waited), cost));
        self.count_traffic(bytes);
        self.counters.multiplications = self.counters.multiplications.saturating_add(macs);
        self.counters.busy_ps = self.counters.busy_ps.saturating_add(cost);
        self.note(abi::RECORD_DONE, 0, ticket, u64::from(kind));
        self.passed();
        Stop::Nothing
    }

    /// A transfer has ended.
    pub(super) fn end_transfer(&mut self, id: TransferId, at: u64, send_port: Option<usize>) {
        let at = self.ends(at);
        let Some(submission) = self.queue.iter_mut().find(|s| s.ticket == id.ticket) else {
            return;
        };
        if submission.ended[id.index] != OPEN {
            return;
        }
        submission.ended[id.index] = at;
        submission.open -= 1;
        submission.end = submission.end.max(at);
        if let Some(port) = send_port {
            submission.open_sends[port] -= 1;
            self.own = self.own.max(at);
        }
        self.outstanding -= 1;
        self.horizon = self.horizon.max(at);
        self.progress += 1;
    }

    /// Completes submissions in order.
    pub(super) fn settle(&mut self) {
        let mut settled = false;
        while let Some(first) = self.queue.front() {
            let complete = first.next == first.work.len() && first.open == 0;
            if !complete {
                break;
            }
            let (client, ticket, end) = (first.client, first.ticket, first.end);
            self.queued -= first.weight();
            self.queue.pop_front();
            self.cursor = self.cursor.saturating_sub(1);
            self.completed = self.completed.max(ticket);
            self.note(abi::RECORD_COMPLETE, 0, ticket, 0);
            self.remember(client, ticket, Ok(end));
            settled = true;
        }
        if settled && self.queue.is_empty() {
            self.clock = self.clock.max(self.horizon);
        }
    }

    /// Removes the work of a failed job from the queue.
    pub(super) fn drop_submissions(&mut self, job: u64, fault: Fault) {
        let issuing = self.queue.get(self.cursor).map(|s| s.job);
        if issuing == Some(job) {
            self.done = None;
        }
        let before = self.queue.iter().take(self.cursor).filter(|s| s.job == job).count();
        self.cursor -= before;
        let (mut open, mut weight) = (0, 0);
        let mut tickets = Vec::new();
        self.queue.retain(|submission| {
            let stays = submission.job != job;
            if !stays {
                open += submission.open;
                weight += submission.weight();
                tickets.push((submission.client, submission.ticket));
            }
            stays
        });
        self.outstanding -= open;
        self.queued -= weight;
        for (client, ticket) in tickets {
            self.remember(client, ticket, Err(fault));
        }
    }
}
