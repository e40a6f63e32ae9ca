// SPDX-License-Identifier: Apache-2.0
//! Cards that share an emulated device give each other what they have there: with the bits of threads, without the host
//! between the beginning and the end of a step, and so that what is done wrong is seen.

use proptest::prelude::*;
use spanker_collective::{DType, ReduceOp};
use spanker_llm::{Recorder, Runner, Step};
use spanker_model::Quant;
use spanker_plan::{Activity, Fold, GpuStaging, Part, Split, Want};
use spanker_runtime::{BufferId, Place};
use spanker_test_support::Recipe;

use super::super::device::Memory;
use super::super::device_context::DeviceContext;
use super::super::exchange::{Exchange, Memories};
use super::super::machine::KERNEL_KV_TYPES;
use super::super::operands::{FoldWords, Gather, Instruction};
use super::models::{Both, Groups, mixture};
use super::{Emulated, Event, is_possible};
use crate::CudaError;

/// A model whose heads, rows and layers four cards can share.
fn recipe() -> Recipe {
    Recipe { layers: 3, ..Recipe::llama(Quant::Q4_0, [8, 4, 32], 256, 512) }
}

/// Stages of so many cards, one after the other.
fn stages(counts: &[usize]) -> Groups {
    let mut card = 0..;
    counts
        .iter()
        .map(|&count| card.by_ref().take(count).map(|card| (card, 1.0)).collect())
        .collect()
}

fn splits() -> Vec<(Split, Groups)> {
    let uneven = vec![vec![(0, 3.0), (1, 1.0), (2, 2.0)]];
    let mut all: Vec<(Split, Groups)> = [&[2][..], &[3], &[4], &[2, 1], &[1, 2], &[2, 2]]
        .into_iter()
        .flat_map(|counts| [Split::Gather, Split::Reduce].map(|split| (split, stages(counts))))
        .collect();
    all.push((Split::Gather, uneven));
    all.extend([&[1, 1][..], &[1, 1, 1]].map(|counts| (Split::Gather, stages(counts))));
    all
}

/// Fails if the host read or wrote anything between a step's first launch and its last. Returns the launches.
fn launches_without_the_host(what: &str, events: &[Event]) -> usize {
    let is_launch = |event: &Event| *event == Event::Launch;
    let first = events.iter().position(is_launch).expect("a launch");
    let last = events.iter().rposition(is_launch).expect("a launch");
    let launches = &events[first..=last];
    assert!(launches.iter().all(is_launch), "{what}: {events:?}");
    launches.len()
}

#[test]
fn cards_of_one_device_have_the_bits_of_threads_and_the_host_stays_out_of_their_steps() {
    if !is_possible() {
        return;
    }
    for (at, (split, groups)) in splits().into_iter().enumerate() {
        let kv = KERNEL_KV_TYPES[at % 2];
        let what = format!("{split:?} {groups:?}, {kv}");
        let mut both = Both::new(&recipe(), (split, &groups, kv), &[2]);
        both.one_sequence(&what, &[3, 1], 7, 2);
        mixture(&mut both, &what);
        let told = std::sync::Arc::clone(&both.told[0]);
        for count in [1u64, 5] {
            let tokens: Vec<u32> = (0..count as u32).collect();
            let part = Part::new(&tokens, 0, &[10], Want::Logits);
            both.step(&what, &Step::of(&[part]));
            told.taken();
            both.step(&what, &Step::of(&[part]));
            let launches = launches_without_the_host(&what, &told.taken());
            // Stages of one card have a kernel of their own; groups have one launch for all that they do, as far as there
            // is room to time it.
            if groups.len() == 1 {
                let most = if count == 1 { 1 } else { groups[0].len() };
                assert!(launches <= most, "{what}, {count} rows: {launches}");
            }
        }
    }
}

#[test]
fn cards_on_several_devices_exchange_through_the_host_and_those_of_one_device_do_not() {
    if !is_possible() {
        return;
    }
    // Cards 0 and 2 are on the first device, 1 and 3 on the second.
    let groups = vec![vec![(0, 1.0), (2, 1.0)], vec![(1, 1.0), (3, 1.0)]];
    for (groups, most) in [(groups, 1), (stages(&[4]), usize::MAX)] {
        for split in [Split::Gather, Split::Reduce] {
            let what = format!("{split:?} {groups:?}");
            let mut both = Both::new(&recipe(), (split, &groups, Quant::F16), &[2, 1]);
            both.one_sequence(&what, &[3, 1], 5, 1);
            both.told.iter().for_each(|told| drop(told.taken()));
            let part = Part::new(&[9], 6, &[3, 1], Want::Logits);
            both.step(&what, &Step::of(&[part]));
            for told in &both.told {
                let launches = told.taken().iter().filter(|event| **event == Event::Launch).count();
                assert!(launches <= most && (most == 1 || launches > 4), "{what}: {launches}");
            }
        }
    }
}

