// SPDX-License-Identifier: Apache-2.0
//! From fitted links to clusters that a planner prices alike.

use spanker_topology::{Bytes, BytesPerSecond, Cluster, Provenance, Seconds, Shape};

use super::LinkModel;

impl LinkModel {
    /// The cluster with the numbers on all links with which a ring of two takes what the fit predicts for two ranks, and
    /// a third rank adds what it adds there.
    #[must_use]
    pub fn calibrate_cluster(&self, cluster: &Cluster) -> Cluster {
        let micros = |ranks, bytes| self.predict(ranks, bytes).value;
        let step = Seconds::from_micros(((micros(3, 1) - micros(2, 1)) / 2.0).max(0.0));
        let base = Seconds::from_micros((micros(2, 1) - 2.0 * step.micros()).max(0.0));
        let size = Bytes(1 << 20);
        let transfer = Seconds::from_micros((micros(2, size.0) - micros(2, 1)).max(1e-3));
        let rate = BytesPerSecond((size.0 as f64 / transfer.0) as u64);
        let wired = cluster.with_changed_wires(|wire| {
            wire.bandwidth = rate;
            if wire.latency > Seconds::ZERO {
                wire.latency = step;
            }
        });
        // The lanes of a ring's cards and the host of a star are the links themselves; a fabric is not.
        let wired = wired.with_changed_shared(|shared, _| {
            if matches!(cluster.shape(), Shape::Ring | Shape::Star) {
                shared.bandwidth = rate;
            }
        });
        let source = "fitted to samples";
        wired.with_profiles(|card| {
            if let Some(link) = &mut card.link {
                link.framing = None;
                link.bandwidth = link.bandwidth.replaced(rate, Provenance::Fitted, source);
                link.latency = link.latency.replaced(step, Provenance::Fitted, source);
                link.base = link.base.replaced(base, Provenance::Fitted, source);
            }
        })
    }
}
