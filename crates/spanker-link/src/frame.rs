// SPDX-License-Identifier: Apache-2.0
//! What a frame looks like on the wire, and how it gets there. Reading is in `decode.rs`.

use crc_fast::{CrcAlgorithm, Digest};

use crate::crc8::crc8;

/// Bytes that a frame with payload adds to it: start 4, header 8, CRC 4, end 4, gap 4.
pub const OVERHEAD: usize = 24;
/// Bytes of a control frame: start 4, header 8, CRC 4.
pub const CONTROL_BYTES: usize = 16;
/// The largest payload of a frame.
pub const MAX_PAYLOAD: usize = 4096;

/// The first two bytes of a frame; the next two are the session.
pub const START: [u8; 2] = [0xFB, 0x5A];
/// The four bytes after the CRC of a frame with payload.
pub const END: [u8; 4] = [0xFD, 0xC3, 0x3C, 0x99];
/// The four bytes after the end. Receivers skip them unseen: clock compensation may change them.
pub const GAP: [u8; 4] = [0xBC, 0x50, 0xBC, 0x50];

/// Bytes before the payload.
pub(crate) const PREFIX: usize = 12;
/// Bytes before the header.
pub(crate) const HEADER: usize = 4;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The ends find each other; has a payload, no sequence number.
    Train,
    /// Sequenced payload.
    Data,
    /// Sequenced payload, in order with data, that may use the reserved credits.
    Notice,
    /// Acknowledges what arrived and grants credit; no payload.
    Ack,
    /// The same, and asks for everything from there on again; no payload.
    Nak,
}

impl Kind {
    /// Whether frames of this kind are without payload, end and gap.
    #[must_use]
    pub const fn is_control(self) -> bool {
        matches!(self, Kind::Ack | Kind::Nak)
    }
}

/// The header of a frame: 56 bits of fields, and the session from the start word.
///
/// | bits of the little-endian word | field |
/// |---|---|
/// | 0..3 | kind and `last`: 1 train, 2 data, 3 data and last, 4 notice, 5 ack, 6 nak, 7 ack and last |
/// | 3..16 | length |
/// | 16..32 | seq |
/// | 32..48 | ack |
/// | 48..56 | credit |
/// | 56..64 | CRC-8 of the session and the seven bytes before |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    /// What the frame is for.
    pub kind: Kind,
    /// Nothing follows for now, so the receiver should answer at once. Only [`Kind::Data`] and
    /// [`Kind::Ack`] have the choice: it is always set for a notice and never for the others.
    pub last: bool,
    /// The low half of the sender's session.
    pub session: u16,
    /// Bytes of payload.
    pub length: u16,
    /// The number of a data frame or notice; for a nak that of the request, which a repeated request
    /// keeps; 0 for others.
    pub seq: u16,
    /// The number that the sender of this frame expects next: it has everything before.
    pub ack: u16,
    /// The low byte of the first number that may not be sent yet.
    pub credit: u8,
}

impl Header {
    /// Bytes of the whole frame.
    #[must_use]
    pub const fn frame_len(&self) -> usize {
        frame_len(self.kind, self.length as usize)
    }

    /// The session and the header as they are on the wire.
    fn to_bytes(self) -> [u8; PREFIX - 2] {
        let code: u16 = match (self.kind, self.last) {
            (Kind::Train, _) => 1,
            (Kind::Data, false) => 2,
            (Kind::Data, true) => 3,
            (Kind::Notice, _) => 4,
            (Kind::Ack, false) => 5,
            (Kind::Nak, _) => 6,
            (Kind::Ack, true) => 7,
        };
        let session = self.session.to_le_bytes();
        let first = (code | self.length << 3).to_le_bytes();
        let seq = self.seq.to_le_bytes();
        let ack = self.ack.to_le_bytes();
        let mut bytes = [
            session[0],
            session[1],
            first[0],
            first[1],
            seq[0],
            seq[1],
            ack[0],
            ack[1],
            self.credit,
            0,
        ];
        bytes[9] = crc8(&bytes[..9]);
        bytes
    }

    /// The header in these bytes, session first, if its check and its fields are right.
    pub(crate) fn from_bytes(bytes: &[u8; PREFIX - 2]) -> Option<Header> {
        if crc8(&bytes[..9]) != bytes[9] {
            return None;
        }
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let first = word(2);
        let (kind, last) = match first & 7 {
            1 => (Kind::Train, false),
            2 => (Kind::Data, false),
            3 => (Kind::Data, true),
            4 => (Kind::Notice, true),
            5 => (Kind::Ack, false),
            6 => (Kind::Nak, false),
            7 => (Kind::Ack, true),
            _ => return None,
        };
        let length = first >> 3;
        let most = if kind.is_control() { 0 } else { MAX_PAYLOAD };
        (usize::from(length) <= most).then_some(Header {
            kind,
            last,
            session: word(0),
            length,
            seq: word(4),
            ack: word(6),
            credit: bytes[8],
        })
    }
}

