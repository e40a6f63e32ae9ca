// SPDX-License-Identifier: Apache-2.0
//! Memory of rank 0 that every rank reads, writes and adds to by itself, without rank 0 answering: MPI's one-sided
//! operations. What the memory means is the caller's business.
//!
//! It has words, which are only ever added to, and bytes. All additions of a round, and everything that was put before
//! it, are under way together and waited for once.
//!
//! Open MPI has shared memory for it on one host. Else MPIs get on with one-sided operations only while rank 0 is in a
//! call of MPI, as MPICH 4.0 on UCX does everywhere: rank 0 has to [`Window::poke`] now and then while it does something
//! else, and the time between two pokes is the time of a round trip.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use mpi::ffi;

use crate::raw::{Comm, check, int};
use crate::watchdog::{Blocking, watchdog};
use crate::{MpiError, World};

/// Bytes of a word.
const WORD: usize = 8;
/// The rank that has the memory.
const OWNER: c_int = 0;
/// The most bytes of one operation: MPI counts in `int`.
const MOST: usize = 1 << 30;

/// A rank that waits sleeps so long at a time, but not at first.
const NAP: Duration = Duration::from_micros(20);
const BRIEF: Duration = Duration::from_micros(20);

/// Memory of rank 0 for all ranks of a world. All of them open it, and all of them close it; one that is dropped
/// instead stays open until MPI ends.
pub struct Window<'w> {
    win: ffi::MPI_Win,
    comm: Comm,
    words: usize,
    bytes: usize,
    timeout: Duration,
    /// What is added, and what was there before. MPI reads and writes them until a round is over.
    added: Vec<u64>,
    before: Vec<u64>,
    /// What is put, and where. MPI reads it until a round is over.
    put: Vec<(usize, Vec<u8>)>,
    /// MPI is there for as long as this is, and only the thread that started it may call it.
    world: PhantomData<&'w World>,
}

