// SPDX-License-Identifier: Apache-2.0
//! Work as the bytes of descriptors. Nothing is checked here.

use bytemuck::{Pod, bytes_of};

use super::{Activation, BufferId, Descriptor, Fold, KvCache, Landing, Picks, Place, Work};
use crate::abi::{
    RECEIVE_FOLD_FIRST, RECEIVE_FOLD_SECOND, RECEIVE_STORE, RawActivate, RawAddPicked, RawAddRow,
    RawAttend, RawAttendBlocks, RawAttendScores, RawBest, RawCombine, RawCopy, RawEmbed, RawFence,
    RawFill, RawGate, RawHalve, RawKeep, RawKvCache, RawMatmul, RawMatmulExperts, RawNorm,
    RawPicks, RawPlace, RawQuantize, RawReceive, RawReduce, RawRotate, RawRotateRows, RawRoute,
    RawRows, RawScale, RawSend, RawWork, RawWrite, WORK_ACTIVATE, WORK_ADD_PICKED, WORK_ADD_ROW,
    WORK_ATTEND, WORK_ATTEND_BLOCKS, WORK_ATTEND_SCORES, WORK_BEST, WORK_COMBINE, WORK_COPY,
    WORK_EMBED, WORK_FENCE, WORK_FILL, WORK_GATE, WORK_HALVE, WORK_KEEP, WORK_MATMUL,
    WORK_MATMUL_EXPERTS, WORK_NORM, WORK_QUANTIZE, WORK_RECEIVE, WORK_REDUCE, WORK_ROTATE,
    WORK_ROTATE_ROWS, WORK_ROUTE, WORK_ROWS, WORK_SCALE, WORK_SEND, WORK_VERSION, WORK_WRITE,
};

/// The bytes of descriptors, end to end.
///
/// ```
/// use spanker_runtime::{BufferId, Place, Work, decode_work, encode_work};
/// let into = Place { buffer: BufferId(1), offset: 0 };
/// let work = [Work::Fill { into, length: 64, pattern: 7 }.into()];
/// assert_eq!(decode_work(&encode_work(&work))?, work);
/// # Ok::<(), spanker_runtime::Malformed>(())
/// ```
#[must_use]
pub fn encode_work(work: &[Descriptor]) -> Vec<u8> {
    let mut out = Vec::with_capacity(work.len() * 64);
    for descriptor in work {
        let after = descriptor.after.map_or(0, |at| at + 1);
        let head = |kind, size: usize| RawWork {
            size: size as u32,
            kind,
            version: WORK_VERSION,
            after,
            reserved: 0,
        };
        encode_one(&descriptor.work, head, &mut out);
    }
    out
}

