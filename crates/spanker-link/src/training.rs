// SPDX-License-Identifier: Apache-2.0
//! The payload of a training frame.

use crate::config::{Identity, MAX_WINDOW, MIN_WINDOW};
use crate::frame::MAX_PAYLOAD;

/// Bytes of the payload of a training frame.
pub const TRAINING_BYTES: usize = 40;

/// The protocol that this crate speaks.
pub const VERSION: u8 = 1;

const SEEKING: u8 = 1;

/// What an end says of itself while it trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The sender is still in training and wants an answer.
    pub seeking: bool,
    pub lanes: u8,
    pub window: u8,
    pub payload: u16,
    pub identity: Identity,
    /// The sender's number for this training; never 0.
    pub session: u32,
    /// The session that the sender has heard from its peer; 0 for none.
    pub echo: u32,
    /// Whose streams the sender has: its own life, which ends when it loses them ...
    pub life: u32,
    /// ... and the life of the peer that they are shared with; 0 for none.
    pub knows: u32,
    /// The sender's nonce. Its sessions rise as long as this stays the same.
    pub birth: u32,
}

/// Why the payload of a training frame cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unusable {
    Malformed,
    Version,
}

impl Hello {
    pub fn to_bytes(self) -> [u8; TRAINING_BYTES] {
        let mut bytes = [0; TRAINING_BYTES];
        bytes[0] = VERSION;
        bytes[1] = if self.seeking { SEEKING } else { 0 };
        bytes[2] = self.lanes;
        bytes[3] = self.window;
        bytes[4..6].copy_from_slice(&self.payload.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.identity.serial.to_le_bytes());
        let words =
            [self.identity.port, self.session, self.echo, self.life, self.knows, self.birth];
        for (place, word) in bytes[16..].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Hello, Unusable> {
        match bytes.first() {
            Some(&VERSION) => {}
            Some(_) => return Err(Unusable::Version),
            None => return Err(Unusable::Malformed),
        }
        let bytes: &[u8; TRAINING_BYTES] = bytes.try_into().map_err(|_| Unusable::Malformed)?;
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let serial = u64::from(word(8)) | u64::from(word(12)) << 32;
        let hello = Hello {
            seeking: bytes[1] & SEEKING != 0,
            lanes: bytes[2],
            window: bytes[3],
            payload: u16::from_le_bytes([bytes[4], bytes[5]]),
            identity: Identity { serial, port: word(16) },
            session: word(20),
            echo: word(24),
            life: word(28),
            knows: word(32),
            birth: word(36),
        };
        let sane = matches!(hello.lanes, 1 | 2 | 4)
            && (MIN_WINDOW..=MAX_WINDOW).contains(&hello.window)
            && (1..=MAX_PAYLOAD).contains(&usize::from(hello.payload))
            && hello.session != 0
            && hello.life != 0;
        if sane { Ok(hello) } else { Err(Unusable::Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            seeking: true,
            lanes: 2,
            window: 64,
            payload: 4096,
            identity: Identity { serial: 0x1122_3344_5566_7788, port: 3 },
            session: 5,
            echo: 6,
            life: 7,
            knows: 8,
            birth: 9,
        }
    }

    #[test]
    fn hello_survives_the_wire() {
        assert_eq!(Hello::from_bytes(&hello().to_bytes()), Ok(hello()));
    }

    #[test]
    fn hello_of_another_version_is_told_from_a_malformed_one() {
        let mut bytes = hello().to_bytes();
        bytes[0] = 2;
        assert_eq!(Hello::from_bytes(&bytes), Err(Unusable::Version));
        assert_eq!(Hello::from_bytes(&hello().to_bytes()[..39]), Err(Unusable::Malformed));
        let lanes = Hello { lanes: 3, ..hello() };
        assert_eq!(Hello::from_bytes(&lanes.to_bytes()), Err(Unusable::Malformed));
    }
}
