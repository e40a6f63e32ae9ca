// SPDX-License-Identifier: Apache-2.0
//! How large a chunk is: as many items as take a backend about as long as any other backend's chunk takes that one.
//! Arithmetic only.
//!
//! The time of a chunk, `tau`, is a part of what is left: `remaining / (PARTS * sum of rates)`, so that chunks
//! shrink towards the end and nobody is left with a large one. It is at most `cap`, so that a backend that
//! slows down holds little; and at least `floor`, so that launches stay a small part of it. With a launch cost of
//! `h` and an ideal time of `T`, a floor of `sqrt(h * T)` makes what launches cost and what is lost at
//! the end about equal, which is where the bound of [`efficiency_bound`] comes from.

/// Parts of what is left that a chunk of every backend would make.
const PARTS: f64 = 3.0;

/// The best part of `sqrt(h * T)` for the shortest chunk: most chunks are longer, so launches cost less than what
/// the last chunk does.
const FLOOR: f64 = 0.5;

/// The time of the next chunk in seconds.
#[must_use]
pub fn chunk_seconds(remaining: f64, rates: f64, floor: f64, cap: f64) -> f64 {
    (remaining / (PARTS * rates)).min(cap).max(floor)
}

/// The shortest time of a chunk that is worth its launch, for a job that ideally takes `ideal` seconds.
#[must_use]
pub fn floor_seconds(launch: f64, ideal: f64) -> f64 {
    FLOOR * (launch * ideal).max(0.0).sqrt()
}

/// The part of the ideal speed that is reached at least, where items cost the same, rates are steady and known,
/// and items are small: `1 / (1 + 2 * sqrt(launch / ideal))`, with both in seconds.
///
/// # Examples
///
/// ```
/// // A second of work, 50 us a launch.
/// assert!(spanker_steal::efficiency_bound(50e-6, 1.0) > 0.986);
/// ```
#[must_use]
pub fn efficiency_bound(launch: f64, ideal: f64) -> f64 {
    1.0 / (1.0 + 2.0 * (launch / ideal).sqrt())
}
