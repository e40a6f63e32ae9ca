// SPDX-License-Identifier: Apache-2.0
//! What is shared, copied and forgotten.

use super::*;

fn tokens(from: u32, count: usize) -> Vec<u32> {
    (from..from + count as u32).collect()
}

/// A sequence that has computed these tokens and is over.
fn computed(pool: &mut BlockPool, tokens: &[u32]) -> Vec<u32> {
    let mut blocks: Vec<u32> =
        (0..tokens.len().div_ceil(TOKENS)).map(|_| pool.take().expect("a block")).collect();
    pool.know(&mut blocks, tokens, 0, true);
    pool.give_back(&blocks);
    blocks
}

#[test]
fn prompt_that_begins_like_another_uses_its_blocks_and_a_copy_of_the_last() {
    let mut pool = BlockPool::new(10, true);
    let first = tokens(0, 150);
    let blocks = computed(&mut pool, &first);
    assert_eq!((pool.available(), pool.cached()), (10, 3));
    let mut second = tokens(0, 140);
    second.extend(tokens(1000, 50));
    let reused = pool.reuse(&second);
    assert_eq!(reused.tokens, 140);
    assert_eq!((&reused.blocks[..2], reused.copy_of), (&blocks[..2], Some(blocks[2])));
    assert_eq!(pool.available(), 10 - 4, "three that are shared or read, and the copy");
    pool.copied(blocks[2]);
    assert_eq!(pool.available(), 10 - 3);
    pool.give_back(&reused.blocks);
    // Something must be left to ask for: of 128 tokens that are all known, the last is computed again.
    let same = pool.reuse(&tokens(0, 128));
    assert_eq!((same.tokens, same.copy_of), (127, Some(blocks[1])));
    assert_eq!(pool.reuse(&[5]), Reused::default());
    assert_eq!(pool.reuse(&[0]).tokens, 0);
}

#[test]
fn other_tokens_before_a_block_are_another_block() {
    let mut pool = BlockPool::new(10, true);
    let first = tokens(0, 129);
    computed(&mut pool, &first);
    let mut other = first.clone();
    other[3] += 1;
    let reused = pool.reuse(&other);
    assert_eq!(reused.tokens, 3, "a copy of the beginning alone");
    let mut late = first;
    late[100] += 1;
    assert_eq!(pool.reuse(&late).tokens, 100);
}

#[test]
fn block_that_was_used_longest_ago_goes_first_and_a_sequences_last_before_its_first() {
    let mut pool = BlockPool::new(4, true);
    let old = computed(&mut pool, &tokens(0, 128));
    let new = computed(&mut pool, &tokens(5000, 128));
    assert_eq!(pool.take(), Some(old[1]));
    // What is left of it is used again, and is younger than the other now.
    let again = pool.reuse(&tokens(0, 65));
    assert_eq!(again.blocks, old[..1]);
    pool.give_back(&again.blocks);
    assert_eq!(pool.take(), Some(new[1]));
    assert_eq!(pool.take(), Some(new[0]));
    assert_eq!(pool.take(), Some(old[0]));
    assert_eq!((pool.take(), pool.available()), (None, 0));
}

#[test]
fn same_block_computed_twice_is_one_afterwards() {
    let mut pool = BlockPool::new(4, true);
    let mut both: Vec<Vec<u32>> = (0..2).map(|_| vec![pool.take().expect("a block")]).collect();
    let content = tokens(7, 64);
    for blocks in &mut both {
        assert_eq!(pool.know(blocks, &content, 0, false), 1);
    }
    assert_eq!(both[0], both[1]);
    assert_eq!(pool.available(), 3);
    both.iter().for_each(|blocks| pool.give_back(blocks));
    assert_eq!((pool.available(), pool.cached()), (4, 1));
}

#[test]
fn pool_that_does_not_share_knows_nothing() {
    let mut pool = BlockPool::new(4, false);
    computed(&mut pool, &tokens(0, 130));
    assert_eq!(pool.reuse(&tokens(0, 130)), Reused::default());
    assert_eq!((pool.available(), pool.cached()), (4, 0));
}
