// SPDX-License-Identifier: Apache-2.0
//! Descriptors and messages as bytes: what was written is read back, and anything else is refused in words.

use proptest::prelude::*;
use spanker_runtime::message::{HEAD_BYTES, Parsed, head, parse};
use spanker_runtime::{
    Activation, BufferId, Descriptor, Fold, KvCache, Landing, MAX_BEST, MAX_SOURCES, Picks, Place,
    Scores, Work, abi, decode_work, encode_work,
};

fn place() -> impl Strategy<Value = Place> {
    (any::<u64>(), any::<u64>())
        .prop_map(|(buffer, offset)| Place { buffer: BufferId(buffer), offset })
}

fn fold() -> impl Strategy<Value = Fold> {
    (any::<u16>(), any::<u16>()).prop_map(|(dtype, op)| Fold { dtype, op })
}

fn landing() -> impl Strategy<Value = Landing> {
    prop_oneof![
        Just(Landing::Store),
        fold().prop_map(Landing::FoldFirst),
        fold().prop_map(Landing::FoldSecond),
    ]
}

fn work() -> impl Strategy<Value = Work> {
    prop_oneof![
        (place(), place(), any::<u64>()).prop_map(|(from, into, length)| Work::Copy {
            from,
            into,
            length
        }),
        (place(), any::<u32>(), any::<u32>()).prop_map(|(into, words, pattern)| Work::Fill {
            into,
            length: u64::from(words) * 4,
            pattern
        }),
        (place(), prop::collection::vec(place(), 1..9), any::<u64>(), fold(), any::<u32>())
            .prop_map(|(into, sources, elements, fold, divisor)| {
                Work::Reduce { into, sources, elements, fold, divisor }
            }),
        (place(), place(), place(), any::<[u64; 3]>(), any::<[u32; 2]>())
            .prop_map(|(a, b, out, shape, types)| Work::Matmul { a, b, out, shape, types }),
        (place(), any::<u64>(), any::<u32>(), any::<u32>())
            .prop_map(|(from, length, port, tag)| Work::Send { from, length, port, tag }),
        (place(), any::<u64>(), any::<u32>(), any::<u32>(), landing()).prop_map(
            |(into, length, port, tag, landing)| Work::Receive { into, length, port, tag, landing }
        ),
        any::<u64>().prop_map(|not_before_ps| Work::Fence { not_before_ps }),
        operator(),
    ]
}

/// The operators of a model.
fn operator() -> impl Strategy<Value = Work> {
    prop_oneof![
        (place(), place(), place(), any::<[u64; 2]>(), any::<[u32; 3]>()).prop_map(
            |(table, ids, into, [rows, width], [quant, first, count])| {
                Work::Embed { table, ids, into, rows, width, quant, first, count }
            }
        ),
        (place(), place(), place(), any::<[u64; 2]>(), any::<u32>()).prop_map(
            |(from, weight, into, [rows, width], epsilon)| {
                Work::Norm { from, weight, into, rows, width, epsilon }
            }
        ),
        (place(), place(), any::<[u64; 2]>(), any::<u32>()).prop_map(
            |(from, into, [rows, width], quant)| Work::Quantize { from, into, rows, width, quant }
        ),
        (place(), place(), any::<[u64; 4]>(), 0..2u32).prop_map(
            |(data, table, [rows, heads, head_size, dims], pairs)| {
                Work::Rotate { data, table, rows, heads, head_size, dims, pairs }
            }
        ),
        (place(), place(), any::<u64>()).prop_map(|(from, into, elements)| Work::Halve {
            from,
            into,
            elements
        }),
        ([place(), place(), place(), place()], any::<[u64; 7]>(), any::<u32>()).prop_map(attend),
        (place(), place(), place(), any::<u64>(), 0..3u32).prop_map(
            |(gate, up, into, elements, activation)| {
                let activation = Activation::from_code(activation).expect("one of three");
                Work::Gate { gate, up, into, elements, activation }
            }
        ),
        (place(), any::<u64>(), any::<[u32; 2]>()).prop_map(|(data, elements, [factor, cap])| {
            Work::Scale { data, elements, factor, cap }
        }),
        (place(), place(), any::<u64>(), any::<u64>(), any::<[u64; 2]>()).prop_map(
            |(from, into, rows, length, strides)| {
                let [from_stride, into_stride] = strides.map(|stride| stride.max(length));
                Work::Rows { from, into, rows, length, from_stride, into_stride }
            }
        ),
        (place(), place(), any::<u64>(), 1..=MAX_BEST, any::<u32>())
            .prop_map(|(from, into, count, k, first)| Work::Best { from, into, count, k, first }),
        (place(), prop::collection::vec(any::<u32>(), 0..20)).prop_map(|(into, words)| {
            let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            Work::Write { into, bytes }
        }),
        (place(), place(), any::<[u64; 2]>()).prop_map(|(into, row, [rows, width])| Work::AddRow {
            into,
            row,
            rows,
            width
        }),
        ([place(), place(), place()], any::<[u64; 5]>(), 0..2u32).prop_map(turn),
        (place(), place(), cache(), any::<u64>())
            .prop_map(|(keys, values, cache, rows)| Work::Keep { keys, values, cache, rows }),
        (place(), place(), cache(), any::<[u64; 4]>(), scores()).prop_map(
            |(queries, into, cache, [rows, heads, group, offset], scores)| {
                Work::AttendBlocks { queries, cache, into, rows, heads, group, offset, scores }
            }
        ),
        of_experts(),
    ]
}

