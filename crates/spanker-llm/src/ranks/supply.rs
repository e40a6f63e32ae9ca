// SPDX-License-Identifier: Apache-2.0
//! A model's bytes on their way to ranks that do not have its file: in chunks, as each rank asks for them.
//!
//! A rank asks for a few chunks at a time and has asked for the next ones before it looks at those that came, so that
//! links are busy while chunks are checked and written. What chunks have to be, [`Store`] knows; nothing is
//! believed of them here but their lengths.

use std::ops::Range;
use std::time::{Duration, Instant};

use spanker_collective::Rank;
use spanker_fabric::{Call, Fabric, FabricError, Message, Pool};

use super::wire::LEADER;

/// Bytes of a chunk; the last one of a file may be shorter.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// Chunks that a rank asks for at a time.
const WINDOW: usize = 4;
/// The least time that a rank waits for chunks, which are longer than any other message.
const LEAST: Duration = Duration::from_secs(20);
/// Bytes of a request before its numbers: how many chunks the rank needs in all.
const HEAD: usize = 8;

/// Bytes in a second of a slow network, which is slower than a board's memory card.
const SLOW: f64 = 2e6;

/// How long ranks may take until all of them have what they need of a file of so many bytes: those that have it wait for
/// those that are given it. Whether a rank is there at all meanwhile is the fabric's to say.
#[must_use]
pub fn reading_time(bytes: u64) -> Duration {
    LEAST + Duration::from_secs_f64(bytes as f64 / SLOW)
}

/// A copy of a model's file with holes, which are filled as bytes are needed.
pub trait Store {
    /// Bytes of the whole file.
    fn length(&self) -> u64;

    /// The numbers of the chunks that hold these bytes and are not there yet.
    ///
    /// # Errors
    /// In words, for ranges beyond the file.
    fn missing(&self, ranges: &[Range<u64>]) -> Result<Vec<u64>, String>;

    /// Takes a chunk.
    ///
    /// # Errors
    /// In words, for bytes that are not this chunk's, or that cannot be kept.
    fn put(&self, number: u64, bytes: &[u8]) -> Result<(), String>;

    /// Everything that was asked for is there.
    ///
    /// # Errors
    /// In words, if it cannot be kept.
    fn complete(&self) -> Result<(), String>;
}

/// The bytes of a file that a chunk is.
#[must_use]
pub fn chunk_range(length: u64, number: u64) -> Range<u64> {
    let start = number.saturating_mul(CHUNK_BYTES).min(length);
    start..start.saturating_add(CHUNK_BYTES).min(length)
}

/// How many chunks a file has.
#[must_use]
pub fn chunk_count(length: u64) -> u64 {
    length.div_ceil(CHUNK_BYTES)
}

/// How long a rank waits for chunks, where it waits so long for other messages.
fn waiting(timeout: Duration) -> Instant {
    Instant::now() + timeout.max(LEAST)
}

fn refuse(fabric: &mut dyn Fabric, reason: String) -> FabricError {
    let rank = fabric.rank();
    fabric.abort(FabricError::Refused { rank, reason })
}

