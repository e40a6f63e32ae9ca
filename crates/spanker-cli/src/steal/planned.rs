// SPDX-License-Identifier: Apache-2.0
//! The job in virtual time: what it would ideally take, by the origin's rule, and a whole run in which nobody waits.

use std::time::Duration;

use spanker_steal::{Origin, Scenario, SimBackend, Trouble, ideal_seconds, origin, simulate};

use super::crew::Kind;
use super::outcome::{ByOrigin, Outcome};
use super::{Setup, work};

impl Setup {
    /// Items a second of one task of each backend, where a thread does so many and an emulated backend of 1x so many.
    pub(super) fn rates(&self, thread: f64, base: f64) -> Vec<f64> {
        let rate = |kind: &Kind| match kind {
            Kind::Cpu { .. } => thread,
            Kind::Emul { speed } => base * speed,
            Kind::Card { .. } | Kind::Gpu { .. } => base,
        };
        self.kinds.iter().map(rate).collect()
    }

    /// What a task of a backend costs beside its items.
    pub(super) fn launch(&self, kind: Kind) -> Duration {
        if matches!(kind, Kind::Emul { .. }) { self.launch } else { Duration::ZERO }
    }

    /// The job and who does it, at so many items a second of a task, as virtual time knows them.
    pub(super) fn scenario(&self, rates: &[f64]) -> Scenario {
        let backend = |(place, kind): (usize, &Kind)| SimBackend {
            lanes: self.lanes(*kind),
            told: self.told,
            trusted: matches!(kind, Kind::Cpu { .. }),
            faults: self.faults[place].clone(),
            ..SimBackend::new(self.names[place].clone(), rates[place], self.launch(*kind))
        };
        Scenario {
            job: self.job.clone(),
            backends: self.kinds.iter().enumerate().map(backend).collect(),
            hot: self.hot.clone(),
            jitter: self.jitter,
            seed: self.seed,
        }
    }
}

/// The same without what is wrong: a backend that computes wrong bytes may as well be dead.
fn honest(scenario: &Scenario) -> Scenario {
    let mut honest = scenario.clone();
    let faults = honest.backends.iter_mut().flat_map(|backend| &mut backend.faults);
    for fault in faults.filter(|fault| fault.trouble == Trouble::Corrupt) {
        fault.trouble = Trouble::Kill;
    }
    honest
}

/// The shortest time in which the backends could do the job right. Infinite if they cannot.
pub(super) fn ideal(scenario: &Scenario) -> f64 {
    ideal_seconds(&honest(scenario))
}

/// What the first version's rule makes of it. What it gets wrong counts as lost.
pub(super) fn by_rule(scenario: &Scenario) -> Origin {
    origin(&honest(scenario))
}

/// Runs it in virtual time.
pub(super) fn run(setup: &Setup) -> Outcome {
    let scenario = setup.scenario(&setup.rates(setup.base, setup.base));
    let items = setup.job.items();
    let run = simulate(&scenario);
    let by_origin = setup.origin.then(|| {
        let origin = by_rule(&scenario);
        ByOrigin { seconds: origin.seconds, done: items - origin.lost, wrong_bytes: None }
    });
    let mut outcome = Outcome::of(setup, run.outcome);
    outcome.simulated = true;
    outcome.seconds = run.seconds;
    outcome.ideal_seconds = ideal(&scenario);
    outcome.launches = run.launches;
    // By the simulation's own count.
    outcome.lost = run.lost;
    outcome.duplicated = run.duplicated;
    outcome.origin = by_origin;
    if run.hung {
        outcome.error = Some("the run came to no end".into());
    }
    if !run.out.is_empty() {
        let expected = |items, out: &mut [u8]| scenario.expected(items, out);
        let bytes = setup.material.bytes();
        let wrong = work::wrong_bytes(items, bytes, &outcome.missing, &run.out, expected);
        outcome.wrong_bytes = Some(wrong);
    }
    outcome
}