fn scores() -> impl Strategy<Value = Scores> {
    let plain = any::<u32>().prop_map(Scores::plain);
    let other = (any::<[u32; 2]>(), any::<u64>(), prop::option::of(place()));
    let other =
        other.prop_map(|([scale, cap], window, sinks)| Scores { scale, cap, window, sinks });
    prop_oneof![plain, other]
}

fn turn((places, sizes, pairs): ([Place; 3], [u64; 5], u32)) -> Work {
    let ([data, table, at], [positions, rows, heads, head_size, dims]) = (places, sizes);
    Work::RotateRows { data, table, positions, at, rows, heads, head_size, dims, pairs }
}

/// Work of mixtures of experts.
fn of_experts() -> impl Strategy<Value = Work> {
    prop_oneof![
        (place(), picks(), any::<u64>(), 0..4u32)
            .prop_map(|(logits, picks, rows, gating)| Work::Route { logits, picks, rows, gating }),
        (
            ([place(), place(), place()], picks()),
            any::<[u64; 4]>(),
            any::<[u32; 2]>(),
            any::<bool>()
        )
            .prop_map(|(([a, b, out], picks), [m, k, n, stride], types, apart)| {
                let shape = [m, k, n];
                Work::MatmulExperts { a, b, out, picks, shape, types, stride, apart }
            }),
        (place(), place(), picks(), any::<[u64; 2]>(), any::<bool>()).prop_map(
            |(from, into, picks, [rows, width], add)| {
                Work::Combine { from, picks, into, rows, width, add }
            }
        ),
        (place(), place(), picks(), any::<[u64; 3]>(), any::<bool>()).prop_map(
            |(into, table, picks, [rows, width, stride], weighed)| {
                Work::AddPicked { into, table, picks, rows, width, stride, weighed }
            }
        ),
    ]
}

fn picks() -> impl Strategy<Value = Picks> {
    (place(), 1..=1024u64, any::<u64>()).prop_map(|(at, experts, salt)| {
        let used = 1 + salt % experts;
        Picks { at, used, experts }
    })
}

/// A KV cache of a type that there is.
fn cache() -> impl Strategy<Value = KvCache> {
    let size = 0..1u64 << 20;
    ([place(), place(), place()], any::<[u64; 3]>(), size, any::<bool>()).prop_map(
        |([blocks, rows, tables], [count, entries, heads], size, whole)| {
            let kinds = if count.is_multiple_of(2) { 8 } else { 2 };
            let (quant, head_size) = if whole { (kinds, 32 * size) } else { (1, size) };
            KvCache { blocks, count, rows, tables, entries, heads, head_size, quant }
        },
    )
}

fn attend((places, sizes, scale): ([Place; 4], [u64; 7], u32)) -> Work {
    let [queries, keys, values, into] = places;
    let [rows, heads, kv_heads, head_size, group, offset, past] = sizes;
    Work::Attend {
        queries,
        keys,
        values,
        into,
        rows,
        heads,
        kv_heads,
        head_size,
        group,
        offset,
        past,
        scale,
    }
}

/// Descriptors of which some wait for an earlier transfer.
fn ring() -> impl Strategy<Value = Vec<Descriptor>> {
    prop::collection::vec((work(), any::<u32>()), 0..12).prop_map(|listed| {
        let mut ring: Vec<Descriptor> = Vec::new();
        for (work, pick) in listed {
            let transfers: Vec<u32> = (0..ring.len())
                .filter(|&at| matches!(ring[at].work, Work::Send { .. } | Work::Receive { .. }))
                .map(|at| at as u32)
                .collect();
            let chosen = pick as usize % (transfers.len() + 1);
            ring.push(Descriptor { after: transfers.get(chosen).copied(), work });
        }
        ring
    })
}

