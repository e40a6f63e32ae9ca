// SPDX-License-Identifier: Apache-2.0
//! Authenticated connections for messages of bytes. What the bytes say is the program's business.
//!
//! The connection over which a leader asks a worker to join is one, and becomes the group's connection between the two.
//! Bulk data has connections of its own, so that it does not stand in the way of a group's messages.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ring::rand::{SecureRandom, SystemRandom};
use rustix::event::PollFlags;
use rustix::net::sockopt;
use spanker_fabric::Message;

use crate::frame::{Head, Kind};
use crate::group::Join;
use crate::link::{Closed, Frame, LONGEST_REFUSAL, Link, prepare};
use crate::noise::{HELLO, Role, TAG, handshake};
use crate::wait::{left, sleep_on, sleep_on_links};
use crate::{Key, TcpError};

/// Bytes of a request to join, at most: the addresses of a thousand workers.
pub(crate) const LONGEST_JOIN: u64 = 64 << 10;

/// How long the other end of a channel may take nothing before it is taken for dead: it may have to write to a disk.
pub(crate) const UNREACHABLE: Duration = Duration::from_secs(60);

/// A number that nobody has drawn before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id(pub [u8; 16]);

impl Id {
    /// Draws one.
    ///
    /// # Errors
    /// [`TcpError::Random`] if the system has no random numbers.
    pub fn random() -> Result<Id, TcpError> {
        let mut bytes = [0; 16];
        SystemRandom::new().fill(&mut bytes).map_err(|_| TcpError::Random)?;
        Ok(Id(bytes))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Questions of a leader, and its group: [`crate::Listener::next`] has it.
    Control,
    /// Bulk data under a number that both ends know: [`crate::Listener::next_bulk`] has it.
    Bulk(Id),
}

/// What a connection is for, between ranks as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Intent {
    Control,
    Bulk(Id),
    /// From this rank of this group.
    Mesh(Id, u32),
}

/// Bytes of an intent.
pub(crate) const INTENT: usize = HELLO - TAG;

impl Intent {
    pub(crate) fn bytes(self) -> [u8; INTENT] {
        let (kind, id, rank) = match self {
            Intent::Control => (1, Id([0; 16]), 0),
            Intent::Bulk(id) => (2, id, 0),
            Intent::Mesh(id, rank) => (3, id, rank),
        };
        let mut out = [0; INTENT];
        out[0] = kind;
        out[4..8].copy_from_slice(&u32::to_le_bytes(rank));
        out[8..24].copy_from_slice(&id.0);
        out
    }

    pub(crate) fn of(bytes: &[u8; INTENT]) -> Option<Intent> {
        let rank = u32::from_le_bytes(bytes[4..8].try_into().ok()?);
        let id = Id(bytes[8..24].try_into().ok()?);
        let intent = match bytes[0] {
            1 => Intent::Control,
            2 => Intent::Bulk(id),
            3 => Intent::Mesh(id, rank),
            _ => return None,
        };
        (intent.bytes() == *bytes).then_some(intent)
    }
}

/// One end of an authenticated connection.
#[derive(Debug)]
pub struct Channel {
    pub(crate) link: Link,
}

/// What has come from a leader.
#[derive(Debug)]
pub enum Event {
    /// Bytes. The channel is there for the answer.
    Message(Channel, Message),
    /// The leader asks this worker to join a group, over the same connection.
    Join(Join),
}

impl Channel {
    /// Connects to a worker that listens at `address`, as in `board2:7077` or `[::1]:7077`.
    ///
    /// # Errors
    /// [`TcpError::Address`], [`TcpError::KeyNeeded`], [`TcpError::System`], [`TcpError::Handshake`] or
    /// [`TcpError::Timeout`] after `timeout`. Only the search for a name may take longer, as long as the system lets it.
    pub fn dial(
        address: &str,
        key: Option<&Key>,
        purpose: Purpose,
        timeout: Duration,
    ) -> Result<Channel, TcpError> {
        let deadline = Instant::now() + timeout;
        let intent = match purpose {
            Purpose::Control => Intent::Control,
            Purpose::Bulk(id) => Intent::Bulk(id),
        };
        let mut last = None;
        for address in resolve(address)? {
            match dial(address, key, intent, deadline) {
                Ok(link) => return Ok(Channel { link }),
                Err(error) => last = Some(error),
            }
        }
        let none = || TcpError::Address { text: address.into(), reason: "has no address".into() };
        Err(last.unwrap_or_else(none))
    }

