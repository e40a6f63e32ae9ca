// SPDX-License-Identifier: Apache-2.0
//! The threads on which a rank's backend works, while the thread that started MPI claims for them.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use spanker_steal::{Backend, Failure};

use super::JobError;

/// What came of a task.
pub(super) struct Answer {
    pub(super) lane: usize,
    pub(super) items: Range<usize>,
    pub(super) out: Vec<u8>,
    pub(super) took: Duration,
    pub(super) outcome: Result<(), Failure>,
}

/// One thread for each task at a time. They end when this is dropped and their task, if any, is over.
pub(super) struct Lanes {
    tasks: Vec<Sender<Range<usize>>>,
    answers: Receiver<Answer>,
}

impl Lanes {
    /// So many threads for a backend whose outputs have so many bytes for each item.
    pub(super) fn start(
        backend: &Arc<dyn Backend>,
        lanes: usize,
        bytes: usize,
    ) -> Result<Lanes, JobError> {
        let (tell, answers) = channel();
        let mut tasks = Vec::new();
        for lane in 0..lanes {
            let (give, given) = channel::<Range<usize>>();
            let (backend, tell) = (Arc::clone(backend), tell.clone());
            let work = move || {
                for items in given {
                    let begun = Instant::now();
                    let mut out = vec![0; items.len() * bytes];
                    let run = AssertUnwindSafe(|| backend.run(items.clone(), &mut out));
                    let panicked = |_| Err(Failure::passing("it has panicked"));
                    let outcome = catch_unwind(run).unwrap_or_else(panicked);
                    let took = begun.elapsed();
                    if tell.send(Answer { lane, items, out, took, outcome }).is_err() {
                        return;
                    }
                }
            };
            let thread = thread::Builder::new().name(format!("lane-{lane}")).spawn(work);
            thread.map_err(|error| JobError::thread("a lane", &error))?;
            tasks.push(give);
        }
        Ok(Lanes { tasks, answers })
    }

    pub(super) fn count(&self) -> usize {
        self.tasks.len()
    }

    /// Gives a lane that has none a task.
    pub(super) fn give(&self, lane: usize, items: Range<usize>) {
        // A lane listens for as long as this is there.
        let _ = self.tasks[lane].send(items);
    }

    /// The next answer, if there is one before so much time has passed.
    pub(super) fn wait(&self, time: Duration) -> Option<Answer> {
        self.answers.recv_timeout(time).ok()
    }
}
