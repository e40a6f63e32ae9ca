// SPDX-License-Identifier: Apache-2.0
//! What it costs to take work, beside the one atomic addition that it cannot do without.

use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use spanker_steal::{Capabilities, Claim, Claims, Job, Ledger, Member, Piece, Token};

use crate::error::{BenchError, Result};
use crate::turns::{Subject, Turn, take_turns, timed};

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
    let ((_, claims), counter) = (open()?, AtomicUsize::new(0));
    let add = |_: usize| {
        black_box(counter.fetch_add(black_box(1200), Ordering::Relaxed));
    };
    let claim = |backend: usize| {
        black_box(take(&claims, backend));
    };
    let mut subjects: [Box<Subject<'_>>; 5] = [
        Box::new(|calls| Ok(on_one_thread(calls, 0, &add))),
        Box::new(|calls| Ok(on_one_thread(calls, 0, &claim))),
        Box::new(cycles),
        Box::new(|calls| Ok(on_two_threads(calls, &add))),
        Box::new(|calls| Ok(on_two_threads(calls, &claim))),
    ];
    let mut turns: Vec<Turn<'_, '_>> =
        subjects.iter_mut().map(|subject| Turn::new(subject, CLAIMS)).collect();
    let medians = take_turns(REPEATS, &mut turns)?;
    let ns = |at: usize| medians[at] * 1e9;
    Ok(ClaimCosts {
        claim_ns: ns(1),
        atomic_addition_ns: ns(0),
        claim_lease_and_acceptance_ns: ns(2),
        claim_two_threads_ns: ns(4),
        atomic_addition_two_threads_ns: ns(3),
        bar_ns: BAR,
    })
}

/// How long claims take with their leases and acceptances, in a job of their own.
fn cycles(calls: usize) -> Result<Duration> {
    let ((mut ledger, claims), mut serial) = (open()?, 0);
    timed(calls, || {
        serial += 1;
        let token = Token { epoch: 1, lane: 0, serial };
        let at = Duration::from_millis(10 * serial);
        let Some(piece) = take(&claims, 0) else {
            return Err(BenchError::Wrong(format!("claim {serial} of the bench got nothing")));
        };
        let items: Range<usize> = piece.items.clone();
        ledger.claimed(token, piece, at);
        black_box(ledger.completed(token, items, &[], None, at + Duration::from_millis(9)));
        Ok(())
    })
}

fn on_one_thread(calls: usize, thread: usize, work: &impl Fn(usize)) -> Duration {
    let begun = Instant::now();
    (0..calls).for_each(|_| work(thread));
    begun.elapsed()
}

/// How long calls take on two threads at once, the mean of both.
fn on_two_threads(calls: usize, work: &(impl Fn(usize) + Sync)) -> Duration {
    let ready = std::sync::Barrier::new(2);
    let one = |thread: usize| {
        ready.wait();
        on_one_thread(calls, thread, work)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| one(1));
        let mine = one(0);
        other.join().map_or(mine, |other| (mine + other) / 2)
    })
}
