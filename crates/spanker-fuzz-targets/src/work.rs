// SPDX-License-Identifier: Apache-2.0
//! Descriptors: the decoder, and two linked cards that run whatever it lets pass while things happen to them.

use nix::errno::Errno;
use rand::Rng;
use rand_pcg::Pcg64Mcg;
use spanker_runtime::abi::{RawFree, RawReset, RawSubmit};
use spanker_runtime::{
    Activation, BufferId, Descriptor, Fold, KvCache, Landing, Picks, Place, Scores, Work,
    decode_work, encode_work,
};

use crate::pair::{GUARD, Guarded, HOSTILE, Pair, pace};
use crate::script::Script;

/// The job of everything here.
const JOB: u64 = 9;
/// The program's buffers, which come behind the guarded one.
const BUFFERS: [(u64, u64); 2] = [(2, 4096), (3, 1000)];

/// Runs an input: the pace, what happens and when, where the second card's bytes begin, and the bytes.
pub fn run(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let (pace, act, when) = (pace(script.byte()), script.byte(), script.byte());
    let split = usize::from(script.short());
    let both = [script.take(split), script.left];
    let mut pair = Pair::new(pace);
    for (end, work) in pair.ends.iter_mut().zip(both) {
        for (handle, length) in BUFFERS {
            assert_eq!(end.allocate(HOSTILE, length), handle);
        }
        submit(end, work);
    }
    pair.steps(usize::from(when % 8));
    happen(&mut pair, act);
    pair.steps(8);
    for end in &mut pair.ends {
        end.check();
        // Whatever is left of the job, the program can be rid of it.
        let (status, ..) = end.ask(HOSTILE, RawReset { job: JOB, ..RawReset::default() }, &[]);
        assert_eq!(status, 0);
        let (status, ..) = end.ask(GUARD, submission(JOB + 1, 0), &[]);
        assert_eq!(status, 0, "the card is free");
    }
    pair.steps(2);
}

fn submission(job: u64, length: usize) -> RawSubmit {
    RawSubmit { address: 0, length: length as u64, job, ticket: 0 }
}

fn submit(end: &mut Guarded, bytes: &[u8]) {
    let (status, ..) = end.ask(HOSTILE, submission(JOB, bytes.len()), bytes);
    match decode_work(bytes) {
        Err(_) => assert_eq!(status, Errno::EINVAL as i32, "what is no work is refused"),
        Ok(work) => {
            let again = decode_work(&encode_work(&work));
            assert_eq!(again.as_ref(), Ok(&work), "work survives its encoding");
        }
    }
}

/// Something that programs and supervisors do at any time.
fn happen(pair: &mut Pair, act: u8) {
    let now = pair.ends[0].now;
    let end = &mut pair.ends[usize::from(act >> 7)];
    match act & 15 {
        0 => drop(end.ask(HOSTILE, RawReset { job: JOB, ..RawReset::default() }, &[])),
        1 => drop(end.ask(HOSTILE, RawReset::default(), &[])),
        2 => {
            end.card.disconnect(HOSTILE);
            end.card.connect(HOSTILE, 2);
        }
        3 => end.card.cut(0),
        4 => end.card.mend(0, now),
        5 => end.card.lost(0),
        6 => end.card.connect_port(0, now),
        7 => end.card.set_errors(0, 1e-5),
        8 => end.card.set_errors(0, 0.5),
        9 => end.card.stick(act & 16 == 0),
        10 => end.card.slow_down(f64::from(act)),
        11 => drop(end.ask(HOSTILE, RawFree { buffer: 2 }, &[])),
        12 => drop(end.ask(GUARD, RawReset { job: JOB, ..RawReset::default() }, &[])),
        13 => end.card.garble(true),
        _ => {}
    }
}

fn place(dice: &mut Pcg64Mcg) -> Place {
    let buffer = BufferId(dice.random_range(2..4));
    Place { buffer, offset: dice.random_range(0..16u64) * 8 }
}

