// SPDX-License-Identifier: Apache-2.0
//! Thousands of runs in virtual time, from seeds: backends die, hang, slow down, fail, lie, give wrong bytes; answers get
//! lost, come twice, late or from earlier runs; clocks jump. No item is lost, none counts twice, no run hangs, and
//! the bytes are those of a run without faults.
//!
//! A failing seed is printed with the command that replays it. `SPANKER_RUNS` asks for more runs.

use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_steal::{
    Fault, Job, Options, Scenario, SimBackend, Simulated, StealError, Trouble, simulate,
};

/// A scenario from a seed. The first backend of one that is not doomed is slow, late and careless at worst.
struct Case {
    scenario: Scenario,
    doomed: bool,
}

fn draw_trouble(dice: &mut Pcg64Mcg, checksums: bool, compared: bool, mild: bool) -> Trouble {
    loop {
        let hang = Duration::from_micros(dice.random_range(1..200_000));
        return match dice.random_range(0..12) {
            0 if !mild => Trouble::Kill,
            1 if !mild => Trouble::Hang(None),
            2 => Trouble::Hang(Some(hang)),
            3 => Trouble::Slow(dice.random_range(0.2..30.0)),
            4 if !mild && compared => Trouble::Corrupt,
            5 if !mild && checksums => Trouble::Garble,
            6 => Trouble::Fail,
            7 if !mild => Trouble::Lie,
            8 => Trouble::Mute,
            9 => Trouble::Echo,
            10 if !mild => Trouble::Vanish,
            11 if dice.random_bool(0.5) => Trouble::Clock(dice.random_range(-5.0..5.0)),
            11 => Trouble::Stale,
            _ => continue,
        };
    }
}

fn draw_job(dice: &mut Pcg64Mcg, seed: u64, checksums: bool, compared: bool) -> Job {
    let most = if dice.random_bool(0.1) { 3000 } else { 150 };
    let items = dice.random_range(1..=most);
    let options = Options {
        cap: Duration::from_micros(dice.random_range(500..20_000)),
        lease: Duration::from_micros(dice.random_range(500..20_000)),
        patience: Duration::from_secs(30),
        strikes: dice.random_range(3..6),
        chunk_bytes: dice.random_range(1..4096),
        checksums,
        sample: if compared { 1.0 } else { 0.0 },
        seed,
        ..Options::STANDARD
    };
    let grain = dice.random_range(1..=8);
    let job = Job::new(items, dice.random_range(1..=12)).grain(grain).options(options);
    let units = items.div_ceil(grain);
    let (a, b) = (dice.random_range(0..units), dice.random_range(1..=units));
    if a < b && dice.random_bool(0.5) {
        job.first(a * grain..items.min(b * grain), dice.random_range(-2..3))
    } else {
        job
    }
}

impl Case {
    fn draw(seed: u64) -> Case {
        let mut dice = Pcg64Mcg::seed_from_u64(seed);
        let doomed = dice.random_bool(0.1);
        let checksums = dice.random_bool(0.5);
        let compared = dice.random_bool(0.4);
        let job = draw_job(&mut dice, seed, checksums, compared);
        let items = job.items();
        let count = dice.random_range(1..=6);
        let span = items as f64 / 1000.0 / count as f64 * 1.5;
        let mut backends = Vec::new();
        for place in 0..count {
            let mild = place == 0 && !doomed;
            let rate = dice.random_range(200.0..4000.0);
            let launch = Duration::from_micros(dice.random_range(0..500));
            let lanes = dice.random_range(1..=2);
            let told = dice.random_bool(0.3);
            let mut backend = SimBackend::new(format!("b{place}"), rate, launch);
            backend = SimBackend { lanes, told, trusted: place == 0, ..backend };
            for _ in 0..dice.random_range(0..=if mild { 2 } else { 3 }) {
                let at = Duration::from_secs_f64(dice.random_range(0.0..span));
                let trouble = draw_trouble(&mut dice, checksums, compared, mild);
                backend.faults.push(Fault { at, trouble });
            }
            backends.push(backend);
        }
        let hot = match dice.random_bool(0.3) {
            true => vec![(dice.random_range(0..items)..items, dice.random_range(0.1..20.0))],
            false => Vec::new(),
        };
        Case { scenario: Scenario { job, backends, hot, jitter: 0.3, seed }, doomed }
    }

    /// Whether anybody computes wrong bytes. Where everybody may, nobody can tell.
    fn misleads(&self) -> bool {
        let mut faults = self.scenario.backends.iter().flat_map(|backend| &backend.faults);
        faults.any(|fault| fault.trouble == Trouble::Corrupt)
    }

    /// What is wrong with a run, if anything.
    fn complaint(&self, run: &Simulated) -> Option<String> {
        let items = self.scenario.job.items();
        let mut wanted = vec![0; run.out.len()];
        Scenario::expected(0..items, &mut wanted);
        if run.hung {
            return Some(format!("it hung at {} s: {:?}", run.seconds, run.outcome));
        }
        if run.duplicated > 0 {
            return Some(format!("{} items twice", run.duplicated));
        }
        match &run.outcome {
            Ok(report) if run.lost > 0 || report.done != items || report.duplicated > 0 => {
                Some(format!("{} lost, {} done of {items}", run.lost, report.done))
            }
            Ok(report) if report.backends.iter().map(|b| b.items).sum::<usize>() != items => {
                Some("shares do not add up".into())
            }
            Ok(_) if self.doomed && self.misleads() => None,
            Ok(_) => (run.out != wanted).then(|| "wrong bytes".into()),
            Err(error) if !self.doomed => Some(format!("it failed: {error}")),
            Err(error) => self.dishonest(error, run, &wanted),
        }
    }

