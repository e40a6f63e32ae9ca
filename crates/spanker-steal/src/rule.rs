// SPDX-License-Identifier: Apache-2.0
//! How large a chunk is: as many items as take a backend about as long as any other backend's chunk takes that one.
//! Arithmetic only.
//!
//! The time of a chunk is a part of what is left: `remaining / (PARTS * sum of rates)`, so that chunks shrink
//! towards the end and nobody is left with a large one. With a launch cost of `h` and an ideal time of `T`, chunks of
//! `sqrt(h * T)` make what launches cost and what is lost at the end about equal, which is where the bound of
//! [`efficiency_bound`] comes from. So it is at most `cap`, that a backend that slows down holds little, or `sqrt(h * T)`
//! if that is longer; and at least a half of `sqrt(h * T)`, which only the last chunks come down to.

/// Parts of what is left that a chunk of every backend would make.
const PARTS: f64 = 3.0;

/// The part of `sqrt(h * T)` that the shortest chunk takes.
const FLOOR: f64 = 0.5;

/// A task may be so many times larger than the largest that its backend has completed.
const GROWTH: usize = 8;

/// Launches cost this much at least, in seconds: a claim and a message.
pub const LEAST_LAUNCH: f64 = 1e-6;

/// The seconds of the next chunk for each item that is left, where all backends do `rates` items a second.
#[must_use]
pub fn part_seconds(rates: f64) -> f64 {
    if rates > 0.0 { 1.0 / (PARTS * rates) } else { f64::INFINITY }
}

/// The longest time of a chunk whose shortest is `floor`.
#[must_use]
pub fn cap_seconds(cap: f64, floor: f64) -> f64 {
    cap.max(floor / FLOOR)
}

/// The shortest time of a chunk that is worth its launch, for a job that ideally takes `ideal` seconds.
#[must_use]
pub fn floor_seconds(launch: f64, ideal: f64) -> f64 {
    FLOOR * (launch * ideal).max(0.0).sqrt()
}

/// What is known of whoever takes the next chunk. Rates are in units of the job a second.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Of one task; above zero.
    pub rate: f64,
    /// Seconds that a task costs beside its units.
    pub launch: f64,
    /// Seconds of the shortest chunk, and of the longest.
    pub floor: f64,
    pub cap: f64,
}

/// How many units the next chunk has where `part` seconds of work would be its share and `left` units are to be had;
/// none where the others would be through with everything before this one has done one unit. All do `rates` units a
/// second. Somebody must not decline, and those that are half as fast as the `fastest` do not.
#[must_use]
pub fn units(pace: &Pace, part: f64, left: f64, rates: f64, fastest: f64) -> Option<usize> {
    let Pace { rate, launch, floor, cap } = *pace;
    let units = (rate * part.min(cap).max(floor) + 0.5) as usize;
    if units == 0 {
        let alone = 1.0 / rate + launch;
        let too_slow = alone * (rates - rate) > left;
        return (!too_slow || rate >= 0.5 * fastest).then_some(1);
    }
    Some(units)
}

/// The most items of a task whose backend has completed `largest` at once, if any: eight times as many. One that has
/// completed nothing begins with one unit, unless it said how fast it is.
#[must_use]
pub fn most(largest: usize, rate_known: bool, unit: usize) -> usize {
    match largest {
        0 if rate_known => usize::MAX,
        0 => unit,
        largest => largest.saturating_mul(GROWTH),
    }
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
