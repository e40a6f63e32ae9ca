// SPDX-License-Identifier: Apache-2.0
//! What a machine captures of a step for an audit: which bytes, and when. How it gets hold of them is its own.

use std::ops::Range;

use spanker_plan::Place;

/// When bytes are what is asked for: before the operators, after them, or at either time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The operators read them and leave them as they are.
    Read,
    /// The operators read them and then write there: they are captured before.
    Overwritten,
    /// The operators write them: they are captured after.
    Written,
}

/// Pieces of memory at equal distances, by the places that a program names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Where the first piece begins.
    pub from: Place,
    /// Pieces.
    pub rows: u64,
    /// Bytes of a piece.
    pub length: u64,
    /// Bytes from a piece to the next.
    pub stride: u64,
    /// When they are captured.
    pub role: Role,
    /// Where the pieces go, end to end: bytes from the start of what is captured of the member.
    pub at: u64,
}

impl Region {
    /// What captures begin at multiples of.
    pub const ALIGNMENT: u64 = 16;

    /// Bytes of all pieces.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rows * self.length
    }

    /// Its bytes among those that were captured of a member.
    #[must_use]
    pub fn of<'b>(&self, captured: &'b [u8]) -> &'b [u8] {
        let start = self.at as usize;
        captured.get(start..start + self.bytes() as usize).unwrap_or(&[])
    }
}

/// What is captured of some operators of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    /// The card's place in the plan.
    pub member: usize,
    /// A run of operators that the card does in one go, or one exchange; or none behind the last one, for what is there
    /// in the end.
    pub ops: Range<usize>,
    /// What of them.
    pub regions: Vec<Region>,
}

/// What is captured in a step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Captures {
    /// What.
    pub list: Vec<Capture>,
    /// Where each member's captures go in its memory, and how many bytes these are. Empty if nothing is captured.
    pub into: Vec<(Place, u64)>,
}
