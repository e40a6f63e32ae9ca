// SPDX-License-Identifier: Apache-2.0
//! How long the host waits for an all-reduce of f32 on all cards of `$SPANKER_DEV_DIR`, transfers and check
//! included. It does not measure card time; `spanker bench all-reduce --fabric cards` does.
//!
//! `cargo run -p spanker-scheduler --example all_reduce_cards -- [KIBIBYTES] [CALLS]`

use std::time::{Duration, Instant};

use spanker_scheduler::{AllReduce, Error, ReduceOp, Topology};

fn main() -> Result<(), Error> {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse().unwrap_or(1usize).max(1));
    let (kibibytes, calls) = (numbers.next().unwrap_or(4096), numbers.next().unwrap_or(15));
    let cards = Topology::enumerate()?;
    let value = |card: usize, i: usize| (card + i % 1000) as f32 / 7.0;
    let input = |card| (0..kibibytes * 256).map(|i| value(card, i)).collect();
    let inputs: Vec<Vec<f32>> = (0..cards.n_sails()).map(input).collect();
    let mut times: Vec<Duration> = Vec::with_capacity(calls);
    for _ in 0..calls {
        let mut buffers = inputs.clone();
        let begun = Instant::now();
        cards.all_reduce_f32(&mut buffers, ReduceOp::Sum)?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    let count = cards.n_sails();
    println!("{count} cards, {kibibytes} KiB, {calls} calls: median {:?}", times[calls / 2]);
    println!("fastest {:?}, slowest {:?}", times[0], times[calls - 1]);
    Ok(())
}
