// SPDX-License-Identifier: Apache-2.0
//! A thread that owns what only one may use at a time, a card or a model, and does what it is asked for. What it does
//! is its own business; here is how it is asked and how it answers.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use spanker_steal::{Failure, Task};

use super::JobError;

/// Items to do, and who waits for them.
pub(crate) enum Order {
    /// A task of a run.
    Task(Task),
    /// A plain call that waits.
    Call { items: Range<usize>, out: Vec<u8>, reply: SyncSender<Result<Vec<u8>, Failure>> },
}

impl Order {
    pub(crate) fn items(&self) -> Range<usize> {
        match self {
            Order::Task(task) => task.items(),
            Order::Call { items, .. } => items.clone(),
        }
    }

    pub(crate) fn output(&mut self) -> &mut [u8] {
        match self {
            Order::Task(task) => task.output(),
            Order::Call { out, .. } => out,
        }
    }

    /// Whether anyone still waits for it.
    pub(crate) fn is_wanted(&self) -> bool {
        match self {
            Order::Task(task) => task.is_wanted(),
            Order::Call { .. } => true,
        }
    }

    pub(crate) fn answer(self, outcome: Result<(), Failure>) {
        match (self, outcome) {
            (Order::Task(task), Ok(())) => task.complete(),
            (Order::Task(task), Err(failure)) => task.fail(failure),
            // Whoever called is waiting.
            (Order::Call { out, reply, .. }, outcome) => drop(reply.send(outcome.map(|()| out))),
        }
    }
}

/// The thread.
pub(crate) struct Worker {
    what: String,
    /// Nothing while the thread is being ended.
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread. `work` says with its first argument that it is ready, or why it cannot be, and then serves
    /// orders until there are no more.
    pub(crate) fn start<T: Send + 'static>(
        what: &str,
        work: impl FnOnce(&SyncSender<Result<T, JobError>>, &Receiver<Order>) + Send + 'static,
    ) -> Result<(Worker, T), JobError> {
        let refused = |reason: &dyn std::fmt::Display| JobError::thread(what, reason);
        let (orders, receiver) = channel();
        let (ready, readiness) = sync_channel(1);
        let thread = thread::Builder::new()
            .name(format!("spanker-{what}"))
            .spawn(move || work(&ready, &receiver))
            .map_err(|error| refused(&error))?;
        let worker = Worker { what: what.to_owned(), orders: Some(orders), thread: Some(thread) };
        match readiness.recv() {
            Ok(Ok(ready)) => Ok((worker, ready)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(refused(&"it has panicked")),
        }
    }

    /// Hands over a task.
    pub(crate) fn submit(&self, task: Task) {
        if let Err(Order::Task(task)) = self.send(Order::Task(task)) {
            task.fail(self.gone());
        }
    }

    /// Has items done, and waits for them.
    pub(crate) fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        let (reply, answer) = sync_channel(1);
        let order = Order::Call { items, out: vec![0; out.len()], reply };
        self.send(order).map_err(|_| self.gone())?;
        let found = answer.recv().map_err(|_| self.gone())??;
        out.copy_from_slice(&found);
        Ok(())
    }

    /// Gives an order to the thread, or back if there is none.
    fn send(&self, order: Order) -> Result<(), Order> {
        match &self.orders {
            Some(orders) => orders.send(order).map_err(|refused| refused.0),
            None => Err(order),
        }
    }

    fn gone(&self) -> Failure {
        Failure::lasting(format!("{}: its thread has ended", self.what))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // Orders that a panic has left unanswered have been answered by being dropped.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Worker").field(&self.what).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that puts what `answer` says into the outputs.
    fn worker(answer: impl Fn(Range<usize>) -> u8 + Send + 'static) -> Worker {
        let work = move |ready: &SyncSender<Result<(), JobError>>, orders: &Receiver<Order>| {
            ready.send(Ok(())).expect("somebody who waits");
            for mut order in orders {
                let value = answer(order.items());
                order.output().fill(value);
                order.answer(Ok(()));
            }
        };
        Worker::start("test", work).expect("a thread").0
    }

    #[test]
    fn call_waits_for_its_own_answer() {
        let worker = worker(|items| items.start as u8);
        for start in 0..10 {
            let mut out = [0; 4];
            worker.run(start..start + 1, &mut out).expect("an answer");
            assert_eq!(out, [start as u8; 4]);
        }
    }

    #[test]
    fn thread_that_panics_has_failed_for_good_and_whoever_waits_is_told() {
        let worker = worker(|items| [1, 2][items.start]);
        worker.run(1..2, &mut [0]).expect("an answer");
        for _ in 0..2 {
            let failure = worker.run(2..3, &mut [0]).expect_err("a thread that has panicked");
            assert!(failure.is_lasting());
            assert_eq!(failure.to_string(), "test: its thread has ended");
        }
    }

    #[test]
    fn thread_that_cannot_begin_says_why() {
        let nothing = || JobError::Nothing { what: "none".into() };
        let refused = Worker::start::<()>("test", move |ready, _| {
            ready.send(Err(nothing())).expect("somebody who waits");
        });
        assert_eq!(refused.expect_err("no worker").to_string(), "nothing to do: none");
        let panicked = Worker::start::<()>("test", |_, _| panic!("at once"));
        let error = panicked.expect_err("no worker").to_string();
        assert_eq!(error, "no thread for test: it has panicked");
    }
}
