// SPDX-License-Identifier: Apache-2.0
//! Backends made of closures, a job whose right bytes are known, and counts of what was run. No test is here.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use spanker_steal::{
    Backend, Capabilities, Failure, IncidentKind, Job, Options, Report, Task, WorkStealingScheduler,
};

/// Bytes of an item's output.
pub const BYTES: usize = 4;
/// What output memory holds before a run.
pub const UNTOUCHED: u8 = 0xa5;
/// Longer than anything here takes, so that no lease runs out that is not meant to.
pub const LONG: Duration = Duration::from_secs(60);

/// Leases and patience that never run out.
pub fn calm() -> Options {
    Options { lease: LONG, patience: LONG, ..Options::STANDARD }
}

/// Leases that run out soon.
pub fn hasty() -> Options {
    Options { lease: Duration::from_millis(40), ..Options::STANDARD }
}

/// A job of `items` with outputs of [`BYTES`].
pub fn job(items: usize, options: Options) -> Job {
    Job::new(items, BYTES).options(options)
}

pub fn value(item: usize) -> [u8; BYTES] {
    (item as u32).wrapping_mul(2_654_435_761).to_le_bytes()
}

/// Writes the right outputs.
pub fn fill(items: Range<usize>, out: &mut [u8]) {
    assert_eq!(out.len(), items.len() * BYTES);
    for (item, out) in items.zip(out.chunks_exact_mut(BYTES)) {
        out.copy_from_slice(&value(item));
    }
}

/// The items whose outputs are not right.
pub fn wrong(out: &[u8]) -> Vec<usize> {
    let outputs = out.chunks_exact(BYTES).enumerate();
    outputs.filter(|(item, out)| **out != value(*item)).map(|(item, _)| item).collect()
}

/// How often each item was run.
#[derive(Clone)]
pub struct Counts(Arc<Vec<AtomicUsize>>);

impl Counts {
    pub fn new(items: usize) -> Counts {
        Counts(Arc::new((0..items).map(|_| AtomicUsize::new(0)).collect()))
    }

    pub fn add(&self, items: Range<usize>) {
        for count in &self.0[items] {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub fn all(&self) -> Vec<usize> {
        self.0.iter().map(|count| count.load(Ordering::SeqCst)).collect()
    }

    pub fn total(&self) -> usize {
        self.all().iter().sum()
    }
}

/// A door that is shut until somebody opens it, or a long time has passed.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().expect("gate") = true;
        self.0.1.notify_all();
    }

    pub fn is_open(&self) -> bool {
        *self.0.0.lock().expect("gate")
    }

    pub fn pass(&self) {
        let open = self.0.0.lock().expect("gate");
        drop(self.0.1.wait_timeout_while(open, LONG, |open| !*open).expect("gate"));
    }
}

type Work = Box<dyn Fn(Range<usize>, &mut [u8]) -> Result<(), Failure> + Send + Sync>;

/// A backend that runs a closure.
pub struct By {
    pub id: &'static str,
    pub capabilities: Capabilities,
    work: Work,
}

impl By {
    pub fn new(
        id: &'static str,
        work: impl Fn(Range<usize>, &mut [u8]) -> Result<(), Failure> + Send + Sync + 'static,
    ) -> By {
        By { id, capabilities: Capabilities::PLAIN, work: Box::new(work) }
    }

    pub fn with(mut self, capabilities: Capabilities) -> By {
        self.capabilities = capabilities;
        self
    }

    /// One that is right, counts, and takes so long for an item.
    pub fn right(id: &'static str, counts: &Counts, each: Duration) -> By {
        let counts = counts.clone();
        By::new(id, move |items, out| {
            counts.add(items.clone());
            if !each.is_zero() {
                thread::sleep(each * items.len() as u32);
            }
            fill(items, out);
            Ok(())
        })
    }
}

impl Backend for By {
    fn id(&self) -> &'static str {
        self.id
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        (self.work)(items, out)
    }
}

/// A backend that takes whole tasks.
pub struct On {
    id: &'static str,
    capabilities: Capabilities,
    submit: Box<dyn Fn(Task) + Send + Sync>,
}

impl On {
    pub fn new(id: &'static str, submit: impl Fn(Task) + Send + Sync + 'static) -> On {
        On { id, capabilities: Capabilities::PLAIN, submit: Box::new(submit) }
    }

    pub fn with(mut self, capabilities: Capabilities) -> On {
        self.capabilities = capabilities;
        self
    }
}

impl Backend for On {
    fn id(&self) -> &'static str {
        self.id
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn run(&self, _: Range<usize>, _: &mut [u8]) -> Result<(), Failure> {
        Err(Failure::lasting("it takes tasks only"))
    }

    fn submit(&self, task: Task) {
        (self.submit)(task);
    }
}

/// A scheduler over these.
pub fn over(backends: Vec<Arc<dyn Backend>>) -> WorkStealingScheduler {
    WorkStealingScheduler::new(backends)
}

/// Runs a job to its good end, with right outputs. Returns what happened.
pub fn run_right(scheduler: &WorkStealingScheduler, job: &Job) -> Report {
    let mut out = vec![UNTOUCHED; job.items() * BYTES];
    let report = scheduler.run(job, &mut out).expect("a run that ends well");
    assert_eq!(wrong(&out), Vec::<usize>::new());
    assert_eq!((report.done, report.duplicated), (job.items(), 0));
    let sum: usize = report.backends.iter().map(|backend| backend.items).sum();
    assert_eq!(sum, job.items());
    report
}

/// Incidents of a kind with a backend.
pub fn incidents(report: &Report, kind: IncidentKind, backend: &str) -> usize {
    let these = report.incidents.iter().filter(|i| i.kind == kind && i.backend == backend);
    these.count()
}

/// Runs a test with a generous bound, so that a run that hangs fails instead.
pub fn bounded(test: impl FnOnce() + Send + 'static) {
    let (done, waits) = mpsc::channel();
    let thread = thread::spawn(move || {
        test();
        done.send(()).ok();
    });
    match waits.recv_timeout(2 * LONG) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}
