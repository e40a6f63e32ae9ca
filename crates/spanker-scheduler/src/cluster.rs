// SPDX-License-Identifier: Apache-2.0
//! Cards as the planner sees them: their profiles, and the wires between them.

use spanker_fabric::device::DeviceError;
use spanker_runtime::{PortInfo, PortState, SpankerControl};
use spanker_topology::{
    Bytes, BytesPerSecond, Cluster, LinkProfile, LinkState, Profile, Provenance, Seconds, Shape,
    Shared, TopologyError, Wire,
};

use crate::{Result, Topology};

impl Topology<SpankerControl> {
    /// The cluster that these cards form, card by card in the order of the topology: built-in profiles by the
    /// names that the cards give, and wires where links are up.
    ///
    /// Rings in the order of the cards, full meshes and cards around a hub are the clusters of these shapes, so
    /// what is predicted for them is what is predicted without cards. Anything else is a list of links, with
    /// the rates and latencies that ports say or else profiles. What a probe has found out is in
    /// [`Topology::links`], not here.
    ///
    /// # Errors
    /// [`Error::Topology`](crate::Error::Topology) for a profile that is not built in, a card without links to
    /// others in its profile, or cards that links leave apart; [`Error::Device`](crate::Error::Device) if a
    /// card does not answer.
    pub fn cluster(&self) -> Result<Cluster> {
        self.cluster_of(&self.pairs())
    }

    /// The cluster that these cards form if these pairs of places are linked, the lower one of each first and
    /// in order.
    pub(crate) fn cluster_of(&self, pairs: &[(usize, usize)]) -> Result<Cluster> {
        let mut profiles = Vec::with_capacity(self.n_sails());
        let mut serials = Vec::with_capacity(self.n_sails());
        for place in 0..self.n_sails() {
            let info = self.ask(place, SpankerControl::info)?;
            let mut profile = named(&info.profile)?;
            // A card has the memory that it says it has, whatever others of its kind have.
            let memory = &mut profile.memory;
            let capacity = Bytes(info.capacity.saturating_add(memory.reserved.value.0));
            if capacity != memory.capacity.value {
                memory.capacity =
                    memory.capacity.replaced(capacity, Provenance::Measured, "the card says so");
            }
            profiles.push(profile);
            serials.push(info.serial);
        }
        let ports = self.ports()?;
        let lanes = |from: usize, to: usize| {
            let leads = |port: &&PortInfo| port.peer.is_some_and(|p| p.serial == serials[to]);
            ports[from].iter().find(leads).map_or(0, |port| port.lanes)
        };
        let said = said(&ports, &serials);
        let shape = shape(&profiles, pairs, &lanes);
        // Where everybody is linked to everybody, only rates and latencies tell a mesh from a hub.
        let count = profiles.len();
        let meshed = pairs.len() == count * (count - 1) / 2;
        let hubs = [Shape::Star, Shape::Switch].into_iter().filter(|_| meshed);
        let regular = [shape].into_iter().filter(|&shape| shape != Shape::Links);
        for shape in regular.chain(hubs) {
            match Cluster::new(profiles.clone(), shape) {
                Ok(cluster) if said.iter().all(|said| said.agrees(&cluster)) => return Ok(cluster),
                _ => {}
            }
        }
        listed(profiles, &said, pairs, &lanes).map_err(|error| match error {
            // Places in a cluster are not what people call the cards.
            TopologyError::Disconnected { from, to } => {
                let [from, to] = [from, to].map(|place| self.indices()[place]);
                TopologyError::Disconnected { from, to }.into()
            }
            other => other.into(),
        })
    }

    /// Asks a card something; the error names the card.
    fn ask<T>(
        &self,
        place: usize,
        ask: impl FnOnce(&SpankerControl) -> spanker_runtime::Result<T>,
    ) -> Result<T> {
        let card = &self.sails()[place];
        ask(card).map_err(|error| DeviceError::request(self.indices()[place], error).into())
    }

