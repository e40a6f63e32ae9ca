// SPDX-License-Identifier: Apache-2.0
//! A claim allocates nothing, whether it is of new items or of items that came back. The only test here, since what
//! is counted is the allocator of the whole process.
#![cfg(not(any(feature = "loom", feature = "shuttle")))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use spanker_steal::{Capabilities, Claim, Failure, Job, Ledger, Member, Token};

/// Counts what the current thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> usize {
    ALLOCATIONS.with(Cell::get)
}

fn members() -> Vec<Member> {
    let member = |place| Member { name: format!("b{place}"), capabilities: Capabilities::PLAIN };
    (0..3).map(member).collect()
}

#[test]
fn a_thousand_claims_of_new_and_of_returned_items_allocate_nothing() {
    let at = Duration::from_millis(1);
    let (_ledger, claims) = Ledger::open(1, &Job::new(1000, 8), members()).expect("a job");
    let before = allocations();
    let mut claimed = 0;
    while let Claim::Take(piece) = claims.claim(claimed % 3) {
        claimed += piece.items.len();
    }
    assert_eq!(allocations() - before, 0, "new items");
    assert_eq!(claimed, 1000);

    // Some are told of and fail, and are then to be had from the pool.
    let (mut ledger, claims) = Ledger::open(2, &Job::new(1000, 8), members()).expect("a job");
    for serial in 0..3 {
        let Claim::Take(piece) = claims.claim(0) else { panic!("items are left") };
        let token = Token { epoch: 2, lane: 0, serial };
        ledger.claimed(token, piece, at);
        ledger.failed(token, &Failure::passing("not now"), at);
    }
    let left = claims.left();
    let before = allocations();
    let (mut pooled, mut fresh) = (0, 0);
    while let Claim::Take(piece) = claims.claim(1) {
        if piece.items.start < 3 { pooled += 1 } else { fresh += 1 }
    }
    assert_eq!(allocations() - before, 0, "{pooled} returned and {fresh} new items");
    assert_eq!(pooled + fresh, left);
    assert_eq!(pooled, 3);
}
