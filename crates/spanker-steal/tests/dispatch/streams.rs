// SPDX-License-Identifier: Apache-2.0
//! Streams: in order, each item once, with bounded memory, slow readers, faults, and readers that leave.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use spanker_steal::{
    Backend, Block, Capabilities, Failure, IncidentKind, Options, Report, StealError,
    WorkStealingScheduler,
};

use crate::crew::{
    BYTES, By, Counts, Gate, bounded, calm, fill, hasty, incidents, job, over, run_right, value,
};

const ITEMS: usize = 400;

/// Reads all of a stream, which is in order and right. Returns what happened.
fn read(
    scheduler: &WorkStealingScheduler,
    job: &spanker_steal::Job,
    mut look: impl FnMut(&Block),
) -> Report {
    let mut next = 0;
    let mut stream = scheduler.run_streaming(job).expect("a stream");
    for block in stream.by_ref() {
        let block = block.expect("a block");
        assert_eq!(block.items.start, next);
        assert_eq!(block.bytes.len(), block.items.len() * BYTES);
        for (item, out) in block.items.clone().zip(block.bytes.chunks_exact(BYTES)) {
            assert_eq!(out, value(item), "item {item}");
        }
        next = block.items.end;
        look(&block);
    }
    assert_eq!(next, job.items());
    assert!(stream.next().is_none());
    stream.report().expect("a report").clone()
}

#[test]
fn stream_of_unequal_backends_is_in_order_and_runs_every_item_once() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let backend = |id, micros| -> Arc<dyn Backend> {
            Arc::new(By::right(id, &counts, Duration::from_micros(micros)))
        };
        let scheduler = over(vec![backend("a", 10), backend("b", 100), backend("c", 300)]);
        let report = read(&scheduler, &job(ITEMS, calm()), |_| ());
        assert_eq!((report.done, report.duplicated), (ITEMS, 0));
        assert_eq!(counts.all(), vec![1; ITEMS]);
    });
}

#[test]
fn stream_with_a_small_window_and_a_slow_reader_runs_no_further_than_the_window() {
    const WINDOW: usize = 20;
    bounded(|| {
        let read_to = Arc::new(AtomicUsize::new(0));
        let most = Arc::new(AtomicUsize::new(0));
        let backend = |id| -> Arc<dyn Backend> {
            let (read_to, most) = (Arc::clone(&read_to), Arc::clone(&most));
            let work = move |items: std::ops::Range<usize>, out: &mut [u8]| {
                let ahead = items.end - read_to.load(Ordering::SeqCst).min(items.end);
                most.fetch_max(ahead, Ordering::SeqCst);
                fill(items, out);
                Ok(())
            };
            // It is told to be fast, so that it would take large tasks.
            let rate = Some(1e9);
            Arc::new(By::new(id, work).with(Capabilities { rate, ..Capabilities::PLAIN }))
        };
        let scheduler = over(vec![backend("a"), backend("b")]);
        let options = Options { window_bytes: WINDOW * BYTES, ..calm() };
        let mut largest = 0;
        read(&scheduler, &job(ITEMS, options).grain(4), |block| {
            thread::sleep(Duration::from_millis(1));
            largest = largest.max(block.items.len());
            read_to.store(block.items.end, Ordering::SeqCst);
        });
        // The window moves on when a block is given out, just before this reader counts it.
        let most = most.load(Ordering::SeqCst);
        assert!(largest <= WINDOW && most <= WINDOW + largest, "{most} ahead, {largest} at once");
    });
}

#[test]
fn window_smaller_than_a_unit_lets_one_unit_through_at_a_time() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let scheduler = over(vec![
            Arc::new(By::right("a", &counts, Duration::ZERO)),
            Arc::new(By::right("b", &counts, Duration::ZERO)),
        ]);
        let options = Options { window_bytes: 1, ..calm() };
        let job = job(ITEMS, options).grain(16);
        read(&scheduler, &job, |block| assert!(block.items.len() <= 16));
        assert_eq!(counts.all(), vec![1; ITEMS]);
    });
}

#[test]
fn stream_that_is_dropped_ends_its_run() {
    bounded(|| {
        let counts = Counts::new(100_000);
        let backend = By::right("by", &counts, Duration::from_micros(50));
        let backend = backend.with(Capabilities { most_items: Some(10), ..Capabilities::PLAIN });
        let scheduler = over(vec![Arc::new(backend)]);
        let options = Options { window_bytes: 100 * BYTES, ..calm() };
        for blocks in [0, 3] {
            let stream = scheduler.run_streaming(&job(100_000, options.clone())).expect("a stream");
            assert_eq!(stream.take(blocks).filter(Result::is_ok).count(), blocks);
        }
        assert!(counts.total() < 1000, "{}", counts.total());
        run_right(&scheduler, &job(ITEMS, calm()));
    });
}

