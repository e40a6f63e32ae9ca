// SPDX-License-Identifier: Apache-2.0
//! `spanker probe --fabric inproc` and `mpi`: what a card that is a thread or a process takes for each kind of
//! operator of a model, measured, as a table and as a profile.

use spanker_topology::{BytesPerSecond, OperatorKind, OperatorRate, Profile, Seconds};

use super::Args;
use crate::llm::host::{self, Freshness};
use crate::llm::{self, FabricKind, Loaded, Split, layout, ranks};
use crate::{files, output};

/// The model that is measured with where no flag names one.
const USUAL_MODEL: &str = "smollm2-135m";

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let fabric = if args.fabric == "mpi" { FabricKind::Mpi } else { FabricKind::Inproc };
    let named = llm::Args {
        model: args.model.clone().unwrap_or_else(|| USUAL_MODEL.to_owned()),
        ctx_size: None,
        threads: args.threads,
        batch_size: spanker_plan::USUAL_BATCH as usize,
        fabric: Some(fabric),
        tensor_split: None,
        deadline: None,
    };
    if fabric == FabricKind::Mpi {
        return ranks::join(&named, &|_| Ok(None), |loaded, front, place| {
            let count = ranks::cards(args.cards.as_ref(), None, place)?;
            let layout = split(loaded, count)?;
            let profile = ranks::profile(loaded, front, place, &layout, Freshness::Now)?;
            show(args, &profile)
        });
    }
    let loaded = Loaded::open(&named)?;
    let count = llm::thread_cards(args.cards.as_ref(), None)?;
    let layout = split(&loaded, count)?;
    let profile = host::profile(&loaded, loaded.threads, &layout, Freshness::Now)?;
    show(args, &profile)
}

/// The layout that runs have where no flag asks for another.
fn split(loaded: &Loaded, cards: usize) -> anyhow::Result<spanker_plan::Layout> {
    layout::given(loaded.network.model(), Split::Gather, &vec![1.0; cards])
}

fn show(args: &Args, profile: &Profile) -> anyhow::Result<()> {
    if let Some(path) = &args.save {
        files::write(path, &profile.to_toml())?;
    }
    if args.json {
        return output::line(&serde_json::to_string(profile)?);
    }
    output::line(&format!("{}: {}\n", profile.name, profile.summary))?;
    output::line(&format!(
        "{:<10} {:<6} {:>5} {:>10} {:>14}",
        "operator", "type", "rows", "overhead", "rate"
    ))?;
    for entry in &profile.compute.operators {
        output::line(&row(entry))?;
    }
    output::line(&format!("\na step besides its operators: {}", profile.host.latency.value * 2.0))?;
    if let Some(link) = &profile.link {
        output::line(&format!(
            "an exchange ({}): {} and {} ({})",
            link.exchange.name(),
            link.latency.value,
            link.bandwidth.value,
            link.latency.provenance
        ))?;
    }
    match &args.save {
        Some(path) => output::line(&format!("saved {}", path.display())),
        None => Ok(()),
    }
}

fn row(entry: &OperatorRate) -> String {
    let rate = match entry.kind {
        OperatorKind::Attention => format!("{:.2} GMAC/s", entry.rate / 1e9),
        _ => BytesPerSecond(entry.rate.min(1e18) as u64).to_string(),
    };
    let overhead: Seconds = entry.overhead;
    format!(
        "{:<10} {:<6} {:>5} {:>10} {rate:>14}",
        entry.kind.name(),
        entry.weights.as_deref().unwrap_or("-"),
        entry.rows,
        overhead.to_string(),
    )
}
