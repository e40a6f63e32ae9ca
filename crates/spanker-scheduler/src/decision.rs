// SPDX-License-Identifier: Apache-2.0
//! The original split decision, kept as it was for those who call it.
//!
//! With `w = m * k * bytes_per_element`, `a = m * n * bytes_per_element` and `N` cards:
//!
//! ```text
//! tensor-parallel = w / (N * ddr) + a / link
//! model-parallel  = w / ddr + a / (N * link)
//! ```
//!
//! # This formula is wrong as physics
//!
//! Do not size a system with it. It reduces to "tensor-parallel if and only if `k >= n * ddr / link`":
//! `m`, `N` and the element size cancel, so it looks at neither the batch nor the number of cards.
//!
//! * A product of activations (m x k) by weights (k x n) reads k*n weights, not m*k. For the
//!   up-projection of TinyLlama at decode (1, 5632, 2048) that is 5,632 times as many elements, and as
//!   4-bit blocks still 1,584 times as many bytes.
//! * A matrix that is split by columns needs no all-reduce, and the hand-off of a layer split is not
//!   divided by the number of cards.
//! * Latency, compute, memory capacity and the shape of the link graph do not appear.
//!
//! On the reference card the memory read dominates decoding, so splitting each matrix over the cards
//! wins in cases where the formula says the opposite. Ask the planner instead: [`crate::planner::choose`],
//! or `spanker plan`. The repository's `docs/decision.md` has what this formula says beside what is right.
//!
//! ```
//! use spanker_scheduler::{
//!     INTERCARD_BW_BYTES_PER_SEC, LOCAL_DDR_BW_BYTES_PER_SEC, Strategy, TileShape, pick_strategy,
//! };
//! let tile = TileShape { m: 4, n: 4, k: 1 << 20, bytes_per_element: 4 };
//! let (ddr, link) = (LOCAL_DDR_BW_BYTES_PER_SEC, INTERCARD_BW_BYTES_PER_SEC);
//! assert_eq!(pick_strategy(&tile, 4, ddr, link), Strategy::TensorParallel);
//! ```

/// A way to split a model over cards.
///
/// The enum grows, so a `match` in another crate needs a `_` arm:
///
/// ```compile_fail,E0004
/// use spanker_scheduler::Strategy;
/// fn name(strategy: Strategy) -> &'static str {
///     match strategy {
///         Strategy::TensorParallel => "tensor",
///         Strategy::ModelParallel => "model",
///     }
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// Each matrix is split over all cards.
    TensorParallel,
    /// Each card has whole layers.
    ModelParallel,
}

/// The shape of one matrix product, in the terms of [`pick_strategy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Rows of the output.
    pub m: u64,
    /// Columns of the output.
    pub n: u64,
    /// The dimension that is summed over.
    pub k: u64,
    /// Bytes of one element.
    pub bytes_per_element: u64,
}

impl TileShape {
    /// `m * k * bytes_per_element`, or the largest number if that is more. What this calls weights is
    /// the activations' side of the product: see the [module's documentation](self).
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.m.saturating_mul(self.k).saturating_mul(self.bytes_per_element)
    }

    /// `m * n * bytes_per_element`, or the largest number if that is more.
    #[must_use]
    pub fn activation_bytes(&self) -> u64 {
        self.m.saturating_mul(self.n).saturating_mul(self.bytes_per_element)
    }
}

/// The cheaper strategy by the formula of the [module's documentation](self), which is **wrong as
/// physics** and kept for compatibility.
///
/// A tie is tensor-parallel, and so is a single card; no cards count as one; a bandwidth of zero costs
/// infinity. Nothing panics.
#[must_use]
pub fn pick_strategy(
    tile: &TileShape,
    n_sails: u64,
    local_ddr_bw: u64,
    intercard_bw: u64,
) -> Strategy {
    let seconds = |bytes: u64, rate: u64| match rate {
        0 => f64::INFINITY,
        _ => bytes as f64 / rate as f64,
    };
    let cards = n_sails.max(1);
    let read = seconds(tile.weight_bytes(), local_ddr_bw);
    let moved = seconds(tile.activation_bytes(), intercard_bw);
    let tensor = read / cards as f64 + moved;
    let model = read + moved / cards as f64;
    if cards == 1 || tensor <= model { Strategy::TensorParallel } else { Strategy::ModelParallel }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DDR: u64 = spanker_topology::LOCAL_DDR_BW_BYTES_PER_SEC;
    const LINK: u64 = spanker_topology::INTERCARD_BW_BYTES_PER_SEC;

    fn tile(m: u64, n: u64, k: u64, bytes_per_element: u64) -> TileShape {
        TileShape { m, n, k, bytes_per_element }
    }

    #[test]
    fn documented_tiles_get_their_documented_answers() {
        let pick = |tile| pick_strategy(&tile, 4, DDR, LINK);
        assert_eq!(pick(tile(1, 5632, 2048, 2)), Strategy::ModelParallel);
        assert_eq!(pick(tile(4, 4, 1 << 20, 4)), Strategy::TensorParallel);
        assert_eq!(pick(tile(4096, 4096, 4, 4)), Strategy::ModelParallel);
    }

    #[test]
    fn one_card_and_no_card_are_tensor_parallel() {
        for cards in [0, 1] {
            let tile = tile(4096, 4096, 4, 4);
            assert_eq!(pick_strategy(&tile, cards, DDR, LINK), Strategy::TensorParallel);
        }
    }

    #[test]
    fn a_tie_is_tensor_parallel() {
        // k = n * ddr / link is where both cost the same.
        assert_eq!(pick_strategy(&tile(1, 256, 1024, 1), 4, 4, 1), Strategy::TensorParallel);
        assert_eq!(pick_strategy(&tile(0, 0, 0, 0), 4, DDR, LINK), Strategy::TensorParallel);
    }

    #[test]
    fn zero_bandwidths_and_overflowing_shapes_do_not_panic() {
        let huge = tile(u64::MAX, u64::MAX, u64::MAX, 4);
        assert_eq!(huge.weight_bytes(), u64::MAX);
        assert_eq!(huge.activation_bytes(), u64::MAX);
        for (ddr, link) in [(0, 0), (0, LINK), (DDR, 0), (DDR, LINK)] {
            for cards in [0, 1, 2, u64::MAX] {
                let _ = pick_strategy(&huge, cards, ddr, link);
            }
        }
        let small = tile(1, 1, 1, 1);
        assert_eq!(pick_strategy(&small, 4, 0, 0), Strategy::TensorParallel);
    }

    #[test]
    fn the_answer_never_depends_on_batch_cards_or_element_size() {
        for (n, k) in [(1024, 1024), (256, 1024), (255, 1024), (5632, 2048), (1, 1 << 20)] {
            let answer = pick_strategy(&tile(1, n, k, 1), 2, DDR, LINK);
            for cards in [2, 3, 8, 64] {
                for m in [1, 7, 512] {
                    assert_eq!(pick_strategy(&tile(m, n, k, 4), cards, DDR, LINK), answer);
                }
            }
        }
    }
}
