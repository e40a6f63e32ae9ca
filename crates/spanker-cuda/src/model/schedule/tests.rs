// SPDX-License-Identifier: Apache-2.0
//! Programs of cards and what they come to.

use spanker_runtime::BufferId;

use super::*;
use crate::model::operands::{self, Operands, kind};

fn at(offset: u64) -> Place {
    Place { buffer: BufferId(0), offset }
}

fn address(slot: usize, place: Place) -> u64 {
    ((slot as u64 + 1) << 32) + place.offset
}

/// Instructions with numbers that say which they are.
fn instructions(numbers: &[u32]) -> Part {
    let one = |&words: &u32| Instruction::new(operands::Fill { words, ..Default::default() });
    Part::Instructions(numbers.iter().map(one).collect())
}

fn gather() -> Part {
    let parts = [0..8, 8..16].into_iter().collect();
    Part::Exchange(Op::Gather { parts, rows: 1, from: at(0), into: at(1024) })
}

/// One group of cards.
fn group(cards: Range<usize>) -> [Range<usize>; 1] {
    [cards]
}

fn send(to: usize) -> Part {
    Part::Exchange(Op::Send { to, from: at(0), length: 16 })
}

fn receive(from: usize, length: u64) -> Part {
    Part::Exchange(Op::Receive { from, into: at(64), length })
}

/// A card's program: its operators have the numbers of their instructions and exchanges.
fn card(device: usize, parts: Vec<Part>) -> Listed {
    let count = parts.iter().map(|part| match part {
        Part::Instructions(all) | Part::Streamed(all) => all.len(),
        Part::Exchange(_) => 1,
    });
    let ops = (0..count.sum()).map(|at| at..at + 1).collect();
    Listed::new(device, Parts { parts, ops, ..Default::default() })
}

/// For every entry what it is, and of a launch what is done in each round: a card and the number of its operator.
fn told(entries: &[Entry]) -> Vec<String> {
    let done = |done: &[Done]| {
        let each = done.iter().map(|done| format!("{}:{}", done.slot, done.ops.start));
        each.collect::<Vec<_>>().join("+")
    };
    let told = |entry: &Entry| match entry {
        Entry::Launch { device, tasks } => {
            let mut text = format!("device {device}:");
            for task in tasks {
                let last = task.instructions.last().expect("an instruction");
                let ends = if last.is_joined() { "," } else { ";" };
                text.push_str(&format!(" {}{ends}", done(&task.done)));
            }
            text
        }
        Entry::Streamed { slot, .. } => format!("card {slot} streams"),
        Entry::Exchange(between) => format!("host: {}", done(&between.done())),
    };
    entries.iter().map(told).collect()
}

#[test]
fn cards_of_a_device_are_one_launch_whose_rounds_have_an_instruction_of_each() {
    let program = || vec![instructions(&[1, 2]), gather(), instructions(&[3])];
    let cards = vec![card(0, program()), card(0, program())];
    let entries = schedule(cards, &group(0..2), &address).unwrap();
    assert_eq!(told(&entries), ["device 0: 0:0, 1:0; 0:1, 1:1; 0:2+1:2; 0:3, 1:3;"]);
    let Entry::Launch { tasks, .. } = &entries[0] else { panic!("{entries:?}") };
    let gather: &operands::Gather = tasks[4].instructions[0].get().unwrap();
    assert_eq!((gather.givers, gather.getters, gather.width * gather.unit), (2, 2, 16));
    assert_eq!(gather.from[..2], [1 << 32, 2 << 32]);
    assert_eq!(gather.into[..2], [(1 << 32) + 1024, (2 << 32) + 1024]);
    assert_eq!((tasks[4].sent, tasks[4].done[0].exchanged), (16, Some(16)));
    // Joined instructions do what they did.
    assert!(tasks[0].instructions[0].is_joined());
    assert_eq!(operands::Fill::KIND, kind::FILL);
}

#[test]
fn programs_of_different_lengths_wait_for_each_other_at_exchanges_alone() {
    let cards = vec![
        card(0, vec![instructions(&[1, 2, 3]), gather()]),
        card(0, vec![gather(), instructions(&[4])]),
    ];
    let entries = schedule(cards, &group(0..2), &address).unwrap();
    assert_eq!(told(&entries), ["device 0: 0:0; 0:1; 0:2; 0:3+1:0; 1:1;"]);
}

#[test]
fn exchanges_between_devices_go_through_the_host_and_all_that_are_ready_go_together() {
    let program = || vec![instructions(&[1]), gather(), instructions(&[2])];
    let two = vec![card(0, program()), card(1, program())];
    let entries = schedule(two, &group(0..2), &address).unwrap();
    let expected =
        ["device 0: 0:0;", "device 1: 1:0;", "host: 0:1+1:1", "device 0: 0:2;", "device 1: 1:2;"];
    assert_eq!(told(&entries), expected);
    let giver = |to| vec![instructions(&[1]), send(to)];
    let getter = |from| vec![receive(from, 16), gather(), instructions(&[2])];
    let four = vec![card(0, giver(2)), card(0, giver(3)), card(1, getter(0)), card(1, getter(1))];
    let entries = schedule(four, &[0..2, 2..4], &address).unwrap();
    let expected =
        ["device 0: 0:0, 1:0;", "host: 0:1+2:0", "host: 1:1+3:0", "device 1: 2:1+3:1; 2:2, 3:2;"];
    assert_eq!(told(&entries), expected);
}

#[test]
fn stages_of_one_device_hand_over_within_it_and_prefetched_weights_have_launches_of_their_own() {
    let streamed = || match instructions(&[5, 6]) {
        Part::Instructions(all) => Part::Streamed(all),
        other => other,
    };
    let cards = vec![
        card(0, vec![streamed(), send(1)]),
        card(0, vec![receive(0, 16), streamed(), instructions(&[7])]),
    ];
    let entries = schedule(cards, &[0..1, 1..2], &address).unwrap();
    let expected = ["card 0 streams", "device 0: 0:2+1:0;", "card 1 streams", "device 0: 1:3;"];
    assert_eq!(told(&entries), expected);
    let Entry::Launch { tasks, .. } = &entries[1] else { panic!("{entries:?}") };
    let bytes: Vec<Option<u64>> = tasks[0].done.iter().map(|done| done.exchanged).collect();
    assert_eq!((bytes, tasks[0].sent), (vec![Some(0), Some(16)], 16));
}

#[test]
fn programs_that_do_not_belong_together_are_refused() {
    let refused = |cards: Vec<Listed>, groups: &[Range<usize>]| {
        schedule(cards, groups, &address).unwrap_err().to_string()
    };
    let said = astray().to_string();
    // One never comes to the exchange.
    let lonely = vec![card(0, vec![gather()]), card(0, vec![instructions(&[1])])];
    assert_eq!(refused(lonely, &group(0..2)), said);
    // Another length than was sent, and a message that nobody sends.
    let short = vec![card(0, vec![send(1)]), card(0, vec![receive(0, 8)])];
    assert_eq!(refused(short, &[0..1, 1..2]), said);
    let silent = vec![card(0, vec![]), card(1, vec![receive(0, 8)])];
    assert_eq!(refused(silent, &[0..1, 1..2]), said);
    let other = Part::Exchange(Op::Gather {
        parts: [0..4, 4..8].into_iter().collect(),
        rows: 1,
        from: at(0),
        into: at(64),
    });
    let unlike = vec![card(0, vec![gather()]), card(0, vec![other])];
    assert_eq!(refused(unlike, &group(0..2)), said);
}
