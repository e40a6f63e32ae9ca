// SPDX-License-Identifier: Apache-2.0
//! What ranks that are processes send each other besides payloads: calls, notices and faults, as bytes. For fabrics.
//!
//! Ranks of one group run the same version, so there is no other version to read. What cannot be read all the
//! same gives `None`, never a panic.

use crate::{Call, FabricError};
use spanker_collective::{Algorithm, Collective, DType, ReduceOp};

/// Bytes of a call.
pub const CALL: usize = 24;
/// Bytes before the payload of a message: the call, the number of the message, its length.
pub const HEAD: usize = CALL + 16;
/// Text of a fault is cut off here.
const MOST_TEXT: usize = 600;

fn place<T: PartialEq>(all: &[T], one: &T) -> u8 {
    all.iter().position(|other| other == one).map_or(u8::MAX, |at| at as u8)
}

/// A call as bytes. Equal calls have equal bytes.
#[must_use]
pub fn call_bytes(call: &Call) -> [u8; CALL] {
    let mut out = [0; CALL];
    out[0] = place(&Collective::ALL, &call.collective.with_root(0));
    out[1] = place(&Algorithm::ALL, &call.algorithm);
    out[2] = place(&DType::ALL, &call.dtype);
    out[3] = place(&ReduceOp::ALL, &call.op);
    let root = call.collective.root().unwrap_or(0) as u32;
    out[4..8].copy_from_slice(&root.to_le_bytes());
    out[8..16].copy_from_slice(&(call.elements as u64).to_le_bytes());
    out[16..24].copy_from_slice(&call.plan.to_le_bytes());
    out
}

/// The call that these bytes say.
#[must_use]
pub fn call_of(bytes: &[u8; CALL]) -> Option<Call> {
    let root = u32::from_le_bytes(bytes[4..8].try_into().ok()?);
    Some(Call {
        collective: Collective::ALL.get(usize::from(bytes[0]))?.with_root(root as usize),
        algorithm: *Algorithm::ALL.get(usize::from(bytes[1]))?,
        dtype: *DType::ALL.get(usize::from(bytes[2]))?,
        op: *ReduceOp::ALL.get(usize::from(bytes[3]))?,
        elements: usize::try_from(u64::from_le_bytes(bytes[8..16].try_into().ok()?)).ok()?,
        plan: u64::from_le_bytes(bytes[16..24].try_into().ok()?),
    })
}

/// A short message about the group itself.
#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    /// The sender has been waiting for a while in its call of this number.
    At {
        /// Calls that are complete.
        number: u64,
        /// The call that it waits in.
        call: [u8; CALL],
    },
    /// The sender cannot go on, in its call of this number.
    Fault {
        /// Calls that are complete.
        number: u64,
        /// Whether it waits for the end of the call.
        committing: bool,
        /// What it found.
        fault: FabricError,
    },
    /// The group's fault, which everyone reports.
    Verdict(FabricError),
    /// The sender has let go of the group.
    Left,
}

impl Notice {
    /// The notice as bytes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Notice::At { number, call } => {
                out.push(0);
                out.extend(number.to_le_bytes());
                out.extend(call);
            }
            Notice::Fault { number, committing, fault } => {
                out.push(1);
                out.extend(number.to_le_bytes());
                out.push(u8::from(*committing));
                put_fault(&mut out, fault);
            }
            Notice::Verdict(fault) => {
                out.push(2);
                put_fault(&mut out, fault);
            }
            Notice::Left => out.push(3),
        }
        out
    }

    /// The notice that these bytes say.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Option<Notice> {
        let mut rest = Reader(bytes);
        match rest.byte()? {
            0 => {
                let number = rest.long()?;
                Some(Notice::At { number, call: rest.take(CALL)?.try_into().ok()? })
            }
            1 => {
                let (number, committing) = (rest.long()?, rest.byte()? != 0);
                Some(Notice::Fault { number, committing, fault: rest.fault()? })
            }
            2 => Some(Notice::Verdict(rest.fault()?)),
            3 => Some(Notice::Left),
            _ => None,
        }
    }
}

/// The fault as everybody else will read it: long texts are cut.
#[must_use]
pub fn as_received(fault: &FabricError) -> FabricError {
    let mut out = Vec::new();
    put_fault(&mut out, fault);
    Reader(&out).fault().unwrap_or_else(|| fault.clone())
}

fn put_fault(out: &mut Vec<u8>, fault: &FabricError) {
    let number = |number: &usize| *number as u64;
    let (kind, numbers, texts): (u8, [u64; 4], [&str; 3]) = match fault {
        FabricError::Died { rank } => (0, [number(rank), 0, 0, 0], [""; 3]),
        FabricError::Deadline { rank, peer, what } => {
            (1, [number(rank), number(peer), 0, 0], [what, "", ""])
        }
        FabricError::Mismatch { rank, peer, field, ours, theirs } => {
            (2, [number(rank), number(peer), 0, 0], [field, ours, theirs])
        }
        FabricError::Length { rank, peer, expected, actual } => {
            let numbers = [number(rank), number(peer), number(expected), number(actual)];
            (3, numbers, [""; 3])
        }
        FabricError::Corrupt { rank, peer } => (4, [number(rank), number(peer), 0, 0], [""; 3]),
        FabricError::Lost { rank, peer } => (5, [number(rank), number(peer), 0, 0], [""; 3]),
        FabricError::Failed { rank, reason } => (6, [number(rank), 0, 0, 0], [reason, "", ""]),
        FabricError::Refused { rank, reason } => (7, [number(rank), 0, 0, 0], [reason, "", ""]),
    };
    out.push(kind);
    numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
    for text in texts {
        let text = &text[..text.floor_char_boundary_within(MOST_TEXT)];
        out.extend((text.len() as u16).to_le_bytes());
        out.extend(text.as_bytes());
    }
}

