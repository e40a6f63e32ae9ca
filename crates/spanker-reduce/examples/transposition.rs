// SPDX-License-Identifier: Apache-2.0
//! Times the transposition of the first version's all-reduce loop: element-outer (before), card-outer (after), and the fused
//! all-reduce of this crate, on the same buffers in turns. It prints medians and minima, and fails if the bits differ; it judges no
//! figure.
//!
//! ```text
//! cargo run --release -p spanker-reduce --example transposition [CARDS [ELEMENTS [OP]]]
//! ```

#[path = "../tests/support/loops.rs"]
mod loops;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use loops::{OPS, card_outer, count_different, element_outer, inputs};
use spanker_collective::ReduceOp;
use spanker_reduce::{Team, Threads, all_reduce};

/// Turns of every loop.
const TURNS: usize = 31;

/// How long a loop runs in each turn before it is timed: what ran before has left its own data in the caches and other
/// threads asleep.
const AWAKE: Duration = Duration::from_millis(4);

/// An all-reduce in place.
type Loop<'a> = Box<dyn FnMut(&mut [Vec<f32>]) + 'a>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let (cards, elements, op) = arguments()?;
    let team = Team::global();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let fused = |threads| {
        move |buffers: &mut [Vec<f32>]| {
            all_reduce(team, threads, buffers, op).expect("buffers of one length");
        }
    };
    let names = ["element-outer (before)", "card-outer (after)", "fused, 1 thread", "fused"];
    let mut loops: [Loop<'_>; 4] = [
        Box::new(|buffers: &mut [Vec<f32>]| element_outer(buffers, op)),
        Box::new(|buffers: &mut [Vec<f32>]| card_outer(buffers, op)),
        Box::new(fused(Threads::Exactly(1))),
        Box::new(fused(Threads::Auto)),
    ];

    let given = inputs(cards, elements);
    let mut expected = given.clone();
    loops[0](&mut expected);
    for (name, reduce) in names.iter().zip(&mut loops) {
        let mut found = given.clone();
        reduce(&mut found);
        let different = count_different(&found, &expected);
        if different > 0 {
            return Err(format!("{name}: {different} elements differ from {}", names[0]));
        }
    }

    let times = in_turns(&mut loops, &given);
    println!(
        "{cards} cards x {elements} f32, {op}, {cores} cores; {TURNS} turns, ratios to element-outer"
    );
    println!("{:<24} {:>10} {:>9} {:>10} {:>9}", "loop", "median us", "", "least us", "");
    for (name, time) in names.iter().zip(&times) {
        let (median, least) = (times[0].median / time.median, times[0].least / time.least);
        println!(
            "{name:<24} {:>10.1} {median:>8.2}x {:>10.1} {least:>8.2}x",
            time.median * 1e6,
            time.least * 1e6
        );
    }
    println!("all results have the same bits");
    Ok(())
}

fn arguments() -> Result<(usize, usize, ReduceOp), String> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, usual: usize| match given.get(at).map(|text| (text, text.parse())) {
        None => Ok(usual),
        Some((_, Ok(number))) if number > 0 => Ok(number),
        Some((text, _)) => Err(format!("'{text}': expected a number from 1")),
    };
    let op = match given.get(2) {
        None => ReduceOp::Sum,
        Some(text) => *OPS
            .iter()
            .find(|op| op.name() == text)
            .ok_or_else(|| format!("'{text}': expected sum, avg, max or min"))?,
    };
    Ok((number(0, 4)?, number(1, 1 << 20)?, op))
}

/// What a loop takes, in seconds. The least is what a machine that others use takes when they leave it alone.
struct Times {
    median: f64,
    least: f64,
}

/// The times of every loop. They take turns, so that what the machine does besides meets them all, and each finds the
/// same inputs in buffers at the same places.
fn in_turns(loops: &mut [Loop<'_>], given: &[Vec<f32>]) -> Vec<Times> {
    let mut buffers = given.to_vec();
    let mut times = vec![Vec::with_capacity(TURNS); loops.len()];
    for _ in 0..TURNS {
        for (reduce, times) in loops.iter_mut().zip(&mut times) {
            let begun = Instant::now();
            while begun.elapsed() < AWAKE {
                reduce(&mut buffers);
            }
            for (buffer, given) in buffers.iter_mut().zip(given) {
                buffer.copy_from_slice(given);
            }
            let begun = Instant::now();
            reduce(&mut buffers);
            times.push(begun.elapsed());
        }
    }
    let summary = |mut times: Vec<Duration>| {
        times.sort_unstable();
        let (median, least) = (times[TURNS / 2].as_secs_f64(), times[0].as_secs_f64());
        Times { median, least }
    };
    times.into_iter().map(summary).collect()
}
