// SPDX-License-Identifier: Apache-2.0
//! How long planning and simulating take, beside what they may take: the cases of `spanker bench planner`,
//! without the rest of the workspace.
//!
//!     cargo run --release -p spanker-plan --example bench_planner

// A timing harness is what a clock is for; the crate itself has none.
#![allow(clippy::disallowed_methods)]

use std::error::Error;
use std::time::Instant;

use spanker_model::{Quant, builtin};
use spanker_plan::{Conditions, Objective, Plan, Request, choose, simulate};
use spanker_topology::{Bytes, BytesPerSecond, Cluster, Profile, Shape};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Cards that all differ, in rate and in memory.
fn different(count: u64, most: u64) -> Outcome<Vec<Profile>> {
    let card = |index: u64| -> Outcome<Profile> {
        let rate = BytesPerSecond(1_000_000_000 + 2_000_000_000 * index / count);
        let mut card = Profile::builtin("rev-a")?.with_memory_bandwidth(rate, "a made-up cluster");
        card.memory.capacity.value = Bytes((most / 2 + most / 2 * index / count) << 20);
        Ok(card)
    };
    (0..count).map(card).collect()
}

/// The median of five runs and the shortest, in seconds.
fn timed(mut run: impl FnMut() -> Outcome<()>) -> Outcome<(f64, f64)> {
    let mut times = Vec::new();
    for _ in 0..5 {
        let begun = Instant::now();
        run()?;
        times.push(begun.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok((times[2], times[0]))
}

fn main() -> Outcome<()> {
    let model = builtin("llama-2-70b", Quant::Q4_0)?;
    let eight = Cluster::new(different(8, 12_000)?, Shape::Ring)?;
    let sixty_four = Cluster::new(different(64, 2_000)?, Shape::Ring)?;
    let equal = Cluster::uniform(Profile::builtin("rev-a")?, 64, Shape::Ring)?;
    let cases = [
        ("8 different cards, latency", &eight, Objective::Latency, 0.1),
        ("8 different cards, ttft", &eight, Objective::Ttft, 0.1),
        ("8 different cards, throughput", &eight, Objective::Throughput, 0.1),
        ("64 equal cards, latency", &equal, Objective::Latency, 5.0),
        ("64 different cards, latency", &sixty_four, Objective::Latency, 5.0),
        ("64 different cards, throughput", &sixty_four, Objective::Throughput, 5.0),
    ];
    // Names on the command line choose cases.
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let chosen =
        |name: &str| wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str()));
    println!(
        "{:<34} {:>10} {:>13} {:>10} {:>9}",
        "plan", "time (ms)", "shortest (ms)", "may take", "of limit"
    );
    for (name, cluster, objective, limit) in cases {
        if !chosen(name) {
            continue;
        }
        let sequences = if objective == Objective::Throughput { 8 } else { 1 };
        let request = Request { sequences, ..Request::new(objective) };
        let cards: Vec<usize> = (0..cluster.cards()).collect();
        let (median, least) = timed(|| Ok(choose(&model, cluster, &cards, &request).map(drop)?))?;
        println!(
            "{name:<34} {:>10.2} {:>13.2} {:>10} {:>9.3}",
            median * 1e3,
            least * 1e3,
            limit * 1e3,
            median / limit
        );
        let choice = choose(&model, cluster, &cards, &request)?;
        if let Some(best) = choice.best() {
            let (prediction, exact) = (&best.prediction, choice.exact);
            let (token, ttft) = (prediction.token, prediction.ttft);
            let rate = prediction.tokens_per_second;
            println!("    {}: {token}, first {ttft}, {rate:.3}/s, exact: {exact}", best.strategy);
        }
    }
    if !chosen("simulate") {
        return Ok(());
    }
    let request = Request::new(Objective::Latency);
    let cards: Vec<usize> = (0..64).collect();
    let choice = choose(&model, &equal, &cards, &request)?;
    let best = choice.best().ok_or("the model does not fit on 64 cards")?;
    let plan = Plan::new(model.clone(), equal, request, best.layout.clone())?;
    let conditions = Conditions { record: false, ..Conditions::calm(1) };
    let trace = simulate(&plan, &conditions)?;
    let (_, wall) = timed(|| Ok(simulate(&plan, &conditions).map(drop)?))?;
    println!(
        "\nsimulate one token on 64 cards: {} events in {:.1} ms, {:.1} M events/s; the cards would take {:.1} ms",
        trace.events,
        wall * 1e3,
        trace.events as f64 / wall / 1e6,
        trace.tokens[0] * 1e3,
    );
    Ok(())
}
