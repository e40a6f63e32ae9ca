// SPDX-License-Identifier: Apache-2.0
//! Jobs that cannot be run, and jobs at the edge of what can.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use spanker_steal::{Backend, Job, MOST_BACKENDS, MOST_ITEMS, Options, StealError};

use crate::crew::{BYTES, By, Counts, bounded, calm, job, over, run_right};

fn crew(backends: usize, counts: &Counts) -> Vec<Arc<dyn Backend>> {
    let backend = |_| -> Arc<dyn Backend> { Arc::new(By::right("by", counts, Duration::ZERO)) };
    (0..backends).map(backend).collect()
}

/// What a job gives on two backends that must not be asked for anything.
fn refused(job: &Job, out: usize) -> StealError {
    let counts = Counts::new(1000);
    let scheduler = over(crew(2, &counts));
    let error = scheduler.run(job, &mut vec![0; out]).expect_err("it cannot be run");
    assert_eq!(counts.total(), 0);
    error
}

#[test]
fn job_without_items_is_refused() {
    assert_eq!(refused(&Job::new(0, 4), 0), StealError::NoItems);
    let counts = Counts::new(1);
    let stream = over(crew(1, &counts)).run_streaming(&Job::new(0, 4)).err();
    assert_eq!(stream, Some(StealError::NoItems));
}

#[test]
fn job_without_backends_is_refused() {
    let error = over(Vec::new()).run(&Job::new(5, 4), &mut [0; 20]).expect_err("nobody is there");
    assert_eq!(error, StealError::NoBackends { items: 5 });
}

#[test]
fn job_on_too_many_backends_is_refused_and_on_the_most_it_runs() {
    let counts = Counts::new(300);
    let error = over(crew(MOST_BACKENDS + 1, &counts))
        .run(&job(300, calm()), &mut [0; 300 * BYTES])
        .expect_err("one too many");
    assert_eq!(error, StealError::TooManyBackends { backends: MOST_BACKENDS + 1 });
    bounded(move || {
        run_right(&over(crew(MOST_BACKENDS, &counts)), &job(300, calm()));
        assert_eq!(counts.all(), vec![1; 300]);
    });
}

#[test]
fn job_whose_sizes_overflow_is_refused() {
    let error = refused(&Job::new(1 << 40, 1 << 40), 0);
    assert_eq!(error, StealError::Overflow { items: 1 << 40, bytes: 1 << 40 });
    let error = refused(&Job::new(MOST_ITEMS + 1, 0), 0);
    assert_eq!(error, StealError::TooManyItems { items: MOST_ITEMS + 1 });
}

#[test]
fn job_with_output_of_another_length_is_refused() {
    for have in [0, 39, 41] {
        let error = refused(&Job::new(10, 4), have);
        assert_eq!(error, StealError::Output { have, need: 40, items: 10, bytes: 4 });
    }
}

#[test]
fn job_whose_description_makes_no_sense_is_refused_and_says_why() {
    let plain = || Job::new(100, 1);
    let sample = |sample: f64| plain().options(Options { sample, ..Options::STANDARD });
    let backwards = Range { start: 20, end: 10 };
    for (job, says) in [
        (plain().grain(0), "a unit of 0 items"),
        (plain().grain(usize::MAX), "a unit of"),
        (plain().first(10..20, 1).first(19..30, 2), "two priorities for item 19"),
        (plain().first(90..101, 1), "items 90..101"),
        (plain().first(5..5, 1), "items 5..5"),
        (plain().first(backwards, 1), "items 20..10"),
        (plain().grain(8).first(4..16, 1), "items 4..16"),
        (sample(1.5), "a sample of 1.5"),
        (sample(f64::NAN), "a sample of NaN"),
        ((0..65).fold(plain(), |job, at| job.first(at..at + 1, 1)), "65 priorities"),
    ] {
        let error = refused(&job, 100).to_string();
        assert!(error.contains(says), "{error} for {says}");
    }
}

#[test]
fn stream_of_a_job_with_priorities_is_refused() {
    let counts = Counts::new(100);
    let scheduler = over(crew(1, &counts));
    let error = scheduler.run_streaming(&Job::new(100, 1).first(0..10, 1)).expect_err("an order");
    assert!(error.to_string().contains("priorities"), "{error}");
}

#[test]
fn more_backends_than_items_do_each_item_once() {
    bounded(|| {
        for items in 1..4 {
            let counts = Counts::new(items);
            run_right(&over(crew(9, &counts)), &job(items, calm()));
            assert_eq!(counts.all(), vec![1; items]);
        }
    });
}

#[test]
fn last_unit_shorter_than_the_grain_is_done_once_like_the_others() {
    bounded(|| {
        for (items, grain) in [(10, 3), (3, 10), (1, 1), (100, 7), (64, 64)] {
            let counts = Counts::new(items);
            run_right(&over(crew(2, &counts)), &job(items, calm()).grain(grain));
            assert_eq!(counts.all(), vec![1; items], "{items} items by {grain}");
        }
    });
}

#[test]
fn leases_and_patience_without_end_do_not_overflow() {
    bounded(|| {
        let forever = Options {
            lease: Duration::MAX,
            patience: Duration::MAX,
            cap: Duration::MAX,
            ..Options::STANDARD
        };
        let counts = Counts::new(100);
        run_right(&over(crew(2, &counts)), &job(100, forever));
        assert_eq!(counts.all(), vec![1; 100]);
    });
}

#[test]
fn outputs_without_bytes_are_done_once_with_and_without_checksums() {
    bounded(|| {
        for checksums in [false, true] {
            let counts = Counts::new(500);
            let theirs = counts.clone();
            let count = move |items: Range<usize>, out: &mut [u8]| {
                assert!(out.is_empty());
                theirs.add(items);
                Ok(())
            };
            let scheduler = over(vec![Arc::new(By::new("count", count))]);
            let job = Job::new(500, 0).options(Options { checksums, ..calm() });
            let report = scheduler.run(&job, &mut []).expect("a run");
            assert_eq!((report.done, counts.all()), (500, vec![1; 500]));
            let mut next = 0;
            for block in scheduler.run_streaming(&job).expect("a stream") {
                let block = block.expect("a block");
                assert_eq!((block.items.start, block.bytes.len()), (next, 0));
                next = block.items.end;
            }
            assert_eq!((next, counts.all()), (500, vec![2; 500]));
        }
    });
}
