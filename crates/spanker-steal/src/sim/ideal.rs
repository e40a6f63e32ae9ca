// SPDX-License-Identifier: Apache-2.0
//! What a scenario would take if nothing were ever lost or waited for, and what it takes by the first version's rule.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Origin, Scenario, SimBackend};
use crate::fault::Trouble;
use crate::scheduler::unit_size;

impl SimBackend {
    /// Times at which the speed changes, with the speed from then on, as a part of the full one.
    fn phases(&self) -> Vec<(f64, f64)> {
        let mut changes = vec![(0.0, 1.0)];
        let mut faults = self.faults.clone();
        faults.sort_by_key(|fault| fault.at);
        for fault in faults {
            let at = fault.at.as_secs_f64();
            let before = changes.last().map_or(1.0, |change| change.1);
            match fault.trouble {
                Trouble::Slow(factor) => changes.push((at, 1.0 / factor.max(1e-9))),
                Trouble::Kill | Trouble::Hang(None) => {
                    changes.push((at, 0.0));
                    break;
                }
                Trouble::Hang(Some(lasts)) => {
                    changes.push((at, 0.0));
                    changes.push((at + lasts.as_secs_f64(), before));
                }
                _ => {}
            }
        }
        changes
    }

    /// When it is killed, if it is.
    pub(super) fn killed_at(&self) -> Option<f64> {
        let kills = self.faults.iter().filter(|fault| fault.trouble == Trouble::Kill);
        kills.map(|fault| fault.at.as_secs_f64()).min_by(f64::total_cmp)
    }

    /// When `work` items that are begun at `start` are done; never, if the backend is gone before.
    pub(super) fn done_at(&self, start: f64, work: f64) -> f64 {
        let phases = self.phases();
        let mut left = work / self.rate;
        let mut now = start;
        for (place, &(_, speed)) in phases.iter().enumerate() {
            let end = phases.get(place + 1).map_or(f64::INFINITY, |next| next.0);
            if end <= now {
                continue;
            }
            if left <= (end - now) * speed {
                return now + left / speed;
            }
            left -= (end - now) * speed;
            now = end;
        }
        f64::INFINITY
    }
}

/// The shortest time in which the backends could do the job with what they can do while they can, and no launches.
/// Infinite if they cannot.
#[must_use]
pub fn ideal_seconds(scenario: &Scenario) -> f64 {
    let work = scenario.cost(&(0..scenario.job.items));
    let speeds: Vec<_> =
        scenario.backends.iter().map(|b| (b.rate * b.lanes.max(1) as f64, b.phases())).collect();
    let mut times: Vec<f64> = speeds.iter().flat_map(|(_, p)| p.iter().map(|p| p.0)).collect();
    times.sort_by(f64::total_cmp);
    times.dedup();
    let mut left = work;
    for (place, &now) in times.iter().enumerate() {
        let at = |phases: &[(f64, f64)]| {
            phases.iter().take_while(|phase| phase.0 <= now).last().map_or(0.0, |phase| phase.1)
        };
        let speed: f64 = speeds.iter().map(|(rate, phases)| rate * at(phases)).sum();
        let end = times.get(place + 1).copied().unwrap_or(f64::INFINITY);
        if left <= speed * (end - now) {
            return now + left / speed;
        }
        left -= speed * (end - now);
    }
    f64::INFINITY
}

/// Runs a scenario by the first version's rule: equal units, a counter, and no record of what becomes of them.
#[must_use]
pub fn origin(scenario: &Scenario) -> Origin {
    let items = scenario.job.items;
    let backends = &scenario.backends;
    let mut result = Origin { seconds: 0.0, lost: 0, launches: 0 };
    if items == 0 || backends.is_empty() {
        return result;
    }
    let unit = unit_size(items, backends.len());
    let lanes = backends.iter().enumerate().flat_map(|(b, backend)| vec![b; backend.lanes.max(1)]);
    // The bits of times that are not negative sort as the times do.
    let mut free: BinaryHeap<_> = lanes
        .enumerate()
        .map(|(lane, backend)| Reverse((0.0f64.to_bits(), lane, backend)))
        .collect();
    let mut next = 0;
    while next < items {
        let Some(Reverse((now, lane, backend))) = free.pop() else {
            result.lost += items - next;
            return result;
        };
        let range = next..items.min(next + unit);
        next = range.end;
        let start = f64::from_bits(now) + backends[backend].launch.as_secs_f64();
        let end = backends[backend].done_at(start, scenario.cost(&range));
        result.launches += 1;
        if end.is_finite() {
            result.seconds = result.seconds.max(end);
            free.push(Reverse((end.to_bits(), lane, backend)));
        } else {
            result.lost += range.len();
        }
    }
    result
}