fn encode_one(work: &Work, head: impl Fn(u16, usize) -> RawWork, out: &mut Vec<u8>) {
    match *work {
        Work::Copy { from, into, length } => {
            let head = head(WORK_COPY, size_of::<RawCopy>());
            push(out, RawCopy { head, from: raw(from), into: raw(into), length });
        }
        Work::Fill { into, length, pattern } => {
            let head = head(WORK_FILL, size_of::<RawFill>());
            push(out, RawFill { head, into: raw(into), length, pattern, reserved: 0 });
        }
        Work::Reduce { into, ref sources, elements, fold, divisor } => {
            let size = size_of::<RawReduce>() + sources.len() * size_of::<RawPlace>();
            let (head, count) = (head(WORK_REDUCE, size), sources.len() as u32);
            let Fold { dtype, op } = fold;
            let into = raw(into);
            push(
                out,
                RawReduce { head, into, elements, r#type: dtype, op, divisor, count, reserved: 0 },
            );
            sources.iter().for_each(|&source| push(out, raw(source)));
        }
        Work::Matmul { a, b, out: product, shape: [m, k, n], types: [a_type, b_type] } => {
            let head = head(WORK_MATMUL, size_of::<RawMatmul>());
            let (a, b) = (raw(a), raw(b));
            push(out, RawMatmul { head, a, b, out: raw(product), m, k, n, a_type, b_type });
        }
        Work::Send { from, length, port, tag } => {
            let head = head(WORK_SEND, size_of::<RawSend>());
            push(out, RawSend { head, from: raw(from), length, port, tag });
        }
        Work::Receive { into, length, port, tag, landing } => {
            let head = head(WORK_RECEIVE, size_of::<RawReceive>());
            let (mode, Fold { dtype, op }) = match landing {
                Landing::Store => (RECEIVE_STORE, Fold { dtype: 0, op: 0 }),
                Landing::FoldFirst(fold) => (RECEIVE_FOLD_FIRST, fold),
                Landing::FoldSecond(fold) => (RECEIVE_FOLD_SECOND, fold),
            };
            let into = raw(into);
            push(
                out,
                RawReceive { head, into, length, port, tag, mode, r#type: dtype, op, reserved: 0 },
            );
        }
        Work::Fence { not_before_ps } => {
            push(out, RawFence { head: head(WORK_FENCE, size_of::<RawFence>()), not_before_ps });
        }
        _ => encode_model(work, head, out),
    }
}

/// The operators of a model.
fn encode_model(work: &Work, head: impl Fn(u16, usize) -> RawWork, out: &mut Vec<u8>) {
    match *work {
        Work::Embed { table, ids, into, rows, width, quant, first, count } => {
            let head = head(WORK_EMBED, size_of::<RawEmbed>());
            let (table, ids, into) = (raw(table), raw(ids), raw(into));
            let reserved = 0;
            push(
                out,
                RawEmbed { head, table, ids, into, rows, width, quant, first, count, reserved },
            );
        }
        Work::Norm { from, weight, into, rows, width, epsilon } => {
            let head = head(WORK_NORM, size_of::<RawNorm>());
            let (from, weight, into) = (raw(from), raw(weight), raw(into));
            push(out, RawNorm { head, from, weight, into, rows, width, epsilon, reserved: 0 });
        }
        Work::Quantize { from, into, rows, width, quant } => {
            let head = head(WORK_QUANTIZE, size_of::<RawQuantize>());
            let (from, into) = (raw(from), raw(into));
            push(out, RawQuantize { head, from, into, rows, width, quant, reserved: 0 });
        }
        Work::Rotate { data, table, rows, heads, head_size, dims, pairs } => {
            let head = head(WORK_ROTATE, size_of::<RawRotate>());
            let (data, table, reserved) = (raw(data), raw(table), 0);
            push(
                out,
                RawRotate { head, data, table, rows, heads, head_size, dims, pairs, reserved },
            );
        }
        Work::Halve { from, into, elements } => {
            let head = head(WORK_HALVE, size_of::<RawHalve>());
            push(out, RawHalve { head, from: raw(from), into: raw(into), elements });
        }
        Work::Gate { gate, up, into, elements, activation: Activation::Silu } => {
            let head = head(WORK_GATE, size_of::<RawGate>());
            push(out, RawGate { head, gate: raw(gate), up: raw(up), into: raw(into), elements });
        }
        Work::Gate { gate, up, into, elements, activation } => {
            let head = head(WORK_ACTIVATE, size_of::<RawActivate>());
            let (gate, up, into) = (raw(gate), raw(up), raw(into));
            let (activation, reserved) = (activation.code(), 0);
            push(out, RawActivate { head, gate, up, into, elements, activation, reserved });
        }
        Work::Scale { data, elements, factor, cap } => {
            let head = head(WORK_SCALE, size_of::<RawScale>());
            push(out, RawScale { head, data: raw(data), elements, factor, cap });
        }
        Work::Rows { from, into, rows, length, from_stride, into_stride } => {
            let head = head(WORK_ROWS, size_of::<RawRows>());
            let (from, into) = (raw(from), raw(into));
            push(out, RawRows { head, from, into, rows, length, from_stride, into_stride });
        }
        Work::Best { from, into, count, k, first } => {
            let head = head(WORK_BEST, size_of::<RawBest>());
            push(out, RawBest { head, from: raw(from), into: raw(into), count, k, first });
        }
        Work::Attend { .. } => encode_attend(work, &head, out),
        _ => encode_batch(work, head, out),
    }
}

/// What steps of many sequences are made of.
fn encode_batch(work: &Work, head: impl Fn(u16, usize) -> RawWork, out: &mut Vec<u8>) {
    match *work {
        Work::Write { into, ref bytes } => {
            let size = size_of::<RawWrite>() + bytes.len().next_multiple_of(8);
            let (head, length) = (head(WORK_WRITE, size), bytes.len() as u64);
            push(out, RawWrite { head, into: raw(into), length });
            out.extend_from_slice(bytes);
            out.resize(out.len().next_multiple_of(8), 0);
        }
        Work::AddRow { into, row, rows, width } => {
            let head = head(WORK_ADD_ROW, size_of::<RawAddRow>());
            push(out, RawAddRow { head, into: raw(into), row: raw(row), rows, width });
        }
        Work::RotateRows { data, table, positions, at, rows, heads, head_size, dims, pairs } => {
            let turn = RawRotateRows {
                head: head(WORK_ROTATE_ROWS, size_of::<RawRotateRows>()),
                data: raw(data),
                table: raw(table),
                at: raw(at),
                positions,
                rows,
                heads,
                head_size,
                dims,
                pairs,
                reserved: 0,
            };
            push(out, turn);
        }
        Work::Keep { keys, values, ref cache, rows } => {
            let head = head(WORK_KEEP, size_of::<RawKeep>());
            let (keys, values, cache) = (raw(keys), raw(values), raw_cache(cache));
            push(out, RawKeep { head, keys, values, cache, rows });
        }
        Work::AttendBlocks { queries, ref cache, into, rows, heads, group, offset, ref scores }
            if scores.is_plain() =>
        {
            let scale = scores.scale;
            let head = head(WORK_ATTEND_BLOCKS, size_of::<RawAttendBlocks>());
            let (queries, into, cache) = (raw(queries), raw(into), raw_cache(cache));
            let reserved = 0;
            push(
                out,
                RawAttendBlocks {
                    head,
                    queries,
                    into,
                    cache,
                    rows,
                    heads,
                    group,
                    offset,
                    scale,
                    reserved,
                },
            );
        }
        Work::AttendBlocks { .. } => encode_scores(work, head, out),
        _ => encode_experts(work, head, out),
    }
}

/// What mixtures of experts are made of.
fn encode_experts(work: &Work, head: impl Fn(u16, usize) -> RawWork, out: &mut Vec<u8>) {
    match *work {
        Work::Route { logits, picks, rows, gating } => {
            let head = head(WORK_ROUTE, size_of::<RawRoute>());
            let (logits, picks) = (raw(logits), raw_picks(picks));
            push(out, RawRoute { head, logits, picks, rows, gating, reserved: 0 });
        }
        Work::MatmulExperts {
            a,
            b,
            out: product,
            picks,
            shape: [m, k, n],
            types,
            stride,
            apart,
        } => {
            let experts = RawMatmulExperts {
                head: head(WORK_MATMUL_EXPERTS, size_of::<RawMatmulExperts>()),
                a: raw(a),
                b: raw(b),
                out: raw(product),
                picks: raw_picks(picks),
                m,
                k,
                n,
                stride,
                a_type: types[0],
                b_type: types[1],
                apart: apart.into(),
                reserved: 0,
            };
            push(out, experts);
        }
        Work::Combine { from, picks, into, rows, width, add } => {
            let head = head(WORK_COMBINE, size_of::<RawCombine>());
            let (from, picks, into) = (raw(from), raw_picks(picks), raw(into));
            let (add, reserved) = (add.into(), 0);
            push(out, RawCombine { head, from, picks, into, rows, width, add, reserved });
        }
        Work::AddPicked { into, table, picks, rows, width, stride, weighed } => {
            let added = RawAddPicked {
                head: head(WORK_ADD_PICKED, size_of::<RawAddPicked>()),
                into: raw(into),
                table: raw(table),
                picks: raw_picks(picks),
                rows,
                width,
                stride,
                weighed: weighed.into(),
                reserved: 0,
            };
            push(out, added);
        }
        _ => {}
    }
}

fn raw_picks(picks: Picks) -> RawPicks {
    RawPicks { at: raw(picks.at), used: picks.used, experts: picks.experts }
}

/// Attention with a window, a cap or sinks.
fn encode_scores(work: &Work, head: impl Fn(u16, usize) -> RawWork, out: &mut Vec<u8>) {
    let Work::AttendBlocks { queries, ref cache, into, rows, heads, group, offset, scores } = *work
    else {
        return;
    };
    let nowhere = Place { buffer: BufferId(0), offset: 0 };
    let raw = RawAttendScores {
        head: head(WORK_ATTEND_SCORES, size_of::<RawAttendScores>()),
        queries: raw(queries),
        into: raw(into),
        cache: raw_cache(cache),
        rows,
        heads,
        group,
        offset,
        scale: scores.scale,
        cap: scores.cap,
        window: scores.window,
        sinks: raw(scores.sinks.unwrap_or(nowhere)),
        has_sinks: u32::from(scores.sinks.is_some()),
        reserved: 0,
    };
    push(out, raw);
}

fn raw_cache(cache: &KvCache) -> RawKvCache {
    let KvCache { blocks, count, rows, tables, entries, heads, head_size, quant } = *cache;
    let (blocks, rows, tables) = (raw(blocks), raw(rows), raw(tables));
    RawKvCache { blocks, rows, tables, count, entries, heads, head_size, quant, reserved: 0 }
}

fn encode_attend(work: &Work, head: impl Fn(u16, usize) -> RawWork, out: &mut Vec<u8>) {
    let Work::Attend { queries, keys, values, into, rows, heads, kv_heads, head_size, .. } = *work
    else {
        return;
    };
    let Work::Attend { group, offset, past, scale, .. } = *work else { return };
    let attend = RawAttend {
        head: head(WORK_ATTEND, size_of::<RawAttend>()),
        queries: raw(queries),
        keys: raw(keys),
        values: raw(values),
        into: raw(into),
        rows,
        heads,
        kv_heads,
        head_size,
        group,
        offset,
        past,
        scale,
        reserved: 0,
    };
    push(out, attend);
}

fn push<T: Pod>(out: &mut Vec<u8>, value: T) {
    out.extend_from_slice(bytes_of(&value));
}

fn raw(place: Place) -> RawPlace {
    RawPlace { buffer: place.buffer.0, offset: place.offset }
}
