// SPDX-License-Identifier: Apache-2.0
//! The tables of a step: which tokens, where each row lies in its sequence, which rows something is asked for, and the
//! block tables of sequences. Programs name places in them and depend on nothing else of a step but its [`Shape`].

use super::{Part, Space, Step, WindowCache};
use crate::work::ROW_BYTES;
use spanker_model::KvShape;

/// Bytes of a token's number, of an output's row and of a block's number.
const WORD: u64 = 4;

/// What steps have in common that one program is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows.
    pub rows: u64,
    /// Rows that something is asked for.
    pub outputs: u64,
    /// Which these are.
    pub which: Outputs,
    /// Candidates that are asked for after each.
    pub candidates: Option<u32>,
    /// Where results go: see [`Step::turn`].
    pub turn: u64,
}

/// Which rows something is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outputs {
    /// The last ones.
    Last,
    /// Any: they are listed.
    Listed,
}

impl Shape {
    /// The shape of a step.
    #[must_use]
    pub fn of(step: &Step<'_>) -> Shape {
        let (rows, outputs) = (step.rows(), step.outputs());
        // The rows in front of the last ones must all be of parts that ask for nothing, or of one part.
        let last = (rows - outputs..rows).eq(step.output_rows());
        let which = if last { Outputs::Last } else { Outputs::Listed };
        Shape { rows, outputs, which, candidates: step.candidates(), turn: step.turn }
    }
}

/// Where the tables of a step begin, in bytes from the start of their buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTables {
    /// A position and the first entry of a block table for each row.
    pub rows: u64,
    /// The same for layers with a window, where these have blocks of their own.
    pub window_rows: u64,
    /// The token of each row.
    pub ids: u64,
    /// The row of each output.
    pub outputs: u64,
    /// Block tables, up to the end of the buffer.
    pub tables: u64,
}

impl StepTables {
    /// For so many rows and outputs.
    #[must_use]
    pub fn new(rows: u64, outputs: u64, windows: Option<WindowCache>) -> StepTables {
        let each = rows * ROW_BYTES;
        let window_rows = if windows.is_some() { each } else { 0 };
        let ids = window_rows + each;
        let outputs_at = ids + rows * WORD;
        let tables = outputs_at + outputs * WORD;
        StepTables { rows: 0, window_rows, ids, outputs: outputs_at, tables }
    }

    /// For a step.
    #[must_use]
    pub fn of(step: &Step<'_>, windows: Option<WindowCache>) -> StepTables {
        StepTables::new(step.rows(), step.outputs(), windows)
    }

    /// Bytes of the tables of a step.
    #[must_use]
    pub fn length(step: &Step<'_>, windows: Option<WindowCache>) -> u64 {
        let entries = entries(step) * if windows.is_some() { 2 } else { 1 };
        StepTables::of(step, windows).tables + entries * WORD
    }

    /// Bytes of the largest tables that there is room for.
    pub(crate) fn most(space: Space, windows: Option<WindowCache>) -> u64 {
        let rows = space.batch.max(space.sequences);
        let entries = space.sequences.saturating_mul(KvShape::blocks_for(space.context));
        let entries = entries.saturating_mul(if windows.is_some() { 2 } else { 1 });
        let tables = StepTables::new(rows, space.outputs, windows).tables;
        tables.saturating_add(entries.saturating_mul(WORD))
    }

    /// Entries that block tables have at most in a buffer for so much.
    pub(crate) fn entries(self, space: Space, windows: Option<WindowCache>) -> u64 {
        // Steps are priced that are larger than any that is run.
        Self::most(space, windows).saturating_sub(self.tables) / WORD
    }

    /// The tables of a step as bytes.
    #[must_use]
    pub fn bytes(self, step: &Step<'_>, windows: Option<WindowCache>) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::length(step, windows) as usize);
        let mut put = |word: u32| out.extend(word.to_le_bytes());
        // Tables of layers with a window lie behind the others.
        let behind = windows.map(|_| entries(step) as u32);
        for first in std::iter::once(0).chain(behind) {
            let mut table = first;
            for part in step.parts {
                for row in 0..part.tokens.len() as u64 {
                    put((part.past + row) as u32);
                    put(table);
                }
                table += blocks(part).len() as u32;
            }
        }
        step.parts.iter().flat_map(|part| part.tokens).for_each(|&token| put(token));
        step.output_rows().for_each(|row| put(row as u32));
        step.parts.iter().flat_map(blocks).for_each(|&block| put(block));
        for (cache, part) in
            windows.iter().flat_map(|cache| step.parts.iter().map(move |part| (cache, part)))
        {
            (0..blocks(part).len() as u64).for_each(|at| put(cache.block(part, at)));
        }
        out
    }
}

