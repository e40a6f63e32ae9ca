// SPDX-License-Identifier: Apache-2.0
//! The byte stream of a program: the parser, and a card that is fed with what it finds.

use rand::Rng;
use rand_pcg::Pcg64Mcg;
use spanker_runtime::abi::{
    Ping, RawAccess, RawAllocate, RawCardInfo, RawFree, RawPortInfo, RawRead, RawRecords, RawReset,
    RawState, RawSubmit, RawWait, Request,
};
use spanker_runtime::message::{Parsed, head, parse};
use spanker_runtime::{Counters, encode_work};

use crate::pair::{HOSTILE, Pair, pace};
use crate::script::Script;
use crate::work::descriptors;

/// Runs an input: the pace, what happens at the end, and the stream.
pub fn run(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let (pace, end) = (pace(script.byte()), script.byte());
    let mut pair = Pair::new(pace);
    let mut stream = script.left;
    loop {
        let now = pair.ends[0].now;
        match parse(stream) {
            Parsed::Request(message) => {
                assert!(message.used <= stream.len() && message.used >= 32);
                pair.ends[0].card.request(HOSTILE, &message, now);
                stream = &stream[message.used..];
                pair.steps(1);
            }
            Parsed::Incomplete(need) => {
                assert!(need > stream.len(), "an incomplete message needs more");
                assert!(need <= 32 + 4096 + (16 << 20), "and not without bounds");
                break;
            }
            Parsed::Refused { error, number, sequence } => {
                pair.ends[0].card.refuse(HOSTILE, number, sequence, error);
                break;
            }
        }
    }
    pair.steps(2);
    if end & 1 == 1 {
        pair.ends[0].card.disconnect(HOSTILE);
    }
    if end & 2 == 2 {
        pair.ends[0].card.cut(0);
    }
    pair.steps(3);
    pair.ends.iter_mut().for_each(crate::pair::Guarded::check);
}

fn push<R: Request>(out: &mut Vec<u8>, request: R, payload: &[u8]) {
    let argument = bytemuck::bytes_of(&request);
    out.extend_from_slice(&head(R::NUMBER, 0, 5, argument.len(), payload.len()));
    out.extend_from_slice(argument);
    out.extend_from_slice(payload);
}

/// A stream of requests that a decent program could send.
pub fn valid(dice: &mut Pcg64Mcg) -> Vec<u8> {
    let mut out = vec![dice.random(), dice.random()];
    push(&mut out, RawAllocate { length: 4096, buffer: 0 }, &[]);
    push(&mut out, RawAllocate { length: 1000, buffer: 0 }, &[]);
    for _ in 0..dice.random_range(0..6) {
        // The guarded buffer is the first, so that these are the next two.
        let buffer = dice.random_range(2..4);
        let (offset, length) = (dice.random_range(0..500), dice.random_range(0..500));
        let access = RawAccess { address: 0, length, buffer, offset };
        match dice.random_range(0..12) {
            0 => push(&mut out, Ping, &[]),
            1 => push(&mut out, RawCardInfo::default(), &[]),
            2 => push(&mut out, RawPortInfo::default(), &[]),
            3 => push(&mut out, RawFree { buffer }, &[]),
            4 => push(&mut out, access, &vec![3; length as usize]),
            5 => push(&mut out, RawRead(access), &[]),
            6 | 7 => {
                let bytes = encode_work(&descriptors(dice));
                let length = bytes.len() as u64;
                let job = dice.random_range(1..3);
                push(&mut out, RawSubmit { address: 0, length, job, ticket: 0 }, &bytes);
            }
            8 => {
                let timeout_ns = dice.random_range(0..100_000);
                push(&mut out, RawWait { ticket: 1, timeout_ns, ..RawWait::default() }, &[]);
            }
            9 => push(&mut out, Counters::default(), &[]),
            10 => {
                let job = dice.random_range(0..3);
                push(&mut out, RawReset { job, ..RawReset::default() }, &[]);
            }
            _ => {
                push(&mut out, RawState::default(), &[]);
                push(&mut out, RawRecords { length: 4096, ..RawRecords::default() }, &[]);
            }
        }
    }
    out
}