/// Steps of two or three cards, with instructions that somebody spoilt.
fn is_seen(split: Split, cards: usize, fault: fn(&mut [Instruction])) -> bool {
    let mut both = Both::new(&recipe(), (split, &stages(&[cards]), Quant::F16), &[2]);
    *both.told[0].change.lock().unwrap() = Some(fault);
    let tokens: Vec<u32> = (3..9).collect();
    let part = Part::new(&tokens, 0, &[2], Want::Logits);
    !both.is_same(&Step::of(&[part]))
}

#[test]
fn members_that_are_swapped_and_parts_that_are_dropped_are_seen() {
    if !is_possible() {
        return;
    }
    fn none(_: &mut [Instruction]) {}
    fn swapped(all: &mut [Instruction]) {
        all.iter_mut().filter_map(Instruction::get_mut::<Gather>).for_each(|op| op.from.swap(0, 1));
    }
    fn dropped(all: &mut [Instruction]) {
        all.iter_mut().filter_map(Instruction::get_mut::<Gather>).for_each(|op| op.givers -= 1);
    }
    fn not_given(all: &mut [Instruction]) {
        all.iter_mut().filter_map(Instruction::get_mut::<Gather>).for_each(|op| op.getters -= 1);
    }
    fn left_out(all: &mut [Instruction]) {
        let folds = all.iter_mut().filter_map(Instruction::get_mut::<FoldWords>);
        folds.for_each(|op| op.cards -= 1);
    }
    for (split, cards, fault, is_wrong) in [
        (Split::Gather, 2, none as fn(&mut [Instruction]), false),
        (Split::Gather, 2, swapped, true),
        (Split::Gather, 3, dropped, true),
        (Split::Gather, 2, not_given, true),
        (Split::Reduce, 3, none, false),
        (Split::Reduce, 3, left_out, true),
    ] {
        assert_eq!(is_seen(split, cards, fault), is_wrong, "{split:?} {cards}");
    }
}

#[test]
fn a_trace_has_every_exchange_of_every_card_with_its_number() {
    if !is_possible() {
        return;
    }
    for (split, each) in [(Split::Gather, 4), (Split::Reduce, 2)] {
        let mut both = Both::new(&recipe(), (split, &stages(&[2]), Quant::F16), &[2]);
        let recorder = Recorder::new();
        both.emulated.record(&recorder);
        let part = Part::new(&[7], 0, &[2], Want::Logits);
        both.emulated.step(&Step::of(&[part])).expect("a step");
        let marks = recorder.marks();
        let of = |card: usize| {
            let own = marks.iter().filter(|mark| mark.card as usize == card);
            own.filter(|mark| mark.label.activity == Activity::Exchange).collect::<Vec<_>>()
        };
        let (one, two) = (of(0), of(1));
        // Of three layers, and of the embedding.
        assert_eq!((one.len(), two.len()), (3 * each + 1, 3 * each + 1), "{split:?}");
        for (one, two) in one.iter().zip(&two) {
            assert_eq!((one.op, one.ops, one.start, one.end), (two.op, 1, two.start, two.end));
            assert!(one.start <= one.end);
        }
        assert!(one.windows(2).all(|pair| pair[0].op < pair[1].op && pair[0].end <= pair[1].start));
    }
}

/// Cards with a buffer each on one device.
struct Cards {
    device: DeviceContext,
    memories: Vec<Memory>,
}

impl Cards {
    fn new(count: usize, bytes: usize) -> Cards {
        let mut device = DeviceContext::new(Box::new(Emulated::new(2).0));
        device.knows(Quant::Q4_0);
        let mut memories = Vec::new();
        for card in 0..count {
            let mut memory = device.allocate(bytes, "a test").unwrap();
            // Numbers from 1 to 2, whose sums depend on the order.
            let word = |at: usize| {
                let hash = ((at + card * 40_503 + 1) as u32).wrapping_mul(2_654_435_761);
                (0x3f80_0000 | hash >> 9).to_le_bytes()
            };
            let own: Vec<u8> = (0..bytes / 4).flat_map(word).collect();
            device.write(&mut memory, 0, &own).unwrap();
            memories.push(memory);
        }
        Cards { device, memories }
    }

    fn all(&mut self) -> Vec<Vec<u8>> {
        let Cards { device, memories } = self;
        let read = |memory: &Memory| {
            let mut bytes = vec![0; memory.bytes];
            device.read(memory, 0, &mut bytes).unwrap();
            bytes
        };
        memories.iter().map(read).collect()
    }