/// Entries of the block tables of a step.
fn entries(step: &Step<'_>) -> u64 {
    step.parts.iter().map(|part| blocks(part).len() as u64).sum()
}

/// The blocks of a sequence that its rows look at.
fn blocks<'p>(part: &'p Part<'_>) -> &'p [u32] {
    let seen = KvShape::blocks_for(part.past + part.tokens.len() as u64) as usize;
    &part.blocks[..seen.min(part.blocks.len())]
}

#[cfg(test)]
mod tests {
    use super::super::Want;
    use super::*;

    fn part<'a>(tokens: &'a [u32], past: u64, blocks: &'a [u32], outputs: u64) -> Part<'a> {
        let want = if outputs == 0 { Want::Nothing } else { Want::Best(3) };
        Part { outputs: outputs.max(1), ..Part::new(tokens, past, blocks, want) }
    }

    #[test]
    fn tables_say_where_rows_lie_and_what_is_asked_for() {
        let parts =
            [part(&[7, 8], 63, &[5, 2, 9], 0), part(&[4], 0, &[3], 1), part(&[6, 1], 1, &[4], 1)];
        let step = Step::of(&parts);
        let bytes = StepTables::of(&step, None).bytes(&step, None);
        let words: Vec<u32> =
            bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        let rows = [63, 0, 64, 0, 0, 2, 1, 3, 2, 3];
        assert_eq!(words[..10], rows);
        assert_eq!(words[10..15], [7, 8, 4, 6, 1]);
        assert_eq!(words[15..17], [2, 4]);
        assert_eq!(words[17..], [5, 2, 3, 4]);
        assert_eq!(bytes.len() as u64, StepTables::length(&step, None));
        assert_eq!(Shape::of(&step).which, Outputs::Listed);
    }

    #[test]
    fn layers_with_a_window_have_rows_and_tables_of_their_own_behind_the_others() {
        let own = |windowed, part: Part<'static>| Part { windowed, ..part };
        let parts =
            [own(&[1, 0], part(&[7, 8], 63, &[5, 2, 9], 0)), own(&[2], part(&[4], 0, &[3], 1))];
        let windows = Some(WindowCache { window: 8, blocks: 4 });
        let step = Step::of(&parts);
        let tables = StepTables::of(&step, windows);
        let bytes = tables.bytes(&step, windows);
        let words: Vec<u32> =
            bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        assert_eq!(words[..6], [63, 0, 64, 0, 0, 2]);
        assert_eq!(words[tables.window_rows as usize / 4..][..6], [63, 3, 64, 3, 0, 5]);
        assert_eq!(words[tables.tables as usize / 4..], [5, 2, 3, 1, 0, 2]);
        assert_eq!(bytes.len() as u64, StepTables::length(&step, windows));
        // Alone and without a table, a sequence goes round.
        let alone = [part(&[4], 64 * 9, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 1)];
        let step = Step::of(&alone);
        let bytes = StepTables::of(&step, windows).bytes(&step, windows);
        let last: Vec<u32> =
            bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        assert_eq!(last[last.len() - 10..], [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]);
    }

    #[test]
    fn outputs_of_the_last_rows_need_no_list() {
        let shape = |parts: &[Part<'_>]| Shape::of(&Step::of(parts)).which;
        let prompt = part(&[1, 2, 3], 0, &[0], 0);
        let (end, one) = (part(&[1, 2, 3], 3, &[0], 1), part(&[5], 9, &[1], 1));
        assert_eq!(shape(&[prompt, one, one]), Outputs::Last);
        assert_eq!(shape(&[prompt, end]), Outputs::Last);
        assert_eq!(shape(&[part(&[1, 2, 3], 3, &[0], 3)]), Outputs::Last);
        assert_eq!(shape(&[end, one]), Outputs::Last);
        assert_eq!(shape(&[one, end]), Outputs::Listed);
    }
}
