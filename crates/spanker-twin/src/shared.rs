// SPDX-License-Identifier: Apache-2.0
//! Memory that two processes map, as two rings of records, one for each direction. The only unsafe code of
//! this crate.
//!
//! Each ring has one writer and one reader. `head` counts the bytes that were written and `tail` those that
//! were read; only the writer stores the one and only the reader the other. Counts and lengths are not trusted:
//! one that cannot be is an error, and nothing is read or written outside the ring. That a writer leaves bytes
//! alone until they were read is trusted: both ends are this program.
//!
//! Records begin on a cache line, and so does what follows the 12 bytes in front of a frame's payload. A record
//! that does not fit before the end of the ring begins at its start.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Bytes of one ring, a power of two: small enough to stay in a cache between its writer and its reader.
const RING: u64 = 128 << 10;
/// Bytes before the rings: the counters, each on a cache line of its own.
const HEADER: usize = 4096;
/// Bytes of the whole.
const TOTAL: usize = HEADER + 2 * RING as usize;
/// What records are aligned to.
const CACHE_LINE: u64 = 64;
/// Bytes of a record's head: length, time stamp, and nothing up to where a frame begins.
const HEAD: u64 = 52;
/// The longest record: the longest frame.
pub(crate) const LONGEST: usize = 4160;
/// The length of what is skipped at the end of a ring.
const SKIP: u64 = u64::MAX;

/// Memory for a link, sealed so that neither end can shrink it while the other uses it.
pub(crate) fn create() -> io::Result<std::os::fd::OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("spanker-link", flags)?;
    rustix::fs::ftruncate(&memory, TOTAL as u64)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// One end's view of both rings.
#[derive(Debug)]
pub(crate) struct Rings {
    base: NonNull<u8>,
    /// Which ring this end writes; it reads the other.
    writes: usize,
    /// Bytes that this end has written.
    written: u64,
    /// Bytes that this end has read.
    read: u64,
}

// SAFETY: the mapping belongs to this value alone within its process, and is reached through `&mut self` or
// atomics.
unsafe impl Send for Rings {}

impl Drop for Rings {
    fn drop(&mut self) {
        // SAFETY: `base` is a mapping of `TOTAL` bytes that nothing else refers to.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), TOTAL) };
    }
}

/// The counters of a ring.
#[derive(Debug, Clone, Copy)]
enum Word {
    Head,
    Tail,
    /// The reader sleeps and wants to be woken.
    Asleep,
    /// The writer waits for space.
    Full,
}

