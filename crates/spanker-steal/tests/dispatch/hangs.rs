// SPDX-License-Identifier: Apache-2.0
//! Backends that do not answer, or answer when nobody waits any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use spanker_steal::{Backend, IncidentKind, Options, StealError};

use crate::crew::{
    BYTES, By, Counts, Gate, LONG, On, UNTOUCHED, bounded, fill, hasty, incidents, job, over,
    run_right, value,
};

const ITEMS: usize = 400;
const EACH: Duration = Duration::from_micros(50);

/// One whose first call waits at `gate`, says that it `came`, and then gives wrong bytes. Others are right.
fn sleeper(came: &Gate, gate: &Gate) -> By {
    let (came, gate, calls) = (came.clone(), gate.clone(), AtomicUsize::new(0));
    By::new("sleeper", move |items, out| {
        if calls.fetch_add(1, Ordering::SeqCst) == 0 {
            came.open();
            gate.pass();
            out.fill(0xee);
        } else {
            fill(items, out);
        }
        Ok(())
    })
}

/// One that is right, and waits until another has come.
fn after(came: &Gate) -> By {
    let came = came.clone();
    By::new("steady", move |items, out| {
        came.pass();
        std::thread::sleep(EACH * items.len() as u32);
        fill(items, out);
        Ok(())
    })
}

#[test]
fn hanging_backend_loses_its_lease_and_the_run_ends_without_it() {
    bounded(|| {
        let (came, gate) = (Gate::default(), Gate::default());
        let scheduler = over(vec![Arc::new(sleeper(&came, &gate)), Arc::new(after(&came))]);
        let report = run_right(&scheduler, &job(ITEMS, hasty()));
        assert!(!gate.is_open(), "the run ended while it hung");
        assert!(incidents(&report, IncidentKind::Expired, "sleeper0") >= 1);
        assert_eq!(report.backends[0].items, 0);
        gate.open();
    });
}

#[test]
fn answer_within_the_run_after_its_lease_was_lost_is_refused() {
    bounded(|| {
        let (came, gate, answered) = (Gate::default(), Gate::default(), Gate::default());
        let held = Arc::new(AtomicUsize::new(usize::MAX));
        let (comes, waits, answers) = (came.clone(), gate.clone(), answered.clone());
        let (theirs, calls) = (Arc::clone(&held), AtomicUsize::new(0));
        let late = On::new("late", move |mut task| {
            let items = task.items();
            if calls.fetch_add(1, Ordering::SeqCst) > 0 {
                fill(items, task.output());
                return task.complete();
            }
            theirs.store(items.start, Ordering::SeqCst);
            comes.open();
            waits.pass();
            task.output().fill(0xee);
            task.complete();
            answers.open();
        });
        // Whoever gets what the other had wakes it, and waits for its answer.
        let other = By::new("other", move |items, out| {
            came.pass();
            if items.contains(&held.load(Ordering::SeqCst)) {
                gate.open();
                answered.pass();
            }
            fill(items, out);
            Ok(())
        });
        let scheduler = over(vec![Arc::new(late), Arc::new(other)]);
        let report = run_right(&scheduler, &job(ITEMS, hasty()));
        assert!(incidents(&report, IncidentKind::Expired, "late0") >= 1);
        assert!(incidents(&report, IncidentKind::Refused, "late0") >= 1);
    });
}

#[test]
fn answer_in_the_next_run_is_refused_and_the_backend_comes_back_after_it() {
    bounded(|| {
        let (came, gate) = (Gate::default(), Gate::default());
        let scheduler = over(vec![Arc::new(sleeper(&came, &gate)), Arc::new(after(&came))]);
        run_right(&scheduler, &job(ITEMS, hasty()));
        // The next run begins while the call hangs, and its answer comes in the middle of it.
        let mut next = 0;
        for block in scheduler.run_streaming(&job(ITEMS, hasty())).expect("a stream") {
            let block = block.expect("a block");
            assert_eq!(block.items.start, next);
            for (item, out) in block.items.clone().zip(block.bytes.chunks_exact(BYTES)) {
                assert_eq!(out, value(item), "item {item}");
            }
            next = block.items.end;
            gate.open();
        }
        assert_eq!(next, ITEMS);
        loop {
            let report = run_right(&scheduler, &job(ITEMS, hasty()));
            match &report.backends[0].benched {
                Some(why) => assert!(why.contains("an earlier run"), "{why}"),
                None => break,
            }
        }
    });
}

