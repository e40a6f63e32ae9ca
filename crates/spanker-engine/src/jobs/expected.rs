// SPDX-License-Identifier: Apache-2.0
//! What the outputs of a job should be: computed beforehand, compared in the end. Which backend does which items is not
//! decided here.

use std::ops::Range;
use std::thread;

use spanker_steal::{Failure, Scenario, Spans};

/// Bytes of one output of a job that sleeps or hashes.
pub(super) const BYTES: usize = 8;
/// Rounds of mixing for an item that costs as much as others.
const ROUNDS: f64 = 500.0;
/// Items between two looks at whether anyone still wants them.
const BATCH: usize = 1024;
/// The same where outputs are large.
const LEAST: usize = 16;

/// Items that cost so many times as much as others.
pub(super) type Hot = [(Range<usize>, f64)];

/// The outputs of a job as they should be.
pub(super) enum Expected {
    /// Numbers that depend on the item, as in virtual time.
    Numbers,
    /// All outputs, of so many bytes each.
    Table { bytes: usize, outputs: Vec<u8> },
    /// Nobody knows.
    Unknown,
}

impl Expected {
    /// Writes the outputs of some items, at no cost. Where nobody knows, nothing is written.
    pub(super) fn write(&self, items: Range<usize>, out: &mut [u8]) {
        match self {
            Expected::Numbers => Scenario::expected(items, out),
            Expected::Table { bytes, outputs } => {
                out.copy_from_slice(&outputs[items.start * bytes..items.end * bytes]);
            }
            Expected::Unknown => {}
        }
    }

    /// Items and bytes of `out`, the outputs of `items` of so many bytes each, that are not as they should be.
    pub(super) fn wrong_in(&self, items: Range<usize>, bytes: usize, out: &[u8]) -> Wrong {
        let batch = batch(bytes);
        let mut right = vec![0; batch * bytes];
        let mut wrong = Wrong::default();
        for (place, out) in out.chunks(batch * bytes).enumerate() {
            let right = &mut right[..out.len()];
            let start = items.start + place * batch;
            self.write(start..start + out.len() / bytes, right);
            if *out == *right {
                continue;
            }
            for (is, should) in out.chunks(bytes).zip(right.chunks(bytes)) {
                wrong.items += usize::from(is != should);
                wrong.bytes += is.iter().zip(should).filter(|(is, should)| is != should).count();
            }
        }
        wrong
    }

    /// Wrong bytes among all outputs of a job, without those that are missing. Nothing if nobody knows.
    pub(super) fn wrong_bytes(
        &self,
        items: usize,
        bytes: usize,
        missing: &[Range<usize>],
        out: &[u8],
    ) -> Option<usize> {
        let mut gone = Spans::new();
        for range in missing {
            gone.insert(range.clone());
        }
        let wrong = |items: Range<usize>| {
            let out = &out[items.start * bytes..items.end * bytes];
            self.wrong_in(items, bytes, out).bytes
        };
        (!matches!(self, Expected::Unknown)).then(|| gone.gaps(0..items).map(wrong).sum())
    }
}

/// Items between two looks at whether anyone still wants them, for outputs of so many bytes.
fn batch(bytes: usize) -> usize {
    (BATCH * BYTES / bytes.max(1)).clamp(LEAST, BATCH)
}

/// All outputs of a job, by as many threads as the machine has. Nothing if `stop` says so before they are done.
pub(super) fn all_of(
    items: usize,
    bytes: usize,
    stop: &(dyn Fn() -> bool + Sync),
    work: impl Fn(Range<usize>, &mut [u8]) -> Result<(), Failure> + Sync,
) -> Result<Option<Vec<u8>>, Failure> {
    let mut all = vec![0; items * bytes];
    let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let batch = batch(bytes);
    let share = items.div_ceil(threads).next_multiple_of(batch);
    let some = &|place: usize, out: &mut [u8]| -> Result<usize, Failure> {
        let mut done = 0;
        for out in out.chunks_mut(batch * bytes) {
            if stop() {
                break;
            }
            let (start, count) = (place * share + done, out.len() / bytes);
            work(start..start + count, out)?;
            done += count;
        }
        Ok(done)
    };
    let done: usize = thread::scope(|scope| {
        let parts = all.chunks_mut(share * bytes).enumerate();
        let begin = |(place, out)| scope.spawn(move || some(place, out));
        let all: Vec<_> = parts.map(begin).collect();
        let lost = || Err(Failure::lasting("a thread has panicked"));
        all.into_iter().map(|one| one.join().unwrap_or_else(|_| lost())).sum::<Result<_, _>>()
    })?;
    Ok((done == items).then_some(all))
}

/// How much of some outputs is not as it should be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) items: usize,
    pub(super) bytes: usize,
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

/// Hashes some items.
pub(super) fn hash(items: Range<usize>, hot: &Hot, out: &mut [u8]) {
    for (item, out) in items.zip(out.chunks_exact_mut(BYTES)) {
        let more = hot.iter().filter(|(range, _)| range.contains(&item));
        let cost = 1.0 + more.map(|(_, factor)| factor - 1.0).sum::<f64>();
        out.copy_from_slice(&mixed(item as u64, (ROUNDS * cost) as u64).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_many_threads_are_those_of_one_also_where_items_are_hot() {
        let hot = [(1000..1500, 3.0)];
        let work = |items: Range<usize>, out: &mut [u8]| {
            hash(items, &hot, out);
            Ok(())
        };
        let outputs = all_of(3000, BYTES, &|| false, work).unwrap().unwrap();
        let table = Expected::Table { bytes: BYTES, outputs };
        let wrong = |out: &[u8]| table.wrong_in(900..1700, BYTES, out);
        let mut out = vec![0; 800 * BYTES];
        hash(900..1700, &hot, &mut out);
        assert_eq!(wrong(&out), Wrong { items: 0, bytes: 0 });
        out[5..11].iter_mut().for_each(|byte| *byte ^= 1);
        assert_eq!(wrong(&out), Wrong { items: 2, bytes: 6 });
    }

    #[test]
    fn outputs_that_nobody_wants_any_more_are_not_computed() {
        assert_eq!(all_of(3000, BYTES, &|| true, |_, _| Ok(())), Ok(None));
    }

    #[test]
    fn outputs_that_are_missing_are_not_compared() {
        let mut out = vec![0; 100 * BYTES];
        Expected::Numbers.write(0..100, &mut out);
        out[10 * BYTES..20 * BYTES].fill(0xff);
        let part = std::iter::once(10..20).collect::<Vec<_>>();
        let wrong = |missing: &[_]| Expected::Numbers.wrong_bytes(100, BYTES, missing, &out);
        assert_eq!(wrong(&part), Some(0));
        assert!(wrong(&[]).is_some_and(|bytes| bytes > 50));
        assert_eq!(Expected::Unknown.wrong_bytes(100, BYTES, &[], &out), None);
    }
}