impl<'w> Window<'w> {
    /// Opens memory of so many words and bytes, all zero. No operation may take longer than `timeout`: the watchdog
    /// ends the process then.
    ///
    /// # Errors
    /// [`MpiError`], if there is no such memory.
    pub fn open(
        world: &'w World,
        words: usize,
        bytes: usize,
        timeout: Duration,
    ) -> Result<Window<'w>, MpiError> {
        let (comm, mine) = (Comm::world(), world.rank() == 0);
        let size = words.checked_mul(WORD).and_then(|size| size.checked_add(bytes));
        let size = size.and_then(|size| ffi::MPI_Aint::try_from(size).ok());
        let size =
            size.ok_or(MpiError::Outside { at: words, len: bytes, size: isize::MAX as usize })?;
        let _armed = watchdog().arm(Blocking::Window, Instant::now() + timeout);
        let mut base: *mut u8 = std::ptr::null_mut();
        // SAFETY: constants of the library; the call overwrites the window.
        let (mut win, info) = unsafe { (ffi::RSMPI_WIN_NULL, ffi::RSMPI_INFO_NULL) };
        let here = if mine { size } else { 0 };
        // SAFETY: the communicator exists; MPI writes the address of its memory to `base`, and the window.
        check("MPI_Win_allocate", unsafe {
            let to = (&raw mut base).cast();
            ffi::MPI_Win_allocate(here, 1, info, comm.0, to, &raw mut win)
        })?;
        // SAFETY: the window was just made.
        check("MPI_Win_set_errhandler", unsafe {
            ffi::MPI_Win_set_errhandler(win, ffi::RSMPI_ERRORS_RETURN)
        })?;
        // SAFETY: the window was just made.
        check("MPI_Win_lock_all", unsafe { ffi::MPI_Win_lock_all(0, win) })?;
        if mine && !base.is_null() {
            // SAFETY: MPI has allocated `size` bytes here, and nobody uses them before the barrier below.
            unsafe { base.write_bytes(0, size as usize) };
        }
        // SAFETY: the window exists and is locked.
        check("MPI_Win_sync", unsafe { ffi::MPI_Win_sync(win) })?;
        // SAFETY: the communicator exists.
        check("MPI_Barrier", unsafe { ffi::MPI_Barrier(comm.0) })?;
        let (added, before) = (vec![0; words + 1], vec![0; words + 1]);
        let (put, world) = (Vec::new(), PhantomData);
        Ok(Window { win, comm, words, bytes, timeout, added, before, put, world })
    }

    /// Puts `data` at byte `at`, in the next round. Nobody sees it for sure before that is over.
    ///
    /// # Errors
    /// [`MpiError::Outside`], and nothing has changed.
    pub fn put(&mut self, at: usize, data: Vec<u8>) -> Result<(), MpiError> {
        inside(at, data.len(), self.bytes)?;
        self.put.push((at, data));
        Ok(())
    }

    /// One round trip: adds `add` to the first word, and `more` to those that follow, each of them at once and for
    /// good, whoever else does so. Returns what the words were before, each at its own moment. Numbers wrap around.
    ///
    /// # Errors
    /// [`MpiError`]; then the window is of no more use.
    pub fn round(&mut self, add: u64, more: &[u64]) -> Result<(u64, &[u64]), MpiError> {
        inside(0, 1 + more.len(), self.words)?;
        let _armed = watchdog().arm(Blocking::Window, Instant::now() + self.timeout);
        // What was begun first is complete by the time that the last is, or soon after: the flush waits no second time.
        let outcome = self.begin(add, more).and_then(wait).and_then(|()| self.flush());
        if let Err(error) = outcome {
            self.give_up();
            return Err(error);
        }
        self.put.clear();
        Ok((self.before[0], &self.before[1..=more.len()]))
    }

    /// Has MPI begin with a round. Its memory stays where it is until `flush`. Returns the request of what comes last.
    fn begin(&mut self, add: u64, more: &[u64]) -> Result<ffi::MPI_Request, MpiError> {
        for (at, data) in &self.put {
            for (place, part) in data.chunks(MOST).enumerate() {
                let there = displacement(self.words * WORD + at + place * MOST);
                let (from, count) = (part.as_ptr().cast(), int(part.len()));
                // SAFETY: the target was checked to be inside the window; `put` keeps the bytes until the round is over.
                check("MPI_Put", unsafe {
                    let byte = ffi::RSMPI_UINT8_T;
                    ffi::MPI_Put(from, count, byte, OWNER, there, count, byte, self.win)
                })?;
            }
        }
        self.added[0] = add;
        self.added[1..=more.len()].copy_from_slice(more);
        let (from, to) = (self.added.as_ptr(), self.before.as_mut_ptr());
        // SAFETY: the first word is inside the window; both buffers are this window's, and stay until the round is over.
        check("MPI_Fetch_and_op", unsafe {
            let (word, sum) = (ffi::RSMPI_UINT64_T, ffi::RSMPI_SUM);
            ffi::MPI_Fetch_and_op(from.cast(), to.cast(), word, OWNER, 0, sum, self.win)
        })?;
        // SAFETY: a constant of the library, which the call overwrites.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let (count, there) = (int(more.len()), displacement(WORD));
        // SAFETY: as above: both buffers are one word longer than this, and the window has as many.
        check("MPI_Rget_accumulate", unsafe {
            let (word, sum) = (ffi::RSMPI_UINT64_T, ffi::RSMPI_SUM);
            let (from, to, request) = (from.add(1).cast(), to.add(1).cast(), &raw mut request);
            ffi::MPI_Rget_accumulate(
                from, count, word, to, count, word, OWNER, there, count, word, sum, self.win,
                request,
            )
        })?;
        Ok(request)
    }

    /// Waits until everything that was begun is complete here and at rank 0.
    fn flush(&mut self) -> Result<(), MpiError> {
        // SAFETY: the window exists and is locked.
        check("MPI_Win_flush", unsafe { ffi::MPI_Win_flush(OWNER, self.win) })
    }

    /// After an error nobody knows what MPI still reads and writes: that memory is never given back.
    fn give_up(&mut self) {
        std::mem::forget(std::mem::take(&mut self.put));
        std::mem::forget(std::mem::take(&mut self.added));
        std::mem::forget(std::mem::take(&mut self.before));
        self.words = 0;
        self.bytes = 0;
    }

    /// Reads `len` bytes from `at` on. What others put there is complete if they have announced it in a
    /// later round.
    ///
    /// # Errors
    /// [`MpiError`]; then the window is of no more use.
    pub fn read(&mut self, at: usize, len: usize) -> Result<Vec<u8>, MpiError> {
        inside(at, len, self.bytes)?;
        let _armed = watchdog().arm(Blocking::Window, Instant::now() + self.timeout);
        let mut to = vec![0u8; len];
        let outcome = self.get(at, &mut to).and_then(|()| self.flush());
        if let Err(error) = outcome {
            std::mem::forget(to);
            self.give_up();
            return Err(error);
        }
        Ok(to)
    }

    /// Has MPI begin to read. `to` must stay until `flush`.
    fn get(&mut self, at: usize, to: &mut [u8]) -> Result<(), MpiError> {
        for (place, part) in to.chunks_mut(MOST).enumerate() {
            let there = displacement(self.words * WORD + at + place * MOST);
            let (into, count) = (part.as_mut_ptr().cast(), int(part.len()));
            // SAFETY: the source was checked to be inside the window; `read` keeps the buffer until it is complete, or
            // for ever.
            check("MPI_Get", unsafe {
                let byte = ffi::RSMPI_UINT8_T;
                ffi::MPI_Get(into, count, byte, OWNER, there, count, byte, self.win)
            })?;
        }
        Ok(())
    }

    /// Lets MPI get on with what others want of this rank.
    ///
    /// # Errors
    /// [`MpiError`], as MPI says.
    pub fn poke(&self) -> Result<(), MpiError> {
        self.comm.probe(0).map(|_| ())
    }

    /// Closes it. Everyone must.
    ///
    /// # Errors
    /// [`MpiError`], as MPI says.
    pub fn close(mut self) -> Result<(), MpiError> {
        let _armed = watchdog().arm(Blocking::Window, Instant::now() + self.timeout);
        // SAFETY: the window exists and is locked, and every round has been waited for.
        check("MPI_Win_unlock_all", unsafe { ffi::MPI_Win_unlock_all(self.win) })?;
        // SAFETY: nobody uses the window after this.
        check("MPI_Win_free", unsafe { ffi::MPI_Win_free(&raw mut self.win) })
    }
}

