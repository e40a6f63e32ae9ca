// SPDX-License-Identifier: Apache-2.0
//! Whether the operators of a model may run. Results lie apart from operands, or just where one is that is read
//! as it is written, so that what comes out does not depend on how work is cut.

use ggml_spanker::{Gating, Quant, WEIGHT_TYPES};
use nix::errno::Errno;

use spanker_runtime::{KvCache, MAX_BEST, MAX_EXPERTS, PICK_BYTES, Picks, Place, ROW_BYTES, Work};

use super::{Owned, apart, product, require};
use crate::card::compute::shared_heads;
use crate::card::traffic::quant;

/// The most numbers of a row: a slice has at least one.
const WIDEST: u64 = 1 << 20;
/// The most scores that attention computes for a row: all heads over all positions.
pub(crate) const MOST_SCORES: u64 = 1 << 26;

/// A type that weights have.
fn weights(id: u32) -> Result<Quant, Errno> {
    quant(id).filter(|quant| WEIGHT_TYPES.contains(quant)).ok_or(Errno::EOPNOTSUPP)
}

/// Bytes of a row of whole blocks.
fn row(quant: Quant, width: u64) -> Result<u64, Errno> {
    require(width > 0 && width.is_multiple_of(quant.block()))?;
    product(&[width / quant.block(), quant.block_bytes()])
}

/// A row that is not too wide.
fn narrow(width: u64) -> Result<(), Errno> {
    require(width > 0 && width <= WIDEST)
}

/// Bytes from the first byte of one block to the last byte of another.
fn span(rows: u64, length: u64, stride: u64) -> Result<u64, Errno> {
    require(length <= stride)?;
    match rows.checked_sub(1) {
        None => Ok(0),
        Some(gaps) => product(&[gaps, stride])?.checked_add(length).ok_or(Errno::EINVAL),
    }
}

pub(super) fn check(owned: &Owned<'_>, work: &Work) -> Result<(), Errno> {
    match *work {
        Work::Matmul { a, b, out, shape, types } => matmul(owned, [a, b, out], shape, types),
        Work::Embed { table, ids, into, rows, width, quant, count, .. } => {
            narrow(width)?;
            let bytes = product(&[count.into(), row(weights(quant)?, width)?])?;
            let out = product(&[rows, width, 4])?;
            owned.contains(table, bytes)?;
            owned.elements(ids, rows, 4)?;
            owned.elements(into, out / 4, 4)?;
            require(apart((into, out), (table, bytes)) && apart((into, out), (ids, rows * 4)))
        }
        Work::Norm { from, weight, into, rows, width, .. } => {
            narrow(width)?;
            let numbers = product(&[rows, width])?;
            owned.elements(from, numbers, 4)?;
            owned.elements(into, numbers, 4)?;
            owned.elements(weight, width, 4)?;
            let out = (into, numbers * 4);
            require(into == from || apart(out, (from, numbers * 4)))?;
            require(apart(out, (weight, width * 4)))
        }
        Work::Quantize { from, into, rows, width, quant: id } => {
            let input =
                quant(id).filter(|quant| matches!(quant, Quant::F32 | Quant::Q8_0 | Quant::Q8K));
            let input = input.ok_or(Errno::EOPNOTSUPP)?;
            narrow(width)?;
            let (given, bytes) = (product(&[rows, width])?, product(&[rows, row(input, width)?])?);
            owned.elements(from, given, 4)?;
            owned.contains(into, bytes)?;
            require(input != Quant::F32 || into.offset.is_multiple_of(4))?;
            require(apart((into, bytes), (from, given * 4)))
        }
        Work::Rotate { data, table, rows, heads, head_size, dims, .. } => {
            narrow(product(&[heads, head_size])?)?;
            require(dims <= head_size && dims.is_multiple_of(2))?;
            let (numbers, turns) = (product(&[rows, heads, head_size])?, product(&[rows, dims])?);
            owned.elements(data, numbers, 4)?;
            owned.elements(table, turns, 4)?;
            require(apart((data, numbers * 4), (table, turns * 4)))
        }
        Work::Halve { from, into, elements } => {
            owned.elements(from, elements, 4)?;
            owned.elements(into, elements, 2)?;
            require(apart((into, elements * 2), (from, elements * 4)))
        }
        Work::Gate { gate, up, into, elements, .. } => opened(owned, [gate, up], into, elements),
        Work::Scale { data, elements, .. } => owned.elements(data, elements, 4),
        Work::Rows { from, into, rows, length, from_stride, into_stride } => {
            let (source, target) =
                (span(rows, length, from_stride)?, span(rows, length, into_stride)?);
            owned.contains(from, source)?;
            owned.contains(into, target)?;
            require(apart((into, target), (from, source)))
        }
        Work::Best { from, into, count, k, first } => {
            require((1..=MAX_BEST).contains(&k))?;
            require(count <= u64::from(u32::MAX - first))?;
            owned.elements(from, count, 4)?;
            let out = u64::from(k) * 8;
            owned.elements(into, out / 4, 4)?;
            require(apart((into, out), (from, count * 4)))
        }
        Work::Attend { .. } => attend(owned, work),
        _ => of_steps(owned, work),
    }
}

