// SPDX-License-Identifier: Apache-2.0
//! The KV cache of layers with a window, which has blocks for what windows see and for the rows of a step alone.
//!
//! All layers with a window have one class of blocks, those without have another, and a sequence has a block table for
//! each. Both tables have an entry for every block of the sequence, so that a position finds its block in the same way in
//! every layer; entries of blocks that no window sees any more are never read.

use spanker_model::{KV_BLOCK, KvShape, Model};

use super::{Part, Space};

/// What there is of the KV cache in layers with a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowCache {
    /// Positions that a row sees at most, its own included.
    pub window: u64,
    /// Blocks of each of these layers.
    pub blocks: u64,
}

impl WindowCache {
    /// Of a model with so much space; nothing where all layers keep all positions, because none has a window, contexts
    /// are no longer than it, or it would take as many blocks.
    #[must_use]
    pub fn of(model: &Model, space: Space) -> Option<WindowCache> {
        let window = model.layers.iter().filter_map(|layer| layer.window).max()?;
        if window >= space.context {
            return None;
        }
        let Space { batch, sequences, blocks: all, .. } = space;
        // A window for each sequence, or for each context that the blocks hold if these are more: what is known of the
        // beginnings of others would be lost otherwise. And the rows of a step, whichever sequence has them.
        let contexts = all.div_ceil(KvShape::blocks_for(space.context).max(1));
        let each = touched(window) + 1;
        let windows = sequences.max(contexts).saturating_mul(each);
        let shared = if sequences > 1 { all / 8 } else { 0 };
        let blocks = windows.max(shared).saturating_add(touched(batch.max(sequences)));
        (blocks < all).then_some(WindowCache { window, blocks })
    }

    /// The blocks of a sequence that rows from one position up to another see or write.
    #[must_use]
    pub fn seen(&self, first: u64, end: u64) -> std::ops::Range<u64> {
        let first = (first + 1).saturating_sub(self.window);
        first / KV_BLOCK..KvShape::blocks_for(end)
    }

    /// The block in these layers of a sequence's block `at`.
    #[must_use]
    pub fn block(&self, part: &Part<'_>, at: u64) -> u32 {
        block_of(part, at, self.blocks)
    }

    /// Whether a sequence that is alone, and of which positions up to `end` were written, can go on at an earlier
    /// position: what its rows see from there on was not written over.
    #[must_use]
    pub fn can_go_back(&self, end: u64, to: u64) -> bool {
        let kept = KvShape::blocks_for(end).saturating_sub(self.blocks);
        self.seen(to, to + 1).start >= kept
    }

    /// Blocks of a layer: of those that it has if it has a window, and of all if not.
    pub(crate) fn of_layer(of: Option<WindowCache>, window: Option<u64>, space: Space) -> u64 {
        match of {
            Some(cache) if window.is_some() => cache.blocks,
            _ => space.blocks,
        }
    }
}

/// The block of a sequence's block `at` in layers with so many blocks of their own.
pub(super) fn block_of(part: &Part<'_>, at: u64, blocks: u64) -> u32 {
    // A sequence that is alone goes round.
    let own = part.windowed.get(at as usize).copied();
    own.unwrap_or_else(|| (at % blocks.max(1)) as u32)
}

/// Blocks that so many positions in a row lie in at most.
fn touched(positions: u64) -> u64 {
    (positions.max(1) - 1).div_ceil(KV_BLOCK) + 1
}

#[cfg(test)]
mod tests {
    use super::super::{Audit, Want};
    use super::*;

    #[test]
    fn positions_lie_in_as_many_blocks_as_the_worst_place_takes() {
        for positions in 1..400u64 {
            let blocks = |first: u64| (first + positions - 1) / KV_BLOCK - first / KV_BLOCK + 1;
            assert_eq!((0..KV_BLOCK).map(blocks).max(), Some(touched(positions)), "{positions}");
        }
    }

    fn windowed(window: u64) -> Model {
        let mut model =
            spanker_model::builtin("smollm2-135m", spanker_model::Quant::Q4_0).expect("a model");
        model.layers.iter_mut().step_by(2).for_each(|layer| layer.window = Some(window));
        model
    }

    #[test]
    fn a_lone_sequence_never_writes_over_what_its_rows_see() {
        for (window, batch) in [(1, 1), (64, 1), (100, 7), (512, 512), (65, 300)] {
            let space = Space::of(8192, batch, 1, Audit::NONE);
            let cache = WindowCache::of(&windowed(window), space).expect("a window");
            for past in 0..space.context - batch {
                let seen = cache.seen(past, past + batch);
                assert!(seen.end - seen.start <= cache.blocks, "{window} {batch} {past}");
                assert!(cache.can_go_back(past + batch, past));
            }
            let far = cache.blocks * KV_BLOCK + 1;
            assert!(!cache.can_go_back(far, 0), "block 0 is written over");
            assert!(cache.can_go_back(far - 1, 0), "there were blocks for all");
        }
    }

    #[test]
    fn all_positions_are_kept_where_windows_save_nothing() {
        let of = |window, context| {
            WindowCache::of(&windowed(window), Space::of(context, 64, 1, Audit::NONE))
        };
        assert_eq!(of(512, 512), None);
        assert_eq!(of(512, 700), None, "a window and a step take all eleven blocks");
        let cache = of(512, 4096).expect("a window");
        assert_eq!(cache.blocks, 10 + 2);
        let part = Part::new(&[1], 0, &[], Want::Nothing);
        assert_eq!(cache.block(&part, 13), 1);
        assert_eq!(cache.block(&Part { windowed: &[7, 9], ..part }, 1), 9);
    }
}
