// SPDX-License-Identifier: Apache-2.0
//! Which buffers work uses, and its kind in the ABI's numbers. What it counts for is `spanker-plan`'s to say.

use ggml_spanker::Quant;
use spanker_runtime::{Activation, Place, Work, abi};

/// A type by GGML's number.
pub(crate) fn quant(id: u32) -> Option<Quant> {
    Quant::from_ggml_id(id)
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
        Work::Write { into, .. } => is(into),
        Work::AddRow { into, row, .. } => any(&[into, row]),
        Work::RotateRows { data, table, at, .. } => any(&[data, table, at]),
        Work::Keep { keys, values, cache, .. } => {
            any(&[keys, values, &cache.blocks, &cache.rows, &cache.tables])
        }
        Work::AttendBlocks { queries, into, cache, scores, .. } => {
            any(&[queries, into, &cache.blocks, &cache.rows, &cache.tables])
                || scores.sinks.as_ref().is_some_and(is)
        }
        Work::Scale { data, .. } => is(data),
        Work::Gate { gate, up, into, .. } => any(&[gate, up, into]),
        Work::Route { logits, picks, .. } => any(&[logits, &picks.at]),
        Work::MatmulExperts { a, b, out, picks, .. } => any(&[a, b, out, &picks.at]),
        Work::Combine { from, picks, into, .. } => any(&[from, &picks.at, into]),
        Work::AddPicked { into, table, picks, .. } => any(&[into, table, &picks.at]),
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
        Work::Gate { activation: Activation::Silu, .. } => abi::WORK_GATE,
        Work::Gate { .. } => abi::WORK_ACTIVATE,
        Work::Scale { .. } => abi::WORK_SCALE,
        Work::Rows { .. } => abi::WORK_ROWS,
        Work::Best { .. } => abi::WORK_BEST,
        Work::Write { .. } => abi::WORK_WRITE,
        Work::AddRow { .. } => abi::WORK_ADD_ROW,
        Work::RotateRows { .. } => abi::WORK_ROTATE_ROWS,
        Work::Keep { .. } => abi::WORK_KEEP,
        Work::AttendBlocks { scores, .. } if scores.is_plain() => abi::WORK_ATTEND_BLOCKS,
        Work::AttendBlocks { .. } => abi::WORK_ATTEND_SCORES,
        Work::Route { .. } => abi::WORK_ROUTE,
        Work::MatmulExperts { .. } => abi::WORK_MATMUL_EXPERTS,
        Work::Combine { .. } => abi::WORK_COMBINE,
        Work::AddPicked { .. } => abi::WORK_ADD_PICKED,
        _ => abi::WORK_FENCE,
    }
}