/// Work with rows of many sequences.
fn of_steps(owned: &Owned<'_>, work: &Work) -> Result<(), Errno> {
    match *work {
        Work::AddRow { into, row, rows, width } => {
            narrow(width)?;
            let numbers = product(&[rows, width])?;
            owned.elements(into, numbers, 4)?;
            owned.elements(row, width, 4)?;
            require(apart((into, numbers * 4), (row, width * 4)))
        }
        Work::RotateRows { data, table, positions, at, rows, heads, head_size, dims, .. } => {
            narrow(product(&[heads, head_size])?)?;
            require(dims <= head_size && dims.is_multiple_of(2))?;
            let numbers = product(&[rows, heads, head_size])?;
            let turns = product(&[positions, dims])?;
            owned.elements(data, numbers, 4)?;
            owned.elements(table, turns, 4)?;
            owned.elements(at, product(&[rows, 2])?, 4)?;
            let out = (data, numbers * 4);
            require(apart(out, (table, turns * 4)) && apart(out, (at, rows * ROW_BYTES)))
        }
        Work::Keep { keys, values, ref cache, rows } => {
            let operands = kept(owned, cache, rows)?;
            let numbers = product(&[rows, cache.heads, cache.head_size])?;
            owned.elements(keys, numbers, 4)?;
            owned.elements(values, numbers, 4)?;
            let [blocks, others @ ..] = operands;
            let given = [(keys, numbers * 4), (values, numbers * 4)];
            require(given.iter().chain(&others).all(|&other| apart(blocks, other)))
        }
        Work::AttendBlocks { queries, ref cache, into, rows, heads, group, offset, ref scores } => {
            let operands = kept(owned, cache, rows)?;
            narrow(product(&[heads, cache.head_size])?)?;
            require(group > 0 && offset <= WIDEST && group <= WIDEST)?;
            require(shared_heads(heads, group, offset).1 <= cache.heads)?;
            let numbers = product(&[rows, heads, cache.head_size])?;
            owned.elements(queries, numbers, 4)?;
            owned.elements(into, numbers, 4)?;
            let out = (into, numbers * 4);
            require(into == queries || apart(out, (queries, numbers * 4)))?;
            if let Some(sinks) = scores.sinks {
                owned.elements(sinks, heads, 4)?;
                require(apart(out, (sinks, heads * 4)))?;
            }
            require(operands.iter().all(|&operand| apart(out, operand)))
        }
        _ => of_experts(owned, work),
    }
}

/// Blocks, rows and block tables of a cache, with their bytes.
fn kept(owned: &Owned<'_>, cache: &KvCache, rows: u64) -> Result<[(Place, u64); 3], Errno> {
    let shape = cache.shape().ok_or(Errno::EOPNOTSUPP)?;
    shape.check().map_err(|_| Errno::EOPNOTSUPP)?;
    narrow(product(&[cache.heads, cache.head_size])?)?;
    require(cache.count <= u64::from(u32::MAX))?;
    let blocks = product(&[cache.count, shape.block_bytes()])?;
    owned.contains(cache.blocks, blocks)?;
    owned.elements(cache.rows, product(&[rows, 2])?, 4)?;
    owned.elements(cache.tables, cache.entries, 4)?;
    let tables = (cache.tables, cache.entries * 4);
    Ok([(cache.blocks, blocks), (cache.rows, rows * ROW_BYTES), tables])
}

/// Picks of rows, with their bytes. Which experts they name is data.
fn picked(owned: &Owned<'_>, picks: &Picks, rows: u64) -> Result<(Place, u64), Errno> {
    require(picks.experts <= MAX_EXPERTS && (1..=picks.experts).contains(&picks.used))?;
    let count = product(&[rows, picks.used])?;
    owned.elements(picks.at, product(&[count, PICK_BYTES / 4])?, 4)?;
    Ok((picks.at, count * PICK_BYTES))
}

