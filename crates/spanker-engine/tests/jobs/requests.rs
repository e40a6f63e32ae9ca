// SPDX-License-Identifier: Apache-2.0
//! Jobs as programs ask for them: in virtual time and for real, with faults, stopped, and refused.

use std::time::Duration;

use spanker_engine::EngineError;
use spanker_engine::jobs::{JobError, JobReport, JobRequest, JobWatch, Workload};
use spanker_steal::{Fault, Options, Trouble};

fn request(backends: &str, workload: Workload) -> JobRequest {
    JobRequest {
        options: workload.options(),
        workload,
        backends: backends.parse().expect("backends"),
        faults: Vec::new(),
        hot: Vec::new(),
        item_time: None,
        launch: Duration::from_micros(50),
        told: false,
        seed: 7,
        simulate: false,
        jitter: 0.0,
        origin: false,
    }
}

fn run(request: JobRequest, stop: bool) -> Result<JobReport, EngineError> {
    let stop = &move || stop;
    let job = request.prepare()?;
    job.run(&JobWatch { stop, progress: &|_| {}, report: &|_| {}, note: &|_| {} })
}

#[test]
fn hot_parts_cost_as_many_times_as_much_in_the_ideal_time() {
    let items = Workload::Sleep { items: 1000 };
    let plain = JobRequest { simulate: true, ..request("emul:1x,emul:3x", items) };
    let hot = JobRequest { hot: vec![(0.9..1.0, 10.0)], ..plain.clone() };
    let [plain, hot] = [plain, hot].map(|one| run(one, false).expect("a run").totals);
    assert_eq!((plain.done, hot.done, hot.lost), (1000, 1000, 0));
    let factor = hot.ideal_seconds / plain.ideal_seconds;
    assert!((factor - 1.9).abs() < 0.01, "{factor}");
}

#[test]
fn product_loses_nothing_with_a_dead_backend_and_wrong_bytes_are_counted() {
    let rows = Workload::Matmul { rows: 200, k: 256, n: 16 };
    let fault =
        |backend: &str, trouble| (backend.to_owned(), Fault { at: Duration::ZERO, trouble });
    let mut request = request("cpu:1,emul:2x", rows);
    request.faults = vec![fault("emul0", Trouble::Kill)];
    let report = run(request.clone(), false).expect("a run");
    assert_eq!((report.totals.done, report.totals.wrong_bytes), (200, Some(0)), "{report:?}");
    assert_eq!(report.backends[0].items, 200, "{report:?}");
    request.faults = vec![fault("cpu0", Trouble::Corrupt)];
    request.options = Options { sample: 0.0, ..request.options };
    let report = run(request, false).expect("a run");
    assert!(report.totals.wrong_bytes.is_some_and(|wrong| wrong > 0), "{report:?}");
}

#[test]
fn job_that_is_stopped_or_makes_no_sense_is_no_report() {
    let items = Workload::Hash { items: 1000 };
    let stopped = run(request("cpu:1", items.clone()), true).expect_err("nothing");
    assert!(matches!(stopped, EngineError::Job(JobError::Interrupted)), "{stopped}");
    let refused = run(request("cpu:1,card:0", items.clone()), false).expect_err("no card");
    assert!(matches!(refused, EngineError::Request { .. }), "{refused}");
    let mut unknown = request("cpu:1", items);
    unknown.faults = vec![("cpu1".into(), Fault { at: Duration::ZERO, trouble: Trouble::Kill })];
    let refused = run(unknown, false).expect_err("no such backend").to_string();
    assert_eq!(refused, "there is no backend 'cpu1': there are cpu0");
}
