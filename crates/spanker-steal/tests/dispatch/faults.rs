// SPDX-License-Identifier: Apache-2.0
//! Backends that fail, panic, drop what they have, or are lost for good.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use spanker_steal::{Backend, Failure, IncidentKind, StealError, Task};

use crate::crew::{
    BYTES, By, Counts, Gate, On, UNTOUCHED, bounded, calm, fill, incidents, job, over, run_right,
    value,
};

const ITEMS: usize = 300;
const EACH: Duration = Duration::from_micros(100);

fn steady(counts: &Counts) -> Arc<dyn Backend> {
    Arc::new(By::right("steady", counts, EACH))
}

/// One that is right, but waits with its first items until `gate` is open: others get some first.
fn patient(id: &'static str, counts: &Counts, gate: &Gate) -> By {
    let (counts, gate) = (counts.clone(), gate.clone());
    By::new(id, move |items, out| {
        gate.pass();
        counts.add(items.clone());
        fill(items, out);
        Ok(())
    })
}

/// A task that is completed with the right outputs.
fn complete(mut task: Task) {
    let items = task.items();
    fill(items, task.output());
    task.complete();
}

#[test]
fn three_unequal_backends_run_every_item_once() {
    bounded(|| {
        let counts = Counts::new(2000);
        let backend = |id, micros| -> Arc<dyn Backend> {
            Arc::new(By::right(id, &counts, Duration::from_micros(micros)))
        };
        let scheduler = over(vec![backend("a", 1), backend("b", 20), backend("c", 100)]);
        for round in 1..=3 {
            let report = run_right(&scheduler, &job(2000, calm()));
            assert_eq!(counts.all(), vec![round; 2000]);
            assert!(report.backends.iter().all(|backend| backend.benched.is_none()));
        }
    });
}

#[test]
fn panic_in_run_costs_one_task_and_the_backend_goes_on() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let opener = Gate::default();
        let (theirs, tries) = (opener.clone(), AtomicUsize::new(0));
        let panics = By::new("panics", move |items, out| {
            let first = tries.fetch_add(1, Ordering::SeqCst) == 0;
            assert!(!first, "the first time");
            fill(items, out);
            theirs.open();
            Ok(())
        });
        let honest = patient("honest", &counts, &opener);
        let scheduler = over(vec![Arc::new(panics), Arc::new(honest)]);
        let report = run_right(&scheduler, &job(ITEMS, calm()));
        assert_eq!(incidents(&report, IncidentKind::Failed, "panics0"), 1);
        let what = &report.incidents[0].what;
        assert!(what.contains("panicked: the first time"), "{what}");
        assert!(report.backends[0].items > 0 && report.backends[0].benched.is_none());
    });
}

#[test]
fn panic_in_submit_answers_for_the_task() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let gate = Gate::default();
        let (theirs, tries) = (gate.clone(), AtomicUsize::new(0));
        let panics = On::new("panics", move |task| {
            let taken = task;
            match tries.fetch_add(1, Ordering::SeqCst) {
                0 => panic!("with {:?}", taken.items()),
                _ => theirs.open(),
            }
            complete(taken);
        });
        let honest = patient("honest", &counts, &gate);
        let report =
            run_right(&over(vec![Arc::new(panics), Arc::new(honest)]), &job(ITEMS, calm()));
        assert_eq!(incidents(&report, IncidentKind::Failed, "panics0"), 1);
        assert!(report.backends[0].benched.is_none());
    });
}

#[test]
fn backend_that_always_panics_is_benched_after_its_strikes() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let gate = Gate::default();
        let (theirs, tries) = (gate.clone(), AtomicUsize::new(0));
        let panics = By::new("panics", move |_, _| {
            if tries.fetch_add(1, Ordering::SeqCst) == 2 {
                theirs.open();
            }
            panic!("again")
        });
        // It cannot take what it failed at before others have had it, so all of its tasks are new ones.
        let honest = patient("honest", &counts, &gate);
        let report =
            run_right(&over(vec![Arc::new(panics), Arc::new(honest)]), &job(ITEMS, calm()));
        assert_eq!(report.backends[0].items, 0);
        assert_eq!(incidents(&report, IncidentKind::Failed, "panics0"), 3);
        let why = report.backends[0].benched.as_deref().expect("benched");
        assert!(why.contains("again"), "{why}");
        assert_eq!(counts.all(), vec![1; ITEMS]);
    });
}

#[test]
fn passing_failures_are_made_up_for_and_the_backend_goes_on() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let tries = AtomicUsize::new(0);
        let flaky = By::new("flaky", move |items, out| {
            if tries.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                return Err(Failure::passing("not now"));
            }
            fill(items, out);
            Ok(())
        });
        let report = run_right(&over(vec![Arc::new(flaky), steady(&counts)]), &job(ITEMS, calm()));
        assert!(incidents(&report, IncidentKind::Failed, "flaky0") >= 1);
        assert_eq!(report.backends[0].benched, None);
    });
}

