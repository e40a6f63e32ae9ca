// SPDX-License-Identifier: Apache-2.0
//! What an all-reduce of one known algorithm costs, and what a blend of two costs.
//!
//! Only the formulas are here; [`choose`](super::choose) finds their parameters.

use crate::fit::solve::dot;

const KIB: f64 = 1024.0;
/// The size at which a sample counts half for the small form, and the unit of its third column.
pub(super) const SMALL: f64 = 128.0 * KIB;
/// The size at which a sample counts half for the large form, and the unit of an algorithm's third
/// column.
pub(super) const LARGE: f64 = 1024.0 * KIB;
/// The size at which both forms have the same say.
const BLEND: f64 = 512.0 * KIB;

/// The algorithms whose formulas may hold for all sizes.
///
/// Others have the formulas of these: two-shot is a ring whose hops cost nothing, a tree is recursive
/// doubling at half the rate, and a star is one-shot at half the rate. Halving-doubling is a ring to
/// all who look at powers of two up to 4, and is not told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    Ring,
    RecursiveDoubling,
    OneShot,
}

impl Algorithm {
    /// All of them; of those that fit equally well, the first is preferred.
    pub(super) const ALL: [Algorithm; 3] =
        [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::OneShot];

    pub(super) fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::OneShot => "one-shot",
        }
    }

    /// The formula in the words of a model's file.
    pub(super) fn formula(self) -> &'static str {
        match self {
            Algorithm::Ring => {
                "base_us + 2 (ranks - 1) per_hop_us + 2 (ranks - 1) / ranks per_byte_us bytes"
            }
            Algorithm::RecursiveDoubling => {
                "base_us + ceil(log2 ranks) (per_hop_us + per_byte_us bytes)"
            }
            Algorithm::OneShot => "base_us + (ranks - 1) (per_hop_us + per_byte_us bytes)",
        }
    }

    /// What is paid for each hop, for people.
    pub(super) fn hops(self) -> &'static str {
        match self {
            Algorithm::Ring => "for each of 2 (ranks - 1) hops",
            Algorithm::RecursiveDoubling => "for each of ceil(log2 ranks) exchanges",
            Algorithm::OneShot => "for each of ranks - 1 messages",
        }
    }

    /// How many hops a call takes, and how many times its bytes a rank sends.
    fn hops_and_loads(self, ranks: f64) -> (f64, f64) {
        match self {
            Algorithm::Ring => (2.0 * (ranks - 1.0), 2.0 * (ranks - 1.0) / ranks),
            Algorithm::RecursiveDoubling => (ranks.log2().ceil(), ranks.log2().ceil()),
            Algorithm::OneShot => (ranks - 1.0, ranks - 1.0),
        }
    }

    pub(super) fn columns(self, ranks: f64, bytes: f64) -> [f64; 3] {
        let (hops, loads) = self.hops_and_loads(ranks);
        [1.0, hops, loads * bytes / LARGE]
    }
}

/// An algorithm with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Known {
    pub(super) algorithm: Algorithm,
    pub(super) base_us: f64,
    pub(super) per_hop_us: f64,
    pub(super) per_byte_us: f64,
}

impl Known {
    pub(super) fn new(algorithm: Algorithm, [base_us, per_hop_us, per_unit]: [f64; 3]) -> Known {
        Known { algorithm, base_us, per_hop_us, per_byte_us: per_unit / LARGE }
    }

    pub(super) fn time(&self, ranks: f64, bytes: f64) -> f64 {
        let coefficients = [self.base_us, self.per_hop_us, self.per_byte_us * LARGE];
        dot(&self.algorithm.columns(ranks, bytes), &coefficients)
    }

    /// How many parameters are not zero.
    fn parameters(&self) -> usize {
        counted([self.base_us, self.per_hop_us, self.per_byte_us])
    }
}

/// The form for small messages where bytes meet on shared edges.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Small {
    pub(super) base_us: f64,
    pub(super) per_rank_us: f64,
    pub(super) per_byte_us: f64,
    pub(super) exponent: f64,
}

impl Small {
    pub(super) fn new([base_us, per_rank_us, per_unit]: [f64; 3], exponent: f64) -> Small {
        Small { base_us, per_rank_us, per_byte_us: per_unit / SMALL, exponent }
    }

    pub(super) fn columns(ranks: f64, bytes: f64, exponent: f64) -> [f64; 3] {
        [1.0, ranks - 1.0, ranks.powf(exponent) * bytes / SMALL]
    }

    fn time(&self, ranks: f64, bytes: f64) -> f64 {
        let coefficients = [self.base_us, self.per_rank_us, self.per_byte_us * SMALL];
        dot(&Small::columns(ranks, bytes, self.exponent), &coefficients)
    }

    fn parameters(&self) -> usize {
        counted([self.base_us, self.per_rank_us, self.per_byte_us])
    }
}

fn counted(coefficients: [f64; 3]) -> usize {
    coefficients.iter().filter(|c| **c > 0.0).count()
}

/// What an all-reduce costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Form {
    /// A small form that gives way to a ring, if large messages were sampled.
    Blended { small: Small, large: Option<Known> },
    /// One algorithm for all sizes.
    Whole(Known),
}

/// The name of a blended form in files.
pub(super) const BLENDED: &str = "blended";

impl Form {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Form::Blended { .. } => BLENDED,
            Form::Whole(known) => known.algorithm.name(),
        }
    }

    pub(super) fn time(&self, ranks: f64, bytes: f64) -> f64 {
        match self {
            Form::Whole(known) => known.time(ranks, bytes),
            Form::Blended { small, large: None } => small.time(ranks, bytes),
            Form::Blended { small, large: Some(large) } => {
                let share = large_share(bytes);
                // A form may predict nothing at all only if a file says so.
                let log = |time: f64| time.max(f64::MIN_POSITIVE).ln();
                let (small, large) = (small.time(ranks, bytes), large.time(ranks, bytes));
                ((1.0 - share) * log(small) + share * log(large)).exp()
            }
        }
    }

    /// How many parameters small and large messages have.
    pub(super) fn parameters(&self) -> (usize, usize) {
        match self {
            Form::Whole(known) => (known.parameters(), known.parameters()),
            Form::Blended { small, large } => {
                (small.parameters(), large.map_or(0, |large| large.parameters()))
            }
        }
    }

    pub(super) fn contended(&self) -> bool {
        matches!(self, Form::Blended { small, .. } if small.exponent > 1.0)
    }
}

pub(super) fn small_weight(bytes: f64) -> f64 {
    1.0 / (1.0 + (bytes / SMALL).powi(2))
}

pub(super) fn large_weight(bytes: f64) -> f64 {
    1.0 / (1.0 + (LARGE / bytes).powi(2))
}

/// The say of the large form.
pub(super) fn large_share(bytes: f64) -> f64 {
    1.0 / (1.0 + (BLEND / bytes).powi(2))
}
