// SPDX-License-Identifier: Apache-2.0
//! What the writer writes the reader reads, and bytes that are not the header's file are errors.

use std::io;

use proptest::prelude::*;
use spanker_model::Quant;
use spanker_model::gguf::{Field, Header, Value, Writer};

fn file_of(writer: &Writer, fill: u8) -> Vec<u8> {
    let mut file = Vec::new();
    let sizes: Vec<u64> = writer.tensors().iter().map(|(_, tensor)| tensor.bytes).collect();
    writer
        .write(&mut file, |at, out| out.write_all(&vec![fill + at as u8; sizes[at] as usize]))
        .expect("memory takes all");
    assert_eq!(file.len() as u64, writer.file_bytes());
    file
}

fn header_of(file: &[u8]) -> Header {
    Header::read(file, file.len() as u64).expect("a good file")
}

proptest! {
    #[test]
    fn what_was_written_is_read(
        texts in prop::collection::vec(".{0,12}", 0..20),
        long in "[a-z]{0,9000}",
        floats in prop::collection::vec(any::<f32>().prop_filter("a number", |x| !x.is_nan()), 0..20),
        integers in prop::collection::vec(any::<i32>(), 0..20),
        number: u32, wide: u64, flag: bool,
        tensors in prop::collection::vec((1_u64..4, 1_u64..5, prop::sample::select(vec![
            Quant::F32, Quant::F16, Quant::Q4_0, Quant::Q4_1, Quant::Q8_0, Quant::Q6K,
        ])), 0..8),
    ) {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut writer = Writer::new();
        for (key, field) in [
            ("texts", Field::Texts(&texts)),
            ("long", Field::Text(&long)),
            ("floats", Field::F32s(&floats)),
            ("integers", Field::I32s(&integers)),
            ("number", Field::U32(number)),
            ("wide", Field::U64(wide)),
            ("float", Field::F32(1.5)),
            ("negative", Field::I32(-3)),
            ("flag", Field::Bool(flag)),
        ] {
            writer.put(key, field).expect("a good key");
        }
        for (at, (blocks, rows, quant)) in tensors.iter().enumerate() {
            let dims = [blocks * quant.block(), *rows];
            writer.tensor(&format!("t{at}"), &dims, *quant).expect("a good tensor");
        }
        let file = file_of(&writer, 1);
        let header = header_of(&file);
        let bytes: Vec<&[u8]> = texts.iter().map(|text| text.as_bytes()).collect();
        prop_assert_eq!(header.texts(&file, "texts").expect("texts"), bytes);
        prop_assert_eq!(header.text(&file, "long").expect("a text"), long);
        let floats: Vec<f64> = floats.into_iter().map(f64::from).collect();
        prop_assert_eq!(header.floats(&file, "floats").expect("floats"), floats);
        let integers: Vec<i64> = integers.into_iter().map(i64::from).collect();
        prop_assert_eq!(header.integers(&file, "integers").expect("integers"), integers);
        prop_assert_eq!(header.number("number"), Some(number.into()));
        prop_assert_eq!(&header.metadata()["wide"], &Value::Unsigned(wide));
        prop_assert_eq!((header.number("float"), header.number("negative")), (Some(1.5), Some(-3.0)));
        prop_assert_eq!((header.flag("flag"), header.number("flag")), (Some(flag), None));
        prop_assert_eq!(header.tensors().len(), tensors.len());
        for (at, (name, tensor)) in writer.tensors().iter().enumerate() {
            prop_assert_eq!(&header.tensors()[name], tensor);
            let weights = header.weights(&file, name).expect("weights");
            prop_assert_eq!(weights, &vec![1 + at as u8; tensor.bytes as usize]);
        }
    }

    #[test]
    fn bytes_that_end_early_are_errors_that_name_the_key(cut in 0_usize..400) {
        let mut writer = Writer::new();
        writer.put("texts", Field::Texts(&["abc", "", "defg"])).expect("a key");
        writer.put("floats", Field::F32s(&[1.0, 2.0])).expect("a key");
        writer.put("long", Field::Text(&"x".repeat(5000))).expect("a key");
        writer.tensor("t", &[8], Quant::F32).expect("a tensor");
        let file = file_of(&writer, 0);
        let header = header_of(&file);
        let short = &file[..cut];
        for (key, result) in [
            ("texts", header.texts(short, "texts").map(|_| ())),
            ("floats", header.floats(short, "floats").map(|_| ())),
            ("long", header.text(short, "long").map(|_| ())),
            ("t", header.weights(short, "t").map(|_| ())),
        ] {
            if let Err(error) = result {
                prop_assert!(error.to_string().contains(&format!("'{key}'")), "{}", error);
            } else {
                prop_assert!(["texts", "floats"].contains(&key), "{} in {} bytes", key, cut);
            }
        }
    }
}

#[test]
fn arrays_of_the_wrong_kind_are_named() {
    let mut writer = Writer::new();
    writer.put("texts", Field::Texts(&["a"])).expect("a key");
    writer.put("floats", Field::F32s(&[1.0])).expect("a key");
    writer.put("one", Field::U32(1)).expect("a key");
    let file = file_of(&writer, 0);
    let header = header_of(&file);
    let said = |error: spanker_model::ModelError| error.to_string();
    for (error, expected) in [
        (
            said(header.texts(&file, "floats").unwrap_err()),
            "'floats': an array of F32, not of texts",
        ),
        (
            said(header.floats(&file, "texts").unwrap_err()),
            "'texts': an array of Text, not of floats",
        ),
        (said(header.integers(&file, "texts").unwrap_err()), "of Text, not of integers"),
        (said(header.integers(&file, "one").unwrap_err()), "'one': not an array"),
        (said(header.text(&file, "one").unwrap_err()), "'one': not a text"),
        (said(header.text(&file, "none").unwrap_err()), "'none': missing"),
        (said(header.weights(&file, "none").unwrap_err()), "tensor 'none': missing"),
    ] {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn writer_refuses_what_no_reader_would_take() {
    let mut writer = Writer::new();
    writer.put("a", Field::U32(1)).expect("a key");
    writer.tensor("a", &[32], Quant::Q4_0).expect("a tensor");
    for key in ["", "a", "general.alignment"] {
        assert!(writer.put(key, Field::U32(1)).is_err(), "{key}");
    }
    for (name, dims, quant) in [
        ("", &[32][..], Quant::F32),
        ("a", &[32], Quant::F32),
        ("b", &[], Quant::F32),
        ("b", &[0], Quant::F32),
        ("b", &[1; 5], Quant::F32),
        ("b", &[33], Quant::Q4_0),
        ("b", &[32], Quant::F8),
        ("b", &[1 << 40, 1 << 40], Quant::F32),
    ] {
        let error = writer.tensor(name, dims, quant).expect_err("a bad tensor").to_string();
        assert!(error.contains(&format!("tensor '{name}'")), "{error}");
    }
    for bytes in [17, 19] {
        let written = writer.write(io::sink(), |_, out| out.write_all(&vec![0; bytes]));
        assert_eq!(written.expect_err("a wrong length").kind(), io::ErrorKind::InvalidInput);
    }
    assert_eq!(header_of(&file_of(&writer, 0)).tensors().len(), 1);
}
