// SPDX-License-Identifier: Apache-2.0
//! What the ledger makes of timings: what backends are told to take, and how long they may take for it.

use std::time::Duration;

use super::{IncidentKind, Lease, Ledger, Slot};
use crate::rule;

/// A lease is so many times as long as the task is expected to take.
const LEASE: f64 = 3.0;
/// The same where a backend's own speed is not known, by the mean speed of the others.
const LEASE_UNKNOWN: f64 = 100.0;
/// Leases are doubled for items that ran out of them, this often at most.
const MOST_DOUBLINGS: u32 = 10;

impl Ledger {
    /// Takes how long a task took.
    pub(super) fn time(&mut self, backend: usize, lease: &Lease, at: Duration) {
        let seconds = at.as_secs_f64() - lease.at.as_secs_f64();
        let items = lease.piece.items.clone();
        if let Err(implausible) = self.members[backend].rate.sample(items.len(), seconds) {
            self.note(backend, IncidentKind::Implausible, items, implausible.to_string(), at);
        }
    }

    /// Tells those who claim what is known of every backend.
    pub(super) fn publish(&mut self, at: Duration) {
        let (mut rates, mut fastest) = (0.0, 0.0f64);
        for lane in &self.lanes {
            let member = &self.members[lane.backend];
            if member.benched.is_none() && lane.slot.answers() {
                let rate = member.rate.items_per_second();
                rates += rate;
                fastest = fastest.max(rate);
            }
        }
        let left = (self.items - self.done.len()) as f64;
        let ideal = if rates > 0.0 { at.as_secs_f64() + left / rates } else { 0.0 };
        for (backend, member) in self.members.iter().enumerate() {
            let rate = member.rate.items_per_second();
            let launch = member.rate.launch().max(rule::LEAST_LAUNCH);
            let grown = rule::most(member.largest, rate > 0.0, self.grain);
            let most = member.capabilities.most_items.unwrap_or(usize::MAX);
            let most = grown.min(most).min(self.most_items) / self.grain * self.grain;
            let floor = rule::floor_seconds(launch, ideal);
            self.claims.publish(backend, rate, launch, floor, most);
        }
        self.claims.publish_rates(rates, if self.nobody_waits { 0.0 } else { fastest });
    }

    /// How long a lane may have its lease.
    pub(super) fn lease_time(&self, lane: usize, lease: &Lease) -> Duration {
        let backend = self.lanes[lane].backend;
        let member = &self.members[backend];
        let items = lease.piece.items.len() as f64;
        let rate = member.rate.items_per_second();
        let patience = self.options.patience.as_secs_f64();
        let expected = if rate > 0.0 {
            let expected = LEASE * (items / rate + member.rate.launch());
            // What a backend says of itself is not known yet.
            if member.rate.is_measured() { expected } else { expected.min(patience / 2.0) }
        } else {
            let known =
                || self.members.iter().map(|m| m.rate.items_per_second()).filter(|r| *r > 0.0);
            let count = known().count();
            if count == 0 {
                return self.options.patience / 2;
            }
            let mean = known().sum::<f64>() / count as f64;
            (LEASE_UNKNOWN * items / mean).min(patience / 2.0)
        };
        let doublings = lease.piece.attempts.min(MOST_DOUBLINGS);
        // There must be time left for others before patience is at its end.
        let most = expected.max(patience / 2.0);
        let seconds = self.options.lease.as_secs_f64().max(expected) * f64::from(1 << doublings);
        Duration::try_from_secs_f64(seconds.min(most)).unwrap_or(Duration::MAX)
    }

    /// When the next lease runs out, or the next look is due.
    #[must_use]
    pub fn next_tick(&self) -> Duration {
        let held = self.lanes.iter().enumerate().filter_map(|(lane, l)| match &l.slot {
            Slot::Held(lease) => {
                let from = lease.at.max(self.resumed);
                Some(from.saturating_add(self.lease_time(lane, lease)))
            }
            _ => None,
        });
        let patience = self.patience();
        let look = match held.min() {
            Some(due) => due,
            None if self.swept => self.ticked.saturating_add(self.options.lease.max(patience / 64)),
            None => self.heard.saturating_add(self.options.lease),
        };
        look.min(self.ticked.saturating_add(patience / 4))
    }
}