    /// The other end.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.link.address()
    }

    /// Sends bytes, and waits until the system has taken them.
    ///
    /// # Errors
    /// [`TcpError::Closed`], or [`TcpError::Timeout`] at `deadline`; then the channel is of no more use.
    pub fn send(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), TcpError> {
        self.link.push_bytes(Head::of_kind(Kind::Bytes), bytes);
        flush(&mut self.link, deadline)
    }

    /// The same without a copy.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn send_message(&mut self, message: Message, deadline: Instant) -> Result<(), TcpError> {
        self.link.push(Head::of_kind(Kind::Bytes), Some(message));
        flush(&mut self.link, deadline)
    }

    /// Waits for bytes. Nothing is allocated for more than `limit` of them.
    ///
    /// # Errors
    /// [`TcpError::Closed`], [`TcpError::TooLong`], [`TcpError::Corrupt`], or [`TcpError::Timeout`] at `deadline`. After
    /// any but the last the channel is of no more use.
    pub fn receive(&mut self, limit: usize, deadline: Instant) -> Result<Message, TcpError> {
        self.link.set_limit(limit as u64);
        let frame = receive(&mut self.link, "message", deadline)?;
        match frame.head.kind {
            Kind::Bytes => Ok(frame.body),
            Kind::Refusal => Err(self.refusal(&frame)),
            _ => Err(TcpError::Corrupt { address: self.address(), what: "not a message" }),
        }
    }

    /// On a worker: waits for bytes, or to be asked to join.
    ///
    /// # Errors
    /// As [`Channel::receive`]; the channel is gone.
    pub fn next(mut self, limit: usize, deadline: Instant) -> Result<Event, TcpError> {
        self.link.set_limit(LONGEST_JOIN.max(limit as u64));
        let frame = receive(&mut self.link, "message", deadline)?;
        match frame.head.kind {
            Kind::Bytes if frame.body.bytes().len() <= limit => {
                Ok(Event::Message(self, frame.body))
            }
            Kind::Bytes => {
                let length = frame.body.bytes().len() as u64;
                Err(TcpError::TooLong { address: self.address(), length, limit: limit as u64 })
            }
            Kind::Join => Join::of(self.link, frame.body.bytes()).map(Event::Join),
            _ => Err(TcpError::Corrupt { address: self.address(), what: "not a question" }),
        }
    }

    fn refusal(&self, frame: &Frame) -> TcpError {
        let reason = String::from_utf8_lossy(frame.body.bytes()).into_owned();
        TcpError::Refused { address: self.address(), reason }
    }

    /// Refuses what the other end asked for, with a reason that it gets as [`TcpError::Refused`], and closes the channel.
    pub fn refuse(mut self, reason: &str) {
        let most = LONGEST_REFUSAL.min(reason.len());
        let end = (0..=most).rev().find(|&at| reason.is_char_boundary(at)).unwrap_or(0);
        let head = Head::of_kind(Kind::Refusal);
        self.link.push_bytes(head, &reason.as_bytes()[..end]);
        // Whoever does not read it does not need it.
        let _ = flush(&mut self.link, Instant::now() + Duration::from_millis(100));
        self.link.finish();
    }
}

/// The addresses that a text says.
fn resolve(text: &str) -> Result<Vec<SocketAddr>, TcpError> {
    let wrong = |reason: String| TcpError::Address { text: text.to_owned(), reason };
    let found = text.to_socket_addrs().map_err(|error| match error.kind() {
        ErrorKind::InvalidInput => wrong(format!("{error}\nhint: HOST:PORT, as in board2:7077")),
        _ => wrong(error.to_string()),
    })?;
    Ok(found.collect())
}

/// Whether only this machine can reach an address.
pub(crate) fn is_local(address: &SocketAddr) -> bool {
    let ip: IpAddr = address.ip().to_canonical();
    ip.is_loopback()
}

/// The key for an address.
///
/// # Errors
/// [`TcpError::KeyNeeded`] if there is none and others can reach it.
pub(crate) fn key_for(key: Option<&Key>, address: SocketAddr) -> Result<Key, TcpError> {
    match key {
        Some(key) => Ok(key.clone()),
        None if is_local(&address) => Ok(Key::NONE),
        None => Err(TcpError::KeyNeeded { address }),
    }
}

/// Connects to one address, and says what for.
pub(crate) fn dial(
    address: SocketAddr,
    key: Option<&Key>,
    intent: Intent,
    deadline: Instant,
) -> Result<Link, TcpError> {
    let key = key_for(key, address)?;
    let timeout = left(deadline);
    let late = || TcpError::Timeout { address, what: "answer", timeout };
    if timeout.is_zero() {
        return Err(late());
    }
    let system = |what| {
        move |error: std::io::Error| TcpError::System { what, address, reason: error.to_string() }
    };
    let stream =
        TcpStream::connect_timeout(&address, timeout).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => late(),
            _ => system("cannot connect to")(error),
        })?;
    prepare(&stream, timeout).map_err(system("cannot set up a connection to"))?;
    let is_bulk = matches!(intent, Intent::Bulk(_));
    // Routers and queues that look at it let a group's messages pass bulk data. Where none do, nothing is lost.
    let service = if is_bulk { THROUGHPUT } else { LOW_DELAY };
    let _ = match address {
        SocketAddr::V4(_) => sockopt::set_ip_tos(&stream, service),
        SocketAddr::V6(_) => sockopt::set_ipv6_tclass(&stream, u32::from(service)),
    };
    let refused = |_| TcpError::Handshake { address };
    let mut noise = handshake(&key, Role::Dials).map_err(refused)?;
    let mut hello = [0; HELLO];
    noise.write_message(&[], &mut hello).map_err(refused)?;
    transfer(&stream, deadline, PollFlags::OUT, HELLO, |at| (&stream).write(&hello[at..]))
        .and_then(|()| {
            transfer(&stream, deadline, PollFlags::IN, HELLO, |at| (&stream).read(&mut hello[at..]))
        })
        .map_err(|error| match error.kind() {
            ErrorKind::TimedOut => late(),
            _ => TcpError::Handshake { address },
        })?;
    noise.read_message(&hello, &mut []).map_err(refused)?;
    let mut link = Link::new(stream, address, noise.into_transport_mode().map_err(refused)?);
    link.push_intent(&intent.bytes());
    flush(&mut link, deadline)?;
    link.set_timeout(Some(UNREACHABLE)).map_err(system("cannot set up a connection to"))?;
    Ok(link)
}

