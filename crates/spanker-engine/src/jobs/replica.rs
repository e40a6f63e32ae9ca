// SPDX-License-Identifier: Apache-2.0
//! Replicas of a model that answer prompts, one at a time each: on threads of this process, or on one card. A model
//! that is split over cards is no replica.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use spanker_fabric::device::Deadline;
use spanker_llm::{InProcess, Network, OnCards, Session, require_operators};
use spanker_model::Quant;
use spanker_plan::{Layout, Objective, Plan, PlanError, Request, Split};
use spanker_runtime::SpankerControl;
use spanker_steal::{Backend, Capabilities, Failure, Task};
use spanker_topology::{Cluster, Profile, Shape};

use super::watch::words;
use super::worker::{Order, Worker};
use super::{JobError, Prompts};

/// A model that answers prompts.
///
/// It has a thread of its own, works on one task at a time, and stops between two tokens of an answer that nobody
/// wants any more. Whatever it runs on, its tokens are the same.
#[derive(Debug)]
pub struct Replica {
    worker: Worker,
    id: &'static str,
}

impl Replica {
    /// A replica on so many threads of this process. Weights are read where the file lies, so that replicas share
    /// them. It is trusted where others disagree.
    ///
    /// # Errors
    /// [`JobError::Model`] if the system has not the memory or the threads.
    pub fn in_process<B: AsRef<[u8]> + Send + Sync + 'static>(
        prompts: Arc<Prompts<B>>,
        threads: usize,
    ) -> Result<Replica, JobError> {
        let (worker, ()) = Worker::start("replica", move |ready, orders| {
            let runner = plan(prompts.network()).and_then(|plan| {
                let network = Arc::clone(prompts.network());
                let (context, batch) = (prompts.context(), prompts.batch());
                Ok(InProcess::new(network, &plan, context, batch, threads)?)
            });
            let session = runner.map(|runner| Session::new(Box::new(runner)));
            serve(&prompts, session, ready, orders);
        })?;
        Ok(Replica { worker, id: "cpu" })
    }

    /// A replica on one card, which gets all weights. Everything on the card is freed when the replica is dropped.
    ///
    /// A card that fails, or shows no progress for `deadline.detect`, has a lasting failure that names it.
    ///
    /// # Errors
    /// [`JobError::Card`] for a card whose version of the ABI has not all operators of a model, [`JobError::Model`] for
    /// one that has not the memory, or fails.
    pub fn on_card<B: AsRef<[u8]> + Send + Sync + 'static>(
        prompts: Arc<Prompts<B>>,
        card: SpankerControl,
        deadline: Deadline,
    ) -> Result<Replica, JobError> {
        // Found out before the weights are on their way.
        require_operators(&card, prompts.network().model()).map_err(|source| {
            let name = card.path().map_or("a card".to_owned(), |path| path.display().to_string());
            JobError::Card { card: name, what: words(&source), source }
        })?;
        let (worker, ()) = Worker::start("replica", move |ready, orders| {
            let runner = plan(prompts.network()).and_then(|plan| {
                let (context, batch) = (prompts.context(), prompts.batch());
                let one = |_| Some(&card);
                Ok(OnCards::load(prompts.network(), &plan, context, batch, &one, &|_| ())?)
            });
            let session = runner.map(|mut runner| {
                runner.set_deadline(deadline);
                Session::new(Box::new(runner))
            });
            serve(&prompts, session, ready, orders);
        })?;
        Ok(Replica { worker, id: "card" })
    }
}

impl Backend for Replica {
    fn id(&self) -> &'static str {
        self.id
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { trusted: self.id == "cpu", ..Capabilities::PLAIN }
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        self.worker.run(items, out)
    }

    fn submit(&self, task: Task) {
        self.worker.submit(task);
    }
}

/// Says whether there is a model, and answers prompts with it.
fn serve<B: AsRef<[u8]>>(
    prompts: &Prompts<B>,
    session: Result<Session<'_>, JobError>,
    ready: &SyncSender<Result<(), JobError>>,
    orders: &Receiver<Order>,
) {
    let mut session = match session {
        Ok(session) => session,
        Err(error) => return drop(ready.send(Err(error))),
    };
    if ready.send(Ok(())).is_err() {
        return;
    }
    while let Ok(mut order) = orders.recv() {
        let outcome = prompts.work(&mut session, &mut order);
        order.answer(outcome);
    }
}

/// The whole model on one card. What the card is makes no difference for a layout without a choice.
fn plan<B: AsRef<[u8]>>(network: &Network<B>) -> Result<Plan, JobError> {
    let refused = |what: String| PlanError::Request { what };
    let profile = Profile::builtin("rev-a").map_err(|error| refused(error.to_string()))?;
    let cluster =
        Cluster::uniform(profile, 1, Shape::Switch).map_err(|error| refused(error.to_string()))?;
    let layout = Layout::of_groups(network.model(), Split::Gather, &[vec![(0, 1.0)]])?;
    let request = Request { kv: Quant::F16, ..Request::new(Objective::Latency) };
    Ok(Plan::new(network.model().clone(), cluster, request, layout)?)
}
