// SPDX-License-Identifier: Apache-2.0
//! Threads allocate what a plan says and nothing else: an allocator that counts is asked, and not the runner.

#[allow(dead_code, reason = "every program of tests uses a part of it")]
#[path = "support/splits.rs"]
mod splits;

use std::alloc::{GlobalAlloc, Layout as Bytes, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use spanker_llm::{InProcess, Network, Session, Want};
use spanker_model::Quant;
use spanker_plan::{Audit, Buffer, CardLayout, Cut, Layout, Op, Plan, Space, Split, card_layouts};
use spanker_test_support::Recipe;
use spanker_topology::{ExchangeKind, Kernels, Shape};

use splits::{Groups, Open, mixed, one_by_one, plan_of, together};

/// The system's allocator, with a count of the bytes that are in use.
struct Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);
static MOST: AtomicI64 = AtomicI64::new(0);

fn add(bytes: usize) {
    let now = LIVE.fetch_add(bytes as i64, Ordering::Relaxed) + bytes as i64;
    MOST.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: all calls go to the system's allocator as they are; counting touches no memory of theirs.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Bytes) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Bytes) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Bytes) {
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Bytes in use, once threads have come to rest: they give back what a step took a moment after the step is over, or
/// later on a busy machine. Waits for no more than `most`, but not for ever.
fn live(most: i64) -> i64 {
    let begun = std::time::Instant::now();
    let mut last = LIVE.load(Ordering::Relaxed);
    loop {
        std::thread::sleep(std::time::Duration::from_millis(2));
        match LIVE.load(Ordering::Relaxed) {
            now if now == last && (now <= most || begun.elapsed().as_secs() >= 5) => return now,
            now => last = now,
        }
    }
}

/// Bytes that a card has besides what was planned for the model: handles of its threads, its ends of channels, its
/// names, and where each matrix of each layer lies.
fn handles(layers: usize, threads: usize) -> i64 {
    (4096 + 2048 * layers + 2048 * threads) as i64
}

const CONTEXT: usize = 96;
const BATCH: usize = 24;

fn layouts(network: &Network<Vec<u8>>, plan: &Plan, kernels: Kernels) -> Vec<CardLayout> {
    let space = Space::of(CONTEXT as u64, BATCH as u64, 1, Audit::NONE);
    let (stages, kind) = (&plan.layout.replicas[0], Some(ExchangeKind::SharedMemory));
    card_layouts(network.model(), &plan.cluster, stages, space, kind, Some(kernels))
}

/// Bytes that cards take from the system: all buffers, and of weights only columns, which are copied. Rows are read
/// where the file is.
fn taken(layouts: &[CardLayout]) -> i64 {
    let of = |layout: &CardLayout| {
        let buffers = layout.allocations().filter(|(of, _)| *of != Buffer::Weights);
        let buffers: u64 = buffers.map(|(_, bytes)| bytes.next_multiple_of(8)).sum();
        let pieces = &layout.weights.pieces;
        let ends = pieces.iter().skip(1).map(|piece| piece.1).chain([layout.weights.bytes]);
        let columns =
            pieces.iter().zip(ends).filter(|((piece, _), _)| matches!(piece.cut, Cut::Columns(_)));
        buffers + columns.map(|((_, start), end)| end - start).sum::<u64>()
    };
    layouts.iter().map(of).sum::<u64>() as i64
}

/// Loads a model, runs a prompt that is longer than a batch, single tokens and a shorter piece, and looks at what is
/// in use after each.
fn check(recipe: &Recipe, split: Split, groups: &Groups, threads: usize) {
    let network = Arc::new(recipe.network());
    let layout = Layout::of_groups(network.model(), split, groups).expect("a layout");
    let plan = plan_of(&network, layout, Shape::Ring);
    let cards = plan.layout.cards().len();
    let named = format!("{} {split:?} {groups:?} {threads}", recipe.name);
    let each = threads.div_ceil(cards);
    let planned = layouts(&network, &plan, Kernels::Host { threads: each as u32 });
    let bare = layouts(&network, &plan, Kernels::Card);
    let allowed = cards as i64 * handles(recipe.layers, each);

    let before = live(i64::MAX);
    let runner = InProcess::new(Arc::clone(&network), &plan, CONTEXT, BATCH, threads);
    let runner = runner.expect("threads");
    let loaded = live(i64::MAX) - before;
    for (used, layout) in runner.memory().iter().zip(&planned) {
        assert_eq!(used.planned, used.allocated, "{named}: card {}", used.card);
        assert_eq!(used.planned, layout.bytes(), "{named}: card {}", used.card);
    }
    let expected = taken(&planned);
    let over = loaded - expected;
    assert!((0..=allowed).contains(&over), "{named}: {loaded} bytes, planned {expected}");
    // A plan without what kernels keep is found out.
    let missing = loaded - taken(&bare);
    assert!(missing > allowed, "{named}: {loaded} bytes, {} without staging", taken(&bare));

    let mut session = Session::new(Box::new(runner));
    let tokens: Vec<u32> = (0..CONTEXT as u32).map(|at| (at * 7 + 3) % 71).collect();
    let mut fed = 0;
    // In a step there are its lists of operators and units of work, and each thread has a piece of a row.
    let lists = cards as i64 * 96 * 1024 + threads as i64 * 16 * 1024;
    // A channel between threads keeps a block of messages at a time.
    let messages = 4096 * cards as i64 + (tokens.len() * 8) as i64;
    let grown = |kept: i64| live(before + loaded + messages + kept) - before - loaded;
    // Lists of operators are kept for each shape of a step: at most so many operators of each layer.
    let each = (cards * (recipe.layers + 2) * 56 * size_of::<Op>()) as i64;
    let mut kept = 2 * each;
    for (count, want) in [
        (2 * BATCH + 5, Want::Best(40)),
        (1, Want::Logits),
        (1, Want::Best(1)),
        (BATCH / 2, Want::Best(71)),
        (1, Want::Best(71)),
    ] {
        MOST.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
        session.feed(&tokens[fed..fed + count], want).expect("a step");
        fed += count;
        let most = MOST.load(Ordering::Relaxed) - before - loaded;
        kept += each;
        let bound = messages + lists + kept;
        assert!(most <= bound, "{named}: {most} bytes more within {count} tokens");
        let grown = grown(kept);
        assert!(grown <= messages + kept, "{named}: {grown} bytes more after {fed} tokens");
    }
    while fed < CONTEXT {
        session.feed(&tokens[fed..=fed], Want::Best(5)).expect("a step");
        fed += 1;
    }
    let grown = grown(kept);
    assert!(grown <= messages + kept, "{named}: {grown} bytes in the end");
}

#[test]
fn threads_allocate_the_planned_bytes_and_no_step_allocates_more() {
    // One test alone: others would be counted.
    for quant in [Quant::Q4_0, Quant::Q4K, Quant::Q8_0, Quant::F16] {
        let recipe = Recipe { layers: 3, ..Recipe::llama(quant, [8, 4, 64], 512, 768) };
        let shared = Recipe::llama(quant, [4, 2, 64], 256, 256).mixture("qwen2moe", [5, 2, 512]);
        let mixture = Recipe { layers: 3, ..shared };
        check(&mixture, Split::Gather, &together(&[1.0]), 2);
        check(&mixture, Split::Gather, &together(&[1.0, 1.0]), 2);
        check(&mixture, Split::Reduce, &together(&[1.0, 1.0]), 2);
        check(&recipe, Split::Gather, &together(&[1.0]), 1);
        check(&recipe, Split::Gather, &together(&[1.0]), 3);
        check(&recipe, Split::Gather, &together(&[1.0, 1.0]), 2);
        check(&recipe, Split::Gather, &together(&[2.0, 1.0, 1.0]), 5);
        check(&recipe, Split::Reduce, &together(&[1.0, 1.0]), 2);
        check(&recipe, Split::Reduce, &together(&[1.0, 1.0, 1.0]), 3);
        check(&recipe, Split::Gather, &one_by_one(2), 2);
        check(&recipe, Split::Gather, &one_by_one(3), 3);
        check(&recipe, Split::Gather, &mixed(3), 3);
        check(&recipe, Split::Reduce, &mixed(3), 4);
    }
}
