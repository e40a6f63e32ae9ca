// SPDX-License-Identifier: Apache-2.0
//! Instructions with dataflow slots do what instructions with grid barriers do.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;

/// A streamed product of `width` numbers with `rows` rows of weights.
fn streamed(keep: u32, width: u32, rows: u32, input: u64, out: u64) -> Streamed {
    let added = if keep == keep::INTO { out } else { 0 };
    let (rows, outs) = ([rows, 0, 0], [out, 0, 0]);
    Streamed { width, keep, rows, input, outs, added, ..Default::default() }
}

fn product(keep: u32, width: u32, rows: u32, input: u64, out: u64) -> Instruction {
    Instruction::new(streamed(keep, width, rows, input, out))
}

/// Attention of one row: four heads, and two of keys and values.
fn attention(head_size: u32, [queries, new_keys, new_values]: [u64; 3], into: u64) -> Attend {
    let (rows, heads, kv_heads, is_fresh) = (1, 4, 2, 1);
    let op = Attend { rows, heads, kv_heads, head_size, is_fresh, ..Default::default() };
    Attend { queries, new_keys, new_values, into, ..op }
}

fn embedding(width: u32, into: u64) -> Instruction {
    Instruction::new(Embed { rows: 1, width, into, ..Default::default() })
}

/// A model of two layers: x at 0x1000, queries, keys and values, what comes of them, gates, and logits.
fn model() -> Vec<Instruction> {
    let (x, q, k, v, seen, gate, logits) = (0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000, 0x9000);
    let mut instructions = vec![embedding(64, x)];
    for _ in 0..2 {
        let all = streamed(keep::STORE, 64, 64, x, q);
        let all = Streamed { rows: [64, 32, 32], outs: [q, k, v], ..all };
        instructions.push(Instruction::new(all));
        instructions.push(Instruction::new(attention(16, [q, k, v], seen)));
        instructions.push(product(keep::INTO, 64, 64, seen, x));
        instructions.push(product(keep::GATED, 64, 128, x, gate));
        instructions.push(product(keep::INTO, 128, 64, gate, x));
    }
    instructions.push(product(keep::STORE, 64, 100, x, logits));
    instructions
}

/// Whether an instruction can follow others.
fn follows(instruction: &Instruction, before: &[Instruction]) -> bool {
    let mut run = Run::default();
    assert!(before.iter().all(|instruction| run.append(instruction)));
    run.append(instruction)
}

fn op<T: super::super::operands::Operands>(instruction: &Instruction) -> &T {
    instruction.get().expect("operands of this kind")
}

#[test]
fn a_model_has_slots_from_its_first_instruction_to_its_last() {
    let instructions = model();
    let mut run = Run::default();
    assert!(instructions.iter().all(|instruction| run.append(instruction)));
    let (assigned, bytes) = assign(&instructions, 1 << 20);
    assert!(bytes > 0 && bytes.is_multiple_of(ALIGNMENT));
    let embed: &Embed = op(&assigned[0]);
    assert_eq!((embed.into, embed.is_overwritten), (0x1000, 1), "a later instruction writes it");
    for instruction in &assigned[1..] {
        let ins = read(instruction);
        assert!(ins.iter().all(|numbers| numbers.at.start >= 1 << 20), "{instruction:?}");
        match instruction.get::<Streamed>() {
            None => assert_eq!(op::<Attend>(instruction).is_awaiting, 1),
            Some(op) if op.keep == keep::INTO => {
                assert_eq!(op.awaits, awaits::AWAITS_INPUT | awaits::AWAITS_ADDED);
            }
            Some(op) => assert_eq!(op.awaits, awaits::AWAITS_INPUT),
        }
    }
    // Results that nobody in the kernel needs go where the program says, and only there.
    let last: &Streamed = op(assigned.last().unwrap());
    assert_eq!((last.outs[0], last.stores[0]), (0x9000, 0));
    // What is overwritten later is not stored before.
    assert_eq!(op::<Streamed>(&assigned[5]).stores[0], 0);
    assert_eq!(op::<Streamed>(&assigned[10]).stores[0], 0x1000, "the last x is stored");
}

