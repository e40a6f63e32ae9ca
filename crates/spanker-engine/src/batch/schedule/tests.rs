// SPDX-License-Identifier: Apache-2.0
//! Random lives of sequences, on cards that remember which token was written where.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;
use spanker_llm::WindowCache;

use super::*;

/// What is in a slot: the tokens up to it, as a number.
type Slot = u64;

/// A number for tokens in their order.
fn fingerprint(tokens: &[u32]) -> Slot {
    tokens.iter().fold(7, |all, token| (all ^ u64::from(*token)).wrapping_mul(0x0100_0000_01B3))
}

/// Cards that remember.
struct Cards {
    blocks: Vec<[Slot; 64]>,
    /// Layers with a window: how many positions their rows see, and what is in their blocks.
    windowed: Option<(usize, Vec<[Slot; 64]>)>,
}

/// A slot of a position, by a block table.
fn slot(blocks: &[u32], position: usize) -> (usize, usize) {
    (blocks[position / 64] as usize, position % 64)
}

/// Windows with blocks for so many sequences and the rows of a step.
fn windows(window: u64, sequences: u64, rows: u64) -> WindowCache {
    let touched = |positions: u64| (positions.max(1) - 1).div_ceil(64) + 1;
    let blocks = sequences * (touched(window) + 1) + touched(rows);
    WindowCache { window, blocks }
}

impl Cards {
    /// Runs a step, and sees that every part finds what came before it.
    fn run(&mut self, step: &StepParts, wholes: &HashMap<SequenceId, Vec<u32>>) {
        for &[from, to] in &step.copies {
            self.blocks[to as usize] = self.blocks[from as usize];
        }
        if let Some((_, blocks)) = &mut self.windowed {
            assert_eq!(step.copies.len(), step.windowed_copies.len());
            for &[from, to] in &step.windowed_copies {
                blocks[to as usize] = blocks[from as usize];
            }
        }
        let mut written = Vec::new();
        let mut windowed = Vec::new();
        for part in &step.parts {
            let whole = &wholes[&part.id];
            let real = part.tokens.len() - part.guessed;
            let mut text = whole[..part.past].to_vec();
            for (at, token) in part.tokens.iter().enumerate() {
                let position = part.past + at;
                assert!(at >= real || whole[position] == *token, "sequence {}", part.id);
                text.push(*token);
                let (block, place) = slot(&part.blocks, position);
                self.blocks[block][place] = fingerprint(&text);
                written.push((block, place));
                if let Some((_, blocks)) = &mut self.windowed {
                    let (block, place) = slot(&part.windowed, position);
                    blocks[block][place] = fingerprint(&text);
                    windowed.push((block, place));
                }
            }
        }
        for mut written in [written, windowed] {
            let count = written.len();
            written.sort_unstable();
            written.dedup();
            assert_eq!(written.len(), count, "a slot is written once in a step");
        }
        for part in &step.parts {
            let whole = &wholes[&part.id];
            for position in 0..part.past + part.tokens.len() - part.guessed {
                let (block, place) = (part.blocks[position / 64] as usize, position % 64);
                let right = fingerprint(&whole[..=position]);
                assert_eq!(self.blocks[block][place], right, "{} at {position}", part.id);
            }
            let Some((window, blocks)) = &self.windowed else { continue };
            let end = part.past + part.tokens.len() - part.guessed;
            for position in (part.past + 1).saturating_sub(*window)..end {
                let (block, place) = slot(&part.windowed, position);
                let right = fingerprint(&whole[..=position]);
                assert_eq!(blocks[block][place], right, "{} sees {position}", part.id);
            }
        }
    }
}

/// A request: which prefix it shares, its own tokens, how many are generated, and when it goes away.
#[derive(Debug, Clone)]
struct Life {
    prefix: u32,
    shared: usize,
    own: usize,
    answer: usize,
    leaves_after: Option<usize>,
    reuses: bool,
}

fn lives() -> impl Strategy<Value = Vec<Life>> {
    let life =
        (0..3u32, 0..200usize, 1..90usize, 1..40usize, prop::option::of(0..20usize), 0..8u32);
    let life = life.prop_map(|(prefix, shared, own, answer, leaves_after, reuses)| Life {
        prefix,
        shared,
        own,
        answer,
        leaves_after,
        reuses: reuses > 0,
    });
    prop::collection::vec(life, 1..12)
}

