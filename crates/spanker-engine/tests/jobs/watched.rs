// SPDX-License-Identifier: Apache-2.0
//! A backend that lets another do the work, and tells of every task before that.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use spanker_steal::{Backend, Capabilities, Failure, Task};

struct Watched {
    inner: Arc<dyn Backend>,
    tasks: AtomicUsize,
    event: Box<dyn Fn(usize) + Send + Sync>,
}

impl Backend for Watched {
    fn id(&self) -> &'static str {
        self.inner.id()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        self.inner.run(items, out)
    }

    fn submit(&self, task: Task) {
        (self.event)(self.tasks.fetch_add(1, Ordering::Relaxed));
        self.inner.submit(task);
    }
}

/// `inner`, with `event` called with the number of each task, from 0.
pub fn watched(
    inner: Arc<dyn Backend>,
    event: impl Fn(usize) + Send + Sync + 'static,
) -> Arc<dyn Backend> {
    Arc::new(Watched { inner, tasks: AtomicUsize::new(0), event: Box::new(event) })
}