/// Waits for a request and gives up its core meanwhile: where MPI needs rank 0 for it, and ranks are more than cores,
/// rank 0 needs that core.
fn wait(mut request: ffi::MPI_Request) -> Result<(), MpiError> {
    let begun = Instant::now();
    loop {
        let mut done = 0;
        // SAFETY: the request was just made by MPI, and is tested until it is complete.
        check("MPI_Test", unsafe {
            ffi::MPI_Test(&raw mut request, &raw mut done, ffi::RSMPI_STATUS_IGNORE)
        })?;
        if done != 0 {
            return Ok(());
        }
        if begun.elapsed() < BRIEF { std::thread::yield_now() } else { std::thread::sleep(NAP) }
    }
}

/// Refuses what is not inside of something of this size.
fn inside(at: usize, len: usize, size: usize) -> Result<(), MpiError> {
    match at.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(MpiError::Outside { at, len, size }),
    }
}

/// A place in the window as MPI counts it. The window is no longer than that, and the place is inside.
fn displacement(at: usize) -> ffi::MPI_Aint {
    ffi::MPI_Aint::try_from(at).expect("a place inside of the window")
}

impl std::fmt::Debug for Window<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Window { words, bytes, .. } = self;
        f.debug_struct("Window").field("words", words).field("bytes", bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_outside_is_refused_also_where_sums_overflow() {
        assert_eq!(inside(3, 5, 8), Ok(()));
        assert_eq!(inside(8, 0, 8), Ok(()));
        for (at, len) in [(4, 5), (9, 0), (usize::MAX, 2)] {
            assert_eq!(inside(at, len, 8), Err(MpiError::Outside { at, len, size: 8 }));
        }
    }
}
