// SPDX-License-Identifier: Apache-2.0
//! One authenticated connection: frames in both directions, and the buffers between them and the socket.
//!
//! Nothing here waits. What cannot be written stays here, what has not come whole is kept, and whoever waits does so
//! for several connections at once (`wait.rs`). A short message is sealed behind its head and both are one write; a long
//! one is sealed record by record as the socket takes it.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt;
use snow::TransportState;
use spanker_fabric::{Message, Pool, ReceiveBuffer};

use crate::frame::{HEAD, Head, Kind};
use crate::noise::{RECORD, TAG};

/// Bytes of a body in one record.
const MOST: usize = RECORD - TAG;
/// Bytes of each buffer: two records, and a head.
const BUFFER: usize = 2 * RECORD + HEAD + TAG;
/// How long a connection may be idle before the kernel asks whether the other end is there, and between questions.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
/// Questions without an answer. The time that the user sets ends a connection before that.
const UNANSWERED: u32 = 60;

/// Bytes of the reason of a refusal, which is taken whatever else is waited for.
pub(crate) const LONGEST_REFUSAL: usize = 4096;
/// Bytes of a notice between ranks, at most.
const LONGEST_NOTICE: u64 = 4096;

/// A frame that has come whole.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) head: Head,
    pub(crate) body: Message,
}

/// Why nothing more will come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Closed {
    /// The other end has closed the connection, or its process is gone.
    Ended,
    /// The system gave the connection up.
    Lost(String),
    /// What came was changed on the way, or makes no sense.
    Corrupt(&'static str),
    /// The other end announced more than this end takes.
    TooLong(u64),
}

/// What is still to be sealed of a frame.
#[derive(Debug)]
struct Outgoing {
    head: Option<Head>,
    body: Option<Message>,
    sealed: usize,
}

/// A frame of which the head has come.
#[derive(Debug)]
struct Incoming {
    head: Head,
    buffer: ReceiveBuffer,
    filled: usize,
}

/// A part of a buffer: from `begin` to `end` there is something.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Buffer {
    /// The memory is only there when the buffer is used.
    fn grow(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; BUFFER];
        }
    }

    fn consume(&mut self, length: usize) {
        self.begin += length;
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
    }

    fn len(&self) -> usize {
        self.end - self.begin
    }
}

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    address: SocketAddr,
    noise: TransportState,
    unsent: VecDeque<Outgoing>,
    outward: Buffer,
    inward: Buffer,
    incoming: Option<Incoming>,
    /// The last read took everything that had come.
    is_drained: bool,
    pool: Pool,
    limit: u64,
    is_broken: bool,
    /// Something has come since somebody asked.
    heard: bool,
    /// Something was written since somebody asked.
    written: bool,
    closed: Option<Closed>,
}

impl Link {
    /// The connection behind a handshake.
    pub(crate) fn new(stream: TcpStream, address: SocketAddr, noise: TransportState) -> Link {
        Link {
            stream,
            address,
            noise,
            unsent: VecDeque::new(),
            outward: Buffer::default(),
            inward: Buffer::default(),
            incoming: None,
            is_drained: false,
            pool: Pool::default(),
            limit: 0,
            is_broken: false,
            heard: false,
            written: false,
            closed: None,
        }
    }

    /// The other end.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes bodies of up to so many bytes from here on.
    pub(crate) fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Bytes of the longest body that is taken.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether the other end did not take what was written.
    pub(crate) fn has_broken(&self) -> bool {
        self.is_broken
    }

    /// Whether anything has come since this was asked last.
    pub(crate) fn take_heard(&mut self) -> bool {
        std::mem::take(&mut self.heard)
    }

    /// Whether the system has taken anything since this was asked last.
    pub(crate) fn take_written(&mut self) -> bool {
        std::mem::take(&mut self.written)
    }

    /// Takes the other end for gone.
    pub(crate) fn give_up(&mut self, why: String) {
        self.closed.get_or_insert(Closed::Lost(why));
    }

