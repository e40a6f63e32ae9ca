// SPDX-License-Identifier: Apache-2.0
//! Backends that lie: about their items, about their bytes, and on the way.

use std::sync::Arc;
use std::time::Duration;

use spanker_steal::{Backend, Capabilities, IncidentKind, Options, StealError, Task, unit_sum};

use crate::crew::{BYTES, By, Gate, On, bounded, calm, fill, incidents, job, over, run_right};

const ITEMS: usize = 200;

/// One that is right and waits until `came` is open.
fn honest(id: &'static str, came: &Gate, trusted: bool) -> Arc<dyn Backend> {
    let came = came.clone();
    let work = move |items: std::ops::Range<usize>, out: &mut [u8]| {
        came.pass();
        std::thread::sleep(Duration::from_micros(50));
        fill(items, out);
        Ok(())
    };
    Arc::new(By::new(id, work).with(Capabilities { trusted, ..Capabilities::PLAIN }))
}

/// One whose bytes are all wrong, and which lets the others begin when it has some.
fn liar(came: &Gate) -> Arc<dyn Backend> {
    let came = came.clone();
    Arc::new(By::new("liar", move |items, out| {
        fill(items, out);
        out.iter_mut().for_each(|byte| *byte ^= 0x40);
        came.open();
        Ok(())
    }))
}

fn sampled(sample: f64) -> Options {
    Options { sample, seed: 11, ..calm() }
}

#[test]
fn answer_for_other_items_than_the_task_is_refused_and_its_backend_benched() {
    bounded(|| {
        for (less, more) in [(0, 1), (1, 0), (1, 1), (0, usize::MAX / 2)] {
            let came = Gate::default();
            let comes = came.clone();
            let lies = On::new("lies", move |mut task: Task| {
                let items = task.items();
                fill(items.clone(), task.output());
                comes.open();
                task.complete_as(items.start + less..items.end + more, None);
            });
            let crew = vec![Arc::new(lies) as Arc<dyn Backend>, honest("honest", &came, false)];
            let report = run_right(&over(crew), &job(ITEMS, calm()));
            assert_eq!(incidents(&report, IncidentKind::Lied, "lies0"), 1, "{less} {more}");
            assert!(report.backends[0].benched.is_some() && report.backends[0].items == 0);
        }
    });
}

#[test]
fn only_backend_that_lies_is_lost_and_nothing_is_done() {
    bounded(|| {
        let lies = On::new("lies", |task: Task| task.complete_as(0..0, None));
        let mut out = vec![0; ITEMS * BYTES];
        let error = over(vec![Arc::new(lies)]).run(&job(ITEMS, calm()), &mut out);
        let error = error.expect_err("nobody is left");
        assert!(matches!(&error, StealError::AllLost(it) if it.report.done == 0), "{error}");
    });
}

#[test]
fn bytes_that_changed_on_the_way_are_found_by_their_sums() {
    bounded(|| {
        let came = Gate::default();
        let comes = came.clone();
        let noisy = On::new("noisy", move |mut task: Task| {
            let items = task.items();
            fill(items.clone(), task.output());
            let sums = task.output().chunks(2 * BYTES).map(unit_sum).collect();
            task.output()[1] ^= 0x10;
            comes.open();
            task.complete_as(items, Some(sums));
        });
        let crew = vec![Arc::new(noisy) as Arc<dyn Backend>, honest("honest", &came, false)];
        let options = Options { checksums: true, ..calm() };
        let report = run_right(&over(crew), &job(ITEMS, options).grain(2));
        assert_eq!(incidents(&report, IncidentKind::WrongBytes, "noisy0"), 1);
        assert!(report.backends[0].benched.is_some());
    });
}

#[test]
fn missing_or_too_many_sums_are_wrong_sums() {
    bounded(|| {
        for sums in [None, Some(vec![]), Some(vec![0; 1000])] {
            let came = Gate::default();
            let comes = came.clone();
            let careless = On::new("careless", move |mut task: Task| {
                let items = task.items();
                fill(items.clone(), task.output());
                comes.open();
                task.complete_as(items, sums.clone());
            });
            let crew = vec![Arc::new(careless) as Arc<dyn Backend>, honest("honest", &came, false)];
            let options = Options { checksums: true, ..calm() };
            let report = run_right(&over(crew), &job(ITEMS, options));
            assert_eq!(incidents(&report, IncidentKind::WrongBytes, "careless0"), 1);
        }
    });
}

#[test]
fn wrong_bytes_are_found_by_a_trusted_backend_and_done_again() {
    bounded(|| {
        for sample in [0.01, 0.3, 1.0] {
            let came = Gate::default();
            let crew = vec![liar(&came), honest("cpu", &came, true)];
            let report = run_right(&over(crew), &job(ITEMS, sampled(sample)));
            assert!(incidents(&report, IncidentKind::WrongBytes, "liar0") >= 1);
            assert_eq!(report.backends[0].items, 0, "all that it did was done again");
            assert!(report.redone >= 1 && report.backends[1].benched.is_none());
        }
    });
}

#[test]
fn wrong_bytes_are_found_by_a_majority_of_three() {
    bounded(|| {
        for sample in [0.01, 1.0] {
            let came = Gate::default();
            let crew = vec![honest("a", &came, false), liar(&came), honest("b", &came, false)];
            let report = run_right(&over(crew), &job(ITEMS, sampled(sample)));
            assert!(incidents(&report, IncidentKind::WrongBytes, "liar0") >= 1);
            assert_eq!(report.backends[1].items, 0);
            assert!(report.backends[0].benched.is_none() && report.backends[2].benched.is_none());
        }
    });
}

#[test]
fn two_that_disagree_with_nobody_to_decide_end_the_run() {
    bounded(|| {
        let came = Gate::default();
        let crew = vec![liar(&came), honest("honest", &came, false)];
        let mut out = vec![0; ITEMS * BYTES];
        let error = over(crew).run(&job(ITEMS, sampled(1.0)), &mut out).expect_err("no majority");
        let StealError::Disagreement { items, mut backends, .. } = error else { panic!("{error}") };
        backends.sort();
        assert_eq!(backends, ["honest0", "liar0"]);
        assert!(!items.is_empty() && items.end <= ITEMS);
    });
}

#[test]
fn honest_backends_that_are_compared_in_full_agree() {
    bounded(|| {
        let came = Gate::default();
        came.open();
        let crew = vec![honest("a", &came, false), honest("b", &came, false)];
        let report = run_right(&over(crew), &job(ITEMS, sampled(1.0)));
        assert_eq!((report.audited, report.redone), (ITEMS, 0));
        assert!(report.incidents.iter().all(|it| it.kind == IncidentKind::Implausible));
    });
}
