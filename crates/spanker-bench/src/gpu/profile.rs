// SPDX-License-Identifier: Apache-2.0
//! GPUs, how they are connected and what they do, measured; and the profile of one.

use std::sync::Arc;

use serde::Serialize;
use spanker_cuda::{
    CudaCard, CudaError, Discovered, Gpu, GpuProbe, PeerProbe, Speeds, Subject, discover,
    discover_logical, measured, probe, probe_peer,
};
use spanker_model::{Quant, builtin};
use spanker_plan::Split;
use spanker_scheduler::{Link, Topology};
use spanker_topology::{BytesPerSecond, Cluster, Profile};

use crate::error::Result;

/// The types of weights whose products are measured for a profile.
const TYPES: [Quant; 3] = [Quant::Q4_0, Quant::Q4K, Quant::Q8_0];
/// The model whose programs are measured, and its context and batch.
const MEASURED: (&str, usize, usize) = ("llama-2-7b", 2048, 128);

/// What was found out about the GPUs of this machine.
#[derive(Debug, Clone, Serialize)]
pub struct GpuReport {
    /// The version of CUDA that the driver speaks.
    pub cuda: String,
    /// The driver's release, where NVML tells it.
    pub driver: Option<String>,
    /// The GPUs, or the logical cards on one.
    pub cards: Vec<CudaCard>,
    /// What links allow by their generation.
    pub links: Vec<GpuLink>,
    /// What the GPUs do.
    pub gpus: Vec<GpuProbe>,
    /// What copies between them take.
    pub peers: Vec<PeerProbe>,
    /// What could not be found out.
    pub notes: Vec<String>,
}

/// A link by what its generation allows.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct GpuLink {
    /// The card that sends.
    pub from: usize,
    /// The card that receives.
    pub to: usize,
    /// Nothing where nobody says.
    pub bandwidth_bytes_per_second: Option<u64>,
}

impl From<&Link> for GpuLink {
    fn from(link: &Link) -> GpuLink {
        GpuLink {
            from: link.local_sail,
            to: link.remote_sail,
            bandwidth_bytes_per_second: link.bandwidth.map(|BytesPerSecond(rate)| rate),
        }
    }
}

/// Measures the GPUs of this machine, or GPU 0 as so many logical cards, and with `profiled` also the profile of the
/// first. `begins` is called with what comes next.
///
/// # Errors
/// What a GPU fails with.
pub fn profile_gpus(
    logical: Option<usize>,
    profiled: bool,
    mut begins: impl FnMut(&str),
) -> Result<(GpuReport, Option<Profile>)> {
    let found = match logical {
        None => discover()?,
        Some(count) => discover_logical(0, count)?,
    };
    let shape = found.shape();
    let Discovered { cuda, driver, cards, links, notes, .. } = found;
    let topology = Topology::of(cards, links)?;
    let cards = topology.sails().to_vec();
    let last = cards.iter().map(|card| card.gpu).max().unwrap_or(0);
    let processors = (0..=last).map(Gpu::open).collect::<Result<Vec<Gpu>, CudaError>>()?;
    let mut gpus = Vec::with_capacity(processors.len());
    for gpu in &processors {
        begins(&format!("measuring GPU {}", gpu.index()));
        gpus.push(probe(gpu)?);
    }
    let mut peers = Vec::new();
    for from in &processors {
        for to in processors.iter().filter(|to| to.index() != from.index()) {
            begins(&format!("measuring GPU {} -> {}", from.index(), to.index()));
            peers.push(probe_peer(from, to)?);
        }
    }
    let profile = match (cards.first(), gpus.first()) {
        (Some(card), Some(probe)) if profiled => {
            let profile = measured(card, shape, probe);
            Some(with_operators(processors, profile, cards.len(), begins)?)
        }
        _ => None,
    };
    let links = topology.links().iter().map(GpuLink::from).collect();
    Ok((GpuReport { cuda, driver, cards, links, gpus, peers, notes }, profile))
}

/// A profile with what operators and exchanges of a model take on its card.
fn with_operators(
    gpus: Vec<Gpu>,
    profile: Profile,
    cards: usize,
    mut begins: impl FnMut(&str),
) -> Result<Profile> {
    let (name, context, batch) = MEASURED;
    let gpus: Vec<Arc<Gpu>> = gpus.into_iter().map(Arc::new).collect();
    let shape = profile.topology;
    let cluster = Cluster::uniform(profile, cards, shape)?;
    let groups = [(0..cards).map(|card| (card, 1.0)).collect()];
    let mut all: Option<Speeds> = None;
    for quant in TYPES {
        begins(&format!("measuring {name} in {quant}"));
        let (model, split) = (&builtin(name, quant)?, Split::Gather);
        let kv = Quant::F16;
        let subject = Subject { model, split, groups: &groups, context, batch, kv };
        let speeds = Speeds::measure(&gpus, &cluster, &subject)?;
        match &mut all {
            Some(all) => all.with_products(&speeds),
            None => all = Some(speeds),
        }
    }
    let Some(speeds) = all else { return Ok(cluster.profile(0).clone()) };
    Ok(speeds.cluster(&cluster)?.profile(0).clone())
}
