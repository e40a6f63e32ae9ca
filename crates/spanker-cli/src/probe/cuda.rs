// SPDX-License-Identifier: Apache-2.0
//! `spanker probe --fabric cuda`: GPUs, how they are connected, and what they do, measured; as a profile too.

use spanker_bench::gpu::{GpuReport, profile_gpus};
use spanker_cuda::{CudaCard, Figure};
use spanker_engine::files;
use spanker_topology::{BytesPerSecond, Seconds};

use super::Args;
use crate::{output, refuse};

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    if args.cards.is_some() {
        return refuse("--cards is for --fabric cards: GPUs are all measured");
    }
    let found = profile_gpus(args.gpus, args.save.is_some(), output::progress);
    output::progress_done();
    let (report, profile) = found?;
    if let (Some(path), Some(profile)) = (&args.save, profile) {
        files::write(path, profile.to_toml())?;
    }
    match args.json {
        true => output::json(&report),
        false => show(&report, args),
    }
}

fn show(report: &GpuReport, args: &Args) -> anyhow::Result<()> {
    let driver = report.driver.as_ref().map_or_else(String::new, |driver| format!(" ({driver})"));
    say!("CUDA {}{driver}", report.cuda)?;
    for card in &report.cards {
        output::line(&describe(card))?;
    }
    for note in &report.notes {
        say!("note: {note}")?;
    }
    for probe in &report.gpus {
        say!("\nGPU {} ({}):", probe.gpu, probe.name)?;
        let mut rows: Vec<Vec<String>> = [
            ("copy (read + write)", &probe.copy),
            ("read", &probe.read),
            ("write", &probe.write),
            ("host to device", &probe.to_device),
            ("device to host", &probe.from_device),
        ]
        .into_iter()
        .map(|(name, figure)| rate(name, figure))
        .collect();
        for (name, seconds) in [
            ("launch, in a row", probe.launch_seconds),
            ("launch and wait", probe.round_trip_seconds),
            ("64 bytes from host", probe.host_latency_seconds),
        ] {
            rows.push(vec![name.into(), Seconds(seconds).to_string(), String::new()]);
        }
        output::table(&HEADER, rows, &["median"])?;
    }
    for peer in &report.peers {
        let way = if peer.direct { "direct" } else { "through the host" };
        let latency = Seconds(peer.latency_seconds).to_string();
        say!("\nGPU {} -> {} ({way}), latency {latency}", peer.from, peer.to)?;
        output::table(&HEADER, vec![rate("copy", &peer.copy)], &["median"])?;
    }
    match &args.save {
        Some(path) => say!(
            "\nthe profile is in {path}: spanker plan llama-2-7b --profile {path} --cards 1",
            path = path.display()
        ),
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

const HEADER: [&str; 3] = ["what", "median", "slowest and fastest run"];

fn rate(name: &str, figure: &Figure) -> Vec<String> {
    let [median, low, high] = [figure.bytes_per_second, figure.low, figure.high]
        .map(|rate| BytesPerSecond(rate).to_string());
    vec![name.into(), median, format!("{low} to {high}")]
}
