// SPDX-License-Identifier: Apache-2.0
//! Two links over a virtual wire that loses, repeats, reorders and breaks what it carries.
//!
//! Everything follows from a [`Case`], so a failure repeats. Payloads are computed from their number,
//! so the far end knows what has to come; a [`Flaw`] is anything lost, repeated, reordered or
//! changed, an acknowledgement of what was not delivered, or an end without a next event.
//! This module tests links; it is public so that tests, examples and tools can share it.

mod case;
mod end;
mod wire;

use std::fmt;

pub use case::{Case, Stall};
pub use wire::Wire;

use crate::{Counters, Fault, LinkState};
use end::End;
use wire::Medium;

/// Femtoseconds in a tick of the links, which is a nanosecond.
const TICK: u64 = 1_000_000;
/// Virtual time after which a case has come to nothing.
const LIMIT: u64 = 15_000 * 1_000_000_000 * TICK;

/// What a case came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// Frames that each end delivered to its caller.
    pub delivered: [u64; 2],
    /// Bytes of payload that each end delivered.
    pub bytes: [u64; 2],
    /// Seconds from the moment that both ends were up for the first time to the end.
    pub seconds: f64,
    /// The end that gave up, and why. Without one, everything was delivered and acknowledged.
    pub fault: Option<(usize, Fault)>,
    /// What the ends counted.
    pub counters: [Counters; 2],
    /// Lanes at the end.
    pub lanes: u8,
}

/// What went wrong, with the seed of the case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// The seed of the case.
    pub seed: u64,
    /// What went wrong, at which end and at what time.
    pub what: String,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: {}", self.seed, self.what)
    }
}

impl std::error::Error for Flaw {}

/// Runs a case until everything is delivered and acknowledged both ways, or an end gives up.
///
/// # Errors
///
/// When the links did not do what they promise.
///
/// ```
/// use spanker_link::sim::{Case, run};
/// let report = run(&Case::random(1, 200))?;
/// assert!(report.fault.is_some() || report.delivered == [200, 200]);
/// # Ok::<(), spanker_link::sim::Flaw>(())
/// ```
pub fn run(case: &Case) -> Result<Report, Flaw> {
    let mut ends = [0, 1].map(|side| End::new(case, side));
    let mut media = [0, 1].map(|side| Medium::new(case.wires[side], case.seed, side as u64));
    let mut now = 0;
    let mut began = None;
    let flaw = |what: String, side: usize, now: u64| Flaw {
        seed: case.seed,
        what: format!("end {side} at {} ns: {what}", now / TICK),
    };
    for end in &mut ends {
        end.link.train(0);
    }
    loop {
        for side in 0..2 {
            ends[side].pump(now, &mut media[side]).map_err(|what| flaw(what, side, now))?;
        }
        let up = ends.iter().all(|end| end.link.state() == LinkState::Up);
        if up && began.is_none() {
            began = Some(now);
        }
        let fault = (0..2).find_map(|side| ends[side].link.fault().map(|fault| (side, fault)));
        if fault.is_some() || (ends[0].is_done(&ends[1]) && ends[1].is_done(&ends[0])) {
            check_acknowledged(&ends).map_err(|(what, side)| flaw(what, side, now))?;
            let seconds = (now - began.unwrap_or(now)) as f64 * 1e-15;
            return Ok(report(&ends, seconds, fault));
        }
        let next = (0..2).filter_map(|side| ends[side].next(now, &media[side], &media[1 - side]));
        now = match next.min() {
            Some(next) if next <= LIMIT => next,
            _ => return Err(flaw("nothing more happens".to_owned(), 0, now)),
        };
        for side in 0..2 {
            while let Some(packet) = media[1 - side].arrived(now) {
                ends[side].hear(&packet, now).map_err(|what| flaw(what, side, now))?;
                media[1 - side].recycle(packet);
            }
            ends[side].tick(now).map_err(|what| flaw(what, side, now))?;
        }
    }
}

/// Everything that an end considers delivered was delivered.
fn check_acknowledged(ends: &[End; 2]) -> Result<(), (String, usize)> {
    for side in 0..2 {
        let (acked, delivered) = (ends[side].acked, ends[1 - side].delivered);
        if acked > delivered {
            return Err((format!("{acked} frames acknowledged, {delivered} delivered"), side));
        }
    }
    Ok(())
}

fn report(ends: &[End; 2], seconds: f64, fault: Option<(usize, Fault)>) -> Report {
    Report {
        delivered: [ends[0].delivered, ends[1].delivered],
        bytes: [ends[0].bytes, ends[1].bytes],
        seconds,
        fault,
        counters: [ends[0].link.counters(), ends[1].link.counters()],
        lanes: ends[0].link.lanes().min(ends[1].link.lanes()),
    }
}
