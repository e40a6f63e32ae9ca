// SPDX-License-Identifier: Apache-2.0
//! The bytes of descriptors as work. Everything that the bytes alone determine is checked here.

use bytemuck::{Pod, pod_read_unaligned};

use super::{
    Activation, BufferId, Descriptor, Fold, KvCache, Landing, MAX_BEST, MAX_EXPERTS, MAX_SOURCES,
    MAX_WRITE, Malformed, Picks, Place, Scores, Work,
};
use crate::abi::{
    GATING_SIGMOID, PAIRS_ADJACENT, PAIRS_HALVES, RECEIVE_FOLD_FIRST, RECEIVE_FOLD_SECOND,
    RECEIVE_STORE, RawActivate, RawAddPicked, RawAddRow, RawAttend, RawAttendBlocks,
    RawAttendScores, RawBest, RawCombine, RawCopy, RawEmbed, RawFence, RawFill, RawGate, RawHalve,
    RawKeep, RawKvCache, RawMatmul, RawMatmulExperts, RawNorm, RawPicks, RawPlace, RawQuantize,
    RawReceive, RawReduce, RawRotate, RawRotateRows, RawRoute, RawRows, RawScale, RawSend, RawWork,
    RawWrite, WORK_ACTIVATE, WORK_ADD_PICKED, WORK_ADD_ROW, WORK_ATTEND, WORK_ATTEND_BLOCKS,
    WORK_ATTEND_SCORES, WORK_BEST, WORK_COMBINE, WORK_COPY, WORK_EMBED, WORK_FENCE, WORK_FILL,
    WORK_GATE, WORK_HALVE, WORK_KEEP, WORK_MATMUL, WORK_MATMUL_EXPERTS, WORK_NORM, WORK_QUANTIZE,
    WORK_RECEIVE, WORK_REDUCE, WORK_ROTATE, WORK_ROTATE_ROWS, WORK_ROUTE, WORK_ROWS, WORK_SCALE,
    WORK_SEND, WORK_VERSION, WORK_WRITE,
};

/// Reads descriptors. The bytes are hostile until this returns; what they say is not yet true of any
/// card's buffers and ports.
///
/// # Errors
/// [`Malformed`] names the first descriptor that is none.
pub fn decode_work(mut bytes: &[u8]) -> Result<Vec<Descriptor>, Malformed> {
    let mut work: Vec<Descriptor> = Vec::new();
    while !bytes.is_empty() {
        let index = work.len();
        let bad = |reason: String| Malformed { index, reason };
        let head: RawWork = read(bytes).ok_or_else(|| bad("cut off in its head".into()))?;
        let size = head.size as usize;
        if size < size_of::<RawWork>() || !size.is_multiple_of(8) || size > bytes.len() {
            return Err(bad(format!("size {size}, and {} bytes are left", bytes.len())));
        }
        if head.version != WORK_VERSION {
            let version = head.version;
            return Err(bad(format!("version {version}, this card knows {WORK_VERSION}")));
        }
        let (one, rest) = bytes.split_at(size);
        let after = match head.after {
            0 => None,
            at if at as usize <= index && is_transfer(&work[at as usize - 1].work) => Some(at - 1),
            at => return Err(bad(format!("after {at}: no send or receive before it"))),
        };
        work.push(Descriptor { after, work: decode_one(head.kind, one).map_err(bad)? });
        bytes = rest;
    }
    Ok(work)
}

fn is_transfer(work: &Work) -> bool {
    matches!(work, Work::Send { .. } | Work::Receive { .. })
}