fn prompt(id: SequenceId, life: &Life) -> Vec<u32> {
    let shared = (0..life.shared as u32).map(|at| 1000 * (life.prefix + 1) + at);
    let own = (0..life.own as u32)
        .map(|at| if life.own.is_multiple_of(3) { at } else { at ^ (id as u32 * 77) });
    shared.chain(own).collect()
}

/// The token that a model gives after others.
fn next_token(tokens: &[u32]) -> u32 {
    (fingerprint(tokens) % 50_000) as u32
}

/// Guesses of what a model gives after others: some right ones, and then wrong ones.
fn guesses(tokens: &[u32]) -> Vec<u32> {
    let mut whole = tokens.to_vec();
    let (right, wrong) = (fingerprint(tokens) % 5, fingerprint(tokens) / 5 % 4);
    for at in 0..right + wrong {
        whole.push(next_token(&whole) ^ u32::from(at >= right));
    }
    whole.split_off(tokens.len())
}

/// Who asked, where nothing was guessed.
fn ids(asked: Vec<Asked>) -> Vec<Option<SequenceId>> {
    asked.into_iter().map(|asked| asked.id).collect()
}

/// Everything that is left to do, with the answers so far.
struct World {
    schedule: Schedule,
    cards: Cards,
    wholes: HashMap<SequenceId, Vec<u32>>,
    answers: HashMap<SequenceId, usize>,
    under_way: VecDeque<StepParts>,
    /// Guesses that were checked, and those that were right.
    guessed: (usize, usize),
}

impl World {
    fn new(blocks: usize, parallel: usize, windows: Option<WindowCache>) -> World {
        let pool = BlockPool::new(blocks, true).with_windows(windows);
        let schedule = Schedule::new(pool, parallel);
        let windowed =
            |cache: WindowCache| (cache.window as usize, vec![[0; 64]; cache.blocks as usize]);
        let cards = Cards { blocks: vec![[0; 64]; blocks], windowed: windows.map(windowed) };
        let (wholes, answers) = (HashMap::new(), HashMap::new());
        let under_way = VecDeque::new();
        World { schedule, cards, wholes, answers, under_way, guessed: (0, 0) }
    }

    fn add(&mut self, id: SequenceId, life: &Life) {
        let tokens = prompt(id, life);
        self.schedule.add(id, tokens.clone(), life.reuses);
        self.wholes.insert(id, tokens);
        self.answers.insert(id, 0);
    }

    /// Begins a step if there is one to begin.
    fn begin(&mut self, budget: Budget) -> bool {
        self.schedule.admit();
        let Some(step) = self.schedule.next(budget) else { return false };
        assert!(step.rows() <= budget.rows && step.parts.len() <= budget.members);
        self.schedule.begun(&step);
        // Cards go through steps in the order in which they begin.
        self.cards.run(&step, &self.wholes);
        self.under_way.push_back(step);
        true
    }

    fn end(&mut self, lives: &[Life]) {
        let Some(step) = self.under_way.pop_front() else { return };
        for asked in self.schedule.done(&step) {
            let Some(id) = asked.id else { continue };
            self.guessed.0 += asked.guesses.len();
            for at in 0..=asked.guesses.len() {
                let whole = self.wholes.get_mut(&id).expect("it was added");
                let token = next_token(whole);
                whole.push(token);
                let count = self.answers.get_mut(&id).expect("it was added");
                *count += 1;
                let life = &lives[id as usize];
                if *count == life.answer || life.leaves_after.is_some_and(|after| *count > after) {
                    self.schedule.remove(id);
                    break;
                }
                self.schedule.push(id, token);
                if asked.guesses.get(at) != Some(&token) {
                    break;
                }
                self.schedule.accept(id);
                self.guessed.1 += 1;
            }
            self.schedule.settle(id);
            if let Some(whole) = self.wholes.get(&id).filter(|whole| whole.len() % 7 > 0) {
                self.schedule.guess(id, guesses(whole));
            }
        }
    }
}