/// Gives out chunks of `file` to these ranks until each has all that it asks for; `progress` gets the bytes that were
/// sent and those of all. Says how many were sent.
///
/// # Errors
/// The group's first fault.
pub fn supply_chunks(
    fabric: &mut dyn Fabric,
    file: &[u8],
    to: &[Rank],
    timeout: Duration,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, FabricError> {
    let (length, mut pool) = (file.len() as u64, Pool::default());
    let (mut sent, mut total, mut is_first) = (0, 0, true);
    let mut pending = to.to_vec();
    let mut replies: Vec<(Rank, Message)> = Vec::new();
    while !pending.is_empty() || !replies.is_empty() {
        let asked = fabric.exchange(&Call::BARRIER, &replies, &pending, waiting(timeout))?;
        sent += replies.iter().map(|(_, reply)| reply.bytes().len() as u64).sum::<u64>();
        if total > 0 && !replies.is_empty() {
            progress(sent, total);
        }
        replies.clear();
        let mut left = Vec::with_capacity(pending.len());
        for (request, &rank) in asked.iter().zip(&pending) {
            let Some((needed, numbers)) = read_request(request.bytes(), length) else {
                let reason = format!("rank {rank} asks for chunks that the model does not have");
                return Err(refuse(fabric, reason));
            };
            total += if is_first { needed } else { 0 };
            if numbers.is_empty() {
                continue;
            }
            let parts = numbers.iter().map(|&number| {
                let range = chunk_range(length, number);
                &file[range.start as usize..range.end as usize]
            });
            let parts: Vec<&[u8]> = parts.collect();
            let bytes = parts.iter().map(|part| part.len()).sum();
            let reply = pool.write(bytes, |mut out| {
                for part in parts {
                    let (own, rest) = std::mem::take(&mut out).split_at_mut(part.len());
                    own.copy_from_slice(part);
                    out = rest;
                }
            });
            replies.push((rank, reply));
            left.push(rank);
        }
        (pending, is_first) = (left, false);
    }
    Ok(sent)
}

/// Asks the leader for the chunks that hold these bytes and are not there. Says how many bytes came.
///
/// # Errors
/// The group's first fault; this rank's, if a chunk is not what it must be.
pub fn fetch_chunks(
    fabric: &mut dyn Fabric,
    store: &dyn Store,
    ranges: &[Range<u64>],
    timeout: Duration,
) -> Result<u64, FabricError> {
    let missing = store.missing(ranges).map_err(|reason| refuse(fabric, reason))?;
    let length = store.length();
    let bytes_of = |number: &u64| {
        let range = chunk_range(length, *number);
        range.end - range.start
    };
    let needed: u64 = missing.iter().map(bytes_of).sum();
    let mut pool = Pool::default();
    let mut request = |numbers: &[u64]| {
        let words = std::iter::once(&needed).chain(numbers);
        let bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        vec![(LEADER, pool.write(bytes.len(), |out| out.copy_from_slice(&bytes)))]
    };
    let windows: Vec<&[u64]> = missing.chunks(WINDOW).collect();
    let first = windows.first().copied().unwrap_or_default();
    fabric.exchange(&Call::BARRIER, &request(first), &[], waiting(timeout))?;
    for (at, window) in windows.iter().enumerate() {
        let next = windows.get(at + 1).copied().unwrap_or_default();
        let asked = request(next);
        let came = fabric.exchange(&Call::BARRIER, &asked, &[LEADER], waiting(timeout))?;
        let expected: u64 = window.iter().map(bytes_of).sum();
        for message in came {
            let actual = message.bytes().len();
            if actual as u64 != expected {
                let (rank, expected) = (fabric.rank(), expected as usize);
                let wrong = FabricError::Length { rank, peer: LEADER, expected, actual };
                return Err(fabric.abort(wrong));
            }
            let mut rest = message.bytes();
            for number in *window {
                let (chunk, others) = rest.split_at(bytes_of(number) as usize);
                rest = others;
                store.put(*number, chunk).map_err(|reason| refuse(fabric, reason))?;
            }
        }
    }
    store.complete().map_err(|reason| refuse(fabric, reason))?;
    Ok(needed)
}

/// The bytes that a rank needs in all, and the chunks that it asks for now; nothing for what is no request.
fn read_request(bytes: &[u8], length: u64) -> Option<(u64, Vec<u64>)> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
    let (words, odd) = rest.as_chunks();
    let numbers: Vec<u64> = words.iter().map(|&word| u64::from_le_bytes(word)).collect();
    let known = numbers.iter().all(|&number| number < chunk_count(length));
    let needed = u64::from_le_bytes(*head);
    (odd.is_empty() && known && numbers.len() <= WINDOW && needed <= length)
        .then_some((needed, numbers))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use spanker_fabric::conformance::on_all;
    use spanker_fabric::inproc::group;

    use super::*;

    /// A copy in memory, with what was wrong of what came.
    struct Copy {
        bytes: RefCell<Vec<u8>>,
        there: RefCell<Vec<bool>>,
        refuses: Option<u64>,
    }

    impl Copy {
        fn of(length: usize, refuses: Option<u64>) -> Copy {
            let there = vec![false; chunk_count(length as u64) as usize];
            Copy { bytes: RefCell::new(vec![0; length]), there: RefCell::new(there), refuses }
        }
    }

    impl Store for Copy {
        fn length(&self) -> u64 {
            self.bytes.borrow().len() as u64
        }

        fn missing(&self, ranges: &[Range<u64>]) -> Result<Vec<u64>, String> {
            let there = self.there.borrow();
            let holds = |number: &u64| {
                let own = chunk_range(self.length(), *number);
                ranges.iter().any(|range| range.start < own.end && own.start < range.end)
            };
            Ok((0..there.len() as u64).filter(|at| holds(at) && !there[*at as usize]).collect())
        }

        fn put(&self, number: u64, bytes: &[u8]) -> Result<(), String> {
            if self.refuses == Some(number) {
                return Err(format!("chunk {number} of x.gguf is corrupt"));
            }
            let range = chunk_range(self.length(), number);
            self.bytes.borrow_mut()[range.start as usize..range.end as usize]
                .copy_from_slice(bytes);
            self.there.borrow_mut()[number as usize] = true;
            Ok(())
        }

        fn complete(&self) -> Result<(), String> {
            Ok(())
        }
    }

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn file() -> Vec<u8> {
        (0..(11 * CHUNK_BYTES as usize + 77)).map(|at| ((at * 31) >> 5) as u8).collect()
    }

    #[test]
    fn every_rank_gets_the_chunks_of_its_ranges_once_and_no_others() {
        let file = file();
        let whole = 0..file.len() as u64;
        let wanted = [vec![], vec![0..5, 6_000_000..11_500_000], vec![whole]];
        let outcomes = on_all(group(3), |mut fabric| {
            let rank = fabric.rank();
            if rank == LEADER {
                let mut seen = Vec::new();
                let mut progress = |done, total| seen.push((done, total));
                let sent = supply_chunks(&mut fabric, &file, &[1, 2], TIMEOUT, &mut progress);
                assert!(seen.is_sorted() && seen.last().unwrap().0 == seen.last().unwrap().1);
                let again = supply_chunks(&mut fabric, &file, &[1, 2], TIMEOUT, &mut |_, _| {});
                assert_eq!(again.unwrap(), 0);
                fabric.barrier(waiting(TIMEOUT)).unwrap();
                return sent.unwrap();
            }
            let copy = Copy::of(file.len(), None);
            let came = fetch_chunks(&mut fabric, &copy, &wanted[rank], TIMEOUT).unwrap();
            for range in &wanted[rank] {
                let range = range.start as usize..range.end as usize;
                assert_eq!(copy.bytes.borrow()[range.clone()], file[range]);
            }
            assert_eq!(fetch_chunks(&mut fabric, &copy, &wanted[rank], TIMEOUT).unwrap(), 0);
            // Whoever left before would look dead to the others.
            fabric.barrier(waiting(TIMEOUT)).unwrap();
            came
        });
        assert_eq!(outcomes[2], file.len() as u64);
        assert!(outcomes[1] < outcomes[2] && outcomes[0] == outcomes[1] + outcomes[2]);
    }

    #[test]
    fn chunk_that_is_refused_ends_the_group_with_its_name() {
        let file = file();
        let outcomes = on_all(group(2), |mut fabric| match fabric.rank() {
            LEADER => supply_chunks(&mut fabric, &file, &[1], TIMEOUT, &mut |_, _| {}),
            _ => {
                let copy = Copy::of(file.len(), Some(7));
                let whole = 0..file.len() as u64;
                fetch_chunks(&mut fabric, &copy, &[whole], TIMEOUT)
            }
        });
        for outcome in outcomes {
            let error = outcome.expect_err("a corrupt chunk").to_string();
            assert_eq!(error, "rank 1: chunk 7 of x.gguf is corrupt");
        }
    }

    #[test]
    fn ranks_wait_for_one_that_gets_its_part_over_a_slow_network_and_not_much_longer() {
        assert_eq!(reading_time(0), LEAST);
        let of = |mib: u64| reading_time(mib << 20).as_secs();
        // Half of 1.1 GB at 5 MB/s takes 110 s.
        assert!((110..900).contains(&of(1100)) && (1000..3000).contains(&of(4096)), "{}", of(4096));
        assert!(reading_time(u64::MAX) > reading_time(1 << 40));
    }

    #[test]
    fn requests_beyond_the_file_or_the_window_are_none() {
        let words = |words: &[u64]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        let length = 3 * CHUNK_BYTES;
        assert_eq!(read_request(&words(&[5, 0, 2]), length), Some((5, vec![0, 2])));
        assert_eq!(read_request(&words(&[5]), length), Some((5, vec![])));
        for bad in [&[5, 3][..], &[length + 1, 0], &[5, 0, 0, 0, 0, 0]] {
            assert_eq!(read_request(&words(bad), length), None, "{bad:?}");
        }
        assert_eq!(read_request(&[1; 7], length), None);
        assert_eq!(read_request(&[0; 13], length), None);
    }
}
