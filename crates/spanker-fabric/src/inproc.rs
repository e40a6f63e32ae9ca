// SPDX-License-Identifier: Apache-2.0
//! The in-process fabric: ranks are threads, messages go through queues in memory.
//!
//! A message is sent as a reference: the sender has written it once, any number of receivers read it, and a receiver
//! that forwards it forwards the reference.
//!
//! A rank that waits gives up its core to the others first and sleeps only after a while: groups are
//! often larger than the number of cores.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spanker_collective::{Algorithm, Collective, Rank};

use crate::{Call, Fabric, FabricError, Message};

/// Messages that may wait on the way from one rank to another before the sender waits too.
const QUEUE: usize = 8;

/// How often a rank that waits gives up its core before it sleeps.
const YIELDS: u32 = 200;

/// How long a rank sleeps before it checks again whether the others run the same call.
const RECHECK: Duration = Duration::from_millis(10);

/// A group of `ranks` connected ends, in rank order. Each goes to a thread of its own.
///
/// Dropping an end is the death of its rank: whoever still needs it gets
/// [`FabricError::Died`].
#[must_use]
pub fn group(ranks: usize) -> Vec<Inproc> {
    let shared = Arc::new(Shared {
        inboxes: (0..ranks).map(|_| Inbox::new(ranks)).collect(),
        group: Mutex::new(Group { arrived: vec![false; ranks], call: None, fault: None }),
        committed: AtomicU64::new(0),
        faulty: AtomicBool::new(false),
        arriving: AtomicBool::new(false),
    });
    (0..ranks).map(|rank| Inproc { rank, shared: Arc::clone(&shared), commits: 0 }).collect()
}

/// The algorithm that suits this fabric for a collective of `bytes` over `ranks` ranks.
///
/// Ranks that share a few cores pay for every round with a change of threads, so short messages go in
/// one round and long ones in two; only large groups, where that means too many messages, take more.
#[must_use]
pub fn suited(collective: Collective, ranks: usize, bytes: usize) -> Algorithm {
    const SHORT: usize = 16 * 1024;
    match collective {
        Collective::AllReduce | Collective::Barrier if ranks > 16 => Algorithm::HalvingDoubling,
        Collective::AllReduce if bytes > SHORT => Algorithm::TwoShot,
        Collective::Broadcast { .. } | Collective::Reduce { .. } if ranks > 16 => Algorithm::Tree,
        Collective::Reduce { .. } if bytes > SHORT => Algorithm::TwoShot,
        _ => Algorithm::OneShot,
    }
}

/// One rank's end of an in-process group.
#[derive(Debug)]
pub struct Inproc {
    rank: Rank,
    shared: Arc<Shared>,
    commits: u64,
}

/// A message in a queue, with the call that it belongs to.
#[derive(Debug)]
struct Envelope {
    call: Call,
    message: Message,
}

#[derive(Debug)]
struct Shared {
    inboxes: Box<[Inbox]>,
    group: Mutex<Group>,
    /// Calls that every rank has agreed to be complete.
    committed: AtomicU64,
    faulty: AtomicBool,
    /// Some rank has completed the current call, so locking the group to compare calls is worth it.
    arriving: AtomicBool,
}

/// What the group agrees on.
#[derive(Debug)]
struct Group {
    /// Ranks that have completed the current call.
    arrived: Vec<bool>,
    /// The first of them, and what it completed.
    call: Option<(Rank, Call)>,
    fault: Option<FabricError>,
}

impl Group {
    /// The fault of a rank whose call is not the one that others have completed.
    fn disagreement(&self, call: &Call, rank: Rank) -> Option<FabricError> {
        self.call.and_then(|(first, theirs)| call.mismatch(&theirs, rank, first))
    }
}

#[derive(Debug)]
#[repr(align(128))]
struct Inbox {
    queues: Mutex<Queues>,
    /// Counts everything that may let the rank go on: it need not lock to see that nothing has.
    news: AtomicU64,
    wake: Condvar,
}