    /// By instructions, to which something is done first. Returns whether the kernel can.
    fn on_device(&mut self, exchange: &Exchange, fault: fn(&mut Instruction)) -> bool {
        let bases: Vec<u64> = self.memories.iter().map(Memory::base).collect();
        let address = |rank: usize, place: Place| bases[rank] + place.offset;
        let Some(mut instructions) = exchange.instructions(&address) else { return false };
        instructions.iter_mut().for_each(fault);
        if instructions.is_empty() {
            return true;
        }
        let staging = GpuStaging { instructions: 64, parts: 1, slots: 0, inputs: 0 };
        let mut work = self.device.workspace(&staging).unwrap();
        let blocks = self.device.blocks(0).unwrap();
        let loaded = self.device.load(&mut work, &instructions, 0, blocks).unwrap();
        self.device.run(&mut work, &loaded.unwrap()).unwrap();
        true
    }
}

impl Memories for Cards {
    fn get(&mut self, slot: usize, place: Place, out: &mut [u8]) -> Result<(), CudaError> {
        self.device.read(&self.memories[slot], place.offset as usize, out)
    }

    fn put(&mut self, slot: usize, place: Place, bytes: &[u8]) -> Result<(), CudaError> {
        self.device.write(&mut self.memories[slot], place.offset as usize, bytes)
    }
}

fn at(offset: u64) -> Place {
    Place { buffer: BufferId(0), offset }
}

const HALF: u64 = 1 << 14;

/// Parts of rows, of so many units of so many bytes each.
fn gather(lengths: &[u64], unit: u64, rows: u64, odd: u64) -> Exchange {
    let mut end = 0;
    let parts = lengths.iter().map(|length| {
        let start = end;
        end += length * unit;
        start..end
    });
    let parts = parts.collect();
    let from = lengths.iter().map(|_| at(odd)).collect();
    let into = lengths.iter().map(|_| at(HALF)).collect();
    Exchange::Gather { parts, rows, from, into }
}

fn same_as_through_the_host(exchange: &Exchange, cards: usize) {
    let [mut one, mut two] = [(); 2].map(|()| Cards::new(cards, 2 * HALF as usize));
    assert!(one.on_device(exchange, |_| ()), "{exchange:?}");
    let slots: Vec<usize> = (0..cards).collect();
    exchange.through_host(&slots, &mut two).unwrap();
    assert!(one.all() == two.all(), "{exchange:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn gathers_and_folds_of_any_number_of_cards_are_those_through_the_host(
        lengths in prop::collection::vec(0u64..20, 2..9),
        unit in prop::sample::select(vec![2u64, 4, 16]),
        rows in 1u64..5,
        elements in 1u64..3000,
        is_sum in any::<bool>(),
    ) {
        if is_possible() {
            let cards = lengths.len();
            same_as_through_the_host(&gather(&lengths, unit, rows, 2 * (rows % 2)), cards);
            let (dtype, op) = match is_sum {
                true => (DType::F32, ReduceOp::Sum),
                false => (DType::U32, ReduceOp::BitwiseOr),
            };
            let fold = Fold { dtype: dtype.code(), op: op.code().unwrap_or_default() };
            let data = vec![at(8); cards];
            same_as_through_the_host(&Exchange::Fold { data, elements, fold }, cards);
            let (from, into, length) = (at(0), at(HALF), 2 * elements);
            same_as_through_the_host(&Exchange::Handoff { from, into, length }, 2);
        }
    }
}

#[test]
fn sums_in_another_order_than_that_of_ranks_are_seen() {
    if !is_possible() {
        return;
    }
    let fold = Fold { dtype: DType::F32.code(), op: ReduceOp::Sum.code().unwrap() };
    let exchange = Exchange::Fold { data: vec![at(0); 3], elements: 500, fold };
    let of = |fault: fn(&mut Instruction)| {
        let mut cards = Cards::new(3, 2000);
        assert!(cards.on_device(&exchange, fault));
        cards.all()
    };
    let swapped = |one: &mut Instruction| one.get_mut::<FoldWords>().unwrap().data.swap(0, 2);
    assert!(of(|_| ()) != of(swapped));
}

#[test]
fn what_the_kernel_cannot_exchange_is_left_to_the_host() {
    let address = |rank: usize, place: Place| ((rank as u64) << 32) + place.offset;
    let is_left = |exchange: &Exchange| exchange.instructions(&address).is_none();
    assert!(!is_left(&gather(&[3, 5], 2, 1, 0)));
    // Bytes that are not pairs, and parts that lie where rows go.
    assert!(is_left(&gather(&[3, 5], 1, 1, 0)));
    assert!(is_left(&gather(&[3, 5], 2, 1, HALF - 2)));
    let sums = Fold { dtype: DType::F32.code(), op: ReduceOp::Sum.code().unwrap() };
    let fold =
        |cards: usize, fold: Fold| Exchange::Fold { data: vec![at(0); cards], elements: 4, fold };
    assert!(!is_left(&fold(12, sums)) && is_left(&fold(13, sums)));
    let products = Fold { op: ReduceOp::Product.code().unwrap(), ..sums };
    assert!(is_left(&fold(2, products)));
    // More cards than an instruction has places for are several instructions.
    let many = gather(&[1; 13], 16, 1, 0).instructions(&address).unwrap();
    assert_eq!(many.len(), 9);
}