fn decode_one(kind: u16, bytes: &[u8]) -> Result<Work, String> {
    Ok(match kind {
        WORK_COPY => {
            let RawCopy { from, into, length, .. } = exactly(bytes)?;
            Work::Copy { from: place(from), into: place(into), length }
        }
        WORK_FILL => {
            let RawFill { into, length, pattern, .. } = exactly(bytes)?;
            if !length.is_multiple_of(4) {
                return Err(format!("fills {length} bytes: not a multiple of 4"));
            }
            Work::Fill { into: place(into), length, pattern }
        }
        WORK_REDUCE => {
            let head: RawReduce = read(bytes).ok_or("cut off")?;
            let count = head.count as usize;
            if count == 0 || count > MAX_SOURCES {
                return Err(format!("{count} sources, from 1 to {MAX_SOURCES} are possible"));
            }
            let listed = &bytes[size_of::<RawReduce>()..];
            if listed.len() != count * size_of::<RawPlace>() {
                return Err(format!("{count} sources in {} bytes", listed.len()));
            }
            let sources = listed
                .chunks_exact(size_of::<RawPlace>())
                .map(|one| place(pod_read_unaligned(one)));
            let fold = Fold { dtype: head.r#type, op: head.op };
            let (into, elements, divisor) = (place(head.into), head.elements, head.divisor);
            Work::Reduce { into, sources: sources.collect(), elements, fold, divisor }
        }
        WORK_MATMUL => {
            let raw: RawMatmul = exactly(bytes)?;
            let (shape, types) = ([raw.m, raw.k, raw.n], [raw.a_type, raw.b_type]);
            Work::Matmul { a: place(raw.a), b: place(raw.b), out: place(raw.out), shape, types }
        }
        WORK_SEND => {
            let RawSend { from, length, port, tag, .. } = exactly(bytes)?;
            Work::Send { from: place(from), length, port, tag }
        }
        WORK_RECEIVE => {
            let raw: RawReceive = exactly(bytes)?;
            let fold = Fold { dtype: raw.r#type, op: raw.op };
            let landing = match raw.mode {
                RECEIVE_STORE => Landing::Store,
                RECEIVE_FOLD_FIRST => Landing::FoldFirst(fold),
                RECEIVE_FOLD_SECOND => Landing::FoldSecond(fold),
                mode => return Err(format!("receive mode {mode} is unknown")),
            };
            let RawReceive { into, length, port, tag, .. } = raw;
            Work::Receive { into: place(into), length, port, tag, landing }
        }
        WORK_FENCE => Work::Fence { not_before_ps: exactly::<RawFence>(bytes)?.not_before_ps },
        kind => return decode_model(kind, bytes),
    })
}

/// The operators of a model.
fn decode_model(kind: u16, bytes: &[u8]) -> Result<Work, String> {
    Ok(match kind {
        WORK_EMBED => {
            let raw: RawEmbed = exactly(bytes)?;
            let (table, ids, into) = (place(raw.table), place(raw.ids), place(raw.into));
            let RawEmbed { rows, width, quant, first, count, .. } = raw;
            Work::Embed { table, ids, into, rows, width, quant, first, count }
        }
        WORK_NORM => {
            let RawNorm { from, weight, into, rows, width, epsilon, .. } = exactly(bytes)?;
            let (from, weight, into) = (place(from), place(weight), place(into));
            Work::Norm { from, weight, into, rows, width, epsilon }
        }
        WORK_QUANTIZE => {
            let RawQuantize { from, into, rows, width, quant, .. } = exactly(bytes)?;
            Work::Quantize { from: place(from), into: place(into), rows, width, quant }
        }
        WORK_ROTATE => {
            let raw: RawRotate = exactly(bytes)?;
            let RawRotate { rows, heads, head_size, dims, pairs, .. } = raw;
            if !matches!(pairs, PAIRS_ADJACENT | PAIRS_HALVES) {
                return Err(format!("pairs {pairs} are unknown"));
            }
            let (data, table) = (place(raw.data), place(raw.table));
            Work::Rotate { data, table, rows, heads, head_size, dims, pairs }
        }
        WORK_HALVE => {
            let RawHalve { from, into, elements, .. } = exactly(bytes)?;
            Work::Halve { from: place(from), into: place(into), elements }
        }
        WORK_ATTEND => attend(exactly(bytes)?),
        WORK_GATE => {
            let RawGate { gate, up, into, elements, .. } = exactly(bytes)?;
            let (gate, up, into) = (place(gate), place(up), place(into));
            Work::Gate { gate, up, into, elements, activation: Activation::Silu }
        }
        WORK_ACTIVATE => {
            let RawActivate { gate, up, into, elements, activation, .. } = exactly(bytes)?;
            let (gate, up, into) = (place(gate), place(up), place(into));
            // SiLU has a kind of its own: work has one form.
            let known = Activation::from_code(activation).filter(|a| *a != Activation::Silu);
            let activation = known.ok_or_else(|| format!("activation {activation} is unknown"))?;
            Work::Gate { gate, up, into, elements, activation }
        }
        WORK_SCALE => {
            let RawScale { data, elements, factor, cap, .. } = exactly(bytes)?;
            Work::Scale { data: place(data), elements, factor, cap }
        }
        WORK_ROWS => {
            let raw: RawRows = exactly(bytes)?;
            let (from, into) = (place(raw.from), place(raw.into));
            let RawRows { rows, length, from_stride, into_stride, .. } = raw;
            if length > from_stride || length > into_stride {
                return Err(format!("{length} bytes, {from_stride} and {into_stride} apart"));
            }
            Work::Rows { from, into, rows, length, from_stride, into_stride }
        }
        WORK_BEST => {
            let RawBest { from, into, count, k, first, .. } = exactly(bytes)?;
            if k == 0 || k > MAX_BEST {
                return Err(format!("the best {k}, from 1 to {MAX_BEST} are possible"));
            }
            Work::Best { from: place(from), into: place(into), count, k, first }
        }
        kind => return decode_batch(kind, bytes),
    })
}

/// What steps of many sequences are made of.
fn decode_batch(kind: u16, bytes: &[u8]) -> Result<Work, String> {
    Ok(match kind {
        WORK_WRITE => {
            let RawWrite { into, length, .. } = read(bytes).ok_or("cut off")?;
            let given = &bytes[size_of::<RawWrite>()..];
            let possible = length.is_multiple_of(4) && length <= MAX_WRITE;
            if !possible || given.len() as u64 != length.next_multiple_of(8) {
                return Err(format!("writes {length} bytes, and {} are there", given.len()));
            }
            Work::Write { into: place(into), bytes: given[..length as usize].into() }
        }
        WORK_ADD_ROW => {
            let RawAddRow { into, row, rows, width, .. } = exactly(bytes)?;
            Work::AddRow { into: place(into), row: place(row), rows, width }
        }
        WORK_ROTATE_ROWS => {
            let raw: RawRotateRows = exactly(bytes)?;
            let RawRotateRows { positions, rows, heads, head_size, dims, pairs, .. } = raw;
            if !matches!(pairs, PAIRS_ADJACENT | PAIRS_HALVES) {
                return Err(format!("pairs {pairs} are unknown"));
            }
            let (data, table, at) = (place(raw.data), place(raw.table), place(raw.at));
            Work::RotateRows { data, table, positions, at, rows, heads, head_size, dims, pairs }
        }
        WORK_KEEP => {
            let RawKeep { keys, values, cache, rows, .. } = exactly(bytes)?;
            let (keys, values) = (place(keys), place(values));
            Work::Keep { keys, values, cache: kv_cache(cache)?, rows }
        }
        WORK_ATTEND_BLOCKS => {
            let raw: RawAttendBlocks = exactly(bytes)?;
            let RawAttendBlocks { rows, heads, group, offset, scale, .. } = raw;
            let (queries, into) = (place(raw.queries), place(raw.into));
            let cache = kv_cache(raw.cache)?;
            let scores = Scores::plain(scale);
            Work::AttendBlocks { queries, cache, into, rows, heads, group, offset, scores }
        }
        WORK_ATTEND_SCORES => {
            let raw: RawAttendScores = exactly(bytes)?;
            let RawAttendScores { rows, heads, group, offset, scale, cap, window, .. } = raw;
            let (queries, into) = (place(raw.queries), place(raw.into));
            let sinks = match raw.has_sinks {
                0 => None,
                1 => Some(place(raw.sinks)),
                other => return Err(format!("sinks {other}: 0 and 1 are possible")),
            };
            let scores = Scores { scale, cap, window, sinks };
            if scores.is_plain() {
                return Err("neither a window nor a cap nor sinks".into());
            }
            let cache = kv_cache(raw.cache)?;
            Work::AttendBlocks { queries, cache, into, rows, heads, group, offset, scores }
        }
        kind => return decode_experts(kind, bytes),
    })
}

/// What mixtures of experts are made of.
fn decode_experts(kind: u16, bytes: &[u8]) -> Result<Work, String> {
    Ok(match kind {
        WORK_ROUTE => {
            let RawRoute { logits, picks, rows, gating, .. } = exactly(bytes)?;
            if gating > GATING_SIGMOID {
                return Err(format!("gating {gating} is unknown"));
            }
            Work::Route { logits: place(logits), picks: picked(picks)?, rows, gating }
        }
        WORK_MATMUL_EXPERTS => {
            let raw: RawMatmulExperts = exactly(bytes)?;
            let RawMatmulExperts { m, k, n, stride, a_type, b_type, .. } = raw;
            let (a, b, out) = (place(raw.a), place(raw.b), place(raw.out));
            let (picks, apart) = (picked(raw.picks)?, flag("apart", raw.apart)?);
            let (shape, types) = ([m, k, n], [a_type, b_type]);
            Work::MatmulExperts { a, b, out, picks, shape, types, stride, apart }
        }
        WORK_COMBINE => {
            let RawCombine { from, picks, into, rows, width, add, .. } = exactly(bytes)?;
            let (from, into, add) = (place(from), place(into), flag("add", add)?);
            Work::Combine { from, picks: picked(picks)?, into, rows, width, add }
        }
        WORK_ADD_PICKED => {
            let raw: RawAddPicked = exactly(bytes)?;
            let RawAddPicked { rows, width, stride, .. } = raw;
            let (into, table) = (place(raw.into), place(raw.table));
            let (picks, weighed) = (picked(raw.picks)?, flag("weighed", raw.weighed)?);
            Work::AddPicked { into, table, picks, rows, width, stride, weighed }
        }
        kind => return Err(format!("kind {kind} is unknown")),
    })
}

fn picked(raw: RawPicks) -> Result<Picks, String> {
    let RawPicks { at, used, experts } = raw;
    if experts > MAX_EXPERTS || used == 0 || used > experts {
        return Err(format!(
            "{used} of {experts} experts, of which there are at most {MAX_EXPERTS}"
        ));
    }
    Ok(Picks { at: place(at), used, experts })
}

fn flag(what: &str, value: u32) -> Result<bool, String> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(format!("{what} {value} is neither 0 nor 1")),
    }
}

