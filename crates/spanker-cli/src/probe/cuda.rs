// SPDX-License-Identifier: Apache-2.0
//! `spanker probe --fabric cuda`: GPUs, how they are connected, and what they do, measured; as a profile too.

use std::sync::Arc;

use serde::Serialize;
use spanker_cuda::{
    CudaCard, CudaError, Discovered, Figure, Gpu, GpuProbe, PeerProbe, Speeds, Subject, discover,
    discover_logical, measured, probe, probe_peer,
};
use spanker_model::Quant;
use spanker_plan::Split;
use spanker_scheduler::{Link, Topology};
use spanker_topology::{BytesPerSecond, Cluster, Profile, Seconds};

use super::Args;
use crate::{Usage, files, output};

/// The schema of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    /// The version of CUDA that the driver speaks.
    cuda: String,
    /// The driver's release, where NVML tells it.
    driver: Option<String>,
    cards: Vec<CudaCard>,
    links: Vec<Linked>,
    gpus: Vec<GpuProbe>,
    peers: Vec<PeerProbe>,
    notes: Vec<String>,
}

/// A link by what its generation allows.
#[derive(Debug, Serialize)]
struct Linked {
    from: usize,
    to: usize,
    bandwidth_bytes_per_second: Option<u64>,
}

impl From<&Link> for Linked {
    fn from(link: &Link) -> Linked {
        Linked {
            from: link.local_sail,
            to: link.remote_sail,
            bandwidth_bytes_per_second: link.bandwidth.map(|BytesPerSecond(rate)| rate),
        }
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    if args.cards.is_some() {
        return Err(Usage("--cards is for --fabric cards: GPUs are all measured".into()).into());
    }
    let found = match args.gpus {
        None => discover()?,
        Some(count) => discover_logical(0, count)?,
    };
    let shape = found.shape();
    let Discovered { cuda, driver, cards, links, notes, .. } = found;
    let topology = Topology::of(cards, links)?;
    let last = topology.sails().iter().map(|card| card.gpu).max().unwrap_or(0);
    let gpus = (0..=last).map(Gpu::open).collect::<Result<Vec<Gpu>, CudaError>>()?;
    let mut probes = Vec::with_capacity(gpus.len());
    for gpu in &gpus {
        output::progress(&format!("measuring GPU {}", gpu.index()));
        let probed = probe(gpu);
        output::progress_done();
        probes.push(probed?);
    }
    let mut peers = Vec::new();
    for from in &gpus {
        for to in gpus.iter().filter(|to| to.index() != from.index()) {
            output::progress(&format!("measuring GPU {} -> {}", from.index(), to.index()));
            let probed = probe_peer(from, to);
            output::progress_done();
            peers.push(probed?);
        }
    }
    if let (Some(path), Some(card), Some(probe)) =
        (&args.save, topology.sails().first(), probes.first())
    {
        let profile = with_operators(gpus, measured(card, shape, probe), topology.sails().len())?;
        files::write(path, &profile.to_toml())?;
    }
    let report = Report {
        cuda,
        driver,
        links: topology.links().iter().map(Linked::from).collect(),
        cards: topology.sails().to_vec(),
        gpus: probes,
        peers,
        notes,
    };
    match args.json {
        true => output::line(&serde_json::to_string(&report)?),
        false => show(&report, args),
    }
}

/// The types of weights whose products are measured for a profile that is saved.
const TYPES: [Quant; 3] = [Quant::Q4_0, Quant::Q4K, Quant::Q8_0];
/// The model whose programs are measured, and its context and batch.
const MEASURED: (&str, usize, usize) = ("llama-2-7b", 2048, 128);

/// A profile with what operators and exchanges of a model take on its card.
fn with_operators(gpus: Vec<Gpu>, profile: Profile, cards: usize) -> anyhow::Result<Profile> {
    let (name, context, batch) = MEASURED;
    let gpus: Vec<Arc<Gpu>> = gpus.into_iter().map(Arc::new).collect();
    let shape = profile.topology;
    let cluster = Cluster::uniform(profile, cards, shape)?;
    let groups = [(0..cards).map(|card| (card, 1.0)).collect()];
    let mut all: Option<Speeds> = None;
    for quant in TYPES {
        output::progress(&format!("measuring {name} in {quant}"));
        let (model, split) = (&spanker_model::builtin(name, quant)?, Split::Gather);
        let subject = Subject { model, split, groups: &groups, context, batch };
        let speeds = Speeds::measure(&gpus, &cluster, &subject);
        output::progress_done();
        let speeds = speeds?;
        match &mut all {
            Some(all) => all.with_products(&speeds),
            None => all = Some(speeds),
        }
    }
    let Some(speeds) = all else { return Ok(cluster.profile(0).clone()) };
    Ok(speeds.cluster(&cluster)?.profile(0).clone())
}

fn show(report: &Report, args: &Args) -> anyhow::Result<()> {
    let driver = report.driver.as_ref().map_or_else(String::new, |driver| format!(" ({driver})"));
    output::line(&format!("CUDA {}{driver}", report.cuda))?;
    for card in &report.cards {
        output::line(&describe(card))?;
    }
    for note in &report.notes {
        output::line(&format!("note: {note}"))?;
    }
    for probe in &report.gpus {
        output::line(&format!(
            "\nGPU {} ({}), medians, slowest and fastest run:",
            probe.gpu, probe.name
        ))?;
        for (name, figure) in [
            ("copy (read + write)", &probe.copy),
            ("read", &probe.read),
            ("write", &probe.write),
            ("host to device", &probe.to_device),
            ("device to host", &probe.from_device),
        ] {
            output::line(&rate(name, figure))?;
        }
        for (name, seconds) in [
            ("launch, in a row", probe.launch_seconds),
            ("launch and wait", probe.round_trip_seconds),
            ("64 bytes from host", probe.host_latency_seconds),
        ] {
            output::line(&format!("  {name:<20} {:>11}", Seconds(seconds).to_string()))?;
        }
    }
    for peer in &report.peers {
        let way = if peer.direct { "direct" } else { "through the host" };
        let latency = Seconds(peer.latency_seconds).to_string();
        output::line(&format!("\nGPU {} -> {} ({way}), latency {latency}", peer.from, peer.to))?;
        output::line(&rate("copy", &peer.copy))?;
    }
    match &args.save {
        Some(path) => output::line(&format!(
            "\nthe profile is in {path}: spanker plan llama-2-7b --profile {path} --cards 1",
            path = path.display()
        )),
        None => Ok(()),
    }
}

fn describe(card: &CudaCard) -> String {
    let (major, minor) = card.capability;
    let slot = card.pcie.map_or_else(String::new, |slot| {
        format!(", PCIe {} x{}", slot.most_generation, slot.most_width)
    });
    format!(
        "{}: {} memory, {} multiprocessors of {major}.{minor} at {} MHz, {} bits of memory at {} MHz, {} NVLinks{slot}",
        card.title(),
        output::bytes(card.memory_bytes),
        card.multiprocessors,
        card.clock_khz / 1000,
        card.memory_bus_bits,
        card.memory_clock_khz / 1000,
        card.nvlinks.len(),
    )
}

fn rate(name: &str, figure: &Figure) -> String {
    let [median, low, high] = [figure.bytes_per_second, figure.low, figure.high]
        .map(|rate| BytesPerSecond(rate).to_string());
    format!("  {name:<20} {median:>11} ({low} to {high})")
}
