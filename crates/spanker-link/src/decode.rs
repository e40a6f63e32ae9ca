// SPDX-License-Identifier: Apache-2.0
//! Finding frames in arbitrary bytes. Every function here is total.

use crate::frame::{CONTROL_BYTES, END, HEADER, Header, PREFIX, START, checksum};

/// What the beginning of a run of bytes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// A whole frame whose checks are right.
    Frame {
        /// Its header.
        header: Header,
        /// Its payload, in place.
        payload: &'a [u8],
        /// Bytes of the frame; the next begins behind them.
        used: usize,
    },
    /// Perhaps a frame: `need` bytes in all are necessary to decide.
    Incomplete {
        /// Bytes to have before it is worth trying again; more than there are.
        need: usize,
    },
    /// Not a frame, or a broken one.
    Corrupt {
        /// Bytes to the next place where a frame may begin, at least 1.
        skip: usize,
        /// The header of the broken frame, where its own check and the frame's end confirm it.
        header: Option<Header>,
    },
}

/// Says what `bytes` begin with. Never panics; `used` and `skip` are never 0, so a loop ends.
///
/// A broken frame is skipped as a whole when its header and its end agree on where it ends, so that
/// nothing in its payload can pass for a frame. Otherwise the search goes on at the next start.
///
/// ```
/// use spanker_link::{Decoded, decode};
/// assert_eq!(decode(&[]), Decoded::Incomplete { need: 12 });
/// assert_eq!(decode(&[1, 2, 3]), Decoded::Corrupt { skip: 3, header: None });
/// ```
#[must_use]
pub fn decode(bytes: &[u8]) -> Decoded<'_> {
    let seen = bytes.len().min(START.len());
    if bytes[..seen] != START[..seen] {
        return Decoded::Corrupt { skip: next_start(bytes), header: None };
    }
    let Some(prefix) = bytes.get(START.len()..PREFIX) else {
        return Decoded::Incomplete { need: PREFIX };
    };
    let prefix = prefix.try_into().expect("the length of the slice");
    let Some(header) = Header::from_bytes(prefix) else {
        return Decoded::Corrupt { skip: next_start(bytes), header: None };
    };
    let used = header.frame_len();
    if bytes.len() < used {
        return Decoded::Incomplete { need: used };
    }
    let check = PREFIX + usize::from(header.length);
    let crc = checksum(&bytes[HEADER..check]).to_le_bytes();
    let right = crc == bytes[check..check + 4];
    if header.kind.is_control() {
        debug_assert_eq!(used, CONTROL_BYTES);
        return if right {
            Decoded::Frame { header, payload: &[], used }
        } else {
            Decoded::Corrupt { skip: next_start(bytes), header: Some(header) }
        };
    }
    match (right, bytes[check + 4..check + 8] == END) {
        (true, true) => Decoded::Frame { header, payload: &bytes[PREFIX..check], used },
        (false, false) => Decoded::Corrupt { skip: next_start(bytes), header: None },
        // One of the two confirms that the frame ends here.
        _ => Decoded::Corrupt { skip: used, header: Some(header) },
    }
}

/// Where the next start may be, not counting the very first byte. A start that is cut off by the end
/// of the bytes counts.
fn next_start(bytes: &[u8]) -> usize {
    let rest = &bytes[1..];
    let may_begin = |at: usize| {
        let seen = (rest.len() - at).min(START.len());
        rest[at..at + seen] == START[..seen]
    };
    // `position` on the first byte is a search that compilers turn into vector code.
    let mut from = 0;
    while let Some(offset) = rest[from..].iter().position(|&byte| byte == START[0]) {
        if may_begin(from + offset) {
            return 1 + from + offset;
        }
        from += offset + 1;
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, encode};

    fn frame(payload: &[u8]) -> Vec<u8> {
        let header = Header {
            kind: Kind::Data,
            last: false,
            session: 3,
            length: payload.len() as u16,
            seq: 9,
            ack: 4,
            credit: 70,
        };
        let mut bytes = Vec::new();
        encode(&header, &[payload], &mut bytes);
        bytes
    }

    #[test]
    fn frame_inside_a_broken_payload_is_skipped_with_it() {
        let inner = frame(b"inner");
        let mut outer = frame(&[&b"x"[..], &inner].concat());
        outer[PREFIX] ^= 1;
        let Decoded::Corrupt { skip, header } = decode(&outer) else { panic!("it is broken") };
        assert_eq!(skip, outer.len());
        assert_eq!(header.map(|header| header.seq), Some(9));
    }

    #[test]
    fn frame_that_was_cut_short_does_not_swallow_the_next() {
        let cut = &frame(&[5; 100])[..60];
        let bytes = [cut, &frame(b"next"), &[0; 80]].concat();
        assert_eq!(decode(&bytes), Decoded::Corrupt { skip: 60, header: None });
        assert!(matches!(decode(&bytes[60..]), Decoded::Frame { payload: b"next", .. }));
    }

    #[test]
    fn start_that_is_cut_off_is_kept_for_the_rest() {
        assert_eq!(decode(&[0, 0, 0xFB, 0x5A]), Decoded::Corrupt { skip: 2, header: None });
        assert_eq!(decode(&[0xFB, 0x5A]), Decoded::Incomplete { need: 12 });
        assert_eq!(decode(&[0xFB, 0x5B]), Decoded::Corrupt { skip: 2, header: None });
    }
}