impl Rings {
    /// Maps the fresh memory of a link. The two ends have different `side`s.
    pub(crate) fn map(memory: impl AsFd, side: bool) -> io::Result<Rings> {
        let size = rustix::fs::fstat(&memory)?.st_size;
        let seals = rustix::fs::fcntl_get_seals(&memory)?;
        if size != TOTAL as i64 || !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no memory of a link"));
        }
        // SAFETY: a fresh mapping anywhere; the file is as long as the mapping and cannot shrink.
        let base = unsafe {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), TOTAL, rights, MapFlags::SHARED, memory, 0)?
        };
        let base = NonNull::new(base.cast()).expect("a mapping is not at address 0");
        Ok(Rings { base, writes: usize::from(side), written: 0, read: 0 })
    }

    fn reads(&self) -> usize {
        1 - self.writes
    }

    fn word(&self, ring: usize, word: Word) -> &AtomicU64 {
        let at = (ring * 4 + word as usize) * 64;
        // SAFETY: `at` is inside the first `HEADER` bytes, which are mapped while `self` lives, aligned to 64,
        // and only ever reached as atomics, by this process and by the peer's.
        unsafe { &*self.base.as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// Copies `bytes` into this end's ring.
    fn store(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= RING as usize, "a record does not cross the end");
        // SAFETY: the bytes lie inside the ring, which is mapped; the reader does not read bytes beyond
        // `head`.
        unsafe {
            let ring = self.base.as_ptr().add(HEADER + self.writes * RING as usize);
            ptr::copy_nonoverlapping(bytes.as_ptr(), ring.add(at), bytes.len());
        }
    }

    /// Bytes of the peer's ring, which the caller has seen to be written and not yet given back.
    fn load(&self, at: usize, length: usize) -> &[u8] {
        assert!(at + length <= RING as usize, "a record does not cross the end");
        // SAFETY: the bytes lie inside the ring, which is mapped while `self` lives; the writer, this same
        // program, does not touch bytes between `tail` and `head`, and `tail` moves only with `&mut self`.
        unsafe {
            let ring = self.base.as_ptr().add(HEADER + self.reads() * RING as usize);
            std::slice::from_raw_parts(ring.add(at), length)
        }
    }

    /// Whether a record of the greatest length fits, and as much again that may be skipped at the end.
    pub(crate) fn has_space(&self) -> bool {
        let tail = self.word(self.writes, Word::Tail).load(Ordering::Acquire);
        // An impossible tail leaves no space.
        let used = self.written.checked_sub(tail);
        used.is_some_and(|used| used <= RING - 2 * (HEAD + LONGEST as u64 + CACHE_LINE))
    }

    /// Writes a record, given in parts. The caller has checked that there is space; a peer that revokes it
    /// harms what it would have read.
    pub(crate) fn put(&mut self, stamp: u64, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        assert!(length <= LONGEST, "a record of {length} bytes is too long");
        let total = (HEAD + length as u64).next_multiple_of(CACHE_LINE);
        let left = RING - self.written % RING;
        if left < total {
            self.store((self.written % RING) as usize, &SKIP.to_le_bytes());
            self.written += left;
        }
        let mut at = (self.written % RING) as usize;
        let mut head = [0; 16];
        head[..8].copy_from_slice(&(length as u64).to_le_bytes());
        head[8..].copy_from_slice(&stamp.to_le_bytes());
        self.store(at, &head);
        at += HEAD as usize;
        for part in parts {
            self.store(at, part);
            at += part.len();
        }
        self.written += total;
        self.word(self.writes, Word::Head).store(self.written, Ordering::Release);
    }

    /// Passes the next record, its stamp and its bytes, to `see`. Returns whether there was one.
    pub(crate) fn next(&mut self, see: &mut dyn FnMut(u64, &[u8])) -> io::Result<bool> {
        let ring = self.reads();
        let head = self.word(ring, Word::Head).load(Ordering::Acquire);
        if head == self.read {
            return Ok(false);
        }
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "the peer's ring is damaged");
        let filled =
            head.checked_sub(self.read).filter(|filled| (CACHE_LINE..=RING).contains(filled));
        let filled = filled.ok_or_else(wrong)?;
        let at = (self.read % RING) as usize;
        let left = RING - at as u64;
        let start = self.load(at, 16);
        let word = |at: usize| u64::from_le_bytes(start[at..at + 8].try_into().expect("8 bytes"));
        let (length, stamp) = (word(0), word(8));
        if length == SKIP && left < filled {
            self.read += left;
            return self.next(see);
        }
        let total =
            HEAD.saturating_add(length).checked_next_multiple_of(CACHE_LINE).ok_or_else(wrong)?;
        if length > LONGEST as u64 || total > filled || total > left {
            return Err(wrong());
        }
        see(stamp, self.load(at + HEAD as usize, length as usize));
        self.read += total;
        self.word(ring, Word::Tail).store(self.read, Ordering::Release);
        Ok(true)
    }

    /// Whether there is nothing to read.
    pub(crate) fn is_empty(&self) -> bool {
        self.word(self.reads(), Word::Head).load(Ordering::Acquire) == self.read
    }

    /// Says that this end is about to sleep, or no longer. The caller polls the ring once more after it.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.say(self.reads(), Word::Asleep, asleep);
    }

    /// Says that this end has more to write than fits, or no longer. The caller checks for space
    /// once more after it.
    pub(crate) fn set_full(&self, full: bool) {
        self.say(self.writes, Word::Full, full);
    }

    /// The fence is one half of a pair, the other is in [`Rings::peer_waits`]: either the peer sees the wish,
    /// or the check that follows here sees what the peer did before it checked for requests.
    fn say(&self, ring: usize, word: Word, wish: bool) {
        self.word(ring, word).store(u64::from(wish), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether the peer is to be woken: it sleeps and there is something to read, or it waits for space and
    /// half of its ring is free. Asking clears the request, so that one bell is rung for it.
    pub(crate) fn peer_waits(&self) -> bool {
        fence(Ordering::SeqCst);
        let cleared = |ring, word| {
            let word = self.word(ring, word);
            word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::SeqCst) != 0
        };
        let unread = self.written != self.word(self.writes, Word::Tail).load(Ordering::Relaxed);
        let asleep = unread && cleared(self.writes, Word::Asleep);
        let ring = self.reads();
        let used = self.word(ring, Word::Head).load(Ordering::Relaxed).saturating_sub(self.read);
        let has_space = used <= RING / 2 && cleared(ring, Word::Full);
        asleep || has_space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> [Rings; 2] {
        let memory = create().unwrap();
        [false, true].map(|side| Rings::map(&memory, side).unwrap())
    }

    /// The next record.
    fn next(rings: &mut Rings) -> io::Result<Option<(u64, Vec<u8>)>> {
        let mut found = None;
        rings.next(&mut |stamp, bytes| {
            assert_eq!(bytes.as_ptr().align_offset(4), 0, "what follows 12 bytes is aligned");
            found = Some((stamp, bytes.to_vec()));
        })?;
        Ok(found)
    }

    #[test]
    fn records_cross_in_order_and_whole_however_the_ring_wraps() {
        let [mut left, mut right] = ends();
        let mut put = 0u64;
        let mut expected = 0u64;
        while expected < 5_000 {
            while put < 5_000 && left.has_space() {
                let length = (put * 37 % (LONGEST as u64 + 1)) as usize;
                left.put(put, &[&vec![put as u8; length]]);
                put += 1;
            }
            assert!(put == 5_000 || put - expected > 10, "the ring holds several records");
            for _ in 0..17 {
                let Some((stamp, bytes)) = next(&mut right).unwrap() else { break };
                let length = expected * 37 % (LONGEST as u64 + 1);
                assert_eq!((stamp, bytes.len() as u64), (expected, length));
                assert!(bytes.iter().all(|&byte| byte == expected as u8));
                expected += 1;
            }
        }
        assert!(right.is_empty() && left.is_empty());
    }

    #[test]
    fn a_sleeper_is_woken_once_and_only_for_something() {
        let [mut left, mut right] = ends();
        right.set_asleep(true);
        assert!(!left.peer_waits());
        left.put(1, &[b"x"]);
        assert!(left.peer_waits());
        assert!(!left.peer_waits());
        right.set_full(true);
        assert!(left.peer_waits(), "there is space for what the right end writes");
        assert_eq!(next(&mut right).unwrap(), Some((1, b"x".to_vec())));
    }

    #[test]
    fn damaged_counters_and_lengths_are_errors() {
        let [mut left, mut right] = ends();
        left.put(1, &[b"hel", b"lo"]);
        for length in [LONGEST as u64 + 1, 100, SKIP - 1, SKIP] {
            left.store(0, &length.to_le_bytes());
            assert!(next(&mut right).is_err(), "{length}");
        }
        for head in [RING * 3, 1, 63] {
            left.word(0, Word::Head).store(head, Ordering::SeqCst);
            assert!(next(&mut right).is_err(), "{head}");
        }
        left.word(0, Word::Tail).store(u64::MAX, Ordering::SeqCst);
        assert!(!left.has_space());
    }

    #[test]
    fn counts_that_the_peer_overwrites_do_no_harm() {
        let [mut left, mut right] = ends();
        left.put(1, &[b"first"]);
        // The peer changes what only this end may store, between the check for space and the record.
        assert!(left.has_space());
        for word in [Word::Head, Word::Tail] {
            right.word(0, word).store(u64::MAX - 20, Ordering::SeqCst);
        }
        left.put(2, &[b"second"]);
        assert_eq!(next(&mut right).unwrap(), Some((1, b"first".to_vec())));
        right.word(0, Word::Tail).store(u64::MAX - 3, Ordering::SeqCst);
        assert_eq!(next(&mut right).unwrap(), Some((2, b"second".to_vec())));
        assert!(right.is_empty() && !left.peer_waits());
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let memory = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, 100).unwrap();
        assert!(Rings::map(&memory, true).is_err());
    }
}
