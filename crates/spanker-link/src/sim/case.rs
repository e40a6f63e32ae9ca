// SPDX-License-Identifier: Apache-2.0
//! What a simulation is made from.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::wire::Wire;
use crate::{Config, Identity};

/// A caller that sometimes stops freeing its receive buffer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stall {
    /// The chance of a pause after each frame.
    pub chance: f64,
    /// Nanoseconds of the longest pause.
    pub most: u64,
}

/// Two ends, two wires, and what is to be carried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    /// What all chance follows from.
    pub seed: u64,
    /// How the ends behave; their ticks are nanoseconds.
    pub ends: [Config; 2],
    /// The wire out of each end.
    pub wires: [Wire; 2],
    /// Frames that each end sends.
    pub frames: [u64; 2],
    /// Every payload is as long as the link allows; otherwise lengths are drawn from zero to that.
    pub fixed_length: bool,
    /// Some of the frames are notices.
    pub notices: bool,
    /// How both callers pause.
    pub stall: Option<Stall>,
}

impl Case {
    /// Two ends of this project's configuration over clean wires, `frames` one way and none back,
    /// with the policy off.
    #[must_use]
    pub fn one_way(seed: u64, payload: u16, delay: u64, frames: u64) -> Case {
        let end = |serial| Config {
            payload,
            saturation: None,
            ..Config::nanoseconds(Identity { serial, port: 0 }, seed as u32 ^ serial as u32)
        };
        Case {
            seed,
            ends: [end(1), end(2)],
            wires: [Wire::clean(delay); 2],
            frames: [frames, 0],
            fixed_length: true,
            notices: false,
            stall: None,
        }
    }

    /// A case drawn from its seed: bit error rates from 1e-9 to 1e-4, drops, duplicates, reordering,
    /// stalls, sizes of everything, `frames` each way.
    #[must_use]
    pub fn random(seed: u64, frames: u64) -> Case {
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let mut log_uniform =
            |low: f64, high: f64| (low.ln() + rng.random::<f64>() * (high / low).ln()).exp();
        let bit_error_rate = log_uniform(1e-9, 1e-4);
        let rates = [(); 6].map(|()| log_uniform(1e-6, 1e-2));
        let delay = log_uniform(20.0, 5_000.0) as u64;
        let late = log_uniform(100.0, 20_000.0) as u64;
        let most = log_uniform(1_000.0, 1_000_000.0) as u64;
        // Without the policy, frames are small enough that a fair part of them arrives.
        let longest = (0.07 / bit_error_rate).clamp(64.0, 1024.0);
        let payload = log_uniform(16.0, longest) as u16;
        let end = |serial: u64, rng: &mut Pcg64Mcg| Config {
            identity: Identity { serial, port: 0 },
            nonce: rng.random(),
            lanes: [1, 2, 4][rng.random_range(0..3)],
            payload,
            window: rng.random_range(8..=120),
            ack_every: rng.random_range(1..=8),
            retry: rng.random_range(20_000..200_000),
            attempts: 200,
            train_every: 20_000,
            train_within: 5_000_000,
            saturation: rng.random_bool(0.2).then_some(10_000_000),
        };
        let mut ends = [end(1, &mut rng), end(2, &mut rng)];
        if ends.iter().any(|end| end.saturation.is_some()) {
            // The policy shrinks frames itself, if they are large enough for that.
            ends = ends.map(|end| Config { payload: 2048, ..end });
        }
        let wire = |drop: f64, duplicate: f64, reorder: f64| Wire {
            bit_error_rate,
            drop,
            duplicate,
            reorder,
            late,
            ..Wire::clean(delay)
        };
        let [a, b, c, d, e, f] = rates.map(|rate| if rng.random_bool(0.5) { rate } else { 0.0 });
        let stall = rng.random_bool(0.5).then_some(Stall { chance: 1e-3, most });
        Case {
            seed,
            ends,
            wires: [wire(a, b, c), wire(d, e, f)],
            frames: [frames; 2],
            fixed_length: rng.random_bool(0.3),
            notices: rng.random_bool(0.5),
            stall,
        }
    }
}
