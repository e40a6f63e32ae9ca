// SPDX-License-Identifier: Apache-2.0
//! MPI's functions, each return code checked. Point-to-point messages own their memory until MPI is done
//! with it. The collectives are in `native.rs`, which the caller's deadline guards.

use std::ffi::{c_char, c_int, c_void};

use mpi::ffi;
use spanker_fabric::{Message, ReceiveBuffer};

use crate::MpiError;

/// A communicator. Copies name the same one.
#[derive(Clone, Copy)]
pub(crate) struct Comm(pub(crate) ffi::MPI_Comm);

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Comm")
    }
}

/// The words for a code that MPI returned.
pub(crate) fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == 0 {
        return Ok(());
    }
    let mut text = [0 as c_char; 2048];
    let mut len: c_int = 0;
    // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING of any MPI, and may be called at any time.
    let outcome = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut len) };
    let message = if outcome == 0 { words(&text, len) } else { "no words for it".into() };
    Err(MpiError::Call { call, code, message })
}

/// MPI's text without what comes after its end. Lines of it become one.
fn words(text: &[c_char], len: c_int) -> String {
    let len = usize::try_from(len).unwrap_or(0).min(text.len());
    let bytes: Vec<u8> = text[..len].iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).trim().replace('\n', "; ")
}

/// Starts MPI. Only the thread that did so may call it.
pub(crate) fn start() -> Result<(), MpiError> {
    let (mut begun, mut provided) = (0, 0);
    // SAFETY: may be called before MPI is started.
    check("MPI_Initialized", unsafe { ffi::MPI_Initialized(&raw mut begun) })?;
    if begun != 0 {
        return Err(MpiError::Again);
    }
    let none = std::ptr::null_mut();
    // SAFETY: MPI takes null for arguments; it is started once, as was just seen.
    check("MPI_Init_thread", unsafe {
        ffi::MPI_Init_thread(none, none.cast(), ffi::RSMPI_THREAD_FUNNELED, &raw mut provided)
    })?;
    // SAFETY: constants of the library, which is started.
    for comm in unsafe { [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] } {
        return_errors(Comm(comm))?;
    }
    Ok(())
}

/// Ends MPI. The caller has made sure that everyone does.
pub(crate) fn finalize() -> Result<(), MpiError> {
    // SAFETY: MPI is started, and called by one thread.
    check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
}

/// Lets errors be returned instead of ending the program.
fn return_errors(comm: Comm) -> Result<(), MpiError> {
    // SAFETY: the communicator is one of MPI's own or was just made.
    check("MPI_Comm_set_errhandler", unsafe {
        ffi::MPI_Comm_set_errhandler(comm.0, ffi::RSMPI_ERRORS_RETURN)
    })
}

/// What the library calls itself.
pub(crate) fn library_version() -> Result<String, MpiError> {
    // Longer than MPI_MAX_LIBRARY_VERSION_STRING of any MPI.
    let mut text = [0 as c_char; 16384];
    let mut len: c_int = 0;
    // SAFETY: the buffer is large enough.
    check("MPI_Get_library_version", unsafe {
        ffi::MPI_Get_library_version(text.as_mut_ptr(), &raw mut len)
    })?;
    Ok(words(&text, len))
}

impl Comm {
    /// All processes.
    pub(crate) fn world() -> Comm {
        // SAFETY: a constant of the library.
        Comm(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    pub(crate) fn rank(self) -> Result<usize, MpiError> {
        let mut rank = 0;
        // SAFETY: the communicator exists.
        check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(self.0, &raw mut rank) })?;
        Ok(usize::try_from(rank).unwrap_or(0))
    }

