// SPDX-License-Identifier: Apache-2.0
//! The kernel in virtual time: the same claims and the same ledger, with backends that only take time and have whatever
//! faults one likes. The same scenario gives the same run.

mod ideal;
mod ranks;
mod world;

use std::ops::Range;
use std::time::Duration;

use crate::error::StealError;
use crate::fault::Fault;
use crate::job::Job;
use crate::ledger::audit::mix;
use crate::report::Report;
pub use ideal::{ideal_seconds, origin};
pub use ranks::{SimulatedRanks, simulate_ranks};

/// A backend that only takes time.
#[derive(Debug, Clone, PartialEq)]
pub struct SimBackend {
    /// Its name in the report.
    pub name: String,
    /// Tasks that it works on at a time.
    pub lanes: usize,
    /// Items a second of one task.
    pub rate: f64,
    /// What a task costs beside its items.
    pub launch: Duration,
    /// Whether the scheduler is told the rate and the launch cost beforehand.
    pub told: bool,
    /// Whether its results decide when backends disagree.
    pub trusted: bool,
    /// What goes wrong with it.
    pub faults: Vec<Fault>,
}

impl SimBackend {
    /// A backend of one lane without faults, about which nothing is known beforehand.
    #[must_use]
    pub fn new(name: impl Into<String>, rate: f64, launch: Duration) -> SimBackend {
        let name = name.into();
        SimBackend { name, lanes: 1, rate, launch, told: false, trusted: false, faults: Vec::new() }
    }
}

/// A job and who does it.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The job. Outputs are bytes that depend on the item, if it has any.
    pub job: Job,
    /// Who does it.
    pub backends: Vec<SimBackend>,
    /// Items that cost so many times as much as others.
    pub hot: Vec<(Range<usize>, f64)>,
    /// The largest part by which a task may take longer, at random.
    pub jitter: f64,
    /// What chance starts from.
    pub seed: u64,
}

/// What came of a scenario.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulated {
    /// The report, or why there was no end.
    pub outcome: Result<Report, StealError>,
    /// Virtual time from the start to the end.
    pub seconds: f64,
    /// Tasks that were begun.
    pub launches: usize,
    /// Items without outputs in the end, by the simulation's own count.
    pub lost: usize,
    /// Items whose outputs were accepted twice, by the simulation's own count.
    pub duplicated: usize,
    /// Nothing ended it.
    pub hung: bool,
    /// The outputs.
    pub out: Vec<u8>,
}

/// What the first version's rule makes of a scenario.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Origin {
    /// Virtual time until the last unit that ended.
    pub seconds: f64,
    /// Items that were in the hands of backends that failed.
    pub lost: usize,
    /// Tasks that were begun.
    pub launches: usize,
}

impl Scenario {
    /// What some items cost, in items.
    fn cost(&self, items: &Range<usize>) -> f64 {
        crate::emulated::cost(items, &self.hot)
    }

    /// The bytes that stand for the outputs of some items.
    pub fn expected(items: Range<usize>, out: &mut [u8]) {
        expected(items, out);
    }
}

/// The bytes of some items, which depend on each item alone.
pub(crate) fn expected(items: Range<usize>, out: &mut [u8]) {
    let bytes = out.len().checked_div(items.len()).unwrap_or(0);
    if bytes == 0 {
        return;
    }
    for (item, out) in items.zip(out.chunks_exact_mut(bytes)) {
        let mut value = mix(0x5ca1_ab1e, item as u64);
        for out in out.chunks_mut(8) {
            out.copy_from_slice(&value.to_le_bytes()[..out.len()]);
            value = mix(value, 1);
        }
    }
}

/// Runs a scenario in virtual time.
///
/// # Examples
///
/// ```
/// use spanker_steal::{Job, Scenario, SimBackend, ideal_seconds, simulate};
/// use std::time::Duration;
///
/// let launch = Duration::from_micros(50);
/// let backend = |(place, speed)| SimBackend::new(format!("emul{place}"), speed, launch);
/// let backends = [1e5, 2e5, 4e5, 8e5].into_iter().enumerate().map(backend).collect();
/// let job = Job::new(1_500_000, 0);
/// let scenario = Scenario { job, backends, hot: Vec::new(), jitter: 0.0, seed: 1 };
/// let run = simulate(&scenario);
/// assert_eq!((run.lost, run.duplicated), (0, 0));
/// assert!(ideal_seconds(&scenario) / run.seconds > 0.98);
/// ```
#[must_use]
pub fn simulate(scenario: &Scenario) -> Simulated {
    world::run(scenario)
}
