// SPDX-License-Identifier: Apache-2.0
//! Tasks that are answered elsewhere, cancellation, priorities, and callers that get in each other's way.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use spanker_steal::{Backend, Capabilities, StealError, Task};

use crate::crew::{BYTES, By, Counts, Gate, On, bounded, calm, fill, job, over, run_right, value};

const ITEMS: usize = 300;

#[test]
fn tasks_answered_from_another_thread_are_two_at_a_time_and_all_count() {
    bounded(|| {
        let (sender, receiver) = mpsc::channel::<Task>();
        let open = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let theirs = Arc::clone(&open);
        let worker = thread::spawn(move || {
            let mut two = false;
            for mut task in receiver {
                // The first is kept until a second has come.
                while !two {
                    two = theirs.0.load(Ordering::SeqCst) == 2;
                    thread::sleep(Duration::from_micros(200));
                }
                let items = task.items();
                fill(items, task.output());
                theirs.0.fetch_sub(1, Ordering::SeqCst);
                task.complete();
            }
        });
        let theirs = Arc::clone(&open);
        let backend = On::new("queue", move |task| {
            let now = theirs.0.fetch_add(1, Ordering::SeqCst) + 1;
            theirs.1.fetch_max(now, Ordering::SeqCst);
            sender.send(task).expect("the worker is there");
        });
        let backend = backend.with(Capabilities { in_flight: 2, ..Capabilities::PLAIN });
        let scheduler = over(vec![Arc::new(backend)]);
        let report = run_right(&scheduler, &job(ITEMS, calm()));
        assert_eq!(report.backends[0].items, ITEMS);
        assert_eq!(open.1.load(Ordering::SeqCst), 2);
        drop(scheduler);
        worker.join().expect("the worker ends with its backend");
    });
}

#[test]
fn job_cancelled_from_another_thread_ends_and_keeps_what_is_done() {
    bounded(|| {
        let job = job(100_000, calm());
        let (cancel, calls) = (job.canceller(), AtomicUsize::new(0));
        let backend = By::new("by", move |items, out| {
            thread::sleep(Duration::from_millis(1));
            fill(items, out);
            if calls.fetch_add(1, Ordering::SeqCst) == 5 {
                let cancel = cancel.clone();
                thread::spawn(move || cancel.cancel());
            }
            Ok(())
        });
        let backend = backend.with(Capabilities { most_items: Some(8), ..Capabilities::PLAIN });
        let scheduler = over(vec![Arc::new(backend)]);
        let mut out = vec![0; 100_000 * BYTES];
        let error = scheduler.run(&job, &mut out).expect_err("cancelled");
        let StealError::Cancelled(unfinished) = error else { panic!("{error}") };
        assert!((5..100_000).contains(&unfinished.report.done), "{}", unfinished.report.done);
        for (item, out) in out.chunks_exact(BYTES).enumerate() {
            let lost = unfinished.missing.iter().any(|range| range.contains(&item));
            assert!(lost || out == value(item), "item {item}");
        }
        // It stays cancelled, and streams of it end as well.
        loop {
            match scheduler.run_streaming(&job).expect("a stream").find_map(Result::err) {
                Some(StealError::Cancelled(_)) => break,
                // The backend is still in its last call.
                Some(StealError::AllLost(_)) => thread::sleep(Duration::from_millis(1)),
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn second_run_beside_the_first_is_told_that_the_scheduler_is_busy() {
    bounded(|| {
        let (came, gate) = (Gate::default(), Gate::default());
        let (comes, waits) = (came.clone(), gate.clone());
        let scheduler = over(vec![Arc::new(By::new("by", move |items, out| {
            comes.open();
            waits.pass();
            fill(items, out);
            Ok(())
        }))]);
        thread::scope(|scope| {
            scope.spawn(|| run_right(&scheduler, &job(ITEMS, calm())));
            came.pass();
            let other = job(10, calm());
            assert_eq!(scheduler.run(&other, &mut [0; 10 * BYTES]), Err(StealError::Busy));
            assert_eq!(scheduler.run_streaming(&other).err(), Some(StealError::Busy));
            gate.open();
        });
        run_right(&scheduler, &job(ITEMS, calm()));
    });
}

#[test]
fn watcher_that_panics_leaves_a_scheduler_that_runs() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let backend = By::right("by", &counts, Duration::from_millis(2));
        let backend = backend.with(Capabilities { most_items: Some(1), ..Capabilities::PLAIN });
        let scheduler = over(vec![Arc::new(backend)]);
        let mut out = vec![0; ITEMS * BYTES];
        let watched = catch_unwind(AssertUnwindSafe(|| {
            scheduler.run_watched(&job(ITEMS, calm()), &mut out, |report| {
                assert!(report.done == ITEMS, "not all is done");
            })
        }));
        assert!(watched.is_err());
        // The lane may have a last task in hand, and then it takes no part in the next run.
        let ran = (0..100).any(|_| {
            thread::sleep(Duration::from_millis(20));
            scheduler.run(&job(20, calm()), &mut [0; 20 * BYTES]).is_ok()
        });
        assert!(ran);
    });
}

#[test]
fn urgent_items_are_run_first_in_order_of_their_priorities() {
    bounded(|| {
        let order = Arc::new(Mutex::new(Vec::new()));
        let theirs = Arc::clone(&order);
        let backend = By::new("by", move |items, out| {
            theirs.lock().expect("order").extend(items.clone());
            fill(items, out);
            Ok(())
        });
        let job = job(100, calm()).first(40..60, 1).first(90..100, 5).first(0..10, -1);
        run_right(&over(vec![Arc::new(backend)]), &job);
        let expected: Vec<usize> = (90..100).chain(40..60).chain(10..40).chain(60..90).collect();
        let order = order.lock().expect("order");
        assert_eq!(order[..90], expected);
        assert_eq!(order[90..], (0..10).collect::<Vec<_>>());
    });
}

#[test]
fn progress_is_told_and_never_goes_back_without_faults() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let slow =
            |id| -> Arc<dyn Backend> { Arc::new(By::right(id, &counts, Duration::from_millis(2))) };
        let mut told = vec![0];
        let scheduler = over(vec![slow("a"), slow("b")]);
        let mut out = vec![0; ITEMS * BYTES];
        let report = scheduler
            .run_watched(&job(ITEMS, calm()), &mut out, |report| told.push(report.done))
            .expect("a run");
        assert!(told.len() > 1 && told.is_sorted(), "{told:?}");
        assert_eq!((report.done, counts.all()), (ITEMS, vec![1; ITEMS]));
    });
}