    pub(crate) fn size(self) -> Result<usize, MpiError> {
        let mut size = 0;
        // SAFETY: the communicator exists.
        check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(self.0, &raw mut size) })?;
        Ok(usize::try_from(size).unwrap_or(0))
    }

    /// The same ranks, whose messages are apart from all others. Everyone must call it.
    pub(crate) fn duplicate(self) -> Result<Comm, MpiError> {
        // SAFETY: a constant of the library, which the call overwrites.
        let mut copy = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: the communicator exists.
        check("MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(self.0, &raw mut copy) })?;
        return_errors(Comm(copy))?;
        Ok(Comm(copy))
    }

    /// Everyone's `mine`, in rank order. Everyone must call it with as many bytes.
    pub(crate) fn all_gather(self, mine: &[u8]) -> Result<Vec<u8>, MpiError> {
        let mut all = vec![0u8; mine.len() * self.size()?];
        let count = int(mine.len());
        // SAFETY: `all` has `count` bytes for each rank, and MPI writes no more.
        check("MPI_Allgather", unsafe {
            ffi::MPI_Allgather(
                mine.as_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                all.as_mut_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                self.0,
            )
        })?;
        Ok(all)
    }

    /// Who has sent a message with `tag`, and how many bytes, if somebody has.
    pub(crate) fn probe(self, tag: c_int) -> Result<Option<(usize, usize)>, MpiError> {
        let (mut found, mut count) = (0, 0);
        // SAFETY: a status is plain data, and all zeros is a value of it.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: the communicator exists; flag and status are written by MPI.
        check("MPI_Iprobe", unsafe {
            ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, self.0, &raw mut found, &raw mut status)
        })?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: the status is of a message that was found.
        check("MPI_Get_count", unsafe {
            ffi::MPI_Get_count(&raw const status, ffi::RSMPI_UINT8_T, &raw mut count)
        })?;
        let source = usize::try_from(status.MPI_SOURCE).unwrap_or(0);
        Ok(Some((source, usize::try_from(count).unwrap_or(0))))
    }

    /// Receives the message that `probe` has found. It is there, so this does not wait for its sender.
    pub(crate) fn receive(self, from: usize, tag: c_int, len: usize) -> Result<Vec<u8>, MpiError> {
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer has `len` bytes, and outlives the call.
        check("MPI_Recv", unsafe {
            ffi::MPI_Recv(
                bytes.as_mut_ptr().cast(),
                int(len),
                ffi::RSMPI_UINT8_T,
                int(from),
                tag,
                self.0,
                ffi::RSMPI_STATUS_IGNORE,
            )
        })?;
        Ok(bytes)
    }
}

/// As MPI counts. What is longer was refused before.
pub(crate) fn int(number: usize) -> c_int {
    c_int::try_from(number).expect("lengths are checked against what MPI can count")
}

/// The most bytes of one message.
pub(crate) const LONGEST: usize = c_int::MAX as usize;

/// The memory of a request: what MPI reads a message from or writes it to.
#[derive(Debug)]
pub(crate) enum RequestBuffer {
    /// The message that is being sent, kept so that its memory stays.
    Sent {
        to: usize,
        _message: Message,
    },
    Received(ReceiveBuffer),
    /// A barrier has none.
    Nothing,
}

/// Nonblocking requests of MPI, and the memory that they own until they are complete.
#[derive(Default)]
pub(crate) struct Requests {
    requests: Vec<ffi::MPI_Request>,
    buffers: Vec<Option<RequestBuffer>>,
    indices: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
    left: usize,
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests").field("left", &self.left).finish_non_exhaustive()
    }
}

/// A request that is complete: its index, its buffer, and the bytes that were received.
pub(crate) type Completed = (usize, RequestBuffer, usize);

impl Requests {
    /// How many are not complete.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// How many requests there are, complete ones included.
    pub(crate) fn count(&self) -> usize {
        self.requests.len()
    }

    /// The receiver of the first send that is not complete.
    pub(crate) fn first_left(&self) -> Option<usize> {
        self.buffers.iter().flatten().find_map(|buffer| match buffer {
            RequestBuffer::Sent { to, .. } => Some(*to),
            _ => None,
        })
    }

    /// Whether the request of this index is complete.
    pub(crate) fn is_complete(&self, index: usize) -> bool {
        self.buffers.get(index).is_none_or(Option::is_none)
    }

    /// Forgets the requests, all of which are complete. Indices begin at 0 again.
    pub(crate) fn clear(&mut self) {
        debug_assert_eq!(self.left, 0);
        if self.left == 0 {
            self.requests.clear();
            self.buffers.clear();
        }
    }

    fn begin(&mut self, buffer: RequestBuffer, request: ffi::MPI_Request) -> usize {
        self.requests.push(request);
        self.buffers.push(Some(buffer));
        self.left += 1;
        self.requests.len() - 1
    }