    /// The ports of all cards.
    fn ports(&self) -> Result<Vec<Vec<PortInfo>>> {
        let of = |place: usize| {
            let count = self.ask(place, SpankerControl::info)?.ports;
            (0..count).map(|port| self.ask(place, |card| card.port(port))).collect()
        };
        (0..self.n_sails()).map(of).collect()
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
}

/// What the ports of links that are up say of them.
fn said(ports: &[Vec<PortInfo>], serials: &[u64]) -> Vec<Said> {
    let mut all = Vec::new();
    for (from, port) in
        ports.iter().enumerate().flat_map(|(from, p)| p.iter().map(move |p| (from, p)))
    {
        let to = serials.iter().position(|&s| port.peer.is_some_and(|p| p.serial == s));
        let (Some(to), Some(rate)) = (to, port.bandwidth) else { continue };
        if port.state == PortState::Up {
            let latency = Seconds(port.latency.as_secs_f64());
            all.push(Said { from, to, bandwidth: BytesPerSecond(rate), latency });
        }
    }
    all
}

/// The regular shape that links form, or a list.
fn shape(
    profiles: &[Profile],
    pairs: &[(usize, usize)],
    lanes: &impl Fn(usize, usize) -> u32,
) -> Shape {
    let count = profiles.len();
    if count <= 2 && pairs.len() + 1 == count {
        let usual = profiles[0].topology;
        let fits = matches!(usual, Shape::Ring | Shape::Mesh | Shape::PointToPoint);
        return if fits { usual } else { Shape::PointToPoint };
    }
    let mut around: Vec<(usize, usize)> = (0..count)
        .map(|card| (card, (card + 1) % count))
        .map(|(a, b)| (a.min(b), a.max(b)))
        .collect();
    around.sort_unstable();
    let ring = pairs == around;
    let mesh = pairs.len() == count * (count - 1) / 2;
    match (ring, mesh) {
        // Three cards are both: in a mesh the lanes are divided.
        (true, true) if lanes(0, 1) == whole(&profiles[0]) => Shape::Ring,
        (_, true) => Shape::Mesh,
        (true, false) => Shape::Ring,
        (false, false) => Shape::Links,
    }
}

/// The cluster of a list of links; `lanes` says how many a link has, by the card that sends.
fn listed(
    profiles: Vec<Profile>,
    said: &[Said],
    pairs: &[(usize, usize)],
    lanes: &impl Fn(usize, usize) -> u32,
) -> std::result::Result<Cluster, TopologyError> {
    let mut used = vec![0; profiles.len()];
    let mut wires = Vec::new();
    for &(a, b) in pairs {
        let lanes = (lanes(a, b), lanes(b, a));
        used[a] += lanes.0;
        used[b] += lanes.1;
        let ends = [(&profiles[a], lanes.0), (&profiles[b], lanes.1)];
        let rate = |(profile, lanes): (&Profile, u32)| rate(profile, lanes);
        let latency = |(profile, _): (&Profile, u32)| link(profile).map(|link| link.latency.value);
        let bandwidth = ends.into_iter().filter_map(rate).min();
        let latency = ends.into_iter().filter_map(latency).fold(Seconds::ZERO, Seconds::max);
        let Some(bandwidth) = bandwidth else { continue };
        for (from, to) in [(a, b), (b, a)] {
            let said = said.iter().find(|said| (said.from, said.to) == (from, to));
            let (bandwidth, latency) =
                said.map_or((bandwidth, latency), |said| (said.bandwidth, said.latency));
            wires.push(Wire { from, to, bandwidth, latency, shared: None });
        }
    }
    // A card whose links use more lanes than it has sends on the same lanes to all of them.
    let mut shared = Vec::new();
    for (card, profile) in profiles.iter().enumerate().filter(|&(c, p)| used[c] > whole(p)) {
        let Some(bandwidth) = rate(profile, whole(profile)) else { continue };
        let leaving = wires.iter_mut().filter(|wire| wire.from == card);
        leaving.for_each(|wire| wire.shared = Some(shared.len()));
        shared.push(Shared { name: format!("the lanes of card {card}"), bandwidth });
    }
    Cluster::with_wires(profiles, wires, shared)
}

/// The profile that a card names: a built-in one, perhaps with another memory, as in `rev-a@1GB/s`.
fn named(name: &str) -> Result<Profile> {
    if let Some((base, rate)) = name.split_once('@')
        && let Ok(rate) = rate.parse()
    {
        return Ok(Profile::builtin(base)?.with_memory_bandwidth(rate, "the card's name"));
    }
    Ok(Profile::builtin(name)?)
}

/// What a port says of the link that it leads to.
#[derive(Debug)]
struct Said {
    from: usize,
    to: usize,
    bandwidth: BytesPerSecond,
    latency: Seconds,
}

impl Said {
    /// Whether a cluster has such a link, but for rounding.
    fn agrees(&self, cluster: &Cluster) -> bool {
        // A card on a hub says its part of what all cards share there.
        let hub = matches!(cluster.shape(), Shape::Star | Shape::Switch);
        let part = |shared: usize| cluster.shared()[shared].bandwidth.0 / cluster.cards() as u64;
        let rate = |&wire: &u32| {
            let wire = &cluster.wires()[wire as usize];
            wire.shared
                .filter(|_| hub)
                .map_or(wire.bandwidth.0, |at| wire.bandwidth.0.min(part(at)))
        };
        let rate = cluster.route(self.from, self.to).iter().map(rate).min();
        let latency = cluster.latency(self.from, self.to).0;
        let same = |one: f64, other: f64| (one - other).abs() <= 0.01 * other;
        rate.is_some_and(|rate| same(self.bandwidth.0 as f64, rate as f64))
            && same(self.latency.0, latency)
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
