// SPDX-License-Identifier: Apache-2.0
//! `spanker bench planner`: how long planning and simulating take, beside what they may take.

use std::time::Instant;

use anyhow::Context;
use serde_json::json;
use spanker_model::{Model, Quant, builtin};
use spanker_plan::{Conditions, Objective, Plan, Request, choose, simulate};
use spanker_topology::{Bytes, BytesPerSecond, Cluster, Profile, Shape};

use crate::output;

/// One case of planning.
struct Case {
    name: &'static str,
    cluster: Cluster,
    objective: Objective,
    /// What it may take, in seconds.
    limit: f64,
}

/// Cards that all differ, in rate and in memory.
fn different(count: u64, most: u64) -> anyhow::Result<Vec<Profile>> {
    let card = |index: u64| -> anyhow::Result<Profile> {
        let rate = BytesPerSecond(1_000_000_000 + 2_000_000_000 * index / count);
        let mut card = Profile::builtin("rev-a")?.with_memory_bandwidth(rate, "a made-up cluster");
        card.memory.capacity.value = Bytes((most / 2 + most / 2 * index / count) << 20);
        Ok(card)
    };
    (0..count).map(card).collect()
}

fn cases() -> anyhow::Result<Vec<Case>> {
    let eight = Cluster::new(different(8, 12_000)?, Shape::Ring)?;
    let sixty_four = Cluster::new(different(64, 2_000)?, Shape::Ring)?;
    let equal = Cluster::uniform(Profile::builtin("rev-a")?, 64, Shape::Ring)?;
    let case = |name, cluster: &Cluster, objective, limit| {
        let cluster = cluster.clone();
        Case { name, cluster, objective, limit }
    };
    Ok(vec![
        case("8 different cards, latency", &eight, Objective::Latency, 0.1),
        case("8 different cards, ttft", &eight, Objective::Ttft, 0.1),
        case("8 different cards, throughput", &eight, Objective::Throughput, 0.1),
        case("64 equal cards, latency", &equal, Objective::Latency, 5.0),
        case("64 different cards, latency", &sixty_four, Objective::Latency, 5.0),
        case("64 different cards, throughput", &sixty_four, Objective::Throughput, 5.0),
    ])
}

/// The median of five runs.
fn median(mut run: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for _ in 0..5 {
        let begun = Instant::now();
        run()?;
        times.push(begun.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[2])
}

pub(super) fn run(as_json: bool) -> anyhow::Result<()> {
    let model = builtin("llama-2-70b", Quant::Q4_0)?;
    if !as_json {
        output::line(
            "# llama-2-70b as q4_0, 80 layers, on made-up variants of rev-a in a ring; medians of 5",
        )?;
        output::line(&format!(
            "{:<34} {:>10} {:>10} {:>9}",
            "plan", "time (ms)", "may take", "of limit"
        ))?;
    }
    for case in cases()? {
        output::progress(case.name);
        let sequences = if case.objective == Objective::Throughput { 8 } else { 1 };
        let request = Request { sequences, ..Request::new(case.objective) };
        let cards: Vec<usize> = (0..case.cluster.cards()).collect();
        let seconds = median(|| Ok(choose(&model, &case.cluster, &cards, &request).map(drop)?))?;
        output::progress_done();
        let (name, of_limit) = (case.name, seconds / case.limit);
        if as_json {
            let row = json!({ "plan": name, "seconds": seconds, "limit_seconds": case.limit });
            output::line(&row.to_string())?;
        } else {
            let (time, limit) = (seconds * 1e3, case.limit * 1e3);
            output::line(&format!("{name:<34} {time:>10.2} {limit:>10} {of_limit:>9.3}"))?;
        }
    }
    simulation(&model, as_json)
}

/// One token of the best plan on 64 cards, against the time that the cards would take.
fn simulation(model: &Model, as_json: bool) -> anyhow::Result<()> {
    let cluster = Cluster::uniform(Profile::builtin("rev-a")?, 64, Shape::Ring)?;
    let request = Request::new(Objective::Latency);
    let cards: Vec<usize> = (0..64).collect();
    let choice = choose(model, &cluster, &cards, &request)?;
    let best = choice.best().context("the model fits on 64 cards")?;
    let layout = best.layout.clone();
    let plan = Plan::new(model.clone(), cluster, request, layout)?;
    let conditions = Conditions { record: false, ..Conditions::calm(1) };
    let trace = simulate(&plan, &conditions)?;
    let wall = median(|| Ok(simulate(&plan, &conditions).map(drop)?))?;
    let (virtual_time, rate) = (trace.tokens[0], trace.events as f64 / wall);
    if as_json {
        return output::line(
            &json!({
                "simulate": "one token on 64 cards",
                "events": trace.events,
                "wall_seconds": wall,
                "virtual_seconds": virtual_time,
                "events_per_second": rate,
            })
            .to_string(),
        );
    }
    output::line(&format!(
        "\nsimulate one token on 64 cards: {} events in {:.1} ms, {:.1} M events/s ({:.1}x of 1 M/s); the cards would take {:.1} ms ({:.2}x)",
        trace.events,
        wall * 1e3,
        rate / 1e6,
        rate / 1e6,
        virtual_time * 1e3,
        virtual_time / wall,
    ))
}