    /// Why nothing more will come, if so.
    pub(crate) fn closed(&self) -> Option<&Closed> {
        self.closed.as_ref()
    }

    /// Whether something is still to be written.
    pub(crate) fn has_unsent(&self) -> bool {
        self.closed.is_none() && (!self.unsent.is_empty() || self.outward.len() > 0)
    }

    /// Puts a record in front of everything: what the end that dials has come for.
    pub(crate) fn push_intent(&mut self, intent: &[u8]) {
        self.outward.grow();
        let sealed = self.noise.write_message(intent, &mut self.outward.bytes);
        self.outward.end = sealed.expect("a record that fits");
    }

    /// Puts a frame behind those that are still to be written.
    pub(crate) fn push(&mut self, head: Head, body: Option<Message>) {
        if self.closed.is_none() && !self.is_broken {
            let length = body.as_ref().map_or(0, |body| body.bytes().len() as u64);
            self.unsent.push_back(Outgoing {
                head: Some(Head { length, ..head }),
                body,
                sealed: 0,
            });
        }
    }

    /// The same for bytes that are copied.
    pub(crate) fn push_bytes(&mut self, head: Head, bytes: &[u8]) {
        let body = self.pool.write(bytes.len(), |out| out.copy_from_slice(bytes));
        self.push(head, Some(body));
    }

    /// Forgets frames of which nothing has been sealed.
    pub(crate) fn forget_unsent(&mut self) {
        self.unsent.retain(|outgoing| outgoing.head.is_none());
    }

    /// Seals as much as there is space for.
    fn seal(&mut self) {
        self.outward.grow();
        while let Some(next) = self.unsent.front_mut() {
            let out = &mut self.outward.bytes[self.outward.end..];
            let whole = next.body.as_ref().map_or(&[][..], Message::bytes);
            let rest = &whole[next.sealed..];
            let head = next.head.map(|head| head.bytes());
            let plain = match &head {
                Some(head) => &head[..],
                None => &rest[..rest.len().min(MOST)],
            };
            if next.head.is_none() && rest.is_empty() {
                self.unsent.pop_front();
                continue;
            }
            if out.len() < plain.len() + TAG {
                return;
            }
            let sealed = self.noise.write_message(plain, out);
            // There is space for it, and numbers of records do not run out.
            self.outward.end += sealed.expect("a record that fits");
            match next.head.take() {
                Some(_) => {}
                None => next.sealed += plain.len(),
            }
        }
    }

    /// Writes what the socket takes. Returns whether that is everything.
    pub(crate) fn flush(&mut self) -> bool {
        while self.has_unsent() {
            if self.outward.begin == 0 {
                self.seal();
            }
            let Buffer { bytes, begin, end } = &self.outward;
            if begin == end {
                break;
            }
            match (&self.stream).write(&bytes[*begin..*end]) {
                Ok(written) => {
                    self.written = true;
                    self.outward.consume(written);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                // Reading goes on, so that nothing that came before is lost, and finds the end, too.
                Err(_) => {
                    self.is_broken = true;
                    self.unsent.clear();
                    (self.outward.begin, self.outward.end) = (0, 0);
                }
            }
        }
        true
    }

    /// More may have come since the last read.
    pub(crate) fn look_again(&mut self) {
        self.is_drained = false;
    }

    /// The next frame, if all of it has come.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame>, Closed> {
        loop {
            if let Some(frame) = self.open()? {
                // It may have been here for long.
                self.heard = true;
                return Ok(Some(frame));
            }
            if let Some(closed) = &self.closed {
                return Err(closed.clone());
            }
            if std::mem::take(&mut self.is_drained) {
                return Ok(None);
            }
            if !self.read() {
                return match &self.closed {
                    Some(closed) => Err(closed.clone()),
                    None => Ok(None),
                };
            }
        }
    }