/// Where a text can be cut.
trait Cut {
    fn floor_char_boundary_within(&self, most: usize) -> usize;
}

impl Cut for str {
    fn floor_char_boundary_within(&self, most: usize) -> usize {
        (0..=most.min(self.len())).rev().find(|&at| self.is_char_boundary(at)).unwrap_or(0)
    }
}

/// Bytes that are left to read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    fn long(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = u16::from_le_bytes(self.take(2)?.try_into().ok()?);
        std::str::from_utf8(self.take(usize::from(len))?).ok()
    }

    fn fault(&mut self) -> Option<FabricError> {
        let kind = self.byte()?;
        let mut numbers = [0usize; 4];
        for number in &mut numbers {
            *number = usize::try_from(self.long()?).ok()?;
        }
        let [rank, peer, expected, actual] = numbers;
        let [first, second, third] = [self.text()?, self.text()?, self.text()?];
        Some(match kind {
            0 => FabricError::Died { rank },
            1 => FabricError::Deadline { rank, peer, what: constant(first) },
            2 => {
                let (ours, theirs) = (second.to_owned(), third.to_owned());
                FabricError::Mismatch { rank, peer, field: constant(first), ours, theirs }
            }
            3 => FabricError::Length { rank, peer, expected, actual },
            4 => FabricError::Corrupt { rank, peer },
            5 => FabricError::Lost { rank, peer },
            6 => FabricError::Failed { rank, reason: first.to_owned() },
            7 => FabricError::Refused { rank, reason: first.to_owned() },
            _ => return None,
        })
    }
}

/// Words of errors that are constants of the program. Others are kept for good: a group has one fault.
fn constant(text: &str) -> &'static str {
    const KNOWN: [&str; 9] = [
        "collective",
        "number of elements",
        "element type",
        "operation",
        "algorithm",
        "schedule",
        "to receive from",
        "to send to",
        "for the end of the call on",
    ];
    KNOWN.into_iter().find(|known| *known == text).unwrap_or_else(|| text.to_owned().leak())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn faults() -> impl Strategy<Value = FabricError> {
        let number = 0usize..5000;
        let text = "[a-z0-9 äß]{0,40}";
        (0..8u8, number.clone(), number, any::<u32>(), text, text).prop_map(
            |(kind, rank, peer, len, ours, theirs)| match kind {
                0 => FabricError::Died { rank },
                1 => FabricError::Deadline { rank, peer, what: "to receive from" },
                2 => FabricError::Mismatch { rank, peer, field: "schedule", ours, theirs },
                3 => FabricError::Length { rank, peer, expected: len as usize, actual: 7 },
                4 => FabricError::Corrupt { rank, peer },
                5 => FabricError::Lost { rank, peer },
                6 => FabricError::Failed { rank, reason: ours },
                _ => FabricError::Refused { rank, reason: theirs },
            },
        )
    }

    proptest! {
        #[test]
        fn notices_read_as_they_were_written(fault in faults(), number: u64, committing: bool) {
            for notice in [
                Notice::Fault { number, committing, fault: fault.clone() },
                Notice::Verdict(fault),
                Notice::Left,
                Notice::At { number, call: [7; CALL] },
            ] {
                prop_assert_eq!(Notice::of(&notice.bytes()), Some(notice));
            }
        }

        #[test]
        fn bytes_that_mean_nothing_are_refused_and_never_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200)
        ) {
            if let Some(notice) = Notice::of(&bytes) {
                prop_assert_eq!(Notice::of(&notice.bytes()), Some(notice));
            }
        }
    }

    #[test]
    fn calls_read_as_they_were_written() {
        for (index, collective) in Collective::ALL.into_iter().enumerate() {
            let call = Call {
                collective: collective.with_root(3),
                algorithm: Algorithm::ALL[index % 6],
                elements: 1 << 40,
                dtype: DType::ALL[index % 8],
                op: ReduceOp::ALL[index],
                plan: 0xdead_beef,
            };
            assert_eq!(call_of(&call_bytes(&call)), Some(call));
        }
        assert_eq!(call_of(&[255; CALL]), None);
    }

    #[test]
    fn long_texts_are_cut_between_characters_and_equal_for_everyone() {
        let fault = FabricError::Refused { rank: 1, reason: "ä".repeat(1000) };
        let received = as_received(&fault);
        assert_eq!(received, FabricError::Refused { rank: 1, reason: "ä".repeat(300) });
        assert_eq!(as_received(&received), received);
    }
}
