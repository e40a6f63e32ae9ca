// SPDX-License-Identifier: Apache-2.0
//! The job in virtual time: what it would ideally take, by the origin's rule, and a whole run in which nobody waits.

use std::time::Duration;

use spanker_steal::{Origin, Scenario, SimBackend, Trouble, ideal_seconds, origin, simulate};

use super::crew::Kind;
use super::outcome::{ByOrigin, Outcome};
use super::{Setup, work};

/// Items a second of what everything else is measured in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// One thread of a cpu backend.
    pub(super) thread: f64,
    /// An emulated backend of 1x.
    pub(super) base: f64,
}

impl Pace {
    /// Anything of 1x does so many items a second.
    pub(super) fn even(base: f64) -> Pace {
        Pace { thread: base, base }
    }

    /// Items a second of one task of a backend.
    pub(super) fn lane(self, kind: Kind) -> f64 {
        match kind {
            Kind::Cpu { .. } => self.thread,
            Kind::Emul { speed } => self.base * speed,
            Kind::Card { .. } => self.base,
        }
    }
}

impl Setup {
    /// What a task of a backend costs beside its items.
    pub(super) fn launch(&self, kind: Kind) -> Duration {
        if matches!(kind, Kind::Emul { .. }) { self.launch } else { Duration::ZERO }
    }

    /// The job and who does it, as virtual time knows them.
    pub(super) fn scenario(&self, pace: Pace) -> Scenario {
        let backend = |(place, kind): (usize, &Kind)| SimBackend {
            lanes: kind.lanes(),
            told: self.told,
            trusted: matches!(kind, Kind::Cpu { .. }),
            faults: self.faults[place].clone(),
            ..SimBackend::new(self.names[place].clone(), pace.lane(*kind), self.launch(*kind))
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
    let scenario = setup.scenario(Pace::even(setup.base));
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
        outcome.wrong_bytes = work::wrong_bytes(items, &outcome.missing, &run.out, expected);
    }
    outcome
}
