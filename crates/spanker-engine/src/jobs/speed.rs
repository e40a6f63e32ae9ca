// SPDX-License-Identifier: Apache-2.0
//! How fast a backend is that works for real: measured for a moment, alone, before the job begins.

use std::thread;
use std::time::{Duration, Instant};

use spanker_steal::{Backend, Failure};

/// How long a speed is measured.
const MEASURE: Duration = Duration::from_millis(300);
/// How long a task should take meanwhile, about what it takes in a job.
const TASK: Duration = Duration::from_millis(8);
/// Bytes of a task at most.
const MOST_BYTES: usize = 8 << 20;
/// Items of the first task.
const FIRST: usize = 16;

/// Items of a task that takes about as long as it should, in a job of so many items with so many bytes each.
fn fitting(backend: &dyn Backend, items: usize, bytes: usize) -> Result<usize, Failure> {
    let mut size = FIRST.min(items);
    loop {
        let mut out = vec![0; size * bytes];
        // What is done for the first time takes longer.
        backend.run(0..size, &mut out)?;
        let begun = Instant::now();
        backend.run(0..size, &mut out)?;
        let more = 2 * size <= items && 2 * size * bytes <= MOST_BYTES;
        if !more || 2 * begun.elapsed() > TASK {
            return Ok(size);
        }
        size *= 2;
    }
}

/// Items a second that each of so many tasks gets done while so many are under way.
pub(super) fn alone(
    backend: &dyn Backend,
    tasks: usize,
    items: usize,
    bytes: usize,
) -> Result<f64, Failure> {
    let size = fitting(backend, items, bytes)?;
    let begun = Instant::now();
    let count = || -> Result<usize, Failure> {
        let mut out = vec![0; size * bytes];
        let (mut done, mut start) = (0, 0);
        while done == 0 || begun.elapsed() < MEASURE {
            backend.run(start..start + size, &mut out)?;
            done += size;
            start = if start + 2 * size <= items { start + size } else { 0 };
        }
        Ok(done)
    };
    let counts: Vec<Result<usize, Failure>> = thread::scope(|scope| {
        let others: Vec<_> = (1..tasks).map(|_| scope.spawn(count)).collect();
        let mut counts = vec![count()];
        let lost = || Err(Failure::lasting("it has panicked"));
        counts.extend(others.into_iter().map(|other| other.join().unwrap_or_else(|_| lost())));
        counts
    });
    let time = begun.elapsed().as_secs_f64();
    let all: usize = counts.into_iter().sum::<Result<usize, Failure>>()?;
    Ok(all as f64 / time / tasks as f64)
}

/// Items a second, from the time that one item takes when it is done for the second time.
pub(super) fn of_one(backend: &dyn Backend, item: usize, bytes: usize) -> Result<f64, Failure> {
    let mut out = vec![0; bytes];
    backend.run(item..item + 1, &mut out)?;
    let begun = Instant::now();
    backend.run(item..item + 1, &mut out)?;
    Ok(1.0 / begun.elapsed().as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_steal::Cpu;

    #[test]
    fn backend_is_asked_only_for_items_that_the_job_has() {
        for items in [1, 15, 16, 17, 1000] {
            let within = Cpu::new(2, move |range: std::ops::Range<usize>, out: &mut [u8]| {
                assert!(range.end <= items && out.len() == 8 * range.len());
                Ok(())
            });
            assert!(alone(&within, 2, items, 8).unwrap() > 0.0, "{items}");
        }
    }

    #[test]
    fn backend_that_fails_has_no_speed() {
        let broken = Cpu::new(1, |_, _: &mut [u8]| Err(Failure::passing("broken")));
        assert_eq!(alone(&broken, 2, 10, 8), Err(Failure::passing("broken")));
        assert_eq!(of_one(&broken, 3, 8), Err(Failure::passing("broken")));
    }
}