/// `IPTOS_LOWDELAY` and `IPTOS_THROUGHPUT`.
const LOW_DELAY: u8 = 0x10;
const THROUGHPUT: u8 = 0x08;

/// Repeats a read or a write from where it got to, until it got to `length`.
fn transfer(
    stream: &TcpStream,
    deadline: Instant,
    until: PollFlags,
    length: usize,
    mut step: impl FnMut(usize) -> std::io::Result<usize>,
) -> std::io::Result<()> {
    let mut at = 0;
    while at < length {
        match step(at) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(moved) => at += moved,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let most = left(deadline);
                if most.is_zero() {
                    return Err(ErrorKind::TimedOut.into());
                }
                sleep_on(&[(stream.as_fd(), until)], most);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What the end of a connection means to whoever uses it.
pub(crate) fn closed(link: &Link, closed: &Closed) -> TcpError {
    let address = link.address();
    match closed {
        Closed::Ended => TcpError::Closed { address },
        Closed::Lost(reason) => {
            TcpError::System { what: "lost the connection to", address, reason: reason.clone() }
        }
        Closed::Corrupt(what) => TcpError::Corrupt { address, what },
        Closed::TooLong(length) => {
            TcpError::TooLong { address, length: *length, limit: link.limit() }
        }
    }
}

/// Waits until everything is written.
pub(crate) fn flush(link: &mut Link, deadline: Instant) -> Result<(), TcpError> {
    let (address, timeout) = (link.address(), left(deadline));
    while !link.flush() {
        let most = left(deadline);
        if most.is_zero() {
            return Err(TcpError::Timeout { address, what: "space for a message", timeout });
        }
        sleep_on(&[(link.as_fd(), PollFlags::OUT)], most);
    }
    match link.has_broken() {
        true => Err(TcpError::Closed { address }),
        false => Ok(()),
    }
}

/// Waits for a frame.
pub(crate) fn receive(
    link: &mut Link,
    what: &'static str,
    deadline: Instant,
) -> Result<Frame, TcpError> {
    let (address, timeout) = (link.address(), left(deadline));
    loop {
        match link.next_frame() {
            Ok(Some(frame)) => return Ok(frame),
            Ok(None) => {}
            Err(why) => return Err(closed(link, &why)),
        }
        let most = left(deadline);
        if most.is_zero() {
            return Err(TcpError::Timeout { address, what, timeout });
        }
        sleep_on_links(std::iter::once((&*link, true)), most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intents_read_as_they_were_written_and_others_are_refused() {
        let id = Id(std::array::from_fn(|at| at as u8));
        for intent in [Intent::Control, Intent::Bulk(id), Intent::Mesh(id, 7)] {
            assert_eq!(Intent::of(&intent.bytes()), Some(intent));
            let mut longer = intent.bytes();
            longer[INTENT - 1] = 1;
            assert_eq!(Intent::of(&longer), None);
        }
        assert_eq!(Intent::of(&[0; INTENT]), None);
    }

    #[test]
    fn an_address_that_others_reach_needs_a_key() {
        for (text, local) in [
            ("127.0.0.1:1", true),
            ("127.9.0.1:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("0.0.0.0:1", false),
            ("[::]:1", false),
            ("10.0.0.1:1", false),
        ] {
            let address: SocketAddr = text.parse().expect("an address");
            assert_eq!(key_for(None, address).is_ok(), local, "{text}");
            assert!(key_for(Some(&Key::NONE), address).is_ok(), "{text}");
        }
        let error = Channel::dial("10.0.0.1:1", None, Purpose::Control, Duration::from_secs(1));
        assert!(matches!(error, Err(TcpError::KeyNeeded { .. })));
    }

    #[test]
    fn texts_that_are_no_addresses_are_named() {
        for text in ["board2", "", ":", "host:port", "1.2.3.4:99999"] {
            let error = Channel::dial(text, None, Purpose::Control, Duration::from_secs(1));
            let error = error.expect_err(text).to_string();
            assert!(error.starts_with(&format!("{text}: ")), "{error}");
        }
    }
}
