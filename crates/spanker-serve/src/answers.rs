// SPDX-License-Identifier: Apache-2.0
//! Answers under way. Updates come from the model's thread into a bounded channel; a client that does not read them
//! loses its answers, and the model's thread never waits for it. Whoever drops [`Answers`] stops them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use spanker_engine::{Ask, Stop, Update};
use tokio::sync::mpsc::{Receiver, channel, error::TrySendError};

use crate::backend::Backend;
use crate::error::Result;
use crate::metrics::{Metrics, Outcome};

/// What is known of an answer that is under way, for whoever looks.
#[derive(Debug)]
pub(crate) struct Slot {
    /// The request's number.
    pub(crate) task: u64,
    pub(crate) prompt_tokens: usize,
    pub(crate) cached_tokens: AtomicUsize,
    pub(crate) tokens: AtomicUsize,
    pub(crate) began: Instant,
    /// Whether the service has taken it.
    is_taken: AtomicBool,
    stop: Stop,
}

/// All answers that are under way.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    tasks: Mutex<Tasks>,
}

#[derive(Debug, Default)]
struct Tasks {
    /// Requests that were taken since the start.
    numbered: u64,
    waiting: Vec<Arc<Slot>>,
    /// Those whose turn has come: each keeps its place until it ends.
    running: Vec<Option<Arc<Slot>>>,
}

