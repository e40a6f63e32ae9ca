// SPDX-License-Identifier: Apache-2.0
//! Frames survive the wire as they are or not at all.

use proptest::collection::vec;
use proptest::prelude::{
    Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::sample::Index;

use spanker_link::{
    Decoded, GAP, Header, Kind, MAX_PAYLOAD, decode, encode, encode_into, frame_len,
};

/// Headers as links write them, with their payload.
fn frames(longest: usize) -> impl Strategy<Value = (Header, Vec<u8>)> {
    let kind = prop_oneof![
        Just((Kind::Train, false)),
        Just((Kind::Data, false)),
        Just((Kind::Data, true)),
        Just((Kind::Notice, true)),
        Just((Kind::Ack, false)),
        Just((Kind::Ack, true)),
        Just((Kind::Nak, false)),
    ];
    let fields = (any::<u16>(), any::<u16>(), any::<u16>(), any::<u8>());
    (kind, fields, vec(any::<u8>(), 0..=longest)).prop_map(
        |((kind, last), (session, seq, ack, credit), mut payload)| {
            if kind.is_control() {
                payload.clear();
            }
            let length = payload.len() as u16;
            (Header { kind, last, session, length, seq, ack, credit }, payload)
        },
    )
}

fn encoded(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(header, &[payload], &mut bytes);
    bytes
}

/// All frames in a stream, found as a receiver finds them.
fn all(mut bytes: &[u8]) -> Vec<(Header, Vec<u8>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let step = match decode(bytes) {
            Decoded::Frame { header, payload, used } => {
                found.push((header, payload.to_vec()));
                used
            }
            Decoded::Corrupt { skip, .. } => skip,
            Decoded::Incomplete { need } => {
                assert!(need > bytes.len());
                break;
            }
        };
        assert!(step > 0);
        bytes = &bytes[step..];
    }
    found
}

proptest! {
    #[test]
    fn frame_that_is_encoded_decodes_to_itself((header, payload) in frames(MAX_PAYLOAD)) {
        let bytes = encoded(&header, &payload);
        prop_assert_eq!(bytes.len(), frame_len(header.kind, payload.len()));
        let used = bytes.len();
        prop_assert_eq!(decode(&bytes), Decoded::Frame { header, payload: &payload, used });
    }

    #[test]
    fn parts_and_places_make_no_difference(
        (header, payload) in frames(600),
        cuts in (any::<Index>(), any::<Index>()),
    ) {
        let (a, b) = (cuts.0.index(payload.len() + 1), cuts.1.index(payload.len() + 1));
        let (a, b) = (a.min(b), a.max(b));
        let parts = [&payload[..a], &payload[a..b], &payload[b..]];
        let whole = encoded(&header, &payload);
        let mut appended = vec![9; 3];
        encode(&header, &parts, &mut appended);
        prop_assert_eq!(&appended[3..], &whole);
        let mut placed = vec![0; whole.len() + 5];
        prop_assert_eq!(encode_into(&header, &parts, &mut placed), whole.len());
        prop_assert_eq!(&placed[..whole.len()], &whole);
    }

    #[test]
    fn frame_with_up_to_three_wrong_bits_is_found_broken(
        (header, payload) in frames(MAX_PAYLOAD),
        flips in vec(any::<Index>(), 1..=3),
    ) {
        let mut bytes = encoded(&header, &payload);
        let original = bytes.clone();
        let checked = bytes.len() - if header.kind.is_control() { 0 } else { GAP.len() };
        for flip in &flips {
            let bit = flip.index(8 * checked);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        if bytes != original {
            let whole = matches!(decode(&bytes), Decoded::Frame { .. });
            prop_assert!(!whole);
            prop_assert!(all(&bytes).is_empty());
        }
    }

    #[test]
    fn arbitrary_bytes_are_taken_without_panic_and_with_progress(bytes in vec(any::<u8>(), 0..300)) {
        all(&bytes);
        // The same behind a start, where more of the decoder runs.
        let started = [&spanker_link::START[..], &bytes].concat();
        prop_assert!(all(&started).len() <= started.len() / 16);
    }

    #[test]
    fn frames_between_garbage_are_all_found(
        parts in vec((frames(80), vec(any::<u8>(), 0..40), prop::bool::ANY), 1..8),
    ) {
        let mut stream = Vec::new();
        let mut expected = Vec::new();
        for ((header, payload), garbage, cut) in parts {
            let bytes = encoded(&header, &payload);
            stream.extend_from_slice(&garbage);
            if cut {
                // A frame that was cut short is garbage too.
                stream.extend_from_slice(&bytes[..bytes.len() / 2]);
            }
            stream.extend_from_slice(&bytes);
            expected.push((header, payload));
        }
        // A frame that was cut off keeps what could still be part of it.
        stream.extend_from_slice(&[0; MAX_PAYLOAD]);
        prop_assert_eq!(all(&stream), expected);
    }
}

#[test]
fn every_single_wrong_bit_of_a_frame_is_found() {
    let header =
        Header { kind: Kind::Data, last: true, session: 1, length: 300, seq: 2, ack: 3, credit: 4 };
    let bytes = encoded(&header, &[0x5A; 300]);
    for bit in 0..8 * (bytes.len() - GAP.len()) {
        let mut wrong = bytes.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        assert!(!matches!(decode(&wrong), Decoded::Frame { .. }), "bit {bit}");
    }
}

#[test]
#[should_panic(expected = "parts of the payload do not add up")]
fn payload_of_another_length_than_the_header_says_is_refused() {
    let header =
        Header { kind: Kind::Data, last: true, session: 1, length: 3, seq: 2, ack: 3, credit: 4 };
    encoded(&header, b"four");
}