    /// What an error says that is not so.
    fn dishonest(&self, error: &StealError, run: &Simulated, wanted: &[u8]) -> Option<String> {
        let Some(unfinished) = error.unfinished() else {
            return Some(format!("no account of what is done: {error}"));
        };
        let missing: usize = unfinished.missing.iter().map(ExactSizeIterator::len).sum();
        if missing != run.lost || unfinished.report.done + missing != self.scenario.job.items() {
            return Some(format!("{missing} missing by the error, {} lost: {error}", run.lost));
        }
        let bytes = run.out.len() / self.scenario.job.items();
        if self.misleads() {
            return None; // Who was right was not found out before the end.
        }
        let mut seen = run.out.clone();
        for range in &unfinished.missing {
            let bytes = range.start * bytes..range.end * bytes;
            seen[bytes.clone()].copy_from_slice(&wanted[bytes]);
        }
        (seen != wanted).then(|| "wrong bytes among those that are done".into())
    }
}

fn try_seed(seed: u64) {
    let case = Case::draw(seed);
    let run = simulate(&case.scenario);
    if let Some(complaint) = case.complaint(&run) {
        panic!(
            "seed {seed}: {complaint}\n{:#?}\nreplay: SPANKER_SEED={seed} cargo test -p spanker-steal --test faults",
            case.scenario
        );
    }
}

#[test]
fn every_item_is_done_once_whatever_fails() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect(name));
    if let Some(seed) = number("SPANKER_SEED") {
        return try_seed(seed);
    }
    for seed in 0..number("SPANKER_RUNS").unwrap_or(20_000) {
        try_seed(seed);
    }
}

#[test]
fn faults_do_happen_in_the_cases_that_are_drawn() {
    let (mut ended, mut incidents, mut redone, mut audited, mut benched) = (0, 0, 0, 0, 0);
    for seed in 0..2000 {
        let run = simulate(&Case::draw(seed).scenario);
        if let Ok(report) = &run.outcome {
            ended += 1;
            incidents += report.incidents.len();
            redone += report.redone;
            audited += report.audited;
            benched += report.backends.iter().filter(|b| b.benched.is_some()).count();
        }
    }
    assert!(ended > 1800, "{ended}");
    for (what, count) in
        [("incidents", incidents), ("redone", redone), ("audited", audited), ("benched", benched)]
    {
        assert!(count > 300, "{what}: {count}");
    }
}

#[test]
fn a_scenario_that_is_run_again_is_the_same_run() {
    for seed in 0..200 {
        let scenario = Case::draw(seed).scenario;
        assert_eq!(simulate(&scenario), simulate(&scenario), "seed {seed}");
    }
}

#[test]
fn backend_that_goes_wrong_late_is_found_by_its_last_task_whatever_the_sample() {
    let options = Options { sample: 1e-9, ..Options::STANDARD };
    let job = Job::new(100_000, 4).options(options);
    let launch = Duration::from_micros(50);
    let honest = SimBackend { trusted: true, ..SimBackend::new("cpu0", 1e5, launch) };
    let corrupt = Fault { at: Duration::from_millis(200), trouble: Trouble::Corrupt };
    let wrong = SimBackend { faults: vec![corrupt], ..SimBackend::new("emul0", 2e5, launch) };
    let backends = vec![honest, wrong];
    let scenario = Scenario { job, backends, hot: Vec::new(), jitter: 0.0, seed: 1 };
    let run = simulate(&scenario);
    let mut wanted = vec![0; run.out.len()];
    Scenario::expected(0..100_000, &mut wanted);
    assert!(run.out == wanted, "wrong bytes are left");
    let report = run.outcome.expect("it ends well");
    assert_eq!(report.backends[1].benched.as_deref(), Some("it gave wrong bytes"));
    // Nothing of it counts but what was confirmed: a unit of its first task.
    assert_eq!(report.backends[1].items, 1);
    assert!(report.redone > 50_000, "{}", report.redone);
}

/// Two backends at 1e5 items a second, the second with one fault.
fn pair(job: Job, fault: Option<Trouble>) -> Scenario {
    let launch = Duration::from_micros(50);
    let at = Duration::from_millis(100);
    let faults = fault.map(|trouble| Fault { at, trouble }).into_iter().collect();
    let second = SimBackend { faults, ..SimBackend::new("emul1", 1e5, launch) };
    let backends = vec![SimBackend::new("emul0", 1e5, launch), second];
    Scenario { job, backends, hot: Vec::new(), jitter: 0.0, seed: 1 }
}

#[test]
fn job_that_is_done_ends_well_although_nobody_is_left_to_compare() {
    let options = Options { sample: 0.02, ..Options::STANDARD };
    let run = simulate(&pair(Job::new(100_000, 4).options(options), Some(Trouble::Hang(None))));
    let report = run.outcome.expect("all is done");
    assert_eq!((report.done, run.lost, run.duplicated), (100_000, 0, 0));
}

#[test]
fn unit_that_is_larger_than_the_job_is_the_whole_job() {
    let options = Options { checksums: true, sample: 1.0, ..Options::STANDARD };
    let job = Job::new(1000, 8).grain(1 << 48).options(options);
    let report = simulate(&pair(job, None)).outcome.expect("all is done");
    assert_eq!((report.done, report.audited), (1000, 1000));
}