proptest! {
    #[test]
    fn descriptors_written_and_read_are_the_same(ring in ring()) {
        prop_assert_eq!(decode_work(&encode_work(&ring)), Ok(ring));
    }

    #[test]
    fn descriptors_cut_anywhere_are_refused_or_a_prefix(ring in ring(), cut in any::<prop::sample::Index>()) {
        let bytes = encode_work(&ring);
        let cut = cut.index(bytes.len() + 1);
        if let Ok(read) = decode_work(&bytes[..cut]) {
            prop_assert_eq!(&read[..], &ring[..read.len()]);
        }
    }

    #[test]
    fn descriptors_with_any_byte_changed_are_read_without_panic(
        ring in ring(),
        at in any::<prop::sample::Index>(),
        value in any::<u8>(),
    ) {
        let mut bytes = encode_work(&ring);
        if !bytes.is_empty() {
            let at = at.index(bytes.len());
            bytes[at] = value;
            // What is accepted is what it says it is.
            if let Ok(read) = decode_work(&bytes) {
                prop_assert_eq!(decode_work(&encode_work(&read)), Ok(read));
            }
        }
    }

    #[test]
    fn messages_of_any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        match parse(&bytes) {
            Parsed::Request(message) => prop_assert!(message.used <= bytes.len()),
            Parsed::Incomplete(need) => prop_assert!(need > bytes.len() && need < 17 << 20),
            Parsed::Refused { .. } => prop_assert!(bytes.len() >= HEAD_BYTES),
        }
    }
}

#[test]
fn a_message_that_announces_four_gibibytes_is_refused_at_its_head() {
    let submit = <abi::RawSubmit as abi::Request>::NUMBER;
    let mut bytes = head(submit, 0, 9, 32, 0).to_vec();
    bytes[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
    let Parsed::Refused { error, number, sequence } = parse(&bytes) else {
        panic!("{:?}", parse(&bytes));
    };
    assert_eq!((error, number, sequence), (nix::errno::Errno::EMSGSIZE, submit, 9));
}

#[test]
fn a_message_of_another_major_version_is_refused() {
    let mut bytes = head(<abi::RawState as abi::Request>::NUMBER, 0, 1, 56, 0).to_vec();
    bytes[4] = 7;
    let Parsed::Refused { error, .. } = parse(&bytes) else { panic!("{:?}", parse(&bytes)) };
    assert_eq!(error, nix::errno::Errno::EPROTONOSUPPORT);
    // Whoever meets another version must be able to say which.
    for (number, size) in
        [(<abi::RawVersion as abi::Request>::NUMBER, 8), (<abi::Ping as abi::Request>::NUMBER, 0)]
    {
        let mut bytes = head(number, 0, 1, size, 0).to_vec();
        bytes.resize(HEAD_BYTES + size, 0);
        bytes[4] = 7;
        assert!(matches!(parse(&bytes), Parsed::Request(_)), "{:?}", parse(&bytes));
    }
}

#[test]
fn malformed_descriptors_are_named_with_their_place() {
    let fence: Descriptor = Work::Fence { not_before_ps: 1 }.into();
    let good = encode_work(&[fence.clone(), fence.clone()]);
    let changed = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        decode_work(&bytes).unwrap_err().to_string()
    };
    assert!(changed(24, 7).starts_with("descriptor 1: size 7"), "{}", changed(24, 7));
    assert!(changed(28, 99).contains("kind 99 is unknown"), "{}", changed(28, 99));
    assert!(changed(30, 2).contains("version 2"), "{}", changed(30, 2));
    assert!(changed(32, 1).contains("after 1"), "{}", changed(32, 1));
    let into = Place { buffer: BufferId(1), offset: 0 };
    let fold = Fold { dtype: 0, op: 0 };
    let many = vec![into; MAX_SOURCES + 1];
    let reduce = Work::Reduce { into, sources: many, elements: 1, fold, divisor: 0 };
    let error = decode_work(&encode_work(&[reduce.into()])).unwrap_err();
    assert!(error.to_string().contains("257 sources"), "{error}");
}

#[test]
fn operators_of_a_model_with_impossible_numbers_are_refused_in_words() {
    let at = Place { buffer: BufferId(1), offset: 0 };
    let refused = |work: Work| decode_work(&encode_work(&[work.into()])).unwrap_err().to_string();
    let sizes = (1, 1, 2, 2);
    let (rows, heads, head_size, dims) = sizes;
    let rotate = Work::Rotate { data: at, table: at, rows, heads, head_size, dims, pairs: 2 };
    assert_eq!(refused(rotate), "descriptor 0: pairs 2 are unknown");
    let rows =
        Work::Rows { from: at, into: at, rows: 1, length: 9, from_stride: 9, into_stride: 8 };
    assert_eq!(refused(rows), "descriptor 0: 9 bytes, 9 and 8 apart");
    for k in [0, MAX_BEST + 1] {
        let best = Work::Best { from: at, into: at, count: 1, k, first: 0 };
        assert!(refused(best).contains(&format!("the best {k}")));
    }
}