#[test]
fn every_slot_is_written_once() {
    let (assigned, bytes) = assign(&model(), 0x10_0000);
    let mut slots: Vec<Range<u64>> = Vec::new();
    for instruction in &assigned {
        for numbers in written(instruction) {
            let at = instruction.get::<Embed>().map_or(numbers.at.start, |op| op.slot);
            let range = at..at + (numbers.at.end - numbers.at.start);
            if at < 0x10_0000 {
                continue;
            }
            assert!(range.end <= 0x10_0000 + bytes);
            assert!(slots.iter().all(|slot| !overlap(slot, &range)), "{range:?}");
            slots.push(range);
        }
    }
    assert_eq!(slots.len(), 1 + 2 * 7);
}

#[test]
fn a_slot_that_is_read_or_written_in_part_ends_a_kernel() {
    let first = product(keep::STORE, 64, 64, 0x1000, 0x2000);
    // A wider row than what was written, one beside it, and a part of it.
    assert!(!follows(&product(keep::STORE, 128, 64, 0x2000, 0x8000), &[first]));
    assert!(!follows(&product(keep::STORE, 64, 64, 0x2000 - 4, 0x8000), &[first]));
    assert!(follows(&product(keep::STORE, 32, 64, 0x2000 + 16, 0x8000), &[first]));
    // Writes that cover another's in part.
    assert!(!follows(&product(keep::STORE, 64, 32, 0x2000, 0x2000 + 64), &[first]));
}

#[test]
fn what_other_blocks_may_still_read_is_not_written() {
    let first = product(keep::STORE, 64, 64, 0x1000, 0x2000);
    assert!(!follows(&product(keep::INTO, 64, 64, 0x3000, 0x1000), &[first]));
    assert!(!follows(&product(keep::INTO, 32, 64, 0x2000, 0x1000), &[first]), "half of a slot");
    // A block that has received all of the first instruction's results knows that nobody reads its inputs any more.
    assert!(follows(&product(keep::INTO, 64, 64, 0x2000, 0x1000), &[first]));
    let second = product(keep::STORE, 64, 64, 0x2000, 0x4000);
    assert!(follows(&product(keep::INTO, 64, 64, 0x4000, 0x1000), &[first, second]));
    // Of an instruction with two results, one says nothing about blocks that had no part in it.
    let both = streamed(keep::STORE, 64, 64, 0x1000, 0x2000);
    let both = Streamed { rows: [64, 64, 0], outs: [0x2000, 0x5000, 0], ..both };
    assert!(!follows(&product(keep::INTO, 64, 64, 0x2000, 0x1000), &[Instruction::new(both)]));
    // A head has received a part of what the instruction before produces: other blocks may still run that.
    let [_, all, attend, ..] = model()[..] else { panic!("a model has more instructions") };
    let attend = Attend { into: op::<Streamed>(&all).input, ..*op(&attend) };
    assert!(!follows(&Instruction::new(attend), &[all]));
    // An input that would be at an odd place.
    assert!(!follows(&product(keep::STORE, 32, 64, 0x2000 + 4, 0x8000), &[first]));
}

#[test]
fn a_model_without_its_first_instruction_is_one_kernel_too() {
    let mut run = Run::default();
    assert!(model()[1..].iter().all(|instruction| run.append(instruction)));
}

type Memory = HashMap<u64, u64>;

fn load(memory: &Memory, at: u64, count: usize) -> Vec<u64> {
    (0..count as u64).map(|i| memory.get(&(at + 4 * i)).copied().unwrap_or(at + 4 * i)).collect()
}

/// A part of an instruction that one block runs: what it reads, by address, number and count, and what it writes.
struct Part {
    reads: Vec<(Operand, usize, usize)>,
    writes: Vec<(Operand, usize)>,
}

/// The parts of an instruction for so many blocks, as the kernel distributes it: rows of a product in equal parts, of which
/// some may be empty; heads in turn, and a token's numbers too.
fn parts(instruction: &Instruction, blocks: usize) -> Vec<Vec<Part>> {
    (0..blocks).map(|block| parts_of(instruction, block, blocks)).collect()
}

