// SPDX-License-Identifier: Apache-2.0
//! A job in virtual time: what it would ideally take, by the first version's rule, and a whole run in which nobody waits.

use spanker_steal::{Origin, Scenario, SimBackend, Trouble, ideal_seconds, origin, simulate};

use super::JobError;
use super::backends::BackendKind;
use super::expected::Expected;
use super::report::JobReport;
use super::request::PreparedJob;
use super::workers::rates;

impl PreparedJob {
    /// The job and who does it, at so many items a second of a task of each backend, as virtual time knows them.
    pub(super) fn scenario(&self, rates: &[f64]) -> Scenario {
        let backend = |(place, kind): (usize, &BackendKind)| SimBackend {
            lanes: self.lanes(*kind),
            told: self.request.told,
            trusted: matches!(kind, BackendKind::Cpu { .. }),
            faults: self.faults[place].clone(),
            ..SimBackend::new(self.names[place].clone(), rates[place], self.launch(*kind))
        };
        Scenario {
            job: self.job.clone(),
            backends: self.kinds().iter().enumerate().map(backend).collect(),
            hot: self.hot.clone(),
            jitter: self.request.jitter,
            seed: self.request.seed,
        }
    }

    /// Runs it in virtual time.
    pub(super) fn simulate(&self) -> Result<JobReport, JobError> {
        let scenario = self.scenario(&rates(self.kinds(), self.base, self.base));
        let items = self.job.items();
        let run = simulate(&scenario);
        let mut report = JobReport::new(self, run.outcome)?;
        report.launches = run.launches;
        if run.hung {
            report.error = Some("the run came to no end".into());
        }
        let totals = &mut report.totals;
        totals.took(run.seconds, ideal(&scenario), report.error.is_none());
        // By the simulation's own count.
        (totals.lost, totals.duplicated) = (run.lost, run.duplicated);
        totals.compare(&Expected::Numbers, self.bytes, &run.out);
        if self.request.origin {
            let origin = by_rule(&scenario);
            report.compare(origin.seconds, items - origin.lost, None);
        }
        Ok(report)
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
