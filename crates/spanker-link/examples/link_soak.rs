// SPDX-License-Identifier: Apache-2.0
//! Runs random cases of two links until so many frames were delivered, or one case again.
//!
//! `link_soak FRAMES [FIRST_SEED]` or `link_soak seed SEED`; see `scripts/check-link`.

use std::process::ExitCode;

use spanker_link::sim::{Case, run};

/// Frames that each end of a case sends.
const EACH: u64 = 50_000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|text| text.parse::<f64>().ok());
    if arguments.first().is_some_and(|word| word == "seed") {
        let seed = arguments.get(1).and_then(|text| text.parse().ok()).unwrap_or(0);
        let case = Case::random(seed, EACH);
        println!("{case:#?}");
        return match run(&case) {
            Ok(report) => {
                println!("{report:#?}");
                ExitCode::SUCCESS
            }
            Err(flaw) => {
                eprintln!("{flaw}");
                ExitCode::FAILURE
            }
        };
    }
    let wanted = number(0).unwrap_or(1e8) as u64;
    soak(wanted, number(1).unwrap_or(0.0) as u64)
}

fn soak(wanted: u64, first: u64) -> ExitCode {
    let (mut delivered, mut broken, mut replayed, mut faults) = (0, 0, 0, 0);
    let mut seed = first;
    let mut reported = 0;
    while delivered < wanted {
        match run(&Case::random(seed, EACH)) {
            Ok(report) => {
                delivered += report.delivered.iter().sum::<u64>();
                broken += report.counters.iter().map(|counters| counters.corrupt).sum::<u64>();
                replayed += report.counters.iter().map(|counters| counters.replayed).sum::<u64>();
                faults += u64::from(report.fault.is_some());
            }
            Err(flaw) => {
                eprintln!("{flaw}\nreplay with: scripts/check-link seed {seed}");
                return ExitCode::FAILURE;
            }
        }
        seed += 1;
        let percent = delivered * 100 / wanted.max(1);
        if percent > reported || delivered >= wanted {
            reported = percent;
            println!(
                "{percent:3} %: {delivered} frames delivered, {broken} broken, {replayed} replayed, \
                 {} cases, {faults} ended in FAULT",
                seed - first
            );
        }
    }
    println!("nothing lost, repeated, reordered or changed");
    ExitCode::SUCCESS
}