/// An operator of a model, of sizes that mostly fit the buffers.
fn operator(dice: &mut Pcg64Mcg) -> Work {
    let at = |buffer, offset| Place { buffer: BufferId(buffer), offset };
    let (from, other, into) = (at(2, 0), at(2, 2048), at(3, 0));
    let (rows, width) = (dice.random_range(0..3), dice.random_range(1..4) * 32);
    let (elements, quant) = (dice.random_range(0..200), [8, 8, 0, 15][dice.random_range(0..4)]);
    match dice.random_range(0..18) {
        0 => {
            let [first, count] = [dice.random_range(0..9), dice.random_range(0..20)];
            Work::Embed { table: from, ids: other, into, rows, width, quant, first, count }
        }
        1 => {
            let into = if dice.random() { from } else { into };
            Work::Norm { from, weight: other, into, rows, width, epsilon: dice.random() }
        }
        2 => Work::Quantize { from, into, rows, width, quant },
        3 => {
            let (heads, head_size, pairs) = (dice.random_range(1..4), 16, dice.random_range(0..2));
            let dims = dice.random_range(0..9) * 2;
            Work::Rotate { data: from, table: other, rows, heads, head_size, dims, pairs }
        }
        4 => Work::Halve { from, into, elements },
        5 => Work::Attend {
            queries: from,
            keys: other,
            values: at(2, 3072),
            into,
            rows,
            heads: dice.random_range(1..5),
            kv_heads: dice.random_range(1..3),
            head_size: 8,
            group: dice.random_range(1..4),
            offset: dice.random_range(0..3),
            past: dice.random_range(0..9),
            scale: dice.random(),
        },
        6 => {
            let activation = Activation::ALL[dice.random_range(0..3)];
            Work::Gate { gate: from, up: other, into, elements, activation }
        }
        7 => {
            let length = dice.random_range(0..40);
            let [from_stride, into_stride] = [0; 2].map(|_: u64| dice.random_range(length..50));
            Work::Rows { from, into, rows: elements / 10, length, from_stride, into_stride }
        }
        8 => {
            let (k, first) = (dice.random_range(1..100), dice.random_range(0..3));
            Work::Best { from, into, count: elements, k, first }
        }
        15..=17 => of_experts(dice, [from, other, into], rows, width),
        9..=13 => of_steps(dice, [from, other, into], rows, width),
        _ => {
            let shape = [rows, width, dice.random_range(0..9)];
            Work::Matmul { a: from, b: other, out: into, shape, types: [quant, quant] }
        }
    }
}

/// Mixtures of experts, whose picks may name any expert.
fn of_experts(dice: &mut Pcg64Mcg, [from, other, into]: [Place; 3], rows: u64, width: u64) -> Work {
    let experts = dice.random_range(1..6);
    let picks = Picks { at: other, used: dice.random_range(1..=experts), experts };
    match dice.random_range(0..4) {
        0 => {
            let picks = Picks { at: into, ..picks };
            Work::Route { logits: from, picks, rows, gating: dice.random_range(0..4) }
        }
        1 => {
            let (n, types) = (dice.random_range(0..4), [8, 8]);
            let (stride, apart) = (dice.random_range(0..500), dice.random());
            let (a, b, out, shape) = (from, Place { offset: 4096, ..from }, into, [rows, width, n]);
            Work::MatmulExperts { a, b, out, picks, shape, types, stride, apart }
        }
        2 => {
            let (stride, weighed) = (4 * dice.random_range(0..99), dice.random());
            Work::AddPicked { into, table: from, picks, rows, width, stride, weighed }
        }
        _ => Work::Combine { from, picks, into, rows, width, add: dice.random() },
    }
}

/// Work with rows of many sequences.
fn of_steps(dice: &mut Pcg64Mcg, [from, other, into]: [Place; 3], rows: u64, width: u64) -> Work {
    match dice.random_range(8..14) {
        8 => Work::Scale {
            data: into,
            elements: 8 * rows,
            factor: dice.random(),
            cap: dice.random(),
        },
        9 => Work::Write { into, bytes: vec![dice.random(); 4 * rows as usize].into() },
        10 => Work::AddRow { into, row: from, rows, width },
        11 => Work::RotateRows {
            data: into,
            table: from,
            positions: dice.random_range(0..20),
            at: other,
            rows,
            heads: dice.random_range(1..4),
            head_size: 16,
            dims: dice.random_range(0..9) * 2,
            pairs: dice.random_range(0..2),
        },
        12 => Work::Keep { keys: into, values: into, cache: cache(dice, from, other), rows },
        _ => Work::AttendBlocks {
            queries: into,
            cache: cache(dice, from, other),
            into,
            rows,
            heads: dice.random_range(1..5),
            group: dice.random_range(1..4),
            offset: dice.random_range(0..3),
            scores: scores(dice, other),
        },
    }
}

