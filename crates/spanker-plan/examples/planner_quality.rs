// SPDX-License-Identifier: Apache-2.0
//! What the planner finds on seeded random clusters.
#![allow(clippy::disallowed_methods)]
use std::error::Error;
use std::time::Instant;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg32;
use spanker_model::{Quant, builtin};
use spanker_plan::{Objective, Request, choose};
use spanker_topology::{Bytes, BytesPerSecond, Cluster, Profile, Seconds, Shape};

fn main() -> Result<(), Box<dyn Error>> {
    let verbose = std::env::args().any(|a| a == "-v");
    let only: Option<u64> = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let counts = [8usize, 10, 12, 16, 20, 24, 32, 48, 64];
    let models = ["tinyllama-1.1b", "llama-2-7b", "llama-2-70b"];
    for seed in 0..54u64 {
        if only.is_some_and(|o| o != seed) {
            continue;
        }
        let mut rng = Pcg32::seed_from_u64(seed);
        let n = counts[(seed as usize) % counts.len()];
        let objective = Objective::ALL[(seed as usize / counts.len()) % 3];
        let name = models[rng.random_range(0..3)];
        let model = builtin(name, Quant::Q4_0)?;
        let shape = [Shape::Ring, Shape::Switch, Shape::Star, Shape::Ring][rng.random_range(0..4)];
        let latency = [1e-6, 2e-6, 2e-5, 2e-4][rng.random_range(0..4)];
        let total = model.weight_bytes() as f64;
        let kinds = rng.random_range(1..=4usize);
        let factor = rng.random_range(1.3..6.0);
        let all_differ = rng.random_bool(0.5);
        let mut kind = |rng: &mut Pcg32| {
            let rate = rng.random_range(500_000_000..4_000_000_000u64);
            let mut p = Profile::builtin("rev-a").unwrap().with_memory_bandwidth(BytesPerSecond(rate), "random");
            let each = total / n as f64 * factor * rng.random_range(0.6..1.4) + 200e6;
            p.memory.capacity.value = Bytes(each as u64);
            p.link.as_mut().unwrap().latency.value = Seconds(latency);
            p
        };
        let profiles: Vec<Profile> = if all_differ {
            (0..n).map(|_| kind(&mut rng)).collect()
        } else {
            let ks: Vec<Profile> = (0..kinds).map(|_| kind(&mut rng)).collect();
            (0..n).map(|_| ks[rng.random_range(0..kinds)].clone()).collect()
        };
        let cluster = Cluster::new(profiles, shape)?;
        let sequences = match objective { Objective::Throughput => [2, 8, n as u64][rng.random_range(0..3)], _ => 1 };
        let request = Request { sequences, ..Request::new(objective) };
        let cards: Vec<usize> = (0..n).collect();
        let begun = Instant::now();
        let choice = choose(&model, &cluster, &cards, &request)?;
        let took = begun.elapsed().as_secs_f64();
        let value = |c: &spanker_plan::Candidate| match objective {
            Objective::Latency => c.prediction.token.0 * 1e3,
            Objective::Throughput => c.prediction.tokens_per_second,
            _ => c.prediction.ttft.0 * 1e3,
        };
        let best = choice.best().map(|b| (b.strategy, value(b)));
        println!("{seed:>3} n={n} {objective} {name} {} differ={all_differ} seqs={sequences} lat={latency:e}: {} {:.4} exact={} in {:.0} ms",
            shape.name(), best.map_or("none".to_string(), |b| b.0.to_string()), best.map_or(0.0, |b| b.1), choice.exact, took*1e3);
        if verbose {
            for c in &choice.candidates {
                let sizes: Vec<usize> = c.layout.stages().map(|s| s.group.cards.len()).collect();
                println!("      {} fits={} {:.4} sizes {sizes:?}", c.strategy, c.prediction.fits(), value(c));
            }
        }
    }
    Ok(())
}
