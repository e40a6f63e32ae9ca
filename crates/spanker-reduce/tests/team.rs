// SPDX-License-Identifier: Apache-2.0
//! The team: every unit once, panics propagated, calls from many threads at once, no allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use spanker_collective::ReduceOp;
use spanker_reduce::{Team, Threads, all_reduce};

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

#[test]
fn every_unit_runs_exactly_once_whatever_the_numbers() {
    for threads in 1..=5 {
        let team = Team::new(threads);
        for units in [0, 1, 2, 3, 7, 64, 1001] {
            let runs: Vec<AtomicUsize> = (0..units).map(|_| AtomicUsize::new(0)).collect();
            for ask in [0, 1, 2, 9] {
                team.run(ask, units, &|unit| {
                    runs[unit].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(runs.iter().all(|count| count.load(Ordering::Relaxed) == 4));
        }
    }
}

#[test]
fn helpers_that_went_to_sleep_wake_up_for_the_next_job() {
    let team = Team::new(3);
    let runs = AtomicUsize::new(0);
    for _ in 0..5 {
        std::thread::sleep(std::time::Duration::from_millis(5));
        team.run(3, 300, &|_| {
            runs.fetch_add(1, Ordering::Relaxed);
        });
    }
    assert_eq!(runs.into_inner(), 1500);
}

#[test]
fn a_panic_in_any_unit_reaches_the_caller_and_the_team_works_on() {
    let team = Team::new(3);
    for bad in [0, 50, 99] {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            team.run(3, 100, &|unit| {
                assert!(unit != bad, "unit {bad} is bad");
            });
        }));
        assert!(outcome.is_err());
    }
    let runs = AtomicUsize::new(0);
    team.run(3, 100, &|_| {
        runs.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(runs.into_inner(), 100);
}

#[test]
fn panics_on_all_threads_at_once_do_not_reach_the_next_call() {
    let team = Team::new(3);
    for _ in 0..20 {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            team.run(3, 3, &|unit| {
                // Long enough for the helpers to come, so that several panic in one job.
                std::thread::sleep(std::time::Duration::from_millis(2));
                panic!("unit {unit}");
            });
        }));
        assert!(outcome.is_err());
        team.run(3, 30, &|_| ());
    }
}

#[test]
fn concurrent_callers_of_one_team_all_get_their_results() {
    let team = Team::new(2);
    std::thread::scope(|scope| {
        for caller in 0..4u32 {
            let team = &team;
            scope.spawn(move || {
                for _ in 0..200 {
                    let mut cards = vec![vec![caller; 40_000]; 3];
                    all_reduce(team, Threads::Exactly(2), &mut cards, ReduceOp::Sum).unwrap();
                    assert!(cards.iter().flatten().all(|&x| x == 3 * caller));
                }
            });
        }
    });
}

#[test]
fn an_all_reduce_allocates_nothing_after_the_first_call() {
    let mut cards = vec![vec![1.0f32; 300_000]; 4];
    all_reduce(Team::global(), Threads::Exactly(2), &mut cards, ReduceOp::Sum).unwrap();
    let before = ALLOCATIONS.with(Cell::get);
    for threads in [Threads::Exactly(1), Threads::Exactly(2), Threads::Auto] {
        all_reduce(Team::global(), threads, &mut cards, ReduceOp::Max).unwrap();
    }
    assert_eq!(ALLOCATIONS.with(Cell::get), before);
}
