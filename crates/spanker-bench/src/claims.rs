// SPDX-License-Identifier: Apache-2.0
//! What it costs to take work, beside the one atomic addition that it cannot do without.

use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use spanker_steal::{Capabilities, Claim, Claims, Job, Ledger, Member, Piece, Token};

use crate::error::{BenchError, Result};
use crate::turns::median;

/// What a claim may cost alone, in nanoseconds.
const BAR: f64 = 50.0;
const REPEATS: usize = 41;
/// Claims of one timing.
const CLAIMS: usize = 20_000;

/// Nanoseconds of each subject, medians of timings that took turns.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ClaimCosts {
    /// A claim, one thread.
    pub claim_ns: f64,
    /// An atomic addition, one thread.
    pub atomic_addition_ns: f64,
    /// A claim, its lease and its acceptance.
    pub claim_lease_and_acceptance_ns: f64,
    /// A claim while another thread claims, too.
    pub claim_two_threads_ns: f64,
    /// An atomic addition while another thread adds, too.
    pub atomic_addition_two_threads_ns: f64,
    /// What a claim may cost alone.
    pub bar_ns: f64,
}

/// A job that no bench comes to the end of, for two backends of known speed.
fn open() -> Result<(Ledger, std::sync::Arc<Claims>)> {
    let capabilities = Capabilities {
        rate: Some(1e5),
        launch: Some(Duration::from_micros(50)),
        most_items: Some(1000),
        ..Capabilities::PLAIN
    };
    let member = |name: &str| Member { name: name.into(), capabilities };
    Ok(Ledger::open(1, &Job::new(1 << 46, 0), vec![member("cpu0"), member("cpu1")])?)
}

fn take(claims: &Claims, backend: usize) -> Option<Piece> {
    match claims.claim(backend) {
        Claim::Take(piece) => Some(piece),
        Claim::Wait | Claim::Over => None,
    }
}

/// Times claims beside atomic additions.
///
/// # Errors
/// [`BenchError::Wrong`] if claims get nothing, which the job is too large for.
pub fn claims() -> Result<ClaimCosts> {
    let mut samples: [Vec<f64>; 5] = Default::default();
    let counter = AtomicUsize::new(0);
    for _ in 0..REPEATS {
        let (mut ledger, claims) = open()?;
        samples[0].push(timed(|| {
            black_box(counter.fetch_add(black_box(1200), Ordering::Relaxed));
        }));
        samples[1].push(timed(|| {
            black_box(take(&claims, 0));
        }));
        let mut serial = 0;
        let mut lost = 0;
        samples[2].push(timed(|| {
            serial += 1;
            let token = Token { epoch: 1, lane: 0, serial };
            let at = Duration::from_millis(10 * serial);
            let Some(piece) = take(&claims, 0) else { return lost += 1 };
            let items: Range<usize> = piece.items.clone();
            ledger.claimed(token, piece, at);
            black_box(ledger.completed(token, items, &[], None, at + Duration::from_millis(9)));
        }));
        if lost > 0 {
            return Err(BenchError::Wrong(format!("{lost} claims of the bench got nothing")));
        }
        samples[3].push(timed_twice(|_| {
            black_box(counter.fetch_add(black_box(1200), Ordering::Relaxed));
        }));
        samples[4].push(timed_twice(|thread| {
            black_box(take(&claims, thread));
        }));
    }
    let [addition, claim, cycle, addition_two, claim_two] =
        samples.map(|samples| median(&samples).unwrap_or(f64::NAN));
    Ok(ClaimCosts {
        claim_ns: claim,
        atomic_addition_ns: addition,
        claim_lease_and_acceptance_ns: cycle,
        claim_two_threads_ns: claim_two,
        atomic_addition_two_threads_ns: addition_two,
        bar_ns: BAR,
    })
}

/// Nanoseconds of one of many calls.
fn timed(mut work: impl FnMut()) -> f64 {
    let begun = Instant::now();
    for _ in 0..CLAIMS {
        work();
    }
    begun.elapsed().as_secs_f64() * 1e9 / CLAIMS as f64
}

/// The same on two threads at once, the mean of both.
fn timed_twice(work: impl Fn(usize) + Sync) -> f64 {
    let ready = std::sync::Barrier::new(2);
    let one = |thread: usize| {
        ready.wait();
        timed(|| work(thread))
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| one(1));
        let mine = one(0);
        other.join().map_or(mine, |other| (mine + other) / 2.0)
    })
}