#[test]
fn stream_with_failures_panics_and_a_hanging_backend_is_in_order_and_right() {
    bounded(|| {
        let (gate, came) = (Gate::default(), Gate::default());
        let counts = Counts::new(ITEMS);
        let tries = AtomicUsize::new(0);
        let flaky = By::new("flaky", move |items, out| {
            match tries.fetch_add(1, Ordering::SeqCst) % 4 {
                1 => return Err(Failure::passing("not now")),
                3 => panic!("oh"),
                _ => fill(items, out),
            }
            Ok(())
        });
        let (waits, comes) = (gate.clone(), came.clone());
        let stone = By::new("stone", move |_, _| {
            comes.open();
            waits.pass();
            Ok(())
        });
        let (waits, theirs) = (came.clone(), counts.clone());
        let steady = By::new("steady", move |items, out| {
            waits.pass();
            theirs.add(items.clone());
            thread::sleep(Duration::from_micros(100));
            fill(items, out);
            Ok(())
        });
        let scheduler = over(vec![Arc::new(flaky), Arc::new(stone), Arc::new(steady)]);
        let options = Options { window_bytes: 64 * BYTES, ..hasty() };
        let report = read(&scheduler, &job(ITEMS, options), |_| ());
        assert!(incidents(&report, IncidentKind::Expired, "stone0") >= 1);
        assert_eq!((report.done, report.duplicated), (ITEMS, 0));
        gate.open();
    });
}

#[test]
fn stream_whose_backends_all_die_gives_what_is_there_and_then_the_error() {
    bounded(|| {
        let mortal = By::new("mortal", |items, out| {
            if items.contains(&100) {
                return Err(Failure::lasting("dead"));
            }
            fill(items, out);
            Ok(())
        });
        let mortal = mortal.with(Capabilities { most_items: Some(5), ..Capabilities::PLAIN });
        let scheduler = over(vec![Arc::new(mortal)]);
        let mut stream = scheduler.run_streaming(&job(ITEMS, calm())).expect("a stream");
        let mut next = 0;
        let error = loop {
            match stream.next().expect("an error before the end") {
                Ok(block) => next = block.items.end,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, StealError::AllLost(_)), "{error}");
        let missing = &error.unfinished().expect("a run").missing;
        assert_eq!(next, missing[0].start, "all before the first that is missing was given out");
        assert!(stream.next().is_none() && stream.report().is_none());
    });
}

#[test]
fn stream_gives_out_what_was_confirmed_of_a_backend_that_lies_later() {
    bounded(|| {
        // Nobody reads past item 0, which is held until the liar is found: what it did right and somebody
        // confirmed stands, and the rest of the same blocks is done again.
        let found = Gate::default();
        let (holds, calls) = (found.clone(), AtomicUsize::new(0));
        let came = Gate::default();
        let comes = came.clone();
        let holder = By::new("holder", move |items, out| {
            comes.open();
            holds.pass();
            fill(items, out);
            Ok(())
        });
        let waits = came.clone();
        let liar = By::new("liar", move |items, out| {
            waits.pass();
            fill(items, out);
            if calls.fetch_add(1, Ordering::SeqCst) >= 4 {
                out.fill(0);
            }
            Ok(())
        });
        let finds = found.clone();
        let judge = By::new("judge", move |items, out| {
            came.pass();
            thread::sleep(Duration::from_millis(2));
            if items.contains(&(ITEMS - 1)) {
                finds.open();
            }
            fill(items, out);
            Ok(())
        });
        let few = Capabilities { most_items: Some(16), ..Capabilities::PLAIN };
        let trusted = Capabilities { trusted: true, ..few };
        let crew: Vec<Arc<dyn Backend>> = vec![
            Arc::new(holder.with(Capabilities { most_items: Some(1), ..few })),
            Arc::new(liar.with(few)),
            Arc::new(judge.with(trusted)),
        ];
        let options = Options { sample: 0.3, seed: 3, ..calm() };
        let report = read(&over(crew), &job(ITEMS, options), |_| ());
        assert!(incidents(&report, IncidentKind::WrongBytes, "liar0") >= 1);
        assert!(report.redone > 0 && report.done == ITEMS);
    });
}

#[test]
fn leases_do_not_run_out_while_the_reader_is_away() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let backend = |id| -> Arc<dyn Backend> {
            let backend = By::right(id, &counts, Duration::ZERO);
            Arc::new(backend.with(Capabilities { most_items: Some(2), ..Capabilities::PLAIN }))
        };
        let scheduler = over(vec![backend("a"), backend("b"), backend("c")]);
        let options = Options { lease: Duration::from_secs(2), ..calm() };
        let mut blocks = 0;
        let report = read(&scheduler, &job(ITEMS, options), |_| {
            blocks += 1;
            if blocks == 3 {
                thread::sleep(Duration::from_secs(3));
            }
        });
        let expired = report.incidents.iter().filter(|i| i.kind == IncidentKind::Expired);
        assert_eq!(expired.count(), 0);
        assert_eq!(counts.all(), vec![1; ITEMS]);
    });
}
