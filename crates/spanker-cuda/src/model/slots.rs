// SPDX-License-Identifier: Apache-2.0
//! Dataflow slots: how thread blocks synchronise in the kernel whose weights are prefetched. Pure: nothing is launched
//! here.
//!
//! That kernel has no grid barriers. What an instruction writes for a later one goes to a slot that nobody has written
//! in this step, and consumers poll the slot until it is written. So every such instruction has a slot of its own,
//! whatever address the program gives its results; what is needed after the kernel is also stored at that address.

use std::collections::BTreeSet;
use std::ops::Range;

use super::operands::{Attend, Embed, Instruction, Streamed, awaits, keep, kind};

/// Slots begin at multiples of this.
const ALIGNMENT: u64 = 128;
/// Bytes of a number.
const NUMBER: u64 = 4;

/// An address of an instruction that may become a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operand {
    /// The inputs of a streamed product.
    Input,
    /// What the results of a streamed product are added to.
    Added,
    /// The results of one of its matrices.
    Output(usize),
    /// Of attention.
    Queries,
    NewKeys,
    NewValues,
    Attended,
    /// The results of an embedding.
    Embedded,
}

/// Numbers that an instruction reads or writes: which of its operands, and their addresses.
struct Numbers {
    operand: Operand,
    at: Range<u64>,
}

impl Numbers {
    fn new(operand: Operand, start: u64, count: u64) -> Numbers {
        Numbers { operand, at: start..start + count * NUMBER }
    }
}

/// Numbers that an instruction reads and that may have been written by an instruction before it. The KV cache belongs to
/// a layer, and blocks of results are for the other kernel: neither is read by a later instruction of the same kernel.
fn read(instruction: &Instruction) -> Vec<Numbers> {
    if let Some(op) = instruction.get::<Streamed>() {
        let added = Numbers::new(Operand::Added, op.added, op.rows[0].into());
        let mut reads = vec![Numbers::new(Operand::Input, op.input, op.width.into())];
        reads.extend((op.keep == keep::INTO).then_some(added));
        return reads;
    }
    let Some(op) = instruction.get::<Attend>() else { return Vec::new() };
    let size = u64::from(op.head_size);
    let (queries, kv) = (u64::from(op.heads) * size, u64::from(op.kv_heads) * size);
    let mut reads = vec![Numbers::new(Operand::Queries, op.queries, queries)];
    if op.is_fresh == 1 {
        reads.push(Numbers::new(Operand::NewKeys, op.new_keys, kv));
        reads.push(Numbers::new(Operand::NewValues, op.new_values, kv));
    }
    reads
}

/// Numbers that an instruction writes.
fn written(instruction: &Instruction) -> Vec<Numbers> {
    if let Some(op) = instruction.get::<Streamed>() {
        let outs = if op.keep == keep::GATED { 1 } else { op.outs.len() };
        let numbers = |i: usize| Numbers::new(Operand::Output(i), op.outs[i], op.rows[i].into());
        let gated = op.keep == keep::GATED;
        return (0..outs).filter(|&i| gated || op.rows[i] > 0).map(numbers).collect();
    }
    if let Some(op) = instruction.get::<Attend>() {
        let count = u64::from(op.heads) * u64::from(op.head_size);
        return vec![Numbers::new(Operand::Attended, op.into, count)];
    }
    let embed = instruction.get::<Embed>();
    embed.map(|op| Numbers::new(Operand::Embedded, op.into, op.width.into())).into_iter().collect()
}

fn overlap(one: &Range<u64>, two: &Range<u64>) -> bool {
    one.start < two.end && two.start < one.end
}

fn contains(outer: &Range<u64>, inner: &Range<u64>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Instructions that one kernel runs, so far.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// What instructions have written to slots, and which.
    produced: Vec<(Range<u64>, usize)>,
    /// What instructions read at the program's addresses, and which.
    plain: Vec<(Range<u64>, usize)>,
    /// Of each instruction, those that are complete once it has begun.
    done: Vec<BTreeSet<usize>>,
}

impl Run {
    /// Appends an instruction if it can follow the others in one kernel: each of its inputs was produced in one slot or
    /// not at all, and what it writes is neither part of a slot nor what somebody may still read at the program's address.
    /// Returns whether it can.
    pub(super) fn append(&mut self, instruction: &Instruction) -> bool {
        let is_attention = instruction.kind() == kind::ATTEND;
        let producer = |at: &Range<u64>| self.produced.iter().rfind(|(slot, _)| contains(slot, at));
        let is_produced = |at: &Range<u64>| producer(at).is_some();
        let is_apart = |at: &Range<u64>| !self.produced.iter().any(|(slot, _)| overlap(slot, at));
        let reads = read(instruction);
        // Inputs of products are read 16 bytes at a time.
        let is_aligned = |numbers: &Numbers| {
            let off = producer(&numbers.at).map_or(0, |(slot, _)| numbers.at.start - slot.start);
            numbers.operand == Operand::Added || is_attention || off.is_multiple_of(16)
        };
        let together = match is_attention {
            true => {
                reads.iter().all(|numbers| is_produced(&numbers.at))
                    || reads.iter().all(|numbers| is_apart(&numbers.at))
            }
            false => reads.iter().all(|numbers| is_produced(&numbers.at) || is_apart(&numbers.at)),
        };
        // A block that has received all that an instruction produces knows that all blocks are done with it. What results
        // are added to is received number by number.
        let whole = reads.iter().filter(|numbers| numbers.operand != Operand::Added);
        let received: Vec<(&Range<u64>, usize)> =
            whole.filter_map(|n| producer(&n.at).map(|(_, by)| (&n.at, *by))).collect();
        let (mut done, mut before) = (BTreeSet::new(), BTreeSet::new());
        for (_, by) in &received {
            let mut slots = self.produced.iter().filter(|(_, producer)| producer == by);
            if slots.all(|(slot, _)| received.iter().any(|(at, _)| *at == slot)) {
                done.insert(*by);
                before.extend(&self.done[*by]);
            }
        }
        // All heads together have received all of it, but each only a part.
        let known = if is_attention { BTreeSet::new() } else { done.clone() };
        let known: BTreeSet<usize> = &known | &before;
        done.extend(before);
        let writes: Vec<Range<u64>> =
            written(instruction).into_iter().map(|numbers| numbers.at).collect();
        let is_free = |at: &Range<u64>| {
            self.produced.iter().all(|(slot, _)| slot == at || !overlap(slot, at))
                && self.plain.iter().all(|(plain, by)| known.contains(by) || !overlap(plain, at))
        };
        if !together || !reads.iter().all(is_aligned) || !writes.iter().all(is_free) {
            return false;
        }
        let own = self.done.len();
        let plain: Vec<(Range<u64>, usize)> =
            reads.iter().filter(|n| !is_produced(&n.at)).map(|n| (n.at.clone(), own)).collect();
        self.plain.extend(plain);
        self.produced.extend(writes.into_iter().map(|at| (at, own)));
        self.done.push(done);
        true
    }
}

