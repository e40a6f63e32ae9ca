// SPDX-License-Identifier: Apache-2.0
//! What a card's program is made of: work on its own memory, and exchanges with other cards.

use std::ops::Range;
use std::sync::Arc;

use spanker_plan::Activity;
use spanker_runtime::{Place, Work};

/// One line of a card's program. Seats are cards in the order of their stages and ranks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// Work on the card's own memory.
    Work(Work),
    /// Every rank of the card's group has a part of each of `rows` rows; afterwards each has all of them.
    Gather {
        /// The bytes of a row that each rank has.
        parts: Arc<[Range<u64>]>,
        /// Rows.
        rows: u64,
        /// This rank's part of every row, end to end.
        from: Place,
        /// Whole rows.
        into: Place,
    },
    /// Adds the f32s of all ranks of the group, in the order of their ranks.
    Sum {
        /// Where they are, and where the sum will be.
        data: Place,
        /// How many.
        elements: u64,
    },
    /// One rank of the group gives bytes to all others.
    Spread {
        /// The rank that has them.
        root: usize,
        /// Where they are and will be.
        data: Place,
        /// How many.
        length: u64,
    },
    /// Gives bytes to a seat of the next stage.
    Hand {
        /// The seat.
        to: usize,
        /// Where they are.
        from: Place,
        /// How many.
        length: u64,
    },
    /// Takes bytes from a seat of the stage before.
    Take {
        /// The seat.
        from: usize,
        /// Where they go.
        into: Place,
        /// How many.
        length: u64,
    },
    /// What follows belongs to this part of a step.
    Mark {
        /// The part.
        activity: Activity,
        /// The layer.
        layer: u32,
    },
}
