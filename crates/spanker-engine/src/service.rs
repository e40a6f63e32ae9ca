// SPDX-License-Identifier: Apache-2.0
//! Many people at once on one model: requests go in from any thread, pieces of answers come out. The model runs on a
//! thread of its own; whoever asks never waits for it, and it never waits for whoever reads.

mod answers;
mod ask;
mod copy;
mod status;
mod worker;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use ask::{Ask, Chance, Constraint, Delivery, Done, ServedPiece, Update};
pub use status::{CardState, CardStatus, KvBlocks, Status};

use spanker_model::Quant;

use crate::batch::{Forecast, Pacing, ServiceLoad, forecast};
use crate::draft::DraftSource;
use crate::error::{EngineError, Result};
use crate::generation::Stop;
use crate::host::Host;
use crate::layout::Wish;
use crate::model::Model;
use worker::{Order, Worker};

/// How a service runs its model.
#[derive(Debug, Clone)]
pub struct ServiceOptions {
    /// Requests that are answered at the same time, at most.
    pub parallel: usize,
    /// Tokens of a request, prompt and answer together, at most.
    pub context: usize,
    /// Tokens that go through the model in one step, at most.
    pub batch: usize,
    /// Bytes for keys and values of all cards together, which copies of the model share; nothing for what the requests
    /// could need. Every copy has room for a context.
    pub kv_memory: Option<u64>,
    /// What keys and values are stored as: F16 or Q8_0.
    pub kv: Quant,
    /// Requests that wait for their turn, at most.
    pub queue: usize,
    /// Which card holds what.
    pub wish: Wish,
    /// The part of the cards' work that is computed a second time: see [`Host::audit`].
    pub audit: Option<f64>,
    /// Whether requests share keys and values of what their prompts begin with.
    pub reuse: bool,
    /// Where guesses of what follows come from.
    pub draft: DraftSource,
}

/// Why a request is not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// As many wait as may wait.
    #[error("{waiting} requests wait already")]
    Full {
        /// How many wait.
        waiting: usize,
        /// When there will be room, by the price of what is under way.
        retry_after: Duration,
    },
    /// The request makes no sense.
    #[error(transparent)]
    Invalid(EngineError),
    /// No more requests are taken.
    #[error("the service is ending")]
    Ending,
    /// The model does not run any more.
    #[error("{0}")]
    Broken(String),
}

/// A request that was taken.
#[derive(Debug, Clone)]
pub struct Taken {
    /// Its number, from 1.
    pub id: u64,
    /// Ends it: within a step on every card.
    pub stop: Stop,
}

/// A model that answers many requests at a time.
///
/// Dropping it ends all answers that are under way.
pub struct Service {
    model: Arc<Model>,
    options: ServiceOptions,
    orders: Sender<Order>,
    shared: Arc<Shared>,
    numbers: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("model", &self.model.path()).finish_non_exhaustive()
    }
}

/// What is said of a thread that runs no model any more.
const ENDED: &str = "the model's thread has ended";

/// What the model's thread and the others look at.
pub(crate) struct Shared {
    status: Mutex<Status>,
    /// What decides how fast each copy is, and its blocks.
    pacings: Mutex<Vec<(Pacing, usize)>>,
}

impl Shared {
    fn of(model: &Model) -> Shared {
        let status = Mutex::new(Status::of(model));
        Shared { status, pacings: Mutex::default() }
    }

