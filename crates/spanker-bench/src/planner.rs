// SPDX-License-Identifier: Apache-2.0
//! How long planning and simulating take, beside what they may take.

use std::time::Duration;

use serde::Serialize;
use spanker_engine::EngineError;
use spanker_model::{Quant, builtin};
use spanker_plan::{Conditions, Objective, Plan, PlanError, Request, choose, simulate};
use spanker_topology::{Bytes, BytesPerSecond, Cluster, Profile, Shape};

use crate::error::Result;
use crate::turns::{Turn, take_turns, timed};

/// The model that is planned: 80 layers.
const MODEL: &str = "llama-2-70b";
/// Runs of which the median counts.
const RUNS: usize = 5;

/// How long one plan took.
#[derive(Debug, Clone, Serialize)]
pub struct PlanTime {
    /// Which cards, and what is asked for.
    pub plan: &'static str,
    /// Median seconds.
    pub seconds: f64,
    /// What it may take.
    pub limit_seconds: f64,
}

/// How long one token takes to simulate.
#[derive(Debug, Clone, Serialize)]
pub struct SimulationTime {
    /// What is simulated.
    pub simulate: &'static str,
    /// Events of the simulation.
    pub events: u64,
    /// Median seconds of the host.
    pub wall_seconds: f64,
    /// Seconds that the cards would take.
    pub virtual_seconds: f64,
    /// Events in a second of the host.
    pub events_per_second: f64,
}

/// Cards that all differ, in rate and in memory.
fn different(count: u64, most: u64) -> Result<Vec<Profile>> {
    let card = |index: u64| -> Result<Profile> {
        let rate = BytesPerSecond(1_000_000_000 + 2_000_000_000 * index / count);
        let mut card = Profile::builtin("rev-a")?.with_memory_bandwidth(rate, "a made-up cluster");
        card.memory.capacity.value = Bytes((most / 2 + most / 2 * index / count) << 20);
        Ok(card)
    };
    (0..count).map(card).collect()
}

/// Cases of planning, with what they may take, in seconds.
fn cases() -> Result<[(&'static str, Cluster, Objective, f64); 6]> {
    let eight = Cluster::new(different(8, 12_000)?, Shape::Ring)?;
    let many = Cluster::new(different(64, 2_000)?, Shape::Ring)?;
    let equal = Cluster::uniform(Profile::builtin("rev-a")?, 64, Shape::Ring)?;
    Ok([
        ("8 different cards, latency", eight.clone(), Objective::Latency, 0.1),
        ("8 different cards, ttft", eight.clone(), Objective::Ttft, 0.1),
        ("8 different cards, throughput", eight, Objective::Throughput, 0.1),
        ("64 equal cards, latency", equal, Objective::Latency, 5.0),
        ("64 different cards, latency", many.clone(), Objective::Latency, 5.0),
        ("64 different cards, throughput", many, Objective::Throughput, 5.0),
    ])
}

/// The median seconds of some runs.
fn median(mut run: impl FnMut() -> Result<(), PlanError>) -> Result<f64> {
    let mut subject = |count: usize| -> Result<Duration> { Ok(timed(count, &mut run)?) };
    Ok(take_turns(RUNS, &mut [Turn::new(&mut subject, 1)])?[0])
}

/// Times planning, one case at a time. `begins` is called with which.
///
/// # Errors
/// What planning fails with.
pub fn planner(
    mut begins: impl FnMut(&'static str),
) -> Result<impl Iterator<Item = Result<PlanTime>>> {
    let model = builtin(MODEL, Quant::Q4_0)?;
    Ok(cases()?.into_iter().map(move |(plan, cluster, objective, limit_seconds)| {
        begins(plan);
        let sequences = if objective == Objective::Throughput { 8 } else { 1 };
        let request = Request { sequences, ..Request::new(objective) };
        let cards: Vec<usize> = (0..cluster.cards()).collect();
        let seconds = median(|| choose(&model, &cluster, &cards, &request).map(drop))?;
        Ok(PlanTime { plan, seconds, limit_seconds })
    }))
}

/// Times one token of the best plan on 64 cards, against the time that the cards would take.
///
/// # Errors
/// What planning fails with.
pub fn simulation() -> Result<SimulationTime> {
    let model = builtin(MODEL, Quant::Q4_0)?;
    let cluster = Cluster::uniform(Profile::builtin("rev-a")?, 64, Shape::Ring)?;
    let request = Request::new(Objective::Latency);
    let cards: Vec<usize> = (0..64).collect();
    let choice = choose(&model, &cluster, &cards, &request)?;
    let best = choice.best().ok_or_else(|| EngineError::request("it does not fit on 64 cards"))?;
    let layout = best.layout.clone();
    let plan = Plan::new(model, cluster, request, layout)?;
    let conditions = Conditions { record: false, ..Conditions::calm(1) };
    let trace = simulate(&plan, &conditions)?;
    let wall = median(|| simulate(&plan, &conditions).map(drop))?;
    Ok(SimulationTime {
        simulate: "one token on 64 cards",
        events: trace.events,
        wall_seconds: wall,
        virtual_seconds: trace.tokens[0],
        events_per_second: trace.events as f64 / wall,
    })
}
