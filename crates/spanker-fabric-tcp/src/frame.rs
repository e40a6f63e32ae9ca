// SPDX-License-Identifier: Apache-2.0
//! What goes over a connection once both ends are authenticated: frames, each a head of fixed length and a body.
//!
//! A head is a record of its own, a body is as many records as it takes. Lengths of records follow from the head, so
//! none is sent in the clear.

use spanker_fabric::wire::CALL;

/// Bytes of a head.
pub(crate) const HEAD: usize = 8 + CALL + 16;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Between ranks of a group: a message of a call.
    Message,
    /// A rank has done its part of a call.
    Arrival,
    /// Every rank has.
    Decision,
    /// About the group itself.
    Notice,
    /// Before a group: bytes of the program.
    Bytes,
    /// The leader asks to join a group.
    Join,
    /// The worker has, and is connected to all others.
    Ready,
    /// The worker does not want to.
    Refusal,
    /// Every worker is ready: the group begins.
    Start,
    /// Nothing, but the sender is there.
    Heartbeat,
}

impl Kind {
    const ALL: [Kind; 10] = [
        Kind::Message,
        Kind::Arrival,
        Kind::Decision,
        Kind::Notice,
        Kind::Bytes,
        Kind::Join,
        Kind::Ready,
        Kind::Refusal,
        Kind::Start,
        Kind::Heartbeat,
    ];
}

/// What a frame says before its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) kind: Kind,
    /// The call that it belongs to, between ranks.
    pub(crate) call: [u8; CALL],
    /// The message's number, or the call's.
    pub(crate) number: u64,
    /// Bytes of the body.
    pub(crate) length: u64,
}

impl Head {
    /// A head that says what its frame is and nothing else.
    pub(crate) fn of_kind(kind: Kind) -> Head {
        Head { kind, call: [0; CALL], number: 0, length: 0 }
    }

    pub(crate) fn bytes(&self) -> [u8; HEAD] {
        let mut out = [0; HEAD];
        out[0] = self.kind as u8 + 1;
        out[8..8 + CALL].copy_from_slice(&self.call);
        out[8 + CALL..16 + CALL].copy_from_slice(&self.number.to_le_bytes());
        out[16 + CALL..].copy_from_slice(&self.length.to_le_bytes());
        out
    }

    pub(crate) fn of(bytes: &[u8; HEAD]) -> Option<Head> {
        let long = |at: usize| Some(u64::from_le_bytes(bytes[at..at + 8].try_into().ok()?));
        let kind = *Kind::ALL.get(usize::from(bytes[0]).checked_sub(1)?)?;
        if bytes[1..8] != [0; 7] {
            return None;
        }
        let call = bytes[8..8 + CALL].try_into().ok()?;
        Some(Head { kind, call, number: long(8 + CALL)?, length: long(16 + CALL)? })
    }
}

/// Texts and numbers end to end, as the frames before a group have them.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn number(&mut self, number: u32) {
        self.0.extend(number.to_le_bytes());
    }

    /// A text, cut off where it would be too long to say how long it is.
    pub(crate) fn text(&mut self, text: &str) {
        let most = text.len().min(4096);
        let end = (0..=most).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        self.number(end as u32);
        self.0.extend(&text.as_bytes()[..end]);
    }
}

/// What is left to read of such bytes.
#[derive(Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn number(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let length = self.number()? as usize;
        std::str::from_utf8(self.take(length)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_read_as_they_were_written_and_others_are_refused() {
        for (at, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, at);
            let head = Head { kind, call: [at as u8; CALL], number: 1 << 40, length: at as u64 };
            assert_eq!(Head::of(&head.bytes()), Some(head));
        }
        assert_eq!(Head::of(&[0; HEAD]), None);
        assert_eq!(Head::of(&[11; HEAD]), None);
        let mut other = Head::of_kind(Kind::Start).bytes();
        other[3] = 1;
        assert_eq!(Head::of(&other), None);
    }

    #[test]
    fn texts_are_cut_between_characters_and_short_bytes_are_refused() {
        let mut writer = Writer::default();
        writer.text(&"ä".repeat(3000));
        writer.number(7);
        let mut reader = Reader(&writer.0);
        assert_eq!(reader.text().map(str::len), Some(4096));
        assert_eq!(reader.number(), Some(7));
        for length in 0..writer.0.len() - 4 {
            assert_eq!(Reader(&writer.0[..length]).text().filter(|_| length < 4100), None);
        }
    }
}