/// Makes an instruction poll a slot for an operand.
fn receive_from(instruction: &mut Instruction, operand: Operand, slot: u64) {
    if let Some(op) = instruction.get_mut::<Streamed>() {
        match operand {
            Operand::Added => (op.added, op.awaits) = (slot, op.awaits | awaits::AWAITS_ADDED),
            _ => (op.input, op.awaits) = (slot, op.awaits | awaits::AWAITS_INPUT),
        }
    }
    if let Some(op) = instruction.get_mut::<Attend>() {
        match operand {
            Operand::NewKeys => op.new_keys = slot,
            Operand::NewValues => op.new_values = slot,
            _ => op.queries = slot,
        }
        op.is_awaiting = 1;
    }
}

/// Makes an instruction write results to a slot, and to the program's address unless a later instruction overwrites it.
fn send_to(instruction: &mut Instruction, operand: Operand, slot: u64, is_overwritten: bool) {
    let store = |address: u64| if is_overwritten { 0 } else { address };
    if let (Some(op), Operand::Output(i)) = (instruction.get_mut::<Streamed>(), operand) {
        (op.outs[i], op.stores[i]) = (slot, store(op.outs[i]));
    }
    if let Some(op) = instruction.get_mut::<Attend>() {
        (op.into, op.store) = (slot, store(op.into));
    }
    if let Some(op) = instruction.get_mut::<Embed>() {
        (op.slot, op.is_overwritten) = (slot, u32::from(is_overwritten));
    }
}

/// Instructions that follow each other, with dataflow slots from `base` on, and the bytes of these.
pub(super) fn assign(instructions: &[Instruction], base: u64) -> (Vec<Instruction>, u64) {
    // Addresses of the program, and the slot that has their numbers.
    let mut now: Vec<(Range<u64>, u64)> = Vec::new();
    let mut next = base;
    let mut out = Vec::with_capacity(instructions.len());
    for (at, instruction) in instructions.iter().enumerate() {
        let mut instruction = *instruction;
        let (reads, writes) = (read(&instruction), written(&instruction));
        for Numbers { operand, at } in reads {
            if let Some((of, slot)) = now.iter().find(|(of, _)| contains(of, &at)) {
                receive_from(&mut instruction, operand, slot + (at.start - of.start));
            }
        }
        for Numbers { operand, at: of } in writes {
            let later = &instructions[at + 1..];
            let again = later.iter().position(|one| written(one).iter().any(|n| n.at == of));
            let readers = &later[..again.map_or(later.len(), |again| again + 1)];
            now.retain(|(old, _)| *old != of);
            let is_read = readers.iter().any(|l| read(l).iter().any(|n| contains(&of, &n.at)));
            if !is_read && again.is_none() {
                continue;
            }
            let slot = next;
            next += (of.end - of.start).next_multiple_of(ALIGNMENT);
            send_to(&mut instruction, operand, slot, again.is_some());
            now.push((of, slot));
        }
        out.push(instruction);
    }
    (out, next - base)
}

/// Where numbers of an instruction lie: their addresses in the program, and where they really begin.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Lies {
    pub(super) read: Vec<(Range<u64>, u64)>,
    pub(super) written: Vec<(Range<u64>, u64)>,
}

/// Where numbers of each instruction lie, of instructions to which slots were assigned.
pub(super) fn lies(instructions: &[Instruction], assigned: &[Instruction]) -> Vec<Lies> {
    let begins = |numbers: Vec<Numbers>, now: Vec<Numbers>| -> Vec<(Range<u64>, u64)> {
        let pairs = numbers.into_iter().zip(now);
        pairs.map(|(numbers, now)| (numbers.at, now.at.start)).collect()
    };
    let lies = |(one, now): (&Instruction, &Instruction)| {
        let mut written = begins(written(one), written(now));
        // An embedding names its slot besides.
        if let Some(slot) = now.get::<Embed>().map(|op| op.slot).filter(|&slot| slot > 0) {
            written.iter_mut().for_each(|(_, begins)| *begins = slot);
        }
        Lies { read: begins(read(one), read(now)), written }
    };
    instructions.iter().zip(assigned).map(lies).collect()
}

#[cfg(test)]
mod tests;
