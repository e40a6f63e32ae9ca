// SPDX-License-Identifier: Apache-2.0
//! Requests and answers as messages on a socket: their heads, and what a head alone says.
//! Nothing is read or written here.

use bytemuck::{bytes_of, pod_read_unaligned};
use nix::errno::Errno;

use crate::abi::{
    ABI_VERSION_MAJOR, AbiVersion, Direction, MESSAGE_MAGIC, MESSAGE_MAX_PAYLOAD, Ping, RawMessage,
    RawVersion, Request, request,
};

/// Bytes of a message's head.
pub const HEAD_BYTES: usize = size_of::<RawMessage>();

/// The head of a message that carries `argument` and `payload` bytes.
#[must_use]
pub fn head(
    number: u32,
    status: i32,
    sequence: u64,
    argument: usize,
    payload: usize,
) -> [u8; HEAD_BYTES] {
    head_of(AbiVersion::OURS, number, status, sequence, argument, payload)
}

/// The same from a sender that speaks another version of the ABI.
#[must_use]
pub fn head_of(
    version: AbiVersion,
    number: u32,
    status: i32,
    sequence: u64,
    argument: usize,
    payload: usize,
) -> [u8; HEAD_BYTES] {
    let raw = RawMessage {
        magic: MESSAGE_MAGIC,
        major: version.major,
        minor: version.minor,
        number,
        status,
        sequence,
        argument: argument as u32,
        payload: payload as u32,
    };
    bytes_of(&raw).try_into().expect("a head has its size")
}

/// A request that is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// The request.
    pub number: u32,
    /// The caller's number for this message.
    pub sequence: u64,
    /// The bytes of the request's struct.
    pub argument: &'a [u8],
    /// Further bytes.
    pub payload: &'a [u8],
    /// Bytes of the whole message.
    pub used: usize,
}

/// What a card finds at the start of the bytes that a client has sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// A whole request.
    Request(Message<'a>),
    /// The start of one; so many bytes are needed in total to go on.
    Incomplete(usize),
    /// No request. The client is answered with this error and this sequence number, and cut off, because
    /// nobody knows where its next message would begin.
    Refused {
        /// What to answer.
        error: Errno,
        /// The request, as far as it is known.
        number: u32,
        /// The sequence number, as far as it is known.
        sequence: u64,
    },
}

/// Whether a request is answered to programs of any major version: without an answer to GET_VERSION they could not
/// say whom they met.
#[must_use]
pub fn is_of_every_version(number: u32) -> bool {
    number == Ping::NUMBER || number == RawVersion::NUMBER
}

/// Parses what a client has sent. Lengths are checked before anything of that length is waited for.
///
/// ```
/// use spanker_runtime::message::{Parsed, parse};
/// assert_eq!(parse(b""), Parsed::Incomplete(32));
/// assert!(matches!(parse(&[0xff; 32]), Parsed::Refused { .. }));
/// ```
#[must_use]
pub fn parse(bytes: &[u8]) -> Parsed<'_> {
    let Some(head) = bytes.get(..HEAD_BYTES) else { return Parsed::Incomplete(HEAD_BYTES) };
    let raw: RawMessage = pod_read_unaligned(head);
    let (number, sequence) = (raw.number, raw.sequence);
    let refused = |error| Parsed::Refused { error, number, sequence };
    if raw.magic != MESSAGE_MAGIC {
        return refused(Errno::EBADMSG);
    }
    if raw.major != ABI_VERSION_MAJOR && !is_of_every_version(number) {
        return refused(Errno::EPROTONOSUPPORT);
    }
    let (argument, payload) = (raw.argument as usize, raw.payload as usize);
    if raw.payload > MESSAGE_MAX_PAYLOAD {
        return refused(Errno::EMSGSIZE);
    }
    // A request that is not known is skipped by its lengths, so that a newer program can go on.
    let Some((_, size, direction)) = request(number) else {
        if argument > 4096 {
            return refused(Errno::EMSGSIZE);
        }
        return whole(bytes, number, sequence, argument, payload);
    };
    if argument != size || (payload > 0 && direction != Direction::ToCard) {
        return refused(Errno::EBADMSG);
    }
    whole(bytes, number, sequence, argument, payload)
}

fn whole(bytes: &[u8], number: u32, sequence: u64, argument: usize, payload: usize) -> Parsed<'_> {
    let used = HEAD_BYTES + argument + payload;
    if bytes.len() < used {
        return Parsed::Incomplete(used);
    }
    let (argument, payload) = bytes[HEAD_BYTES..used].split_at(argument);
    Parsed::Request(Message { number, sequence, argument, payload, used })
}

/// The head of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The card's version, without the patch, which a head does not tell.
    pub(crate) version: AbiVersion,
    pub(crate) status: i32,
    pub(crate) sequence: u64,
    pub(crate) argument: usize,
    pub(crate) payload: usize,
}

/// Reads the head of an answer to `number`.
pub(crate) fn answer(head: &[u8; HEAD_BYTES], number: u32) -> Result<Answer, String> {
    let raw: RawMessage = pod_read_unaligned(head);
    if raw.magic != MESSAGE_MAGIC {
        return Err(format!("it begins with {:08x}", raw.magic));
    }
    if raw.number != number {
        return Err(format!("it answers request {:08x}", raw.number));
    }
    if raw.payload > MESSAGE_MAX_PAYLOAD {
        return Err(format!("it announces {} bytes", raw.payload));
    }
    let (argument, payload) = (raw.argument as usize, raw.payload as usize);
    let version = AbiVersion { major: raw.major, minor: raw.minor, patch: 0 };
    Ok(Answer { version, status: raw.status, sequence: raw.sequence, argument, payload })
}