    /// Sends a message. Returns the request's index.
    pub(crate) fn send(
        &mut self,
        comm: Comm,
        to: usize,
        tag: c_int,
        message: Message,
    ) -> Result<usize, MpiError> {
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let bytes = message.bytes();
        // SAFETY: the bytes are shared and never written; `buffers` keeps them until MPI has read them.
        check("MPI_Isend", unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast::<c_void>(),
                int(bytes.len()),
                ffi::RSMPI_UINT8_T,
                int(to),
                tag,
                comm.0,
                &raw mut request,
            )
        })?;
        Ok(self.begin(RequestBuffer::Sent { to, _message: message }, request))
    }

    /// Receives into a buffer. Returns the request's index.
    pub(crate) fn receive(
        &mut self,
        comm: Comm,
        from: usize,
        tag: c_int,
        mut buffer: ReceiveBuffer,
    ) -> Result<usize, MpiError> {
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let bytes = buffer.bytes_mut();
        // SAFETY: nobody else has the buffer; `buffers` keeps it, unread, until MPI has written it. Its bytes
        // do not move with it.
        check("MPI_Irecv", unsafe {
            ffi::MPI_Irecv(
                bytes.as_mut_ptr().cast::<c_void>(),
                int(bytes.len()),
                ffi::RSMPI_UINT8_T,
                int(from),
                tag,
                comm.0,
                &raw mut request,
            )
        })?;
        Ok(self.begin(RequestBuffer::Received(buffer), request))
    }

    /// Takes part in a nonblocking barrier. Returns the request's index.
    pub(crate) fn barrier(&mut self, comm: Comm) -> Result<usize, MpiError> {
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: the communicator exists; there is no memory to keep.
        check("MPI_Ibarrier", unsafe { ffi::MPI_Ibarrier(comm.0, &raw mut request) })?;
        Ok(self.begin(RequestBuffer::Nothing, request))
    }

    /// Lets MPI make progress, and moves complete requests to `completed`.
    pub(crate) fn poll(&mut self, completed: &mut Vec<Completed>) -> Result<(), MpiError> {
        let count = self.requests.len();
        if self.left == 0 {
            return Ok(());
        }
        if self.indices.len() < count {
            self.indices.resize(count, 0);
            // SAFETY: a status is plain data, and all zeros is a value of it.
            self.statuses.resize(count, unsafe { std::mem::zeroed() });
        }
        let mut done = 0;
        // SAFETY: there are at least as many indices and statuses as requests.
        let code = unsafe {
            ffi::MPI_Testsome(
                int(count),
                self.requests.as_mut_ptr(),
                &raw mut done,
                self.indices.as_mut_ptr(),
                self.statuses.as_mut_ptr(),
            )
        };
        let in_status = code == ffi::MPI_ERR_IN_STATUS as c_int;
        if !in_status {
            check("MPI_Testsome", code)?;
        }
        // A negative number says that none was left.
        let done = usize::try_from(done).unwrap_or(0);
        let mut outcome = Ok(());
        for (&index, status) in self.indices.iter().zip(&self.statuses).take(done) {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            let Some(buffer) = self.buffers.get_mut(index).and_then(Option::take) else { continue };
            self.left -= 1;
            if in_status && status.MPI_ERROR != 0 {
                outcome = outcome.and(check("MPI_Testsome", status.MPI_ERROR));
            }
            let mut bytes = 0;
            if matches!(buffer, RequestBuffer::Received(_)) {
                // SAFETY: the status is of a message that was received.
                check("MPI_Get_count", unsafe {
                    ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &raw mut bytes)
                })?;
            }
            completed.push((index, buffer, usize::try_from(bytes).unwrap_or(0)));
        }
        outcome
    }

    /// Gives up what is not complete. Memory that MPI does not release at once is leaked.
    pub(crate) fn abandon(&mut self) {
        for index in 0..self.requests.len() {
            if let Some(RequestBuffer::Received(_)) = self.buffers[index] {
                // SAFETY: the request is active: its buffer is still here.
                let _ = unsafe { ffi::MPI_Cancel(&raw mut self.requests[index]) };
            }
        }
        let mut completed = Vec::new();
        for _ in 0..100 {
            if self.left == 0 || self.poll(&mut completed).is_err() {
                break;
            }
        }
        // MPI may still read or write this memory. It is never given back.
        self.buffers.drain(..).flatten().for_each(std::mem::forget);
        self.requests.clear();
        self.left = 0;
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        if self.left > 0 {
            self.abandon();
        }
    }
}

unsafe extern "C" {
    fn _exit(code: c_int) -> !;
}

/// Ends the process without anybody's clean-up, which could wait for MPI.
pub(crate) fn leave_at_once(code: c_int) -> ! {
    // SAFETY: nothing of this process is used any more.
    unsafe { _exit(code) }
}
