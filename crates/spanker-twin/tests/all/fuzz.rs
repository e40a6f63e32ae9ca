// SPDX-License-Identifier: Apache-2.0
//! The brief fuzzers: valid inputs and what mutations make of them, from seeds. They look for panics, for bytes
//! of another program that have changed, and for cards that no longer answer. `scripts/fuzz` looks longer, with
//! the coverage as its guide.
//!
//! A failing seed is printed with the command that replays it. `SPANKER_RUNS` asks for more inputs.

use std::path::Path;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use spanker_fuzz_targets::{frames, requests, work};

/// A target: its name, what it runs, and what makes its valid inputs.
struct Target {
    name: &'static str,
    run: fn(&[u8]),
    valid: fn(&mut Pcg64Mcg) -> Vec<u8>,
    inputs: u64,
}

const FRAMES: Target =
    Target { name: "frames", run: frames::run, valid: frames::valid, inputs: 150_000 };
const REQUESTS: Target =
    Target { name: "requests", run: requests::run, valid: requests::valid, inputs: 60_000 };
const WORK: Target = Target { name: "work", run: work::run, valid: work::valid, inputs: 60_000 };

/// Prints how to see it again if the input panics.
struct Replay(&'static str, u64);

impl Drop for Replay {
    fn drop(&mut self) {
        let Replay(name, seed) = self;
        if std::thread::panicking() {
            eprintln!(
                "seed {seed}\nreplay: SPANKER_SEED={seed} cargo test -p spanker-twin --test all {name}"
            );
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn runs(target: &Target) {
    let seeds = match number("SPANKER_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SPANKER_RUNS").unwrap_or(target.inputs),
    };
    for seed in seeds {
        let _replay = Replay(target.name, seed);
        (target.run)(&input(target, seed));
    }
}

/// The input of a seed: the first are valid, of the others most are no longer.
fn input(target: &Target, seed: u64) -> Vec<u8> {
    let mut dice = Pcg64Mcg::seed_from_u64(seed);
    let mut bytes = (target.valid)(&mut dice);
    if seed >= 100 {
        for _ in 0..dice.random_range(0..4) {
            mutate(&mut bytes, target, &mut dice);
        }
    }
    bytes
}

/// Numbers that programs trip over.
const EDGES: [u64; 12] = [
    0,
    1,
    7,
    64,
    255,
    4096,
    u16::MAX as u64,
    u32::MAX as u64,
    1 << 62,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];

fn mutate(bytes: &mut Vec<u8>, target: &Target, dice: &mut Pcg64Mcg) {
    if bytes.is_empty() {
        return;
    }
    let at = dice.random_range(0..bytes.len());
    match dice.random_range(0..7) {
        0 => bytes[at] ^= 1 << dice.random_range(0..8),
        1 => bytes[at] = dice.random(),
        2 => bytes.truncate(at),
        3 => {
            // The tail of another input.
            let other = (target.valid)(dice);
            let from = dice.random_range(0..other.len());
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        4 => {
            // A piece of itself, once more.
            let end = (at + dice.random_range(1..64)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        // A field of 2, 4 or 8 bytes that is an edge, or a little more or less than it was.
        kind => {
            let width = 2 << dice.random_range(0..3);
            let at = at & !1;
            let Some(field) = bytes.get_mut(at..at + width) else { return };
            let mut old = [0; 8];
            old[..width].copy_from_slice(field);
            let edge = EDGES[dice.random_range(0..EDGES.len())];
            let near = u64::from_le_bytes(old).wrapping_add_signed(dice.random_range(-9..10));
            let new = if kind == 5 { edge } else { near };
            field.copy_from_slice(&new.to_le_bytes()[..width]);
        }
    }
}

#[test]
fn frames_of_any_kind_break_no_promise() {
    runs(&FRAMES);
}

#[test]
fn requests_of_any_kind_break_no_promise() {
    runs(&REQUESTS);
}

#[test]
fn work_of_any_kind_breaks_no_promise() {
    runs(&WORK);
}

#[test]
fn corpus_of_valid_inputs_is_written_where_it_is_asked_for() {
    let Ok(folder) = std::env::var("SPANKER_CORPUS") else { return };
    for target in [FRAMES, REQUESTS, WORK] {
        let folder = Path::new(&folder).join(target.name);
        std::fs::create_dir_all(&folder).expect("a folder");
        for seed in 0..100 {
            let file = folder.join(format!("valid-{seed}"));
            std::fs::write(file, input(&target, seed)).expect("a file");
        }
    }
}