#[test]
fn lasting_failure_ends_the_part_of_its_backend() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let gate = Gate::default();
        let theirs = gate.clone();
        let gone = By::new("gone", move |_, _| {
            theirs.open();
            Err(Failure::lasting("the cable is out"))
        });
        let honest = patient("honest", &counts, &gate);
        let report = run_right(&over(vec![Arc::new(gone), Arc::new(honest)]), &job(ITEMS, calm()));
        assert_eq!(incidents(&report, IncidentKind::Failed, "gone0"), 1);
        assert_eq!(report.backends[0].benched.as_deref(), Some("the cable is out"));
        assert_eq!(counts.all(), vec![1; ITEMS]);
    });
}

#[test]
fn all_backends_but_one_die_and_the_last_one_does_the_rest() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let mut crew: Vec<Arc<dyn Backend>> = Vec::new();
        for dies_after in 0..7 {
            let tries = AtomicUsize::new(0);
            crew.push(Arc::new(By::new("mortal", move |items, out| {
                if tries.fetch_add(1, Ordering::SeqCst) >= dies_after {
                    return Err(Failure::lasting("dead"));
                }
                fill(items, out);
                Ok(())
            })));
        }
        crew.push(steady(&counts));
        let report = run_right(&over(crew), &job(ITEMS, calm()));
        assert!(report.backends[7].items > 0 && report.backends[7].benched.is_none());
    });
}

#[test]
fn all_backends_die_and_the_error_says_what_is_done() {
    bounded(|| {
        let mut crew: Vec<Arc<dyn Backend>> = Vec::new();
        for _ in 0..3 {
            let tries = AtomicUsize::new(0);
            crew.push(Arc::new(By::new("mortal", move |items, out| {
                if tries.fetch_add(1, Ordering::SeqCst) >= 2 {
                    return Err(Failure::lasting("dead"));
                }
                fill(items, out);
                Ok(())
            })));
        }
        let mut out = vec![UNTOUCHED; 5000 * BYTES];
        let error = over(crew).run(&job(5000, calm()), &mut out).expect_err("nobody is left");
        assert!(matches!(error, StealError::AllLost(_)), "{error}");
        let unfinished = error.unfinished().expect("the run had begun");
        let missing: usize = unfinished.missing.iter().map(ExactSizeIterator::len).sum();
        assert_eq!(unfinished.report.done + missing, 5000);
        assert!(unfinished.report.done >= 1, "{error}");
        for (item, out) in out.chunks_exact(BYTES).enumerate() {
            if unfinished.missing.iter().any(|range| range.contains(&item)) {
                assert_eq!(out, [UNTOUCHED; BYTES], "item {item}");
            } else {
                assert_eq!(out, value(item), "item {item}");
            }
        }
        assert!(error.to_string().contains("mortal2: dead"), "{error}");
    });
}

#[test]
fn item_that_fails_everywhere_is_named() {
    bounded(|| {
        for backends in [1, 2, 4] {
            let crew = (0..backends).map(|_| -> Arc<dyn Backend> {
                Arc::new(By::new("picky", |items, out| {
                    if items.contains(&137) {
                        return Err(Failure::passing("item 137 is too hot"));
                    }
                    fill(items, out);
                    Ok(())
                }))
            });
            let mut out = vec![0; ITEMS * BYTES];
            let error = over(crew.collect()).run(&job(ITEMS, calm()), &mut out);
            let error = error.expect_err("one item cannot be done");
            let StealError::Refused { items, last, unfinished } = error else { panic!("{error}") };
            assert_eq!((items, last.as_str()), (137..138, "item 137 is too hot"));
            assert!(unfinished.missing.iter().any(|range| range.contains(&137)));
            assert!(unfinished.report.backends.iter().all(|backend| backend.benched.is_none()));
        }
    });
}

#[test]
fn dropped_tasks_have_failed_and_are_done_by_others() {
    bounded(|| {
        let counts = Counts::new(ITEMS);
        let gate = Gate::default();
        let (theirs, tries) = (gate.clone(), AtomicUsize::new(0));
        let drops = On::new("drops", move |task| {
            if tries.fetch_add(1, Ordering::SeqCst) < 2 {
                return;
            }
            theirs.open();
            complete(task);
        });
        let honest = patient("honest", &counts, &gate);
        let report = run_right(&over(vec![Arc::new(drops), Arc::new(honest)]), &job(ITEMS, calm()));
        assert_eq!(incidents(&report, IncidentKind::Failed, "drops0"), 2);
        assert!(report.incidents[0].what.contains("dropped"), "{}", report.incidents[0]);
    });
}
