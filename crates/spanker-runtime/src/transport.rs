// SPDX-License-Identifier: Apache-2.0
//! The ways in which a request reaches a card: an ioctl on a character device, a message on a socket. The
//! crate's only ioctl is here. It does not retry or look for cards: one call is one request.

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;

use crate::abi::ABI_VERSION_MAJOR;
use crate::error::{Error, Result};
use crate::message::{self, HEAD_BYTES};

/// The bytes that a request moves besides its struct.
#[derive(Debug)]
pub enum Payload<'a> {
    /// None.
    Empty,
    /// To the card.
    ToCard(&'a [u8]),
    /// From the card.
    FromCard(&'a mut [u8]),
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Payload::Empty => 0,
            Payload::ToCard(bytes) => bytes.len(),
            Payload::FromCard(bytes) => bytes.len(),
        }
    }
}

/// One request on its way.
#[derive(Debug)]
pub struct Call<'a> {
    /// Its name, for errors.
    pub name: &'static str,
    /// Its number, which encodes the size of its struct.
    pub number: u32,
    /// The bytes of its struct, which the answer overwrites.
    pub argument: &'a mut [u8],
    /// Further bytes.
    pub payload: Payload<'a>,
    /// How long the answer may take.
    pub timeout: Duration,
}

/// A way to a card.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Delivers a request and brings back its answer.
    ///
    /// # Errors
    /// What the card answered, or why it did not.
    fn call(&self, call: &mut Call<'_>) -> Result<()>;
}

/// A character device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) file: File,
}

impl Transport for Device {
    fn call(&self, call: &mut Call<'_>) -> Result<()> {
        let encoded = (call.number >> 16 & 0x3FFF) as usize;
        assert_eq!(encoded, call.argument.len(), "{} carries its struct", call.name);
        let address = match &mut call.payload {
            Payload::Empty => None,
            Payload::ToCard(bytes) => Some(bytes.as_ptr() as u64),
            Payload::FromCard(bytes) => Some(bytes.as_mut_ptr() as u64),
        };
        if let Some(address) = address {
            call.argument[..8].copy_from_slice(&address.to_ne_bytes());
        }
        // A request without data passes null, so that the driver never sees a stray address.
        let argument = match call.argument.is_empty() {
            true => ptr::null_mut(),
            false => call.argument.as_mut_ptr(),
        };
        // SAFETY: a driver that honours the number reads and writes no more than the struct whose size the
        // number encodes, which `argument` has, and the payload's bytes, which are borrowed for as long as
        // the call lasts and for writing where the driver writes. Any bits are valid in both. The
        // descriptor is open while `self` lives.
        let code = unsafe { libc::ioctl(self.file.as_raw_fd(), call.number.into(), argument) };
        if code < 0 {
            return Err(Error::Ioctl { op: call.name, source: Errno::last() });
        }
        Ok(())
    }
}

/// A socket on which a program plays a card.
#[derive(Debug)]
pub(crate) struct Socket {
    /// `None` once an answer is missing: a late answer would be mistaken for that of a later request.
    connection: Mutex<Option<(UnixStream, u64)>>,
}

impl Socket {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Socket { connection: Mutex::new(Some((stream, 0))) }
    }
}

impl Transport for Socket {
    fn call(&self, call: &mut Call<'_>) -> Result<()> {
        let mut connection =
            self.connection.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some((stream, sequence)) = connection.as_mut() else {
            return Err(Error::Gone { op: call.name });
        };
        *sequence += 1;
        let outcome = exchange(stream, *sequence, call);
        // After a refusal the stream is in order; after any other error it is not known what comes next.
        if !matches!(outcome, Ok(()) | Err(Error::Ioctl { .. })) {
            *connection = None;
        }
        outcome
    }
}

fn exchange(stream: &mut UnixStream, sequence: u64, call: &mut Call<'_>) -> Result<()> {
    let deadline = Instant::now() + call.timeout;
    let (op, timeout) = (call.name, call.timeout);
    let lost = |error: std::io::Error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Unresponsive { op, waited: timeout },
        _ => Error::Gone { op },
    };
    let sent = match &call.payload {
        Payload::ToCard(bytes) => bytes,
        _ => &[][..],
    };
    let head = message::head(call.number, 0, sequence, call.argument.len(), sent.len());
    stream.set_write_timeout(Some(remaining(deadline))).map_err(lost)?;
    let mut request = Vec::with_capacity(HEAD_BYTES + call.argument.len());
    request.extend_from_slice(&head);
    request.extend_from_slice(call.argument);
    stream.write_all(&request).and_then(|()| stream.write_all(sent)).map_err(lost)?;

    let mut head = [0; HEAD_BYTES];
    receive(stream, &mut head, deadline).map_err(lost)?;
    let nonsense = |what| Error::Nonsense { op, what };
    let answer = message::answer(&head, call.number).map_err(nonsense)?;
    if answer.sequence != sequence {
        return Err(nonsense(format!("sequence {}, expected {sequence}", answer.sequence)));
    }
    if answer.status == Errno::EPROTONOSUPPORT as i32 && answer.version.major != ABI_VERSION_MAJOR {
        return Err(Error::Version { theirs: answer.version });
    }
    if answer.status != 0 {
        if answer.argument + answer.payload > 0 {
            return Err(nonsense("a refusal with data".into()));
        }
        return Err(Error::Ioctl { op, source: Errno::from_raw(answer.status) });
    }
    if answer.argument != call.argument.len() {
        let (found, expected) = (answer.argument, call.argument.len());
        return Err(nonsense(format!("{found} bytes, expected {expected}")));
    }
    receive(stream, call.argument, deadline).map_err(lost)?;
    let expected = if let Payload::FromCard(_) = call.payload { call.payload.len() } else { 0 };
    if answer.payload > expected {
        return Err(nonsense(format!("{} bytes of payload, expected {expected}", answer.payload)));
    }
    if let Payload::FromCard(bytes) = &mut call.payload {
        receive(stream, &mut bytes[..answer.payload], deadline).map_err(lost)?;
        if answer.payload < expected && op == "READ" {
            return Err(nonsense(format!(
                "{} bytes of payload, expected {expected}",
                answer.payload
            )));
        }
    }
    Ok(())
}

/// As `read_exact`, with one deadline for the whole read.
fn receive(stream: &mut UnixStream, mut into: &mut [u8], deadline: Instant) -> std::io::Result<()> {
    while !into.is_empty() {
        stream.set_read_timeout(Some(remaining(deadline)))?;
        match stream.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A timeout of zero would mean for ever.
fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}
