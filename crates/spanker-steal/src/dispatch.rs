// SPDX-License-Identifier: Apache-2.0
//! A run: plain threads that claim, work and answer, and one caller who keeps the ledger. A thread that waits for its
//! task does nothing else, so that no backend can hold up another.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::backend::{Backend, Capabilities, Failure, panicked};
use crate::claims::{Claim, Claims};
use crate::error::StealError;
use crate::job::Job;
use crate::ledger::{Ledger, Member, Token, Verdict};
use crate::report::Report;
use crate::sync::run::{
    AtomicUsize, Clock, Condvar, Mutex, MutexGuard, Ordering, Receiver, receive, sync_channel,
    thread,
};
use crate::task::{Line, Message};

/// A lane that has nothing to do looks again after this long, whether or not it is called.
const IDLE: Duration = Duration::from_millis(20);
/// Whoever keeps the ledger looks after cancellation and progress this often.
const LOOK: Duration = Duration::from_millis(10);
/// Messages on their way, for each lane. A lane waits when there are more: outputs do not pile up.
const MESSAGES: usize = 4;
/// Messages that are heard before anything else is looked after.
const MOST_TOLD: usize = 256;
/// Threads of a run.
const MOST_LANES: usize = 1024;
/// How long the end of a run waits for its threads to have left, but for those that lost their leases: whoever is
/// still at work takes no part in a run that follows at once.
const LEAVE: Duration = Duration::from_millis(100);

/// Backends by name, with the calls into them that have not returned.
pub(crate) struct Crew {
    pub(crate) backends: Vec<Arc<dyn Backend>>,
    names: Vec<String>,
    /// Lanes of each backend that are inside it, whatever run they belong to.
    inside: Vec<Arc<AtomicUsize>>,
    epoch: AtomicUsize,
}

impl Crew {
    pub(crate) fn new(backends: Vec<Arc<dyn Backend>>) -> Crew {
        let place = |this: usize| {
            let id = backends[this].id();
            let before = backends[..this].iter().filter(|backend| backend.id() == id).count();
            format!("{id}{before}")
        };
        let names = (0..backends.len()).map(place).collect();
        let inside = backends.iter().map(|_| Arc::default()).collect();
        Crew { backends, names, inside, epoch: AtomicUsize::new(0) }
    }

    /// The kind of each backend and its place among those of its kind.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Starts a run in which so many items may be ahead of whoever reads the outputs.
    pub(crate) fn start(&self, job: &Job, window: usize) -> Result<Run, StealError> {
        job.check(self.backends.len())?;
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) as u64 + 1;
        let share = (MOST_LANES / self.backends.len()).max(1);
        // A backend that is still in a call of an earlier run takes part with the rest of its lanes.
        let member = |(place, backend): (usize, &Arc<dyn Backend>)| {
            let told = catch_unwind(AssertUnwindSafe(|| backend.capabilities()));
            let mut out = told.as_ref().err().map(|panic| panicked(panic.as_ref()));
            let mut capabilities = told.unwrap_or(Capabilities::PLAIN);
            let inside = self.inside[place].load(Ordering::Acquire);
            let lanes = capabilities.lanes().min(share);
            capabilities.in_flight = lanes.saturating_sub(inside).max(1);
            if inside >= lanes {
                out = Some("it is still in a call of an earlier run".to_owned());
            }
            (Member { name: self.names[place].clone(), capabilities }, out)
        };
        let (members, left_out): (Vec<Member>, Vec<Option<String>>) =
            self.backends.iter().enumerate().map(member).unzip();
        let (mut ledger, claims) = Ledger::open(epoch, job, members)?;
        claims.set_window(window);
        for (backend, why) in left_out.iter().enumerate() {
            if let Some(why) = why {
                ledger.leave_out(backend, why);
            }
        }
        let lanes: Vec<usize> = ledger.lanes().collect();
        let (sender, receiver) = sync_channel(MESSAGES * lanes.len());
        let shared = Arc::new(Shared::default());
        let clock = Clock::start();
        for (lane, &backend) in lanes.iter().enumerate() {
            if left_out[backend].is_some() {
                continue;
            }
            let lane = LaneThread {
                backend: Arc::clone(&self.backends[backend]),
                place: backend,
                token: Token { epoch, lane, serial: 0 },
                line: Arc::new(Line::new(sender.clone(), clock.clone(), Arc::clone(&claims), job)),
                shared: Arc::clone(&shared),
                inside: Arc::clone(&self.inside[backend]),
            };
            shared.state().lanes += 1;
            let name = format!("{} lane", self.names[backend]);
            if let Err(error) = thread::Builder::new().name(name).spawn(move || lane.work()) {
                shared.state().lanes -= 1;
                ledger.leave_out(backend, &format!("no thread for it: {error}"));
            }
        }
        let over = Over { claims: Arc::clone(&claims), shared: Arc::clone(&shared) };
        let cancel = job.canceller();
        let looked = Duration::ZERO;
        Ok(Run { ledger, claims, shared, receiver, clock, seen: 0, looked, cancel, over })
    }
}