    pub(crate) fn set_pacings(&self, pacings: Vec<(Pacing, usize)>) {
        *self.pacings.lock().unwrap_or_else(PoisonError::into_inner) = pacings;
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Service {
    /// Opens a host on a thread of its own, loads the model there, and takes requests from then on. `open` is called on
    /// that thread.
    ///
    /// # Errors
    /// What opening, planning or loading fails with.
    pub fn start(
        model: Arc<Model>,
        options: ServiceOptions,
        open: impl FnOnce() -> Result<Host> + Send + 'static,
    ) -> Result<Service> {
        let shared = Arc::new(Shared::of(&model));
        let (orders, incoming) = channel();
        let (ready, started) = channel();
        let (own, wanted, told) = (Arc::clone(&model), options.clone(), Arc::clone(&shared));
        let run = move || serve(&own, &wanted, open, &incoming, &told, &ready);
        let thread = std::thread::Builder::new().name("spanker-service".into()).spawn(run);
        let thread = thread
            .map_err(|error| EngineError::unavailable(format!("no thread: {error}"), None))?;
        let lost = || EngineError::unavailable("the model's thread has panicked", None);
        started.recv().map_err(|_| lost())??;
        let (numbers, thread) = (AtomicU64::new(1), Some(thread));
        Ok(Service { model, options, orders, shared, numbers, thread })
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// How it runs.
    #[must_use]
    pub fn options(&self) -> &ServiceOptions {
        &self.options
    }

    /// Takes a request. `deliver` is called on the model's thread with everything that comes of it, and must not block;
    /// it says whether anybody still listens. The last call is [`Update::Done`] or [`Update::Failed`], unless nobody
    /// listened before.
    ///
    /// # Errors
    /// [`Refusal`], after which `deliver` is never called.
    pub fn submit(
        &self,
        ask: Ask,
        deliver: impl FnMut(Update) -> bool + Send + 'static,
    ) -> Result<Taken, Refusal> {
        ask.check(&self.model, &self.options).map_err(Refusal::Invalid)?;
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = &status.broken {
            return Err(Refusal::Broken(reason.clone()));
        }
        if status.is_ending {
            return Err(Refusal::Ending);
        }
        if status.running + status.waiting >= self.options.parallel + self.options.queue {
            status.refused += 1;
            let retry_after = status.room_in();
            return Err(Refusal::Full { waiting: status.waiting, retry_after });
        }
        let id = self.numbers.fetch_add(1, Ordering::Relaxed);
        let stop = ask.limits.stop.clone();
        let order = Order { id, ask, deliver: Box::new(deliver) };
        self.orders.send(order).map_err(|_| Refusal::Broken(ENDED.into()))?;
        status.waiting += 1;
        Ok(Taken { id, stop })
    }

    /// What it is doing.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What clients will see of it as it runs now: the same schedule in virtual time, with steps that take what they
    /// cost by the prediction.
    #[must_use]
    pub fn forecast(&self, load: ServiceLoad) -> Forecast {
        let pacings = self.shared.pacings.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let shared = if self.options.reuse { load.shared } else { 0 };
        forecast(&pacings, ServiceLoad { shared, ..load })
    }

    /// Takes no more requests; those that were taken go on.
    pub fn drain(&self) {
        self.shared.update(|status| status.is_ending = true);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.drain();
        // The worker ends when nobody can send orders.
        self.orders = channel().0;
        if let Some(thread) = self.thread.take() {
            // Its panics were reported where they happened.
            let _ = thread.join();
        }
    }
}

/// Says that nothing runs any more when the model's thread ends.
struct Ended<'s>(&'s Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.update(|status| {
            status.broken.get_or_insert_with(|| ENDED.to_owned());
        });
    }
}

/// The model's thread.
fn serve(
    model: &Arc<Model>,
    options: &ServiceOptions,
    open: impl FnOnce() -> Result<Host>,
    orders: &Receiver<Order>,
    shared: &Arc<Shared>,
    ready: &Sender<Result<()>>,
) {
    // On ranks the others have to open theirs as well.
    let host = match open().and_then(|host| host.open_with(|| Ok(())).map(|()| host)) {
        Ok(host) => host,
        // Whoever started it has gone if it does not hear.
        Err(error) => return ready.send(Err(error)).unwrap_or_default(),
    };
    match Worker::load(&host, model, options, shared) {
        Ok(mut worker) => {
            ready.send(Ok(())).unwrap_or_default();
            // Whoever asks later hears of it, also where this thread panics.
            let _ended = Ended(shared);
            worker.work(orders);
        }
        Err(error) => ready.send(Err(error)).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