fn parts_of(instruction: &Instruction, block: usize, blocks: usize) -> Vec<Part> {
    if let Some(op) = instruction.get::<Embed>() {
        let own = (block..op.width as usize).step_by(blocks);
        let writes = own.map(|i| (Operand::Embedded, i)).collect();
        return vec![Part { reads: Vec::new(), writes }];
    }
    if let Some(op) = instruction.get::<Attend>() {
        let (heads, size) = (op.heads as usize, op.head_size as usize);
        let part = |head: usize| {
            let kv = head * op.kv_heads as usize / heads;
            let (keys, values) = ((Operand::NewKeys, kv), (Operand::NewValues, kv));
            let reads = [(Operand::Queries, head), keys, values];
            Part {
                reads: reads.map(|(operand, at)| (operand, at * size, size)).into(),
                writes: (0..size).map(|i| (Operand::Attended, head * size + i)).collect(),
            }
        };
        return (block..heads).step_by(blocks).map(part).collect();
    }
    let op: &Streamed = op(instruction);
    let outs = if op.keep == keep::GATED { 1 } else { 3 };
    let rows_of =
        |out: usize| (0..op.rows[out] as usize).map(move |row| (Operand::Output(out), row));
    let rows: Vec<(Operand, usize)> = (0..outs).flat_map(rows_of).collect();
    let own = rows[rows.len() * block / blocks..rows.len() * (block + 1) / blocks].to_vec();
    let mut reads = vec![(Operand::Input, 0, op.width as usize)];
    if op.keep == keep::INTO {
        reads.extend(own.iter().map(|(_, row)| (Operand::Added, *row, 1)));
    }
    if own.is_empty() { Vec::new() } else { vec![Part { reads, writes: own }] }
}

/// Where an operand is.
fn address(instruction: &Instruction, operand: Operand) -> u64 {
    let all = read(instruction).into_iter().chain(written(instruction));
    let found = all.into_iter().find(|numbers| numbers.operand == operand);
    found.map_or(0, |numbers| numbers.at.start)
}

/// Where results go: the slot or the program's address, and the second place, if there is one.
fn targets(instruction: &Instruction, operand: Operand) -> [u64; 2] {
    if let Some(op) = instruction.get::<Embed>() {
        return [op.slot, if op.is_overwritten == 1 { 0 } else { op.into }];
    }
    let store = match (instruction.get::<Streamed>(), operand) {
        (Some(op), Operand::Output(out)) => op.stores[out],
        _ => op::<Attend>(instruction).store,
    };
    [address(instruction, operand), store]
}

/// What a part writes as one of its results: it depends on all that the part reads, but of what it adds to on its own row.
fn result(part: &Part, read: &[Vec<u64>], operand: Operand, row: usize) -> u64 {
    let which = if let Operand::Output(out) = operand { out } else { 0 };
    let mut sum = (which * 1000 + row) as u64;
    for ((from, at, _), numbers) in part.reads.iter().zip(read) {
        if *from != Operand::Added || *at == row {
            for number in numbers {
                sum = sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ number;
            }
        }
    }
    sum
}

/// Runs instructions with a grid barrier after each.
fn synchronised(instructions: &[Instruction], blocks: usize) -> Memory {
    let mut memory = Memory::new();
    for instruction in instructions {
        let mut new = Vec::new();
        for part in parts(instruction, blocks).iter().flatten() {
            let from = |(operand, at, count): &(Operand, usize, usize)| {
                load(&memory, address(instruction, *operand) + 4 * *at as u64, *count)
            };
            let read: Vec<Vec<u64>> = part.reads.iter().map(from).collect();
            new.extend(part.writes.iter().map(|&(operand, row)| {
                let to = address(instruction, operand) + 4 * row as u64;
                (to, result(part, &read, operand, row))
            }));
        }
        memory.extend(new);
    }
    memory
}

/// Blocks that run instructions with slots, and wait for nothing but for these.
struct Race<'a> {
    instructions: &'a [Instruction],
    base: u64,
    memory: Memory,
    /// What each block still runs: parts of instructions, each to read and then to write.
    left: Vec<VecDeque<(usize, Part)>>,
    read: Vec<Option<Vec<Vec<u64>>>>,
}