#[derive(Debug)]
struct Queues {
    from: Vec<VecDeque<Envelope>>,
    /// Senders that found their queue full.
    blocked: Vec<Rank>,
    asleep: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half-done under these locks, so a panic elsewhere does not spoil them.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inbox {
    fn new(ranks: usize) -> Self {
        Inbox {
            queues: Mutex::new(Queues {
                from: (0..ranks).map(|_| VecDeque::new()).collect(),
                blocked: Vec::new(),
                asleep: false,
            }),
            news: AtomicU64::new(0),
            wake: Condvar::new(),
        }
    }

    /// Tells the owner that it may be able to go on.
    fn notify(&self) {
        self.notify_locked(lock(&self.queues));
    }

    fn notify_locked(&self, queues: MutexGuard<'_, Queues>) {
        self.news.fetch_add(1, Ordering::Release);
        let asleep = queues.asleep;
        drop(queues);
        if asleep {
            self.wake.notify_one();
        }
    }
}

impl Shared {
    /// Records the first fault and wakes everyone. Returns the first fault.
    fn fail(&self, fault: FabricError) -> FabricError {
        self.fail_locked(lock(&self.group), fault)
    }

    fn fail_locked(&self, mut group: MutexGuard<'_, Group>, fault: FabricError) -> FabricError {
        let first = group.fault.get_or_insert(fault).clone();
        drop(group);
        self.faulty.store(true, Ordering::Release);
        for inbox in &self.inboxes {
            inbox.notify();
        }
        first
    }

    fn fault(&self) -> Option<FabricError> {
        self.faulty.load(Ordering::Acquire).then(|| lock(&self.group).fault.clone()).flatten()
    }
}

/// The state of a wait that first yields the core and then sleeps.
struct Backoff {
    yields: u32,
    seen: u64,
}

impl Inproc {
    fn inbox(&self) -> &Inbox {
        &self.shared.inboxes[self.rank]
    }

    fn backoff(&self) -> Backoff {
        Backoff { yields: 0, seen: self.inbox().news.load(Ordering::Acquire) }
    }

    /// Waits until something has happened since `backoff.seen`, or it is time to check the group again, or the
    /// deadline has passed. Returns false in the last case.
    fn pause(&self, backoff: &mut Backoff, deadline: Instant) -> bool {
        let inbox = self.inbox();
        loop {
            let news = inbox.news.load(Ordering::Acquire);
            if news != backoff.seen {
                *backoff = Backoff { yields: 0, seen: news };
                return true;
            }
            if backoff.yields < YIELDS {
                backoff.yields += 1;
                // Reading the clock costs as much as giving up the core, so it is read now and then.
                if backoff.yields.is_multiple_of(32) && Instant::now() >= deadline {
                    return false;
                }
                std::thread::yield_now();
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            let mut queues = lock(&inbox.queues);
            if inbox.news.load(Ordering::Acquire) == backoff.seen {
                queues.asleep = true;
                let (mut queues, timed_out) = inbox
                    .wake
                    .wait_timeout(queues, left.min(RECHECK))
                    .unwrap_or_else(PoisonError::into_inner);
                queues.asleep = false;
                if timed_out.timed_out() && left > RECHECK {
                    return true;
                }
            }
        }
    }

    /// Puts a message into the receiver's queue, unless that is full.
    fn post(&self, to: Rank, call: &Call, message: &Message) -> bool {
        let inbox = &self.shared.inboxes[to];
        let mut queues = lock(&inbox.queues);
        if queues.from[self.rank].len() >= QUEUE {
            if !queues.blocked.contains(&self.rank) {
                queues.blocked.push(self.rank);
            }
            return false;
        }
        let envelope = Envelope { call: *call, message: message.clone() };
        queues.from[self.rank].push_back(envelope);
        inbox.notify_locked(queues);
        true
    }

    /// Removes the next message of rank `from` from its queue, if there is one.
    fn next(&self, from: Rank) -> Option<Envelope> {
        let mut queues = lock(&self.inbox().queues);
        let envelope = queues.from[from].pop_front()?;
        let unblocked = queues.blocked.iter().position(|&sender| sender == from);
        if let Some(index) = unblocked {
            queues.blocked.swap_remove(index);
            drop(queues);
            self.shared.inboxes[from].notify();
        }
        Some(envelope)
    }

    /// Sends what can be sent, in order for each receiver, and keeps the rest in `unsent`.
    fn post_all(&self, call: &Call, sends: &[(Rank, Message)], unsent: &mut Vec<usize>) {
        let mut full: Vec<Rank> = Vec::new();
        unsent.retain(|&index| {
            let (to, message) = &sends[index];
            let sent = !full.contains(to) && self.post(*to, call, message);
            if !sent {
                full.push(*to);
            }
            !sent
        });
    }

    /// Receives what has arrived, in order for each sender, and keeps the rest in `missing`.
    fn receive_all(
        &self,
        call: &Call,
        receives: &[Rank],
        missing: &mut Vec<usize>,
        messages: &mut [Option<Message>],
    ) -> Result<(), FabricError> {
        let mut empty: Vec<Rank> = Vec::new();
        let mut fault = None;
        missing.retain(|&index| {
            let from = receives[index];
            if empty.contains(&from) || fault.is_some() {
                return true;
            }
            let Some(envelope) = self.next(from) else {
                empty.push(from);
                return true;
            };
            fault = call.mismatch(&envelope.call, self.rank, from);
            messages[index] = Some(envelope.message);
            false
        });
        fault.map_or(Ok(()), Err)
    }
}

impl Fabric for Inproc {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.inboxes.len()
    }

