// SPDX-License-Identifier: Apache-2.0
//! Cards as the planner sees them: their profiles, and the wires between them.

use spanker_fabric::device::DeviceError;
use spanker_runtime::{PortInfo, SpankerControl};
use spanker_topology::{
    BytesPerSecond, Cluster, LinkProfile, LinkState, Profile, Seconds, Shape, Shared, Wire,
};

use crate::{Result, Topology};

impl Topology<SpankerControl> {
    /// The cluster that these cards form, card by card in the order of the topology: built-in profiles by the
    /// names that the cards give, and wires where links are up.
    ///
    /// Rings in the order of the cards and full meshes are the clusters of these shapes, so what is predicted
    /// for them is what is predicted without cards. Anything else is a list of links, with the rates and
    /// latencies that the ports tell, or those of the profiles. What a probe has found out is in [`Topology::links`], not here.
    ///
    /// # Errors
    /// [`Error::Topology`](crate::Error::Topology) for a profile that is not built in, a card without links to
    /// others in its profile, or cards that links leave apart; [`Error::Device`](crate::Error::Device) or
    /// [`Error::Runtime`](crate::Error::Runtime) if a card does not answer.
    pub fn cluster(&self) -> Result<Cluster> {
        let mut profiles = Vec::with_capacity(self.n_sails());
        for (sail, &index) in self.sails().iter().zip(self.indices()) {
            let info = sail.info().map_err(|error| DeviceError::request(index, error))?;
            profiles.push(Profile::builtin(&info.profile)?);
        }
        match self.shape(&profiles)? {
            Shape::Links => self.listed(profiles),
            shape => Ok(Cluster::new(profiles, shape)?),
        }
    }

    /// Pairs of places with a link that is up both ways, the lower one first.
    fn pairs(&self) -> Vec<(usize, usize)> {
        let up = |from, to| {
            let link = spanker_topology::find(self.links(), from, to);
            link.is_some_and(|link| link.state == LinkState::Up)
        };
        let all = (0..self.n_sails()).flat_map(|a| (a + 1..self.n_sails()).map(move |b| (a, b)));
        all.filter(|&(a, b)| up(a, b) && up(b, a)).collect()
    }

    /// The regular shape that the links form, or a list.
    fn shape(&self, profiles: &[Profile]) -> Result<Shape> {
        let (count, pairs) = (profiles.len(), self.pairs());
        if count == 1 {
            return Ok(Shape::Ring);
        }
        let mut around: Vec<(usize, usize)> = (0..count)
            .map(|card| (card, (card + 1) % count))
            .map(|(a, b)| (a.min(b), a.max(b)))
            .collect();
        around.sort_unstable();
        around.dedup();
        let linked = profiles.iter().all(|profile| profile.link.is_some());
        let ring = linked && pairs == around;
        let mesh = linked && pairs.len() == count * (count - 1) / 2;
        if !ring && !mesh {
            return Ok(Shape::Links);
        }
        let port = self.port(0, 1)?;
        let whole = port.is_none_or(|port| port.lanes == whole(&profiles[0]));
        // Only a port that tells its rate tells the rest as well.
        let told = port.filter(|port| port.bandwidth.is_some());
        let shared = told.map(|port| port.shared_lanes);
        let usual = profiles[0].link.as_ref().map_or(0.0, |link| link.latency.value.0);
        let direct = told.is_none_or(|port| (port.latency.as_secs_f64() - usual).abs() < 1e-9);
        Ok(match (ring, mesh) {
            // Cards on a hub are linked as those of a mesh are, from further away.
            _ if !direct => Shape::Links,
            // Three cards are both: in a mesh the lanes are divided.
            (true, true) if whole && (shared != Some(false) || count == 2) => Shape::Ring,
            (true, false) => Shape::Ring,
            (_, true) if shared != Some(true) => Shape::Mesh,
            _ => Shape::Links,
        })
    }

    /// The port of the link from one place to another, if the card knows of it.
    fn port(&self, from: usize, to: usize) -> Result<Option<PortInfo>> {
        let peer = self.sails()[to].info()?.serial;
        let card = &self.sails()[from];
        for port in 0..card.info()?.ports {
            let port = card.port(port)?;
            if port.peer.is_some_and(|there| there.serial == peer) {
                return Ok(Some(port));
            }
        }
        Ok(None)
    }

    /// The cluster of a list of links, with the rates and latencies that their ports tell, or those of the
    /// profiles.
    fn listed(&self, profiles: Vec<Profile>) -> Result<Cluster> {
        let mut wires: Vec<Wire> = Vec::new();
        let mut used = vec![0; profiles.len()];
        let mut shares = vec![false; profiles.len()];
        for (a, b) in self.pairs() {
            for (from, to) in [(a, b), (b, a)] {
                let (port, profile) = (self.port(from, to)?, &profiles[from]);
                let told = port.filter(|port| port.bandwidth.is_some());
                let lanes = port.map_or(0, |port| port.lanes);
                used[from] += lanes;
                shares[from] |= told.is_some_and(|port| port.shared_lanes);
                let bandwidth = told.and_then(|port| port.bandwidth).map(BytesPerSecond);
                let Some(bandwidth) = bandwidth.or_else(|| rate(profile, lanes)) else { continue };
                let latency = match told {
                    Some(port) => Seconds(port.latency.as_secs_f64()),
                    None => link(profile).map_or(Seconds::ZERO, |link| link.latency.value),
                };
                wires.push(Wire { from, to, bandwidth, latency, shared: None });
            }
        }
        let mut shared = Vec::new();
        for card in 0..profiles.len() {
            // A card whose links use more lanes than it has sends on the same lanes to all of them.
            if !shares[card] && used[card] <= whole(&profiles[card]) {
                continue;
            }
            let leaving = wires.iter_mut().filter(|wire| wire.from == card);
            let fastest = leaving.map(|wire| {
                wire.shared = Some(shared.len());
                wire.bandwidth
            });
            let Some(bandwidth) = fastest.max() else { continue };
            shared.push(Shared { name: format!("the lanes of card {card}"), bandwidth });
        }
        Ok(Cluster::with_wires(profiles, wires, shared)?)
    }
}

fn link(profile: &Profile) -> Option<&LinkProfile> {
    profile.link.as_ref()
}

/// All lanes of a card.
fn whole(profile: &Profile) -> u32 {
    link(profile).map_or(0, |link| link.lanes.value)
}

/// What some lanes of a card sustain; a card that does not say how many it uses uses all.
fn rate(profile: &Profile, lanes: u32) -> Option<BytesPerSecond> {
    let link = link(profile)?;
    let lanes = if lanes == 0 { link.lanes.value } else { lanes.min(link.lanes.value) };
    Some(link.sustained(lanes))
}
