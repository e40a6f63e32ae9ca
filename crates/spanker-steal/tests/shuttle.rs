// SPDX-License-Identifier: Apache-2.0
//! Many orders of the threads of whole runs, lanes and keeper, with backends that fail, panic and answer from elsewhere.
//! Time is modelled: it goes on only when the keeper of the ledger gives up a wait, and nobody else ever does,
//! so that a call that a lane misses is a deadlock here. A panic within `submit` itself is left to the tests on
//! real threads: the checker does not model what a thread does while it unwinds.
#![cfg(feature = "shuttle")]

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::sync::{Mutex, mpsc};
use shuttle::{Config, Runner, thread};
use spanker_steal::{
    Backend, Capabilities, Failure, Job, Options, StealError, Task, WorkStealingScheduler,
};

const ITEMS: usize = 12;
const ORDERS: usize = 2000;
/// What the random choices of orders start from.
const SEED: u64 = 20_241;

fn value(item: usize) -> u8 {
    item as u8 * 7 + 1
}

fn fill(items: Range<usize>, out: &mut [u8]) {
    items.zip(out).for_each(|(item, out)| *out = value(item));
}

/// What a backend does with a task, by how many it has had before.
enum Ways {
    Right,
    /// Every second time.
    Fails,
    /// The second time and the third.
    Panics,
    /// After its second task.
    Dies,
}

struct By {
    ways: Ways,
    calls: AtomicUsize,
}

fn by(ways: Ways) -> Arc<dyn Backend> {
    Arc::new(By { ways, calls: AtomicUsize::new(0) })
}

impl Backend for By {
    fn id(&self) -> &'static str {
        "by"
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        match self.ways {
            Ways::Fails if call.is_multiple_of(2) => Err(Failure::passing("not now")),
            // A panic that the checker does not take for its own.
            Ways::Panics if call == 1 || call == 2 => resume_unwind(Box::new("oh")),
            Ways::Dies if call >= 2 => Err(Failure::lasting("dead")),
            _ => {
                fill(items, out);
                Ok(())
            }
        }
    }
}

/// A backend whose tasks another thread answers.
struct Queue(Mutex<mpsc::Sender<Task>>);

impl Backend for Queue {
    fn id(&self) -> &'static str {
        "queue"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { in_flight: 2, ..Capabilities::PLAIN }
    }

    fn run(&self, _: Range<usize>, _: &mut [u8]) -> Result<(), Failure> {
        Err(Failure::lasting("it takes tasks only"))
    }

    fn submit(&self, task: Task) {
        self.0.lock().expect("sender").send(task).expect("the worker is there");
    }
}

/// A job with leases of so many looks of the keeper, and endless patience.
fn job(looks: u32) -> Job {
    Job::new(ITEMS, 1).options(options(looks))
}

fn options(looks: u32) -> Options {
    let lease = Duration::from_millis(10) * looks;
    let patience = Duration::from_secs(1_000_000);
    Options { lease, patience, ..Options::STANDARD }
}

/// Runs a job, in which every item is accepted once and right.
fn run_right(scheduler: &WorkStealingScheduler, job: &Job) {
    let mut out = [0; ITEMS];
    let report = scheduler.run(job, &mut out).expect("a run that ends well");
    let right: Vec<u8> = (0..ITEMS).map(value).collect();
    assert_eq!(out[..], right);
    assert_eq!((report.done, report.duplicated), (ITEMS, 0));
    assert_eq!(report.backends.iter().map(|backend| backend.items).sum::<usize>(), ITEMS);
}

fn check(scheduler: impl Scheduler + 'static, test: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    let orders = Runner::new(scheduler, config).run(test);
    assert!(orders >= ORDERS / 4, "{orders} orders from seed {SEED}");
}

fn random() -> RandomScheduler {
    RandomScheduler::new_from_seed(SEED, ORDERS)
}

#[test]
fn items_on_three_backends_of_which_one_fails_and_one_panics_are_done_once() {
    check(random(), || {
        let crew = vec![by(Ways::Right), by(Ways::Fails), by(Ways::Panics)];
        run_right(&WorkStealingScheduler::new(crew), &job(1_000));
    });
}

#[test]
fn items_under_leases_that_run_out_at_any_time_are_done_once() {
    check(random(), || {
        let crew = vec![by(Ways::Right), by(Ways::Right), by(Ways::Panics)];
        run_right(&WorkStealingScheduler::new(crew), &job(2));
    });
}

#[test]
fn items_in_orders_with_few_but_deep_preemptions_are_done_once() {
    check(PctScheduler::new_from_seed(SEED, 3, ORDERS / 4), || {
        let crew = vec![by(Ways::Right), by(Ways::Fails), by(Ways::Dies)];
        run_right(&WorkStealingScheduler::new(crew), &job(1_000));
    });
}

#[test]
fn tasks_that_another_thread_answers_are_done_once_in_two_runs() {
    check(random(), || {
        let (sender, receiver) = mpsc::channel::<Task>();
        let worker = thread::spawn(move || {
            while let Ok(mut task) = receiver.recv() {
                fill(task.items(), task.output());
                task.complete();
            }
        });
        let crew = vec![Arc::new(Queue(Mutex::new(sender))) as Arc<dyn Backend>, by(Ways::Dies)];
        let scheduler = WorkStealingScheduler::new(crew);
        run_right(&scheduler, &job(1_000));
        run_right(&scheduler, &job(1_000));
        drop(scheduler);
        worker.join().expect("the worker");
    });
}

#[test]
fn runs_whose_backends_all_die_end_and_say_what_is_done() {
    check(random(), || {
        let scheduler = WorkStealingScheduler::new(vec![by(Ways::Dies), by(Ways::Dies)]);
        let mut out = [0; ITEMS];
        let error = scheduler.run(&job(1_000), &mut out).expect_err("nobody is left");
        let StealError::AllLost(unfinished) = error else { panic!("{error}") };
        for (item, out) in out.into_iter().enumerate() {
            let lost = unfinished.missing.iter().any(|range| range.contains(&item));
            assert!(lost || out == value(item), "item {item}");
        }
    });
}

#[test]
fn streams_are_in_order_and_right_and_may_be_dropped() {
    check(random(), || {
        let crew = vec![by(Ways::Right), by(Ways::Fails), by(Ways::Panics)];
        let scheduler = WorkStealingScheduler::new(crew);
        let job = job(1_000).options(Options { window_bytes: 4, ..options(1_000) });
        let mut next = 0;
        for block in scheduler.run_streaming(&job).expect("a stream") {
            let block = block.expect("a block");
            assert_eq!(block.items.start, next);
            assert!(block.items.clone().map(value).eq(block.bytes.iter().copied()));
            next = block.items.end;
        }
        assert_eq!(next, ITEMS);
        let mut dropped = scheduler.run_streaming(&job).expect("a stream");
        assert!(dropped.next().is_some_and(|block| block.is_ok()));
    });
}

#[test]
fn job_cancelled_beside_its_run_ends_done_or_cancelled() {
    check(random(), || {
        let scheduler = WorkStealingScheduler::new(vec![by(Ways::Right), by(Ways::Fails)]);
        let job = job(1_000);
        let cancel = job.canceller();
        let other = thread::spawn(move || cancel.cancel());
        let mut out = [0; ITEMS];
        match scheduler.run(&job, &mut out) {
            Ok(report) => assert_eq!(report.done, ITEMS),
            Err(StealError::Cancelled(unfinished)) => assert!(unfinished.report.done < ITEMS),
            Err(error) => panic!("{error}"),
        }
        other.join().expect("the other thread");
    });
}