impl Schedule {
    /// All sequences that somebody wants, in their order, with their tokens and whether they use the cache: cards were lost,
    /// with all that was in their blocks.
    pub(crate) fn into_members(self) -> impl Iterator<Item = (SequenceId, Vec<u32>, bool)> {
        let all = self.running.into_iter().chain(self.waiting);
        let wanted = all.filter(|member| !member.is_gone);
        wanted.map(|member| (member.id, member.tokens, member.reuses))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_sequence_finds_its_own_tokens_and_all_come_to_their_end(
        lives in lives(),
        blocks in 6..20usize,
        parallel in 1..6usize,
        rows in 1..80usize,
        prompt_rows in 1..40usize,
        depth in 1..4usize,
        gaps in prop::collection::vec(0..4usize, 12),
        window in prop::option::of((1..200u64, 1..6u64)),
    ) {
        // With blocks for as many sequences as run, or for fewer, which are put back.
        let windows = window.map(|(window, sequences)| {
            windows(window, sequences.min(parallel as u64), rows as u64)
        });
        let mut world = World::new(blocks, parallel, windows);
        let budget = Budget { rows, prompt_rows, members: parallel.div_ceil(depth) };
        let mut next = 0;
        let mut turns = 0;
        loop {
            turns += 1;
            prop_assert!(turns < 20_000, "nothing comes to an end");
            if next < lives.len() && turns % (gaps[next] + 1) == 0 {
                world.add(next as u64, &lives[next]);
                next += 1;
            }
            while world.under_way.len() < depth && world.begin(budget) {}
            if world.under_way.is_empty() && next == lives.len() {
                break;
            }
            world.end(&lives);
        }
        for (id, life) in lives.iter().enumerate() {
            let expected = life.leaves_after.map_or(life.answer, |after| life.answer.min(after + 1));
            prop_assert_eq!(world.answers[&(id as u64)], expected);
            // The same tokens as alone: each follows from all before it.
            let whole = &world.wholes[&(id as u64)];
            for at in prompt(id as u64, life).len()..whole.len() {
                prop_assert_eq!(whole[at], next_token(&whole[..at]));
            }
        }
        prop_assert_eq!(world.schedule.counts(), (0, 0));
        prop_assert_eq!(world.schedule.pool().available(), blocks, "no block is lost");
        let all = windows.map(|cache| cache.blocks as usize);
        prop_assert_eq!(world.schedule.pool().windowed_available(), all);
    }

    #[test]
    fn sequences_that_are_restarted_or_removed_at_any_time_lose_no_block(
        lives in lives(),
        acts in prop::collection::vec((0..6usize, 0..12usize), 1..60),
        window in prop::option::of(1..200u64),
    ) {
        let windows = window.map(|window| windows(window, 4, 48));
        let (blocks, depth) = (12, 2);
        let mut world = World::new(blocks, 4, windows);
        for (id, life) in lives.iter().enumerate() {
            world.add(id as u64, life);
        }
        let budget = Budget { rows: 48, prompt_rows: 16, members: 4 };
        for (act, who) in acts {
            match act {
                0 => world.schedule.remove(who as u64),
                1 if who == 0 => {
                    // All cards are lost, and what they were doing.
                    world.under_way.clear();
                    let pool = BlockPool::new(blocks, true).with_windows(windows);
                    let empty = || Schedule::new(pool, 4);
                    let before = std::mem::replace(&mut world.schedule, empty());
                    for (id, tokens, reuses) in before.into_members() {
                        world.schedule.add(id, tokens, reuses);
                    }
                    world.cards.blocks = vec![[1; 64]; blocks];
                    if let Some((_, windowed)) = &mut world.cards.windowed {
                        windowed.fill([1; 64]);
                    }
                }
                _ if world.under_way.len() < depth => drop(world.begin(budget)),
                _ => world.end(&lives),
            }
        }
        while !world.under_way.is_empty() {
            world.end(&lives);
        }
        for id in 0..lives.len() as u64 {
            world.schedule.remove(id);
        }
        prop_assert_eq!(world.schedule.counts(), (0, 0));
        prop_assert_eq!(world.schedule.pool().available(), blocks);
        let all = windows.map(|cache| cache.blocks as usize);
        prop_assert_eq!(world.schedule.pool().windowed_available(), all);
    }
}

#[test]
#[should_panic(expected = "sees ")]
fn window_that_is_longer_than_what_is_held_is_found_in_the_cache() {
    let cache = windows(8, 2, 16);
    let mut world = World::new(20, 2, Some(cache));
    // Rows see as far as three blocks back.
    world.cards.windowed.as_mut().expect("windows").0 = 190;
    let life =
        |own| Life { prefix: 0, shared: 0, own, answer: 9, leaves_after: None, reuses: true };
    let lives = [life(300), life(301)];
    (0..2).for_each(|id| world.add(id, &lives[id as usize]));
    let budget = Budget { rows: 16, prompt_rows: 16, members: 2 };
    for _ in 0..100 {
        while world.begin(budget) {}
        world.end(&lives);
    }
}

#[test]
fn sequence_of_any_length_holds_a_window_and_a_beginning_is_used_as_far_as_its_end_sees() {
    let cache = WindowCache { window: 100, blocks: 5 };
    let mut world = World::new(40, 1, Some(cache));
    let life =
        Life { prefix: 0, shared: 0, own: 1100, answer: 200, leaves_after: None, reuses: true };
    let lives = [life.clone(), Life { own: 700, ..life.clone() }, Life { answer: 1, ..life }];
    let budget = Budget { rows: 64, prompt_rows: 64, members: 1 };
    let mut run = |id: SequenceId, tokens: Vec<u32>| {
        world.schedule.add(id, tokens.clone(), true);
        world.wholes.insert(id, tokens);
        world.answers.insert(id, 0);
        let admitted = world.schedule.admit()[0].1;
        while world.begin(budget) {
            world.end(&lives);
        }
        assert_eq!(world.schedule.counts(), (0, 0));
        (admitted, world.wholes[&id].clone())
    };
    let (_, whole) = run(0, prompt(0, &lives[0]));
    // What comes after it sees the last blocks, which are there still.
    let (reused, _) = run(2, whole.iter().copied().chain([1, 2, 3]).collect());
    assert_eq!(reused, whole.len() - 1);
    // A branch that left it long before sees what is there no more, and is computed from its beginning.
    let (reused, _) = run(1, whole[..700].to_vec());
    assert_eq!(reused, 0);
}

#[test]
#[should_panic(expected = "1 at ")]
fn guess_that_is_kept_although_it_was_refused_is_found_in_the_cache() {
    let mut world = World::new(4, 1, None);
    let lives = [0, 1].map(|_| Life {
        prefix: 0,
        shared: 0,
        own: 5,
        answer: 40,
        leaves_after: None,
        reuses: false,
    });
    world.add(1, &lives[1]);
    let budget = Budget { rows: 16, prompt_rows: 16, members: 1 };
    for _ in 0..30 {
        while world.begin(budget) {}
        let refused = world.under_way.front().is_some_and(|step| step.parts[0].guessed > 0);
        world.end(&lives);
        if refused {
            // Nothing of the last token is on the cards, and it is said to be.
            world.schedule.accept(1);
            world.schedule.push(1, next_token(&world.wholes[&1]));
            let whole = world.wholes.get_mut(&1).expect("it was added");
            whole.push(next_token(whole));
        }
    }
}

#[test]
fn prompt_goes_through_in_pieces_beside_the_tokens_of_others() {
    let mut schedule = Schedule::new(BlockPool::new(20, false), 4);
    schedule.add(1, vec![1; 3], false);
    schedule.admit();
    let budget = Budget { rows: 64, prompt_rows: 8, members: 4 };
    let first = schedule.next(budget).expect("a prompt");
    assert_eq!(first.rows(), 3);
    schedule.begun(&first);
    assert_eq!(schedule.next(budget), None, "it waits for its token");
    assert_eq!(ids(schedule.done(&first)), [Some(1)]);
    schedule.push(1, 9);
    schedule.add(2, vec![2; 100], false);
    schedule.admit();
    let step = schedule.next(budget).expect("a token and a piece");
    let rows: Vec<(u64, usize, bool)> =
        step.parts.iter().map(|part| (part.id, part.tokens.len(), part.asks)).collect();
    assert_eq!(rows, [(1, 1, true), (2, 8, false)]);
    assert_eq!(ids(schedule.done(&step)), [Some(1)]);
    schedule.remove(1);
    // Alone, it has the whole step.
    assert_eq!(schedule.next(budget).expect("a piece").rows(), 64);
}

#[test]
fn short_prompt_does_not_wait_for_a_long_one_and_no_row_is_lost() {
    let mut schedule = Schedule::new(BlockPool::new(40, false), 4);
    for (id, length) in [(1, 1000), (2, 30), (3, 500)] {
        schedule.add(id, vec![id as u32; length], false);
    }
    schedule.admit();
    let budget = Budget { rows: 64, prompt_rows: 64, members: 5 };
    let parts = |schedule: &mut Schedule| {
        let step = schedule.next(budget).expect("prompts");
        let list: Vec<_> = step.parts.iter().map(|part| (part.id, part.tokens.len())).collect();
        schedule.done(&step);
        list
    };
    assert_eq!(parts(&mut schedule), [(1, 32), (2, 16), (3, 16)]);
    assert_eq!(parts(&mut schedule), [(1, 32), (2, 14), (3, 18)]);
    // Its answer begins; the others share what there is.
    assert_eq!(parts(&mut schedule), [(1, 32), (3, 32)]);
    schedule.remove(3);
    assert_eq!(parts(&mut schedule), [(1, 64)]);
}

#[test]
fn text_that_has_stopped_goes_on_before_prompts_do() {
    let mut schedule = Schedule::new(BlockPool::new(20, false), 4);
    schedule.resume(1, vec![1; 60], false);
    schedule.resume(2, vec![2; 50], false);
    schedule.add(3, vec![3; 100], false);
    schedule.admit();
    let budget = Budget { rows: 64, prompt_rows: 8, members: 4 };
    let rows = |step: &StepParts| -> Vec<(u64, usize)> {
        step.parts.iter().map(|part| (part.id, part.tokens.len())).collect()
    };
    let step = schedule.next(budget).expect("half of the rows for each");
    assert_eq!(rows(&step), [(1, 32), (2, 32)]);
    assert_eq!(ids(schedule.done(&step)), []);
    let step = schedule.next(budget).expect("what is left of both");
    assert_eq!(rows(&step), [(1, 28), (2, 18)]);
    assert_eq!(ids(schedule.done(&step)), [Some(1), Some(2)]);
    schedule.push(1, 9);
    schedule.push(2, 9);
    let step = schedule.next(budget).expect("two tokens and a piece");
    assert_eq!(rows(&step), [(1, 1), (2, 1), (3, 8)]);
}

#[test]
fn last_to_come_is_the_first_to_be_put_back() {
    let mut schedule = Schedule::new(BlockPool::new(4, true), 4);
    for id in 1..=3 {
        schedule.add(id, vec![id as u32; 60], true);
    }
    assert_eq!(schedule.admit(), [(1, 0), (2, 0), (3, 0)]);
    let budget = Budget { rows: 1000, prompt_rows: 1000, members: 4 };
    let step = schedule.next(budget).expect("three prompts");
    assert_eq!(step.parts.len(), 3);
    for turn in 0..10 {
        let step = if turn == 0 { step.clone() } else { schedule.next(budget).expect("tokens") };
        schedule.begun(&step);
        let expected = if turn < 5 { 3 } else { 2 };
        assert_eq!(step.parts.len(), expected, "{turn}");
        for id in ids(schedule.done(&step)).into_iter().flatten() {
            schedule.push(id, 5);
        }
    }
    // The first had the last block; the second needed another, which the third has given up.
    assert_eq!((schedule.put_back(), schedule.counts()), (1, (2, 1)));
}

#[test]
fn prompt_that_needs_all_blocks_does_not_wait_for_the_one_that_it_begins_like() {
    // Room for one context: a second request agrees with the first in a part of a block, and fills all of them.
    let mut schedule = Schedule::new(BlockPool::new(2, true), 1);
    let budget = Budget { rows: 128, prompt_rows: 128, members: 2 };
    for (id, shared) in [(1, 0), (2, 20)] {
        let tokens = (0..100).map(|at| if at < shared { at } else { at + 1000 * (id - 1) });
        schedule.add(u64::from(id), tokens.collect(), true);
        schedule.admit();
        let step = schedule.next(budget).expect("it is alone");
        schedule.begun(&step);
        assert_eq!(ids(schedule.done(&step)), [Some(u64::from(id))]);
        schedule.remove(u64::from(id));
    }
    assert_eq!((schedule.put_back(), schedule.counts()), (0, (0, 0)));
    assert_eq!(schedule.pool().available(), 2);
}

#[test]
fn prompts_that_share_most_of_their_blocks_go_on_together() {
    let mut schedule = Schedule::new(BlockPool::new(8, true), 4);
    let budget = Budget { rows: 400, prompt_rows: 400, members: 5 };
    let prompt =
        |id: u64| (0..330).map(move |at| if at < 320 { at } else { 1000 * id as u32 + at });
    schedule.add(1, prompt(1).collect(), true);
    assert_eq!(schedule.admit(), [(1, 0)]);
    let step = schedule.next(budget).expect("a prompt");
    schedule.begun(&step);
    schedule.done(&step);
    schedule.push(1, 7);
    // Of six blocks each needs one of its own, and there is room for two more.
    (2..=4).for_each(|id| schedule.add(id, prompt(id).collect(), true));
    assert_eq!(schedule.admit(), [(2, 320), (3, 320)]);
    assert_eq!(schedule.counts(), (3, 1));
}

#[test]
fn prompt_waits_for_the_blocks_that_prompts_before_it_will_need() {
    let mut schedule = Schedule::new(BlockPool::new(10, false), 4);
    let budget = Budget { rows: 64, prompt_rows: 64, members: 5 };
    for (id, blocks) in [(1, 6), (2, 6), (3, 4)] {
        schedule.add(id, vec![id as u32; 64 * blocks], false);
    }
    // The second would be put back when the first has half of its blocks.
    assert_eq!(schedule.admit(), [(1, 0)]);
    while let Some(step) = schedule.next(budget) {
        assert!(schedule.admit().is_empty());
        schedule.done(&step);
    }
    schedule.remove(1);
    assert_eq!(schedule.admit(), [(2, 0), (3, 0)]);
    assert_eq!(schedule.put_back(), 0);
}

#[test]
fn refused_guesses_give_their_blocks_back_at_once_and_take_none_from_others() {
    let mut schedule = Schedule::new(BlockPool::new(3, false), 2);
    let budget = Budget { rows: 80, prompt_rows: 80, members: 3 };
    schedule.add(1, vec![1; 60], false);
    schedule.admit();
    let step = schedule.next(budget).expect("a prompt");
    schedule.done(&step);
    schedule.push(1, 9);
    schedule.guess(1, vec![7; 12]);
    assert_eq!(schedule.decoding().collect::<Vec<_>>(), [(1, 61)]);
    let step = schedule.next(budget).expect("a token and guesses");
    assert_eq!((step.rows(), step.outputs(), step.parts[0].blocks.len()), (13, 13, 2));
    let asked = schedule.done(&step);
    assert_eq!(asked, [Asked { id: Some(1), guesses: vec![7; 12] }]);
    // One was right.
    schedule.push(1, 7);
    schedule.accept(1);
    schedule.push(1, 8);
    schedule.settle(1);
    assert_eq!(schedule.pool().available(), 2, "the second block is free again");
    // Another needs both: there is room for one guess in the block that the first has.
    schedule.add(2, vec![2; 70], false);
    schedule.admit();
    schedule.guess(1, vec![7; 12]);
    let step = schedule.next(budget).expect("a prompt and a token");
    let parts: Vec<_> = step
        .parts
        .iter()
        .map(|part| (part.id, part.past, &part.tokens[..], part.guessed))
        .collect();
    assert_eq!(parts, [(1, 62, &[8, 7][..], 1), (2, 0, &[2; 70][..], 0)]);
    assert_eq!((schedule.put_back(), schedule.pool().available()), (0, 0));
}