/// Mixtures of experts.
fn of_experts(owned: &Owned<'_>, work: &Work) -> Result<(), Errno> {
    match *work {
        Work::Route { logits, ref picks, rows, gating } => {
            Gating::from_code(gating).ok_or(Errno::EINVAL)?;
            let chosen = picked(owned, picks, rows)?;
            let numbers = product(&[rows, picks.experts])?;
            owned.elements(logits, numbers, 4)?;
            require(apart(chosen, (logits, numbers * 4)))
        }
        Work::MatmulExperts {
            a,
            b,
            out,
            ref picks,
            shape: [m, k, n],
            types,
            stride,
            apart: own,
        } => {
            let chosen = picked(owned, picks, m)?;
            let weights = weights(types[1])?;
            let inputs = quant(types[0]).filter(|&inputs| inputs == weights.input());
            let inputs = inputs.ok_or(Errno::EOPNOTSUPP)?;
            require(k <= WIDEST)?;
            let count = product(&[m, picks.used])?;
            let left = product(&[if own { count } else { m }, row(inputs, k)?])?;
            let each = product(&[n, row(weights, k)?])?;
            // The last expert ends where its rows do.
            let all = product(&[picks.experts - 1, stride])?.checked_add(each);
            let all = all.ok_or(Errno::EINVAL)?;
            require(stride >= each)?;
            owned.contains(a, left)?;
            require(inputs != Quant::F32 || a.offset.is_multiple_of(4))?;
            owned.contains(b, all)?;
            let results = product(&[count, n])?;
            owned.elements(out, results, 4)?;
            product(&[count, n, k])?;
            let out = (out, results * 4);
            require(apart(out, (a, left)) && apart(out, (b, all)) && apart(out, chosen))
        }
        Work::Combine { from, ref picks, into, rows, width, .. } => {
            narrow(width)?;
            let chosen = picked(owned, picks, rows)?;
            let (given, numbers) = (product(&[rows, picks.used, width])?, product(&[rows, width])?);
            owned.elements(from, given, 4)?;
            owned.elements(into, numbers, 4)?;
            let out = (into, numbers * 4);
            require(apart(out, (from, given * 4)) && apart(out, chosen))
        }
        Work::AddPicked { into, table, ref picks, rows, width, stride, weighed } => {
            narrow(width)?;
            let chosen = picked(owned, picks, rows)?;
            let of = if weighed { 1 } else { picks.used };
            let numbers = product(&[rows, of, width])?;
            require(stride.is_multiple_of(4) && stride >= width * 4)?;
            let all = product(&[picks.experts - 1, stride])?.checked_add(width * 4);
            let all = all.ok_or(Errno::EINVAL)?;
            owned.elements(into, numbers, 4)?;
            owned.elements(table, all / 4, 4)?;
            let out = (into, numbers * 4);
            require(apart(out, (table, all)) && apart(out, chosen))
        }
        _ => Err(Errno::EOPNOTSUPP),
    }
}

fn opened(
    owned: &Owned<'_>,
    operands: [Place; 2],
    into: Place,
    elements: u64,
) -> Result<(), Errno> {
    owned.elements(into, elements, 4)?;
    for place in operands {
        owned.elements(place, elements, 4)?;
        require(place == into || apart((into, elements * 4), (place, elements * 4)))?;
    }
    Ok(())
}

fn matmul(
    owned: &Owned<'_>,
    [a, b, out]: [Place; 3],
    [m, k, n]: [u64; 3],
    [a_type, b_type]: [u32; 2],
) -> Result<(), Errno> {
    let weights = weights(b_type)?;
    let inputs = quant(a_type).ok_or(Errno::EOPNOTSUPP)?;
    let both = inputs == Quant::Q4K && weights == Quant::Q4K;
    if !both && inputs != weights.input() {
        return Err(Errno::EOPNOTSUPP);
    }
    require(both || k <= WIDEST)?;
    let (left, right) = (product(&[m, row(inputs, k)?])?, product(&[n, row(weights, k)?])?);
    let results = product(&[m, n])?;
    owned.contains(a, left)?;
    require(inputs != Quant::F32 || a.offset.is_multiple_of(4))?;
    owned.contains(b, right)?;
    owned.elements(out, results, 4)?;
    product(&[m, n, k])?;
    let out = (out, results * 4);
    require(apart(out, (a, left)) && apart(out, (b, right)))
}

fn attend(owned: &Owned<'_>, work: &Work) -> Result<(), Errno> {
    let Work::Attend { queries, keys, values, into, rows, heads, kv_heads, head_size, .. } = *work
    else {
        return Err(Errno::EOPNOTSUPP);
    };
    let Work::Attend { group, offset, past, .. } = *work else { return Err(Errno::EOPNOTSUPP) };
    narrow(product(&[heads, head_size])?)?;
    narrow(product(&[kv_heads, head_size])?)?;
    require(group > 0 && offset <= WIDEST && group <= WIDEST)?;
    require(shared_heads(heads, group, offset).1 <= kv_heads)?;
    let positions = past.checked_add(rows).ok_or(Errno::EINVAL)?;
    require(product(&[positions, heads])? <= MOST_SCORES)?;
    product(&[4, rows, positions, heads, head_size])?;
    let (numbers, cached) =
        (product(&[rows, heads, head_size])?, product(&[positions, kv_heads, head_size])?);
    owned.elements(queries, numbers, 4)?;
    owned.elements(into, numbers, 4)?;
    owned.elements(keys, cached, 2)?;
    owned.elements(values, cached, 2)?;
    let out = (into, numbers * 4);
    require(into == queries || apart(out, (queries, numbers * 4)))?;
    require(apart(out, (keys, cached * 2)) && apart(out, (values, cached * 2)))
}
