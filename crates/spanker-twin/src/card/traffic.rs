// SPDX-License-Identifier: Apache-2.0
//! What work moves and multiplies, as the planner counts it, and which buffers it uses. What that takes is
//! said by the costs.

use ggml_spanker::Quant;
use spanker_collective::DType;
use spanker_runtime::{Place, Work, abi};

use super::compute::shared_heads;

/// What an operator counts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Traffic {
    /// Bytes read and written in the card's memory.
    pub(crate) bytes: u64,
    /// Multiply-accumulates.
    pub(crate) macs: u64,
    /// Whether it takes the fixed time of an operator.
    pub(crate) starts: bool,
}

/// A type by GGML's number.
pub(crate) fn quant(id: u32) -> Option<Quant> {
    Quant::from_ggml_id(id)
}

fn row_bytes(id: u32, width: u64) -> u64 {
    quant(id).map_or(0, |quant| quant.row_bytes(width))
}

/// What an operator counts for that comes behind another one.
///
/// Products that follow each other with the same inputs are one operator of the planner: queries with keys and
/// values, gate with up. What models do between products is not counted as operators either; its traffic is.
pub(crate) fn traffic(work: &Work, before: Option<&Work>) -> Traffic {
    let moves = |bytes| Traffic { bytes, macs: 0, starts: false };
    let starts = |bytes, macs| Traffic { bytes, macs, starts: true };
    match *work {
        Work::Copy { length, .. } => starts(2 * length, 0),
        Work::Fill { length, .. } => starts(length, 0),
        Work::Reduce { ref sources, elements, fold, .. } => {
            let size = DType::from_code(fold.dtype).map_or(0, DType::size) as u64;
            starts((sources.len() as u64 + 1) * elements * size, 0)
        }
        Work::Matmul { shape: [m, k, n], types: [a, b], .. } => {
            let follows = before.is_some_and(|before| shares_inputs(before, work));
            let inputs = if follows { 0 } else { m * row_bytes(a, k) };
            let bytes = inputs + n * row_bytes(b, k) + m * n * 4;
            Traffic { bytes, macs: m * n * k, starts: !follows }
        }
        Work::Norm { rows, width, .. } => starts((2 * rows + 1) * width * 4, 0),
        Work::Attend { rows, heads, head_size, group, offset, past, .. } => {
            let (first, behind) = shared_heads(heads, group, offset);
            let kept = (behind - first) * head_size * 2;
            let seen = rows * past + rows * (rows + 1) / 2;
            starts(2 * (past + rows) * kept, 2 * seen * heads * head_size)
        }
        Work::Embed { rows, width, quant, .. } => {
            moves(rows * (4 + row_bytes(quant, width) + width * 4))
        }
        Work::Quantize { rows, width, quant, .. } => {
            moves(rows * (width * 4 + row_bytes(quant, width)))
        }
        Work::Rotate { rows, heads, head_size, dims, .. } => {
            moves(rows * (2 * heads * head_size + dims) * 4)
        }
        Work::Halve { elements, .. } => moves(6 * elements),
        Work::Gate { elements, .. } => moves(12 * elements),
        Work::Rows { rows, length, .. } => moves(2 * (rows * length)),
        Work::Best { count, k, .. } => moves(4 * count + 8 * u64::from(k)),
        _ => moves(0),
    }
}

/// Whether two products have the same inputs.
fn shares_inputs(one: &Work, other: &Work) -> bool {
    match (one, other) {
        (
            Work::Matmul { a, shape: [m, k, _], types: [kind, _], .. },
            Work::Matmul { a: same, shape: [rows, width, _], types: [input, _], .. },
        ) => (a, m, k, kind) == (same, rows, width, input),
        _ => false,
    }
}

/// Whether work uses a buffer.
pub(crate) fn uses(work: &Work, buffer: u64) -> bool {
    let is = |place: &Place| place.buffer.0 == buffer;
    let any = |places: &[&Place]| places.iter().any(|place| is(place));
    match work {
        Work::Copy { from, into, .. }
        | Work::Quantize { from, into, .. }
        | Work::Halve { from, into, .. }
        | Work::Rows { from, into, .. }
        | Work::Best { from, into, .. } => any(&[from, into]),
        Work::Fill { into, .. } | Work::Receive { into, .. } => is(into),
        Work::Reduce { into, sources, .. } => is(into) || sources.iter().any(is),
        Work::Matmul { a, b, out, .. } => any(&[a, b, out]),
        Work::Send { from, .. } => is(from),
        Work::Embed { table, ids, into, .. } => any(&[table, ids, into]),
        Work::Norm { from, weight, into, .. } => any(&[from, weight, into]),
        Work::Rotate { data, table, .. } => any(&[data, table]),
        Work::Attend { queries, keys, values, into, .. } => any(&[queries, keys, values, into]),
        Work::Gate { gate, up, into, .. } => any(&[gate, up, into]),
        // A kind that nobody has taught this function keeps its buffers.
        Work::Fence { .. } => false,
        _ => true,
    }
}

/// The ABI's number for a kind of work.
pub(crate) fn kind(work: &Work) -> u16 {
    match work {
        Work::Copy { .. } => abi::WORK_COPY,
        Work::Fill { .. } => abi::WORK_FILL,
        Work::Reduce { .. } => abi::WORK_REDUCE,
        Work::Matmul { .. } => abi::WORK_MATMUL,
        Work::Send { .. } => abi::WORK_SEND,
        Work::Receive { .. } => abi::WORK_RECEIVE,
        Work::Embed { .. } => abi::WORK_EMBED,
        Work::Norm { .. } => abi::WORK_NORM,
        Work::Quantize { .. } => abi::WORK_QUANTIZE,
        Work::Rotate { .. } => abi::WORK_ROTATE,
        Work::Halve { .. } => abi::WORK_HALVE,
        Work::Attend { .. } => abi::WORK_ATTEND,
        Work::Gate { .. } => abi::WORK_GATE,
        Work::Rows { .. } => abi::WORK_ROWS,
        Work::Best { .. } => abi::WORK_BEST,
        _ => abi::WORK_FENCE,
    }
}