impl Race<'_> {
    /// Lets a block go on. Returns whether it can.
    fn go_on(&mut self, block: usize) -> bool {
        let Some((at, part)) = self.left[block].front() else { return false };
        let instruction = &self.instructions[*at];
        let Some(read) = self.read[block].take() else {
            let from = part.reads.iter().map(|&(operand, at, count)| {
                (address(instruction, operand) + 4 * at as u64, count)
            });
            let from: Vec<(u64, usize)> = from.collect();
            let (memory, base) = (&self.memory, self.base);
            let is_there = |&(at, count): &(u64, usize)| {
                at < base || (0..count as u64).all(|i| memory.contains_key(&(at + 4 * i)))
            };
            if from.iter().all(is_there) {
                let read = from.iter().map(|&(at, count)| load(memory, at, count)).collect();
                self.read[block] = Some(read);
            }
            return self.read[block].is_some();
        };
        for &(operand, row) in &part.writes {
            let value = result(part, &read, operand, row);
            let to = targets(instruction, operand);
            for to in to.into_iter().filter(|to| *to != 0) {
                let before = self.memory.insert(to + 4 * row as u64, value);
                assert!(to < self.base || before.is_none(), "a slot was written twice");
            }
        }
        self.left[block].pop_front();
        true
    }
}

/// Runs instructions with slots in so many blocks, in an order that `choices` make.
fn raced(
    instructions: &[Instruction],
    was: &[Instruction],
    base: u64,
    blocks: usize,
    choices: &[usize],
) -> Memory {
    let left = (0..blocks).map(|_| VecDeque::new()).collect();
    let mut race =
        Race { instructions, base, memory: Memory::new(), left, read: vec![None; blocks] };
    for (at, instruction) in was.iter().enumerate() {
        for (block, own) in parts(instruction, blocks).into_iter().enumerate() {
            race.left[block].extend(own.into_iter().map(|part| (at, part)));
        }
    }
    let mut choices = choices.iter().cycle();
    while race.left.iter().any(|own| !own.is_empty()) {
        let first = choices.next().unwrap();
        let went = (0..blocks).any(|i| race.go_on((first + i) % blocks));
        assert!(went, "nobody writes what is waited for");
    }
    race.memory
}

/// An instruction of a random program: its kind, where it reads and writes, and how much.
fn random(&(what, from, to, size): &(u32, u64, u64, u32)) -> Instruction {
    let place = |which: u64| 0x1000 + which % 6 * 0x100;
    let op = streamed(what % 3, size * 4, size * 4, place(from), place(to));
    match what {
        // A product with two matrices, attention, and a token.
        3 => {
            let (rows, outs) = ([size * 4, size * 4, 0], [place(to), place(to + 1), 0]);
            Instruction::new(Streamed { rows, outs, ..op })
        }
        4 => Instruction::new(attention(size, [from, from + 1, from + 2].map(place), place(to))),
        5 => embedding(size * 4, place(to)),
        _ => Instruction::new(op),
    }
}

/// Whether an instruction reads where it writes, by itself: programs have no such instructions, whatever kernel runs them.
fn is_tangled(instruction: &Instruction) -> bool {
    let reads = read(instruction).into_iter().filter(|numbers| numbers.operand != Operand::Added);
    let writes = written(instruction);
    reads.into_iter().any(|one| writes.iter().any(|two| overlap(&one.at, &two.at)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Random programs, cut where an instruction cannot follow: with slots, blocks in any order leave the same memory as
    /// with grid barriers.
    #[test]
    fn instructions_with_slots_leave_what_instructions_with_barriers_leave(
        steps in prop::collection::vec((0u32..6, 0u64..6, 0u64..6, 1u32..5), 1..24),
        blocks in 1usize..5,
        choices in prop::collection::vec(0usize..5, 1..200),
    ) {
        let instructions: Vec<Instruction> = steps.iter().map(random).filter(|instruction| !is_tangled(instruction)).collect();
        let base = 1 << 30;
        let mut run = Run::default();
        let mut runs: Vec<Vec<Instruction>> = Vec::new();
        for instruction in &instructions {
            if !runs.is_empty() && run.append(instruction) {
                runs.last_mut().unwrap().push(*instruction);
            } else {
                run = Run::default();
                prop_assert!(run.append(instruction));
                runs.push(vec![*instruction]);
            }
        }
        for run in runs {
            let (assigned, bytes) = assign(&run, base);
            let memory = raced(&assigned, &run, base, blocks, &choices);
            prop_assert!(memory.keys().all(|at| *at < base + bytes));
            let visible: Memory = memory.into_iter().filter(|(at, _)| *at < base).collect();
            prop_assert_eq!(visible, synchronised(&run, blocks));
        }
    }
}
