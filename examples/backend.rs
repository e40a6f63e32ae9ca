// SPDX-License-Identifier: Apache-2.0
//! A backend of one's own in the work-stealing scheduler, beside a thread of this processor. It breaks on the
//! way, and every item is done exactly once all the same.
//!
//!     cargo run --example backend

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use spanker_scheduler::stealing::{Backend, Cpu, Failure, Job, WorkStealingScheduler};

const ITEMS: usize = 400_000;

/// The output of an item: how many steps of the Collatz sequence lead from it to 1. It depends on the item alone,
/// which is what lets any backend do it, and do it again.
fn steps(item: usize) -> u32 {
    let next = |&n: &usize| Some(if n.is_multiple_of(2) { n / 2 } else { 3 * n + 1 });
    std::iter::successors(Some(item + 1), next).take_while(|&n| n != 1).count() as u32
}

fn work(items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
    for (item, out) in items.zip(out.chunks_exact_mut(4)) {
        out.copy_from_slice(&steps(item).to_le_bytes());
    }
    Ok(())
}

/// A backend that counts its items, and is lost after a sixteenth of them all.
struct Fragile(AtomicUsize);

impl Backend for Fragile {
    fn id(&self) -> &'static str {
        "fragile"
    }

    fn run(&self, items: Range<usize>, out: &mut [u8]) -> Result<(), Failure> {
        if self.0.fetch_add(items.len(), Ordering::Relaxed) > ITEMS / 16 {
            // A lasting failure: it is not asked again, and what it held goes to the others.
            return Err(Failure::lasting("the device is gone"));
        }
        work(items, out)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backends: Vec<Arc<dyn Backend>> =
        vec![Arc::new(Cpu::new(1, work)), Arc::new(Fragile(AtomicUsize::new(0)))];
    let mut out = vec![0; ITEMS * 4];
    let report = WorkStealingScheduler::new(backends).run(&Job::new(ITEMS, 4), &mut out)?;
    for backend in &report.backends {
        println!("{:<9} {:>7} items in {:>3} tasks", backend.name, backend.items, backend.chunks);
    }
    report.incidents.iter().for_each(|incident| println!("{incident}"));
    println!("{} of {ITEMS} items once each, {:?}", report.done, report.elapsed);
    let right = |(item, bytes): (usize, &[u8])| bytes == steps(item).to_le_bytes();
    assert!(out.chunks_exact(4).enumerate().all(right), "an item is wrong");
    Ok(())
}
