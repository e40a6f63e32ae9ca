// SPDX-License-Identifier: Apache-2.0
//! Files that lie: every one is an error that names the byte, none a panic or a large allocation.

use std::io::{self, Read};

use proptest::prelude::*;
use spanker_model::gguf::Header;
use spanker_model::{ModelError, Quant};

use crate::writer::{Writer, array_value, of_model, text_value, u32_value};
use crate::{mixture, read, small};

fn error(writer: &Writer) -> String {
    read(writer).expect_err("a bad header").to_string()
}

/// Reads a header that may be anything, and what follows from it.
fn survive(bytes: &[u8], file_bytes: u64) -> Result<(), ModelError> {
    let model = Header::read(bytes.chain(io::repeat(0)), file_bytes)?.model()?;
    // What it gives is valid and can be computed with.
    model.validate().expect("a model is valid");
    assert!(model.weight_bytes() <= file_bytes);
    let _ = (model.parameters(), model.kv_bytes_per_token(Quant::F16) * model.context);
    Ok(())
}

#[test]
fn truncated_files_are_errors_at_every_length() {
    let writer = of_model(&small());
    let (header, file_bytes) = (writer.header(), writer.file_bytes());
    survive(&header, file_bytes).expect("a good file");
    for length in 0..header.len() as u64 {
        // A file that is short, and a reader that ends before the file should.
        let short = Header::read(&header[..length as usize], length).expect_err("a short file");
        assert!(short.to_string().contains("byte"), "{short}");
        let cut = Header::read(&header[..length as usize], file_bytes);
        // The padding before the data is not read.
        if length + writer.alignment <= header.len() as u64 {
            let cut = cut.expect_err("a short reader").to_string();
            assert!(cut.contains("the file ends before byte"), "{cut}");
        }
    }
    for length in header.len() as u64..file_bytes {
        let short = survive(&header, length).expect_err("a short file").to_string();
        assert!(short.contains("ends beyond the file's"), "{short}");
    }
}

#[test]
fn changed_bytes_never_panic() {
    for writer in [of_model(&small()), of_model(&mixture())] {
        let (header, file_bytes) = (writer.header(), writer.file_bytes());
        for at in 0..header.len() {
            let bits = (0..8).map(|bit| header[at] ^ (1 << bit));
            for value in bits.chain([0, 1, 0x7f, 0x80, 0xff]) {
                let mut changed = header.clone();
                changed[at] = value;
                let _ = survive(&changed, file_bytes);
                let _ = survive(&changed, u64::MAX);
            }
        }
    }
}