    fn exchange(
        &mut self,
        call: &Call,
        sends: &[(Rank, Message)],
        receives: &[Rank],
        deadline: Instant,
    ) -> Result<Vec<Message>, FabricError> {
        let mut backoff = self.backoff();
        let mut unsent: Vec<usize> = (0..sends.len()).collect();
        let mut missing: Vec<usize> = (0..receives.len()).collect();
        let mut messages: Vec<Option<Message>> = vec![None; receives.len()];
        loop {
            self.post_all(call, sends, &mut unsent);
            if let Err(fault) = self.receive_all(call, receives, &mut missing, &mut messages) {
                return Err(self.shared.fail(fault));
            }
            if unsent.is_empty() && missing.is_empty() {
                return Ok(messages.into_iter().flatten().collect());
            }
            // Only a rank that cannot go on reports a fault, so that what was sent before it counts.
            if let Some(fault) = self.shared.fault() {
                return Err(fault);
            }
            // Others may have completed a call that has no message for this rank.
            if self.shared.arriving.load(Ordering::Acquire) {
                let group = lock(&self.shared.group);
                if let Some(fault) = group.disagreement(call, self.rank) {
                    return Err(self.shared.fail_locked(group, fault));
                }
            }
            if !self.pause(&mut backoff, deadline) {
                let (peer, what) = match missing.first() {
                    Some(&index) => (receives[index], "to receive from"),
                    None => (sends[unsent[0]].0, "to send to"),
                };
                let fault = FabricError::Deadline { rank: self.rank, peer, what };
                return Err(self.shared.fail(fault));
            }
        }
    }

    fn commit(&mut self, call: &Call, deadline: Instant) -> Result<(), FabricError> {
        let mine = self.commits;
        self.commits += 1;
        let mut backoff = self.backoff();
        let mut group = lock(&self.shared.group);
        if let Some(fault) = &group.fault {
            return Err(fault.clone());
        }
        if let Some(fault) = group.disagreement(call, self.rank) {
            return Err(self.shared.fail_locked(group, fault));
        }
        group.call.get_or_insert((self.rank, *call));
        group.arrived[self.rank] = true;
        self.shared.arriving.store(true, Ordering::Release);
        if group.arrived.iter().all(|&arrived| arrived) {
            group.arrived.fill(false);
            group.call = None;
            self.shared.arriving.store(false, Ordering::Release);
            self.shared.committed.store(mine + 1, Ordering::Release);
            drop(group);
            for inbox in &self.shared.inboxes {
                inbox.notify();
            }
            return Ok(());
        }
        drop(group);
        loop {
            let fault = self.shared.fault();
            // The last rank may have arrived before the fault came: then the call is complete.
            if self.shared.committed.load(Ordering::Acquire) > mine {
                return Ok(());
            }
            if let Some(fault) = fault {
                return Err(fault);
            }
            if !self.pause(&mut backoff, deadline) {
                let group = lock(&self.shared.group);
                if self.shared.committed.load(Ordering::Acquire) > mine {
                    return Ok(());
                }
                let missing = group.arrived.iter().position(|&arrived| !arrived);
                let peer = missing.unwrap_or(self.rank);
                let what = "for the end of the call on";
                let fault = FabricError::Deadline { rank: self.rank, peer, what };
                return Err(self.shared.fail_locked(group, fault));
            }
        }
    }

    fn abort(&mut self, error: FabricError) -> FabricError {
        self.shared.fail(error)
    }
}

impl Drop for Inproc {
    fn drop(&mut self) {
        self.shared.fail(FabricError::Died { rank: self.rank });
    }
}