/// What the threads of a run share beside their claims.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    /// How often the bell rang.
    rings: u64,
    /// Threads that have not left.
    lanes: usize,
    /// Memory of outputs that have been handed on.
    stock: Vec<Vec<u8>>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls those who wait.
    fn ring(&self) {
        self.state().rings += 1;
        self.bell.notify_all();
    }

    /// Waits for the bell to ring more than `heard` times.
    fn wait(&self, heard: u64) {
        let waits = |state: &mut State| state.rings <= heard;
        let state = self.state();
        drop(
            self.bell
                .wait_timeout_while(state, IDLE, waits)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

/// One of the tasks that a backend works on at a time: a thread that claims, submits and waits for the answer.
struct LaneThread {
    backend: Arc<dyn Backend>,
    place: usize,
    token: Token,
    line: Arc<Line>,
    shared: Arc<Shared>,
    inside: Arc<AtomicUsize>,
}

impl LaneThread {
    fn work(mut self) {
        loop {
            let heard = self.shared.state().rings;
            match self.line.claims.claim(self.place) {
                Claim::Over => break,
                Claim::Wait => self.shared.wait(heard),
                Claim::Take(piece) => {
                    self.token.serial += 1;
                    let items = piece.items.clone();
                    let at = self.line.clock.elapsed();
                    if !self.line.tell(Message::Claimed { token: self.token, piece, at }) {
                        break;
                    }
                    self.submit(items);
                }
            }
        }
        self.shared.state().lanes -= 1;
        self.shared.bell.notify_all();
    }

    fn submit(&self, items: Range<usize>) {
        let mut out = self.shared.state().stock.pop().unwrap_or_default();
        let bytes = items.len().saturating_mul(self.line.bytes);
        if out.try_reserve(bytes.saturating_sub(out.len())).is_err() {
            let failure = Failure::lasting(format!("no memory for {bytes} bytes of outputs"));
            let (token, at) = (self.token, self.line.clock.elapsed());
            self.line.tell(Message::Failed { token, failure, out, at });
            return;
        }
        self.inside.fetch_add(1, Ordering::AcqRel);
        let task = self.line.task(self.token, items, out);
        // A panic has dropped the task, which has answered.
        let _ = catch_unwind(AssertUnwindSafe(|| self.backend.submit(task)));
        self.line.wait();
        self.inside.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Outputs that were accepted.
pub(crate) struct Accepted {
    pub(crate) items: Range<usize>,
    pub(crate) out: Vec<u8>,
}

/// A run as its keeper has it.
pub(crate) struct Run {
    pub(crate) ledger: Ledger,
    pub(crate) claims: Arc<Claims>,
    shared: Arc<Shared>,
    receiver: Receiver<Message>,
    clock: Clock,
    seen: u64,
    /// When the last step ended.
    looked: Duration,
    cancel: crate::Cancel,
    over: Over,
}

impl Run {
    /// Waits a little for what happens, and puts outputs that count into `accepted`. Items whose outputs do not
    /// count after all are told to `forget` before anything else is accepted.
    pub(crate) fn step(
        &mut self,
        accepted: &mut VecDeque<Accepted>,
        mut forget: impl FnMut(Range<usize>, &mut VecDeque<Accepted>),
    ) {
        let begun = self.clock.elapsed();
        if begun.saturating_sub(self.looked) >= LOOK {
            self.ledger.resume(begun);
        }
        // Whoever reads a stream has made room.
        self.call();
        let due = self.ledger.next_tick().saturating_sub(self.clock.elapsed());
        let mut message = receive(&self.receiver, due.min(LOOK), &self.clock);
        let mut more = MOST_TOLD;
        while let Some(told) = message {
            self.take(told, accepted);
            for items in self.ledger.drain_thrown_out() {
                forget(items, accepted);
            }
            more -= 1;
            message = if more > 0 { self.receiver.try_recv().ok() } else { None };
        }
        if self.cancel.is_cancelled() {
            self.ledger.cancel();
        }
        let now = self.clock.elapsed();
        if now >= self.ledger.next_tick() {
            self.ledger.tick(now);
        }
        self.call();
        self.looked = self.clock.elapsed();
    }

    /// Calls those who wait, if there is something to be had.
    fn call(&mut self) {
        let stirs = self.claims.stirs();
        if stirs != self.seen {
            self.seen = stirs;
            self.shared.ring();
        }
    }

    fn take(&mut self, message: Message, accepted: &mut VecDeque<Accepted>) {
        match message {
            Message::Claimed { token, piece, at } => self.ledger.claimed(token, piece, at),
            Message::Failed { token, failure, out, at } => {
                // Backends that notice that nobody waits any more are not to blame.
                match self.cancel.is_cancelled() {
                    true => self.ledger.cancel(),
                    false => self.ledger.failed(token, &failure, at),
                }
                self.recycle(out);
            }
            Message::Completed { token, items, out, sums, at } => {
                let range = items.clone();
                match self.ledger.completed(token, items, &out, sums.as_deref(), at) {
                    Verdict::Commit => accepted.push_back(Accepted { items: range, out }),
                    Verdict::Compared | Verdict::Refuse => self.recycle(out),
                }
            }
        }
    }

    /// Takes back memory of outputs.
    pub(crate) fn recycle(&self, out: Vec<u8>) {
        self.shared.state().stock.push(out);
    }

    /// How long the run has gone on.
    pub(crate) fn elapsed(&self) -> Duration {
        self.clock.elapsed()
    }

    /// Ends the run: threads leave now, and those that are inside a backend when they come out.
    pub(crate) fn end(self) -> Result<Report, StealError> {
        let Run { ledger, shared, receiver, over, .. } = self;
        drop(receiver);
        drop(over);
        let stuck = ledger.stuck_lanes();
        let state = shared.state();
        let waits = |state: &mut State| state.lanes > stuck;
        drop(shared.bell.wait_timeout_while(state, LEAVE, waits));
        ledger.close()
    }
}

/// Sends the threads away when a run ends, even by a panic of its keeper.
struct Over {
    claims: Arc<Claims>,
    shared: Arc<Shared>,
}

impl Drop for Over {
    fn drop(&mut self) {
        self.claims.close();
        self.shared.ring();
    }
}