#[test]
fn numbers_that_are_replaced_by_extremes_never_panic() {
    let writer = of_model(&small());
    let (header, file_bytes) = (writer.header(), writer.file_bytes());
    let extremes = [0, 1, u64::from(u32::MAX), 1 << 40, 1 << 62, i64::MAX as u64, u64::MAX];
    for at in 0..header.len() - 8 {
        for value in extremes {
            let mut changed = header.clone();
            changed[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let _ = survive(&changed, file_bytes);
            let _ = survive(&changed, u64::MAX);
        }
    }
}

#[test]
fn counts_and_lengths_are_bounded_before_they_are_used() {
    let mut counts = b"GGUF\x03\0\0\0".to_vec();
    counts.extend(u64::MAX.to_le_bytes());
    let tensors = survive(&counts, u64::MAX).expect_err("too many").to_string();
    assert_eq!(tensors, format!("gguf: byte 8: tensor count {} is more than 65536", u64::MAX));

    let mut writer = Writer::new();
    writer.meta("a", array_value(10, 1 << 40, &[]));
    assert_eq!(error(&writer), "gguf: byte 49: the file ends at byte 64, in an array");
    // A file that claims to be large enough for it.
    let error_of = |writer: &Writer| survive(&writer.header(), u64::MAX).expect_err("bad");
    let huge = error_of(&writer).to_string();
    assert!(huge.ends_with("a header has at most 268435456"), "{huge}");

    let mut writer = Writer::new();
    writer.meta(&"k".repeat(70_000), u32_value(1));
    assert_eq!(error(&writer), "gguf: byte 24: a metadata key of 70000 bytes: it has 1 to 65535");

    let mut writer = Writer::new();
    for key in 0..300 {
        writer.meta(&format!("{key:060000}"), u32_value(1));
    }
    assert!(error(&writer).ends_with("more than 16777216 bytes of text"), "{}", error(&writer));

    let mut writer = Writer::new();
    let nested = (0..6).fold(vec![], |inner, _| array_value(9, 1, &inner)[4..].to_vec());
    writer.meta("a", [&9_u32.to_le_bytes()[..], &nested].concat());
    assert!(error(&writer).ends_with("arrays lie more than 4 deep"), "{}", error(&writer));
}

#[test]
fn metadata_that_are_malformed_are_errors() {
    for (value, expected) in [
        (13_u32.to_le_bytes().to_vec(), "gguf: byte 33: value type 13 is not 0 to 12"),
        ([&7_u32.to_le_bytes()[..], &[2]].concat(), "gguf: byte 37: a flag is 2, not 0 or 1"),
    ] {
        let mut writer = Writer::new();
        writer.meta("a", value);
        assert_eq!(error(&writer), expected);
    }
    let mut writer = Writer::new();
    writer.meta("a", u32_value(1));
    writer.meta("a", u32_value(2));
    assert_eq!(error(&writer), "gguf: byte 41: metadata key 'a' comes twice");
    for value in [u32_value(0), u32_value(48), text_value("32")] {
        let mut writer = Writer::new();
        writer.meta("general.alignment", value);
        let error = error(&writer);
        assert!(error.starts_with("gguf: metadata 'general.alignment': "), "{error}");
    }
}

#[test]
fn tensors_that_are_malformed_or_misplaced_are_errors() {
    let two = || {
        let mut writer = Writer::new();
        writer.tensor("one", &[64, 2], Quant::Q4_0);
        writer.tensor("two", &[64, 2], Quant::Q4_0);
        writer
    };
    read(&two()).expect("a good header");
    let changed = |change: &dyn Fn(&mut Writer)| {
        let mut writer = two();
        change(&mut writer);
        let error = error(&writer);
        error
            .split_once(": byte ")
            .and_then(|(_, rest)| rest.split_once(": "))
            .expect("a byte")
            .1
            .to_owned()
    };
    let reason = changed(&|writer| writer.tensors[1].name = "one".into());
    assert_eq!(reason, "tensor 'one' comes twice");
    let reason = changed(&|writer| writer.tensors[1].name.clear());
    assert_eq!(reason, "a tensor's name of 0 bytes: it has 1 to 256");
    let reason = changed(&|writer| writer.tensors[1].dims = vec![32; 5]);
    assert_eq!(reason, "tensor 'two' has 5 dimensions, more than 4");
    let reason = changed(&|writer| writer.tensors[1].dims[1] = 0);
    assert_eq!(reason, "tensor 'two' has a dimension of 0");
    let reason = changed(&|writer| writer.tensors[1].dims[0] = 65);
    assert_eq!(reason, "tensor 'two' has rows of 65, not whole q4_0 blocks of 32");
    let reason = changed(&|writer| writer.tensors[1].dims = vec![1 << 40; 3]);
    assert!(reason.ends_with("whose product overflows"), "{reason}");
    let reason = changed(&|writer| writer.tensors[1].id = 4);
    assert_eq!(reason, "tensor 'two' has type 4, which GGML does not define");
    let reason = changed(&|writer| writer.tensors[1].offset = 33);
    assert_eq!(reason, "tensor 'two' has offset 33, no multiple of 32");
    let reason = changed(&|writer| writer.tensors[1].offset = 64);
    assert_eq!(reason, "tensor 'two' overlaps 'one', which ends at byte 200");
    let reason = changed(&|writer| writer.tensors[1].dims[1] = 3);
    assert_eq!(reason, "tensor 'two' of 108 bytes ends beyond the file's 296");
    let reason = changed(&|writer| writer.tensors[1].offset = u64::MAX - 31);
    assert!(reason.contains("ends beyond the file's"), "{reason}");
}

#[test]
fn reader_that_fails_is_an_error_that_says_how() {
    struct Failing;
    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::new(io::ErrorKind::PermissionDenied, "no"))
        }
    }
    let header = of_model(&small()).header();
    let error = Header::read(header[..100].chain(Failing), 10_000).expect_err("a failure");
    assert!(matches!(error, ModelError::Read { kind: io::ErrorKind::PermissionDenied, .. }));
    assert!(error.to_string().ends_with("reading failed: no"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn random_bytes_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..2000),
        start in 0_usize..25,
        file_bytes in prop_oneof![Just(u64::MAX), 0_u64..5000],
    ) {
        // As they are, and behind the beginning of a good file.
        let _ = survive(&bytes, file_bytes);
        let mut file = b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"[..start.min(24)].to_vec();
        file.extend(bytes);
        let _ = survive(&file, file_bytes);
    }

    #[test]
    fn several_changes_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        file_bytes in prop_oneof![Just(u64::MAX), 0_u64..50_000],
    ) {
        let mut header = of_model(&small()).header();
        for (at, value) in changes {
            let at = at.index(header.len());
            header[at] = value;
        }
        let _ = survive(&header, file_bytes);
    }
}
