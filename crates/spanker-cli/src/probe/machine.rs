// SPDX-License-Identifier: Apache-2.0
//! `spanker probe --fabric inproc`, `mpi` and `tcp`: what a card that is a thread, a process or a machine takes for each kind of
//! operator of a model, measured, as a table and as a profile.

use spanker_engine::{Fabric, Freshness, files};
use spanker_topology::{BytesPerSecond, OperatorKind, OperatorRate, Profile};

use super::Args;
use crate::{llm, output};

/// The model that is measured with where no flag names one.
const USUAL_MODEL: &str = "smollm2-135m";

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let fabric = args.fabric;
    let usual = llm::Args::usual(args.model.as_deref().unwrap_or(USUAL_MODEL));
    let workers = args.workers.clone();
    let named = llm::Args { threads: args.threads, fabric: Some(fabric), workers, ..usual };
    llm::on_host(&named, args.cards.as_ref(), None, |place| {
        let layout = place.host.usual_layout(&place.model, place.host.card_count())?;
        let request = place.request(1, 1);
        let cluster = place.host.cluster(&place.model, &request, &layout, Freshness::Now)?;
        // Machines that differ have profiles of their own; that of this one is saved.
        let others = if fabric == Fabric::Tcp { 1..cluster.cards() } else { 0..0 };
        show(args, cluster.profile(0))?;
        others.into_iter().try_for_each(|card| describe(args, cluster.profile(card)))
    })
}

fn show(args: &Args, profile: &Profile) -> anyhow::Result<()> {
    if let Some(path) = &args.save {
        files::write(path, profile.to_toml())?;
    }
    describe(args, profile)?;
    match &args.save {
        Some(path) if !args.json => say!("saved {}", path.display()),
        _ => Ok(()),
    }
}

fn describe(args: &Args, profile: &Profile) -> anyhow::Result<()> {
    if args.json {
        return output::json(profile);
    }
    say!("{}: {}\n", profile.name, profile.summary)?;
    let header = ["operator", "type", "rows", "overhead", "rate"];
    let rows = profile.compute.operators.iter().map(row).collect();
    output::table(&header, rows, &header[2..])?;
    say!("\na step besides its operators: {}", profile.host.latency.value * 2.0)?;
    if let Some(link) = &profile.link {
        say!(
            "an exchange ({}): {} and {} ({})",
            link.exchange.name(),
            link.latency.value,
            link.bandwidth.value,
            link.latency.provenance
        )?;
    }
    Ok(())
}

fn row(entry: &OperatorRate) -> Vec<String> {
    let rate = match entry.kind {
        OperatorKind::Attention => format!("{:.2} GMAC/s", entry.rate / 1e9),
        _ => BytesPerSecond(entry.rate.min(1e18) as u64).to_string(),
    };
    vec![
        entry.kind.name().into(),
        entry.weights.as_deref().unwrap_or("-").into(),
        entry.rows.to_string(),
        entry.overhead.to_string(),
        rate,
    ]
}