impl Slots {
    fn tasks<T>(&self, look: impl FnOnce(&mut Tasks) -> T) -> T {
        look(&mut self.tasks.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn enter(&self, prompt_tokens: usize, stop: Stop) -> Arc<Slot> {
        self.tasks(|tasks| {
            tasks.numbered += 1;
            let slot = Arc::new(Slot {
                task: tasks.numbered,
                prompt_tokens,
                cached_tokens: AtomicUsize::new(0),
                tokens: AtomicUsize::new(0),
                began: Instant::now(),
                is_taken: AtomicBool::new(false),
                stop,
            });
            tasks.waiting.push(Arc::clone(&slot));
            slot
        })
    }

    fn begin(&self, slot: &Arc<Slot>) {
        self.tasks(|tasks| {
            tasks.waiting.retain(|other| !Arc::ptr_eq(other, slot));
            match tasks.running.iter_mut().find(|place| place.is_none()) {
                Some(place) => *place = Some(Arc::clone(slot)),
                None => tasks.running.push(Some(Arc::clone(slot))),
            }
        });
    }

    fn leave(&self, slot: &Arc<Slot>) {
        self.tasks(|tasks| {
            let is_slot = |other: &Arc<Slot>| Arc::ptr_eq(other, slot);
            tasks.waiting.retain(|other| !is_slot(other));
            let places = tasks.running.iter_mut();
            for place in places.filter(|place| place.as_ref().is_some_and(is_slot)) {
                *place = None;
            }
        });
    }

    /// Those whose turn has come, by their places.
    pub(crate) fn running(&self) -> Vec<Option<Arc<Slot>>> {
        self.tasks(|tasks| tasks.running.clone())
    }

    /// How many are not complete.
    pub(crate) fn count(&self) -> usize {
        self.tasks(|tasks| tasks.waiting.len() + tasks.running.iter().flatten().count())
    }

    /// Ends all of them.
    pub(crate) fn stop(&self) {
        self.tasks(|tasks| {
            let running = tasks.running.iter().flatten();
            tasks.waiting.iter().chain(running).for_each(|slot| slot.stop.stop());
        });
    }
}

/// What the model's thread tells of an answer, before anybody else sees it.
struct Tracker {
    slot: Arc<Slot>,
    slots: Arc<Slots>,
    metrics: Arc<Metrics>,
    asked: Instant,
    /// When the last token came.
    last: Option<Instant>,
    outcome: Outcome,
}

impl Tracker {
    fn note(&mut self, update: &Update) {
        match update {
            Update::Begun { cached_tokens } => {
                self.slot.cached_tokens.store(*cached_tokens, Ordering::Relaxed);
                self.slots.begin(&self.slot);
            }
            Update::Piece(piece) if piece.token.is_some() => {
                let now = Instant::now();
                match self.last.replace(now) {
                    Some(last) => self.metrics.between_tokens.observe(now - last),
                    None => self.metrics.first_token.observe(now - self.asked),
                }
                let tokens = piece.corrects.as_ref().map(|corrects| corrects.token);
                match tokens {
                    Some(right) => self.slot.tokens.store(right + 1, Ordering::Relaxed),
                    None => drop(self.slot.tokens.fetch_add(1, Ordering::Relaxed)),
                }
            }
            Update::Done(done) => self.outcome = Outcome::of(done.reason),
            Update::Failed { is_request, .. } => {
                self.outcome = if *is_request { Outcome::Invalid } else { Outcome::Failed };
            }
            _ => {}
        }
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        self.slots.leave(&self.slot);
        // What was refused is counted by whoever says so.
        if self.slot.is_taken.load(Ordering::Relaxed) {
            self.metrics.ended(self.outcome);
            self.metrics.whole.observe(self.asked.elapsed());
        }
    }
}

/// What is heard of an answer.
#[derive(Debug)]
pub(crate) enum Heard {
    /// An update of the answer with this number.
    Update(usize, Update),
    /// Nobody reads: answers were given up.
    Unread,
    /// The model's thread has gone away.
    Lost,
}

/// The answers to a request.
pub(crate) struct Answers {
    updates: Receiver<(usize, Update)>,
    stops: Vec<Stop>,
    /// Answers that are not complete.
    left: usize,
    is_unread: Arc<AtomicBool>,
}

impl Answers {
    /// Submits what is asked. Up to `room` updates are kept that nobody has read.
    ///
    /// # Errors
    /// Why one of them is not taken; then none is.
    pub(crate) fn submit(
        backend: &dyn Backend,
        asks: Vec<Ask>,
        (slots, metrics): (&Arc<Slots>, &Arc<Metrics>),
        room: usize,
    ) -> Result<Answers> {
        let (sender, updates) = channel(room.max(1).saturating_mul(asks.len()));
        let is_unread = Arc::new(AtomicBool::new(false));
        let left = asks.len();
        // Dropped with an error, it stops what was submitted.
        let mut answers = Answers { updates, stops: Vec::new(), left, is_unread };
        let asked = Instant::now();
        for (at, ask) in asks.into_iter().enumerate() {
            let stop = ask.limits.stop.clone();
            let slot = slots.enter(ask.prompt.len(), stop.clone());
            let (slots, metrics) = (Arc::clone(slots), Arc::clone(metrics));
            let outcome = Outcome::Cancelled;
            let taken = Arc::clone(&slot);
            let mut tracker = Tracker { slot, slots, metrics, asked, last: None, outcome };
            let (sender, is_unread) = (sender.clone(), Arc::clone(&answers.is_unread));
            let deliver = move |update: Update| {
                tracker.slot.is_taken.store(true, Ordering::Relaxed);
                tracker.note(&update);
                match sender.try_send((at, update)) {
                    Ok(()) => true,
                    Err(TrySendError::Closed(_)) => false,
                    Err(TrySendError::Full(_)) => {
                        is_unread.store(true, Ordering::Relaxed);
                        tracker.outcome = Outcome::Unread;
                        false
                    }
                }
            };
            backend.submit(ask, Box::new(deliver))?;
            taken.is_taken.store(true, Ordering::Relaxed);
            answers.stops.push(stop);
        }
        Ok(answers)
    }

    /// What is heard next; nothing once all answers are complete.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Heard>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.updates.poll_recv(context).map(|received| {
            let heard = match received {
                Some((at, update)) => {
                    if matches!(update, Update::Done(_) | Update::Failed { .. }) {
                        self.left -= 1;
                    }
                    Heard::Update(at, update)
                }
                None => {
                    self.left = 0;
                    let unread = self.is_unread.load(Ordering::Relaxed);
                    if unread { Heard::Unread } else { Heard::Lost }
                }
            };
            Some(heard)
        })
    }

    /// The same for whoever can wait.
    pub(crate) async fn next(&mut self) -> Option<Heard> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    /// Ends one of them.
    pub(crate) fn stop(&self, at: usize) {
        if let Some(stop) = self.stops.get(at) {
            stop.stop();
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.stops.iter().for_each(Stop::stop);
    }
}