    /// Reads what has come. Returns whether anything has.
    fn read(&mut self) -> bool {
        self.inward.grow();
        let Buffer { bytes, begin, end } = &mut self.inward;
        if bytes.len() - *end < RECORD {
            bytes.copy_within(*begin..*end, 0);
            (*begin, *end) = (0, *end - *begin);
        }
        let space = &mut bytes[*end..];
        loop {
            match (&self.stream).read(space) {
                Ok(0) => self.closed = Some(Closed::Ended),
                Ok(read) => {
                    *end += read;
                    self.heard = true;
                    self.is_drained = read < space.len();
                    return true;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    self.closed = Some(Closed::Ended);
                }
                Err(error) => self.closed = Some(Closed::Lost(error.to_string())),
            }
            return false;
        }
    }

    /// Opens the records that have come.
    fn open(&mut self) -> Result<Option<Frame>, Closed> {
        let opened = self.open_records();
        if let Err(closed) = &opened {
            self.closed = Some(closed.clone());
            // What follows cannot be understood.
            (self.inward.begin, self.inward.end) = (0, 0);
        }
        opened
    }

    fn open_records(&mut self) -> Result<Option<Frame>, Closed> {
        const CHANGED: Closed = Closed::Corrupt("a record was changed on the way");
        loop {
            let came = &self.inward.bytes[self.inward.begin..self.inward.end];
            let Some(incoming) = &mut self.incoming else {
                let Some(record) = came.get(..HEAD + TAG) else { return Ok(None) };
                let mut plain = [0; HEAD];
                self.noise.read_message(record, &mut plain).map_err(|_| CHANGED)?;
                self.inward.consume(HEAD + TAG);
                let head = Head::of(&plain).ok_or(Closed::Corrupt("a head makes no sense"))?;
                let length = usize::try_from(head.length).unwrap_or(usize::MAX);
                let limit = match head.kind {
                    Kind::Message | Kind::Bytes | Kind::Join => self.limit,
                    Kind::Refusal => self.limit.max(LONGEST_REFUSAL as u64),
                    Kind::Notice if head.length <= LONGEST_NOTICE => LONGEST_NOTICE,
                    _ if head.length == 0 => 0,
                    _ => return Err(Closed::Corrupt("a frame is too long for what it says")),
                };
                if head.length > limit {
                    return Err(Closed::TooLong(head.length));
                }
                let buffer = self.pool.receive_buffer(length);
                self.incoming = Some(Incoming { head, buffer, filled: 0 });
                continue;
            };
            let rest = &mut incoming.buffer.bytes_mut()[incoming.filled..];
            let length = rest.len().min(MOST);
            if length > 0 {
                let Some(record) = came.get(..length + TAG) else { return Ok(None) };
                let text = &mut rest[..length];
                self.noise.read_message(record, text).map_err(|_| CHANGED)?;
                self.inward.consume(length + TAG);
                incoming.filled += length;
                continue;
            }
            let done = self.incoming.take();
            return Ok(done.map(|Incoming { head, buffer, .. }| Frame {
                head,
                body: self.pool.freeze(buffer),
            }));
        }
    }

    /// Says that nothing more will be written.
    pub(crate) fn finish(&self) {
        // A connection that is gone has nobody to say it to.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    /// How long the kernel tries to deliver something before the connection ends; nothing for as long as it does by
    /// itself. It counts the time in which the other end takes nothing because nobody reads there.
    pub(crate) fn set_timeout(&self, timeout: Option<Duration>) -> std::io::Result<()> {
        let millis = |timeout: Duration| u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let timeout = timeout.map_or(0, |timeout| millis(timeout).max(1));
        Ok(sockopt::set_tcp_user_timeout(&self.stream, timeout)?)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Makes a socket one that never blocks, sends at once and finds out when the other end is gone.
pub(crate) fn prepare(stream: &TcpStream, timeout: Duration) -> std::io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE)?;
    sockopt::set_tcp_keepcnt(stream, UNANSWERED)?;
    let timeout = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1);
    Ok(sockopt::set_tcp_user_timeout(stream, timeout)?)
}