/// Scores with or without what may be done to them.
fn scores(dice: &mut Pcg64Mcg, sinks: Place) -> Scores {
    let plain = Scores::plain(dice.random());
    let window = [0, 1, 70, u64::MAX][dice.random_range(0..4)];
    let cap = [0, dice.random()][dice.random_range(0..2)];
    let sinks = [None, Some(sinks)][dice.random_range(0..2)];
    Scores { cap, window, sinks, ..plain }
}

/// A KV cache whose rows and tables are whatever is there.
fn cache(dice: &mut Pcg64Mcg, blocks: Place, rows: Place) -> KvCache {
    let whole: bool = dice.random();
    KvCache {
        blocks,
        count: dice.random_range(0..4),
        rows,
        tables: Place { offset: rows.offset + 64, ..rows },
        entries: dice.random_range(0..30),
        heads: 1,
        head_size: if whole { 0 } else { 4 },
        quant: if whole { 8 } else { 1 },
    }
}

/// Descriptors that mostly pass every check.
pub fn descriptors(dice: &mut Pcg64Mcg) -> Vec<Descriptor> {
    let mut all: Vec<Descriptor> = Vec::new();
    for _ in 0..dice.random_range(1..6) {
        let (port, tag, length) = (0, 1, dice.random_range(0..100u64) * 8);
        // Types and operations that mostly go together.
        let fold = Fold { dtype: dice.random_range(0..8), op: dice.random_range(0..4) };
        let work = match dice.random_range(0..12) {
            0 => {
                let (from, into) = (BufferId(2), BufferId(3));
                let at = |buffer| Place { buffer, offset: 0 };
                Work::Copy { from: at(from), into: at(into), length }
            }
            1 => Work::Fill { into: place(dice), length, pattern: dice.random() },
            2 => Work::Reduce {
                into: Place { buffer: BufferId(3), offset: 0 },
                sources: vec![Place { buffer: BufferId(2), offset: 8 }; dice.random_range(1..5)],
                elements: length / 8,
                fold,
                divisor: dice.random_range(0..300),
            },
            3 => Work::Matmul {
                a: Place { buffer: BufferId(2), offset: 0 },
                b: Place { buffer: BufferId(2), offset: 144 },
                out: Place { buffer: BufferId(3), offset: 0 },
                shape: [dice.random_range(0..4), 256, dice.random_range(0..4)],
                types: [12, 12],
            },
            4 | 5 => Work::Send { from: place(dice), length: length.min(800), port, tag },
            6 => {
                let landing = match dice.random_range(0..3) {
                    0 => Landing::FoldFirst(fold),
                    1 => Landing::FoldSecond(fold),
                    _ => Landing::Store,
                };
                Work::Receive { into: place(dice), length: length.min(800), port, tag, landing }
            }
            7 => Work::Fence { not_before_ps: dice.random_range(0..3) * 1_000_000 },
            _ => operator(dice),
        };
        let transfers: Vec<u32> = (0..all.len() as u32)
            .filter(|&at| matches!(all[at as usize].work, Work::Send { .. } | Work::Receive { .. }))
            .collect();
        let after = match transfers[..] {
            [] => None,
            _ if dice.random_bool(0.7) => None,
            _ => Some(transfers[dice.random_range(0..transfers.len())]),
        };
        all.push(Descriptor { after, work });
    }
    all
}

/// The descriptors of the other end of a link: what one sends the other receives.
fn mirrored(work: &[Descriptor]) -> Vec<Descriptor> {
    let other = |work: &Work| match *work {
        Work::Send { from: into, length, port, tag } => {
            Work::Receive { into, length, port, tag, landing: Landing::Store }
        }
        Work::Receive { into: from, length, port, tag, .. } => {
            Work::Send { from, length, port, tag }
        }
        ref same => same.clone(),
    };
    work.iter().map(|one| Descriptor { after: one.after, work: other(&one.work) }).collect()
}

/// Work for both cards that mostly runs.
pub fn valid(dice: &mut Pcg64Mcg) -> Vec<u8> {
    let first = descriptors(dice);
    let second = if dice.random_bool(0.7) { mirrored(&first) } else { descriptors(dice) };
    let [first, second] = [first, second].map(|work| encode_work(&work));
    let split = (first.len() as u16).to_le_bytes();
    let mut out: Vec<u8> = vec![dice.random(), dice.random(), dice.random()];
    out.extend_from_slice(&split);
    out.extend_from_slice(&first);
    out.extend_from_slice(&second);
    out
}
