// SPDX-License-Identifier: Apache-2.0
//! What an item is: bytes that depend on the item alone, and what it takes to get them. Who does which items is
//! not decided here.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use spanker_steal::Spans;

/// Bytes of one output.
pub(super) const BYTES: usize = 8;
/// Rounds of mixing for an item that costs as much as others.
const ROUNDS: f64 = 500.0;
/// Items between two looks at whether anyone still wants them.
const BATCH: usize = 1024;
/// How long a speed is measured.
const MEASURE: Duration = Duration::from_millis(300);

/// What backends do. Every kind of job is a variant.
pub(super) enum Work {
    /// Nothing but sleep.
    Sleep,
    /// Many rounds of mixing, with what comes of them for those who only pretend.
    Hash { hot: Vec<(Range<usize>, f64)>, reference: Vec<u8> },
}

impl Work {
    /// Hashing of so many items: every output is computed once, by as many threads as the machine has. Nothing if
    /// `stop` says so before that is done.
    pub(super) fn hash(
        items: usize,
        hot: Vec<(Range<usize>, f64)>,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Option<Work> {
        let mut reference = vec![0; items * BYTES];
        let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let whole = AtomicUsize::new(0);
        let share = items.div_ceil(threads);
        thread::scope(|scope| {
            for (place, out) in reference.chunks_mut(share * BYTES).enumerate() {
                let (hot, whole) = (&hot, &whole);
                scope.spawn(move || {
                    for (batch, out) in out.chunks_mut(BATCH * BYTES).enumerate() {
                        if stop() {
                            return;
                        }
                        let start = place * share + batch * BATCH;
                        hash(start..start + out.len() / BYTES, hot, out);
                        whole.fetch_add(out.len() / BYTES, Ordering::Relaxed);
                    }
                });
            }
        });
        (whole.into_inner() == items).then_some(Work::Hash { hot, reference })
    }

    /// The outputs of some items by the work that it takes.
    pub(super) fn compute(&self, items: Range<usize>, out: &mut [u8]) {
        match self {
            Work::Sleep => self.recall(items, out),
            Work::Hash { hot, .. } => hash(items, hot, out),
        }
    }

    /// The outputs of some items as they should be, at no cost.
    pub(super) fn recall(&self, items: Range<usize>, out: &mut [u8]) {
        match self {
            Work::Sleep => {
                for (item, out) in items.zip(out.chunks_exact_mut(BYTES)) {
                    out.copy_from_slice(&mixed(item as u64, 1).to_le_bytes());
                }
            }
            Work::Hash { reference, .. } => {
                out.copy_from_slice(&reference[items.start * BYTES..items.end * BYTES]);
            }
        }
    }

    /// Items and bytes of `out`, the outputs of `items`, that are not as they should be.
    pub(super) fn wrong_in(&self, items: Range<usize>, out: &[u8]) -> Wrong {
        wrong_in(items, out, |items, right| self.recall(items, right))
    }
}

/// How much of some outputs is not as it should be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) items: usize,
    pub(super) bytes: usize,
}

/// Items and bytes of `out`, the outputs of `items`, that are not those of `expected`.
fn wrong_in(items: Range<usize>, out: &[u8], expected: impl Fn(Range<usize>, &mut [u8])) -> Wrong {
    let mut right = [0; BATCH * BYTES];
    let mut wrong = Wrong::default();
    for (batch, out) in out.chunks(BATCH * BYTES).enumerate() {
        let right = &mut right[..out.len()];
        let start = items.start + batch * BATCH;
        expected(start..start + out.len() / BYTES, right);
        if *out == *right {
            continue;
        }
        for (is, should) in out.chunks(BYTES).zip(right.chunks(BYTES)) {
            wrong.items += usize::from(is != should);
            wrong.bytes += is.iter().zip(should).filter(|(is, should)| is != should).count();
        }
    }
    wrong
}

/// Wrong bytes among all outputs of a job, without those that are missing.
pub(super) fn wrong_bytes(
    items: usize,
    missing: &[Range<usize>],
    out: &[u8],
    expected: impl Fn(Range<usize>, &mut [u8]),
) -> usize {
    let mut gone = Spans::new();
    for range in missing {
        gone.insert(range.clone());
    }
    let there = gone.gaps(0..items);
    let wrong = |items: Range<usize>| {
        wrong_in(items.clone(), &out[items.start * BYTES..items.end * BYTES], &expected).bytes
    };
    there.map(wrong).sum()
}

/// So many rounds of a mixing function, each of which waits for the one before.
fn mixed(item: u64, rounds: u64) -> u64 {
    let mut x = item;
    for _ in 0..rounds {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        x ^= x >> 29;
    }
    x
}

fn hash(items: Range<usize>, hot: &[(Range<usize>, f64)], out: &mut [u8]) {
    for (item, out) in items.zip(out.chunks_exact_mut(BYTES)) {
        let more = hot.iter().filter(|(range, _)| range.contains(&item));
        let cost = 1.0 + more.map(|(_, factor)| factor - 1.0).sum::<f64>();
        out.copy_from_slice(&mixed(item as u64, (ROUNDS * cost) as u64).to_le_bytes());
    }
}

/// Items a second that each of so many threads hashes while all of them do.
pub(super) fn hash_rate(threads: usize) -> f64 {
    let begun = Instant::now();
    let count = |place: usize| {
        let mut out = [0; BATCH * BYTES];
        let mut done = 0;
        while begun.elapsed() < MEASURE {
            let start = place * MEASURE.as_nanos() as usize + done;
            hash(start..start + BATCH, &[], &mut out);
            std::hint::black_box(&out);
            done += BATCH;
        }
        done as f64 / begun.elapsed().as_secs_f64()
    };
    let rates: f64 = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|place| scope.spawn(move || count(place))).collect();
        count(0) + others.into_iter().map(|other| other.join().unwrap_or(0.0)).sum::<f64>()
    });
    rates / threads as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_the_reference_are_those_of_the_work_also_where_items_are_hot() {
        let work = Work::hash(3000, vec![(1000..1500, 3.0)], &|| false).unwrap();
        let mut out = vec![0; 800 * BYTES];
        work.compute(900..1700, &mut out);
        assert_eq!(work.wrong_in(900..1700, &out), Wrong { items: 0, bytes: 0 });
        out[5..11].iter_mut().for_each(|byte| *byte ^= 1);
        assert_eq!(work.wrong_in(900..1700, &out), Wrong { items: 2, bytes: 6 });
    }

    #[test]
    fn a_reference_that_nobody_wants_any_more_is_not_made() {
        assert!(Work::hash(3000, Vec::new(), &|| true).is_none());
    }

    #[test]
    fn outputs_that_are_missing_are_not_compared() {
        let mut out = vec![0; 100 * BYTES];
        Work::Sleep.compute(0..100, &mut out);
        out[10 * BYTES..20 * BYTES].fill(0xff);
        let expected = |items, out: &mut [u8]| Work::Sleep.recall(items, out);
        let part = std::iter::once(10..20).collect::<Vec<_>>();
        assert_eq!(wrong_bytes(100, &part, &out, expected), 0);
        assert!(wrong_bytes(100, &[], &out, expected) > 50);
    }
}