fn kv_cache(raw: RawKvCache) -> Result<KvCache, String> {
    let RawKvCache { count, entries, heads, head_size, quant, .. } = raw;
    let (blocks, rows, tables) = (place(raw.blocks), place(raw.rows), place(raw.tables));
    let cache = KvCache { blocks, count, rows, tables, entries, heads, head_size, quant };
    let shape = cache.shape().ok_or_else(|| format!("type {quant} of keys is unknown"))?;
    shape.check().map(|()| cache)
}

fn attend(raw: RawAttend) -> Work {
    Work::Attend {
        queries: place(raw.queries),
        keys: place(raw.keys),
        values: place(raw.values),
        into: place(raw.into),
        rows: raw.rows,
        heads: raw.heads,
        kv_heads: raw.kv_heads,
        head_size: raw.head_size,
        group: raw.group,
        offset: raw.offset,
        past: raw.past,
        scale: raw.scale,
    }
}

fn read<T: Pod>(bytes: &[u8]) -> Option<T> {
    Some(pod_read_unaligned(bytes.get(..size_of::<T>())?))
}

fn exactly<T: Pod>(bytes: &[u8]) -> Result<T, String> {
    match bytes.len() == size_of::<T>() {
        true => Ok(pod_read_unaligned(bytes)),
        false => Err(format!("{} bytes, expected {}", bytes.len(), size_of::<T>())),
    }
}

fn place(raw: RawPlace) -> Place {
    Place { buffer: BufferId(raw.buffer), offset: raw.offset }
}