/// Bytes of a whole frame of this kind with so much payload.
///
/// ```
/// use spanker_link::{Kind, frame_len};
/// assert_eq!(frame_len(Kind::Data, 2048), 2072);
/// assert_eq!(frame_len(Kind::Ack, 0), 16);
/// ```
#[must_use]
pub const fn frame_len(kind: Kind, payload_len: usize) -> usize {
    if kind.is_control() { CONTROL_BYTES } else { OVERHEAD + payload_len }
}

/// Appends a whole frame to `out`. The payload comes in parts.
///
/// # Panics
///
/// When the parts do not add up to `header.length`, when that is over [`MAX_PAYLOAD`], or when a
/// control frame has a payload.
///
/// ```
/// use spanker_link::{Decoded, Header, Kind, decode, encode};
/// let header =
///     Header { kind: Kind::Data, last: true, session: 7, length: 5, seq: 1, ack: 0, credit: 64 };
/// let mut wire = Vec::new();
/// encode(&header, &[b"he", b"llo"], &mut wire);
/// assert_eq!(wire.len(), 29);
/// assert_eq!(decode(&wire), Decoded::Frame { header, payload: b"hello", used: 29 });
/// ```
pub fn encode(header: &Header, payload: &[&[u8]], out: &mut Vec<u8>) {
    let begin = out.len();
    out.reserve(header.frame_len());
    out.extend_from_slice(&START);
    out.extend_from_slice(&header.to_bytes());
    for part in payload {
        out.extend_from_slice(part);
    }
    let length = out.len() - begin - PREFIX;
    check_length(header, length);
    let crc = checksum(&out[begin + HEADER..]);
    out.extend_from_slice(&crc.to_le_bytes());
    if !header.kind.is_control() {
        out.extend_from_slice(&END);
        out.extend_from_slice(&GAP);
    }
}

/// Writes a whole frame to the beginning of `out` and says how long it is: for callers with a ring of
/// their own.
///
/// # Panics
///
/// As [`encode`], and when `out` is shorter than [`frame_len`].
pub fn encode_into(header: &Header, payload: &[&[u8]], out: &mut [u8]) -> usize {
    let total = header.frame_len();
    let out = &mut out[..total];
    out[..2].copy_from_slice(&START);
    out[2..PREFIX].copy_from_slice(&header.to_bytes());
    let length = payload.iter().map(|part| part.len()).sum();
    check_length(header, length);
    let mut at = PREFIX;
    for part in payload {
        out[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    let crc = checksum(&out[HEADER..at]);
    out[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    if !header.kind.is_control() {
        out[at + 4..at + 8].copy_from_slice(&END);
        out[at + 8..at + 12].copy_from_slice(&GAP);
    }
    total
}

/// What goes before and after the payload of a frame: for callers who put the payload on the wire from where
/// it lies.
///
/// # Panics
///
/// As [`encode`], and for a control frame, which has no payload.
///
/// ```
/// use spanker_link::{Header, Kind, encode, seal};
/// let header =
///     Header { kind: Kind::Data, last: true, session: 7, length: 5, seq: 1, ack: 0, credit: 64 };
/// let (prefix, suffix) = seal(&header, &[b"hello"]);
/// let mut wire = Vec::new();
/// encode(&header, &[b"hello"], &mut wire);
/// assert_eq!([&prefix[..], b"hello", &suffix[..]].concat(), wire);
/// ```
#[must_use]
pub fn seal(header: &Header, payload: &[&[u8]]) -> ([u8; 12], [u8; 12]) {
    assert!(!header.kind.is_control(), "a control frame has no payload");
    check_length(header, payload.iter().map(|part| part.len()).sum());
    let mut prefix = [0; PREFIX];
    prefix[..2].copy_from_slice(&START);
    prefix[2..].copy_from_slice(&header.to_bytes());
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&prefix[HEADER..]);
    payload.iter().for_each(|part| digest.update(part));
    let crc = digest.finalize() as u32;
    let mut suffix = [0; OVERHEAD - PREFIX];
    suffix[..4].copy_from_slice(&crc.to_le_bytes());
    suffix[4..8].copy_from_slice(&END);
    suffix[8..].copy_from_slice(&GAP);
    (prefix, suffix)
}

/// CRC-32C of header and payload.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn check_length(header: &Header, length: usize) {
    assert_eq!(length, usize::from(header.length), "parts of the payload do not add up");
    assert!(length <= MAX_PAYLOAD, "a payload of {length} bytes is too long");
    assert!(length == 0 || !header.kind.is_control(), "a control frame has no payload");
}