#[test]
fn run_in_which_everybody_hangs_is_given_up() {
    bounded(|| {
        let gate = Gate::default();
        let hang = || -> Arc<dyn Backend> {
            let gate = gate.clone();
            Arc::new(By::new("stone", move |_, _| {
                gate.pass();
                Ok(())
            }))
        };
        let patience = Duration::from_millis(300);
        let scheduler = over(vec![hang(), hang(), hang()]);
        let mut out = vec![UNTOUCHED; ITEMS * BYTES];
        let job = job(ITEMS, Options { patience, ..hasty() });
        let error = scheduler.run(&job, &mut out).expect_err("nobody answers");
        let StealError::Stalled { waited, unfinished } = error else { panic!("{error}") };
        assert!(patience <= waited && waited < LONG, "{waited:?}");
        assert_eq!((unfinished.report.done, unfinished.missing.len()), (0, 1));
        assert_eq!(unfinished.missing[0], 0..ITEMS);
        assert!(out.iter().all(|byte| *byte == UNTOUCHED));
        // All of them are still inside, so that there is nobody for another run.
        let error = scheduler.run(&job, &mut out).expect_err("nobody is there");
        assert!(matches!(error, StealError::AllLost(_)), "{error}");
        gate.open();
    });
}

#[test]
fn backends_that_hang_after_some_items_leave_those_done() {
    bounded(|| {
        let gate = Gate::default();
        let hang = || -> Arc<dyn Backend> {
            let (gate, calls) = (gate.clone(), AtomicUsize::new(0));
            Arc::new(By::new("tired", move |items, out| {
                if calls.fetch_add(1, Ordering::SeqCst) >= 2 {
                    gate.pass();
                }
                fill(items, out);
                Ok(())
            }))
        };
        let mut out = vec![UNTOUCHED; 9000 * BYTES];
        let options = Options { patience: Duration::from_millis(500), ..hasty() };
        let error = over(vec![hang(), hang()]).run(&job(9000, options), &mut out);
        let error = error.expect_err("nobody answers");
        assert!(matches!(error, StealError::Stalled { .. }), "{error}");
        let unfinished = error.unfinished().expect("the run had begun");
        let missing: usize = unfinished.missing.iter().map(ExactSizeIterator::len).sum();
        assert!(unfinished.report.done >= 2 && unfinished.report.done + missing == 9000);
        for (item, out) in out.chunks_exact(BYTES).enumerate() {
            let lost = unfinished.missing.iter().any(|range| range.contains(&item));
            assert!(lost || out == value(item), "item {item}");
        }
        gate.open();
    });
}

#[test]
fn task_that_is_kept_for_ever_holds_up_nobody() {
    bounded(|| {
        let kept = Arc::new(std::sync::Mutex::new(Vec::new()));
        let came = Gate::default();
        let (theirs, comes, unwanted) =
            (Arc::clone(&kept), came.clone(), Arc::new(AtomicBool::new(false)));
        let keeps = On::new("keeps", move |task| {
            theirs.lock().expect("kept").push(task);
            comes.open();
        });
        let scheduler = over(vec![Arc::new(keeps), Arc::new(after(&came))]);
        let report = run_right(&scheduler, &job(ITEMS, hasty()));
        assert!(incidents(&report, IncidentKind::Expired, "keeps0") >= 1);
        for task in kept.lock().expect("kept").drain(..) {
            unwanted.store(!task.is_wanted(), Ordering::SeqCst);
            task.complete();
        }
        assert!(unwanted.load(Ordering::SeqCst));
    });
}

#[test]
fn counts_of_a_hasty_run_are_at_least_one_and_what_is_delivered_is_right() {
    bounded(|| {
        // Leases so short that many are lost for nothing: wasted work, and no wrong answer.
        let counts = Counts::new(ITEMS);
        let slow = |each| -> Arc<dyn Backend> { Arc::new(By::right("slow", &counts, each)) };
        let options = Options { lease: Duration::from_micros(100), ..Options::STANDARD };
        let crew = vec![slow(Duration::from_micros(200)), slow(EACH), slow(Duration::ZERO)];
        run_right(&over(crew), &job(ITEMS, options));
        assert!(counts.all().iter().all(|count| *count >= 1));
    });
}
